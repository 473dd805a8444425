"""Datasets, batches, CSV files, generated puzzles, copies and downloads: data.py and prepare_sudoku.py."""
import gzip
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from helpers import ROOT, dataset_settings, prepare, wait_for, write_csv

import prepare_maze
import prepare_sudoku
import puzzles
from data import Dataset, halting_draws
from puzzles import judge, sudoku, sudoku_task, text_of
from puzzles.sudoku import minimal_sudokus, num_solutions
from puzzles.symmetries import keys_of
from runtime import prepare as prepare_files
from runtime.errors import TransientError, UserError

REAL = {split: os.path.join(ROOT, f"tests/data/sudoku_real_{split}_60.csv.gz") for split in ("train", "test")}
FILES = dict(train_csv=REAL["train"], test_csv=REAL["test"])
SMALL = dict(source="generate", size=4, num_test=9, num_train=5, num_aug=2)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """40 real 9x9 puzzles with 50 copies each, and 60 test puzzles."""
    path = tmp_path_factory.mktemp("real") / "sudoku"
    prepare(path, **FILES, subsample_size=40, num_aug=50)
    return path


def contents(batch):
    return b"".join(array.tobytes() for array in batch.values())


# The files of a dataset

def test_layout_is_the_official_one(real):
    assert json.loads((real / "train/dataset.json").read_text()) == {
        "pad_id": 0, "ignore_label_id": 0, "blank_identifier_id": 0, "vocab_size": 11, "seq_len": 81,
        "num_puzzle_identifiers": 1, "total_groups": 40, "mean_puzzle_examples": 1.0, "total_puzzles": 40,
        "sets": ["all"]}
    train = Dataset(real, "train")
    assert train.inputs.dtype == np.uint8 and (np.diff(train.group_indices) == 51).all()
    assert train.made_by().startswith("prepare_sudoku.py --source=csv ")


def test_a_dataset_without_its_identifiers_is_refused(real, tmp_path):
    """ARC's final evaluation needs them."""
    path = shutil.copytree(real, tmp_path / "copy")
    os.remove(path / "identifiers.json")
    with pytest.raises(UserError, match="identifiers.json is missing"):
        Dataset(path, "test")


@pytest.fixture
def official(real, tmp_path):
    """The same as the official builder writes it: without a manifest, and with integers of 64 bits."""
    path = shutil.copytree(real, tmp_path / "official")
    os.remove(path / "manifest.json")
    for file in path.glob("train/*.npy"):
        np.save(file, np.load(file).astype(np.int64))
    return path


def test_datasets_of_the_official_builder_load(official, real):
    ours, theirs = [Dataset(path, "train").train_batch(1, 2, 64) for path in (real, official)]
    assert contents(ours) == contents(theirs)


@pytest.mark.parametrize("name, change, wrong", [
    ("inputs", lambda array: array + 1, "vocab_size"),
    ("labels", lambda array: array[:-1], "labels"),
    ("puzzle_identifiers", lambda array: array + 1, "num_puzzle_identifiers"),
    ("inputs", lambda array: array - 99, "tokens from 0"),
    ("puzzle_indices", lambda array: np.delete(array, 1), "indices of rows"),
    ("group_indices", lambda array: array[::-1], "number of puzzles"),
])
def test_arrays_that_do_not_fit_are_named(name, change, wrong, official):
    """test_wrong_input.py has more damage."""
    path = official / f"train/all__{name}.npy"
    np.save(path, change(np.load(path)))
    with pytest.raises(UserError, match=f"official/train: dataset.json does not fit {wrong}: build it again"):
        Dataset(official, "train")


@pytest.mark.parametrize("change, message", [
    ({"seq_len": None}, "must have seq_len, a whole number, not None"),
    ({"vocab_size": "11"}, "must have vocab_size, a whole number, not '11'"),
    ({"num_puzzle_identifiers": 1.5}, "must have num_puzzle_identifiers, a whole number, not 1.5"),
    ([1], "cannot be read as a JSON object"),
])
def test_a_wrong_dataset_json_is_named(change, message, official):
    path = official / "train/dataset.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change if isinstance(change, dict) else change))
    with pytest.raises(UserError, match=message):
        Dataset(official, "train")


def test_what_dataset_json_leaves_out_is_counted_and_what_it_adds_is_ignored(official, real):
    """As in the files of nano-trm; a key may have the name of an attribute."""
    added = dict(subset="easy", versions="1.0", path="x", sha256="x", train_batch=1, grid_size=9)
    path = official / "train/dataset.json"
    path.write_text(json.dumps(dict(seq_len=81, vocab_size=11.0, num_puzzles=1) | added))
    train = Dataset(official, "train")
    want = Dataset(real, "train")
    assert contents(train.train_batch(1, 2, 64)) == contents(want.train_batch(1, 2, 64))
    for name in "total_groups", "mean_puzzle_examples", "num_puzzle_identifiers", "ignore_label_id":
        assert getattr(train, name) == getattr(want, name)
    assert train.path == official and len(train.sha256) == 64


@pytest.mark.parametrize("manifest, message", [
    ({"kind": "sudoku", "grid": [9, 9], "symbols": " .123456789"}, ""),  # by hand, without hashes
    ({"sha256": []}, r"manifest.json: sha256 is \[\]"),
    ({"kind": "sudoku", "grid": "9x9", "symbols": " .123456789"}, "grid '9x9' must be"),
    ({"kind": "sudoku", "grid": [9, 9], "symbols": list(range(11))}, "symbols .* a text"),
])
def test_a_manifest_by_hand_is_checked(manifest, message, official):
    (official / "manifest.json").write_text(json.dumps(manifest))
    if not message:
        assert Dataset(official, "train").task["kind"] == "sudoku"
        return
    with pytest.raises(UserError, match=message):
        Dataset(official, "train")


def test_the_official_builders_sudokus_can_be_typed(official):
    """It says neither the kind nor the symbols."""
    task = Dataset(official, "train").task
    for empty in ".0":
        _, tokens = puzzles.parse_question(task, "5" + empty * 80)
        assert tokens[:2].tolist() == [6, 1]
    assert puzzles.task_of({}, 900, 12)["symbols"] == " |0123456789"


def test_a_folder_of_the_home_directory_is_written_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="--output_dir=~/d: write the folder of ~ out"):
        prepare("~/d", **SMALL)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("by, code", [(signal.SIGTERM, 3), (signal.SIGKILL, -9)])
def test_a_killed_command_leaves_nothing_that_stays(tmp_path, by, code):
    """After kill -9 the same command replaces the folder."""
    path = tmp_path / "x"
    flags = "--source=generate --size=4 --num_test=9 --num_train=9 --num_aug=300000 --output_dir=".split()
    flags[-1] += str(path)
    process = subprocess.Popen([sys.executable, prepare_sudoku.__file__, *flags], stderr=subprocess.PIPE)
    wait_for(lambda: list(tmp_path.glob("x.part*/train")))
    process.send_signal(by)
    process.communicate()
    assert process.returncode == code and not path.exists()
    assert len(list(tmp_path.glob("*/"))) == (by == signal.SIGKILL)
    prepare(path, **SMALL)
    assert list(tmp_path.glob("*/")) == [path] and len(Dataset(path, "train")) == 15


# Batches


def test_batches_are_a_pure_function_of_seed_and_step(real):
    """However many ranks there are, and in whatever order they ask."""
    train = Dataset(real, "train")
    whole = [train.train_batch(3, step, 64) for step in range(4)]
    for step, world in (3, 2), (0, 4), (1, 2):
        parts = [train.train_batch(3, step, 64, rank, world) for rank in range(world)]
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        assert contents(joined) == contents(whole[step])
    assert len(set(map(contents, whole))) == 4


def test_a_group_of_puzzles_with_several_examples_brings_one_of_them(tmp_path):
    """As in the official ARC sets; a smaller puzzle repeats its examples."""
    os.mkdir(tmp_path / "train")
    rows = np.arange(7)[:, None]
    arrays = dict(inputs=rows, labels=rows, puzzle_identifiers=[1, 2, 3, 4], puzzle_indices=[0, 2, 3, 6, 7],
                  group_indices=[0, 3, 4])
    prepare_files.finish_split(
        tmp_path / "train", arrays, ignore_label_id=None, vocab_size=7, seq_len=1, num_puzzle_identifiers=5,
        total_groups=2, mean_puzzle_examples=1.75)
    train = Dataset(tmp_path, "train")
    epochs = {tuple(sorted(train.train_batch(0, step, 4)["inputs"].ravel())) for step in range(100)}
    assert epochs == {(0, 0, 1, 6), (2, 2, 2, 6), (3, 4, 5, 6)}


def test_halting_draws_are_uniform_from_2_or_0():
    draws = halting_draws(1, 0, 5000, 16, 0.5)
    assert set(draws) == {0, *range(2, 17)}
    assert not halting_draws(0, 0, 500, 1, 1.0).any() and not halting_draws(0, 0, 500, 16, 0.0).any()
    assert (halting_draws(1, 0, 5000, 16, 0.5, rank=3, world=4) == draws[3750:]).all()


def test_test_batches_have_the_rows_and_subsets_cover_the_whole_set(real):
    test = Dataset(real, "test")
    batch = test.test_batch([3, 59])
    assert (batch["inputs"] == test.inputs[[3, 59]]).all() and (batch["labels"] == test.labels[[3, 59]]).all()
    assert len(set(test.subset(20))) == 20 and max(test.subset(20)) > 40


# Generated puzzles and copies

def test_a_long_search_is_given_up_for_its_board_alone(monkeypatch):
    monkeypatch.setattr(sudoku, "SEARCH", 2000)
    question, _ = minimal_sudokus(0, 0, 1, 9)
    boards = np.concatenate([np.ones_like(question), question])
    assert num_solutions(boards, 9).tolist() == [-1, 1]


@pytest.mark.parametrize("size, n", [(4, 60), (6, 60), (9, 5)])
def test_generated_puzzles_are_minimal_with_one_solution(size, n):
    questions, answers = minimal_sudokus(0, 0, n, size)
    assert judge(sudoku_task(size), questions, answers).solved.all()
    for question in questions:
        # each clue is missing in one board, none in the last
        clues = np.flatnonzero(question > 1)
        boards = np.tile(question, (len(clues) + 1, 1))
        boards[np.arange(len(clues)), clues] = 1
        assert num_solutions(boards, size).tolist() == [2] * len(clues) + [1]


def test_generation_does_not_depend_on_the_processes(monkeypatch, capfd):
    """They are killed in silence when enough is made."""
    alone = prepare_sudoku.generate(4, 900, 7)
    monkeypatch.setattr(prepare_files, "JOBS_ALONE", 0)
    assert np.array_equal(alone, prepare_sudoku.generate(4, 900, 7)) and not capfd.readouterr().err


def test_a_process_that_is_killed_is_an_error(monkeypatch):
    """As where memory is full."""
    monkeypatch.setattr(prepare_files, "JOBS_ALONE", 0)
    with pytest.raises(TransientError, match="ended before its work"):
        next(prepare_files.in_parallel(os._exit))


def test_copies_have_one_solution_and_are_never_test_puzzles(tmp_path):
    """One of the copies was made anew. More training puzzles leave the test set as it is."""
    changes = SMALL | dict(num_test=800)
    prepare(tmp_path / "few", **changes)
    path = prepare(tmp_path / "many", **changes | dict(num_train=300, num_aug=20))
    train = Dataset(path, "train")
    test = Dataset(path, "test")
    assert set(keys_of(test.inputs)).isdisjoint(keys_of(train.inputs))
    assert len(set(keys_of(train.inputs[::21]))) == 300 and len(set(keys_of(test.inputs))) == 800
    assert judge(test.task, train.inputs, train.labels).solved.all()
    assert (num_solutions(train.inputs, 4) == 1).all()
    assert np.array_equal(Dataset(tmp_path / "few", "test").inputs, test.inputs)


# (the dataset's digest, a batch's digest): integers and seeded draws make them, so they hold on any machine
RECORDED = [("949f8e8288c280b8", "04022d5fe457a4cd"), ("11833591e7a22d78", "55b8f228bf258fa1"),
            ("d5889d4854c1be93", "44fe27e4bc729121")]


def test_the_same_settings_give_the_same_dataset_and_batches_everywhere(tmp_path):
    """Published results name their data by the settings alone."""
    generated = dict(source="generate", num_train=20, num_test=10)
    prepare(tmp_path / "0", **generated, size=6, num_aug=9)
    prepare(tmp_path / "1", prepare_maze, **generated, size=7, min_path=9)
    prepare(tmp_path / "2", **FILES, subsample_size=9, num_aug=9)
    digests = []
    for name in "012":
        train = Dataset(tmp_path / name, "train")
        batch = contents(train.train_batch(3, 5, 64, rank=1, world=2))
        digests.append((train.sha256[:16], hashlib.sha256(batch).hexdigest()[:16]))
    assert digests == RECORDED


# CSV files; test_wrong_input.py has more wrong ones

A = ("mine", "1..3.42...1.2...", "1243342143122134", "7")
B = ("mine", "..13...43....1..", "2413132432414132", "3")


def test_the_first_wrong_row_of_a_long_file_is_named(tmp_path):
    """Beyond the first block of rows."""
    # 17000 questions with one answer, which differ in their givens
    masks = [f"{i:016b}" for i in range(17000)]
    questions = ["".join(c if bit == "1" else "." for c, bit in zip(A[2], mask)) for mask in masks]
    wrong = ("mine", "4" + "." * 15, B[2], "3")
    right = [("mine", question, A[2], "7") for question in questions]
    long = write_csv(tmp_path / "long.csv", [*right, wrong])
    short = write_csv(tmp_path / "short.csv", [B])
    with pytest.raises(UserError, match=r"long\.csv:17002: row 1, column 1 of the answer breaks a rule"):
        prepare(tmp_path / "out", train_csv=long, test_csv=short, size=4)


def test_csv_files_of_other_programs(tmp_path):
    """Another order of columns, "0" for an empty cell, a byte order mark, quotes, CRLF, blank lines."""
    zeros = A[1].replace(".", "0")
    rows = ["\ufeffrating,answer,question,source,note", f'7,{A[2]},{zeros},"mine, not yours",', "",
            f"-1,{B[2]},{B[1]},,x"]
    (tmp_path / "train.csv").write_bytes("\r\n".join(rows).encode())
    test = write_csv(tmp_path / "test.csv", [("mine", A[1][::-1], A[2][::-1], "3")])
    files_and_size = dict(train_csv=tmp_path / "train.csv", test_csv=test, size=4)
    path = prepare(tmp_path / "out", **files_and_size, num_aug=0, min_difficulty=-1)
    assert [text_of(sudoku_task(4), row) for row in Dataset(path, "train").inputs] == [A[1], B[1]]


TWO = ("mine", "12" + "." * 14, "1234341221434321", "1.5")  # one of its answers, and another
OTHER = (*TWO[:2], "1234341243212143", "2")


def test_rows_that_are_repeated_or_have_several_solutions_are_left_out(tmp_path, capsys):
    """So many puzzles are drawn as were asked for, and the same ones as without those rows."""
    reverse = [("mine", question[::-1], answer[::-1], "0") for _, question, answer, _ in (A, B)]
    train = write_csv(tmp_path / "train.csv", [A, A, TWO, TWO, B])
    test = write_csv(tmp_path / "test.csv", [*reverse, TWO])
    flags = dict(test_csv=test, size=4, num_aug=0, subsample_size=2)
    for seed in range(4):
        path = prepare(tmp_path / str(seed), train_csv=train, **flags, seed=seed)
        assert [text_of(sudoku_task(4), row) for row in Dataset(path, "train").inputs] == [A[1], B[1]]
        assert len(Dataset(path, "test")) == 2
    text = capsys.readouterr().out
    assert text.count("train.csv: left out 2 rows whose question stands above\n") == 4
    assert "left out, since they have several solutions: 2\n" in text

    two = write_csv(tmp_path / "two.csv", [A, TWO, OTHER])
    with pytest.raises(UserError, match=r"two\.csv:4: another answer to the same question"):
        prepare(tmp_path / "y", train_csv=two, **flags)
    only = write_csv(tmp_path / "only.csv", [TWO])
    for files_given in dict(train_csv=only), dict(train_csv=train, test_csv=only):
        with pytest.raises(UserError, match=r"only\.csv: no puzzle has one solution"):
            prepare(tmp_path / "y", **flags | files_given)


@pytest.mark.parametrize("header, rating", [
    ("question,answer,rating", ",0.0"), ("unsolved, solved ,difficulty", ",1.7"),
    ("id,Puzzle,Solution,clues", ""),
    ("quizzes,solutions", "")])
def test_columns_of_public_files(header, rating, tmp_path):
    """Ratings may be missing and have decimals."""
    before = "7," * header.startswith("id")
    after = ",9" * header.endswith("clues")
    for name, rows in ("train", [A, B]), ("test", [("", A[1][::-1], A[2][::-1])]):
        lines = [f"{before}{row[1]},{row[2]}{after}{rating}" for row in rows]
        (tmp_path / f"{name}.csv").write_text("\n".join([header, *lines]))
    flags = dict(train_csv=tmp_path / "train.csv", test_csv=tmp_path / "test.csv", size=4, num_aug=0)
    assert len(Dataset(prepare(tmp_path / "x", **flags), "train")) == 2
    expected = "rating" if not rating else "none that is hard enough"
    with pytest.raises(UserError, match=expected):
        prepare(tmp_path / "y", **flags, min_difficulty=2)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be"])
def test_encodings_are_read_or_refused_by_name(encoding, tmp_path):
    """Those that a byte order mark names are read."""
    text = "question,answer\né.,éè\n"
    mark = b"\xfe\xff" * (encoding == "utf-16-be")
    (tmp_path / "a.csv").write_bytes(mark + text.encode(encoding))
    [(line, row)] = prepare_files.csv_rows(str(tmp_path / "a.csv"), "question", "answer")
    assert row == {"question": "é.", "answer": "éè"}

    content = b"question,answer\n" + b"a,b\n" * 9000 + b"\xe9.,\xe9\n"
    (tmp_path / "b.csv.GZ").write_bytes(gzip.compress(content))
    with pytest.raises(UserError, match=r"b\.csv\.GZ:9002: is not UTF-8 text: .*iconv"):
        list(prepare_files.csv_rows(str(tmp_path / "b.csv.GZ"), "question", "answer"))


def test_easy_rows_and_rows_of_the_test_set_are_dropped(tmp_path, capsys):
    rows = [A, (*B[:3], "2"), ("mine", A[1][::-1], A[2][::-1], "9")]
    train = write_csv(tmp_path / "train.csv", rows)
    test = write_csv(tmp_path / "test.csv", rows[1:])
    path = prepare(tmp_path / "x", train_csv=train, test_csv=test, size=4, min_difficulty=3, num_aug=0)
    assert len(Dataset(path, "train")) == len(Dataset(path, "test")) == 1
    assert "left out, since the test set has them: 1\n" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"test\.csv:2: no puzzle .*, or none that is hard enough"):
        prepare(tmp_path / "y", train_csv=train, test_csv=test, size=4, min_difficulty=10)


# Downloads

@pytest.mark.parametrize("faults, error, requests, message", [
    (404, UserError, 1, r"cannot be downloaded \(status 404\)"),
    (503, TransientError, 6, "status 503: run again.*--source=csv"),
    ("break", TransientError, 6, "ChunkedEncodingError"),
])
def test_downloads_give_up_and_leave_nothing(hub, tmp_path, faults, error, requests, message):
    hub.files["/file"] = b"x"
    hub.faults["/file"] = [faults] * 9
    with pytest.raises(error, match=rf"{hub.url}/file.*{message}"):
        prepare_files.download(hub.url + "/file", str(tmp_path / "file"))
    assert len(hub.log) == requests and os.listdir(tmp_path) == ["file.lock"]


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
