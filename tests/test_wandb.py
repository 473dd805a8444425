"""W&B: what train.py and scripts/wandb_follow.py send. Nothing W&B does may stop, slow or outlive training.

First the real wandb, then the follower with a stand-in for wandb, then train.py's side of it.
"""
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import conftest
import pytest
import wandb_follow
from configurator import UserError, configure
from conftest import wait_for
from test_train import begun, command, data

import train
from data import locked, read_metrics

SCRIPT = wandb_follow.__file__
KEY = "0123456789abcdef" * 3
RUN = dict(id="abc", project="p", name="n", config={"lr": 0.1}, command=["train.py", "--lr=0.1"])
LINES = [{"step": 1, "train/loss": 2.0}, {"step": 2, "train/loss": 1.0},
         {"step": 2, "final": True, "eval/accuracy": 0.5}]
ROWS = [{"step": 1, "train/loss": 2.0}, {"step": 2, "train/loss": 1.0, "final": True, "eval/accuracy": 0.5}]


def environment(home, **more):
    """Nobody's: no login, no configuration of W&B's."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    return {**kept, "HOME": str(home), "OMP_NUM_THREADS": "1", "NO_PROXY": "*", **more}


def make_out_dir(path, lines=LINES):
    """A folder with metrics.jsonl, and with wandb.json as train.py writes it."""
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "wandb.json").write_text(json.dumps(RUN))
    return path


def about_wandb(text):
    return [line for line in text.splitlines() if line.startswith("W&B: ")]


class Server(conftest.Server):
    """Answers HEAD with 200 and nothing else; if it works, as W&B's own as far as a run needs it."""

    def __init__(self, works=False):
        super().__init__(Handler, works=works, runs=set(), configs=[], history={}, exit_codes=[])

    def reply(self, body):
        """The answer to a request, whose history it keeps."""
        received = body.get("files", {}).get("wandb-history.jsonl", {"content": [], "offset": 0})
        for i, line in enumerate(received["content"]):
            self.history[received["offset"] + i] = json.loads(line)
        if "exitcode" in body:
            self.exit_codes.append(body["exitcode"])
        if "query" in body:
            return {"data": self.data(body["query"], body.get("variables", {}))}
        return {"exitcode": None, "limits": {}}

    def data(self, query, variables):
        """The answer to a GraphQL query; a run that has history can be resumed."""
        bucket = {"id": "R", "name": variables.get("name"), "displayName": "r", "config": "{}", "tags": [],
                  "project": {"id": "P", "name": "trm", "entity": {"id": "E", "name": "me"}}}
        if "upsertBucket" in query:
            self.runs.add(variables["name"])
            self.configs.append(variables["config"])
        tail = json.dumps([json.dumps(line) for line in list(self.history.values())[-1:]])
        resumed = bucket | {"historyLineCount": len(self.history), "historyTail": tail, "eventsTail": "[]",
                            "summaryMetrics": "{}", "eventsLineCount": 0, "logLineCount": 0}
        answers = {
            "viewer {": {"viewer": {"id": "V", "entity": "me", "flags": "{}", "teams": {"edges": []}}},
            "createRunFiles": {"createRunFiles": {"runID": "R", "uploadHeaders": [], "files": []}},
            "upsertBucket": {"upsertBucket": {"inserted": not self.history, "bucket": bucket}},
            "bucket(": {"model": {"bucket": resumed if self.history else None}}}
        return next((v for k, v in answers.items() if k in query), {"serverInfo": {}})

    def rows(self):
        return [without_wandb_keys(self.history[i]) for i in sorted(self.history)]


class Handler(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        if not self.server.works:
            time.sleep(100)
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        answer = self.server.reply({} if "otel" in self.path else json.loads(body or "{}"))
        self.do_HEAD()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def server():
    with Server() as server:
        yield server


def records(out_dir):
    """What wandb's own reader makes of the offline run: a function of the type of the records."""
    path, = out_dir.glob("wandb/offline-run-*/*.wandb")
    reader = subprocess.run([sys.executable, "-m", "wandb", "leet", "inspect", "--json", path],
                            capture_output=True, text=True, env=environment(out_dir))
    lines = [json.loads(line) for line in reader.stdout.splitlines()]
    return lambda name: [line[name] for line in lines if line["type"] == name]


def without_wandb_keys(item):
    return {k: v for k, v in item.items() if not k.startswith("_")}


def follow(out_dir, *flags, home, code=0, seconds=30, **more):
    """Runs the follower with its stdin at its end; returns its lines."""
    program = (f"import sys; sys.path.insert(0, {os.path.dirname(SCRIPT)!r}); import wandb_follow; "
               f"wandb_follow.SECONDS = {seconds}; wandb_follow.main(sys.argv[1:])")
    done = subprocess.run([sys.executable, "-c", program, str(out_dir), *flags], stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=90, env=environment(home, **more))
    assert done.returncode == code, done.stdout + done.stderr
    assert KEY not in done.stdout and not done.stderr
    assert done.stdout.splitlines() == about_wandb(done.stdout)
    return done.stdout.splitlines()


TROUBLE = {  # of the server: what the line names
    "accepts and stalls": "ReadTimeout: HTTPConnectionPool",
    "no login": "UsageError: No API key configured",
    "answers once and stalls": "AuthenticationError: Failed to authenticate"}


@pytest.fixture(scope="module")
def in_trouble(tmp_path_factory, server):
    """Followers with trouble of each kind as futures: they run at once, while the first whole run does."""
    futures = {}
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor() as pool:
        stalls = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for name in TROUBLE:
            out_dir = make_out_dir(tmp_path_factory.mktemp("trouble") / "run")
            more = {"WANDB_BASE_URL": stalls if name == "accepts and stalls" else server.url}
            more |= {"WANDB_API_KEY": KEY} if name != "no login" else {}
            futures[name] = out_dir, pool.submit(follow, out_dir, "--child", home=out_dir.parent, **more)
        yield futures


def test_a_killed_run_that_resumes_reaches_the_server_once(in_trouble, data, tmp_path):
    """Two commands: each step arrives once, with the numbers of metrics.jsonl."""
    out_dir = tmp_path / "run"
    argv = command(data, out_dir, "--wandb_log", "--wandb_project=cells", "--eval_interval=40",
                   "--checkpoint_interval=10")[2:]
    with Server(works=True) as server:
        options = dict(cwd=conftest.ROOT, env=environment(
            tmp_path, WANDB_BASE_URL=server.url, WANDB_API_KEY=KEY, WANDB__FILE_STREAM_TRANSMIT_INTERVAL="1"))
        with begun(conftest.ForkedTrain([*argv, "--max_steps=1000000"], **options)) as killed:
            wait_for(lambda: len(server.history) > 8)
            killed.kill()
            text = killed.communicate()[0]
        last = max(int(path.stem[5:]) for path in out_dir.glob("ckpt_*.json"))
        done = conftest.ForkedTrain([*argv, f"--max_steps={last + 60}", "--init_from=resume"], **options)
        more = done.communicate()[0]
    assert done.returncode == 0 and KEY not in text + more and "Traceback" not in text + more
    rows = {}
    for line in read_metrics(out_dir / "metrics.jsonl"):
        rows.setdefault(line["step"], {}).update(line)
    keys = ("step", "train/loss", "eval/exact_accuracy", "final")
    expected = [[row.get(k) for k in keys] for row in rows.values()]
    assert [[row.get(k) for k in keys] for row in server.rows()] == expected
    assert expected[-1][0] == last + 60 and expected[-1][-1]
    assert server.exit_codes == [1, 0] and len(server.runs) == 1
    assert "wandb" not in os.listdir(conftest.ROOT)
    description = json.loads((out_dir / "wandb.json").read_text())
    assert description.keys() == RUN.keys() and description["id"] in server.runs
    assert description["command"][1:-2] == argv and description["project"] == "cells"
    assert description["config"]["data_sha256"] in server.configs[0] and description["config"]["lr"] == 2e-3
    said = about_wandb((out_dir / "log.txt").read_text())
    assert said == about_wandb(text) + about_wandb(more) and len(said) == 2
    assert all(line.endswith("/me/trm/runs/" + description["id"]) for line in said)


@pytest.mark.parametrize("name", TROUBLE)
def test_trouble_with_the_server_leaves_an_offline_run_and_one_line(in_trouble, name):
    out_dir, future = in_trouble[name]
    said, = future.result()
    assert said.startswith("W&B: offline (" + TROUBLE[name]) and "wandb sync" in said
    of_type = records(out_dir)
    assert [without_wandb_keys(record["item"]) for record in of_type("history")] == ROWS
    assert [record["item"]["_step"] for record in of_type("history")] == [1, 2]
    assert [record.get("exit_code", 0) for record in of_type("exit")] == [0]
    description, shown = of_type("run")[0], of_type("environment")[0]
    assert [description[k] for k in ("run_id", "project", "display_name")] == ["abc", "p", "n"]
    assert description["config"]["update"]["lr"] == 0.1
    assert shown["program"] == "train.py" and shown["args"] == ["--lr=0.1"]
    summary = {k: v for record in of_type("summary") for k, v in record.get("update", {}).items()}
    assert summary["eval/accuracy"] == summary["final/accuracy"] == 0.5


def test_by_hand_an_offline_run_reaches_a_server_later_and_only_once(in_trouble):
    out_dir, future = in_trouble["no login"]
    future.result()
    with Server(works=True) as server:
        for _ in range(2):
            said = follow(out_dir, home=out_dir.parent, WANDB_BASE_URL=server.url, WANDB_API_KEY=KEY)
            assert said == [f"W&B: {server.url}/me/trm/runs/abc"]
            assert server.rows() == ROWS and server.runs == {"abc"}
    assert server.exit_codes == [0, 0]


STUB = """
import os, signal, sys, time
from types import SimpleNamespace
trouble = os.environ.get("TROUBLE", "")
login = int
print("a line of wandb's own")
def note(text):
    with open(os.environ["NOTES"], "a") as f:
        f.write(text + "\\n")
def hang_or_raise(place):
    if trouble == place + " raises":
        raise RuntimeError("trouble")
    time.sleep(1000 * (trouble == place + " hangs"))
    if trouble == place + " kills":
        os.kill(os.getpid(), signal.SIGKILL)
class setup:
    settings = SimpleNamespace(base_url=os.environ["WANDB_BASE_URL"])
def init(mode, id, resume, **_):
    note(f"init {mode} {id} {resume}")
    hang_or_raise("init")
    return Run()
class Run:
    dir, url, summary, starting_step = "/x/files", "https://x/y", {}, 0
    def log(self, values, step):
        hang_or_raise("log")
        assert values["step"] == step
        note(f"log {step} {' '.join(str(v) for k, v in values.items() if k != 'step')}".strip())
    def finish(self, code):
        hang_or_raise("finish")
        note(f"finish {code}")
"""


@pytest.fixture
def stub(tmp_path, server):
    """The environment of a process that finds the stand-in."""
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "__init__.py").write_text(STUB)
    (tmp_path / "notes").touch()
    return dict(PYTHONPATH=str(tmp_path), NOTES=str(tmp_path / "notes"), WANDB_BASE_URL=server.url)


def notes(tmp_path, wanted=("init", "log", "finish")):
    """What the stand-in was called for."""
    return [line for line in (tmp_path / "notes").read_text().splitlines() if line.startswith(wanted)]


@pytest.mark.parametrize("final", [False, True])
def test_a_child_follows_the_file_and_sends_whole_steps(tmp_path, stub, final):
    out_dir = make_out_dir(tmp_path / "run", [{"step": 1, "a": 1}, {"step": 2, "b": 2}])
    (out_dir / "log.txt").write_text("before\n")
    child = subprocess.Popen([sys.executable, SCRIPT, str(out_dir), "--child"], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True, env=environment(tmp_path, **stub))
    wait_for(lambda: notes(tmp_path, "log 1"))
    with open(out_dir / "metrics.jsonl", "a") as f:
        f.write('{"step": 7, "c": ')
        f.flush()
        child.send_signal(signal.SIGTERM)  # the trainer decides when it ends
        time.sleep(1.2)
        f.write('3}\nnot JSON\n{"step": 7, "d": 4}\n{"step": 8, "e": 5}\n')
        f.write('{"step": 8, "final": 6}\n{"step": 9, "fi' if final else '{"step": 8, "fi')
    child.stdin.close()
    assert child.wait(20) == 0 and child.stdout.read() == "W&B: https://x/y\n"
    rows = ["log 1 1", "log 2 2", "log 7 3 4"]
    ending = ["log 8 5 6", "finish 0"] if final else ["finish 1"]
    assert notes(tmp_path) == ["init online abc allow", *rows, *ending]
    assert (out_dir / "log.txt").read_text() == "before\nW&B: https://x/y\n"
    assert json.loads((out_dir / "wandb.json").read_text()) == RUN


@pytest.mark.parametrize("trouble", ["init raises", "init hangs", "log raises", "finish hangs", "no package"])
def test_a_wandb_that_breaks_or_hangs_costs_one_line(tmp_path, stub, trouble):
    if trouble == "no package":
        (tmp_path / "wandb" / "__init__.py").write_text("raise ImportError('trouble')")
    out_dir = make_out_dir(tmp_path / "run")
    said = follow(out_dir, "--child", home=tmp_path, code=1, seconds=1, TROUBLE=trouble, **stub)
    error = "TimeoutError: no answer in time" if "hangs" in trouble else "Error: trouble"
    last, = set(said) - {"W&B: https://x/y"}
    assert last.startswith("W&B: stopped (") and error in last
    modes = [line.split()[1] for line in notes(tmp_path, "init")]
    assert modes == {"init": ["online", "offline"], "no": []}.get(trouble.split()[0], ["online"])


def test_by_hand_the_settings_of_a_checkpoint_become_wandb_json(tmp_path, stub):
    out_dir = make_out_dir(tmp_path / "sudoku7")
    os.remove(out_dir / "wandb.json")
    settings = dict(lr=0.1, wandb_project="p", wandb_run_name="")
    (out_dir / "ckpt_00000010.json").write_text(json.dumps(dict(settings=settings | {"lr": 0.2})))
    (out_dir / "ckpt_00000020.json").write_text(json.dumps(dict(settings=settings)))
    said, = follow(out_dir, home=tmp_path, code=1, **stub | {"WANDB_BASE_URL": "http://127.0.0.1:1"})
    assert said.startswith("W&B: stopped (ConnectionError") and not notes(tmp_path)  # nor offline
    follow(out_dir, home=tmp_path, code=-signal.SIGKILL, TROUBLE="log kills", **stub)
    follow(out_dir, home=tmp_path, WANDB_MODE="offline", **stub)
    run = json.loads((out_dir / "wandb.json").read_text())
    assert run == dict(id=run["id"], project="p", name="sudoku7", command=["train.py"], config=settings)
    assert notes(tmp_path, "init") == [f"init {mode} {run['id']} allow" for mode in ("online", "offline")]
    assert len(run["id"]) == 8 and notes(tmp_path)[-1] == "finish 0"


@pytest.mark.parametrize("arguments, file, content, words", [
    ([], "log.txt", "", "OUT_DIR"),
    (["RUN", "--projekt=x"], "log.txt", "", "projekt"),
    (["RUN", "--mode=sometimes"], "log.txt", "", "online or offline"),
    (["RUN"], "metrics.jsonl", None, "no metrics.jsonl"),
    *((["RUN"], "wandb.json", content, "wandb.json: missing or damaged")
      for content in ('{"id": ', "[1]", "{}", None)),
])
def test_wrong_input(tmp_path, arguments, file, content, words):
    out_dir = make_out_dir(tmp_path / "run")
    if content is None:
        (out_dir / file).unlink()
    else:
        (out_dir / file).write_text(content)
    with pytest.raises(UserError, match=words):
        wandb_follow.main([str(out_dir) if a == "RUN" else a for a in arguments])


def test_one_process_sends_a_run_and_the_other_says_so_in_one_line(tmp_path):
    out_dir = make_out_dir(tmp_path / "run")
    with locked(os.path.join(out_dir, "wandb.json")):
        command = [sys.executable, "-X", "importtime", SCRIPT, str(out_dir)]
        done = subprocess.run(command, capture_output=True, text=True)
    *imports, error = done.stderr.splitlines()
    assert not {"torch", "train", "wandb"} & {line.split("|")[-1].strip() for line in imports}
    assert error == f"wandb_follow.py: {out_dir}: another process is sending this run"
    assert done.returncode == 2 and not done.stdout


@pytest.fixture
def begin(tmp_path, stub, monkeypatch):
    """A function that begins the log of a run whose wandb has the given trouble, as train.py does."""
    def begin(trouble="", rank=0, **settings):
        c = configure(train.__file__, ["--wandb_log", f"--out_dir={tmp_path / 'run'}"])
        vars(c).update(settings)
        for key, value in (stub | {"TROUBLE": trouble}).items():
            monkeypatch.setenv(key, value)
        log = train.Log(c, SimpleNamespace(rank=rank), SimpleNamespace(step=0, state={"wandb_id": "abc"}))
        log.begin(20)
        return log

    monkeypatch.delenv("WANDB_MODE", raising=False)
    return begin


@pytest.mark.parametrize("settings, environment, mode", [
    ({}, "", "online"), ({"wandb_mode": "offline"}, "online", "offline"), ({}, "offline", "offline"),
    ({}, "disabled", ""), ({"wandb_mode": "disabled"}, "", ""), ({"wandb_log": False}, "", ""),
    ({"rank": 1}, "", "")])
def test_a_run_sends_its_numbers_where_it_should(tmp_path, begin, monkeypatch, settings, environment, mode):
    monkeypatch.setenv("WANDB_MODE", environment)
    log = begin(**settings)
    log.log_metrics(1, {"train/loss": 1.0})
    log.log_metrics(1, {"final": True})
    follower = log.follower
    log.close(20)
    written = (tmp_path / "run" / "wandb.json").exists()
    assert log.wandb_id == "abc" and written == (follower is not None) == bool(mode)
    calls = [f"init {mode} abc allow", "log 1 1.0 True", "finish 0"]
    assert notes(tmp_path) == (calls if mode else [])


@pytest.mark.parametrize("trouble, seconds, words", [
    ("init raises", 20, "stopped ("), ("log kills", 20, "exit code -9"), ("no process", 20, "/none"),
    ("finish hangs", 1, "no end within 1 s"), ("stopped", 1, "no end within 1 s")])
def test_a_wandb_that_breaks_or_hangs_never_holds_up_training(tmp_path, begin, monkeypatch, trouble, seconds,
                                                              words):
    if trouble == "no process":
        monkeypatch.setattr(train.subprocess, "Popen", lambda *_, **__: open("/none"))
    log, slowest = begin(trouble), 0
    process = log.follower
    if trouble == "stopped":
        process.send_signal(signal.SIGSTOP)
    for step in range(2000):  # 2 MB
        began = time.monotonic()
        log.log_metrics(step, {"text": "x" * 1000})
        slowest = max(slowest, time.monotonic() - began)
    wait_for(lambda: trouble != "finish hangs" or notes(tmp_path, "log "))
    began = time.monotonic()
    log.close(seconds)
    assert time.monotonic() - began < seconds + 1 and slowest < 0.5 and log.follower is None
    said, = about_wandb((tmp_path / "run" / "log.txt").read_text().replace("W&B: https://x/y", ""))
    assert words in said and (trouble == "no process" or "scripts/wandb_follow.py" in said)
    assert not process or process.wait(5) is not None
