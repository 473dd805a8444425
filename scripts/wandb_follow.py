"""Sends the metrics of a run to Weights & Biases, and follows them while the run goes on.

    python scripts/wandb_follow.py out/sudoku                  sends what W&B lacks, until the run ends
    python scripts/wandb_follow.py out/sudoku --again          sends everything, as a new run
    python scripts/wandb_follow.py out/sudoku --mode=offline   writes files for `wandb sync` instead

train.py starts this script where wandb_log is set. By hand it uploads a run later, from any machine.
OUT_DIR/wandb.json holds the run's id, settings and command, and how many lines of metrics.jsonl were sent.
Where it is missing, the settings come from the newest checkpoint.
"""
import contextlib
import glob
import html
import json
import os
import secrets
import signal
import sys
import threading
import time
from itertools import islice

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from configurator import UserError, command, configure  # noqa: E402
from data import locked  # noqa: E402

# W&B
project = ""  # empty: as in wandb.json
name = ""  # empty: as in wandb.json
mode = ""  # online or offline; empty: as in wandb.json, or WANDB_MODE=offline in the environment
again = False  # sends everything under a new id
# ---

CHILD = "--child"  # train.py's flag: the end of stdin ends the run; --child=REASON: online has failed
CONNECT_SECONDS = 20  # for login and init together
SEND_SECONDS = 60  # for a line, and for finish; by hand there is Ctrl-C instead


def main(argv):
    """Checks the input, then follows the run. Raises UserError."""
    child_flags = [a for a in argv if a.partition("=")[0] == CHILD]
    folders = [a for a in argv if not a.startswith("-")]
    s = configure(__file__, [a for a in argv if a not in child_flags + folders])
    if len(folders) != 1:
        raise UserError("write: python scripts/wandb_follow.py OUT_DIR; --help shows the settings")
    out_dir = folders[0]
    if not os.path.exists(os.path.join(out_dir, "metrics.jsonl")):
        raise UserError(f"{out_dir}: has no metrics.jsonl, or is no folder: give the out_dir of a run")
    try:  # train.py's own waits for that of a trainer that was killed
        with locked(os.path.join(out_dir, "wandb.json"), wait=bool(child_flags)):
            follow(out_dir, s, child_flags)
    except BlockingIOError:
        raise UserError(f"{out_dir}: another process sends this run") from None


def follow(out_dir, s, child_flags):
    """Reads what was sent so far, then sends the rest. child_flags: CHILD where train.py has started this."""
    child = bool(child_flags)
    run = read_run(out_dir) | {k: v for k, v in (("project", s.project), ("name", s.name)) if v}
    if s.again:
        run |= {"id": secrets.token_hex(4), "sent": 0}
    mode, reason = s.mode or run["mode"], ""
    if child:
        reason = child_flags[-1].partition("=")[2]
        mode = "offline" if reason else mode
    elif mode == "online":
        mode = os.environ.get("WANDB_MODE") or mode
    if not child and mode not in ("online", "offline"):
        raise UserError(f"mode (or WANDB_MODE) must be online or offline, not {mode!r}")
    Follower(out_dir, run, mode, reason, child).follow()


class Follower:
    """Sends one run. wandb can hang in login, init, log, finish and its exit hooks: all have a time limit."""

    def __init__(self, out_dir, run, mode, offline_reason, child):
        """run: the object in wandb.json; child: whether train.py waits for the end."""
        self.out_dir, self.run, self.mode, self.child = out_dir, run, mode, child
        self.offline_reason = offline_reason
        self.seconds = SEND_SECONDS if child else 0
        self.path = os.path.join(out_dir, "metrics.jsonl")
        self.environment = dict(os.environ)  # before wandb changes it
        self.stdout = os.dup(1)
        self.wandb_run = None
        self.new_lines = 0
        self.final = False  # the last line sent is the evaluation at the end

    def follow(self):
        """Sends all lines until the run ends, then ends the run at W&B and this process."""
        if self.child:  # train.py decides when it ends
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        position = self.skip_sent()
        if not self.child and self.final and not read_lines(self.path, position)[0]:
            self.report(f"0 lines sent: all {self.run['sent']} were sent before; "
                        "--again sends them as a new run")
            return
        try:
            self.connect()
            with contextlib.suppress(KeyboardInterrupt):
                self.send_all(position)
            self.limit(self.seconds)
            self.wandb_run.finish(0 if self.final else 1)  # 1: W&B shows the run as failed
        except BaseException as e:
            self.give_up(e)
        if not self.child:
            self.report(f"{self.new_lines} lines sent")
        os._exit(0)  # wandb's exit hooks wait 10 s for a server that stalls, offline too

    def connect(self):
        """Starts or resumes the run at W&B. Raises what wandb raises."""
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(null, stream)  # discards what wandb prints
        import requests
        import wandb
        sys.argv = self.run["command"] or sys.argv  # W&B shows it as the run's command
        self.limit(CONNECT_SECONDS)
        if self.mode == "online":
            server = wandb.setup().settings.base_url
            try:  # wandb's own check gives up late; auth: nothing secret is sent, so any certificate will do
                requests.head(server, timeout=5, verify=False, auth=lambda request: request)
            except requests.RequestException:
                raise ConnectionError(f"no answer from {server}") from None
            wandb.login()  # raises without a valid key; does not ask for one where the output is discarded
        settings = wandb.Settings(
            silent=True, console="off", program=sys.argv[0],
            x_disable_stats=not self.child)  # by hand this machine's load has nothing to do with the run
        options = {key: self.run[key] for key in ("id", "project", "name", "config")}
        run = wandb.init(**options, mode=self.mode, dir=self.out_dir, resume="allow", settings=settings)
        self.wandb_run = run
        self.limit(0)
        run.define_metric("*", step_metric="step")  # wandb's own step cannot go back, as a resume does
        write_run(self.out_dir, self.run)
        if self.mode == "online":
            self.report(run.url)
        else:
            reason = f" ({self.offline_reason})" if self.offline_reason else ""
            self.report(f"offline{reason}: wandb sync {os.path.dirname(run.dir)} uploads it")

    def send_all(self, position):
        """Sends the lines of metrics.jsonl from position on, with a look for new ones each second."""
        trainer = threading.Thread(target=sys.stdin.buffer.read, daemon=True)  # lives as long as train.py
        if self.child:
            trainer.start()
        else:
            self.report("following the run; Ctrl-C ends it before the final evaluation")
        while True:
            ended = not trainer.is_alive() if self.child else self.final  # ahead of the last look at the file
            if os.path.getsize(self.path) < position:
                position = self.skip_sent()
            lines, position = read_lines(self.path, position)
            for line in lines:
                self.limit(self.seconds)
                self.send(line)
            self.limit(0)
            if lines:
                continue
            if ended:
                return
            if self.child:
                trainer.join(1)
            else:
                time.sleep(1)

    def send(self, line):
        """Sends one line, then counts it in wandb.json."""
        import wandb
        values = parse(line)
        if "eval/example" in values:
            values["eval/example"] = wandb.Html(f"<pre>{html.escape(values['eval/example'])}</pre>")
        if values:
            self.wandb_run.log(values)
        self.final = "final" in values
        if self.final:
            metrics = {k: v for k, v in values.items() if k.startswith("eval/") and k != "eval/example"}
            self.wandb_run.summary.update({k.replace("eval/", "final/"): v for k, v in metrics.items()})
        self.new_lines += 1
        self.run["sent"] += 1
        write_run(self.out_dir, self.run)

    def skip_sent(self):
        """Returns the position after the lines sent before. A resume may have cut off some of them."""
        lines, position = read_lines(self.path, 0, self.run["sent"])
        self.run["sent"] = len(lines)
        self.final = bool(lines) and "final" in parse(lines[-1])
        return position

    def limit(self, seconds):
        """Gives up after so many seconds unless called again before; 0: no limit, as always on Windows."""
        if hasattr(signal, "SIGALRM"):
            error = TimeoutError(f"no answer within {seconds} s")
            signal.signal(signal.SIGALRM, lambda *_: self.give_up(error))
            signal.alarm(seconds)

    def give_up(self, error):
        """Ends this process with a line that says why. A child that cannot connect starts again, offline."""
        self.limit(0)
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".rstrip(": ")
        if not self.child:
            self.report(f"stopped after {self.new_lines} lines ({reason}); the same command sends the rest")
        elif self.mode != "online" or self.wandb_run:
            self.report(f"off ({reason}); metrics.jsonl has it all")
        else:  # as a new program: after a failure wandb can hang in its offline mode too
            os.dup2(self.stdout, 1)
            os.execve(sys.executable, [*sys.orig_argv, f"{CHILD}={reason}"], self.environment)
        os._exit(1)

    def report(self, text):
        """Writes a line for people to stdout and, as train.py's child, to the run's log."""
        line = f"W&B: {' '.join(text.split())}\n".encode()
        log = os.path.join(self.out_dir, "log.txt")
        with contextlib.suppress(OSError):  # the trainer may be gone, or the disk full
            if self.child and os.path.exists(log):
                with open(log, "ab", buffering=0) as f:
                    f.write(line)
            os.write(self.stdout, line)


def read_lines(path, position, count=None):
    """Returns (the complete lines from position on, at most count, the position after them)."""
    with open(path, "rb") as f:
        f.seek(position)
        lines = [line for line in islice(f, count) if line.endswith(b"\n")]
    return lines, position + sum(map(len, lines))


def parse(line):
    """The object in a line of metrics.jsonl; {} for a line that a crash of the machine has damaged."""
    try:
        values = json.loads(line)
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def read_run(out_dir):
    """The object in wandb.json, or a new one with the settings of the newest checkpoint. Raises UserError."""
    path = os.path.join(out_dir, "wandb.json")
    if os.path.exists(path):
        try:
            with open(path, encoding="utf-8") as f:
                run = json.load(f)
            keys = ("id", "project", "name", "mode", "config", "command")
            return {key: run[key] for key in keys} | {"sent": int(run["sent"])}
        except (ValueError, KeyError, TypeError) as e:
            hint = "remove it to send everything as a new run"
            raise UserError(f"{path}: damaged ({type(e).__name__}: {e}); {hint}") from None
    for path in sorted(glob.glob(os.path.join(glob.escape(out_dir), "ckpt_*.json")), reverse=True):
        try:
            with open(path, encoding="utf-8") as f:
                checkpoint = json.load(f)
            c = checkpoint["settings"]
            return {
                "id": secrets.token_hex(4), "project": c["wandb_project"], "command": [], "sent": 0,
                "name": c["wandb_run_name"] or os.path.basename(os.path.abspath(out_dir)),
                "mode": "offline" if c["wandb_mode"] == "offline" else "online",
                "config": c | {"data_sha256": checkpoint["data"]}}
        except (ValueError, KeyError, TypeError):
            continue
    raise UserError(f"{out_dir}: has neither wandb.json nor a ckpt_*.json with the settings of the run")


def write_run(out_dir, run):
    """Replaces wandb.json in one step, so that a kill leaves the old one or the new one."""
    path = os.path.join(out_dir, "wandb.json")
    with open(path + ".tmp", "w", encoding="utf-8") as f:
        json.dump(run, f)
    os.replace(path + ".tmp", path)


if __name__ == "__main__":
    command(lambda: main(sys.argv[1:]), __file__)
