"""The puzzles that solve.py is asked to solve: in a text, in a file, or in the rows of a .csv."""
import os
import re
import sys
from dataclasses import dataclass

import numpy as np

from puzzles.prepare import column_names, csv_rows, open_text
from puzzles.reader import TITLE
from runtime.errors import UserError

MOST_PROBLEMS = 10  # with puzzles, that are printed


@dataclass
class Row:
    """A puzzle that was asked for."""

    prefix: str  # where it stands, before a message
    question: str
    known_answer: str
    tokens: np.ndarray = None  # int32 [cells]
    problem: str = ""  # why it cannot be solved


def read_source(source):
    """Returns the Rows of a .csv, the text of another file, or source itself. Raises UserError."""
    text = source
    if source.lower().endswith(".parquet"):
        raise UserError(f"{source}: convert it: python -c \"import pandas; pandas.read_parquet({source!r})"
                        ".to_csv('puzzles.csv', index=False)\"")
    if os.path.isfile(source):
        with open_text(source) as f:
            text = f.read()

    # a .csv without names in its first line is a list of puzzles, or the cells of one
    header = text.partition("\n")[0]
    is_csv = re.search(r"\.[ct]sv(\.gz)?$", source.lower())
    names = re.findall(r"\w+", header)
    has_names = "question" in column_names(names) or not re.search(r"\d", header)
    if is_csv and re.search(TITLE, header) and has_names:
        rows = csv_rows(source, ["question"], is_strict=False)
        return [Row(f"{source}:{line}: ", row.get("question", ""), row.get("answer") or "")
                for line, row in rows]
    if os.path.isdir(source):
        raise UserError(f"{source} is a folder: give a file, or MODEL and PUZZLE")
    if text == source and re.search(r"\.(txt|sdk|sdm|ss|jsonl?|xml|[ct]sv|gz)$", source):
        raise UserError(f"{source}: no such file")
    return text


def read_rows(kind, source, content):
    """Returns the Rows of a model's Kind, not parsed yet, and in words how they were read. Raises UserError.

    source: as typed; content: see read_source.
    """
    if not isinstance(content, str):
        return content, f"{len(content)} puzzle{'s' * (len(content) > 1)}, one a row"
    prefix = f"{source}:" if os.path.isfile(source) else ""
    try:
        puzzles, how = kind.find(content)
    except UserError as e:
        raise UserError(f"{prefix} {e}".strip()) from None
    return [Row(prefix and f"{prefix}{line}: ", question, answer) for line, question, answer in puzzles], how


def parse_rows(kind, rows):
    """Gives the Rows their tokens or a problem, and returns the Kind of puzzles with their size.

    Warns on stderr of what is not solved. Raises UserError if no puzzle can be solved.
    """
    # read each puzzle; mazes of other sizes than the first one are not solved
    readable = []
    for row in rows:
        try:
            row.tokens = kind.parse(row.question)
            size = readable[0].tokens.size if readable else row.tokens.size
            if row.tokens.size != size:
                raise UserError(f"the puzzle has {row.tokens.size} cells, others have {size}")
            readable.append(row)
        except UserError as e:
            row.problem = str(e)

    # leave out puzzles without a solution; the first warning stands for all
    notes = []
    if readable:
        kind = kind.resized(size)
        notes = kind.solution_notes(np.stack([row.tokens for row in readable]))
    warning = ""
    for row, (count, words) in zip(readable, notes):
        if count == 0:
            row.problem = words
        elif words:
            warning = warning or f"warning: {row.prefix}{words}\n"

    # say what was found
    wrong = [row for row in rows if row.problem]
    if len(wrong) == len(rows):
        raise UserError(wrong[0].prefix + wrong[0].problem)
    sys.stderr.write(warning)
    for row in wrong[:MOST_PROBLEMS]:
        print(f"{row.prefix}not solved: {row.problem}", file=sys.stderr)
    return kind
