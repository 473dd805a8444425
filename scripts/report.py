"""Tables and pictures that compare runs: the groups of the scaling study, or any runs.

    python scripts/report.py                              the study: out/study
    python scripts/report.py out/demo0 out/demo1          these runs, or all runs in these folders
    python scripts/report.py pulled --out_dir=out/pulled  what was downloaded from a bucket

Writes out_dir/report.md, its PNGs, and results.json with the numbers of each complete run. A run is a folder
with metrics.jsonl, ckpt_*.json and log.txt. Runs that are unfinished or damaged are named. Runs that
differ only in their seed are one setting. A run of another group with the same settings is one more seed.
It needs matplotlib and scipy.
"""
import json
import math
import os
import pathlib
import re
import sys
from dataclasses import dataclass

import matplotlib
import numpy as np
from scipy.optimize import curve_fit
from scipy.stats import ttest_ind

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
from sweep import GROUPS, group_of

from configurator import UserError, command, configure, split_arguments
from data import read_metrics, saved_settings
from train import RUN_SETTINGS

# input and output; arguments without a dash are folders to read
out_dir = "out/report"  # report.md and its pictures
target = 85.0  # percent of the test puzzles, for the steps and the time needed to reach it

STUDY = "out/study"
# The numbers of a run, with their units.
VALUES = {
    "accuracy": "test puzzles solved (%)",
    "surest": "surest answers right (%)",
    "train": "training puzzles solved (%)",
    "gap": "training - test (points)",
    "parameters": "parameters (millions)",
    "depth": "effective depth (layers per supervision step)",
    "speed": "throughput (examples/s)",
    "hours": "training time (hours)",
    "halting": "mean halting step in training",
    "saved": "supervision steps saved by halting (%)",
    "steps_to": "steps to the target",
    "hours_to": "hours to the target",
    "puzzles": "training puzzles",
    "copies": "augmented copies per puzzle",
    "global_batch_size": "global batch (sequences)",
    "halt_max_steps": "maximum supervision steps (halt_max_steps)",
    "pflop": "training arithmetic (PFLOP)",
}
LOGARITHMIC = "parameters", "puzzles", "copies", "global_batch_size"
# the columns of each table, after accuracy, x and the panels
COLUMNS = (
    "surest", "train", "gap", "parameters", "speed", "saved", "steps_to", "hours_to", "pflop", "hours")
EXPLANATION = """Accuracy is the share of test puzzles solved in the final evaluation, by each puzzle's last
answer (with eval_patience, one that repeats); the surest comes from the step where q_halt was highest.
Training values are means over the last tenth of the run, of the weights and not of their average. Time is
steps times step time; arithmetic counts matmuls alone. The supervision steps saved assume that halting works
at inference as in training. Steps and time to the target are interpolated between evaluations.
± is one standard deviation over seeds. Differences have 95% confidence intervals by Welch's test."""


@dataclass
class Run:
    """One run, as its folder has it."""
    name: str  # its folder's
    problem: str = ""  # why it is not complete; "" if it is
    settings: str = ""  # those that can change its result, but for the seed, as JSON
    seed: int = 0
    values: dict = None  # {key of VALUES: number}, if it is complete
    evaluations: dict = None  # {step: percent of the test puzzles solved}
    hardware: tuple = ()  # a run may move between machines

@dataclass
class Variant:
    """Runs of equal settings, one for each seed: a row of a table, a point of a panel."""
    label: str
    runs: list

    def values(self, key):
        """Returns a number of each run."""
        return [run.values[key] for run in self.runs]

    def mean(self, key):
        return np.mean(self.values(key))

    def deviation(self, key):
        """Returns the standard deviation over seeds, 0 if there is one."""
        return np.std(self.values(key), ddof=min(1, len(self.runs) - 1))


def main(argv):
    """Reads the runs, writes report.md and its pictures, and prints what is not complete."""
    settings, folders, unknown = split_arguments(__file__, argv)
    configure(__file__, unknown)  # raises UserError for the first
    runs = []
    for folder in find_runs(folders or [STUDY]):
        runs.append(read_run(folder, settings.target))
    complete = [run for run in runs if not run.problem]
    status = [f"- {len(complete)} of {len(runs)} runs are complete"]
    hardware = set()
    for run in runs:
        hardware.update(run.hardware)
        if run.problem:
            status.append(f"- {run.name}: {run.problem}")

    # report.md has the status of the runs, then a section for each group
    out_dir = pathlib.Path(settings.out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    lines = ["# Report", "", EXPLANATION, "", f"Hardware: {'; '.join(sorted(hardware))}.", "", *status, ""]
    for group in GROUPS:
        compared = variants_of(group, complete)
        if compared:
            lines += section(group, compared, out_dir)
    (out_dir / "report.md").write_text("\n".join(lines), encoding="utf-8")

    # results.json has the numbers that are known
    results = []
    for run in complete:
        known = {key: value for key, value in run.values.items() if not math.isnan(value)}
        results.append(dict(name=run.name, seed=run.seed, **known, evaluations=run.evaluations))
    (out_dir / "results.json").write_text(json.dumps(results, indent=1))
    print(*status, f"wrote {out_dir}/report.md", sep="\n")


# ---------------------------------------------------------------------------------------------------------
# Reading

def find_runs(paths):
    """Returns the folders with a metrics.jsonl in paths or below. Raises UserError."""
    files = []
    for path in paths:
        found = sorted(pathlib.Path(path).rglob("metrics.jsonl"))
        if not found:
            raise UserError(f"{path}: no run (a folder with metrics.jsonl) there")
        files += found
    return list(dict.fromkeys(file.parent for file in files))


def read_run(folder, target):
    """Returns the Run in a folder. A damaged file costs the run its numbers, and is the problem."""
    name = folder.absolute().name
    try:
        lines = read_metrics(folder / "metrics.jsonl")
        if not lines or "final" not in lines[-1]:
            return Run(name, "unfinished")
        settings = saved_settings(folder)
        log = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")
        values, evaluations = read_values(lines, settings, log, target)
        hardware = tuple(re.findall(r"cores, (\d+ x .*?); settings", log))
        seed = settings.pop("seed")
    except Exception as e:
        return Run(name, f"damaged: {type(e).__name__}: {e}"[:200])

    # what tells this run from others
    for key in (*RUN_SETTINGS, "data_prepare"):
        settings.pop(key, None)
    return Run(name, "", json.dumps(settings, sort_keys=True), seed, values, evaluations, hardware)


def read_values(lines, settings, log, target):
    """Returns the numbers of a run, {key of VALUES: number}, and its accuracy in percent, {step: number}.

    Args:
        lines: of its metrics.jsonl.
        settings: its own.
        log: the text of its log.txt.
        target: percent of the test puzzles.
    """
    trained = [line for line in lines if "perf/step_time" in line]
    evaluated = [line for line in lines if "eval/exact_accuracy" in line]

    # what training had cost at each line, which has the means of the steps since the line before
    logged_steps = np.append(0, column(trained, "step"))
    seconds = np.diff(logged_steps) * column(trained, "perf/step_time")
    hours = np.append(0, seconds.cumsum() / 3600)
    steps = column(evaluated, "step")
    accuracy = 100 * column(evaluated, "eval/exact_accuracy")
    steps_to = crossing(steps, accuracy, target)

    # means over the last tenth of the run
    tail = [line for line in trained if line["step"] > 0.9 * trained[-1]["step"]]
    train = 100 * column(tail, "train/exact_accuracy").mean()
    halting = column(tail, "train/steps").mean()

    # the size of the model and of the data; a resumed run repeats this line
    pattern = r"^(\d+) parameters; (\d+) training examples of (\d+) puzzles"
    counts = re.findall(pattern, log.replace(",", ""), re.M)[-1]
    parameters, examples, puzzles = map(float, counts)
    values = dict(
        accuracy=accuracy[-1],
        surest=100 * lines[-1]["eval/surest_accuracy"],
        train=train,
        gap=train - accuracy[-1],
        parameters=parameters / 1e6,
        depth=settings["H_cycles"] * (settings["L_cycles"] + 1) * settings["L_layers"],
        speed=np.median(column(trained, "perf/examples_per_sec")),
        hours=hours[-1],
        halting=halting,
        saved=100 * (1 - halting / settings["halt_max_steps"]),
        steps_to=steps_to,
        hours_to=np.interp(steps_to, logged_steps, hours),
        puzzles=puzzles,
        copies=examples / puzzles - 1,
        global_batch_size=settings["global_batch_size"],
        halt_max_steps=settings["halt_max_steps"],
        pflop=(seconds * column(trained, "perf/tflops")).sum() / 1000,
    )
    return values, dict(zip(steps.astype(int).tolist(), accuracy.tolist()))


def column(lines, key):
    """Returns a metric of all lines as an array."""
    return np.array([line[key] for line in lines], dtype=float)


def crossing(steps, accuracy, level):
    """Returns the step at which accuracy, which is 0 at step 0, first rises to a level; nan if never."""
    reached = np.flatnonzero(accuracy >= level)
    if not len(reached):
        return math.nan
    around = slice(reached[0], reached[0] + 2)
    return np.interp(level, np.append(0, accuracy)[around], np.append(0, steps)[around])


# ---------------------------------------------------------------------------------------------------------
# Comparing

def variants_of(group, runs):
    """Returns the Variants of a group, by x; runs: all that are complete. Those of other groups add seeds."""
    # {settings: {seed: run}}; of two runs with one seed the group's own counts
    by_settings = {}
    for run in sorted(runs, key=lambda run: group_of(run.name) is not group):
        by_seed = by_settings.setdefault(run.settings, {})
        by_seed.setdefault(run.seed, run)

    # a variant is named by the group's own runs
    variants = []
    for by_seed in by_settings.values():
        names = dict.fromkeys(run.name for run in by_seed.values() if group_of(run.name) is group)
        if names:
            variants.append(Variant(", ".join(names), list(by_seed.values())))
    if group.x:
        variants.sort(key=lambda variant: variant.mean(group.x))
    return variants


def difference_of(variant, base):
    """Returns the points of accuracy between two variants, with their 95% confidence interval, as text."""
    if variant is base or min(len(variant.runs), len(base.runs)) < 2:
        return "-"
    interval = ttest_ind(variant.values("accuracy"), base.values("accuracy"), equal_var=False)
    low, high = interval.confidence_interval()
    return f"{variant.mean('accuracy') - base.mean('accuracy'):+.1f} ({low:+.1f} to {high:+.1f})"


def fit_power_law(x, y):
    """Returns the least squares of y = a - b * x^-c, ((a, b, c), standard errors), or None without a fit."""
    if len(set(x)) < 4:
        return None
    # The search begins with the highest accuracy as a, and with b from the range of y.
    start = max(y), (max(y) - min(y)) * min(x), 1.0
    try:
        law, covariance = curve_fit(power_law, x, y, start)
    except RuntimeError:  # it does not converge
        return None
    # A line, or a curve that falls, is fitted by values that say nothing.
    errors = np.sqrt(np.diag(covariance))
    saturates = law[1] > 0 and 0.02 < law[2] < 10
    return (law, errors) if saturates and np.isfinite(errors).all() else None


def power_law(x, a, b, c):
    return a - b * np.power(x, -c)


# ---------------------------------------------------------------------------------------------------------
# Writing

def section(group, variants, out_dir):
    """Draws a group's picture; returns its Markdown lines.

    Args:
        group: the Group.
        variants: its Variants.
        out_dir: folder of the picture.
    """
    name = group.prefix or "runs"
    lines = [f"## {name}: {group.question}", "", *table(group, variants), ""]
    law = None
    if group.x == "parameters":
        parameters = np.concatenate([variant.values("parameters") for variant in variants])
        accuracy = np.concatenate([variant.values("accuracy") for variant in variants])
        law = fit_power_law(parameters, accuracy)
        lines += [law_sentence(law), ""]
    plot_group(group, variants, law, out_dir / f"{name}.png")
    return [*lines, f"![{group.question}]({name}.png)", ""]


def law_sentence(law):
    """Returns the law of fit_power_law in words."""
    if not law:
        return "No fit: accuracy does not rise and level off with size as a - b * params^-c does."
    values = [f"{name} = {value:.3g} ± {error:.2g}" for name, value, error in zip("abc", *law)]
    return (f"Least squares for n million parameters: accuracy = a - b * n^-c, with {', '.join(values)} "
            "(standard errors).")


def table(group, variants):
    """Returns Markdown lines: a row for each variant, mean ± deviation over seeds, - if not known."""
    # The variant with the most seeds is the one that all others are compared with.
    base = max(variants, key=lambda variant: len(variant.runs))
    keys = dict.fromkeys(["accuracy", group.x, *group.panels, *COLUMNS])
    keys.pop("", None)

    # one row for each variant
    titles = ["setting", "seeds", f"points against {base.label}", *map(VALUES.get, keys)]
    rows = [titles, ["---"] * len(titles)]
    for variant in variants:
        row = [variant.label, str(len(variant.runs)), difference_of(variant, base)]
        for key in keys:
            cell = digits(variant.mean(key))
            if variant.deviation(key) > 1e-6 * abs(variant.mean(key)):
                cell += f" ± {digits(variant.deviation(key))}"
            row.append(cell)
        rows.append(row)
    return ["| " + " | ".join(row) + " |" for row in rows]


def digits(value):
    """Returns a number with four significant digits, or all before the point; - for nan."""
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


# ---------------------------------------------------------------------------------------------------------
# Drawing

def plot_group(group, variants, law, path):
    """Writes the picture of a group: its panels and learning curves.

    Args:
        group: the Group.
        variants: its Variants.
        law: what fit_power_law returns.
        path: of the picture.
    """
    count = len(group.panels) + 1
    fig, axes = plt.subplots(1, count, figsize=(4.5 * count, 4.5), layout="constrained")
    for i, variant in enumerate(variants):
        # a point in each panel, with its deviation over seeds; a learning curve for each seed
        x = variant.mean(group.x) if group.x else variant.label
        for key, ax in zip(group.panels, axes):
            ax.errorbar(x, variant.mean(key), variant.deviation(key), fmt="o", capsize=3, color=f"C{i}",
                        label=variant.label)
        for run in variant.runs:
            axes[-1].plot(list(run.evaluations), list(run.evaluations.values()), color=f"C{i}")

    # the axes
    for key, ax in zip(group.panels, axes):
        ax.set(xlabel=VALUES.get(group.x, ""), ylabel=VALUES[key])
        ax.tick_params("x", rotation=30)
        if group.x in LOGARITHMIC:
            ax.set_xscale("log")
    axes[-1].set(xlabel="step", ylabel=VALUES["accuracy"])

    # the fitted law, over the width of its panel
    if law:
        x = np.geomspace(*axes[0].get_xlim(), 200)
        axes[0].plot(x, power_law(x, *law[0]), "k--", label="a - b * n^-c")
    axes[0].legend(fontsize="small")
    fig.suptitle(group.question)
    fig.savefig(path, dpi=110)
    plt.close(fig)


if __name__ == "__main__":
    command(lambda: main(sys.argv[1:]), __file__)
