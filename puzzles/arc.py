"""ARC: grids and their versions, the tasks of a dataset, a generator of small tasks, and the vote.

A grid is an array of colors [rows, columns], uint8. On a canvas of side x side tokens, it has an EDGE below
and on the right, where there is room. A version, uint8 [11], says in which of the 8 ways to turn a grid,
numbered as in the official builder, and what the colors 0 to 9 become.
"""
import functools
import json

import numpy as np

from puzzles.symmetries import WAY_BACK, turned

ARC = " |0123456789"  # a symbol for each token
EDGE = 1  # token
COLOR = 2  # token of color 0
ORIGINAL = np.array([0, *range(10)], dtype=np.uint8)  # the version that changes nothing


def arc_task(side):
    """Returns the task of canvases of side x side cells."""
    return {"kind": "arc", "grid": [side, side], "symbols": ARC}


# ---------------------------------------------------------------------------------------------------------
# Grids

def grid_of(value):
    """Returns a grid, uint8 [rows, columns], of lists of colors. Raises ValueError."""
    grid = np.array(value)
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
    way = WAY_BACK[version[0]]
    colors = np.argsort(version[1:]).astype(np.uint8)
    return colors[turned(grid, way)]


def canvas(grid, side, row=0, column=0):
    """Returns tokens, uint8 [side, side]: a canvas with a grid whose first cell is at (row, column)."""
    # the grid's colors, then an edge below it and one beside it, as far as the canvas goes
    tokens = np.zeros((side, side), dtype=np.uint8)
    end_row = row + grid.shape[0]
    end_column = column + grid.shape[1]
    tokens[row:end_row, column:end_column] = grid + COLOR
    tokens[end_row:end_row + 1, column:end_column] = EDGE
    tokens[row:end_row, end_column:end_column + 1] = EDGE
    return tokens


def crop(tokens, side):
    """Returns the grid at the top left of a canvas, tokens [side * side]; [0, 0] if there is none.

    It is the largest rectangle of colors there, the flattest of equal ones, as in the official evaluation.
    """
    tokens = tokens.reshape(side, side)
    # the first n rows all begin with widths[n - 1] colors
    run_lengths = np.logical_and.accumulate(tokens >= COLOR, axis=1).sum(axis=1)
    widths = np.minimum.accumulate(run_lengths)
    # the first of the largest areas has the fewest rows
    areas = widths * np.arange(1, side + 1)
    rows = np.append(0, areas).argmax()
    columns = widths[rows - 1]
    grid = tokens[:rows, :columns] - COLOR
    return grid.astype(np.uint8)


# ---------------------------------------------------------------------------------------------------------
# The tasks of a dataset

class Tasks:
    """The tasks of a split of a dataset of prepare_arc.py, which stores each example of a task once.

    Task i is the group i of the dataset. All of its versions have the stored examples
    indices[i]:indices[i + 1]; a row of versions [n, 11] says how a version turns and recolors them.

    Args:
        dataset: the data.Dataset.
        indices, versions: all__task_indices.npy and all__versions.npy.
    """

    def __init__(self, dataset, indices, versions):
        self.dataset = dataset
        self.indices = indices
        self.versions = versions
        self.side = dataset.task["grid"][0]

    @functools.cached_property
    def grids(self):
        """The stored examples, pairs (input, output) of grids."""
        examples = zip(self.dataset.inputs, self.dataset.labels)
        return [[crop(tokens, self.side) for tokens in pair] for pair in examples]

    @functools.cached_property
    def names(self):
        """The name of each task."""
        path = self.dataset.path
        with open(f"{path}/identifiers.json", encoding="utf-8") as f:
            _, *names = json.load(f)  # the tasks in train
        # the versions of these tasks have the identifiers 1, 2, ...
        first_identifiers = np.load(f"{path}/train/all__group_indices.npy") + 1
        identifiers = self.dataset.puzzle_identifiers[self.dataset.group_indices[:-1]]
        return [names[i] for i in np.searchsorted(first_identifiers, identifiers)]

    def pairs(self, task):
        """Returns the pairs (input, output) of a task: grids of colors."""
        first, end = self.indices[task:task + 2]
        return self.grids[first:end]

    def draw(self, rows, versions, translation_draws):
        """Returns inputs and labels [b, side * side]: canvases with versions of stored examples.

        Args:
            rows: the examples [b].
            versions: the numbers of the versions in which they come [b].
            translation_draws: numbers in [0, 1) that move them, [b, 2], or 0.
        """
        canvases = []
        translation_draws = np.broadcast_to(translation_draws, (len(rows), 2))
        for row, version, draws in zip(rows, self.versions[versions], translation_draws):
            grids = [apply_version(grid, version) for grid in self.grids[row]]
            # both are moved alike, as far as there is room for them
            question, answer = grids
            room = self.side + 1 - np.maximum(question.shape, answer.shape)
            offset = (draws * room).astype(np.int64)
            canvases.append([canvas(grid, self.side, *offset) for grid in grids])
        return np.reshape(canvases, (-1, 2, self.side ** 2)).swapaxes(0, 1)


EXAMPLE_FIELDS = [("group", int), ("version_draw", float), ("member", int), ("translation_draws", float, 2)]


def draw_examples(groups, group_sizes, rng):
    """Returns the examples that groups bring to an epoch, each group all examples of one of its versions.

    A structured array [n]: group; version_draw, the number in [0, 1) that draws a version of the group;
    member, which of the version's examples it is; translation_draws, two numbers in [0, 1) that move it.

    Args:
        groups: in order.
        group_sizes: how many examples each group brings.
        rng: a random generator.
    """
    # list the examples of all groups
    sizes = group_sizes[groups]
    owners = np.repeat(groups, sizes)
    members = np.concatenate(list(map(np.arange, sizes)))

    # draw one version of each group; all of its examples but one move
    version_draws, fixed_draws = rng.random((2, len(groups)))
    fixed_members = (fixed_draws * group_sizes).astype(int)
    translation_draws = rng.random((len(owners), 2))
    translation_draws[members == fixed_members[owners]] = 0
    fields = [owners, version_draws[owners], members, translation_draws]
    return np.rec.fromarrays(fields, dtype=EXAMPLE_FIELDS)


# ---------------------------------------------------------------------------------------------------------
# Generated tasks

def generated_task(number, seed, size, num_pairs):
    """Returns the name of a task and its content, as in a JSON file; the name says its family.

    Args:
        number: of the task, from 0; the families take turns.
        seed: together with the number, decides the task.
        size: rows and columns of a grid.
        num_pairs: pairs of grids, the last one for the test.
    """
    rng = np.random.default_rng([seed, number])
    family = FAMILIES[number % len(FAMILIES)]
    # draw inputs that any family can start from: 40% of the cells have one of three colors
    shape = num_pairs, size, size
    colors = rng.permutation(9) + 1
    grids = np.where(rng.random(shape) < 0.4, rng.choice(colors[:3], shape), 0)

    # one rule makes the outputs of all of them
    questions, answers = family(rng, grids, colors)
    pairs = []
    for question, answer in zip(questions, answers):
        pairs.append({"input": question.tolist(), "output": answer.tolist()})
    return f"{family.__name__}_{number:04d}", {"train": pairs[:-1], "test": pairs[-1:]}


# A family takes a random generator, grids [n, size, size] of three colors on 0, and the colors 1 to 9 in
# the task's order, of which the first three are in the grids. It returns inputs and outputs by one rule.

def mirror(rng, grids, colors):
    """Exchanges left and right, or above and below."""
    return grids, np.flip(grids, rng.integers(1, 3))


def turn(rng, grids, colors):
    """Turns the grid by a quarter, to the left or to the right."""
    return grids, np.rot90(grids, rng.choice([1, 3]), axes=(1, 2))


def move(rng, grids, colors):
    """Moves everything down or right by one cell; what leaves the grid comes in on the other side."""
    return grids, np.roll(grids, 1, rng.integers(1, 3))


def gravity(rng, grids, colors):
    """Lets all colored cells fall to the bottom."""
    order = np.argsort(grids > 0, axis=1, kind="stable")
    return grids, np.take_along_axis(grids, order, axis=1)


def complete_symmetry(rng, grids, colors):
    """Gives empty cells the color that their mirror image has."""
    return grids, np.where(grids == 0, np.flip(grids, rng.integers(1, 3)), grids)


def recolour(rng, grids, colors):
    """Gives the cells of one color another one."""
    return grids, np.where(grids == colors[0], colors[3], grids)


def keep(rng, grids, colors):
    """Keeps the cells of one color, and no others."""
    return grids, np.where(grids == colors[0], grids, 0)


def fill(rng, grids, colors):
    """Fills the empty cells with a color."""
    return grids, np.where(grids == 0, colors[3], grids)


def line(rng, grids, colors):
    """Draws lines along the rows through the cells of one color."""
    is_hit = (grids == colors[0]).any(axis=2, keepdims=True)
    return grids, np.where(is_hit, colors[0], grids)


def count(rng, grids, colors):
    """Fills the grid with the color that has the most cells."""
    most = np.resize(rng.permutation(colors[:3]), (len(grids), 1, 1))
    questions = np.where(rng.random(grids.shape) < 0.6, most, grids)
    return questions, np.broadcast_to(most, grids.shape)


FAMILIES = (mirror, turn, move, gravity, complete_symmetry, recolour, keep, fill, line, count)


# ---------------------------------------------------------------------------------------------------------
# The vote: the versions of a task vote on the answer to each of its test inputs

PASSES = (1, 2, 5, 10, 100, 1000)  # pass@K: the right answer is among the K with the most votes


def count_votes(test, indices, preds, q_halt):
    """Returns {(group, member): {answer: [the confidence of each of its votes]}} of test examples.

    A group is a task, a member one of its test inputs. Answers are the keys of grids (grid_key) in the
    task's own version.

    Args:
        test: a data.Dataset with Tasks.
        indices: which of its examples [n].
        preds: their answers, tokens [n, S].
        q_halt: the confidence of each answer, logits [n].
    """
    versions, members = test.locate(indices)
    groups = test.groups_of(versions)
    confidences = 1 / (1 + np.exp(-np.float64(q_halt)))

    votes = {}
    columns = versions, groups.tolist(), members.tolist(), preds, confidences.tolist()
    for version, group, member, tokens, confidence in zip(*columns):
        # bring the answer back to the task's own colors and orientation
        grid = crop(tokens, test.arc.side)
        answer = grid_key(undo_version(grid, test.arc.versions[version]))
        candidates = votes.setdefault((group, member), {})
        candidates.setdefault(answer, []).append(confidence)
    return votes


def merge_votes(ranks):
    """Returns the sum of the ranks' votes."""
    total = {}
    for votes in ranks:
        for test_input, candidates in votes.items():
            merged = total.setdefault(test_input, {})
            for answer, confidences in candidates.items():
                merged.setdefault(answer, []).extend(confidences)
    return total


def elect(candidates):
    """Returns the answers to one test input, by their votes, then by their mean confidence."""
    def standing(answer):
        confidences = candidates[answer]
        return len(confidences), sum(confidences) / len(confidences)

    return sorted(candidates, key=standing, reverse=True)


def vote_values(test, votes):
    """Returns {"eval/pass1": share, ...} of the tasks that were voted on and have known answers.

    A task counts by the share of its test inputs that are solved (official evaluators/arc.py).
    """
    solved = dict.fromkeys(PASSES, 0.0)
    num_tasks = 0
    groups = {group for group, _ in votes}
    for group in sorted(groups):
        # an answer that is not known is empty
        answers = [answer for _, answer in test.arc.pairs(group)]
        if not all(answer.size for answer in answers):
            continue
        num_tasks += 1
        for member, answer in enumerate(answers):
            elected = elect(votes[group, member])
            for k in PASSES:
                is_solved = grid_key(answer) in elected[:k]
                solved[k] += is_solved / len(answers)

    # the mean over the tasks
    values = {}
    for k, total in solved.items():
        values[f"eval/pass{k}"] = total / max(1, num_tasks)
    return values


def submission(test, votes):
    """Returns {task: [{"attempt_1": grid, "attempt_2": grid}, ...]}, an entry a test input, as for Kaggle."""
    attempts = {}
    for group, member in sorted(votes):
        elected = elect(votes[group, member])
        grids = [np.frombuffer(cells, dtype=np.uint8).reshape(shape).tolist() for shape, cells in elected[:2]]
        # a single answer is given twice
        best = {"attempt_1": grids[0], "attempt_2": grids[-1]}
        attempts.setdefault(test.arc.names[group], []).append(best)
    return attempts
