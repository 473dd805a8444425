"""Mazes: the rules, a solver, a generator, and copies that are turned and solved anew.

Mazes are the official code's tokens [n, cells]. 0 is padding, and 1 to 5 are the symbols "# SGo": wall, open,
start, goal, path. They are squares, row after row. The answer is the question with an "o" in each open cell
of one shortest path from S to G. Steps go up, down, left and right.
"""
import itertools
import math

import numpy as np

from puzzles import Judgement, Kind

MAZE = "_# SGo"  # a symbol for each token
WALL, OPEN, START, GOAL, PATH = range(1, 6)  # tokens
GRIDS = 4096  # grids that the generator makes at a time
WALLS = 0.3, 0.5  # the least and the largest share of walls in a generated grid


class Maze(Kind):
    """What is known of mazes."""

    symmetries = {"dihedral": True}
    no_solution = "the answer is not a shortest path"
    empty = OPEN

    @staticmethod
    def new_task(rows):
        return {
            "kind": "maze",
            "grid": [rows, rows],
            "symbols": MAZE,
        }

    def question_symbols(self):
        """See Kind. The path is no part of a question."""
        return MAZE[1:-1]

    def judge(self, questions, answers):
        """See Kind. The path may go over open cells; another cell is broken if it differs from the question.

        An answer is a solution if it is a shortest path, and nothing else differs.
        """
        is_drawn = (questions == OPEN) & (answers == PATH)
        broken = (answers != questions) & ~is_drawn
        _, is_shortest = path_metrics(questions, answers)
        return Judgement(broken, is_shortest & ~broken.any(axis=1))

    def num_solutions(self, questions):
        """Returns 1 for mazes with a path from the one start to the one goal, else 0, [n]."""
        _, steps = solve_mazes(questions)
        return steps > 0

    def metrics(self, questions, answers):
        """See Kind. The paper's metric compares mazes with their labels; these ones follow the rules."""
        valid, optimal = path_metrics(questions, answers)
        return {"path_valid": valid, "path_optimal": optimal}

    def training_copies(self, puzzles, num_copies, rng, test_keys):
        """See Kind. The answer is turned with its maze.

        But if the answer follows the rule of solve_mazes, each copy gets a new answer by this rule: turned
        answers would teach 8 rules, and the test set has one.
        """
        copies = super().training_copies(puzzles, num_copies, rng, test_keys)
        # solve the copies of mazes whose answer follows the rule
        questions, answers = puzzles
        answers_by_rule, _ = solve_mazes(questions)
        by_rule = (answers == answers_by_rule).all(axis=1)
        followers = copies[0, by_rule]
        solved, _ = solve_mazes(followers.reshape(-1, self.cells))
        copies[1, by_rule] = solved.reshape(followers.shape)
        return copies


# ---------------------------------------------------------------------------------------------------------
# Rules

def path_metrics(questions, answers):
    """Returns which answers to mazes are a path from S to G, and which a shortest one: bool [n] each.

    In a path, S and G are where the question has them, and every "o" is on an open cell of the question. The
    "o" form one line from S to G that does not touch itself: no way along it leaves out a cell.
    """
    # check that S and G stay, and that the path is on open cells
    is_path = answers == PATH
    is_end = np.isin(questions, [START, GOAL])
    is_any_end = is_end | np.isin(answers, [START, GOAL])
    fits = np.where(
        is_any_end,
        answers == questions,
        ~is_path | (questions == OPEN),
    )

    # solve the maze whose only open cells are the path's: its shortest path must take all of them
    num_steps = is_path.sum(axis=1) + 1
    walls = np.where(is_end, questions, WALL)
    _, steps_along = solve_mazes(np.where(is_path, OPEN, walls))
    is_valid = fits.all(axis=1) & (steps_along == num_steps)

    _, fewest_steps = solve_mazes(questions)
    return is_valid, is_valid & (num_steps == fewest_steps)


# ---------------------------------------------------------------------------------------------------------
# The solver works on many mazes at a time

def solve_mazes(questions):
    """Returns the answers, and the steps [n] of their shortest paths, 0 if there is none.

    Of several shortest paths it takes the one that, seen from S, goes down where it can, else left, else
    right, else up. All labels of Maze-Hard follow this rule, and a model can match them exactly only because
    there is a rule.
    """
    # put walls around the mazes, so that all cells have four neighbors
    size = math.isqrt(questions.shape[1])
    width = size + 2
    border = (0, 0), (1, 1), (1, 1)
    squares = questions.reshape(-1, size, size)
    squares = np.pad(squares, border, constant_values=WALL)
    cells = squares.reshape(-1, width * width)
    from_goal = distances(squares == GOAL, squares != WALL)
    from_goal = from_goal.reshape(cells.shape)

    # begin at the starts; without one start and one goal there is no path
    is_start = cells == START
    num_starts = is_start.sum(axis=1)
    num_goals = (cells == GOAL).sum(axis=1)
    has_ends = (num_starts == 1) & (num_goals == 1)
    position = is_start.argmax(axis=1)
    steps = from_goal[np.arange(len(cells)), position]
    steps = np.maximum(steps * has_ends, 0)

    # walk to the goals: the mazes with the longest way first, until all are as near
    neighbors_at = np.array([width, -1, 1, -width])  # down, left, right, up
    for steps_left in range(steps.max(initial=0) - 1, 0, -1):
        rows = np.flatnonzero(steps > steps_left)[:, None]
        neighbors = position[rows] + neighbors_at
        is_nearer = from_goal[rows, neighbors] == steps_left
        choice = is_nearer.argmax(axis=1, keepdims=True)
        position[rows] = np.take_along_axis(neighbors, choice, axis=1)
        cells[rows, position[rows]] = PATH
    inner = squares[:, 1:-1, 1:-1]
    return inner.reshape(questions.shape), steps


def distances(starts, is_open):
    """Returns how many steps cells are from a start, int32 [n, size, size]; -1 where no way leads there.

    starts, is_open: bool [n, size, size].
    """
    # [size, size, n]: numpy is fast where the last axis is long
    reached = np.moveaxis(starts, 0, 2).copy()
    unseen = np.moveaxis(is_open & ~starts, 0, 2).copy()
    steps = reached.astype(np.int32) - 1
    for step in itertools.count(1):
        if not reached.any():
            return np.moveaxis(steps, 2, 0)
        # go on to the neighbors of the cells that were reached last
        near = np.zeros_like(reached)
        near[1:] |= reached[:-1]
        near[:-1] |= reached[1:]
        near[:, 1:] |= reached[:, :-1]
        near[:, :-1] |= reached[:, 1:]
        reached = near & unseen
        unseen ^= reached
        np.copyto(steps, step, where=reached)


# ---------------------------------------------------------------------------------------------------------
# Generated mazes

def long_mazes(index, seed, size, min_path):
    """Returns the mazes (questions, answers) among GRIDS random grids, which depend on seed and index.

    The method of Lehnert et al. (arXiv 2402.14083), which Maze-Hard's authors cite: 30 to 50% of the cells,
    anywhere, are walls, and grids without a long path are dropped. To drop fewer, one end is the cell
    farthest from a random one, and the other any cell at least min_path steps away.
    """
    # draw grids, and a cell of each that is open
    rng = np.random.default_rng([seed, index])
    draws = rng.random((GRIDS, size, size), dtype=np.float32)
    is_open = draws >= rng.uniform(*WALLS, (GRIDS, 1, 1))
    origin = rng.integers(size * size, size=(GRIDS, 1, 1))
    is_origin = origin == np.arange(size * size).reshape(size, size)
    is_open |= is_origin

    # put one end as far as possible from that cell; no two cells are farther apart than twice that
    steps = distances(is_origin, is_open)
    farthest = steps.max(axis=(1, 2), keepdims=True)
    is_far = steps == farthest
    keep = 2 * farthest.ravel() >= min_path
    is_open = is_open[keep]
    one_end = random_cells(is_far[keep], rng)

    # put the other end min_path steps away or more
    is_far = distances(one_end, is_open) >= min_path
    other_end = random_cells(is_far, rng)

    # draw which of them is the start
    swap = rng.random((len(is_open), 1, 1)) < 0.5
    questions = np.where(is_open, np.uint8(OPEN), WALL)
    questions[np.where(swap, one_end, other_end)] = START
    questions[np.where(swap, other_end, one_end)] = GOAL

    # keep the mazes that have both ends
    has_both_ends = other_end.any(axis=(1, 2))
    questions = questions[has_both_ends].reshape(-1, size * size)
    answers, _ = solve_mazes(questions)
    return questions, answers


def random_cells(squares, rng):
    """Returns one random cell of each set, bool [n, size, size]; none of an empty set."""
    n, rows, columns = squares.shape
    cells = squares.reshape(n, rows * columns)
    draws = 1 - rng.random(cells.shape, dtype=np.float32)  # above 0
    chosen = (cells * draws).argmax(axis=1, keepdims=True)
    is_chosen = np.arange(rows * columns) == chosen
    return squares & is_chosen.reshape(squares.shape)
