"""scripts/sweep.py: the list of all runs, and runs that are complete, killed, damaged, stopped or others."""
import os
import re
import signal
import sys
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import sweep as script
from helpers import ROOT, TINY, begun, lines, start_script, wait_for

FLAGS = [*TINY, "--halt_max_steps=2", "--micro_batch_size=0", "--checkpoint_interval=20", "--max_steps=120",
         "--wandb_log=False", "--device=cpu", "--lr=1e-4"]
EMA_OFF, EMA = "exp08a_ema_off", "exp08b_ema0.99"


class Popen:
    """Stands for subprocess.Popen, and runs train.py in a process that need not import torch."""

    def __init__(self, command, env):
        Popen.last = self.process = start_script("train", command[2:])
        self.terminate = self.process.terminate

    def wait(self):
        print(self.process.stdout.read())
        return self.process.wait()


@pytest.fixture
def sweep(capfd, monkeypatch):
    """sweep.py in this process: a function of its arguments that returns what it and its runs print."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(script, "subprocess", SimpleNamespace(Popen=Popen))

    def sweep(*argv, code=0):
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            script.main(argv)
            sys.exit(0)
        text = "".join(capfd.readouterr())
        assert stop.value.code == code, text
        return text

    return sweep


@pytest.fixture
def flags(data, tmp_path):
    """Flags that train a tiny model in tmp_path."""
    return [*FLAGS, f"--data_path={data}", f"--out_dir={tmp_path}"]


def test_the_list_has_each_groups_question_and_each_runs_changes(sweep):
    *_, question, wide, baseline = sweep("--list", "exp01a", "exp01c").splitlines()
    assert question.startswith("How does accuracy grow with param")
    assert wide.split() == ["exp01a_h256", "hidden_size=256", "num_heads=4", "puzzle_emb_ndim=256"]
    assert baseline.split(maxsplit=1) == ["exp01c_h512", "the baseline"]


def test_a_pattern_selects_runs_that_begin_with_it():
    names = [file.stem for file in script.select_files(["exp04a_100"], "exp0?a_2*")]
    assert names == ["exp04a_100_puzzles", "exp04a_2000_puzzles", "exp04a_250_puzzles"]


def test_an_unknown_run_is_an_error():
    with pytest.raises(script.UserError, match=r"config/study has no run exp01ax\["):
        script.main(["exp01ax"])


def test_a_run_saves_and_goes_on_after_a_stop_and_ends_with_a_killed_sweep(flags, tmp_path):
    """output() returns once the sweep and its run have closed the pipe."""
    start = partial(start_script, "sweep", ["exp08a", "exp08b", *flags, "--max_steps=3000"], cwd=ROOT)
    with begun(start(), "step 10/") as process:
        os.kill(process.pid, signal.SIGINT)
        text = process.output(3)
    step = re.search(r"stopped at step (\d+), checkpoint saved", text)[1]
    with begun(start(), f"training from step {step} to 3000") as process:
        process.kill()
        process.output(-signal.SIGKILL)
    assert "final" not in lines(tmp_path / EMA_OFF)[-1]
    assert not (tmp_path / EMA).exists()


def test_a_killed_run_is_resumed_a_failure_is_named_and_a_complete_run_is_skipped(sweep, flags, tmp_path):
    # the first run has a damaged checkpoint alone
    (tmp_path / EMA_OFF).mkdir()
    for name in "ckpt_00000010.pt", "ckpt_00000010.json":
        (tmp_path / EMA_OFF / name).write_text("damaged")

    # the second one is killed
    def kill():
        wait_for((tmp_path / EMA / "ckpt_00000020.json").exists)
        Popen.last.kill()

    threading.Thread(target=kill).start()
    text = sweep("exp08a", "exp08b", *flags, code=1)
    assert "train.py: --init_from=auto: no complete checkpoint" in text and "resuming from" in text
    assert f"{EMA_OFF:32} failed with exit code 2\n{EMA:32} complete\n" in text
    assert lines(tmp_path / EMA)[-1]["final"]

    # the same sweep once more, and one with another setting
    assert sweep("exp08b", *flags, "--log_interval=9").startswith(f"{EMA:32} complete\n")
    with pytest.raises(script.UserError, match=r"holds a run with other settings \(lr=0.0001\): delete it"):
        sweep("exp08b", *flags, "--lr=0.5")
