"""Makes a Sudoku dataset: Sudoku-Extreme from the hub, your own CSV files, or generated puzzles.

    python prepare_sudoku.py                              Sudoku-Extreme: 1000 puzzles x 1001
    python prepare_sudoku.py --train_csv=A --test_csv=B   columns question,answer, perhaps rating
    python prepare_sudoku.py --source=generate --size=6   minimal 6x6 puzzles

In files, an empty cell is one of . 0 _ * ?. From your own files, the script leaves out repeated puzzles and
puzzles with several solutions. puzzles/sudoku.py has the generator and the copies.
"""
import functools

import numpy as np

from configurator import Above0, From0, start
from puzzles import kind_of
from puzzles.download import csv_paths
from puzzles.keys import keys_of
from puzzles.prepare import distinct, fill_in_source, read_both, write_puzzles
from puzzles.sudoku import BOXES, Sudoku, hard_sudokus, minimal_sudokus
from puzzles.text import EMPTY_SIGNS, csv_rows
from runtime.errors import UserError


class Settings:
    # source
    source = "hub"  # hub (Sudoku-Extreme from Hugging Face), csv, or generate
    train_csv = ""  # training puzzles, .csv or .csv.gz; implies csv
    test_csv = ""  # test puzzles
    size: Above0 = 9  # cells of a row: 4, 6 (boxes of 2 rows, 3 columns), 9, 12 (3 rows, 4 columns) or 16
    output_dir = ""  # "": a folder under data/ named after these settings
    seed: From0 = 0  # decides the choice of puzzles, their copies, and generated puzzles
    # puzzles from the hub or from CSV files
    subsample_size: From0 = 1000  # training puzzles, chosen at random; 0: all; every test puzzle is kept
    min_difficulty = 0  # lowest rating that is kept, in training and test; 0: all
    # generated puzzles
    num_train: Above0 = 3000  # training puzzles
    num_test: Above0 = 1000  # test puzzles, the same for each num_train
    num_hard: From0 = 0  # further training puzzles, of at most 9 rows, most of which need many guesses
    # augmentation
    num_aug: From0 = 1000  # augmented copies of each training puzzle, besides itself


HUB = "sapientinc/sudoku-extreme"
DOTS = dict.fromkeys(map(ord, EMPTY_SIGNS), ".")  # other signs of files for an empty cell


def main(settings):
    """Makes the dataset that the settings describe and returns its folder. Raises UserError."""
    size = settings.size
    dataset_names = {"hub": "sudoku-extreme", "generate": f"sudoku-{size}x{size}"}
    fill_in_source(settings, dataset_names, settings.num_aug,
                   others=["seed", "min_difficulty", "num_test", "num_hard"],
                   of_generated=["num_train", "num_test", "num_hard"])
    sizes = [9] if settings.source == "hub" else [*BOXES]
    if size not in sizes:
        raise UserError(f"size must be one of {sizes}, not {size}")
    if settings.num_hard and size > 9:
        raise UserError("num_hard is for 9 rows at most: more would take hours")

    # get the puzzles, [2, n, cells]: questions and answers
    kind = kind_of(Sudoku.new_task(size))
    left_out = {}
    if settings.source == "generate":
        puzzles = generate(size, settings.num_train + settings.num_test, settings.seed)
        # the test puzzles are the same for each num_train
        test, train = np.split(puzzles, [settings.num_test], axis=1)
        if settings.num_hard:
            hard = generate(size, settings.num_hard, settings.seed, hard_sudokus)
            # on small boards, some of them are among the others
            others = set(keys_of(puzzles[0]))
            is_new = [key not in others for key in keys_of(hard[0])]
            train = np.concatenate([train, hard[:, is_new]], axis=1)
    else:
        paths = csv_paths(settings, HUB)
        rows_of = functools.partial(hard_rows, min_difficulty=settings.min_difficulty)
        train, test, left_out = read_both(settings, paths, kind, rows_of)

    # write them with their copies
    config = "demo.py"
    if size == 9:
        config = "sudoku_cpu.py" if settings.source == "generate" else "sudoku.py"
    return write_puzzles(settings, __file__, config, kind, train, test, settings.num_aug, left_out)


def hard_rows(path, min_difficulty):
    """Yields the rows of a file that are rated min_difficulty or more, as csv_rows does.

    With min_difficulty 0 a file needs no ratings, and they may be words. A row without a rating has 0. White
    space is no cell.
    """
    columns = ["question", "answer"]
    if min_difficulty:
        columns.append("rating")
    for line, row in csv_rows(path, columns, symbols=""):
        try:
            is_hard = not min_difficulty or float(row["rating"] or 0) >= min_difficulty
        except ValueError:
            raise UserError(f"{path}:{line}: the rating {row['rating']!r} is not a number") from None
        if is_hard:
            yield line, row | {"question": row["question"].translate(DOTS)}


def generate(size, n, seed, make_sudokus=minimal_sudokus):
    """Returns n distinct puzzles with one solution each, questions and answers [2, n, cells]."""
    make = functools.partial(make_sudokus, seed=seed, n=512, size=size)
    return distinct(f"distinct {size}x{size} puzzles", n, make, keys_of)


if __name__ == "__main__":
    start(main, Settings)
