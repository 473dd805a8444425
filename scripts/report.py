"""Tables and pictures that compare runs: the groups of the scaling study, or any runs.

    python scripts/report.py                              the study: out/study
    python scripts/report.py out/demo0 out/demo1          these runs, or all runs in these folders
    python scripts/report.py pulled --out_dir=out/pulled  what was downloaded from a bucket

Reads the metrics.jsonl of each run. Writes out_dir/report.md, its PNGs, and results.json with the numbers of
each complete run. Runs that are unfinished or damaged are named. Runs whose settings differ in the seed alone
are one setting, and a run of another group with the same settings is one more seed. It needs matplotlib and
scipy.
"""
import json
import math
import os
import pathlib
import sys
from typing import NamedTuple

import matplotlib
import numpy as np
from scipy.optimize import curve_fit
from scipy.stats import ttest_ind

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
from sweep import GROUPS, NEUTRAL, group_of

from configurator import UserError, command, configure, split_arguments
from data import read_facts, read_metrics

# input and output; arguments without a dash are folders to read
out_dir = "out/report"  # report.md and its pictures
target = 85.0  # percent of the test puzzles, for the steps and the time needed to reach it

# The columns of the tables.
COLUMNS = {
    "accuracy": "test puzzles solved (%)",
    "surest": "surest answers right (%)",
    "train": "training puzzles solved (%)",
    "gap": "training - test (points)",
    "parameters": "parameters (millions)",
    "depth": "effective depth (layers per supervision step)",
    "halting": "mean halting step in training",
    "saved": "supervision steps saved by halting (%)",
    "steps_to": "steps to the target",
    "hours_to": "hours to the target",
    "speed": "throughput (examples/s)",
    "hours": "training time (hours)",
    "pflop": "training arithmetic (PFLOP)",
}
LOGARITHMIC = ("puzzles", "examples", "global_batch_size")  # abscissae
EXPLANATION = """Accuracy is the share of test puzzles solved in the final evaluation, by each puzzle's last
answer (with eval_patience, one that repeats); the surest comes from the step where q_halt was highest.
Training values are means over the last tenth of the run, of the weights and not of their average. Time is
steps times step time; arithmetic counts matmuls alone. The supervision steps saved assume that halting works
at inference as in training. Steps and time to the target are interpolated between evaluations.
± is one standard deviation over seeds. The reference is the baseline or, outside the study, the setting with
the most seeds. Differences from it have 95% confidence intervals by Welch's test."""


class Run(NamedTuple):
    """A complete run, as its metrics.jsonl has it."""
    name: str  # of its folder
    group: str  # a key of GROUPS; for runs outside the study their dataset
    seed: int
    settings: dict  # those that can change its result, but for the seed, and the dataset with its hash
    facts: dict  # what the first line says, and the numbers of COLUMNS that are known
    evaluations: dict  # {step: percent of the test puzzles solved}


class Variant(NamedTuple):
    """Runs of equal settings, one for each seed: a row of a table, a colour of a picture."""
    label: str
    runs: list

    def numbers(self, name):
        """Returns a setting or a fact of each run, nan if not known."""
        return np.array([(run.settings | run.facts).get(name, math.nan) for run in self.runs])


def main(argv):
    """Reads the runs, writes report.md and its pictures, and prints what is not complete."""
    settings, paths, unknown = split_arguments(__file__, argv)
    configure(__file__, unknown)  # raises UserError for the first
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
    out_dir = pathlib.Path(settings.out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    text = ["# Report", "", EXPLANATION, "", f"Hardware: {'; '.join(sorted(hardware))}.", "", *status, ""]
    for group in dict.fromkeys([*GROUPS, *(run.group for run in runs)]):
        variants = variants_of(group, runs)
        if variants:
            text += section(group, variants, out_dir)
    (out_dir / "report.md").write_text("\n".join(text), encoding="utf-8")
    results = [dict(name=run.name, seed=run.seed, **run.facts, evaluations=run.evaluations) for run in runs]
    (out_dir / "results.json").write_text(json.dumps(results, indent=1))
    print(*status, f"wrote {out_dir}/report.md", sep="\n")


# ---------------------------------------------------------------------------------------------------------
# Reading

def find_files(paths):
    """Returns each metrics.jsonl in paths or below. Raises UserError."""
    files = []
    for path in paths:
        found = sorted(pathlib.Path(path).rglob("metrics.jsonl"))
        if not found:
            raise UserError(f"{path}: no run (a folder with metrics.jsonl) there")
        files += found
    return files


def read_run(path, target):
    """Returns the Run of a metrics.jsonl. Raises UserError if it is not complete.

    Args:
        path: of the file.
        target: percent of the test puzzles.
    """
    facts = read_facts(path)
    lines = read_metrics(path)
    if not facts:
        raise UserError("the first line does not say what the run is; an older train.py has written it")
    if not lines or "final" not in lines[-1]:
        raise UserError("unfinished")
    settings = facts.pop("settings")
    step_time, speed, tflops = columns(lines, "perf/step_time", "perf/examples_per_sec", "perf/tflops")
    solved, halting = columns(lines, "train/exact_accuracy", "train/steps")
    steps, accuracy = columns(lines, "step", "eval/exact_accuracy")
    accuracy *= 100
    # training, in the last tenth of the run
    train = 100 * solved[-len(solved) // 10:].mean()
    halting_step = halting[-len(halting) // 10:].mean()
    step_hours = step_time.mean() / 3600
    facts |= dict(
        accuracy=accuracy[-1],
        surest=100 * lines[-1]["eval/surest_accuracy"],
        train=train,
        gap=train - accuracy[-1],
        parameters=facts["parameters"] / 1e6,
        depth=settings["H_cycles"] * (settings["L_cycles"] + 1) * settings["L_layers"],
        halting=halting_step,
        saved=100 * (1 - halting_step / settings["halt_max_steps"]),
        speed=np.median(speed),
        hours=facts["total_steps"] * step_hours,
        pflop=facts["total_steps"] * (tflops * step_time).mean() / 1000,
    )
    # where the best accuracy so far, which is 0 at step 0, reaches the target
    best = np.maximum.accumulate(accuracy)
    if best[-1] >= target:
        facts["steps_to"] = np.interp(target, [0, *best], [0, *steps])
        facts["hours_to"] = facts["steps_to"] * step_hours

    # what tells this run from others; its dataset may have moved
    name = path.absolute().parent.name
    data = f"{os.path.basename(settings['data_path'])}-{facts['data_sha256'][:8]}"
    seed = settings.pop("seed")
    decisive = {key: value for key, value in settings.items() if key not in NEUTRAL} | dict(data_path=data)
    return Run(name, group_of(name) or data, seed, decisive, facts, dict(zip(map(int, steps), accuracy)))


def columns(lines, *keys):
    """Returns metrics as arrays, [keys, lines], from the lines that have them all."""
    return np.array([[line[key] for key in keys] for line in lines if line.keys() >= {*keys}]).T


# ---------------------------------------------------------------------------------------------------------
# Comparing

def variants_of(group, runs):
    """Returns the Variants of a group's runs, by x. Other runs with the settings of one are seeds of it."""
    own = [run for run in runs if run.group == group]
    variants = {}
    for run in own:
        # the settings in which the group's runs differ
        words = []
        for name, value in run.settings.items():
            if any(other.settings.get(name) != value for other in own):
                words.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
        # of two runs with one seed the group's own counts
        seeds = {other.seed: other for other in [*runs, *own] if other.settings == run.settings}
        label = ", ".join(words or [run.name for run in own])
        variants[label] = Variant(label, list(seeds.values()))
    x = GROUPS.get(group, {}).get("x")
    return sorted(variants.values(), key=lambda variant: variant.numbers(x).mean() if x else 0)


def difference_of(variant, reference):
    """Returns the points of accuracy between two variants, with their 95% confidence interval, as text."""
    if variant is reference:
        return "reference"
    if min(len(variant.runs), len(reference.runs)) < 2:
        return "-"
    accuracy = variant.numbers("accuracy")
    other = reference.numbers("accuracy")
    low, high = ttest_ind(accuracy, other, equal_var=False).confidence_interval()
    return f"{accuracy.mean() - other.mean():+.1f} ({low:+.1f} to {high:+.1f})"


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

def section(name, variants, out_dir):
    """Draws a group's picture; returns its Markdown lines.

    Args:
        name: of the group.
        variants: its Variants.
        out_dir: folder of the picture.
    """
    group = GROUPS.get(name, dict(question="Runs"))
    # the reference is the baseline, or else what has the most seeds
    reference = max(variants, key=lambda variant: len(variant.runs))
    for variant in variants:
        if group.get("baseline") in [run.name for run in variant.runs]:
            reference = variant
    lines = [f"## {name}: {group['question']}", "", *table(variants, reference), ""]

    law = None
    if group.get("x") == "parameters":
        points = [np.concatenate([v.numbers(key) for v in variants]) for key in ("parameters", "accuracy")]
        law = fit_power_law(*points)
        lines += [law_sentence(law), ""]
    plot_group(group, variants, law, out_dir / f"{name}.png")
    return [*lines, f"![{group['question']}]({name}.png)", ""]


def law_sentence(law):
    """Returns the law of fit_power_law in words."""
    if not law:
        return "No fit: accuracy does not rise and level off with size as a - b * params^-c does."
    values = [f"{name} = {value:.3g} ± {error:.2g}" for name, value, error in zip("abc", *law)]
    return (f"Least squares for n million parameters: accuracy = a - b * n^-c, with {', '.join(values)} "
            "(standard errors).")


def table(variants, reference):
    """Returns Markdown lines: a row for each variant."""
    titles = ["setting", "seeds", "points against the reference", *COLUMNS.values()]
    rows = [titles, ["---"] * len(titles)]
    for variant in variants:
        cells = [spread(variant.numbers(name)) for name in COLUMNS]
        rows.append([variant.label, str(len(variant.runs)), difference_of(variant, reference), *cells])
    return ["| " + " | ".join(row) + " |" for row in rows]


def spread(values):
    """Returns the mean of values and, if they differ, ± their standard deviation, as text; - for nan."""
    if np.ptp(values) > 1e-6 * abs(values).max():
        return f"{digits(values.mean(), 4)} ± {digits(values.std(ddof=1), 2)}"
    return digits(values.mean(), 4).replace("nan", "-")


def digits(value, count):
    """Returns a number with so many significant digits, as text."""
    return f"{float(f'{value:.{count}g}'):,g}"


def plot_group(group, variants, law, path):
    """Writes a picture: the accuracy of each run by x, and its learning curve.

    Args:
        group: a dict as in config/study.py.
        variants: its Variants.
        law: what fit_power_law returns.
        path: of the picture.
    """
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 6), sharey=True, layout="constrained")
    x = group.get("x")
    for i, variant in enumerate(variants):
        accuracy = variant.numbers("accuracy")
        places = variant.numbers(x) if x else [i] * len(accuracy)
        left.plot(places, accuracy, "o", color=f"C{i}", label=variant.label)
        for run in variant.runs:
            right.plot(*zip(*run.evaluations.items()), color=f"C{i}")

    # the axes, from 0
    left.set(xlabel=COLUMNS.get(x, x), ylabel=COLUMNS["accuracy"], ylim=(0, None))
    if x in LOGARITHMIC:
        left.set_xscale("log")
    if not x:
        left.set_xticks([])
    # the fitted law, from the first to the last point
    if law:
        places = np.linspace(*left.dataLim.intervalx, 200)
        left.plot(places, power_law(places, *law[0]), "k--", label="a - b * n^-c")
    fig.legend(loc="outside lower center", ncols=2, fontsize="x-small")
    right.set_xlabel("step")
    fig.suptitle(group["question"])
    fig.savefig(path, dpi=80)
    plt.close(fig)


if __name__ == "__main__":
    command(lambda: main(sys.argv[1:]), __file__)
