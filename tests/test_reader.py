"""puzzles/reader.py: Sudokus and mazes as people write them are read rightly, or refused."""
import json
import re
from pathlib import Path

import pytest
from helpers import ROOT

from puzzles import kind_of
from puzzles.maze import Maze
from puzzles.sudoku import Sudoku
from runtime.errors import UserError

QUESTION = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"
ANSWER = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"

# texts that begin with a line "=== how they are read", or "=== refused: why"
FORMS = re.findall(r"^=== (.*)\n((?:(?!===).*\n)+)", Path(ROOT, "tests/data/sudokus.txt").read_text(), re.M)
READ = [form for form in FORMS if not form[0].startswith("refused")]
REFUSED = [form for form in FORMS if form not in READ]


@pytest.mark.parametrize("how, text", READ)
def test_sudokus_in_every_form_are_read_and_it_says_how(how, text):
    puzzles, words = kind_of(Sudoku.new_task(9)).find(text)
    answer = ANSWER if how.endswith(", with answers") else ""
    assert [puzzle[1:] for puzzle in puzzles] == [(QUESTION, answer)] * len(puzzles)
    assert words == how.removesuffix(", with answers")


@pytest.mark.parametrize("cell", [*Sudoku.empty_cells, " "])
def test_a_grid_with_any_sign_for_an_empty_cell(cell):
    """A space too, with and without those at the end of lines, which editors strip; and lines of Windows."""
    for how, text in READ:
        if "\u00b7" in text:
            text = text.replace("\u00b7", cell)
            for variant in text, text.replace("\n", "\r\n"), re.sub(" +$", "", text, flags=re.M):
                [(_, question, answer)], words = kind_of(Sudoku.new_task(9)).find(variant)
                assert (question, answer) == (QUESTION, "") and words.startswith(how), text


@pytest.mark.parametrize("how, text", REFUSED)
def test_what_is_not_clear_is_refused(how, text):
    with pytest.raises(UserError) as error:
        kind_of(Sudoku.new_task(9)).parse(text)
    assert how.removeprefix("refused: ") in str(error.value)


def test_spaces_in_a_grid_that_has_a_column_of_them():
    """At the end of lines they tell a column of empty cells from a gap between boxes."""
    [(_, question, _)], _ = kind_of(Sudoku.new_task(6)).find("2     \n4   6 \n    15\n6    2\n  3 5 \n      ")
    assert question == "2.....4...6.....156....2..3.5......."
    with pytest.raises(UserError, match="cannot tell which cells"):
        kind_of(Sudoku.new_task(6)).find("2\n4   6\n    1\n6\n  3 5\n     5")


HEX = ".123456789ABCDEFG"


def test_puzzles_of_other_kinds_have_their_symbols_alone():
    """A 16x16 Sudoku with letters; dots and dashes are symbols where they are."""
    task = {"kind": "sixteen", "grid": [16, 16], "symbols": "_" + HEX}
    rows = [(HEX * 2)[i:i + 16] for i in range(16)]
    titled = "easy one\n" + "\n".join(map("|".join, rows))
    for text in "".join(rows), "\n".join(rows), " ".join("\n".join(rows)), titled:
        [(_, question, _)], _ = kind_of(task).find(text)
        assert question == "".join(rows)
    with pytest.raises(UserError, match="has 'H' in row 1, column 3"):
        kind_of(task).parse("".join(rows).replace("2", "H"))
    # four lines of nine are no puzzle of six rows
    with pytest.raises(UserError, match="is no row of 6 cells"):
        kind_of({"kind": "six", "grid": [6, 6], "symbols": "_.12"}).find("\n".join([".1.2.1.2."] * 4))
    spaces = {"kind": "spaces", "grid": [6, 6], "symbols": "_ 12"}
    with pytest.raises(UserError, match="4 lines are no puzzle of 6 rows"):
        kind_of(spaces).find("\n".join(["1 2 1 2 1"] * 4))
    signs = {"kind": "signs", "grid": [3, 3], "symbols": "_-|#"}
    assert kind_of(signs).find("-|#\n---\n#|-")[0][0].question == "-|#---#|-"
    # a row with a letter too many is no title
    letters = {"kind": "letters", "grid": [3, 3], "symbols": "_AB"}
    for text in "ABA\nBAA\nBBB\nBAAB", "ABABAABBB\nBAAB":
        with pytest.raises(UserError):
            kind_of(letters).parse(text)


@pytest.mark.parametrize("sign", "#/%;-_*=+|!.:'`\"<\\\u2500\u2502")
def test_a_sign_that_is_a_symbol_is_a_cell(sign):
    """It begins no comment, and draws no line, alone or with another."""
    other = "*" if sign != "*" else "-"
    task = {"kind": "mine", "grid": [3, 3], "symbols": f"\0{sign}{other}"}
    rows = [sign + other + sign, sign * 3, other + sign * 2]
    grid = "\n".join(rows) + "\n"
    line = "".join(rows) + "\n"
    comment = "# it's" if sign != "#" else "// it's"
    texts = [grid + grid, f"{comment}\r\n\r\n{grid}\n{grid}", f"first one\n{grid}second one\n{grid}",
             " ".join(grid) + "\n" + grid, line + line, f"1: {line}2: {line}"]
    for text in texts:
        puzzles, _ = kind_of(task).find(text)
        assert [puzzle[1:] for puzzle in puzzles] == [("".join(rows), "")] * 2, text


LIFE = {"kind": "life", "grid": [4, 4], "symbols": "_01"}
GRIDS = ["0000011001100000", "1111111111111111", "0110100110010110"]


@pytest.mark.parametrize("text", [
    "\n".join(GRIDS), "\n\n".join("\n".join(re.findall("....", grid)) for grid in GRIDS), json.dumps(GRIDS)])
def test_a_grid_that_fits_the_one_before_it_answers_only_a_sudoku(text):
    """In Life no cell is empty: 0 and 1 are both given."""
    puzzles, _ = kind_of(LIFE).find(text)
    assert [puzzle[1:] for puzzle in puzzles] == [(grid, "") for grid in GRIDS]
    with pytest.raises(UserError, match="has 33 cells"):
        kind_of(LIFE).parse(" ".join(GRIDS[:2]))
    with pytest.raises(UserError, match="2 puzzles stand together"):
        kind_of(LIFE).find(json.dumps({"a": GRIDS[0], "b": GRIDS[1]}))


@pytest.mark.parametrize("task, question, answer", [
    (LIFE, GRIDS[1], GRIDS[0]), (Maze.new_task(3), "S # #   G", "Soo#ooooG"),
    ({"kind": "spaces", "grid": [2, 2], "symbols": "_ 1"}, " 1 1", "1 1 ")])
def test_names_in_json_say_which_is_the_answer(task, question, answer):
    """In JSON and in JSON lines, in any order, for any kind and any symbols."""
    record = {"id": 7, "Solution": answer, "question": question}
    lines = json.dumps(record) + "\r\n" + json.dumps(record) + "\n"
    for text, how in (lines, "one a line"), (json.dumps([record] * 2, indent=1), "from JSON"):
        puzzles, words = kind_of(task).find(text)
        assert puzzles == [(1, question, answer), (2, question, answer)] and words == f"2 puzzles, {how}"


@pytest.mark.parametrize("text, mazes", [
    ("S #\n # \n  G", 1), ("S #\n #\n  G\n", 1), ("S # #   G", 1), ("S.#\n.#.\n..G", 1), ("S █\n █ \n  E", 1),
    ("S # #   G\nS # #   G\n", 2)])
def test_mazes(text, mazes):
    puzzles, _ = kind_of(Maze.new_task(3)).find(text)
    assert [question for _, question, _ in puzzles] == ["S # #   G"] * mazes


@pytest.mark.parametrize("text", [
    "S 1\n 1 \n  G", "S       \n       G", "S  #\n    \n  G ", "S.#\n. .\n..G", "WSE\nW.E\nWGE"])
def test_other_drawings_are_told_what_a_maze_is(text):
    with pytest.raises(UserError, match="no maze: that is a square of the characters '# SG', wall"):
        kind_of(Maze.new_task(3)).find(text)
