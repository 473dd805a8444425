"""Symmetries, and evaluate.py: slots that are filled again, attempts at copies, what is saved and shown.

test_solve.py compares the most confident answers with those of weights.solve and solve.py.
"""
import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import run

import evaluate
from evaluate import save_file
from puzzles import kind_of, sigmoid
from puzzles.maze import Maze, long_mazes
from puzzles.sudoku import Sudoku, minimal_sudokus
from runtime.errors import UserError

SETTINGS = ["--puzzle_emb_ndim=0", "--multiple_of=256", "--H_cycles=1", "--L_cycles=1", "--ema=False",
            "--eval_halt_max_steps=6", "--max_steps=120"]
N = 40  # test puzzles


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """The folder of a run that solves some puzzles and not others."""
    out = str(tmp_path_factory.mktemp("trained") / "run")
    run(data, out, *SETTINGS, "--lr=1e-2", "--halt_max_steps=2", "--weight_decay=0.1")
    return out


def evaluated(data, trained, *flags):
    """Returns (metrics, saved arrays) of all test puzzles."""
    names = "labels,preds,q_halt_logits,surest_preds,surest_q_halt_logits,attempts"
    again = "--init_from=resume", "--eval_only", f"--eval_save_outputs={names}", *flags
    words = re.search("evaluation: (.*)", run(data, trained, *SETTINGS, *again))[1].split()
    return dict(zip(words[::2], map(float, words[1::2]))), dict(np.load(f"{trained}/eval_00000120.npz"))


@pytest.fixture
def sure(data, trained, monkeypatch):
    """The q_halt from which an answer counts as sure, so low that 3 of 10 first attempts reach it."""
    _, saved = evaluated(data, trained)
    value = np.quantile(saved["surest_q_halt_logits"], 0.7)
    monkeypatch.setattr(evaluate, "SURE", sigmoid(value))
    return value


@pytest.mark.parametrize("task, puzzle, num_different", [
    (Sudoku.new_task(9), minimal_sudokus(0, 1, 1, 9), 20),
    (Maze.new_task(6), [boards[:1] for boards in long_mazes(0, 1, 6, 6)], 7)])
def test_copies_are_different_puzzles_whose_answers_can_be_turned_back(task, puzzle, num_different):
    kind = kind_of(task)
    [question], _ = puzzle
    copies, others = [[*itertools.islice(kind.copies(question, 3, number), 20)] for number in (8, 9)]
    assert str(copies) != str(others)
    questions = {symmetries.apply(question).tobytes() for symmetries in copies}
    assert len(questions - {question.astype(np.uint8).tobytes()}) == num_different
    for symmetries in copies:
        turned = symmetries.apply(np.stack(puzzle))
        assert (symmetries.undo(turned) == puzzle).all()
        assert kind.judge(*turned).solved.all()


def test_attempts_leave_the_papers_metrics_and_add_theirs(data, trained, sure):
    one, saved_one = evaluated(data, trained)
    five, saved = evaluated(data, trained, "--eval_attempts=5")

    # one attempt and five have the same values of the paper's metrics
    assert 0.1 < one["exact_accuracy"] < 0.95 and "attempts" not in one
    changed = {name: five[name] for name in ("surest_accuracy", "attempts")}
    assert five == pytest.approx(one | changed)
    assert np.array_equal(saved["preds"], saved_one["preds"])

    # the metrics of attempts are means over the puzzles
    is_solved = (saved["surest_preds"] == saved["labels"]).all(1)
    means = [is_solved.mean(), saved["attempts"].mean()]
    assert [five["surest_accuracy"], five["attempts"]] == pytest.approx(means, abs=1e-4)

    # an answer that is never sure takes all five attempts, and some other one takes fewer
    assert set(saved["attempts"][saved["surest_q_halt_logits"] < sure]) == {5} < set(saved["attempts"])

    # the seed draws the copies that attempts are made at
    assert evaluated(data, trained, "--eval_attempts=5", "--seed=1")[0] != five


def test_answers_that_cannot_be_written_cost_a_warning(capsys):
    settings = SimpleNamespace(out_dir="/proc/self/full", gcs_dir="")
    save_file(settings, SimpleNamespace(rank=0), lambda: False, "submission.json", lambda f: None)
    assert "/proc/self/full/submission.json: not saved: " in capsys.readouterr().err


def test_a_kind_without_symmetries_has_one_attempt(random_puzzles, arc_folder):
    for data, words in (random_puzzles, "prepare_csv.py --dihedral"), (arc_folder / "arc-data", "versions"):
        with pytest.raises(UserError, match=f"eval_attempts=2: .*{words}"):
            run(data, "out", "--eval_attempts=2")
    assert not Path("out").exists()


@pytest.mark.parametrize("patience, flags", [
    (0, ["--global_batch_size=7"]), (1, ["--global_batch_size=12", "--micro_batch_size=4"])])
def test_the_answers_do_not_depend_on_the_batch(data, trained, sure, patience, flags):
    """Each puzzle keeps the answer with which it left, though its slot took others before and after.

    test_solve.py compares the answers with those of weights.solve, one puzzle at a time.
    """
    same = "--eval_attempts=4", f"--eval_patience={patience}"
    values, saved = evaluated(data, trained, *same, "--global_batch_size=64")
    other, other_saved = evaluated(data, trained, *same, *flags)
    logits = other_saved["surest_q_halt_logits"]
    assert np.allclose(saved["surest_q_halt_logits"], logits, rtol=1e-3, atol=1e-3)
    assert (saved["surest_preds"] == other_saved["surest_preds"]).mean() > 0.99
    assert len(set(saved["attempts"])) > 2 and (saved["attempts"] != other_saved["attempts"]).sum() <= 1
    assert (values["steps"] < 6) == bool(patience)
    assert other["puzzles"] == N and other == pytest.approx(values, abs=0.03)
