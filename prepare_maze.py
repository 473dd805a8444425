"""Makes a maze dataset: Maze-Hard from the hub, your own CSV files, or generated mazes.

    python prepare_maze.py                                               Maze-Hard, 1000 mazes x 8
    python prepare_maze.py --train_csv=train.csv --test_csv=test.csv     columns question,answer
    python prepare_maze.py --source=generate --size=30 --min_path=111    mazes like Maze-Hard's

In files, a maze is a square of the characters "# SGo", row after row: wall, open, start, goal, path. The
answer is the question with an "o" in each open cell of one shortest path from S to G. Steps go up, down, left
and right. puzzles/maze.py has the generator and the copies.
"""
import functools
import math

import numpy as np

from configurator import Above0, From0, start
from puzzles import kind_of
from puzzles.download import csv_paths
from puzzles.maze import Maze, long_mazes
from puzzles.prepare import distinct, fill_in_source, read_both, write_puzzles
from puzzles.text import csv_rows


class Settings:
    # source
    source = "hub"  # hub (Maze-Hard from Hugging Face), csv, or generate
    train_csv = ""  # training mazes, .csv or .csv.gz; implies csv
    test_csv = ""  # test mazes
    output_dir = ""  # "": a folder under data/ named after these settings
    seed: From0 = 0  # decides the choice of mazes, and generated mazes
    # mazes from the hub or from CSV files
    subsample_size: From0 = 0  # training mazes, chosen at random; 0: all; every test maze is kept
    # generated mazes
    size: Above0 = 30  # cells of a row
    min_path: Above0 = 111  # least number of steps of the shortest path
    num_train: Above0 = 1000  # training mazes
    num_test: Above0 = 1000  # test mazes
    # augmentation
    aug = True  # training mazes in all 8 rotations and reflections (off by default in the official builder)


HUB = "sapientinc/maze-30x30-hard-1k"


def main(settings):
    """Makes the dataset that the settings describe and returns its folder. Raises UserError."""
    dataset_names = {
        "hub": "maze-30x30-hard",
        "generate": f"maze-{settings.size}x{settings.size}-path-{settings.min_path}",
    }
    num_copies = 7 * settings.aug
    fill_in_source(settings, dataset_names, 1 + num_copies, others=["seed", "num_test"],
                   of_generated=["size", "min_path", "num_train", "num_test"], hub_size="1k")

    # get the mazes, [2, n, cells]: questions and answers
    left_out = {}
    if settings.source == "generate":
        size = settings.size
        mazes = generate(size, settings.num_train + settings.num_test, settings.seed, settings.min_path)
        train, test = np.split(mazes, [settings.num_train], axis=1)
    else:
        paths = csv_paths(settings, HUB)
        # the first training maze says how large the mazes are
        _, row = next(csv_rows(paths[0]))
        size = math.isqrt(len(row["question"]))
        train, test, left_out = read_both(settings, paths, maze_of(size), csv_rows)

    # write them with their copies
    config = "maze_demo.py" if size < 20 else "maze.py"
    return write_puzzles(settings, __file__, config, maze_of(size), train, test, num_copies, left_out)


def maze_of(size):
    """Returns the Kind of mazes of size x size cells."""
    return kind_of(Maze.new_task(size))


def generate(size, n, seed, min_path):
    """Returns n mazes, [2, n, cells], no two alike even when turned or reflected."""
    make = functools.partial(long_mazes, seed=seed, size=size, min_path=min_path)
    name = f"{size}x{size} mazes whose shortest path has min_path={min_path} steps or more"
    return distinct(name, n, make, maze_of(size).keys)


if __name__ == "__main__":
    start(main, Settings)
