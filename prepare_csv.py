"""Makes a dataset of any puzzle whose questions and answers are strings of one length.

    python prepare_csv.py --train_csv=train.csv --test_csv=test.csv --grid=6x6 --symbols=".01"
    python prepare_csv.py --train_csv=all.csv --holdout=1000 --dihedral --kind=distances

Files are CSV with the columns question and answer, also .gz. docs/own-puzzles.md says more.
"""
import functools
import math
import os
import re

import numpy as np

# isort: off
from configurator import UserError, start
from puzzles import task_of
from puzzles.files import (
    check_minimums, csv_rows, read_puzzles, refuse_existing, rows_to_train_on, table_of, write_puzzles)
from puzzles.symmetries import dihedral as dihedral_turns, keys_of, orbit_keys

# files
train_csv = ""  # training puzzles, .csv or .csv.gz
test_csv = ""  # test puzzles, which are left out of the training puzzles
holdout = 0  # test puzzles to draw from train_csv, instead of test_csv
several_answers = False  # keep the first of several answers to a question, which are an error otherwise
output_dir = ""  # "": data/ and the name of train_csv
seed = 0  # decides which test puzzles are drawn, and the copies
# puzzle
kind = "puzzle"  # its name; sudoku, maze, and kinds that a script adds, are judged by their rules
grid = ""  # its rows and columns, as 6x6; "": a square
symbols = ""  # its characters, the empty cell first; "": all that the files have
ignored = ""  # characters of answers for cells that do not count
# symmetries, which must turn every puzzle and its answer into another one
dihedral = False  # the 8 rotations and reflections of a square
permute_symbols = ""  # characters that may change places, as 1-9
num_aug = 7  # copies of each training puzzle, besides itself


def main(settings):
    """Makes the dataset that the settings describe and returns its folder. Raises UserError."""
    fill_in(settings)
    refuse_existing(settings.output_dir)
    symbols = settings.symbols or symbols_of(settings)

    # the puzzles, [2, n, cells]: questions and answers as tokens, where 0 is a cell that does not count
    train = read(settings.train_csv, 0, settings, symbols)
    print(f"symbols: {symbols!r}; {symbols[0]!r} is an empty cell")
    if settings.test_csv:
        test = read(settings.test_csv, train.shape[2], settings, symbols)
    else:
        order = np.random.default_rng([settings.seed, 1]).permutation(train.shape[1])
        test = train[:, np.sort(order[:settings.holdout])]

    # neither test puzzles nor what a symmetry turns into one are trained on
    grid = grid_of(settings, train.shape[2])
    turns = dihedral_turns(grid[0]) if settings.dihedral else np.arange(train.shape[2])[None]
    exchanged = exchanged_tokens(settings.permute_symbols, symbols)
    keys = orbit_keys(train[0], turns, exchanged)
    rows = rows_to_train_on(settings.train_csv, keys, set(orbit_keys(test[0], turns, exchanged)))
    counts = {"left out, since a symmetry makes a test puzzle": len(keys) - settings.holdout - len(rows)}

    # the puzzle itself, and its copies
    num_copies = 1 + settings.num_aug
    if not exchanged:
        num_copies = min(num_copies, len(turns))
    rng = np.random.default_rng([settings.seed, 2])
    copies_of = functools.partial(
        symmetric_copies, turns=np.resize(turns, (num_copies, turns.shape[1])), exchanged=exchanged, rng=rng)
    task = {"kind": settings.kind, "grid": grid, "symbols": "_" + symbols}
    write_puzzles(settings, __file__, "demo.py", task, train[:, rows], test, num_copies, copies_of, counts)
    return settings.output_dir


def fill_in(settings):
    """Fills in output_dir. Raises UserError for settings that do not fit together."""
    # test puzzles come from a file or are drawn, not both
    has_test = bool(settings.test_csv) != bool(settings.holdout)
    if not settings.train_csv or not has_test:
        raise UserError("needs --train_csv=FILE and either --test_csv=FILE or --holdout=N")
    check_minimums(settings, num_aug=0, holdout=0, seed=0)
    form = r"(\d+)x\1|" if settings.dihedral else r"\d+x\d+|"
    if not re.fullmatch(form, settings.grid):
        raise UserError(f"grid={settings.grid}: must be as 6x6, and a square for --dihedral")
    name = os.path.basename(settings.train_csv).split(".")[0]
    settings.output_dir = settings.output_dir or f"data/{name}"


def symbols_of(settings):
    """Returns the characters that the files have, those that only questions have first."""
    empty = set()
    filled = set()
    for path in filter(None, (settings.train_csv, settings.test_csv)):
        for _, (question, answer) in csv_rows(path, ("question", "answer")):
            empty.update(question)
            filled.update(answer)
    filled -= set(settings.ignored)
    return "".join(sorted(empty - filled) + sorted(filled))


def read(path, cells, settings, symbols):
    """Returns the puzzles of a file, [2, n, cells], each once; cells: see read_puzzles. Raises UserError."""
    def task_of_cells(cells):
        manifest = {"kind": settings.kind, "grid": grid_of(settings, cells), "symbols": "_" + symbols}
        return task_of(manifest, cells, len(symbols) + 1)

    tables = table_of(symbols), table_of(symbols) | dict.fromkeys(settings.ignored, 0)
    rows = csv_rows(path, ("question", "answer"))
    puzzles, lines = read_puzzles(path, rows, cells, tables, task_of_cells)

    # repeated questions have the same answer
    first_rows = {}
    for row, key in enumerate(keys_of(puzzles[0])):
        first = first_rows.setdefault(key, row)
        is_other = first < row and (puzzles[1, row] != puzzles[1, first]).any()
        if is_other and not settings.several_answers:
            raise UserError(f"{path}:{lines[row]}: another answer stands above (see --several_answers)")
    if len(first_rows) < len(lines):
        print(f"{path}: left out, since they are repeated: {len(lines) - len(first_rows):,}")
    return puzzles[:, list(first_rows.values())]


def grid_of(settings, cells):
    """Returns the grid of so many cells, [rows, columns]: a square, unless the settings have another one."""
    side = math.isqrt(cells)
    return list(map(int, settings.grid.split("x"))) if settings.grid else [side, side]


def exchanged_tokens(permute_symbols, symbols):
    """Returns the tokens of characters such as 1-9, each once. Raises UserError."""
    tokens = {}
    for first, last in re.findall("(.)(?:-(.))?", permute_symbols):
        for code in range(ord(first), ord(last or first) + 1):
            if chr(code) not in symbols:
                raise UserError(f"permute_symbols={permute_symbols}: {chr(code)!r} is not in the puzzles")
            tokens[1 + symbols.index(chr(code))] = True
    return list(tokens)


def symmetric_copies(puzzles, turns, exchanged, rng):
    """Returns each puzzle before its copies, [2, n, copies, cells].

    Args:
        puzzles: questions and answers, tokens [2, n, cells].
        turns: of each copy, as indices [copies, cells].
        exchanged: tokens that change places at random, but not in the first copy.
        rng: a random generator.
    """
    turned = puzzles[:, :, turns]
    # what each token of each copy becomes
    to = np.tile(np.arange(256, dtype=np.uint8), (1, *turned.shape[1:3], 1))
    to[:, :, 1:, exchanged] = rng.permuted(to[:, :, 1:, exchanged], axis=3)
    return np.take_along_axis(to, turned, axis=3)


if __name__ == "__main__":
    start(main, __file__)
