"""What differs by kind of puzzle, the one place that judges answers, and the solvers.

A task is a dict: "kind", "grid" ([rows, columns]) and "symbols", a character for each token (0: padding).
It stands in a dataset's manifest.json and a checkpoint's state["task"]. Questions and answers are tokens
[n, cells].

Answers to kinds that are not known here are compared with the known answers. RULES holds the rules of those
that are known; a script may add a kind to it, as examples/coloring.py does.
"""
import math
from typing import NamedTuple

import numpy as np

from configurator import UserError

IGNORE_LABEL = -100  # the label of cells that no loss and no metric counts

# Sudoku: token 1 is an empty cell, d + 1 the digit d
SUDOKU = " .123456789"  # symbols
BOXES = {4: (2, 2), 6: (2, 3), 9: (3, 3)}  # rows and columns of a box
BOARDS = 4096  # in the solver at a time: as many as stay in the processor's cache

# mazes
MAZE = "_# SGo"  # symbols
WALL, OPEN, START, GOAL, PATH = range(1, 6)  # tokens
LARGEST_MAZE = 64  # cells in a row: solve_mazes packs them into the bits of a word

# ARC: token 1 is the edge below and on the right of a grid, c + 2 the colour c
ARC = " |0123456789"  # symbols
EDGE = 1  # token
COLOUR = 2  # token of colour 0
# the colours 0 to 9 as everybody draws them
COLOURS = (
    "#000000",  # black
    "#0074d9",  # blue
    "#ff4136",  # red
    "#2ecc40",  # green
    "#ffdc00",  # yellow
    "#aaaaaa",  # grey
    "#f012be",  # magenta
    "#ff851b",  # orange
    "#7fdbff",  # light blue
    "#870c25",  # maroon
)


# ---------------------------------------------------------------------------------------------------------
# Tasks

def task_of(manifest, seq_len, vocab_size):
    """Returns the task in a dataset's manifest.json, checked. Raises UserError.

    What is missing, as in datasets of the official code: kind "", one row, the tokens' numbers as symbols.
    """
    if not 2 <= vocab_size <= 256:
        raise UserError(f"{vocab_size - 1} symbols: a dataset has from 1 to 255")
    kind = manifest.get("kind", "")
    grid = list(manifest.get("grid", [1, seq_len]))
    symbols = manifest.get("symbols", list(map(str, range(vocab_size))))
    text = "".join(symbols)
    if len(text) == len(symbols):
        symbols = text

    # the grid has the model's cells
    if len(grid) != 2 or math.prod(grid) != seq_len:
        raise UserError(f"grid {grid} does not fit {seq_len} cells")

    # each token has a symbol of its own
    num_different = len(set(symbols[1:]))
    if len(symbols) != vocab_size or num_different != vocab_size - 1:
        raise UserError(f"symbols {symbols!r} must be {vocab_size}, one for each token, all different")
    if "\ufffd" in text or not text.isprintable():
        raise UserError(f"symbols {symbols!r} must be characters that can be printed")

    # these kinds have fixed symbols
    task = {"kind": kind, "grid": grid, "symbols": symbols}
    known_tasks = {"sudoku": sudoku_task, "maze": maze_task, "arc": arc_task}
    if kind in known_tasks and task != known_tasks[kind](grid[0]):
        raise UserError(f"grid {grid} and symbols {symbols!r} do not fit kind {kind}")
    return task


def sudoku_task(size):
    symbols = SUDOKU[:size + 2] if size in BOXES else ""
    return {"kind": "sudoku", "grid": [size, size], "symbols": symbols}


def maze_task(size):
    symbols = MAZE if size <= LARGEST_MAZE else ""
    return {"kind": "maze", "grid": [size, size], "symbols": symbols}


def arc_task(side):
    return {"kind": "arc", "grid": [side, side], "symbols": ARC}


class Appearance(NamedTuple):
    """How to draw a kind of puzzle, and how the page of play.py speaks of it."""

    title: str  # name of such puzzles
    empty: str  # symbol of a cell that is not given
    symbols: str  # symbols that a question may have
    box: tuple  # rows and columns between thick lines
    names: dict = {".": "empty"}  # {symbol: its name}
    palette: dict = {}  # {symbol: the colour of its cells}
    drawn: dict = {}  # {symbol: the character that stands for it on the page}
    typed: dict = {}  # {character: the symbol that it means where it is typed}
    once: str = ""  # symbols that a question has once
    goal: str = ""  # what is to be done, as a sentence
    failed: str = "not solved"  # verdict on a wrong answer


def appearance(task):
    """Returns the Appearance of a task."""
    symbols = task["symbols"][1:]
    rows = task["grid"][0]
    if task["kind"] == "sudoku":
        return Appearance("Sudoku", ".", symbols, BOXES[rows], typed={"0": "."})
    if task["kind"] == "maze":
        return Appearance(
            "mazes", " ", "# SG", task["grid"],
            names={"#": "wall", " ": "open", "S": "start", "G": "goal", "o": "path"},
            palette={"#": "#4d4d4d", "o": "#bfbfbf"},
            drawn={"o": "●"},
            typed={".": " "},
            once="SG",
            goal="Find a shortest path from S to G.",
            failed="not a shortest path")
    palette = dict(zip("0123456789", COLOURS)) if task["kind"] == "arc" else {}
    return Appearance(task["kind"], symbols[0], symbols, task["grid"], palette=palette)


# ---------------------------------------------------------------------------------------------------------
# Questions as text

def parse_question(task, text):
    """Returns the task with the grid of a typed question, and its tokens, int32 [cells]. Raises UserError.

    Only a maze may have another grid than the task: models with attention take any number of cells.
    """
    allowed = appearance(task).symbols
    if task["kind"] == "maze":
        # editors strip spaces at the end of a line
        lines = text.strip("\r\n").splitlines()
        width = max(map(len, lines), default=0)
        cells = "".join(line.ljust(width) for line in lines)
        task = maze_task(min(math.isqrt(len(cells)), LARGEST_MAZE))
    else:
        words = text.splitlines() if " " in allowed else text.split()
        cells = "".join(words)
    if task["kind"] == "sudoku":
        cells = cells.replace("0", ".")
    rows, columns = task["grid"]
    if not cells or len(cells) != rows * columns:
        raise UserError(f"the puzzle {text.strip()[:20]!r} has {len(cells)} cells, not {rows}x{columns}")

    # the first wrong symbol
    rest = cells.lstrip("".join(allowed))
    if rest:
        place = place_of(len(cells) - len(rest), task)
        raise UserError(f"{place} of the puzzle is {rest[0]!r}: "
                        f"must be one of {allowed!r}")
    tokens = [task["symbols"].index(symbol, 1) for symbol in cells]
    return task, np.array(tokens, dtype=np.int32)


def text_of(task, tokens):
    return "".join(task["symbols"][token] for token in tokens)


def side_by_side(grids, symbols, rows, columns):
    """Returns a text: grids next to each other, as many as 120 characters hold.

    Args:
        grids: list of (title, tokens [cells], which cells to mark with * [cells]).
        symbols: a character for each token.
        rows, columns: of each grid.
    """
    # the lines of each grid, below its title
    blocks = []
    for title, tokens, marked in grids:
        cells = []
        for token, is_marked in zip(tokens, marked):
            mark = "*" if is_marked else " "
            cells.append(mark + symbols[token] + " ")
        lines = np.reshape(cells, (rows, columns))
        blocks.append([title, *map("".join, lines)])

    # blocks of the same width in one line
    width = max(len(line) for block in blocks for line in block) + 2
    blocks_per_line = max(1, 120 // width)
    text = ""
    for first in range(0, len(blocks), blocks_per_line):
        for lines in zip(*blocks[first:first + blocks_per_line]):
            line = "".join(part.ljust(width) for part in lines)
            text += line.rstrip() + "\n"
        text += "\n"
    return text


# ---------------------------------------------------------------------------------------------------------
# Rules

def broken_in_sudoku(task, questions, answers):
    """Returns which cells are empty, differ from a given, or share a unit with an equal digit, bool."""
    changed = (questions > 1) & (answers != questions)
    broken = (answers < 2) | changed

    # no digit stands twice in a row, a column or a box
    size = task["grid"][0]
    box_rows, box_columns = BOXES[size]
    row, column = np.divmod(np.arange(size * size), size)
    box = row // box_rows * box_rows + column // box_columns
    first_unit = np.arange(len(answers))[:, None] * size
    for unit in row, column, box:
        token_in_unit = (first_unit + unit) * (size + 2) + answers  # a number for each unit and token
        counts = np.bincount(token_in_unit.ravel())
        broken |= counts[token_in_unit] > 1
    return broken


def broken_in_maze(task, questions, answers):
    """Returns which cells differ from the question's, but for the path on open cells, bool."""
    return (answers != questions) & ~((questions == OPEN) & (answers == PATH))


# kind: the function (task, questions, answers) -> which cells of the answers break a rule, bool [n, cells]
RULES = {"sudoku": broken_in_sudoku, "maze": broken_in_maze}

# kinds of RULES whose questions have several right answers, of which the label is one; empty for Sudoku and
# mazes: a Sudoku has one answer, and the paper's metric compares mazes with their labels
SEVERAL_ANSWERS = set()


def broken_cells(task, questions, answers):
    """Returns which cells of the answers break a rule, bool [n, cells]; None if the rules are not known.

    questions, answers: tokens [n, cells]; one question [1, cells] will do for all answers.
    """
    rule = RULES.get(task["kind"])
    return rule and rule(task, questions, answers)


def are_solutions(task, questions, answers):
    """Returns which answers keep all rules, or are a shortest path, bool [n]; None without rules."""
    if task["kind"] == "maze":
        size = task["grid"][0]
        shortest, _ = solve_mazes(questions, size)
        return path_metrics(questions, shortest, answers, size)[1]
    broken = broken_cells(task, questions, answers)
    return None if broken is None else ~broken.any(axis=1)


def is_correct(task, inputs, labels, preds):
    """Returns which answers are correct: {name: bool [n]}; the names depend on the task alone.

    "accuracy": all labelled cells are right, and there is one. For kinds with several right answers also
    "valid_accuracy": by the rules. For mazes also "path_valid" and "path_optimal".

    Args:
        task: the puzzles' task.
        inputs, labels, preds: tokens [n, cells]; labels are IGNORE_LABEL where they do not count.
    """
    is_labelled = labels != IGNORE_LABEL
    is_right = (preds == labels) | ~is_labelled
    correct = {"accuracy": is_right.all(axis=1) & is_labelled.any(axis=1)}
    if task["kind"] in SEVERAL_ANSWERS:
        correct["valid_accuracy"] = are_solutions(task, inputs, preds)
    if task["kind"] == "maze":
        valid, optimal = path_metrics(inputs, labels, preds, task["grid"][0])
        correct["path_valid"] = valid
        correct["path_optimal"] = optimal
    return correct


def count_correct(task, arrays, attempts):
    """Returns {name of a metric: how many puzzles}, of the last and of the surest answers.

    The names do not depend on the puzzles. "accuracy", of the last answers, is left out: the model counts it.

    Args:
        task: the puzzles' task.
        arrays: inputs, labels, preds, surest_preds [n, cells].
        attempts: the surest answers of each attempt, likewise.
    """
    inputs = arrays["inputs"]
    labels = arrays["labels"]
    counts = {}
    for prefix, preds in ("", arrays["preds"]), ("surest_", arrays["surest_preds"]):
        judgements = is_correct(task, inputs, labels, preds)
        for name, correct in judgements.items():
            counts[prefix + name] = float(correct.sum())
    del counts["accuracy"]

    # puzzles that at least one attempt solves
    if len(attempts) > 1:
        solved = [is_correct(task, inputs, labels, preds)["accuracy"] for preds in attempts]
        is_solved = np.any(solved, axis=0)
        counts["any_accuracy"] = float(is_solved.sum())
    return counts


def verdict(task, question, answer):
    """Returns in words whether an answer [cells] is a solution."""
    solved = are_solutions(task, question[None], answer[None])
    if solved is None:
        return "not judged: the rules are not known"
    return "a solution: all rules and givens kept" if solved[0] else appearance(task).failed


def check_questions(task, questions, places):
    """Returns a warning if a question has several solutions, else "". places: a prefix for each question.

    Raises UserError for the first question without a solution.
    """
    size = task["grid"][0]
    if task["kind"] == "sudoku":
        counts = count_solutions(candidates_of(questions, size), size, 2)
    elif task["kind"] == "maze":
        _, steps = solve_mazes(questions, size)
        counts = have_ends(questions) & (steps > 0)
    else:
        return ""

    # the first question without a solution, or with several
    fewest = int(counts.argmin())
    if not counts[fewest]:
        question = questions[fewest]
        clashes = broken_cells(task, question[None], question[None])[0] & (question > 1)
        where = f": {place_of(clashes.argmax(), task)} breaks a rule" if clashes.any() else ""
        raise UserError(f"{places[fewest]}the puzzle has no solution{where}")
    most = int(counts.argmax())
    if counts[most] > 1:
        return places[most] + "the puzzle has more than one solution"
    return ""


def explain(task, question, answer):
    """Returns in words why an answer to a question, [cells] each, is no solution."""
    broken = broken_cells(task, question[None], answer[None])[0]
    if broken.any():
        return f"{place_of(broken.argmax(), task)} of the answer breaks a rule"
    return f"the answer is {appearance(task).failed}"


def place_of(cell, task):
    row, column = divmod(int(cell), task["grid"][1])
    return f"row {row + 1}, column {column + 1}"


def path_metrics(inputs, labels, preds, size):
    """Returns which answers to mazes are a path from S to G, and which a shortest one: bool [n] each.

    inputs, labels (a shortest path each), preds: tokens [n, size * size].
    """
    valid = are_paths(inputs, preds, size)
    steps = (preds == PATH).sum(axis=1)
    shortest = (labels == PATH).sum(axis=1)
    return valid, valid & (steps == shortest)


def are_paths(questions, answers, size):
    """Returns which answers to mazes are a path, bool [n].

    In a path, S and G are where the question has them, every "o" is on a cell that is open in the question,
    and the "o" form one line from S to G that does not touch itself: no way from S to G along it leaves out
    any of its cells.
    """
    # S and G stay, and the path is on open cells
    ends = np.where(np.isin(questions, (START, GOAL)), questions, 0)
    drawn_ends = np.where(np.isin(answers, (START, GOAL)), answers, 0)
    path = answers == PATH
    fits = (ends == drawn_ends) & (~path | (questions == OPEN))

    # the maze whose only open cells are the path's: its shortest path takes all of them
    line = np.where(path, OPEN, np.where(ends, ends, WALL))
    _, steps = solve_mazes(line, size)
    uses_all_cells = steps == path.sum(axis=1) + 1
    return fits.all(axis=1) & have_ends(questions) & uses_all_cells


def have_ends(questions):
    """Returns which mazes have one start and one goal, bool [n]."""
    starts = (questions == START).sum(axis=1)
    goals = (questions == GOAL).sum(axis=1)
    return (starts == 1) & (goals == 1)


# ---------------------------------------------------------------------------------------------------------
# Symmetries

# the 8 ways to turn a grid: whether rows become columns, then the steps along rows and columns of the result
TURNS = (
    (False, 1, 1),
    (True, -1, 1),  # a quarter
    (False, -1, -1),  # a half
    (True, 1, -1),  # three quarters
    (False, 1, -1),  # left and right exchanged
    (False, -1, 1),  # up and down exchanged
    (True, 1, 1),  # transposed
    (True, -1, -1),  # transposed along the other diagonal
)
WAY_BACK = (0, 3, 2, 1, 4, 5, 6, 7)


def turned(grid, way):
    """Returns a view of a grid that is turned in one of 8 ways, in the official builder's order."""
    is_transposed, row_step, column_step = TURNS[way]
    if is_transposed:
        grid = grid.T
    return grid[::row_step, ::column_step]


def dihedral(size):
    """Returns the 8 turned squares as indices [8, cells]."""
    square = np.arange(size * size).reshape(size, size)
    squares = np.stack([turned(square, way) for way in range(8)])
    return squares.reshape(8, -1)


# ---------------------------------------------------------------------------------------------------------
# ARC: a grid is an array of colours [rows, columns], uint8. On a canvas of side x side tokens, it has an EDGE
# below and on the right, where there is room. A version, uint8 [11], says in which of the 8 ways to turn a
# grid, numbered as in the official builder, and what the colours 0 to 9 become.

ORIGINAL = np.array([0, *range(10)], dtype=np.uint8)  # the version that changes nothing


def apply_version(grid, version):
    return turned(version[1:][grid], version[0])


def undo_version(grid, version):
    colours = np.argsort(version[1:]).astype(np.uint8)
    return colours[turned(grid, WAY_BACK[version[0]])]


def canvas(grid, side, row=0, column=0):
    """Returns tokens, uint8 [side, side]: a canvas with a grid whose first cell is at (row, column)."""
    tokens = np.zeros((side, side), dtype=np.uint8)
    end_row = row + grid.shape[0]
    end_column = column + grid.shape[1]
    tokens[row:end_row, column:end_column] = grid + COLOUR
    tokens[end_row:end_row + 1, column:end_column] = EDGE
    tokens[row:end_row, end_column:end_column + 1] = EDGE
    return tokens


def crop(tokens, side):
    """Returns the grid at the top left of a canvas, tokens [side * side]; [0, 0] if there is none.

    It is the largest rectangle of colours there, the flattest of equal ones, as in the official evaluation.
    """
    tokens = tokens.reshape(side, side)
    run_lengths = np.logical_and.accumulate(tokens >= COLOUR, axis=1).sum(axis=1)
    widths = np.minimum.accumulate(run_lengths)
    areas = widths * np.arange(1, side + 1)
    rows = np.append(0, areas).argmax()
    columns = widths[rows - 1]
    grid = tokens[:rows, :columns] - COLOUR
    return grid.astype(np.uint8)


# ---------------------------------------------------------------------------------------------------------
# The Sudoku solver works on many boards at a time: candidates [cells, n], where bit d - 1 is set while digit
# d is possible in the cell. Numpy is fast on these as long as every operation runs over all n boards.

def count_solutions(candidates, size, limit):
    """Returns the number of solutions of each board [n], counted up to limit; candidates: [cells, n].

    It goes depth first over many boards at once: where the singles are stuck, it splits a board in two at one
    of its cells with the fewest candidates.
    """
    n = candidates.shape[1]
    counts = np.zeros(n, dtype=np.int64)
    waiting = [(candidates, np.arange(n))]
    while waiting:
        boards, owners = waiting.pop()
        if len(owners) > BOARDS:
            waiting.append((boards[:, BOARDS:], owners[BOARDS:]))
            boards = boards[:, :BOARDS]
            owners = owners[:BOARDS]

        # boards that are solved, broken or solved often enough are done
        boards, broken, solved, stuck = propagate(boards, size)
        counts += np.bincount(owners[solved], minlength=n)
        alive = ~broken & ~solved & (counts[owners] < limit)

        # the stuck boards: one copy takes the cell's lowest candidate, the other one the rest
        split = np.flatnonzero(alive & stuck)
        others = boards[:, split]
        column = np.arange(len(split))
        cell = np.argmin(np.bitwise_count(others) - np.uint8(2), axis=0)  # decided cells wrap around
        options = others[cell, column]
        boards[cell, split] = options & -options
        others[cell, column] = options & (options - 1)
        if alive.any():
            boards = np.concatenate([boards[:, alive], others], axis=1)
            owners = np.concatenate([owners[alive], owners[split]])
            waiting.append((boards, owners))
    return np.minimum(counts, limit)


def propagate(candidates, size):
    """Runs one round of naked and hidden singles.

    Returns the candidates, and bool [n] each: broken, solved, stuck.
    broken: no solution; solved: all cells decided; stuck: unchanged by this round.
    """
    axes_of_units = (2, 3), (0, 1), (1, 3)  # a row, a column, a box
    after = candidates.copy()
    cells = after.reshape(*box_shape(size), -1)  # (bands, rows, stacks, columns, n), a view
    broken = np.zeros(after.shape[1], dtype=bool)

    # a digit placed in a unit leaves the unit's other cells
    for axes in axes_of_units:
        is_placed = cells & (cells - 1) == 0
        placed = cells * is_placed
        taken = np.bitwise_or.reduce(placed, axis=axes, keepdims=True)
        twice = taken != np.add.reduce(placed, axis=axes, keepdims=True, dtype=np.uint16)
        broken |= twice.any(axis=(0, 1, 2, 3))
        cells &= ~taken | placed

    # a digit with one cell left in a unit is placed there
    for axes in axes_of_units:
        unit = np.moveaxis(cells, axes, (0, 1))
        seen = np.uint16(0)
        again = np.uint16(0)
        for i, j in np.ndindex(unit.shape[:2]):
            again = again | seen & unit[i, j]
            seen = seen | unit[i, j]
        lacks_digit = seen != 2 ** size - 1
        broken |= lacks_digit.any(axis=(0, 1))
        once = seen & ~again
        single = cells & np.expand_dims(once, axes)
        cells &= single | np.uint16(0xFFFF) * (single == 0)

    # what the round came to
    unchanged = (after == candidates).all(axis=0) & ~broken
    decided = (after & (after - 1) == 0).all(axis=0)
    return after, broken, unchanged & decided, unchanged & ~decided


def candidates_of(boards, size):
    """Returns the candidates [cells, n] of boards, tokens [n, cells]; an empty cell has all."""
    digits = 1 << np.arange(size)
    by_token = np.array([0, digits.sum(), *digits], dtype=np.uint16)  # padding has none
    return by_token[boards.T]


def box_shape(size):
    """Returns the bands, rows of a band, stacks and columns of a stack."""
    rows, columns = BOXES[size]
    return size // rows, rows, size // columns, columns


# ---------------------------------------------------------------------------------------------------------
# The maze solver works on many mazes at a time: sets of cells are bits [rows, n], a word for a row of a maze.

def solve_mazes(questions, size):
    """Returns the answers, and the steps [n] of their shortest paths, 0 if there is none.

    Of several shortest paths it takes the one that, seen from S, goes down where it can, else left, else
    right, else up. All labels of Maze-Hard follow this rule, and a model can match them exactly only because
    there is a rule.
    """
    # the cells that are 0, 1, 2, ... steps from the goal
    start = pack(questions == START, size)
    goal = pack(questions == GOAL, size)
    layers = list(layers_from(goal, pack(questions != WALL, size)))
    steps = np.zeros(len(questions), dtype=int)
    for step, layer in enumerate(layers):
        has_start = (layer & start > 0).any(axis=0)
        steps += step * has_start

    # walk from the start to the goal, each step to a cell of the next layer
    position = np.zeros_like(start)
    path = np.zeros_like(start)
    for step in range(len(layers) - 2, 0, -1):
        position = np.where(steps == step + 1, start, position)
        down, left, right, up = neighbours(position)
        position = up & layers[step]
        for preferred in (right, left, down):
            preferred = preferred & layers[step]
            position = np.where(preferred.any(axis=0), preferred, position)
        path |= position
    return np.where(unpack(path), np.uint8(PATH), questions), steps


def layers_from(start, open_cells):
    """Yields the sets of cells that are 0, 1, 2, ... steps from start, up to the farthest of any maze."""
    layer = start
    unseen = open_cells & ~start
    while True:
        yield layer
        layer = np.bitwise_or.reduce(neighbours(layer)) & unseen
        if not layer.any():
            return
        unseen &= ~layer


def neighbours(bits):
    """Returns the cells below, left, right and above; bits beyond the right edge mean nothing."""
    nothing = np.zeros_like(bits[:1])
    below = np.concatenate([nothing, bits[:-1]])
    above = np.concatenate([bits[1:], nothing])
    return below, bits >> 1, bits << 1, above


def pack(cells, size):
    """Returns bits, uint64 [rows, n], of bool [n, cells]."""
    columns = np.arange(size, dtype=np.uint64)
    bits = cells.reshape(-1, size, size) << columns
    return np.ascontiguousarray(bits.sum(axis=2, dtype=np.uint64).T)


def unpack(bits):
    """Returns bool [n, cells] of bits [rows, n]."""
    columns = np.arange(len(bits), dtype=np.uint64)
    cells = bits.T[:, :, None] >> columns & 1
    return cells.reshape(-1, len(bits) ** 2).astype(bool)
