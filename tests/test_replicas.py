"""Several replicas: torch_xla on the CPU, where replicas are threads, and processes joined by gloo."""
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch.nn.functional as F
from helpers import (
    CURRICULUM,
    arguments,
    curve,
    hosts,
    on_replicas,
    remove,
    run,
    start_train,
    xla_environment,
)
from torch.utils._pytree import tree_leaves

import configurator
import model
import train
from data import Dataset
from model import Block
from runtime.device import flatten
from runtime.errors import UserError
from train import open_device

# Shallow: depth amplifies rounding, and the order of a sum depends on the number of replicas.
SHALLOW = ["--max_steps=20", "--halt_max_steps=2", "--lr=2e-4", "--log_interval=1", "--eval_interval=4",
           "--eval_max_puzzles=20", "--checkpoint_interval=10", "--keep_last_n=9", "--eval_attempts=3",
           "--eval_save_outputs=surest_preds,surest_q_halt_logits,attempts"]


def flags_of(data, out, *flags):
    return arguments(data, out, *SHALLOW, *flags)


# What the replicas of one process do.

class ReadsBack(Block):
    def forward(self, x, rope):
        return super().forward(x, rope) * (2 if x.sum().item() < 1e9 else 1)


class Dropout(Block):
    def forward(self, x, rope):
        return super().forward(F.dropout(x, 0.3, self.training), rope)


def xla_run(rank, argv):
    """Runs train.py."""
    train.replica(configurator.configure(train.Settings, argv), "xla")


def xla_step(rank, argv):
    """Saves the program of a step at the full depth, and the gradient."""
    import torch_xla.core.xla_builder as xb
    import torch_xla.debug.metrics
    programs = []

    def recorded(*arguments):
        lowering, *others = lower(*arguments)
        programs.append(xb.computation_from_module_proto("step", lowering.hlo()))
        return lowering, *others

    # a device, a network with a large table of puzzles, and the inputs of a step
    settings = configurator.configure(train.Settings, argv)
    device = open_device("xla", settings)
    device.choose_dtype(settings.forward_dtype)
    dataset = Dataset(settings.data_path, "train")
    sizes = SimpleNamespace(seq_len=16, vocab_size=6, num_puzzle_identifiers=5000, task=None)
    run = train.Run(settings, train.new_model(settings, sizes), device)
    inputs = train.make_inputs(run, dataset, 0, 30)

    # run the step
    lower = device.lower
    device.lower = recorded
    run.train_step(run.state, inputs, (settings.H_cycles, settings.L_cycles))

    # the program, how much of the state it overwrites, and the gradient, of which the first moment is a share
    aliases = torch_xla.debug.metrics.metric_data("InputOutputAliasCount")[2]  # of each program
    moments = {name: state["m"] for name, state in run.state["optimizer"].items()}
    np.savez(f"{rank}.npz", program=xb.get_computation_hlo(programs[0]),
             aliases=max(number for _, number in aliases), state_tensors=len(tree_leaves(run.state)),
             gradient=flatten(moments)[0].cpu() / (1 - settings.beta1))


# Runs

@pytest.fixture(scope="module")
def one(data, tmp_path_factory):
    """A run of 20 steps in one process."""
    out = tmp_path_factory.mktemp("one") / "run"
    run(data, out, *SHALLOW)
    return out


@pytest.fixture(scope="module")
def two(data, tmp_path_factory):
    """The same run on two processes, as torchrun starts them."""
    out = tmp_path_factory.mktemp("two") / "run"
    ranks = [start_train(data, out, *SHALLOW, **environment) for environment in hosts(2)]
    for rank in ranks:
        rank.output()
    return out


@pytest.fixture(scope="module")
def four(data, tmp_path_factory):
    """The same run on four replicas of torch_xla."""
    out = tmp_path_factory.mktemp("four") / "run"
    on_replicas(4, xla_run, flags_of(data, out))
    return out


def check_curves(ours, theirs):
    for key in ("train/loss", "train/grad_norm", "train/accuracy", "eval/loss", "eval/accuracy"):
        want = curve(theirs, key)
        assert len(want) > 1 and curve(ours, key) == pytest.approx(want, rel=1e-4), key


@pytest.mark.xla
def test_a_step_that_is_traced_each_time_gives_the_curve_of_the_replay(data, four):
    """Two replicas and micro-batches show it: the curve depends on neither."""
    on_replicas(2, xla_run, flags_of(data, "run", "--compile=off", "--micro_batch_size=4"))
    check_curves("run", four)
    compiles = curve("run", "xla/compiles")
    assert compiles[15] == compiles[2], compiles  # the evaluation follows step 16
    assert set(curve("run", "xla/fallbacks").values()) == {0}


def saved_answers(out, step=20):
    """Returns the arrays of eval_save_outputs of all ranks, in the order of the puzzles."""
    ranks = [np.load(path) for path in Path(out).glob(f"eval_{step:08d}*.npz")]
    order = np.concatenate([arrays["indices"] for arrays in ranks]).argsort()
    return {name: np.concatenate([arrays[name] for arrays in ranks])[order] for name in ranks[0]}


@pytest.mark.xla
def test_nothing_compiles_after_the_first_step_and_evaluation(four):
    """Programs: the ranks' agreement (two), the broadcast of rank 0's weights, the step, the evaluation."""
    compiles = curve(four, "xla/compiles")
    first = compiles[1]
    # the evaluation follows step 16, and one replica may compile it before another one logs that step
    assert first <= 4 and [compiles[step] - first for step in (15, 17, 20)] == [0, 1, 1], compiles
    assert set(curve(four, "xla/fallbacks").values()) == {0}


@pytest.mark.parametrize("name", ["two", pytest.param("four", marks=pytest.mark.xla)])
def test_the_curve_is_that_of_one_process(one, name, request):
    out = request.getfixturevalue(name)
    check_curves(out, one)
    ours = saved_answers(out)
    theirs = saved_answers(one)
    assert list(ours["indices"]) == list(range(40)) == list(theirs["indices"])
    assert (ours["surest_preds"] == theirs["surest_preds"]).mean() > 0.98
    assert (ours["attempts"] == theirs["attempts"]).all()
    assert ours["surest_q_halt_logits"] == pytest.approx(theirs["surest_q_halt_logits"], rel=1e-4)


@pytest.mark.xla
def test_puzzles_leave_an_evaluation_early_on_any_number_of_replicas(data):
    flags = ["--max_steps=120", "--lr=1e-2", "--weight_decay=0.1", "--ema=False", "--eval_interval=0",
             "--eval_halt_max_steps=9", "--eval_patience=1", "--eval_attempts=1", "--eval_save_outputs=preds"]
    again = flags_of(data, "run", *flags, "--micro_batch_size=2", "--init_from=resume", "--eval_only")
    run(data, "run", *SHALLOW, *flags)
    one = saved_answers("run", 120)["preds"]
    Path("run/eval_00000120.npz").unlink()
    text = on_replicas(2, xla_run, again)
    assert 2 < float(re.search(r"evaluation: .* steps (\S+)", text)[1]) < 9, text
    two = saved_answers("run", 120)["preds"]
    assert (one != two).any(1).sum() <= 4  # where rounding repeats an answer


@pytest.mark.xla
def test_a_run_on_four_continues_on_one_and_on_four(data, four):
    for out in "four", "one":
        remove(shutil.copytree(four, out), "ckpt_00000020.*")
    text = on_replicas(4, xla_run, flags_of(data, "four", "--init_from=auto"))
    assert "training from step 10 to 20" in text and "4 x xla" in text
    assert curve("four") == curve(four)  # bit for bit
    # on the CPU, whose curve differs by rounding
    assert "training from step 10 to 20" in run(data, "one", *SHALLOW, "--init_from=auto")
    assert curve("one") == pytest.approx(curve(four), rel=1e-4)


# The real command: its processes, signals and exit codes.

@pytest.mark.xla
def test_wrong_input_ends_all_replicas_with_one_line(data, four):
    """An error that only rank 0 sees: out_dir holds a run."""
    text = start_train(data, four, *SHALLOW, "--device=xla", **xla_environment(2)).output(2)
    assert f"train.py: --out_dir={four} holds a run" in text.splitlines()[-1] and "Traceback" not in text


# The program of a step.

@pytest.mark.xla
def test_a_step_has_one_all_reduce_and_does_not_depend_on_the_split(data):
    """Micro-batches are a loop in the program. test_parity.py has the embedding, on two replicas too."""
    gradients = []
    for world, micro in (1, 0), (2, 4):
        flags = flags_of(data, "run", "--lr_warmup_steps=0", f"--micro_batch_size={micro}")
        on_replicas(world, xla_step, flags)
        step = np.load("0.npz")
        gradients.append(step["gradient"])
        program = str(step["program"])
        assert program.count(" all-reduce(") == (world > 1) and program.count(" while(") == (micro > 0)
        # a TPU multiplies float32 numbers as bfloat16 unless each product asks for more
        assert program.count(" dot(") == program.count("operand_precision={highest,highest}") > 9
        # the new state takes the memory of the old one
        assert step["aliases"] == step["state_tensors"]

    # smaller shapes, whose products XLA sums in another order
    one, two = gradients
    assert np.linalg.norm(two - one) < 3e-6 * np.linalg.norm(one)
    # nothing as large as the table travels
    size = max(map(int, re.findall(r"f32\[(\d+)\]", re.search(r".* all-reduce\(.*", program)[0])))
    num_sums = len(model.METRICS + model.LOSS_TERMS) + 1  # and the stop requests
    assert size == len(two) + num_sums + 16 * (32 + 2)


@pytest.mark.xla
def test_a_curriculum_is_a_program_a_stage(data):
    """The curve is the CPU's."""
    flags = [*CURRICULUM, "--L_cycles=2", "--curriculum_epochs=3", "--max_steps=18", "--log_interval=3",
             "--eval_interval=0"]
    on_replicas(2, xla_run, flags_of(data, "xla", *flags))
    run(data, "cpu", *SHALLOW, *flags)
    compiles = curve("xla", "xla/compiles")
    # the second stage follows step 12
    assert [compiles[step] - compiles[3] for step in (9, 15, 18)] == [0, 1, 1], compiles
    assert curve("xla") == pytest.approx(curve("cpu"), rel=1e-3)
    assert set(curve("xla", "xla/fallbacks").values()) == {0}


@pytest.mark.xla
def test_a_fork_that_cannot_be_captured_is_refused_with_the_place(data):
    on_replicas(1, xla_refused, arguments(data, "xla", "--max_steps=2"))


def xla_refused(rank, argv):
    """Runs train.py with each Block of this file, which cannot be captured."""
    for block, why in (ReadsBack, "item has"), (Dropout, r"bernoulli\.p draws"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, "Block", block)
            with pytest.raises(UserError, match=rf"test_replicas\.py:\d+: {why}"):
                xla_run(rank, [*argv, "--init_from=auto"])


# Processes, joined by gloo.

def test_a_stop_of_one_rank_in_an_evaluation_stops_all(data, two):
    flags = [*SHALLOW, "--init_from=resume", "--eval_only", "--eval_halt_max_steps=300",
             "--global_batch_size=2", "--stall_timeout=60", "--eval_save_outputs="]
    ranks = [start_train(data, two, *flags, **environment) for environment in hosts(2)]
    assert any("parameters" in line for line in ranks[0].stdout)
    time.sleep(1)
    ranks[1].terminate()
    texts = [rank.output(3, timeout=40) for rank in ranks]
    assert "evaluation stopped; the same command starts it again" in texts[0]
