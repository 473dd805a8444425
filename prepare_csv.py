"""Makes a dataset of any puzzle whose questions and answers are strings of one length.

    python prepare_csv.py --train_csv=train.csv --test_csv=test.csv --grid=6x6 --symbols=".01"
    python prepare_csv.py --train_csv=all.jsonl --holdout=1000 --dihedral --kind=distances

Files are CSV with the columns question and answer, or JSON lines with these keys; either also .gz.
"""
import csv
import gzip
import itertools
import json
import math
import os
import re
import zlib

import numpy as np

# isort: off
import puzzles
from configurator import UserError, start
from data import IGNORED, Progress, board_keys, command_of, refuse_existing, write_dataset

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


def main(s):
    """Makes the dataset that the settings s describe and returns its folder. Raises UserError."""
    if not s.train_csv or bool(s.test_csv) == (s.holdout > 0) or min(s.num_aug, s.holdout, s.seed) < 0:
        raise UserError("needs --train_csv=FILE and either --test_csv=FILE or --holdout=N; no number below 0")
    path = s.output_dir or "data/" + os.path.basename(s.train_csv).split(".")[0]
    refuse_existing(path)
    train, repeated = read_puzzles(s.train_csv, s, {})
    test, more = read_puzzles(s.test_csv, s, train) if s.test_csv else ({}, 0)
    filled = set().union(*train.values(), *test.values()) - set(s.ignored)
    empty = set().union(*train, *test) - filled
    symbols = s.symbols or "".join(sorted(empty) + sorted(filled))
    table = {ord(symbol): token for token, symbol in enumerate(symbols, 1)}
    grid, *symmetries = symmetries_of(s, len(next(iter(train))), table)
    questions = list(train)
    if s.holdout >= len(questions):
        raise UserError(f"holdout={s.holdout}: {s.train_csv} has only {len(questions)} puzzles")
    order = np.random.default_rng([s.seed, 1]).permutation(len(questions))
    for i in sorted(order[:s.holdout]):
        test[questions[i]] = train.pop(questions[i])
    of_test, of_train = (orbit_keys(token_blocks(found.items(), 4096, table), *symmetries)
                         for found in (test, train))
    in_test = set(of_test)
    kept = {question: train[question] for question, key in zip(train, of_train) if key not in in_test}
    copies = 1 + (s.num_aug if s.permute_symbols else min(s.num_aug, 7) if s.dihedral else 0)
    splits = {"train": (len(kept), copies, examples(s, kept, table, *symmetries, copies)),
              "test": (len(test), 1, examples(s, test, table, *symmetries, 1))}
    counts = dict(train_puzzles=len(kept), test_puzzles=len(test),
                  repeated=repeated + more, symmetric=len(train) - len(kept))
    write_dataset(path, splits, len(symbols) + 1, dict(
        kind=s.kind, command=command_of(__file__, s), counts=counts, grid=grid, symbols="_" + symbols))
    print(f"train: {len(kept):,} puzzles, each {copies} times; test: {len(test):,}")
    print("left out: {repeated:,} repeated, {symmetric:,} symmetric to a test puzzle".format(**counts))
    print(f"symbols: {symbols!r}; {symbols[0]!r} is an empty cell")
    print(f"Train on it: python train.py --data_path={path}")
    return path


def read_puzzles(path, s, others):
    """{question: answer} of a file, none of them in others, and how many rows are repeated."""
    found, repeated, cells = {}, 0, len(next(iter(others), ""))
    allowed = s.symbols, s.symbols and s.symbols + s.ignored
    for question, answer, line in read_csv(path, cells, allowed):
        repeated += question in found
        if found.setdefault(question, answer) != answer and not s.several_answers:
            raise UserError(f"{path}:{line}: another answer stands above (see --several_answers)")
        if question in others:
            raise UserError(f"{path}:{line}: the question is in {s.train_csv}, too")
    return found, repeated


def symmetries_of(s, cells, table):
    """The grid, its turns as indices [n, cells], and the tokens that may change places."""
    side = math.isqrt(cells)
    grid = re.fullmatch(r"(\d+)x(\d+)", s.grid or f"{side}x{side}")
    grid = [int(n) for n in grid.groups()] if grid else []
    if math.prod(grid) != cells or s.dihedral and grid != [side, side]:
        wanted = "a square, for --dihedral" if s.dihedral else "as 6x6"
        raise UserError(f"grid={s.grid} does not fit {cells} characters: must be {wanted}")
    turns = puzzles.dihedral(grid[0]) if s.dihedral else np.arange(cells)[None]
    exchanged = {}  # each once
    for ends in re.findall("(.)(?:-(.))?", s.permute_symbols):
        first, last = sorted(ord(end or ends[0]) for end in ends)
        exchanged |= dict.fromkeys(map(table.get, range(first, last + 1)))
    if None in exchanged:
        raise UserError(f"permute_symbols={s.permute_symbols}: some are not in the puzzles")
    return grid, turns, [*exchanged]


def examples(s, chosen, table, turns, exchanged, copies):
    """Yields blocks (inputs, labels) of write_dataset: each puzzle, then its copies."""
    rng, cells = np.random.default_rng([s.seed, 2]), turns.shape[1]
    shapes = np.resize(turns, (copies, cells))
    tables = table, table | dict.fromkeys(map(ord, s.ignored), 0)
    for block in token_blocks(chosen.items(), max(1, 16384 // copies), *tables):
        to = np.tile(np.arange(256, dtype=np.int16), (len(block[0]), copies, 1))
        to[:, 1:, exchanged] = rng.permuted(to[:, 1:, exchanged], axis=2)
        to[:, :, 0] = IGNORED
        yield [np.take_along_axis(to, boards[:, shapes], axis=2).reshape(-1, cells) for boards in block]


# For the other prepare scripts, too.

def read_csv(path, cells, allowed, *more):
    """Yields (question, answer, the columns more, line) of each row of a file. Raises UserError.

    cells: 0: as many as the first question has. allowed: symbols of questions, of answers; "": any.
    """
    progress = Progress(f"reading {path}", 0, "rows")
    for line, row in csv_rows(path, ("question", "answer", *more)):
        cells = cells or len(row[0]) or 1
        for name, text, symbols in zip(("question", "answer"), row, allowed):
            rest = symbols and text.lstrip(symbols)
            if len(text) != cells:
                raise UserError(f"{path}:{line}: the {name} has {len(text)} characters, not {cells}")
            if rest:
                place = f"character {cells - len(rest) + 1} of the {name}"
                raise UserError(f"{path}:{line}: {place} is {rest[0]!r}, not one of {symbols!r}")
        yield *row, line
        progress.add(1)
    if not progress.done:
        raise UserError(f"{path}:2: no puzzle under the header")


def csv_rows(path, needed, optional=()):
    """Yields (line, [texts of columns]) of a file; optional ones may be missing: "". Raises UserError."""
    line, header = 1, None
    is_json, opener = ".jsonl" in path[-9:], gzip.open if path.endswith(".gz") else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", errors="replace", newline="") as f:
            for line, row in enumerate(f if is_json else csv.reader(f), 1):
                if not row or is_json and row.isspace():
                    continue
                if is_json or header:
                    row = json.loads(row) if is_json else dict(zip(header, row, strict=True))
                    yield line, [row[k] + "" for k in needed] + [
                        "" if row.get(k) is None else str(row[k]) for k in optional]
                else:
                    header = [name.strip() for name in row]
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{path}:{line}: must have {', '.join(needed)}, as text; "
                        "the first line of a CSV file names its columns") from None
    except (OSError, EOFError, csv.Error, zlib.error) as e:
        raise UserError(f"{path}: cannot be read ({getattr(e, 'strerror', None) or e})") from None


def token_blocks(rows, n, *tables):
    """Yields columns of n rows at a time, the first by tables {code: token}: tokens, uint8 [n, cells]."""
    rows = iter(rows)
    while block := list(itertools.islice(rows, n)):
        columns = list(zip(*block))
        for i, table in enumerate(tables):
            text = "".join(columns[i]).translate(table).encode("latin-1", "replace")
            columns[i] = np.frombuffer(text, dtype=np.uint8).reshape(len(block), -1)
        yield columns


def orbit_keys(blocks, turns, exchanged=()):
    """Yields a key of each board, equal for those that symmetries turn into each other.

    blocks: as of token_blocks; turns, exchanged: as of symmetries_of.
    """
    exchanged = np.array(exchanged, dtype=int)
    for boards, *_ in blocks:
        keys = []
        for turned in (boards[:, turn] for turn in turns):
            same = turned[:, None] == exchanged[:, None]
            first = np.where(same.any(axis=2), same.argmax(axis=2), boards.shape[1])
            to = np.tile(np.arange(256, dtype=np.uint8), (len(boards), 1))
            to[:, exchanged] = exchanged[first.argsort(axis=1).argsort(axis=1)]
            keys.append(board_keys(np.take_along_axis(to, turned, axis=1)))
        yield from map(min, zip(*keys))


if __name__ == "__main__":
    start(main, __file__)
