"""scripts/solve.py on a small model of 4x4 Sudoku that is trained here, and on mazes."""
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
    """data/, a data set of 4x4 Sudoku, and run/, of a model that solves most of it."""
    path = tmp_path_factory.mktemp("solve")
    prepare(prepare_sudoku, "--size=4", "--num_train=500", "--num_test=60", "--num_aug=10",
            f"--output_dir={path / 'data'}")
    flags = [f"--data_path={path / 'data'}", f"--out_dir={path / 'run'}", *MODEL, *TRAINING]
    flags.append("--max_steps=120")
    run_train(*flags, "--eval_save_outputs=inputs,labels,preds,q_halt_logits")
    run_train(*flags, "--init_from=resume", f"--export_official={path / 'official.pt'}")
    return path


@pytest.fixture(scope="module")
def evaluation(folder):
    """The answers of train.py's own evaluation of the test set."""
    return np.load(folder / "run/eval_00000120.npz")


@pytest.fixture(scope="module")
def solved(evaluation):
    """A puzzle that the model solves and its answer, as lines."""
    i = int((evaluation["preds"] == evaluation["labels"]).all(axis=1).argmax())
    return ["".join(" .1234"[t] for t in evaluation[name][i]) for name in ("inputs", "labels")]


def test_answers_are_those_of_the_evaluation(folder, evaluation):
    assert (evaluation["preds"] == evaluation["labels"]).all(axis=1).mean() > 0.5
    run, step = solve.read_model(str(folder / "run"), [], "sudoku", 4)
    assert step == 120
    for i in range(20):
        answers = solve.solve(run, evaluation["inputs"][i])
        assert len(answers) == 4 and (answers[-1][0] == evaluation["preds"][i]).all()
        assert answers[-1][1] == pytest.approx(1 / (1 + np.exp(-evaluation["q_halt_logits"][i])), abs=1e-4)


def test_puzzle_from_a_line_a_file_and_stdin(run, folder, solved, tmp_path):
    question, answer = solved
    text = run(folder / "run", question)
    assert answer in text.splitlines() and "a solution: every row" in text
    assert "after 4 supervision steps" in text and "training step 120" in text
    grid = "\n".join(" ".join(question[i:i + 4]) for i in range(0, 16, 4)).replace(".", "0") + "\n"
    (tmp_path / "puzzle.txt").write_text(grid)
    assert run(folder / "run", tmp_path / "puzzle.txt") == text
    assert run_process(folder / "run", stdin=grid) == text
    assert solve.read_arguments(["run", "-"]) == solve.read_arguments(["run"])


def test_steps_and_more_depth_than_in_training(run, folder, solved):
    text = run(folder / "run", solved[0], "--steps", "--halt_max_steps=19")
    assert [n for n in range(1, 20) if f"step {n}: " in text] == [1, 2, 4, 8, 16, 19]
    assert text.count("% sure") == 7 and "question" in text and "after 19 supervision steps" in text


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
    text = run(folder / "run", solved[0], f"--plot={tmp_path / 'a.png'}", "--halt_max_steps=5")
    assert f"wrote {tmp_path / 'a.png'}" in text
    pixels = np.asarray(image.open(tmp_path / "a.png").convert("L"))
    assert min(pixels.shape) > 500 and 0.01 < (pixels < 128).mean() < 0.3
    run(folder / "run", solved[0], f"--plot={tmp_path / 'a.gif'}", "--halt_max_steps=5")
    film = image.open(tmp_path / "a.gif")
    assert film.n_frames > 2  # 6, and 3 more of the last; the writer merges equal ones
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
    (["{run}", "." * 16, "--plot=nowhere/a.png"], "cannot be written"),
    (["{run}", "." * 16, "--plot=nowhere/a.gif"], "cannot be written"),
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
