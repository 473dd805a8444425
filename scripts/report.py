"""Tables and pictures that compare runs: the groups of the scaling study, or any runs.

    python scripts/report.py                              the study: out/study
    python scripts/report.py out/demo0 out/demo1          these runs, or all runs in these folders
    python scripts/report.py pulled --out_dir=out/pulled  what was downloaded from a bucket

Writes out_dir/report.md, its PNGs, and results.json with the numbers of each complete run, in place of an
earlier report's. A run is a folder with metrics.jsonl, ckpt_*.json and log.txt. Runs that are missing,
unfinished or damaged are named. Runs that differ only in their seed are one point. A run of another group
with the same settings is one more seed.
"""
import json
import math
import os
import pathlib
import re
import sys
import textwrap
import warnings
from dataclasses import dataclass

import numpy as np

try:
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter
    from scipy.optimize import curve_fit
    from scipy.stats import t as student_t
    from scipy.stats import ttest_ind
except ImportError:
    plt = None  # main raises an error

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
from configurator import UserError, command, configure, read_settings

from data import read_metrics, saved_settings

# input and output; arguments without a dash are folders to read
out_dir = "out/report"  # report.md and its pictures
configs = "config/study"  # a file for each run that the study should have
target = 85.0  # percent of the test puzzles, for the time and the data needed to reach it
# ---

STUDY = "out/study"


@dataclass
class Group:
    """A question of the study and what answers it: settings, or keys of VALUES."""
    prefix: str  # of its runs' names
    question: str
    label: str  # of a setting: what differs between the runs
    x: str = ""  # abscissa of its panels; "": the labels
    panels: tuple = ("accuracy",)  # ordinates, a panel each; the learning curves follow
    columns: tuple = ()  # of its table, besides x, panels and COLUMNS
    log: bool = False  # logarithmic abscissa
    fit: bool = False  # accuracy = a - b * x^-c
    bracket: bool = False  # where accuracy crosses the target
    compare: str = ""  # another group, drawn in the same panels
    curves: tuple = (("accuracy", "flop"),)  # ordinate and abscissa of the learning curves


GROUPS = (
    Group("exp01", "How does accuracy grow with parameters, and where does it saturate?",
          "hidden_size {hidden_size}", "parameters", columns=("per_time",), log=True, fit=True),
    Group("exp02a", "Does more effective depth, by L_cycles, help, and does it overfit?",
          "L_cycles {L_cycles}", "depth", columns=("gap", "speed")),
    Group("exp02b", "At equal effective depth, are H_cycles worth more than L_cycles?",
          "H_cycles {H_cycles}", "depth", columns=("gap", "speed"), compare="exp02a"),
    Group("exp03", "Can recursion replace layers?",
          "L_layers {L_layers}, L_cycles {L_cycles}", columns=("parameters", "speed")),
    Group("exp04a", "How few training puzzles are enough?",
          "{puzzles:,.0f} puzzles", "puzzles", ("accuracy", "gap"), log=True, bracket=True),
    Group("exp04b", "Can augmented copies replace data?",
          "{copies:,.0f} copies", "copies", ("accuracy", "gap"), log=True),
    Group("exp05", "What does accuracy cost at inference?",
          "halt_max_steps {halt_max_steps}", "halt_max_steps", ("accuracy", "halting"), ("saved",)),
    Group("exp06", "Up to which size does a larger batch save steps and gain throughput?",
          "batch {global_batch_size}, lr {lr:.2e}", "global_batch_size", ("accuracy", "speed"), ("steps_to",),
          log=True),
    Group("exp07", "Which precision is enough?", "{forward_dtype}", columns=("speed",)),
    Group("exp08", "Does the average of the weights help, and at which rate?", "ema {average}"),
    Group("exp09", "Which optimizer?", "{optimizer}, beta2 {beta2}", columns=("steps_to", "speed")),
    Group("exp10", "Which learning rate, and does decaying it help?", "lr {lr:g}, {end}",
          columns=("steps_to",)),
    Group("contrib01", "Does a curriculum of growing depth reach the target sooner?", "{variant}",
          columns=("time_to", "steps_to")),
    Group("contrib02", "Does exploration that decays over the run lead to earlier halting?", "{variant}",
          "", ("accuracy", "halting"), ("saved",)),
)
OTHERS = Group("", "How do these runs compare?", "{common}", columns=("best", "parameters", "speed"),
               curves=(("accuracy", "examples"), ("loss", "examples"), ("accuracy", "time")))
# The numbers of a run: axis label with its unit, format in the tables.
VALUES = {
    "accuracy": ("test puzzles solved (%)", "{:.2f}"),
    "surest": ("surest answers right (%)", "{:.2f}"),
    "best": ("best evaluation (%)", "{:.2f}"),
    "train": ("training puzzles solved (%)", "{:.2f}"),
    "gap": ("training - test (points)", "{:.2f}"),
    "parameters": ("parameters (millions)", "{:.3f}"),
    "depth": ("effective depth (layers per supervision step)", "{:.0f}"),
    "speed": ("throughput (examples/s)", "{:,.1f}"),
    "time": ("training time ({unit}s)", "{:.3f}"),
    "per_time": ("accuracy per parameter-{unit} (% / (million {unit}s))", "{:,.2f}"),
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
COLUMNS = "surest", "train", "flop", "time"  # of each table
EXPLANATION = """Accuracy is the share of test puzzles solved in the final evaluation, by each puzzle's last
answer (with eval_patience, one that repeats); the surest is that of the step where q_halt was highest.
Training values are means over the last tenth of the run, of the weights and not of their average. Time is
steps times step time; arithmetic is that of matmuls. The supervision steps saved assume that halting works
at inference as in training. Steps and time to the target are interpolated between evaluations.
± is one standard deviation over seeds; brackets in a legend give their number. Only learning curves include
unfinished runs."""
# Okabe and Ito's colours, with line styles and markers that differ in grey too.
STYLES = [("#000000", "-", "o"), ("#0072B2", "--", "s"), ("#D55E00", "-.", "^"), ("#009E73", ":", "D"),
          ("#CC79A7", (0, (6, 1, 1, 1, 1, 1)), "v"), ("#E69F00", (0, (1, 1)), "P"),
          ("#56B4E9", (0, (8, 3)), "X"), ("#999999", "-", "*")]


def main(argv):
    """Reads the runs, writes report.md and its pictures, and prints what is missing."""
    c = configure(__file__, [a for a in argv if a.startswith("-")])
    if not plt:
        raise UserError("matplotlib or scipy is missing: pip install matplotlib scipy")
    documented = read_settings(os.path.join(ROOT, "train.py"))
    defaults = {name: values[0] for name, values in documented.items()}
    folders = find_runs([a for a in argv if not a.startswith("-")] or [STUDY])
    runs = [read_run(folder, defaults, c.target) for folder in folders]
    c.unit = choose_unit(runs)
    planned = []
    if any(run["group"] is not OTHERS for run in runs):
        planned = sorted(path.stem for path in pathlib.Path(c.configs).glob("*.py"))
        planned = planned or [f"not known: {c.configs} has no files"]
    try:
        os.makedirs(c.out_dir, exist_ok=True)
    except OSError as e:
        raise UserError(f"--out_dir={c.out_dir}: {e.strerror}") from None

    compared = [name for name, (_, _, part) in documented.items()
                if part not in ("run", "logging") and name not in ("seed", "data_prepare")]
    status = ["| group | complete | unfinished | missing |", "|---|---|---|---|"]
    body, points = [], {}
    for group in (*GROUPS, OTHERS):
        own = [run for run in runs if run["group"] is group]
        complete = [run for run in own if not run["problem"]]
        incomplete = [run for run in own if run["problem"]]
        missing = [name for name in planned if group_of(name) is group
                   and not any(f"{run['name']}_".startswith(f"{name}_") for run in own)]
        others = [run for run in runs if not run["problem"] and run["group"] not in (group, OTHERS)]
        points[group.prefix], notes = points_of(group, complete, others, compared)
        if own or missing:
            unfinished = "; ".join(f"{run['name']}: {run['problem']}" for run in incomplete)
            cells = group.prefix or "others", str(len(complete)), unfinished or "-", ", ".join(missing) or "-"
            status.append(f"| {' | '.join(cells)} |")
        if own:
            body += section(group, points, incomplete, c) + [f"- {note}" for note in notes] + [""]
    results = ",\n".join(json.dumps(numbers(run)) for run in runs if not run["problem"])
    pathlib.Path(c.out_dir, "results.json").write_text(f"[\n{results}\n]\n")
    path = pathlib.Path(c.out_dir, "report.md")
    hardware = sorted({run["hardware"] for run in runs if not run["problem"]})
    text = "\n".join(["# Report", "", EXPLANATION, "", f"Hardware: {'; '.join(hardware)}.", "",
                      *status, "", *body])
    path.write_text(text, encoding="utf-8")
    complete = sum(not run["problem"] for run in runs)
    print(*status, f"wrote {path}: {complete} of {len(runs)} runs are complete", sep="\n")


def group_of(name):
    return next((group for group in GROUPS if name.startswith(group.prefix)), OTHERS)


def section(group, points, incomplete, c):
    """Draws a group's pictures; returns its Markdown. points: by prefix; incomplete: runs."""
    own = points[group.prefix]
    name = group.prefix or "runs"  # of its pictures
    lines = [f"## {group.prefix}{group.prefix and ': '}{group.question}", ""]
    law = None
    if own:
        sentences = chance_finding(own)
        if group.fit:
            sentence, law = fit_finding(own)
            sentences.append(sentence)
        if group.bracket:
            sentences.append(bracket_finding(group, own, c.target))
        columns = [key for key in (group.x, *group.panels, *group.columns) if key in VALUES]
        lines += table(own, dict.fromkeys(["accuracy", *columns, *COLUMNS]), c) + [""]
        lines += [f"- {sentence}" for sentence in sentences] + [""]
    started = [run for run in incomplete if len(run["curve"]["loss"]) > 1]
    if own or started:
        plot_group(group, points, started, law, c, os.path.join(c.out_dir, f"{name}.png"))
        lines += [f"![{group.question}]({name}.png)", ""]
    return lines


def table(points, columns, c):
    """Markdown lines: a row per point, mean ± deviation over seeds, - if not known."""
    titles = ["setting", "seeds"] + [axis_label(key, c).replace("\n", " ") for key in columns]
    rows = [titles, ["---"] * len(titles)]
    for point in points:
        rows.append([point["label"], str(len(point["runs"]))])
        for key in columns:
            (value, deviation), form = point[key], VALUES[key][1]
            cell = "-" if math.isnan(value) else form.format(value)
            if float(form.format(deviation).replace(",", "")) and deviation > 1e-6 * abs(value):
                cell += f" ± {form.format(deviation)}"
            rows[-1].append(cell)
    return [f"| {' | '.join(cells)} |" for cells in rows]


def chance_finding(points):
    """What differs from the setting with the most seeds beyond chance, and by how much."""
    base = max(points, key=lambda point: len(point["runs"]))
    (mean, deviation), seeds = base["accuracy"], len(base["runs"])
    if seeds < 3 or len(points) < 2:
        return []
    found = {True: [], False: []}
    for point in points:
        if point is not base:
            difference, low, high = difference_of(point["runs"], base["runs"])
            found[low > 0 or high < 0].append(
                f"{point['label']} {difference:+.1f} ({low:+.1f} to {high:+.1f})")
    return [f"Points against {base['label']}, {mean:.1f} ± {deviation:.1f} over {seeds} seeds, with 95% "
            f"confidence intervals. Beyond chance: {'; '.join(found[True]) or 'none'}. "
            f"Within: {'; '.join(found[False]) or 'none'}."]


def difference_of(runs, base):
    """(mean accuracy of runs less that of base, low, high): its 95% confidence interval, by Welch's t test.

    One run or two are taken to vary as those of base do, of which there are several.
    """
    a, b = ([run["accuracy"] for run in group] for group in (runs, base))
    difference = np.mean(a) - np.mean(b)
    if len(a) > 2:
        return difference, *ttest_ind(a, b, equal_var=False).confidence_interval()
    half = student_t.ppf(0.975, len(b) - 1) * np.std(b, ddof=1) * math.sqrt(1 / len(a) + 1 / len(b))
    return difference, difference - half, difference + half


def fit_finding(points):
    """The fitted law as a sentence, and as fit_power_law returns it (or None)."""
    runs = [run for point in points for run in point["runs"] if not math.isnan(run["parameters"])]
    sizes = [run["parameters"] for run in runs]
    law = fit_power_law(sizes, [run["accuracy"] for run in runs])
    if isinstance(law, str):
        return law, None
    (a, b, c), covariance = law
    errors = np.sqrt(np.diag(covariance))
    return (
        f"Least squares over {len(runs)} runs of n = {min(sizes):.3g} to {max(sizes):.3g} million "
        f"parameters: accuracy = a - b * n^-c, with a = {a:.2f} ± {errors[0]:.2f}%, "
        f"b = {b:.3g} ± {errors[1]:.2g}, c = {c:.3g} ± {errors[2]:.2g} (standard errors); "
        f"within one point of a from {b ** (1 / c):.3g} million on."), law


def bracket_finding(group, points, target):
    """How many puzzles reach the target, in words."""
    known = sorted((p[group.x][0], p["accuracy"][0]) for p in points if not math.isnan(p[group.x][0]))
    at = crossing([math.log(x) for x, _ in known], [y for _, y in known], target)
    if math.isnan(at):
        return f"The runs do not bracket {target:g}%."
    return f"Puzzles for {target:g}%: about {math.exp(at):,.0f}, interpolated in their logarithm."


def find_runs(paths):
    """The folders with a metrics.jsonl in paths or below. Raises UserError."""
    found = []
    for path in paths:
        files = sorted(pathlib.Path(path).rglob("metrics.jsonl"))
        if not files:
            raise UserError(f"{path}: no run (a folder with metrics.jsonl) there")
        found += [str(file.parent) for file in files]
    return list(dict.fromkeys(found))


def read_run(folder, defaults, target):
    """One run as a flat dict: settings, VALUES, name, folder, curve, problem (or "")."""
    lines = [{key: value for key, value in line.items() if isinstance(value, (int, float))}
             for line in read_metrics(os.path.join(folder, "metrics.jsonl"))]
    files = [*pathlib.Path(folder).glob("ckpt_*.json"), pathlib.Path(folder, "best.json")]  # best: the last
    settings = saved_settings(files, pathlib.Path.read_bytes)
    run = defaults | settings if settings else {}
    name = os.path.basename(os.path.abspath(folder))
    run |= dict(name=name, folder=folder, group=group_of(name), **read_log(folder))
    run["variant"] = name.partition("_")[2] or name
    last = lines[-1] if lines else {"step": 0}
    run["problem"] = "" if settings else "no ckpt_*.json with its settings"
    if "final" not in last:
        run["problem"] = f"unfinished at step {last['step']:,}"
    elif "eval/exact_accuracy" not in last:
        run["problem"] = "its final line in metrics.jsonl has no accuracy"

    trained = [line for line in lines if "train/loss" in line]
    evaluated = [line for line in lines if "eval/exact_accuracy" in line]
    solved = {line["step"]: 100 * line["eval/exact_accuracy"] for line in evaluated}
    loss = {line["step"]: line["train/loss"] for line in trained}
    batch_size = run.get("global_batch_size", math.nan)
    hours, flop = training_clock(trained)
    run["curve"] = {
        "accuracy": solved, "loss": loss,
        "hours": {step: hours(step) for step in solved | loss},
        "flop": {step: flop(step) for step in solved | loss},
        "examples": {step: step * batch_size for step in solved | loss},
    }
    return run | ({} if run["problem"] else final_values(run, trained, last, hours, target))


def final_values(run, trained, last, hours, target):
    """The numbers of a complete run, by their names in VALUES and in labels."""
    solved = run["curve"]["accuracy"]
    accuracy = solved[last["step"]]
    tail = [line for line in trained if line["step"] > 0.9 * trained[-1]["step"]]
    train = 100 * np.mean(column(tail, "train/exact_accuracy"))
    halting = np.mean(column(tail, "train/steps"))
    steps_to = crossing(list(solved), list(solved.values()), target)
    if next(iter(solved.values())) >= target:
        steps_to = next(iter(solved))
    return dict(
        accuracy=accuracy, surest=100 * last.get("eval/surest_accuracy", math.nan),
        best=max(solved.values()), train=train, flop=run["curve"]["flop"][last["step"]],
        gap=train - accuracy, halting=halting, saved=100 * (1 - halting / run["halt_max_steps"]),
        depth=run["H_cycles"] * (run["L_cycles"] + 1) * run["L_layers"],
        speed=np.median(column(trained, "perf/examples_per_sec")),
        hours=hours(last["step"]), steps_to=steps_to, hours_to=hours(steps_to),
        average=f"{run['ema_rate']:g}" if run["ema"] else "off",
        end="constant" if run["lr_min_ratio"] == 1 else f"cosine to {run['lr_min_ratio']:g} of it")


def numbers(run):
    """What results.json has of a complete run: its seed, known VALUES, and accuracy by step."""
    known = {key: float(f"{run[key]:.6g}") for key in VALUES if not math.isnan(run.get(key, math.nan))}
    return dict(name=run["name"], seed=run["seed"], **known, evaluations=run["curve"]["accuracy"])


def read_log(folder):
    """Parameters (millions), puzzles and copies, nan if not known, and hardware in log.txt."""
    path = pathlib.Path(folder, "log.txt")
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    parameters = examples = puzzles = math.nan
    counts = re.findall(r"^([\d,]+) parameters; ([\d,]+) training examples of ([\d,]+) puzzles", text, re.M)
    if counts:
        parameters, examples, puzzles = (float(n.replace(",", "")) or math.nan for n in counts[-1])
    hardware = dict.fromkeys(re.findall(r"cores, (\d+ x .*?); settings", text))
    return dict(parameters=parameters / 1e6, puzzles=puzzles, copies=examples / puzzles - 1,
                hardware=", then ".join(hardware) or "unknown")


def training_clock(trained):
    """Two functions of the step: hours and FLOP of training, nan without step times."""
    timed = [line for line in trained if "perf/step_time" in line]
    steps = [0] + [line["step"] for line in timed]
    seconds = np.diff(steps) * [line["perf/step_time"] for line in timed]
    flop = seconds * [1e12 * line.get("perf/tflops", math.nan) for line in timed]

    def reading(per_line):
        sums = [0.0, *np.cumsum(per_line)]
        return lambda step: np.interp(step, steps, sums) if timed else math.nan

    return reading(seconds / 3600), reading(flop)


def choose_unit(runs):
    """The unit that fits the longest run; adds time, time_to and per_time to the runs."""
    longest = max((h for run in runs for h in run["curve"]["hours"].values() if h > 0), default=1.0)
    units = [("second", 3600, 1 / 20), ("minute", 60, 1.5), ("hour", 1, 72), ("day", 1 / 24, math.inf)]
    unit, factor = next((unit, factor) for unit, factor, limit in units if longest < limit)
    for run in runs:
        run["curve"]["time"] = {step: factor * hours for step, hours in run["curve"]["hours"].items()}
        if not run["problem"]:
            run |= dict(time=factor * run["hours"], time_to=factor * run["hours_to"])
            run["per_time"] = run["accuracy"] / (run["parameters"] * run["time"])
    return unit


def column(lines, key):
    """A metric of the lines that have it; [nan] if none has."""
    return [line[key] for line in lines if key in line] or [math.nan]


def points_of(group, runs, others, compared):
    """The runs with equal settings `compared` as points, by x, and notes on what is left out.

    others: runs of other groups, more seeds of the points with their settings.
    A point is a dict: settings, (mean, deviation) for each of VALUES, label and runs (its seeds).
    """
    def key_of(run):
        return tuple(run[name] for name in compared)

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
        common = os.path.commonprefix([run["name"] for run in same]).rstrip("-_") or same[0]["name"]
        point = dict(same[0], runs=same, label=group.label.format_map(same[0] | {"common": common}))
        for key in VALUES:
            if key in point:
                values = [run[key] for run in same]
                deviation = np.std(values, ddof=1) if len(values) > 1 else 0.0
                point[key] = np.mean(values), deviation
        points.append(point)
    labels = [point["label"] for point in points]
    for point in points:
        if labels.count(point["label"]) > 1:  # the runs' names tell them apart
            point["label"] += f" ({point['runs'][0]['name']})"
    if group.x:
        points.sort(key=lambda point: point[group.x][0])
    return points, notes


def crossing(x, y, level):
    """The interpolated x at which y first rises through level, or nan. x rises."""
    for i in range(1, len(x)):
        if y[i - 1] < level <= y[i]:
            return x[i - 1] + (x[i] - x[i - 1]) * (level - y[i - 1]) / (y[i] - y[i - 1])
    return math.nan


def fit_power_law(x, y):
    """Least squares of y = a - b * x^-c: ((a, b, c), covariance [3, 3]), or why not."""
    if len(set(x)) < 4:
        return f"No fit: {len(set(x))} sizes, and three parameters with an error need four."
    start = max(y), (max(y) - min(y)) * min(x), 1.0
    try:
        with warnings.catch_warnings():  # of overflow and an infinite covariance
            warnings.simplefilter("ignore")
            p, covariance = curve_fit(lambda x, a, b, c: a - b * x ** -c, x, y, start)
        if p[1] > 0 and 0.02 < p[2] < 10 and np.isfinite(covariance).all():
            return p, covariance
    except RuntimeError:  # no convergence
        pass
    return "No fit: accuracy does not rise and level off with size as a - b * params^-c does."


def plot_group(group, points, unfinished, law, c, path):
    """The picture of a group: its panels and learning curves; law: of fit_power_law, or None."""
    own, compared = points[group.prefix], points.get(group.compare)
    series = {group.prefix: own} | ({group.compare: compared} if compared else {})
    panels = group.panels if max(map(len, series.values())) > 1 else ()  # a lone dot says nothing
    count, settings = len(panels) + len(group.curves), len(own) + len(unfinished)
    fig, axes = plt.subplots(1, count, figsize=(4.2 * count, 3.4 + 0.12 * settings), layout="constrained",
                             squeeze=False)
    axes = axes[0]
    for key, ax in zip(panels, axes):
        if group.x:
            plot_against_x(ax, key, group, series, law, c)
        else:
            plot_rows(ax, key, own, c)
            ax.set_yticks(range(len(own)), [p["label"] for p in own] if ax is axes[0] else [])
    for curve, ax in zip(group.curves, axes[len(panels):]):
        plot_curves(ax, *curve, own, unfinished, c)
    save_figure(fig, axes, group.question, path)


def plot_rows(ax, key, points, c):
    """A panel with one number, a row for each setting: mean and deviation, and the single runs."""
    for row, point in enumerate(points):
        (value, deviation), runs = point[key], point["runs"]
        ax.plot([run[key] for run in runs], [row] * len(runs), "k.", alpha=0.3)
        ax.errorbar(value, row, xerr=deviation, fmt="ko", capsize=3)
    ax.set_xlabel(axis_label(key, c))
    ax.set_ylim(len(points) - 0.5, -0.5)
    ax.margins(x=0.15)


def plot_against_x(ax, key, group, series, law, c):
    """A panel with one number against the group's x."""
    for (color, dashes, marker), (name, points) in zip(STYLES, series.items()):
        points = [p for p in points if not math.isnan(p[group.x][0] + p[key][0])]
        x, values = ([p[k][0] for p in points] for k in (group.x, key))
        ax.errorbar(x, values, [p[key][1] for p in points], color=color, capsize=3, marker=marker,
                    label=name if len(series) > 1 else None, linestyle="" if law else dashes)
    xs = {p[group.x][0] for points in series.values() for p in points}
    ticks = sorted(x for x in xs if not math.isnan(x))
    if law and key == "accuracy":
        (a, b, exponent), _ = law
        curve = np.geomspace(ticks[0], ticks[-1], 200)
        ax.plot(curve, a - b * curve ** -exponent, "k--",
                label=f"{a:.4g} - {b:.3g} n$^{{-{exponent:.3g}}}$, n in millions")
    ax.set_xlabel(axis_label(group.x, c))
    ax.set_ylabel(axis_label(key, c))
    if group.log:
        ax.set_xscale("log")
    if len(ticks) < 9:  # the settings themselves
        labels = [f"{tick:,.0f}" if tick >= 100 else f"{tick:.3g}" for tick in ticks]
        ax.set_xticks(ticks, labels, rotation=30 if max(map(len, labels), default=0) > 4 else 0)
        ax.xaxis.minorticks_off()
    if group.bracket and key == "accuracy":
        ax.axhline(c.target, color="0.5", linestyle=":", label=f"{c.target:g}%")


def plot_curves(ax, key, abscissa, points, unfinished, c):
    """A panel with the learning curves of all settings."""
    curves = [(f"{point['label']} ({len(point['runs'])})", point["runs"]) for point in points]
    curves += [(f"{run['name']} (unfinished)", [run]) for run in unfinished]
    for i, (label, runs) in enumerate(curves):
        plot_curve(ax, key, abscissa, runs, STYLES[i % len(STYLES)], label)
    ax.set_xlim(left=0)
    ax.set_xlabel(axis_label(abscissa, c))
    ax.set_ylabel(axis_label(key, c))
    if abscissa != "time":
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))


def plot_curve(ax, key, abscissa, runs, style, label):
    """Mean and deviation of one point's runs, at the steps that all of them have."""
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


def save_figure(fig, axes, title, path):
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
    fig.savefig(path, dpi=110)
    plt.close(fig)


def axis_label(key, c):
    return VALUES[key][0].format(target=c.target, unit=c.unit) if key in VALUES else key


if __name__ == "__main__":
    command(lambda: main(sys.argv[1:]), __file__)
