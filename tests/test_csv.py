"""prepare_csv.py, what write_dataset refuses, and the example of another puzzle."""
import gzip
import json
import os
import runpy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import ROOT

import model
import prepare_csv
import puzzles
from configurator import UserError, configure
from data import Dataset
from prepare import keys_of, write_dataset
from puzzles import IGNORE_LABEL


def prepare_rows(folder, *flags):
    return prepare_csv.main(configure(prepare_csv.__file__, [f"--output_dir={folder}", *flags]))


def write(path, rows):
    """Writes rows (question, answer) as a .csv or .jsonl.gz file; returns its path."""
    path = str(path)
    if path.endswith(".csv"):
        lines = ["question,answer", *map(",".join, rows)]
    else:
        lines = [json.dumps(dict(question=question, answer=answer)) for question, answer in rows]
    opener = gzip.open if path.endswith(".gz") else open
    with opener(path, "wt", encoding="utf-8") as f:
        f.write("\n".join(lines) + "\n")
    return path


def texts(dataset, field):
    symbols = dataset.task["symbols"]
    return ["".join(map(symbols.__getitem__, row)) for row in getattr(dataset, field)]


def random_rows(n, cells=9, alphabet="123"):
    """Returns n distinct questions with . for an empty cell, and their answers."""
    rng = np.random.default_rng(0)
    answers = {}
    while len(answers) < n:
        answer = rng.choice(list(alphabet), cells)
        question = np.where(rng.random(cells) < 0.5, answer, ".")
        answers["".join(question)] = "".join(answer)
    return list(answers.items())


@pytest.mark.parametrize("ending", [".csv", ".jsonl.gz"])
def test_datasets_hold_the_files_rows(ending, tmp_path):
    """Of several answers to a question, the first."""
    rows = random_rows(30, cells=6, alphabet="áβ😀")
    train = write(tmp_path / f"train{ending}", rows[:20] + [rows[0], (rows[1][0], "ββββββ")])
    test = write(tmp_path / f"test{ending}", rows[20:])
    flags = [f"--train_csv={train}", f"--test_csv={test}", "--grid=2x3", "--kind=mine", "--several_answers"]
    path = prepare_rows(tmp_path / "x", *flags)
    for split, expected in ("train", rows[:20]), ("test", rows[20:]):
        dataset = Dataset(path, split)
        assert dataset.task == {"kind": "mine", "grid": [2, 3], "symbols": "_.áβ😀"}
        assert list(zip(texts(dataset, "inputs"), texts(dataset, "labels"))) == expected


def test_held_out_puzzles_are_drawn_by_the_seed(tmp_path):
    rows = random_rows(60)
    path = write(tmp_path / "all.csv", rows + rows[:2])
    drawn = []
    for seed in "01":
        folder = prepare_rows(tmp_path / seed, f"--train_csv={path}", "--holdout=20", f"--seed={seed}")
        train, test = [texts(Dataset(folder, split), "inputs") for split in ("train", "test")]
        assert len(test) == 20 and sorted(train + test) == sorted(dict(rows))
        drawn.append(test)
    assert drawn[0] != drawn[1]


def test_copies_are_symmetric_and_never_test_puzzles(tmp_path):
    """Training puzzles that a symmetry turns into a test puzzle are left out."""
    path = write(tmp_path / "all.csv", random_rows(400, alphabet="12"))
    flags = [f"--train_csv={path}", "--holdout=100", "--dihedral"]
    turns = puzzles.dihedral(3)
    train = Dataset(prepare_rows(tmp_path / "turned", *flags), "train")
    assert (train.inputs.reshape(-1, 8, 9) == train.inputs[::8][:, turns]).all()

    # with 1 and 2 exchanged, too
    folder = prepare_rows(tmp_path / "x", *flags, "--permute_symbols=12", "--num_aug=15")
    train = Dataset(folder, "train")
    pairs = np.concatenate([train.inputs, train.labels], axis=1).reshape(-1, 16, 2, 9)
    turned = np.stack([pairs[:, 0][..., turns[k % 8]] for k in range(16)], axis=1)
    swapped = np.array([0, 1, 3, 2], dtype=np.uint8)[turned]
    is_same = (pairs == turned).all(axis=(2, 3))
    is_swapped = (pairs == swapped).all(axis=(2, 3))
    assert (is_same | is_swapped).all() and is_same.any() and is_swapped.any()
    seen = set(keys_of(np.concatenate([turned[:, :, 0], swapped[:, :, 0]]).reshape(-1, 9)))
    assert seen.isdisjoint(keys_of(Dataset(folder, "test").inputs))


def test_cells_whose_answer_is_ignored_do_not_count(tmp_path):
    rows = [(question, "?" + answer[1:]) for question, answer in random_rows(30)]
    path = write(tmp_path / "all.csv", rows)
    test = Dataset(prepare_rows(tmp_path / "x", f"--train_csv={path}", "--holdout=9", "--ignored=?"), "test")
    assert test.task["symbols"] == "_.123"
    labels = test.test_batch(range(9), 9)["labels"]
    assert (labels[:, 0] == IGNORE_LABEL).all() and (labels[:, 1:] > 1).all()


GOOD = [("1...", "1234"), ("2...", "2143")]
TEST = ["--test_csv={good}", "--holdout=0"]
MANY = [(chr(0x4e00 + i) * 4, chr(0x4e00 + i) * 4) for i in range(256)]
WRONG = [  # rows of train.csv, flags, what the message names
    (GOOD + [("1x..", "1234")], ["--symbols=.1234"], "train.csv:4: character 2 .* 'x'"),
    (GOOD + [("1..", "1234")], [], "train.csv:4: the question has 3 characters, not 4"),
    (GOOD + [("1...", "1243")], [], "train.csv:4.* another answer .*--several_answers"),
    (GOOD, TEST, "good.csv:2: the question is in .*train.csv"),
    ([], [], "train.csv:2: no puzzle"),
    (GOOD, ["--grid=2x3"], "grid=2x3.* 4 characters"),
    (MANY, [], "256 symbols.* 1 to 255"),
    (GOOD + [("1\t..", "1234")], [], "symbols .* must be characters that can be printed"),
    (GOOD, ["--permute_symbols=1-5"], "permute_symbols=1-5.* not in the"),
    (GOOD, ["--grid=1x4", "--dihedral"], "grid=1x4 .* a square for --dihedral"),
    (GOOD, ["--holdout=2"], "train.csv: no puzzle is left of 2"),
    (GOOD, ["--train_csv=nowhere.csv"], "nowhere.csv: cannot be read"),
    (GOOD, ["--kind=sudoku"], "symbols '_.1234' do not fit kind sudoku"),
    ([("1..", "???"), ("2..", "???")], ["--ignored=?", "--grid=1x3"], "no cell that counts"),
    ([("12", "12"), ("21", "21")], ["--grid=1x2", "--permute_symbols=12"],
     "train.csv: no puzzle is left of 2.* symmetry"),
]


@pytest.mark.parametrize("rows, flags, message", WRONG)
def test_wrong_input_is_one_line_and_leaves_nothing(rows, flags, message, tmp_path):
    path = write(tmp_path / "train.csv", rows)
    good = write(tmp_path / "good.csv", GOOD)
    flags = [flag.format(good=good) for flag in flags]
    with pytest.raises(UserError, match=message):
        prepare_rows(tmp_path / "x", f"--train_csv={path}", "--holdout=1", *flags)
    assert sorted(os.listdir(tmp_path)) == ["good.csv", "train.csv"]


@pytest.mark.parametrize("line", ['{"question": "1..."}', '{"question": "1...", "answer": 1234}', "1,2"])
def test_wrong_json_lines(line, tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"question": "1...", "answer": "1234"}\n\n' + line)
    with pytest.raises(UserError, match="train.jsonl:3: must have question, answer, as text"):
        prepare_rows(tmp_path / "x", f"--train_csv={path}", "--holdout=1")


# What write_dataset and Dataset refuse.

LATIN = np.array([[(row + column) % 4 + 2 for row in range(4) for column in range(4)]])  # no boxes
SUDOKU = {"kind": "sudoku", "grid": [4, 4], "symbols": " .1234"}


@pytest.mark.parametrize("manifest, message", [
    (SUDOKU, "breaks a rule of kind sudoku"),
    (SUDOKU | {"symbols": " .1233"}, "all different"),
])
def test_what_write_dataset_refuses(manifest, message, tmp_path):
    with pytest.raises(UserError, match=message):
        write_dataset(str(tmp_path / "x"), {"train": (1, 1, [(np.ones_like(LATIN), LATIN)])}, 6, manifest)
    assert os.listdir(tmp_path) == []


@pytest.fixture
def coloring(monkeypatch):
    """examples/coloring.py, whose rules puzzles.py forgets after the test."""
    monkeypatch.setattr(puzzles, "RULES", puzzles.RULES.copy())
    monkeypatch.setattr(puzzles, "SEVERAL_ANSWERS", set())
    monkeypatch.setattr(model.TRM, "is_solved", model.TRM.is_solved)
    return SimpleNamespace(**runpy.run_path(os.path.join(ROOT, "examples", "coloring.py")))


COLORING = {"kind": "coloring", "grid": [4, 5], "symbols": "_.123"}
CHECKED = "12312231233123112312"  # each cell's number is its diagonal's


def colors(*texts):
    return np.array([["_.123".index(symbol) for symbol in text] for text in texts])


def test_any_right_answer_counts_where_a_kind_has_several(coloring):
    questions = colors("1" + "." * 19).repeat(3, axis=0)
    labels = colors(CHECKED).repeat(3, axis=0)
    other = CHECKED.translate(str.maketrans("23", "32"))
    answers = colors(CHECKED, other, CHECKED[:19] + "1")
    correct = puzzles.is_correct(COLORING, questions, labels, answers)
    assert correct["accuracy"].tolist() == [True, False, False]
    assert correct["valid_accuracy"].tolist() == [True, True, False]
    arrays = dict(inputs=questions, labels=labels, preds=answers, surest_preds=answers)
    assert puzzles.count_correct(COLORING, arrays, [answers]) == {
        "valid_accuracy": 2, "surest_accuracy": 1, "surest_valid_accuracy": 2}
    solved = coloring.is_solved(torch.tensor(questions), torch.tensor(labels), torch.tensor(answers))
    assert solved.tolist() == [True, True, False]


def test_the_coloring_example_becomes_a_dataset(coloring, tmp_path):
    """Whose writer checks the rules that the example adds."""
    path = str(tmp_path / "c.csv")
    coloring.make(path, 50)
    flags = [f"--train_csv={path}", "--holdout=9", "--kind=coloring", "--grid=4x5"]
    assert Dataset(prepare_rows(tmp_path / "x", *flags), "train").task == COLORING
    wrong = write(tmp_path / "wrong.csv", [("1" + "." * 19, "1" * 20), ("2" + "." * 19, "23" * 10)])
    with pytest.raises(UserError, match="breaks a rule of kind coloring"):
        prepare_rows(tmp_path / "y", f"--train_csv={wrong}", "--holdout=1", "--symbols=.123", *flags[2:])


def test_a_checkpoint_says_what_it_solves_whatever_its_sizes():
    """Latin squares of 4x4 have the sizes of a Sudoku, and are none."""
    import solve
    task = {"kind": "latin", "grid": [4, 4], "symbols": "_.1234"}
    saved = solve.Saved("latin.pt", {"task": task}, None, {"seq_len": 16, "vocab_size": 6})
    assert solve.task_of_model(saved) == task
    latin = LATIN.astype(np.int64)
    assert puzzles.is_correct(task, latin, latin, latin)["accuracy"].all()
