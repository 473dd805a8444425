"""Runs the scaling study: the files of config/study, one after the other. Complete runs are skipped.

    python scripts/sweep.py --list                          what each run asks and changes
    python scripts/sweep.py exp01a exp02b_03 --epochs=1000  two runs, both with a setting of train.py
    python scripts/sweep.py --pattern=exp01 config/mini.py  with this config file after each run's

A name may end before any _ of it: exp01a selects exp01a_h256. --pattern selects all runs that begin with it.
The settings below are sweep.py's own. All others are train.py's and apply to every run; the run's name is
added to out_dir and gcs_dir. bench.py with a run's file tells how long the run takes on this machine.

A run's folder has its log, log.txt. A run that dies is resumed twice, and one that fails does not end the
others. The sweep ends with the status of each run, and report.py compares them. Ctrl-C or SIGTERM makes the
current run save and stop; the same command resumes it. If the sweep is killed, its run ends. The exit code is
0 if all runs are complete, 1 if not, 2 for wrong input before the first run, and 3 if the sweep was stopped.
"""
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import data
import train
from configurator import configure, split_arguments
from runtime import files, process
from runtime.errors import UserError


class Settings:
    # which runs; names without a dash select runs too
    pattern = ""  # runs whose names begin so, with * and ? as in a shell; "" without names: all 67
    # instead of running them
    list = False  # print what each run asks and changes
    prepare = False  # make the datasets that are missing


STUDY = ROOT / "config/study"
BASELINE = ROOT / "config/baseline.py"
# The groups, by the first letters of their runs' names; report.py and config/study.py read this too.
#   project   name of the group's project at Weights & Biases
#   question  what the group asks
#   baseline  the run that is the baseline once more, with a seed of its own
GROUPS = json.loads(STUDY.with_suffix(".json").read_text())
# Settings that do not change a run's result.
NEUTRAL = (
    *train.RUN_SETTINGS, "micro_batch_size", "eval_interval", "eval_max_puzzles",
    "eval_versions",
)
# a dataset has several addresses, and train.py replaces a type that the device does not have
REPLACED = ("data_path", "forward_dtype")


def main(argv):
    """Separates sweep.py's arguments from train.py's, and does what they ask for."""
    settings, names, train_arguments = split_arguments(Settings, argv)
    for path in map(Path, train_arguments):
        if path.resolve().parent == STUDY:
            raise UserError(f"{path} would follow every run's file: {path.stem} selects the run")
    runs = [StudyRun(path, train_arguments) for path in select_files(names, settings.pattern)]
    if settings.list:
        print_runs(runs, StudyRun(BASELINE, train_arguments).settings)
    elif settings.prepare:
        for run in runs:
            data.get_dataset(run.settings, lambda: False)
    else:
        sys.exit(sweep(runs))


# ---------------------------------------------------------------------------------------------------------
# The runs

def select_files(names, pattern):
    """Returns the files of config/study that the names and the pattern select.

    Raises UserError if one of them selects none.
    """
    # exp04a_100 selects exp04a_100_puzzles.py, but not exp04a_1000_puzzles.py
    globs = [f"{name}[_.]*" for name in names]
    if pattern or not names:
        globs.append(f"{pattern}*.py".replace("**", "*"))
    selected = set()
    for text in globs:
        paths = {*STUDY.glob(text)}
        if not paths:
            raise UserError(f"config/study has no run {text}; --list prints all runs")
        selected |= paths
    return sorted(selected)


class StudyRun:
    """One run: its settings and its command.

    Args:
        path: a file of config/study.
        train_arguments: config files and flags for all runs, which follow the run's file.

    Raises UserError for settings that train.py refuses.
    """

    def __init__(self, path, train_arguments):
        self.name = path.stem
        # a run that has begun goes on
        arguments = [os.path.relpath(path), "--init_from=auto", *train_arguments]
        settings = configure(train.Settings, arguments)
        # each run has a folder of its own in the folder that is given for all
        for setting in "out_dir", "gcs_dir":
            folder = getattr(settings, setting)
            if folder and os.path.basename(folder) != self.name:
                own_folder = os.path.join(folder, self.name)
                setattr(settings, setting, own_folder)
                arguments.append(f"--{setting}={own_folder}")
        train.check_start_settings(settings)
        self.settings = settings
        self.metrics = f"{settings.out_dir}/metrics.jsonl"
        self.command = [os.path.relpath(train.__file__), *arguments]


def group_of(name):
    """Returns the key in GROUPS of a run's group, or "" for a run outside the study."""
    return next(filter(name.startswith, GROUPS), "")


def changes(settings, others, ignored=NEUTRAL):
    """Returns the settings, {name: value}, that differ from those in others, as text; ignored: names."""
    return " ".join(f"{name}={value}" for name, value in settings.items()
                    if name not in ignored and value != others.get(name, value))


def print_runs(runs, baseline):
    """Prints each group's question, and how each run differs from the baseline's settings."""
    for group, group_runs in itertools.groupby(runs, lambda run: group_of(run.name)):
        print(GROUPS[group]["question"])
        for run in group_runs:
            differences = changes(vars(run.settings), vars(baseline)) or "the baseline"
            print(f"  {run.name:32} {differences}")


# ---------------------------------------------------------------------------------------------------------
# Running them

def sweep(runs):
    """Runs all runs that are not complete; returns sweep.py's exit code. KeyboardInterrupt stops it."""
    # a run with other settings in the folder must not be resumed, nor count as complete
    for run in runs:
        saved = files.read_facts(run.metrics).get("settings", {})
        difference = changes(saved, vars(run.settings), NEUTRAL + REPLACED)
        if difference:
            raise UserError(f"{run.settings.out_dir} holds a run with other settings ({difference}): "
                            "delete it, or choose another --out_dir")

    # process.command() would end this process 4 seconds after a signal; a run may take longer to save
    signal.set_wakeup_fd(-1)
    codes = {run.name: train_to_end(run) for run in runs}
    for name, code in codes.items():
        print(f"{name:32}", f"failed with exit code {code}" if code else "complete")
    return any(codes.values())


def train_to_end(run):
    """Runs train.py unless the run is complete, and again if it dies. Returns its exit code."""
    # with a bucket, only train.py can tell whether everything has been uploaded
    metrics = files.read_metrics(run.metrics)
    if metrics and "final" in metrics[-1] and not run.settings.gcs_dir:
        return 0
    for _ in range(3):
        print("$", shlex.join(["python", *run.command]), flush=True)
        training = subprocess.Popen(
            [sys.executable, *run.command],
            env=os.environ | dict(TRM_SWEEP=str(os.getpid())),  # the run ends with this process
        )
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
