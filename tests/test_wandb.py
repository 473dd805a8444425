"""W&B: nothing it does may stop training or outlive it. With the real wandb, which reaches no server."""
import json
import os
import signal
import socket
import sys
from pathlib import Path
from unittest import mock

import pytest
from helpers import begun, children, lines, run, start_train

KEY = "0123456789abcdef" * 3


@pytest.fixture(autouse=True)
def no_login(monkeypatch):
    """The environment of somebody who has not logged in at W&B."""
    for name in list(os.environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", ".")
    monkeypatch.setenv("NO_PROXY", "*")


def train(data, *flags, **environment):
    """Returns a process that trains and sends its metrics."""
    return start_train(data, "run", "--wandb_log", "--max_steps=10", *flags, **environment)


def run_id():
    return json.loads(Path("run/run.json").read_text())["id"]


def test_a_run_that_resumes_adds_to_its_run_at_wandb(data, hub, monkeypatch):
    """A stand-in notes what wandb is asked for."""
    wandb = mock.MagicMock()
    wandb.setup.return_value.settings.base_url = hub.url
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for flags in ["--max_steps=10"], ["--max_steps=20", "--init_from=resume"]:
        assert "W&B: online" in run(data, "run", "--wandb_log", *flags)
    for call in wandb.init.call_args_list:
        asked = [call.kwargs[name] for name in ("id", "resume", "mode")]
        assert asked == [run_id(), "allow", "online"]
    wandb.define_metric.assert_called_with("*", step_metric="step")
    rows = [call.args[0] for call in wandb.init.return_value.log.call_args_list]
    assert [row["step"] for row in rows if "train/loss" in row] == [5, 10, 15, 20] and rows[-1]["final"]


@pytest.mark.parametrize("key", ["", KEY], ids=["no login", "no answer"])
def test_without_a_login_or_an_answer_a_run_is_offline_from_its_start(key, data, hub):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}" if key else hub.url
        text = train(data, WANDB_BASE_URL=url, WANDB_API_KEY=key).output()
    assert text.count("W&B: offline") == 2 and "wandb sync" in text, text
    assert not key or key not in text
    [file] = Path().glob("run/wandb/offline-run-*/*.wandb")
    assert run_id() in file.name


def test_a_wandb_that_dies_does_not_end_training(data):
    with begun(train(data, "--wandb_mode=offline"), "W&B: offline") as process:
        for pid in children(process.pid):
            os.kill(pid, signal.SIGKILL)
        text = process.output()
    assert text.count("W&B: stopped") == 1, text
    assert lines("run")[-1]["final"]


HANGS = """
import time, train
import runtime.log
class Run:
    url = dir = "/x"
    log = finish = lambda self, *row: row or time.sleep(1000)
watchdog = runtime.log.restart_watchdog
runtime.log.restart_watchdog = lambda seconds: watchdog(3 if seconds == 60 else seconds)
runtime.log.Log.start_wandb = lambda log, *_: setattr(log, "wandb", Run())
"""


def test_a_wandb_that_hangs_at_the_end_is_left(data):
    Path("fork.py").write_text(HANGS)
    assert "Timeout" in train(data, "fork.py", "--stall_timeout=0").output(1)
    assert lines("run")[-1]["final"]
    assert os.path.exists("run/ckpt_00000010.json")
