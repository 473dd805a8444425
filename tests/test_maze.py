"""Mazes: generated ones, answers and copies, CSV files and the hub, path metrics, and train.py on mazes."""
import numpy as np
import pytest
from helpers import lines, prepare, run, write_csv

import prepare_maze
from data import Dataset

# isort: off
from puzzles import judge, maze_task, text_of
from puzzles.maze import GOAL, OPEN, PATH, START, WALL, maze_copies, path_metrics, solve_mazes
from puzzles.symmetries import dihedral


def tokens(*grids):
    """Returns tokens [n, cells] of mazes drawn with "." for an open cell and "/" between rows."""
    cells = [list(map("_#.SGo".index, grid.replace("/", ""))) for grid in grids]
    return np.array(cells, dtype=np.uint8)


def write_mazes(path, mazes):
    texts = [[text_of(maze_task(6), tokens) for tokens in pair] for pair in mazes.swapaxes(0, 1)]
    return write_csv(path, [("me", question, answer, "?") for question, answer in texts])


def plain_answer(maze, width):
    """Solves a maze with walls around it, a row after the other; returns the answer and the path's steps."""
    start, goal = [maze.tolist().index(token) for token in (START, GOAL)]
    moves = width, -1, 1, -width  # down, left, right, up
    steps = {goal: 0}
    cells = [goal]
    for cell in cells:
        for move in moves:
            if maze[cell + move] != WALL and cell + move not in steps:
                steps[cell + move] = steps[cell] + 1
                cells.append(cell + move)

    # from the start, the first move to a cell that is nearer to the goal
    answer = maze.copy()
    cell = start
    for left in range(steps.get(start, 0) - 1, 0, -1):
        cell = next(cell + move for move in moves if steps.get(cell + move) == left)
        answer[cell] = PATH
    return answer, steps.get(start, 0)


# The solver and the generator

@pytest.mark.parametrize("size, n", [(2, 300), (5, 300), (70, 3)])
def test_answers_are_shortest_paths_that_prefer_down_left_right_up(size, n):
    rng = np.random.default_rng(size)
    questions = np.where(rng.random((n, size * size)) < 0.35, WALL, OPEN).astype(np.uint8)
    for question in questions:
        question[rng.choice(size * size, 2, replace=False)] = START, GOAL
    answers, lengths = solve_mazes(questions, size)
    assert (lengths > 0).any()
    for question, answer, length in zip(questions, answers, lengths):
        with_walls = np.pad(question.reshape(size, size), 1, constant_values=WALL)
        expected, expected_length = plain_answer(with_walls.ravel(), size + 2)
        expected = expected.reshape(with_walls.shape)[1:-1, 1:-1]
        assert length == expected_length and (answer == expected.ravel()).all()


@pytest.mark.parametrize("size, min_path, n", [(30, 111, 10), (8, 12, 200)])
def test_generated_mazes_are_hard_and_distinct(size, min_path, n):
    """None is symmetric, or another one turned or reflected."""
    questions, _ = prepare_maze.generate(size, n, 3, min_path)
    _, lengths = solve_mazes(questions, size)
    assert min(lengths) >= min_path
    turned = questions[:, dihedral(size)].reshape(8 * n, -1)
    assert len(np.unique(turned, axis=0)) == 8 * n


# Datasets

def test_the_copies_of_a_maze_are_its_8_turns_each_solved_by_the_rule(tmp_path):
    path = prepare(
        tmp_path / "x", prepare_maze, source="generate", size=7, min_path=9, num_train=40, num_test=30)
    train = Dataset(path, "train")
    assert (train.labels == solve_mazes(train.inputs, 7)[0]).all()
    assert (np.diff(train.group_indices) == 8).all()
    grid = train.inputs[0].reshape(7, 7)
    turns = [*(np.rot90(grid, k) for k in range(4)), np.fliplr(grid), np.flipud(grid), grid.T,
             np.rot90(grid.T, 2)]  # in the official builder's order
    assert (train.inputs[:8].reshape(8, 7, 7) == turns).all()


def test_answers_that_do_not_follow_the_rule_are_turned_with_their_mazes():
    questions = tokens("S../.../..G", "S../.../..G")
    answers = tokens("S../o../ooG", "Soo/..o/..G")  # by the rule, and another one
    inputs, labels = maze_copies(np.stack([questions, answers]), 8)
    assert (inputs == questions[:, dihedral(3)]).all()
    assert (labels[0] == solve_mazes(inputs[0], 3)[0]).all()
    assert (labels[1] == answers[1][dihedral(3)]).all()


def test_mazes_of_the_test_set_are_dropped_turned_or_not(tmp_path, capsys):
    mazes = prepare_maze.generate(6, 20, 0, 6)
    turned = mazes[:, [16, 17]][:, :, dihedral(6)[3]]
    test = write_mazes(tmp_path / "test.csv", mazes[:, 15:])
    train = write_mazes(tmp_path / "train.csv", np.concatenate([mazes[:, :16], turned], axis=1))
    path = prepare(tmp_path / "x", prepare_maze, train_csv=train, test_csv=test, aug=False)
    assert (Dataset(path, "train").inputs == mazes[0, :15]).all()
    assert (Dataset(path, "test").labels == mazes[1, 15:]).all()
    assert "left out, since the test set has them: 3\n" in capsys.readouterr().out


# Metrics

MAZE = "S..../.##../...../.##../....G", "S..../o##../o..../o##../ooooG"  # and its shortest path
ANSWERS = {  # to MAZE: whether it is valid and optimal
    MAZE[1]: (True, True),
    "Soooo/.##.o/....o/.##.o/....G": (True, True),
    "Soooo/.##.o/ooooo/o##../ooooG": (True, False),  # a detour
    "S..../o##../ooo../o.o../ooooG": (False, False),  # a line that touches itself
    "S..../o##../...../o##../ooooG": (False, False),  # a gap
    "So.../.o#../.o.../.o#../.oooG": (False, False),  # through walls
    "S..../o##../oo.../o##../ooooG": (False, False),  # a blind alley
    "S..../o.#../o..../o##../ooooG": (True, True),  # a wall drawn open
    "_____/_____/_____/_____/_____": (False, False),
}


def test_path_metrics():
    """Alike for a maze and its turns; a solution has the question's walls, too."""
    question, label = tokens(*MAZE)
    answers = tokens(*ANSWERS)
    for turn in dihedral(5):
        valid, optimal = path_metrics(question[None, turn], label[None, turn], answers[:, turn])
        assert list(zip(valid, optimal)) == list(ANSWERS.values())
    solved = judge(maze_task(5), question[None], answers).solved
    assert np.flatnonzero(solved).tolist() == [0, 1]


def test_the_logged_metrics_are_those_of_the_saved_answers(tmp_path):
    flags = ["--puzzle_emb_ndim=0", "--ema=False", "--L_layers=1", "--H_cycles=1", "--L_cycles=1",
             "--halt_max_steps=2", "--lr=1e-2", "--max_steps=80"]
    path = prepare(
        tmp_path / "maze", prepare_maze, source="generate", size=4, min_path=1, num_train=60, num_test=49)
    out = tmp_path / "out"
    run(path, out, *flags, "--eval_save_outputs=inputs,labels,preds,")
    saved = np.load(out / "eval_00000080.npz")
    shares = [np.mean(metric) for metric in path_metrics(saved["inputs"], saved["labels"], saved["preds"])]
    final = lines(out)[-1]
    assert [final["eval/path_valid"], final["eval/path_optimal"]] == pytest.approx(shares)
    assert 0 < final["eval/exact_accuracy"] <= final["eval/path_optimal"] <= final["eval/path_valid"]
