"""Several replicas: torch_xla on the CPU, where replicas are threads, and processes joined by gloo."""
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import configurator
import numpy as np
import pytest
import torch
from conftest import ROOT, ForkedTrain, hosts, xla_environment
from test_train import CURRICULUM, begun, command, curve, data, edited_copy, fork, popen
from test_train import run as run_cpu

import bench
import device as devices
import train
from model import recomputed_attention

# Shallow: depth amplifies rounding, and the order of a sum depends on the number of replicas.
SHALLOW = ["--H_cycles=1", "--L_cycles=1", "--halt_max_steps=2", "--lr=2e-4", "--log_interval=1",
           "--eval_interval=4", "--eval_max_puzzles=20", "--checkpoint_interval=10", "--keep_last_n=9",
           "--eval_rollouts=3", "--eval_save_outputs=surest_preds,surest_q_halt_logits"]
FORKS = {
    "item": ("q_halt = self.q_head(z_H[:, 0])[:, 0].float()",
             "q_halt = self.q_head(z_H[:, 0])[:, 0].float() * (2 if z_H.sum().item() > 0 else 1)",
             "item has"),
    "no XLA operation": ("z_H = self.L_level(z_H + z_L, rope)",
                         "z_H = self.L_level(z_H + z_L + torch.special.bessel_j0(z_L.detach()), rope)",
                         "special_bessel_j0 is not"),
    "dropout": ("z_H = self.L_level(z_H + z_L, rope)",
                "z_H = self.L_level(z_H + F.dropout(z_L, 0.3, self.training), rope)", "bernoulli.p draws"),
}


# What the replicas of one process do.

def xla_run(rank, argv, name=""):
    """train.py; name: of a fork."""
    module = fork(model=[FORKS[name][:2]]) if name else train
    c = configurator.configure(train.__file__, argv)
    module.check_settings(c)
    module.replica(c, "xla")


def xla_step(rank, folder, argv):
    """The gradient of a step at the full depth and its program, from each replica."""
    import torch_xla.core.xla_builder as xb
    build, programs = xb.computation_from_module_proto, []
    c = configurator.configure(train.__file__, argv)
    dataset, device = train.Dataset(c.data_path, "train"), train.open_device("xla", c)
    run = train.Run(train.new_model(c, seq_len=16, vocab_size=6), c, device)
    device.xb = SimpleNamespace(**vars(xb))
    device.xb.computation_from_module_proto = lambda *args: programs.append(build(*args)) or programs[0]
    inputs = train.make_inputs(run, dataset, 0, 30)
    run.train_program(run.state, inputs, list(train.stages(c, 64.0).values())[-1])
    np.savez(os.path.join(folder, f"{rank}.npz"), text=xb.get_computation_hlo(programs[0]),
             gradient=run.state["optimizer"]["m"].cpu().numpy() / (1 - c.beta1))


def xla_profile(rank, folder, argv):
    """bench.py --profile."""
    own = configurator.configure(bench.__file__, [f"--profile={folder}"])
    c = configurator.configure(train.__file__, argv)
    bench.bench(rank, c, own, "xla", c.data_path)


def attention(rank, path, kind="xla", attend=recomputed_attention):
    """Saves the result of attention over 37 positions and the gradients of q, k and v: [4, 2, 3, 37, 8]."""
    device = train.open_device(kind, configurator.configure(train.__file__, ["--compile=off"]))
    *qkv, weight = device.put(list(torch.randn(4, 2, 3, 37, 8, generator=torch.Generator().manual_seed(0))))
    out = attend(*[t.requires_grad_() for t in qkv])
    np.save(path, torch.stack([out, *torch.autograd.grad(out, qkv, weight)]).detach().cpu().numpy())


def flags_of(data, out, *flags):
    return [*command(data, out)[2:], *SHALLOW, *flags]


@pytest.fixture(scope="module")
def four(data, replicas, tmp_path_factory):
    """A run of 30 steps on four replicas."""
    out = str(tmp_path_factory.mktemp("four") / "run")
    replicas(4, xla_run, flags_of(data, out, "--max_steps=30"))
    return out


def saved_answers(out, step=30):
    """The arrays of eval_save_outputs of all ranks, in the order of the puzzles."""
    parts = [np.load(path) for path in glob.glob(os.path.join(out, f"eval_{step:08d}*.npz"))]
    order = np.concatenate([part["indices"] for part in parts]).argsort()
    return {name: np.concatenate([part[name] for part in parts])[order] for name in parts[0]}


@pytest.mark.xla
def test_nothing_compiles_after_the_first_step_and_evaluation(four):
    """Programs: the ranks' agreement, the broadcast of rank 0's weights, the step and the evaluation."""
    compiles = curve(four, "xla/compiles")
    first = compiles[1]
    assert first <= 4 and [compiles[step] - first for step in (16, 17, 30)] == [0, 1, 1], compiles
    assert set(curve(four, "xla/fallbacks").values()) == {0}


@pytest.fixture(scope="module")
def two(data, tmp_path_factory):
    """The same run on two processes under torchrun."""
    out = tmp_path_factory.mktemp("two") / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run(torchrun + command(data, out, *SHALLOW, "--max_steps=30")[1:], check=True,
                   capture_output=True, timeout=200)
    return out


XLA = [pytest.param(kind, marks=pytest.mark.xla) for kind in ("1", "4", "four")]


@pytest.mark.parametrize("kind", ["two", *XLA])
def test_the_curve_is_that_of_one_process(data, replicas, tmp_path, request, kind):
    """Also of a run in micro-batches on four replicas."""
    out = tmp_path / kind
    if kind in ("four", "two"):
        out = request.getfixturevalue(kind)
    else:
        flags = flags_of(data, out, "--max_steps=30", "--micro_batch_size=2")
        replicas(int(kind), xla_run, flags, optimised=kind == "1")
    run_cpu(data, tmp_path / "one", *SHALLOW, "--max_steps=30")
    for key in ("train/loss", "train/grad_norm", "train/accuracy", "eval/loss", "eval/accuracy"):
        want = curve(tmp_path / "one", key)
        assert len(want) > 1 and curve(out, key) == pytest.approx(want, rel=1e-4), key
    assert set(curve(out, "eval/puzzles").values()) == {20, 40}
    mine, theirs = saved_answers(out), saved_answers(tmp_path / "one")
    assert list(mine["indices"]) == list(range(40)) == list(theirs["indices"])
    assert (mine["surest_preds"] == theirs["surest_preds"]).mean() > 0.98
    assert mine["surest_q_halt_logits"] == pytest.approx(theirs["surest_q_halt_logits"], rel=1e-4)


@pytest.mark.xla
def test_puzzles_leave_an_evaluation_early_on_any_number_of_replicas(data, replicas, tmp_path):
    flags = ["--max_steps=120", "--lr=1e-2", "--weight_decay=0.1", "--ema=False", "--eval_interval=0",
             "--eval_halt_max_steps=9", "--eval_patience=1", "--eval_rollouts=1", "--eval_save_outputs=preds"]
    again = [*flags, "--init_from=resume", "--eval_only"]
    found = {}
    for world in (1, 4):
        text = run_cpu(data, tmp_path, *SHALLOW, *flags) if world == 1 else replicas(
            4, xla_run, flags_of(data, tmp_path, *again, "--micro_batch_size=2"))
        assert 2 < float(re.search(r"evaluation: .* steps (\S+)", text)[1]) < 9, text
        found[world] = saved_answers(tmp_path, 120)
        assert list(found[world]["indices"]) == list(range(40))
    assert (found[1]["preds"] != found[4]["preds"]).any(1).sum() <= 4  # where rounding repeats an answer
    few = replicas(4, xla_run, flags_of(data, tmp_path, *again, "--eval_final_max_puzzles=2"))
    assert "puzzles 2\n" in few  # two ranks have none


@pytest.mark.xla
def test_a_run_on_four_continues_on_one_and_on_four(data, four, replicas, tmp_path):
    for world in (1, 4):
        out = shutil.copytree(four, tmp_path / str(world))
        for name in ("ckpt_00000030.pt", "ckpt_00000030.json"):
            os.remove(out / name)
        text = replicas(world, xla_run, flags_of(data, out, "--max_steps=30", "--init_from=auto"))
        assert "training from step 20 to 30" in text and f"{world} x xla" in text
        assert list(curve(out)) == list(range(1, 31)) and curve(out) == pytest.approx(curve(four), rel=1e-4)
    assert curve(out) == curve(four)  # bit for bit


# The real command: its processes, signals and exit codes.

def xla_command(data, out, *flags, script=train.__file__):
    return [sys.executable, script, *flags_of(data, out, "--device=xla", *flags)]


@pytest.mark.xla
def test_sigterm_stops_all(data, tmp_path):
    argv = xla_command(data, tmp_path, "--max_steps=100000", "--checkpoint_interval=0", "--eval_interval=0")
    with begun(popen(argv, env=xla_environment(2)), "step 12/") as process:
        process.terminate()
        text = process.communicate(timeout=30)[0]
    assert process.returncode == 3, text
    step = int(os.path.basename(train.checkpoint_paths(str(tmp_path))[0])[5:-3])
    assert f"stopped at step {step}" in text and list(curve(tmp_path)) == list(range(1, step + 1))
    assert "to continue: the same command with --init_from=resume" in text


@pytest.mark.xla
def test_wrong_input_ends_all_replicas_with_one_line(data, four):
    """An error that only rank 0 sees: out_dir holds a run."""
    done = subprocess.run(xla_command(data, four, "--max_steps=30"), env=xla_environment(2), timeout=300,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stdout
    assert f"train.py: {four} holds a run" in done.stdout.splitlines()[-1]


@pytest.mark.xla
def test_a_replica_that_breaks_ends_the_run(data, tmp_path):
    """Rank 0 fails to load a batch: the other must not wait for it forever."""
    line = "    c, device = run.c, run.device\n    batch = "
    broken = line.replace("    batch", "    if (device.rank, step) == (0, 3):\n"
                          "        raise ValueError('broken on purpose')\n    batch")
    script = edited_copy(tmp_path / "code", "train.py", line, broken)
    argv = xla_command(data, tmp_path, "--max_steps=100000", script=script)
    with begun(popen(argv, env=xla_environment(2))) as process:
        text = process.communicate(timeout=60)[0]
    assert process.returncode == 1 and "broken on purpose" in text and "a replica died" in text


# The program of a step.

@pytest.mark.xla
def test_a_step_has_one_all_reduce_and_a_gradient_that_does_not_depend_on_the_split(data, replicas, tmp_path):
    """Micro-batches are a loop in the program."""
    want = None
    for world, micro in (1, 0), (1, 4), (4, 2), (4, 0):
        replicas(world, xla_step, str(tmp_path), flags_of(data, tmp_path, f"--micro_batch_size={micro}"))
        ranks = [dict(np.load(tmp_path / f"{rank}.npz")) for rank in range(world)]
        got, text = ranks[0]["gradient"], str(ranks[0]["text"])
        assert all(np.array_equal(got, r["gradient"]) and text == r["text"] for r in ranks)
        assert text.count(" all-reduce(") == (world > 1) and text.count(" while(") == (micro > 0)
        want = got if want is None else want
        # more replicas mean smaller shapes, whose products XLA sums in another order
        assert np.linalg.norm(got - want) < (1e-6 if world == 1 else 3e-6) * np.linalg.norm(want)


@pytest.mark.xla
def test_a_curriculum_is_a_program_a_stage_and_ends_in_that_of_a_run_without(data, replicas, tmp_path):
    """The curve is the CPU's."""
    flags = [*CURRICULUM, "--curriculum_epochs=6", "--max_steps=32", "--log_interval=5", "--eval_interval=0"]
    replicas(4, xla_run, flags_of(data, tmp_path / "xla", *flags))
    run_cpu(data, tmp_path / "cpu", *SHALLOW, *flags)
    compiles = curve(tmp_path / "xla", "xla/compiles")
    assert [compiles[step] - compiles[5] for step in compiles] == [0] * 3 + [1] * 3 + [2] * 3, compiles
    assert curve(tmp_path / "xla") == pytest.approx(curve(tmp_path / "cpu"), rel=1e-3)
    assert set(curve(tmp_path / "xla", "xla/fallbacks").values()) == {0}
    texts = []
    for own in (CURRICULUM + ["--curriculum_epochs=1"], ["--H_cycles=2", "--L_cycles=3"], []):
        replicas(1, xla_step, str(tmp_path), flags_of(data, tmp_path, *own))
        texts.append(str(np.load(tmp_path / "0.npz")["text"]))
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.xla
def test_bench_shows_the_most_expensive_operations(data, replicas, tmp_path):
    text = replicas(1, xla_profile, str(tmp_path), flags_of(data, tmp_path))
    assert " ms " in text and " x dot\n" in text and "perfetto" in text


@pytest.mark.parametrize("kind", ["cpu", pytest.param("xla", marks=pytest.mark.xla)])
def test_recomputed_attention_equals_torchs(kind, request, tmp_path):
    got, want = tmp_path / "got.npy", tmp_path / "want.npy"
    if kind == "xla":
        request.getfixturevalue("replicas")(1, attention, str(got))
    else:
        attention(0, got, "cpu")
    attention(0, want, "cpu", torch.nn.functional.scaled_dot_product_attention)
    got, want = np.load(got), np.load(want)
    assert np.abs(got - want).max() < 1e-5 and np.abs(want).max() > 1


@pytest.mark.xla
@pytest.mark.parametrize("name", FORKS)
def test_a_fork_that_cannot_be_captured_trains_traced_and_says_so(data, replicas, tmp_path, name):
    """The losses equal the CPU's; random numbers differ from step to step and are off in evaluations."""
    old, new, why = FORKS[name]
    with open(os.path.join(ROOT, "model.py")) as f:
        line = f.read().partition(old)[0].count("\n") + 1
    flags = ["--max_steps=2", "--log_interval=1", "--micro_batch_size=8", "--H_cycles=1", "--L_cycles=1",
             "--halt_max_steps=2", "--eval_final_max_puzzles=16"]
    if "draws" in why:  # updated weights would depend on the random numbers
        flags += ["--lr=1e-9", "--puzzle_emb_lr=0"]
    run_cpu(data, tmp_path / "cpu", *flags, code_of=fork(model=[(old, new)]))
    text = replicas(1, xla_run, command(data, tmp_path / "xla", *flags)[2:], name)
    warnings = [text for text in text.splitlines() if "traces" in text]
    assert len(warnings) == (1 if "draws" in why else 2), text  # one for training and one for evaluation
    assert all(f"model.py:{line}: {why}" in text for text in warnings), text
    assert warnings[0] in open(tmp_path / "xla" / "log.txt").read()
    key = "eval/loss" if "draws" in why else "train/loss"
    want = curve(tmp_path / "cpu", key)
    assert want and curve(tmp_path / "xla", key) == pytest.approx(want, rel=1e-3)


def test_an_operation_that_cannot_be_replayed_raises():
    x, ints = torch.randn(3, 2), torch.tensor([0, 1])
    calls = (lambda: x.sum().item(), lambda: x[x > 0], lambda: x.nonzero(), lambda: x.unique(),
             lambda: x.masked_select(x > 0), lambda: x.clone().index_put_((x > 0,), ints[0].float()),
             lambda: bool(x.sum() > 0), lambda: torch.rand(2))
    for call in calls:
        with pytest.raises(devices.NotReplayable, match="depends on data|random"), devices.Replayable():
            call()
    with devices.Replayable():
        rows = x[ints]
        x.clone().index_put_((ints,), x[0])
    assert torch.equal(rows, x[:2])


# Processes, joined by gloo.

def test_a_stop_of_one_rank_in_an_evaluation_stops_all(data, two):
    flags = ["--max_steps=30", "--init_from=resume", "--eval_only", "--eval_halt_max_steps=300",
             "--global_batch_size=2", "--stall_timeout=60", "--eval_save_outputs="]
    argv = command(data, two, *SHALLOW, *flags)[2:]
    ranks = [ForkedTrain(argv, env=os.environ | environment) for environment in hosts(2)]
    assert any("parameters" in line for line in ranks[0].stdout)
    time.sleep(1)
    ranks[1].terminate()
    texts = [rank.communicate(timeout=40)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [3, 3], texts
    assert "evaluation stopped; the same command starts it again" in texts[0]
