"""puzzles/reader.py: Sudokus and mazes as people write them are read rightly, or refused."""
import json
import re

import pytest

from puzzles import parse_question, sudoku_task
from puzzles.maze import maze_task
from puzzles.reader import EMPTY_CELLS, find_puzzles
from runtime.errors import UserError

QUESTION = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"
ANSWER = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"
ROWS = [QUESTION[i:i + 9] for i in range(0, 81, 9)]
ZEROS = [row.replace(".", "0") for row in ROWS]
NUMBERS = [list(map(int, row)) for row in ZEROS]


def lines(rows):
    return "\n".join(rows)


def boxed(cell, gap, bar, rule, outer=("", ""), top="", bottom=""):
    """Returns the puzzle with a gap between cells, a bar and a rule between boxes, and lines around it."""
    texts = []
    for row in ROWS:
        row = row.replace(".", cell)
        boxes = [gap.join(row[i:i + 3]) for i in (0, 3, 6)]
        texts.append(outer[0] + bar.join(boxes) + outer[1])
    bands = [lines(texts[i:i + 3]) for i in (0, 3, 6)]
    return "\n".join(filter(None, [top, f"\n{rule}\n".join(bands), bottom]))


def grids_of(cell):
    """Yields texts of the puzzle."""
    yield QUESTION.replace(".", cell)
    yield lines(row.replace(".", cell) for row in ROWS) + "\n"
    yield lines(row.replace(".", cell).rstrip() for row in ROWS)  # as editors do
    yield lines(" ".join(row.replace(".", cell)) for row in ROWS)
    yield lines("|" + "|".join(row.replace(".", cell)) + "|" for row in ROWS)
    yield lines("| " + " | ".join(row.replace(".", cell)) + " |" for row in ROWS)
    yield boxed(cell, " ", " | ", "------+-------+------")
    yield boxed(cell, "", "|", "---+---+---")
    yield boxed(cell, "", "|", "-----------")
    yield boxed(cell, "", " ", "")
    yield boxed(cell, "", "|", "|---+---+---|", ("|", "|"), "*-----------*", "*-----------*")  # .ss
    frame = "+-------+-------+-------+"
    yield boxed(cell, " ", " | ", frame, ("| ", " |"), frame, frame)
    yield boxed(cell, " ", " │ ", "├───────┼───────┼───────┤", ("│ ", " │"), "┌───────┬───────┬───────┐",
                "└───────┴───────┴───────┘")
    yield boxed(cell, " ", " ║ ", "╠═══════╬═══════╬═══════╣", ("║ ", " ║"), "╔═══════╦═══════╦═══════╗")
    yield boxed(cell, " ", " | ", ":-------+-------+-------:", ("| ", " |"), ".-------.-------.-------.",
                "'-------'-------'-------'")


@pytest.mark.parametrize("cell", [*EMPTY_CELLS, " "])
def test_a_grid_with_any_sign_for_an_empty_cell(cell):
    for text in grids_of(cell):
        for variant in text, text.replace("\n", "\r\n"):
            [(_, question, answer)], how = find_puzzles(sudoku_task(9), variant)
            assert (question, answer) == (QUESTION, "") and how.startswith("one puzzle"), text


def test_spaces_in_a_grid_that_has_a_column_of_them():
    """At the end of lines they tell a column of empty cells from a gap between boxes."""
    [(_, question, _)], _ = find_puzzles(sudoku_task(6), "2     \n4   6 \n    15\n6    2\n  3 5 \n      ")
    assert question == "2.....4...6.....156....2..3.5......."
    with pytest.raises(UserError, match="cannot tell which cells"):
        find_puzzles(sudoku_task(6), "2\n4   6\n    1\n6\n  3 5\n     5")


XML = ('<?xml version="1.0"?>\n<opensudoku>\n<name>mine</name>\n<game data="{0}" />\n<game data="{0}" />\n'
       '</opensudoku>')
# texts: (number of puzzles, whether their answers are known, how they are read)
FORMS = {
    lines(map(",".join, ZEROS)): (1, False, "one puzzle of 9 lines"),
    lines(",".join(row).replace(".", "") for row in ROWS): (1, False, "one puzzle of 9 lines"),
    lines("\t".join(row).replace(".", "") for row in ROWS): (1, False, "one puzzle of 9 lines"),
    ";".join(QUESTION): (1, False, "one puzzle, one a line"),
    "/".join(ROWS): (1, False, "one puzzle, one a line"),
    "\n\n".join(ROWS): (1, False, "one puzzle of 9 lines"),
    lines(f"'{row}'," for row in ROWS): (1, False, "one puzzle of 9 lines"),
    "board = [\n" + lines(f"    {row}," for row in NUMBERS) + "\n]\n": (1, False, "one puzzle of 9 lines"),
    # JSON
    json.dumps(NUMBERS): (1, False, "one puzzle, from JSON"),
    json.dumps(NUMBERS, indent=2): (1, False, "one puzzle, from JSON"),
    json.dumps([[cell or None for cell in row] for row in NUMBERS]): (1, False, "one puzzle, from JSON"),
    json.dumps([ROWS, ROWS]): (2, False, "2 puzzles, from JSON"),
    json.dumps({"grids": [{"value": NUMBERS, "solution": ANSWER}], "size": 9}):
        (1, True, "one puzzle, from JSON"),
    lines([json.dumps({"solution": ANSWER, "puzzle": QUESTION})] * 3): (3, True, "3 puzzles, one a line"),
    # a puzzle a line
    f"49 puzzles, easy\n{QUESTION}\n\n{QUESTION} # comment\n{QUESTION}//\n":
        (3, False, "3 puzzles, one a line"),
    f"0000183b305c {''.join(ZEROS)}  1.2\n" * 2: (2, False, "2 puzzles, one a line"),
    f"puzzle,solution\n{QUESTION},{ANSWER}\n{QUESTION},{ANSWER}\n": (2, True, "2 puzzles, one a line"),
    XML.format("".join(ZEROS)): (2, False, "2 puzzles, one a line"),
    f"49151\n{QUESTION}\n{QUESTION}\n": (2, False, "2 puzzles, one a line"),
    f"{QUESTION}\n{ANSWER}\n" * 2: (2, True, "2 puzzles, one a line"),
    # several grids
    f"9\n{lines(map(' '.join, ZEROS))}\n": (1, False, "one puzzle of 9 lines"),
    f"{lines(ROWS)}\n\nAnswer:\n{ANSWER}\n".replace(ANSWER, "\n".join(re.findall(".{9}", ANSWER))):
        (1, True, "one puzzle of 9 lines"),
    "\\begin{sudoku}\n" + lines("|" + "|".join(row.replace(".", " ")) + "|." for row in ROWS) + "\n\\end":
        (1, False, "one puzzle of 9 lines"),
    f"Grid 01\n{lines(ZEROS)}\nGrid 02\n{lines(ZEROS)}\n": (2, False, "2 puzzles of 9 lines"),
    f"{lines(ROWS)}\n\n{lines(ROWS)}\n\n\n{lines(ROWS)}": (3, False, "3 puzzles of 9 lines"),
    f"#Ame\n; easy\n[Puzzle]\n{lines(ROWS)}\n[State]\n{ANSWER}\n": (1, False, "one puzzle of 9 lines"),
}


@pytest.mark.parametrize("text", FORMS)
def test_files_of_puzzles(text):
    number, is_answered, how = FORMS[text]
    answer = ANSWER if is_answered else ""
    puzzles, words = find_puzzles(sudoku_task(9), text)
    assert [puzzle[1:] for puzzle in puzzles] == [(QUESTION, answer)] * number and words == how


@pytest.mark.parametrize("text, words", [
    (lines(ROWS[:8]), "8 rows, not 9, from line 1"),
    (lines(ROWS + ROWS[:1]), "10 rows, not 9, from line 1"),
    (lines([*ROWS[:4], ROWS[4] + ".", *ROWS[5:]]), "line 5, '4..8.3..1.', is no row of 9 cells"),
    (lines([*ROWS[:4], "AB" + ROWS[4][2:], *ROWS[5:]]), "4 rows, not 9, from line 1"),
    (boxed("-", "", " ", "---------"), "11 rows, not 9"),
    # two rows are missing, and two lines of dashes are there
    (lines([*ROWS[:3], "-" * 9, *ROWS[3:5], "-" * 9, *ROWS[5:7]]), "2 rows, not 9, from line 5"),
    # a row is missing, and another puzzle would complete it
    (lines([*ROWS[:8], "", *ROWS, "", *ROWS, ROWS[0]]), "8 rows, not 9, from line 1"),
    (lines([*ROWS[:6], "", *ROWS, "", *ROWS[:3]]), "6 rows, not 9, from line 1"),
    (lines([*ROWS, "", *ROWS[:8], "", *ROWS, ROWS[0]]), "8 rows, not 9, from line 11"),
    # spaces at the beginning of the lines are lost
    (lines(row.replace(".", " ").strip() for row in ROWS), "cannot tell which cells are empty"),
    (lines(row.replace(".", "⬜") for row in ROWS), "cannot tell which cells are empty"),
    # candidates, and numbers of the rows
    (lines(" ".join(row).replace(".", "123") for row in ROWS), "cannot tell which cells are empty"),
    (lines(f"{i} | {' '.join(row)}" for i, row in enumerate(ROWS, 1)), "line 1, '1|53..7....', is no row"),
    (f"{QUESTION}\n{lines(ROWS)}", "some lines have all cells of a puzzle, others those of a row"),
    (json.dumps({"a": QUESTION, "b": QUESTION[::-1]}), "2 puzzles stand together, and are not one with its"),
    (f"{QUESTION} {QUESTION[::-1]}", "has 163 cells, not 9x9"),
    (f"{QUESTION[:80]} {ANSWER}", "has 162 cells, not 9x9"),
    (f"{' '.join(QUESTION[:80])} {ANSWER}", "cells, not 9x9"),
    (f"{QUESTION}\n{QUESTION}\n", "the text has 2 puzzles"),
    ("1" * 81 + "x", "has 82 cells, not 9x9"),
    # a number, and a puzzle or a row that lacks a cell
    (f"1: {QUESTION[1:]}", "cells, not 9x9"),
    (f"1 {QUESTION[1:]}", "has 82 cells, not 9x9"),
    (f"9\n{QUESTION[1:]}", "line 1, '9', is no row"),
    (f"{QUESTION[1:]}; 3\n{QUESTION[1:]}; 3", "line 1, '3..7....6..195....98', is no row"),
    (lines(f"{i} {row[1:]}" for i, row in enumerate(ROWS, 1)), "line 1, '13..7....', is no row"),
    # a row of a grid with spaces has one too few
    (lines([*ROWS[:4], ROWS[4][1:], *ROWS[5:]]).replace(".", " "), "cannot tell which cells are empty"),
    ("A" + QUESTION[1:], "has 'A' in row 1, column 1: must be one of"),
    ("<html>\n<p>no puzzle</p>\n</html>", "no line has the cells of a 9x9 puzzle or of its row"),
])
def test_what_is_not_clear_is_refused(text, words):
    with pytest.raises(UserError) as error:
        parse_question(sudoku_task(9), text)
    assert words in str(error.value)


HEX = ".123456789ABCDEFG"


def test_puzzles_of_other_kinds_have_their_symbols_alone():
    """A 16x16 Sudoku with letters; dots and dashes are symbols where they are."""
    task = {"kind": "sixteen", "grid": [16, 16], "symbols": "_" + HEX}
    rows = [(HEX * 2)[i:i + 16] for i in range(16)]
    titled = f"easy one\n{lines(map('|'.join, rows))}"
    for text in "".join(rows), lines(rows), lines(map(" ".join, rows)), titled:
        [(_, question, _)], _ = find_puzzles(task, text)
        assert question == "".join(rows)
    with pytest.raises(UserError, match="has 'H' in row 1, column 3"):
        parse_question(task, "".join(rows).replace("2", "H"))
    # four lines of nine are no puzzle of six rows
    with pytest.raises(UserError, match="is no row of 6 cells"):
        find_puzzles({"kind": "six", "grid": [6, 6], "symbols": "_.12"}, lines([".1.2.1.2."] * 4))
    spaces = {"kind": "spaces", "grid": [6, 6], "symbols": "_ 12"}
    with pytest.raises(UserError, match="4 lines are no puzzle of 6 rows"):
        find_puzzles(spaces, lines(["1 2 1 2 1"] * 4))
    signs = {"kind": "signs", "grid": [3, 3], "symbols": "_-|#"}
    assert find_puzzles(signs, "-|#\n---\n#|-")[0][0].question == "-|#---#|-"


@pytest.mark.parametrize("text, mazes", [
    ("S #\n # \n  G", 1), ("S #\n #\n  G\n", 1), ("S # #   G", 1), ("S.#\n.#.\n..G", 1), ("S █\n █ \n  E", 1),
    ("S # #   G\nS # #   G\n", 2)])
def test_mazes(text, mazes):
    puzzles, _ = find_puzzles(maze_task(3), text)
    assert [question for _, question, _ in puzzles] == ["S # #   G"] * mazes


@pytest.mark.parametrize("text", [
    "S 1\n 1 \n  G", "S       \n       G", "S  #\n    \n  G ", "S.#\n. .\n..G",
    "WSE\nW.E\nWGE"])
def test_other_drawings_are_told_what_a_maze_is(text):
    with pytest.raises(UserError, match="no maze: that is a square of the characters '# SG', wall"):
        find_puzzles(maze_task(3), text)
