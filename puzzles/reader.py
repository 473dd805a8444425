"""Finds the puzzles in a text, as people write them down. A text that can be read in two ways is refused.

A puzzle is a line with all its cells, or a line for each row, or JSON, or JSON lines. Between cells may
stand spaces, commas, pipes and brackets, between rows lines of dashes and box drawing, between puzzles titles
and comments. A Sudoku's empty cell is one of empty_cells of its Kind, or a space where the columns show which
cells are meant. Other puzzles have the symbols of their dataset alone.
"""
import itertools
import json
import math
import re
from contextlib import suppress
from typing import NamedTuple

from runtime.errors import UserError

SEPARATORS = " ,;|!:'\"()[]{}<>=/\\+" + "".join(map(chr, range(0x2500, 0x2580)))  # the last: box drawing
# {the sign that begins a comment: the comment}; a row of a table may begin with ; and has more of them
COMMENTS = {"#": "#.*", "/": "//.*", "%": "^%.*", ";": "^;(?!.*;).*"}
AFTERWARDS = r"(?mi)^\[(?:state|pencilmarks)\]"  # a player's work, in .sdk files
HEADING = r"\s*\d{1,6}(\s+\d{1,2})?\s*"  # how many puzzles follow, or the size of one
BARS = "[!\u2502\u2503\u2551]"  # signs for |
ANSWER = "(?i)answer|solution|solved"  # how its name in JSON begins
TITLE = r"[^\W\d_xX]{2}"  # two letters, in a line that is not a puzzle or a row


class Puzzle(NamedTuple):
    """A puzzle in a text."""

    line: int  # where it begins, from 1; in JSON, its place in a list
    question: str  # a symbol for each cell; a line that is no puzzle stands here as it is
    answer: str = ""  # "": it is not known


class Line(NamedTuple):
    """A line of a text, and what it seems to be: puzzle, row, dashes, gap, title, or other."""

    what: str
    number: int  # from 1
    text: str  # its cells, or the line as it is
    answer: str = ""


def find_puzzles(kind, text):
    """Returns the Puzzles in a text, at least one, and in words how it was read. Raises UserError.

    kind: of the model that shall solve them.
    """
    # JSON, or else lines
    puzzles, how = json_text(kind, text)
    if not puzzles:
        if " " in kind.symbols[1:]:
            return kind.find_spaced(text)
        before = re.split(AFTERWARDS, text)[0]
        puzzles, how = written_puzzles(kind, before.splitlines())

    # say what was found
    puzzles = with_answers(kind, puzzles)
    count = "one puzzle" if len(puzzles) == 1 else f"{len(puzzles)} puzzles"
    return puzzles, count + how


def written_puzzles(kind, texts):
    """Returns the Puzzles in lines, each a puzzle or a row, and in words how. Raises UserError."""
    rows = kind.rows
    lines = [line_of(kind, number, text) for number, text in enumerate(texts, 1)]
    written = [line for line in lines if line.what in ("puzzle", "row", "other")]
    contents = [line.what for line in written]

    # a single line that is no puzzle; what takes it says what is wrong
    whole = "\n".join(texts).strip()
    if "\n" not in whole and "puzzle" not in contents:
        return [Puzzle(1, whole)], ""

    # read on below a number that stands above the puzzles
    if "puzzle" in contents or len(contents) % rows == 1:
        first = written[0]
        if first.what == "other" and re.fullmatch(HEADING, first.text):
            blank = [""] * first.number
            return written_puzzles(kind, blank + texts[first.number:])

    # a puzzle a line
    if "puzzle" in contents:
        if "row" in contents:
            raise UserError("some lines have all cells of a puzzle, others those of a row")
        return [Puzzle(*line[1:]) for line in written], ", one a line"

    # a row a line; without a sign for an empty cell, a space may be one
    empty = {*kind.empty_cells}.intersection("".join(line.text for line in written))
    if kind.empty_cells and not empty and "other" in contents:
        puzzles, how = written_puzzles(kind, dotted(kind, texts))
        return puzzles, how + ", a space for an empty cell"
    return grids(kind, lines, empty), f" of {rows} lines"


def squared(text):
    """Returns a text in one line, with the spaces that editors strip at the end of lines; and its lines."""
    lines = text.strip("\r\n").splitlines()
    width = max(map(len, lines), default=0)
    return "".join(line.ljust(width) for line in lines), len(lines)


# ---------------------------------------------------------------------------------------------------------
# Cells

def signs_of(kind):
    """Returns {a sign in a text: the symbol of a Kind that it means}."""
    symbols = kind.symbols[1:]
    return dict.fromkeys(kind.empty_cells, ".") | dict(zip(symbols, symbols))


def cells_of(kind, text, rows):
    """Returns the symbols of a text that has the cells of so many rows and nothing else, or ""."""
    signs = signs_of(kind)
    is_whole = len(text) == rows * kind.columns and signs.keys() >= {*text}
    return "".join(map(signs.get, text)) if is_whole else ""


def has_half(kind, text):
    """Returns whether a text has more than half the cells of a puzzle."""
    signs = signs_of(kind)
    return sum(char in signs for char in text) > kind.cells // 2


def with_answers(kind, puzzles):
    """Returns Puzzles, where a Sudoku that answers the one before or after it is no puzzle of its own.

    Other kinds may have no empty cell, and then a grid that fits the one before it may be the next question.
    """
    if not kind.empty_cells:
        return puzzles
    merged = []
    for puzzle in puzzles:
        last = merged[-1] if merged else puzzle
        question, answer = sorted([last.question, puzzle.question], key=lambda cells: "." not in cells)
        # an answer has what the question gives, and another symbol for each empty cell
        pattern = re.escape(question).replace(r"\.", "[^.]")
        if question != answer and re.fullmatch(pattern, answer) and not last.answer:
            merged[-1] = Puzzle(last.line, question, answer)
        else:
            merged.append(puzzle)
    return merged


def json_text(kind, text):
    """Returns the Puzzles in JSON or JSON lines, or none, and in words how they stand. Raises UserError."""
    with suppress(ValueError):
        return json_puzzles(kind, json.loads(text)), ", from JSON"
    with suppress(ValueError):
        return numbered_puzzles(kind, map(json.loads, text.rstrip().splitlines())), ", one a line"
    return [], ""


def json_puzzles(kind, value):
    """Returns the Puzzles in JSON: texts, lists of cells, rows or puzzles. Raises UserError."""
    split = str.splitlines if " " in kind.symbols[1:] else str.split
    cells = cells_of(kind, "".join(split(json_cells(value))), kind.rows)
    if cells:
        return [Puzzle(1, cells)]
    if isinstance(value, list):
        return numbered_puzzles(kind, value)
    if not isinstance(value, dict):
        return []

    # the members of an object belong together; their names or their cells say which is the answer, and an
    # answer without a question is no puzzle
    puzzles_of = {name: json_puzzles(kind, member) for name, member in value.items()}
    named = [name for name in puzzles_of if re.match(ANSWER, name)]
    answers = sum([puzzles_of.pop(name) for name in named], [])
    questions = sum(puzzles_of.values(), [])
    if not questions or len(questions) == len(answers):
        return [Puzzle(1, question.question, answer.question) for question, answer in zip(questions, answers)]
    puzzles = questions + answers
    if puzzles not in puzzles_of.values():
        puzzles = with_answers(kind, puzzles)
        if len(puzzles) > 1:
            raise UserError(f"{len(puzzles)} puzzles stand together, and are not one with its answer")
    return puzzles


def numbered_puzzles(kind, values):
    """Returns the Puzzles in a list of JSON; what has half a puzzle and is none stands there as it is."""
    puzzles = []
    for number, value in enumerate(values, 1):
        text = json_cells(value)
        own_puzzles = json_puzzles(kind, value)
        if has_half(kind, text) and not own_puzzles:
            own_puzzles = [Puzzle(number, text)]
        puzzles += [Puzzle(number, *puzzle[1:]) for puzzle in own_puzzles]
    return puzzles


def json_cells(value):
    """Returns the cells of JSON as a text: null and "" are empty, and a number has one digit."""
    if isinstance(value, list):
        return "".join(map(json_cells, value))
    if value in (None, "", " "):
        return "."
    cells = str(value)
    return cells if isinstance(value, str | dict) or len(cells) == 1 else "\ufffd"


# ---------------------------------------------------------------------------------------------------------
# Lines

def words_of(kind, text):
    """Returns the words of a line, which separators set apart; a whole row or puzzle is one word."""
    separators = {*SEPARATORS} - signs_of(kind).keys()
    words = "".join(" " if char in separators else char for char in text).split()
    # in a table, an empty field is an empty cell
    framed = re.sub(BARS, "|", text).strip(" ").removesuffix("|.")  # as LaTeX ends a row
    fields = re.split("[,;|\t]", framed.strip("|"))
    whole = ""
    if kind.empty_cells and len(fields) in (kind.columns, kind.cells):
        whole = "".join(field.strip() or "." for field in fields)
    # pieces of a row or a puzzle have one length; a number beside them has another
    elif len({*map(len, words)}) == 1:
        whole = "".join(words)
    is_whole = cells_of(kind, whole, 1) or cells_of(kind, whole, kind.rows)
    return [whole] if is_whole else words


def line_of(kind, number, text):
    """Returns the Line of a text."""
    signs = signs_of(kind)
    # without other signs, a line with as many characters as cells has spaces for empty cells
    if kind.empty_cells and len(text) == kind.cells and re.fullmatch("[1-9 ]+", text):
        text = text.replace(" ", ".")
    for sign in COMMENTS.keys() - signs.keys():
        text = re.sub(COMMENTS[sign], "", text)

    # a puzzle may stand beside its number, rating or answer, but not beside half a puzzle
    words = words_of(kind, text)
    puzzles = []
    others = ""
    for word in words:
        puzzle = cells_of(kind, word, kind.rows)
        if puzzle:
            puzzles.append(Puzzle(number, puzzle))
        else:
            others += word
    puzzles = with_answers(kind, puzzles)
    is_half = has_half(kind, others)
    if len(puzzles) == 1 and not is_half:
        return Line("puzzle", *puzzles[0])
    if puzzles or is_half:
        return Line("other", number, text.strip())

    # a row has symbols of the dataset; a line of a Sudoku's other dashes may be a row, or stand between rows
    cells = "".join(words)
    has_symbol = {*cells} & {*kind.symbols[1:]}
    is_row = len(words) == 1 and cells_of(kind, cells, 1)
    is_drawn = {*cells} <= {*"-_*.'`"} and {*text} & {*"-=_*+\u2500\u2501\u2550"}
    if not cells or is_drawn and not (is_row and has_symbol):
        is_dashes = is_row and len({*cells}) == 1 and not {"+", "="} & {*text}
        return Line("dashes" if is_dashes else "gap", number, cells)
    if is_row:
        return Line("row", number, cells)
    # letters that are all symbols are a row of another length
    is_title = re.search(TITLE, text) and not signs.keys() >= {*cells}
    return Line("title" if is_title else "other", number, text)


def grids(kind, lines, empty):
    """Returns the Puzzles in Lines that are rows. Raises UserError.

    empty: the signs for empty cells in the rows; a line of dashes that are one of them is a row.
    """
    rows, columns = kind.grid
    row_lines = []
    shape = ""  # a letter for each line: row, gap, title
    for line in lines:
        what = line.what
        if what == "other":
            cells = "".join(line.text.split())
            raise UserError(f"line {line.number}, {cells[:20]!r}, is no row of {columns} cells")
        if what == "dashes":
            what = "row" if {*line.text} <= empty else "gap"
        if what == "row":
            row_lines.append(line)
        shape += what[0]
    if not row_lines:
        raise UserError(f"no line has the cells of a {rows}x{columns} puzzle or of its row")

    # a missing row shows: in a puzzle, gaps are after no row, after each band of boxes or after each row
    band = kind.box[0]
    layouts = [f"r{{{height}}}(g+r{{{height}}}){{{rows // height - 1}}}" for height in (rows, band, 1)]
    end = re.match(f"[gt]*(({'|'.join(layouts)})[gt]*)*", shape).end()
    one_puzzle = f"[gt]*r(g*r){{{rows - 1}}}[gt]*"
    if end < len(shape) and not re.fullmatch(one_puzzle, shape):
        # tell of the first block that has another height, or of the rows below the last puzzle
        for block in re.finditer("r+", shape):
            if len(block[0]) not in (1, band, rows):
                raise UserError(f"{len(block[0])} rows, not {rows}, from line {block.start() + 1}")
        raise UserError(f"{shape.count('r', end)} rows, not {rows}, from line {end + 1}; the gaps between "
                        "the rows of a puzzle must be alike")

    # put the rows together
    puzzles = []
    for first in range(0, len(row_lines), rows):
        cells = "".join(line.text for line in row_lines[first:first + rows])
        puzzles.append(Puzzle(row_lines[first].number, cells_of(kind, cells, rows)))
    return puzzles


def dotted(kind, texts):
    """Returns texts with a dot for each space that is an empty cell. Raises UserError if that is not clear.

    All rows must fit one way to set cells apart, and no other.
    """
    rows, columns = kind.grid
    row_texts = {}  # {index of a row in texts: the row}
    for i, text in enumerate(texts):
        row = re.sub(BARS, "|", text.expandtabs())
        if re.fullmatch("[1-9 |]+", row) and (row.strip(" |") or len(row) >= columns):
            row_texts[i] = row

    # a space that is lost or added moves cells: no line may begin without its spaces, and all end alike
    begins = {row[0] for row in row_texts.values()}
    ends = {row[-1] for row in row_texts.values()}
    lengths = {*map(len, row_texts.values())}
    is_clear = begins & {" ", "|"} and (len(lengths) == 1 or " " not in ends and ends != {"|"})
    # lines that still have the spaces at their end are as long as the puzzle
    longest = max(lengths) if " " in ends else math.inf

    # try each way: what stands between cells, before the first cell, and between boxes
    box_columns = kind.box[1]
    readings = set()
    for gap, margin in itertools.product(("", " "), ("", " ", "|", "| ")):
        box = gap.join("." * box_columns)
        for between in {gap, gap + " ", "|", " | "}:
            pattern = margin + between.join([box] * (columns // box_columns))
            row = re.escape(pattern).replace(r"\.", "([1-9 ])") + "[ |]*"
            matches = [re.fullmatch(row, text.ljust(len(pattern))) for text in row_texts.values()]
            if all(matches) and len(pattern) <= longest:
                readings.add(tuple("".join(match.groups()) for match in matches))
    if len(readings) != 1 or not is_clear:
        raise UserError("cannot tell which cells are empty: write a dot for each")
    dotted_texts = list(texts)
    for i, row in zip(row_texts, *readings):
        dotted_texts[i] = row.replace(" ", ".")
    return dotted_texts
