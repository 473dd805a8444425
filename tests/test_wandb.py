"""W&B logging: what a real offline run holds, and that nothing W&B does stops, slows or outlives training."""
import glob
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
import train  # noqa: E402

TINY = ["--hidden_size=16", "--num_heads=2", "--puzzle_emb_ndim=16", "--puzzle_emb_len=2", "--H_cycles=1", "--L_cycles=1", "--halt_max_steps=2",
        "--forward_dtype=float32", "--global_batch_size=16", "--lr_warmup_steps=5", "--log_interval=5", "--eval_interval=4", "--max_steps=20"]
KEY = "0123456789abcdef" * 3


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("data") / "sudoku-4x4")
    subprocess.run([sys.executable, os.path.join(ROOT, "prepare_sudoku.py"), "--source=generate", "--size=4", "--num_train=64", "--num_test=20",
                    "--num_aug=2", f"--output_dir={path}"], check=True, capture_output=True)
    return path


def environment(home, **more):
    """Nobody's: no login, no configuration of W&B's."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    return {**kept, "HOME": str(home), "OMP_NUM_THREADS": "1", "NO_PROXY": "*", **more}


def run(data, tmp_path, *flags, **more):
    """Runs train.py with its stdin closed; returns (what it printed, its lines from W&B, seconds)."""
    began = time.monotonic()
    done = subprocess.run([sys.executable, os.path.join(ROOT, "train.py"), f"--data_path={data}", f"--out_dir={tmp_path / 'run'}", "--device=cpu",
                           *TINY, "--wandb_log", *flags], capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
                          env=environment(tmp_path, **more))
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert KEY not in text and "Traceback" not in text
    return text, [line for line in text.splitlines() if line.startswith("W&B: ")], time.monotonic() - began


def metrics(tmp_path):
    with open(tmp_path / "run" / "metrics.jsonl") as f:
        return [json.loads(line) for line in f]


def records(tmp_path):
    """What wandb's own reader makes of the offline runs, oldest first: [[record, ...], ...]."""
    runs = []
    for path in sorted(glob.glob(str(tmp_path / "run" / "wandb" / "offline-run-*" / "*.wandb"))):
        read = subprocess.run([sys.executable, "-m", "wandb", "leet", "inspect", "--json", path], capture_output=True, text=True,
                              env=environment(tmp_path))
        assert read.returncode == 0, read.stderr
        runs.append([json.loads(line) for line in read.stdout.splitlines()])
    return runs


def history(run):
    """The items logged, without wandb's own keys."""
    return [{k: v for k, v in r["history"]["item"].items() if not k.startswith("_")} for r in run if r["type"] == "history"]


def complete(tmp_path):
    """metrics.jsonl has every line of 20 steps."""
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == [5, 10, 15, 16, 16, 20, 20] and lines[-1]["final"], lines
    return lines


def test_an_offline_run_holds_every_line_and_a_resume_goes_on_under_its_id(data, tmp_path):
    _, said, _ = run(data, tmp_path, "--wandb_mode=offline", "--checkpoint_interval=10", "--wandb_project=cells")
    first = complete(tmp_path)
    os.remove(tmp_path / "run" / "ckpt_00000020.json")  # so that it goes on from step 10, as after a kill
    run(data, tmp_path, "--wandb_mode=offline", "--checkpoint_interval=10", "--init_from=resume")
    runs = records(tmp_path)
    assert len(runs) == 2 and len(said) == 1 and "wandb sync" in said[0]
    assert os.listdir(ROOT).count("wandb") == 0
    for records_of_one, lines in zip(runs, (first, [line for line in metrics(tmp_path) if line["step"] > 10])):
        logged = history(records_of_one)
        assert [item for item in logged if not any(k.startswith("eval/example") for k in item)] == lines
        assert {r["metric"]["glob_name"]: r["metric"]["step_metric"] for r in records_of_one if r["type"] == "metric"} == {"*": "step"}
        summary = {k: v for r in records_of_one if r["type"] == "summary" for k, v in r["summary"].get("update", {}).items()}
        final = {k: v for k, v in lines[-1].items() if k.startswith("eval/")}
        assert final.items() <= summary.items() and {k.replace("eval/", "final/"): v for k, v in final.items()}.items() <= summary.items()
        assert [r["exit"].get("exit_code", 0) for r in records_of_one if r["type"] == "exit"] == [0]
    about = [next(r["run"] for r in one if r["type"] == "run") for one in runs]
    state = torch.load(tmp_path / "run" / "ckpt_00000020.pt", weights_only=True)
    assert {one["run_id"] for one in about} == {state["wandb_id"]}
    assert [one["project"] for one in about] == ["cells", "trm"] and about[0]["display_name"] == "run"
    config = about[0]["config"]["update"]
    assert config["hidden_size"] == 16 and config["data_sha256"] == state["data"]
    assert config["parameters"] == sum(t.numel() for k, t in state["weights"].items() if k not in ("H_init", "L_init"))
    pages = glob.glob(str(tmp_path / "run" / "wandb" / "offline-run-*" / "files" / "media" / "html" / "eval" / "*.html"))
    steps = [item["step"] for one in runs for item in history(one) if any(k.startswith("eval/example") for k in item)]
    assert len(pages) == len(steps) and steps[-1] == 20 and "question" in open(pages[0]).read()


class Silent:
    """A port that accepts connections and never answers."""

    def __enter__(self):
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        return self

    def __exit__(self, *_):
        self.socket.close()


class Answering:
    """A server that answers HEAD with 200 and then nothing: it holds every other request."""

    def __enter__(self):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_HEAD(self):
                self.send_response(200)
                self.end_headers()

            def do_POST(self):
                time.sleep(100)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads, self.server.block_on_close, self.port = True, False, self.server.server_port
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()


class Working(Answering):
    """As much of W&B's own server as a run online needs; keeps what it is told."""

    def __enter__(self):
        super().__enter__()
        self.runs, self.history = runs, history = [], {}
        bucket = {"id": "R", "displayName": "r", "project": {"id": "P", "name": "trm", "entity": {"id": "E", "name": "me"}}}
        answers = {"viewer {": {"viewer": {"id": "V", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}},
                   "bucket(": {"model": {"bucket": None}},
                   "createRunFiles": {"createRunFiles": {"runID": "R", "uploadHeaders": [], "files": []}},
                   "upsertBucket": {"upsertBucket": {"inserted": True, "bucket": bucket}}}

        def do_POST(handler):
            body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"] or 0)) or "{}") if "otel" not in handler.path else {}
            query = body.get("query", "")
            reply = {"data": next((v for k, v in answers.items() if k in query), {"serverInfo": {}})} if query else {"exitcode": None, "limits": {}}
            if "upsertBucket" in query:
                bucket["name"] = bucket.get("name") or body["variables"]["name"]
                runs.append(body["variables"]["name"])
            for i, line in enumerate(body.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])):
                history[body["files"]["wandb-history.jsonl"]["offset"] + i] = json.loads(line)
            text = json.dumps(reply).encode()
            handler.send_response(200)
            handler.send_header("Content-Type", "application/json")
            handler.send_header("Content-Length", str(len(text)))
            handler.end_headers()
            handler.wfile.write(text)

        self.server.RequestHandlerClass.do_POST = do_POST
        return self


class Closed:
    """A port where nothing listens."""

    def __enter__(self):
        with socket.create_server(("127.0.0.1", 0)) as s:
            self.port = s.getsockname()[1]
        return self

    def __exit__(self, *_):
        pass


def test_an_online_run_reaches_a_server(data, tmp_path):
    with Working() as s:
        _, said, took = run(data, tmp_path, WANDB_BASE_URL=f"http://127.0.0.1:{s.port}", WANDB_API_KEY=KEY)
    lines = complete(tmp_path)
    told = [{k: v for k, v in s.history[i].items() if not k.startswith("_")} for i in sorted(s.history)]
    assert [item for item in told if "eval/example" not in item] == lines
    identity = torch.load(tmp_path / "run" / "ckpt_00000020.pt", weights_only=True)["wandb_id"]
    assert len(said) == 1 and said[0].endswith("/me/trm/runs/" + identity) and set(s.runs) == {identity} and took < 20, (said, s.runs)


@pytest.mark.parametrize("server, key, reason, seconds", [
    (Closed, KEY, "no answer", 15), (Silent, KEY, "no answer", 20), (Answering, "", "API key", 15), (Answering, KEY, "", 45)],
    ids=["nothing listens", "accepts and stalls", "no login", "answers once and stalls"])
def test_trouble_with_the_server_leaves_an_offline_run_and_one_warning(data, tmp_path, server, key, reason, seconds):
    with server() as s:
        more = {"WANDB_API_KEY": key} if key else {}
        _, said, took = run(data, tmp_path, WANDB_BASE_URL=f"http://127.0.0.1:{s.port}", **more)
    print(f"{took:.1f} s")
    lines = complete(tmp_path)
    assert len(said) == 1 and said[0].startswith("W&B: offline (") and reason in said[0] and "wandb sync" in said[0], said
    assert [item for item in history(records(tmp_path)[0]) if "eval/example.path" not in item] == lines
    assert took < seconds


def test_without_the_package(data, tmp_path):
    (tmp_path / "stub" / "wandb").mkdir(parents=True)
    (tmp_path / "stub" / "wandb" / "__init__.py").write_text("raise ImportError('no such package')")
    _, said, took = run(data, tmp_path, PYTHONPATH=str(tmp_path / "stub"))
    complete(tmp_path)
    assert said == ["W&B: off (ImportError: no such package); metrics.jsonl has it all"] and took < 15


STUB = """
import os, signal, sys, time
from types import SimpleNamespace
run = None
Settings = dict
def note(text):
    with open(os.environ["NOTES"], "a") as f:
        f.write(text + "\\n")
def setup():
    return SimpleNamespace(settings=SimpleNamespace(base_url=os.environ["WANDB_BASE_URL"]))
def login():
    note("login")
def init(mode, id, resume, **_):
    global run
    note(f"init {mode} {id} {resume}")
    if os.environ["TROUBLE"] == "init raises":
        raise RuntimeError("init")
    if os.environ["TROUBLE"] == "init hangs":
        time.sleep(1000)
    run = Run()
    return run
class Run:
    dir, url, summary = "/x/files", "https://x/y", {}
    def define_metric(self, *_, **__):
        pass
    def log(self, values):
        if os.environ["TROUBLE"] == "log raises":
            raise ConnectionResetError("Connection lost")
        if os.environ["TROUBLE"] == "log hangs":
            time.sleep(1000)
        if os.environ["TROUBLE"] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        note(f"log {values['step']}")
    def finish(self, code):
        if os.environ["TROUBLE"] == "finish hangs":
            time.sleep(1000)
        note(f"finish {code}")
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A function that starts a WandB whose wandb has the given trouble; it returns the object and what it says."""
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "__init__.py").write_text(STUB)

    def start(trouble, rank=0, **settings):
        settings = dict(wandb_log=True, wandb_mode="online", wandb_project="p", wandb_run_name="", out_dir=str(tmp_path / "run"),
                        eval_only=False) | settings
        for k, v in dict(PYTHONPATH=str(tmp_path), NOTES=str(tmp_path / "notes"), TROUBLE=trouble,
                         WANDB_BASE_URL=f"http://127.0.0.1:{server.port}").items():
            monkeypatch.setenv(k, v)
        said = []
        started.append(train.WandB(SimpleNamespace(**settings), rank, "abc", said.append))
        return started[-1], said

    started = []
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with Answering() as server:
        yield start
        for w in started:
            w.close(5)


def notes(tmp_path):
    return (tmp_path / "notes").read_text().splitlines()


def test_steps_may_go_back(start, tmp_path):
    w, said = start("none")
    for step in (1, 2, 1):
        w.send({"step": step})
    w.close()
    assert notes(tmp_path) == ["login", "init online abc allow", "log 1", "log 2", "log 1", "finish 0"] and said == ["W&B: https://x/y"]


@pytest.mark.parametrize("trouble", ["init raises", "log raises", "killed"])
def test_a_wandb_that_breaks(start, tmp_path, trouble):
    w, said = start(trouble)
    until = time.monotonic() + 20
    while w.process and time.monotonic() < until:
        w.send({"step": 1})
        time.sleep(0.05)
    assert not w.process
    w.send({"step": 2})
    w.close()
    said = [line for line in said if line != "W&B: https://x/y"]
    assert len(said) == 1 and said[0].startswith("W&B: off"), said
    if trouble == "init raises":
        assert [line.split()[1] for line in notes(tmp_path) if line.startswith("init")] == ["online", "offline"]


@pytest.mark.parametrize("trouble", ["init hangs", "log hangs", "finish hangs", "stopped"])
def test_a_wandb_that_hangs_never_holds_up_training_and_is_killed_at_the_end(start, trouble):
    w, said = start(trouble)
    pid = w.process.pid
    if trouble == "stopped":
        os.kill(pid, signal.SIGSTOP)
    slowest = 0
    for step in range(2000):  # 2 MB, more than any pipe holds
        began = time.monotonic()
        w.send({"step": step, "text": "x" * 1000})
        slowest = max(slowest, time.monotonic() - began)
    began = time.monotonic()
    w.close(2)
    assert time.monotonic() - began < 3 and slowest < 0.5
    said = [line for line in said if line != "W&B: https://x/y"]
    assert len(said) == 1 and "no end within 2 s" in said[0] and "*run-*-abc" in said[0], said
    for _ in range(100):
        if not os.path.exists(f"/proc/{pid}") or open(f"/proc/{pid}/stat").read().split()[2] == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("its process lives on")


def test_the_run_is_marked_as_failed_where_training_dies(start, tmp_path):
    w, _ = start("none")
    w.send({"step": 1})
    w.process.stdin.close()
    w.process.wait(20)
    assert notes(tmp_path)[-2:] == ["log 1", "finish 1"]


@pytest.mark.parametrize("settings", [dict(rank=1), dict(wandb_log=False), dict(wandb_mode="disabled"), dict(eval_only=True)])
def test_no_process_where_none_is_wanted(start, settings):
    w, said = start("none", **settings)
    w.send({"step": 1})
    w.close()
    assert w.process is None and w.id == "abc" and not said


def test_the_environment_may_keep_a_run_at_home(start, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    w, said = start("none")
    w.close()
    assert notes(tmp_path)[0].startswith("init offline") and len(said) == 1
