"""scripts/solve.py and puzzles.py: on a small model of 4x4 Sudoku that is trained here, and on mazes."""
import csv
import json
import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
import solve
import torch
from configurator import UserError, configure

import model as models
import prepare_maze
import prepare_sudoku
import puzzles
import train
from data import IGNORED, write_dataset

MODEL = [
    "--hidden_size=64", "--num_heads=2", "--puzzle_emb_ndim=0", "--expansion=2", "--H_cycles=1",
    "--L_cycles=1", "--L_layers=1", "--halt_max_steps=2", "--eval_halt_max_steps=4",
    "--forward_dtype=float32"]
TRAINING = [
    "--device=cpu", "--global_batch_size=48", "--lr=1e-2", "--lr_warmup_steps=20", "--weight_decay=0.1",
    "--ema_rate=0.95", "--loss_type=softmax_cross_entropy", "--eval_interval=0"]
SUDOKU, MAZE = puzzles.guess(16, 6), puzzles.guess(36, 6)


def prepare(script, *flags):
    script.main(configure(script.__file__, ["--source=generate", *flags]))


@pytest.fixture
def run(capsys):
    """solve.py in this process: a function of its arguments that returns what it prints."""
    def run(*argv):
        capsys.readouterr()
        solve.main(list(map(str, argv)))
        return capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """NAME-data/ and NAME/ of three models; model.pt and official.pt, the first of them in files.

    One solves most 4x4 Sudokus; one 6x6 mazes, badly; one exchanges the cells 0 and 1 of a grid of 2x3.
    """
    path = tmp_path_factory.mktemp("solve")
    prepare(prepare_sudoku, "--size=4", "--num_train=500", "--num_test=60", "--num_aug=10",
            f"--output_dir={path / 'sudoku-data'}")
    prepare(prepare_maze, "--size=6", "--min_path=6", "--num_train=64", "--num_test=20",
            f"--output_dir={path / 'maze-data'}")
    questions = np.random.default_rng(0).integers(1, 3, (64, 6), dtype=np.uint8)
    splits = {split: (64, 1, [(questions, 3 - questions)]) for split in ("train", "test")}
    kind = {"kind": "exchange", "grid": [2, 3], "symbols": "_01"}
    write_dataset(str(path / "exchange-data"), splits, 3, kind)

    def train_one(name, *flags):
        c = configure(train.__file__, [
            f"--data_path={path / name}-data", f"--out_dir={path / name}", *MODEL, *TRAINING, *flags])
        train.check_settings(c)
        train.replica(c, "cpu")

    outputs = "inputs,labels,preds,q_halt_logits,surest_preds,surest_q_halt_logits"
    train_one("sudoku", "--max_steps=70", f"--eval_save_outputs={outputs}")
    train_one("sudoku", "--max_steps=70", "--init_from=resume", f"--export={path / 'model.pt'}")
    torch.save(torch.load(path / "model.pt")["weights"], path / "official.pt")
    attention = ["--mlp_t=False", "--pos_encodings=rope"]
    train_one("maze", *attention, "--max_steps=4", "--eval_final_max_puzzles=8")
    train_one("exchange", "--max_steps=30")
    return path


def read_rows(path):
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.fixture(scope="module")
def evaluation(folder):
    """The answers of train.py's own evaluation of the test set."""
    return np.load(folder / "sudoku/eval_00000070.npz")


@pytest.fixture(scope="module")
def solved(evaluation):
    """A puzzle that the model solves and its answer, as lines."""
    i = int((evaluation["surest_preds"] == evaluation["labels"]).all(axis=1).argmax())
    return [puzzles.text_of(SUDOKU, evaluation[name][i]) for name in ("inputs", "labels")]


def test_model_file_needs_nothing_else(run, folder, evaluation, solved, tmp_path, monkeypatch):
    """model.py alone, solve.py without the dataset, and train.py's evaluation give the same answers."""
    shutil.copy(folder / "model.pt", tmp_path)
    shutil.copy(models.__file__, tmp_path)
    code = ("import sys, torch; from model import TRM; m = TRM.load('model.pt')\n"
            "answers, sure = m.solve(torch.load('model.pt')['puzzles']['inputs'], steps=4)\n"
            "torch.save([answers, sure, m.solve(sys.argv[1], steps=4), list(sys.modules)], 'out.pt')")
    subprocess.run([sys.executable, "-c", code, solved[0]], cwd=tmp_path, check=True, timeout=120)
    answers, sure, (answer, _), modules = torch.load(tmp_path / "out.pt")
    assert (answers.numpy() == evaluation["surest_preds"]).all() and answer == solved[1]
    assert sure.numpy() == pytest.approx(1 / (1 + np.exp(-evaluation["surest_q_halt_logits"])), abs=1e-4)
    assert not {"train", "data", "puzzles"} & set(modules)
    monkeypatch.chdir(tmp_path)
    assert solved[1] in run("model.pt", solved[0]).splitlines()
    checkpoint = models.TRM.load(folder / "sudoku/ckpt_00000070.pt")
    assert checkpoint.solve(solved[0] + "\r\n", steps=4)[0] == solved[1]
    for question, words in ("12", "2 cells, not 16"), ("x" * 16, "substring"):
        with pytest.raises(ValueError, match=words):
            checkpoint.solve(question)


def test_model_file_says_how_it_was_made(folder):
    saved = torch.load(folder / "model.pt")
    manifest = json.loads((folder / "sudoku-data/manifest.json").read_text())
    assert saved["data"] == train.Dataset(folder / "sudoku-data", "test").sha256
    assert saved["task"] == {name: manifest[name] for name in ("kind", "grid", "symbols")}
    assert saved["metrics"]["eval/puzzles"] == 60 and 0.5 < saved["metrics"]["eval/exact_accuracy"] <= 1
    assert saved["step"] == 70 and "out_dir" not in saved["settings"]
    command = shlex.split(saved["command"])
    c = configure(train.__file__, command[2:])
    assert command[:2] == ["python", "train.py"] and (c.max_steps, c.lr, c.export) == (70, 0.01, "")
    assert c.data_path == str(folder / "sudoku-data") and c.init_from == "scratch"


def test_model_of_the_puzzles_size(run, folder, solved, tmp_path, monkeypatch):
    """solve.py with a puzzle alone, and with a model alone (the puzzle comes from stdin)."""
    for name in "a.pt", "b.pt":
        shutil.copy(folder / "model.pt", tmp_path / name)
    other = torch.load(tmp_path / "a.pt")
    other["task"] = dict(kind="maze", grid=[4, 4], symbols=puzzles.MAZE)
    torch.save(other, tmp_path / "a.pt")
    (tmp_path / "puzzle").write_text(solved[0])
    (tmp_path / "a.csv").write_text(f"question\n{solved[0]}\n")
    monkeypatch.setattr(solve, "MODELS", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for puzzle in solved[0], "puzzle":
        assert "; b.pt, training step 70" in run(puzzle)
    assert "1 of 1 puzzles solved" in run("a.csv")
    with pytest.raises(UserError, match="'out/model' .is it a file.*a.pt: .*; b.pt: .*has 9 cells"):
        run("out/model")


class Code:
    """What a hostile pickle is made of."""

    def __reduce__(self):
        return open, ("executed", "w")


@pytest.mark.parametrize("change, words", [
    (lambda saved: saved["task"].update(grid=[3, 6]), "another version"),
    (lambda saved: saved["task"].update(symbols=" .12"), "another version"),
    (lambda saved: saved["task"].update(symbols=7), "another version"),
    (lambda saved: saved.update(task=None), "another version"),
    (lambda saved: saved["model"].pop("seq_len"), "another version"),
    (lambda saved: saved["model"].update(seq_len="16"), "another version"),
    (lambda saved: saved.update(settings=[]), "another version"),
    (lambda saved: saved["puzzles"]["inputs"].fill_(6), "another version"),
    (lambda saved: saved["puzzles"].update(labels=torch.zeros(3)), "another version"),
    (lambda saved: saved["settings"].update(lr="fast"), "lr must be float"),
    (lambda saved: saved["settings"].update(hidden_size=-1), "hidden_size must be above 0"),
    (lambda saved: saved["settings"].update(hidden_size=48), "these settings need"),
    (lambda saved: saved["settings"].update(L_layers=2), "other settings"),
    (lambda saved: saved["weights"].update(gate=torch.zeros(1)), "also has gate"),
    (lambda saved: saved["weights"].update(gate="x"), "holds no weights by name"),
    (lambda saved: saved.update(weights={}), "holds no weights by name"),
    (lambda saved: saved.update(extra=Code()), "cannot be read as a checkpoint")])
def test_wrong_model_files(folder, change, words, tmp_path, monkeypatch):
    """They are refused in one line, and nothing in them is executed."""
    saved = torch.load(folder / "model.pt")
    change(saved)
    torch.save(saved, tmp_path / "a.pt")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words):
        solve.main(["a.pt", "." * 16])
    assert os.listdir() == ["a.pt"]


def test_damaged_model_files_and_newer_ones(run, folder, solved, tmp_path, monkeypatch, recwarn):
    monkeypatch.chdir(tmp_path)
    content = (folder / "model.pt").read_bytes()
    for damaged in (b"", b"x" * 100, content[:-30], content[:1000], content[:50_000] + content[60_000:],
                    pickle.dumps(Code())):
        (tmp_path / "a.pt").write_bytes(damaged)
        with pytest.raises(UserError, match="a.pt: cannot be read as a checkpoint"):
            run("a.pt", solved[0])
    assert not recwarn and os.listdir() == ["a.pt"]
    saved = torch.load(folder / "model.pt")
    saved["puzzles"]["inputs"][0, 0] = 0  # padding
    torch.save(saved | {"more": 1, "settings": saved["settings"] | {"more": 1}}, tmp_path / "a.pt")
    assert solved[1] in run("a.pt", solved[0]).splitlines()


def test_surest_of_equals_is_the_last_step_of_the_first_attempt():
    q_halt = np.float32([[[0, 9], [0, 1]], [[9, 0], [3, 0]], [[9, 9], [2, 1]]])  # 3 steps, 2 puzzles
    step, attempt = solve.surest(q_halt)
    assert step.tolist() == [2, 1] and attempt.tolist() == [0, 0]
    assert solve.surest(q_halt[:1])[1].tolist() == [1, 1]


def test_attempts_with_noise(run, folder, solved, evaluation):
    path, questions = str(folder / "sudoku"), evaluation["inputs"][:8]
    state, c = solve.read_model(path, [])
    model = solve.build_run(state, c, path, 16)
    plain = list(solve.solve(model, questions))
    assert len(plain) == 4 and (plain[-1][0][:, 0] == evaluation["preds"][:8]).all()
    assert plain[-1][1][:, 0] == pytest.approx(evaluation["q_halt_logits"][:8], abs=1e-4)
    c.eval_rollouts = 3
    noisy = list(solve.solve(model, questions))
    assert noisy[0][0].shape == (8, 3, 16) and noisy[0][1].shape == (8, 3)
    for (preds, q_halt), (noisy_preds, noisy_q_halt) in zip(plain, noisy):
        assert noisy_q_halt[:, :1] == pytest.approx(q_halt, abs=1e-4)  # the first attempt has no noise
        assert (noisy_preds[:, :1] == preds).all()
    assert np.ptp(noisy[-1][1], axis=1).min() > 1e-4  # the others differ
    alone = list(solve.solve(model, questions[5:6]))  # whatever else is in the batch
    assert alone[-1][1] == pytest.approx(noisy[-1][1][5:6], abs=1e-4)
    text = run(path, solved[0], "--eval_rollouts=4", "--eval_noise=0.5")
    assert solved[1] in text and re.search(r"sure after step [1-4] of 4, attempt [1-4] of 4; ", text)


def test_puzzle_from_a_line_a_file_and_stdin(run, folder, solved, tmp_path):
    question, answer = solved
    text = run(folder / "sudoku", question)
    assert answer in text.splitlines() and "a solution: all rules" in text
    assert re.search(r"\d% sure after step [1-4] of 4; .*training step 70", text)
    grid = "\n".join(" ".join(question[i:i + 4]) for i in range(0, 16, 4)).replace(".", "0") + "\n"
    (tmp_path / "puzzle.txt").write_text("\ufeff" + grid)
    stdin = os.dup(0)
    for operands in ([tmp_path / "puzzle.txt"], [], ["-"]):
        with open(tmp_path / "puzzle.txt") as f:
            os.dup2(f.fileno(), 0)
        assert run(folder / "sudoku", *operands) == text
    os.dup2(stdin, 0)
    text = run(folder / "sudoku", question, "--steps", "--halt_max_steps=19")  # more than in training
    kept = int(re.search(r"after step (\d+) of 19", text)[1])
    assert {1, 2, 4, 8, 16, kept, 19} == set(map(int, re.findall(r"step (\d+): ", text)))
    assert text.count("%, kept") == 1 and "question" in text


def test_file_of_puzzles(run, folder, evaluation, tmp_path, monkeypatch):
    """Every other one with its answer; those that have none are judged by the rules."""
    questions, labels, answers = (evaluation[name] for name in ("inputs", "labels", "surest_preds"))
    texts = [[puzzles.text_of(SUDOKU, row) for row in tokens] for tokens in (questions, labels)]
    lines = [f"{'' if i % 2 else label},x,{question}" for i, (question, label) in enumerate(zip(*texts))]
    (tmp_path / "a.csv").write_text("\n".join(["answer, source ,question", *lines, ""]))
    right = (answers == labels).all(axis=1)  # every question has one solution
    certainty = 1 / (1 + np.exp(-evaluation["surest_q_halt_logits"]))
    monkeypatch.setattr(solve, "SURE", float(np.median(certainty)))
    sure = certainty > np.median(certainty)
    summary = (f"{right.sum()} of 60 puzzles solved ({right.mean():.1%}); of the 30 answers that are "
               f"{solve.SURE:.0%} sure, {right[sure].sum()} are right")
    assert 0 < right[::2].sum() < 30 and 0 < right[1::2].sum() < 30
    assert summary in run(folder / "sudoku", tmp_path / "a.csv", f"--output={tmp_path / 'b.csv'}")
    rows = read_rows(tmp_path / "b.csv")
    assert [float(row["certainty"]) for row in rows] == pytest.approx(certainty, abs=1e-3)
    assert len(steps := {row["step"] for row in rows}) > 1 and steps <= set("1234")
    results = [["wrong", "right"], ["not a solution", "solution"]]
    for i, row in enumerate(rows):
        texts = [puzzles.text_of(SUDOKU, tokens[i]) for tokens in (questions, answers)]
        assert [row["question"], row["answer"], row["result"]] == [*texts, results[i % 2][int(right[i])]]
    monkeypatch.setattr(solve, "CELLS_AT_A_TIME", 16 * 7 * 2)  # batches of 7 puzzles
    assert summary in run(folder / "sudoku", tmp_path / "a.csv", "--eval_rollouts=2", "--eval_noise=0")
    with pytest.raises(solve.UserError, match="b.csv: exists already"):
        run(folder / "sudoku", tmp_path / "a.csv", f"--output={tmp_path / 'b.csv'}")
    assert read_rows(tmp_path / "b.csv") == rows  # untouched


@pytest.mark.parametrize("content, words", [
    ("1" * 16 + "\n", ":2: no puzzle under the header"),
    ("question\n" + "." * 16 + "\n12\n", ":3: the puzzle '12' has 2 cells"),
    ("question,answer\n" + "." * 16 + "\n", ":2: must have question, as text"),
    ("question,answer\n" + "." * 16 + ",12\n", ":2: the answer has 2 characters, not 16"),
    ("question,answer\n" + "." * 16 + "," + "x" * 16 + "\n", ":2: row 1, column 1 of the answer is 'x'"),
    ("question,answer\n" + "." * 16 + ",1234341221434322\n", ":2: the answer is not a solution"),
    ("question,answer\n" + "." * 16 + ",\n2" + "." * 15 + ",1234341221434321\n", ":3: the answer is not a")])
def test_wrong_file_is_refused_before_anything_is_solved(folder, content, words, tmp_path):
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(UserError, match=re.escape(words)):
        solve.main([str(folder / "sudoku"), str(tmp_path / "a.csv"), f"--output={tmp_path / 'b.csv'}"])
    assert not (tmp_path / "b.csv").exists()


def test_warning_of_several_solutions(capsys):
    """Of a Sudoku: a maze may have several shortest paths."""
    for puzzle, questions, warning in (
            (SUDOKU, ["1234341221434321", "." * 16, "." * 16], "1:the puzzle has more than one solution\n"),
            (SUDOKU, ["12343412214343.."], ""), (MAZE, ["S" + " " * 34 + "G"], ""), (MAZE, ["SG##"], "")):
        solve.parse_rows(puzzle, [(f"{i}:", question, "") for i, question in enumerate(questions)])
        assert capsys.readouterr().err == (warning and f"solve.py: warning: {warning}")


def test_official_checkpoint_with_its_settings(run, folder, solved, tmp_path):
    (tmp_path / "model.py").write_text("\n".join(MODEL).replace("--", "").replace("float32", "'float32'"))
    question, answer = solved
    for given in MODEL, [tmp_path / "model.py"]:
        text = run(folder / "official.pt", *given, question, "--halt_max_steps=4")
        assert answer in text.splitlines()


def test_pictures(run, folder, solved, tmp_path):
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("matplotlib")
    for name, depth, smallest in ("a.png", 7, 500), ("a.gif", 2, 480):
        text = run(folder / "sudoku", solved[0], f"--plot={tmp_path / name}", f"--halt_max_steps={depth}")
        picture = image.open(tmp_path / name)
        dark = (np.asarray(picture.convert("L")) < 128).mean()
        assert f"wrote {tmp_path / name}" in text and min(picture.size) >= smallest and 0.005 < dark < 0.3
    assert picture.n_frames >= 2  # 3, and 3 more of the answer; the writer merges equal ones


def test_cells_that_break_a_rule():
    _, question = puzzles.parse(SUDOKU, "1...............")
    answer = np.array([int(d) + 1 for d in "1234341221434321"])
    boards, questions = np.stack([answer] * 4), np.stack([question] * 4)
    # 2 again in row 2, column 2: in its row, its column and its box; cell 1 empty; 2 for the given 1
    boards[[1, 2, 3], [5, 1, 0]] = 3, 1, 3
    broken = puzzles.broken_cells(SUDOKU, questions, boards)
    assert [np.flatnonzero(cells).tolist() for cells in broken] == [[], [1, 5, 7], [1], [0, 1, 8]]
    assert puzzles.are_solutions(SUDOKU, questions, boards).tolist() == [True, False, False, False]
    assert puzzles.verdict(SUDOKU, question, answer) == "a solution: all rules and givens kept"
    assert puzzles.verdict(SUDOKU, question, boards[1]) == "not a solution: 3 cells break a rule"


def test_which_answers_are_correct():
    """All scored cells are right, and there is one; the names of the metrics depend on the kind alone."""
    labels = np.array([[2, 3], [2, IGNORED], [2, 3], [IGNORED] * 2])
    preds = np.array([[2, 3], [2, 5], [2, 5], [2, 3]])
    (name, values), = puzzles.is_correct({"kind": ""}, labels, labels, preds).items()
    assert name == "accuracy" and values.tolist() == [True, True, False, False]
    for n in (0, 1):
        arrays = [array[:n, :1] for array in (labels, labels, preds)]
        maze = puzzles.is_correct({"kind": "maze", "grid": [1, 1]}, *arrays)
        assert list(maze) == ["accuracy", "path_valid", "path_optimal"]


def test_another_kind_is_judged_by_its_known_answers(run, folder, tmp_path):
    """It needs nothing but its dataset."""
    model = folder / "exchange"
    text = run(model, "011\n010", "--steps")
    assert "\n100101\n" in text and "not judged: the rules are not known" in text
    assert re.search(r"\n 0  1  1 +1  0  0", text)
    rows = '{"question": "011010", "answer": 100101}', '{"question": "000000", "answer": "000000"}'
    (tmp_path / "a.jsonl").write_text("\n".join([*rows, '{"question": "111111", "answer": null}\n']))
    text = run(model, tmp_path / "a.jsonl", f"--output={tmp_path / 'b.csv'}")
    assert "1 of 3 puzzles solved" in text and "only 2 have a known answer" in text
    assert [row["result"] for row in read_rows(tmp_path / "b.csv")] == ["right", "wrong", "not judged"]
    assert "\n100101\n" in run(model, "011010", "--data_path=nowhere")  # the checkpoint says what it solves
    state = torch.load(model / "ckpt_00000030.pt", weights_only=True)
    torch.save({k: v for k, v in state.items() if k != "task"}, tmp_path / "old.pt")
    with pytest.raises(UserError, match="6 cells of 3 tokens: neither a Sudoku nor a maze"):
        run(tmp_path / "old.pt", "011010", "--data_path=nowhere")


def test_mazes(run, folder, tmp_path):
    maze = "S #   \n  # # \n ## # \n      \n # ## \n     G\n"
    (tmp_path / "maze.txt").write_text("".join(line.rstrip() + "\n" for line in maze.splitlines()))
    text = run(folder / "maze", tmp_path / "maze.txt", "--steps")
    assert "path" in text and text == run(folder / "maze", maze.replace("\n", ""), "--steps")
    assert "path" in run(folder / "maze", "S" + " " * 62 + "G")  # 8x8: attention takes any length
    _, question = puzzles.parse(MAZE, maze)
    path = prepare_maze.solve(question[None], 6)[0][0]
    path[2] = puzzles.PATH
    assert np.flatnonzero(puzzles.broken_cells(MAZE, question[None], path[None])).tolist() == [2]
    small, question = puzzles.parse(MAZE, "S  \n   \n G ")
    detour = question.copy()
    detour[[1, 2, 5, 8]] = puzzles.PATH
    answers = np.stack([detour, question, prepare_maze.solve(question[None], 3)[0][0]])
    assert [puzzles.verdict(small, question, answer) for answer in answers] == [
        "a path of 5 steps; the shortest has 3", "not a path from S to G", "a shortest path, 3 steps"]
    assert puzzles.are_solutions(small, np.stack([question] * 3), answers).tolist() == [False, False, True]


OFFICIAL = ["official.pt", *MODEL, "--data_path=nowhere"]  # a puzzle's text tells mazes of 4x4 from Sudoku


@pytest.mark.parametrize("argv, words", [
    (["a", "b", "c"], "MODEL PUZZLE"),
    (["nowhere", "." * 16], "nowhere: no such checkpoint or folder"),
    (["sudoku-data", "." * 16], "no complete checkpoint"),
    (["sudoku", "." * 16, "--plot=a.jpg"], ".png or .gif"),
    (["sudoku", "." * 16, "--plot=nowhere/a.png"], "nowhere/a.png: there is no such folder"),
    (["sudoku", "nowhere.csv", "--output=b.txt"], "must end in .csv"),
    (["sudoku", "." * 16, "--output=b.csv"], "is for the puzzles of a .csv"),
    (["sudoku", "nowhere.csv", "--steps"], "--steps and --plot show one puzzle"),
    (["sudoku", "nowhere.csv"], "nowhere.csv: cannot be read"),
    (["sudoku", "." * 16, "--halt_max_steps=-1"], "0 or more"),
    (["sudoku", "empty.txt"], "the puzzle '' has 0 cells"),
    (["sudoku", "nowhere.txt"], "none of that name"),
    (["sudoku", "1..5............"], "row 1, column 4 of the puzzle is '5': must be one of '.1234'"),
    (["sudoku", "1.1............."], "digit 1 twice in row 1"),
    (["exchange", "......"], "row 1, column 1 of the puzzle is '.': must be one of '01'"),
    (["official.pt", "." * 16, "--puzzle_emb_ndim=0"], "other settings (mlp_t, L_layers"),
    (OFFICIAL + ["S" + " " * 15], "the question has 0 cells G, not 1"),
    (OFFICIAL + ["S#G" + "#" * 13], "the question has no way from S to G"),
    (OFFICIAL + ["S" * 5], "as many rows as columns"),
    (OFFICIAL + ["SG" + " " * 4223], "65 rows; 64 are the most"),
    (OFFICIAL + ["SG" + " " * 23], "takes 16 cells, not 25")])
def test_wrong_input(folder, argv, words, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "empty.txt").write_text("\n")
    with pytest.raises(UserError, match=re.escape(words)):
        solve.main(argv)
