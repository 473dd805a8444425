"""prepare_csv.py, what write_dataset refuses, and the examples of other puzzles."""
import gzip
import json
import os
import pathlib
import re
import runpy

import numpy as np
import pytest
from configurator import UserError, configure
from conftest import ROOT

import data
import prepare_csv
import prepare_maze
import puzzles
from data import IGNORED, Dataset, write_dataset


def prepare(folder, *flags):
    return prepare_csv.main(configure(prepare_csv.__file__, [f"--output_dir={folder}", *flags]))


def write(path, rows):
    """A .csv or .jsonl file of (question, answer), also .gz."""
    path = str(path)
    lines = [",".join(row) for row in (("question", "answer"), *rows)]
    if ".jsonl" in path:
        lines = [json.dumps(dict(question=question, answer=answer)) for question, answer in rows]
    with (gzip.open if path.endswith(".gz") else open)(path, "wt", encoding="utf-8") as f:
        f.write("\n".join(lines) + "\n")
    return path


def texts(dataset, field):
    symbols = np.array(list(dataset.task["symbols"]))
    return ["".join(row) for row in symbols[getattr(dataset, field)]]


def random_rows(n, cells=9, alphabet="123", seed=0):
    """Distinct questions with . for an empty cell, and their answers."""
    rng = np.random.default_rng(seed)
    answers = rng.choice(list(alphabet), (n, cells))
    questions = np.where(rng.random((n, cells)) < 0.5, answers, ".")
    return list(dict(zip(map("".join, questions), map("".join, answers))).items())


@pytest.mark.parametrize("ending", [".csv", ".csv.gz", ".jsonl", ".jsonl.gz"])
def test_datasets_hold_the_files_rows(ending, tmp_path, capsys):
    """Of several answers to a question, the first."""
    rows = random_rows(30, cells=6, alphabet="áβ😀")
    train = write(tmp_path / f"train{ending}", rows[:20] + [rows[0], (rows[1][0], "ββββββ")])
    test = write(tmp_path / f"test{ending}", rows[20:])
    flags = [f"--train_csv={train}", f"--test_csv={test}", "--grid=2x3", "--kind=mine", "--several_answers"]
    path = prepare(tmp_path / "x", *flags)
    task = {"kind": "mine", "grid": [2, 3], "symbols": "_.áβ😀"}
    for split, expected in ("train", rows[:20]), ("test", rows[20:]):
        dataset = Dataset(path, split)
        assert dataset.task == task and dataset.vocab_size == 5
        assert list(zip(texts(dataset, "inputs"), texts(dataset, "labels"))) == expected
    assert dataset.manifest["counts"] == {
        "train_puzzles": 20, "test_puzzles": len(rows) - 20, "repeated": 2, "symmetric": 0}
    assert "'.' is an empty cell" in capsys.readouterr().out
    command = " ".join([prepare_csv.__file__, *flags])
    assert data.made_by_another_command(path, command) == ""
    assert "kind is 'mine' in it" in data.made_by_another_command(path, command.replace("mine", "yours"))


def test_held_out_puzzles_are_drawn_by_the_seed(tmp_path):
    rows = random_rows(60)
    path = write(tmp_path / "all.csv", rows + rows[:2])
    drawn = []
    for i, seed in enumerate((0, 0, 1)):
        folder = prepare(tmp_path / str(i), f"--train_csv={path}", "--holdout=20", f"--seed={seed}")
        train, test = (set(texts(Dataset(folder, split), "inputs")) for split in ("train", "test"))
        assert not train & test and train | test == {question for question, _ in rows} and len(test) == 20
        drawn.append(test)
    assert drawn[0] == drawn[1] != drawn[2]


def test_copies_are_symmetric_and_never_test_puzzles(tmp_path):
    """Training puzzles that a symmetry turns into a test puzzle are left out."""
    rows = random_rows(400, alphabet="12")
    path = write(tmp_path / "all.csv", rows)
    flags = [f"--train_csv={path}", "--holdout=100", "--dihedral"]
    folder = prepare(tmp_path / "x", *flags, "--permute_symbols=2-12", "--num_aug=15")  # as 1-2
    train, test = Dataset(folder, "train"), Dataset(folder, "test")
    assert train.manifest["counts"]["symmetric"] > 0 and len(train) == 16 * train.total_groups
    turns = prepare_maze.dihedral(3)
    swap = np.array([0, 1, 3, 2], dtype=np.uint8)
    swapped = 0
    for first in range(0, len(train), 16):
        pairs = np.stack([train.inputs, train.labels], axis=1)[first:first + 16]
        for k, pair in enumerate(pairs):
            turned = pairs[0][:, turns[k % 8]]
            swapped += (pair == swap[turned]).all()
            assert (pair == turned).all() or k and (pair == swap[turned]).all()
    assert 0.4 < swapped / len(train) < 0.6
    orbits = {tuple(swapped[question[turn]]) for question in test.inputs for turn in turns
              for swapped in (np.arange(4), swap)}
    assert not orbits & set(map(tuple, train.inputs))
    train = Dataset(prepare(tmp_path / "y", *flags), "train")
    assert (train.inputs.reshape(-1, 8, 9) == train.inputs[::8][:, turns]).all()  # the 8 turns, once each


def test_cells_that_do_not_count(tmp_path):
    rows = [(question, answer[:4] + "?" + answer[5:]) for question, answer in random_rows(30)]
    path = write(tmp_path / "all.csv", rows)
    for symbols in ([], ["--symbols=.123"]):
        folder = tmp_path / str(len(symbols))
        test = Dataset(prepare(folder, f"--train_csv={path}", "--holdout=9", "--ignored=?", *symbols), "test")
        assert test.vocab_size == 5 and test.task["symbols"] == "_.123"
        labels = test.test_batch(range(9), 9)["labels"]
        assert (labels[:, 4] == IGNORED).all() and (np.delete(labels, 4, axis=1) > 1).all()


GOOD = [("1...", "1234"), ("2...", "2143")]
TEST = ["--test_csv={good}", "--holdout=0"]
MANY = [(chr(0x4e00 + i) * 4, chr(0x4e00 + i) * 4) for i in range(256)]
WRONG = {  # rows of train.csv, flags, what the message names
    "another symbol": (GOOD + [("1x..", "1234")], ["--symbols=.1234"], ["train.csv:4", "character 2", "'x'"]),
    "a short question": (GOOD + [("1..", "1234")], [], ["train.csv:4", "question has 3 characters, not 4"]),
    "a long answer": (GOOD + [("3...", "12341")], [], ["train.csv:4", "answer has 5 characters, not 4"]),
    "a third column": (GOOD + [("3...", "1234", "")], [], ["train.csv:4", "question, answer, as text"]),
    "two answers": (GOOD + [("1...", "1243")], [], ["train.csv:4", "another answer", "--several_answers"]),
    "on both sides": (GOOD, TEST, ["good.csv:2: the question is in", "train.csv"]),
    "a test file of other sizes": ([("1", "1")], TEST, ["good.csv:2", "not 1"]),
    "no rows": ([], [], ["train.csv:2", "no puzzle"]),
    "a grid that does not fit": (GOOD, ["--grid=2x3"], ["grid=2x3", "4 characters"]),
    "a grid that is none": (GOOD, ["--grid=2by2"], ["grid=2by2", "as 6x6"]),
    "no square": ([("12", "12")], [], ["2 characters", "6x6"]),
    "too many symbols": (MANY, [], ["256 symbols", "255"]),
    "not UTF-8": (GOOD + [("1\ufffd..", "1234")], [], ["\ufffd", "printed"]),
    "a tab": (GOOD + [("1\t..", "1234")], [], ["\\t", "printed"]),
    "a symbol twice": (GOOD, ["--symbols=.12341"], ["symbols", "different"]),
    "an unknown permutation": (GOOD, ["--permute_symbols=1-5"], ["permute_symbols=1-5", "not in the"]),
    "turns of an oblong": (GOOD, ["--grid=1x4", "--dihedral"], ["--dihedral", "1x4"]),
    "nothing held out": (GOOD, ["--holdout=0"], ["--test_csv", "--holdout"]),
    "negative": (GOOD, ["--test_csv={good}", "--holdout=-1"], ["no number below 0"]),
    "all held out": (GOOD, ["--holdout=2"], ["holdout=2", "has only 2 puzzles"]),
    "both": (GOOD, ["--test_csv={good}"], ["either"]),
    "no file": (GOOD, ["--train_csv=nowhere.csv"], ["nowhere.csv: cannot be read"]),
    "a folder that exists": (GOOD, ["--output_dir={tmp}"], ["exists already"]),
    "a known kind": (GOOD, ["--kind=sudoku"], ["symbols '_.1234' are not those of kind sudoku"]),
    "a negative number": (GOOD, ["--num_aug=-1"], ["below 0"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_line_and_leaves_nothing(case, tmp_path):
    rows, flags, words = WRONG[case]
    path, good = write(tmp_path / "train.csv", rows), write(tmp_path / "good.csv", GOOD)
    flags = [flag.format(good=good, tmp=tmp_path) for flag in flags]
    with pytest.raises(UserError) as error:
        prepare(tmp_path / "x", f"--train_csv={path}", "--holdout=1", *flags)
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value) and sorted(os.listdir(tmp_path)) == ["good.csv", "train.csv"]


@pytest.mark.parametrize("line", [
    '{"question": "1..."}', '{"question": "1...", "answer": 1234}', "[]", "1,2", "{"])
def test_wrong_json_lines(line, tmp_path):
    path = write(tmp_path / "train.jsonl", GOOD)
    with open(path, "a") as f:
        f.write("\n" + line + "\n")
    with pytest.raises(UserError, match="train.jsonl:4: must have question, answer, as text"):
        prepare(tmp_path / "x", f"--train_csv={path}", "--holdout=1")


# What write_dataset and Dataset refuse.

ONES = np.ones((4, 36), dtype=np.uint8)
LATIN = np.array([[(row + column) % 4 + 2 for row in range(4) for column in range(4)]])  # no boxes
GRID, SIX = {"grid": [6, 6]}, {"grid": [3, 6]}
SUDOKU = {"kind": "sudoku", "grid": [4, 4], "symbols": " .1234"}
REFUSED = {  # labels, vocab_size, manifest, words
    "label 0, as of Lights Out": (ONES - 1, 3, GRID, "labels hold 0: must be 1 to 2"),
    "rows of another grid": (ONES, 3, SIX, r"inputs must be integers of shape \(4, 18\), not .* \(4, 36\)"),
    "a large token": (ONES * np.int32(256), 3, GRID, "labels hold 256: must be 1 to 2"),
    "a negative token": (ONES * np.int32(-1), 3, GRID, "labels hold -1"),
    "floats": (ONES * 1.0, 3, GRID, "labels must be integers"),
    "short symbols": (ONES, 3, GRID | {"symbols": "_0"}, "symbols '_0' must be 3"),
    "equal symbols": (ONES, 3, GRID | {"symbols": "_00"}, "all different"),
    "300 tokens": (ONES, 301, GRID, "300 symbols are too many"),
    "no grid": (ONES, 3, {"kind": "mine"}, r"grid \[\] does not fit"),
    "fewer rows": (ONES[:3], 3, GRID, "train has 3 rows: must be 4 x 1"),
    "Latin squares as Sudoku": (LATIN.repeat(4, axis=0), 6, SUDOKU, "breaks a rule of kind sudoku"),
    "Sudoku of 5x5": (ONES, 7, SUDOKU | {"grid": [5, 5], "symbols": " .12345"}, "not those of kind sudoku"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_write_dataset_refuses(case, tmp_path):
    labels, vocab_size, manifest, words = REFUSED[case]
    inputs = np.ones_like(labels, dtype=np.uint8)
    with pytest.raises(UserError, match=words):
        write_dataset(str(tmp_path / "x"), {"train": (4, 1, [(inputs, labels)])}, vocab_size, manifest)
    assert os.listdir(tmp_path) == []


def test_a_manifest_without_grid_or_symbols(tmp_path):
    """Another program's: no KeyError, but one line where the kind needs them."""
    grids = np.full((4, 16), 2, dtype=np.uint8)
    path = str(tmp_path / "x")
    write_dataset(path, {split: (4, 1, [(grids, grids)]) for split in ("train", "test")}, 6, {"grid": [4, 4]})
    assert Dataset(path, "test").task == {"kind": "", "grid": [4, 4], "symbols": "012345"}
    manifest = json.loads((tmp_path / "x/manifest.json").read_text())
    del manifest["grid"]
    (tmp_path / "x/manifest.json").write_text(json.dumps(manifest))
    assert Dataset(path, "test").task["grid"] == [1, 16]
    for changes, words in (
            ({"kind": "maze"}, r"manifest.json: grid \[1, 16\] and .* not those of kind maze"),
            ({"grid": [2, 4]}, r"manifest.json: grid \[2, 4\] does not fit 16 cells: build it again")):
        (tmp_path / "x/manifest.json").write_text(json.dumps(manifest | changes))
        with pytest.raises(UserError, match=words):
            Dataset(path, "test")


def test_takuzu_example(tmp_path):
    """Every puzzle has one solution and needs each of its clues, if they are more than 24."""
    path = tmp_path / "takuzu.csv"
    example = runpy.run_path(os.path.join(ROOT, "examples", "takuzu.py"))
    example["main"](str(path), 40)
    boards = example["solved_boards"]()
    assert len(boards) == 4140 == len(set(map(bytes, boards)))
    for _, (question, answer) in prepare_csv.csv_rows(str(path), ["question", "answer"]):
        given = np.array([cell != "." for cell in question])
        agrees = boards == np.array(list(map(int, answer)))
        assert agrees[:, given].all(axis=1).sum() == 1
        for cell in np.flatnonzero(given) if given.sum() > 24 else ():
            assert agrees[:, given & (np.arange(36) != cell)].all(axis=1).sum() > 1
    folder = prepare(tmp_path / "x", f"--train_csv={path}", "--holdout=10", "--symbols=.01", "--kind=takuzu",
                     "--dihedral", "--permute_symbols=01")
    task = Dataset(folder, "train").task
    assert puzzles.verdict(task, *Dataset(folder, "test").inputs[:2]) == "not judged: the rules are not known"


def test_a_fork_adds_the_rules_of_a_kind_in_one_place(tmp_path):
    """Those of Takuzu as docs/own-puzzles.md has them."""
    guide = pathlib.Path(ROOT, "docs", "own-puzzles.md").read_text()
    rules = re.search(r"```python\n(    if task.*?)```", guide, re.S)[1]
    before, rest = pathlib.Path(puzzles.__file__).read_text().split("def broken_cells(")
    signature, body = rest.split('known."""\n', 1)
    source = f'{before}def broken_cells({signature}known."""\n{rules}{body}'
    exec(compile(source, "fork", "exec"), fork := {"__name__": "fork"})
    boards = runpy.run_path(os.path.join(ROOT, "examples", "takuzu.py"))["solved_boards"]() + 2
    task = {"kind": "takuzu", "grid": [6, 6], "symbols": "_.01"}
    empty = np.ones_like(boards)
    assert fork["are_solutions"](task, empty, boards).all()
    everything = np.random.default_rng(0).integers(2, 4, (2000, 36))
    others = boards[:2000].copy()
    others[np.arange(2000), np.arange(2000) % 36] ^= 1  # one cell changed
    solved = set(map(bytes, boards))
    for answers in (everything, others):
        broken = fork["broken_cells"](task, empty[:2000], answers)
        assert [bytes(answer) in solved for answer in answers] == (~broken.any(axis=1)).tolist()
    given = fork["broken_cells"](task, others[:1], boards[:1])
    assert np.flatnonzero(given).tolist() == [0]
    with pytest.raises(UserError, match="breaks a rule of kind takuzu"):
        fork["check_rows"](task, empty[:1501], np.concatenate([boards[:1500], others[:1]]))


def test_a_checkpoint_says_what_it_solves_whatever_its_sizes():
    """Latin squares of 4x4 have the sizes of a Sudoku, and are none."""
    import solve
    task = {"kind": "latin", "grid": [4, 4], "symbols": "_.1234"}
    assert solve.puzzle_of({"task": task}, None) == task
    latin = LATIN.astype(np.int64)
    assert puzzles.are_solutions(task, latin, latin) is None
    assert not puzzles.are_solutions(puzzles.guess(16, 6), latin, latin)[0]
    assert puzzles.is_correct(task, latin, latin, latin)["accuracy"].all()
    assert puzzles.look(task)["title"] == "latin" and puzzles.check_questions(task, latin, [""]) == ""
