"""Makes a dataset of any puzzle whose questions and answers are strings of one length.

    python prepare_csv.py --train_csv=train.csv --test_csv=test.csv --grid=6x6 --symbols=".01"
    python prepare_csv.py --train_csv=all.jsonl --holdout=1000 --dihedral --kind=distances

Files are CSV with the columns question and answer, or JSON lines with these keys; either also .gz.
"""
import math
import os
import re

import numpy as np

# isort: off
import puzzles
from configurator import UserError, start
from prepare import check_minimums, orbit_keys, read_csv, refuse_existing, tokens_of, write_puzzles

# files
train_csv = ""  # training puzzles: .csv or .jsonl, also .gz
test_csv = ""  # test puzzles, none of which is in train_csv
holdout = 0  # test puzzles to draw from train_csv, instead of test_csv
several_answers = False  # keep the first of several answers to a question, which are an error otherwise
output_dir = ""  # "": data/ and the name of train_csv
seed = 0  # decides which test puzzles are drawn, and the copies
# puzzle
kind = "puzzle"  # its name; kinds that puzzles.py knows are judged by their rules
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

    # {question: answer}, as text
    train, repeated = read_answers(settings.train_csv, settings, {})
    test = {}
    if settings.test_csv:
        test, more_repeated = read_answers(settings.test_csv, settings, train)
        repeated += more_repeated
    both = train | test
    symbols = settings.symbols or symbols_of(both, settings.ignored)

    # questions and answers as tokens, where 0 is a cell of an answer that does not count
    table = {ord(symbol): token for token, symbol in enumerate(symbols, 1)}
    answer_table = table | dict.fromkeys(map(ord, settings.ignored), 0)
    boards = np.array([tokens_of(both, table), tokens_of(both.values(), answer_table)])  # [2, n, cells]
    grid, turns = grid_and_turns(settings, boards.shape[2])
    exchanged = exchanged_tokens(settings.permute_symbols, table)

    # the rows of the test puzzles, drawn or from their own file
    rng = np.random.default_rng([settings.seed, 1])
    order = rng.permutation(len(train))
    test_rows = [*np.sort(order[:settings.holdout]), *range(len(train), len(both))]

    # test puzzles, and training puzzles that a symmetry turns into one, are not trained on
    test = boards[:, test_rows]
    test_keys = set(orbit_keys(test[0], turns, exchanged))
    train_rows = []
    for first in range(0, len(both), 4096):  # as memory allows
        keys = orbit_keys(boards[0, first:first + 4096], turns, exchanged)
        train_rows += [row for row, key in enumerate(keys, first) if key not in test_keys]
    if not train_rows:
        raise UserError(f"{settings.train_csv}: no puzzle is left of {len(train)}: each is a test puzzle, "
                        "or a symmetry turns it into one")

    # the puzzle itself, and its copies
    copies = 1 + settings.num_aug
    if not exchanged:
        copies = min(copies, len(turns))
    blocks = examples(settings, boards[:, train_rows], turns, exchanged, copies)
    counts = {
        "repeated": repeated,
        "symmetric": len(train) - settings.holdout - len(train_rows),
    }
    task = {"kind": settings.kind, "grid": grid, "symbols": "_" + symbols}
    write_puzzles(settings, __file__, task, blocks, len(train_rows), test, copies, counts)
    print(f"symbols: {symbols!r}; {symbols[0]!r} is an empty cell")
    return settings.output_dir


def fill_in(settings):
    """Fills in output_dir. Raises UserError for settings that do not fit together."""
    # test puzzles come from a file or are drawn, not both
    has_test = bool(settings.test_csv) != bool(settings.holdout)
    if not settings.train_csv or not has_test:
        raise UserError("needs --train_csv=FILE and either --test_csv=FILE or --holdout=N")
    check_minimums(settings, num_aug=0, holdout=0, seed=0)
    name = os.path.basename(settings.train_csv).split(".")[0]
    settings.output_dir = settings.output_dir or f"data/{name}"


def read_answers(path, settings, others):
    """Returns {question: answer} of a file, none of them in others, and how many rows are repeated."""
    answers = {}
    repeated = 0
    cells = len(next(iter(others), ""))
    allowed = settings.symbols, settings.symbols and settings.symbols + settings.ignored
    for question, answer, line in read_csv(path, cells, allowed):
        repeated += question in answers
        if answers.setdefault(question, answer) != answer and not settings.several_answers:
            raise UserError(f"{path}:{line}: another answer stands above (see --several_answers)")
        if question in others:
            raise UserError(f"{path}:{line}: the question is in {settings.train_csv}, too")
    return answers, repeated


def symbols_of(answers, ignored):
    """Returns the characters of puzzles {question: answer}, those that only questions have first."""
    filled = set().union(*answers.values()) - set(ignored)
    empty = set().union(*answers) - filled
    return "".join(sorted(empty) + sorted(filled))


def grid_and_turns(settings, cells):
    """Returns the grid, [rows, columns], and its turns as indices [n, cells]. Raises UserError."""
    side = math.isqrt(cells)
    square = [side, side]
    grid = list(map(int, re.findall(r"\d+", settings.grid))) if settings.grid else square
    if math.prod(grid) != cells or settings.dihedral and grid != square:
        raise UserError(f"grid={settings.grid} does not fit {cells} characters: must be as 6x6, and a square "
                        "for --dihedral")
    return grid, puzzles.dihedral(side) if settings.dihedral else np.arange(cells)[None]


def exchanged_tokens(permute_symbols, table):
    """Returns the tokens of characters such as 1-9, each once. Raises UserError."""
    tokens = {}
    for first, last in re.findall("(.)(?:-(.))?", permute_symbols):
        for code in range(ord(first), ord(last or first) + 1):
            if code not in table:
                raise UserError(f"permute_symbols={permute_symbols}: {chr(code)!r} is not in the puzzles")
            tokens[table[code]] = True
    return list(tokens)


def examples(settings, boards, turns, exchanged, copies):
    """Yields blocks (inputs, labels) of write_dataset: puzzles, boards [2, n, cells], before their copies."""
    rng = np.random.default_rng([settings.seed, 2])
    cells = turns.shape[1]
    turn_of_copy = np.resize(turns, (copies, cells))
    step = max(1, 16384 // copies)
    for first in range(0, boards.shape[1], step):
        turned = boards[:, first:first + step, turn_of_copy]  # [2, n, copies, cells]

        # what each token of each copy becomes: in the first one, itself
        to = np.tile(np.arange(256, dtype=np.uint8), (1, turned.shape[1], copies, 1))
        to[:, :, 1:, exchanged] = rng.permuted(to[:, :, 1:, exchanged], axis=3)
        yield np.take_along_axis(to, turned, axis=3).reshape(2, -1, cells)


if __name__ == "__main__":
    start(main, __file__)
