"""bench.py at tiny sizes: figures, the batch that it takes, wrong input; counted FLOPs against torch's."""
import contextlib
import io
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
import bench  # noqa: E402
import configurator  # noqa: E402
import data  # noqa: E402
import train  # noqa: E402

MODEL = ["--hidden_size=32", "--num_heads=2", "--puzzle_emb_ndim=32", "--puzzle_emb_len=2", "--H_cycles=2",
         "--L_cycles=2", "--halt_max_steps=4", "--forward_dtype=float32"]
TINY = [*MODEL, "--global_batch_size=16"]


def run(*flags):
    """(the figures of the last line, all that is printed) on the CPU, in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        bench.main([*flags, "--device=cpu"])
    text = printed.getvalue()
    return json.loads(text.splitlines()[-1]), text


def run_command(*flags, **env):
    """What `python bench.py` prints: for XLA, which a process can start only once."""
    command = [sys.executable, os.path.join(ROOT, "bench.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env={**os.environ, **env})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "cpu.txt"
    found, text = run(*TINY, "--steps=5")
    path.write_text(text)
    return found, path


def test_throughput_on_the_cpu(figures):
    f, path = figures
    assert f["kind"] == "cpu" and f["replicas"] == 1 and f["steps"] == 5 and f["tokens_per_example"] == 83
    assert f["step_ms_min"] <= f["step_ms"] <= f["step_ms_max"]
    assert f["examples_per_sec"] >= 0.99 * 16e3 / f["step_ms"]
    assert f["tflops"] == pytest.approx(f["examples_per_sec"] * f["gflop_per_example"] / 1e3, rel=1e-4)
    assert f["mfu_of_product"] == pytest.approx(f["tflops"] / f["product_tflops"], rel=1e-4)
    assert 0 < f["evaluation_ms"] and 0 < f["optimizer_ms"] < f["step_ms"] and f["peak_memory_gb"] > 0.1
    for words in ("timing 5 training steps", "timing 5 evaluation steps", "first step", "examples/s",
                  "of a matrix product's", "optimizer", "feeding", "evaluation", "a forward pass",
                  "times the training's"):
        assert words in path.read_text()


def test_compare_and_real_data(figures, tmp_path):
    path = str(tmp_path / "data")
    grids = np.random.default_rng(0).integers(1, 6, (2, 64, 16), dtype=np.uint8)
    data.write_dataset(path, {split: (64, 1, [grids]) for split in ("train", "test")}, 6, {"grid": [4, 4]})
    f, text = run(*TINY, "--steps=3", "--real_data", f"--data_path={path}", f"--compare={figures[1]}")
    assert f["tokens_per_example"] == 18 and f["real_data"]
    ratio = next(line for line in text.splitlines() if line.startswith("examples_per_sec")).split()[-1]
    assert float(ratio) == pytest.approx(f["examples_per_sec"] / figures[0]["examples_per_sec"], rel=1e-2)


@pytest.mark.xla
def test_replicas_through_xla():
    text = run_command(*TINY, "--micro_batch_size=2", "--steps=2", PJRT_DEVICE="CPU", CPU_NUM_DEVICES="2")
    f = json.loads(text.splitlines()[-1])
    assert f["kind"] == "xla" and f["replicas"] == 2 and f["micro_batch_size"] == 2
    assert f["xla/fallbacks"] == 0


def test_sweep():
    rows, text = run(*TINY, "--steps=1", "--sweep=global_batch_size=4,x,8")
    assert [row["global_batch_size"] for row in rows] == [4, 8] and "global_batch_size must be int" in text


def test_profile_on_the_cpu(tmp_path):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        bench.main([*TINY, "--device=cpu", f"--profile={tmp_path / 'p'}"])
    assert "aten::" in printed.getvalue() and "perfetto" in printed.getvalue()
    with open(tmp_path / "p" / "trace.0.json") as f:
        assert any(event.get("name", "").startswith("aten::") for event in json.load(f)["traceEvents"])


@pytest.mark.xla
def test_profile_through_xla(tmp_path):
    text = run_command(*TINY, "--device=xla", f"--profile={tmp_path / 'p'}", PJRT_DEVICE="CPU")
    assert " ms " in text and " x dot\n" in text and "perfetto" in text


# The batch and the steps that nobody gave.

def fit(flags, batch_given=False, steps_given=False, kind="cpu"):
    """(global_batch_size, steps) that fit_to_cpu sets."""
    own, c, _ = bench.configure(bench.__file__, flags)
    bench.fit_to_cpu(c, own, puzzles(c), kind, batch_given, steps_given)
    return c.global_batch_size, own.steps


def puzzles(c):
    """Stands for a Dataset."""
    class Puzzles:
        seq_len, vocab_size, num_puzzle_identifiers = 16, 6, 1

        def train_batch(self, seed, step, batch_size, rank, world):
            cells = np.ones((batch_size, 16), np.int32)
            return dict(inputs=cells, labels=cells, puzzle_identifiers=np.zeros(batch_size, np.int32))

    return Puzzles()


def test_a_batch_that_fits_the_time(monkeypatch):
    monkeypatch.setattr(bench, "BUDGET", 0.3)
    f, text = run(*MODEL)
    assert f["global_batch_size"] < 768
    assert f"global_batch_size {f['global_batch_size']} fits this machine" in text
    assert 1 <= f["steps"] <= 10
    assert fit(MODEL, batch_given=True) == (768, 1)
    assert fit([*MODEL, "--steps=7"], steps_given=True)[1] == 7
    assert fit([*MODEL, "--micro_batch_size=3"])[0] % 3 == 0
    monkeypatch.setattr(bench, "BUDGET", 1e6)
    assert fit(MODEL) == (768, 10)


def test_a_batch_that_fits_the_memory(monkeypatch):
    monkeypatch.setattr(bench, "BUDGET", 1e6)
    monkeypatch.setattr(os, "sysconf", lambda name: 0)
    assert fit(MODEL)[0] == 1
    monkeypatch.setenv("CPU_NUM_DEVICES", "2")
    assert fit([*MODEL, "--micro_batch_size=2"], kind="xla")[0] == 4


def test_a_long_run_says_so_before_it_starts(capsys):
    assert fit([*MODEL, "--global_batch_size=1000000", "--steps=3"], True, True) == (1000000, 3)
    assert "expected:" in capsys.readouterr().out


def test_who_gave_the_batch(tmp_path):
    (tmp_path / "config.py").write_text("global_batch_size = 768\n")
    assert bench.is_given("global_batch_size", [str(tmp_path / "config.py")])
    assert bench.is_given("global_batch_size", ["--lr=1", "--global_batch_size=768"])
    assert not bench.is_given("global_batch_size", [os.path.join(ROOT, "config", "sudoku.py"), "--lr=1"])


@pytest.mark.parametrize("flags,words", [
    (["--stepz=3"], ["stepz", "closest"]),
    (["--steps=0"], ["steps must be 1 or more"]),
    (["--compare=nowhere.txt"], ["nowhere.txt"]),
    (["--sweep=lr=1,2", "--profile=p"], ["--profile is for one run"]),
    (["--real_data", "--data_path=nowhere"], ["nowhere", "no such data set"]),
    (["--sweep=lr"], ["--sweep"]),
    (["--sweep=hidden_size=x"], ["no run succeeded"]),
    (["--micro_batch_size=5"], ["16", "multiple of 5"]),
    (["config/nowhere.py"], ["config/nowhere.py"]),
    (["--hidden_size=-1"], ["hidden_size"]),
    (["--mlp_t=False", "--num_heads=3"], ["hidden_size", "num_heads"]),
], ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_wrong_input(flags, words, capsys):
    with pytest.raises(SystemExit) as exit:
        configurator.command(lambda: bench.main([*TINY, "--device=cpu", "--steps=1", *flags]), bench.__file__)
    error = capsys.readouterr().err
    assert exit.value.code == 2
    assert len(error.splitlines()) == 1 and error.startswith("bench.py: ")
    assert all(word in error for word in words), error


@pytest.mark.parametrize("mixer", [[], ["--mlp_t=False", "--pos_encodings=rope"]], ids=["mlp", "attention"])
def test_the_counted_flops_are_torchs(mixer):
    c = configurator.configure(train.__file__, [*TINY, "--compile=off", *mixer])
    model = train.TRM(train.TRMConfig.of(c, seq_len=16, vocab_size=6))
    training = train.Run(model, c, train.open_device("cpu", c))
    rows, cells = torch.zeros(16, dtype=torch.int32), torch.zeros(16, 16, dtype=torch.int32)
    batch = dict(inputs=cells, labels=cells, puzzle_identifiers=rows, min_halt_steps=rows)
    inputs = dict(batch=batch, rates=torch.ones(4), stop_requested=torch.zeros(1))
    # Attention from single products: the CPU's fused one is not counted.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        training.train_program(training.state, inputs)
    flops = 16 * model.flops_per_example()[1]  # without the q head
    assert counter.get_total_flops() == pytest.approx(flops, rel=0.02)
