"""Tables and pictures of many runs: the scaling study's groups, or any runs side by side.

    python scripts/report.py                              the study: out/study/*
    python scripts/report.py out/demo0 out/demo1          these runs, or all runs in these folders
    python scripts/report.py pulled --out_dir=out/pulled  what was downloaded from a bucket

Writes out_dir/report.md and its PNGs. A run is a folder with metrics.jsonl, ckpt_*.json (its settings) and log.txt (its parameters,
its data, its hardware). Only complete runs enter tables and fits; those that are missing or unfinished are named. Runs that differ
in their seed alone are one point: their mean and standard deviation.
"""
import glob
import json
import math
import os
import re
import sys
import textwrap
from dataclasses import dataclass

import numpy as np

try:
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter
except ImportError:
    plt = None  # main says so

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
from configurator import UserError, command, configure, read_settings  # noqa: E402

# what is read and written; arguments without a dash are folders to read
out_dir = "out/report"  # report.md and its pictures
configs = "config/study"  # a file for each run that the study should have
target = 85.0  # percent of the test puzzles: what the times and the data needed refer to
dpi = 110  # of the pictures
# ---

STUDY = "out/study/*"


@dataclass
class Group:
    """A question of the study and the numbers that answer it. The names in it are settings or keys of VALUES."""
    prefix: str  # of its runs' names
    asks: str
    label: str  # what tells its settings apart
    x: str = ""  # abscissa of its plot; "": the labels
    panels: tuple = ("accuracy",)  # ordinates, a panel each
    log: bool = False  # abscissa
    curves: str = "examples"  # abscissa of its learning curves
    fit: bool = False  # accuracy = a - b * x^-c
    bracket: bool = False  # where accuracy crosses the target
    beside: str = ""  # another group to plot along
    note: str = ""


GROUPS = (
    Group("exp01", "How does accuracy grow with parameters, and where does it saturate?", "hidden_size {hidden_size}", "parameters",
          ("accuracy", "per_hour"), log=True, fit=True),
    Group("exp02a", "Does more effective depth, by L_cycles, help, and does it overfit?", "L_cycles {L_cycles}", "depth",
          ("accuracy", "gap", "speed")),
    Group("exp02b", "At equal effective depth, are H_cycles worth more than L_cycles?", "H_cycles {H_cycles}", "depth", ("accuracy", "gap", "speed"),
          beside="exp02a"),
    Group("exp03", "Can recursion stand in for layers?", "L_layers {L_layers}, L_cycles {L_cycles}", "", ("accuracy", "parameters", "speed"),
          note="Memory is not in a run's log: `python bench.py config/study/FILE.py` measures it, with `--aot=v5e:2x4` for a TPU."),
    Group("exp04a", "How few training puzzles are enough?", "{puzzles:,.0f} puzzles", "puzzles", ("accuracy", "gap"), log=True, bracket=True),
    Group("exp04b", "Are augmented copies a substitute for data?", "{copies:,.0f} copies", "copies", ("accuracy", "gap"), log=True),
    Group("exp05", "What does accuracy cost at inference?", "halt_max_steps {halt_max_steps}", "halt_max_steps", ("accuracy", "halting", "saved")),
    Group("exp06", "Up to which batch does a larger one save steps, and what throughput does it bring?", "batch {global_batch_size}, lr {lr:.2e}",
          "global_batch_size", ("accuracy", "steps_to", "speed"), log=True),
    Group("exp07", "Which precision is enough?", "{forward_dtype}", "", ("accuracy", "speed")),
    Group("exp08", "Does the average of the weights help, and at which rate?", "ema {average}", "", ("accuracy", "cells")),
    Group("exp09", "Which optimizer?", "{optimizer}, beta2 {beta2}", "", ("accuracy", "steps_to", "speed")),
    Group("exp10", "Which learning rate, and does it pay to let it fall?", "lr {lr:g}, {end}", "", ("accuracy", "steps_to")),
    Group("contrib01", "Does a curriculum of growing depth reach the target sooner?", "{variant}", "",
          ("accuracy", "hours_to", "steps_to"), curves="hours"),
    Group("contrib02", "Does exploration that falls over the run halt earlier?", "{variant}", "", ("accuracy", "halting", "saved")),
)
OTHERS = Group("", "How do these runs compare?", "{common}")
# A run's numbers: axis label with its unit, format in the tables.
VALUES = {
    "accuracy": ("test puzzles solved (%)", "{:.2f}"), "best": ("best evaluation (%)", "{:.2f}"), "cells": ("test cells right (%)", "{:.2f}"),
    "train": ("training puzzles solved (%)", "{:.2f}"), "gap": ("training - test (points)", "{:.2f}"),
    "parameters": ("parameters (millions)", "{:.3f}"), "depth": ("effective depth (layers a supervision step)", "{:.0f}"),
    "speed": ("throughput (examples/s)", "{:,.1f}"), "hours": ("training time (hours)", "{:.3f}"),
    "per_hour": ("accuracy per parameter-hour\n(% per million parameters and hour)", "{:,.2f}"),
    "halting": ("mean halting step in training", "{:.2f}"), "saved": ("supervision steps saved by halting (%)", "{:.1f}"),
    "steps_to": ("steps to {target:g}%", "{:,.0f}"), "hours_to": ("hours to {target:g}%", "{:.3f}"),
    "puzzles": ("training puzzles", "{:,.0f}"), "copies": ("augmented copies a puzzle", "{:,.0f}"),
    "global_batch_size": ("global batch (sequences)", "{:,.0f}"), "halt_max_steps": ("supervision steps at most (halt_max_steps)", "{:.0f}"),
    "examples": ("training examples (sequences)", "{:,.0f}"), "loss": ("training loss (nats a sequence)", "{:.4f}")}
COLUMNS = ("accuracy", "best", "cells", "train", "gap", "parameters", "depth", "speed", "hours", "per_hour")
HEAD = """Accuracy is that of the evaluation at a run's end: test puzzles with every cell right. Training values are means over the last
tenth of the run, of the sequences that halted in it, by the weights themselves and not their average. Hours are steps times step time:
no compiling, evaluation or interruption in them. Supervision steps saved are what halting would save at inference if it were as in
training. Steps and hours to the target are interpolated between evaluations. ± is one standard deviation over seeds. Only complete
runs are in tables, points and fits; curves go as far as a run went."""
# Told apart in grey too: Okabe and Ito's colours, each with a line style and a marker of its own.
STYLES = [("#000000", "-", "o"), ("#0072B2", "--", "s"), ("#D55E00", "-.", "^"), ("#009E73", ":", "D"), ("#CC79A7", (0, (6, 1, 1, 1, 1, 1)), "v"),
          ("#E69F00", (0, (1, 1)), "P"), ("#56B4E9", (0, (8, 3)), "X"), ("#999999", "-", "*")]


# Reading.

def read_lines(path):
    """The objects of a metrics.jsonl; a last line that a kill cut off is left out. Raises UserError with file and line for any other."""
    with open(path, encoding="utf-8", errors="replace") as f:
        lines = [line for line in f if line.endswith("\n")]
    values = []
    for number, line in enumerate(lines, 1):
        try:
            values.append(json.loads(line))
            if not all(isinstance(v, (int, float)) for v in (values[-1]["step"], *values[-1].values())):
                raise ValueError
        except (ValueError, TypeError, KeyError):
            raise UserError(f"{path}:{number}: damaged, not an object of numbers with a step: remove the line, or pull the file again") from None
    return values


def read_run(folder, defaults, target):
    """One run as a flat dict: its settings, VALUES, `name`, `folder`, `fault` ("" where it is complete) and its `curve`."""
    lines, run = read_lines(os.path.join(folder, "metrics.jsonl")), {}
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), "ckpt_*.json")), reverse=True) + [os.path.join(folder, "best.json")]:
        try:
            with open(path, "rb") as f:
                run = defaults | json.load(f)["settings"]
            break
        except (OSError, ValueError, KeyError, TypeError):  # half a pull, as train.py passes over it
            pass
    last, name, text = lines[-1] if lines else {"step": 0}, os.path.basename(os.path.abspath(folder)), ""
    fault = "" if run and "final" in last else "without its ckpt_*.json" if "final" in last else f"unfinished at step {last['step']:,}"
    run.update(name=name, folder=folder, fault=fault, variant=name.partition("_")[2] or name)
    if os.path.exists(os.path.join(folder, "log.txt")):
        with open(os.path.join(folder, "log.txt"), encoding="utf-8", errors="replace") as f:
            text = f.read()
    counts = re.findall(r"^([\d,]+) parameters; ([\d,]+) training examples of ([\d,]+) puzzles", text, re.M)
    parameters, examples, puzzles = (float(n.replace(",", "")) for n in counts[-1]) if counts else [math.nan] * 3
    run["hardware"] = ", then ".join(dict.fromkeys(re.findall(r"cores, (\d+ x .*?); settings", text))) or "unknown"
    batch, trained = run.get("global_batch_size", math.nan), [line for line in lines if "train/loss" in line]
    steps, times, before = [0], [0.0], 0  # the clock: step times without compiling, evaluations and interruptions
    for line in trained:
        if "perf/step_time" in line:
            times.append(times[-1] + (line["step"] - before) * line["perf/step_time"] / 3600)
            steps.append(line["step"])
            before = line["step"]
    clock = lambda step: float(np.interp(step, steps, times)) if len(steps) > 1 else math.nan  # nan for nan
    solved = {line["step"]: 100 * line["eval/exact_accuracy"] for line in lines if "eval/exact_accuracy" in line}
    tail = [line for line in trained if line["step"] > 0.9 * trained[-1]["step"]]
    mean = lambda key: float(np.mean(known)) if (known := [line[key] for line in tail if key in line]) else math.nan
    loss = {line["step"]: line["train/loss"] for line in trained}
    run["curve"] = {"accuracy": solved, "loss": loss, "hours": {s: clock(s) for s in solved | loss},
                    "examples": {s: s * batch for s in solved | loss}}
    if fault:
        return run
    accuracy, halting, hours = solved[last["step"]], mean("train/steps"), clock(last["step"])
    steps_to = next((step for step, value in solved.items() if value >= target), math.nan)
    if steps_to != next(iter(solved)):
        steps_to = crossing(list(solved), list(solved.values()), target)
    run.update(
        accuracy=accuracy, best=max(solved.values()), cells=100 * last["eval/accuracy"], train=100 * mean("train/exact_accuracy"),
        gap=100 * mean("train/exact_accuracy") - accuracy, halting=halting, saved=100 * (1 - halting / run["halt_max_steps"]),
        parameters=parameters / 1e6, puzzles=puzzles, copies=examples / puzzles - 1,
        depth=run["H_cycles"] * (run["L_cycles"] + 1) * run["L_layers"], hours=hours,
        speed=float(np.median([line["perf/examples_per_sec"] for line in trained if "perf/examples_per_sec" in line] or [math.nan])),
        per_hour=accuracy / (parameters / 1e6 * hours), steps_to=steps_to, hours_to=clock(steps_to),
        average=f"{run['ema_rate']:g}" if run["ema"] else "off",
        end="constant" if run["lr_min_ratio"] == 1 else f"cosine to {run['lr_min_ratio']:g} of it")
    return run


def crossing(x, y, level):
    """Where y first rises through level, by interpolation between two points; nan where it does not. x rises."""
    for i in range(1, len(x)):
        if y[i - 1] < level <= y[i]:
            return x[i - 1] + (x[i] - x[i - 1]) * (level - y[i - 1]) / (y[i] - y[i - 1])
    return math.nan


def find_runs(paths):
    """Folders with a metrics.jsonl: the given ones, or all below them. Raises UserError where there is none."""
    found = []
    for path in paths:
        matches = sorted(glob.glob(path)) or [path]
        below = [file for match in matches for file in sorted(glob.glob(os.path.join(glob.escape(match), "**", "metrics.jsonl"), recursive=True))]
        if not below:
            raise UserError(f"{path}: no run (a folder with metrics.jsonl) there: give folders of runs, out/study or out/demo0")
        found += map(os.path.dirname, below)
    return list(dict.fromkeys(map(os.path.normpath, found)))


# Points: the runs of one setting.

def points_of(group, runs, compared, notes):
    """The runs gathered by the settings `compared`, seeds together, by rising x: [{**settings, key: (mean, deviation), label, runs}]."""
    points = {}
    for run in runs:
        same = points.setdefault(json.dumps({k: run[k] for k in compared if k in run}, sort_keys=True), [])
        if any(run["seed"] == other["seed"] for other in same):
            notes.append(f"{run['folder']} has the settings and the seed of {same[0]['folder']}: left out")
        else:
            same.append(run)
    points = [dict(same[0], runs=same) for same in points.values()]
    for point in points:
        for key in set(VALUES) & set(point):
            values = [run[key] for run in point["runs"]]
            point[key] = float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
        names = [run["name"] for run in point["runs"]]
        common = names[0] if len(names) == 1 else re.sub(r"[-_]?(seed|s)?[-_]?$", "", os.path.commonprefix(names)) or ", ".join(names)
        point["label"] = group.label.format_map(point["runs"][0] | {"common": common})
    alike = [p for p in points if [q["label"] for q in points].count(p["label"]) > 1]
    for point in alike:  # what tells them apart is in their names, or not at all
        point["label"] += f" ({point['runs'][0]['name']})"
    return sorted(points, key=lambda p: p[group.x][0]) if group.x else points


def power_law(p, x):
    """a - b * x^-c at x [n], p = (a, b, c), and its derivatives by p [n, 3]."""
    a, b, c = p
    return a - b * x ** -c, np.stack([np.ones_like(x), -x ** -c, b * x ** -c * np.log(x)], axis=1)


def fit_power_law(x, y):
    """Least squares of y = a - b * x^-c: ((a, b, c), covariance [3, 3]), or a sentence that says why there is none.

    The best c of a grid, a and b linear, then Gauss-Newton; the covariance is s^2 (J'J)^-1, s^2 the residuals' variance.
    """
    x, y = np.asarray(x, float), np.asarray(y, float)
    if len(set(x)) < 4:
        return f"No fit: {len(set(x))} sizes, and a law of three numbers with an error needs four."
    grid = []
    for c in np.geomspace(0.02, 10, 400):
        linear = power_law((0, 1, c), x)[1][:, :2]
        a, b = np.linalg.lstsq(linear, y, rcond=None)[0]
        grid.append((np.square(y - linear @ (a, b)).sum(), a, b, c))
    best = min(grid)
    if best in (grid[0], grid[-1]) or best[2] <= 0:
        return "No fit: accuracy does not rise and level off with size as a - b * params^-c does."
    p = np.array(best[1:])
    try:
        for _ in range(50):
            value, jacobian = power_law(p, x)
            p = p + np.linalg.lstsq(jacobian, y - value, rcond=None)[0]
        squares = np.square(y - power_law(p, x)[0]).sum()
        if squares <= best[0] * (1 + 1e-6) + 1e-12:
            return p, squares / (len(x) - 3) * np.linalg.inv(jacobian.T @ jacobian)
    except np.linalg.LinAlgError:
        pass
    return "No fit: the points do not determine a - b * params^-c."


# Pictures.

def axis_label(key, target):
    return VALUES[key][0].format(target=target) if key in VALUES else key


def plot_rows(axes, group, points, target):
    """A panel for each number of the group, a row for each setting."""
    for key, ax in zip(group.panels, axes):
        for row, (value, deviation) in enumerate(p[key] for p in points):
            ax.errorbar(value, row, xerr=deviation, fmt="ko", capsize=3)
            if math.isnan(value):
                ax.text(0.03, row, "not reached" if "_to" in key else "not known", va="center", transform=ax.get_yaxis_transform())
        ax.set_xlabel(axis_label(key, target))
        ax.set_yticks(range(len(points)), [p["label"] for p in points] if ax is axes[0] else [])
        ax.set_ylim(len(points) - 0.5, -0.5)
        ax.margins(x=0.15)


def plot_lines(axes, group, series, law, target):
    """A panel for each number of the group, against its x. series: [(name, points)], the group's own first; law: as fit_power_law's."""
    known = lambda p, *keys: not math.isnan(sum(p[k][0] for k in keys))
    for key, ax in zip(group.panels, axes):
        drawn = [(name, points, key) for name, points in series]
        if key == "accuracy" and "gap" in group.panels:  # both ends of it
            drawn = [(f"{name}: {kind}", points, k) for kind, k in (("test", key), ("training", "train")) for name, points in series]
        for i, (name, points, k) in enumerate(drawn):
            colour, dashes, marker = STYLES[i]
            dashes = "" if law and k == "accuracy" else dashes  # the law is the line
            points = [p for p in points if known(p, group.x, k)]
            ax.errorbar([p[group.x][0] for p in points], [p[k][0] for p in points], [p[k][1] for p in points], color=colour, linestyle=dashes,
                        marker=marker, capsize=3, markerfacecolor="white" if k == "train" else colour,
                        label=name if key == "accuracy" and len(drawn) > 1 else None)
            if max((p[k][0] for p in points), default=0) > 10 * min((p[k][0] for p in points), default=0) > 0 and k in ("per_hour", "steps_to"):
                ax.set_yscale("log")
        ticks = sorted({p[group.x][0] for _, points in series for p in points if known(p, group.x)})
        if law and key == "accuracy":
            (a, b, c), covariance = law
            x = np.geomspace(ticks[0], ticks[-1], 200)
            y, jacobian = power_law(law[0], x)
            error = np.sqrt(np.einsum("ni,ij,nj->n", jacobian, covariance, jacobian))
            ax.plot(x, y, "k--", label=f"{a:.4g} - {b:.3g} n$^{{-{c:.3g}}}$, n in millions")
            ax.fill_between(x, y - error, y + error, color="0.85", label="its standard error")
        ax.set_xlabel(axis_label(group.x, target))
        ax.set_ylabel("puzzles solved (%)" if len(drawn) > len(series) else axis_label(key, target))
        if group.log:
            ax.set_xscale("log")
        if len(ticks) < 9:  # the settings themselves
            ax.set_xticks(ticks, [f"{t:,.0f}" if t >= 100 else f"{t:.3g}" for t in ticks], rotation=30 if ticks and ticks[-1] > 999 else 0)
            ax.xaxis.minorticks_off()
        if group.bracket and key == "accuracy":
            ax.axhline(target, color="0.5", linestyle=":", label=f"{target:g}%")


def plot_group(group, series, law, s, path):
    """The picture of a group, as plot_rows or plot_lines."""
    rows = 0 if group.x else len(series[0][1])
    size = 4.2 * len(group.panels) + 1.5 * bool(rows), 1.5 + 0.36 * rows if rows else 3.6
    fig, axes = plt.subplots(1, len(group.panels), figsize=size, layout="constrained", squeeze=False)
    plot_lines(axes[0], group, series, law, s.target) if group.x else plot_rows(axes[0], group, series[0][1], s.target)
    finish(fig, axes[0], group.asks, s, path)


def finish(fig, axes, title, s, path):
    """Grid, title, the legend below, where it hides nothing; writes the file."""
    handles = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels())}
    if handles:
        columns = int(12 * fig.get_size_inches()[0] / (8 + max(map(len, handles))))  # 12 characters to the inch
        fig.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=max(1, min(4, columns)), frameon=False)
    for ax in axes:
        ax.grid(color="0.9")
        ax.set_axisbelow(True)
    fig.suptitle("\n".join(textwrap.wrap(title, int(11 * fig.get_size_inches()[0]))))
    fig.savefig(path, dpi=s.dpi)
    plt.close(fig)


def plot_curves(group, points, unfinished, s, path):
    """Learning curves: test accuracy and training loss, mean and deviation over seeds; what is unfinished as far as it goes."""
    rows = [(p["label"] + (f" (mean ± deviation of {len(p['runs'])})" if len(p["runs"]) > 1 else ""), p["runs"]) for p in points]
    rows += [(f"{run['name']} (unfinished)", [run]) for run in unfinished]
    fig, axes = plt.subplots(1, 2, figsize=(10, 3.5 + 0.1 * len(rows)), layout="constrained")
    for key, ax in zip(("accuracy", "loss"), axes):
        for i, (label, runs) in enumerate(rows):
            colour, dashes, marker = STYLES[i % len(STYLES)]
            steps = sorted(set.intersection(*(set(run["curve"][key]) for run in runs)))
            if not steps:
                continue
            values = np.array([[run["curve"][key][step] for step in steps] for run in runs])
            x = np.mean([[run["curve"][group.curves][step] for step in steps] for run in runs], axis=0)
            mean, deviation = values.mean(0), values.std(0, ddof=1) if len(runs) > 1 else None
            ax.plot(x, mean, color=colour, linestyle=dashes, marker=marker, markevery=max(1, len(x) // 8), markersize=5, linewidth=1.3, label=label)
            if deviation is not None:
                ax.fill_between(x, mean - deviation, mean + deviation, color=colour, alpha=0.2, linewidth=0)
        ax.set_xlim(left=0)
        ax.set_xlabel(axis_label(group.curves, s.target))
        ax.set_ylabel(axis_label(key, s.target))
        if group.curves == "examples":
            ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    finish(fig, axes, f"Learning curves: {group.asks[0].lower() + group.asks[1:]}", s, path)


# The report.

def table(points, columns, target):
    """Markdown lines: a row a point, mean ± deviation where there are several seeds, - where a run does not have the number."""
    def cell(point, key):
        value, deviation = point[key]
        form = VALUES[key][1]
        several = f" ± {form.format(deviation)}" if deviation > 1e-9 * abs(value) else ""
        return "-" if math.isnan(value) else form.format(value) + several

    heads = ["setting", "seeds"] + [axis_label(k, target).replace("\n", " ") for k in columns]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    return lines + ["| " + " | ".join([p["label"], str(len(p["runs"]))] + [cell(p, k) for k in columns]) + " |" for p in points]


def findings(group, points, s):
    """What the group's numbers say, as sentences, and the fitted law (or None)."""
    if group.fit:
        pairs = [(run["parameters"], run["accuracy"]) for p in points for run in p["runs"] if not math.isnan(run["parameters"])]
        law = fit_power_law(*zip(*pairs)) if pairs else "No fit: no run's log.txt tells its parameters."
        if isinstance(law, str):
            return [law], None
        (a, b, c), error = law[0], np.sqrt(np.diag(law[1]))
        return [f"Least squares over {len(pairs)} runs: accuracy = a - b * n^-c, n in millions of parameters, with a = {a:.2f} ± {error[0]:.2f}%, "
                f"b = {b:.3g} ± {error[1]:.2g}, c = {c:.3g} ± {error[2]:.2g} (standard errors). "
                f"The law is within one point of its limit a from {b ** (1 / c):.3g} million parameters on."], law
    if group.bracket:
        known = sorted((p[group.x][0], p["accuracy"][0]) for p in points if not math.isnan(p[group.x][0]))
        at = crossing(*zip(*[(math.log(x), y) for x, y in known]), s.target) if known else math.nan
        if not math.isnan(at):
            return [f"Fewest puzzles for {s.target:g}%: about {math.exp(at):,.0f}, interpolated in their logarithm between the nearest runs."], None
        return [f"The runs do not bracket {s.target:g}%: how many puzzles it takes is not known."], None
    return [], None


def section(group, points, faulty, s):
    """Draws a group's pictures; returns its lines of Markdown. points: of all groups by prefix; faulty: its runs that are not complete."""
    own, stem = points[group.prefix], group.prefix or "runs"
    lines = [f"## {group.prefix}: {group.asks}" if group.prefix else f"## {group.asks}", ""]
    if own:
        complete = [run for point in own for run in point["runs"]]
        extra = [k for k in (group.x, *group.panels) if k in VALUES and k not in COLUMNS]
        said, law = findings(group, own, s)
        lines += table(own, (*COLUMNS[:1], *extra, *COLUMNS[1:]), s.target) + [""] + said + [group.note] * bool(group.note)
        lines += [f"Hardware: {'; '.join(sorted({run['hardware'] for run in complete}))}.", ""]
        unknown = ", ".join(run["name"] for run in complete if math.isnan(run["parameters"]))
        lines += [f"No log.txt that tells parameters and data: {unknown}.", ""] * bool(unknown)
        series = [(name, points[name]) for name in dict.fromkeys((group.prefix, group.beside or group.prefix)) if points.get(name)]
        plot_group(group, series, law, s, os.path.join(s.out_dir, f"{stem}.png"))
        lines += [f"![{group.asks}]({stem}.png)", ""]
    begun = [run for run in faulty if len(run["curve"]["loss"]) > 1 and not math.isnan(max(run["curve"][group.curves].values()))]
    if own or begun:
        plot_curves(group, own, begun, s, os.path.join(s.out_dir, f"{stem}_curves.png"))
        lines += [f"![Learning curves]({stem}_curves.png)", ""]
    return lines


def main(argv):
    """Reads the runs, writes report.md and its pictures, and prints where and what is missing."""
    s = configure(__file__, [a for a in argv if a.startswith("-")])
    if not plt:
        raise UserError("the pictures need matplotlib: pip install matplotlib")
    documented = read_settings(os.path.join(ROOT, "train.py"))
    compared = [k for k, (_, _, part) in documented.items() if part not in ("run", "logging") and k not in ("seed", "data_prepare")]
    defaults = {k: default for k, (default, _, _) in documented.items()}
    runs = [read_run(folder, defaults, s.target) for folder in find_runs([a for a in argv if not a.startswith("-")] or [STUDY])]
    group_of = lambda name: next((g for g in GROUPS if name.startswith(g.prefix)), OTHERS)
    study = any(group_of(run["name"]) is not OTHERS for run in runs)
    planned = sorted(os.path.basename(path)[:-3] for path in glob.glob(os.path.join(s.configs, "*.py"))) if study else []
    try:
        os.makedirs(s.out_dir, exist_ok=True)
    except OSError as e:
        raise UserError(f"--out_dir={s.out_dir}: {e.strerror}") from None

    head = HEAD + f" {s.configs} has no files, so which runs are missing is not known." * (study and not planned)
    status, body, points = ["| group | complete | unfinished | missing |", "|---|---|---|---|"], [], {}
    for g in (*GROUPS, OTHERS):
        own, notes = [run for run in runs if group_of(run["name"]) is g], []
        faulty = [run for run in own if run["fault"]]
        points[g.prefix] = points_of(g, [run for run in own if not run["fault"]], compared, notes)
        found = lambda name: any(run["name"] == name or run["name"].startswith(name + "_") for run in own)
        missing = [name for name in planned if group_of(name) is g is not OTHERS and not found(name)]
        if own or missing:
            unfinished = "; ".join(f"{run['name']}: {run['fault']}" for run in faulty)
            status.append(f"| {g.prefix or 'others'} | {len(own) - len(faulty)} | {unfinished or '-'} | {', '.join(missing) or '-'} |")
        if own:
            body += section(g, points, faulty, s) + [f"- {note}" for note in notes] + [""]
    with open(os.path.join(s.out_dir, "report.md"), "w", encoding="utf-8") as f:
        f.write("\n".join(["# Report", "", head, "", *status, "", *body]))
    print("\n".join(status))
    print(f"wrote {os.path.join(s.out_dir, 'report.md')} of {sum(not run['fault'] for run in runs)} complete runs of {len(runs)}")


if __name__ == "__main__":
    command(lambda: main(sys.argv[1:]), __file__)
