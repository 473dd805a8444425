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
from sweep import GROUPS, changes, group_of

from configurator import configure, split_arguments
from runtime.errors import UserError, writing
from runtime.files import read_facts, read_metrics
from runtime.process import command


class Settings:
    # input and output; arguments without a dash are folders to read
    out_dir = "out/report"  # report.md and its pictures
    target = 85.0  # percent of the test puzzles, for the steps needed to reach it


# The columns of the tables.
COLUMNS = {
    "accuracy": "test puzzles solved (%)",
    "gap": "training - test (points)",
    "parameters": "parameters (millions)",
    "depth": "effective depth (layers per supervision step)",
    "halting": "mean halting step in training",
    "steps_to": "steps to the target",
    "speed": "throughput (examples/s)",
    "hours": "training time (hours)",
    "pflop": "training arithmetic (PFLOP)",
}
EXPLANATION = """A row is named by how its settings differ from the reference's: the baseline or, outside the
study, the setting with the most seeds. ± is one standard deviation over seeds. Accuracy is the share of test
puzzles solved in the final evaluation, by each puzzle's last answer (with eval_patience, one that repeats).
Training values are means over the last tenth of the run, of the weights and not of their average. Time is
steps times step time; arithmetic counts only matmuls. The target counts as reached at the first evaluation
that reaches it; a "-" stands where a seed did not."""


class Run(NamedTuple):
    """A complete run, as its metrics.jsonl has it."""
    name: str  # of its folder
    group: str  # a key of GROUPS; for runs outside the study their dataset
    seed: int
    settings: dict  # all but the seed, and what else tells it from other runs
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
    status = []
    for path in find_files(paths or ["out/study"]):
        try:
            runs.append(read_run(path, settings.target))
        except Exception as e:  # whatever the damage is, the other runs have their report
            status.append(f"- {path}: {e if isinstance(e, UserError) else repr(e)}")
    status.insert(0, f"- {len(runs)} of {len(runs) + len(status)} runs are complete")
    hardware = sorted({name for run in runs for name in run.facts["hardware"]})

    # report.md has the status of the runs, then a section for each group; results.json has the numbers
    folder = Path(settings.out_dir)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    paragraphs = ["# Report", EXPLANATION, f"Hardware: {'; '.join(hardware)}.", "\n".join(status)]
    for group in dict.fromkeys([*GROUPS, *(run.group for run in runs)]):
        paragraphs += section(group, runs, folder)
    (folder / "report.md").write_text("\n\n".join(paragraphs) + "\n", encoding="utf-8")
    results = [run.facts | dict(name=run.name, seed=run.seed, evaluations=run.evaluations) for run in runs]
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

    # two runs with these settings differ in nothing else; a dataset may have moved
    name = path.absolute().parent.name
    settings = facts.pop("settings")
    seed = settings.pop("seed")
    data = f"{Path(settings['data_path']).name}-{facts['data_sha256'][:8]}"
    settings |= dict(
        data_path=data,
        forks=facts.pop("forks", {}),
        began_with=facts.pop("init_from", "scratch"),
    )

    # the columns
    steps = column(lines, "step", "eval/exact_accuracy").tolist()
    accuracy = 100 * column(lines, "eval/exact_accuracy")
    if max(accuracy) >= target:
        facts["steps_to"] = steps[np.argmax(accuracy >= target)]
    facts["parameters"] /= 1e6
    facts["accuracy"] = accuracy[-1]
    facts["depth"] = settings["H_cycles"] * (settings["L_cycles"] + 1) * settings["L_layers"]
    facts |= training_facts(lines, accuracy[-1])
    return Run(name, group_of(name) or data, seed, settings, facts, dict(zip(steps, accuracy)))


def training_facts(lines, accuracy):
    """Returns the columns that the lines of training steps give; accuracy: of the test, in percent."""
    solved = column(lines, "train/exact_accuracy")
    last_tenth = -len(solved) // 10
    # a line stands for the steps since the one before; none has a speed if every step compiled
    steps = np.diff(column(lines, "step", "perf/step_time"), prepend=0)
    seconds = steps * column(lines, "perf/step_time")
    return dict(
        gap=100 * solved[last_tenth:].mean() - accuracy,
        halting=column(lines, "train/steps")[last_tenth:].mean(),
        speed=np.median(column(lines, "perf/examples_per_sec")),
        hours=seconds.sum() / 3600 or math.nan,
        pflop=seconds @ column(lines, "perf/tflops") / 1000 or math.nan,
    )


def column(lines, name, beside=""):
    """Returns the values of a name in the lines that have it, or have `beside`."""
    return np.array([line[name] for line in lines if (beside or name) in line])


# ---------------------------------------------------------------------------------------------------------
# Comparing

def variants_of(group_runs, runs, x):
    """Returns the variants of a group, lists of runs with equal settings and different seeds, by x.

    Args:
        group_runs: the group's runs.
        runs: all runs; those with the settings of a group's run are seeds of it.
        x: a setting or a fact, or "".
    """
    variants = []
    for run in group_runs:
        same = [other for other in [*group_runs, *runs] if not changes(other.settings, run.settings)]
        variant = [*{other.seed: other for other in same}.values()]
        if variant not in variants:
            variants.append(variant)
    return sorted(variants, key=lambda variant: numbers(variant, x).mean()) if x else variants


def numbers(runs, name):
    """Returns a setting or a fact of each run, nan if not known."""
    return np.array([(run.settings | run.facts).get(name, math.nan) for run in runs])


def fit_power_law(x, y):
    """Returns the least squares of y = a - b * x^-c, ((a, b, c), standard errors), or None without a fit."""
    from scipy.optimize import curve_fit

    if len(set(x)) < 4:
        return None
    # the search begins with the highest accuracy as a, and with b from the range of y
    try:
        law, covariance = curve_fit(power_law, x, y, [max(y), np.ptp(y) * min(x), 1])
    except RuntimeError:  # it does not converge
        return None
    return law, np.sqrt(np.diag(covariance))


def power_law(x, a, b, c):
    return a - b * np.power(x, -c)


# ---------------------------------------------------------------------------------------------------------
# Writing

def section(name, runs, folder):
    """Draws a group's picture; returns its paragraphs, [] if it has no run.

    Args:
        name: of the group.
        runs: all runs.
        folder: of the picture.
    """
    group_runs = [run for run in runs if run.group == name]
    if not group_runs:
        return []
    group = GROUPS.get(name, dict(question="Runs"))
    x = group.get("x", "")
    variants = variants_of(group_runs, runs, x)
    # the reference is the baseline, or else what has the most seeds
    baseline = group.get("baseline")
    reference = max(variants, key=lambda runs: (baseline in [run.name for run in runs], len(runs)))[0]
    labels = [changes(runs[0].settings, reference.settings) or reference.name for runs in variants]
    paragraphs = [f"## {name}: {group['question']}", table(variants, labels)]

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


def table(variants, labels):
    """Returns a Markdown table: a row for each variant."""
    rows = [["setting", "seeds", *COLUMNS.values()], ["---"] * (2 + len(COLUMNS))]
    for label, runs in zip(labels, variants):
        rows.append([label, str(len(runs)), *(spread(numbers(runs, name)) for name in COLUMNS)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def spread(values):
    """Returns the mean of values and, if they differ, ± their standard deviation, as text; - for nan."""
    mean = digits(values.mean(), 4).replace("nan", "-")
    # of equal values the deviation is rounding
    if np.ptp(values) > 1e-6 * abs(values).max():
        return f"{mean} ± {digits(values.std(ddof=1), 2)}"
    return mean


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
            curve_axes.plot([*run.evaluations], [*run.evaluations.values()], color=f"C{i}")
    # the fitted law, from the first to the last point
    if law:
        positions = np.geomspace(*accuracy_axes.dataLim.intervalx, 200)
        accuracy_axes.plot(positions, power_law(positions, *law[0]), "k--", label="a - b * n^-c")

    # the axes
    accuracy_axes.set(xlabel=COLUMNS.get(x, x), ylabel=COLUMNS["accuracy"], xscale="log" if x else "linear")
    curve_axes.set(xlabel="step", ylim=(0, None))
    fig.legend(loc="outside lower center", ncols=2, fontsize="x-small")
    fig.savefig(path, dpi=80)


if __name__ == "__main__":
    command(main)
