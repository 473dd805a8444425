"""scripts/solve.py and puzzles.py: on a small model of 4x4 Sudoku that is trained here, and on mazes."""
import csv
import io
import os
import pickle
import re
import shutil
import sys

import numpy as np
import pytest
import solve
import torch
from helpers import SOLVE_MODEL

import model as models
import puzzles
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


def read_results(path):
    return list(csv.DictReader(path.read_text().splitlines()))


# Models

def test_model_file_needs_no_dataset(run_solve, models_folder, evaluation, solved, tmp_path, monkeypatch):
    """TRM.load in a notebook, solve.py, and train.py's evaluation give the same answers."""
    monkeypatch.chdir(tmp_path)
    saved = torch.load(models_folder / "model.pt")
    saved["settings"] |= dict(loss_type="a fork's", optimizer="a fork's")
    torch.save(saved, "model.pt")
    model = models.TRM.load("model.pt")
    answers, _ = model.solve(torch.load("model.pt")["puzzles"]["inputs"], steps=4)
    assert (answers.numpy() == evaluation["surest_preds"]).all()
    assert solved[1] in run_solve("model.pt", solved[0]).splitlines()
    checkpoint = models.TRM.load(models_folder / "sudoku/ckpt_00000070.pt")
    assert checkpoint.solve(solved[0] + "\r\n", steps=4)[0] == solved[1]
    with pytest.raises(ValueError, match="2 cells, not 16"):
        checkpoint.solve("12")


def test_a_puzzle_alone_takes_the_model_of_its_size(run_solve, models_folder, solved, tmp_path, monkeypatch):
    """Official checkpoints among the models do not say what they solve."""
    monkeypatch.setattr(solve, "MODELS", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    saved = torch.load(models_folder / "model.pt")
    torch.save(saved | {"task": puzzles.maze_task(4)}, "a.pt")
    shutil.copy(models_folder / "model.pt", "b.pt")
    shutil.copy(models_folder / "official.pt", tmp_path)
    (tmp_path / "puzzle").write_text(solved[0])
    monkeypatch.setattr(os, "access", lambda *args: False)  # a folder that cannot be written to will do
    assert "; b.pt, training step 70" in run_solve("puzzle")
    with pytest.raises(UserError, match="'12' is no file, and no puzzle for one of a.pt, b.pt"):
        solve.main(["12"])


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
    (tmp_path / "a.pt").write_bytes(damage((models_folder / "model.pt").read_bytes()))
    with pytest.raises(UserError, match="a.pt: cannot be read as a checkpoint"):
        solve.main(["a.pt", "." * 16])
    if damage is flip_a_bit:
        with pytest.raises(ValueError, match="a.pt is damaged"):
            models.TRM.load("a.pt")
    assert os.listdir() == ["a.pt"]


def test_official_checkpoint_with_its_settings(run_solve, models_folder, tmp_path):
    """It has its weights alone; its sizes tell what it solves."""
    torch.save(torch.load(models_folder / "maze/ckpt_00000004.pt")["ema"], tmp_path / "official.pt")
    settings = "\n".join(SOLVE_MODEL).replace("--", "").replace("float32", "'float32'")
    (tmp_path / "model.py").write_text(settings)
    maze = "S" + " " * 34 + "G"
    answer = run_solve(models_folder / "maze", maze).rpartition("; ")[0]
    for given in SOLVE_MODEL, [tmp_path / "model.py"]:
        text = run_solve(tmp_path / "official.pt", *given, "--mlp_t=False", "--pos_encodings=rope", maze,
                   "--halt_max_steps=4")
        assert text.startswith(answer)


# Answers

def test_puzzle_from_a_line_a_file_and_stdin(run_solve, models_folder, solved, tmp_path, monkeypatch):
    question, answer = solved
    text = run_solve(models_folder / "sudoku", question)
    assert answer in text.splitlines() and "a solution: all rules" in text
    assert re.search(r"\(step [1-4]: \d+% sure, kept; 4 steps, .*training step 70\)", text)
    grid = "\n".join(re.findall("....", question)).replace(".", "0") + "\n"
    (tmp_path / "puzzle.txt").write_text("\ufeff" + grid)
    assert run_solve(models_folder / "sudoku", tmp_path / "puzzle.txt") == text
    for operands in [], ["-"]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(grid.encode())))
        assert run_solve(models_folder / "sudoku", *operands) == text


def test_steps_shows_powers_of_two_the_kept_and_the_last_step(run_solve, models_folder, solved):
    # more steps than in training
    text = run_solve(models_folder / "sudoku", solved[0], "--steps", "--halt_max_steps=19")
    kept = int(re.search(r"step (\d+): \d+% sure, kept; 19", text)[1])
    assert {1, 2, 4, 8, 16, kept, 19} == set(map(int, re.findall(r"step (\d+): ", text)))
    assert text.count("sure, kept") == 2 and "question" in text


def test_file_of_puzzles(run_solve, models_folder, evaluation, tmp_path, monkeypatch):
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
    certainty = solve.sigmoid(evaluation["surest_q_halt_logits"])
    assert [float(row["certainty"]) for row in rows] == pytest.approx(certainty, abs=1e-3)
    with pytest.raises(UserError, match="b.csv: exists already"):
        run_solve(*argv)
    assert read_results(tmp_path / "b.csv") == rows  # untouched


@pytest.mark.parametrize("content, words", [
    ("1111\n", ":2: no puzzle under the header"),
    ("question\n................\n12\n", ":3: the puzzle '12' has 2 cells")])
def test_wrong_file_is_refused_before_anything_is_solved(models_folder, content, words, tmp_path):
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(UserError, match=re.escape(words)):
        solve.main([str(models_folder / "sudoku"), str(tmp_path / "a.csv"), f"--output={tmp_path / 'b.csv'}"])
    assert not (tmp_path / "b.csv").exists()


def test_a_puzzle_of_another_kind_is_answered_without_rules(run_solve, models_folder, tmp_path):
    model = models_folder / "exchange"
    # the checkpoint says what it solves
    text = run_solve(model, "011\n010", "--steps", "--data_path=nowhere")
    assert "\n100101\n" in text and "not judged: the rules are not known" in text
    assert re.search(r"\n 0  1  1 +1  0  0", text)
    (tmp_path / "a.jsonl").write_text('{"question": "011010"}\n')
    assert "1 of 1 not judged" in run_solve(model, tmp_path / "a.jsonl", f"--output={tmp_path / 'b.csv'}")
    assert [(row["answer"], row["result"]) for row in read_results(tmp_path / "b.csv")] == [
        ("100101", "not judged")]


def test_mazes_of_any_size_and_attempts_with_noise(run_solve, models_folder, tmp_path):
    maze = "S #   \n  # # \n ## # \n      \n # ## \n     G\n"
    (tmp_path / "maze.txt").write_text("".join(line.rstrip() + "\n" for line in maze.splitlines()))
    text = run_solve(models_folder / "maze", tmp_path / "maze.txt", "--steps")
    assert "path" in text and text == run_solve(models_folder / "maze", maze.replace("\n", ""), "--steps")
    larger = "S" + " " * 62 + "G"  # 8x8
    text = run_solve(models_folder / "maze", larger, "--eval_rollouts=4", "--eval_noise=0.5")
    assert "path" in text and re.search(r"attempt [1-4] of 4; ", text)


def test_pictures(run_solve, models_folder, solved, tmp_path):
    image = pytest.importorskip("PIL.Image")
    for name, depth, smallest in ("a.png", 7, 500), ("a.gif", 2, 480):
        text = run_solve(
            models_folder / "sudoku", solved[0], f"--plot={tmp_path / name}", f"--halt_max_steps={depth}")
        picture = image.open(tmp_path / name)
        assert f"wrote {tmp_path / name}" in text and min(picture.size) >= smallest
    assert picture.n_frames >= 2  # 3, and 3 more of the answer; the writer merges equal ones


# Rules

def test_cells_that_break_a_rule():
    _, question = puzzles.parse_question(SUDOKU, "1...............")
    answer = np.array([int(d) + 1 for d in "1234341221434321"])
    boards, questions = np.stack([answer] * 4), np.stack([question] * 4)
    # 2 again in row 2, column 2: in its row, its column and its box; cell 1 empty; 2 for the given 1
    boards[[1, 2, 3], [5, 1, 0]] = 3, 1, 3
    broken = puzzles.broken_cells(SUDOKU, questions, boards)
    assert [np.flatnonzero(cells).tolist() for cells in broken] == [[], [1, 5, 7], [1], [0, 1, 8]]
    assert puzzles.are_solutions(SUDOKU, questions, boards).tolist() == [True, False, False, False]


OFFICIAL = ["official.pt", *SOLVE_MODEL]  # 4x4 Sudokus have as many symbols as mazes


@pytest.mark.parametrize("argv, words", [
    (["a", "b", "c"], "MODEL PUZZLE"),
    (["nowhere", "." * 16], "nowhere: cannot be read as a checkpoint"),
    (["sudoku-data", "." * 16], "no complete checkpoint"),
    (["sudoku", "." * 16, "--plot=a.jpg"], ".png or .gif"),
    (["sudoku", "tasks.json"], "choose a file for the answers to the tasks, --output=submission.json"),
    (["sudoku", "--task=x"], "sudoku-data: not made by prepare_arc.py"),
    (["sudoku", "nowhere.csv", "--steps"], "--steps and --plot show one puzzle"),
    (["sudoku", "nowhere.csv"], "nowhere.csv: cannot be read"),
    (["sudoku", "1..5............"], "row 1, column 4 of the puzzle is '5': must be one of '.1234'"),
    (["sudoku", "1.1............."], "the puzzle has no solution: row 1, column 1 breaks a rule"),
    (["official.pt", "SG" + " " * 14], "other settings (mlp_t, L_layers"),
    (OFFICIAL + ["S" + " " * 15], "the puzzle has no solution"),
    (OFFICIAL + ["SG" + " " * 4223], "has 4225 cells, not 64x64")])
def test_wrong_input_is_one_line(models_folder, argv, words, monkeypatch):
    monkeypatch.chdir(models_folder)
    with pytest.raises(UserError, match=re.escape(words)):
        solve.main(argv)
