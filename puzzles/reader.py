"""Finds the puzzles in a text, as people write them down. A text that can be read in two ways is refused.

A puzzle is a line with all its cells, or a line for each row, or JSON. Between cells may stand spaces,
commas, pipes and brackets, between rows lines of dashes and box drawing, between puzzles titles and
comments. A Sudoku's empty cell is one of EMPTY_CELLS, or a space where the columns show which cells are
meant. Other puzzles have the symbols of their dataset alone.
"""
import json
import math
import re
from typing import NamedTuple

from puzzles.sudoku import BOXES
from runtime.errors import UserError

EMPTY_CELLS = ".0*_-xX?\u00b7"  # of Sudokus
SEPARATORS = " ,;|!:'\"()[]{}<>=/\\+" + "".join(map(chr, range(0x2500, 0x2580)))  # the last: box drawing
COMMENT = re.compile(r"(#|//).*|^[;%].*")
TITLE = re.compile(r"[^\W\d_xX]{2}")  # two letters, in a line that is not a puzzle or a row


class Puzzle(NamedTuple):
    """A puzzle in a text."""

    line: int  # where it begins, from 1
    question: str  # a symbol for each cell; a line that is no puzzle stands here as it is
    answer: str = ""  # "": it is not known


class Line(NamedTuple):
    """A line of a text, and what it seems to be: puzzle, row, dashes, gap, title, or other."""

    number: int
    what: str
    cells: str
    answer: str = ""


def find_puzzles(task, text):
    """Returns the Puzzles in a text, at least one, and in words how it was read. Raises UserError.

    task: of the model that shall solve them.
    """
    if task["kind"] == "maze":
        return find_mazes(text)
    rows, columns = task["grid"]
    num_cells = rows * columns
    if " " in task["symbols"][1:]:
        cells, height = squared(text)
        if height not in (1, rows):
            raise UserError(f"{height} lines are no puzzle of {rows} rows")
        return [Puzzle(1, cells)], "one puzzle"

    # one puzzle in any number of lines, with one sign for an empty cell
    signs = signs_of(task)
    parts = ["".join(line.split()) for line in text.splitlines() if line.strip()]
    cells = "".join(parts)
    is_uniform = task["kind"] != "sudoku" or len({*cells} & {*EMPTY_CELLS}) < 2
    is_whole = are_parts(parts, columns) and are_parts(text.split(), columns)
    if has_cells(cells, signs, num_cells) and is_uniform and is_whole:
        return [Puzzle(1, translated(cells, signs))], "one puzzle"

    # JSON
    try:
        found = json_puzzles(json.loads(text), signs, num_cells)
    except ValueError:
        found = []
    if found:
        return [Puzzle(1, *puzzle) for puzzle in found], f"{count_of(found)}, from JSON"

    # what a file of puzzles keeps of its player's work comes after the puzzle
    text = re.split(r"(?mi)^\[(?:state|pencilmarks)\]", text)[0]
    lines = [line_of(number, line, task, signs) for number, line in enumerate(text.splitlines(), 1)]
    # above the puzzles their number may stand, or the size of one
    has_lines = any(line.what == "puzzle" for line in lines)
    written = [line for line in lines if line.what in ("puzzle", "row", "other")]
    numbers = written[0].cells.split() if written else []
    sizes = {str(size) for size in (rows, columns, *BOXES.get(rows, ()))}
    is_size = len(written) % rows == 1 and {*numbers} <= sizes
    if len(numbers) < 3 and (is_size or has_lines and written[0].cells.strip().isdigit()):
        lines.remove(written[0])
    if has_lines:
        if any(line.what == "row" for line in lines):
            raise UserError("some lines have all cells of a puzzle, others those of a row")
        found = [Puzzle(line.number, line.cells, line.answer) for line in lines
                 if line.what in ("puzzle", "other")]
        found = with_answers(found, task["symbols"][1])
        return found, f"{count_of(found)}, one a line"
    if len(text.strip("\r\n").splitlines()) <= 1:
        return [Puzzle(1, spaced_line(text.strip("\r\n"), task))], "one puzzle"
    return grids(lines, text, task, signs)


def count_of(found):
    return "one puzzle" if len(found) == 1 else f"{len(found)} puzzles"


def squared(text):
    """Returns a text in one line, with the spaces that editors strip at the end of lines; and its lines."""
    lines = text.strip("\r\n").splitlines()
    width = max(map(len, lines), default=0)
    return "".join(line.ljust(width) for line in lines), len(lines)


# ---------------------------------------------------------------------------------------------------------
# Cells

def signs_of(task):
    """Returns {a sign in a text: the symbol of the task that it means}."""
    symbols = "".join(task["symbols"][1:])
    signs = dict(zip(symbols, symbols))
    if task["kind"] == "sudoku":
        signs |= dict.fromkeys(EMPTY_CELLS, ".")
    return signs


def has_cells(text, signs, number):
    """Returns whether a text has so many cells, and nothing else."""
    return len(text) == number and signs.keys() >= {*text}


def are_parts(texts, columns):
    """Returns whether texts may be parts of one puzzle, and no number beside one.

    They are rows, several rows each, or parts of a row, and all of these have one length.
    """
    lengths = {*map(len, texts)}
    fit = [length % columns == 0 or columns % length == 0 for length in lengths]
    return all(fit) and len(lengths) == 1


def translated(cells, signs):
    return "".join(signs[cell] for cell in cells)


def is_answer(answer, question, empty):
    """Returns whether cells are all that the question gives, and no cell is empty."""
    return empty not in answer and all(cell in (empty, known) for cell, known in zip(question, answer))


def question_and_answer(puzzles, empty):
    """Returns (question,) or (question, answer) of one or two texts of cells, in any order, or UserError."""
    question, *answers = sorted(puzzles, key=lambda cells: empty not in cells)
    if len(puzzles) > 2 or answers and not is_answer(answers[0], question, empty):
        raise UserError(f"{len(puzzles)} puzzles stand together, and are not one with its answer")
    return question, *answers


def with_answers(found, empty):
    """Returns Puzzles where one that is the answer to the one before it has become that one's answer."""
    merged = []
    for puzzle in found:
        last = merged[-1] if merged else puzzle
        if empty in last.question and not last.answer and is_answer(puzzle.question, last.question, empty):
            merged[-1] = last._replace(answer=puzzle.question)
        else:
            merged.append(puzzle)
    return merged


def json_puzzles(value, signs, num_cells):
    """Returns the (question,) and (question, answer) in JSON: texts, lists of cells, rows or puzzles."""
    cells = json_cells(value)
    if has_cells(cells, signs, num_cells):
        return [(translated(cells, signs),)]
    children = []
    if isinstance(value, list | dict):
        members = value.values() if isinstance(value, dict) else value
        children = [json_puzzles(member, signs, num_cells) for member in members]
        children = [child for child in children if child]
    if isinstance(value, dict) and len(children) > 1:
        # the members belong together, such as puzzle and solution
        members = [cells for child in children for puzzle in child for cells in puzzle]
        return [question_and_answer(members, signs.get("."))]
    return [puzzle for child in children for puzzle in child]


def json_cells(value):
    """Returns the cells of JSON as a text: null, "" and false are empty, other than one character is none."""
    if isinstance(value, list):
        return "".join(map(json_cells, value))
    if isinstance(value, str) and len(value) > 1:
        return "".join(value.split())
    cell = "." if value in (None, "", " ", False) else str(value)
    return cell if len(cell) == 1 else "\ufffd"


# ---------------------------------------------------------------------------------------------------------
# Lines

def line_of(number, text, task, signs):
    """Returns the Line of a text."""
    rows, columns = task["grid"]
    num_cells = rows * columns
    separators = {*SEPARATORS} - signs.keys()
    if not {"#", "/"} & signs.keys():
        text = COMMENT.sub("", text)
    words = "".join(" " if char in separators else char for char in text).split()
    cells = "".join(words)
    is_whole = are_parts(words, columns)
    framed = re.sub("[\u2502\u2503\u2551]", "|", text).strip(" ").removesuffix("|.")  # as LaTeX ends a row
    fields = re.split("[,;|\t]", framed.strip("|"))
    if task["kind"] == "sudoku" and len(fields) in (columns, num_cells):
        # an empty field is an empty cell
        cells = "".join(field.strip() or "." for field in fields)
        is_whole = True

    # a puzzle may stand beside its number, rating or answer, but not beside half a puzzle
    puzzles = [translated(word, signs) for word in words if has_cells(word, signs, num_cells)]
    has_others = any(len(word) > num_cells // 2 and not has_cells(word, signs, num_cells) for word in words)
    if is_whole and has_cells(cells, signs, num_cells):
        puzzles = [translated(cells, signs)]
        has_others = False
    if puzzles and not has_others:
        try:
            return Line(number, "puzzle", *question_and_answer(puzzles, task["symbols"][1]))
        except UserError:
            has_others = True
    if has_others:
        return Line(number, "other", text.strip())

    # dashes are a row of empty cells or a line between rows
    is_row = is_whole and has_cells(cells, signs, columns)
    if not text.strip():
        return Line(number, "gap", text)
    if {*cells} <= {*"-_*.'`"} and not (is_row and "." in cells):
        is_frame = "+" in text or "=" in text or re.search("[\u2500-\u257f]", text) and not cells
        if re.search("[-=_*+\u2500\u2501\u2550]", text) or not cells:
            is_dashes = is_row and not is_frame and len({*cells}) == 1
            return Line(number, "dashes" if is_dashes else "gap", cells)
    if is_row:
        return Line(number, "row", cells)
    return Line(number, "title" if TITLE.search(text) else "other", text)


def grids(lines, text, task, signs):
    """Returns the Puzzles in lines that are rows, and in words how they were read. Raises UserError."""
    rows, columns = task["grid"]
    given = "".join(line.cells for line in lines if line.what in ("row", "other"))
    empty = {*given} & {*EMPTY_CELLS}
    how = ""
    if task["kind"] == "sudoku" and not empty and any(line.what == "other" for line in lines):
        lines = spaced_rows(text, lines, task)
        how = ", a space for an empty cell"

    # gaps are after each box or after each row, or there are none, and so in all puzzles: a missing row shows
    band = BOXES[rows][0] if task["kind"] == "sudoku" else rows
    layouts = [set(), {*range(band, rows, band)}, {*range(1, rows)}]
    puzzle = []
    found = []
    gaps = set()
    for line in [*lines, Line(len(lines) + 1, "end", "")]:
        if line.what == "other":
            cells = "".join(line.cells.split())
            raise UserError(f"line {line.number}, {cells[:20]!r}, is no row of {columns} cells")
        if line.what == "row" or line.what == "dashes" and {*line.cells} <= empty:
            puzzle.append(line)
        elif puzzle:
            gaps.add(len(puzzle))

        # keep the layouts that fit so far
        length = len(puzzle)
        layouts = [layout for layout in layouts if {gap for gap in layout if gap < length} <= gaps <= layout]
        is_broken = line.what in ("title", "end") and puzzle
        if is_broken or not layouts:
            then = line.cells[:20].strip() or line.what
            first = puzzle[0].number
            raise UserError(f"{length} rows, not {rows}, from line {first}; then comes {then!r}")
        if length == rows:
            cells = "".join(row.cells for row in puzzle)
            found.append(Puzzle(puzzle[0].number, translated(cells, signs | {" ": "."})))
            puzzle = []
            gaps = set()

    if not found:
        raise UserError(f"no line has the cells of a {rows}x{columns} puzzle or of its row")
    found = with_answers(found, task["symbols"][1])
    return found, f"{count_of(found)} of {rows} lines{how}"


def spaced_rows(text, lines, task):
    """Returns the Lines of a text whose empty cells are spaces. Raises UserError if columns are not clear.

    All rows must fit one way to set cells apart, and no other.
    """
    rows, columns = task["grid"]
    box_columns = BOXES[rows][1]
    raw_lines = text.splitlines()
    kept = {}  # {number of a line: its text}
    for line in lines:
        row = re.sub("[!\u2502\u2503\u2551]", "|", raw_lines[line.number - 1].expandtabs())
        is_framed = line.what == "gap" and row.strip(" |") == "" and len(row) >= columns
        if line.what in ("row", "other") or is_framed:
            kept[line.number] = row

    # a space that is lost or added moves cells: no line may begin without its spaces, and all end alike
    texts = list(kept.values())
    ends = {row[-1] for row in texts}
    have_one_length = len({*map(len, texts)}) == 1
    is_padded = have_one_length and " " in ends
    begins_with_space = any(row[0] in " |" for row in texts)
    ends_alike = have_one_length or " " not in ends and ends != {"|"}

    readings = set()
    for gap in "", " ":
        for between in {gap, gap + " ", "|", " | "}:
            for margin in "", " ", "|", "| ":
                box = gap.join(["."] * box_columns)
                pattern = margin + between.join([box] * (columns // box_columns))
                # lines that still have the spaces at their end are as long as the puzzle
                if not is_padded or len(pattern) <= len(texts[0]):
                    readings.add(tuple(row_of(row, pattern) for row in texts))
    readings = [reading for reading in readings if None not in reading]
    if len(readings) != 1 or not begins_with_space or not ends_alike:
        raise UserError("cannot tell which cells are empty: write a dot for each")
    numbers = dict(zip(kept, *readings))
    return [Line(line.number, "row", numbers[line.number]) if line.number in numbers else line
            for line in lines]


def spaced_line(text, task):
    """Returns the cells of a line, which has as many characters as cells if spaces are empty cells."""
    if task["kind"] == "sudoku" and len(text) == math.prod(task["grid"]) and re.fullmatch("[1-9 ]+", text):
        return text.replace(" ", ".")
    return "".join(text.split()) if are_parts(text.split(), task["grid"][1]) else text.strip()


def row_of(text, pattern):
    """Returns the cells, digits and spaces, where a pattern has dots; None if the text does not fit."""
    cells = ""
    for char, wanted in zip(text.ljust(len(pattern)), pattern):
        if wanted == ".":
            cells += char
    fits = all(char == wanted or wanted == "." for char, wanted in zip(text, pattern))
    is_cells = re.fullmatch("[1-9 ]*", cells)
    return cells if fits and is_cells and not text[len(pattern):].strip(" |") else None


# ---------------------------------------------------------------------------------------------------------
# Mazes

def find_mazes(text):
    """Returns the Puzzles in a text, one maze or a maze a line, and in words how. Raises UserError."""
    # a dot is an open cell where a space is none
    if "G" not in text:
        text = text.replace("E", "G")
    if {*"SG"} <= {*text} and not any(" " in line.rstrip() for line in text.splitlines()):
        text = text.replace(".", " ")
    text = text.replace("\u2588", "#")
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and all(line.count("S") == line.count("G") == 1 for line in lines):
        found = [Puzzle(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        return found, f"{len(found)} mazes, one a line"
    cells, height = squared(text)
    side = math.isqrt(len(cells))
    if side * side != len(cells) or height not in (1, side) or not {*cells} <= {*"# SG"}:
        raise UserError(f"{height} lines with {len(cells)} cells are no maze: that is a square of the "
                        "characters '# SG', wall, open, start and goal")
    return [Puzzle(1, cells)], "one maze"
