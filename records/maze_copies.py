"""Makes mazes without copies, with copies that are solved anew, and with copies whose labels are turned.

    python records/maze_copies.py data/copies 6 500 2000 16000    data/copies/6-500-{none,solved,turned}, ...

All have the same 1000 test mazes. "none" has no copies. "solved" has each of the 8 copies solved anew by the
rule of the labels, as prepare_maze.py does. "turned" has labels that are turned with their mazes, as the
official builder does. results.md has the results.
"""
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
import prepare_maze
from puzzles.maze import MAZE
from puzzles.symmetries import dihedral
from puzzles.writer import write_dataset


def main(folder, size, *counts):
    # the last 1000 mazes are the test, the first ones are trained on
    mazes = prepare_maze.generate(size, max(counts) + 1000, 0, size)
    kind = prepare_maze.maze_of(size)
    for n in counts:
        train = mazes[:, :n]
        # the versions of these mazes: questions and answers [2, n, versions, cells]
        originals = train[:, :, None]
        datasets = {
            "none": originals,
            "solved": np.concatenate([originals, kind.training_copies(train, 7)], axis=2),
            "turned": train[:, :, dihedral(size)],
        }
        for name, versions in datasets.items():
            splits = {"train": versions, "test": mazes[:, -1000:]}
            write_dataset(f"{folder}/{size}-{n}-{name}", splits, len(MAZE), kind.task)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
