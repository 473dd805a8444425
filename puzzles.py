"""What differs by kind of puzzle, and the one place that judges answers.

A task is a dict: "kind", "grid" ([rows, columns]) and "symbols", a character for each token (0: padding).
It stands in a dataset's manifest.json and a checkpoint's state["task"]. Questions and answers are tokens
[n, cells].

Answers to kinds that are not known here are compared with the known answers. A branch in broken_cells
judges those of another kind by its rules; look, read, are_solutions and check_questions are for what else
differs.
"""
import math

import numpy as np
from configurator import UserError

IGNORED = -100  # the label of cells that no loss and no metric counts
BOXES = {4: (2, 2), 6: (2, 3), 9: (3, 3)}  # rows and columns of a box of Sudoku
SUDOKU, MAZE = " .123456789", "_# SGo"  # symbols
WALL, OPEN, START, GOAL, PATH = range(1, 6)  # tokens of a maze
LARGEST = 64  # cells in a row of a maze: solve() of prepare_maze.py has the bits of a word for them


def task_of(manifest, seq_len, vocab_size):
    """The task in a dataset's manifest.json, checked. Raises UserError.

    What is missing, as in datasets of the official code: kind "", one row, the tokens' numbers as symbols.
    """
    numbers = [str(token) for token in range(vocab_size)]
    task = {"kind": "", "grid": [1, seq_len], "symbols": numbers}
    task |= {key: manifest[key] for key in task if key in manifest}
    if all(len(symbol) == 1 for symbol in task["symbols"]):
        task["symbols"] = "".join(task["symbols"])
    kind, grid, symbols = task.values()
    if len(grid) != 2 or math.prod(grid) != seq_len:
        raise UserError(f"grid {list(grid)} does not fit {seq_len} cells")
    if len(symbols) != vocab_size or len(set(symbols[1:])) != vocab_size - 1:
        raise UserError(f"symbols {symbols!r} must be {vocab_size}, one for each token, all different")
    if "\ufffd" in symbols or not "".join(symbols).isprintable():
        raise UserError(f"symbols {symbols!r} must be characters that can be printed")
    size = grid[0] if grid[0] == grid[1] else 0
    expected = MAZE if 0 < size <= LARGEST else ""
    if kind == "sudoku":
        expected = SUDOKU[:size + 2] if size in BOXES else ""
    if kind in ("sudoku", "maze") and symbols != expected:
        raise UserError(f"grid {list(grid)} and symbols {symbols!r} are not those of kind {kind}")
    return task


# What differs by kind.

def look(task):
    """How to draw a task and how the page of play.py speaks of it, as a dict for JSON.

    empty: the symbol of a cell that is not given; symbols: of questions; box: rows and columns between thick
    lines; names, drawn: of symbols; typed: what stands for symbols; once: symbols that a question has once.
    """
    about = dict(
        title=task["kind"], empty=task["symbols"][1], symbols=task["symbols"][1:], box=task["grid"],
        names={".": "empty"}, drawn={}, typed={}, once="", goal="", failed="not solved")
    if task["kind"] == "sudoku":
        about |= dict(title="Sudoku", box=BOXES[task["grid"][0]], typed={"0": "."})
    elif task["kind"] == "maze":
        about |= dict(
            title="mazes", empty=" ", symbols="# SG", drawn={"o": "●"}, typed={".": " "}, once="SG",
            names={"#": "wall", " ": "open", "S": "start", "G": "goal", "o": "path"},
            goal="Find a shortest path from S to G.", failed="not a shortest path")
    return about


def read(task, text):
    """The task with the grid of a typed question, and its cells as symbols.

    Only a maze may have another grid than the task: models with attention take any number of cells.
    """
    if task["kind"] == "maze":
        lines = text.strip("\r\n").splitlines()
        width = max(map(len, lines), default=0)
        cells = "".join(line.ljust(width) for line in lines)  # editors strip spaces at the end of a line
        return task | {"grid": [math.isqrt(len(cells))] * 2}, cells
    cells = "".join(text.splitlines() if " " in task["symbols"][1:] else text.split())
    return task, cells.replace("0", ".") if task["kind"] == "sudoku" else cells


def broken_cells(task, questions, answers):
    """Which cells of the answers break a rule, bool [n, cells]; None if the kind's rules are not known."""
    if task["kind"] == "maze":
        return (answers != questions) & ~((questions == OPEN) & (answers == PATH))
    if task["kind"] == "sudoku":
        size = task["grid"][0]
        broken = (answers < 2) | ((questions > 1) & (answers != questions))
        for unit in units_of(size):
            digit_in_unit = (np.arange(len(answers))[:, None] * size + unit) * (size + 2) + answers
            broken |= np.bincount(digit_in_unit.ravel())[digit_in_unit] > 1
        return broken
    return None


def units_of(size):
    """The numbers of each cell's row, column and box in a Sudoku, [cells] each."""
    box_rows, box_columns = BOXES[size]
    row, column = np.divmod(np.arange(size * size), size)
    return row, column, row // box_rows * box_rows + column // box_columns


def are_solutions(task, questions, answers):
    """Which answers keep all rules, or are a shortest path, bool [n]; None if the rules are not known."""
    if task["kind"] == "maze":
        steps, shortest = path_steps(task, questions, answers)
        return (steps > 0) & (steps == shortest)
    broken = broken_cells(task, questions, answers)
    return None if broken is None else ~broken.any(axis=1)


def is_correct(task, inputs, labels, preds):
    """Which answers are correct: {name: bool [n]}; the names depend on the task alone.

    "accuracy": all scored cells are right, and there is one; for mazes also "path_valid" and "path_optimal".
    inputs, labels (-100: not scored), preds: tokens [n, cells].
    """
    scored = labels != IGNORED
    correct = {"accuracy": ((preds == labels) | ~scored).all(axis=1) & scored.any(axis=1)}
    if task["kind"] == "maze":
        valid, optimal = path_metrics(inputs, labels, preds, task["grid"][0])
        correct |= {"path_valid": valid, "path_optimal": optimal}
    return correct


def verdict(task, question, answer):
    """Whether an answer [cells] is a solution, in words."""
    question, answer = question[None], answer[None]
    if task["kind"] == "maze":
        (steps,), (shortest,) = path_steps(task, question, answer)
        if not steps:
            return "not a path from S to G"
        if steps > shortest:
            return f"a path of {steps} steps; the shortest has {shortest}"
        return f"a shortest path, {steps} steps"
    broken = broken_cells(task, question, answer)
    if broken is None:
        return "not judged: the rules are not known"
    if broken.any():
        return f"not a solution: {broken.sum()} cells break a rule"
    return "a solution: all rules and givens kept"


def check_questions(task, questions, places):
    """A warning if a question has several solutions, else "". places: a prefix of messages for each.

    Raises UserError for the first question without a solution.
    """
    size, boards = task["grid"][0], questions
    if task["kind"] == "sudoku":
        import prepare_sudoku as script
        boards = questions - 1
        counts = script.count_solutions(script.candidates_of(boards, size), size, 2)
    elif task["kind"] == "maze":
        import prepare_maze as script
        if size > LARGEST:
            raise UserError(f"{places[0]}the maze has {size} rows; {LARGEST} are the most")
        has_ends = ((questions == START).sum(axis=1) == 1) & ((questions == GOAL).sum(axis=1) == 1)
        counts = has_ends & (script.solve(questions, size)[1] > 0)
    else:
        return ""
    for i in np.flatnonzero(counts == 0)[:1]:
        raise UserError(places[i] + script.explain(boards[i], boards[i], size))
    several = np.flatnonzero(counts > 1)
    return f"{places[several[0]]}the puzzle has more than one solution" if len(several) else ""


# For all kinds.

def given_cells(task, question):
    """Which cells of a question are given, bool [cells]."""
    return question != task["symbols"].index(look(task)["empty"], 1)


def check_rows(task, inputs, labels):
    """Raises UserError for rows [n, cells] that cannot be in a dataset of the task (see write_dataset)."""
    shape, end = (len(inputs), math.prod(task["grid"])), len(task["symbols"])
    for name, array, lowest in ("inputs", inputs, 0), ("labels", labels, 1):
        if array.dtype.kind not in "iu" or array.shape != shape:
            raise UserError(f"{name} must be integers of shape {shape}, not {array.dtype} of {array.shape}")
        wrong = ((array < lowest) | (array >= end)) & ((array != IGNORED) | (name == "inputs"))
        if wrong.any():
            raise UserError(f"{name} hold {array[wrong][0]}: must be {lowest} to {end - 1}, where 0 is the "
                            f"padding of inputs, or {IGNORED} for labels that do not count")
    scored = (labels != IGNORED).all(axis=1)
    inputs, labels = inputs[scored], labels[scored].astype(np.int64)
    broken = broken_cells(task, inputs, labels)
    if broken is not None and broken.any():
        i = int(broken.any(axis=1).argmax())
        question, answer = (text_of(task, rows[i]) for rows in (inputs, labels))
        raise UserError(f"the answer {answer!r} to {question!r} breaks a rule of kind {task['kind']}: "
                        "correct it, or choose another kind")


def parse(task, text):
    """The task with the grid of this question, and the question's tokens, int32 [cells]. Raises UserError."""
    task, cells = read(task, text)
    rows, columns = task["grid"]
    if len(cells) != rows * columns or not cells:
        fitting = "as many rows as columns" if task["kind"] == "maze" else f"{rows}x{columns}"
        start = text.strip()[:20]
        raise UserError(f"the puzzle {start!r} has {len(cells)} cells: it must have {fitting}")
    return task, tokens_of(task, cells, look(task)["symbols"], "the puzzle")


def tokens_of(task, cells, allowed, name):
    """The tokens [cells] of a text. Raises UserError for the first symbol that is not in `allowed`."""
    for i, symbol in enumerate(cells):
        if symbol not in allowed:
            row, column = divmod(i, task["grid"][1])
            raise UserError(f"row {row + 1}, column {column + 1} of {name} is {symbol!r}: "
                            f"must be one of {allowed!r}")
    return np.array([task["symbols"].index(symbol, 1) for symbol in cells], dtype=np.int32)


def text_of(task, tokens):
    return "".join(task["symbols"][token] for token in tokens)


def guess(cells, vocab_size, text=""):
    """The task of a model without one. Raises UserError if it is neither a Sudoku nor a maze.

    cells: of a question; 0 if the model takes any number. text: a question, to tell a 4x4 maze from a Sudoku.
    """
    size, digits = math.isqrt(cells), vocab_size - 2
    may_be_maze = vocab_size == len(MAZE) and size * size == cells
    if digits in BOXES and cells in (0, digits ** 2) and not (may_be_maze and set(text) & set("#SG")):
        return dict(kind="sudoku", grid=[digits] * 2, symbols=SUDOKU[:vocab_size])
    if may_be_maze:
        return dict(kind="maze", grid=[size] * 2, symbols=MAZE)
    raise UserError(f"the model takes {cells} cells of {vocab_size} tokens: neither a Sudoku nor a maze")


def path_steps(task, questions, answers):
    """Steps of each answer's path, 0 if it is none, and of the shortest paths: two int arrays [n]."""
    import prepare_maze
    size = task["grid"][0]
    valid, _ = path_metrics(questions, answers, answers, size)
    return valid * ((answers == PATH).sum(axis=1) + 1), prepare_maze.solve(questions, size)[1]


def path_metrics(inputs, labels, preds, size):
    """Which answers to mazes are a path from S to G, and which a shortest one: two bool arrays [n].

    inputs, labels (a shortest path each), preds: tokens [n, size * size]. In a path, S and G are where the
    question has them, every "o" is on a cell that is open in the question, and the "o" form one line from S
    to G that does not touch itself: no way from S to G along it leaves out any of its cells.
    """
    import prepare_maze
    start, goal, path = inputs == START, inputs == GOAL, preds == PATH
    fits = ((preds == START) == start) & ((preds == GOAL) == goal) & (~path | (inputs == OPEN))
    valid = fits.all(axis=1) & (start.sum(axis=1) == 1) & (goal.sum(axis=1) == 1)
    line = np.where(path, OPEN, np.where(start | goal, inputs, WALL))
    valid &= prepare_maze.solve(line, size)[1] == path.sum(axis=1) + 1
    return valid, valid & (path.sum(axis=1) == (labels == PATH).sum(axis=1))


def label_notes(train, test):
    """Lines for the log of these Datasets: whether training labels were turned with their mazes."""
    size = math.isqrt(test.seq_len)
    if test.vocab_size != len(MAZE) or size * size != test.seq_len or size > LARGEST:
        return []
    import prepare_maze
    shares = []  # of the labels that follow the rule of prepare_maze.solve, in at most 1000
    for dataset in train, test:
        indices = dataset.subset(1000)
        mazes = dataset.test_batch(indices, len(indices))
        answers, _ = prepare_maze.solve(mazes["inputs"], size)
        shares.append((answers == mazes["labels"]).all(axis=1).mean())
    if not shares[0] < 0.95 < shares[1]:
        return []
    return [f"{shares[1]:.0%} of the test labels take the first of down, left, right and up that is "
            f"shortest, but only {shares[0]:.0%} of the training labels: turned with their mazes, they "
            "teach eight rules; prepare_maze.py solves each copy anew"]


def dihedral(size):
    """The 8 turned squares as indices [8, cells], in the official builder's order."""
    square = np.arange(size * size).reshape(size, size)
    turned = [np.rot90(square, k) for k in range(4)]
    reflected = [np.fliplr(square), np.flipud(square), square.T, np.fliplr(turned[1])]
    return np.stack(turned + reflected).reshape(8, -1)


def count_correct(task, arrays, attempts):
    """{name of a metric: how many puzzles} of the last and the surest answers; the names depend on no puzzle.

    arrays: inputs, labels, preds, surest_preds [n, cells]; attempts: each attempt's surest answers, likewise.
    """
    last, surest, *tried = [is_correct(task, arrays["inputs"], arrays["labels"], preds)
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
