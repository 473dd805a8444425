"""Runs the scaling study: the files of config/study, one after the other. Complete runs are skipped.

    python scripts/sweep.py --list                          what each run asks, changes and costs
    python scripts/sweep.py exp01a exp02b_03 --epochs=1000  two runs, both with a setting of train.py
    python scripts/sweep.py --pattern=exp01 config/mini.py  with this config file after each run's

A name may be cut off before a _, as exp01a of exp01a_h256; --pattern selects all runs that begin with it.
The settings below are sweep.py's own. All others are train.py's and apply to every run; the run's name is
added to out_dir and gcs_dir. A run's cost is the arithmetic of its training as a multiple of the baseline's,
a curriculum counted at its full depth.

A run's folder has its log, log.txt. A run that dies is resumed twice. The sweep ends with the status of each
run, and report.py compares them. Ctrl-C or SIGTERM makes the current run save and stop; the same command
resumes it. The exit code is 0 if all runs are complete, 1 if not, 2 for wrong input before the first run, and
3 if the sweep was stopped.
"""
import glob
import os
import runpy
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = str(Path(__file__).parents[1])
sys.path.insert(0, ROOT)
import torch

import optim
import prepare_sudoku
import train
from configurator import configure, split_arguments
from puzzles.sudoku import Sudoku
from runtime import files, process
from runtime.dataset import get_dataset
from runtime.errors import UserError
from runtime.flops import FlopCounter, flops_per_example
from runtime.minutes import keep_length
from weights import new_model


class Settings:
    # which runs; names without a dash select runs too
    pattern = ""  # runs whose names begin so, with * and ? as in a shell; "" without names: all 67
    continue_on_failure = False  # continue with the next run if one fails
    # instead of running them
    list = False  # print what each run asks, changes and costs
    dry_run = False  # print each run's data set and command besides
    prepare = False  # make the datasets that are missing


STUDY = Path(ROOT, "config", "study")
BASELINE = Path(ROOT, "config", "baseline.py")
# {the beginning of its runs' names: the group}
GROUPS = runpy.run_path(f"{STUDY}.py", {"run": lambda path: None})["groups"]
# Settings that do not change a run's result.
NEUTRAL = (
    *train.RUN_SETTINGS, "micro_batch_size", "eval_interval", "eval_max_puzzles",
    "eval_versions",
)
# a dataset has several addresses, and train.py replaces a type that the device does not have
REPLACED = ("data_path", "forward_dtype")
ATTEMPTS = 3  # starts of a run that dies
FLOPS = {}  # {sizes of a model: FLOPs of a training step for a sequence}


def main(argv):
    """Separates sweep.py's arguments from train.py's, and does what they ask for."""
    settings, names, train_arguments = split_arguments(Settings, argv)
    for path in map(Path, train_arguments):
        if path.resolve().parent == STUDY:
            raise UserError(f"{path} would follow every run's file: {path.stem} selects the run")
    runs = [StudyRun(path, train_arguments) for path in select_files(names, settings.pattern)]
    if settings.list or settings.dry_run:
        print_runs(runs, StudyRun(BASELINE, train_arguments), settings.dry_run)
    elif settings.prepare:
        for run in runs:
            get_dataset(run.settings, lambda: False)
    else:
        sys.exit(sweep(runs, settings.continue_on_failure))


# ---------------------------------------------------------------------------------------------------------
# The runs

def select_files(names, pattern):
    """Returns the files of config/study that the names and the pattern select, in the study's order.

    Raises UserError if one of them selects none.
    """
    # exp04a_100 selects exp04a_100_puzzles.py, but not exp04a_1000_puzzles.py
    globs = {name: f"{name}[_.]*" for name in names}
    if pattern or not names:
        globs[pattern] = f"{pattern}*.py"
    files = set()
    for name, text in globs.items():
        paths = glob.glob(f"{STUDY}/{text}")
        if not paths:
            raise UserError(f"config/study has no run {name}; --list prints all runs")
        files.update(map(Path, paths))

    # the contributions come last, and 250 puzzles before 1000
    def study_order(file):
        return "contrib" in file.stem, file.stem.split("_")[0], len(file.stem), file

    return sorted(files, key=study_order)


class StudyRun:
    """One run: its settings and its command.

    Args:
        path: a file of config/study.
        train_arguments: config files and flags for all runs, which follow the run's file.

    Raises UserError for settings that train.py refuses.
    """

    def __init__(self, path, train_arguments):
        self.name = path.stem
        arguments = [os.path.relpath(path), *train_arguments]
        self.settings = configure(train.Settings, arguments)
        # each run has a folder of its own in the folder that is given for all
        for setting in "out_dir", "gcs_dir":
            folder = getattr(self.settings, setting)
            if folder and os.path.basename(folder) != self.name:
                own_folder = os.path.join(folder, self.name)
                setattr(self.settings, setting, own_folder)
                arguments.append(f"--{setting}={own_folder}")
        train.check_settings(self.settings)
        self.metrics = os.path.join(self.settings.out_dir, "metrics.jsonl")
        # with init_from=FILE, train.py itself resumes a run that has begun
        if self.settings.init_from == "scratch":
            arguments.append("--init_from=auto")
        self.command = [os.path.relpath(train.__file__), *arguments]

    def size(self):
        """Returns the run's steps, its parameters, and the FLOPs of its training at the full depth."""
        # the config says how many puzzles there will be, so the dataset need not exist
        prepared = configure(prepare_sudoku.Settings, shlex.split(self.settings.data_prepare)[1:])
        puzzles = prepared.num_train if prepared.source == "generate" else prepared.subsample_size
        sizes = SimpleNamespace(
            seq_len=prepared.size ** 2, vocab_size=prepared.size + 2, num_puzzle_identifiers=1,
            task=Sudoku.new_task(prepared.size))
        with torch.device("meta"), FlopCounter():  # takes no memory, and little time
            trm = new_model(self.settings, sizes)
        # counting takes half a second, and most runs have the baseline's sizes
        model_key = f"{trm} {self.settings.H_cycles} {self.settings.L_cycles} {self.settings.num_heads}"
        if model_key not in FLOPS:
            FLOPS[model_key] = flops_per_example(trm)
        steps = optim.count_steps(self.settings, puzzles)
        return steps, trm.num_parameters(), steps * self.settings.global_batch_size * FLOPS[model_key]


def group_of(name):
    """Returns the key in GROUPS of a run's group, or "" for a run outside the study."""
    return next((prefix for prefix in GROUPS if name.startswith(prefix)), "")


def changes(settings, others, ignored=NEUTRAL):
    """Returns the settings that differ from those in others, as text.

    Args:
        settings, others: {name: value} of train.py's settings.
        ignored: names of settings that may differ.
    """
    differing = []
    for name, value in settings.items():
        if name not in ignored and value != others.get(name, value):
            text = f"{value:.4g}" if isinstance(value, float) else value
            differing.append(f"{name}={text}")
    return " ".join(differing)


def print_runs(runs, baseline, dry_run):
    """Prints each run's size and how it differs from the baseline; with dry_run also its data and command."""
    *_, baseline_flops = baseline.size()
    total = 0
    group = ""
    for run in runs:
        # the question of the group, before its first run
        if group_of(run.name) != group:
            group = group_of(run.name)
            print(GROUPS[group]["question"])
        steps, parameters, flops = run.size()
        cost = flops / baseline_flops
        total += cost
        differences = changes(vars(run.settings), vars(baseline.settings)) or "the baseline"
        print(f"  {run.name:32}{steps:7,} steps {parameters:11,} parameters cost {cost:5.2f}  {differences}")
        if dry_run:
            print(f"    {run.settings.data_path}\n    {shlex.join(['python', *run.command])}")
    print(f"runs: {len(runs)}; cost: {total:.1f} times the baseline's, by their arithmetic")


# ---------------------------------------------------------------------------------------------------------
# Running them

def sweep(runs, continue_on_failure):
    """Runs all runs that are not complete; returns sweep.py's exit code. KeyboardInterrupt stops it."""
    # a run with other settings in the folder must not be resumed, nor count as complete
    for run in runs:
        saved = files.read_facts(run.metrics).get("settings", {})
        keep_length(run.settings, saved)  # max_minutes has become a number of steps
        difference = changes(saved, vars(run.settings), NEUTRAL + REPLACED)
        if difference:
            raise UserError(f"{run.settings.out_dir} holds a run with other settings ({difference}): "
                            "delete it, or choose another --out_dir")

    # process.command() would end this process 4 seconds after a signal; a run may take longer to save
    signal.set_wakeup_fd(-1)
    statuses = dict.fromkeys([run.name for run in runs], "not reached")
    for run in runs:
        code = train_to_end(run)
        statuses[run.name] = f"failed with exit code {code}" if code else "complete"
        if code and not continue_on_failure:
            break
    # the table
    for name, status in statuses.items():
        print(f"{name:32} {status}")
    num_complete = list(statuses.values()).count("complete")
    print(f"{num_complete} of {len(runs)} complete; python scripts/report.py compares them")
    return int(num_complete < len(runs))


def train_to_end(run):
    """Runs train.py unless the run is complete, and again if it dies. Returns its exit code."""
    # with a bucket, only train.py can tell whether everything has been uploaded
    metrics = files.read_metrics(run.metrics)
    if metrics and "final" in metrics[-1] and not run.settings.gcs_dir:
        return 0
    for _ in range(ATTEMPTS):
        print("$", shlex.join(["python", *run.command]), flush=True)
        training = subprocess.Popen([sys.executable, *run.command])
        try:
            code = training.wait()
        finally:
            # after Ctrl-C or SIGTERM the run saves and stops
            training.terminate()
            training.wait()
        # complete, wrong input, or stopped by someone else: another attempt would not help
        if code in (0, 2, 3):
            break
    return code


if __name__ == "__main__":
    process.command(main)
