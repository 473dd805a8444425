"""Makes a dataset of any puzzle whose questions and answers are strings of one length.

    python prepare_csv.py --train_csv=train.csv --test_csv=test.csv --grid=6x6 --symbols=".01"
    python prepare_csv.py --train_csv=all.csv --holdout=1000 --dihedral --kind=distances

Files are CSV with the columns question and answer, also compressed as .gz. docs/own-puzzles.md says more.
"""
import math
import os
import re

import numpy as np

from configurator import From0, start
from puzzles import kind_of, task_of
from puzzles.prepare import distinct_rows, drop_test_puzzles, name_folder, read_puzzles, write_puzzles
from puzzles.text import csv_rows
from runtime.errors import UserError


class Settings:
    # files
    train_csv = ""  # training puzzles, .csv or .csv.gz
    test_csv = ""  # test puzzles, which are left out of the training puzzles
    holdout: From0 = 0  # test puzzles to draw from train_csv, instead of test_csv
    several_answers = False  # keep the first of several answers to a question, which are an error otherwise
    output_dir = ""  # "": data/ and the name of train_csv
    seed: From0 = 0  # decides which test puzzles are drawn, and the copies
    # puzzle
    kind = "puzzle"  # its name; kinds that a fork adds are judged by their rules
    grid = ""  # its rows and columns, such as 6x6; "": a square
    symbols = ""  # its characters, the empty cell first; "": all that the files have
    # symmetries, which must turn every puzzle and its answer into another one
    dihedral = False  # the 8 rotations and reflections of a square
    permute_symbols = ""  # characters that may change places, as 123456789
    units = ""  # sizes of the units in which no symbol stands twice, as 1x9,9x1,3x3, for examples/houses.py
    num_aug: From0 = 7  # copies of each training puzzle, besides itself


def main(settings):
    """Makes the dataset that the settings describe and returns its folder. Raises UserError."""
    # test puzzles come from a file or are drawn, not both
    if not settings.train_csv or bool(settings.test_csv) == bool(settings.holdout):
        raise UserError("needs --train_csv=FILE and either --test_csv=FILE or --holdout=N")
    name_folder(settings, os.path.basename(settings.train_csv).split(".")[0])

    # read the files
    files = {}  # {path: rows}
    for path in filter(None, [settings.train_csv, settings.test_csv]):
        rows = csv_rows(path, symbols=settings.symbols)
        files[path] = list(distinct_rows(path, rows, settings.several_answers))
    kind = kind_of(new_task(settings, [row for rows in files.values() for _, row in rows]))
    if kind.versions_vote:
        raise UserError("versions vote on puzzles of this kind, which prepare_arc.py makes")

    # turn them into tokens, [2, n, cells]: questions and answers
    puzzles = [read_puzzles(path, rows, kind) for path, rows in files.items()]
    train = puzzles[0]
    test = puzzles[-1]

    # or draw the test puzzles
    if settings.holdout >= train.shape[1]:
        raise UserError(f"holdout={settings.holdout} leaves no puzzle to train on, of {train.shape[1]}")
    if settings.holdout:
        order = np.random.default_rng([settings.seed, 1]).permutation(train.shape[1])
        drawn = np.sort(order[:settings.holdout])
        test = train[:, drawn]
        train = np.delete(train, drawn, axis=1)

    # leave out test puzzles, and what a symmetry turns into one
    train, left_out = drop_test_puzzles(settings.train_csv, train, test, kind)

    # write the puzzles with their copies
    return write_puzzles(settings, __file__, "demo.py", kind, train, test, settings.num_aug, left_out)


def new_task(settings, rows):
    """Returns the task of the settings, and of the rows in the files where they leave it open."""
    questions = [row["question"] for row in rows]
    answers = [row["answer"] for row in rows]

    # by default the grid is a square, with as many cells as the first question has
    side = math.isqrt(len(questions[0]))
    grid = read_size("grid", settings.grid or f"{side}x{side}")

    # by default the symbols are the characters of the files, those that only questions have first
    symbols = settings.symbols
    if not symbols:
        filled = set().union(*answers)
        empty = set().union(*questions) - filled
        symbols = "".join(sorted(empty) + sorted(filled))
    manifest = {"kind": settings.kind, "grid": grid, "symbols": "_" + symbols}
    if settings.dihedral or settings.permute_symbols:
        manifest["symmetries"] = {
            "dihedral": settings.dihedral,
            "permute_symbols": "".join(dict.fromkeys(settings.permute_symbols)),
        }
    if settings.units:
        units = [read_size("units", size) for size in settings.units.split(",")]
        manifest["units"] = sorted(units, key=lambda shape: 1 not in shape)  # lines come first
    task = task_of(manifest, math.prod(grid), len(symbols) + 1)
    if settings.units:
        kind_of(task).units()  # raises UserError for units that do not fit
    print(f"symbols: {symbols!r}; {symbols[0]!r} is an empty cell")
    return task


def read_size(name, text):
    """Returns [rows, columns] of a text like 6x6. Raises UserError."""
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", text):
        raise UserError(f"{name}={text}: must be like 6x6")
    return [int(number) for number in text.split("x")]


if __name__ == "__main__":
    start(main, Settings)
