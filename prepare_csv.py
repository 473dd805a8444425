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
from prepare import command_of, orbit_keys, read_csv, refuse_existing, token_blocks, write_dataset
from puzzles import IGNORE_LABEL

# files
train_csv = ""  # training puzzles: .csv or .jsonl, also .gz
test_csv = ""  # test puzzles, none of which is in train_csv
holdout = 0  # test puzzles to draw from train_csv, instead of test_csv
several_answers = False  # keep the first of several answers to a question, which are an error otherwise
output_dir = ""  # "": data/ and the name of train_csv
seed = 0  # of the test puzzles that are drawn, and of the copies
# puzzle
kind = "puzzle"  # its name; kinds that puzzles.py knows are judged by their rules
grid = ""  # its rows and columns, as 6x6; "": a square
symbols = ""  # its characters, first that of an empty cell; "": those of the files
ignored = ""  # characters of answers for cells that do not count
# symmetries, which must turn every puzzle and its answer into another one
dihedral = False  # the 8 rotations and reflections of a square
permute_symbols = ""  # characters that may change places, as 1-9
num_aug = 7  # copies of each training puzzle, besides itself
# ---


def main(settings):
    """Makes the dataset that the settings describe and returns its folder. Raises UserError."""
    check(settings)
    path = settings.output_dir or "data/" + os.path.basename(settings.train_csv).split(".")[0]
    refuse_existing(path)

    # the puzzles as texts, {question: answer}
    train, repeated = read_puzzles(settings.train_csv, settings, {})
    test = {}
    if settings.test_csv:
        test, more_repeated = read_puzzles(settings.test_csv, settings, train)
        repeated += more_repeated
    symbols = settings.symbols or symbols_of(train | test, settings.ignored)
    table = {ord(symbol): token for token, symbol in enumerate(symbols, 1)}  # {code of a character: token}
    questions = list(train)
    grid, turns = grid_of(settings, len(questions[0]))
    exchanged = exchanged_tokens(settings.permute_symbols, table)

    # the test puzzles, if they come from the same file
    if settings.holdout >= len(questions):
        raise UserError(f"holdout={settings.holdout}: {settings.train_csv} has only {len(questions)} puzzles")
    order = np.random.default_rng([settings.seed, 1]).permutation(len(questions))
    for i in sorted(order[:settings.holdout]):
        test[questions[i]] = train.pop(questions[i])

    # training puzzles that a symmetry turns into a test puzzle are left out
    test_keys = set(keys_of(test, table, turns, exchanged))
    kept = {}
    for question, key in zip(train, keys_of(train, table, turns, exchanged)):
        if key not in test_keys:
            kept[question] = train[question]
    if not kept:
        raise UserError(f"{settings.train_csv}: no puzzle is left: a symmetry turns each "
                        "into a test puzzle")

    # the puzzle itself, and its copies
    copies = 1
    if settings.permute_symbols:
        copies += settings.num_aug
    elif settings.dihedral:
        copies += min(settings.num_aug, 7)
    train_examples = examples(settings, kept, table, turns, exchanged, copies)
    test_examples = examples(settings, test, table, turns, exchanged, 1)
    splits = {
        "train": (len(kept), copies, train_examples),
        "test": (len(test), 1, test_examples),
    }
    symmetric = len(train) - len(kept)
    counts = {
        "train_puzzles": len(kept),
        "test_puzzles": len(test),
        "repeated": repeated,
        "symmetric": symmetric,
    }
    write_dataset(path, splits, len(symbols) + 1, {
        "kind": settings.kind,
        "command": command_of(__file__, settings),
        "counts": counts,
        "grid": grid,
        "symbols": "_" + symbols,
    })
    print(f"train: {len(kept):,} puzzles, each {copies} times; test: {len(test):,}")
    print(f"left out: {repeated:,} repeated, {symmetric:,} symmetric to a test puzzle")
    print(f"symbols: {symbols!r}; {symbols[0]!r} is an empty cell")
    print(f"Train on it: python train.py --data_path={path}")
    return path


def check(settings):
    """Raises UserError for settings that do not fit together."""
    # test puzzles come from a file or are drawn, not both
    has_test = bool(settings.test_csv) != (settings.holdout > 0)
    if not settings.train_csv or not has_test or min(settings.num_aug, settings.holdout, settings.seed) < 0:
        raise UserError("needs --train_csv=FILE and either --test_csv=FILE or --holdout=N; no number below 0")


def read_puzzles(path, settings, others):
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


def grid_of(settings, cells):
    """Returns the grid, [rows, columns], and its turns as indices [n, cells]. Raises UserError."""
    side = math.isqrt(cells)
    match = re.fullmatch(r"(\d+)x(\d+)", settings.grid or f"{side}x{side}")
    grid = list(map(int, match.groups())) if match else []
    if math.prod(grid) != cells or settings.dihedral and grid != [side, side]:
        wanted = "a square, for --dihedral" if settings.dihedral else "as 6x6"
        raise UserError(f"grid={settings.grid} does not fit {cells} characters: must be {wanted}")
    if settings.dihedral:
        return grid, puzzles.dihedral(side)
    return grid, np.arange(cells)[None]


def exchanged_tokens(permute_symbols, table):
    """Returns the tokens of characters such as 1-9, each once. Raises UserError."""
    tokens = []
    for first, last in re.findall("(.)(?:-(.))?", permute_symbols):
        low, high = sorted([ord(first), ord(last or first)])
        for code in range(low, high + 1):
            if code not in table:
                raise UserError(f"permute_symbols={permute_symbols}: {chr(code)!r} is not in the puzzles")
            if table[code] not in tokens:
                tokens.append(table[code])
    return tokens


def keys_of(answers, table, turns, exchanged):
    """Yields a key for each question, equal for those that symmetries turn into each other."""
    for questions, in token_blocks(zip(answers), 4096, table):
        yield from orbit_keys(questions, turns, exchanged)


def examples(settings, answers, table, turns, exchanged, copies):
    """Yields blocks (inputs, labels) of write_dataset: each puzzle of {question: answer}, then its copies."""
    rng = np.random.default_rng([settings.seed, 2])
    cells = turns.shape[1]
    turn_of_copy = np.resize(turns, (copies, cells))
    tables = table, table | dict.fromkeys(map(ord, settings.ignored), 0)
    for block in token_blocks(answers.items(), max(1, 16384 // copies), *tables):
        # what each token of each copy becomes: in the first one, itself
        to = np.tile(np.arange(256, dtype=np.int16), (len(block[0]), copies, 1))
        to[:, 1:, exchanged] = rng.permuted(to[:, 1:, exchanged], axis=2)
        to[:, :, 0] = IGNORE_LABEL
        yield [np.take_along_axis(to, boards[:, turn_of_copy], axis=2).reshape(-1, cells) for boards in block]


if __name__ == "__main__":
    start(main, __file__)
