"""Tables and pictures that compare runs: the groups of the scaling study, or any runs.

    python scripts/report.py                              the study: out/study
    python scripts/report.py out/demo0 out/demo1          these runs, or all runs in these folders
    python scripts/report.py pulled --out_dir=out/pulled  what was downloaded from a bucket

Reads the metrics.jsonl of each run. Writes out_dir/report.md, its PNGs, and results.json with the numbers of
each complete run. Runs that are unfinished or damaged are named. Runs whose settings differ only in the seed
are one variant, and a run of another group with the same settings is one more seed. It needs matplotlib and
scipy.
"""
import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from sweep import GROUPS, NEUTRAL, changes, group_of

from configurator import configure, split_arguments
from runtime.errors import UserError, writing
from runtime.files import read_facts, read_metrics
from runtime.process import command


class Settings:
    # input and output; arguments without a dash are folders to read
    out_dir = "out/report"  # report.md and its pictures
    target = 85.0  # percent of the test puzzles, for the steps and the time needed to reach it


# The columns of the tables.
COLUMNS = {
    "accuracy": "test puzzles solved (%)",
    "gap": "training - test (points)",
    "parameters": "parameters (millions)",
    "depth": "effective depth (layers per supervision step)",
    "halting": "mean halting step in training",
    "steps_to": "steps to the target",
    "hours_to": "hours to the target",
    "speed": "throughput (examples/s)",
    "hours": "training time (hours)",
    "pflop": "training arithmetic (PFLOP)",
}
EXPLANATION = """A row is named by how its settings differ from the reference's: the baseline or, outside the
study, the setting with the most seeds. Differences of accuracy have 95% confidence intervals by Welch's test.
± is one standard deviation over seeds. Accuracy is the share of test puzzles solved in the final evaluation,
by each puzzle's last answer (with eval_patience, one that repeats). Training values are means over the last
tenth of the run, of the weights and not of their average. Time is steps times step time; arithmetic counts
only matmuls. Steps and time to the target are interpolated between evaluations; a "-" stands where a seed did
not reach it."""


class Run(NamedTuple):
    """A complete run, as its metrics.jsonl has it."""
    name: str  # of its folder
    group: str  # a key of GROUPS; for runs outside the study their dataset
    seed: int
    settings: dict  # those that can change its result, but for the seed, and the dataset with its hash
    facts: dict  # what the first line says, and the numbers of COLUMNS that are known
    evaluations: dict  # {step: percent of the test puzzles solved}


def main(argv):
    """Reads the runs, writes report.md and its pictures, and prints what is not complete."""
    settings, paths, unknown = split_arguments(Settings, argv)
    configure(Settings, unknown)  # raises UserError for the first
    if not all(map(importlib.util.find_spec, ["matplotlib", "scipy"])):
        raise UserError("needs two more packages: pip install matplotlib scipy")

    # read the runs
    runs = []
    problems = []
    for path in find_files(paths or ["out/study"]):
        try:
            runs.append(read_run(path, settings.target))
        except Exception as e:  # whatever the damage is, the other runs have their report
            problems.append(f"- {path}: {e if isinstance(e, UserError) else repr(e)}")
    status = [f"- {len(runs)} of {len(runs) + len(problems)} runs are complete", *problems]
    hardware = {name for run in runs for name in run.facts["hardware"]}

    # report.md has the status of the runs, then a section for each group
    folder = Path(settings.out_dir)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    paragraphs = ["# Report", EXPLANATION, f"Hardware: {'; '.join(sorted(hardware))}.", "\n".join(status)]
    for group in dict.fromkeys([*GROUPS, *(run.group for run in runs)]):
        group_runs = [run for run in runs if run.group == group]
        if group_runs:
            paragraphs += section(group, group_runs, runs, folder)
    (folder / "report.md").write_text("\n\n".join(paragraphs) + "\n", encoding="utf-8")
    # results.json has the numbers
    results = [dict(name=run.name, seed=run.seed, **run.facts, evaluations=run.evaluations) for run in runs]
    (folder / "results.json").write_text(json.dumps(results, indent=1))
    print(*status, f"wrote {folder}/report.md", sep="\n")


# ---------------------------------------------------------------------------------------------------------
# Reading

def find_files(paths):
    """Returns each metrics.jsonl in paths or below. Raises UserError."""
    files = []
    for path in paths:
        run_files = sorted(Path(path).rglob("metrics.jsonl"))
        if not run_files:
            raise UserError(f"{path}: no run (a folder with metrics.jsonl) there")
        files += run_files
    return files


def read_run(path, target):
    """Returns the Run of a metrics.jsonl. Raises UserError if it is not complete.

    Args:
        path: of the file.
        target: percent of the test puzzles.
    """
    facts = read_facts(path)
    lines = read_metrics(path)
    if not lines or "final" not in lines[-1]:
        raise UserError("unfinished")

    # test puzzles solved, in percent
    evaluations = {}
    for line in lines:
        if "eval/exact_accuracy" in line:
            evaluations[line["step"]] = 100 * line["eval/exact_accuracy"]
    accuracy = [*evaluations.values()]

    def metric(name):
        return np.array([line[name] for line in lines if name in line])

    # the columns; training values are of the last tenth of the run
    settings = facts.pop("settings")
    solved = metric("train/exact_accuracy")
    step_time = metric("perf/step_time")
    last_tenth = -len(solved) // 10
    # a line stands for the steps since the one before; none has a speed if every step compiled
    steps = np.diff([0, *(line["step"] for line in lines if "perf/step_time" in line)])
    step_hours = steps @ step_time / steps.sum() / 3600
    facts |= dict(
        accuracy=accuracy[-1],
        gap=100 * solved[last_tenth:].mean() - accuracy[-1],
        parameters=facts["parameters"] / 1e6,
        depth=settings["H_cycles"] * (settings["L_cycles"] + 1) * settings["L_layers"],
        halting=metric("train/steps")[last_tenth:].mean(),
        speed=np.median(metric("perf/examples_per_sec")),
        hours=facts["total_steps"] * step_hours,
        pflop=facts["total_steps"] * (steps @ (metric("perf/tflops") * step_time)) / steps.sum() / 1000,
    )
    # where the best accuracy so far, which is 0 at step 0, reaches the target
    best = np.maximum.accumulate(accuracy)
    if best[-1] >= target:
        reached = np.argmax(best >= target) + 1
        facts["steps_to"] = np.interp(target, [0, *best[:reached]], [0, *list(evaluations)[:reached]])
        facts["hours_to"] = facts["steps_to"] * step_hours

    # what tells this run from others: its settings, its dataset, which may have moved, its forks and the
    # weights that it began with
    name = path.absolute().parent.name
    data = f"{Path(settings['data_path']).name}-{facts['data_sha256'][:8]}"
    seed = settings.pop("seed")
    decisive = {key: value for key, value in settings.items() if key not in NEUTRAL}
    decisive |= dict(
        data_path=data,
        forks=" ".join(map("-".join, facts.pop("forks", {}).items())) or "none",
        began_with=facts.pop("init_from", "scratch"),
    )
    return Run(name, group_of(name) or data, seed, decisive, facts, evaluations)


# ---------------------------------------------------------------------------------------------------------
# Comparing

def variants_of(group_runs, runs, x):
    """Returns the variants of a group, lists of runs with equal settings and different seeds, by x.

    Args:
        group_runs: the group's runs.
        runs: all runs; those with the settings of a group's run are seeds of it.
        x: a setting or a fact, or "".
    """
    # each run's variant, unless an earlier run has the same one
    variants = []
    for run in group_runs:
        # of two runs with one seed the group's own counts
        seeds = {}
        for other in [*group_runs, *runs]:
            if other.settings == run.settings:
                seeds.setdefault(other.seed, other)
        variant = [*seeds.values()]
        if variant not in variants:
            variants.append(variant)
    return sorted(variants, key=lambda variant: numbers(variant, x).mean()) if x else variants


def numbers(runs, name):
    """Returns a setting or a fact of each run, nan if not known."""
    return np.array([(run.settings | run.facts).get(name, math.nan) for run in runs])


def difference_of(runs, reference):
    """Returns the points of accuracy between two variants, with their 95% confidence interval, as text."""
    from scipy.stats import ttest_ind

    if runs is reference:
        return "reference"
    if min(len(runs), len(reference)) < 2:
        return "-"
    # Welch's test
    accuracy = numbers(runs, "accuracy")
    other = numbers(reference, "accuracy")
    low, high = ttest_ind(accuracy, other, equal_var=False).confidence_interval()
    return f"{accuracy.mean() - other.mean():+.1f} ({low:+.1f} to {high:+.1f})"


def fit_power_law(x, y):
    """Returns the least squares of y = a - b * x^-c, ((a, b, c), standard errors), or None without a fit."""
    from scipy.optimize import curve_fit

    if len(set(x)) < 4:
        return None
    # the search begins with the highest accuracy as a, and with b from the range of y
    start = max(y), (max(y) - min(y)) * min(x), 1.0
    try:
        law, covariance = curve_fit(power_law, x, y, start)
    except RuntimeError:  # it does not converge
        return None
    return law, np.sqrt(np.diag(covariance))


def power_law(x, a, b, c):
    return a - b * np.power(x, -c)


# ---------------------------------------------------------------------------------------------------------
# Writing

def section(name, group_runs, runs, folder):
    """Draws a group's picture; returns its paragraphs.

    Args:
        name: of the group.
        group_runs: its runs.
        runs: all runs.
        folder: of the picture.
    """
    group = GROUPS.get(name, dict(question="Runs"))
    x = group.get("x", "")
    variants = variants_of(group_runs, runs, x)
    # the reference is the baseline, or else what has the most seeds
    baseline = group.get("baseline")
    reference = max(variants, key=lambda runs: (baseline in [run.name for run in runs], len(runs)))
    labels = [changes(runs[0].settings, reference[0].settings) or reference[0].name for runs in variants]
    paragraphs = [f"## {name}: {group['question']}", table(variants, labels, reference)]

    # the law of model scaling, by all runs of the group
    law = None
    if x == "parameters":
        everything = sum(variants, [])
        law = fit_power_law(numbers(everything, x), numbers(everything, "accuracy"))
    if law:
        values = [f"{name} = {value:.3g} ± {error:.2g}" for name, value, error in zip("abc", *law)]
        paragraphs.append("Least squares for n million parameters: accuracy = a - b * n^-c, with "
                          f"{', '.join(values)} (standard errors).")
    plot_group(x, variants, labels, law, folder / f"{name}.png")
    return [*paragraphs, f"![{group['question']}]({name}.png)"]


def table(variants, labels, reference):
    """Returns a Markdown table: a row for each variant."""
    titles = ["setting", "seeds", "points against the reference", *COLUMNS.values()]
    # the header, the line below it, and the rows
    rows = [titles, ["---"] * len(titles)]
    for label, runs in zip(labels, variants):
        cells = [spread(numbers(runs, name)) for name in COLUMNS]
        rows.append([label, str(len(runs)), difference_of(runs, reference), *cells])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def spread(values):
    """Returns the mean of values and, if they differ, ± their standard deviation, as text; - for nan."""
    # of equal values the deviation is rounding
    if np.ptp(values) > 1e-6 * abs(values).max():
        return f"{digits(values.mean(), 4)} ± {digits(values.std(ddof=1), 2)}"
    return digits(values.mean(), 4).replace("nan", "-")


def digits(value, count):
    """Returns a number with `count` significant digits, as text."""
    return f"{float(f'{value:.{count}g}'):,g}"


def plot_group(x, variants, labels, law, path):
    """Writes a picture: the accuracy of each run by x, and its learning curve.

    Args:
        x: a setting or a fact; "": the variants side by side.
        variants: lists of runs.
        labels: of the variants.
        law: what fit_power_law returns.
        path: of the picture.
    """
    from matplotlib.figure import Figure

    # on the left the accuracy of each run, on the right its learning curve, a color for each variant
    fig = Figure(figsize=(11, 6), layout="constrained")
    accuracy_axes, curve_axes = fig.subplots(1, 2, sharey=True)
    for i, (label, runs) in enumerate(zip(labels, variants)):
        positions = numbers(runs, x) if x else [i] * len(runs)
        accuracy_axes.plot(positions, numbers(runs, "accuracy"), "o", color=f"C{i}", label=label)
        for run in runs:
            curve_axes.plot(*zip(*run.evaluations.items()), color=f"C{i}")
    # the fitted law, from the first to the last point
    if law:
        positions = np.geomspace(*accuracy_axes.dataLim.intervalx, 200)
        accuracy_axes.plot(positions, power_law(positions, *law[0]), "k--", label="a - b * n^-c")

    # the axes
    accuracy_axes.set(xlabel=COLUMNS.get(x, x), ylabel=COLUMNS["accuracy"], ylim=(0, None))
    curve_axes.set(xlabel="step")
    if x:
        accuracy_axes.set_xscale("log")
    else:
        accuracy_axes.set_xticks([])
    fig.legend(loc="outside lower center", ncols=2, fontsize="x-small")
    fig.savefig(path, dpi=80)


if __name__ == "__main__":
    command(main)
