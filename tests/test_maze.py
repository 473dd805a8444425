"""Mazes: generated ones, answers and copies, CSV files and the hub, path metrics, and train.py on mazes."""
import collections
import functools
import os
import shutil

import maze_copies
import numpy as np
import pytest
from conftest import ForkedTrain, hosts
from test_data import hub, prepare, settings, write_csv
from test_train import command, lines, run

import prepare_maze
from data import Dataset
from puzzles import GOAL, OPEN, PATH, START, WALL, label_notes, path_metrics

SYMBOLS = "_# SGo"
prepare = functools.partial(prepare, script=prepare_maze)


def tokens(*grids):
    """Tokens [n, cells] of mazes drawn with "." for an open cell and "/" between rows."""
    drawn = ("_", "#", ".", "S", "G", "o")
    return np.array([[drawn.index(c) for c in grid.replace("/", "")] for grid in grids], dtype=np.uint8)


def text(cells):
    return "".join(SYMBOLS[token] for token in cells)


def neighbours(row, column):
    """Down, left, right, up: the solver's order of preference."""
    return (row + 1, column), (row, column - 1), (row, column + 1), (row - 1, column)


def by_the_rule(question, size):
    """The shortest path that prefers down, left, right, up, by a plain search; None if there is none."""
    grid = question.reshape(size, size).copy()
    position, goal = (tuple(np.argwhere(grid == token)[0].tolist()) for token in (START, GOAL))
    steps_left, queue = {goal: 0}, collections.deque([goal])
    while queue:
        reached = queue.popleft()
        for cell in neighbours(*reached):
            if 0 <= min(cell) and max(cell) < size and grid[cell] != WALL and cell not in steps_left:
                steps_left[cell] = steps_left[reached] + 1
                queue.append(cell)
    if position not in steps_left:
        return None
    for steps in range(steps_left[position] - 1, 0, -1):
        position = next(cell for cell in neighbours(*position) if steps_left.get(cell) == steps)
        grid[position] = PATH
    return grid.ravel()


def write_mazes(path, mazes, rating="1"):
    return write_csv(path, [("me", text(question), text(answer), rating) for question, answer in mazes])


# The solver and the generator.

@pytest.mark.parametrize("size", [2, 5, 32, 33, 64])
def test_answers_are_shortest_paths_by_the_rule(size):
    n = 500 if size < 30 else 6
    rng = np.random.default_rng(size)
    questions = np.where(rng.random((n, size * size)) < 0.35, WALL, OPEN).astype(np.uint8)
    for question in questions:
        question[rng.choice(size * size, 2, replace=False)] = START, GOAL
    questions[0] = WALL
    questions[0, [0, -1]] = START, GOAL
    answers, steps = prepare_maze.solve(questions, size)
    expected = [by_the_rule(question, size) for question in questions]
    assert expected[0] is None and any(e is not None for e in expected)
    for question, answer, length, path in zip(questions, answers, steps, expected):
        assert (answer == (question if path is None else path)).all()
        assert length == (0 if path is None else (path == PATH).sum() + 1)
    assert (prepare_maze.unpack(prepare_maze.pack(questions == WALL, size)) == (questions == WALL)).all()


@pytest.mark.parametrize("size, min_path, n", [(30, 111, 10), (8, 12, 200), (5, 1, 100)])
def test_generated_mazes(size, min_path, n):
    questions, _ = prepare_maze.generate(size, n, 3, min_path)
    assert questions.shape == (n, size * size) and questions.dtype == np.uint8
    assert ((questions == START).sum(axis=1) == 1).all() and ((questions == GOAL).sum(axis=1) == 1).all()
    assert set(np.unique(questions)) == {WALL, OPEN, START, GOAL}
    _, steps = prepare_maze.solve(questions, size)
    assert min(steps) >= min_path and (n == 10 or min(steps) == min_path)
    copies = {text(q[copy]) for q in questions for copy in prepare_maze.dihedral(size)}
    assert len(copies) == 8 * n  # none is symmetric, or another one turned or reflected
    assert 0.3 < (questions == WALL).mean() < 0.5


# Datasets.

def test_labels_that_were_turned_are_noticed(tmp_path):
    maze_copies.main(tmp_path, 5, 60)
    notes = {kind: label_notes(*(Dataset(f"{tmp_path}/5-60-{kind}", split) for split in ("train", "test")))
             for kind in ("none", "solved", "turned")}
    assert not notes["none"] and not notes["solved"]
    [note] = notes["turned"]
    assert note.startswith("100% of the test labels") and "turned with their mazes" in note


def test_dataset(tmp_path):
    def generated(**changes):
        defaults = dict(source="generate", size=7, min_path=9, num_train=40, num_test=30)
        return prepare(tmp_path / str(len(os.listdir(tmp_path))), **(defaults | changes))

    path = generated()
    train, test = Dataset(path, "train"), Dataset(path, "test")
    assert len(train) == 320 and len(test) == 30 and train.vocab_size == 6 and train.seq_len == 49
    manifest = train.manifest
    assert manifest["kind"] == "maze" and manifest["grid"] == [7, 7] and manifest["symbols"] == SYMBOLS
    assert manifest["counts"] == {"train_puzzles": 40, "test_puzzles": 30}
    assert (np.diff(train.group_indices) == 8).all() and (np.diff(test.group_indices) == 1).all()
    for split in (train, test):
        assert (split.labels == prepare_maze.solve(split.inputs, 7)[0]).all()
    copies = []  # in the official builder's order
    for grid in train.inputs[::8].reshape(-1, 7, 7):
        copies += [grid, np.rot90(grid), np.rot90(grid, 2), np.rot90(grid, 3)]
        copies += [np.fliplr(grid), np.flipud(grid), grid.T, np.fliplr(np.rot90(grid))]
    assert (train.inputs == np.array(copies).reshape(-1, 49)).all()
    assert not {text(question) for question in test.inputs} & {text(question) for question in train.inputs}
    same, other = (Dataset(generated(seed=seed), "train") for seed in (0, 1))
    assert same.sha256 == train.sha256 != other.sha256
    plain = Dataset(generated(aug=False), "train")
    assert (plain.inputs == train.inputs[::8]).all() and plain.manifest["command"]["aug"] is False


def test_answers_that_do_not_follow_the_rule_are_turned_with_their_mazes():
    question, = tokens("S../.../..G")
    by_rule, other = answers = tokens("S../o../ooG", "Soo/..o/..G")
    (inputs, labels), = prepare_maze.augmented(np.stack([question] * 2), answers, 3, True)
    copies = prepare_maze.dihedral(3)
    assert (inputs == np.concatenate([question[copies]] * 2)).all()
    assert (labels[8:] == other[copies]).all() and (labels[:8] != by_rule[copies]).any()
    assert (labels[:8] == prepare_maze.solve(inputs[:8], 3)[0]).all()


# CSV files and the hub.

def test_csv_files(tmp_path):
    """Training rows that are repeated or in the test set, turned or not, are dropped. Ratings are free."""
    questions, answers = prepare_maze.generate(6, 20, 0, 6)
    turn = prepare_maze.dihedral(6)[3]
    rows = list(zip(questions, answers))
    turned = list(zip(questions[:, turn], answers[:, turn]))
    test = write_mazes(tmp_path / "test.csv", rows[15:])
    in_test = [rows[16], turned[17]]
    repeated = [rows[3], turned[4]]
    train = write_mazes(tmp_path / "train.csv", rows[:12] + in_test + repeated, rating="?")
    path = prepare(tmp_path / "a", train_csv=train, test_csv=test, aug=False)
    assert (Dataset(path, "train").inputs == questions[:12]).all()
    assert (Dataset(path, "test").labels == answers[15:]).all()
    assert Dataset(path, "train").manifest["counts"] == {
        "train_rows": 16, "test_rows": 5, "train_rows_in_test": 2, "train_rows_twice": 2,
        "train_puzzles": 12, "test_puzzles": 5}
    subsets = []
    for i, seed in enumerate((0, 0, 1)):
        path = prepare(tmp_path / f"few{i}", train_csv=train, test_csv=test, subsample_size=5, seed=seed)
        subsets.append(Dataset(path, "train").inputs[::8])
    assert len(subsets[0]) == 5 and (subsets[0] == subsets[1]).all() and (subsets[0] != subsets[2]).any()


def test_hub_end_to_end(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    questions, answers = prepare_maze.generate(30, 3, 0, 20)
    rows = list(zip(questions, answers))
    for split, part in (("train", rows[:2]), ("test", rows[2:])):
        name = f"/datasets/sapientinc/maze-30x30-hard-1k/resolve/main/{split}.csv"
        hub.files[name] = write_mazes(tmp_path / f"{split}.csv", part).read_bytes()
    train = Dataset(prepare_maze.main(settings(prepare_maze)), "train")
    assert len(train) == 16 and train.total_groups == 2 and (train.inputs[::8] == questions[:2]).all()


# Metrics.

MAZE = "S..../.##../...../.##../....G", "S..../o##../o..../o##../ooooG"  # and its shortest path
NEAR = "SG.../...../...../...../....."
FREE = "S.G../...../...../...../.....", "SoG../...../...../...../....."
ANSWERS = [  # a maze, an answer, whether it is valid and optimal
    (MAZE, MAZE[1], True, True), (MAZE, "Soooo/.##.o/....o/.##.o/....G", True, True),
    (MAZE, "Soooo/.##.o/ooooo/o##../ooooG", True, False),  # a detour
    (MAZE, "S..../o##../ooo../o.o../ooooG", False, False),  # a line that touches itself
    (MAZE, "S..../o##../...../o##../ooooG", False, False),  # a gap
    (MAZE, "So.../.o#../.o.../.o#../.oooG", False, False),  # through walls
    (MAZE, "S...o/o##../o..../o##../ooooG", False, False),  # a stray cell
    (MAZE, "S..../o##../oo.../o##../ooooG", False, False),  # a blind alley
    (MAZE, "Soooo/o##.o/o...o/o##.o/ooooG", False, False),  # both ways
    (MAZE, "Soooo/o##oo/ooooo/o##oo/ooooG", False, False),  # all cells
    (MAZE, "S...S/o##../o..../o##../ooooG", False, False),  # two starts
    (MAZE, "S..../o##../o..../o##../oooGo", False, False),  # a goal elsewhere
    (MAZE, "S..../o.#../o..../o##../ooooG", True, True),  # a wall drawn open
    (MAZE, "_____/_____/_____/_____/_____", False, False),
    ((NEAR, NEAR), NEAR, True, True),
    (FREE, "SoG../...../..ooo/..o.o/..ooo", False, False),  # a ring beside the path
    (FREE, "S.G../..o../oooo./...o./..ooo", False, False)]  # cells that do not meet S


def test_path_metrics():
    """In a batch and one by one, and of no answers."""
    mazes, answers, valid, optimal = zip(*ANSWERS)
    questions, labels = (tokens(*drawn) for drawn in zip(*mazes))
    answers = tokens(*answers)
    for turn in prepare_maze.dihedral(5):
        for rows in (slice(None), slice(0, 0), *(slice(i, i + 1) for i in range(len(ANSWERS)))):
            metrics = path_metrics(*(array[rows][:, turn] for array in (questions, labels, answers)), 5)
            assert tuple(tuple(values) for values in metrics) == (valid[rows], optimal[rows])


# train.py.

def test_train_and_evaluate(tmp_path):
    """The metrics that train.py logs are those of the answers that it saves."""
    flags = ["--hidden_size=16", "--mlp_t=False", "--pos_encodings=rope", "--puzzle_emb_ndim=0",
             "--ema=False", "--L_layers=1", "--H_cycles=1", "--L_cycles=1", "--halt_max_steps=2",
             "--lr=1e-2", "--max_steps=80"]
    path = prepare(tmp_path / "maze", source="generate", size=4, min_path=1, num_train=60, num_test=49)
    out = tmp_path / "out"
    text = run(path, out, *flags, "--eval_save_outputs=inputs,labels,preds,", "--eval_show_puzzle")
    final, saved = lines(out)[-1], np.load(out / "eval_00000080.npz")
    valid, optimal = path_metrics(saved["inputs"], saved["labels"], saved["preds"], 4)
    assert final["eval/puzzles"] == len(valid) == 49
    assert final["eval/path_valid"] == pytest.approx(valid.mean())
    assert final["eval/path_optimal"] == pytest.approx(optimal.mean())
    assert 0 < final["eval/exact_accuracy"] <= final["eval/path_optimal"] <= final["eval/path_valid"]
    line = f"path_valid {valid.mean():.4f} path_optimal {optimal.mean():.4f}"
    assert text.count(line) == 1 and "question" in text
    # With 49 puzzles on 2 ranks in batches of 8, one rank has a puzzle in the last round and the other none.
    argv = command(path, out, *flags, "--init_from=resume", "--eval_only")[2:]
    ranks = [ForkedTrain(argv, env=os.environ | environment) for environment in hosts(2)]
    path = shutil.copytree(path, tmp_path / "official")
    os.remove(path / "manifest.json")
    text = run(path, tmp_path / "other", *flags, "--max_steps=2")
    assert "exact" in text and "path_valid" not in text
    texts = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], texts
    assert [text.count(line) for text in texts] == [1, 0]
