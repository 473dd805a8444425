"""The check to run after every edit: the real commands at tiny sizes, in under a minute on 2 cores.

    python -m pytest -q test_smoke.py
"""
import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

ROOT = os.path.dirname(os.path.abspath(__file__))
SMALL = ["--hidden_size=32", "--num_heads=2", "--multiple_of=32", "--L_layers=1", "--H_cycles=2",
         "--L_cycles=2", "--puzzle_emb_ndim=32", "--puzzle_emb_len=2", "--halt_max_steps=4",
         "--global_batch_size=16", "--lr=2e-3", "--lr_warmup_steps=5", "--log_interval=10",
         "--checkpoint_interval=20", "--eval_interval=0", "--forward_dtype=auto"]

# pytest runs several tests at a time, so each takes one thread.
# XLA compiles small programs twice as fast without optimizing them, and faster still by its older emitters.
FAST = {"OMP_NUM_THREADS": "1",
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"}


def python(*command, **env):
    done = subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True,
                          timeout=120, env={**FAST, **os.environ, **env})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def logged(out, name):
    with open(out / "metrics.jsonl") as f:
        return [line[name] for line in map(json.loads, f) if name in line]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "sudoku-4x4"
    text = python("prepare_sudoku.py", "--source=generate", "--size=4", "--num_train=64", "--num_test=40",
                  "--num_aug=5", f"--output_dir={path}")
    assert f"train.py config/demo.py --data_prepare= --data_path={path}" in text
    return path


def train(data, out, *flags, **env):
    paths = f"--data_path={data}", f"--out_dir={out}"
    return python("train.py", *paths, "--device=cpu", *SMALL, *flags, **env)


def test_train_resume_evaluate_solve(data, tmp_path):
    """Trains with attention, resumes (on torch_xla if it is installed), evaluates, and solves a puzzle."""
    out = tmp_path / "out"
    flags = "--mlp_t=False", "--pos_encodings=rope"
    train(data, out, *flags, "--max_steps=40")
    losses = logged(out, "train/loss")
    assert len(losses) == 4 and losses[-1] < 0.9 * losses[0]
    device = "xla" if find_spec("torch_xla") else "cpu"
    again = "--max_steps=60", "--init_from=resume", f"--device={device}"
    shown = train(data, out, *again, PJRT_DEVICE="CPU")
    assert "training from step 40 to 60" in shown
    assert logged(out, "eval/puzzles") == [40, 40]  # at the end of both runs
    assert "steps, attempts: 1" in python("scripts/solve.py", out, "." * 16)
