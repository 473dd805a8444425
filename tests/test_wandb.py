"""W&B: nothing it does may stop training or outlive it. With the real wandb, against a server of our own."""
import http.server
import json
import os
import signal
import socket

import pytest
from helpers import Server, TrainProcess, begun, children, command, wait_for

from data import read_metrics

KEY = "0123456789abcdef" * 3


def train(data, folder, *flags, **environment):
    """Returns a process that trains in folder/run and sends its metrics, without a login of W&B's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    argv = command(data, folder / "run", "--wandb_log", *flags)[2:]
    return TrainProcess(argv, cwd=folder, env={**kept, "HOME": str(folder), "NO_PROXY": "*", **environment})


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers W&B's client; server.runs: the runs' ids; server.history: the rows. A run with rows resumes."""

    def do_HEAD(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        body = {} if "otel" in self.path else json.loads(body or "{}")
        for line in body.get("files", {}).get("wandb-history.jsonl", {"content": []})["content"]:
            self.server.history.append(json.loads(line))
        variables = body.get("variables", {})
        if "upsertBucket" in body.get("query", ""):
            self.server.runs.add(variables["name"])
        self.do_HEAD()
        answer = {"exitcode": None, "limits": {}, "data": self.data(variables.get("name"))}
        self.wfile.write(json.dumps(answer).encode())

    def data(self, name):
        """Returns the answer to any of the client's GraphQL queries: each takes its part."""
        history = self.server.history
        bucket = {"id": "R", "name": name, "displayName": "r", "config": "{}", "summaryMetrics": "{}",
                  "project": {"id": "P", "name": "trm", "entity": {"id": "E", "name": "me"}},
                  "historyLineCount": len(history), "eventsLineCount": 0, "logLineCount": 0,
                  "historyTail": json.dumps([json.dumps(row) for row in history[-1:]]), "eventsTail": "[]"}
        return {"viewer": {"id": "V", "entity": "me", "flags": "{}", "teams": {"edges": []}},
                "createRunFiles": {"runID": "R", "uploadHeaders": [], "files": []},
                "upsertBucket": {"inserted": not history, "bucket": bucket},
                "model": {"bucket": bucket if history else None}, "serverInfo": {}}

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with Server(Handler, runs=set(), history=[]) as server:
        yield server


def test_a_killed_run_that_resumes_goes_on_in_the_same_run_of_the_server(data, server, tmp_path):
    more = dict(WANDB_BASE_URL=server.url, WANDB_API_KEY=KEY, WANDB__FILE_STREAM_TRANSMIT_INTERVAL="1")
    with begun(train(data, tmp_path, "--max_steps=1000000", "--checkpoint_interval=5", **more)) as killed:
        wait_for(lambda: len(server.history) > 8)
        killed.kill()
        text = killed.communicate()[0]
    last = max(int(path.stem[5:]) for path in (tmp_path / "run").glob("ckpt_*.json"))
    done = train(data, tmp_path, f"--max_steps={last + 20}", "--init_from=resume", **more)
    text += done.communicate()[0]
    assert done.returncode == 0 and KEY not in text and "Traceback" not in text, text
    run_id = json.loads((tmp_path / "run" / "run.json").read_text())["id"]
    assert server.runs == {run_id} and f"W&B: online, {server.url}/me/trm/runs/{run_id}" in text
    rows = [row["step"] for row in server.history if row.get("train/loss")]
    assert rows[-4:] == [last + 5, last + 10, last + 15, last + 20]
    assert any(row.get("final") for row in server.history)


@pytest.mark.parametrize("key", ["", KEY], ids=["no login", "no answer"])
def test_without_a_login_or_an_answer_a_run_is_offline_from_its_start(key, data, server, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}" if key else server.url
        process = train(data, tmp_path, "--max_steps=10", WANDB_BASE_URL=url, WANDB_API_KEY=key)
        text = process.communicate()[0]
    assert process.returncode == 0 and text.count("W&B: offline") == 2 and "wandb sync" in text, text
    [file] = tmp_path.glob("run/wandb/offline-run-*/*.wandb")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["id"] in file.name


def test_a_wandb_that_dies_does_not_end_training(data, server, tmp_path):
    more = dict(WANDB_BASE_URL=server.url, WANDB_API_KEY=KEY)
    with begun(train(data, tmp_path, "--max_steps=20", **more), "W&B: online") as process:
        for pid in children(process.pid):
            os.kill(pid, signal.SIGKILL)
        text = process.communicate()[0]
    assert process.returncode == 0 and text.count("W&B: stopped") == 1, text
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["final"]


HANGS = """
import time, train
class Run:
    url = dir = "/x"
    log = finish = lambda self, *row: row or time.sleep(1000)
watchdog = train.restart_watchdog
train.restart_watchdog = lambda seconds: watchdog(3 if seconds == 60 else seconds)
train.start_wandb = lambda *_: Run()
"""


def test_a_wandb_that_hangs_at_the_end_is_left(data, tmp_path):
    (tmp_path / "fork.py").write_text(HANGS)
    process = train(data, tmp_path, "fork.py", "--max_steps=10", "--stall_timeout=0")
    assert "Timeout" in process.communicate()[0] and process.returncode == 1
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["final"]
    assert os.path.exists(tmp_path / "run" / "ckpt_00000010.json")
