"""Writes takuzu.csv: 6x6 Takuzu puzzles with 24 clues and one solution.

    python examples/takuzu.py takuzu.csv 6000

Rows and columns have three 0 and three 1, never three alike in a row, and no two rows or columns are equal.
"""
import itertools
import sys

import numpy as np


def is_line(cells):
    """Returns True for three 0 and three 1, never three alike in a row."""
    triples = zip(cells, cells[1:], cells[2:])
    has_triple = any(sum(triple) in (0, 3) for triple in triples)
    return sum(cells) == 3 and not has_triple


def solved_boards():
    """Returns all boards, [4140, 36]."""
    lines = [line for line in itertools.product((0, 1), repeat=6) if is_line(line)]

    # three different rows without three alike in a column
    halves = []
    for half in itertools.permutations(lines, 3):
        sums = set(map(sum, zip(*half)))
        if sums.isdisjoint((0, 3)):
            halves.append(half)

    # two halves are a board if their rows and columns are different lines
    boards = []
    for top, bottom in itertools.product(halves, halves):
        rows = {*top, *bottom}
        columns = set(zip(*top, *bottom))
        are_lines = all(map(is_line, columns))
        if are_lines and len(rows) == len(columns) == 6:
            boards.append(top + bottom)
    return np.array(boards).reshape(-1, 36)


def main(path, n):
    """Writes n puzzles to a new CSV file."""
    rng = np.random.default_rng(0)
    boards = solved_boards()
    with open(path, "x") as f:
        f.write("question,answer\n")
        for answer in boards[rng.integers(len(boards), size=n)]:
            given = np.ones(36, dtype=bool)
            agrees = boards == answer

            # remove clues in random order, unless the answer is then not the only one
            for cell in rng.permutation(36):
                given[cell] = False
                num_answers = agrees[:, given].all(axis=1).sum()
                given[cell] = given.sum() < 24 or num_answers > 1
            cells = np.where(answer, "1", "0")
            question = "".join(np.where(given, cells, "."))
            answer = "".join(cells)
            f.write(f"{question},{answer}\n")


if __name__ == "__main__":
    path, n = sys.argv[1:]
    main(path, int(n))
