"""W&B: nothing it does may stop training or outlive it. With the real wandb, which reaches no server."""
import json
import os
import signal
import socket
import sys
from unittest import mock

import pytest
from helpers import begun, children, lines, run, start_train

KEY = "0123456789abcdef" * 3


@pytest.fixture(autouse=True)
def no_login(tmp_path, monkeypatch):
    """The environment of somebody who has not logged in at W&B."""
    for name in list(os.environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "*")


def train(data, folder, *flags, **environment):
    """Returns a process that trains in folder/run and sends its metrics."""
    flags = "--wandb_log", "--max_steps=10", *flags
    return start_train(data, folder / "run", *flags, cwd=folder, **environment)


def run_id(folder):
    return json.loads((folder / "run/run.json").read_text())["id"]


def test_a_run_that_resumes_adds_to_its_run_at_wandb(data, hub, tmp_path, monkeypatch):
    """A stand-in notes what wandb is asked for."""
    wandb = mock.MagicMock()
    wandb.setup.return_value.settings.base_url = hub.url
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for flags in ["--max_steps=10"], ["--max_steps=20", "--init_from=resume"]:
        assert "W&B: online" in run(data, tmp_path / "run", "--wandb_log", *flags)
    for call in wandb.init.call_args_list:
        asked = [call.kwargs[name] for name in ("id", "resume", "mode")]
        assert asked == [run_id(tmp_path), "allow", "online"]
    wandb.define_metric.assert_called_with("*", step_metric="step")
    rows = [call.args[0] for call in wandb.init.return_value.log.call_args_list]
    assert [row["step"] for row in rows if "train/loss" in row] == [5, 10, 15, 20] and rows[-1]["final"]


@pytest.mark.parametrize("key", ["", KEY], ids=["no login", "no answer"])
def test_without_a_login_or_an_answer_a_run_is_offline_from_its_start(key, data, hub, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}" if key else hub.url
        process = train(data, tmp_path, WANDB_BASE_URL=url, WANDB_API_KEY=key)
        text = process.output()
    assert process.returncode == 0 and text.count("W&B: offline") == 2 and "wandb sync" in text, text
    assert not key or key not in text
    [file] = tmp_path.glob("run/wandb/offline-run-*/*.wandb")
    assert run_id(tmp_path) in file.name


def test_a_wandb_that_dies_does_not_end_training(data, tmp_path):
    with begun(train(data, tmp_path, "--wandb_mode=offline"), "W&B: offline") as process:
        for pid in children(process.pid):
            os.kill(pid, signal.SIGKILL)
        text = process.output()
    assert process.returncode == 0 and text.count("W&B: stopped") == 1, text
    assert lines(tmp_path / "run")[-1]["final"]


HANGS = """
import time, train
import runtime.log
class Run:
    url = dir = "/x"
    log = finish = lambda self, *row: row or time.sleep(1000)
watchdog = runtime.log.restart_watchdog
runtime.log.restart_watchdog = lambda seconds: watchdog(3 if seconds == 60 else seconds)
train.start_wandb = lambda *_: Run()
"""


def test_a_wandb_that_hangs_at_the_end_is_left(data, tmp_path):
    (tmp_path / "fork.py").write_text(HANGS)
    process = train(data, tmp_path, "fork.py", "--stall_timeout=0")
    assert "Timeout" in process.output() and process.returncode == 1
    assert lines(tmp_path / "run")[-1]["final"]
    assert os.path.exists(tmp_path / "run/ckpt_00000010.json")
