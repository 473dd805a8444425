"""Tables and pictures that compare runs: the groups of the scaling study, or any runs.

    python scripts/report.py                              the study: out/study/*
    python scripts/report.py out/demo0 out/demo1          these runs, or all runs in these folders
    python scripts/report.py pulled --out_dir=out/pulled  what was downloaded from a bucket
    python scripts/report.py --html                       report.html too: one file, with the pictures in it

Writes out_dir/report.md and its PNGs. A run is a folder with metrics.jsonl, ckpt_*.json (its settings) and
log.txt (its parameters, data and hardware). Only complete runs enter tables and fits. Missing and unfinished
runs are named. Runs that differ only in their seed are one point: their mean and standard deviation. A run of
another group with the same settings is one more seed.
"""
import base64
import glob
import json
import math
import os
import re
import sys
import textwrap
from dataclasses import dataclass
from html import escape

import numpy as np

try:
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter
except ImportError:
    plt = None  # main raises an error

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
from configurator import UserError, command, configure, read_settings  # noqa: E402

# input and output; arguments without a dash are folders to read
out_dir = "out/report"  # report.md and its pictures
configs = "config/study"  # a file for each run that the study should have
target = 85.0  # percent of the test puzzles, for the time and the data needed to reach it
dpi = 110  # of the pictures
html = False  # write report.html too, one file with the pictures in it
# ---

STUDY = "out/study/*"


@dataclass
class Group:
    """A question of the study and the numbers that answer it: settings, or keys of VALUES."""
    prefix: str  # of its runs' names
    question: str
    label: str  # of a setting: what differs between the runs
    x: str = ""  # abscissa of its plot; "": the labels
    panels: tuple = ("accuracy",)  # ordinates, a panel each
    log: bool = False  # logarithmic abscissa
    fit: bool = False  # accuracy = a - b * x^-c
    bracket: bool = False  # where accuracy crosses the target
    compare: str = ""  # another group, drawn in the same plot
    note: str = ""


GROUPS = (
    Group("exp01", "How does accuracy grow with parameters, and where does it saturate?",
          "hidden_size {hidden_size}", "parameters", ("accuracy", "per_time"), log=True, fit=True),
    Group("exp02a", "Does more effective depth, by L_cycles, help, and does it overfit?",
          "L_cycles {L_cycles}", "depth", ("accuracy", "gap", "speed")),
    Group("exp02b", "At equal effective depth, are H_cycles worth more than L_cycles?",
          "H_cycles {H_cycles}", "depth", ("accuracy", "gap", "speed"), compare="exp02a"),
    Group("exp03", "Can recursion replace layers?",
          "L_layers {L_layers}, L_cycles {L_cycles}", "", ("accuracy", "parameters", "speed"),
          note="Logs do not contain memory use: `python bench.py config/study/FILE.py` measures it, and "
               "`python scripts/aot.py config/study/FILE.py --slices=v5e:2x4` computes it for a TPU."),
    Group("exp04a", "How few training puzzles are enough?",
          "{puzzles:,.0f} puzzles", "puzzles", ("accuracy", "gap"), log=True, bracket=True),
    Group("exp04b", "Can augmented copies replace data?",
          "{copies:,.0f} copies", "copies", ("accuracy", "gap"), log=True),
    Group("exp05", "What does accuracy cost at inference?",
          "halt_max_steps {halt_max_steps}", "halt_max_steps", ("accuracy", "halting", "saved")),
    Group("exp06", "Up to which size does a larger batch save steps, and how much throughput does it gain?",
          "batch {global_batch_size}, lr {lr:.2e}", "global_batch_size", ("accuracy", "steps_to", "speed"),
          log=True),
    Group("exp07", "Which precision is enough?", "{forward_dtype}", "", ("accuracy", "speed")),
    Group("exp08", "Does the average of the weights help, and at which rate?",
          "ema {average}", "", ("accuracy", "cells")),
    Group("exp09", "Which optimizer?", "{optimizer}, beta2 {beta2}", "", ("accuracy", "steps_to", "speed")),
    Group("exp10", "Which learning rate, and does decaying it help?",
          "lr {lr:g}, {end}", "", ("accuracy", "steps_to")),
    Group("contrib01", "Does a curriculum of growing depth reach the target sooner?",
          "{variant}", "", ("accuracy", "time_to", "steps_to")),
    Group("contrib02", "Does exploration that decays over the run lead to earlier halting?",
          "{variant}", "", ("accuracy", "halting", "saved")),
)
OTHERS = Group("", "How do these runs compare?", "{common}")
# The numbers of a run: axis label with its unit, format in the tables.
VALUES = {
    "accuracy": ("test puzzles solved (%)", "{:.2f}"),
    "surest": ("surest answers right (%)", "{:.2f}"),
    "best": ("best evaluation (%)", "{:.2f}"),
    "cells": ("test cells right (%)", "{:.2f}"),
    "train": ("training puzzles solved (%)", "{:.2f}"),
    "gap": ("training - test (points)", "{:.2f}"),
    "parameters": ("parameters (millions)", "{:.3f}"),
    "depth": ("effective depth (layers per supervision step)", "{:.0f}"),
    "speed": ("throughput (examples/s)", "{:,.1f}"),
    "time": ("training time ({unit}s)", "{:.3f}"),
    "per_time": ("accuracy per parameter-{unit}\n(% / (million {unit}s))", "{:,.2f}"),
    "halting": ("mean halting step in training", "{:.2f}"),
    "saved": ("supervision steps saved by halting (%)", "{:.1f}"),
    "steps_to": ("steps to {target:g}%", "{:,.0f}"),
    "time_to": ("{unit}s to {target:g}%", "{:.3f}"),
    "puzzles": ("training puzzles", "{:,.0f}"),
    "copies": ("augmented copies per puzzle", "{:,.0f}"),
    "global_batch_size": ("global batch (sequences)", "{:,.0f}"),
    "halt_max_steps": ("maximum supervision steps (halt_max_steps)", "{:.0f}"),
    "examples": ("training examples (sequences)", "{:,.0f}"),
    "flop": ("training arithmetic (FLOP)", "{:.3g}"),
    "loss": ("training loss (nats per sequence)", "{:.4f}"),
}
COLUMNS = ("accuracy", "surest", "best", "cells", "train", "gap", "parameters", "depth", "speed", "time",
           "per_time")
EXPLANATION = """Accuracy is the share of test puzzles with every cell right, in the evaluation at the end:
after the last supervision step, and for the surest answer, at the step where q_halt was highest.
Training values are means over the sequences that halted in the last tenth of the run. They are measured with
the weights themselves, not with their average. Time is steps times step time, without compiling, evaluation
and interruptions; arithmetic is that of the matrix products. The supervision steps saved assume that halting
works at inference as it does in training.
Steps and time to the target are interpolated between evaluations. ± is one standard deviation over seeds.
Only complete runs are in tables, points and fits. Learning curves show unfinished runs as far as they got."""
# Okabe and Ito's colours, each with its own line style and marker, so that they differ in grey too.
STYLES = [("#000000", "-", "o"), ("#0072B2", "--", "s"), ("#D55E00", "-.", "^"), ("#009E73", ":", "D"),
          ("#CC79A7", (0, (6, 1, 1, 1, 1, 1)), "v"), ("#E69F00", (0, (1, 1)), "P"),
          ("#56B4E9", (0, (8, 3)), "X"), ("#999999", "-", "*")]


def main(argv):
    """Reads the runs, writes report.md and its pictures, and prints what is missing."""
    c = configure(__file__, [a for a in argv if a.startswith("-")])
    if not plt:
        raise UserError("the pictures need matplotlib: pip install matplotlib")
    documented = read_settings(os.path.join(ROOT, "train.py"))
    defaults = {name: default for name, (default, _, _) in documented.items()}
    folders = find_runs([a for a in argv if not a.startswith("-")] or [STUDY])
    runs = [read_run(folder, defaults, c.target) for folder in folders]
    c.unit = choose_unit(runs)
    planned = []
    explanation = EXPLANATION
    if any(group_of(run["name"]) is not OTHERS for run in runs):
        files = glob.glob(os.path.join(c.configs, "*.py"))
        planned = sorted(os.path.basename(path)[:-3] for path in files)
        if not planned:
            explanation += f" {c.configs} has no files, so which runs are missing is not known."
    try:
        os.makedirs(c.out_dir, exist_ok=True)
    except OSError as e:
        raise UserError(f"--out_dir={c.out_dir}: {e.strerror}") from None

    compared = [name for name, (_, _, part) in documented.items()
                if part not in ("run", "logging") and name not in ("seed", "data_prepare")]
    status = ["| group | complete | unfinished | missing |", "|---|---|---|---|"]
    body = []
    points = {}
    for group in (*GROUPS, OTHERS):
        own = [run for run in runs if group_of(run["name"]) is group]
        complete = [run for run in own if not run["problem"]]
        incomplete = [run for run in own if run["problem"]]
        missing = []
        if group is not OTHERS:
            missing = [name for name in planned if group_of(name) is group and not has_run(own, name)]
        others = [run for run in runs if not run["problem"] and group_of(run["name"]) not in (group, OTHERS)]
        points[group.prefix], notes = points_of(group, complete, others, compared)
        if own or missing:
            unfinished = "; ".join(f"{run['name']}: {run['problem']}" for run in incomplete)
            status.append(f"| {group.prefix or 'others'} | {len(complete)} | {unfinished or '-'} "
                          f"| {', '.join(missing) or '-'} |")
        if own:
            body += section(group, points, incomplete, c) + [f"- {note}" for note in notes] + [""]
    print("\n".join(status))
    write_report(["# Report", "", explanation, "", *status, "", *body], c)
    print(f"of {sum(not run['problem'] for run in runs)} complete runs of {len(runs)}")


def group_of(name):
    """The group of the run of this name."""
    return next((group for group in GROUPS if name.startswith(group.prefix)), OTHERS)


def has_run(runs, planned_name):
    """Whether one of runs was made by the study's file of this name."""
    return any(run["name"] == planned_name or run["name"].startswith(planned_name + "_") for run in runs)


def section(group, points, incomplete, c):
    """Draws the pictures of a group and returns its lines of Markdown.

    points: of all groups, by prefix. incomplete: the group's other runs.
    """
    own = points[group.prefix]
    name = group.prefix or "runs"  # of its pictures
    lines = [f"## {group.prefix}: {group.question}" if group.prefix else f"## {group.question}", ""]
    if own:
        complete = [run for point in own for run in point["runs"]]
        extra = [key for key in (group.x, *group.panels) if key in VALUES and key not in COLUMNS]
        sentences, law = findings(group, own, c.target)
        lines += table(own, (*COLUMNS[:1], *extra, *COLUMNS[1:]), c) + [""]
        lines += [f"- {sentence}" for sentence in sentences + [group.note] if sentence] + [""]
        lines += [f"Hardware: {'; '.join(sorted({run['hardware'] for run in complete}))}.", ""]
        unknown = [run["name"] for run in complete if math.isnan(run["parameters"])]
        if unknown:
            lines += [f"No log.txt with parameters and data: {', '.join(unknown)}.", ""]
        series = {group.prefix: own}
        if group.compare and points[group.compare]:
            series[group.compare] = points[group.compare]
        if max(map(len, series.values())) > 1:  # one setting alone is a lone dot; its curve says more
            plot_group(group, series, law, c, os.path.join(c.out_dir, f"{name}.png"))
            lines += [f"![{group.question}]({name}.png)", ""]
    started = [run for run in incomplete if len(run["curve"]["loss"]) > 1
               and not math.isnan(max(run["curve"]["examples"].values()))]
    if own or started:
        plot_curves(group, own, started, c, os.path.join(c.out_dir, f"{name}_curves.png"))
        lines += [f"![Learning curves]({name}_curves.png)", ""]
    return lines


def table(points, columns, c):
    """Markdown lines: a row per point, mean ± deviation over seeds, - where a number is not known."""
    titles = ["setting", "seeds"] + [axis_label(key, c).replace("\n", " ") for key in columns]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for point in points:
        cells = [point["label"], str(len(point["runs"]))]
        for key in columns:
            value, deviation = point[key]
            form = VALUES[key][1]
            cell = "-" if math.isnan(value) else form.format(value)
            if deviation > 1e-9 * abs(value):
                cell += f" ± {form.format(deviation)}"
            cells.append(cell)
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def findings(group, points, target):
    """What the numbers of a group say, as sentences, and the fitted law (or None)."""
    sentences, law = noise_finding(points), None
    if group.fit:
        sentence, law = fit_finding(points)
        sentences.append(sentence)
    if group.bracket:
        sentences.append(bracket_finding(group, points, target))
    return sentences, law


def noise_finding(points):
    """How far the settings are from the one with the most seeds, and which differences may be chance."""
    base = max(points, key=lambda point: len(point["runs"]))
    (mean, deviation), seeds = base["accuracy"], len(base["runs"])
    if seeds < 3 or len(points) < 2:
        return []
    n = seeds - 1  # degrees of freedom of Student's t; its 97.5% quantile as a series
    quantile = 1.96 + 2.37 / n + 2.82 / n ** 2 + 2.56 / n ** 3
    differences = []
    for point in points:
        difference = point["accuracy"][0] - mean
        by_chance = quantile * deviation * math.sqrt(1 / seeds + 1 / len(point["runs"]))
        if point is not base:
            note = " (may be chance)" if abs(difference) < by_chance else ""
            differences.append(f"{point['label']}: {difference:+.2f}{note}")
    by_chance = quantile * deviation * math.sqrt(1 / seeds + 1)
    return [f"Points of accuracy against {base['label']}, which has {mean:.2f} ± {deviation:.2f} over "
            f"{seeds} seeds, so that a single run may differ by {by_chance:.2f} by chance (95%): "
            f"{'; '.join(differences)}."]


def fit_finding(points):
    """The fitted law as a sentence, and as fit_power_law returns it (or None)."""
    runs = [run for point in points for run in point["runs"] if not math.isnan(run["parameters"])]
    if not runs:
        return "No fit: no run's log.txt has its parameters.", None
    sizes = [run["parameters"] for run in runs]
    law = fit_power_law(sizes, [run["accuracy"] for run in runs])
    if isinstance(law, str):
        return law, None
    (a, b, c), covariance = law
    errors = np.sqrt(np.diag(covariance))
    sentence = (
        f"Least squares over {len(runs)} runs: accuracy = a - b * n^-c, n in millions of parameters, with "
        f"a = {a:.2f} ± {errors[0]:.2f}%, b = {b:.3g} ± {errors[1]:.2g}, c = {c:.3g} ± {errors[2]:.2g} "
        f"(standard errors), between {min(sizes):.3g} and {max(sizes):.3g} million parameters. The law is "
        f"within one point of a from {b ** (1 / c):.3g} million parameters on.")
    return sentence, law


def bracket_finding(group, points, target):
    """How many puzzles reach the target, in words."""
    known = sorted((p[group.x][0], p["accuracy"][0]) for p in points if not math.isnan(p[group.x][0]))
    at = crossing([math.log(x) for x, _ in known], [y for _, y in known], target)
    if math.isnan(at):
        return f"The runs do not bracket {target:g}%: how many puzzles it takes is not known."
    return (f"Fewest puzzles for {target:g}%: about {math.exp(at):,.0f}, interpolated in their logarithm "
            "between the nearest runs.")


# Reading runs.

def find_runs(paths):
    """The folders with a metrics.jsonl in paths or below. Raises UserError where a path has none."""
    found = []
    for path in paths:
        files = []
        for match in sorted(glob.glob(path)) or [path]:
            pattern = os.path.join(glob.escape(match), "**", "metrics.jsonl")
            files += sorted(glob.glob(pattern, recursive=True))
        if not files:
            raise UserError(f"{path}: no run (a folder with metrics.jsonl) there: "
                            "give folders of runs, as out/study or out/demo0")
        found += map(os.path.dirname, files)
    return list(dict.fromkeys(map(os.path.normpath, found)))


def read_run(folder, defaults, target):
    """One run as a flat dict: settings, VALUES, name, folder, curve, problem ("" if the run is complete)."""
    lines = read_lines(os.path.join(folder, "metrics.jsonl"))
    settings = saved_settings(folder)
    run = defaults | settings if settings else {}
    name = os.path.basename(os.path.abspath(folder))
    run |= dict(name=name, folder=folder, variant=name.partition("_")[2] or name, **read_log(folder))
    last = lines[-1] if lines else {"step": 0}
    if "final" not in last:
        run["problem"] = f"unfinished at step {last['step']:,}"
    else:
        run["problem"] = "" if settings else "without its ckpt_*.json"

    trained = [line for line in lines if "train/loss" in line]
    evaluated = [line for line in lines if "eval/exact_accuracy" in line]
    solved = {line["step"]: 100 * line["eval/exact_accuracy"] for line in evaluated}
    loss = {line["step"]: line["train/loss"] for line in trained}
    batch_size = run.get("global_batch_size", math.nan)
    clock = training_clock(trained, batch_size)
    run["curve"] = {
        "accuracy": solved,
        "loss": loss,
        "hours": {step: reading(clock, "hours", step) for step in solved | loss},
        "flop": {step: reading(clock, "flop", step) for step in solved | loss},
        "examples": {step: step * batch_size for step in solved | loss},
    }
    if not run["problem"]:
        run |= final_values(run, trained, last, clock, target)
    return run


def final_values(run, trained, last, clock, target):
    """The numbers of a complete run, by their names in VALUES and in labels."""
    solved = run["curve"]["accuracy"]
    accuracy = solved[last["step"]]
    tail = [line for line in trained if line["step"] > 0.9 * trained[-1]["step"]]
    train = 100 * mean_of(tail, "train/exact_accuracy")
    halting = mean_of(tail, "train/steps")
    rates = [line["perf/examples_per_sec"] for line in trained if "perf/examples_per_sec" in line]
    steps_to = crossing(list(solved), list(solved.values()), target)
    if next(iter(solved.values())) >= target:
        steps_to = next(iter(solved))
    end = "constant"
    if run["lr_min_ratio"] != 1:
        end = f"cosine to {run['lr_min_ratio']:g} of it"
    return dict(
        accuracy=accuracy, surest=100 * last.get("eval/surest_accuracy", math.nan),
        best=max(solved.values()), cells=100 * last["eval/accuracy"], train=train,
        gap=train - accuracy, halting=halting, saved=100 * (1 - halting / run["halt_max_steps"]),
        depth=run["H_cycles"] * (run["L_cycles"] + 1) * run["L_layers"],
        speed=float(np.median(rates or [math.nan])), hours=reading(clock, "hours", last["step"]),
        steps_to=steps_to, hours_to=reading(clock, "hours", steps_to),
        average=f"{run['ema_rate']:g}" if run["ema"] else "off", end=end)


def read_lines(path):
    """The objects of a metrics.jsonl, without their texts and without a last line that a kill cut off.

    Raises UserError with file and line number for any other damage.
    """
    with open(path, encoding="utf-8", errors="replace") as f:
        lines = [line for line in f if line.endswith("\n")]
    objects = []
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
            values.pop("eval/example", None)
            valid = all(isinstance(value, (int, float)) for value in (values["step"], *values.values()))
        except (ValueError, TypeError, KeyError, AttributeError):
            valid = False
        if not valid:
            raise UserError(f"{path}:{number}: damaged, not an object of numbers with a step: "
                            "remove the line, or pull the file again")
        objects.append(values)
    return objects


def saved_settings(folder):
    """The settings of a run, from its newest readable checkpoint's .json; {} without one."""
    paths = sorted(glob.glob(os.path.join(glob.escape(folder), "ckpt_*.json")), reverse=True)
    for path in paths + [os.path.join(folder, "best.json")]:
        try:
            with open(path, "rb") as f:
                return json.load(f)["settings"]
        except (OSError, ValueError, KeyError, TypeError):  # an interrupted pull, which train.py skips too
            pass
    return {}


def read_log(folder):
    """What log.txt says: parameters (millions), puzzles and copies (nan if it does not), and hardware."""
    text = ""
    if os.path.exists(os.path.join(folder, "log.txt")):
        with open(os.path.join(folder, "log.txt"), encoding="utf-8", errors="replace") as f:
            text = f.read()
    parameters = examples = puzzles = math.nan
    counts = re.findall(r"^([\d,]+) parameters; ([\d,]+) training examples of ([\d,]+) puzzles", text, re.M)
    if counts:
        parameters, examples, puzzles = (float(n.replace(",", "")) for n in counts[-1])
    hardware = dict.fromkeys(re.findall(r"cores, (\d+ x .*?); settings", text))
    return dict(parameters=parameters / 1e6, puzzles=puzzles, copies=examples / puzzles - 1,
                hardware=", then ".join(hardware) or "unknown")


def training_clock(trained, batch_size):
    """{steps, hours, flop}: sums at the lines that have a step time, for training alone."""
    clock = dict(steps=[0], hours=[0.0], flop=[0.0])
    for line in trained:
        if "perf/step_time" in line:
            steps = line["step"] - clock["steps"][-1]
            flop = 1e12 * line.get("perf/tflops", math.nan) / line["perf/examples_per_sec"] * batch_size
            clock["steps"].append(line["step"])
            clock["hours"].append(clock["hours"][-1] + steps * line["perf/step_time"] / 3600)
            clock["flop"].append(clock["flop"][-1] + steps * flop)
    return clock


def reading(clock, name, step):
    """Hours or FLOP of training at a step; nan if the clock is empty, or for nan."""
    return float(np.interp(step, clock["steps"], clock[name])) if len(clock["steps"]) > 1 else math.nan


def choose_unit(runs):
    """The unit that fits the longest run; gives the runs time, time_to and per_time in it."""
    hours = [h for run in runs for h in run["curve"]["hours"].values() if not math.isnan(h)]
    longest = max(hours, default=1.0)
    units = [("second", 3600, 1 / 20), ("minute", 60, 1.5), ("hour", 1, 72), ("day", 1 / 24, math.inf)]
    unit, factor = next((unit, factor) for unit, factor, limit in units if longest < limit)
    for run in runs:
        run["curve"]["time"] = {step: factor * hours for step, hours in run["curve"]["hours"].items()}
        if not run["problem"]:
            run |= dict(time=factor * run["hours"], time_to=factor * run["hours_to"])
            run["per_time"] = run["accuracy"] / (run["parameters"] * run["time"])
    return unit


def mean_of(lines, key):
    """The mean of a metric over the lines that have it; nan if none has."""
    values = [line[key] for line in lines if key in line]
    return float(np.mean(values)) if values else math.nan


# Points and laws.

def points_of(group, runs, others, compared):
    """The runs grouped by their settings `compared`, by rising x, and notes on what was left out.

    others: runs of other groups; those with the settings of a point are further seeds of it.
    A point is a dict of the settings, key: (mean, deviation) for each of VALUES, label and runs (its seeds).
    """
    def key_of(run):
        return json.dumps({name: run[name] for name in compared if name in run}, sort_keys=True)

    same_settings, notes = {}, []
    for run in runs:
        same = same_settings.setdefault(key_of(run), [])
        if any(run["seed"] == other["seed"] for other in same):
            notes.append(f"{run['folder']} has the settings and the seed of {same[0]['folder']}: left out")
        else:
            same.append(run)
    for run in others:
        same = same_settings.get(key_of(run), [])
        if same and all(run["seed"] != other["seed"] for other in same):
            same.append(run)
    points = []
    for same in same_settings.values():
        label = group.label.format_map(same[0] | {"common": common_name(same)})
        point = dict(same[0], runs=same, label=label)
        for key in VALUES:
            if key in point:
                values = [run[key] for run in same]
                deviation = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
                point[key] = float(np.mean(values)), deviation
        points.append(point)
    labels = [point["label"] for point in points]
    for point in points:
        if labels.count(point["label"]) > 1:  # the runs' names tell them apart
            point["label"] += f" ({point['runs'][0]['name']})"
    if group.x:
        points.sort(key=lambda point: point[group.x][0])
    return points, notes


def common_name(runs):
    """What the names of runs that differ only in their seed have in common."""
    names = [run["name"] for run in runs]
    if len(names) == 1:
        return names[0]
    return re.sub(r"[-_]?(seed|s)?[-_]?$", "", os.path.commonprefix(names)) or ", ".join(names)


def crossing(x, y, level):
    """The interpolated x at which y first rises through level; nan if it does not. x rises."""
    for i in range(1, len(x)):
        if y[i - 1] < level <= y[i]:
            return x[i - 1] + (x[i] - x[i - 1]) * (level - y[i - 1]) / (y[i] - y[i - 1])
    return math.nan


def power_law(p, x):
    """a - b * x^-c at x [n], p = (a, b, c), and its derivatives by p [n, 3]."""
    a, b, c = p
    return a - b * x ** -c, np.stack([np.ones_like(x), -x ** -c, b * x ** -c * np.log(x)], axis=1)


def fit_power_law(x, y):
    """Least squares of y = a - b * x^-c: ((a, b, c), covariance [3, 3]), or a sentence why there is none.

    The best c of a grid with its linear a and b, then Gauss-Newton. The covariance is s^2 (J'J)^-1, s^2 the
    residuals' variance.
    """
    x, y = np.asarray(x, float), np.asarray(y, float)
    if len(set(x)) < 4:
        return f"No fit: {len(set(x))} sizes, and three parameters with an error need four."
    exponents = np.geomspace(0.02, 10, 400)
    powers = x ** -exponents[:, None]  # [400, n]
    centered = powers - powers.mean(1, keepdims=True)
    b = -(centered @ y) / np.square(centered).sum(1)
    a = y.mean() + b * powers.mean(1)
    squares = np.square(a[:, None] - b[:, None] * powers - y).sum(1)
    best = squares.argmin()
    if best in (0, len(exponents) - 1) or b[best] <= 0:
        return "No fit: accuracy does not rise and level off with size as a - b * params^-c does."
    p = np.array([a[best], b[best], exponents[best]])
    try:
        for _ in range(50):
            value, jacobian = power_law(p, x)
            p = p + np.linalg.lstsq(jacobian, y - value, rcond=None)[0]
        fitted_squares = np.square(y - power_law(p, x)[0]).sum()
        if fitted_squares <= squares[best] * (1 + 1e-6) + 1e-12:
            return p, fitted_squares / (len(x) - 3) * np.linalg.inv(jacobian.T @ jacobian)
    except np.linalg.LinAlgError:
        pass
    return "No fit: the points do not determine a - b * params^-c."


# Pictures.

def plot_group(group, series, law, c, path):
    """The picture of a group: its numbers against x, or a row for each setting.

    series: {name: points}, the group's own first. law: as fit_power_law returns it, or None.
    """
    points = series[group.prefix]
    size = (4.2 * len(group.panels), 3.6)
    if not group.x:
        size = (size[0] + 1.5, 1.5 + 0.36 * len(points))
    fig, axes = plt.subplots(1, len(group.panels), figsize=size, layout="constrained", squeeze=False)
    for key, ax in zip(group.panels, axes[0]):
        if group.x:
            plot_against_x(ax, key, group, series, law, c)
        else:
            plot_rows(ax, key, points, c)
            ax.set_yticks(range(len(points)), [p["label"] for p in points] if ax is axes[0, 0] else [])
    save_figure(fig, axes[0], group.question, c, path)


def plot_rows(ax, key, points, c):
    """A panel with one number, a row for each setting."""
    for row, point in enumerate(points):
        value, deviation = point[key]
        ax.errorbar(value, row, xerr=deviation, fmt="ko", capsize=3)
        if math.isnan(value):
            ax.text(0.03, row, why_missing(key), va="center", transform=ax.get_yaxis_transform())
    ax.set_xlabel(axis_label(key, c))
    ax.set_ylim(len(points) - 0.5, -0.5)
    ax.margins(x=0.15)
    if all(math.isnan(p[key][0]) for p in points):
        ax.set_xticks([])


def why_missing(key):
    return "not reached" if "_to" in key else "not known"


def plot_against_x(ax, key, group, series, law, c):
    """A panel with one number against the group's x."""
    drawn = [(name, points, key) for name, points in series.items()]
    both = key == "accuracy" and "gap" in group.panels  # both ends of the gap
    if both:
        drawn = [(f"{name}: test", points, "accuracy") for name, points in series.items()]
        drawn += [(f"{name}: training", points, "train") for name, points in series.items()]
    for style, (name, points, k) in zip(STYLES, drawn):
        label = name if key == "accuracy" and len(drawn) > 1 else None
        plot_points(ax, k, group.x, points, style, label, line=not (law and k == "accuracy"))
    known = {p[group.x][0] for points in series.values() for p in points}
    ticks = sorted(x for x in known if not math.isnan(x))
    if law and key == "accuracy":
        plot_law(ax, law, ticks)
    ax.set_xlabel(axis_label(group.x, c))
    ax.set_ylabel("puzzles solved (%)" if both else axis_label(key, c))
    if group.log:
        ax.set_xscale("log")
    if len(ticks) < 9:  # the settings themselves
        labels = [f"{tick:,.0f}" if tick >= 100 else f"{tick:.3g}" for tick in ticks]
        ax.set_xticks(ticks, labels, rotation=30 if max(map(len, labels), default=0) > 4 else 0)
        ax.xaxis.minorticks_off()
    if all(math.isnan(p[k][0]) for _, points, k in drawn for p in points):
        ax.text(0.5, 0.5, why_missing(key), ha="center", transform=ax.transAxes)
        ax.plot(ticks, [0] * len(ticks), alpha=0)  # for the range of x
        ax.set_yticks([])
    if group.bracket and key == "accuracy":
        ax.axhline(c.target, color="0.5", linestyle=":", label=f"{c.target:g}%")


def plot_points(ax, key, x, points, style, label, line):
    """The points whose numbers are known, with error bars; line: joined."""
    color, dashes, marker = style
    points = [p for p in points if not math.isnan(p[x][0] + p[key][0])]
    values = [p[key][0] for p in points]
    ax.errorbar([p[x][0] for p in points], values, [p[key][1] for p in points], color=color, label=label,
                linestyle=dashes if line else "", capsize=3,
                marker=marker, markerfacecolor="white" if key == "train" else color)
    if key in ("per_time", "steps_to") and values and max(values) > 10 * min(values) > 0:
        ax.set_yscale("log")


def plot_law(ax, law, ticks):
    """The fitted law with its standard error, between the first and the last tick."""
    (a, b, c), covariance = law
    x = np.geomspace(ticks[0], ticks[-1], 200)
    y, jacobian = power_law((a, b, c), x)
    error = np.sqrt(np.einsum("ni,ij,nj->n", jacobian, covariance, jacobian))
    ax.plot(x, y, "k--", label=f"{a:.4g} - {b:.3g} n$^{{-{c:.3g}}}$, n in millions")
    ax.fill_between(x, y - error, y + error, color="0.85", label="its standard error")


def plot_curves(group, points, unfinished, c, path):
    """Learning curves: accuracy by examples, arithmetic and time, and loss; mean and deviation over seeds."""
    curves = []
    for point in points:
        label = point["label"]
        if len(point["runs"]) > 1:
            label += f" (mean ± deviation of {len(point['runs'])})"
        curves.append((label, point["runs"]))
    curves += [(f"{run['name']} (unfinished)", [run]) for run in unfinished]
    fig, axes = plt.subplots(2, 2, figsize=(9, 6.5 + 0.1 * len(curves)), layout="constrained")
    panels = ("accuracy", "examples"), ("loss", "examples"), ("accuracy", "flop"), ("accuracy", "time")
    for (key, abscissa), ax in zip(panels, axes.flat):
        for i, (label, runs) in enumerate(curves):
            plot_curve(ax, key, abscissa, runs, STYLES[i % len(STYLES)], label)
        ax.set_xlim(left=0)
        ax.set_xlabel(axis_label(abscissa, c))
        ax.set_ylabel(axis_label(key, c))
        if abscissa != "time":
            ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    title = f"Learning curves: {group.question[0].lower() + group.question[1:]}"
    save_figure(fig, list(axes.flat), title, c, path)


def plot_curve(ax, key, abscissa, runs, style, label):
    """The mean of one point's runs, with its deviation, at the steps that all of them have."""
    color, dashes, marker = style
    steps = sorted(set.intersection(*(set(run["curve"][key]) for run in runs)))
    if not steps:
        return
    x = np.mean([[run["curve"][abscissa][step] for step in steps] for run in runs], axis=0)
    values = np.array([[run["curve"][key][step] for step in steps] for run in runs])
    mean = values.mean(0)
    ax.plot(x, mean, color=color, linestyle=dashes, linewidth=1.3, label=label,
            marker=marker, markersize=5, markevery=max(1, len(x) // 8))
    if len(runs) > 1:
        deviation = values.std(0, ddof=1)
        ax.fill_between(x, mean - deviation, mean + deviation, color=color, alpha=0.2, linewidth=0)


def save_figure(fig, axes, title, c, path):
    """Adds grid, title and a legend below the panels, and writes the file."""
    handles = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels())}
    width = fig.get_size_inches()[0]
    if handles:
        columns = int(12 * width / (8 + max(map(len, handles))))  # 12 characters to the inch
        fig.legend(handles.values(), handles.keys(), loc="outside lower center", frameon=False,
                   ncols=max(1, min(4, columns)))
    for ax in axes:
        ax.grid(color="0.9")
        ax.set_axisbelow(True)
        if ax.get_xlabel().endswith("(%)"):
            ax.set_xlim(max(ax.get_xlim()[0], 0), min(ax.get_xlim()[1], 100))
        if ax.get_ylabel().endswith("(%)"):
            ax.set_ylim(max(ax.get_ylim()[0], 0), min(ax.get_ylim()[1], 100))
    fig.suptitle("\n".join(textwrap.wrap(title, int(11 * width))))
    fig.savefig(path, dpi=c.dpi)
    plt.close(fig)


def axis_label(key, c):
    return VALUES[key][0].format(target=c.target, unit=c.unit) if key in VALUES else key


# Files.

def write_report(lines, c):
    """Writes report.md, and report.html if c.html is set, and prints their paths."""
    path = os.path.join(c.out_dir, "report.md")
    with open(path, "w", encoding="utf-8") as f:
        f.write("\n".join(lines))
    print(f"wrote {path}")
    if c.html:
        path = os.path.join(c.out_dir, "report.html")
        with open(path, "w", encoding="utf-8") as f:
            f.write(as_html(lines, c.out_dir))
        print(f"wrote {path}")


PAGE = """<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Report</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
.table {{ overflow-x: auto }}
table {{ border-collapse: collapse; font-size: 0.85rem }}
th, td {{ border-bottom: 1px solid #bbb; padding: 0.2rem 0.5rem; text-align: left; vertical-align: top }}
img {{ max-width: 100% }}
</style>
{}
</html>
"""


def as_html(lines, folder):
    """The report's lines of Markdown (headings, tables, lists, pictures, paragraphs) as one HTML page."""
    body, before = [], ""
    for line in lines + [""]:
        kind = ""
        if line.startswith("|"):
            kind = "table"
        elif line.startswith("- "):
            kind = "ul"
        if before and kind != before:
            body.append("</table></div>" if before == "table" else "</ul>")
        if kind and kind != before:
            body.append('<div class="table"><table>' if kind == "table" else "<ul>")
        before_row, before = before, kind
        text = escape(line)
        picture = re.fullmatch(r"!\[(.*)\]\((.*)\)", line)
        if kind == "table":
            cell = "td" if before_row == "table" else "th"
            if not line.startswith("|---"):
                cells = [f"<{cell}>{value.strip()}</{cell}>" for value in text.strip("|").split("|")]
                body.append(f"<tr>{''.join(cells)}</tr>")
        elif kind == "ul":
            body.append(f"<li>{text[2:]}</li>")
        elif picture:
            with open(os.path.join(folder, picture[2]), "rb") as f:
                data = base64.b64encode(f.read()).decode()
            body.append(f'<img alt="{escape(picture[1])}" src="data:image/png;base64,{data}">')
        elif line.startswith("#"):
            level = len(line) - len(line.lstrip("#"))
            body.append(f"<h{level}>{text.lstrip('# ')}</h{level}>")
        elif line:
            body.append(f"<p>{text}</p>")
    return PAGE.format("\n".join(body))


if __name__ == "__main__":
    command(lambda: main(sys.argv[1:]), __file__)
