"""Runs the scaling study: the files of config/study, one after the other. Complete runs are skipped.

    python scripts/sweep.py --list                                the runs
    python scripts/sweep.py --pattern=exp01 --dry_run             what would run: differences, size, command
    python scripts/sweep.py --prepare                             make the data sets that are missing
    python scripts/sweep.py exp01a exp02b_03 --epochs=1000        two runs, both with a setting of train.py
    python scripts/sweep.py config/mini.py                        all, this config file after that of each run
    python scripts/sweep.py --continue_on_failure --gcs_dir=gs://BUCKET/study

The settings below are sweep.py's own. All others are train.py's and apply to every run; the run's name is
added to out_dir and gcs_dir. Each run has its log beside its folder, RUN.log. results.json has the results of
all. On Ctrl-C or SIGTERM the current run saves and stops; the same command resumes it. The exit code is 0 if
all runs are complete, 1 if one failed, and 3 if the sweep was stopped.

Several sweeps at a time share the runs of a folder: what one has in progress the others leave to it, and
take over if it dies. On a slice of several hosts a sweep runs on each of them and needs gcs_dir: by what the
bucket contains all hosts skip the same runs.
"""
import difflib
import fnmatch
import functools
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
from configurator import (  # noqa: E402; before torch
    UserError, command, configure, read_settings, run_file, split_flags)
import torch  # noqa: E402

import prepare_sudoku  # noqa: E402
import train  # noqa: E402
from data import Bucket, lock  # noqa: E402
from model import TRM, TRMConfig  # noqa: E402

# which runs; names without a dash select single ones
pattern = ""  # runs whose file name starts so, with * and ? as in a shell; without it and names: all 67
retries = 2  # how often a run that dies is resumed; wrong input is not retried
continue_on_failure = False  # continue with the next run if one fails
# instead of running them
list = False  # print the names and what each run asks
dry_run = False  # print what would run
prepare = False  # make the data sets that are missing
# ---

STUDY = os.path.join(ROOT, "config", "study")
BASELINE = os.path.join(ROOT, "config", "baseline.py")
# Settings that do not change a result.
LABELS = ("data_prepare", "out_dir", "gcs_dir", "wandb_log", "wandb_project", "wandb_run_name")


def main(argv):
    """Separates sweep.py's flags from train.py's, and does what they ask for."""
    if "--pattern" in argv[:-1]:  # its value may follow it
        i = argv.index("--pattern")
        argv = argv[:i] + [f"--pattern={argv[i + 1]}"] + argv[i + 2:]
    own, rest = split_flags(__file__, argv)
    s = configure(__file__, own)
    if s.retries < 0:
        raise UserError(f"retries must be 0 or more, not {s.retries}")
    flags = [a for a in rest if a.startswith("-")]
    configs = [a for a in rest if a.endswith(".py") and a not in flags]
    paths = select_files([a for a in rest if a not in flags + configs], s.pattern)
    runs = [StudyRun(path, configs + flags) for path in paths]
    if s.list:
        question = ""
        for run in runs:
            if question_of(run.path) != question:
                question = question_of(run.path)
                print(question)
            print(f"  {os.path.basename(run.path)[:-3]:22}{differences(run)}")
        print(f"{len(runs)} runs")
        return
    if s.dry_run:
        for run in runs:
            describe(run)
        flop = sum(run.flop_from(0) for run in runs)
        print(f"{len(runs)} runs, {sum(run.steps for run in runs):,} steps, {flop:.3g} FLOP")
    elif s.prepare:
        make_datasets(runs)
    else:
        code = Sweep(runs, s.retries, s.continue_on_failure).run()
        if code:
            sys.exit(code)


def select_files(names, pattern):
    """Files of config/study in the study's order. Raises UserError if a name or the pattern matches none."""
    def order(name):
        return name.startswith("contrib"), name.partition("_")[0], len(name), name  # 250 before 1000

    files = sorted((name[:-3] for name in os.listdir(STUDY) if name.endswith(".py")), key=order)
    for name in set(names) - set(files):
        close = difflib.get_close_matches(name, files, 1, 0.3)
        hint = f"; the closest is {close[0]}" if close else ""
        raise UserError(f"{name}: no such run in config/study{hint}")
    if names or pattern:
        matches = fnmatch.filter(files, pattern + "*") if pattern else []
        files = [name for name in files if name in names or name in matches]
    if not files:
        raise UserError(f"--pattern={pattern}: no run's name starts so; --list prints them")
    return [os.path.join(STUDY, name + ".py") for name in files]


def question_of(path):
    """The comment of a file of the study."""
    with open(path, encoding="utf-8") as f:
        return next(line[2:].strip() for line in f if line.startswith("# "))


def differences(run):
    """How a run differs from the baseline with the same config files and flags."""
    baseline = vars(configure(train.__file__, [BASELINE, *run.extra]))
    found = [f"{k}={v}" for k, v in vars(run.c).items() if v != baseline[k] and k not in LABELS]
    return " ".join(found) or "the baseline"


def describe(run):
    """Prints how a run differs from the baseline, its size, its data set and its command."""
    c = run.c
    missing = "" if has_dataset(c.data_path) else f"; missing: python {c.data_prepare}"
    print(f"{run.name}: {question_of(run.path)}\n"
          f"  differs from the baseline in  {differences(run)}\n"
          f"  trains                        {run.steps:,} steps of {c.global_batch_size:,} sequences, "
          f"{run.parameters:,} parameters, {run.flop_from(0):.2g} FLOP\n"
          f"  data set                      {c.data_path}, {run.puzzles:,.0f} puzzles{missing}\n"
          f"  W&B                           {wandb_of(run)}\n"
          f"  command                       {shlex.join(['python', *run.command])}")


def wandb_of(run):
    """Where a run logs, in words."""
    if not run.c.wandb_log:
        return "off"
    return f"{run.c.wandb_project}; --wandb_log=False switches it off"


def make_datasets(runs):
    """Makes the data sets that are missing. Raises UserError if one fails."""
    missing = {run.c.data_path: run.c.data_prepare for run in runs if not has_dataset(run.c.data_path)}
    for i, (path, script) in enumerate(missing.items(), 1):
        print(f"[{i}/{len(missing)}] {path}: python {script}", flush=True)
        failed = subprocess.run([sys.executable, *shlex.split(script)]).returncode
        if failed or not os.path.exists(path):
            raise UserError(f"{path} was not made, see above: python {script}")
    print(f"data sets: {len({run.c.data_path for run in runs})}, made now: {len(missing)}")


class Sweep:
    """The runs in their order, one at a time."""

    def __init__(self, runs, retries, continue_on_failure):
        self.runs = runs
        self.retries = retries
        self.continue_on_failure = continue_on_failure
        self.results_path = os.path.join(os.path.dirname(runs[0].c.out_dir), "results.json")
        self.results = {}  # by the runs' names, those of earlier sweeps too
        self.read_results()
        # FLOP of the incomplete runs, before anything runs, so that all hosts run the same ones
        self.todo = {run.name: run.flop_from(run.step()) for run in runs if not run.is_complete()}
        self.began = time.monotonic()
        self.process = None
        self.seconds = 0.0  # that train.py took for the current run
        self.stop_requested = False

    def run(self):
        """Runs all; returns the exit code."""
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number and signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self.on_signal)
        if self.todo:
            print(f"W&B: {wandb_of(self.runs[0])}", flush=True)
        queue = [(run, False) for run in self.runs]
        while queue and not self.stop_requested:
            run, wait = queue.pop(0)
            self.seconds = 0.0
            status, error = "complete", ""
            if run.name not in self.todo:
                print(f"{self.label(run)}: complete, skipped", flush=True)
            else:
                print(f"{self.label(run)}: step {run.step()} of {run.steps}, log in {run.log}", flush=True)
                status, error = self.train(run, wait)
                reason = f": {error}" if error else ""
                print(f"  {status}{reason}, {train.duration(self.seconds)}", flush=True)
            if status == "elsewhere":
                queue.append((run, True))
                continue
            self.record(run, status, error)
            self.stop_requested = self.stop_requested or status == "stopped"
            if self.stop_requested or status == "failed" and not self.continue_on_failure:
                break
        complete = self.print_table()
        if complete == len(self.runs):
            return 0
        return 3 if self.stop_requested else 1

    def label(self, run):
        return f"[{self.runs.index(run) + 1}/{len(self.runs)}] {run.name}"

    def train(self, run, wait):
        """Runs train.py to its end, again if it dies.

        wait: whether to wait for another sweep that has the run in progress. Returns complete, stopped,
        failed or elsewhere, and the error.
        """
        os.makedirs(os.path.dirname(run.log) or ".", exist_ok=True)
        with open(run.log, "a", encoding="utf-8") as log:
            while not self.has_lock(log):
                if not wait:
                    return "elsewhere", "another sweep has it in progress"
                if self.stop_requested:
                    return "stopped", ""
                time.sleep(1)
            if run.is_complete():
                return "complete", ""
            for attempt in range(self.retries + 1):
                print("$", shlex.join(["python", *run.command]), file=log, flush=True)
                code = self.run_process(run, log)
                if code == 0:
                    return "complete", ""
                if code == 3 or self.stop_requested:
                    return "stopped", ""
                error = last_line(run.log)
                if code < 0:
                    error = f"killed by {signal.Signals(-code).name} after {error!r}"
                if code == 2:
                    break
                if attempt < self.retries:
                    print(f"  died: {error}; resuming from its last checkpoint", flush=True)
            return "failed", error

    def has_lock(self, log):
        """Takes the lock of a run's log. train.py inherits it, and may outlive a sweep that is killed."""
        try:
            lock(log, wait=False)
        except BlockingIOError:
            return False
        return True

    def run_process(self, run, log):
        """Runs train.py once and returns its exit code. Prints progress and the time left every minute."""
        # In a process group of its own, so that Ctrl-C reaches it only once, from on_signal.
        self.process = subprocess.Popen([sys.executable, *run.command], stdout=log, stderr=log,
                                        stdin=subprocess.DEVNULL, preexec_fn=getattr(os, "setpgrp", None))
        if self.stop_requested:  # since there was no process to tell
            self.process.terminate()
        began = printed = time.monotonic()
        while self.process.poll() is None:
            try:
                self.process.wait(1)
            except subprocess.TimeoutExpired:
                if time.monotonic() > printed + 60:
                    printed = time.monotonic()
                    print(f"  {last_line(run.log)} | sweep {self.eta()}", flush=True)
        self.seconds += time.monotonic() - began
        code = self.process.returncode
        self.process = None
        return code

    def on_signal(self, number, _):
        """Asks the run to save and stop. A second signal kills it."""
        action = "the run saves and stops; a second one kills it"
        if self.stop_requested:
            action = "killing the run"
        print(f"{signal.Signals(number).name}: {action}", file=sys.stderr, flush=True)
        self.stop_requested = True
        if self.process:
            self.process.terminate()  # not SIGINT, which processes that a shell starts with & ignore

    def eta(self):
        """The time left to the sweep, by the FLOP done so far, by this process and others."""
        left = sum(run.flop_from(run.step()) for run in self.runs
                   if run.name in self.todo and not run.is_complete())
        done = sum(self.todo.values()) - left
        if done <= 0:
            return "eta ?"
        return f"eta {train.duration(left / done * (time.monotonic() - self.began))}"

    def read_results(self):
        """Takes over results.json, to which another sweep may have written."""
        if os.path.exists(self.results_path):
            with open(self.results_path, encoding="utf-8") as f:
                self.results |= {result["run"]: result for result in json.load(f)}

    def record(self, run, status, error):
        """Adds a run's result to results.json, which other sweeps write too."""
        os.makedirs(os.path.dirname(self.results_path) or ".", exist_ok=True)
        with open(self.results_path + ".lock", "w") as lock_file:
            lock(lock_file)
            self.read_results()
            earlier = self.results.get(run.name, {}).get("wall_seconds", 0.0)
            self.results[run.name] = run.result(status, earlier + self.seconds, error)
            with train.replacing(self.results_path) as f:
                f.write(json.dumps([self.results[name] for name in sorted(self.results)], indent=1).encode())

    def print_table(self):
        """Prints the results; returns how many runs are complete."""
        print(f"\n{'run':32}{'status':>12}{'steps':>16}{'best':>9}{'last':>9}{'trained':>10}"
              f"{'examples/s':>12}")
        results = [self.results.get(run.name) or run.result("not started", 0.0, "") for run in self.runs]
        for r in results:
            best, last = (as_text(r[f"{which}_exact_accuracy"], ".4f") for which in ("best", "last"))
            trained = train.duration(r["train_seconds"] or 0)
            rate = as_text(r["examples_per_sec"], ",.1f")
            print(f"{r['run']:32}{r['status']:>12}{r['steps']:>8,}/{r['total_steps']:<7,}{best:>9}{last:>9}"
                  f"{trained:>10}{rate:>12}")
            if r["error"]:
                print(f"  {r['error']}")
        complete = sum(r["status"] == "complete" for r in results)
        print(f"{complete} of {len(results)} complete; {self.results_path}")
        return complete


class StudyRun:
    """One run: its settings, command, steps and parameters, and its progress so far."""

    def __init__(self, path, extra):
        """extra: config files and flags after the study's file."""
        self.path, self.extra = path, extra
        self.name = run_file(path, defaults(), defaults())["wandb_run_name"]
        self.c = c = configure(train.__file__, [path, *extra])
        self.command = [os.path.relpath(train.__file__), os.path.relpath(path)]
        for arg in extra:
            name = arg.lstrip("-").partition("=")[0]
            if arg.startswith("-") and name in ("out_dir", "gcs_dir"):
                setattr(c, name, f"{arg.partition('=')[2].rstrip('/')}/{self.name}")
                arg = f"--{name}={getattr(c, name)}"
            self.command.append(arg)
        self.command.append("--init_from=auto")
        train.check_settings(c)
        self.log = c.out_dir + ".log"
        seq_len, vocab_size, self.puzzles = dataset_sizes(c.data_path, c.data_prepare)
        self.steps = train.count_steps(c, self.puzzles)
        try:
            with torch.device("meta"):
                self.model = TRM(TRMConfig.of(c, seq_len=seq_len, vocab_size=vocab_size))
        except ValueError as e:
            raise UserError(f"{self.name}: {e}") from None
        self.parameters = sum(p.numel() for p in self.model.parameters())

    def flop_from(self, step):
        """FLOP of the training from step on."""
        stages = train.stages(self.c, self.puzzles)
        ends = [*stages, self.steps][1:]
        flop = 0
        for (start, cycles), end in zip(stages.items(), ends):
            steps = max(0, min(end, self.steps) - max(start, step))
            flop += steps * self.c.global_batch_size * self.model.flops_per_example(cycles)[1]
        return flop

    def is_complete(self):
        """Whether it has its final evaluation. A bucket alone decides, so that all hosts agree."""
        rows = self.bucket_rows if self.c.gcs_dir else self.rows()
        return any("final" in row and row["step"] == self.steps for row in rows)

    def step(self):
        return max((row["step"] for row in self.rows()), default=0)

    def rows(self):
        """metrics.jsonl of this machine, or else of the bucket."""
        return parse_rows(train.metrics_lines(self.c.out_dir)) or self.bucket_rows

    @functools.cached_property
    def bucket_rows(self):
        """metrics.jsonl in the bucket when the sweep began; [] without one."""
        if not self.c.gcs_dir:
            return []
        text = (Bucket(self.c.gcs_dir).read("metrics.jsonl") or b"").decode()
        return parse_rows(text.splitlines())

    def result(self, status, wall_seconds, error):
        """The run's entry of results.json. train_seconds leaves out compiling, evaluating and saving."""
        rows = self.rows()
        exact = [row["eval/exact_accuracy"] for row in rows if "eval/exact_accuracy" in row]
        surest = [row["eval/surest_accuracy"] for row in rows if "eval/surest_accuracy" in row]
        trained = [row for row in rows if "train/loss" in row]
        step = timed_steps = seconds = 0
        for row in trained:
            if "perf/step_time" in row:
                timed_steps += row["step"] - step
                seconds += (row["step"] - step) * row["perf/step_time"]
            step = row["step"]
        train_seconds = rate = None
        if timed_steps:
            step_time = seconds / timed_steps
            train_seconds = round(step * step_time, 1)
            rate = round(self.c.global_batch_size / step_time, 2)
        return dict(
            run=self.name, status=status, steps=step, total_steps=self.steps,
            best_exact_accuracy=max(exact, default=None),
            last_exact_accuracy=exact[-1] if exact else None,
            last_surest_accuracy=surest[-1] if surest else None,
            train_seconds=train_seconds,
            wall_seconds=round(wall_seconds, 1),
            examples_per_sec=rate,
            error=error)


@functools.lru_cache(maxsize=None)
def defaults():
    """The defaults of train.py's settings."""
    return {name: default for name, (default, _, _) in read_settings(train.__file__).items()}


@functools.lru_cache(maxsize=None)
def dataset_sizes(path, data_prepare):
    """(cells, tokens, puzzles of an epoch) of a data set, or of the one that data_prepare would make."""
    text = None
    if path.startswith("gs://"):
        text = Bucket(path).read("train/dataset.json")
    elif os.path.exists(os.path.join(path, "train", "dataset.json")):
        with open(os.path.join(path, "train", "dataset.json"), "rb") as f:
            text = f.read()
    if text:
        try:
            metadata = json.loads(text)
            puzzles = metadata["total_groups"] * metadata["mean_puzzle_examples"]
            return metadata["seq_len"], metadata["vocab_size"], puzzles
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}: train/dataset.json is damaged: build the data set again") from None
    script, *flags = shlex.split(data_prepare) or [""]
    if script != "prepare_sudoku.py":
        raise UserError(f"{path}: no such data set")
    s = prepare_sudoku.complete(configure(prepare_sudoku.__file__, flags))
    return s.size ** 2, s.size + 2, s.num_train if s.source == "generate" else s.subsample_size


def has_dataset(path):
    return path.startswith("gs://") or os.path.exists(path)


def parse_rows(lines):
    """Lines of metrics.jsonl as dicts, without those that a crash damaged."""
    return [json.loads(line) for line in lines if train.line_step(line) < math.inf]


def last_line(path):
    """The last line of a text file that is not empty."""
    with open(path, "rb") as f:
        f.seek(max(0, os.path.getsize(path) - 16384))
        lines = f.read().decode(errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.strip()), "")


def as_text(value, form):
    return "-" if value is None else format(value, form)


if __name__ == "__main__":
    command(lambda: main(sys.argv[1:]), __file__)
