"""Makes mazes whose copies are turned with their labels, as the official builder does, and ours beside them.

    python tests/maze_copies.py data/copies 6 500 2000 16000    data/copies/6-500-{none,solved,turned}, ...

All have the same 1000 test mazes. none: no copies; solved: each of the 8 copies solved anew by the rule of
the labels, as prepare_maze.py does; turned: labels turned with their mazes. docs/results.md has the results.
"""
import os
import sys

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import prepare_maze
from prepare import write_dataset
from puzzles import MAZE, dihedral, maze_task


def main(folder, size, *counts):
    questions, answers = prepare_maze.generate(size, max(counts) + 1000, 0, size)
    test = questions[-1000:], answers[-1000:]
    for n in counts:
        train = questions[:n], answers[:n]
        turned = np.array(train)[:, :, dihedral(size)].reshape(2, -1, size * size)
        datasets = {
            "none": (1, prepare_maze.augmented(*train, size, False)),
            "solved": (8, prepare_maze.augmented(*train, size, True)),
            "turned": (8, [turned]),
        }
        for name, (copies, blocks) in datasets.items():
            splits = {"train": (n, copies, blocks), "test": (1000, 1, [test])}
            write_dataset(f"{folder}/{size}-{n}-{name}", splits, len(MAZE), maze_task(size))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
