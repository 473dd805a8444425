"""Runs the scaling study: the files of config/study, one after the other. Complete runs are skipped.

    python scripts/sweep.py --list                          what each run asks, changes and costs
    python scripts/sweep.py exp01a exp02b_03 --epochs=1000  two runs, both with a setting of train.py
    python scripts/sweep.py --pattern=exp01 config/mini.py  with this config file after each run's

A name selects the runs that begin with it. The settings below are sweep.py's own. All others are train.py's
and apply to every run; the run's name is added to out_dir and gcs_dir. Each run has its log beside its
folder, RUN.log. A run that dies is resumed twice. The sweep ends with the status of each run, and report.py
compares them. Ctrl-C or SIGTERM makes the current run save and stop; the same command resumes it. The exit
code is 0 if all runs are complete, 1 if not, 2 for wrong input before the first run, and 3 if the sweep was
stopped.

Several sweeps on one machine may share a folder: a sweep does not start what another one is training.
"""
import fcntl
import glob
import os
import pathlib
import re
import shlex
import subprocess
import sys
import time
from typing import NamedTuple

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
import torch

import configurator
import optim
import prepare_sudoku
import train
from configurator import UserError, configure, split_arguments
from data import read_json, read_metrics, saved_settings

# which runs; names without a dash select runs too
pattern = ""  # runs whose names begin so, with * and ? as in a shell; "" without names: all 67
continue_on_failure = False  # continue with the next run if one fails
# instead of running them
list = False  # print what each run asks, changes and costs
dry_run = False  # print each run's data set and command besides
prepare = False  # make the datasets that are missing

STUDY = os.path.join(ROOT, "config", "study")
ATTEMPTS = 3  # how often a run that dies is started
# settings that do not change a run's result
NEUTRAL = (*train.RUN_SETTINGS, "data_prepare", "micro_batch_size")
# train.py may replace these two: by the local copy of a bucket's dataset, by a type that the GPU has.
REPLACED = ("data_path", "forward_dtype")


class Group(NamedTuple):
    """A question of the study, and what report.py draws to answer it: keys of its VALUES."""
    prefix: str  # how its runs' names begin
    question: str
    x: str = ""  # abscissa of its panels; "": the settings' names
    panels: tuple = ("accuracy",)  # ordinates, a panel each; the learning curves follow


GROUPS = (
    Group("exp01", "How does accuracy grow with parameters, and where does it saturate?", "parameters"),
    Group("exp02a", "Does more effective depth, by L_cycles, help, and does it overfit?", "depth"),
    Group("exp02b", "At equal effective depth, are H_cycles worth more than L_cycles?", "depth"),
    Group("exp03", "Can recursion replace layers?"),
    Group("exp04a", "How few training puzzles are enough?", "puzzles", ("accuracy", "gap")),
    Group("exp04b", "Can augmented copies replace data?", "copies", ("accuracy", "gap")),
    Group("exp05", "What does accuracy cost at inference?", "halt_max_steps", ("accuracy", "halting")),
    Group("exp06", "Up to which size does a larger batch save steps and gain throughput?",
          "global_batch_size", ("accuracy", "speed")),
    Group("exp07", "Which precision is enough?"),
    Group("exp08", "Does the average of the weights help, and at which rate?"),
    Group("exp09", "Which optimizer?"),
    Group("exp10", "Which learning rate, and does decaying it help?"),
    Group("contrib01", "Does a curriculum of growing depth reach the target sooner?"),
    Group("contrib02", "Does exploration that decays over the run lead to earlier halting?",
          panels=("accuracy", "halting")),
    Group("", "How do the other runs compare?"),
)


def group_of(name):
    """Returns the Group of a run; the last one takes every name."""
    return next(group for group in GROUPS if name.startswith(group.prefix))


def main(argv):
    """Separates sweep.py's arguments from train.py's, and does what they ask for."""
    # the runs, each with a folder of its own
    settings, names, train_arguments = split_arguments(__file__, argv)
    runs = [StudyRun(path, train_arguments) for path in select_files(names, settings.pattern)]
    folders = {run.settings.out_dir for run in runs}
    if len(folders) < len(runs):
        raise UserError("a config file gives several runs one out_dir; name a run as exp01a, not by its path")

    # print them, make their data, or run them
    if settings.list or settings.dry_run:
        baseline = configure(train.__file__, [os.path.join(ROOT, "config/baseline.py"), *train_arguments])
        print_runs(runs, vars(baseline), settings.dry_run)
    elif settings.prepare:
        for run in runs:
            train.make_dataset(run.settings)
    else:
        sys.exit(sweep(runs, settings.continue_on_failure))


def select_files(names, pattern):
    """Returns the files of config/study that the names and the pattern select, in the study's order.

    Raises UserError if one of them selects none.
    """
    # exp04a_100 selects exp04a_100_puzzles.py, but not exp04a_1000_puzzles.py.
    globs = {name: f"{name}[_.]*" for name in names}
    if pattern or not names:
        globs[f"--pattern={pattern}"] = f"{pattern}*.py"
    selected = set()
    for argument, text in globs.items():
        paths = glob.glob(os.path.join(STUDY, text))
        if not paths:
            raise UserError(f"{argument}: no such run in config/study; --list prints all")
        selected.update(paths)
    return sorted(selected, key=place)


def place(path):
    """Returns the sort key of a run's file: the contributions come last, and 250 puzzles before 1000."""
    group = os.path.basename(path).partition("_")[0]
    return group.startswith("contrib"), group, len(path), path


def print_runs(runs, baseline, dry_run):
    """Prints each run's size and how it differs from the baseline; with dry_run also its data and command."""
    # a group's runs have one question, which is printed above them
    question = ""
    for run in runs:
        if group_of(run.name).question != question:
            question = group_of(run.name).question
            print(question)
        differences = changes(vars(run.settings), baseline, NEUTRAL) or "the baseline"
        print(f"  {run.name:32}{run.steps:7,} steps {run.parameters:11,} weights  {differences}")
        if dry_run:
            print(f"    {run.settings.data_path}\n    {shlex.join(['python', *run.command])}")
    print(f"{len(runs)} runs, {sum(run.steps for run in runs):,} steps")


def changes(settings, others, ignored):
    """Returns the settings that differ from those in others, as text.

    Args:
        settings, others: {name: value} of train.py's settings.
        ignored: names of settings that may differ.
    """
    differing = []
    for name, value in settings.items():
        if name not in ignored and value != others.get(name, value):
            differing.append(f"{name}={value}")
    return " ".join(differing)


def sweep(runs, continue_on_failure):
    """Runs all that is not complete; returns sweep.py's exit code. KeyboardInterrupt stops it."""
    for run in runs:
        run.check_folder()
    errors = {}  # {name of a run that failed: last line of its log}
    waiting = runs.copy()
    while waiting:
        run = waiting.pop(0)
        os.makedirs(run.settings.out_dir, exist_ok=True)
        with open(run.log, "a", encoding="utf-8") as log:
            # A sweep holds the lock of the run that it trains. train.py inherits the open file and with it
            # the lock, which therefore outlives a sweep that is killed.
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting.append(run)
                time.sleep(1)
                continue
            # With a bucket, train.py itself finds out whether all of the run has been uploaded.
            if run.is_complete() and not run.settings.gcs_dir:
                print(f"{run.name}: complete", flush=True)
                continue
            code = train_to_end(run, log)
        # what failed is named by the last line of its log
        if code:
            text = pathlib.Path(run.log).read_text(encoding="utf-8", errors="replace")
            errors[run.name] = "failed: " + text.strip().rpartition("\n")[2]
            print(f"{run.name}: {errors[run.name]}", flush=True)
            if not continue_on_failure:
                break

    # the status of all runs, also of those that this sweep has not reached
    complete = 0
    for run in runs:
        status = "complete" if run.is_complete() else "incomplete"
        status = errors.get(run.name, status)
        complete += status == "complete"
        print(f"{run.name:32} {status}")
    print(f"{complete} of {len(runs)} complete; python scripts/report.py compares them")
    return int(complete < len(runs))


def train_to_end(run, log):
    """Runs train.py, again if it dies; returns its last exit code.

    Args:
        log: the open file that gets train.py's output.
    """
    for attempt in range(ATTEMPTS):
        print(f"{run.name}: attempt {attempt + 1}, log in {run.log}", flush=True)
        print("$", shlex.join(["python", *run.command]), file=log, flush=True)
        # The process has its own group, so that a terminal's Ctrl-C reaches it once, from here.
        process = subprocess.Popen(
            [sys.executable, *run.command], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            preexec_fn=os.setpgrp)
        try:
            code = process.wait()
        except KeyboardInterrupt:
            print("the run saves and stops", file=sys.stderr)
            process.terminate()
            process.wait()
            raise
        # Complete, wrong input, or stopped by someone else: another attempt would not help.
        if code in (0, 2, 3):
            break
        print(f"{run.name}: died with exit code {code}", flush=True)
    return code


class StudyRun:
    """One run: its settings, command and size."""

    def __init__(self, path, train_arguments):
        """Reads the run's file. Raises UserError for settings that train.py refuses.

        Args:
            path: a file of config/study.
            train_arguments: config files and flags for all runs, which follow the run's file.
        """
        self.name = os.path.basename(path).removesuffix(".py")
        # Each run gets a folder of its own in the folders that are given for all.
        own_arguments = []
        for argument in train_arguments:
            if re.match("-+(out|gcs)_dir=", argument):
                argument = f"{argument.rstrip('/')}/{self.name}"
            own_arguments.append(argument)
        script = os.path.relpath(train.__file__)
        self.command = [script, os.path.relpath(path), *own_arguments, "--init_from=auto"]
        self.settings = configure(train.__file__, [path, *own_arguments])
        self.log = self.settings.out_dir + ".log"

        # the length of the run and the size of the model, which is not built in memory
        train.check_settings(self.settings)
        seq_len, vocab_size, examples = dataset_sizes(self.settings)
        with torch.device("meta"):
            model = train.new_model(self.settings, seq_len=seq_len, vocab_size=vocab_size)
        self.steps = optim.count_steps(self.settings, examples)
        self.parameters = sum(weight.numel() for weight in model.parameters())

    def check_folder(self):
        """Raises UserError if out_dir holds a run with other settings."""
        saved = saved_settings(self.settings.out_dir)
        difference = changes(saved, vars(self.settings), NEUTRAL + REPLACED)
        if difference:
            raise UserError(f"{self.settings.out_dir} holds a run with other settings ({difference}): "
                            "delete it, or choose another --out_dir")

    def is_complete(self):
        metrics = read_metrics(os.path.join(self.settings.out_dir, "metrics.jsonl"))
        return any("final" in line and line["step"] == self.steps for line in metrics)


def dataset_sizes(settings):
    """Returns (cells, tokens, examples of an epoch) of the dataset, or of the one data_prepare would make."""
    file = os.path.join(settings.data_path, "train", "dataset.json")
    if os.path.exists(file):
        sizes = read_json(file, "seq_len", "vocab_size", "total_groups", "mean_puzzle_examples")
        return sizes["seq_len"], sizes["vocab_size"], sizes["total_groups"] * sizes["mean_puzzle_examples"]
    script, _, flags = settings.data_prepare.partition(" ")
    if script != "prepare_sudoku.py":
        raise UserError(f"{settings.data_path}: no such dataset")
    prepared = configure(prepare_sudoku.__file__, shlex.split(flags))
    examples = prepared.num_train if prepared.source == "generate" else prepared.subsample_size
    return prepared.size ** 2, prepared.size + 2, examples


if __name__ == "__main__":
    configurator.command(lambda: main(sys.argv[1:]), __file__)
