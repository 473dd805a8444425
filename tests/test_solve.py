"""scripts/solve.py and puzzles.py: on a small model of 4x4 Sudoku that is trained here, and on mazes."""
import csv
import os
import re
import signal
import sys

import numpy as np
import pytest

SCRIPTS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "scripts")
sys.path[:0] = [os.path.dirname(SCRIPTS), SCRIPTS]
import solve
from configurator import UserError, configure

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


def run_train(*flags):
    """train.py in this process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    train.main(configure(train.__file__, flags))
    for number, handler in handlers.items():
        signal.signal(number, handler)


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
    """data/, a dataset of 4x4 Sudoku; run/, a model that solves most of it; official.pt, the same model."""
    path = tmp_path_factory.mktemp("solve")
    prepare(prepare_sudoku, "--size=4", "--num_train=500", "--num_test=60", "--num_aug=10",
            f"--output_dir={path / 'data'}")
    flags = [f"--data_path={path / 'data'}", f"--out_dir={path / 'run'}", *MODEL, *TRAINING, "--max_steps=70"]
    outputs = "inputs,labels,preds,q_halt_logits,surest_preds,surest_q_halt_logits"
    run_train(*flags, f"--eval_save_outputs={outputs}")
    run_train(*flags, "--init_from=resume", f"--export_official={path / 'official.pt'}")
    return path


@pytest.fixture(scope="module")
def evaluation(folder):
    """The answers of train.py's own evaluation of the test set."""
    return np.load(folder / "run/eval_00000070.npz")


@pytest.fixture(scope="module")
def solved(evaluation):
    """A puzzle that the model solves and its answer, as lines."""
    i = int((evaluation["surest_preds"] == evaluation["labels"]).all(axis=1).argmax())
    return [puzzles.text_of(SUDOKU, evaluation[name][i]) for name in ("inputs", "labels")]


@pytest.fixture
def model(folder):
    """The model of 4x4 Sudoku as a train.Run."""
    path = str(folder / "run")
    state, c = solve.read_model(path, [])
    return solve.build_run(state, c, path, 16)


def test_answers_are_those_of_the_evaluation(model, evaluation):
    assert (evaluation["preds"] == evaluation["labels"]).all(axis=1).mean() > 0.5
    for rows in (slice(0, 20), slice(20, 21)):
        preds, q_halt = (np.stack(arrays) for arrays in zip(*solve.solve(model, evaluation["inputs"][rows])))
        assert len(preds) == 4 and (preds[-1, :, 0] == evaluation["preds"][rows]).all()
        assert q_halt[-1, :, 0] == pytest.approx(evaluation["q_halt_logits"][rows], abs=1e-4)
        step, attempt = solve.surest(q_halt)
        assert (preds[step, np.arange(len(step)), attempt] == evaluation["surest_preds"][rows]).all()
        assert q_halt.max(axis=(0, 2)) == pytest.approx(evaluation["surest_q_halt_logits"][rows], abs=1e-4)


def test_surest_of_equals_is_the_last_step_of_the_first_attempt():
    q_halt = np.float32([[[0, 9], [0, 1]], [[9, 0], [3, 0]], [[9, 9], [2, 1]]])  # 3 steps, 2 puzzles
    step, attempt = solve.surest(q_halt)
    assert step.tolist() == [2, 1] and attempt.tolist() == [0, 0]
    assert solve.surest(q_halt[:1])[1].tolist() == [1, 1]


def test_attempts_with_noise(run, folder, solved, model, evaluation):
    questions = evaluation["inputs"][:8]
    plain = list(solve.solve(model, questions))
    model.c.eval_rollouts = 3
    noisy = list(solve.solve(model, questions))
    assert noisy[0][0].shape == (8, 3, 16) and noisy[0][1].shape == (8, 3)
    for (preds, q_halt), (noisy_preds, noisy_q_halt) in zip(plain, noisy):
        assert noisy_q_halt[:, :1] == pytest.approx(q_halt, abs=1e-4)  # the first attempt has no noise
        assert (noisy_preds[:, :1] == preds).all()
    assert np.ptp(noisy[-1][1], axis=1).min() > 1e-4  # the others differ
    alone = list(solve.solve(model, questions[5:6]))  # whatever else is in the batch
    assert alone[-1][1] == pytest.approx(noisy[-1][1][5:6], abs=1e-4)
    text = run(folder / "run", solved[0], "--eval_rollouts=4", "--eval_noise=0.5")
    assert solved[1] in text and re.search(r"sure after step [1-4] of 4, attempt [1-4] of 4; ", text)


@pytest.mark.parametrize("depth, best, per_row, expected", [
    (4, 2, 5, [0, 1, 2, 3, 4]), (4, 2, 4, [0, 1, 2, 4]), (8, 5, 6, [0, 1, 2, 4, 5, 8]),
    (8, 8, 6, [0, 1, 2, 3, 4, 8]), (8, 5, 5, [0, 1, 2, 5, 8]), (16, 11, 4, [0, 1, 2, 3, 4, 8, 11, 16]),
    (2, 1, 6, [0, 1, 2]), (64, 64, 1, [0, 1, 2, 4, 8, 16, 32, 64])])
def test_panels_fill_their_rows(depth, best, per_row, expected):
    assert solve.choose_panels(depth, best, per_row) == expected


def test_puzzle_from_a_line_a_file_and_stdin(run, folder, solved, tmp_path):
    question, answer = solved
    text = run(folder / "run", question)
    assert answer in text.splitlines() and "a solution: all rules" in text
    assert re.search(r"\d% sure after step [1-4] of 4; .*training step 70", text)
    grid = "\n".join(" ".join(question[i:i + 4]) for i in range(0, 16, 4)).replace(".", "0") + "\n"
    (tmp_path / "puzzle.txt").write_text(grid)
    stdin = os.dup(0)
    for operands in ([tmp_path / "puzzle.txt"], [], ["-"]):
        with open(tmp_path / "puzzle.txt") as f:
            os.dup2(f.fileno(), 0)
        assert run(folder / "run", *operands) == text
    os.dup2(stdin, 0)


def test_steps_and_more_depth_than_in_training(run, folder, solved):
    text = run(folder / "run", solved[0], "--steps", "--halt_max_steps=19")
    assert {1, 2, 4, 8, 16, 19} <= {n for n in range(1, 20) if f"step {n}: " in text}
    assert text.count("%, kept") == 1 and "question" in text and re.search(r"after step \d+ of 19", text)
    titles = [line for line in text.splitlines() if "step" in line and "sure after" not in line]
    assert len(titles) == 2 and titles[0].count("step") + 1 == titles[1].count("step")


def read_rows(path):
    return list(csv.DictReader(path.read_text().splitlines()))


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
    summary = (f"{right.sum()} of 60 puzzles solved ({right.mean():.1%}), 30 judged by their known answers "
               "and the others by the rules; of the 30 answers that are "
               f"{solve.SURE:.0%} sure, {right[sure].sum()} are right")
    assert 0 < right[::2].sum() < 30 and 0 < right[1::2].sum() < 30
    assert summary in run(folder / "run", tmp_path / "a.csv", f"--output={tmp_path / 'b.csv'}")
    rows = read_rows(tmp_path / "b.csv")
    assert [float(row["certainty"]) for row in rows] == pytest.approx(certainty, abs=1e-3)
    assert {int(row["step"]) for row in rows} <= {1, 2, 3, 4}
    results = [["wrong", "right"], ["not a solution", "solution"]]
    for i, row in enumerate(rows):
        assert [row["question"], row["answer"], row["result"]] == [
            *(puzzles.text_of(SUDOKU, tokens[i]) for tokens in (questions, answers)),
            results[i % 2][int(right[i])]]
    monkeypatch.setattr(solve, "CELLS_AT_A_TIME", 16 * 7 * 2)  # batches of 7 puzzles
    assert summary in run(folder / "run", tmp_path / "a.csv", "--eval_rollouts=2", "--eval_noise=0")
    with pytest.raises(UserError, match="exists already"):
        run("nowhere", tmp_path / "a.csv", f"--output={tmp_path / 'b.csv'}")
    assert read_rows(tmp_path / "b.csv") == rows


@pytest.mark.parametrize("content, words", [
    ("1" * 16 + "\n", ":1: no column question"),
    ("question\n", ":2: no puzzle"), ("question\n" + "." * 16 + "\n12\n", ":3: the puzzle '12' has 2 cells"),
    ("question,answer\n" + "." * 16 + "\n", ":2: 1 columns, but the header has 2"),
    ("question,answer\n" + "." * 16 + ",12\n", ":2: the answer has 2 characters, not 16"),
    ("question,answer\n" + "." * 16 + "," + "x" * 16 + "\n", ":2: row 1, column 1 of the answer is 'x'"),
    ("question,answer\n" + "." * 16 + ",1234341221434322\n", ":2: the answer is not a solution"),
    ("question,answer\n" + "." * 16 + ",\n2" + "." * 15 + ",1234341221434321\n", ":3: the answer is not a")])
def test_wrong_file_is_refused_before_anything_is_solved(folder, content, words, tmp_path):
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(UserError, match=re.escape(words)):
        solve.main([str(folder / "run"), str(tmp_path / "a.csv"), f"--output={tmp_path / 'b.csv'}"])
    assert not (tmp_path / "b.csv").exists()


@pytest.mark.parametrize("puzzle, questions, warning", [
    (SUDOKU, ["1234341221434321", "." * 16, "." * 16], "warning: 1:the puzzle has more than one solution "
     "(as have 1 others), unlike those of training: 0 of 16 cells are given\n"),
    (MAZE, ["S" + " " * 34 + "G"], "hardly any walls, unlike those of training: 2 of 36 cells are given\n"),
    (MAZE, ["SG##"], ""),
    (SUDOKU, ["12343412214343.."], "")])
def test_warning_of_unusual_puzzles(puzzle, questions, warning, capsys):
    solve.parse_rows(puzzle, [(f"{i}:", question, "") for i, question in enumerate(questions)])
    printed = capsys.readouterr().err
    assert printed.endswith(warning) and printed.count("\n") == bool(warning)


def test_official_checkpoint_with_its_settings(run, folder, solved, tmp_path):
    settings = "\n".join(MODEL).replace("--", "").replace("=float32", "='float32'")
    (tmp_path / "model.py").write_text(settings)
    (question, answer), official = solved, folder / "official.pt"
    for given in MODEL, [tmp_path / "model.py"]:
        assert answer in run(official, *given, question, "--halt_max_steps=4").splitlines()
    with pytest.raises(UserError, match="other settings .mlp_t, L_layers"):
        run(official, question, "--puzzle_emb_ndim=0")


def test_pictures(run, folder, solved, tmp_path):
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("matplotlib")
    for name, depth, smallest in ("a.png", 7, 500), ("a.gif", 2, 480):
        text = run(folder / "run", solved[0], f"--plot={tmp_path / name}", f"--halt_max_steps={depth}")
        picture = image.open(tmp_path / name)
        dark = (np.asarray(picture.convert("L")) < 128).mean()
        assert f"wrote {tmp_path / name}" in text and min(picture.size) >= smallest and 0.005 < dark < 0.3
    assert picture.n_frames >= 2  # 3, and 3 more of the answer; the writer merges equal ones


def test_cells_that_break_a_rule():
    _, question = puzzles.parse(SUDOKU, "1...............")
    answer = np.array([int(d) + 1 for d in "1234341221434321"])
    # 2 again in row 2, column 2: in its row, its column and its box; cell 1 empty; 2 for the given 1
    changes = [(0, 1, []), (5, 2, [1, 5, 7]), (1, 0, [1]), (0, 2, [0, 1, 8])]
    boards, questions = np.stack([answer] * 4), np.stack([question] * 4)
    for board, (cell, digit, _) in zip(boards, changes):
        board[cell] = digit + 1
    for broken, (_, _, cells) in zip(puzzles.broken_cells(SUDOKU, questions, boards), changes):
        assert np.flatnonzero(broken).tolist() == cells
    assert puzzles.are_solutions(SUDOKU, questions, boards).tolist() == [True, False, False, False]
    assert puzzles.verdict(SUDOKU, question, answer) == "a solution: all rules and givens kept"
    assert puzzles.verdict(SUDOKU, question, boards[1]) == "not a solution: 3 cells break a rule"


def test_which_answers_are_correct():
    """All scored cells are right, and there is one; the names of the metrics depend on the kind alone."""
    labels = np.array([[2, 3], [2, IGNORED], [2, 3], [IGNORED] * 2])
    preds = np.array([[2, 3], [2, 5], [2, 5], [2, 3]])
    (name, values), = puzzles.is_correct({}, labels, labels, preds).items()
    assert name == "accuracy" and values.tolist() == [True, True, False, False]
    for n in (0, 1):
        maze = puzzles.is_correct({"kind": "maze", "grid": [1, 2]}, labels[:n], labels[:n], preds[:n])
        assert list(maze) == ["accuracy", "path_valid", "path_optimal"]


def prepare_exchange(path):
    """A dataset of a puzzle of 2x3 cells of "01", to exchange the two."""
    questions = np.random.default_rng(0).integers(1, 3, (64, 6), dtype=np.uint8)
    splits = {split: (64, 1, [(questions, 3 - questions)]) for split in ("train", "test")}
    write_dataset(str(path), splits, 3, {"kind": "exchange", "grid": [2, 3], "symbols": "_01"})


def test_another_kind_is_judged_by_its_known_answers(run, tmp_path):
    """It needs nothing but its dataset."""
    prepare_exchange(tmp_path / "data")
    run_train(f"--data_path={tmp_path / 'data'}", f"--out_dir={tmp_path / 'run'}", *MODEL, *TRAINING,
              "--max_steps=30")
    text = run(tmp_path / "run", "011\n010", "--steps")
    assert "\n100101\n" in text and "not judged: the rules are not known" in text
    assert re.search(r"\n 0  1  1 +1  0  0", text)
    (tmp_path / "a.csv").write_text("question,answer\n011010,100101\n000000,000000\n111111,\n")
    text = run(tmp_path / "run", tmp_path / "a.csv", f"--output={tmp_path / 'b.csv'}")
    assert "1 of 3 puzzles solved" in text and "only 2 have a known answer" in text
    assert [row["result"] for row in read_rows(tmp_path / "b.csv")] == ["right", "wrong", "not judged"]
    with pytest.raises(UserError, match="row 1, column 1 of the puzzle is '.': must be one of '01'"):
        run(tmp_path / "run", "......")
    with pytest.raises(UserError, match="6 cells of 3 tokens: neither a Sudoku nor a maze"):
        run(tmp_path / "run", "011010", "--data_path=nowhere")


def test_mazes(run, tmp_path):
    prepare(prepare_maze, "--size=6", "--min_path=6", "--num_train=64", "--num_test=20",
            f"--output_dir={tmp_path / 'data'}")
    run_train(f"--data_path={tmp_path / 'data'}", f"--out_dir={tmp_path / 'run'}", *MODEL, *TRAINING,
              "--mlp_t=False", "--pos_encodings=rope", "--max_steps=4", "--eval_final_max_puzzles=8")
    maze = "S #   \n  # # \n ## # \n      \n # ## \n     G\n"
    (tmp_path / "maze.txt").write_text("".join(line.rstrip() + "\n" for line in maze.splitlines()))
    text = run(tmp_path / "run", tmp_path / "maze.txt", "--steps")
    assert "path" in text and text == run(tmp_path / "run", maze.replace("\n", ""), "--steps")
    assert "path" in run(tmp_path / "run", "S" + " " * 62 + "G")  # 8x8: attention takes any length
    assert "path" in run(tmp_path / "run", "S" + " " * 14 + "G", "--data_path=nowhere")
    _, question = puzzles.parse(MAZE, maze)
    path = prepare_maze.solve(question[None], 6)[0][0]
    assert puzzles.verdict(MAZE, question, path) == "a shortest path, 10 steps"
    path[2] = puzzles.PATH
    assert np.flatnonzero(puzzles.broken_cells(MAZE, question[None], path[None])).tolist() == [2]
    small, question = puzzles.parse(MAZE, "S  \n   \n G ")
    detour = question.copy()
    detour[[1, 2, 5, 8]] = puzzles.PATH
    answers = np.stack([detour, question, prepare_maze.solve(question[None], 3)[0][0]])
    assert [puzzles.verdict(small, question, answer) for answer in answers] == [
        "a path of 5 steps; the shortest has 3", "not a path from S to G", "a shortest path, 3 steps"]
    assert puzzles.are_solutions(small, np.stack([question] * 3), answers).tolist() == [False, False, True]


OFFICIAL = ["{official}", *MODEL, "--data_path=nowhere"]  # a puzzle's text tells mazes of 4x4 from Sudoku


@pytest.mark.parametrize("argv, words", [
    (["a", "b", "c"], "CHECKPOINT PUZZLE"),
    (["nowhere", "." * 16], "nowhere: no such checkpoint or folder"),
    (["{data}", "." * 16], "no complete checkpoint"),
    (["{data}/manifest.json", "." * 16], "cannot be read as a checkpoint"),
    (["{run}", "." * 16, "--plot=a.jpg"], ".png or .gif"),
    (["nowhere", "." * 16, "--plot=nowhere/a.png"], "a.png: cannot be written"),
    (["nowhere", "nowhere.csv", "--output=nowhere/b.csv"], "b.csv: cannot be written"),
    (["{run}", "nowhere.csv", "--output=b.txt"], "must end in .csv"),
    (["{run}", "." * 16, "--output=b.csv"], "is for the puzzles of a .csv"),
    (["{run}", "nowhere.csv", "--steps"], "--steps and --plot show one puzzle"),
    (["{run}", "nowhere.csv"], "nowhere.csv: cannot be read"),
    (["{run}", "." * 16, "--halt_max_steps=-1"], "0 or more"),
    (["{run}", "." * 16, "--hidden_size=48"], "these settings need"),
    (["{run}", "{data}/empty.txt"], "the puzzle '' has 0 cells"),
    (["{run}", "nowhere.txt"], "none of that name"),
    (["{run}", "1..5............"], "row 1, column 4 of the puzzle is '5': must be one of '.1234'"),
    (["{run}", "1.1............."], "digit 1 twice in row 1"),
    (["{run}", "123....4........"], "no solution"),
    (OFFICIAL + ["S" + " " * 15], "the question has 0 cells G, not 1"),
    (OFFICIAL + ["S#G" + "#" * 13], "the question has no way from S to G"),
    (OFFICIAL + ["S" * 5], "as many rows as columns"),
    (OFFICIAL + ["SG" + " " * 4223], "65 rows; 64 are the most"),
    (OFFICIAL + ["SG" + " " * 23], "takes 16 cells, not 25")])
def test_wrong_input(folder, argv, words):
    (folder / "data/empty.txt").write_text("\n")
    paths = dict(data=folder / "data", run=folder / "run", official=folder / "official.pt")
    with pytest.raises(UserError, match=re.escape(words)):
        solve.main([a.format_map(paths) for a in argv])
