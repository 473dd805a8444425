"""What a puzzle is: its task, and what is known of its kind.

A task is a dict: "kind", "grid" ([rows, columns]) and "symbols", a character for each token (0: padding).
It stands in a dataset's manifest.json and a checkpoint's "task". Questions and answers are tokens [n, cells].
A token is the index of its symbol in task["symbols"]; Kind.empty is the token of an empty cell.

task["kind"] is a name, KINDS has its class, and kind_of(task) is an instance, which code calls kind. Sudoku,
mazes and ARC have classes in this folder. The class Kind is for puzzles whose rules are not known: their
answers are compared with the known ones. A fork may add a class to KINDS, as examples/coloring.py does.
"""
import math
import pkgutil
from typing import NamedTuple

import numpy as np

from puzzles.symmetries import Symmetries, check_symmetries, dihedral, renamings
from runtime.errors import UserError

IGNORE_LABEL = -100  # the same as in model.py, which needs torch

# {kind: its class, or the place of a class, which loads when a task of the kind is met}; others are plain
KINDS = {"sudoku": "puzzles.sudoku:Sudoku", "maze": "puzzles.maze:Maze", "arc": "puzzles.arc:ARC"}
DRAWS = 256  # draws of a puzzle's symmetry, after which no further copy is expected

# {(cells, tokens): the task} of the official code's datasets. These store each version of an ARC task as a
# task of its own; the empty kind keeps the versions from voting.
OFFICIAL = {
    (81, 11): {"kind": "sudoku", "grid": [9, 9], "symbols": " .123456789"},
    (900, 12): {"kind": "", "grid": [30, 30], "symbols": " |0123456789"},
}


def kind_of(task):
    """Returns the Kind of a task. Raises UserError for a task that does not fit its kind."""
    # the file of a built-in kind is imported here, when a puzzle of the kind is met
    kind = KINDS.get(task["kind"], Kind)
    if isinstance(kind, str):
        kind = pkgutil.resolve_name(kind)
    return kind(task)


def task_of(manifest, seq_len, vocab_size):
    """Returns the task in a dataset's manifest.json, checked. Raises UserError.

    Datasets of the official code have no manifest: their Sudokus and ARC's grids are known by their sizes.
    What is missing elsewhere: kind "", one row, the tokens' numbers as symbols. seq_len may be None for a new
    dataset, which must have a grid.
    """
    if "symbols" not in manifest:
        manifest = OFFICIAL.get((seq_len, vocab_size), manifest)
    grid = manifest.get("grid", [1, seq_len])
    symbols = list(map(str, manifest.get("symbols", range(vocab_size))))
    # a string is easier to read in a manifest, if each symbol is one character
    text = "".join(symbols)
    if len(text) == len(symbols):
        symbols = text

    # the grid has the model's cells, and each token a symbol of its own
    is_pair = list(map(type, grid or ())) == [int, int] and min(grid) > 0
    if not is_pair or seq_len not in (None, math.prod(grid)):
        raise UserError(f"grid {grid!r} must be [rows, columns], and have the cells of a puzzle")
    num_different = 1 + len(set(symbols[1:]))
    if not 2 <= len(symbols) == num_different == vocab_size <= 256:
        raise UserError(f"{len(symbols)} symbols {symbols!r} must be {vocab_size}, one for each token, all "
                        "different, and from 1 to 255 besides padding")
    task = {"kind": manifest.get("kind", ""), "grid": list(grid), "symbols": symbols}
    for name in "symmetries", "units":
        if name in manifest:
            task[name] = manifest[name]
    kind_of(task)
    return task


class Judgement(NamedTuple):
    """What the rules say of answers."""

    broken: np.ndarray  # which cells break a rule, bool [n, cells]
    solved: np.ndarray  # which answers are solutions, bool [n]


class Kind:
    """What is known of the puzzles of a task: no rules, and the symmetries that the task describes.

    Raises UserError for a task whose grid, symbols or symmetries do not fit.
    """

    has_several_answers = False  # whether a question has several right answers; these need a judge
    versions_vote = False  # whether the versions of a puzzle vote on its answer, as in puzzles/arc.py
    symmetries = {}  # see puzzles/symmetries.py, unless the task describes others
    empty = 1  # the token of a cell that is to be filled
    no_solution = "the answer is no solution"  # verdict on a wrong answer that breaks no rule

    def __init__(self, task):
        self.task = task
        self.grid = task["grid"]
        self.rows, self.columns = self.grid
        self.cells = self.rows * self.columns
        self.symbols = task["symbols"]
        self.symmetries = task.get("symmetries", self.symmetries)
        # some kinds have one grid and one set of symbols; padding has no sign, prepare_csv.py gives it one
        own_task = self.new_task(self.rows)
        if own_task and (own_task["grid"], own_task["symbols"][1:]) != (self.grid, self.symbols[1:]):
            raise UserError(f"grid {self.grid} and symbols {self.symbols!r} do not fit kind {task['kind']}, "
                            f"whose are {own_task['grid']} and {own_task['symbols']!r}")
        check_symmetries(self)

    @staticmethod
    def new_task(rows):
        """Returns the task of grids with so many rows; None if it may have any columns and symbols."""
        return None

    def resized(self, cells):
        """Returns the Kind of squares with so many cells, where there are such puzzles; else itself."""
        task = self.new_task(math.isqrt(cells))
        if not task or not task["symbols"]:
            return self
        return type(self)(self.task | task | {"kind": self.task["kind"]})

    @property
    def unit_shapes(self):
        """The [rows, columns] of the units in which no symbol stands twice; lines come first."""
        return self.task.get("units", [])

    def units(self):
        """Returns the number of each cell's unit, int [divisions, cells].

        A division cuts the grid into units of one of the unit_shapes: [1, 9], [9, 1] and [3, 3] for 9x9
        Sudoku. Raises UserError if there are none.
        """
        if not self.unit_shapes:
            raise UserError(f"{self.task['kind']!r} puzzles have no units; see prepare_csv.py --units")
        # a division numbers its units from left to right, then from top to bottom
        row, column = np.divmod(np.arange(self.cells), self.columns)
        divisions = []
        for rows, columns in self.unit_shapes:
            if self.rows % rows or self.columns % columns:
                raise UserError(f"units: {rows}x{columns} does not divide the grid {self.grid}")
            divisions.append(row // rows * (self.columns // columns) + column // columns)
        return np.array(divisions)

    @property
    def box(self):
        """The rows and columns of a box, between which a picture has lines."""
        return self.grid

    # -----------------------------------------------------------------------------------------------------
    # Text

    def question_symbols(self):
        """Returns the symbols of questions."""
        return self.symbols[1:]

    def text(self, tokens):
        """Returns the symbols of tokens [cells] as a string."""
        return "".join(self.symbols[token] for token in tokens)

    def place_of(self, cell):
        row, column = divmod(cell, self.columns)
        return f"row {row + 1}, column {column + 1}"

    # -----------------------------------------------------------------------------------------------------
    # Rules

    def judge(self, questions, answers):
        """Returns the Judgement of answers by their rules; None if the rules are not known.

        questions, answers: numpy arrays of tokens [n, cells]; one question [1, cells] will do for all.
        """
        return None

    def num_solutions(self, questions):
        """Returns the number of solutions [n] of questions, counted up to 2; 1 if the rules are not known.

        -1: the search was too long.
        """
        return np.ones(len(questions), dtype=int)

    def verdict(self, question, answer):
        """Returns in words whether an answer [cells] is a solution."""
        judgement = self.judge(question[None], answer[None])
        if judgement is None:
            return "not judged: the rules are not known"
        if judgement.solved[0]:
            return "a solution: all rules and givens kept"
        if judgement.broken.any():
            return f"{self.place_of(judgement.broken.argmax())} of the answer breaks a rule"
        return self.no_solution

    def metrics(self, questions, answers):
        """Returns {name of a metric besides model.METRICS: which answers count in it, bool [n]}."""
        if self.has_several_answers:
            return {"valid_accuracy": self.judge(questions, answers).solved}
        return {}

    # -----------------------------------------------------------------------------------------------------
    # Symmetries

    def turns(self):
        """Returns the turns of the grid, as indices [m, cells]; the first one changes nothing."""
        if self.symmetries.get("dihedral"):
            return dihedral(self.rows)
        return np.arange(self.cells)[None]

    def exchanged(self):
        """Returns the tokens that may change places: its symmetries' "permute_symbols"."""
        return [self.symbols.index(symbol, 1) for symbol in self.symmetries.get("permute_symbols", "")]

    @property
    def has_symmetries(self):
        """Whether copies() can make copies; a class with a draw_symmetries of its own sets it to True."""
        return bool(self.symmetries)

    def draw_symmetries(self, n, rng):
        """Draws n Symmetries."""
        return Symmetries(rng.choice(self.turns(), n), renamings(self.exchanged(), (n,), rng))

    def copies(self, question, seed, number):
        """Yields the Symmetries [1, ...] of copies of a puzzle, all different, as long as there are more.

        They follow from (seed, number). No copy is the puzzle itself.

        Args:
            question: tokens [cells].
            seed: of the draws.
            number: the puzzle's, in its dataset or file.
        """
        # draw symmetries; one that leads to a copy that was there before does not count
        rng = np.random.default_rng([seed, number])
        made = {question.astype(np.uint8).tobytes()}
        for _ in range(DRAWS):
            symmetries = self.draw_symmetries(1, rng)
            copy = symmetries.apply(question).tobytes()
            if copy not in made:
                made.add(copy)
                yield symmetries

    def check_attempts(self, attempts):
        """Raises UserError if puzzles cannot be attempted so many times."""
        if attempts > 1 and not self.has_symmetries:
            raise UserError(f"eval_attempts={attempts}: no symmetries of this kind of puzzle, "
                            f"{self.task['kind']!r}, are known: prepare_csv.py --dihedral or "
                            "--permute_symbols makes a dataset that has them; the versions of ARC's tasks "
                            "vote, eval_versions says how many")

    def training_copies(self, puzzles, num_copies, rng, test_keys):
        """Returns copies of each puzzle to train on, [2, n, num_copies, cells]; they take the turns in order.

        Args:
            puzzles: questions and answers, tokens [2, n, cells].
            num_copies: copies of each puzzle; fewer if there are no more.
            rng: a random generator.
            test_keys: all test questions, as bytes, for kinds whose copies might be among them.
        """
        # a puzzle whose symbols stay has no more copies than turns
        if not self.exchanged():
            num_copies = min(num_copies, len(self.turns()) - 1)
        # the first turn is none, and the puzzle itself is no copy
        cells = np.resize(self.turns(), (1 + num_copies, self.cells))[1:]
        tokens = renamings(self.exchanged(), (puzzles.shape[1], num_copies), rng)
        return Symmetries(cells, tokens).apply(puzzles[:, :, None])

    def keys(self, questions):
        """Returns a list of keys of questions [n, cells], equal for puzzles that count as one."""
        from puzzles.keys import orbit_keys
        return orbit_keys(questions, self.turns(), self.exchanged())


def sigmoid(logits):
    return 1 / (1 + np.exp(-np.float64(logits)))


def score(values):
    """Returns the metric by which best.pt is chosen, of {"eval/...": number}.

    For ARC it is the share of tasks that are solved in two tries. For kinds with several right answers it is
    the share of answers that keep the rules, for other kinds the share of answers that equal their labels.
    """
    names = ("eval/pass2", "eval/valid_accuracy", "eval/exact_accuracy")
    return next(values[name] for name in names if name in values)
