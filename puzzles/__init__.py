"""What a puzzle is: its task, questions and answers as text and as tokens, its symmetries, and the one judge.

A task is a dict: "kind", "grid" ([rows, columns]) and "symbols", a character for each token (0: padding).
It stands in a dataset's manifest.json and a checkpoint's state["task"]. Questions and answers are tokens
[n, cells]. Each kind that is known has a file here, with its rules, solver, generator and symmetries.

Answers to other kinds are compared with the known answers, unless a script adds their rules to JUDGES, as
examples/coloring.py does.
"""
import math
import re
from typing import NamedTuple

import numpy as np

from puzzles.arc import arc_task
from puzzles.maze import MAZE, judge_maze, maze_symmetries, maze_task, num_paths, path_metrics
from puzzles.reader import find_puzzles
from puzzles.sudoku import judge_sudoku, num_solutions, sudoku_symmetries, sudoku_task
from puzzles.symmetries import check_symmetries, described_symmetries
from runtime.errors import UserError

IGNORE_LABEL = -100  # the same as in model.py, which needs torch

# {(cells, tokens): the task} of the official code's datasets. These store each version of an ARC task as a
# task of its own; the empty kind keeps the versions from voting.
OFFICIAL = {(81, 11): sudoku_task(9), (900, 12): arc_task(30) | {"kind": ""}}

# kinds whose grids and symbols are fixed: a function of the grid's rows that returns the task
TASKS = {"sudoku": sudoku_task, "maze": maze_task, "arc": arc_task}

# The rules: {kind: a function (task, questions, answers)}, which takes what judge() takes and returns the two
# arrays of a Judgement. A token is the place of its symbol in task["symbols"]: 1 is the empty cell, 2 the
# first symbol after it.
JUDGES = {"sudoku": judge_sudoku, "maze": judge_maze}

# kinds of JUDGES whose questions have several right answers, of which the label is one; Sudoku and mazes are
# not here: a Sudoku has one answer, and the paper's metric compares mazes with their labels
SEVERAL_ANSWERS = set()

# {kind: a function (questions, rows of the grid) that counts their solutions up to 2, or gives up: -1}
SOLVERS = {"sudoku": num_solutions, "maze": num_paths}

# {kind: a function (task, n, a random generator) that draws n Symmetries}; a task of another kind may
# describe its own, as prepare_csv.py does
SYMMETRIES = {"sudoku": sudoku_symmetries, "maze": maze_symmetries}
DRAWS = 256  # draws of a puzzle's symmetry, after which no further copy is expected


# ---------------------------------------------------------------------------------------------------------
# Tasks

def task_of(manifest, seq_len, vocab_size):
    """Returns the task in a dataset's manifest.json, checked. Raises UserError.

    Datasets of the official code have no manifest: their Sudokus and ARC's grids are known by their sizes.
    What is missing elsewhere: kind "", one row, the tokens' numbers as symbols. seq_len may be None for a new
    dataset, which must have a grid.
    """
    if "symbols" not in manifest:
        manifest = OFFICIAL.get((seq_len, vocab_size), manifest)
    kind = manifest.get("kind", "")
    grid = manifest.get("grid", seq_len and [1, seq_len])
    symbols = manifest.get("symbols", list(map(str, range(vocab_size))))
    is_pair = isinstance(grid, (list, tuple)) and list(map(type, grid)) == [int, int]
    if not is_pair or min(grid) < 1 or not all(isinstance(symbol, str) for symbol in symbols):
        raise UserError(f"manifest.json: grid {grid!r} must be [rows, columns], symbols {symbols!r} a string")
    text = "".join(symbols)
    if len(text) == len(symbols):
        symbols = text
    task = {"kind": kind, "grid": list(grid), "symbols": symbols}

    # each token has a symbol of its own, and the grid has the model's cells
    num_different = 1 + len(set(symbols[1:]))
    if not 2 <= vocab_size <= 256:
        raise UserError(f"{max(0, vocab_size - 1)} symbols: a dataset has from 1 to 255")
    if seq_len not in (None, math.prod(grid)):
        raise UserError(f"grid {grid} does not fit {seq_len} cells")
    if not len(symbols) == num_different == vocab_size:
        raise UserError(f"symbols {symbols!r} must be {vocab_size}, one for each token, all different")
    if kind in TASKS and task != TASKS[kind](grid[0]):
        raise UserError(f"grid {grid} and symbols {symbols!r} do not fit kind {kind}")
    if "symmetries" in manifest:
        task["symmetries"] = manifest["symmetries"]
    check_symmetries(task)
    return task


# ---------------------------------------------------------------------------------------------------------
# Text and tokens

def parse_question(task, text):
    """Returns the task with the grid of the one question in a text, and its tokens, int32 [cells].

    Raises UserError. Only a maze may have another grid than the task: models with attention take any number
    of cells.
    """
    found, _ = find_puzzles(task, text)
    if len(found) > 1:
        raise UserError(f"the text has {len(found)} puzzles")
    [(_, cells, _)] = found
    symbols = "".join(task["symbols"][1:])
    # the path is no part of a question
    if task["kind"] == "maze":
        symbols = MAZE[1:-1]
        task = maze_task(math.isqrt(len(cells)))
    check_text(task, cells, symbols, f"the puzzle {cells[:20]!r}")
    tokens = [task["symbols"].index(symbol, 1) for symbol in cells]
    return task, np.array(tokens, dtype=np.int32)


def tokens_of(task, puzzles, name):
    """Returns puzzles as tokens, uint8 [2, ..., cells], where 0 is a cell whose answer does not count.

    Args:
        task: the puzzles' task.
        puzzles: questions and answers, integers [n, cells], or [n, versions, cells]. They are tokens from 1
            on; what is below in an answer, as IGNORE_LABEL, does not count.
        name: the name of the puzzles in messages.

    Raises UserError for arrays that do not fit the task.
    """
    cells = math.prod(task["grid"])
    vocab_size = len(task["symbols"])
    try:
        tokens = np.maximum(puzzles, 0)
    except (TypeError, ValueError):
        raise UserError(f"{name}: questions and answers must be arrays of numbers, of one shape") from None
    if tokens.ndim not in (3, 4) or len(tokens) != 2 or tokens.shape[-1] != cells or not tokens.size:
        raise UserError(f"{name}: questions and answers of shape {tokens.shape[1:]}: must be [n, {cells}] "
                        f"for the grid {task['grid']}, with one puzzle at least")
    if tokens.max() >= vocab_size or tokens.dtype.kind not in "biu":
        raise UserError(f"{name}: tokens must be integers below vocab_size={vocab_size}")
    if tokens[0].min() < 1:
        raise UserError(f"{name}: tokens of questions count from 1; 0 is padding")
    return tokens.astype(np.uint8, copy=False)


def check_text(task, text, symbols, name):
    """Raises UserError unless a string has one of the symbols for each cell; name: its name in messages."""
    rows, columns = task["grid"]
    if not text or len(text) != rows * columns:
        # a spreadsheet takes a puzzle of digits for a number, and drops zeros or digits
        is_number = text.isdigit() and len(text) > rows * columns // 2 or re.fullmatch(r"\d.*E\+\d+", text)
        hint = " (did a spreadsheet read it as a number?)" if is_number else ""
        raise UserError(f"{name} has {len(text)} cells, not {rows}x{columns}{hint}")
    rest = text.lstrip(symbols)
    if rest:
        place = place_of(len(text) - len(rest), task)
        raise UserError(f"{name} has {rest[0]!r} in {place}: must be one of {symbols!r}")


def squeezed(text, symbols):
    """Returns a string without white space; if a space is one of the symbols, without line ends."""
    return "".join(text.splitlines() if " " in symbols else text.split())


def text_of(task, tokens):
    """Returns the symbols of tokens [cells] as a string."""
    return "".join(task["symbols"][token] for token in tokens)


def side_by_side(task, grids):
    """Returns a string: grids next to each other, as many as 120 characters hold.

    grids: list of (title, tokens [cells], which cells to mark with * [cells]).
    """
    # write the lines of each grid below its title
    blocks = []
    for title, tokens, marked in grids:
        cells = [" *"[int(mark)] + task["symbols"][token] + " " for token, mark in zip(tokens, marked)]
        lines = np.reshape(cells, task["grid"])
        blocks.append([title, *map("".join, lines)])

    # put as many blocks beside each other as fit
    width = max(len(line) for block in blocks for line in block) + 2
    blocks_per_line = max(1, 120 // width)
    text = ""
    for first in range(0, len(blocks), blocks_per_line):
        for lines in zip(*blocks[first:first + blocks_per_line]):
            line = "".join(part.ljust(width) for part in lines)
            text += line.rstrip() + "\n"
        text += "\n"
    return text


def place_of(cell, task):
    row, column = divmod(int(cell), task["grid"][1])
    return f"row {row + 1}, column {column + 1}"


# ---------------------------------------------------------------------------------------------------------
# Symmetries

def has_symmetries(task):
    """Returns whether copies() can make copies of the task's puzzles."""
    return task["kind"] in SYMMETRIES or "symmetries" in task


def check_attempts(task, attempts):
    """Raises UserError if a task's puzzles cannot be attempted so many times."""
    if attempts > 1 and not has_symmetries(task):
        raise UserError(f"eval_attempts={attempts}: no symmetries of this kind of puzzle, {task['kind']!r}, "
                        "are known: prepare_csv.py --dihedral or --permute_symbols makes a dataset that has "
                        "them; the versions of ARC's tasks vote, eval_versions says how many")


def copies(task, question, seed, number):
    """Yields different copies of a puzzle, (its Symmetries [1, ...], tokens [cells]), while there are more.

    They follow from (seed, number). No copy is the puzzle itself.

    Args:
        task: the puzzle's task, which has_symmetries.
        question: tokens [cells].
        seed: of the draws.
        number: the puzzle's, in its dataset or file.
    """
    # a checkpoint of earlier code may have symmetries that nobody checked
    check_symmetries(task)
    rng = np.random.default_rng([seed, number])
    draw = SYMMETRIES.get(task["kind"], described_symmetries)
    made = {question.astype(np.uint8).tobytes()}
    for _ in range(DRAWS):
        symmetries = draw(task, 1, rng)
        [copy] = symmetries.apply(question[None])
        if copy.tobytes() not in made:
            made.add(copy.tobytes())
            yield symmetries, copy


# ---------------------------------------------------------------------------------------------------------
# The judge

class Judgement(NamedTuple):
    """What the rules say of answers."""

    broken: np.ndarray  # which cells break a rule, bool [n, cells]
    solved: np.ndarray  # which answers are solutions, bool [n]


def judge(task, questions, answers):
    """Returns the Judgement of answers by their rules; None if the rules are not known.

    questions, answers: numpy arrays of tokens [n, cells]; one question [1, cells] will do for all answers.
    """
    if task["kind"] not in JUDGES:
        return None
    return Judgement(*JUDGES[task["kind"]](task, questions, answers))


def verdict(task, question, answer):
    """Returns in words whether an answer [cells] is a solution."""
    judgement = judge(task, question[None], answer[None])
    if judgement is None:
        return "not judged: the rules are not known"
    if judgement.solved[0]:
        return "a solution: all rules and givens kept"
    if judgement.broken.any():
        return f"{place_of(judgement.broken.argmax(), task)} of the answer breaks a rule"
    return "the answer is not a shortest path" if task["kind"] == "maze" else "the answer is no solution"


def solution_notes(task, questions):
    """Returns (solutions up to 2, -1 if not decided, and words if it is not one) of questions [n, cells]."""
    if task["kind"] not in SOLVERS:
        return [(1, "")] * len(questions)
    notes = []
    for question, count in zip(questions, SOLVERS[task["kind"]](questions, task["grid"][0])):
        words = {1: "", 2: "the puzzle has more than one solution", 0: "the puzzle has no solution",
                 -1: "not decided whether the puzzle has one solution: the search was too long"}[count]
        if count == 0:
            # two givens may break a rule
            clashes = judge(task, question[None], question[None]).broken[0] & (question > 1)
            words += f": {place_of(clashes.argmax(), task)} breaks a rule" if clashes.any() else ""
        notes.append((count, words))
    return notes


def count_correct(task, arrays):
    """Returns {name of a metric: how many puzzles}, for evaluations; the names depend on the task alone.

    surest_accuracy counts the surest answers that equal the labels. The rules decide valid_accuracy (kinds
    with several right answers), and path_valid and path_optimal (mazes). These count the last answers; with
    the prefix surest_ they count the surest answers.

    Args:
        task: the puzzles' task.
        arrays: inputs, labels, preds, surest_preds, tokens [n, cells]; labels are IGNORE_LABEL where they do
            not count.
    """
    inputs = arrays["inputs"]
    labels = arrays["labels"]
    correct = {}
    for prefix in "", "surest_":
        preds = arrays[prefix + "preds"]
        if task["kind"] in SEVERAL_ANSWERS:
            correct[prefix + "valid_accuracy"] = judge(task, inputs, preds).solved
        if task["kind"] == "maze":
            valid, optimal = path_metrics(inputs, preds)
            correct[prefix + "path_valid"] = valid
            correct[prefix + "path_optimal"] = optimal
    correct["surest_accuracy"] = equal_labels(arrays["surest_preds"], labels)
    return {name: float(is_correct.sum()) for name, is_correct in correct.items()}


def score(values):
    """Returns the share of puzzles that ranks evaluations, of {"eval/...": number}.

    For ARC it is the share of tasks that are solved in two tries. For kinds with several right answers it is
    the share of answers that keep the rules, for other kinds the share of answers that equal their labels.
    """
    names = ("eval/pass2", "eval/valid_accuracy", "eval/exact_accuracy")
    return next(values[name] for name in names if name in values)


def equal_labels(preds, labels):
    """Returns which answers are right in all labeled cells, of which there is one at least, bool [n].

    preds, labels: arrays or tensors [n, cells].
    """
    is_labeled = labels != IGNORE_LABEL
    is_right = (preds == labels) | ~is_labeled
    return is_right.all(1) & is_labeled.any(1)
