"""Makes tables and pictures that compare runs: the groups of the scaling study, or any runs.

    python scripts/report.py                              the study: out/study
    python scripts/report.py out/demo0 out/demo1          these runs, or all runs in these folders
    python scripts/report.py pulled --out_dir=out/pulled  what was downloaded from a bucket

It reads the metrics.jsonl of each run and writes out_dir/report.md with its PNGs. It names runs that are
unfinished or damaged. Runs whose settings differ only in the seed are one variant, and a run of another group
with the same settings is one more seed. It needs matplotlib and scipy.
"""
import json
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
from sweep import GROUPS, NEUTRAL, changes, group_of

from configurator import configure, split_arguments
from runtime.errors import UserError, one_line, writing
from runtime.files import read_facts, read_metrics
from runtime.process import command


class Settings:
    # input and output; arguments without a dash are folders to read
    out_dir = "out/report"  # report.md and its pictures


# The columns of the tables.
COLUMNS = {
    "accuracy": "test puzzles solved (%)",
    "gap": "training - test (points)",
    "parameters": "parameters (millions)",
    "hours": "training time (hours)",
    "pflop": "training arithmetic (PFLOP)",
}
EXPLANATION = """A row is named by how its settings differ from the reference's: the baseline or, outside the
study, the row that comes first. ± is one standard deviation over seeds. Accuracy is the share of test puzzles
solved in the final evaluation, by each puzzle's last answer (with eval_patience, one that repeats). The
training share is the mean over the last tenth of the run, of the weights and not of their average. Time is
steps times step time, 0 if no step was timed; arithmetic counts only matmuls."""


class Run(NamedTuple):
    """A complete run, as its metrics.jsonl has it."""
    name: str  # of its folder
    group: str  # a key of GROUPS; for runs outside the study their dataset
    seed: int
    settings: dict  # what decides the result: all but the seed, the dataset's hash, forks, first weights
    numbers: dict  # {a key of COLUMNS: number}


def main(argv):
    """Reads the runs, writes report.md and its pictures, and prints what is not complete."""
    settings, paths, unknown = split_arguments(Settings, argv)
    configure(Settings, unknown)  # raises UserError for the first
    if not find_spec("matplotlib") or not find_spec("scipy"):
        raise UserError("report.py needs matplotlib and scipy: pip install matplotlib scipy")

    # find the runs
    files = []
    for path in paths or ["out/study"]:
        run_files = sorted(Path(path).rglob("metrics.jsonl"))
        if not run_files:
            raise UserError(f"{path}: no run (a folder with metrics.jsonl) there")
        files += run_files

    # read them
    runs = []
    problems = ""
    for path in files:
        try:
            runs.append(read_run(path))
        except Exception as e:  # whatever the damage is, the other runs have their report
            problems += f"\n- {path}: {one_line(e)}"
    status = f"- {len(runs)} of {len(files)} runs are complete{problems}"

    # report.md has the status of the runs, then a section for each group
    folder = Path(settings.out_dir)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    paragraphs = ["# Report", EXPLANATION, status]
    for group in sorted({run.group for run in runs}):
        paragraphs += section(group, runs, folder)
    (folder / "report.md").write_text("\n\n".join(paragraphs) + "\n", encoding="utf-8")
    print(f"{status}\nwrote {folder}/report.md")


# ---------------------------------------------------------------------------------------------------------
# Reading

def read_run(path):
    """Returns the Run of a metrics.jsonl. Raises EOFError if it is not complete."""
    facts = read_facts(path)
    lines = read_metrics(path)
    if not lines or "final" not in lines[-1]:
        raise EOFError("the run is unfinished")

    # two runs with these settings differ in nothing else; a dataset may have moved
    name = path.absolute().parent.name
    settings = {key: value for key, value in facts["settings"].items() if key not in NEUTRAL}
    seed = settings.pop("seed")
    data = f"{Path(settings['data_path']).name}-{facts['data_sha256'][:8]}"
    settings |= dict(
        data_path=data,
        forks=facts["forks"],
        began_with=facts["init_from"],
    )

    # the columns; a line stands for the steps since the one before, and has no speed if a step compiled
    accuracy = 100 * lines[-1]["eval/exact_accuracy"]
    solved = column(lines, "train/exact_accuracy")
    steps = np.diff(column(lines, "step", "perf/step_time"), prepend=0)
    seconds = steps * column(lines, "perf/step_time")
    return Run(name, group_of(name) or data, seed, settings, dict(
        accuracy=accuracy,
        gap=100 * solved[-len(solved) // 10:].mean() - accuracy,
        parameters=facts["parameters"] / 1e6,
        hours=seconds.sum() / 3600,
        pflop=seconds @ column(lines, "perf/tflops") / 1000,
    ))


def column(lines, name, beside=""):
    """Returns the values of a name in the lines that have it, or have `beside`."""
    return np.array([line[name] for line in lines if (beside or name) in line])


# ---------------------------------------------------------------------------------------------------------
# Comparing

def variants_of(group, runs):
    """Returns the variants of a group, lists of runs with equal settings and different seeds."""
    variants = defaultdict(dict)
    # the group's own runs come first, and other groups' runs with the same settings are more seeds
    for run in sorted(runs, key=lambda run: run.group != group):
        variants[json.dumps(run.settings, sort_keys=True)].setdefault(run.seed, run)
    lists = [[*variant.values()] for variant in variants.values()]
    return [runs for runs in lists if runs[0].group == group]


def numbers(runs, name):
    """Returns a column of runs."""
    return np.array([run.numbers[name] for run in runs])


def power_law(x, y):
    """Returns the least squares of y = a - b * x^-c as a list of one paragraph, or [] without a fit."""
    if len(set(x)) < 4:
        return []
    from scipy.optimize import curve_fit
    # the search begins with the highest accuracy as a, and with b from the range of y
    try:
        law, covariance = curve_fit(
            lambda x, a, b, c: a - b * x ** -c, x, y, [max(y), np.ptp(y) * min(x), 1])
    except RuntimeError:  # it does not converge
        return []
    parameters = zip("abc", law, np.diag(covariance) ** 0.5)
    values = ", ".join(f"{name} = {value:.3g} ± {error:.2g}" for name, value, error in parameters)
    return ["Least squares for n million parameters: accuracy = a - b * n^-c, with "
            f"{values} (standard errors)."]


# ---------------------------------------------------------------------------------------------------------
# Writing

def section(name, runs, folder):
    """Draws a group's picture; returns its paragraphs.

    Args:
        name: of the group.
        runs: all runs.
        folder: of the picture.
    """
    group = GROUPS.get(name, dict(question="Runs", baseline=""))
    variants = variants_of(name, runs)
    reference = max(variants, key=lambda runs: runs[0].name == group["baseline"])[0]
    labels = [changes(runs[0].settings, reference.settings) or reference.name for runs in variants]
    paragraphs = [f"## {name}: {group['question']}", table(variants, labels)]

    # the law of model scaling, by all runs of the group
    if name == "exp01":
        everything = sum(variants, [])
        paragraphs += power_law(numbers(everything, "parameters"), numbers(everything, "accuracy"))

    # the picture has a line for each variant, and a point for each run
    from matplotlib.figure import Figure
    figure = Figure((9, 2 + len(variants) / 4), layout="constrained")
    ax = figure.subplots()
    ax.set(xlabel=COLUMNS["accuracy"])
    ax.invert_yaxis()  # in the order of the table
    for label, runs in zip(labels, variants):
        ax.plot(numbers(runs, "accuracy"), [label] * len(runs), "o")
    figure.savefig(folder / f"{name}.png")
    return [*paragraphs, f"![{name}]({name}.png)"]


def table(variants, labels):
    """Returns a Markdown table: a row for each variant."""
    rows = [["setting", "seeds", *COLUMNS.values()], ["---"] * (2 + len(COLUMNS))]
    for label, runs in zip(labels, variants):
        rows.append([label, str(len(runs)), *(spread(numbers(runs, name)) for name in COLUMNS)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def spread(values):
    """Returns the mean of values and, if they differ, ± their standard deviation, as text."""
    text = f"{values.mean():.4g}"
    if np.ptp(values):
        text += f" ± {values.std(ddof=1):.2g}"
    return text


if __name__ == "__main__":
    command(main)
