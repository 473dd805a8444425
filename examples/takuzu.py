"""Writes takuzu.csv: 6x6 Takuzu puzzles with 24 clues and one solution.

    python examples/takuzu.py takuzu.csv 6000

Rows and columns have three 0 and three 1, never three alike in a row, and no two rows or columns are equal.
"""
import itertools
import sys

import numpy as np


def is_line(cells):
    return sum(cells) == 3 and all(len(set(cells[i:i + 3])) > 1 for i in range(4))


def solved_boards():
    """All of them, [4140, 36]."""
    lines = list(filter(is_line, itertools.product((0, 1), repeat=6)))
    halves = [half for half in itertools.permutations(lines, 3) if all(0 < sum(c) < 3 for c in zip(*half))]
    boards = [top + bottom for top in halves for bottom in halves if not set(top) & set(bottom)]
    boards = [board for board in boards if len(set(zip(*board))) == 6 and all(map(is_line, zip(*board)))]
    return np.array(boards).reshape(-1, 36)


def main(path, n):
    rng, boards = np.random.default_rng(0), solved_boards()
    with open(path, "x") as f:
        f.write("question,answer\n")
        for answer in boards[rng.integers(len(boards), size=n)]:
            given, agrees = np.ones(36, dtype=bool), boards == answer
            for cell in rng.permutation(36):  # without this clue, is the answer still the only one?
                given[cell] = False
                given[cell] = given.sum() < 24 or agrees[:, given].all(axis=1).sum() > 1
            cells = np.where(answer, "1", "0")
            f.write(f"{''.join(np.where(given, cells, '.'))},{''.join(cells)}\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]))
    except (IndexError, ValueError, OSError) as e:
        print(f"takuzu.py NEW_FILE NUMBER: {e}", file=sys.stderr)
        sys.exit(2)
