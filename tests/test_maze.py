"""Mazes: generated ones, their answers and copies, CSV files and the hub, path metrics, and train.py's command on them."""
import collections
import csv
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

import data
import prepare_maze
from configurator import UserError, configure
from data import GOAL, PATH, START, WALL, Dataset, path_metrics
from test_data import hub  # noqa: F401, a fixture: a local server in the hub's place

ROOT = os.path.dirname(os.path.abspath(data.__file__))
SYMBOLS = "_# SGo"
HEADER = ["source", "question", "answer", "rating"]


def settings(**changes):
    return configure(prepare_maze.__file__, [f"--{key}={value}" for key, value in changes.items()])


def prepare(path, **changes):
    return prepare_maze.prepare(settings(output_dir=path, **changes))


def generated(path, **changes):
    return prepare(path, **dict(dict(source="generate", size=7, min_path=9, num_train=40, num_test=30), **changes))


def tokens(*grids):
    """Tokens [n, cells] of mazes drawn with "." for an open cell and "/" between rows."""
    return np.array([[SYMBOLS.index(c) for c in grid.replace("/", "").replace(".", " ")] for grid in grids], dtype=np.uint8)


def text(cells):
    return "".join(SYMBOLS[token] for token in cells)


def distances(question, size, origin):
    """{cell: steps from the cell with the token origin}, by a plain search."""
    grid = question.reshape(size, size)
    queue = collections.deque(map(tuple, np.argwhere(grid == origin)))
    found = {queue[0]: 0}
    while queue:
        r, c = queue.popleft()
        for cell in ((r + 1, c), (r, c - 1), (r, c + 1), (r - 1, c)):
            if 0 <= min(cell) and max(cell) < size and grid[cell] != WALL and cell not in found:
                found[cell] = found[r, c] + 1
                queue.append(cell)
    return found


def by_the_rule(question, size):
    """The answer that goes down, left, right, up, in this order of preference, among the shortest; None where there is none."""
    to_goal, grid = distances(question, size, GOAL), question.reshape(size, size).copy()
    r, c = map(int, np.argwhere(grid == START)[0])
    if (r, c) not in to_goal:
        return None
    while to_goal[r, c] > 1:
        r, c = next(cell for cell in ((r + 1, c), (r, c - 1), (r, c + 1), (r - 1, c)) if to_goal.get(cell) == to_goal[r, c] - 1)
        grid[r, c] = PATH
    return grid.ravel()


def write_csv(path, mazes, rating="1"):
    with open(path, "w", newline="") as f:
        csv.writer(f).writerows([HEADER] + [["me", text(q), text(a), rating] for q, a in mazes])
    return str(path)


# The solver and the generator.

@pytest.mark.parametrize("size", [2, 5, 12, 32, 33, 64])
def test_answers_are_shortest_paths_by_the_rule(size):
    rng = np.random.default_rng(size)
    n = 40 if size < 30 else 6
    questions = np.where(rng.random((n, size * size)) < 0.35, WALL, data.OPEN).astype(np.uint8)
    for question in questions:
        question[rng.choice(size * size, 2, replace=False)] = START, GOAL
    questions[0] = WALL
    questions[0, [0, -1]] = START, GOAL
    answers, steps = prepare_maze.solve(questions, size)
    expected = [by_the_rule(question, size) for question in questions]
    assert expected[0] is None and any(e is not None for e in expected)
    for question, answer, length, wanted in zip(questions, answers, steps, expected):
        assert (answer == (question if wanted is None else wanted)).all()
        assert length == (0 if wanted is None else (wanted == PATH).sum() + 1)
    assert (prepare_maze.unpack(prepare_maze.pack(questions == WALL, size)) == (questions == WALL)).all()


@pytest.mark.parametrize("size, min_path, n", [(30, 111, 30), (8, 12, 300), (5, 1, 200)])
def test_generated_mazes(size, min_path, n):
    questions = prepare_maze.generate(size, n, 3, min_path, 1)
    assert questions.shape == (n, size * size) and questions.dtype == np.uint8
    assert ((questions == START).sum(axis=1) == 1).all() and ((questions == GOAL).sum(axis=1) == 1).all()
    assert set(np.unique(questions)) == {WALL, data.OPEN, START, GOAL}
    assert min(distances(q, size, START)[tuple(map(int, np.argwhere(q.reshape(size, size) == GOAL)[0]))] for q in questions) == min_path
    copies = {text(q[copy]) for q in questions for copy in prepare_maze.dihedral(size)}
    assert len(copies) == 8 * n  # none is another one turned or reflected, nor symmetric here
    assert 0.3 < (questions == WALL).mean() < 0.5


def test_generation_is_seeded_and_does_not_depend_on_the_processes(monkeypatch):
    one = prepare_maze.generate(12, 4000, 7, 30, 1)
    monkeypatch.setattr(data, "POOL_AFTER", 0.0)
    assert (one == prepare_maze.generate(12, 4000, 7, 30, 2)).all()
    assert (one[:50] == prepare_maze.generate(12, 50, 7, 30, 1)).all()
    assert (one[:50] != prepare_maze.generate(12, 50, 8, 30, 1)).any()


@pytest.mark.parametrize("size, min_path, n, found", [(3, 4, 5000, r"\d+"), (6, 30, 10, "0")])
def test_more_mazes_than_there_are(size, min_path, n, found):
    with pytest.raises(UserError, match=f"hardly more than {found} {size}x{size} mazes whose shortest path has {min_path} steps or more"):
        prepare_maze.generate(size, n, 0, min_path, 1)


# Data sets.

def test_data_set(tmp_path):
    path = generated(tmp_path / "a")
    train, test = Dataset(path, "train"), Dataset(path, "test")
    assert len(train) == 320 and len(test) == 30 and train.vocab_size == 6 and train.seq_len == 49
    assert train.manifest["kind"] == "maze" and train.manifest["grid"] == [7, 7] and train.manifest["symbols"] == SYMBOLS
    assert train.manifest["counts"] == {"train_puzzles": 40, "test_puzzles": 30}
    assert (np.diff(train.group_indices) == 8).all() and (np.diff(test.group_indices) == 1).all()
    for split in (train, test):
        for question, answer in zip(split.inputs, split.labels):
            assert (answer == by_the_rule(question, 7)).all()
    assert generated(tmp_path / "b") and Dataset(str(tmp_path / "b"), "train").sha256 == train.sha256
    assert generated(tmp_path / "c", seed=1) and Dataset(str(tmp_path / "c"), "train").sha256 != train.sha256
    tested = {text(question[copy]) for question in np.asarray(test.inputs) for copy in prepare_maze.dihedral(7)}
    assert not tested & {text(question) for question in train.inputs}
    plain = Dataset(generated(tmp_path / "d", aug=False), "train")
    assert (plain.inputs == train.inputs[::8]).all() and plain.manifest["settings"]["aug"] is False


def test_layout_is_the_official_one(tmp_path):
    """The files that the official builder would write for these mazes, but for the answers of its copies."""
    path = generated(tmp_path / "a")
    for split, copies in (("train", 8), ("test", 1)):
        ours = Dataset(path, split)
        turned = [[grid, np.rot90(grid), np.rot90(grid, 2), np.rot90(grid, 3), np.fliplr(grid), np.flipud(grid), grid.T,
                   np.fliplr(np.rot90(grid))][:copies] for grid in ours.inputs[::copies].reshape(-1, 7, 7)]
        assert (ours.inputs == np.array(turned).reshape(-1, 49)).all()
        with open(f"{path}/{split}/dataset.json") as f:
            groups = len(ours) // copies
            assert json.load(f) == {
                "pad_id": 0, "ignore_label_id": 0, "blank_identifier_id": 0, "vocab_size": 6, "seq_len": 49, "num_puzzle_identifiers": 1,
                "total_groups": groups, "mean_puzzle_examples": 1.0, "total_puzzles": groups, "sets": ["all"]}
        n = len(ours)
        for field, array in (("puzzle_identifiers", np.zeros(n)), ("puzzle_indices", np.arange(n + 1)),
                             ("group_indices", np.arange(0, n + 1, copies))):
            stored = np.load(f"{path}/{split}/all__{field}.npy")
            assert stored.dtype == np.int32 and (stored == array).all()
    os.remove(f"{path}/manifest.json")  # as the official builder leaves it
    theirs = Dataset(path, "train")
    assert theirs.manifest == {} and theirs.train_batch(0, 0, 16)["inputs"].shape == (16, 49)


def test_copies_of_other_answers_are_turned_alike():
    """Answers that do not follow the rule stay what they are."""
    question, = tokens("S../.../..G")
    ruled, other = tokens("S../o../ooG", "Soo/..o/..G")
    (inputs, labels), = prepare_maze.augmented(np.stack([question, question]), np.stack([ruled, other]), 3, True)
    places = prepare_maze.dihedral(3)
    assert (inputs == np.concatenate([question[places]] * 2)).all()
    assert (labels[8:] == other[places]).all() and (labels[:8] != ruled[places]).any()
    assert all((label == by_the_rule(inputs[i], 3)).all() for i, label in enumerate(labels[:8]))


@pytest.mark.parametrize("given, name", [
    (dict(), "data/maze-30x30-hard-1k-aug-8"),
    (dict(aug=False, subsample_size=200, seed=3), "data/maze-30x30-hard-200-seed-3"),
    (dict(train_csv="x/mine.csv.gz", test_csv="y.csv"), "data/mine-full-aug-8"),
    (dict(source="generate", size=8, min_path=10, num_train=2000), "data/maze-8x8-path-10-2k-aug-8"),
])
def test_names(given, name):
    assert prepare_maze.complete(settings(**given)).output_dir == name


# CSV files and the hub.

def test_csv_files(tmp_path):
    """Rows of the test set, as they are or turned, and repeated ones leave the training set; a rating may be anything."""
    questions = prepare_maze.generate(6, 20, 0, 6, 1)
    answers, _ = prepare_maze.solve(questions, 6)
    turn = prepare_maze.dihedral(6)[3]
    rows = list(zip(questions, answers))
    test = write_csv(tmp_path / "test.csv", rows[15:])
    train = write_csv(tmp_path / "train.csv", rows[:12] + [rows[16], (questions[17][turn], answers[17][turn]), rows[3],
                                                           (questions[4][turn], answers[4][turn])], rating="?")
    path = prepare(tmp_path / "a", train_csv=train, test_csv=test, aug=False)
    assert (Dataset(path, "train").inputs == questions[:12]).all() and (Dataset(path, "test").labels == answers[15:]).all()
    assert Dataset(path, "train").manifest["counts"] == {
        "train_rows": 16, "test_rows": 5, "train_rows_in_test": 2, "train_rows_twice": 2, "train_puzzles": 12, "test_puzzles": 5}
    few = [Dataset(prepare(tmp_path / f"few{i}", train_csv=train, test_csv=test, subsample_size=5, seed=seed), "train").inputs[::8]
           for i, seed in enumerate((0, 0, 1))]
    assert len(few[0]) == 5 and (few[0] == few[1]).all() and (few[0] != few[2]).any()
    with pytest.raises(UserError, match=r"test\.csv: no maze is left of 5 rows: all are in the test set too"):
        prepare(tmp_path / "b", train_csv=test, test_csv=test)


GOOD = "S../.#./..G", "S../o#./ooG"
FAULTS = {
    "two starts": (("S.S/.#./..G", "SoS/.#o/..G"), "the question has 2 cells S, not 1"),
    "no goal": (("S../.#./...", "Soo/.#o/..o"), "the question has 0 cells G, not 1"),
    "a path in the question": (("So./.#./..G", "Soo/.#o/..G"), "character 2 of the question is 'o', not one of '# SG'"),
    "a foreign character": (("S../.#./..G", "Soo/.#o/..x"), "character 9 of the answer is 'x', not one of '# SGo'"),
    "another maze": (("S../.#./..G", "Soo/..o/..G"), "the answer has ' ' in row 2, column 2 where the question has '#'"),
    "through a wall": (("S../.#./..G", "So./.oo/..G"), "the answer has 'o' in row 2, column 2 where the question has '#'"),
    "no way": (("S#./##./..G", "S#./##./..G"), "the question has no way from S to G"),
    "a gap": (("S../.#./..G", "Soo/.#./..G"), "the answer's o do not make one line from S to G"),
    "both ways": (("S../.#./..G", "Soo/o#o/ooG"), "the answer's o do not make one line from S to G"),
    "a detour": (("..../.##./S.G./....", "oooo/o##o/S.Go/...."), "the answer's path has 8 steps where 2 are enough"),
    "no square": (("S.G./.##./....", "SoG./.##./...."), "a question of 12 characters is not a square of 2x2 to 64x64 cells"),
    "an empty question": (("/", "/"), "a question of 0 characters is not a square of 2x2 to 64x64 cells"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_wrong_rows_are_named(case, tmp_path):
    (question, answer), message = FAULTS[case]
    draw = lambda grid: grid.replace("/", "").replace(".", " ")
    size = max(3, question.index("/"))
    first = prepare_maze.generate(size, 1, 0, 2, 1)
    good = write_csv(tmp_path / "good.csv", list(zip(first, prepare_maze.solve(first, size)[0])))
    with open(good) as f:
        lines = f.read()
    # first in its file, where the size is read from, where that is the fault; else in the third line
    lines = lines if len(question.replace("/", "")) == size * size else lines.splitlines()[0] + "\n"
    (tmp_path / "mine.csv").write_text(lines + f"me,{draw(question)},{draw(answer)},1\n")
    with pytest.raises(UserError, match=re.escape(f"mine.csv:{len(lines.splitlines()) + 1}: {message}")) as error:
        prepare(tmp_path / "out", train_csv=good, test_csv=tmp_path / "mine.csv")
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_other_answers_pass_unchecked(tmp_path):
    good = write_csv(tmp_path / "good.csv", [tokens(*GOOD)])
    mine = write_csv(tmp_path / "mine.csv", [tokens("S../.#./.G.", "Soo/.#o/.Go")])
    path = prepare(tmp_path / "out", train_csv=mine, test_csv=good, check_paths=False)
    assert (Dataset(path, "train").labels[0] == tokens("Soo/.#o/.Go")).all()


def test_hub_end_to_end(hub, tmp_path, monkeypatch, capfd):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setattr(data.random, "uniform", lambda low, high: 0.01)
    questions = prepare_maze.generate(30, 24, 0, 111, 1)
    rows = list(zip(questions, prepare_maze.solve(questions, 30)[0]))
    for split, part in (("train", rows[:16]), ("test", rows[16:])):
        name = f"/datasets/sapientinc/maze-30x30-hard-1k/resolve/main/{split}.csv"
        with open(write_csv(f"{split}.csv", part), "rb") as f:
            hub.files.update({name: f.read()})
        hub.faults[name] = [503, "break"]
    path = prepare_maze.prepare(settings())
    assert path == "data/maze-30x30-hard-1k-aug-8" and sorted(os.listdir("data/downloads/maze-30x30-hard-1k")) == ["test.csv", "train.csv"]
    train, test = Dataset(path, "train"), Dataset(path, "test")
    assert len(train) == 128 and len(test) == 8 and train.seq_len == 900 and train.total_groups == 16
    assert (train.inputs[::8] == questions[:16]).all()
    out, _ = capfd.readouterr()
    assert "each in 8 of its 8 rotations and reflections" in out and f"--data_path={path}" in out


# Metrics.

QUESTION = "S..../.##../...../.##../....G"
ANSWERS = {  # valid, optimal
    "the label": ("S..../o##../o..../o##../ooooG", True, True),
    "another shortest path": ("Soooo/.##.o/....o/.##.o/....G", True, True),
    "a third": ("S..../o##../oooo./.##o./...oG", True, True),
    "a line that touches itself": ("S..../o##../ooo../o.o../ooooG", False, False),
    "a gap": ("S..../o##../...../o##../ooooG", False, False),
    "through walls": ("So.../.o#../.o.../.o#../.oooG", False, False),
    "only the ends": (QUESTION, False, False),
    "a stray cell": ("S...o/o##../o..../o##../ooooG", False, False),
    "a blind alley": ("S..../o##../oo.../o##../ooooG", False, False),
    "both ways": ("Soooo/o##.o/o...o/o##.o/ooooG", False, False),
    "all cells": ("Soooo/o##oo/ooooo/o##oo/ooooG", False, False),
    "no start": ("o..../o##../o..../o##../ooooG", False, False),
    "two starts": ("S...S/o##../o..../o##../ooooG", False, False),
    "a goal elsewhere": ("S..../o##../o..../o##../oooGo", False, False),
    "a wall drawn open": ("S..../o.#../o..../o##../ooooG", True, True),
    "padding": ("_____/_____/_____/_____/_____", False, False),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_path_metrics(case):
    question, label = tokens(QUESTION, ANSWERS["the label"][0])
    answer, = tokens(ANSWERS[case][0])
    for turn in prepare_maze.dihedral(5):
        got = path_metrics(question[None, turn], label[None, turn], answer[None, turn], (5, 5))
        assert [values.tolist() for values in got] == [[ANSWERS[case][1]], [ANSWERS[case][2]]]


def test_path_metrics_of_a_batch():
    """A detour is valid and not optimal, a ring beside the path makes it invalid; the rows of a batch do not mix; an oblong grid."""
    cases = [  # question, label, answer, valid, optimal
        ("S.G..../.##..../......./.......", "SoG..../.##..../......./.......", "S.Go.../o##o.../oooo.../.......", True, False),
        ("S.G..../.##..../......./.......", "SoG..../.##..../......./.......", "SoG..../.##..../......./.......", True, True),
        ("S.G..../......./......./.......", "SoG..../......./......./.......", "SoG..../....ooo/....o.o/....ooo", False, False),
        ("SG...../......./......./.......", "SG...../......./......./.......", "SG...../......./......./.......", True, True),
        ("S.G..../......./......./.......", "SoG..../......./......./.......", "S.G.ooo/....o../oooooo./.......", False, False),
    ]
    batch = [tokens(*column) for column in list(zip(*cases))[:3]]
    for rows in (slice(None), slice(2, 3), slice(0, 0)):
        assert [v.tolist() for v in path_metrics(*(part[rows] for part in batch), (4, 7))] == [[c[k] for c in cases[rows]] for k in (3, 4)]


def test_path_metrics_of_generated_mazes():
    questions = prepare_maze.generate(30, 20, 0, 111, 1)
    answers, _ = prepare_maze.solve(questions, 30)
    assert np.all(path_metrics(questions, answers, answers.astype(np.int32), (30, 30)))
    for cell in range(900):  # any change of any cell of the path breaks it
        wrong = answers.copy()
        wrong[:, cell] = np.where(wrong[:, cell] == PATH, data.OPEN, wrong[:, cell])
        valid, optimal = path_metrics(questions, answers, wrong, (30, 30))
        assert (valid == optimal).all() and (valid == (answers[:, cell] != PATH)).all()


# train.py.

TINY = ["--device=cpu", "--hidden_size=16", "--num_heads=2", "--mlp_t=False", "--pos_encodings=rope", "--puzzle_emb_ndim=0", "--L_layers=1",
        "--H_cycles=1", "--L_cycles=1", "--halt_max_steps=2", "--global_batch_size=16", "--lr=1e-2", "--lr_warmup_steps=5", "--ema=False",
        "--forward_dtype=float32", "--eval_interval=0"]


def command(*arguments):
    done = subprocess.run([sys.executable, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_train_and_evaluate(tmp_path):
    """The metrics that train.py logs are those of the answers that it saves."""
    path, out = tmp_path / "maze", tmp_path / "out"
    command("prepare_maze.py", "--source=generate", "--size=4", "--min_path=1", "--num_train=60", "--num_test=49", f"--output_dir={path}")
    shown = command("train.py", *TINY, f"--data_path={path}", f"--out_dir={out}", "--max_steps=80", "--eval_save_outputs=inputs,labels,preds",
                    "--eval_show_puzzle")
    with open(out / "metrics.jsonl") as f:
        final = json.loads(f.readlines()[-1])
    saved = np.load(out / "eval_00000080.npz")
    valid, optimal = path_metrics(*(saved[k] for k in ("inputs", "labels", "preds")), (4, 4))
    assert final["eval/puzzles"] == len(valid) == 49
    assert (final["eval/path_valid"], final["eval/path_optimal"]) == (pytest.approx(valid.mean()), pytest.approx(optimal.mean()))
    assert 0 < final["eval/exact_accuracy"] <= final["eval/path_optimal"] <= final["eval/path_valid"]
    assert f"path valid {valid.mean():.4f} optimal {optimal.mean():.4f}" in shown and "question" in shown
    # 49 puzzles on 2 ranks in batches of 8: in the last round one rank has a puzzle and the other none
    two = command("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py", *TINY, f"--data_path={path}", f"--out_dir={out}",
                  "--max_steps=80", "--init_from=resume", "--eval_only")
    assert shown.count(f"path valid {valid.mean():.4f} optimal {optimal.mean():.4f}") == two.count(f"path valid {valid.mean():.4f} optimal") == 1
    os.remove(path / "manifest.json")
    without = command("train.py", *TINY, f"--data_path={path}", f"--out_dir={tmp_path / 'other'}", "--max_steps=2")
    assert "exact" in without and "path valid" not in without
