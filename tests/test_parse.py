"""puzzles.text.parse: a text is read in one of its two forms, or refused."""
import re

import pytest

from puzzles import kind_of
from puzzles.maze import Maze
from puzzles.sudoku import Sudoku
from puzzles.text import parse
from runtime.errors import UserError

QUESTION = "12..34.........1"
GRID = "12..\n34..\n....\n...1\n"
FRAME = "+----+----+\n| 12 | .. |\n| 34 | .. |\n|====|====|\n| .. | .. |\n| .. | .1 |\n+----+----+\n"


def questions_of(task, text):
    """Returns the questions in a text, {line: cells}, as texts."""
    return {line: kind_of(task).text(tokens) for line, tokens in parse(task, text).items()}


@pytest.mark.parametrize("text, lines", [
    (FRAME + "\n" + GRID, [2, 9]),
    (f"{QUESTION}\r\n{GRID} \n{' '.join(QUESTION)}", [1, 2, 7])])
@pytest.mark.parametrize("sign", ".0")
def test_a_puzzle_is_a_line_or_a_line_for_each_row(text, lines, sign):
    assert questions_of(Sudoku.new_task(4), text.replace(".", sign)) == dict.fromkeys(lines, QUESTION)


@pytest.mark.parametrize("text, where", [
    ("---+---\n", "no puzzle"), (QUESTION.replace("2", "5"), "line 1, "), ("my puzzle\n" + GRID, "line 1, "),
    (GRID.replace("34..", "34."), "line 2, "), (GRID + "....\n" + GRID, "line 5, ")])
def test_what_has_neither_form_is_refused_with_its_line(text, where):
    with pytest.raises(UserError, match=f"^{where}.*a puzzle is a line of 16 cells, or 4 lines of 4 with"):
        parse(Sudoku.new_task(4), text)


@pytest.mark.parametrize("sign", "_ |")  # signs of empty cells, white space and rulers
def test_a_sign_that_is_a_symbol_is_a_cell(sign):
    task = {"kind": "mine", "grid": [3, 3], "symbols": f"\0{sign}#"}
    rows = [f"{sign}#{sign}", sign * 3, f"#{sign}{sign}"]
    for text in "".join(rows), "\n".join(rows):
        assert questions_of(task, text) == {1: "".join(rows)}


def test_a_dot_is_an_open_cell_of_a_maze_and_its_path_is_no_question():
    task = Maze.new_task(3)
    for text in "S #\n # \n  G", "S.#\n.#.\n..G", "S # #   G":
        assert questions_of(task, text) == {1: "S # #   G"}
    with pytest.raises(UserError, match=re.escape("of '# SG'")):
        parse(task, "Soo#ooooG")
