"""Draws official.png, maze_copies.png and attempts.png from the .json of the same names, for results.md."""
import json
import os

import matplotlib.pyplot as plt
import numpy as np

SIZES = 500, 2000, 16000  # training mazes


def select(rows, key, **values):
    """Returns the column `key` of the rows that have these values."""
    return [row[key] for row in rows if all(row[name] == value for name, value in values.items())]


def official(rows):
    """Draws learning curves by minutes of training, a line for each seed."""
    # a color for each run, a line for each seed
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for run, label, color in (("official", "official code", "gray"), ("demo", "config/demo.py", "tab:red"),
                              ("same", "this code, the same recipe", "tab:blue")):
        for row in rows:
            if row["run"] == run:
                accuracy = 100 * np.array([0, *row["exact_accuracy"]])
                axes.plot([0, *row["minutes"]], accuracy, ".-", color=color, label=label)
                label = ""  # the other seeds
    # the target, and the axes
    axes.axhline(90, color="black", linewidth=0.5)
    axes.set(xlabel="minutes of training on one thread", xlim=0, ylim=(0, 100))
    axes.set_ylabel("unseen puzzles solved (%)")
    axes.legend(frameon=False)
    figure.savefig("official.png", dpi=150)


def maze_copies(rows):
    """Draws accuracy by the number of training mazes: exact, and any shortest path."""
    figure, both = plt.subplots(1, 2, figsize=(7, 3), sharey=True, layout="constrained")
    titles = dict(exact_accuracy="the label", path_optimal="any shortest path")
    for axes, (metric, title) in zip(both, titles.items()):
        for copies, label, color in (("none", "no copies", "gray"), ("turned", "labels turned", "tab:red"),
                                     ("solved", "copies solved anew", "tab:blue")):
            # mean and standard deviation of the seeds
            found = 100 * np.array([select(rows, metric, size=6, mazes=n, copies=copies) for n in SIZES])
            axes.errorbar(SIZES, found.mean(1), found.std(1, ddof=1), fmt=".-", capsize=3, color=color,
                          label=label)
        # the axes
        axes.set(title=title, xscale="log", xlabel="training mazes", ylim=(0, 100))
        axes.set_xticks(SIZES, map(str, SIZES))
        axes.minorticks_off()
    both[0].set_ylabel("unseen mazes solved (%)")
    both[0].legend(frameon=False)
    figure.savefig("maze_copies.png", dpi=150)


def attempts(rows):
    """Draws the accuracy of the surest answer by the arithmetic that a puzzle takes on average."""
    # a line for each rule
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for rule, label, color in (("attempts", "attempts of 16 steps", "tab:red"),
                               ("patience", "the same, each until its answer repeats", "tab:blue"),
                               ("steps", "one attempt, until its answer repeats", "gray")):
        x, y, names = (select(rows, key, rule=rule) for key in ("gflop", "surest", "name"))
        axes.plot(x, y, ".-", color=color, label=label)
        # a name beside each point
        for place in zip(names, zip(x, y)):
            axes.annotate(*place, xytext=(4, -11), textcoords="offset points", fontsize=8, color=color)
    axes.set(xlabel="GFLOP of a puzzle, mean", ylabel="unseen puzzles solved (%)", xlim=0, ylim=(86, 100))
    axes.legend(frameon=False, fontsize=8, loc=(0.42, 0.6))
    figure.savefig("attempts.png", dpi=150)


if __name__ == "__main__":
    os.chdir(os.path.dirname(os.path.abspath(__file__)))
    for draw in official, maze_copies, attempts:
        with open(f"{draw.__name__}.json") as f:
            draw(json.load(f))
