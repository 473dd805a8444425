"""Tables and pictures that compare runs: the groups of the scaling study, or any runs.

    python scripts/report.py                              the study: out/study
    python scripts/report.py out/demo0 out/demo1          these runs, or all runs in these folders
    python scripts/report.py pulled --out_dir=out/pulled  what was downloaded from a bucket

Writes out_dir/report.md, its PNGs, and results.json with the numbers of each complete run. A run is a folder
with metrics.jsonl, ckpt_*.json and log.txt. Runs that are missing, unfinished or damaged are named. Runs that
differ only in their seed are one setting. A run of another group with the same settings is one more seed.
"""
import json
import math
import os
import pathlib
import re
import sys
from dataclasses import dataclass

import numpy as np

try:
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from scipy.optimize import curve_fit
    from scipy.stats import ttest_ind
except ImportError:
    plt = None  # main raises an error

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
from sweep import RUN_SETTINGS

from configurator import UserError, command, configure
from data import read_metrics, saved_settings

# input and output; arguments without a dash are folders to read
out_dir = "out/report"  # report.md and its pictures
configs = "config/study"  # a file for each run that the study should have
target = 85.0  # percent of the test puzzles, for the steps, the time and the data needed to reach it
# ---

STUDY = "out/study"


@dataclass
class Group:
    """A question of the study, and the keys of VALUES that answer it."""
    prefix: str  # of its runs' names
    question: str
    x: str = ""  # abscissa of its panels; "": the settings' names
    panels: tuple = ("accuracy",)  # ordinates, a panel each; the learning curves follow
    columns: tuple = ()  # of its table, besides x, panels and COLUMNS


GROUPS = (
    Group("exp01", "How does accuracy grow with parameters, and where does it saturate?", "parameters",
          columns=("per_hour",)),
    Group("exp02a", "Does more effective depth, by L_cycles, help, and does it overfit?", "depth",
          columns=("gap", "speed")),
    Group("exp02b", "At equal effective depth, are H_cycles worth more than L_cycles?", "depth",
          columns=("gap", "speed")),
    Group("exp03", "Can recursion replace layers?", columns=("parameters", "speed")),
    Group("exp04a", "How few training puzzles are enough?", "puzzles", ("accuracy", "gap")),
    Group("exp04b", "Can augmented copies replace data?", "copies", ("accuracy", "gap")),
    Group("exp05", "What does accuracy cost at inference?", "halt_max_steps", ("accuracy", "halting"),
          ("saved",)),
    Group("exp06", "Up to which size does a larger batch save steps and gain throughput?",
          "global_batch_size", ("accuracy", "speed"), ("steps_to",)),
    Group("exp07", "Which precision is enough?", columns=("speed",)),
    Group("exp08", "Does the average of the weights help, and at which rate?"),
    Group("exp09", "Which optimizer?", columns=("steps_to", "speed")),
    Group("exp10", "Which learning rate, and does decaying it help?", columns=("steps_to",)),
    Group("contrib01", "Does a curriculum of growing depth reach the target sooner?",
          columns=("steps_to", "hours_to")),
    Group("contrib02", "Does exploration that decays over the run lead to earlier halting?",
          panels=("accuracy", "halting"), columns=("saved",)),
)
OTHERS = Group("", "How do these runs compare?", columns=("parameters", "speed"))
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
    "per_hour": "accuracy per parameter-hour (% / (million hours))",
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
COLUMNS = "surest", "train", "pflop", "hours"  # of each table
EXPLANATION = """Accuracy is the share of test puzzles solved in the final evaluation, by each puzzle's last
answer (with eval_patience, one that repeats); the surest is that of the step where q_halt was highest.
Training values are means over the last tenth of the run, of the weights and not of their average. Time is
steps times step time; arithmetic is that of matmuls. The supervision steps saved assume that halting works
at inference as in training. Steps and time to the target are interpolated between evaluations.
± is one standard deviation over seeds. Differences have 95% confidence intervals by Welch's test."""


@dataclass
class Run:
    """One run, as its folder has it."""
    name: str  # of its folder
    problem: str = ""  # why it is not complete; "" if it is
    settings: str = ""  # those that can change its result, but for the seed, as JSON
    seed: int = 0
    values: dict = None  # {key of VALUES: number}, if it is complete
    steps: tuple = ()  # of its evaluations
    pflop: tuple = ()  # until each of them
    accuracy: tuple = ()  # of each of them, in percent
    hardware: str = "unknown"

    @property
    def group(self):
        return next((group for group in GROUPS if self.name.startswith(group.prefix)), OTHERS)


@dataclass
class Setting:
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
        return np.std(self.values(key), ddof=1) if len(self.runs) > 1 else 0.0


def main(argv):
    """Reads the runs, writes report.md and its pictures, and prints what is missing."""
    # arguments with a dash are settings, all others folders
    settings = configure(__file__, [argument for argument in argv if argument.startswith("-")])
    if not plt:
        raise UserError("matplotlib or scipy is missing: pip install matplotlib scipy")
    folders = find_runs([argument for argument in argv if not argument.startswith("-")] or [STUDY])
    runs = [read_run(folder, settings.target) for folder in folders]
    # If some runs are of the study, those of its runs without a folder are missing.
    if any(run.group is not OTHERS for run in runs):
        names = {run.name for run in runs}
        planned = sorted(path.stem for path in pathlib.Path(settings.configs).glob("*.py"))
        runs += [Run(name, "missing") for name in planned if name not in names]
    complete = [run for run in runs if not run.problem]
    hardware = sorted({run.hardware for run in complete})
    os.makedirs(settings.out_dir, exist_ok=True)

    # report.md has the status of the runs, then a section for each group
    status = status_table(runs)
    lines = ["# Report", "", EXPLANATION, "", f"Hardware: {'; '.join(hardware)}.", "", *status, ""]
    for group in (*GROUPS, OTHERS):
        lines += section(group, runs, settings)
    path = pathlib.Path(settings.out_dir, "report.md")
    path.write_text("\n".join(lines), encoding="utf-8")

    # results.json has a line for each run.
    results = ",\n".join(json.dumps(run_numbers(run)) for run in complete)
    pathlib.Path(settings.out_dir, "results.json").write_text(f"[\n{results}\n]\n")
    print(*status, f"wrote {path}: {len(complete)} of {len(runs)} runs are complete", sep="\n")


# Reading.

def find_runs(paths):
    """Returns the folders with a metrics.jsonl in paths or below. Raises UserError."""
    folders = []
    for path in paths:
        files = sorted(pathlib.Path(path).rglob("metrics.jsonl"))
        if not files:
            raise UserError(f"{path}: no run (a folder with metrics.jsonl) there")
        folders += [file.parent for file in files]
    return list(dict.fromkeys(folders))


def read_run(folder, target):
    """Returns the Run in a folder. A damaged file costs the run its numbers, and is the problem."""
    name = folder.absolute().name
    try:
        return read_files(folder, name, target)
    except Exception as e:
        return Run(name, f"damaged: {type(e).__name__}: {e}"[:200])


def read_files(folder, name, target):
    """Returns the Run in a folder. Raises some exception if a file is damaged."""
    # Lines that a crash has cut or glued together are left out.
    lines = read_metrics(folder / "metrics.jsonl")
    trained = [line for line in lines if "perf/step_time" in line]
    evaluated = [line for line in lines if "eval/exact_accuracy" in line]

    # Only a complete run has numbers.
    settings = saved_settings(folder.glob("ckpt_*.json"), pathlib.Path.read_bytes)
    if not lines or "final" not in lines[-1]:
        return Run(name, "unfinished")
    if not settings:
        return Run(name, "no ckpt_*.json with its settings")

    # What training had cost at each evaluation. Each line has the means of the steps since the line before.
    logged_steps = [0, *column(trained, "step")]
    seconds = np.diff(logged_steps) * column(trained, "perf/step_time")
    hours = np.cumsum([0, *seconds / 3600])
    logged_pflop = np.cumsum([0, *seconds * column(trained, "perf/tflops") / 1000])
    steps = column(evaluated, "step")
    pflop = np.interp(steps, logged_steps, logged_pflop)
    accuracy = 100 * column(evaluated, "eval/exact_accuracy")

    # Means over the last tenth of the run.
    tail = [line for line in trained if line["step"] > 0.9 * trained[-1]["step"]]
    train = 100 * np.mean(column(tail, "train/exact_accuracy"))
    halting = np.mean(column(tail, "train/steps"))

    # The size of the model and of the data. A resumed run repeats this line.
    log = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")
    pattern = r"^([\d,]+) parameters; ([\d,]+) training examples of ([\d,]+) puzzles"
    counts = [float(text.replace(",", "")) for text in re.findall(pattern, log, re.M)[-1]]
    parameters, examples, puzzles = counts

    # what it reached, and what that took
    steps_to = crossing([0, *steps], [0, *accuracy], target)
    values = dict(
        accuracy=accuracy[-1],
        surest=100 * lines[-1]["eval/surest_accuracy"],
        train=train,
        gap=train - accuracy[-1],
        parameters=parameters / 1e6,
        depth=settings["H_cycles"] * (settings["L_cycles"] + 1) * settings["L_layers"],
        speed=np.median(column(trained, "perf/examples_per_sec")),
        hours=hours[-1],
        per_hour=1e6 * accuracy[-1] / parameters / hours[-1],
        halting=halting,
        saved=100 * (1 - halting / settings["halt_max_steps"]),
        steps_to=steps_to,
        hours_to=np.interp(steps_to, logged_steps, hours),
        puzzles=puzzles,
        copies=examples / puzzles - 1,
        global_batch_size=settings["global_batch_size"],
        halt_max_steps=settings["halt_max_steps"],
        pflop=pflop[-1],
    )
    # What tells this run from others. A run may have moved between machines.
    hardware = "; ".join(dict.fromkeys(re.findall(r"cores, (\d+ x .*?); settings", log)))
    seed = settings.pop("seed")
    for key in (*RUN_SETTINGS, "data_prepare"):
        settings.pop(key, None)
    settings = json.dumps(settings, sort_keys=True)
    return Run(name, "", settings, seed, values, steps, pflop, accuracy, hardware)


def column(lines, key):
    """Returns a metric of all lines as an array."""
    return np.array([line[key] for line in lines], dtype=float)


def crossing(x, y, level):
    """Returns the interpolated x at which y first rises to level, or nan. x rises."""
    for i in range(1, len(y)):
        if y[i - 1] < level <= y[i]:
            return np.interp(level, y[i - 1:i + 1], x[i - 1:i + 1])
    return math.nan


def run_numbers(run):
    """Returns what results.json has of a run: its seed, the numbers that are known, accuracy by step."""
    known = {key: value for key, value in run.values.items() if not math.isnan(value)}
    evaluations = dict(zip(run.steps.astype(int).tolist(), run.accuracy.tolist()))
    return dict(name=run.name, seed=run.seed, **known, evaluations=evaluations)


# Comparing.

def settings_of(group, runs):
    """Returns the Settings of a group's complete runs, by x. Runs of other groups add seeds."""
    complete = [run for run in runs if run.group is not OTHERS or group is OTHERS]
    complete = [run for run in complete if not run.problem]
    complete.sort(key=lambda run: run.group is not group)

    # {settings: {seed: run}}; of two runs with one seed the group's own counts
    by_settings = {}
    for run in complete:
        if run.group is group:
            by_settings.setdefault(run.settings, {})
        if run.settings in by_settings:
            by_settings[run.settings].setdefault(run.seed, run)

    # A setting is named by the group's own runs.
    settings = []
    for by_seed in by_settings.values():
        same = [*by_seed.values()]
        names = dict.fromkeys(run.name for run in same if run.group is group)
        settings.append(Setting(", ".join(names), same))
    if group.x:
        settings.sort(key=lambda setting: setting.mean(group.x))
    return settings


def difference_of(setting, base):
    """Returns the points of accuracy between two settings, with their 95% confidence interval, as text."""
    if setting is base or min(len(setting.runs), len(base.runs)) < 2:
        return "-"
    interval = ttest_ind(setting.values("accuracy"), base.values("accuracy"), equal_var=False)
    low, high = interval.confidence_interval()
    return f"{setting.mean('accuracy') - base.mean('accuracy'):+.1f} ({low:+.1f} to {high:+.1f})"


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


# Writing.

def status_table(runs):
    """Returns Markdown lines: how many runs of each group are complete, and what all others lack."""
    lines = ["| group | complete | not complete |", "|---|---|---|"]
    for group in (*GROUPS, OTHERS):
        own = [run for run in runs if run.group is group]
        problems = [f"{run.name}: {run.problem}" for run in own if run.problem]
        if own:
            complete = len(own) - len(problems)
            lines.append(f"| {group.prefix or 'others'} | {complete} | {'; '.join(problems) or '-'} |")
    return lines


def section(group, runs, settings):
    """Draws a group's picture; returns its Markdown lines, [] without runs.

    Args:
        group: the Group.
        runs: of all groups.
        settings: report.py's.
    """
    compared = settings_of(group, runs)
    if not compared:
        return []
    name = group.prefix or "runs"
    lines = [f"## {name}: {group.question}", "", *table(group, compared), ""]
    law = None
    if group.x == "parameters":
        parameters = np.concatenate([setting.values("parameters") for setting in compared])
        accuracy = np.concatenate([setting.values("accuracy") for setting in compared])
        law = fit_power_law(parameters, accuracy)
        lines += [law_sentence(law), ""]
    if group.x == "puzzles":
        log_puzzles = [math.log(setting.mean("puzzles")) for setting in compared]
        accuracy = [setting.mean("accuracy") for setting in compared]
        puzzles = math.exp(crossing(log_puzzles, accuracy, settings.target))
        lines += [f"Puzzles for {settings.target:g}%, interpolated between runs: {digits(puzzles)}.", ""]
    plot_group(group, compared, law, f"{settings.out_dir}/{name}.png")
    return [*lines, f"![{group.question}]({name}.png)", ""]


def law_sentence(law):
    """Returns the law of fit_power_law in words."""
    if not law:
        return "No fit: accuracy does not rise and level off with size as a - b * params^-c does."
    values = [f"{name} = {value:.3g} ± {error:.2g}" for name, value, error in zip("abc", *law)]
    return (f"Least squares for n million parameters: accuracy = a - b * n^-c, with {', '.join(values)} "
            "(standard errors).")


def table(group, settings):
    """Returns Markdown lines: a row for each setting, mean ± deviation over seeds, - if not known."""
    # The setting with the most seeds is the one that all others are compared with.
    base = max(settings, key=lambda setting: len(setting.runs))
    keys = [key for key in ("accuracy", group.x, *group.panels, *group.columns, *COLUMNS) if key]
    keys = [*dict.fromkeys(keys)]  # each once

    # one row for each setting
    titles = ["setting", "seeds", f"points against {base.label}", *(VALUES[key] for key in keys)]
    rows = [titles, ["---"] * len(titles)]
    for setting in settings:
        row = [setting.label, str(len(setting.runs)), difference_of(setting, base)]
        for key in keys:
            cell = digits(setting.mean(key))
            if setting.deviation(key) > 1e-6 * abs(setting.mean(key)):
                cell += f" ± {digits(setting.deviation(key))}"
            row.append(cell)
        rows.append(row)
    return [f"| {' | '.join(row)} |" for row in rows]


def digits(value):
    """Returns a number with four significant digits, or all before the point; - for nan."""
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


# Drawing.

def plot_group(group, settings, law, path):
    """Writes the picture of a group: its panels and learning curves.

    Args:
        group: the Group.
        settings: its Settings.
        law: as fit_power_law returns it.
        path: of the picture.
    """
    # the panels: a point for each setting, with its deviation over seeds
    count = len(group.panels) + 1
    fig, axes = plt.subplots(1, count, figsize=(4.5 * count, 4.5), layout="constrained")
    for key, ax in zip(group.panels, axes):
        x = [setting.mean(group.x) if group.x else setting.label for setting in settings]
        means = [setting.mean(key) for setting in settings]
        deviations = [setting.deviation(key) for setting in settings]
        ax.errorbar(x, means, deviations, fmt="o:", capsize=3, label=group.prefix or "runs")
        ax.set_xlabel(VALUES.get(group.x, ""))
        ax.set_ylabel(VALUES[key])
        ax.tick_params("x", rotation=30)
        if group.x in LOGARITHMIC:
            ax.set_xscale("log")
    # the fitted law, over the width of its panel
    if law:
        x = np.geomspace(*axes[0].get_xlim(), 200)
        axes[0].plot(x, power_law(x, *law[0]), "k--", label="a - b * n^-c")

    # the learning curves: a colour for each setting, a line for each seed
    ax = axes[-1]
    for i, setting in enumerate(settings):
        label = f"{setting.label} ({len(setting.runs)})"
        for run in setting.runs:
            ax.plot(run.pflop, run.accuracy, color=f"C{i}", label=label)
            label = None  # once in the legend
    ax.set_xlabel(VALUES["pflop"])
    ax.set_ylabel(VALUES["accuracy"])

    # what all panels have
    for ax in axes:
        ax.grid(color="0.9")
        ax.legend(fontsize="small")
    fig.suptitle(group.question)
    fig.savefig(path, dpi=110)
    plt.close(fig)


if __name__ == "__main__":
    command(lambda: main(sys.argv[1:]), __file__)
