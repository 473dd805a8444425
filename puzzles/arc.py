"""ARC: grids and their versions, and the vote.

A grid is an array of colors [rows, columns], uint8. The model sees it on a canvas of side x side tokens, with
an EDGE below and on the right if there is room. A version is uint8 [11]. Its first number says in which of 8
ways a grid is turned, numbered as in the official builder. The others say what the colors 0 to 9 become.
"""
import json
import math
from collections import defaultdict
from pathlib import Path

import numpy as np

from puzzles import Kind, sigmoid
from puzzles.symmetries import turned
from runtime.errors import UserError

ARC_SYMBOLS = " |0123456789"  # a symbol for each token
EDGE = 1  # token
COLOR = 2  # token of color 0
ORIGINAL = np.array([0, *range(10)], dtype=np.uint8)  # the version that changes nothing


class ARC(Kind):
    """What is known of ARC's grids."""

    versions_vote = True

    @staticmethod
    def new_task(rows):
        return {
            "kind": "arc",
            "grid": [rows, rows],
            "symbols": ARC_SYMBOLS,
        }

    def question_symbols(self):
        """Raises UserError: a question alone has no puzzle identifier."""
        raise UserError("this model solves ARC tasks: train.py writes submission.json, see docs/arc.md")

    def grids(self, *canvases):
        """Returns the grids at the top left of canvases, tokens [side * side] each."""
        return list(map(crop, canvases))

    def canvases(self, pairs, versions, translation_draws):
        """Returns canvases with versions of pairs (input, output) of grids: tokens [n, side * side] each.

        translation_draws: numbers in [0, 1), [n, 2], that move the grids; 0: nothing moves.
        """
        canvases = []
        translation_draws = np.broadcast_to(translation_draws, (len(pairs), 2))
        for pair, version, draws in zip(pairs, versions, translation_draws):
            grids = [apply_version(grid, version) for grid in pair]
            # both are moved alike, as far as there is room for them
            question, answer = grids
            room = self.rows + 1 - np.maximum(question.shape, answer.shape)
            offset = (draws * room).astype(int)
            canvases.append([canvas(grid, self.rows, *offset) for grid in grids])
        return np.reshape(canvases, (-1, 2, self.cells)).swapaxes(0, 1)


# ---------------------------------------------------------------------------------------------------------
# Grids

def grid_of(value):
    """Returns a grid, uint8 [rows, columns], of lists of colors. Raises ValueError."""
    grid = np.array(value, dtype=object)  # rows may have different lengths
    is_rectangle = grid.ndim == 2 and grid.size > 0
    if not is_rectangle or not set(range(10)).issuperset(grid.flat):
        raise ValueError("a grid is not a rectangle of colors from 0 to 9")
    return grid.astype(np.uint8)


def grid_key(grid):
    """Returns the shape and the bytes of a grid, equal for equal grids."""
    return grid.shape, grid.tobytes()


def apply_version(grid, version):
    way = version[0]
    colors = version[1:]
    return turned(colors[grid], way)


def undo_version(grid, version):
    way = version[0]
    way = {1: 3, 3: 1}.get(way, way)  # quarters to the left and to the right; the others undo themselves
    colors = np.argsort(version[1:]).astype(np.uint8)
    return colors[turned(grid, way)]


def canvas(grid, side, row, column):
    """Returns tokens, uint8 [side, side]: a canvas with a grid whose first cell is at (row, column)."""
    # an edge below the grid and one beside it, as far as the canvas goes, but not at their corner
    tokens = np.zeros((side, side), dtype=np.uint8)
    end_row = row + grid.shape[0]
    end_column = column + grid.shape[1]
    tokens[row:end_row + 1, column:end_column + 1] = EDGE
    tokens[end_row:, end_column:] = 0
    tokens[row:end_row, column:end_column] = grid + COLOR
    return tokens


def crop(tokens):
    """Returns the grid at the top left of a square canvas of tokens; [0, 0] if there is none.

    It is the largest rectangle of colors there, the flattest of equal ones, as in the official evaluation.
    """
    side = math.isqrt(tokens.size)
    tokens = tokens.reshape(side, side)
    # the first n rows all begin with widths[n - 1] colors
    is_in_run = np.logical_and.accumulate(tokens >= COLOR, axis=1)
    run_lengths = is_in_run.sum(axis=1)
    widths = np.minimum.accumulate(run_lengths)
    # the first of the largest areas has the fewest rows
    areas = widths * np.arange(1, side + 1)
    rows = np.append(0, areas).argmax()
    columns = widths[rows - 1]
    grid = tokens[:rows, :columns] - COLOR
    return grid.astype(np.uint8)


# ---------------------------------------------------------------------------------------------------------
# The vote: the versions of a task vote on the answer to each of its test inputs

PASSES = (1, 2, 5, 10, 100, 1000)  # pass@K: the right answer is among the K with the most votes


def pairs_of(dataset, group):
    """Returns the pairs (input, output) of a task: grids of colors."""
    first, end = dataset.row_indices[group:group + 2]
    return dataset.grids[first:end]


def task_names(dataset):
    """Returns the name of each task of a data.Dataset."""
    path = Path(dataset.path, "identifiers.json")
    _, *names = json.loads(path.read_text(encoding="utf-8"))
    # the names are of the tasks in train, whose versions have the identifiers 1, 2, ...
    first_identifiers = np.load(f"{dataset.path}/train/all__group_indices.npy") + 1
    identifiers = dataset.puzzle_identifiers[dataset.group_indices[:-1]]
    return [names[i] for i in np.searchsorted(first_identifiers, identifiers)]


def count_votes(test_set, indices, preds, q_halt):
    """Returns {(group, member, answer): [the confidence of each of its votes]} of test examples.

    A group is a task, a member one of its test inputs. Answers are the keys of grids (grid_key) in the
    task's own version.

    Args:
        test_set: the data.Dataset of test tasks.
        indices: which of its examples [n].
        preds: their answers, tokens [n, S].
        q_halt: the confidence of each answer, logits [n].
    """
    versions, members = test_set.locate(indices)
    groups = test_set.groups_of(versions)
    confidences = sigmoid(q_halt)

    votes = defaultdict(list)
    columns = (
        versions,
        groups.tolist(),
        members.tolist(),
        preds,
        confidences.tolist(),
    )
    for version, group, member, tokens, confidence in zip(*columns):
        # bring the answer back to the task's own colors and orientation
        grid = undo_version(crop(tokens), test_set.versions[version])
        votes[group, member, grid_key(grid)].append(confidence)
    return votes


def merge_votes(ranks):
    """Returns {(group, member): answers} of the ranks' votes; the answers with most votes come first.

    Of equal ones it is the one with the higher mean confidence.
    """
    total = defaultdict(list)
    for votes in ranks:
        for key, confidences in votes.items():
            total[key] += confidences

    def standing(key):
        confidences = total[key]
        return len(confidences), sum(confidences) / len(confidences)

    elected = defaultdict(list)
    for group, member, answer in sorted(total, key=standing, reverse=True):
        elected[group, member].append(answer)
    return elected


def vote_values(test_set, elected):
    """Returns {"eval/pass1": share, ...} of the tasks that were voted on and have known answers.

    A task counts by the share of its test inputs that are solved (official evaluators/arc.py).
    """
    solved = dict.fromkeys(PASSES, 0.0)
    num_tasks = 0
    for group in sorted({group for group, _ in elected}):
        # an answer that is not known is empty
        answers = [answer for _, answer in pairs_of(test_set, group)]
        if not all(answer.size for answer in answers):
            continue
        num_tasks += 1
        for member, answer in enumerate(answers):
            for k in PASSES:
                is_solved = grid_key(answer) in elected[group, member][:k]
                solved[k] += is_solved / len(answers)

    # the mean over the tasks
    return {f"eval/pass{k}": total / max(1, num_tasks) for k, total in solved.items()}


def submission(test_set, elected):
    """Returns {task: [{"attempt_1": grid, "attempt_2": grid}, ...]}, an entry a test input, as for Kaggle."""
    names = task_names(test_set)
    attempts = {}
    for (group, _), answers in sorted(elected.items()):
        grids = [np.ndarray(shape, np.uint8, cells).tolist() for shape, cells in answers[:2]]
        # a single answer is given twice
        attempts.setdefault(names[group], []).append({"attempt_1": grids[0], "attempt_2": grids[-1]})
    return attempts
