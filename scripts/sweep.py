"""Runs the scaling study: the files of config/study, one after the other. Complete runs are skipped.

    python scripts/sweep.py --list                          the runs
    python scripts/sweep.py --pattern=exp01 --dry_run       what would run: differences, size, command
    python scripts/sweep.py --prepare                       makes the datasets that are missing
    python scripts/sweep.py exp01a exp02b_03 --epochs=1000  two runs, both with a setting of train.py
    python scripts/sweep.py config/mini.py                  all, with this config file after each run's
    python scripts/sweep.py --continue_on_failure --gcs_dir=gs://BUCKET/study
    python scripts/sweep.py --jobs=scripts/sky-tpu.yaml --gcs_dir=gs://BUCKET/study     on rented machines

The settings below are sweep.py's own. All others are train.py's and apply to every run; the run's name is
added to out_dir and gcs_dir. Each run has its log beside its folder, RUN.log; results.json has all results.
A folder that holds a run with other settings is left as it is and counts as a failure. Ctrl-C or SIGTERM
makes the current run save and stop; the same command resumes it. The exit code is 0 if all runs are
complete, 1 if one failed, and 3 if the sweep was stopped.

Several sweeps at a time share the runs of a folder: one leaves to the others what they have in progress, and
takes it over if they die. Between machines there is no such sharing: jobs leaves the queue to SkyPilot.
"""
import fcntl
import fnmatch
import functools
import itertools
import json
import os
import pathlib
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
import configurator  # before torch: see there
import torch
from configurator import TransientError, UserError, configure, read_settings, run_file, split_arguments

import prepare_sudoku
import train
from bucket import Bucket
from data import locked, parse_metrics, read_metrics, replacing

# which runs; names without a dash select single ones
pattern = ""  # runs whose file names start so, with * and ? as in a shell; "" without names: all 67
retries = 2  # how often a run that dies is resumed; wrong input is not retried
continue_on_failure = False  # continue with the next run if one fails
# instead of running them
list = False  # print the names and what each run asks
dry_run = False  # print what would run
prepare = False  # make the datasets that are missing
pull = False  # download metrics and logs from gcs_dir to out_dir, for report.py, and print the table
# on machines that SkyPilot rents, with gcs_dir
jobs = ""  # a SkyPilot file: print a managed job for each run that is not complete in the bucket
launch = False  # start these jobs and wait for them; those in SkyPilot's queue are not started again
max_jobs = 4  # at a time, with launch
# ---

PROGRESS_INTERVAL = 60  # seconds between two lines, or two looks at the queue
STUDY = os.path.join(ROOT, "config", "study")
BASELINE = os.path.join(ROOT, "config", "baseline.py")
SETTINGS = read_settings(train.__file__)
DEFAULTS = {name: default for name, (default, _, _) in SETTINGS.items()}
# Settings that do not change a result. The data is known by data_path.
NEUTRAL = {name for name, (_, _, group) in SETTINGS.items() if group in ("run", "logging")}
NEUTRAL -= {"checkpoint_interval"}  # sequences start afresh there
NEUTRAL |= {"data_prepare", "micro_batch_size", "eval_save_outputs", "eval_show_puzzle", "eval_only"}


def main(argv):
    """Separates sweep.py's arguments from train.py's, and does what they ask for."""
    s, names, extra = split_arguments(__file__, argv)
    if s.retries < 0:
        raise UserError(f"retries must be 0 or more, not {s.retries}")
    if s.max_jobs < 1:
        raise UserError(f"max_jobs must be 1 or more, not {s.max_jobs}")
    runs = [StudyRun(path, extra) for path in select_files(names, s.pattern)]
    if (s.jobs or s.pull) and runs[0].c.gcs_dir.count("/") < 4:
        raise UserError("--jobs and --pull need --gcs_dir=gs://BUCKET/FOLDER, the folder of all runs")
    baseline = vars(configure(train.__file__, [BASELINE, *extra]))
    if s.list:
        for question, group in itertools.groupby(runs, lambda run: run.question):
            print(question)
            for run in group:
                print(f"  {run.file:22}{changes(vars(run.c), baseline) or 'the baseline'}")
        print(f"{len(runs)} runs")
    elif s.dry_run:
        for run in runs:
            describe(run, baseline)
        flop = sum(run.flop() for run in runs)
        print(f"{len(runs)} runs, {sum(run.steps for run in runs):,} steps, {flop:.3g} FLOP")
    elif s.prepare:
        for run in runs:
            if not run.c.data_path.startswith("gs://"):
                train.make_dataset(run.c)
        print(f"datasets: {len({run.c.data_path for run in runs})}")
    else:
        sweep = Sweep(runs, s)
        sys.exit(sweep.pull() if s.pull else sweep.run_jobs() if s.jobs else sweep.run())


def select_files(names, pattern):
    """Files of config/study in the study's order. Raises UserError if a name or the pattern fits none."""
    files = sorted((path.stem for path in pathlib.Path(STUDY).glob("*.py")), key=lambda name: (
        name.startswith("contrib"), name.partition("_")[0], len(name), name))  # 250 before 1000
    for name in set(names) - set(files):
        raise UserError(f"{name}: no such run in config/study; --list prints all")
    if names or pattern:
        matches = fnmatch.filter(files, pattern + "*") if pattern else []
        files = [name for name in files if name in [*names, *matches]]
    if not files:
        raise UserError(f"--pattern={pattern}: no run's name starts so; --list prints all")
    return [os.path.join(STUDY, name + ".py") for name in files]


def changes(settings, others):
    """The settings that differ in others and can change a result, as text; both are dicts."""
    def differ(name):
        pair = settings[name], others[name]
        if name == "data_path":  # data/NAME is the copy of gs://bucket/NAME
            pair = [os.path.basename(path.rstrip("/")) for path in pair]
        return name not in NEUTRAL and pair[0] != pair[1]

    return " ".join(f"{name}={settings[name]}" for name in DEFAULTS if differ(name))


def describe(run, baseline):
    """Prints how a run differs from the baseline, its size, its dataset and its command."""
    c = run.c
    exists = c.data_path.startswith("gs://") or os.path.exists(c.data_path)
    missing = "" if exists else f"; missing: python {c.data_prepare}"
    print(f"{run.name}: {run.question}\n"
          f"  differs from the baseline in  {changes(vars(c), baseline) or 'nothing'}\n"
          f"  trains                        {run.steps:,} steps of {c.global_batch_size:,} sequences, "
          f"{run.parameters:,} parameters, {run.flop():.2g} FLOP\n"
          f"  dataset                       {c.data_path}, {run.puzzles:,.0f} puzzles{missing}\n"
          f"  command                       {shlex.join(['python', *run.command])}")


class Sweep:
    """The runs in their order, one at a time."""

    def __init__(self, runs, settings):
        self.runs, self.settings = runs, settings
        with ThreadPoolExecutor() as pool:
            [*pool.map(lambda run: run.read_bucket(), runs)]
        self.results_path = os.path.join(os.path.dirname(runs[0].c.out_dir), "results.json")
        self.results, self.process, self.stop_requested = {}, None, False  # results: {name: result}

    def run(self):
        """Runs all; returns the exit code."""
        self.flop_before, self.began, self.printed = self.flop_left(), time.monotonic(), 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self.on_signal)
        queue = [(run, False) for run in self.runs]
        while queue and not self.stop_requested:
            run, wait = queue.pop(0)
            label = f"[{self.runs.index(run) + 1}/{len(self.runs)}] {run.name}"
            status, error = run.state()
            if status == "incomplete":
                print(f"{label}: step {run.step()} of {run.steps}, log in {run.log}", flush=True)
                status, error = self.train(run, wait)
            print(f"{label}: {status}{error and ': ' + error}", flush=True)
            if status == "elsewhere":
                queue.append((run, True))
                continue
            if not run.conflict():
                self.record(run, status, error)
            self.stop_requested |= status == "stopped"
            if status == "failed" and not self.settings.continue_on_failure:
                break
        return self.print_table()

    def run_jobs(self):
        """Prints a job for each run that is not complete or, with launch, starts them. Returns the exit code.

        SkyPilot's queue alone knows what was started, so this can be stopped and started again.
        """
        waiting = {run.job_name(): run for run in self.runs if run.state()[0] == "incomplete"}
        jobs = {name: run.job(self.settings.jobs) for name, run in waiting.items()}
        if not self.settings.launch:
            print(*(shlex.join(["sky", "jobs", *job]) for job in jobs.values()), sep="\n")
            for run in self.runs:
                if run.state()[0] != "incomplete":
                    print(f"{run.name}: {': '.join(filter(None, run.state()))}", file=sys.stderr)
            return 0
        running = {}
        self.flop_before, self.began, self.printed = self.flop_left(), time.monotonic(), 0
        while True:
            try:
                queue = {job["job_name"] for job in queued_jobs()}
                running |= {name: waiting.pop(name) for name in queue & waiting.keys()}
                for name, run in [*running.items()]:
                    run.read_bucket()
                    if name not in queue:
                        print(f"{run.name}: {' '.join(running.pop(name).state())}", flush=True)
                for name in [*waiting][:max(0, self.settings.max_jobs - len(running))]:
                    print(f"{waiting[name].name}: starting the job {name}", flush=True)
                    run = waiting.pop(name)
                    sky(*jobs[name])
                    running[name] = run
            except TransientError as e:  # the next look at the queue may succeed
                print(f"  {e}", flush=True)
            if not (waiting or running):
                return self.print_table()
            self.show_progress(f"{len(running)} jobs in the queue, {len(waiting)} waiting")
            time.sleep(PROGRESS_INTERVAL)

    def pull(self):
        """Downloads what report.py reads, writes results.json and prints the table; returns the exit code."""
        with ThreadPoolExecutor() as pool:
            [*pool.map(StudyRun.pull, self.runs)]
        for run in self.runs:
            if not run.conflict():
                self.record(run, *run.state())
        return self.print_table()

    def train(self, run, wait):
        """Runs train.py to its end, again if it dies. Returns the status and the error.

        wait: whether to wait for another sweep that has the run in progress.
        """
        os.makedirs(os.path.dirname(run.log) or ".", exist_ok=True)
        with open(run.log, "a", encoding="utf-8") as log:
            while not self.stop_requested:
                try:  # train.py inherits it and may outlive a killed sweep
                    fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not wait:
                        return "elsewhere", "another sweep has it in progress"
                self.show_progress(last_line(run.log))
                time.sleep(1)
            else:
                return "stopped", ""
            status, error = run.state()  # another sweep may have run it meanwhile
            if status != "incomplete":
                return status, error
            for attempt in range(self.settings.retries + 1):
                print("$", shlex.join(["python", *run.command]), file=log, flush=True)
                # In its own process group, so that Ctrl-C reaches it only once, from on_signal.
                self.process = subprocess.Popen([sys.executable, *run.command], stdout=log, stderr=log,
                                                stdin=subprocess.DEVNULL, preexec_fn=os.setpgrp)
                if self.stop_requested:  # since there was no process to tell
                    self.process.terminate()
                while self.process.poll() is None:
                    self.show_progress(last_line(run.log))
                    time.sleep(0.1)
                code = self.process.returncode
                if code in (0, 3) or self.stop_requested:
                    return "stopped" if code else "complete", ""
                error = last_line(run.log)
                if code < 0:
                    error = f"killed by {signal.Signals(-code).name} after {error!r}"
                if code == 2:
                    break
                if attempt < self.settings.retries:
                    print(f"  died: {error}; resuming from its last checkpoint", flush=True)
            return "failed", error

    def flop_left(self):
        return sum(run.flop() * max(0, 1 - run.step() / run.steps) for run in self.runs)

    def show_progress(self, text):
        """Prints the text and the time left to the sweep, by FLOP, once a minute."""
        seconds = time.monotonic() - self.began
        if seconds >= self.printed + PROGRESS_INTERVAL:
            self.printed, left = seconds, self.flop_left()
            done = self.flop_before - left
            eta = train.duration(seconds * left / done) if done > 0 else "?"
            print(f"  {text} | sweep eta {eta}", flush=True)

    def on_signal(self, number, _):
        """Asks the run to save and stop. A second signal kills it."""
        name = signal.Signals(number).name
        print(f"{name}: the run saves and stops; a second one kills it", file=sys.stderr)
        self.stop_requested = True
        if self.process:
            self.process.terminate()  # not SIGINT, which processes that a shell starts with & ignore

    def record(self, run, status, error):
        """Adds a run's result to results.json, which other sweeps write too."""
        with locked(path := self.results_path):
            try:
                text = pathlib.Path(path).read_bytes() if os.path.exists(path) else b"[]"
                found = {result["run"]: result for result in json.loads(text)}
            except (ValueError, KeyError, TypeError):
                os.replace(path, path + ".damaged")
                found = {}
                print(f"  {path} was damaged: kept as results.json.damaged; it is written anew", flush=True)
            found[run.name] = self.results[run.name] = run.result(status, error)
            with replacing(path) as f:
                f.write(json.dumps([found[name] for name in sorted(found)], indent=1).encode())

    def print_table(self):
        """Prints the results; returns the exit code."""
        print(f"\n{'run':32}{'status':>12}{'steps':>16}{'best':>9}{'last':>9}{'trained':>10}"
              f"{'examples/s':>12}")
        complete = 0
        for run in self.runs:
            r = self.results.get(run.name) or run.result(*run.state())
            best, last = ("-" if r[name] is None else f"{r[name]:.4f}"
                          for name in ("best_exact_accuracy", "last_exact_accuracy"))
            print(f"{run.name:32}{r['status']:>12}{r['steps']:>8,}/{run.steps:<7,}{best:>9}{last:>9}"
                  f"{train.duration(r['train_seconds']):>10}{r['examples_per_sec']:>12,.1f}")
            if r["error"]:
                print(f"  {r['error']}")
            complete += r["status"] == "complete"
        print(f"{complete} of {len(self.runs)} complete; {self.results_path}")
        return 0 if complete == len(self.runs) else 3 if self.stop_requested else 1


class StudyRun:
    """One run: its settings, command, size and progress."""

    def __init__(self, path, extra):
        """extra: config files and flags after the study's file."""
        self.file = os.path.basename(path)[:-3]
        lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
        self.question = next(line[2:].strip() for line in lines if line.startswith("# "))
        self.name = run_file(path, DEFAULTS, DEFAULTS)["wandb_run_name"]
        self.c = c = configure(train.__file__, [path, *extra])
        self.command = [os.path.relpath(train.__file__), os.path.relpath(path)]
        self.extra = extra
        for arg in extra:
            name, _, value = arg.lstrip("-").partition("=")
            if arg.startswith("-") and name in ("out_dir", "gcs_dir"):
                setattr(c, name, f"{value.rstrip('/')}/{self.name}")
                arg = f"--{name}={getattr(c, name)}"
            self.command.append(arg)
        self.command.append("--init_from=auto")
        self.log = c.out_dir + ".log"
        self.bucket_rows, self.bucket_settings = [], {}
        try:
            train.check_settings(c)
            seq_len, vocab_size, self.puzzles = dataset_sizes(c.data_path, c.data_prepare)
            with torch.device("meta"):
                self.model = train.new_model(c, seq_len=seq_len, vocab_size=vocab_size)
        except UserError as e:
            raise UserError(f"{self.name}: {e}") from None
        self.steps = train.count_steps(c, self.puzzles)
        self.parameters = sum(p.numel() for p in self.model.parameters())

    def job(self, file):
        """The arguments of `sky jobs` that start the run; file: as scripts/sky-tpu.yaml.

        Its dataset is expected in data/ beside the study's folder, unless data_path is an address.
        """
        bucket, study, name = self.c.gcs_dir.rsplit("/", 2)
        data = self.c.data_path
        if not data.startswith("gs://"):
            data = f"{bucket}/data/{os.path.basename(data)}"
        own = "--out_dir=", "--gcs_dir=", "--data_path=", "--data_prepare="
        flags = [flag for flag in self.extra if not flag.startswith(own)]
        config = shlex.join([self.command[1], *flags, "--data_prepare="])
        variables = dict(BUCKET=bucket, CONFIG=config, DATA=data, RUN=f"{study}/{name}")
        env = [f"--env={key}={value}" for key, value in variables.items()]
        return ["launch", "--yes", "--detach-run", f"--name={self.job_name()}", file, *env]

    def job_name(self):
        return "-".join(self.c.gcs_dir.split("/")[-2:])

    def flop(self):
        """FLOP of the whole training."""
        plan, flop = train.stages(self.c, self.puzzles), 0
        for start, end, cycles in zip(plan, [*plan, self.steps][1:], plan.values()):
            steps = max(0, min(end, self.steps) - start)
            flop += steps * self.model.flops_per_example(cycles)[1]
        return flop * self.c.global_batch_size

    def state(self):
        """complete, incomplete, or failed if its folder holds another run; and the error."""
        if error := self.conflict():
            return "failed", error
        rows = self.bucket_rows if self.c.gcs_dir else self.rows()  # as all hosts see it
        last = [row for row in rows if "final" in row and row["step"] == self.steps]
        return "complete" if last else "incomplete", ""

    def conflict(self):
        """The error if a checkpoint in out_dir or in the bucket has other settings."""
        local = settings_of(pathlib.Path(self.c.out_dir).glob("ckpt_*.json"), pathlib.Path.read_bytes)
        for place, settings in ("out_dir", local), ("gcs_dir", self.bucket_settings):
            if found := settings and changes(settings, vars(self.c)):
                return (f"{getattr(self.c, place)} holds a run with other settings ({found}): delete it, "
                        f"or choose another --{place}")
        return ""

    def step(self):
        return max((row["step"] for row in self.rows()), default=0)

    def rows(self):
        """metrics.jsonl of this machine, or else of the bucket."""
        return read_metrics(os.path.join(self.c.out_dir, "metrics.jsonl")) or self.bucket_rows

    def read_bucket(self):
        if self.c.gcs_dir:
            bucket = Bucket(self.c.gcs_dir)
            self.bucket_rows = parse_metrics((bucket.read("metrics.jsonl") or b"").splitlines())
            self.bucket_settings = settings_of(fnmatch.filter(bucket.list(), "ckpt_*.json"), bucket.read)

    def pull(self):
        """Downloads metrics, log and settings to out_dir, unless it holds weights or another run."""
        if self.conflict() or any(pathlib.Path(self.c.out_dir).glob("*.pt")):
            return
        bucket = Bucket(self.c.gcs_dir)
        for name in bucket.list():
            if re.fullmatch(r"metrics\.jsonl|log\.txt|(ckpt_\d+|best)\.json", name):
                bucket.download(name, os.path.join(self.c.out_dir, name))

    def result(self, status, error):
        """The run's entry of results.json. train_seconds: by the median rate."""
        rows = [] if self.conflict() else self.rows()
        exact, surest, rates = ([row[name] for row in rows if name in row] for name in (
            "eval/exact_accuracy", "eval/surest_accuracy", "perf/examples_per_sec"))
        step = self.step() if rows else 0
        rate = statistics.median(rates) if rates else 0.0
        return dict(
            run=self.name, status=status, steps=step, total_steps=self.steps,
            best_exact_accuracy=max(exact, default=None), last_exact_accuracy=[None, *exact][-1],
            last_surest_accuracy=[None, *surest][-1],
            train_seconds=round(step * self.c.global_batch_size / rate, 1) if rate else 0.0,
            examples_per_sec=rate, error=error)


def settings_of(files, read):
    """Settings in the newest checkpoint's .json, or {}; read(file): a file's content."""
    try:
        return DEFAULTS | json.loads(read(max(files)))["settings"]
    except (ValueError, KeyError, TypeError, FileNotFoundError):  # train.py names it
        return {}


def queued_jobs():
    """The managed jobs that have not ended, as dicts."""
    text = sky("queue", "--all", "--skip-finished", "--output=json")
    try:
        return json.loads(text[re.search(r"^\[", text, re.MULTILINE).start():])  # after any notices
    except (AttributeError, ValueError):
        raise TransientError(f"sky jobs queue: not a queue: {text[:80]!r}") from None


def sky(*args):
    """What `sky jobs` prints. Raises UserError without SkyPilot, TransientError if it fails."""
    command = ["sky", "jobs", *args]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError("no program `sky` in PATH: docs/engines.md says how to install SkyPilot") from None
    if done.returncode:
        lines = (done.stderr + done.stdout).strip().splitlines() or [""]
        raise TransientError(f"sky jobs {args[0]} failed: {lines[-1]}")
    return done.stdout


@functools.cache
def dataset_sizes(path, data_prepare):
    """(cells, tokens, puzzles of an epoch) of a dataset, or of the one that data_prepare makes."""
    file = pathlib.Path(path, "train", "dataset.json")
    in_bucket = path.startswith("gs://")
    text = Bucket(path).read("train/dataset.json") if in_bucket else file.exists() and file.read_bytes()
    if text:
        try:
            metadata = json.loads(text)
            puzzles = metadata["total_groups"] * metadata["mean_puzzle_examples"]
            return metadata["seq_len"], metadata["vocab_size"], puzzles
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}: train/dataset.json is damaged: build it again") from None
    script, *flags = shlex.split(data_prepare) or [""]
    if script != "prepare_sudoku.py":
        raise UserError(f"{path}: no such dataset")
    s = prepare_sudoku.complete(configure(prepare_sudoku.__file__, flags))
    return s.size ** 2, s.size + 2, s.num_train if s.source == "generate" else s.subsample_size


def last_line(path):
    """The last line of a text file that is not empty."""
    with open(path, encoding="utf-8", errors="replace") as f:
        return next((line.strip() for line in reversed(f.readlines()) if line.strip()), "")


if __name__ == "__main__":
    configurator.command(lambda: main(sys.argv[1:]), __file__)
