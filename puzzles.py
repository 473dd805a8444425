"""What differs by kind of puzzle, and the one place that judges answers.

A puzzle is described by the dict of its dataset's manifest.json: `kind`, `grid` (rows, columns) and
`symbols`, a character for each token (0 is padding). Questions and answers are tokens [n, cells].

Answers to another kind are compared with the known ones. If it has rules, a branch in broken_cells lets
solve.py and play.py mark cells and recognize solutions.
"""
import math

import numpy as np
from configurator import UserError

from data import IGNORED

BOXES = {4: (2, 2), 6: (2, 3), 9: (3, 3)}  # rows and columns of a box of Sudoku
SUDOKU, MAZE = " .123456789", "_# SGo"  # symbols
WALL, OPEN, START, GOAL, PATH = range(1, 6)  # tokens of a maze


def is_correct(manifest, inputs, labels, preds):
    """Which answers are correct: {name: bool [n]}; the names depend on the manifest alone.

    "accuracy": all scored cells are right, and there is one; for mazes also "path_valid" and "path_optimal".
    manifest: {} for a dataset without one. inputs, labels (-100: not scored), preds: tokens [n, cells].
    """
    scored = labels != IGNORED
    correct = {"accuracy": ((preds == labels) | ~scored).all(axis=1) & scored.any(axis=1)}
    if manifest.get("kind") == "maze":
        valid, optimal = path_metrics(inputs, labels, preds, manifest["grid"])
        correct |= {"path_valid": valid, "path_optimal": optimal}
    return correct


def broken_cells(puzzle, questions, answers):
    """Which cells of the answers break a rule, bool [n, cells]; None if the kind's rules are not known."""
    if puzzle["kind"] == "maze":
        return (answers != questions) & ~((questions == OPEN) & (answers == PATH))
    if puzzle["kind"] == "sudoku":
        size, (box_rows, box_columns) = puzzle["grid"][0], puzzle["box"]
        row, column = np.divmod(np.arange(size * size), size)
        broken = (answers < 2) | ((questions > 1) & (answers != questions))
        for unit in (row, column, row // box_rows * box_rows + column // box_columns):
            digit_in_unit = (np.arange(len(answers))[:, None] * size + unit) * (size + 2) + answers
            broken |= np.bincount(digit_in_unit.ravel())[digit_in_unit] > 1
        return broken
    return None


def are_solutions(puzzle, questions, answers):
    """Which answers keep all rules, or are a shortest path, bool [n]; None if the rules are not known."""
    if puzzle["kind"] == "maze":
        steps, shortest = path_steps(puzzle, questions, answers)
        return (steps > 0) & (steps == shortest)
    broken = broken_cells(puzzle, questions, answers)
    return None if broken is None else ~broken.any(axis=1)


def verdict(puzzle, question, answer):
    """Whether an answer [cells] is a solution, in words."""
    question, answer = question[None], answer[None]
    if puzzle["kind"] == "maze":
        (steps,), (shortest,) = path_steps(puzzle, question, answer)
        if steps == shortest:
            return f"a shortest path, {steps} steps"
        return f"a path of {steps} steps; the shortest has {shortest}" if steps else "not a path from S to G"
    broken = broken_cells(puzzle, question, answer)
    if broken is None:
        return "not judged: the rules are not known"
    count = broken.sum()
    return f"not a solution: {count} cells break a rule" if count else "a solution: all rules and givens kept"


def check_questions(puzzle, questions, places):
    """A warning if the questions are unlike those of training, else "".

    places: a prefix of messages for each question. Raises UserError for the first without a solution.
    """
    size, boards = puzzle["grid"][0], questions
    if puzzle["kind"] == "sudoku":
        import prepare_sudoku as script
        boards = questions - 1
        counts = script.count_solutions(script.candidates_of(boards, size), size, 2)
        unusual, reason = counts > 1, "more than one solution"
    elif puzzle["kind"] == "maze":
        import prepare_maze as script
        if size > script.LARGEST:
            raise UserError(f"{places[0]}the maze has {size} rows; {script.LARGEST} are the most")
        has_ends = ((questions == START).sum(axis=1) == 1) & ((questions == GOAL).sum(axis=1) == 1)
        counts = has_ends * script.solve(questions, size)[1]
        unusual, reason = (questions == WALL).mean(axis=1) < 0.1, "hardly any walls"
    else:
        return ""
    if not counts.all():
        i = int(counts.argmin())
        raise UserError(places[i] + script.explain(boards[i], boards[i], size))
    if not unusual.any():
        return ""
    i = int(unusual.argmax())
    others = f" (as have {unusual.sum() - 1} others)" if unusual.sum() > 1 else ""
    cells = f"{(questions[i] != empty_token(puzzle)).sum()} of {size * size} cells are given"
    return f"{places[i]}the puzzle has {reason}{others}, unlike those of training: {cells}"


def question_symbols(puzzle):
    return puzzle["symbols"][1:PATH if puzzle["kind"] == "maze" else None]


def empty_token(puzzle):  # of a cell that is not given
    return OPEN if puzzle["kind"] == "maze" else 1


def parse(puzzle, text):
    """The puzzle with the grid of this question, and the question's tokens, int32 [cells]. Raises UserError.

    Only a maze may have another grid than puzzle: models with attention take any number of cells.
    """
    if puzzle["kind"] == "maze":
        lines = text.strip("\r\n").splitlines()
        width = max(map(len, lines), default=0)
        cells = "".join(line.ljust(width) for line in lines)  # editors strip spaces at the end of a line
        puzzle = puzzle | {"grid": [math.isqrt(len(cells))] * 2}
    elif puzzle["kind"] == "sudoku":
        cells = "".join(text.split()).replace("0", ".")
    else:
        cells = "".join(text.splitlines())
    rows, columns = puzzle["grid"]
    if len(cells) != rows * columns or not cells:
        fitting = "as many rows as columns" if puzzle["kind"] == "maze" else f"{rows}x{columns}"
        raise UserError(f"the puzzle {text.strip()[:20]!r} has {len(cells)} cells: it must have {fitting}")
    return puzzle, tokens_of(puzzle, cells, question_symbols(puzzle), "the puzzle")


def tokens_of(puzzle, cells, allowed, name):
    """The tokens [cells] of a text. Raises UserError for the first symbol that is not in `allowed`."""
    for i, symbol in enumerate(cells):
        if symbol not in allowed:
            row, column = divmod(i, puzzle["grid"][1])
            raise UserError(f"row {row + 1}, column {column + 1} of {name} is {symbol!r}: "
                            f"must be one of {allowed!r}")
    return np.array([puzzle["symbols"].index(symbol, 1) for symbol in cells], dtype=np.int32)


def text_of(puzzle, tokens):
    return "".join(puzzle["symbols"][token] for token in tokens)


def guess(cells, vocab_size, text=""):
    """The puzzle of a model without a manifest. Raises UserError if it is neither a Sudoku nor a maze.

    cells: of a question; 0 if the model takes any number. text: a question, to tell a 4x4 maze from a Sudoku.
    """
    size, digits = math.isqrt(cells), vocab_size - 2
    may_be_maze = vocab_size == len(MAZE) and size * size == cells
    if digits in BOXES and cells in (0, digits ** 2) and not (may_be_maze and set(text) & set("#SG")):
        return dict(kind="sudoku", grid=[digits] * 2, box=BOXES[digits], symbols=SUDOKU[:vocab_size])
    if may_be_maze:
        return dict(kind="maze", grid=[size] * 2, symbols=MAZE)
    raise UserError(f"the model takes {cells} cells of {vocab_size} tokens: neither a Sudoku nor a maze")


def path_steps(puzzle, questions, answers):
    """Steps of each answer's path, 0 if it is none, and of the shortest paths: two int arrays [n]."""
    import prepare_maze
    valid, _ = path_metrics(questions, answers, answers, puzzle["grid"])
    return valid * ((answers == PATH).sum(axis=1) + 1), prepare_maze.solve(questions, puzzle["grid"][0])[1]


def path_metrics(inputs, labels, preds, grid):
    """Which answers to mazes are a path from S to G, and which a shortest one: two bool arrays [n].

    inputs, labels (a shortest path each), preds: tokens [n, cells]; grid: (rows, columns). In a path, S and G
    are where the question has them, every "o" is on a cell that is open in the question, and the "o" form one
    line from S to G: each touches two other cells of the line, S and G touch one. Stray cells, gaps, forks
    and rings break a path.
    """
    n, (rows, columns) = len(inputs), grid
    size = (rows + 2) * (columns + 2)  # with a border, so that a step beyond an edge ends there
    inputs, preds = (np.pad(tokens.reshape(n, *grid), ((0, 0), (1, 1), (1, 1))).reshape(n, size)
                     for tokens in (inputs, preds))
    start, goal, path = inputs == START, inputs == GOAL, preds == PATH
    line = path | start | goal
    steps = np.array([-columns - 2, -1, 1, columns + 2])
    touching = sum(np.roll(line, step, axis=1).astype(np.uint8) for step in steps)
    fits = ((preds == START) == start) & ((preds == GOAL) == goal) & (~path | (inputs == OPEN))
    fits &= np.where(path, touching == 2, (touching == 1) | ~(start | goal))
    valid = fits.all(axis=1) & (start.sum(axis=1) == 1) & (goal.sum(axis=1) == 1)
    remaining, position = line[valid], start[valid].argmax(axis=1)
    n = np.arange(len(remaining))
    for _ in range(int(remaining.sum(axis=1).max(initial=0))):  # erases the line from S; a ring remains
        remaining[n, position] = False
        onward = remaining[n[:, None], position[:, None] + steps]
        position = position + steps[onward.argmax(axis=1)] * onward.any(axis=1)
    valid[valid] = ~remaining.any(axis=1)
    return valid, valid & (path.sum(axis=1) == (labels == PATH).sum(axis=1))


def count_correct(manifest, arrays, attempts):
    """{name of a metric: how many puzzles} of the last and the surest answers; the names depend on no puzzle.

    arrays: inputs, labels, preds, surest_preds [n, cells]; attempts: each attempt's surest answers, likewise.
    """
    last, surest, *tried = [is_correct(manifest, arrays["inputs"], arrays["labels"], preds)
                            for preds in (arrays["preds"], arrays["surest_preds"], *attempts)]
    found = {name: solved for name, solved in last.items() if name != "accuracy"}  # which the model counts
    found |= {"surest_" + name: solved for name, solved in surest.items()}
    if len(tried) > 1:
        found["any_accuracy"] = np.any([correct["accuracy"] for correct in tried], axis=0)
    return {name: float(solved.sum()) for name, solved in found.items()}


def side_by_side(grids, symbols, rows, columns):
    """A text: grids next to each other, as many as 120 characters hold.

    grids: [(title, tokens, which cells to mark with *)], each with `rows` x `columns` cells.
    """
    width = max(3 * columns, *(len(title) for title, _, _ in grids)) + 2
    per_line, lines = max(1, 120 // width), []
    for j in range(0, len(grids), per_line):
        shown = grids[j:j + per_line]
        lines.append("".join(title.ljust(width) for title, _, _ in shown))
        for cells in np.arange(rows * columns).reshape(rows, columns):
            texts = [" ".join(("*" if marked[k] else " ") + symbols[tokens[k]] for k in cells)
                     for _, tokens, marked in shown]
            lines.append("".join(text.ljust(width) for text in texts))
        lines.append("")
    return "\n".join(line.rstrip() for line in lines)
