"""Runs the scaling study: the files of config/study one after the other, each skipped, resumed or started, as what it left tells.

    python scripts/sweep.py --list                                what there is
    python scripts/sweep.py --pattern=exp01 --dry_run             what would run: differences, steps, parameters, data set, command
    python scripts/sweep.py --prepare                             makes the data sets that are missing
    python scripts/sweep.py exp01a exp02b_03 --epochs=1000        two runs, both with a setting of train.py
    python scripts/sweep.py --continue_on_failure --gcs_dir=gs://BUCKET/study

Settings below are sweep.py's own; all others are train.py's and hold for every run, out_dir and gcs_dir with the run's name added.
Beside the runs lie a log of each, RUN.log, and results.json. Ctrl-C and SIGTERM let the current run save; the same command goes on.
On a slice of several hosts it runs on each of them and needs gcs_dir: by what the bucket holds all hosts skip the same runs.
"""
import difflib
import fcntl
import fnmatch
import functools
import glob
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time

import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
import configurator  # noqa: E402
import prepare_sudoku  # noqa: E402
import train  # noqa: E402
from configurator import UserError  # noqa: E402
from data import Bucket  # noqa: E402
from model import TRM, TRMConfig  # noqa: E402

# what runs
pattern = ""  # runs whose file's name begins so; * and ? as in a shell. Names without a dash choose single ones; neither: all 67
retries = 2  # a run that dies is resumed so often; one that names wrong input is not
continue_on_failure = False  # go on with the next run after one that failed
# instead
list = False  # print the names and what each asks
dry_run = False  # print what would run
prepare = False  # make the data sets that are missing
# ---

STUDY = os.path.join(ROOT, "config", "study")
BASELINE = os.path.join(ROOT, "config", "baseline.py")
NAMES = ("data_prepare", "out_dir", "gcs_dir", "wandb_log", "wandb_project", "wandb_run_name")  # differ without changing a result
SAID = "with --init_from=resume"  # in train.py's last lines where it stopped because it was asked to


def chosen(names, wanted):
    """Files of config/study in the order of the study; raises UserError where a name or the pattern fits none."""
    order = lambda name: (name.startswith("contrib"), name.partition("_")[0], len(name), name)  # 250 before 1000
    files = sorted((name[:-3] for name in os.listdir(STUDY) if name.endswith(".py")), key=order)
    for name in set(names) - set(files):
        close = difflib.get_close_matches(name, files, 1, 0.3)
        raise UserError(f"{name}: no such run in config/study" + (f"; the closest is {close[0]}" if close else ""))
    found = [f for f in files if f in names or wanted and fnmatch.fnmatch(f, wanted + "*") or not names and not wanted]
    if not found:
        raise UserError(f"--pattern={wanted}: no run's name begins so; --list prints them")
    return [os.path.join(STUDY, f + ".py") for f in found]


def asks(path):
    """The comment of a file of the study."""
    with open(path, encoding="utf-8") as f:
        return next(line[2:].strip() for line in f if line.startswith("# "))


@functools.lru_cache(maxsize=None)
def defaults():
    return {name: default for name, (default, _, _) in configurator.read_settings(train.__file__).items()}


@functools.lru_cache(maxsize=None)
def dataset(path, prepare):
    """(cells, tokens, puzzles of an epoch) of a data set, or of the one that the command `prepare` would make."""
    found = None
    if path.startswith("gs://"):
        found = Bucket(path).read("train/dataset.json")
    elif os.path.exists(os.path.join(path, "train", "dataset.json")):
        with open(os.path.join(path, "train", "dataset.json"), "rb") as f:
            found = f.read()
    if found:
        about = json.loads(found)
        return about["seq_len"], about["vocab_size"], about["total_groups"] * about["mean_puzzle_examples"]
    script, *flags = shlex.split(prepare) or [""]
    if script != "prepare_sudoku.py":
        raise UserError(f"{path}: no such data set")
    s = prepare_sudoku.complete(configurator.configure(prepare_sudoku.__file__, flags))
    return s.size ** 2, s.size + 2, s.num_train if s.source == "generate" else s.subsample_size


def parsed(lines):
    """Lines of metrics.jsonl as dicts, without what a crash cut off."""
    return [json.loads(line) for line in lines if train.line_step(line) < math.inf]


def last_lines(path, n):
    """The last n lines of a text file that are not empty."""
    with open(path, "rb") as f:
        f.seek(max(0, os.path.getsize(path) - 16384))
        return [line for line in f.read().decode(errors="replace").splitlines() if line.strip()][-n:]


class Plan:
    """One run: its settings, command, steps and parameters, and what it has left so far."""

    def __init__(self, path, flags):
        self.path, self.name = path, configurator.run_file(path, defaults(), defaults())["wandb_run_name"]
        self.c = c = configurator.configure(train.__file__, [path, *flags])
        self.command = [os.path.relpath(train.__file__), os.path.relpath(path), *flags]
        for k in ("out_dir", "gcs_dir"):
            if getattr(c, k) and any(flag.lstrip("-").startswith(k + "=") for flag in flags):
                setattr(c, k, f"{getattr(c, k).rstrip('/')}/{self.name}")
                self.command.append(f"--{k}={getattr(c, k)}")
        self.command.append("--init_from=auto")
        train.check_settings(c)
        self.log, self.in_bucket = c.out_dir + ".log", []
        seq_len, vocab_size, self.puzzles = dataset(c.data_path, c.data_prepare)
        self.steps = c.max_steps or int(c.epochs * self.puzzles / c.global_batch_size)  # as train.py counts them
        with torch.device("meta"):
            self.model = TRM(TRMConfig.of(c, seq_len=seq_len, vocab_size=vocab_size))
        self.parameters = sum(p.numel() for p in self.model.parameters())

    def work(self, step):
        """FLOP of the training from step on."""
        plan, last = train.stages(self.c, self.puzzles), max(step, 1)
        flops = {cycles: self.model.flops_per_example(cycles)[1] for cycles in plan.values()}
        return train.steps_left(plan, flops, last, self.steps) * flops[train.depth(plan, last - 1)] * self.c.global_batch_size

    def rows(self):
        """metrics.jsonl, of this machine or else as the bucket had it when the sweep began."""
        return parsed(train.metrics_lines(self.c.out_dir)) or self.in_bucket

    def step(self):
        return max((row["step"] for row in self.rows()), default=0)

    def complete(self):
        """Whether it has its evaluation at the end: by the bucket alone where there is one, so that all hosts say the same."""
        if self.c.gcs_dir:
            self.in_bucket = parsed((Bucket(self.c.gcs_dir).read("metrics.jsonl") or b"").decode().splitlines())
        return any("final" in row and row["step"] == self.steps for row in (self.in_bucket if self.c.gcs_dir else self.rows()))

    def result(self, status, wall, error):
        """What results.json says of it. train_seconds is from its log: without compiling, evaluating and saving."""
        rows = self.rows()
        found = [row["eval/exact_accuracy"] for row in rows if "eval/exact_accuracy" in row]
        trained = [row for row in rows if "train/loss" in row]
        steps = [row["step"] for row in trained]
        spans = [(row["step"] - before, row["perf/step_time"]) for before, row in zip([0] + steps, trained) if "perf/step_time" in row]
        step_time = sum(n * t for n, t in spans) / sum(n for n, _ in spans) if spans else None
        return dict(run=self.name, status=status, steps=steps[-1] if steps else 0, total_steps=self.steps,
                    best_exact_accuracy=max(found, default=None), last_exact_accuracy=found[-1] if found else None,
                    train_seconds=step_time and round(steps[-1] * step_time, 1), wall_seconds=round(wall, 1),
                    examples_per_sec=step_time and round(self.c.global_batch_size / step_time, 2), error=error)


def describe(run):
    """Prints a run as it would be made."""
    base, c = configurator.run_file(BASELINE, defaults(), defaults()), run.c
    differs = " ".join(f"{k}={v}" for k, v in vars(c).items() if v != base[k] and k not in NAMES) or "nothing"
    missing = "" if os.path.exists(c.data_path) or c.data_path.startswith("gs://") else f"; missing: python {c.data_prepare}"
    print(f"{run.name}: {asks(run.path)}\n"
          f"  differs from the baseline in  {differs}\n"
          f"  trains                        {run.steps:,} steps of {c.global_batch_size:,} sequences, {run.parameters:,} parameters, "
          f"{run.work(0):.2g} FLOP\n"
          f"  data set                      {c.data_path}, {run.puzzles:,.0f} puzzles{missing}\n"
          f"  W&B                           {c.wandb_project if c.wandb_log else 'off'}\n"
          f"  command                       {shlex.join(['python', *run.command])}")


def make_data(runs):
    """Makes the data sets that are missing."""
    missing = {run.c.data_path: run.c.data_prepare for run in runs if not run.c.data_path.startswith("gs://") and not os.path.exists(run.c.data_path)}
    for i, (path, command) in enumerate(missing.items(), 1):
        print(f"[{i}/{len(missing)}] {path}: python {command}", flush=True)
        if subprocess.run([sys.executable, *shlex.split(command)]).returncode or not os.path.exists(path):
            raise UserError(f"{path} was not made, see above: python {command}")
    print(f"data sets: {len({run.c.data_path for run in runs})}, made just now: {len(missing)}")


class Sweep:
    """The runs in their order, one at a time."""

    def __init__(self, runs, retries, continue_on_failure):
        self.runs, self.retries, self.continue_on_failure, self.process, self.asked = runs, retries, continue_on_failure, None, False
        self.path = os.path.join(os.path.dirname(runs[0].c.out_dir), "results.json")
        self.results = {}  # those of earlier sweeps too
        if os.path.exists(self.path):
            with open(self.path, encoding="utf-8") as f:
                self.results = {result["run"]: result for result in json.load(f)}
        self.todo = {run.name: run.work(run.step()) for run in runs if not run.complete()}  # before anything runs: all hosts see the same
        self.begun, self.worked = time.monotonic(), 0.0  # FLOP of this sweep
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                signal.signal(number, self.stop)

    def stop(self, number, _):
        """A signal: the run saves and stops; at the second one it is killed."""
        what = "killing the run" if self.asked else "the run saves and stops; a second one kills it"
        print(f"{signal.Signals(number).name}: {what}", file=sys.stderr, flush=True)
        self.asked = True
        if self.process:
            self.process.send_signal(signal.SIGINT)

    def train(self, run):
        """Runs train.py to its end: ("complete", "stopped" or "failed", the last line of its log)."""
        os.makedirs(os.path.dirname(run.log) or ".", exist_ok=True)
        with open(run.log, "a", encoding="utf-8") as log:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # train.py inherits it, and holds it where a sweep has died
            except BlockingIOError:
                return "failed", f"{run.log} is held by another process: the run goes on there"
            for attempt in range(self.retries + 1):
                print("$", shlex.join(["python", *run.command]), file=log, flush=True)
                self.process = subprocess.Popen([sys.executable, *run.command], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                                                start_new_session=True)  # so that Ctrl-C reaches it once, from stop()
                if self.asked:  # while there was no process
                    self.process.send_signal(signal.SIGINT)
                code, self.process = self.wait(run), None
                logs = glob.glob(os.path.join(glob.escape(run.c.out_dir), "log*.txt"))  # of this host
                if self.asked or code == 0 and any(SAID in line for path in logs for line in last_lines(path, 3)):
                    return "stopped", ""
                if code == 0:
                    return "complete", ""
                error = last_lines(run.log, 1)[0] + (f" ({signal.Signals(-code).name})" if code < 0 else "")
                if code == 2 or attempt == self.retries:
                    return "failed", error
                print(f"  died: {error}; trying again from its last checkpoint", flush=True)

    def wait(self, run):
        """The exit code of the process at its end; every minute a line with its progress and the time left to the sweep."""
        shown = time.monotonic()
        while self.process.poll() is None:
            try:
                self.process.wait(1)
            except subprocess.TimeoutExpired:
                if time.monotonic() > shown + 60:
                    shown = time.monotonic()
                    print(f"  {' '.join(last_lines(run.log, 1))} | sweep {self.eta(run)}", flush=True)
        return self.process.returncode

    def eta(self, run):
        """By the arithmetic that the sweep's runs have done so far."""
        left = run.work(run.step())
        worked = self.worked + self.todo[run.name] - left
        left += sum(self.todo.get(r.name, 0.0) for r in self.runs[self.runs.index(run) + 1:])
        return f"eta {train.duration(left / worked * (time.monotonic() - self.begun))}" if worked > 0 else "eta ?"

    def run(self):
        """All of them; returns whether all are complete."""
        for i, run in enumerate(self.runs, 1):
            began, status, error = time.monotonic(), "complete", ""
            what = f"step {run.step()} of {run.steps}, log in {run.log}" if run.name in self.todo else "complete, skipped"
            print(f"[{i}/{len(self.runs)}] {run.name}: {what}", flush=True)
            if run.name in self.todo:
                status, error = self.train(run)
                print(f"  {status}{': ' + error if error else ''}, {train.duration(time.monotonic() - began)}", flush=True)
                self.worked += self.todo[run.name] if status == "complete" else 0.0
            wall = self.results.get(run.name, {}).get("wall_seconds", 0.0) + time.monotonic() - began
            self.results[run.name] = run.result(status, wall, error)
            os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
            text = json.dumps([self.results[name] for name in sorted(self.results)], indent=1)
            train.write_atomically(self.path, lambda f: f.write(text.encode()))
            if self.asked or status == "stopped" or status == "failed" and not self.continue_on_failure:
                break
        return self.table()

    def table(self):
        """Prints the results; returns whether all runs are complete."""
        show = lambda value, form: format(value, form) if value is not None else "-"
        print(f"\n{'run':32}{'status':>12}{'steps':>16}{'best':>9}{'last':>9}{'trained':>10}{'examples/s':>12}")
        results = [self.results.get(run.name) or run.result("not started", 0.0, "") for run in self.runs]
        for r in results:
            print(f"{r['run']:32}{r['status']:>12}{r['steps']:>8,}/{r['total_steps']:<7,}{show(r['best_exact_accuracy'], '.4f'):>9}"
                  f"{show(r['last_exact_accuracy'], '.4f'):>9}{train.duration(r['train_seconds'] or 0):>10}{show(r['examples_per_sec'], ',.1f'):>12}"
                  + (f"\n  {r['error']}" if r["error"] else ""))
        complete = sum(r["status"] == "complete" for r in results)
        print(f"{complete} of {len(results)} complete; {self.path}")
        return complete == len(results)


def main(argv):
    """Sorts the flags into sweep.py's and train.py's, and does what they ask for."""
    if "--pattern" in argv[:-1]:
        i = argv.index("--pattern")
        argv = argv[:i] + ["=".join(argv[i:i + 2])] + argv[i + 2:]
    own = configurator.read_settings(__file__)
    mine = [a for a in argv if a in ("-h", "--help") or a.startswith("-") and a.lstrip("-").partition("=")[0] in own]
    names, flags = [a for a in argv if not a.startswith("-")], [a for a in argv if a.startswith("-") and a not in mine]
    s = configurator.configure(__file__, mine)
    paths = chosen(names, s.pattern)
    if s.list:
        for path in paths:
            print(f"{os.path.basename(path)[:-3]:22}{asks(path)}")
        return print(f"{len(paths)} runs")
    runs = [Plan(path, flags) for path in paths]
    if s.dry_run:
        for run in runs:
            describe(run)
        return print(f"{len(runs)} runs, {sum(run.steps for run in runs):,} steps, {sum(run.work(0) for run in runs):.3g} FLOP")
    if s.prepare:
        return make_data(runs)
    if not Sweep(runs, s.retries, s.continue_on_failure).run():
        sys.exit(1)


if __name__ == "__main__":
    configurator.command(lambda: main(sys.argv[1:]), __file__)
