"""Several replicas: train.py and torch_xla's own collectives on the CPU, where replicas are threads."""
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
import configurator  # noqa: E402
import train  # noqa: E402
from data import Dataset, halting_draws  # noqa: E402

# Shallow: depth amplifies rounding, and the order of a sum depends on the number of replicas.
TINY = ["--hidden_size=32", "--num_heads=2", "--puzzle_emb_ndim=32", "--puzzle_emb_len=2", "--H_cycles=1",
        "--L_cycles=1", "--halt_max_steps=2", "--forward_dtype=float32", "--global_batch_size=16",
        "--lr=2e-4", "--lr_warmup_steps=5", "--log_interval=1", "--eval_interval=4", "--eval_max_puzzles=20",
        "--checkpoint_interval=10", "--keep_last_n=9", "--eval_rollouts=3",
        "--eval_save_outputs=surest_preds,surest_q_halt_logits"]
SOURCES = ("train.py", "xla.py", "model.py", "data.py", "configurator.py")
pytestmark = pytest.mark.xla


def start(replicas, data, out, *flags, root=ROOT):
    command = [sys.executable, os.path.join(root, "train.py"), f"--data_path={data}", f"--out_dir={out}",
               "--device=xla", *TINY, *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            env={**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(replicas)})


def run(replicas, data, out, *flags, code=0):
    process = start(replicas, data, out, *flags)
    text = process.communicate(timeout=300)[0]
    assert process.returncode == code, text
    return text


def curve(out, key="train/loss"):
    with open(os.path.join(out, "metrics.jsonl")) as f:
        return {line["step"]: line[key] for line in map(json.loads, f) if key in line}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("data") / "sudoku-4x4")
    subprocess.run([sys.executable, os.path.join(ROOT, "prepare_sudoku.py"), "--source=generate", "--size=4",
                    "--num_train=64", "--num_test=40", "--num_aug=5", f"--output_dir={path}"],
                   check=True, capture_output=True)
    return path


@pytest.fixture(scope="module")
def four(data, tmp_path_factory):
    """A run of 30 steps on four replicas."""
    out = str(tmp_path_factory.mktemp("four") / "run")
    run(4, data, out, "--max_steps=30")
    return out


def without_last(source, out):
    shutil.copytree(source, out)
    for name in ("ckpt_00000030.pt", "ckpt_00000030.json"):
        os.remove(os.path.join(out, name))
    return out


def saved_answers(out, step=30):
    """The arrays of eval_save_outputs of all ranks, in the order of the puzzles."""
    parts = [np.load(path) for path in glob.glob(os.path.join(out, f"eval_{step:08d}*.npz"))]
    order = np.concatenate([part["indices"] for part in parts]).argsort()
    return {name: np.concatenate([part[name] for part in parts])[order] for name in parts[0]}


@pytest.mark.parametrize("replicas,flags", [(1, []), (2, ["--micro_batch_size=2"]), (1, ["--device=cpu"])],
                         ids=["1", "2 in micro-batches", "without XLA"])
def test_the_curve_does_not_depend_on_the_replicas(data, four, tmp_path, replicas, flags):
    run(replicas, data, tmp_path / "run", "--max_steps=30", *flags)
    for key in ("train/loss", "train/grad_norm", "train/accuracy", "eval/loss", "eval/accuracy"):
        assert curve(four, key).keys(), key
        assert curve(tmp_path / "run", key) == pytest.approx(curve(four, key), rel=1e-4), key
    assert set(curve(four, "eval/puzzles").values()) == {20, 40}
    assert set(curve(tmp_path / "run", "eval/puzzles").values()) == {20, 40}
    mine, theirs = saved_answers(tmp_path / "run"), saved_answers(four)
    assert list(mine["indices"]) == list(range(40)) == list(theirs["indices"])
    assert (mine["surest_preds"] == theirs["surest_preds"]).mean() > 0.98
    assert mine["surest_q_halt_logits"] == pytest.approx(theirs["surest_q_halt_logits"], rel=1e-4)


def test_puzzles_leave_an_evaluation_early_on_any_number_of_replicas(data, tmp_path):
    out, found = tmp_path / "run", []
    flags = ["--max_steps=120", "--lr=1e-2", "--weight_decay=0.1", "--ema=False", "--eval_interval=0",
             "--eval_halt_max_steps=9", "--eval_patience=1", "--eval_rollouts=1", "--eval_save_outputs=preds"]
    again = ["--init_from=resume", "--eval_only"]
    for replicas, more in (1, ["--device=cpu"]), (4, [*again, "--micro_batch_size=2"]):
        text = run(replicas, data, out, *flags, *more)
        found.append(saved_answers(out, step=120))
        assert 2 < float(text.split("40 test puzzles at ")[1].split()[0]) < 9, text
        for path in glob.glob(os.path.join(out, "eval_*")):
            os.remove(path)
    assert list(found[0]["indices"]) == list(found[1]["indices"]) == list(range(40))
    differ = (found[0]["preds"] != found[1]["preds"]).any(1)
    assert differ.sum() <= 4  # where rounding makes an answer repeat at another step
    few = run(4, data, out, *flags, *again, "--eval_final_max_puzzles=2")
    assert "2 test puzzles at" in few  # two ranks have none


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_run_on_four_continues_on_fewer(data, four, tmp_path, replicas):
    out = without_last(four, str(tmp_path / "run"))
    text = run(replicas, data, out, "--max_steps=30", "--init_from=auto")
    assert "training from step 20 to 30" in text and f"{replicas} x xla" in text
    assert list(curve(out)) == list(range(1, 31)) and curve(out) == pytest.approx(curve(four), rel=1e-4)


def test_nothing_compiles_after_the_first_step_and_evaluation(four):
    """Four programs: the broadcast of rank 0's weights, the short sums, the step and the evaluation."""
    compiles = curve(four, "xla/compiles")
    assert [compiles[step] for step in (1, 16, 17, 30)] == [3, 3, 4, 4], compiles
    assert set(curve(four, "xla/fallbacks").values()) == {0}


def test_sigterm_stops_all_and_the_next_step_follows(data, tmp_path):
    process = start(4, data, tmp_path / "run", "--max_steps=100000", "--checkpoint_interval=0",
                    "--eval_interval=0")
    for line in process.stdout:
        if line.startswith("step 12/"):
            process.send_signal(signal.SIGTERM)
            break
    began = time.time()
    text = process.stdout.read()
    assert process.wait(30) == 3 and time.time() - began < 30, text
    step = int(os.path.basename(train.checkpoint_paths(str(tmp_path / "run"))[0])[5:-3])
    assert f"stopped at step {step}" in text
    run(4, data, tmp_path / "run", f"--max_steps={step + 3}", "--checkpoint_interval=0", "--eval_interval=0",
        "--init_from=auto")
    assert list(curve(tmp_path / "run")) == list(range(1, step + 4))


def test_wrong_input_ends_all_replicas_with_one_line(data, four, tmp_path):
    """An error that only rank 0 sees (out_dir holds a run), and one that all ranks see."""
    text = run(2, data, four, "--max_steps=30", code=2)
    assert f"train.py: {four} holds a run" in text and "Traceback" not in text
    text = run(4, data, tmp_path / "run", "--global_batch_size=18", code=2)
    assert text.splitlines()[-1] == ("train.py: global_batch_size 18 must be a multiple of 4 (4 replicas): "
                                     "the nearest are 16 and 20")


def test_a_replica_that_breaks_ends_the_run(data, tmp_path):
    """Rank 0 fails to load a batch: the other must not wait for it forever."""
    for name in SOURCES:
        shutil.copy(os.path.join(ROOT, name), tmp_path)
    source = (tmp_path / "data.py").read_text()
    line = "        rows = rank_slice(batch_size, rank, world)\n"
    assert source.count(line) == 1
    broken = (line + "        if (rank, step) == (0, 3):\n"
              "            raise FileNotFoundError('broken on purpose')\n")
    (tmp_path / "data.py").write_text(source.replace(line, broken))
    process = start(2, data, tmp_path / "run", "--max_steps=100000", root=tmp_path)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 1 and "broken on purpose" in text and "a replica died" in text


# One step, its program and its state, in a new process: torch_xla must be set up before anything else runs.

def one_step(index, data, folder, flags):
    import torch_xla.core.xla_builder as xb
    programs, build = [], xb.computation_from_module_proto

    def record(*args):
        programs.append(build(*args))
        return programs[-1]

    xb.computation_from_module_proto = record
    c = configurator.configure(train.__file__, [f"--data_path={data}", *TINY, *flags])
    dataset, device = Dataset(c.data_path, "train"), train.open_device("xla", c)
    model = train.TRM(train.TRMConfig.of(c, seq_len=dataset.seq_len, vocab_size=dataset.vocab_size))
    state = train.Run(model, c, device)
    batch = dataset.train_batch(c.seed, 0, c.global_batch_size, device.rank, device.world)
    batch["min_halt_steps"] = halting_draws(c.seed, 0, c.global_batch_size, c.halt_max_steps,
                                            c.halt_exploration_prob, device.rank, device.world)
    inputs = dict(batch=batch, rates=train.rates(c, 0, 30), stop_requested=np.zeros(1, np.float32))
    state.train_program(state.state, device.put(inputs))
    text = xb.get_computation_hlo(programs[-1])
    np.savez(os.path.join(folder, f"{device.rank}.npz"),
             gradient=state.state["m"].cpu().numpy() / (1 - c.beta1), text=text)


@pytest.fixture(scope="module")
def steps(data, tmp_path_factory):
    """{(replicas, micro_batch_size): (gradient, program)} of rank 0, checked to be the same on every rank."""
    found = {}
    for replicas, micro in ((1, 0), (1, 4), (2, 2), (4, 0)):
        folder = str(tmp_path_factory.mktemp("step"))
        subprocess.run([sys.executable, __file__, data, folder, json.dumps([f"--micro_batch_size={micro}"])],
                       check=True, timeout=300,
                       env={**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(replicas),
                            "XLA_THREAD_POOL_SIZE": "16"})
        ranks = [np.load(os.path.join(folder, f"{rank}.npz")) for rank in range(replicas)]
        assert all(np.array_equal(ranks[0]["gradient"], r["gradient"]) and ranks[0]["text"] == r["text"]
                   for r in ranks)
        found[replicas, micro] = ranks[0]["gradient"], str(ranks[0]["text"])
    return found


@pytest.mark.parametrize("split", [(1, 4), (2, 2), (4, 0)],
                         ids=["4 micro-batches", "2 replicas x 4 micro-batches", "4 replicas"])
def test_gradients_do_not_depend_on_the_split(steps, split):
    (want, _), (got, _) = steps[1, 0], steps[split]
    # more replicas mean smaller shapes, whose products XLA sums in another order
    limit = 1e-6 if split[0] == 1 else 3e-6
    assert np.linalg.norm(got - want) < limit * np.linalg.norm(want)


def test_a_step_has_one_all_reduce_and_loops_over_micro_batches(steps):
    for (replicas, micro), (_, text) in steps.items():
        assert text.count(" all-reduce(") == (replicas > 1), (replicas, micro)
        assert text.count(" while(") == (micro > 0), (replicas, micro)


if __name__ == "__main__":
    import torch_xla.distributed.xla_multiprocessing as xmp
    xmp.spawn(one_step, args=(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))
