"""Mazes: each answer is a shortest path, by one rule among equals; so is the answer to a turned copy."""
from pathlib import Path

import networkx
import numpy as np
import pytest
from helpers import judgements, prepare

import prepare_maze
from data import Dataset
from prepare_maze import maze_of
from puzzles.maze import GOAL, OPEN, PATH, START, WALL, path_metrics, solve_mazes
from puzzles.symmetries import dihedral


def tokens(*grids):
    """Returns tokens [n, cells] of mazes drawn with "." for an open cell and "/" between rows."""
    cells = [list(map("_#.SGo".index, grid.replace("/", ""))) for grid in grids]
    return np.array(cells, dtype=np.uint8)


def plain_answer(question, size):
    """Solves a maze cell by cell: [cells], the answer; it has no path if there is none."""
    answer = question.reshape(size, size).copy()
    graph = networkx.grid_2d_graph(size, size)
    graph.remove_nodes_from(map(tuple, np.argwhere(answer == WALL)))
    [start], [goal] = [map(tuple, np.argwhere(answer == token)) for token in (START, GOAL)]
    steps = networkx.single_source_shortest_path_length(graph, goal)

    # from the start, the first move to a cell that is nearer to the goal
    row, column = start
    for left in range(steps.get(start, 0) - 1, 0, -1):
        moves = (row + 1, column), (row, column - 1), (row, column + 1), (row - 1, column)
        row, column = next(cell for cell in moves if steps.get(cell) == left)
        answer[row, column] = PATH
    return answer.ravel()


# The solver and the generator

@pytest.mark.parametrize("size, n", [(2, 100), (5, 300), (30, 3)])
def test_answers_are_shortest_paths_that_prefer_down_left_right_up(size, n):
    rng = np.random.default_rng(size)
    questions = np.where(rng.random((n, size * size)) < 0.35, WALL, OPEN).astype(np.uint8)
    for question in questions:
        question[rng.choice(size * size, 2, replace=False)] = START, GOAL
    answers, _ = solve_mazes(questions)
    assert (answers == [plain_answer(question, size) for question in questions]).all()
    assert (answers == PATH).any()


def test_generated_mazes_are_hard_and_distinct():
    """None is symmetric, or another one turned or reflected. Of so small mazes many would be."""
    questions, answers = prepare_maze.generate(4, 100, 3, 5)
    assert (answers == PATH).sum(axis=1).min() >= 4
    turned = questions[:, dihedral(4)].reshape(800, 16)
    assert len(np.unique(turned, axis=0)) == 800


# Datasets

def test_the_copies_of_a_maze_are_its_8_turns_each_solved_by_the_rule():
    """test_data.py has the digest of such a dataset."""
    path = prepare("x", prepare_maze, source="generate", size=7, min_path=9, num_train=40, num_test=30)
    train = Dataset(path, "train")
    assert (train.labels == solve_mazes(train.inputs)[0]).all()
    assert (train.inputs.reshape(40, 8, 49) == train.inputs[::8][:, dihedral(7)]).all()


def test_answers_that_do_not_follow_the_rule_are_turned_with_their_mazes():
    questions = tokens("S../.../..G", "S../.../..G")
    answers = tokens("S../o../ooG", "Soo/..o/..G")  # by the rule, and another one
    rng = np.random.default_rng(0)
    inputs, labels = maze_of(3).training_copies(np.stack([questions, answers]), 7, rng, set())
    assert (labels[0] == solve_mazes(inputs[0])[0]).all()
    assert (labels[1] == answers[1][dihedral(3)[1:]]).all()


def test_a_maze_of_the_test_set_is_dropped_although_it_is_turned(capsys):
    Path("train.csv").write_text("question,answer\nS   #   G,Soo #o  G\nS  ## ##G,Soo##o##G\n")
    Path("test.csv").write_text("question,answer\nG   #   S,G  o# ooS\n")
    path = prepare("", prepare_maze, train_csv="train.csv", test_csv="test.csv", aug=False)
    assert path == "data/train-full-aug-1"
    assert [maze_of(3).text(row) for row in Dataset(path, "train").inputs] == ["S  ## ##G"]
    assert "left out, since the test set has them: 1\n" in capsys.readouterr().out


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


def test_a_path_is_valid_if_it_reaches_the_goal_and_optimal_if_none_is_shorter():
    """A maze and its turns are judged alike. A solution must have the walls of the question, too."""
    question, label = tokens(*MAZE)
    answers = tokens(*ANSWERS)
    for turn in dihedral(5):
        valid, optimal = path_metrics(question[None, turn], answers[:, turn])
        assert list(zip(valid, optimal)) == list(ANSWERS.values())

    # the walls
    assert np.flatnonzero(maze_of(5).judge(question[None], answers).solved).tolist() == [0, 1]

    # the metrics of an evaluation
    arrays = dict(inputs=question[None], labels=label[None], preds=answers, surest_preds=answers[:3])
    assert judgements(maze_of(5).task, arrays) == dict(
        path_valid=4, path_optimal=3, surest_path_valid=3, surest_path_optimal=2, surest_accuracy=1)
    # a puzzle without a label takes no part
    assert not any(judgements(maze_of(5).task, arrays | dict(count=np.zeros(1))).values())
