"""Sends to Weights & Biases what it does not have yet of a run's metrics.

    python scripts/wandb_follow.py out/sudoku

train.py starts it if wandb_log is set. By hand it works on any machine, during the run or later. The run's
id, project, name, config and command are in wandb.json; without it, they are made from a checkpoint.
"""
import glob
import json
import os
import secrets
import select
import signal
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from configurator import Output, UserError, command, split_arguments

from data import locked, parse_metrics, replacing

mode = ""  # online, or offline (files for `wandb sync`); empty: WANDB_MODE, or online
child = False  # set by train.py: follow the run until stdin ends
reason = "as asked"  # set by train.py: why the run is offline
SECONDS = 30  # to connect; then for new lines, and to finish, but not by hand


def main(argv):
    """Sends a run. Raises UserError."""
    s, folders, unknown = split_arguments(__file__, argv)
    if len(folders) != 1 or unknown:
        raise UserError(f"expected one OUT_DIR, not {' '.join(folders + unknown) or 'none'}; see --help")
    s.mode = s.mode or os.environ.get("WANDB_MODE") or "online"
    if s.mode not in ("online", "offline"):
        raise UserError(f"mode (or WANDB_MODE) must be online or offline, not {s.mode!r}")
    if not os.path.exists(os.path.join(folders[0], "metrics.jsonl")):
        raise UserError(f"{folders[0]}: no metrics.jsonl there; give the out_dir of a run")
    try:  # a child waits for that of a trainer that was killed
        with locked(os.path.join(folders[0], "wandb.json"), wait=s.child):
            Sender(folders[0], s).send()
    except BlockingIOError:
        raise UserError(f"{folders[0]}: another process is sending this run") from None


def read_run(out_dir):
    """The object in wandb.json, made from the newest checkpoint if missing. Raises UserError."""
    path = source = os.path.join(out_dir, "wandb.json")
    if not os.path.exists(path):
        source = max(glob.glob(os.path.join(glob.escape(out_dir), "ckpt_*.json")), default=path)
    try:
        with open(source, encoding="utf-8") as f:
            found = json.load(f)
        if source == path:
            return {key: found[key] for key in ("id", "project", "name", "config", "command")}
        c = found["settings"]
        run = dict(id=secrets.token_hex(4), project=c["wandb_project"], config=c, command=["train.py"])
        run["name"] = c["wandb_run_name"] or os.path.basename(os.path.abspath(out_dir))
    except (FileNotFoundError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"{source}: missing or damaged ({type(e).__name__}: {e})") from None
    with replacing(path) as f:
        f.write(json.dumps(run, indent=1).encode())
    return run


class Sender:
    """Sends one run. wandb can hang in login, init, log, finish and its exit hooks."""

    def __init__(self, out_dir, s):
        self.out_dir, self.s, self.run = out_dir, s, None  # run: wandb's
        self.about, self.environment = read_run(out_dir), dict(os.environ)  # before wandb changes it
        self.stdout = Output(os.fdopen(os.dup(1), "w", errors="backslashreplace"))
        self.log = Output(open(os.path.join(out_dir, "log.txt"), "a", encoding="utf-8"))

    def send(self):
        """Sends what there is, as a child until train.py ends, then ends this process."""
        signal.signal(signal.SIGALRM, lambda *_: self.give_up(TimeoutError("no answer in time")))
        if self.s.child:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # train.py decides when it ends
        try:
            self.connect()
            self.run.finish(self.send_rows())
        except BaseException as e:
            self.give_up(e)
        os._exit(0)  # wandb's exit hooks wait 10 s for a server that stalls, offline too

    def connect(self):
        """Starts or resumes the run at W&B. Raises what requests and wandb raise."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # discards what wandb prints
        os.dup2(1, 2)
        import requests
        import wandb
        sys.argv = self.about.pop("command")  # W&B shows it as the run's command
        signal.alarm(SECONDS)
        if self.s.mode == "online":
            server = wandb.setup().settings.base_url  # wandb's own check gives up late
            requests.head(server, timeout=5, verify=False, auth=lambda r: r)  # sends no password
            wandb.login()  # raises without a valid key
        # stats: the load of this machine, unless the run is elsewhere.
        settings = dict(console="off", program=sys.argv[0], x_disable_stats=not self.s.child)
        self.run = wandb.init(**self.about, resume="allow", settings=settings,
                              mode=self.s.mode, dir=self.out_dir)
        folder = os.path.dirname(self.run.dir)
        self.report(self.run.url or f"offline ({self.s.reason}): wandb sync {folder} uploads it")

    def send_rows(self):
        """Sends the lines of each step as one row; returns 0 if the run is complete, else 1."""
        row, position, ended = {"step": -1}, 0, False
        while not ended:
            signal.alarm(SECONDS * self.s.child)
            ended = not self.s.child or select.select([sys.stdin], [], [], 1)[0]  # its end of file
            with open(os.path.join(self.out_dir, "metrics.jsonl"), "rb") as f:
                f.seek(position)
                lines = [line for line in f if line.endswith(b"\n")]
            position += sum(map(len, lines))
            for values in parse_metrics(lines):
                if values["step"] > row["step"]:
                    self.send_row(row)
                    row = {}
                row |= values
        if "final" in row:  # else a resume may add to the row, and W&B takes a step once
            self.send_row(row)
        return int("final" not in row)

    def send_row(self, row):
        if "final" in row:
            self.run.summary.update({"final" + k[4:]: v for k, v in row.items() if k.startswith("eval/")})
        if row["step"] >= self.run.starting_step:  # W&B has the steps before
            self.run.log(row, step=row["step"])

    def give_up(self, error):
        """Ends this process with a line. A child that cannot connect starts again, offline."""
        signal.alarm(0)
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if self.s.child and self.s.mode == "online" and not self.run:
            os.dup2(self.stdout.fileno(), 1)
            again = [*sys.orig_argv, "--mode=offline", f"--reason={why}"]
            os.execve(sys.executable, again, self.environment)  # wandb may hang offline too
        self.report(f"stopped ({why}); scripts/wandb_follow.py {self.out_dir} sends the rest")
        os._exit(3 if isinstance(error, KeyboardInterrupt) else 1)

    def report(self, text):
        for stream in self.stdout, self.log:
            print("W&B:", text, file=stream, flush=True)


if __name__ == "__main__":
    command(lambda: main(sys.argv[1:]), __file__)
