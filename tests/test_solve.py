"""scripts/solve.py on a small model of 4x4 Sudoku that is trained here, and on mazes."""
import csv
import gzip
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
sys.path.insert(0, os.path.join(ROOT, "scripts"))
import prepare_maze  # noqa: E402
import prepare_sudoku  # noqa: E402
import solve  # noqa: E402
import train  # noqa: E402
from configurator import UserError, configure  # noqa: E402

MODEL = [
    "--hidden_size=64", "--num_heads=2", "--puzzle_emb_ndim=0", "--expansion=2", "--H_cycles=1",
    "--L_cycles=1", "--halt_max_steps=2", "--eval_halt_max_steps=4", "--forward_dtype=float32"]
TRAINING = [
    "--device=cpu", "--global_batch_size=48", "--lr=7e-3", "--lr_warmup_steps=20", "--weight_decay=0.1",
    "--ema_rate=0.95", "--loss_type=softmax_cross_entropy", "--eval_interval=0"]


def run_train(*flags):
    """train.py in this process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        train.main(configure(train.__file__, flags))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def prepare(script, *flags):
    script.prepare(configure(script.__file__, ["--source=generate", *flags]))


def run_process(*argv, stdin=None, code=0):
    """solve.py as a command; returns what it prints."""
    done = subprocess.run([sys.executable, os.path.join(ROOT, "scripts", "solve.py"), *map(str, argv)],
                          capture_output=True, text=True, timeout=200, input=stdin)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


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
    """data/, a data set of 4x4 Sudoku, and run/, of a model that solves most of it, after 30 steps little."""
    path = tmp_path_factory.mktemp("solve")
    prepare(prepare_sudoku, "--size=4", "--num_train=500", "--num_test=60", "--num_aug=10",
            f"--output_dir={path / 'data'}")
    flags = [f"--data_path={path / 'data'}", f"--out_dir={path / 'run'}", *MODEL, *TRAINING]
    flags += ["--max_steps=120", "--checkpoint_interval=30", "--keep_last_n=9"]
    outputs = "inputs,labels,preds,q_halt_logits,surest_preds,surest_q_halt_logits"
    run_train(*flags, f"--eval_save_outputs={outputs}")
    run_train(*flags, "--init_from=resume", f"--export_official={path / 'official.pt'}")
    return path


@pytest.fixture(scope="module")
def evaluation(folder):
    """The answers of train.py's own evaluation of the test set."""
    return np.load(folder / "run/eval_00000120.npz")


@pytest.fixture(scope="module")
def solved(evaluation):
    """A puzzle that the model solves and its answer, as lines."""
    i = int((evaluation["surest_preds"] == evaluation["labels"]).all(axis=1).argmax())
    return ["".join(" .1234"[t] for t in evaluation[name][i]) for name in ("inputs", "labels")]


@pytest.fixture
def model(folder):
    """The model of 4x4 Sudoku as a train.Run."""
    path = str(folder / "run")
    state, c = solve.read_model(path, [])
    return solve.build_run(state, c, path, "sudoku", 4)


def line_of(tokens):
    return solve.text_of("sudoku", tokens)


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


def test_attempts_with_noise(model, evaluation):
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


@pytest.mark.parametrize("depth, best, per_row, expected", [
    (4, 2, 5, [0, 1, 2, 3, 4]),
    (4, 2, 4, [0, 1, 2, 4]),
    (8, 5, 6, [0, 1, 2, 4, 5, 8]),
    (8, 8, 6, [0, 1, 2, 3, 4, 8]),
    (8, 5, 5, [0, 1, 2, 5, 8]),
    (16, 11, 4, [0, 1, 2, 3, 4, 8, 11, 16]),
    (2, 1, 6, [0, 1, 2]),
    (64, 64, 1, [0, 1, 2, 4, 8, 16, 32, 64])])
def test_panels_fill_their_rows(depth, best, per_row, expected):
    assert solve.choose_panels(depth, best, per_row) == expected


def test_puzzle_from_a_line_a_file_and_stdin(run, folder, solved, tmp_path):
    question, answer = solved
    text = run(folder / "run", question)
    assert answer in text.splitlines() and "a solution: every row" in text
    assert re.search(r"\d% sure after step [1-4] of 4; .*training step 120", text)
    grid = "\n".join(" ".join(question[i:i + 4]) for i in range(0, 16, 4)).replace(".", "0") + "\n"
    (tmp_path / "puzzle.txt").write_text(grid)
    assert run(folder / "run", tmp_path / "puzzle.txt") == text
    assert run_process(folder / "run", stdin=grid) == text
    assert solve.read_arguments(["run", "-"]) == solve.read_arguments(["run"])


def test_steps_and_more_depth_than_in_training(run, folder, solved):
    text = run(folder / "run", solved[0], "--steps", "--halt_max_steps=19")
    assert {1, 2, 4, 8, 16, 19} <= {n for n in range(1, 20) if f"step {n}: " in text}
    assert text.count("%, kept") == 1 and "question" in text and re.search(r"after step \d+ of 19", text)
    titles = [line for line in text.splitlines() if "step" in line and "sure after" not in line]
    assert len(titles) == 2 and titles[0].count("step") + 1 == titles[1].count("step")


def test_answer_is_the_surest_of_several_attempts(run, folder, solved):
    text = run(folder / "run", solved[0], "--eval_rollouts=4", "--eval_noise=0.5")
    assert solved[1] in text and re.search(r"sure after step [1-4] of 4, attempt [1-4] of 4; ", text)


@pytest.fixture
def puzzles(evaluation, tmp_path):
    """A CSV file of 60 puzzles with their answers, as the prepare scripts take it."""
    path = tmp_path / "puzzles.csv.gz"
    with gzip.open(path, "wt") as f:
        f.write("source,question,answer,rating\n")
        for question, answer in zip(evaluation["inputs"], evaluation["labels"]):
            f.write(f"x,{line_of(question)},{line_of(answer)},0\n")
    return path


def read_rows(path):
    with open(path, encoding="utf-8", newline="") as f:
        return list(csv.DictReader(f))


def test_file_of_puzzles_with_answers(run, folder, evaluation, puzzles, tmp_path, monkeypatch):
    right = (evaluation["surest_preds"] == evaluation["labels"]).all(axis=1)
    sure = evaluation["surest_q_halt_logits"] > np.log(9)
    summary = (f"{right.sum()} of 60 puzzles solved ({right.mean():.1%}); of the {sure.sum()} answers that "
               f"are 90% sure, {right[sure].sum()} are right")
    assert summary in run(folder / "run", puzzles, f"--output={tmp_path / 'answers.csv'}")
    rows = read_rows(tmp_path / "answers.csv")
    assert list(rows[0]) == ["question", "answer", "certainty", "step", "result"] and len(rows) == 60
    for i, row in enumerate(rows):
        assert row["question"] == line_of(evaluation["inputs"][i])
        assert row["answer"] == line_of(evaluation["surest_preds"][i])
        certainty = 1 / (1 + np.exp(-evaluation["surest_q_halt_logits"][i]))
        assert float(row["certainty"]) == pytest.approx(certainty, abs=1e-3)
        assert row["result"] == ("right" if right[i] else "wrong") and 1 <= int(row["step"]) <= 4
    monkeypatch.setattr(solve, "CELLS_AT_A_TIME", 16 * 7 * 2)  # batches of 7 puzzles
    run(folder / "run", puzzles, f"--output={tmp_path / 'more.csv'}", "--eval_rollouts=2", "--eval_noise=0")
    answers = [(row["answer"], row["result"]) for row in rows]
    assert [(row["answer"], row["result"]) for row in read_rows(tmp_path / "more.csv")] == answers
    assert summary in run(folder / "run", puzzles)  # no file is written
    with pytest.raises(UserError, match="exists already"):
        run("nowhere", puzzles, f"--output={tmp_path / 'answers.csv'}")
    assert read_rows(tmp_path / "answers.csv") == rows


def test_file_with_some_answers(run, folder, evaluation, tmp_path):
    lines = ["answer,question"]
    for i, (question, answer) in enumerate(zip(evaluation["inputs"], evaluation["labels"])):
        lines.append(("" if i % 2 else line_of(answer)) + "," + line_of(question))
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    output = run(folder / "run/ckpt_00000030.pt", tmp_path / "a.csv", f"--output={tmp_path / 'b.csv'}")
    solved = 0
    for i, row in enumerate(read_rows(tmp_path / "b.csv")):
        is_right = row["answer"] == line_of(evaluation["labels"][i])  # every question has one solution
        solved += is_right
        results = ("not a solution", "solution") if i % 2 else ("wrong", "right")
        assert row["result"] == results[int(is_right)]
    assert 0 < 60 - solved
    assert f"{solved} of 60 puzzles solved" in output and "30 by their known answers" in output


def test_file_of_questions(folder, tmp_path, capsys):
    (tmp_path / "a.csv").write_text("question\n1234341221434321\n" + "." * 16 + "\n")
    solve.main([str(folder / "run"), str(tmp_path / "a.csv"), f"--output={tmp_path / 'b.csv'}"])
    printed = capsys.readouterr()
    assert " of 2 puzzles solved" in printed.out and "are right" in printed.out
    warning = "a.csv:3: the puzzle has more than one solution, unlike those of training: 0 of 16 cells"
    assert printed.err.count("\n") == 1 and warning in printed.err
    assert len(read_rows(tmp_path / "b.csv")) == 2


@pytest.mark.parametrize("content, words", [
    ("", ":1: no column question"),
    ("1" * 16 + "\n", ":1: no column question"),
    ("question\n", ":2: no puzzle"),
    ("question\n1234341221434321\n12\n", ":3: the puzzle '12' has 2 cells"),
    ("question\n1234341221434321\n" + "." * 36 + "\n", ":3: the puzzle is not of the kind and size"),
    ("question\n" + "." * 16 + "\n11" + "." * 14 + "\n", ":3: the question has digit 1 twice"),
    ("question\n12x" + "." * 13 + "\n", ":2: row 1, column 3"),
    ("question,answer\n" + "." * 16 + "\n", ":2: 1 columns, but the header has 2"),
    ("question,answer\n" + "." * 16 + ",12\n", ":2: the answer has 2 characters, not 16"),
    ("question,answer\n" + "." * 16 + "," + "." * 16 + "\n", ":2: row 1, column 1 of the answer is '.'"),
    ("question,answer\n" + "." * 16 + ",1234341221434322\n", ":2: the answer is not a solution"),
    ("question,answer\n2" + "." * 15 + ",1234341221434321\n", ":2: the answer is not a solution")])
def test_wrong_file_is_refused_before_anything_is_solved(content, words, tmp_path):
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(UserError, match=re.escape(words)):
        solve.main(["nowhere", str(tmp_path / "a.csv"), f"--output={tmp_path / 'b.csv'}"])
    assert not (tmp_path / "b.csv").exists()


@pytest.mark.parametrize("puzzle, warning", [
    ("." * 81, "more than one solution, unlike those of training: 0 of 81 cells are given"),
    ("S" + " " * 34 + "G", "hardly any walls, unlike those of training: 2 of 36 cells are given"),
    ("12343412214343..", "")])
def test_warning_of_unusual_puzzles(puzzle, warning, capsys):
    with pytest.raises(UserError, match="no such checkpoint"):
        solve.main(["nowhere", puzzle])
    printed = capsys.readouterr().err
    assert warning in printed and printed.count("\n") == (1 if warning else 0)


def test_official_checkpoint_with_its_settings(run, folder, solved, tmp_path):
    settings = [flag.replace("--", "").replace("=float32", "='float32'") for flag in MODEL]
    (tmp_path / "model.py").write_text("\n".join(settings) + "\n")
    question, answer = solved
    official = folder / "official.pt"
    assert answer in run(official, question, *MODEL).splitlines()
    assert answer in run(official, tmp_path / "model.py", question, "--halt_max_steps=8").splitlines()
    with pytest.raises(UserError, match="these settings need"):
        run(official, question, "--puzzle_emb_ndim=0")


def test_pictures(run, folder, solved, tmp_path):
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("matplotlib")
    text = run(folder / "run", solved[0], f"--plot={tmp_path / 'a.png'}", "--halt_max_steps=7")
    assert f"wrote {tmp_path / 'a.png'}" in text
    pixels = np.asarray(image.open(tmp_path / "a.png").convert("L"))
    assert min(pixels.shape) > 500 and 0.01 < (pixels < 128).mean() < 0.3
    run(folder / "run", solved[0], f"--plot={tmp_path / 'a.gif'}", "--halt_max_steps=5")
    film = image.open(tmp_path / "a.gif")
    assert film.n_frames > 2  # 6, and 3 more of the answer; the writer merges equal ones
    assert min(film.size) >= 480
    assert (np.asarray(film.convert("L")) < 128).mean() > 0.005


def test_cells_that_break_a_rule():
    kind, size, question = solve.read_puzzle("1...............")
    answer = np.array([int(d) + 1 for d in "1234341221434321"])
    assert not solve.broken_cells("sudoku", 4, question, answer).any()
    assert "a solution" in solve.verdict("sudoku", 4, question, answer)
    # 2 again in row 2, column 2: in its row, its column and its box; cell 1 empty; 2 for the given 1
    for cell, digit, broken in ((5, 2, [1, 5, 7]), (1, 0, [1]), (0, 2, [0, 1, 8])):
        changed = answer.copy()
        changed[cell] = digit + 1
        assert np.flatnonzero(solve.broken_cells("sudoku", 4, question, changed)).tolist() == broken
        verdict = solve.verdict("sudoku", 4, question, changed)
        assert verdict == f"not a solution: {len(broken)} cells break a rule"
        boards = np.stack([answer, changed])
        assert solve.are_solutions("sudoku", 4, question[None], boards).tolist() == [True, False]


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


def test_verdicts_on_mazes():
    _, size, question = solve.read_puzzle("S #   \n  # # \n ## # \n      \n # ## \n     G\n")
    path = prepare_maze.solve(question[None], size)[0][0]
    assert size == 6 and solve.verdict("maze", 6, question, path) == "a shortest path, 10 steps"
    assert solve.verdict("maze", 6, question, question) == "not a path from S to G"
    path[2] = solve.PATH
    assert np.flatnonzero(solve.broken_cells("maze", 6, question, path)).tolist() == [2]
    _, _, open_maze = solve.read_puzzle("S  \n   \n G ")
    detour = open_maze.copy()
    detour[[1, 2, 5, 8]] = solve.PATH
    assert solve.verdict("maze", 3, open_maze, detour) == "a path of 5 steps; the shortest has 3"


@pytest.mark.parametrize("argv, words", [
    ([], "CHECKPOINT PUZZLE"),
    (["a", "b", "c"], "CHECKPOINT PUZZLE"),
    (["nowhere", "." * 16], "nowhere: no such checkpoint or folder"),
    (["{data}", "." * 16], "no complete checkpoint"),
    (["{data}/manifest.json", "." * 16], "cannot be read as a checkpoint"),
    (["{run}", "." * 16, "--plot=a.jpg"], ".png or .gif"),
    (["nowhere", "." * 16, "--plot=nowhere/a.png"], "a.png: cannot be written"),
    (["nowhere", "." * 16, "--plot=nowhere/a.gif"], "a.gif: cannot be written"),
    (["nowhere", "nowhere.csv", "--output=nowhere/b.csv"], "b.csv: cannot be written"),
    (["{run}", "nowhere.csv", "--output=b.txt"], "must end in .csv"),
    (["{run}", "." * 16, "--output=b.csv"], "is for the puzzles of a .csv"),
    (["{run}", "nowhere.csv", "--steps"], "--steps and --plot show one puzzle"),
    (["{run}", "nowhere.csv"], "nowhere.csv: cannot be read"),
    (["{run}", "." * 16, "--halt_max_steps=-1"], "0 or more"),
    (["{run}", "." * 16, "--halt_max_step=8"], "unknown setting halt_max_step"),
    (["{run}", "." * 16, "--hidden_size=48"], "these settings need"),
    (["{run}", "." * 16, "--forward_dtype=int8"], "forward_dtype must be one of"),
    (["{run}", "12"], "has 2 cells"),
    (["{run}", "{empty}"], "the puzzle '' has 0 cells"),
    (["{run}", "1" * 17], "has 17 cells"),
    (["{run}", "nowhere.txt"], "none of that name"),
    (["{run}", "1..x............"], "row 1, column 4 of the puzzle is 'x'"),
    (["{run}", "5..............."], "row 1, column 1 of the puzzle is '5'"),
    (["{run}", "1.1............."], "digit 1 twice in row 1"),
    (["{run}", "123....4........"], "no solution"),
    (["{run}", "." * 36], "6 tokens, not 8"),
    (["{run}", "S" + " " * 24], "one S and one G"),
    (["{run}", "SSG" + " " * 22], "one S and one G"),
    (["{run}", "S#G" + "#" * 22], "no path"),
    (["{run}", "S.G" + " " * 22], "row 1, column 2"),
    (["{run}", "SG" + " " * 23], "takes 16 cells, not 25")])
def test_wrong_input(folder, argv, words):
    (folder / "empty.txt").write_text("\n")
    paths = dict(data=folder / "data", run=folder / "run", empty=folder / "empty.txt")
    with pytest.raises(UserError, match=re.escape(words)):
        solve.main([a.format_map(paths) for a in argv])


def test_wrong_input_is_one_line_and_exit_code_2(folder):
    output = run_process(folder / "run", stdin="1.1" + "." * 13 + "\n", code=2)
    assert output == "solve.py: the question has digit 1 twice in row 1\n"
