"""Colours the cells of a 4x5 grid with 3 colours so that neighbours differ: any right answer counts.

    python examples/coloring.py make coloring.csv 6000
    python prepare_csv.py --train_csv=coloring.csv --holdout=1000 --several_answers --grid=4x5 \\
        --symbols=.123 --kind=coloring --permute_symbols=1-3 --num_aug=5 --output_dir=data/coloring
    python examples/coloring.py train examples/coloring_config.py
    python examples/coloring.py solve out/coloring .1..3...............
    python examples/coloring.py play out/coloring

train, solve and play are train.py, scripts/solve.py and scripts/play.py, which learn the rules here. Most
questions have several answers, of which the label is one.
"""
import os
import sys

import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, os.path.join(ROOT, "scripts")]
# isort: off
import puzzles
from configurator import command, start
from model import TRM


# ---------------------------------------------------------------------------------------------------------
# The rules, for the judge of answers and for the target of q_halt

def judge_coloring(task, questions, answers):
    """Returns which cells are empty, differ from a given, or have a neighbour of their colour.

    See JUDGES in puzzles/__init__.py; arrays and tensors alike.
    """
    changed = (questions > 1) & (answers != questions)
    broken = (answers < 2) | changed
    colors = answers.reshape(-1, *task["grid"])
    marks = broken.reshape(colors.shape)  # a view

    # both cells of a pair of equal neighbours, one below the other
    equal = colors[:, 1:] == colors[:, :-1]
    marks[:, 1:] |= equal
    marks[:, :-1] |= equal

    # and of a pair side by side
    equal = colors[:, :, 1:] == colors[:, :, :-1]
    marks[:, :, 1:] |= equal
    marks[:, :, :-1] |= equal
    return broken, ~broken.any(1)


def is_solved(inputs, labels, answer):
    """Returns which answers keep the rules, bool [b]; inputs, labels, answer: tensors of tokens [b, 20]."""
    _, solved = judge_coloring({"grid": [4, 5]}, inputs, answer)
    return solved


puzzles.JUDGES["coloring"] = judge_coloring
puzzles.SEVERAL_ANSWERS.add("coloring")
TRM.is_solved = staticmethod(is_solved)  # not in main(): the processes of torch_xla import this file anew


# ---------------------------------------------------------------------------------------------------------
# Puzzles

def make(path, n):
    """Writes n random colourings and questions with about a fifth of their cells to a new CSV file."""
    rng = np.random.default_rng(0)
    with open(path, "x") as f:
        f.write("question,answer\n")
        for _ in range(n):
            # cell by cell, a colour that neither the cell above nor the one to the left has
            colors = np.zeros((5, 6), dtype=int)  # with a border of 0 above and to the left
            for row, column in np.ndindex(4, 5):
                above = colors[row, column + 1]
                left = colors[row + 1, column]
                allowed = {1, 2, 3} - {above, left}
                colors[row + 1, column + 1] = rng.choice(list(allowed))
            answer = colors[1:, 1:].astype(str).ravel()
            question = np.where(rng.random(20) < 0.2, answer, ".")
            f.write("".join(question) + ",")
            f.write("".join(answer) + "\n")


def main(action, *arguments):
    """Runs one of the docstring's commands."""
    if action == "make":
        path, n = arguments
        make(path, int(n))
    elif action == "train":
        import train
        sys.argv[1:2] = []
        start(train.main, train.__file__)
    else:
        script = __import__(action)  # solve or play
        command(lambda: script.main(list(arguments)), script.__file__)


if __name__ == "__main__":
    main(*sys.argv[1:])
