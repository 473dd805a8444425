"""Data sets, batches, CSV files, generated puzzles, copies and downloads: data.py and prepare_sudoku.py."""
import csv
import functools
import gzip
import hashlib
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import data
import prepare_sudoku
from configurator import TransientError, UserError, configure, start
from data import Dataset, halting_draws

HERE = os.path.dirname(os.path.abspath(__file__))
REAL = {split: os.path.join(HERE, "data", f"sudoku_real_{split}_60.csv.gz") for split in ("train", "test")}
FIELDS = ("inputs", "labels", "puzzle_identifiers", "puzzle_indices", "group_indices")
BOXES = {4: (2, 2), 6: (2, 3), 9: (3, 3)}  # rows and columns of a box


def settings(**changes):
    return configure(prepare_sudoku.__file__, [f"--{key}={value}" for key, value in changes.items()])


def prepare(path, **changes):
    return prepare_sudoku.prepare(settings(output_dir=path, **changes))


def generated(path, **changes):
    return prepare(path, source="generate", **changes)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """40 real 9x9 puzzles with 50 copies each, and 60 test puzzles."""
    path = str(tmp_path_factory.mktemp("real") / "sudoku")
    return prepare(path, train_csv=REAL["train"], test_csv=REAL["test"], subsample_size=40, num_aug=50)


@pytest.fixture
def copy(real, tmp_path):
    return shutil.copytree(real, tmp_path / "copy")


def read_real(split):
    with gzip.open(REAL[split], "rt", newline="") as f:
        return list(csv.DictReader(f))


def symbols(tokens):
    return "".join(" .123456789"[token] for token in tokens)


def units(boards, size):
    """Rows, columns and boxes of boards [n, cells]: [n, 3 * size, size]."""
    box_rows, box_columns = BOXES[size]
    rows = boards.reshape(-1, size, size)
    columns = rows.transpose(0, 2, 1)
    grid = boards.reshape(-1, size // box_rows, box_rows, size // box_columns, box_columns)
    boxes = grid.transpose(0, 1, 3, 2, 4).reshape(-1, size, size)
    return np.concatenate([rows, columns, boxes], axis=1)


def assert_valid(questions, answers, size):
    """Answers [n, cells] are filled by the rules, and the clues agree with them."""
    assert (np.sort(units(answers, size), axis=2) == np.arange(1, size + 1)).all()
    assert ((questions == 0) | (questions == answers)).all()


def solutions(board, size, limit=2):
    """Number of solutions up to limit, by plain backtracking; the clues of board [cells] must not clash."""
    cells = np.arange(size * size)
    units_of = [[] for _ in range(size * size)]
    for unit, members in enumerate(units(cells, size)[0].tolist()):
        for cell in members:
            units_of[cell].append(unit)
    missing = [2 ** size - 1] * (3 * size)  # the digits, as bits, that a unit still lacks
    for cell, digit in enumerate(board.tolist()):
        for unit in units_of[cell]:
            missing[unit] &= ~(1 << digit >> 1)  # 0, an empty cell, has no bit

    def options(cell):
        row, column, box = units_of[cell]
        return missing[row] & missing[column] & missing[box]

    def count(empty, limit):
        if not empty:
            return 1
        cell = min(empty, key=lambda cell: options(cell).bit_count())
        found = 0
        for bit in [1 << digit for digit in range(size) if options(cell) >> digit & 1]:
            for unit in units_of[cell]:
                missing[unit] ^= bit
            found += count([other for other in empty if other != cell], limit - found)
            for unit in units_of[cell]:
                missing[unit] ^= bit
            if found >= limit:
                break
        return found

    return count(np.flatnonzero(board == 0).tolist(), limit)


# The layout.

def test_layout_is_the_official_one(real):
    for split, groups, examples in (("train", 40, 40 * 51), ("test", 60, 60)):
        with open(f"{real}/{split}/dataset.json") as f:
            assert json.load(f) == {
                "pad_id": 0, "ignore_label_id": 0, "blank_identifier_id": 0, "vocab_size": 11, "seq_len": 81,
                "num_puzzle_identifiers": 1, "total_groups": groups, "mean_puzzle_examples": 1.0,
                "total_puzzles": groups, "sets": ["all"]}
        arrays = {field: np.load(f"{real}/{split}/all__{field}.npy") for field in FIELDS}
        assert arrays["inputs"].shape == arrays["labels"].shape == (examples, 81)
        assert arrays["inputs"].dtype == arrays["labels"].dtype == np.uint8
        assert all(arrays[field].dtype == np.int32 for field in FIELDS[2:])
        assert (arrays["puzzle_identifiers"] == np.zeros(examples)).all()
        assert (arrays["puzzle_indices"] == np.arange(examples + 1)).all()
        assert (arrays["group_indices"] == np.arange(groups + 1) * (examples // groups)).all()
    with open(f"{real}/identifiers.json") as f:
        assert json.load(f) == ["<blank>"]


def test_manifest_describes_the_data_set(real):
    with open(f"{real}/manifest.json") as f:
        manifest = json.load(f)
    assert manifest["grid"] == [9, 9] and manifest["box"] == [3, 3] and manifest["symbols"] == " .123456789"
    assert manifest["kind"] == "sudoku" and manifest["source"] == "csv" and manifest["seed"] == 0
    assert manifest["counts"] == {
        "train_rows": 60, "test_rows": 60, "train_rows_in_test": 0, "train_puzzles": 40, "test_puzzles": 60,
        "copies_replaced": 0}
    files = [os.path.join(folder, name) for folder, _, names in os.walk(real) for name in names]
    assert {os.path.relpath(file, real) for file in files} == {"manifest.json", *manifest["sha256"]}
    for name, digest in manifest["sha256"].items():
        with open(f"{real}/{name}", "rb") as f:
            assert hashlib.sha256(f.read()).hexdigest() == digest


def test_tokens_and_rows_are_those_of_the_files(real):
    test, rows = Dataset(real, "test"), read_real("test")
    assert len(test) == len(rows) == 60
    assert [symbols(question) for question in test.inputs] == [row["question"] for row in rows]
    assert [symbols(answer) for answer in test.labels] == [row["answer"] for row in rows]
    known = {row["question"] for row in read_real("train")}
    originals = {symbols(question) for question in Dataset(real, "train").inputs[::51]}
    assert len(originals & known) == 40


def test_data_sets_of_the_official_builder_load(copy, real):
    ours = Dataset(real, "train")
    os.remove(copy / "manifest.json")
    theirs = Dataset(copy, "train")
    assert theirs.manifest == {} and theirs.sha256 == ours.sha256
    for split in ("train", "test"):
        for field in FIELDS:
            path = copy / split / f"all__{field}.npy"
            np.save(path, np.load(path).astype(np.int64))
        path = copy / split / "dataset.json"
        text = path.read_text()
        path.write_text(text.replace('"ignore_label_id": 0', '"ignore_label_id": null'))
    theirs = Dataset(copy, "train")
    assert theirs.sha256 != ours.sha256
    a, b = ours.train_batch(1, 2, 64), theirs.train_batch(1, 2, 64)
    assert all((a[key] == b[key]).all() and a[key].dtype == b[key].dtype == np.int32 for key in a)


def test_the_same_settings_make_the_same_files(tmp_path):
    hashes = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        path = generated(tmp_path / name, size=6, num_train=30, num_test=10, num_aug=3, seed=seed)
        hashes.append(Dataset(path, "train").sha256)
    assert hashes[0] == hashes[1] != hashes[2]


def test_an_existing_folder_is_not_overwritten(real):
    before = data.file_sha256(f"{real}/manifest.json")
    with pytest.raises(UserError, match="exists already: delete it or choose another --output_dir"):
        generated(real, size=4, num_train=2, num_test=2)
    assert data.file_sha256(f"{real}/manifest.json") == before


def test_an_interrupted_data_set_leaves_nothing(tmp_path):
    def blocks():
        yield np.ones((3, 16), np.uint8), np.ones((3, 16), np.uint8)
        assert not (tmp_path / "x").exists()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        data.write_dataset(str(tmp_path / "x") + "/", {"train": (6, 1, blocks())}, 6, {"grid": [4, 4]})
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written():
    with pytest.raises(UserError, match="cannot be written"):
        data.write_dataset("/proc/nowhere/x", {}, 6, {"grid": [4, 4]})


# Damage.

def remove(name):
    return lambda path: os.remove(path / name)


def write(name, text):
    return lambda path: (path / name).write_text(text)


def cut(name):
    def damage(path):
        with open(path / name, "r+b") as f:
            f.truncate(os.path.getsize(path / name) - 100)
    return damage


def flip(name):
    def damage(path):
        with open(path / name, "r+b") as f:
            f.seek(-50, 2)
            f.write(b"\x07")
    return damage


def without_manifest(damage):
    def both(path):
        os.remove(path / "manifest.json")
        damage(path)
    return both


def change(field, function):
    def damage(path):
        file = path / "train" / f"all__{field}.npy"
        np.save(file, function(np.load(file)))
    return without_manifest(damage)


def metadata(key, value):
    def damage(path):
        with open(path / "train/dataset.json") as f:
            content = json.load(f)
        content[key] = value
        (path / "train/dataset.json").write_text(json.dumps(content))
    return without_manifest(damage)


def with_row(array, row, value):
    array = array.astype(np.int64)
    array[row] = value
    return array


DAMAGE = {
    "no data set": (shutil.rmtree, r"train: no such data set; build it with prepare_sudoku.py"),
    "missing array": (
        remove("train/all__labels.npy"),
        r"train/all__labels.npy is missing: build it again with prepare_sudoku.py"),
    "missing metadata": (remove("train/dataset.json"), r"train/dataset.json is missing"),
    "truncated": (
        cut("train/all__inputs.npy"),
        r"all__inputs.npy does not match manifest.json \(changed or truncated\): build it again"),
    "changed": (flip("train/all__labels.npy"), r"all__labels.npy does not match manifest.json"),
    "changed metadata": (flip("train/dataset.json"), r"dataset.json does not match manifest.json"),
    "manifest lacks a file": (
        write("manifest.json", '{"sha256": {}}'), r"dataset.json does not match manifest.json"),
    "manifest is not JSON": (cut("manifest.json"), r"manifest.json cannot be read as JSON"),
    "manifest is a list": (write("manifest.json", "[]"), r"manifest.json lacks sha256"),
    "manifest without a table": (
        write("manifest.json", '{"sha256": []}'), r"manifest.json: sha256 must be a table"),
    "truncated inputs, no manifest": (
        without_manifest(cut("train/all__inputs.npy")), r"all__inputs.npy cannot be read \(truncated\?\)"),
    "truncated indices, no manifest": (
        without_manifest(cut("train/all__group_indices.npy")), r"all__group_indices.npy cannot be read"),
    "empty file": (without_manifest(write("train/all__labels.npy", "")), r"all__labels.npy cannot be read"),
    "not npy": (without_manifest(write("train/all__labels.npy", "x" * 500)), r"labels.npy cannot be read"),
    "metadata is not JSON": (
        without_manifest(cut("train/dataset.json")), r"dataset.json cannot be read as JSON"),
    "metadata lacks a key": (
        without_manifest(write("train/dataset.json", "{}")), r"dataset.json lacks sets, pad_id"),
    "metadata of a wrong type": (
        metadata("seq_len", "81"), r"dataset.json: seq_len must be a number, not '81'"),
    "several sets": (metadata("sets", ["all", "more"]), r'sets must be \["all"\]'),
    "other seq_len": (
        metadata("seq_len", 80),
        r"all__inputs.npy must hold integers of shape \[N, 80\], not uint8 of \[2040, 81\]"),
    "other total_groups": (metadata("total_groups", 41), r"all__group_indices.npy must have 42 entries"),
    "token beyond the vocabulary": (metadata("vocab_size", 10), r"all__inputs.npy holds 10, beyond the 9 "),
    "float inputs": (change("inputs", lambda a: a.astype(float)), r"must hold integers"),
    "flat labels": (
        change("labels", lambda a: a.ravel()), r"all__labels.npy must hold integers of shape \[N, 81\]"),
    "fewer labels": (
        change("labels", lambda a: a[:-1]),
        r"all__labels.npy has 2039 rows, but all__inputs.npy has 2040"),
    "negative input": (change("inputs", lambda a: with_row(a, 5, -3)), r"all__inputs.npy holds -3"),
    "unknown identifier": (
        change("puzzle_identifiers", lambda a: with_row(a, 5, 1)), r"identifiers.npy holds 1, beyond the 0"),
    "too few identifiers": (
        change("puzzle_identifiers", lambda a: a[1:]),
        r"puzzle_indices.npy must have 2040 entries, not 2041"),
    "too few indices": (
        change("puzzle_indices", lambda a: np.delete(a, 5)),
        r"puzzle_indices.npy must have 2041 entries, not"),
    "indices fall": (
        change("puzzle_indices", lambda a: with_row(a, 5, 3)), r"all__puzzle_indices.npy must rise from 0"),
    "indices end early": (
        change("group_indices", lambda a: a[:-1]), r"all__group_indices.npy must rise .* puzzles, 2040"),
    "indices start late": (
        change("group_indices", lambda a: with_row(a, 0, 1)), r"all__group_indices.npy must rise from 0"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_data_sets_are_named(case, copy):
    damage, message = DAMAGE[case]
    damage(copy)
    with pytest.raises(UserError, match=message) as error:
        Dataset(str(copy), "train")
    assert "\n" not in str(error.value)


# Batches.

def test_batches_are_a_pure_function_of_seed_and_step(real):
    train = Dataset(real, "train")
    first = [train.train_batch(3, step, 48) for step in range(5)]
    again = [Dataset(real, "train").train_batch(3, step, 48) for step in reversed(range(5))][::-1]
    for a, b in zip(first, again):
        assert all((a[key] == b[key]).all() and a[key].dtype == np.int32 for key in a)
        assert a["inputs"].shape == a["labels"].shape == (48, 81) and a["puzzle_identifiers"].shape == (48,)
    assert (first[0]["inputs"] != first[1]["inputs"]).any()
    assert (first[0]["inputs"] != train.train_batch(4, 0, 48)["inputs"]).any()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_slices_of_the_ranks_make_the_global_batch(real, world):
    train = Dataset(real, "train")
    whole = train.train_batch(0, 7, 64)
    parts = [train.train_batch(0, 7, 64, rank, world) for rank in range(world)]
    assert all((np.concatenate([part[key] for part in parts]) == whole[key]).all() for key in whole)
    draws = [halting_draws(0, 7, 64, 16, 0.5, rank, world) for rank in range(world)]
    assert (np.concatenate(draws) == halting_draws(0, 7, 64, 16, 0.5)).all()
    with pytest.raises(UserError, match="a batch of 66 cannot be divided among 4 replicas"):
        train.train_batch(0, 0, 66, 0, 4)


def test_threads_draw_the_same_batches(real):
    train = Dataset(real, "train")

    def slices(rank):
        return np.stack([train.train_batch(0, step, 32, rank, 4)["inputs"] for step in range(30)])

    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(slices, range(4)))
    whole = np.stack([train.train_batch(0, step, 32)["inputs"] for step in range(30)])
    assert (np.concatenate(parts, axis=1) == whole).all()


@pytest.mark.parametrize("batch_size", [16, 24, 100])  # parts of the 40 groups, and batches that span epochs
def test_each_group_comes_once_an_epoch(real, batch_size):
    train = Dataset(real, "train")
    group_of = {row.tobytes(): i // 51 for i, row in enumerate(np.asarray(train.inputs))}
    steps = range(40 * 6 // batch_size + 1)
    inputs = np.concatenate([train.train_batch(5, step, batch_size)["inputs"] for step in steps])
    groups = np.array([group_of[row.tobytes()] for row in inputs.astype(np.uint8)])
    epochs = groups[:40 * (len(groups) // 40)].reshape(-1, 40)
    assert (np.sort(epochs, axis=1) == np.arange(40)).all()
    assert (epochs[0] != epochs[1]).any()


def test_copies_vary(real):
    train = Dataset(real, "train")
    copies = {row.tobytes(): i % 51 for i, row in enumerate(np.asarray(train.inputs))}
    rows = np.concatenate([train.train_batch(0, step, 400)["inputs"] for step in range(10)]).astype(np.uint8)
    share = np.bincount([copies[row.tobytes()] for row in rows], minlength=51) / len(rows)
    assert share.min() > 0.4 / 51 and share.max() < 2 / 51


def test_puzzles_with_several_examples(tmp_path):
    """Groups of several puzzles with several examples, as in the official ARC sets."""
    folder = tmp_path / "arc" / "train"
    folder.mkdir(parents=True)
    inputs = np.arange(7).repeat(2).reshape(7, 2)
    for field, array in (
        ("inputs", inputs),
        ("labels", inputs),
        ("puzzle_identifiers", [1, 2, 3, 4]),
        ("puzzle_indices", [0, 2, 3, 6, 7]),
        ("group_indices", [0, 1, 4]),
    ):
        np.save(folder / f"all__{field}.npy", np.array(array))
    (folder / "dataset.json").write_text(json.dumps({
        "pad_id": 0, "ignore_label_id": None, "blank_identifier_id": 0, "vocab_size": 7, "seq_len": 2,
        "num_puzzle_identifiers": 5, "total_groups": 2, "mean_puzzle_examples": 1.75, "total_puzzles": 4,
        "sets": ["all"]}))
    train = Dataset(str(tmp_path / "arc"), "train")
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
    assert (halting_draws(1, 3, 64, 16, 0.1) == halting_draws(1, 3, 64, 16, 0.1)).all()
    assert not halting_draws(0, 0, 500, 1, 1.0).any() and not halting_draws(0, 0, 500, 16, 0.0).any()
    assert set(halting_draws(0, 0, 500, 2, 1.0)) == {2}


def test_test_batches_and_subsets(real):
    test = Dataset(real, "test")
    rows = [3, 59, 4]
    batch = test.test_batch(rows, 5)
    assert (batch["inputs"][:3] == test.inputs[rows]).all()
    assert (batch["labels"][:3] == test.labels[rows]).all()
    assert batch["inputs"].shape == (5, 81)
    assert (batch["inputs"][3:] == 0).all() and (batch["labels"][3:] == -100).all()
    assert all(array.dtype == np.int32 for array in batch.values())
    assert test.test_batch([], 2)["inputs"].shape == (2, 81)
    subset = test.subset(20)
    assert len(subset) == 20 and (np.diff(subset) > 0).all()
    assert (subset == Dataset(real, "test").subset(20)).all()
    assert subset[-1] > 40 and (subset != np.arange(20)).any()
    assert (test.subset(0) == np.arange(60)).all() and (test.subset(1000) == np.arange(60)).all()


# Generated puzzles and copies.

@pytest.mark.parametrize("size, n", [(4, 60), (6, 60), (9, 2)])
def test_generated_puzzles_are_minimal_with_one_solution(size, n):
    questions, answers = prepare_sudoku.generate(size, n, 0, 1)
    assert questions.shape == answers.shape == (n, size * size)
    assert questions.dtype == answers.dtype == np.uint8
    assert_valid(questions, answers, size)
    assert len(np.unique(questions, axis=0)) == n
    for question in questions:
        assert solutions(question, size) == 1
        for clue in np.flatnonzero(question):
            fewer = question.copy()
            fewer[clue] = 0
            assert solutions(fewer, size) == 2


def test_generation_depends_on_the_seed_and_not_on_the_processes(monkeypatch):
    questions, answers = prepare_sudoku.generate(4, 2500, 7, 1)
    assert len(np.unique(questions, axis=0)) == 2500
    assert (questions[:50] != prepare_sudoku.generate(4, 50, 8, 1)[0]).any()
    monkeypatch.setattr(data, "POOL_AFTER", 0.0)
    in_pool = prepare_sudoku.generate(4, 2500, 7, 2)
    assert (questions == in_pool[0]).all() and (answers == in_pool[1]).all()


def test_more_puzzles_than_exist(monkeypatch):
    chunk = prepare_sudoku.generate_chunk((0, 0, 1024, 4))
    monkeypatch.setattr(prepare_sudoku, "generate_chunk", lambda task: chunk)
    message = "hardly more than 10.. distinct 4x4 puzzles can be found: choose fewer than 3000"
    with pytest.raises(UserError, match=message):
        prepare_sudoku.generate(4, 3000, 0, 1)


def test_counting_agrees_with_backtracking():
    rng = np.random.default_rng(0)
    questions, answers = prepare_sudoku.generate(6, 40, 1, 1)
    for removed in (0, 1, 2, 3):  # boards that lack clues have several solutions
        boards = questions.copy()
        for board, answer in zip(boards, answers):
            board[rng.choice(np.flatnonzero(board), removed, replace=False)] = 0
            if removed == 3:  # a changed clue often leaves none
                cell = rng.choice(np.flatnonzero(board))
                board[cell] = answer[cell] % 6 + 1
        counts = prepare_sudoku.count_solutions(prepare_sudoku.candidates_of(boards, 6), 6, 5)
        for board, count in zip(boards, counts):
            clash = any(len(set(unit[unit > 0])) < (unit > 0).sum() for unit in units(board, 6)[0])
            assert count == (0 if clash else solutions(board, 6, 5))
    assert prepare_sudoku.count_solutions(np.full((81, 3), 511, np.uint16), 9, 2).tolist() == [2, 2, 2]


def test_train_and_test_of_a_generated_set_are_distinct(tmp_path):
    path = generated(tmp_path / "g", size=4, num_train=300, num_test=800, num_aug=20)
    train = Dataset(path, "train")
    train_rows = [row.tobytes() for row in train.inputs]
    test_rows = [row.tobytes() for row in Dataset(path, "test").inputs]
    assert len(set(test_rows)) == 800 and len(set(train_rows[::21])) == 300
    assert not set(test_rows) & set(train_rows)
    assert train.manifest["counts"]["copies_replaced"] > 0
    assert_valid(train.inputs - 1, train.labels - 1, 4)


def test_more_training_puzzles_leave_the_others_as_they_are(tmp_path):
    few, many = (generated(tmp_path / f"{n}", size=6, num_train=n, num_test=20, num_aug=1) for n in (10, 30))
    assert np.array_equal(Dataset(few, "test").inputs, Dataset(many, "test").inputs)
    assert np.array_equal(Dataset(few, "train").inputs[::2], Dataset(many, "train").inputs[:20:2])


@pytest.mark.parametrize("size", [4, 6, 9])
def test_copies_are_valid_puzzles(size):
    rng = np.random.default_rng(0)
    questions, answers = prepare_sudoku.generate(size, 5, 0, 1)
    new_questions, new_answers = prepare_sudoku.transform(questions, answers, 1000, size, rng)
    assert new_questions.shape == (5000, size * size) and new_questions.dtype == np.uint8
    assert_valid(new_questions, new_answers, size)
    assert ((new_questions > 0).sum(axis=1) == (questions > 0).sum(axis=1).repeat(1000)).all()
    distinct = [len(np.unique(new_questions[i:i + 1000], axis=0)) for i in range(0, 5000, 1000)]
    assert min(distinct) > (500 if size == 4 else 990)
    candidates = prepare_sudoku.candidates_of(new_questions[::10], size)
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


def test_copies_keep_the_stacks_together():
    """Question i has the first row's cells in stack i: they end in one row and stack, or column and band."""
    questions = np.zeros((3, 81), np.uint8)
    answers = np.tile(np.arange(81) % 9 + 1, (3, 1)).astype(np.uint8)
    for i in range(3):
        questions[i, i * 3:i * 3 + 3] = answers[i, i * 3:i * 3 + 3]
    copies, _ = prepare_sudoku.transform(questions, answers, 500, 9, np.random.default_rng(1))
    for question in copies.reshape(-1, 9, 9):
        r, c = np.nonzero(question)
        assert len(set(r // 3)) == 1 and len(set(c // 3)) == 1 and (len(set(r)) == 1 or len(set(c)) == 1)


def test_speed(tmp_path):
    begun = time.monotonic()
    path = generated(tmp_path / "g", size=6, num_train=1000, num_test=200, num_aug=100)
    assert time.monotonic() - begun < 10
    train = Dataset(path, "train")
    train.train_batch(0, 0, 6144)
    begun = time.monotonic()
    for step in range(5):
        train.train_batch(0, step, 6144)
    assert (time.monotonic() - begun) / 5 < 0.05


# CSV files.

@functools.lru_cache(maxsize=None)
def four_by_four():
    """Three rows of a 4x4 file: puzzles with one solution."""
    rows = []
    for question, answer in zip(*prepare_sudoku.generate(4, 3, 0, 1)):
        rows.append(("mine", symbols(question + 1), symbols(answer + 1), "3"))
    return rows


def replaced(text, cell, character):
    return text[:cell] + character + text[cell + 1:]


def with_question(row, question):
    return (row[0], question, *row[2:])


def with_answer(row, answer):
    return (*row[:2], answer, row[3])


def other_digit(row):
    """The answer with another digit in the question's first empty cell."""
    cell = row[1].index(".")
    return with_answer(row, replaced(row[2], cell, str(int(row[2][cell]) % 4 + 1)))


def clue_mismatch(row):
    """An answer that is a valid grid, but another puzzle's."""
    return with_answer(row, row[2].translate(str.maketrans("1234", "2143")))


def fewer_clues(row):
    return with_question(row, replaced(row[1], re.search(r"\d", row[1]).start(), "."))


WRONG_ROWS = {
    "short row": (lambda row: row[:3], "3 columns, but the header has 4"),
    "long row": (lambda row: (*row, "x"), "5 columns, but the header has 4"),
    "short question": (
        lambda row: with_question(row, row[1][1:]), "the question has 15 characters, not 16"),
    "long answer": (
        lambda row: with_answer(row, row[2] + "1"), "the answer has 17 characters, not 16"),
    "wrong character": (
        lambda row: with_question(row, replaced(row[1], 5, "x")),
        "character 6 of the question is 'x', not one of '.01234'"),
    "digit too large": (
        lambda row: with_answer(row, replaced(row[2], 3, "5")),
        "character 4 of the answer is '5', not one of '1234'"),
    "not ASCII": (
        lambda row: with_answer(row, replaced(row[2], 0, "\u0663")),
        "character 1 of the answer is '\u0663'"),
    "empty cell in the answer": (
        lambda row: with_answer(row, replaced(row[2], 15, ".")), "character 16 of the answer is '.'"),
    "wrong digit": (other_digit, "the answer has digit . twice in (row|column|box) ."),
    "clue mismatch": (clue_mismatch, "the question has . in row ., column ., where the answer has ."),
    "clash in the question": (
        lambda row: with_question(row, "1..1" + "." * 12), "the question has digit 1 twice in row 1"),
    "unsolvable": (
        lambda row: with_question(row, "12........3...4."), "the question has no solution"),
    "ambiguous": (fewer_clues, "the question has more than one solution"),
    "wrong rating": (lambda row: (*row[:3], "hard"), "the rating 'hard' is not an integer"),
    "empty rating": (lambda row: (*row[:3], ""), "the rating '' is not an integer"),
}


def write_csv(path, rows, header=("source", "question", "answer", "rating")):
    with open(path, "w", newline="", encoding="utf-8") as f:
        csv.writer(f).writerows([header, *rows])
    return str(path)


def build(tmp_path, train, test, **changes):
    return prepare(tmp_path / "out", train_csv=train, test_csv=test, size=4, num_aug=0, **changes)


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("case", WRONG_ROWS)
def test_wrong_rows_are_named(case, split, tmp_path):
    damage, message = WRONG_ROWS[case]
    a, b, c = four_by_four()
    files = {"train": write_csv(tmp_path / "train.csv", [a]), "test": write_csv(tmp_path / "test.csv", [c])}
    first = {"train": a, "test": c}[split]
    files[split] = write_csv(tmp_path / "mine.csv", [first, damage(b), damage(b)])
    with pytest.raises(UserError, match=r"mine\.csv:3: " + message) as error:
        build(tmp_path, **files)
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("damages, message", [
    ([clue_mismatch, lambda row: row[:2], other_digit], "the question has ."),
    ([lambda row: row[:2], clue_mismatch, other_digit], "2 columns"),
])
def test_the_first_wrong_row_of_a_long_file_is_named(tmp_path, damages, message):
    """Wrong rows of several kinds, beyond the first block of rows."""
    a, b, c = four_by_four()
    train = write_csv(tmp_path / "train.csv", [a] * 20000 + [damage(a) for damage in damages])
    with pytest.raises(UserError, match=rf"train\.csv:20002: {message}"):
        build(tmp_path, train, write_csv(tmp_path / "test.csv", [c]))


def test_wrong_files_are_named(tmp_path):
    a, _, c = four_by_four()
    good = write_csv(tmp_path / "good.csv", [c])
    other_header = ("source", "question", "answer", "hardness")
    write_csv(tmp_path / "column.csv", [a], header=other_header)
    write_csv(tmp_path / "bare.csv", [])
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "folder.csv").mkdir()
    lines = ["source,question,answer,rating", *[",".join(a) + str(i) for i in range(3000)]]
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress("\n".join(lines).encode())[:-50])
    (tmp_path / "plain.csv.gz").write_text("source,question,answer,rating\n")
    for name, message in (
        ("missing.csv", r": cannot be read \(No such file"),
        ("folder.csv", r": cannot be read \(Is a directory\)"),
        ("empty.csv", ":1: no column source; the first line must be source,question,answer,rating"),
        ("column.csv", ":1: no column rating"),
        ("bare.csv", ":2: no puzzle under the header"),
        ("cut.csv.gz", r":\d+: cannot be read \(Compressed file ended"),
        ("plain.csv.gz", r":1: cannot be read \(Not a gzipped file"),
    ):
        with pytest.raises(UserError, match=re.escape(name) + message) as error:
            build(tmp_path, tmp_path / name, good)
        assert "\n" not in str(error.value)


def test_csv_variants(tmp_path):
    """Another order of columns, "0" for an empty cell, a byte order mark, quotes, CRLF, blank lines."""
    a, b, c = four_by_four()
    text = "\ufeffrating,answer,question,source,note\r\n"
    text += f'7,{a[2]},{a[1].replace(".", "0")},"mine, not yours",\r\n\r\n-1,{b[2]},{b[1]},,x'
    (tmp_path / "train.csv").write_bytes(text.encode())
    test = write_csv(tmp_path / "test.csv", [c])
    train = Dataset(build(tmp_path, tmp_path / "train.csv", test, min_difficulty=-1), "train")
    assert [symbols(question) for question in train.inputs] == [a[1], b[1]]
    assert train.vocab_size == 6
    assert train.manifest["box"] == [2, 2] and train.manifest["symbols"] == " .1234"


def test_choice_of_rows(tmp_path):
    """min_difficulty holds for both files, rows of the test set are dropped, the choice is seeded."""
    rows = [["x", row["question"], row["answer"], row["rating"]] for row in read_real("train")]
    train, test = write_csv(tmp_path / "train.csv", rows), write_csv(tmp_path / "test.csv", rows[50:])
    files = dict(train_csv=train, test_csv=test, num_aug=0)
    everything = Dataset(prepare(tmp_path / "all", **files, subsample_size=0), "train")
    assert len(everything) == 50 and everything.manifest["counts"]["train_rows_in_test"] == 10
    path = prepare(tmp_path / "hard", **files, subsample_size=0, min_difficulty=100)
    is_hard = [int(row[3]) >= 100 for row in rows]
    assert len(Dataset(path, "train")) == sum(is_hard[:50])
    assert len(Dataset(path, "test")) == sum(is_hard[50:])
    chosen = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        path = prepare(tmp_path / name, **files, subsample_size=20, seed=seed)
        chosen.append(Dataset(path, "train").inputs)
    assert (chosen[0] == chosen[1]).all() and (chosen[0] != chosen[2]).any() and len(chosen[0]) == 20
    message = r"test\.csv: no puzzle is left of 10 rows: .* min_difficulty=100000"
    with pytest.raises(UserError, match=message):
        prepare(tmp_path / "none", **files, min_difficulty=100000)
    message = r"test\.csv: no puzzle is left of 10 rows: 10 are in the test set too"
    with pytest.raises(UserError, match=message):
        prepare(tmp_path / "none", train_csv=test, test_csv=test)


def test_ambiguous_puzzles_pass_unchecked(tmp_path):
    a, b, c = four_by_four()
    train = write_csv(tmp_path / "train.csv", [a, fewer_clues(b)])
    test = write_csv(tmp_path / "test.csv", [c])
    assert len(Dataset(build(tmp_path, train, test, check_unique=False), "train")) == 2


@pytest.mark.parametrize("wrong, message", [
    (dict(source="web"), "source must be hub, csv or generate, not 'web'"),
    (dict(train_csv="a.csv"), "source=csv needs both"),
    (dict(source="csv"), "source=csv needs both"),
    (dict(source="generate", size=5), "size must be 4, 6 or 9, not 5"),
    (dict(size=6), "size must be 9 for the hub, not 6"),
    (dict(num_aug=-1), "num_aug must be at least 0"),
    (dict(source="generate", num_train=0), "num_train must be at least 1"),
    (dict(seed=-1), "seed must be at least 0"),
])
def test_wrong_settings(wrong, message):
    with pytest.raises(UserError, match=message):
        prepare_sudoku.prepare(settings(**wrong))


@pytest.mark.parametrize("changes, name", [
    (dict(), "data/sudoku-extreme-1k-aug-1000"),
    (dict(subsample_size=0, num_aug=0), "data/sudoku-extreme-full"),
    (dict(min_difficulty=20, seed=3), "data/sudoku-extreme-1k-aug-1000-min-20-seed-3"),
    (dict(train_csv="x/mine.csv.gz", test_csv="y.csv", subsample_size=123), "data/mine-123-aug-1000"),
    (dict(source="generate", size=6, num_aug=10), "data/sudoku-6x6-3k-aug-10"),
])
def test_default_output_dir(changes, name):
    assert prepare_sudoku.complete(settings(**changes)).output_dir == name


# Downloads.

class Hub(http.server.BaseHTTPRequestHandler):
    """Serves server.files; each request takes the next fault of server.faults[path].

    server.log: (path, range, token) of each request.
    """

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        server, path = self.server, self.path
        server.log.append((path, self.headers.get("Range"), self.headers.get("Authorization")))
        body = server.files.get(path)
        fault = server.faults[path].pop(0) if server.faults.get(path) else None
        if fault == "redirect":
            digest = hashlib.sha256(body).hexdigest()
            headers = {"X-Linked-Size": str(len(body)), "X-Linked-Etag": f'"{digest}"'}
            return self.answer(302, b"", Location=f"/cdn{path}", **headers)
        if isinstance(fault, int) or body is None:
            return self.answer(fault or 404, b"no")
        headers = {}
        if fault == "hash":
            headers["X-Linked-Etag"] = '"' + "0" * 64 + '"'
        if fault == "size":
            headers["X-Linked-Size"] = str(len(body) + 5)
        start = 0
        requested = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if requested and fault != "ignore range":
            start = int(requested[1])
            if start >= len(body):
                return self.answer(416, b"", **{"Content-Range": f"bytes */{len(body)}"}, **headers)
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        half = (len(body) - start) // 2 if fault in ("break", "stall") else None
        self.answer(206 if start else 200, body[start:], half, **headers)
        if fault == "stall":
            server.stop.wait(5)

    def answer(self, status, body, part=None, **headers):
        self.send_response(status)
        for key, value in dict({"Content-Length": str(len(body))}, **headers).items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body[:part])
        self.close_connection = part is not None or status >= 400

    def log_message(self, *args):
        pass


@pytest.fixture
def hub():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files, server.faults, server.log, server.stop = {}, {}, [], threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.stop.set()
    server.shutdown()
    thread.join()
    server.server_close()


BODY = np.random.default_rng(0).bytes(300_000)


@pytest.mark.parametrize("faults, ranges", [
    ([], [None]),
    (["break"], [None, "resumed"]),
    (["break"] * 7, [None] + ["resumed"] * 7),  # more than 6 attempts, as each receives something
    ([503, 429, 500, 408], [None] * 5),
    (["break", "ignore range"], [None, "resumed"]),
    (["break", "break", "ignore range", 502], [None, "resumed", "resumed"]),
    (["stall"], [None, "resumed"]),
    (["hash"], [None, None]),
    (["size", "size"], [None, "resumed", None]),
])
def test_downloads_survive(hub, tmp_path, faults, ranges):
    hub.files["/file"], hub.faults["/file"] = BODY, list(faults)
    path = str(tmp_path / "deep" / "file")
    data.download(hub.url + "/file", path, timeout=0.5, wait=0.01)
    with open(path, "rb") as f:
        assert f.read() == BODY
    assert [byte_range and "resumed" for _, byte_range, _ in hub.log] == ranges
    assert os.listdir(tmp_path / "deep") == ["file"]
    data.download(hub.url + "/file", path)
    assert len(hub.log) == len(ranges)


@pytest.mark.parametrize("size, ranges", [
    (100_000, ["bytes=100000-"]),
    (300_000, ["bytes=300000-"]),  # complete
    (300_001, ["bytes=300001-", None]),  # too long
])
def test_downloads_resume_after_a_kill(hub, tmp_path, size, ranges):
    hub.files["/file"] = BODY
    (tmp_path / "file.part").write_bytes((BODY + b"x")[:size])
    data.download(hub.url + "/file", str(tmp_path / "file"), wait=0.01)
    assert (tmp_path / "file").read_bytes() == BODY
    assert [byte_range for _, byte_range, _ in hub.log] == ranges


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_downloads_that_cannot_succeed_fail_at_once(hub, tmp_path, status):
    hub.files["/file"], hub.faults["/file"] = BODY, [status] * 9
    with pytest.raises(UserError, match=rf"{hub.url}/file cannot be downloaded \(status {status}\)") as error:
        data.download(hub.url + "/file", str(tmp_path / "file"))
    assert len(hub.log) == 1 and "\n" not in str(error.value)


@pytest.mark.parametrize("fault, message", [
    (503, "status 503"),
    ("hash", "its SHA-256 is not the one that the hub states"),
    ("size", "broke off"),
    ("stall", "timed out"),
])
def test_downloads_give_up(hub, tmp_path, fault, message):
    hub.files["/file"] = BODY[:1]  # half of it is nothing: no attempt makes progress
    hub.faults["/file"] = [fault] * 99
    message = rf"cannot be downloaded \(.*({message}).*run again .*--source=csv"
    with pytest.raises(TransientError, match=message) as error:
        data.download(hub.url + "/file", str(tmp_path / "file"), attempts=3, timeout=0.3, wait=0.01)
    assert not (tmp_path / "file").exists() and "\n" not in str(error.value)


def test_no_server(tmp_path):
    with pytest.raises(TransientError, match="cannot be downloaded .*refused") as error:
        data.download("http://127.0.0.1:9/file", str(tmp_path / "file"), attempts=2, wait=0.01)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="is not a URL that can be downloaded"):
        data.download("hf.co/file", str(tmp_path / "file"))


def test_hub_end_to_end(hub, tmp_path, monkeypatch, capfd):
    """source=hub with a mirror that redirects, breaks off once, and gets a token."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", hub.url + "/")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr(data.random, "uniform", lambda low, high: 0.01)
    for split in ("train", "test"):
        with gzip.open(REAL[split]) as f:
            name, body = f"/datasets/sapientinc/sudoku-extreme/resolve/main/{split}.csv", f.read()
        hub.files.update({name: body, f"/cdn{name}": body})
        hub.faults.update({name: ["redirect", "redirect"], f"/cdn{name}": ["break"]})
    path = prepare_sudoku.prepare(settings(subsample_size=10, num_aug=5))
    assert path == "data/sudoku-extreme-10-aug-5"
    assert len(Dataset(path, "train")) == 60 and len(Dataset(path, "test")) == 60
    assert sorted(os.listdir("data/downloads/sudoku-extreme")) == ["test.csv", "train.csv"]
    assert all(token == "Bearer hf_secret" for _, _, token in hub.log) and len(hub.log) == 8
    out, err = capfd.readouterr()
    assert f"python train.py --data_path={path}" in out and "hf_secret" not in out + err
    prepare_sudoku.prepare(settings(subsample_size=10, num_aug=0))
    assert len(hub.log) == 8


def test_token_goes_to_the_hub_only(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.files["/file"] = BODY
    data.download(hub.url + "/file", str(tmp_path / "file"))
    assert [token for _, _, token in hub.log] == [None]


def test_progress(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(data.time, "monotonic", lambda: clock[0])
    with data.Progress("quick", 10):
        clock[0] += 1.0
    assert capsys.readouterr().err == ""
    with data.Progress("slow", 100, "MB", 1e0) as progress:
        for _ in range(10):
            clock[0] += 3.0
            progress.add(10)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "slow: 40/100 MB, 3.3 MB/s, 18 s left"
    assert lines[-1] == "slow: 100/100 MB, 3.3 MB/s, 30 s" and len(lines) <= 4


def test_command(tmp_path, monkeypatch, capsys):
    script = prepare_sudoku.__file__
    argv = [script, "--source=generate", "--size=4", "--num_train=5", "--num_test=5", "--num_aug=2"]
    done = subprocess.run([sys.executable, *argv], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert "python train.py --data_path=data/sudoku-4x4-5-aug-2" in done.stdout
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as stop:
        start(prepare_sudoku.main, script)
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert err.startswith("prepare_sudoku.py: data/sudoku-4x4-5-aug-2 exists already")
    assert len(err.splitlines()) == 1 and out == ""
