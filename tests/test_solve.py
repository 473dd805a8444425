"""scripts/solve.py, on small models of 4x4 Sudoku, of 6x6 mazes and of a puzzle without rules."""
import csv
import io
import os
import pickle
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import solve
import torch
from helpers import run
from test_forks import each_fork, flags_of, no_fork_stays  # noqa: F401

import configurator
import model as models
import puzzles
import train
from configurator import UserError

SUDOKU = puzzles.sudoku_task(4)


@pytest.fixture(scope="module")
def evaluation(models_folder):
    """The answers of train.py's own evaluation of the test set."""
    return np.load(models_folder / "sudoku/eval_00000070.npz")


@pytest.fixture(scope="module")
def solved(evaluation):
    """A puzzle that the model solves and its answer, as lines."""
    i = int((evaluation["surest_preds"] == evaluation["labels"]).all(axis=1).argmax())
    return [puzzles.text_of(SUDOKU, evaluation[name][i]) for name in ("inputs", "labels")]


# Models

def test_a_model_file_needs_no_dataset(run_solve, models_folder, evaluation, solved, tmp_path, monkeypatch):
    """TRM.load in a notebook, solve.py, and train.py's evaluation give the same answers."""
    monkeypatch.chdir(tmp_path)
    saved = torch.load(models_folder / "model.pt")
    saved["settings"] |= dict(loss_type="a fork's", optimizer="a fork's")
    torch.save(saved, "model.pt")
    model = models.TRM.load("model.pt")
    answers, _ = model.solve(torch.from_numpy(evaluation["inputs"]), steps=4)
    assert (answers.numpy() == evaluation["surest_preds"]).all()
    assert solved[1] in run_solve("model.pt", solved[0]).splitlines()


def test_a_checkpoint_is_a_model_too(models_folder, solved):
    model = models.TRM.load(models_folder / "sudoku/ckpt_00000070.pt")
    assert model.solve(solved[0] + "\r\n", steps=4)[0] == solved[1]
    assert len(model.puzzles["inputs"]) == 60 and model.step == 70


@pytest.mark.parametrize("question, words", [
    ("2.....4...6.....156....2..3.5.......", r"as a 6x6 sudoku, \S*models/sudoku-6x6.pt\n"),
    ("S     " + " " * 24 + "     G", r"as a 6x6 maze, \S*models/maze-6x6.pt\n")])
def test_a_puzzle_alone_takes_the_model_of_its_size_and_says_which(run_solve, question, words):
    assert re.match(words, run_solve(question))


@each_fork
def test_a_forks_model_solves_with_its_file_and_names_it_without(fork, data, tmp_path, run_solve, capsys):
    run(data, tmp_path, *flags_of(fork, "--max_steps=2"))
    text = run_solve(tmp_path, fork, "." * 16, "--halt_max_steps=3")
    answer, _ = models.TRM.load(tmp_path / "ckpt_00000002.pt").solve("." * 16, steps=3)
    assert answer in text.splitlines()

    # as in another process
    configurator.configure(train.__file__, [])
    configurator.FORKS.clear()
    capsys.readouterr()
    error = ""
    try:
        solve.main([str(tmp_path), "." * 16])
    except UserError as e:
        error = str(e)
    assert Path(fork).name in error + capsys.readouterr().err


class Code:
    """What a hostile pickle is made of."""

    def __reduce__(self):
        return open, ("executed", "w")


def flip_a_bit(content):
    """Returns the file with another exponent in one of its weights."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 64]) + content[middle + 1:]


@pytest.mark.parametrize("damage", [
    lambda content: b"", lambda content: content[:-30], lambda content: pickle.dumps(Code()), flip_a_bit])
def test_damaged_model_files_are_refused_and_not_executed(models_folder, damage, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.pt").write_bytes(damage((models_folder / "model.pt").read_bytes()))
    with pytest.raises(UserError, match="a.pt is damaged"):
        solve.main(["a.pt", "." * 16])
    assert os.listdir() == ["a.pt"]


# Answers

def test_a_puzzle_is_a_line_a_file_or_stdin(run_solve, models_folder, solved, tmp_path, monkeypatch):
    question, answer = solved
    text = run_solve(models_folder / "sudoku", question)
    assert answer in text.splitlines() and "a solution: all rules" in text
    assert re.search(r"\(step [1-4]: \d+% sure; 4 steps, attempt 1 of 1; .*sudoku\)", text)
    grid = "\n".join(re.findall("....", question)).replace(".", "0") + "\n"
    (tmp_path / "puzzle.txt").write_text("\ufeff" + grid)
    assert run_solve(models_folder / "sudoku", tmp_path / "puzzle.txt") == text
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(grid.encode())))
    assert run_solve(models_folder / "sudoku", "-") == text


def test_steps_shows_each_step_and_may_be_more_than_in_training(run_solve, models_folder, solved):
    text = run_solve(models_folder / "sudoku", solved[0], "--steps", "--halt_max_steps=19")
    assert [*range(1, 20)] == [int(step) for step in re.findall(r"step (\d+): \d+% sure(?!;)", text)]


def test_a_file_of_puzzles_is_solved_as_the_evaluation_does(run_solve, models_folder, evaluation, tmp_path,
                                                            monkeypatch):
    texts = {name: [puzzles.text_of(SUDOKU, row) for row in evaluation[name]]
             for name in ("inputs", "surest_preds")}
    (tmp_path / "a.csv").write_text("source, question\n" + "".join(f"x,{text}\n" for text in texts["inputs"]))
    right = (evaluation["surest_preds"] == evaluation["labels"]).all(axis=1)
    monkeypatch.setattr(solve, "CELLS_AT_A_TIME", 16 * 7)  # batches of 7 puzzles
    argv = models_folder / "sudoku", tmp_path / "a.csv", f"--output={tmp_path / 'b.csv'}"
    assert f"{right.sum()} of 60 right ({right.mean():.1%})\n" in run_solve(*argv)
    rows = read_results(tmp_path / "b.csv")
    assert [row["question"] for row in rows] == texts["inputs"]
    assert [row["answer"] for row in rows] == texts["surest_preds"]
    assert [row["result"] for row in rows] == np.where(right, "right", "wrong").tolist()
    certainties = solve.sigmoid(evaluation["surest_q_halt_logits"])
    assert [float(row["certainty"]) for row in rows] == pytest.approx(certainties, abs=1e-3)
    with pytest.raises(UserError, match="b.csv exists already"):
        run_solve(*argv)


def read_results(path):
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.mark.parametrize("content, words", [
    ("1111\n", ":2: no puzzle under the header"),
    ("question\n................\n12\n", ":3: the puzzle '12' has 2 cells")])
def test_a_wrong_file_is_refused_before_anything_is_solved(models_folder, content, words, tmp_path):
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(UserError, match=re.escape(words)):
        solve.main([str(models_folder / "sudoku"), str(tmp_path / "a.csv"), f"--output={tmp_path / 'b.csv'}"])
    assert not (tmp_path / "b.csv").exists()


def test_without_rules_the_column_answer_judges(run_solve, models_folder, tmp_path):
    """The model exchanges the two symbols; other characters stand in cells that do not count."""
    assert "\n100101\nnot judged: the rules are not known" in run_solve(models_folder / "exchange", "011\n010")
    answers = {"100101": "right", "?00101": "right", "000101": "wrong", "": "not judged"}
    rows = "".join(f"011010,{answer}\n" for answer in answers)
    (tmp_path / "a.csv").write_text("question,answer\n" + rows)
    text = run_solve(models_folder / "exchange", tmp_path / "a.csv", f"--output={tmp_path / 'b.csv'}")
    assert "2 of 4 right (50.0%)" in text
    assert [row["result"] for row in read_results(tmp_path / "b.csv")] == list(answers.values())


def test_cells_that_never_count_show_the_question(run_solve, models_folder, tmp_path):
    saved = torch.load(models_folder / "exchange/ckpt_00000030.pt")
    saved["puzzles"]["labels"][:, 1] = puzzles.IGNORE_LABEL
    torch.save(saved, tmp_path / "model.pt")
    assert "\n110101\n" in run_solve(tmp_path / "model.pt", "011010")


def test_mazes_of_any_size_and_attempts_with_noise(run_solve, models_folder, tmp_path):
    maze = "S #   \n  # # \n ## # \n      \n # ## \n     G\n"
    (tmp_path / "maze.txt").write_text("".join(line.rstrip() + "\n" for line in maze.splitlines()))
    text = run_solve(models_folder / "maze", tmp_path / "maze.txt", "--steps")
    assert text == run_solve(models_folder / "maze", maze.replace("\n", ""), "--steps")
    larger = "S" + " " * 62 + "G"  # 8x8
    text = run_solve(models_folder / "maze", larger, "--eval_rollouts=4", "--eval_noise=0.5")
    assert re.search(r"attempt [1-4] of 4; ", text)


def test_pictures(run_solve, models_folder, solved, tmp_path):
    image = pytest.importorskip("PIL.Image")
    for name, frames in ("a.png", 1), ("a.gif", 5):
        run_solve(models_folder / "sudoku", solved[0], f"--plot={tmp_path / name}")
        picture = image.open(tmp_path / name)
        assert min(picture.size) >= 480 and picture.n_frames in (frames, frames - 1)  # equal frames are merged


# Wrong input

@pytest.mark.parametrize("argv, words", [
    (["a", "b", "c"], "MODEL PUZZLE"),
    (["12"], "'12' is neither a file nor a puzzle for any of "),
    (["nowhere", "." * 16], "No such file or directory: 'nowhere'"),
    (["official.pt", "." * 16], "official.pt does not say what it solves: scripts/export.py makes"),
    (["sudoku-data", "." * 16], "no complete checkpoint"),
    (["sudoku", "." * 16, "--plot=a.jpg"], ".png or .gif"),
    (["sudoku", "." * 16, "--output=a.csv"], "--output is for a .csv"),
    (["sudoku", "nowhere.csv", "--steps"], "--steps and --plot show one puzzle"),
    (["sudoku", "nowhere.csv"], "nowhere.csv: cannot be read"),
    (["sudoku", "." * 16, "--eval_rollouts=0"], "eval_rollouts must be"),
    (["sudoku", "1..5............"], "row 1, column 4 of the puzzle is '5': must be one of '.1234'"),
    (["sudoku", "1.1............."], "the puzzle has no solution: row 1, column 1 breaks a rule"),
    (["maze", "S" + " " * 15], "the puzzle has no solution"),
    (["maze", "SG" + " " * 4222], "has 4224 cells, not 64x64")])
def test_wrong_input_is_one_line(models_folder, argv, words, monkeypatch):
    monkeypatch.chdir(models_folder)
    with pytest.raises(UserError, match=re.escape(words)):
        solve.main(argv)


def test_arc_is_for_the_page(arc_folder):
    with pytest.raises(UserError, match="solves ARC tasks: play.py shows them"):
        solve.main([str(arc_folder / "model.pt"), "0" * 16])
