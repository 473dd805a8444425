"""W&B: what train.py and scripts/wandb_follow.py send. Nothing W&B does may stop, slow or outlive training.

First whole runs with the real wandb, then the follower with a stand-in for wandb, then train.py's side of it.
"""
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SCRIPT = os.path.join(ROOT, "scripts", "wandb_follow.py")
sys.path.insert(0, ROOT)
sys.path.insert(0, os.path.dirname(SCRIPT))
import train  # noqa: E402
import wandb_follow  # noqa: E402
from configurator import UserError, configure  # noqa: E402
from data import locked  # noqa: E402

TINY = ["--hidden_size=16", "--num_heads=2", "--puzzle_emb_ndim=16", "--puzzle_emb_len=2", "--H_cycles=1",
        "--L_cycles=1", "--halt_max_steps=2", "--forward_dtype=float32", "--global_batch_size=16",
        "--lr_warmup_steps=5", "--log_interval=5", "--eval_interval=4", "--max_steps=20",
        "--checkpoint_interval=10"]
KEY = "0123456789abcdef" * 3
RUN = dict(id="abc", project="p", name="n", mode="online", config={"lr": 0.1},
           command=["train.py", "--lr=0.1"], sent=0)
LINES = [{"step": 1, "train/loss": 2.0}, {"step": 2, "train/loss": 1.0, "eval/example": "1 < 2"},
         {"step": 2, "final": True, "eval/accuracy": 0.5, "eval/example": "1 > 0"}]


def environment(home, **more):
    """Nobody's: no login, no configuration of W&B's."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    return {**kept, "HOME": str(home), "OMP_NUM_THREADS": "1", "NO_PROXY": "*", **more}


def read_json(path):
    with open(path, encoding="utf-8") as f:
        return json.load(f)


def read_metrics(out_dir):
    with open(out_dir / "metrics.jsonl", encoding="utf-8") as f:
        return [json.loads(line) for line in f]


def append(out_dir, *lines):
    with open(out_dir / "metrics.jsonl", "a", encoding="utf-8") as f:
        f.writelines(json.dumps(line) + "\n" for line in lines)


def make_out_dir(path, lines=LINES, **run):
    """A folder with metrics.jsonl, and with wandb.json as train.py writes it."""
    path.mkdir(parents=True)
    append(path, *lines)
    (path / "wandb.json").write_text(json.dumps(RUN | run))
    return path


def about_wandb(text):
    return [line for line in text.splitlines() if line.startswith("W&B: ")]


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


# Servers.

class Closed:
    """A port where nothing listens."""

    def __enter__(self):
        with socket.create_server(("127.0.0.1", 0)) as s:
            self.port = s.getsockname()[1]
        return self

    def __exit__(self, *_):
        pass


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
        self.server.daemon_threads, self.server.block_on_close = True, False
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()


class Working(Answering):
    """As much of W&B's own server as a run online needs; keeps what it receives."""

    def __enter__(self):
        super().__enter__()
        self.runs, self.history, self.exit_codes = runs, history, exit_codes = [], {}, []
        bucket = {"id": "R", "displayName": "r",
                  "project": {"id": "P", "name": "trm", "entity": {"id": "E", "name": "me"}}}
        viewer = {"id": "V", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}
        answers = {"viewer {": {"viewer": viewer},
                   "bucket(": {"model": {"bucket": None}},
                   "createRunFiles": {"createRunFiles": {"runID": "R", "uploadHeaders": [], "files": []}},
                   "upsertBucket": {"upsertBucket": {"inserted": True, "bucket": bucket}}}

        def do_POST(handler):
            body = handler.rfile.read(int(handler.headers["Content-Length"] or 0))
            body = json.loads(body or "{}") if "otel" not in handler.path else {}
            query = body.get("query", "")
            reply = {"exitcode": None, "limits": {}}
            if query:
                reply = {"data": next((v for k, v in answers.items() if k in query), {"serverInfo": {}})}
            if "upsertBucket" in query:
                bucket["name"] = bucket.get("name") or body["variables"]["name"]
                runs.append(body["variables"]["name"])
            received = body.get("files", {}).get("wandb-history.jsonl", {"content": [], "offset": 0})
            for i, line in enumerate(received["content"]):
                history[received["offset"] + i] = json.loads(line)
            if "exitcode" in body:
                exit_codes.append(body["exitcode"])
            text = json.dumps(reply).encode()
            handler.send_response(200)
            handler.send_header("Content-Type", "application/json")
            handler.send_header("Content-Length", str(len(text)))
            handler.end_headers()
            handler.wfile.write(text)

        self.server.RequestHandlerClass.do_POST = do_POST
        return self

    def lines(self):
        return [without_wandb_keys(self.history[i]) for i in sorted(self.history)]


# What the real wandb was given.

def records(out_dir):
    """What wandb's own reader makes of the offline runs, oldest first: [[record, ...], ...]."""
    runs = []
    for path in sorted(glob.glob(str(out_dir / "wandb" / "offline-run-*" / "*.wandb"))):
        reader = subprocess.run([sys.executable, "-m", "wandb", "leet", "inspect", "--json", path],
                                capture_output=True, text=True, env=environment(out_dir))
        assert reader.returncode == 0, reader.stderr
        runs.append([json.loads(line) for line in reader.stdout.splitlines()])
    return runs


def of_type(run, name):
    return [record[name] for record in run if record["type"] == name]


def history(run):
    return [without_wandb_keys(record["item"]) for record in of_type(run, "history")]


def without_wandb_keys(item):
    """A logged item without wandb's own keys and what it makes of the example."""
    return {k: v for k, v in item.items() if not k.startswith(("_", "eval/example"))}


def without_examples(lines):
    return [{k: v for k, v in line.items() if k != "eval/example"} for line in lines]


def summary(run):
    return {k: v for record in of_type(run, "summary") for k, v in record.get("update", {}).items()}


def check_offline_run(run, lines, project):
    """Checks that an offline run holds these lines of metrics.jsonl, the last one final, and was ended."""
    assert history(run) == without_examples(lines)
    assert {m["glob_name"]: m["step_metric"] for m in of_type(run, "metric")} == {"*": "step"}
    assert [record.get("exit_code", 0) for record in of_type(run, "exit")] == [0]
    assert of_type(run, "run")[0]["project"] == project
    final = {k: v for k, v in lines[-1].items() if k.startswith("eval/") and k != "eval/example"}
    final |= {k.replace("eval/", "final/"): v for k, v in final.items()}
    assert len(final) >= 2 and final.items() <= summary(run).items()


def examples(out_dir):
    """The texts of the pages that wandb wrote."""
    paths = glob.glob(str(out_dir / "wandb" / "*run-*" / "files" / "media" / "html" / "eval" / "*.html"))
    return [open(path, encoding="utf-8").read() for path in paths]


# Whole runs with the real wandb.

@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("data") / "sudoku-4x4")
    subprocess.run([sys.executable, os.path.join(ROOT, "prepare_sudoku.py"), "--source=generate", "--size=4",
                    "--num_train=64", "--num_test=20", "--num_aug=2", f"--output_dir={path}"],
                   check=True, capture_output=True)
    return path


def training_flags(data, out_dir, *flags):
    return [f"--data_path={data}", f"--out_dir={out_dir}", "--device=cpu", *TINY, "--wandb_log", *flags]


def check_training(out_dir, text):
    """Checks what every run of train.py leaves and prints; returns its lines about W&B."""
    assert KEY not in text and "Traceback" not in text
    lines = read_metrics(out_dir)
    assert [line["step"] for line in lines] == [5, 10, 15, 16, 16, 20, 20] and lines[-1]["final"], lines
    assert read_json(out_dir / "wandb.json")["sent"] == len(lines)
    said = about_wandb(text)
    assert said == about_wandb((out_dir / "log.txt").read_text())[-len(said):]
    return said


def follow(out_dir, *flags, home, code=0, **more):
    """Runs the follower with its stdin at its end; returns (its lines, seconds)."""
    began = time.monotonic()
    done = subprocess.run([sys.executable, SCRIPT, str(out_dir), *flags], stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=120, env=environment(home, **more))
    assert done.returncode == code, done.stdout + done.stderr
    assert KEY not in done.stdout + done.stderr and not done.stderr
    assert done.stdout.splitlines() == about_wandb(done.stdout), "something else than lines for people"
    return done.stdout.splitlines(), time.monotonic() - began


TROUBLE = {  # of the server: its class, the key, what the warning names, seconds
    "nothing listens": (Closed, KEY, "ConnectionError: no answer from http", 30),
    "accepts and stalls": (Silent, KEY, "ConnectionError: no answer from http", 30),
    "no login": (Answering, "", "API key", 30),
    "answers once and stalls": (Answering, KEY, "Error: ", 45)}


@pytest.fixture(scope="module")
def in_trouble(tmp_path_factory):
    """Followers with trouble of each kind as futures: they run at once, while the first whole runs do."""
    with ExitStack() as servers, ThreadPoolExecutor() as pool:
        futures = {}
        for name, (server, key, _, _) in TROUBLE.items():
            folder = tmp_path_factory.mktemp("trouble")
            url = f"http://127.0.0.1:{servers.enter_context(server()).port}"
            more = {"WANDB_API_KEY": key} if key else {}
            out_dir = make_out_dir(folder / "run")
            future = pool.submit(follow, out_dir, "--child", home=folder, WANDB_BASE_URL=url, **more)
            futures[name] = out_dir, future
        yield futures


@pytest.fixture(scope="module")
def offline_run(data, tmp_path_factory, in_trouble):
    """A run of train.py as a command, offline, with its stdin closed: (its folder, its lines about W&B)."""
    out_dir = tmp_path_factory.mktemp("offline") / "run"
    flags = training_flags(data, out_dir, "--wandb_mode=offline", "--wandb_project=cells")
    done = subprocess.run([sys.executable, os.path.join(ROOT, "train.py"), *flags], stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=120, env=environment(out_dir.parent))
    assert done.returncode == 0, done.stdout + done.stderr
    return out_dir, check_training(out_dir, done.stdout + done.stderr)


@pytest.fixture
def train_here(data, tmp_path, monkeypatch, capfd):
    """A function that runs train.py in this process; it returns its lines about W&B."""
    def train_here(out_dir, *flags, **more):
        for key, value in environment(tmp_path, **more).items():
            monkeypatch.setenv(key, value)
        train.replica(configure(train.__file__, training_flags(data, out_dir, *flags)), "cpu")
        return check_training(out_dir, "".join(capfd.readouterr()))

    for key in [key for key in os.environ if key.startswith("WANDB_")]:
        monkeypatch.delenv(key)
    return train_here


def test_an_offline_run_holds_every_line(offline_run):
    out_dir, said = offline_run
    lines = read_metrics(out_dir)
    run, = records(out_dir)
    assert len(said) == 1 and said[0].startswith("W&B: offline: wandb sync"), said
    assert os.listdir(ROOT).count("wandb") == 0
    check_offline_run(run, lines, "cells")
    state = torch.load(out_dir / "ckpt_00000020.pt", weights_only=True)
    description = of_type(run, "run")[0]
    config = description["config"]["update"]
    assert description["run_id"] == state["wandb_id"] and description["display_name"] == "run"
    assert config["hidden_size"] == 16 and config["data_sha256"] == state["data"]
    weights = {k: t for k, t in state["weights"].items() if k not in ("H_init", "L_init")}
    assert config["parameters"] == sum(t.numel() for t in weights.values())
    shown = of_type(run, "environment")[0]
    assert shown["program"].endswith("train.py") and "--wandb_project=cells" in shown["args"]

    texts = [line["eval/example"] for line in lines if "eval/example" in line]
    assert [line["step"] for line in lines if "eval/example" in line] == [16, 20] and "question" in texts[0]
    assert len(examples(out_dir)) == 2 and all("question" in text for text in examples(out_dir))


def test_an_online_run_reaches_a_server_and_a_resume_without_network_keeps_its_id(train_here, tmp_path):
    out_dir = tmp_path / "run"
    with Working() as server:
        url = f"http://127.0.0.1:{server.port}"
        said = train_here(out_dir, WANDB_BASE_URL=url, WANDB_API_KEY=KEY)
    lines = read_metrics(out_dir)
    run_id = torch.load(out_dir / "ckpt_00000020.pt", weights_only=True)["wandb_id"]
    assert server.lines() == without_examples(lines) and set(server.runs) == {run_id}
    assert len(said) == 1 and said[0].endswith("/me/trm/runs/" + run_id), said
    assert server.exit_codes == [0]

    os.remove(out_dir / "ckpt_00000020.json")  # so that it resumes from step 10, as after a kill
    began = time.monotonic()
    flags = ["--init_from=resume", "--wandb_project=cells"]
    said = train_here(out_dir, *flags, WANDB_BASE_URL=url, WANDB_API_KEY=KEY)
    run, = records(out_dir)
    assert len(said) == 1 and said[0].startswith("W&B: offline (ConnectionError: no answer"), said
    check_offline_run(run, [line for line in read_metrics(out_dir) if line["step"] > 10], "cells")
    assert of_type(run, "run")[0]["run_id"] == run_id
    assert time.monotonic() - began < 20


def test_by_hand_a_run_reaches_a_server_later(offline_run, tmp_path):
    out_dir, _ = offline_run
    with Working() as server:
        said, _ = follow(out_dir, "--again", "--mode=online", "--project=trm", home=tmp_path,
                         WANDB_BASE_URL=f"http://127.0.0.1:{server.port}", WANDB_API_KEY=KEY)
    run = read_json(out_dir / "wandb.json")
    assert server.lines() == without_examples(read_metrics(out_dir)) and set(server.runs) == {run["id"]}
    assert said[0].endswith("/me/trm/runs/" + run["id"]) and said[-1] == "W&B: 7 lines sent"
    assert server.exit_codes == [0] and run["sent"] == 7


@pytest.mark.parametrize("name", TROUBLE)
def test_trouble_with_the_server_leaves_an_offline_run_and_one_warning(in_trouble, name):
    out_dir, future = in_trouble[name]
    said, seconds = future.result()
    _, _, reason, limit = TROUBLE[name]
    assert len(said) == 1 and said[0].startswith("W&B: offline (") and reason in said[0], said
    assert "wandb sync" in said[0]
    run, = records(out_dir)
    check_offline_run(run, LINES, "p")
    assert of_type(run, "run")[0]["run_id"] == "abc"
    assert seconds < limit


# The follower alone, with a stand-in for wandb.

STUB = """
import os, signal, sys, time
from types import SimpleNamespace
run, trouble = None, os.environ.get("TROUBLE", "")
Settings = dict
print("a line of wandb's own")
def note(text):
    with open(os.environ["NOTES"], "a") as f:
        f.write(text + "\\n")
def hang_or_raise(place):
    if trouble == place + " raises":
        raise RuntimeError("trouble")
    if trouble == place + " hangs":
        time.sleep(1000)
def setup():
    return SimpleNamespace(settings=SimpleNamespace(base_url=os.environ["WANDB_BASE_URL"]))
def login():
    note("login")
def init(mode, id, project, name, config, dir, resume, settings):
    global run
    note(f"init {mode} {id} {resume}")
    note(f"options {project} {name} {sorted(config)} {settings['program']} {' '.join(sys.argv)}")
    hang_or_raise("init")
    run = Run()
    return run
def Html(text):
    note("html " + text)
    return text
class Run:
    dir, url, summary = "/x/files", "https://x/y", {}
    def define_metric(self, *_, **__):
        pass
    def log(self, values):
        hang_or_raise("log")
        if trouble == f"killed at step {values['step']}":
            os.kill(os.getpid(), signal.SIGKILL)
        note(f"log {values['step']}")
    def finish(self, code):
        hang_or_raise("finish")
        note(f"finish {code}")
"""


@pytest.fixture(scope="module")
def server():
    with Answering() as server:
        yield server


@pytest.fixture
def stub(tmp_path, server):
    """The environment of a process that finds the stand-in."""
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "__init__.py").write_text(STUB)
    return dict(PYTHONPATH=str(tmp_path), NOTES=str(tmp_path / "notes"),
                WANDB_BASE_URL=f"http://127.0.0.1:{server.port}")


def notes(tmp_path, *wanted):
    """What the stand-in was called for: its lines that begin with one of these."""
    if not (tmp_path / "notes").exists():
        return []
    lines = (tmp_path / "notes").read_text().splitlines()
    return [line for line in lines if line.startswith(wanted or ("login", "init", "log", "finish"))]


def hear_ctrl_c():
    """A background job of a shell ignores it, and its children with it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def start(tmp_path, stub):
    """A function that starts the follower and leaves it running."""
    processes = []

    def start(out_dir, *flags, **more):
        processes.append(subprocess.Popen(
            [sys.executable, SCRIPT, str(out_dir), *flags], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, preexec_fn=hear_ctrl_c, env=environment(tmp_path, **stub, **more)))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_a_child_sends_the_lines_in_their_order_and_logs_one_line_itself(tmp_path, stub):
    out_dir = make_out_dir(tmp_path / "run", [{"step": 2}, {"step": 1}, *LINES])  # steps may go back
    (out_dir / "log.txt").write_text("before\n")
    said, _ = follow(out_dir, "--child", home=tmp_path, **stub)
    sent = ["log 2", "log 1", "log 1", "log 2", "log 2"]
    assert notes(tmp_path) == ["login", "init online abc allow", *sent, "finish 0"]
    assert notes(tmp_path, "options") == ["options p n ['lr'] train.py train.py --lr=0.1"]
    assert notes(tmp_path, "html") == ["html <pre>1 &lt; 2</pre>", "html <pre>1 &gt; 0</pre>"]
    assert said == ["W&B: https://x/y"] and (out_dir / "log.txt").read_text() == "before\nW&B: https://x/y\n"
    assert read_json(out_dir / "wandb.json") == RUN | {"sent": 5}


def test_a_child_follows_the_file_and_waits_for_a_half_written_line(tmp_path, start):
    out_dir = make_out_dir(tmp_path / "run", LINES[:1])
    child = start(out_dir, "--child")
    wait_for(lambda: "log 1" in notes(tmp_path))
    with open(out_dir / "metrics.jsonl", "a") as f:
        f.write('{"step": 7, "train/')
        f.flush()
        for number in (signal.SIGTERM, signal.SIGINT):  # the trainer decides when it ends
            child.send_signal(number)
        time.sleep(1.2)
        f.write('loss": 1}\nnot JSON\n{"step": 8}\n{"step": 9, "fi')
    child.stdin.close()
    assert child.wait(20) == 0
    assert notes(tmp_path, "log ", "finish") == ["log 1", "log 7", "log 8", "finish 1"]
    assert read_json(out_dir / "wandb.json")["sent"] == 4


def test_the_run_is_marked_as_failed_where_training_dies(tmp_path, stub):
    follow(make_out_dir(tmp_path / "run", LINES[:1]), "--child", home=tmp_path, **stub)
    assert notes(tmp_path)[-2:] == ["log 1", "finish 1"]


def test_a_second_follower_sends_what_the_killed_one_did_not(tmp_path, stub):
    out_dir = make_out_dir(tmp_path / "run", [{"step": step} for step in range(1, 6)])
    follow(out_dir, "--child", home=tmp_path, code=-signal.SIGKILL, TROUBLE="killed at step 3", **stub)
    assert read_json(out_dir / "wandb.json")["sent"] == 2
    follow(out_dir, "--child", home=tmp_path, **stub)
    assert notes(tmp_path, "log ") == [f"log {step}" for step in range(1, 6)]


def test_lines_that_a_resume_cut_off_do_not_count_as_sent(tmp_path, start):
    out_dir = make_out_dir(tmp_path / "run", [{"step": 1}, {"step": 2}], sent=5)
    child = start(out_dir, "--child")
    wait_for(lambda: notes(tmp_path, "init"))
    append(out_dir, {"step": 3}, {"step": 4})
    wait_for(lambda: "log 4" in notes(tmp_path))
    (out_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    time.sleep(1.2)
    append(out_dir, {"step": 2, "again": 1})
    child.stdin.close()
    child.wait(20)
    assert notes(tmp_path, "log ") == ["log 3", "log 4", "log 2"]
    assert read_json(out_dir / "wandb.json")["sent"] == 2


@pytest.mark.parametrize("trouble", ["init raises", "log raises"])
def test_a_wandb_that_breaks_costs_one_line(tmp_path, stub, trouble):
    out_dir = make_out_dir(tmp_path / "run")
    said, _ = follow(out_dir, "--child", home=tmp_path, code=1, TROUBLE=trouble, **stub)
    said = [line for line in said if line != "W&B: https://x/y"]
    assert said == ["W&B: off (RuntimeError: trouble); metrics.jsonl has it all"]
    modes = [line.split()[1] for line in notes(tmp_path, "init")]
    assert modes == (["online", "offline"] if trouble == "init raises" else ["online"])
    assert read_json(out_dir / "wandb.json")["sent"] == 0


@pytest.mark.parametrize("trouble", ["init hangs", "log hangs", "finish hangs"])
def test_a_follower_ends_by_itself_where_the_trainer_is_gone_and_wandb_hangs(tmp_path, stub, trouble):
    out_dir = make_out_dir(tmp_path / "run")
    program = (f"import sys; sys.path.insert(0, {os.path.dirname(SCRIPT)!r}); import wandb_follow; "
               "wandb_follow.CONNECT_SECONDS = wandb_follow.SEND_SECONDS = 1; "
               "wandb_follow.main(sys.argv[1:])")
    done = subprocess.run([sys.executable, "-c", program, str(out_dir), "--child"], stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=30,
                          env=environment(tmp_path, TROUBLE=trouble, **stub))
    said = [line for line in done.stdout.splitlines() if line != "W&B: https://x/y"]
    assert said == ["W&B: off (TimeoutError: no answer within 1 s); metrics.jsonl has it all"]
    assert done.returncode == 1
    modes = [line.split()[1] for line in notes(tmp_path, "init")]
    assert modes == (["online", "offline"] if trouble == "init hangs" else ["online"])


def test_without_the_package(tmp_path, stub):
    (tmp_path / "wandb" / "__init__.py").write_text("raise ImportError('no such package')")
    out_dir = make_out_dir(tmp_path / "run")
    said, _ = follow(out_dir, "--child", home=tmp_path, code=1, **stub)
    assert said == ["W&B: off (ImportError: no such package); metrics.jsonl has it all"]
    said, _ = follow(out_dir, home=tmp_path, code=1, **stub)
    assert len(said) == 1 and "ImportError: no such package" in said[0]


def test_by_hand_a_finished_run_is_sent_once_and_again_where_asked(tmp_path, stub):
    out_dir = make_out_dir(tmp_path / "run")
    (out_dir / "log.txt").write_text("before\n")
    said, _ = follow(out_dir, home=tmp_path, **stub)
    sent = ["login", "init online abc allow", "log 1", "log 2", "log 2", "finish 0"]
    assert notes(tmp_path) == sent and said[0] == "W&B: https://x/y" and said[-1] == "W&B: 3 lines sent"
    assert (out_dir / "log.txt").read_text() == "before\n"

    said, _ = follow(out_dir, home=tmp_path, **stub)
    assert notes(tmp_path) == sent and len(said) == 1 and said[0].startswith("W&B: 0 lines sent")

    follow(out_dir, "--again", "--project=other", "--name=new", "--mode=offline", home=tmp_path, **stub)
    run = read_json(out_dir / "wandb.json")
    assert run == RUN | {"id": run["id"], "project": "other", "name": "new", "sent": 3} and run["id"] != "abc"
    assert notes(tmp_path)[len(sent):] == [f"init offline {run['id']} allow", *sent[2:]]
    assert "options other new ['lr'] train.py train.py --lr=0.1" in notes(tmp_path, "options")


def test_by_hand_a_run_without_wandb_json_takes_the_settings_of_its_newest_checkpoint(tmp_path, stub):
    out_dir = make_out_dir(tmp_path / "sudoku7")
    os.remove(out_dir / "wandb.json")
    settings = dict(lr=0.1, wandb_project="p", wandb_run_name="", wandb_mode="disabled")
    (out_dir / "ckpt_00000010.json").write_text(json.dumps(dict(settings=settings | {"lr": 0.2}, data="old")))
    (out_dir / "ckpt_00000020.json").write_text(json.dumps(dict(settings=settings, data="5ha")))
    (out_dir / "ckpt_00000030.json").write_text('{"settings": {')
    follow(out_dir, home=tmp_path, code=-signal.SIGKILL, TROUBLE="killed at step 1", **stub)
    assert read_json(out_dir / "wandb.json")["sent"] == 0  # its id is known from the moment W&B has the run
    follow(out_dir, home=tmp_path, **stub)
    run = read_json(out_dir / "wandb.json")
    assert run == dict(id=run["id"], project="p", name="sudoku7", mode="online", command=[], sent=3,
                       config=settings | {"data_sha256": "5ha"})
    assert notes(tmp_path, "init") == 2 * [f"init online {run['id']} allow"] and len(run["id"]) == 8


def test_by_hand_a_live_run_is_followed_to_its_end(tmp_path, start):
    out_dir = make_out_dir(tmp_path / "run", LINES[:1])
    process = start(out_dir)
    wait_for(lambda: "log 1" in notes(tmp_path))
    append(out_dir, *LINES[1:])
    assert process.wait(20) == 0 and notes(tmp_path)[-3:] == ["log 2", "log 2", "finish 0"]
    assert process.stdout.read().endswith("W&B: 3 lines sent\n")


def test_by_hand_ctrl_c_ends_it_properly(tmp_path, start):
    out_dir = make_out_dir(tmp_path / "run", LINES[:1])
    process = start(out_dir)
    wait_for(lambda: read_json(out_dir / "wandb.json")["sent"] == 1)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0 and notes(tmp_path)[-2:] == ["log 1", "finish 1"]
    assert process.stdout.read().endswith("W&B: 1 lines sent\n")


def test_by_hand_nothing_is_written_offline_where_online_was_meant(tmp_path, stub):
    out_dir = make_out_dir(tmp_path / "run")
    with Closed() as nobody:
        stub["WANDB_BASE_URL"] = f"http://127.0.0.1:{nobody.port}"
        said, _ = follow(out_dir, "--again", home=tmp_path, code=1, **stub)
    assert len(said) == 1 and said[0].startswith("W&B: stopped after 0 lines (ConnectionError"), said
    assert not notes(tmp_path) and read_json(out_dir / "wandb.json") == RUN


def test_by_hand_the_environment_may_keep_a_run_from_going_online(tmp_path, stub):
    follow(make_out_dir(tmp_path / "run"), "--mode=online", home=tmp_path, WANDB_MODE="offline", **stub)
    assert notes(tmp_path)[0] == "init offline abc allow"


WRONG_INPUT = {  # name: (arguments after the folder, what to do to it, words of the error)
    "no folder": (None, None, "OUT_DIR"),
    "two folders": (["other"], None, "OUT_DIR"),
    "no such folder": ([], lambda d: d.rename(d.parent / "elsewhere"), "no metrics.jsonl"),
    "no metrics": ([], lambda d: os.remove(d / "metrics.jsonl"), "no metrics.jsonl"),
    "wandb.json cut off": ([], lambda d: (d / "wandb.json").write_text('{"id": '), "wandb.json: damaged"),
    "wandb.json of another kind": ([], lambda d: (d / "wandb.json").write_text("[1]"), "wandb.json: damaged"),
    "wandb.json lacks keys": ([], lambda d: (d / "wandb.json").write_text('{}'), "wandb.json: damaged"),
    "no settings": ([], lambda d: os.remove(d / "wandb.json"), "neither wandb.json nor"),
    "unknown setting": (["--projekt=x"], None, "project"),
    "unknown mode": (["--mode=sometimes"], None, "online or offline")}


@pytest.mark.parametrize("name", WRONG_INPUT)
def test_wrong_input(tmp_path, name):
    arguments, spoil, words = WRONG_INPUT[name]
    out_dir = make_out_dir(tmp_path / "run")
    if spoil:
        spoil(out_dir)
    with pytest.raises(UserError, match=words):
        wandb_follow.main([str(out_dir), *arguments] if arguments is not None else [])


def test_one_process_sends_a_run(tmp_path):
    out_dir = make_out_dir(tmp_path / "run")
    with locked(os.path.join(out_dir, "wandb.json")):
        with pytest.raises(UserError, match="another process sends this run"):
            wandb_follow.main([str(out_dir)])


def test_wrong_input_ends_with_one_line_and_exit_code_2(tmp_path):
    done = subprocess.run([sys.executable, SCRIPT, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("wandb_follow.py: ") and str(tmp_path) in done.stderr


def test_the_follower_imports_neither_torch_nor_train(tmp_path):
    program = (f"import sys; sys.path.insert(0, {os.path.dirname(SCRIPT)!r}); import wandb_follow; "
               "print(sorted({'torch', 'train', 'wandb'} & set(sys.modules)))")
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "[]\n"


# train.py's side, with the stand-in.

@pytest.fixture
def begin(tmp_path, stub, monkeypatch):
    """A function that begins the log of a run whose wandb has the given trouble, as train.py does."""
    logs = []

    def begin(trouble="", rank=0, step=0, **settings):
        c = configure(train.__file__, ["--wandb_log", f"--out_dir={tmp_path / 'run'}"])
        vars(c).update(settings)
        for key, value in (stub | {"TROUBLE": trouble}).items():
            monkeypatch.setenv(key, value)
        device = SimpleNamespace(rank=rank, local_rank=rank, host=0)
        start = SimpleNamespace(step=step, wandb_id="abc", main_host=0)
        logs.append(train.Log(c, device, start))
        logs[-1].begin(20, data_sha256="5ha")
        return logs[-1]

    monkeypatch.delenv("WANDB_MODE", raising=False)
    yield begin
    for log in logs:
        log.close(5)


def is_dead(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().split()[2] == "Z"
    except FileNotFoundError:
        return True


def said_about_wandb(tmp_path):
    lines = about_wandb((tmp_path / "run" / "log.txt").read_text())
    return [line for line in lines if line != "W&B: https://x/y"]


def test_a_run_sends_its_numbers_and_ends_with_its_final_line(tmp_path, begin):
    log = begin(lr=0.5)
    log.numbers(1, {"train/loss": 1.0})
    log.numbers(1, {"final": True})
    log.close(20)
    assert notes(tmp_path) == ["login", "init online abc allow", "log 1", "log 1", "finish 0"]
    run = read_json(tmp_path / "run" / "wandb.json")
    assert run["config"]["lr"] == 0.5 and run["config"]["data_sha256"] == "5ha" and run["command"] == sys.argv
    assert not said_about_wandb(tmp_path)


@pytest.mark.parametrize("sent, steps", [(3, [15]), (1, [10, 15]), (None, [15])],
                         ids=["all", "one line", "unknown: a run without wandb.json"])
def test_a_resume_sends_what_was_not_sent(tmp_path, begin, sent, steps):
    out_dir = make_out_dir(tmp_path / "run", [{"step": 5}, {"step": 10}, {"step": 15}], sent=sent)
    if sent is None:
        os.remove(out_dir / "wandb.json")
    log = begin(step=10)
    log.numbers(15, {"train/loss": 1.0})
    log.close(20)
    assert notes(tmp_path, "log ") == [f"log {step}" for step in steps]


@pytest.mark.parametrize("trouble", ["init raises", "log raises", "killed at step 1"])
def test_a_wandb_that_breaks_never_stops_training(tmp_path, begin, trouble):
    log = begin(trouble)
    log.numbers(1, {"train/loss": 1.0})
    log.wandb.process.wait(20)
    log.numbers(2, {"train/loss": 1.0})
    log.close(5)
    said = said_about_wandb(tmp_path)
    assert len(said) == 1 and said[0].startswith("W&B: off"), said


@pytest.mark.parametrize("trouble", ["init hangs", "log hangs", "finish hangs", "stopped"])
def test_a_wandb_that_hangs_never_holds_up_training_and_is_killed_at_the_end(tmp_path, begin, trouble):
    log = begin(trouble)
    pid = log.wandb.process.pid
    if trouble == "stopped":
        os.kill(pid, signal.SIGSTOP)
    slowest = 0
    for step in range(2000):  # 2 MB
        began = time.monotonic()
        log.numbers(step, {"text": "x" * 1000})
        slowest = max(slowest, time.monotonic() - began)
    if trouble != "stopped":  # let it come to where it hangs
        wait_for(lambda: notes(tmp_path, "log " if trouble == "finish hangs" else "init"))
    began = time.monotonic()
    log.close(2)
    assert time.monotonic() - began < 3 and slowest < 0.5
    said = said_about_wandb(tmp_path)
    assert len(said) == 1 and "no end within 2 s" in said[0] and "--again" in said[0], said
    assert log.wandb.process is None
    wait_for(lambda: is_dead(pid), 5)


@pytest.mark.parametrize("settings", [dict(rank=1), dict(wandb_log=False), dict(wandb_mode="disabled"),
                                      dict(eval_only=True)], ids=str)
def test_no_process_where_none_is_wanted(tmp_path, begin, settings):
    log = begin(**settings)
    log.numbers(1, {"train/loss": 1.0})
    log.close(5)
    assert log.wandb is None and log.wandb_id == "abc" and not (tmp_path / "run" / "wandb.json").exists()
    assert not notes(tmp_path)


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_the_environment_may_keep_a_run_from_going_online(tmp_path, begin, monkeypatch, mode):
    monkeypatch.setenv("WANDB_MODE", mode)
    log = begin()
    log.numbers(1, {"train/loss": 1.0})
    log.close(20)
    assert notes(tmp_path)[:1] == (["init offline abc allow"] if mode == "offline" else [])


def test_a_damaged_wandb_json_never_stops_training(tmp_path, begin):
    out_dir = make_out_dir(tmp_path / "run", [{"step": 5}])
    (out_dir / "wandb.json").write_text('{"id": ')
    log = begin(step=5)
    log.numbers(10, {"train/loss": 1.0})
    log.close(20)
    assert notes(tmp_path, "log ") == ["log 10"]


def test_a_process_that_cannot_start_never_stops_training(tmp_path, begin, monkeypatch):
    def no_process(*_, **__):
        raise OSError("no memory")

    monkeypatch.setattr(train.subprocess, "Popen", no_process)
    log = begin()
    log.numbers(10, {"train/loss": 1.0})
    log.close(5)
    said, = said_about_wandb(tmp_path)
    assert said.startswith("W&B: off") and "no memory" in said
