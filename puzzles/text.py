"""Reads puzzles from text: what people type, and the rows of CSV files."""
import csv
import gzip
import string
import zlib
from contextlib import contextmanager

import numpy as np

from puzzles import kind_of
from runtime.errors import UserError

EMPTY_SIGNS = ".0_*?"  # each is an empty cell if the task has no such symbol
DRAWN = string.whitespace + "|+-="  # what may stand between cells if the task has no such symbol


def parse(task, text):
    """Returns the questions in a text, {the line where one begins, from 1: tokens int32 [cells]}.

    A puzzle is a line with all its cells, or a line for each row with an empty line before the next puzzle.
    What is DRAWN between cells is left out. Raises UserError for anything else.
    """
    # the token of each sign
    kind = kind_of(task)
    symbols = kind.question_symbols()
    tokens = dict.fromkeys(EMPTY_SIGNS, kind.empty)
    tokens |= {symbol: kind.symbols.index(symbol, 1) for symbol in symbols}

    forms = (f"a puzzle is a line of {kind.cells} cells, or {kind.rows} lines of {kind.columns} with an "
             f"empty line before the next puzzle; cells are of {symbols!r}, any of {EMPTY_SIGNS!r} is empty")
    questions = {}
    rows = []  # tokens of the puzzle that is read row by row
    # an empty line ends the last puzzle too
    for number, line in enumerate([*text.splitlines(), ""], 1):
        # the line's tokens, None for an unknown sign; a line that has nothing but rulers goes
        cells = [tokens.get(sign) for sign in line if sign in tokens or sign not in DRAWN]
        if line.strip() and not cells:
            continue

        # it is a whole puzzle, or a row, of which the first one begins a puzzle, or the end of a puzzle
        is_wrong = None in cells
        if len(cells) == kind.cells and not rows:
            questions[number] = cells
        elif len(cells) == kind.columns and len(rows) < kind.cells:
            if not rows:
                rows = questions[number] = []
            rows += cells
        elif not cells and len(rows) in (0, kind.cells):
            rows = []
        else:
            is_wrong = True
        if is_wrong:
            raise UserError(f"line {number}, {line[:20]!r}, with {len(cells)} cells, is no puzzle "
                            f"and no row of one: {forms}")
    if not questions:
        raise UserError(f"no puzzle: {forms}")
    return {number: np.int32(cells) for number, cells in questions.items()}


def squeezed(text, symbols):
    """Returns a string without white space; if a space is one of the symbols, without line ends."""
    return "".join(text.splitlines() if " " in symbols else text.split())


def check_text(kind, text, symbols, name):
    """Raises UserError unless a string has one of the symbols for each cell; name: for the message."""
    if len(text) != kind.cells:
        # of a puzzle that it takes for a number, a spreadsheet drops zeros or digits
        raise UserError(f"{name} has {len(text)} cells, not {kind.rows}x{kind.columns}")
    rest = text.lstrip(symbols)
    if rest:
        cell = kind.place_of(len(text) - len(rest))
        raise UserError(f"{name} has {rest[0]!r} in {cell}: must be one of {symbols!r}")


# ---------------------------------------------------------------------------------------------------------
# CSV files

# {a name that public files give a column: ours}
SYNONYMS = {
    "puzzle": "question", "puzzles": "question", "quiz": "question", "quizzes": "question",
    "unsolved": "question",
    "solution": "answer", "solutions": "answer", "solved": "answer",
    "difficulty": "rating",
}


def csv_rows(path, columns=("question", "answer"), symbols=" "):
    """Yields (line, {column: text}) of a CSV file, also .gz. Raises UserError.

    Args:
        path: the file.
        columns: that each row must have, under these or another of the names in SYNONYMS.
        symbols: of the puzzles; white space is no cell unless a space is one of them.
    """
    wanted = ", ".join(columns)
    has_rows = False
    # columns that nobody reads may have fields of any length
    csv.field_size_limit(2 ** 31 - 1)
    with open_text(path) as f:
        is_tsv = path.lower().endswith((".tsv", ".tsv.gz"))
        reader = csv.DictReader(f, delimiter="\t" if is_tsv else ",")
        header = reader.fieldnames or []
        titles = [title.strip().lower() for title in header]
        names = reader.fieldnames = [SYNONYMS.get(title, title) for title in titles]
        if any(names.count(name) != 1 for name in columns):
            raise UserError(f"{path}:1: must name the columns {wanted} once each: it has "
                            f"{', '.join(header)[:100]}")

        for row in reader:
            # spreadsheets write empty fields behind a row, and rows of nothing else
            rest = row.pop(None, [])
            if any(rest) or None in [row[name] for name in columns]:
                raise UserError(f"{path}:{reader.line_num}: must have {wanted}; the first line of the file "
                                "names its columns")
            if any(row.values()):
                has_rows = True
                texts = {name: squeezed(row[name], symbols) for name in columns}
                if not texts["question"]:
                    raise UserError(f"{path}:{reader.line_num}: no question")
                yield reader.line_num, row | texts
    if not has_rows:
        raise UserError(f"{path}:2: no puzzle under the header")


@contextmanager
def open_text(path):
    """Yields a text file in UTF-8, also .gz. Raises UserError if it cannot be read."""
    open_file = gzip.open if path.lower().endswith(".gz") else open
    try:
        # spreadsheets write a byte order mark
        with open_file(path, "rt", encoding="utf-8-sig", newline="") as f:
            yield f
    except (OSError, EOFError, csv.Error, zlib.error, UnicodeDecodeError) as e:
        raise UserError(f"{path}: cannot be read as UTF-8 text ({e})") from None
