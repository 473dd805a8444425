"""Datasets, batches, CSV files, generated puzzles, copies and downloads: data.py and prepare_sudoku.py."""
import gzip
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures.process import _ExecutorManagerThread
from unittest import mock

import numpy as np
import pytest
from helpers import COLUMNS, ROOT, dataset_settings, prepare, wait_for, write_csv

import data
import prepare as shared
import prepare_maze
import prepare_sudoku
from configurator import TransientError, UserError
from data import FIELDS, Dataset, halting_draws
from prepare import csv_rows
from puzzles import are_solutions, candidates_of, count_solutions, sudoku_task, text_of

REAL = {split: os.path.join(ROOT, f"tests/data/sudoku_real_{split}_60.csv.gz") for split in ("train", "test")}


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """40 real 9x9 puzzles with 50 copies each, and 60 test puzzles."""
    path = tmp_path_factory.mktemp("real") / "sudoku"
    prepare(path, train_csv=REAL["train"], test_csv=REAL["test"], subsample_size=40, num_aug=50)
    return path


@pytest.fixture
def copy(real, tmp_path):
    return shutil.copytree(real, tmp_path / "copy")


# The layout.

def test_layout_is_the_official_one(real):
    assert json.loads((real / "train/dataset.json").read_text()) == {
        "pad_id": 0, "ignore_label_id": 0, "blank_identifier_id": 0, "vocab_size": 11, "seq_len": 81,
        "num_puzzle_identifiers": 1, "total_groups": 40, "mean_puzzle_examples": 1.0, "total_puzzles": 40,
        "sets": ["all"]}
    train = Dataset(real, "train")
    assert train.inputs.dtype == np.uint8 and (np.diff(train.group_indices) == 51).all()
    assert train.made_by().startswith("prepare_sudoku.py --source=csv ")
    assert train.manifest["counts"] == {
        "train_rows": 60, "test_rows": 60, "train_rows_in_test": 0, "train_puzzles": 40, "test_puzzles": 60,
        "copies_replaced": 0}


def test_datasets_of_the_official_builder_load(copy, real):
    """They have no manifest, and integers of 64 bits."""
    os.remove(copy / "manifest.json")
    for field in FIELDS:
        path = copy / "train" / f"all__{field}.npy"
        np.save(path, np.load(path).astype(np.int64))
    theirs = Dataset(copy, "train").train_batch(1, 2, 64)
    ours = Dataset(real, "train").train_batch(1, 2, 64)
    for name, array in ours.items():
        assert array.dtype == theirs[name].dtype == np.int32
        assert (array == theirs[name]).all()


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_command_leaves_nothing_that_stays(tmp_path, by):
    """No folder after SIGTERM; after kill -9 the same command replaces the folder."""
    argv = [sys.executable, prepare_sudoku.__file__, "--source=generate", "--size=4", "--num_test=9",
            f"--output_dir={tmp_path / 'x'}", "--num_train=9", "--num_aug=3000000"]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE)
    wait_for(lambda: list(tmp_path.glob("x.part*/train/*inputs*")))
    process.send_signal(by)
    process.communicate()
    assert not (tmp_path / "x").exists()
    assert bool(list(tmp_path.glob("x.part*/"))) == (by == signal.SIGKILL)
    small = dict(source="generate", size=4, num_test=9, num_train=5, num_aug=2)
    prepare(tmp_path / "x", **small)
    assert os.listdir(tmp_path) == ["x"]
    assert len(Dataset(tmp_path / "x", "train")) == 15
    with pytest.raises(UserError, match="exists already: delete it or choose another --output_dir"):
        prepare(tmp_path / "x", **small)


# Damage; test_wrong_input.py has more.

@pytest.mark.parametrize("name, change", [
    ("inputs", lambda array: array + 1),
    ("inputs", lambda array: array[:0]),
    ("labels", lambda array: array[:-1]),
    ("puzzle_identifiers", lambda array: array + 1),
    ("puzzle_indices", lambda array: np.delete(array, 1)),
    ("group_indices", lambda array: array[::-1]),
])
def test_arrays_that_do_not_fit_are_refused(name, change, copy):
    os.remove(copy / "manifest.json")
    path = copy / f"train/all__{name}.npy"
    np.save(path, change(np.load(path)))
    with pytest.raises(UserError, match="copy/train: dataset.json and the arrays do not fit"):
        Dataset(copy, "train")


# Batches.

@pytest.mark.parametrize("world", [2, 4])
def test_batches_are_a_pure_function_of_seed_and_step(real, world):
    """However many ranks there are, and in whatever order they ask."""
    train = Dataset(real, "train")
    for step in 3, 0, 1:
        parts = [train.train_batch(3, step, 64, rank, world) for rank in range(world)]
        for name, array in train.train_batch(3, step, 64).items():
            assert (np.concatenate([part[name] for part in parts]) == array).all()
        draws = [halting_draws(0, step, 64, 16, 0.5, rank, world) for rank in range(world)]
        assert (np.concatenate(draws) == halting_draws(0, step, 64, 16, 0.5)).all()


def test_each_group_comes_once_an_epoch(real):
    """Batches of 24 cut the epochs of 40 groups."""
    train = Dataset(real, "train")
    group_of = {row.tobytes(): i // 51 for i, row in enumerate(train.inputs)}
    inputs = np.concatenate([train.train_batch(5, step, 24)["inputs"] for step in range(5)])
    groups = [group_of[row.tobytes()] for row in inputs.astype(np.uint8)]
    epochs = np.reshape(groups, (3, 40))
    assert (np.sort(epochs, axis=1) == np.arange(40)).all()
    assert (epochs[0] != epochs[1]).any()


def test_a_group_of_puzzles_with_several_examples_brings_one_of_them(tmp_path):
    """As in the official ARC sets; a smaller puzzle repeats its examples."""
    (tmp_path / "train").mkdir()
    rows = np.arange(7)[:, None]
    arrays = rows, rows, [1, 2, 3, 4], [0, 2, 3, 6, 7], [0, 3, 4]
    shared.finish_split(tmp_path / "train", dict(zip(FIELDS, arrays)), ignore_label_id=None, vocab_size=7,
                        seq_len=1, num_puzzle_identifiers=5, total_groups=2, mean_puzzle_examples=1.75)
    train = Dataset(str(tmp_path), "train")
    epochs = set()
    for step in range(100):
        inputs = train.train_batch(0, step, 4)["inputs"]
        epochs.add(tuple(sorted(inputs[:, 0].tolist())))
    assert epochs == {(0, 0, 1, 6), (2, 2, 2, 6), (3, 4, 5, 6)}


def test_halting_draws_are_uniform_from_2_or_0():
    assert set(halting_draws(1, 0, 5000, 16, 0.5)) == {0, *range(2, 17)}
    assert set(halting_draws(0, 0, 500, 2, 1.0)) == {2}
    assert not halting_draws(0, 0, 500, 1, 1.0).any()
    assert not halting_draws(0, 0, 500, 16, 0.0).any()


def test_test_batches_are_padded_and_subsets_cover_the_whole_set(real):
    test = Dataset(real, "test")
    batch = test.test_batch([3, 59], 4)
    assert (batch["labels"][:2] == test.labels[[3, 59]]).all() and (batch["labels"][2:] == -100).all()
    assert not batch["inputs"][2:].any()
    assert len(set(test.subset(20))) == 20 and max(test.subset(20)) > 40


# Generated puzzles and copies.

@pytest.mark.parametrize("size, n", [(4, 60), (6, 60), (9, 5)])
def test_generated_puzzles_are_minimal_with_one_solution(size, n):
    questions, answers = prepare_sudoku.generate_chunk(0, 0, n, size)
    assert are_solutions(sudoku_task(size), questions, answers).all()
    for question in questions:
        # each clue is missing in one board, none in the last
        clues = np.flatnonzero(question > 1)
        boards = np.tile(question, (len(clues) + 1, 1))
        boards[np.arange(len(clues)), clues] = 1
        counts = count_solutions(candidates_of(boards, size), size, 2)
        assert counts.tolist() == [2] * len(clues) + [1]


def test_generation_does_not_depend_on_the_processes(monkeypatch):
    monkeypatch.setattr(shared, "cores", lambda: 1)
    alone = prepare_sudoku.generate(4, 1500, 7)
    monkeypatch.setattr(shared, "POOL_AFTER", 0.0)
    monkeypatch.setattr(shared, "cores", lambda: 2)
    in_pool = prepare_sudoku.generate(4, 1500, 7)
    assert np.array_equal(alone, in_pool)


def exit_in_a_pool(code):
    if code:
        os._exit(code)


def test_a_process_of_the_pool_that_is_killed_is_an_error(monkeypatch):
    """As where memory is full."""
    monkeypatch.setattr(shared, "POOL_AFTER", -1.0)
    monkeypatch.setattr(shared, "cores", lambda: 2)
    with pytest.raises(TransientError, match="ended before its work"):
        list(shared.in_parallel(exit_in_a_pool, [(0,), (1,)]))


def test_ctrl_c_before_the_thread_of_the_pool_runs_is_a_ctrl_c(monkeypatch):
    monkeypatch.setattr(shared, "POOL_AFTER", -1.0)
    monkeypatch.setattr(shared, "cores", lambda: 2)
    monkeypatch.setattr(_ExecutorManagerThread, "start", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        list(shared.in_parallel(exit_in_a_pool, [(0,), (0,)]))


def test_more_puzzles_than_exist(monkeypatch):
    chunk = prepare_sudoku.generate_chunk(0, 0, 1024, 4)
    monkeypatch.setattr(prepare_sudoku, "generate_chunk", lambda *task: chunk)
    message = "only about 10.. distinct 4x4 puzzles can be found: choose fewer than 3000"
    with pytest.raises(UserError, match=message):
        prepare_sudoku.generate(4, 3000, 0)


def test_copies_have_one_solution_and_are_never_test_puzzles(tmp_path):
    """More training puzzles leave the test set as it is."""
    small = dict(source="generate", size=4, num_test=800)
    path = prepare(tmp_path / "many", **small, num_train=300, num_aug=20)
    train = Dataset(path, "train")
    test = Dataset(path, "test")
    keys = list(shared.keys_of(train.inputs))
    test_keys = set(shared.keys_of(test.inputs))
    assert len(test_keys) == 800 and len(set(keys[::21])) == 300
    assert test_keys.isdisjoint(keys) and train.manifest["counts"]["copies_replaced"] > 0
    assert are_solutions(sudoku_task(4), train.inputs, train.labels).all()
    assert (count_solutions(candidates_of(train.inputs, 4), 4, 2) == 1).all()
    few = prepare(tmp_path / "few", **small, num_train=10, num_aug=1)
    assert np.array_equal(Dataset(few, "test").inputs, test.inputs)


# (the dataset's digest, a batch's digest): integers and seeded draws make them, so they hold on any machine
RECORDED = [("949f8e8288c280b8", "04022d5fe457a4cd"), ("11833591e7a22d78", "55b8f228bf258fa1"),
            ("d5889d4854c1be93", "44fe27e4bc729121")]


def test_the_same_settings_give_the_same_dataset_and_batches_everywhere(tmp_path):
    """Published results name their data by the settings alone."""
    sudoku = prepare(tmp_path / "sudoku", source="generate", size=6, num_train=20, num_test=10, num_aug=9)
    maze = prepare(tmp_path / "maze", prepare_maze, source="generate", size=7, min_path=9, num_train=20,
                   num_test=10)
    real = prepare(tmp_path / "real", train_csv=REAL["train"], test_csv=REAL["test"], subsample_size=9,
                   num_aug=9)
    batches = []
    for path in sudoku, maze, real:
        train = Dataset(path, "train")
        batch = train.train_batch(3, 5, 64, rank=1, world=2)
        content = b"".join(array.tobytes() for array in batch.values())
        batches.append((train.sha256[:16], hashlib.sha256(content).hexdigest()[:16]))
    assert batches == RECORDED


# CSV files; test_wrong_input.py has more wrong ones.

A = ("mine", "1..3.42...1.2...", "1243342143122134", "7")
B = ("mine", "..13...43....1..", "2413132432414132", "3")


def test_the_first_wrong_row_of_a_long_file_is_named(tmp_path):
    """Beyond the first block of rows."""
    several = ("mine", "1" + "." * 15, A[2], "3")
    long = write_csv(tmp_path / "long.csv", [A] * 17000 + [several] * 2)
    short = write_csv(tmp_path / "short.csv", [B])
    with pytest.raises(UserError, match=r"long\.csv:17002: the question has more than one solution"):
        prepare(tmp_path / "out", train_csv=long, test_csv=short, size=4, subsample_size=0, num_aug=0)
    assert not (tmp_path / "out").exists()


def test_csv_files_of_other_programs(tmp_path):
    """Another order of columns, "0" for an empty cell, a byte order mark, quotes, CRLF, blank lines."""
    zeros = A[1].replace(".", "0")
    text = "\ufeffrating,answer,question,source,note\r\n"
    text += f'7,{A[2]},{zeros},"mine, not yours",\r\n\r\n-1,{B[2]},{B[1]},,x'
    (tmp_path / "train.csv").write_bytes(text.encode())
    test = write_csv(tmp_path / "test.csv", [("mine", A[1][::-1], A[2][::-1], "3")])
    path = prepare(tmp_path / "out", train_csv=tmp_path / "train.csv", test_csv=test, size=4, num_aug=0,
                   min_difficulty=-1)
    assert [text_of(sudoku_task(4), row) for row in Dataset(path, "train").inputs] == [A[1], B[1]]


def test_easy_rows_and_rows_of_the_test_set_are_dropped(tmp_path):
    rows = [row for _, row in csv_rows(REAL["train"], COLUMNS)]
    test = write_csv(tmp_path / "test.csv", rows[50:])
    files = dict(train_csv=REAL["train"], test_csv=test, num_aug=0, subsample_size=0)
    path = prepare(tmp_path / "hard", **files, min_difficulty=100)
    is_hard = [int(row[3]) >= 100 for row in rows]
    assert len(Dataset(path, "train")) == sum(is_hard[:50])
    assert len(Dataset(path, "test")) == sum(is_hard[50:])
    with pytest.raises(UserError, match=r"test\.csv: no puzzle is left of 10 rows: .* min_difficulty=100000"):
        prepare(tmp_path / "none", **files, min_difficulty=100000)


# Downloads.

@pytest.mark.parametrize("faults, error, requests, message", [
    (404, UserError, 1, r"cannot be downloaded \(status 404\)"),
    (503, TransientError, 6, "status 503: run again.*--source=csv"),
    ("break", TransientError, 6, "ChunkedEncodingError"),
    (200, UserError, 1, "the answer is a web page; does this network"),
])
def test_downloads_give_up_and_leave_nothing(hub, tmp_path, faults, error, requests, message):
    hub.files["/file"] = b"x"
    hub.faults["/file"] = [faults] * 9
    if faults == 200:  # the page on which a network asks for a login
        hub.content_type = "text/html; charset=utf-8"
    with pytest.raises(error, match=rf"{hub.url}/file.*{message}"):
        shared.download(hub.url + "/file", str(tmp_path / "file"))
    assert len(hub.log) == requests and os.listdir(tmp_path) == []


def test_hub_end_to_end(hub, tmp_path, monkeypatch):
    """source=hub with a mirror that redirects and breaks off; test_gcs.py has more faults."""
    monkeypatch.chdir(tmp_path)
    for split, file in REAL.items():
        with gzip.open(file) as f:
            body = f.read() + b"\n" * 100_000  # blank lines: it is received in several blocks
        name = f"/datasets/sapientinc/sudoku-extreme/resolve/main/{split}.csv"
        hub.files |= {name: body, f"/cdn{name}": body}
        hub.faults |= {name: [302, 302], f"/cdn{name}": ["break"]}
    path = prepare_sudoku.main(dataset_settings(subsample_size=10, num_aug=5))
    assert path == "data/sudoku-extreme-10-aug-5"
    assert len(Dataset(path, "train")) == 60 and len(Dataset(path, "test")) == 60
    assert len(hub.log) == 8  # each file twice, from the address that the first one names

    # a second dataset needs no download
    prepare_sudoku.main(dataset_settings(subsample_size=10, num_aug=0))
    assert len(hub.log) == 8


def test_damaged_lines_of_metrics_are_left_out(tmp_path):
    lines = ['{"step": 1}', "\0" * 90, '{"step": ', "[]", '{"step": 3}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert data.read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 3}]
    assert data.read_metrics(tmp_path / "none.jsonl") == []
