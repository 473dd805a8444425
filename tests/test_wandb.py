"""W&B: a missing login is an error, and nothing else it does may stop training. With the real wandb."""
import json
import os
import re
import signal
import sys
from pathlib import Path
from unittest import mock

import pytest
from helpers import begun, children, lines, run, start_train


def test_a_run_that_resumes_adds_to_its_run_at_wandb(data, monkeypatch):
    """A stand-in notes what wandb is asked for."""
    wandb = mock.MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for flags in ["--max_steps=10"], ["--max_steps=20", "--init_from=resume"]:
        assert "W&B: online" in run(data, "run", "--wandb_log", *flags)
    run_id = json.loads(Path("run/run.json").read_text())["id"]
    for call in wandb.init.call_args_list:
        assert [call.kwargs["id"], call.kwargs["resume"]] == [run_id, "allow"]
    rows = [call.args[0] for call in wandb.init.return_value.log.call_args_list]
    assert rows == [line for line in lines("run") if "run" not in line]


def test_without_a_login_a_run_does_not_begin(data, monkeypatch):
    monkeypatch.setenv("HOME", ".")
    text = start_train(data, "run", "--wandb_log", WANDB_API_KEY="").output(2)
    assert re.search("^train.py: --wandb_log: .*`wandb login`", text, re.M)
    assert not Path("run").exists()


def test_a_wandb_that_dies_does_not_end_training(data):
    flags = "--wandb_log", "--wandb_mode=offline", "--max_steps=10"
    with begun(start_train(data, "run", *flags), "W&B: offline") as process:
        for pid in children(process.pid):
            os.kill(pid, signal.SIGKILL)
        text = process.output()
    assert text.count("W&B: stopped") == 1, text
    assert lines("run")[-1]["final"]


@pytest.mark.parametrize("fails", ["init", "init.return_value.finish"])
def test_a_server_that_goes_away_does_not_end_training(fails, data, monkeypatch):
    """A stand-in raises as wandb does after its time-out."""
    wandb = mock.MagicMock(**{f"{fails}.side_effect": TimeoutError})
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    assert "W&B: " in run(data, "run", "--wandb_log", "--max_steps=10")
    assert lines("run")[-1]["final"]
