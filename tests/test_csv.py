"""prepare_csv.py, the rules that a script adds, and the example of another puzzle."""
import random
import runpy
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT, judgements, start_script

import data
import model
import prepare_csv
import puzzles
from configurator import configure
from data import Dataset
from puzzles import kind_of
from puzzles.keys import keys_of, orbit_keys
from puzzles.maze import Maze
from puzzles.symmetries import dihedral
from runtime.errors import UserError


def build(folder, flags):
    return prepare_csv.main(configure(prepare_csv.Settings, [f"--output_dir={folder}", *shlex.split(flags)]))


def write(path, *rows):
    """Writes a CSV file of rows "question,answer"; returns its path."""
    Path(path).write_text("\n".join(["question,answer", *rows]), encoding="utf-8")
    return path


def rows_of(folder, split):
    """Returns the rows of a dataset as they stood in its file."""
    dataset = Dataset(folder, split)
    pairs = zip(dataset.inputs, dataset.labels)
    return [",".join(kind_of(dataset.task).text(tokens) for tokens in pair) for pair in pairs]


def random_rows(n, cells=9, alphabet="123"):
    """Returns n rows with different questions, where an empty cell is a dot."""
    draw = random.Random(0)
    questions = dict.fromkeys("".join(draw.choices(alphabet + ".", k=cells)) for _ in range(9 * n))
    return [f"{question},{question.replace('.', alphabet[0])}" for question in questions][:n]


# Datasets

def test_datasets_hold_the_files_rows():
    """Of several answers to a question, the first one is kept."""
    rows = random_rows(30, 6, "áβ😀")
    train = write("train.csv", *rows[:20], rows[0], rows[1][:7] + "ββββββ")
    test = write("test.csv", *rows[20:])
    path = build("x", f"--train_csv={train} --test_csv={test} --grid=2x3 --kind=my --several_answers")
    assert rows_of(path, "train") == rows[:20] and rows_of(path, "test") == rows[20:]
    assert Dataset(path, "test").task == {"kind": "my", "grid": [2, 3], "symbols": "_.áβ😀"}


def test_held_out_puzzles_are_drawn_from_all_and_not_trained_on(capsys):
    rows = random_rows(60)
    folder = build("x y/", f"--train_csv={write('all.csv', *rows)} --holdout=20")
    assert "config/demo.py --data_prepare= '--data_path=x y' '--out_dir=out/x y'\n" in capsys.readouterr().out
    test = rows_of(folder, "test")
    assert len(test) == 20 and sorted(test + rows_of(folder, "train")) == sorted(rows) and test != rows[:20]


def test_copies_are_symmetric_and_never_test_puzzles():
    """Training puzzles that a symmetry turns into a test puzzle are left out.

    test_data.py and test_maze.py say that answers are turned with their questions.
    """
    path = write("all.csv", *random_rows(400, 9, "12"))
    flags = "--holdout=100 --dihedral --permute_symbols=121 --units=1x3,3x1 --num_aug=15"
    folder = build("x", f"--train_csv={path} {flags}")
    train, test = [Dataset(folder, split) for split in ("train", "test")]
    assert test.task["symmetries"] == {"dihedral": True, "permute_symbols": "12"}
    assert test.task["units"] == [[1, 3], [3, 1]]
    train_keys, test_keys = [orbit_keys(split.inputs, dihedral(3), [2, 3]) for split in (train, test)]
    assert len(test_keys) == 100 and {*train_keys}.isdisjoint(test_keys)
    assert len({*train_keys}) <= train.total_groups  # copies are symmetric


def test_white_space_is_no_cell_unless_it_is_a_symbol():
    """A text of 5x5 cells with white space between them has 49 characters, as one of 7x7 cells has."""
    texts = ["\n".join([" ".join(symbol * 5)] * 5) for symbol in "123"]
    path = write("all.csv", *[f'"{text}","{text}"' for text in texts])
    folder = build("x", f"--train_csv={path} --holdout=1")
    assert rows_of(folder, "test")[0] in [f"{symbol * 25},{symbol * 25}" for symbol in "123"]

    path = write("spaces.csv", "1 2 ,1122", " 11 ,2112", "2  1,2211")
    folder = build("y", f"--train_csv={path} --holdout=1 --symbols=' 12'")
    assert Dataset(folder, "test").task["symbols"] == "_ 12"


def test_a_tsv_file_has_tabs_between_its_columns():
    Path("all.TSV").write_text("question\tanswer\n1...\t1234\n2...\t2143\n")
    folder = build("x", "--train_csv=all.TSV --holdout=1")
    assert sorted(rows_of(folder, "train") + rows_of(folder, "test")) == ["1...,1234", "2...,2143"]


# Wrong input

GOOD = "1...,1234\n2...,2143\n"
MANY = "\n".join(f"{chr(i) * 4},{chr(i) * 4}" for i in range(0x4e00, 0x4f00))


@pytest.mark.parametrize("rows, flags, message", [
    (GOOD + "1x..,1234", "--symbols=.1234", "train.csv:4: the question has 'x' in row 1, column 2: must be"),
    (GOOD + "1...,1243", "", "train.csv:4.* another answer .*--several_answers"),
    (GOOD + "123,1234\n3...,3412", "", "train.csv:4: the question has 3 cells, not 2x2"),
    (GOOD, "--holdout=2", "holdout=2 leaves no puzzle to train on, of 2"),
    (GOOD + "1...,1234,5", "", "train.csv:4: must have question, answer"),
    (MANY, "", "257 symbols.* 1 to 255"),
    (GOOD, "--kind=sudoku", r"do not fit kind sudoku, whose are \[2, 2\]")])
def test_wrong_input_is_one_line_and_leaves_nothing(rows, flags, message):
    path = write("train.csv", rows)
    with pytest.raises(UserError, match=message):
        build("x", f"--train_csv={path} --holdout=1 {flags}")
    assert not list(Path().glob("x*/"))


# Rules

def test_the_command_that_trains_names_the_file_of_the_rules():
    Path("rules.py").write_text("import puzzles\npuzzles.KINDS['mine'] = puzzles.Kind\n")
    flags = f"--train_csv={write('all.csv', *random_rows(9))}", "--holdout=3", "--kind=mine"
    text = start_script("prepare_csv", ["rules.py", *flags]).output()
    assert "python train.py config/demo.py rules.py --data_prepare= " in text


@pytest.fixture
def kinds(monkeypatch):
    """puzzles.KINDS, restored after the test."""
    monkeypatch.setattr(puzzles, "KINDS", puzzles.KINDS.copy())
    return puzzles.KINDS


@pytest.fixture
def coloring(kinds, monkeypatch):
    """The names of examples/coloring.py; what it replaces is restored after the test."""
    monkeypatch.setattr(model.TRM, "is_solved", model.TRM.is_solved)
    monkeypatch.setattr(data, "Dataset", Dataset)
    return runpy.run_path(f"{ROOT}/examples/coloring.py")


def test_a_class_that_extends_a_kind_has_datasets_of_any_size(kinds):
    """Each puzzle gets as many copies as there can be."""
    kinds["mine"] = type("Mine", (Maze,), {})
    path = write("all.csv", "S##   ##G,S##ooo##G", "S  ## ##G,Soo##o##G")
    flags = f"--train_csv={path} --holdout=1 --kind=mine --num_aug=9 --symbols='# SGo'"
    train = Dataset(build("x", flags), "train")
    assert len(train) == 8
    larger = kind_of(train.task).resized(81)
    assert type(larger) is kinds["mine"] and larger.task["grid"] == [9, 9]


CHECKED = "12312231233123112312"  # each cell's number is its diagonal's
OTHER = CHECKED.translate(str.maketrans("23", "32"))


def test_any_right_answer_counts_where_a_kind_has_several(coloring):
    texts = [[CHECKED, CHECKED, CHECKED], [CHECKED, OTHER, CHECKED[:19] + "1"]]
    labels, preds = np.array([[list(map("_.123".index, text)) for text in row] for row in texts])
    questions = np.where(np.arange(20) == 0, labels, 1)
    solved = coloring["is_solved"](*map(torch.tensor, (questions, labels, preds)))
    assert solved.tolist() == [True, True, False]
    arrays = dict(inputs=questions, labels=labels, preds=preds, surest_preds=preds)
    assert judgements(coloring["Coloring"].task, arrays) == {
        "valid_accuracy": 2, "surest_valid_accuracy": 2, "surest_accuracy": 1}


def test_the_coloring_example_does_not_train_on_questions_like_those_of_the_test(coloring):
    splits = [coloring["Coloring"]("coloring", split) for split in ("train", "test")]
    train, test = [set(keys_of(split.puzzles["inputs"] > 1)) for split in splits]
    assert len(train) > 800 and train.isdisjoint(test)
