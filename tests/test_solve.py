"""scripts/solve.py as people run it, on a small model of 4x4 Sudoku trained here, and on mazes."""
import os
import re
import subprocess
import sys

import numpy as np
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "scripts"))
import solve  # noqa: E402
from configurator import UserError  # noqa: E402

MODEL = ["--hidden_size=64", "--num_heads=2", "--puzzle_emb_ndim=0", "--expansion=2", "--H_cycles=2", "--L_cycles=2", "--halt_max_steps=2",
         "--eval_halt_max_steps=4", "--forward_dtype=float32"]
TRAINING = ["--device=cpu", "--global_batch_size=32", "--lr=5e-3", "--lr_warmup_steps=20", "--weight_decay=0.1", "--ema_rate=0.98",
            "--loss_type=softmax_cross_entropy", "--eval_interval=0"]


def python(script, *argv, code=0, stdin=None):
    done = subprocess.run([sys.executable, os.path.join(ROOT, script), *map(str, argv)], capture_output=True, text=True, timeout=200, input=stdin)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """data/, a data set of 4x4 Sudoku, and run/, of a model that solves most of it."""
    path = tmp_path_factory.mktemp("solve")
    python("prepare_sudoku.py", "--source=generate", "--size=4", "--num_train=500", "--num_test=60", "--num_aug=10", f"--output_dir={path / 'data'}")
    flags = [f"--data_path={path / 'data'}", f"--out_dir={path / 'run'}", *MODEL, *TRAINING, "--max_steps=300"]
    python("train.py", *flags)
    python("train.py", *flags, "--init_from=resume", "--eval_only", "--eval_save_outputs=inputs,labels,preds,q_halt_logits")
    python("train.py", *flags, "--init_from=resume", f"--export_official={path / 'official.pt'}")
    return path


@pytest.fixture(scope="module")
def evaluation(folder):
    """What train.py's own evaluation of the test set answered."""
    return np.load(folder / "run/eval_00000300.npz")


@pytest.fixture(scope="module")
def solved(evaluation):
    """A puzzle that the model solves and its answer, as lines."""
    i = int((evaluation["preds"] == evaluation["labels"]).all(axis=1).argmax())
    return ["".join(" .1234"[t] for t in evaluation[name][i]) for name in ("inputs", "labels")]


def test_answers_are_those_of_the_evaluation(folder, evaluation):
    assert (evaluation["preds"] == evaluation["labels"]).all(axis=1).mean() > 0.5
    run, step = solve.read_model(str(folder / "run"), [], "sudoku", 4)
    assert step == 300
    for i in range(20):
        answers = solve.solve(run, evaluation["inputs"][i])
        assert len(answers) == 4 and (answers[-1][0] == evaluation["preds"][i]).all()
        assert answers[-1][1] == pytest.approx(1 / (1 + np.exp(-evaluation["q_halt_logits"][i])), abs=1e-4)


def test_a_line_a_file_and_stdin(folder, solved, tmp_path):
    question, answer = solved
    text = python("scripts/solve.py", folder / "run", question)
    assert answer in text.splitlines() and "a solution: every row" in text and "after 4 supervision steps" in text and "training step 300" in text
    grid = "\n".join(" ".join(question[i:i + 4]) for i in range(0, 16, 4)).replace(".", "0") + "\n"
    (tmp_path / "puzzle.txt").write_text(grid)
    assert python("scripts/solve.py", folder / "run", tmp_path / "puzzle.txt") == text
    assert python("scripts/solve.py", folder / "run", stdin=grid) == text == python("scripts/solve.py", folder / "run", "-", stdin=question)


def test_steps_and_depth_beyond_the_trainings(folder, solved):
    text = python("scripts/solve.py", folder / "run", solved[0], "--steps", "--halt_max_steps=19")
    assert [f"step {n}: " in text for n in (1, 2, 3, 4, 8, 16, 19)] == [True, True, False, True, True, True, True]
    assert text.count("% sure") == 7 and "question" in text and "after 19 supervision steps" in text


def test_an_official_checkpoint_with_its_settings(folder, solved, tmp_path):
    (tmp_path / "model.py").write_text("".join(f.replace("--", "").replace("=float32", "='float32'") + "\n" for f in MODEL))
    question, answer = solved
    assert answer in python("scripts/solve.py", folder / "official.pt", question, *MODEL).splitlines()
    assert answer in python("scripts/solve.py", folder / "official.pt", tmp_path / "model.py", question, "--halt_max_steps=8").splitlines()
    assert "these settings need" in python("scripts/solve.py", folder / "official.pt", question, "--puzzle_emb_ndim=0", code=2)


def test_pictures(folder, solved, tmp_path):
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("matplotlib")
    text = python("scripts/solve.py", folder / "run", solved[0], f"--plot={tmp_path / 'a.png'}", "--halt_max_steps=5")
    assert f"wrote {tmp_path / 'a.png'}" in text
    pixels = np.asarray(image.open(tmp_path / "a.png").convert("L"))
    assert min(pixels.shape) > 500 and 0.01 < (pixels < 128).mean() < 0.3
    python("scripts/solve.py", folder / "run", solved[0], f"--plot={tmp_path / 'a.gif'}", "--halt_max_steps=5")
    film = image.open(tmp_path / "a.gif")
    assert film.n_frames > 2  # frames alike are merged by the writer: 6 and 3 more of the last
    assert (np.asarray(film.convert("L")) < 128).mean() > 0.005


def test_cells_that_break_a_rule():
    kind, size, question = solve.read_puzzle("1...............")
    answer = np.array([int(d) + 1 for d in "1234341221434321"])
    assert not solve.broken("sudoku", 4, question, answer).any() and "a solution" in solve.verdict("sudoku", 4, question, answer)
    # 2 once more in row 2, column 2: in its row, its column and its box; nothing in cell 1; 2 for the given 1
    for cell, digit, wrong in ((5, 2, [1, 5, 7]), (1, 0, [1]), (0, 2, [0, 1, 8])):
        changed = answer.copy()
        changed[cell] = digit + 1
        assert np.flatnonzero(solve.broken("sudoku", 4, question, changed)).tolist() == wrong
        assert solve.verdict("sudoku", 4, question, changed) == f"not a solution: {len(wrong)} cells break a rule"


def test_mazes(tmp_path):
    python("prepare_maze.py", "--source=generate", "--size=6", "--min_path=6", "--num_train=64", "--num_test=20", f"--output_dir={tmp_path / 'data'}")
    attention = ["--mlp_t=False", "--pos_encodings=rope", "--max_steps=4", "--eval_final_max_puzzles=8"]
    python("train.py", f"--data_path={tmp_path / 'data'}", f"--out_dir={tmp_path / 'run'}", *MODEL, *TRAINING, *attention)
    maze = "S #   \n  # # \n ## # \n      \n # ## \n     G\n"
    (tmp_path / "maze.txt").write_text("".join(line.rstrip() + "\n" for line in maze.splitlines()))
    text = python("scripts/solve.py", tmp_path / "run", tmp_path / "maze.txt", "--steps")
    assert "path" in text and text == python("scripts/solve.py", tmp_path / "run", maze.replace("\n", ""), "--steps")
    assert "path" in python("scripts/solve.py", tmp_path / "run", "S" + " " * 62 + "G")  # 8x8: attention takes any length
    _, size, question = solve.read_puzzle(maze)
    path = solve.prepare_maze.solve(question[None], size)[0][0]
    assert size == 6 and solve.verdict("maze", 6, question, path) == "a shortest path, 10 steps"
    assert solve.verdict("maze", 6, question, question) == "not a path from S to G"
    path[2] = solve.PATH
    assert np.flatnonzero(solve.broken("maze", 6, question, path)).tolist() == [2]
    _, _, open_maze = solve.read_puzzle("S  \n   \n G ")
    detour = open_maze.copy()
    detour[[1, 2, 5, 8]] = solve.PATH
    assert solve.verdict("maze", 3, open_maze, detour) == "a path of 5 steps; the shortest has 3"


@pytest.mark.parametrize("argv, want", [
    ([], "CHECKPOINT PUZZLE"), (["a", "b", "c"], "CHECKPOINT PUZZLE"), (["nowhere", "." * 16], "nowhere: no such checkpoint or folder"),
    (["{data}", "." * 16], "no complete checkpoint"), (["{data}/manifest.json", "." * 16], "cannot be read as a checkpoint"),
    (["{run}", "." * 16, "--plot=a.jpg"], ".png or .gif"), (["{run}", "." * 16, "--plot=nowhere/a.png"], "cannot be written"),
    (["{run}", "." * 16, "--halt_max_steps=-1"], "0 or more"), (["{run}", "." * 16, "--halt_max_step=8"], "unknown setting halt_max_step"),
    (["{run}", "." * 16, "--hidden_size=48"], "these settings need"), (["{run}", "." * 16, "--forward_dtype=int8"], "forward_dtype must be one of"),
    (["{run}", "12"], "has 2 cells"), (["{run}", "1" * 17], "has 17 cells"), (["{run}", "nowhere.txt"], "none of that name"),
    (["{run}", "1..x............"], "row 1, column 4 of the puzzle is 'x'"), (["{run}", "5..............."], "row 1, column 1 of the puzzle is '5'"),
    (["{run}", "1.1............."], "digit 1 twice in row 1"), (["{run}", "123....4........"], "no solution"),
    (["{run}", "." * 36], "6 tokens, not 8"),
    (["{run}", "S" + " " * 24], "one S and one G"), (["{run}", "SSG" + " " * 22], "one S and one G"), (["{run}", "S#G" + "#" * 22], "no path"),
    (["{run}", "S.G" + " " * 22], "row 1, column 2"), (["{run}", "SG" + " " * 23], "takes 16 cells, not 25")])
def test_wrong_input(folder, argv, want):
    with pytest.raises(UserError, match=re.escape(want)):
        solve.main([a.format(data=folder / "data", run=folder / "run") for a in argv])


def test_wrong_input_is_one_line_and_exit_code_2(folder):
    assert python("scripts/solve.py", folder / "run", stdin="\n", code=2).startswith("solve.py: the puzzle '' has 0 cells")
    said = python("scripts/solve.py", folder / "run", "1.1" + "." * 13, code=2)
    assert said == "solve.py: the question has digit 1 twice in row 1\n"
