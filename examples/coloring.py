"""Colors the cells of a 4x5 grid with 3 colors so that neighbors differ: any right answer counts.

    python train.py config/demo.py examples/coloring.py
    python scripts/solve.py out/coloring examples/coloring.py .1..3...............

Most questions have several answers; the label is one of them. Puzzles are made on the fly.
"""
import numpy as np

import data
import model
import puzzles
from data import Generated

data_path = "coloring"
data_prepare = ""
out_dir = "out/coloring"


def broken_cells(questions, answers):
    """Returns which cells are empty, differ from a given, or have a neighbor of their color, bool [n, 20].

    It takes arrays and tensors alike.
    """
    broken = (answers < 2) | (questions > 1) & (answers != questions)
    colors = answers.reshape(-1, 4, 5)
    marks = broken.reshape(colors.shape)  # a view

    # mark both cells of equal neighbors: one below the other, then side by side
    for cells, cell_marks in (colors, marks), (colors.mT, marks.mT):
        equal = cells[:, 1:] == cells[:, :-1]
        cell_marks[:, 1:] |= equal
        cell_marks[:, :-1] |= equal
    return broken


def is_solved(inputs, labels, answers):
    """Returns which answers keep the rules, bool [b]; inputs, labels, answers: tensors of tokens [b, 20]."""
    return ~broken_cells(inputs, answers).any(1)


class Rules(puzzles.Kind):
    has_several_answers = True

    def judge(self, questions, answers):
        broken = broken_cells(questions, answers)
        return puzzles.Judgement(broken, ~broken.any(1))


class Coloring(Generated):
    task = {"kind": "coloring", "grid": [4, 5], "symbols": "_.123", "symmetries": {"permute_symbols": "123"}}
    total_groups = 4160  # 1170 steps in the demo's 9 epochs

    def draw(self, rng, n, split):
        # cell by cell, draw a color that neither the cell above nor the one to the left has
        colors = np.zeros((n, 5, 6), dtype=int)  # with a border of 0 above and to the left
        for row, column in np.ndindex(4, 5):
            draws = rng.random((n, 4))
            for used in 0, colors[:, row, column + 1], colors[:, row + 1, column]:
                draws[np.arange(n), used] = -1
            colors[:, row + 1, column + 1] = draws.argmax(axis=1)
        answers = colors[:, 1:, 1:].reshape(n, 20) + 1

        # give a fifth of the cells; one in ten sets of given cells is for the test alone
        is_given = rng.random((20 * n, 20)) < 0.2
        is_test = is_given @ (1 << np.arange(20)) % 10 == 0
        is_given = is_given[is_test == (split == "test")][:n]
        return np.where(is_given, answers, 1), answers


puzzles.KINDS["coloring"] = Rules
model.TRM.is_solved = staticmethod(is_solved)
data.Dataset = Coloring
