"""--device=tpu: TorchTPU over XLA's CPU client.

    python tests/torchtpu/on_cpu.py -m pytest tests/test_torchtpu.py

Each run is a command, since a process has one TPU. No test reaches the rounding of a TPU, TorchTPU's process
group, or the all-reduce inside a program: this client has no collectives between processes, and
torchtpu/replicas.py sums on the host instead.
"""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import (
    DEEP,
    ROOT,
    TINY,
    arguments,
    begun,
    children,
    curve,
    hosts,
    last_weights,
    lines,
    run,
    same,
)

from runtime.files import checkpoint_paths

# a checkpoint, an evaluation and a loop over micro-batches
RUN = [*DEEP, "--max_steps=20", "--checkpoint_interval=10", "--log_interval=1", "--eval_interval=4",
       "--eval_max_puzzles=20", "--keep_last_n=9"]
ENDLESS = [*RUN, "--eval_interval=1", "--checkpoint_interval=0", "--max_steps=1000000"]


@pytest.fixture(scope="module")
def tpu():
    """The variables of a command with a TPU."""
    if "CPU_CLIENT" not in os.environ:
        pytest.skip("python tests/torchtpu/on_cpu.py -m pytest runs it")
    return dict(PYTHONPATH=os.pathsep.join([os.environ["PYTHONPATH"], ROOT, f"{ROOT}/scripts"]))


def output(environment, *command, code=0):
    """Returns what a Python command prints until it ends with this exit code."""
    process = subprocess.run([sys.executable, *command], env=os.environ | environment, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=280)
    assert process.returncode == code, process.stdout
    return process.stdout


def train(environment, data, out, *flags, code=0):
    command = [f"{ROOT}/train.py", *arguments(data, out, "--device=tpu", *RUN, *flags)]
    return output(environment, *command, code=code)


@pytest.fixture(scope="module")
def run_on_tpu(tpu, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("tpu") / "run"
    train(tpu, data, out, "--micro_batch_size=4")
    return out


@pytest.mark.parametrize("micro_batch_size", [0, 2])
def test_training_repeats_the_official_codes_recorded_steps(tpu, micro_batch_size):
    code = f"""
import parity
for path in parity.FILES:
    replay = parity.GoldenRun(path, "tpu", micro_batch_size={micro_batch_size})
    replay.compare_all()
    print(path, replay.worst, replay.run.device.counts())
"""
    assert output(tpu, "-c", code).count("'tpu/compiles': 2") == 2


def test_the_curve_is_the_cpus_in_two_programs(data, run_on_tpu):
    run(data, "cpu", *RUN)
    for key, steps in ("train/loss", 20), ("eval/loss", 2):
        want = curve("cpu", key)
        assert len(want) == steps
        assert curve(run_on_tpu, key) == pytest.approx(want, rel=1e-5)
    assert curve(run_on_tpu, "tpu/compiles")[20] == 2  # of the step and of the evaluation


def test_a_resume_has_the_same_bits(tpu, data, run_on_tpu):
    shutil.copytree(run_on_tpu, "run")
    os.remove(checkpoint_paths("run")[0])
    train(tpu, data, "run", "--micro_batch_size=4", "--init_from=resume")
    assert same(last_weights("run"), last_weights(run_on_tpu))


def start_two(environment, data, *launcher):
    """Starts an endless run on two chips."""
    command = [*launcher, f"{ROOT}/train.py", *arguments(
        data, "two", "--device=tpu", *ENDLESS, "--micro_batch_size=4")]
    variables = dict(CHIPS="2", TORCH_TPU_SLICEBUILDER_ADDRESSES="localhost:1,localhost:2")
    return subprocess.Popen([sys.executable, *command], env=os.environ | environment | variables, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def test_two_replicas_have_the_curve_of_one_and_stop_together(tpu, data):
    with begun(start_two(tpu, data), "step 4 | evaluation") as process:
        process.terminate()
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 3 and len(checkpoint_paths("two")) == 1, text
    run(data, "one", *ENDLESS, "--max_steps=5")
    for key, steps in ("train/loss", [1, 2, 3, 4]), ("eval/loss", [4]):
        one = curve("one", key)
        two = curve("two", key)
        assert [two[step] for step in steps] == pytest.approx([one[step] for step in steps], rel=1e-5)


def test_the_death_of_one_replica_ends_the_other(tpu, data):
    torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"
    with begun(start_two(tpu, data, *torchrun), "step 4 | evaluation") as process:
        os.kill(children(process.pid)[-1], signal.SIGKILL)
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "exitcode  : -9" in text, text


def test_a_fork_that_cannot_be_captured_is_refused_with_the_place(tpu, data):
    Path("fork.py").write_text("""
import model
halts = model.TRM.halts

def _halts(self, steps, q_halt, min_halt_steps):
    return halts(self, steps + int(q_halt[0].item()), q_halt, min_halt_steps)

model.TRM.halts = _halts
""")
    text = train(tpu, data, "out", "fork.py", code=2)
    assert "train.py: fork.py:6: item has a value or a shape that depends on data" in text


def test_a_process_of_torchrun_that_does_not_know_the_others_is_wrong_input(tpu, data):
    command = [f"{ROOT}/train.py", *arguments(data, "out", "--device=tpu")]
    text = output(tpu | hosts(1)[0], *command, code=2)
    words = "^train.py: .*TORCH_TPU_SLICEBUILDER_ADDRESSES is not in the environment"
    assert re.search(words, text, re.M)
    assert "Traceback" not in text
    assert not lines("out")


def test_without_a_tpu_the_cpu_trains(tpu, data, monkeypatch):
    """TorchTPU, which importing torch loads, would wait for a TPU at the first backward pass."""
    for name in "TPU_LIBRARY_PATH", "TORCH_DEVICE_BACKEND_AUTOLOAD":
        monkeypatch.delenv(name)
    output(dict(PYTHONPATH=""), f"{ROOT}/train.py", *arguments(data, "out", "--max_steps=1"))
    assert curve("out")


def test_the_tpus_compiler_takes_the_step_with_its_all_reduce(tpu, data):
    pytest.importorskip("jax")
    command = [
        f"{ROOT}/scripts/aot.py", *TINY, *DEEP, f"--data_path={data}", "--tpu=v5e-4",
        "--micro_batch_size=2",
    ]
    text = output(tpu, *command)
    figures = json.loads(re.search(r"^{$.*?^}$", text, re.M | re.S)[0])
    assert [operation for _, operation in figures["train"]["collectives"]] == ["all-reduce"]
    for step in figures.values():
        assert step["chips"] == 4
        assert step["donated_tensors"] == step["state_tensors"] > 5
        assert 0 < step["schedules_ms"] < step["cost_model_ms"] < 1
