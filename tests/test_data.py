"""Datasets, batches, CSV files, generated puzzles, copies and downloads: data.py and prepare_sudoku.py."""
import csv
import glob
import gzip
import http.server
import itertools
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from configurator import TransientError, UserError, configure
from conftest import ROOT, Server, wait_for

import data
import prepare_maze
import prepare_sudoku
from data import FIELDS, Dataset, halting_draws
from prepare_csv import csv_rows
from puzzles import are_solutions

HERE = os.path.dirname(os.path.abspath(__file__))
REAL = {split: os.path.join(HERE, "data", f"sudoku_real_{split}_60.csv.gz") for split in ("train", "test")}
BOXES = {4: (2, 2), 6: (2, 3), 9: (3, 3)}  # rows and columns of a box
COLUMNS = "source", "question", "answer", "rating"


def settings(script=prepare_sudoku, **changes):
    return configure(script.__file__, [f"--{key}={value}" for key, value in changes.items()])


def prepare(path, script=prepare_sudoku, **changes):
    return script.main(settings(script, output_dir=path, **changes))


def generated(path, **changes):
    return prepare(path, source="generate", **changes)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """40 real 9x9 puzzles with 50 copies each, and 60 test puzzles."""
    path = tmp_path_factory.mktemp("real") / "sudoku"
    prepare(path, train_csv=REAL["train"], test_csv=REAL["test"], subsample_size=40, num_aug=50)
    return path


@pytest.fixture
def copy(real, tmp_path):
    return shutil.copytree(real, tmp_path / "copy")


def symbols(tokens):
    return "".join(" .123456789"[token] for token in tokens)


def are_valid(questions, answers, size):
    """Which answers are filled by the rules, and agree with the clues."""
    assert answers.max() == size
    return are_solutions(prepare_sudoku.task_of(size), questions + 1, answers + 1)


# The layout.

def test_layout_is_the_official_one(real):
    for split, groups, examples in (("train", 40, 40 * 51), ("test", 60, 60)):
        assert json.loads((real / split / "dataset.json").read_text()) == {
            "pad_id": 0, "ignore_label_id": 0, "blank_identifier_id": 0, "vocab_size": 11, "seq_len": 81,
            "num_puzzle_identifiers": 1, "total_groups": groups, "mean_puzzle_examples": 1.0,
            "total_puzzles": groups, "sets": ["all"]}
        arrays = {field: np.load(f"{real}/{split}/all__{field}.npy") for field in FIELDS}
        assert [array.dtype for array in arrays.values()] == [np.uint8] * 2 + [np.int32] * 3
        assert arrays["inputs"].shape == arrays["labels"].shape == (examples, 81)
        assert (arrays["puzzle_identifiers"] == np.zeros(examples)).all()
        assert (arrays["puzzle_indices"] == np.arange(examples + 1)).all()
        assert (arrays["group_indices"] == np.arange(groups + 1) * (examples // groups)).all()
    assert json.loads((real / "identifiers.json").read_text()) == ["<blank>"]
    manifest = Dataset(real, "test").manifest
    assert manifest["grid"] == [9, 9] and manifest["box"] == [3, 3] and manifest["symbols"] == " .123456789"
    assert manifest["kind"] == "sudoku" and manifest["command"]["source"] == "csv"
    assert manifest["counts"] == {
        "train_rows": 60, "test_rows": 60, "train_rows_in_test": 0, "train_puzzles": 40, "test_puzzles": 60,
        "copies_replaced": 0}
    files = {os.path.relpath(path, real) for path in glob.glob(f"{real}/**", recursive=True)}
    assert {file for file in files if "." in file[1:]} == {"manifest.json", *manifest["sha256"]}
    assert all(data.file_hash(f"{real}/{name}") == sha for name, sha in manifest["sha256"].items())


def test_tokens_and_rows_are_those_of_the_files(real):
    test, (train_rows, test_rows) = Dataset(real, "test"), [list(csv_rows(REAL[s], COLUMNS)) for s in REAL]
    shown = [[symbols(question), symbols(answer)] for question, answer in zip(test.inputs, test.labels)]
    assert shown == [row[1:3] for _, row in test_rows]
    originals = {symbols(question) for question in Dataset(real, "train").inputs[::51]}
    assert len(originals & {row[1] for _, row in train_rows}) == 40


def test_datasets_of_the_official_builder_load(copy, real):
    ours = Dataset(real, "train")
    os.remove(copy / "manifest.json")
    theirs = Dataset(copy, "train")
    assert theirs.manifest == {} and theirs.sha256 == ours.sha256
    for field in FIELDS:
        path = copy / "train" / f"all__{field}.npy"
        np.save(path, np.load(path).astype(np.int64))
    theirs = Dataset(copy, "train")
    assert theirs.sha256 != ours.sha256
    a, b = ours.train_batch(1, 2, 64), theirs.train_batch(1, 2, 64)
    assert all((a[key] == b[key]).all() and a[key].dtype == b[key].dtype == np.int32 for key in a)
    (copy / "manifest.json").write_text('{"sha256": {}}')
    with pytest.raises(UserError, match=r"dataset.json does not match manifest.json \(changed or trunc"):
        Dataset(copy, "train")


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_command_leaves_nothing_that_stays(tmp_path, by):
    """No folder after SIGTERM; after kill -9 the same command replaces the folder."""
    argv = [sys.executable, prepare_sudoku.__file__, "--source=generate", "--size=4", "--num_test=9",
            f"--output_dir={tmp_path / 'x'}/", "--num_train=9", "--num_aug=3000000"]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE)
    part = tmp_path / f"x.part-{platform.node()}"
    wait_for(lambda: list(tmp_path.glob("x.part*/train/*inputs*")))
    process.send_signal(by)
    process.communicate()
    assert process.returncode == (3 if by == signal.SIGTERM else -9)
    assert part.exists() == (by == signal.SIGKILL) and not (tmp_path / "x").exists()
    path = generated(f"{tmp_path / 'x'}/", size=4, num_test=9, num_train=5, num_aug=2)
    assert sorted(os.listdir(tmp_path)) == ["x"] and len(Dataset(path, "train")) == 15
    with pytest.raises(UserError, match="exists already: delete it or choose another --output_dir"):
        generated(path, size=4, num_train=2, num_test=2)
    assert len(Dataset(path, "train")) == 15


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_a_lock_of_another_user():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        with data.locked(f"{folder}/x"):
            os.chmod(f"{folder}/x.lock", 0o644)
        code = ("import os, data; os.setuid(65534)\n"
                f"with data.locked('{folder}/x'): print(os.getuid())")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
        assert done.stdout == "65534\n", done.stderr


def test_a_dataset_that_another_command_made(tmp_path, real):
    script = prepare_sudoku.__file__
    path = generated(tmp_path / "x", size=4, num_train=30, num_test=9, num_aug=1)
    same = f"{script} --num_aug=1 --num_test=9 --size=4 --source=generate --num_train=30 --output_dir=y"
    other = same.replace("--num_train=30", "--num_train=50") + " --seed=2"
    maze = script.replace("sudoku", "maze") + " --source=generate"
    for command, message in (
        (same, ""), ("", ""), ("nowhere.py", ""),
        (other, "seed is 0 in it, 2 in data_prepare; num_train is 30 in it, 50 in data_prepare"),
        (maze, "script is 'prepare_sudoku.py' in it, 'prepare_maze.py' in data_prepare; .*"),
    ):
        assert re.fullmatch(message, data.made_by_another_command(path, command)), command
    files = f"{script} --train_csv={REAL['train']} --test_csv={REAL['test']} --subsample_size=40 --num_aug=50"
    assert data.made_by_another_command(real, files) == ""  # source=csv is implied
    manifest = tmp_path / "x" / "manifest.json"
    value = json.loads(manifest.read_text())
    mine = tmp_path / "prepare_mine.py"  # a user's own
    mine.write_text("rows = 9  # of them\n")
    manifest.write_text(json.dumps(value | {"command": {"script": "prepare_mine.py", "rows": 9}}))
    assert data.made_by_another_command(path, f"{mine} --rows=9") == ""
    assert data.made_by_another_command(path, f"{mine} --rows=8") == "rows is 9 in it, 8 in data_prepare"
    del value["command"]["seed"]  # a setting that is newer than the dataset
    manifest.write_text(json.dumps(value))
    assert data.made_by_another_command(path, same) == ""
    manifest.write_text(json.dumps({"sha256": value["sha256"]}))
    assert data.made_by_another_command(path, other) == ""
    manifest.unlink()
    assert data.made_by_another_command(path, other) == ""


# Damage; test_wrong_input.py has more.

def with_row(row, value):
    def change(array):
        array = array.astype(np.int64)
        array[row] = value
        return array
    return change


@pytest.mark.parametrize("name, change, message", [
    ("seq_len", lambda n: n - 1, r"inputs.npy must hold integers of shape \[2040, 80\], not uint8 of"),
    ("total_groups", lambda n: n + 1, r"group_indices.npy .* of shape \[42\], not"),
    ("inputs", lambda array: array.astype(float), r"inputs.npy must hold integers"),
    ("inputs", with_row(5, -3), r"inputs.npy holds -3 to 10"),
    ("inputs", with_row(5, 11), r"inputs.npy holds 0 to 11, where dataset.json allows 0 to 10"),
    ("labels", lambda array: array[:-1], r"labels.npy .*, not uint8 of \[2039, 81\]"),
    ("puzzle_identifiers", with_row(5, 1), r"identifiers.npy holds 0 to 1, .* to 0"),
    ("puzzle_identifiers", lambda array: array[1:], r"puzzle_indices.npy .* of shape \[2040\], not"),
    ("puzzle_indices", with_row(5, 3), r"puzzle_indices.npy must rise .* to 2040"),
    ("group_indices", with_row(-1, 2039), r"group_indices.npy must rise .* 2040"),
    ("group_indices", with_row(0, 1), r"group_indices.npy must rise from 0"),
])
def test_damaged_datasets_are_named(name, change, message, copy):
    """Of the official builder. name: of an array, or a key of dataset.json."""
    os.remove(copy / "manifest.json")
    if name in FIELDS:
        path = copy / "train" / f"all__{name}.npy"
        np.save(path, change(np.load(path)))
    else:
        path = copy / "train/dataset.json"
        content = json.loads(path.read_text())
        path.write_text(json.dumps(content | {name: change(content[name])}))
    with pytest.raises(UserError, match=message) as error:
        Dataset(str(copy), "train")
    assert "\n" not in str(error.value)


# Batches.

@pytest.mark.parametrize("world", [1, 2, 4])
def test_batches_are_a_pure_function_of_seed_and_step(real, world):
    """However many ranks there are, in whatever order and on whatever thread."""
    train = Dataset(real, "train")
    whole = [train.train_batch(3, step, 64) for step in range(8)]

    def parts(rank):
        return [train.train_batch(3, step, 64, rank, world) for step in reversed(range(8))][::-1]

    with ThreadPoolExecutor(4) as pool:
        ranks = list(pool.map(parts, range(world)))
    for step, batch in enumerate(whole):
        assert batch["inputs"].shape == batch["labels"].shape == (64, 81)
        for key, array in batch.items():
            assert array.dtype == np.int32 and len(array) == 64
            assert (np.concatenate([rank[step][key] for rank in ranks]) == array).all()
    assert (whole[0]["inputs"] != whole[1]["inputs"]).any()
    assert (whole[0]["inputs"] != train.train_batch(4, 0, 64)["inputs"]).any()
    draws = [halting_draws(0, 7, 64, 16, 0.5, rank, world) for rank in range(world)]
    assert (np.concatenate(draws) == halting_draws(0, 7, 64, 16, 0.5)).all()


@pytest.mark.parametrize("batch_size", [16, 24, 100])  # parts of the 40 groups, and batches that span epochs
def test_each_group_comes_once_an_epoch(real, batch_size):
    train = Dataset(real, "train")
    group_of = {row.tobytes(): i // 51 for i, row in enumerate(train.inputs)}
    steps = range(40 * 6 // batch_size + 1)
    inputs = np.concatenate([train.train_batch(5, step, batch_size)["inputs"] for step in steps])
    groups = np.array([group_of[row.tobytes()] for row in inputs.astype(np.uint8)])
    epochs = groups[:40 * (len(groups) // 40)].reshape(-1, 40)
    assert (np.sort(epochs, axis=1) == np.arange(40)).all()
    assert (epochs[0] != epochs[1]).any()


def test_puzzles_with_several_examples(real, tmp_path):
    """Groups of several puzzles with several examples, as in the official ARC sets."""
    folder = tmp_path / "train"
    folder.mkdir()
    inputs = np.arange(7).repeat(2).reshape(7, 2)
    arrays = inputs, inputs, [1, 2, 3, 4], [0, 2, 3, 6, 7], [0, 1, 4]
    for field, array in zip(FIELDS, arrays):
        np.save(folder / f"all__{field}.npy", np.array(array))
    (folder / "dataset.json").write_text(json.dumps({
        "pad_id": 0, "ignore_label_id": None, "blank_identifier_id": 0, "vocab_size": 7, "seq_len": 2,
        "num_puzzle_identifiers": 5, "total_groups": 2, "mean_puzzle_examples": 1.75}))
    train = Dataset(str(tmp_path), "train")
    owner = np.array([1, 1, 2, 3, 3, 3, 4])
    batch = train.train_batch(0, 0, 6000)
    assert (batch["puzzle_identifiers"] == owner[batch["inputs"][:, 0]]).all()
    share = np.bincount(batch["inputs"][:, 0]) / 6000
    assert np.allclose(share, [1 / 4, 1 / 4, 1 / 6, 1 / 18, 1 / 18, 1 / 18, 1 / 6], atol=0.02)
    test = train.test_batch(range(7), 8)
    assert (test["puzzle_identifiers"] == [1, 1, 2, 3, 3, 3, 4, 0]).all()
    assert (test["labels"][:7] == inputs).all() and (test["labels"][7] == -100).all()


def test_halting_draws():
    draws = np.concatenate([halting_draws(1, step, 1000, 16, 0.1) for step in range(100)])
    assert draws.dtype == np.int32 and set(draws) == {0, *range(2, 17)}
    assert abs((draws > 0).mean() - 0.1) < 0.005
    share = np.bincount(draws[draws > 0], minlength=17)[2:] / (draws > 0).sum()
    assert np.allclose(share, 1 / 15, atol=0.01)
    assert not halting_draws(0, 0, 500, 1, 1.0).any() and not halting_draws(0, 0, 500, 16, 0.0).any()
    assert set(halting_draws(0, 0, 500, 2, 1.0)) == {2}


def test_test_batches_and_subsets(real):
    test = Dataset(real, "test")
    rows = [3, 59, 4]
    batch = test.test_batch(rows, 5)
    for key, padding in (("inputs", 0), ("labels", -100)):
        assert batch[key].shape == (5, 81) and (batch[key][:3] == getattr(test, key)[rows]).all()
        assert (batch[key][3:] == padding).all()
    assert all(array.dtype == np.int32 for array in batch.values())
    assert test.test_batch([], 2)["inputs"].shape == (2, 81)
    subset = test.subset(20)
    assert len(subset) == 20 and (np.diff(subset) > 0).all() and subset[-1] > 40
    assert (subset == Dataset(real, "test").subset(20)).all()
    assert (test.subset(0) == np.arange(60)).all() and (test.subset(1000) == np.arange(60)).all()


# Generated puzzles and copies.

@pytest.mark.parametrize("size, n", [(4, 60), (6, 60), (9, 5)])
def test_generated_puzzles_are_minimal_with_one_solution(size, n):
    questions, answers = prepare_sudoku.generate_chunk((0, 0, n, size))
    assert questions.shape == answers.shape == (n, size * size)
    assert questions.dtype == answers.dtype == np.uint8
    assert are_valid(questions, answers, size).all()
    for question in questions:
        clues = np.flatnonzero(question)
        boards = np.tile(question, (len(clues) + 1, 1))
        boards[np.arange(len(clues)), clues] = 0  # each clue is missing in one board, none in the last
        counts = prepare_sudoku.count_solutions(prepare_sudoku.candidates_of(boards, size), size, 2)
        assert counts.tolist() == [2] * len(clues) + [1]


def test_generation_depends_on_the_seed_and_not_on_the_processes(monkeypatch):
    monkeypatch.setattr(data, "cores", lambda: 1)
    questions, answers = prepare_sudoku.generate(4, 1500, 7)
    assert len(np.unique(questions, axis=0)) == 1500
    assert (questions[:50] != prepare_sudoku.generate(4, 50, 8)[0]).any()
    monkeypatch.setattr(data, "POOL_AFTER", 0.0)
    monkeypatch.setattr(data, "cores", lambda: 2)
    in_pool = prepare_sudoku.generate(4, 1500, 7)
    assert (questions == in_pool[0]).all() and (answers == in_pool[1]).all()


def test_a_pool_ends_with_the_command_that_is_killed(tmp_path):
    argv = [sys.executable, prepare_sudoku.__file__, "--source=generate", "--size=9", "--num_train=100000"]
    process = subprocess.Popen([*argv, f"--output_dir={tmp_path / 'x'}"], start_new_session=True)
    group = ["pgrep", "-g", str(process.pid)]
    try:
        wait_for(lambda: len(subprocess.run(group, capture_output=True).stdout.split()) > 2)
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: subprocess.run(group, capture_output=True).returncode)


def killed_in_a_pool(task):
    if task:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_of_the_pool_that_is_killed_is_an_error(monkeypatch):
    monkeypatch.setattr(data, "POOL_AFTER", -1.0)
    monkeypatch.setattr(data, "cores", lambda: 2)
    with pytest.raises(TransientError, match="ended before its work"):
        list(data.in_parallel(killed_in_a_pool, range(9)))


def test_more_puzzles_than_exist(monkeypatch):
    chunk = prepare_sudoku.generate_chunk((0, 0, 1024, 4))
    monkeypatch.setattr(prepare_sudoku, "generate_chunk", lambda task: chunk)
    message = "only about 10.. distinct 4x4 puzzles can be found: choose fewer than 3000"
    with pytest.raises(UserError, match=message):
        prepare_sudoku.generate(4, 3000, 0)


def test_counting_agrees_with_all_288_grids():
    rng, rows = np.random.default_rng(0), np.array(list(itertools.permutations(range(1, 5))), np.uint8)
    grids = rows[np.indices((24,) * 4).reshape(4, -1).T].reshape(-1, 16)
    grids = grids[are_valid(np.zeros_like(grids), grids, 4)]
    questions, answers = prepare_sudoku.generate_chunk((1, 0, 60, 4))
    for removed in (0, 1, 2, 3):  # boards that lack clues have several solutions
        boards = questions.copy()
        for board, answer in zip(boards, answers):
            board[rng.choice(np.flatnonzero(board), removed, replace=False)] = 0
            if removed == 1:  # a changed clue often leaves none
                cell = rng.choice(np.flatnonzero(board))
                board[cell] = answer[cell] % 4 + 1
        counts = prepare_sudoku.count_solutions(prepare_sudoku.candidates_of(boards, 4), 4, 50)
        fitting = ((boards[:, None] == 0) | (boards[:, None] == grids)).all(axis=2).sum(axis=1)
        assert len(grids) == 288 and (counts == np.minimum(fitting, 50)).all()
        assert removed == 0 or len(set(counts)) > 2
    assert prepare_sudoku.count_solutions(np.full((81, 3), 511, np.uint16), 9, 2).tolist() == [2, 2, 2]


def test_train_and_test_of_a_generated_set_are_distinct(tmp_path):
    """And more training puzzles leave the others as they are."""
    path = generated(tmp_path / "g", size=4, num_train=300, num_test=800, num_aug=20)
    train, test = Dataset(path, "train"), Dataset(path, "test")
    train_rows, test_rows = ([row.tobytes() for row in split.inputs] for split in (train, test))
    assert len(set(test_rows)) == 800 and len(set(train_rows[::21])) == 300
    assert not set(test_rows) & set(train_rows)
    assert train.manifest["counts"]["copies_replaced"] > 0
    assert are_valid(train.inputs - 1, train.labels - 1, 4).all()
    few, again, other = (
        generated(tmp_path / str(i), size=4, num_train=10, num_test=800, num_aug=1, seed=seed)
        for i, seed in enumerate((0, 0, 1)))
    assert Dataset(again, "train").sha256 == Dataset(few, "train").sha256 != Dataset(other, "train").sha256
    assert np.array_equal(Dataset(few, "test").inputs, test.inputs)
    assert np.array_equal(Dataset(few, "train").inputs[::2], train.inputs[:210:21])


@pytest.mark.parametrize("size", [4, 6, 9])
def test_copies_are_valid_puzzles(size):
    rng = np.random.default_rng(0)
    questions, answers = prepare_sudoku.generate_chunk((0, 0, 5, size))
    new_questions, new_answers = prepare_sudoku.transform(questions, answers, 1000, size, rng)
    assert new_questions.shape == (5000, size * size) and new_questions.dtype == np.uint8
    assert are_valid(new_questions, new_answers, size).all()
    assert ((new_questions > 0).sum(axis=1) == (questions > 0).sum(axis=1).repeat(1000)).all()
    distinct = [len(np.unique(new_questions[i:i + 1000], axis=0)) for i in range(0, 5000, 1000)]
    assert min(distinct) > (300 if size == 4 else 990)
    candidates = prepare_sudoku.candidates_of(new_questions[::50], size)
    assert (prepare_sudoku.count_solutions(candidates, size, 2) == 1).all()


@pytest.mark.parametrize("size, transposes", [(4, True), (6, False), (9, True)])
def test_copies_sample_the_whole_group_and_nothing_else(size, transposes):
    """A full first row and one digit below it show where rows, columns and digits go."""
    n = 4000
    rows, columns = BOXES[size]
    board = np.zeros((size, size), np.uint8)
    board[0] = np.arange(1, size + 1)
    board[1, 0] = 1
    boards = board.reshape(1, -1)
    _, copies = prepare_sudoku.transform(boards, boards, n, size, np.random.default_rng(0))
    copies = copies.reshape(n, size, size)
    upright = (copies > 0).sum(axis=2).max(axis=1) == size  # the full row is still a row
    assert abs(upright.mean() - (0.5 if transposes else 1.0)) < (0.03 if transposes else 1e-9)
    copies[~upright] = copies[~upright].transpose(0, 2, 1)
    line = (copies > 0).sum(axis=2).argmax(axis=1)
    assert np.allclose(np.bincount(line, minlength=size) / n, 1 / size, atol=0.03)
    below = ((copies > 0).sum(axis=2) == 1).argmax(axis=1)  # stays in the full row's band
    assert (below // rows == line // rows).all() and (below != line).all()
    order = copies[np.arange(n), line].astype(int)  # a permutation of the digits through stacks and columns
    assert (np.sort(order, axis=1) == np.arange(1, size + 1)).all()
    shares = [np.bincount(order[:, j], minlength=size + 1)[1:] / n for j in range(size)]
    assert np.allclose(shares, 1 / size, atol=0.03)


def test_speed(tmp_path):
    begun = time.monotonic()
    path = generated(tmp_path / "g", size=6, num_train=300, num_test=100, num_aug=300)
    assert time.monotonic() - begun < 8
    train = Dataset(path, "train")
    train.train_batch(0, 0, 6144)
    begun = time.monotonic()
    for step in range(5):
        train.train_batch(0, step, 6144)
    assert (time.monotonic() - begun) / 5 < 0.05


# CSV files; test_wrong_input.py has more wrong ones.

A, B, C = [("mine", symbols(question + 1), symbols(answer + 1), "3")  # three puzzles with one solution
           for question, answer in zip(*prepare_sudoku.generate_chunk((0, 0, 3, 4)))]


FEWER_CLUES = ("mine", B[2][0] + "." * 15, *B[2:])
CLUE_MISMATCH = (*B[:2], B[2].translate(str.maketrans("1234", "2143")), "3")  # another puzzle's answer


def write_csv(path, rows):
    with open(path, "w", newline="", encoding="utf-8") as f:
        csv.writer(f).writerows([COLUMNS, *rows])
    return path


@pytest.mark.parametrize("wrong, message", [
    (CLUE_MISMATCH, "the question has . in row ., column ., where the answer has ."),
    (FEWER_CLUES, "the question has more than one solution"),
    ((*B[:3], ""), "the rating '' is not an integer"),
])
def test_the_first_wrong_row_of_a_long_file_is_named(tmp_path, wrong, message):
    """Beyond the first block of rows, of either file."""
    long = write_csv(tmp_path / "long.csv", [A] * 17000 + [wrong] * 2)
    short = write_csv(tmp_path / "short.csv", [C])
    for train, test in ((long, short), (short, long)):
        with pytest.raises(UserError, match=rf"long\.csv:17002: {message}"):
            prepare(tmp_path / "out", train_csv=train, test_csv=test, size=4, subsample_size=0, num_aug=0)
        assert not (tmp_path / "out").exists()


def test_csv_variants(tmp_path):
    """Another order of columns, "0" for an empty cell, a byte order mark, quotes, CRLF, blank lines."""
    text = "\ufeffrating,answer,question,source,note\r\n"
    text += f'7,{A[2]},{A[1].replace(".", "0")},"mine, not yours",\r\n\r\n-1,{B[2]},{FEWER_CLUES[1]},,x'
    (tmp_path / "train.csv").write_bytes(text.encode())
    test = write_csv(tmp_path / "test.csv", [C])
    path = prepare(tmp_path / "out", train_csv=tmp_path / "train.csv", test_csv=test, size=4, num_aug=0,
                   min_difficulty=-1, check_unique=False)
    train = Dataset(path, "train")
    assert [symbols(question) for question in train.inputs] == [A[1], FEWER_CLUES[1]]
    assert train.vocab_size == 6
    assert train.manifest["box"] == [2, 2] and train.manifest["symbols"] == " .1234"


def test_choice_of_rows(tmp_path):
    """min_difficulty holds for both files, rows of the test set are dropped, the choice is seeded."""
    rows = [row for _, row in csv_rows(REAL["train"], COLUMNS)]
    train, test = write_csv(tmp_path / "train.csv", rows), write_csv(tmp_path / "test.csv", rows[50:])
    files = dict(train_csv=train, test_csv=test, num_aug=0)
    path = prepare(tmp_path / "hard", **files, subsample_size=0, min_difficulty=100)
    is_hard = [int(row[3]) >= 100 for row in rows]
    assert len(Dataset(path, "train")) == sum(is_hard[:50])
    assert len(Dataset(path, "test")) == sum(is_hard[50:])
    assert Dataset(path, "train").manifest["counts"]["train_rows_in_test"] == sum(is_hard[50:])
    a, b, c = (Dataset(prepare(tmp_path / str(i), **files, subsample_size=20, seed=seed), "train").inputs
               for i, seed in enumerate((0, 0, 1)))
    assert (a == b).all() and (a != c).any() and len(a) == 20
    with pytest.raises(UserError, match=r"test\.csv: no puzzle is left of 10 rows: .* min_difficulty=100000"):
        prepare(tmp_path / "none", **files, min_difficulty=100000)


FILES = dict(train_csv="x/mine.csv.gz", test_csv="y.csv")


@pytest.mark.parametrize("script, changes, name", [
    (prepare_sudoku, dict(), "data/sudoku-extreme-1k-aug-1000"),
    (prepare_sudoku, dict(subsample_size=0, num_aug=0), "data/sudoku-extreme-full"),
    (prepare_sudoku, dict(min_difficulty=20, seed=3), "data/sudoku-extreme-1k-aug-1000-min-20-seed-3"),
    (prepare_sudoku, FILES | dict(subsample_size=123), "data/mine-123-aug-1000"),
    (prepare_sudoku, dict(source="generate", size=6, num_aug=10), "data/sudoku-6x6-3k-aug-10"),
    (prepare_maze, dict(), "data/maze-30x30-hard-1k-aug-8"),
    (prepare_maze, dict(aug=False, subsample_size=200, seed=3), "data/maze-30x30-hard-200-seed-3"),
    (prepare_maze, FILES, "data/mine-full-aug-8"),
    (prepare_maze, dict(source="generate", size=8, min_path=10, num_train=2000),
     "data/maze-8x8-path-10-2k-aug-8"),
])
def test_default_output_dir(script, changes, name):
    assert script.complete(settings(script, **changes)).output_dir == name


# Downloads.

class Hub(http.server.BaseHTTPRequestHandler):
    """Serves server.files; each request takes the next fault of server.faults[path]. server.log: ranges."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        server, path = self.server, self.path
        server.log.append(self.headers.get("Range"))
        body = server.files.get(path, b"no")
        fault = server.faults[path].pop(0) if server.faults.get(path) else None
        start = int(re.sub(r"\D", "", self.headers.get("Range", "0")))
        status = 206 if start else 200 if path in server.files else 404
        self.send_response(302 if fault == "redirect" else fault if isinstance(fault, int) else status)
        self.send_header("Location", f"/cdn{path}")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        self.close_connection = fault == "break"
        self.wfile.write(body[start:(start + len(body)) // 2 if fault == "break" else None])

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(monkeypatch, at_once):
    """A local server instead of the hub, and no waits between attempts."""
    server = Server(Hub, files={}, faults={}, log=[])
    monkeypatch.setenv("HF_ENDPOINT", server.url + "/")
    yield server
    server.server_close()


@pytest.mark.parametrize("faults, error, requests, message", [
    (401, UserError, 1, r"cannot be downloaded \(status 401\)"),
    (404, UserError, 1, r"cannot be downloaded \(status 404\)"),
    (503, TransientError, 6, r"cannot be downloaded \(status 503\): run again.*--source=csv"),
    ("break", TransientError, 3, "ChunkedEncodingError"),
])
def test_downloads_give_up(hub, tmp_path, faults, error, requests, message):
    hub.files["/file"] = b"x"  # half of it is nothing: no attempt makes progress
    hub.faults["/file"] = [faults] * 9
    with pytest.raises(error, match=rf"{hub.url}/file.*{message}") as e:
        data.download(hub.url + "/file", str(tmp_path / "file"))
    assert len(hub.log) == requests and "\n" not in str(e.value) and os.listdir(tmp_path) == []
    with pytest.raises(TransientError, match="cannot be downloaded .*refused"):
        data.download("http://127.0.0.1:9/file", str(tmp_path / "file"))
    with pytest.raises(UserError, match="hf.co/file cannot be downloaded"):
        data.download("hf.co/file", str(tmp_path / "file"))


def test_hub_end_to_end(hub, tmp_path, monkeypatch, capfd):
    """source=hub with a mirror that redirects and breaks off; test_gcs.py has more faults."""
    monkeypatch.chdir(tmp_path)
    for split in ("train", "test"):
        with gzip.open(REAL[split]) as f:
            body = f.read() + b"\n" * 100_000  # blank lines: it is received in several blocks
        name = f"/datasets/sapientinc/sudoku-extreme/resolve/main/{split}.csv"
        hub.files.update({name: body, f"/cdn{name}": body})
        hub.faults.update({name: ["redirect", "redirect"], f"/cdn{name}": ["break"]})
    folder = tmp_path / "data/downloads/sudoku-extreme"
    folder.mkdir(parents=True)
    (folder / "train.csv.tmp").write_bytes(bytes(10 ** 6))  # of a process that was killed
    path = prepare_sudoku.main(settings(subsample_size=10, num_aug=5))
    assert path == "data/sudoku-extreme-10-aug-5" and f"--data_path={path}" in capfd.readouterr()[0]
    assert len(Dataset(path, "train")) == 60 and len(Dataset(path, "test")) == 60
    assert [span is None for span in hub.log] == [True, True, False, False] * 2
    prepare_sudoku.main(settings(subsample_size=10, num_aug=0))
    assert len(hub.log) == 8 and sorted(os.listdir(folder)) == ["test.csv", "train.csv"]


def test_progress(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(data.time, "monotonic", lambda: clock[0])
    progress = data.Progress("slow", 100e6, "MB", 1e6)
    clock[0] = 12.0
    progress.add(0)
    assert capsys.readouterr().err == "slow: 0/100 MB, 0.0 MB/s\n"
    progress.start = progress.printed = 12.0
    for _ in range(10):
        clock[0] += 3.0
        progress.add(10_000_000)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["slow: 40/100 MB, 3.3 MB/s, 18 s left", "slow: 80/100 MB, 3.3 MB/s, 6 s left"]
