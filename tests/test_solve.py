"""scripts/solve.py, on small models of 4x4 Sudoku, of 6x6 mazes and of a puzzle without rules."""
import csv
import os
import pickle
import re
import shlex
from pathlib import Path

import export
import numpy as np
import pytest
import solve
import torch
from helpers import ROOT, in_new_process, run, start_script
from test_forks import flags_of

import evaluate
import weights
from puzzles.sudoku import Sudoku
from runtime.errors import UserError
from weights import load_model


@pytest.fixture(autouse=True)
def models_here(models_folder):
    """The folder of each test has the models, and the runs that trained them."""
    for path in models_folder.iterdir():
        os.symlink(path, path.name)


@pytest.fixture(scope="module")
def evaluation(models_folder):
    """Questions, answers and labels of train.py's own evaluation of the test set, as texts."""
    arrays = np.load(models_folder / "sudoku/eval_00000070.npz")
    names = "inputs", "surest_preds", "labels"
    kind = Sudoku(Sudoku.new_task(4))
    return [[kind.text(row) for row in arrays[name]] for name in names]


@pytest.fixture(scope="module")
def solved(evaluation):
    """A puzzle that the model solves, and its answer."""
    return next((question, answer) for question, answer, label in zip(*evaluation) if answer == label)


# Models

def test_a_model_file_needs_no_dataset_and_no_fork(evaluation):
    """load_model in a notebook and train.py's evaluation give the same answers."""
    saved = torch.load("model.pt")
    saved["settings"] |= dict(loss_type="a fork's", optimizer="a fork's", data_path="gone")
    torch.save(saved, "alone.pt")
    questions, answers, _ = evaluation
    for path in "alone.pt", "sudoku/ckpt_00000070.pt":
        trm = load_model(path)
        assert weights.solve(trm, questions[:20], steps=4)[0] == answers[:20]
        assert weights.solve(trm, []) == ([], [])
        assert len(trm.test_puzzles["inputs"]) == 60 and trm.step == 70
    solve.load("alone.pt", [])


def test_weights_that_other_code_has_wrapped_can_be_exported(evaluation):
    """Wrappers add prefixes to the names, and a dict around them. The average beside the weights counts."""
    wrapped = {}
    for name, t in torch.load("official.pt").items():
        wrapped["module._orig_mod.model.inner." + name.removeprefix(export.PREFIX)] = t
    zeros = {name: torch.zeros_like(t) for name, t in wrapped.items()}
    torch.save({"model": zeros, "ema_helper": wrapped, "epoch": 3}, "wrapped.pt")
    _, _, *flags = shlex.split(torch.load("model.pt")["command"])
    export.main(["wrapped.pt", "named.pt", *flags])
    questions, answers, _ = evaluation
    assert weights.solve(load_model("named.pt"), questions[:20], steps=4)[0] == answers[:20]


def test_a_fork_solves_and_is_named_without_its_file(data):
    """test_models.py has models of forks that load_model reads."""
    fork = "rsm.py"  # not the one of examples/, which would run by itself
    Path(fork).write_text(Path(f"{ROOT}/examples/rsm.py").read_text() + "# changed")
    run(data, "run", *flags_of(fork, "--max_steps=2"))
    question = "." * 16
    text = start_script("solve", ["run", fork, question, "--eval_halt_max_steps=3"]).output()
    assert "not sure after 3 steps" in text
    text = start_script("solve", ["run", question]).output(2)
    assert re.search(r"it was trained with rsm.py \w{8}, and needs the same here", text)


@pytest.mark.parametrize("question, name", [
    ("2.....4...6.....156....2..3.5.......", "sudoku-6x6"), ("S" + " " * 34 + "G", "maze-6x6")])
def test_a_puzzle_alone_takes_the_model_of_its_size_and_says_which(run_solve, question, name):
    assert re.match(rf"by \S*models/{name}.pt\n", run_solve(question))


def test_a_puzzle_of_any_other_size_takes_the_model_for_every_size():
    assert solve.choose_model("." * 256).name == "sudoku.pt"


def test_a_model_of_another_fork_says_so_once():
    """The model is built twice: for the size in the file, and for the puzzle's."""
    saved = torch.load(f"{ROOT}/models/sudoku.pt")
    saved["forks"]["sizes.py"] = "00000000"
    torch.save(saved, "other.pt")
    text = start_script("solve", ["other.pt", "." * 16, "--eval_halt_max_steps=1"]).output()
    assert text.count("warning: trained with the fork sizes.py 00000000") == 1
    assert text.count("warning: line 1: the puzzle has more than one solution") == 1


class Code:
    """What a hostile pickle is made of."""

    def __reduce__(self):
        return open, ("executed", "w")


def test_damaged_model_files_are_refused_and_not_executed():
    """test_wrong_input.py has more damage."""
    Path("cut.pt").write_bytes(Path("model.pt").read_bytes()[:-30])
    Path("pickle.pt").write_bytes(pickle.dumps(Code()))
    for name in "cut.pt", "pickle.pt":
        with pytest.raises(UserError, match=f"{name} is damaged"):
            solve.main([name, "." * 16])
    assert not os.path.exists("executed")


# Answers

def test_each_step_of_a_puzzle_is_shown(run_solve, solved):
    text = run_solve("model.pt", solved[0], "--steps", "--eval_halt_max_steps=9")
    assert solved[1] in text.splitlines() and "a solution: all rules" in text and "step 1: " in text


def solve_a_stream(question):
    reader, writer = os.pipe()
    os.dup2(reader, 0)
    os.write(writer, question.encode())
    os.close(writer)
    solve.main(["model.pt", "-"])


def test_a_stream_is_a_file(solved):
    assert solved[1] in in_new_process(solve_a_stream, solved[0]).splitlines()


def test_a_file_of_puzzles_is_solved_as_in_a_notebook(run_solve, evaluation, monkeypatch):
    """load_model and solve.py try the same copies, until the same answers are sure."""
    monkeypatch.setattr(evaluate, "SURE", 0.05)
    monkeypatch.setattr(weights, "CELLS_AT_A_TIME", 16 * 7)  # batches of 7 puzzles
    questions, _, labels = [texts[:20] for texts in evaluation]
    rows = solve_rows(run_solve, "sudoku", ["question", *questions])
    answers, sure = weights.solve(load_model("model.pt"), questions, 4, 8)
    assert [row["question"] for row in rows] == questions
    assert [row["answer"] for row in rows] == answers
    assert [row["result"] == "right" for row in rows] == list(map(str.__eq__, answers, labels))
    assert [float(row["confidence"]) for row in rows] == pytest.approx(sure, abs=1e-3)
    assert len({row["attempts"] for row in rows}) > 2
    with pytest.raises(UserError, match="b.csv: must be a new file"):
        solve_rows(run_solve, "sudoku", ["question", *questions])


def solve_rows(run_solve, model, lines, *flags):
    """Solves the puzzles in these lines of a file; returns the rows of the output."""
    Path("a.csv").write_text("\n".join(lines))
    text = run_solve(model, "a.csv", "--output=b.csv", *flags)
    rows = list(csv.DictReader(Path("b.csv").read_text().splitlines()))
    assert f"{[row['result'] for row in rows].count('right')} of {len(rows)} right (" in text
    return rows


def test_without_rules_the_column_answer_judges(run_solve):
    """The model exchanges the two symbols."""
    assert "\n100101\nnot judged: the rules are not known" in run_solve("exchange", "011010")
    assert "2 of 2 not judged" in run_solve("exchange", "011010\n011010")
    results = {"100101": "right", "1 0 0 1 0 1": "right", "000101": "wrong", "": "not judged"}
    lines = ["question,answer", *[f"011010,{answer}" for answer in results]]
    rows = solve_rows(run_solve, "exchange", lines)
    assert [row["result"] for row in rows] == list(results.values())


def test_a_maze_of_another_size_takes_several_attempts(run_solve):
    maze = "S" + " " * 62 + "G"
    text = run_solve("maze", maze, "--cells=64", "--eval_attempts=4")
    assert re.search(r"not sure after \d+ steps, attempts: 4", text)


def test_a_puzzle_is_drawn_as_an_animation(run_solve, solved):
    image = pytest.importorskip("PIL.Image")
    run_solve("sudoku", solved[0], "--plot=a.gif", "--eval_attempts=1")
    assert image.open("a.gif").n_frames > 1


# Wrong input

@pytest.mark.parametrize("argv, words", [
    (["1" * 35], "'11111111111111111111' is no file and no puzzle for a model of models/"),
    (["sudoku", "1" * 15], "no such file; as a text, line 1, '111111111111111', with 15 cells, is no puzzle"),
    (["nowhere", "." * 16], "nowhere: neither a file"),
    (["official.pt", "." * 16], "official.pt does not say what it solves: scripts/export.py makes"),
    (["sudoku", "11" + "." * 14], "line 1: the puzzle has no solution"),
    (["sudoku", "puzzles.csv", "--plot=a.gif"], "--steps and --plot show one puzzle")])
def test_wrong_input_is_named(argv, words):
    Path("puzzles.csv").write_text(f"question\n{'.' * 16}\n")
    with pytest.raises(UserError, match=re.escape(words)):
        solve.main(argv)
    assert not os.path.exists("a.gif")


def test_a_question_alone_is_none_of_arc(arc_folder):
    with pytest.raises(UserError, match="solves ARC tasks: train.py writes submission.json"):
        solve.main([str(arc_folder / "model.pt"), "0" * 16])
