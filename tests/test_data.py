"""Datasets and their files: data.py, prepare_sudoku.py, and what all prepare scripts share.

The official builder's datasets load, batches follow from the seed and the step, files of other programs are
read, and what is left out is counted.
"""
import gzip
import hashlib
import json
import os
import resource
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT, dataset_settings, prepare, start_script, wait_for
from servers import Hub, Server

import prepare_arc
import prepare_maze
import prepare_sudoku
from data import Dataset, halting_draws
from puzzles import IGNORE_LABEL, sudoku
from puzzles import prepare as prepare_files
from puzzles.download import download
from puzzles.keys import keys_of
from puzzles.sudoku import Sudoku, hard_sudokus, minimal_sudokus
from puzzles.text import parse
from puzzles.writer import finish_split, write_dataset
from runtime.errors import TransientError, UserError

REAL = {split: f"{ROOT}/tests/data/sudoku_real_{split}_60.csv.gz" for split in ("train", "test")}
FILES = dict(train_csv=REAL["train"], test_csv=REAL["test"])
SMALL = dict(source="generate", size=4, num_test=9, num_train=5, num_aug=2)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """40 real 9x9 puzzles with 50 copies each, and 60 test puzzles."""
    path = tmp_path_factory.mktemp("real") / "sudoku"
    prepare(path, **FILES, subsample_size=40, num_aug=50)
    return path


def sudoku_of(size):
    return Sudoku(Sudoku.new_task(size))


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


@pytest.fixture
def official(real):
    """The same as the official builder writes it: without a manifest, and with integers of 64 bits."""
    path = Path(shutil.copytree(real, "official"))
    os.remove(path / "manifest.json")
    for file in path.glob("train/*.npy"):
        np.save(file, np.load(file).astype(np.int64))
    return path


def test_datasets_of_the_official_builder_load(official, real):
    """dataset.json may lack what can be counted, and have keys of other programs, as nano-trm writes it."""
    facts = dict(seq_len=81, vocab_size=11, num_puzzles=1, path="x", grid_size=9)
    (official / "train/dataset.json").write_text(json.dumps(facts))
    ours, theirs = [Dataset(path, "train") for path in (real, official)]
    assert contents(ours.train_batch(1, 2, 64)) == contents(theirs.train_batch(1, 2, 64))
    for name in "total_groups", "mean_puzzle_examples", "num_puzzle_identifiers":
        assert getattr(ours, name) == getattr(theirs, name)
    # their Sudokus, of which the files say neither the kind nor the symbols, can be typed
    tokens = parse(theirs.task, "5" + "." * 80)[1]
    assert tokens[:2].tolist() == [6, 1]


@pytest.mark.parametrize("name, change, message", [
    ("inputs", lambda array: array + 1, "dataset.json does not fit vocab_size"),
    ("group_indices", lambda array: np.insert(array, 1, array[1]), "does not fit groups without a version"),
    ("group_indices", lambda array: array[:1], "has no examples"),
])
def test_arrays_that_do_not_fit_are_named(name, change, message, official):
    """test_wrong_input.py has more damage."""
    path = official / f"train/all__{name}.npy"
    np.save(path, change(np.load(path)))
    with pytest.raises(UserError, match=f"{message}: build it again"):
        Dataset(official, "train")


MANIFEST = {"kind": "mine", "grid": [2, 2], "symbols": "_.01"}
ONES = np.ones((3, 4), dtype=int)
PUZZLES = (ONES, ONES)


@pytest.mark.parametrize("puzzles, changes, message", [
    ((ONES + 3, ONES), {}, "integers below vocab_size=4"),
    ((ONES - 1, ONES), {}, "of questions count from 1"),
    (PUZZLES, {"grid": [2, 4]}, r"shape \(3, 4\): must be \[n, 8\] for the grid \[2, 4\]"),
    (PUZZLES, {"symmetries": {"permute_symbols": "_1"}}, "'_1': must be symbols of .*, each once"),
    (PUZZLES, {"symmetries": {"dihedral": True}, "grid": [1, 4]}, r"grid \[1, 4\] square")])
def test_what_is_no_dataset_is_not_written(puzzles, changes, message):
    with pytest.raises(UserError, match=message):
        write_dataset("mine", {"train": puzzles}, 4, MANIFEST | changes)
    assert not os.path.exists("mine")


def test_a_cell_without_a_symbol_has_no_answer():
    """Puzzles may be lists, the grid a tuple, and the kind missing."""
    puzzles = [[1, 1, 1, 1]], [[1, 0, -1, IGNORE_LABEL]]
    write_dataset("mine", dict.fromkeys(("train", "test"), puzzles), 4, {"grid": (2, 2), "symbols": "_.01"})
    batch = Dataset("mine", "test").test_batch([0])
    assert batch["labels"].tolist() == [[1] + [IGNORE_LABEL] * 3]


@pytest.mark.parametrize("script, changes, name", [
    (prepare_sudoku, FILES | dict(num_aug=0, min_difficulty=2),
     "sudoku_real_train_60-1k-aug-0-min_difficulty-2"),
    (prepare_maze, dict(source="generate", size=5, min_path=5, num_train=2, num_test=1000),
     "maze-5x5-path-5-2-aug-8"),
    (prepare_arc, dict(source="generate", num_aug=0, num_train=9), "generate-aug-0-num_train-9")])
def test_a_default_folder_names_what_makes_another_dataset(script, changes, name):
    """What has its default is not in the name, since config files name the folder of the defaults."""
    assert script.main(dataset_settings(script, **changes)) == f"data/{name}"
    assert os.path.isfile(f"data/{name}/manifest.json")


@pytest.mark.parametrize("by, code", [(signal.SIGTERM, 3), (signal.SIGKILL, -9)])
def test_a_killed_command_leaves_nothing_that_stays(by, code):
    """After kill -9 the same command replaces the folder."""
    flags = "--source=generate --size=4 --num_test=9 --num_train=9 --num_aug=150000 --output_dir=x"
    process = start_script("prepare_sudoku", flags.split())
    wait_for(lambda: list(Path().glob("x.part*")))
    os.kill(process.pid, by)
    process.output(code)
    assert len(list(Path().glob("*/"))) == (by == signal.SIGKILL)
    prepare("x", **SMALL)
    assert list(Path().glob("*/")) == [Path("x")]


def test_a_full_disk_is_named_and_nothing_stays():
    """A limit of 4 KB a file stands for it: numpy says of both how many bytes it wrote."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(UserError, match=r"x cannot be written: is the disk full\? \(4800 requested and "):
            prepare("x", **SMALL | dict(num_train=100))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir() == ["x.lock"]


# Batches

def test_batches_are_a_pure_function_of_seed_and_step(real):
    """They depend neither on the number of ranks nor on the order in which steps are asked for."""
    train = Dataset(real, "train")
    whole = [train.train_batch(3, step, 64)["inputs"] for step in range(4)]
    for step, world in (3, 2), (0, 4), (1, 2):
        parts = [train.train_batch(3, step, 64, rank, world)["inputs"] for rank in range(world)]
        assert np.array_equal(np.concatenate(parts), whole[step])
    assert len(np.unique(whole, axis=0)) == 4


def test_a_group_of_puzzles_with_several_examples_brings_one_of_them():
    """The official ARC sets work so. A puzzle with fewer examples than the others repeats them."""
    os.mkdir("train")
    rows = np.arange(7)[:, None]
    arrays = dict(inputs=rows, labels=rows, puzzle_identifiers=[1, 2, 3, 4], puzzle_indices=[0, 2, 3, 6, 7],
                  group_indices=[0, 3, 4])
    finish_split(
        "train", arrays, ignore_label_id=None, vocab_size=7, seq_len=1, num_puzzle_identifiers=5)
    train = Dataset(".", "train")
    epochs = {tuple(sorted(train.train_batch(0, step, 4)["inputs"].ravel())) for step in range(100)}
    assert epochs == {(0, 0, 1, 6), (2, 2, 2, 6), (3, 4, 5, 6)}


def test_halting_draws_are_uniform_from_2_or_0():
    draws = halting_draws(1, 0, 5000, 16, 0.5)
    assert set(draws) == {0, *range(2, 17)}
    assert not halting_draws(0, 0, 500, 1, 1.0).any() and not halting_draws(0, 0, 500, 16, 0.0).any()


def test_a_subset_covers_the_whole_test_set(real):
    """The test set is ordered by source: its first puzzles would be of one source."""
    indices = Dataset(real, "test").subset(20)
    assert len(set(indices)) == 20 and max(indices) > 40


# Generated puzzles and copies

def test_a_long_search_is_given_up_for_its_board_alone(monkeypatch):
    monkeypatch.setattr(sudoku, "SEARCH", 2000)
    question, _ = minimal_sudokus(0, 0, 1, 9)
    boards = np.concatenate([np.ones_like(question), question])
    assert sudoku_of(9).num_solutions(boards).tolist() == [-1, 1]


@pytest.mark.parametrize("size, n", [(4, 60), (6, 60), (9, 3)])
def test_generated_puzzles_are_minimal_with_one_solution(size, n):
    questions, answers = minimal_sudokus(0, 0, n, size)
    assert sudoku_of(size).judge(questions, answers).solved.all()
    assert (sudoku_of(size).num_solutions(questions) == 1).all()
    for question in questions:
        # each clue is missing in one board
        clues = np.flatnonzero(question > 1)
        boards = np.tile(question, (len(clues), 1))
        boards[np.arange(len(clues)), clues] = 1
        assert (sudoku_of(size).num_solutions(boards) == 2).all()


def test_hard_puzzles_take_more_work(monkeypatch):
    monkeypatch.setattr(sudoku, "GENERATIONS", 1)
    questions, _ = hard_sudokus(0, 0, 8, 9)
    assert (sudoku_of(9).num_solutions(questions) == 1).all()
    usual, _ = minimal_sudokus(0, 0, 64, 9)
    assert median_work(questions) > 2 * median_work(usual)


def test_hard_puzzles_are_not_among_the_others():
    prepare("hard", source="generate", size=4, num_hard=300, num_aug=0)
    puzzles = np.concatenate([np.load(f"hard/{split}/all__inputs.npy") for split in ("train", "test")])
    assert len(np.unique(puzzles, axis=0)) == len(puzzles)


def median_work(questions):
    """Returns how many rounds the solver needs for a question."""
    _, rounds = sudoku.count_solutions(sudoku.candidates_of(questions, 9), 9, 2, 10**6)
    return np.median(rounds)


def test_generation_does_not_depend_on_the_number_of_processes(monkeypatch, capfd):
    alone = prepare_sudoku.generate(4, 900, 7)
    monkeypatch.setattr(prepare_files, "JOBS_ALONE", 0)
    assert np.array_equal(alone, prepare_sudoku.generate(4, 900, 7))
    assert "Traceback" not in capfd.readouterr().err  # it says how far it is if that takes long


def test_a_process_that_is_killed_before_its_work_is_done_is_an_error(monkeypatch):
    """A full memory kills one."""
    monkeypatch.setattr(prepare_files, "JOBS_ALONE", 0)
    with pytest.raises(TransientError, match="ended before its work"):
        next(prepare_files.in_parallel(os._exit))


def test_copies_are_never_test_puzzles():
    """More training puzzles leave the test set as it is. test_attempts.py says that copies keep the rules."""
    few = prepare("few", **SMALL | dict(num_test=800))
    path = prepare("many", **SMALL | dict(num_test=800, num_train=300, num_aug=20))
    train = Dataset(path, "train")
    test = Dataset(path, "test")
    assert np.array_equal(test.inputs, Dataset(few, "test").inputs)
    assert set(keys_of(test.inputs)).isdisjoint(keys_of(train.inputs))


# (the dataset's digest, a batch's digest): integers and seeded draws make them, so they hold on any machine
RECORDED = [("949f8e8288c280b8", "04022d5fe457a4cd"), ("11833591e7a22d78", "55b8f228bf258fa1"),
            ("d5889d4854c1be93", "44fe27e4bc729121")]


def test_the_same_settings_give_the_same_dataset_and_batches_everywhere():
    """Published results name their data by the settings alone."""
    generated = dict(source="generate", num_train=20, num_test=10)
    prepare("0", **generated, size=6, num_aug=9)
    prepare("1", prepare_maze, **generated, size=7, min_path=9)
    prepare("2", **FILES, subsample_size=9, num_aug=9)
    digests = []
    for name in "012":
        train = Dataset(name, "train")
        batch = contents(train.train_batch(3, 5, 64, rank=1, world=2))
        digests.append((train.sha256[:16], hashlib.sha256(batch).hexdigest()[:16]))
    assert digests == RECORDED


# CSV files; test_wrong_input.py has wrong ones

A = "1..3.42...1.2...", "1243342143122134"  # questions and their answers
B = "..13...43....1..", "2413132432414132"
OTHERS = [[text[::-1] for text in puzzle] for puzzle in (A, B)]
TWO = "12" + "." * 14, "1234341221434321"  # one of its answers


def from_csv(train, test, **changes):
    """Makes a 4x4 dataset of two lists of lines, and returns its training puzzles."""
    for name, rows in ("train", train), ("test", test):
        lines = [row if isinstance(row, str) else ",".join(row) for row in rows]
        Path(f"{name}.csv").write_bytes("\r\n".join(lines).encode("utf-8-sig"))
    files = dict(train_csv="train.csv", test_csv="test.csv")
    path = str(len(os.listdir()))
    prepare(path, **files, size=4, num_aug=0, **changes)
    return [sudoku_of(4).text(row) for row in Dataset(path, "train").inputs]


HEADER = "question,answer"
TEST = [HEADER, *OTHERS]


@pytest.mark.parametrize("rows", [
    # another order, "0" for an empty cell, quotes, a blank line, a rating that is missing
    ["rating,answer,question,source,note", f'7,{A[1]},{A[0].replace(".", "0")},"mine, not yours",', "",
     f",{B[1]},{B[0]},,x"],
    # what spreadsheets add, and a long text that nobody reads
    ["question,answer,note", f"{','.join(A)},{'x' * 200_000}", f"{','.join(B)},,,,", ",,,"],
    # names of columns in public files
    ["id,Puzzle, Solution ,clues", f"7,{','.join(A)},9", f"8,{','.join(B)},9"]])
def test_csv_files_of_other_programs(rows):
    """Each file begins with a byte order mark."""
    assert from_csv(rows, TEST) == [A[0], B[0]]


def test_rows_that_are_repeated_or_have_several_solutions_are_left_out(capsys):
    """As many puzzles are drawn as were asked for, and the same ones as without those rows."""
    rows = [HEADER, A, A, TWO, TWO, B]
    assert from_csv(rows, [*TEST, TWO], subsample_size=2) == [A[0], B[0]]
    text = capsys.readouterr().out
    assert "train.csv: left out 2 rows whose question stands above\n" in text
    assert "left out, since they have several solutions: 2\n" in text and "test puzzles: 2\n" in text
    with pytest.raises(UserError, match=r"train\.csv: no puzzle has one solution"):
        from_csv([HEADER, TWO], TEST)


def test_rows_of_the_test_set_and_easy_rows_are_left_out(capsys):
    rated = ["unsolved,solved,difficulty", (*A, "7"), (*B, ""), (*OTHERS[0], "9")]
    assert from_csv(rated, [rated[0], *rated[2:]], min_difficulty=3) == [A[0]]
    assert "left out, since the test set has them: 1\n" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"csv: no puzzle has one solution, or none is hard enough"):
        from_csv(rated, rated, min_difficulty=10)


# Downloads

def test_a_download_that_is_refused_gives_up_and_leaves_nothing(hub):
    """The server would answer one more attempt."""
    path = "/datasets/me/puzzles/resolve/main/train.csv"
    hub.files[path] = b"x"
    hub.faults[path] = [401]
    words = r"^me/puzzles/train.csv.*cannot be downloaded \(status 401\): set HF_TOKEN.*--source=csv"
    with pytest.raises(UserError, match=words):
        download("me/puzzles", "train.csv")
    assert os.listdir("data/downloads/puzzles") == ["train.csv.lock"]


def test_the_default_dataset_is_downloaded_once_although_requests_fail(hub, monkeypatch):
    """The hub redirects each file to another host, which must not get the token."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret\n")
    with Server(Hub) as cdn:
        hub.cdn = cdn.url
        for split, file in REAL.items():
            body = gzip.decompress(Path(file).read_bytes()) + b"\n" * 100_000  # received in several blocks
            name = f"/datasets/sapientinc/sudoku-extreme/resolve/main/{split}.csv"
            hub.faults[name] = [503, 302, 302]
            cdn.files[name] = body
            cdn.faults[name] = ["break"]  # so the hub is asked once more
        path = prepare_sudoku.main(dataset_settings(subsample_size=10, num_aug=5))
    assert path == "data/sudoku-extreme-10-aug-5"
    assert len(Dataset(path, "train")) == 60 and len(Dataset(path, "test")) == 60
    assert hub.tokens == ["Bearer hf_secret"] * 6 and cdn.tokens == [None] * 4  # of two files

    # a second dataset needs no request
    prepare_sudoku.main(dataset_settings(subsample_size=10, num_aug=0))
    assert len(hub.log) == 6
