"""Makes a dataset of any puzzle whose questions and answers are strings of one length.

    python prepare_csv.py --train_csv=train.csv --test_csv=test.csv --grid=6x6 --symbols=".01"
    python prepare_csv.py --train_csv=all.jsonl --holdout=1000 --dihedral --kind=distances

Files are CSV with the columns question and answer, or JSON lines with these keys; either also .gz. A string
has a character for each cell, row after row. Files are read twice: memory holds keys of rows, not rows.
"""
import csv
import gzip
import itertools
import json
import math
import os
import re
import sys
import zlib
from types import SimpleNamespace

import numpy as np

# isort: off
import puzzles
from configurator import UserError, start
from data import IGNORED, Progress, command_of, refuse_existing, write_dataset

# files
train_csv = ""  # training puzzles: .csv or .jsonl, also .gz
test_csv = ""  # test puzzles, none of which is in train_csv
holdout = 0  # test puzzles to draw from train_csv, instead of test_csv
several_answers = False  # of several answers to one question keep the first; otherwise that is an error
output_dir = ""  # "": data/ and the name of train_csv
seed = 0  # of the test puzzles that are drawn, and of the copies
# puzzle
kind = "puzzle"  # its name; kinds that puzzles.py knows are judged by their rules
grid = ""  # its rows and columns, as 6x6; "": a square
symbols = ""  # its characters, first that of an empty cell; "": those of the files
ignored = ""  # characters of answers, for cells that no loss and no metric counts
# symmetries: name those that turn every puzzle and its answer into another puzzle and its answer
dihedral = False  # the 8 rotations and reflections of a square
permute_symbols = ""  # characters that may change places, as 1-9
num_aug = 7  # copies of each training puzzle by these symmetries, besides itself
# ---

ROWS = 16384  # rows that are made at a time


def main(s):
    """Makes the dataset that the settings (a namespace of all of them) describe and returns its folder.

    Raises UserError for a wrong setting, a wrong row of a file, or an existing folder.
    """
    if not s.train_csv or bool(s.test_csv) == (s.holdout > 0) or min(s.num_aug, s.seed) < 0:
        raise UserError("name --train_csv=FILE and either --test_csv=FILE or --holdout=N, no number below 0")
    path = s.output_dir or "data/" + os.path.basename(s.train_csv).split(".")[0]
    refuse_existing(path)
    train = scan(s.train_csv, s, 0)
    test = scan(s.test_csv, s, train.cells) if s.test_csv else train
    questions, answers = train.used | test.used
    found = *np.flatnonzero(questions & ~answers), *np.flatnonzero(answers)  # first what stands for empty
    symbols = s.symbols or "".join(map(chr, found))
    if set(exchanged(s)) - set(symbols):
        raise UserError(f"permute_symbols={s.permute_symbols}: not all are among {symbols!r}")
    copies = 1 + (s.num_aug if s.permute_symbols else min(s.num_aug, 7) if s.dihedral else 0)
    test_rows, train_rows, counts = choose(s, test, train)
    sizes = counts["train_puzzles"], counts["test_puzzles"]
    splits = {"train": (sizes[0], copies, examples(s, train, train_rows, symbols, copies)),
              "test": (sizes[1], 1, examples(s, test, test_rows, symbols, 1))}
    write_dataset(path, splits, len(symbols) + 1, dict(
        kind=s.kind, command=command_of(__file__, s), counts=counts, grid=grid_of(s, train.cells),
        symbols="_" + symbols))
    print(f"train: {sizes[0]:,} puzzles, each {copies} times; test: {sizes[1]:,}; left out: "
          f"{counts['repeated']:,} repeated, {counts['symmetric']:,} symmetric to a test puzzle")
    print(f"symbols: {symbols!r}; {symbols[0]!r} is an empty cell")
    print(f"Train on it: python train.py --data_path={path} --out_dir=out/{os.path.basename(path)}")
    return path


def grid_of(s, cells):
    """[rows, columns] of the setting grid. Raises UserError if they do not fit."""
    match = re.fullmatch(r"(\d+)x(\d+)", s.grid or "{0}x{0}".format(math.isqrt(cells)))
    grid = list(map(int, match.groups())) if match else [0]
    if math.prod(grid) != cells or s.dihedral and grid[0] != grid[1]:
        wanted = "a square, for --dihedral" if s.dihedral else "as 6x6"
        raise UserError(f"grid={s.grid} does not fit {cells} characters: it must be {wanted}")
    return grid


def exchanged(s):
    """The characters of permute_symbols, with its ranges written out."""
    return re.sub("(.)-(.)", lambda m: "".join(map(chr, range(ord(m[1]), ord(m[2]) + 1))), s.permute_symbols)


def turns(s, cells):
    """The rotations and reflections as indices [n, cells], first none."""
    return puzzles.dihedral(math.isqrt(cells)) if s.dihedral else np.arange(cells)[None]


# The first reading: which characters there are, and which rows are alike.

def scan(path, s, cells):
    """What a file has: path, cells, rows and used.

    rows: the lines, and keys of questions, of answers, and of questions up to symmetries; used: which
    characters questions and answers have, bool [2, characters].
    """
    parts, used = [], np.zeros((2, sys.maxunicode + 1), dtype=bool)
    index_of = table_of({character: i for i, character in enumerate(exchanged(s), 1)})
    progress = Progress(f"reading {path}", 0, "rows")
    rows = read_csv(path, cells, s.symbols, s.symbols and s.symbols + s.ignored)
    for lines, questions, answers, _ in rows:
        cells = questions.shape[1]
        grid_of(s, cells)
        weights = np.random.default_rng(0).integers(2 ** 63, size=cells, dtype=np.uint64)
        copies = [relabeled(questions[:, turn], index_of) for turn in turns(s, cells)]
        keys = [(codes * weights).sum(axis=1) for codes in (questions, answers, *copies)]
        parts.append([lines, *keys[:2], np.min(keys[2:], axis=0)])
        used[0, questions] = used[1, answers] = True
        progress.add(len(lines))
    used[1, list(map(ord, s.ignored))] = False
    return SimpleNamespace(path=path, cells=cells, used=used, rows=list(map(np.concatenate, zip(*parts))))


def relabeled(codes, index_of):
    """codes [n, cells]; characters in index_of are numbered as each row comes to them."""
    index = index_of[codes].astype(int)
    first = [np.full(len(codes), -1)]
    for i in range(1, int(index_of.max()) + 1):
        place = index == i
        first.append(np.where(place.any(axis=1), place.argmax(axis=1), codes.shape[1]))
    number = np.argsort(np.argsort(first, axis=0), axis=0).T
    return np.where(index, sys.maxunicode + np.take_along_axis(number, index, 1), codes)


def choose(s, test, train):
    """Which rows are test and training puzzles, bool [rows] of the files, and counts.

    Raises UserError for the first row that contradicts another one.
    """
    files = [train] if s.holdout else [test, train]
    lines, questions, answers, orbits = map(np.concatenate, zip(*(file.rows for file in files)))
    source = np.repeat(np.arange(len(files)), [len(file.rows[0]) for file in files])
    _, first, group = np.unique(questions, return_index=True, return_inverse=True)
    first = first[group]  # row with the same question
    several = (answers != answers[first]) & (not s.several_answers)
    for row in np.flatnonzero((source != source[first]) | several)[:1]:
        here, there = (f"{files[source[i]].path}:{lines[i]}" for i in (row, first[row]))
        what = "has another answer (see --several_answers)" if several[row] else "is a test puzzle too"
        raise UserError(f"{here}: the question {what}, in {there}")
    once = first == np.arange(len(lines))
    drawn = np.random.default_rng([s.seed, 1]).permutation(np.flatnonzero(once))[:s.holdout]
    in_test = np.isin(np.arange(len(lines)), drawn) if s.holdout else once & (source == 0)
    symmetric = once & ~in_test & np.isin(orbits, orbits[in_test])
    in_train = once & ~in_test & ~symmetric
    counts = dict(train_puzzles=in_train, test_puzzles=in_test, repeated=~once, symmetric=symmetric)
    counts = {name: int(rows.sum()) for name, rows in counts.items()}
    return in_test[:len(test.rows[0])], in_train[-len(train.rows[0]):], counts


# The second reading: tokens and copies.

def examples(s, file, rows, symbols, copies):
    """Yields blocks (inputs, labels) of write_dataset: each of the chosen rows, then its copies."""
    rng, step = np.random.default_rng([s.seed, 2]), max(1, ROWS // copies)
    table = table_of({character: token for token, character in enumerate(symbols, 1)})
    of_answers = table.astype(np.int16)
    of_answers[list(map(ord, s.ignored))] = 0
    tokens = [symbols.index(character) + 1 for character in exchanged(s)]
    shapes = np.resize(turns(s, file.cells), (copies, file.cells))  # in turn
    begin, progress = 0, Progress("writing puzzles", len(rows), "rows")
    for lines, questions, answers, _ in read_csv(file.path, file.cells):
        chosen = np.flatnonzero(rows[begin:begin + len(lines)])
        begin += len(lines)
        progress.add(len(lines))
        for i in range(0, len(chosen), step):
            block = chosen[i:i + step]
            to = np.tile(np.arange(256, dtype=np.int16), (len(block), copies, 1))
            to[:, 1:, tokens] = rng.permuted(to[:, 1:, tokens], axis=2)
            to[:, :, 0] = IGNORED
            yield [np.take_along_axis(to, cells[block][:, shapes].astype(int), 2).reshape(-1, file.cells)
                   for cells in (table[questions], of_answers[answers])]


# For the other prepare scripts, too.

def read_csv(path, cells=0, question_symbols="", answer_symbols="", rated=False):
    """Yields a file's puzzles in blocks (lines [n], questions [n, cells], answers [n, cells], ratings [n]).

    path: as of csv_rows, with question, answer and, if rated, rating. cells: characters of a question; 0: as
    many as the first one has. question_symbols, answer_symbols: the allowed characters; "": any. Questions
    and answers are the codes of their characters, uint32; ratings are 0 if not rated. Raises UserError with
    file and line for the first wrong row.
    """
    found = csv_rows(path, ("question", "answer", "rating")[:3 if rated else 2])
    lines, error = (), None
    while not error:
        block = []
        try:
            for line, row in itertools.islice(found, 4096):
                cells = cells or len(row[0])
                for name, text, allowed in (("question", row[0], question_symbols),
                                            ("answer", row[1], answer_symbols)):
                    if len(text) != cells:
                        raise UserError(f"{path}:{line}: the {name} has {len(text)} characters, not {cells}")
                    rest = allowed and text.lstrip(allowed)
                    if rest:
                        place = f"{path}:{line}: character {cells - len(rest) + 1} of the {name}"
                        raise UserError(f"{place} is {rest[0]!r}, not one of {allowed!r}")
                if rated and not row[2].strip().removeprefix("-").isdecimal():
                    raise UserError(f"{path}:{line}: the rating {row[2]!r} is not an integer")
                block.append((line, *row))
        except UserError as e:
            error = e  # after the rows above it, in which the caller may find another error
        if not block:
            break
        lines, questions, answers, *ratings = zip(*block)
        text = "".join(itertools.chain.from_iterable(zip(questions, answers)))
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        codes = codes.reshape(len(lines), 2, cells)
        ratings = np.array(ratings[0] if rated else (0,) * len(lines), dtype=int)
        yield np.array(lines), codes[:, 0], codes[:, 1], ratings
    if error or not lines:
        raise error or UserError(f"{path}:2: no puzzle under the header")


def csv_rows(path, needed, optional=()):
    """Yields (line, [texts of the columns needed and optional]) of a .csv or .jsonl file, also .gz.

    .jsonl is a JSON object a line. Optional columns may be missing: "". Raises UserError for the first wrong
    row, and if the file cannot be read.
    """
    line = 1
    try:
        with (gzip.open if path.endswith(".gz") else open)(
                path, "rt", encoding="utf-8-sig", errors="replace", newline="") as f:
            if path.removesuffix(".gz").endswith(".jsonl"):
                for line, text in enumerate(f, 1):
                    if text.strip():
                        row = dict.fromkeys(optional, "") | json.loads(text)
                        yield line, [row[name] + "" for name in (*needed, *optional)]
                return
            reader = csv.reader(f)
            header = [name.strip() for name in next(reader, [])]
            for name in set(needed) - set(header):
                raise UserError(f"{path}:1: no column {name}; the first line must be question,answer or "
                                "source,question,answer,rating")
            columns = [header.index(name) if name in header else -1 for name in (*needed, *optional)]
            for row in filter(None, reader):
                line = reader.line_num
                if len(row) != len(header):
                    raise UserError(f"{path}:{line}: {len(row)} columns, but the header has {len(header)}")
                row.append("")
                yield line, [row[column] for column in columns]
    except (KeyError, TypeError, json.JSONDecodeError):
        raise UserError(f'{path}:{line}: not a line as {{"question": "12", "answer": "34"}}') from None
    except (OSError, EOFError, csv.Error, zlib.error) as e:
        raise UserError(f"{path}: cannot be read ({getattr(e, 'strerror', None) or e})") from None


def table_of(values):
    """An array, uint8, from the codes of characters to their values; from all others to 0."""
    table = np.zeros(sys.maxunicode + 1, dtype=np.uint8)
    table[[ord(character) for character in values]] = list(values.values())
    return table


if __name__ == "__main__":
    start(main, __file__)
