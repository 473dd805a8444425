"""Datasets: the format of the files, where a run finds one, and the reader that makes batches of it.

A dataset is a folder in the layout of the official code, plus a manifest:

    data/NAME/manifest.json           the command that made it, counts and the SHA-256 of every file
    data/NAME/identifiers.json        names of the puzzle identifiers
    data/NAME/{train,test}/dataset.json
    data/NAME/{train,test}/all__{inputs,labels,puzzle_identifiers,puzzle_indices,group_indices}.npy

A group is one puzzle, or one task of ARC. It has versions: the puzzle itself and its copies by symmetry. The
files have the official code's names, in which a version is called a puzzle.

inputs and labels are tokens [N, seq_len], one example a row. Version i has the row puzzle_identifiers[i] of
the model's table, and owns the examples puzzle_indices[i]:puzzle_indices[i + 1]; group g owns the versions
group_indices[g]:group_indices[g + 1].

A dataset of prepare_arc.py stores each example of an ARC task once, and batches make its versions. It has two
files in place of puzzle_indices: group g has the rows task_indices[g]:task_indices[g + 1], and versions[i],
uint8 [11], says how version i turns and recolors them (puzzles/arc.py).
"""
import functools
import hashlib
import json
import math
import os
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from puzzles import IGNORE_LABEL, kind_of, task_of
from runtime.errors import TransientError, UserError
from runtime.files import file_hash, locked, read_json

ROOT = str(Path(__file__).parent)
ORDER, EXAMPLE, HALT, SUBSET = range(4)  # independent random streams of one seed


# ---------------------------------------------------------------------------------------------------------
# Where a dataset comes from

def get_dataset(settings, should_stop):
    """Returns the folder of the dataset: data_path, or a download of it; if missing, data_prepare makes it.

    One process of a host does both, while the others wait. Raises SystemExit once should_stop() returns true.
    """
    path = settings.data_path
    if path.startswith("gs://"):
        from puzzles.download import local_dataset
        path = local_dataset(path, should_stop)
    try:
        command = shlex.split(settings.data_prepare)
    except ValueError as e:
        raise UserError(f"data_prepare: {e}: {settings.data_prepare}") from None
    if os.path.exists(path) or not command:
        return path
    # the first process of the host makes the dataset; the others wait, and find it made
    with locked(os.path.normpath(path) + ".made"):
        if os.path.exists(path):
            return path
        # the script may stand beside train.py, and the current folder be another one
        if not os.path.exists(command[0]):
            command[0] = os.path.join(ROOT, command[0])
        # a stop ends the command, too: Ctrl-C reaches both processes, but SIGTERM only this one
        print(f"{path} is missing; making it: python", *command, flush=True)
        environment = os.environ | {"DATA_PREPARE": "1"}  # a prepare script then tells nobody to train
        process = subprocess.Popen([sys.executable, *command], env=environment)
        try:
            while process.poll() is None and not should_stop():
                time.sleep(0.1)
        finally:
            process.terminate()
        process.wait()
        if should_stop():
            raise SystemExit(3)
        # a command that fails by itself may succeed later, one that finds wrong input may not
        if not os.path.exists(path):
            error = UserError if process.returncode in (0, 2) else TransientError
            raise error(f"data_prepare did not make data_path={path}: {settings.data_prepare}")
    return path


# ---------------------------------------------------------------------------------------------------------
# Datasets

def load(path):
    """Returns the Datasets of a folder, (train, test). Raises UserError."""
    return Dataset(path, "train"), Dataset(path, "test")


class Dataset:
    """One split of a dataset, checked when it is loaded.

    len() is the number of examples: N, or more where batches make versions. Datasets of the official code,
    without a manifest, load too. read_files() sets the attributes that the files give, and number_examples()
    those that are counted.

    Args:
        path: the folder of the dataset.
        split: "train" or "test".

    Raises UserError, which names a file or folder that is missing, damaged or inconsistent.
    """

    def __init__(self, path, split):
        self.path = path
        self.folder = f"{path}/{split}"
        self.manifest = read_manifest(path, split)
        self.read_files()
        self.check()
        self.number_examples()

    def read_files(self):
        """Reads the split's files."""
        self.inputs = self.read("inputs")  # [N, seq_len], stays on the disk, as labels do
        self.labels = self.read("labels")
        self.puzzle_identifiers = self.read("puzzle_identifiers")  # of each version
        self.group_indices = self.read("group_indices")  # the versions of group g begin at group_indices[g]
        self.total_groups = len(self.group_indices) - 1

        # row_indices[i]:row_indices[i + 1] are the rows of version i, in ARC of group i for all its versions
        self.makes_versions = os.path.exists(f"{self.folder}/all__versions.npy")
        if self.makes_versions:
            self.versions = self.read("versions")  # how each one turns and recolors
        self.row_indices = self.read("task_indices" if self.makes_versions else "puzzle_indices")

        # the keys of dataset.json that count; and the task, see puzzles/__init__.py
        file = f"{self.folder}/dataset.json"
        facts = read_json(file)
        if not {"seq_len", "vocab_size"} <= facts.keys():
            raise UserError(f"{file} must have seq_len and vocab_size: build it again")
        self.seq_len = facts["seq_len"]
        self.vocab_size = facts["vocab_size"]  # tokens, padding included
        self.num_puzzle_identifiers = facts.get(
            "num_puzzle_identifiers", int(self.puzzle_identifiers.max(initial=0)) + 1)
        # the label of cells that no loss counts; None: these have IGNORE_LABEL already
        self.ignore_label_id = facts.get("ignore_label_id", 0)
        self.task = task_of(self.manifest, self.seq_len, self.vocab_size)

    def read(self, field):
        """Returns one of the split's arrays, which stays on the disk. Raises UserError."""
        file = f"{self.folder}/all__{field}.npy"
        try:
            # a plain view of the file indexes faster than np.memmap
            return np.asarray(np.load(file, mmap_mode="r"))
        except (OSError, ValueError, EOFError) as e:
            raise UserError(f"{file} cannot be read (truncated?): build it again ({e})") from None

    def check(self):
        """Raises UserError, which names the arrays whose shapes or numbers do not fit."""
        if min(len(self.inputs), len(self.row_indices), self.total_groups) < 1:
            raise UserError(f"{self.folder} has no examples: build it again")
        num_owners = self.total_groups if self.makes_versions else len(self.puzzle_identifiers)
        shape = (self.row_indices[-1], self.seq_len)
        lowest_label = min(0, IGNORE_LABEL if self.ignore_label_id is None else self.ignore_label_id)
        checks = {
            "inputs, labels": self.inputs.shape == self.labels.shape == shape,
            "vocab_size": max(self.inputs.max(), self.labels.max()) < self.vocab_size,
            "tokens from 0": self.inputs.min() >= 0 and self.labels.min() >= lowest_label,
            "num_puzzle_identifiers": self.puzzle_identifiers.max(initial=0) < self.num_puzzle_identifiers,
            "indices of rows": len(self.row_indices) == num_owners + 1,
            "group_indices": self.group_indices[-1] == len(self.puzzle_identifiers),
            "groups without a version": np.diff(self.group_indices).min() > 0,
        }
        wrong = [name for name, fits in checks.items() if not fits]
        if wrong:
            raise UserError(f"{self.folder}: dataset.json does not fit {', '.join(wrong)}: build it again")

    def number_examples(self):
        """Numbers the examples of all versions; those of one version follow each other."""
        # the owner of each version's rows: itself, or its group
        row_owners = np.arange(len(self.puzzle_identifiers))
        if self.makes_versions:
            row_owners = self.groups_of(row_owners)
        # version i has the examples example_indices[i]:example_indices[i + 1]
        self.first_rows = self.row_indices[row_owners]
        self.num_examples = np.diff(self.row_indices)[row_owners]
        self.example_indices = np.append(0, self.num_examples.cumsum())
        self.mean_puzzle_examples = len(self) / len(row_owners)  # of a version; the files call it a puzzle
        # in an epoch, a group contributes as many examples as its largest version has
        self.group_sizes = np.maximum.reduceat(self.num_examples, self.group_indices[:-1])
        self.epoch_examples = int(self.group_sizes.sum())

    def __len__(self):
        return int(self.example_indices[-1])

    def train_batch(self, seed, step, batch_size, rank=0, world=1):
        """Returns the rank's slice of a step's global batch: a pure function of (seed, step).

        Args:
            seed, step: choose the examples.
            batch_size: sequences of the global batch, which does not depend on the number of ranks.
            rank, world: the slice, b = batch_size // world sequences.

        Returns a dict of int32 arrays: inputs [b, seq_len], labels [b, seq_len] (IGNORE_LABEL where no label
        counts), puzzle_identifiers [b]. Thread-safe.
        """
        # the epochs follow each other in an endless stream of examples, which the batches cut
        own_slice = rank_slice(batch_size, rank, world)
        stream_positions = step * batch_size + np.arange(batch_size)[own_slice]
        epochs, positions = np.divmod(stream_positions, self.epoch_examples)
        own_positions = [(epoch, positions[epochs == epoch]) for epoch in np.unique(epochs)]

        # ARC, also in the official code's datasets: a group brings all examples of a version
        if self.makes_versions or self.epoch_examples > self.total_groups:
            drawn = []
            for epoch, own in own_positions:
                drawn.append([array[own] for array in draw_examples(self, seed, epoch)])
            versions, members, translation_draws = map(np.concatenate, zip(*drawn))
            return self._batch(versions, members, translation_draws)

        # Sudoku and mazes: a group brings one example, of a version that the step draws
        groups = np.concatenate([draw_groups(self, seed, epoch)[own] for epoch, own in own_positions])
        # the second draw of a sequence is unused: without it, batches would not be those of records/
        draws = generator(seed, EXAMPLE, step).random((batch_size, 2))[own_slice, 0]
        return self._batch(draw_versions(self.group_indices, groups, draws), members=0)

    def test_batch(self, indices):
        """Returns the batch of the examples with these indices; see train_batch."""
        return self._batch(*self.locate(indices))

    def locate(self, indices):
        """Returns the versions [n] of these examples, and which of its version's examples each one is [n]."""
        versions = np.searchsorted(self.example_indices, indices, side="right") - 1
        return versions, indices - self.example_indices[versions]

    def groups_of(self, versions):
        """Returns the groups [n] of versions."""
        return np.searchsorted(self.group_indices, versions, side="right") - 1

    def _batch(self, versions, members, translation_draws=0):
        """Returns the batch of some examples.

        Args:
            versions: numbers of versions [b].
            members: which of its version's examples each one is [b].
            translation_draws: numbers in [0, 1), [b, 2]; 0: nothing moves.
        """
        rows = self.first_rows[versions] + members
        if self.makes_versions:
            pairs = [self.grids[row] for row in rows]
            inputs, labels = kind_of(self.task).canvases(pairs, self.versions[versions], translation_draws)
        else:
            inputs = self.inputs[rows]
            labels = self.labels[rows]
        return batch_of(inputs, labels, self.puzzle_identifiers[versions], self.ignore_label_id)

    @functools.cached_property
    def grids(self):
        """The stored examples of ARC, pairs (input, output) of grids."""
        return list(map(kind_of(self.task).grids, self.inputs, self.labels))

    @functools.cached_property
    def identifiers_sha256(self):
        """Hex digest that identifies what the puzzle identifiers stand for; "" if that is not known."""
        with suppress(FileNotFoundError), open(f"{self.path}/identifiers.json", encoding="utf-8") as f:
            return json_hash(json.load(f))
        return ""

    def subset(self, n, num_versions=0):
        """Returns the sorted indices of n random puzzles, the same in every run; all if n is 0 or too large.

        Test sets are ordered by source: their first n examples would not represent the whole set. A task with
        several test inputs counts as one, and brings them all. For ARC they come in the first num_versions of
        the task's versions, 0: in all.
        """
        # draw the groups
        groups = generator(0, SUBSET).permutation(self.total_groups)
        groups = np.sort(groups[:n or None])
        starts = self.group_indices[groups]
        ends = np.minimum(self.group_indices[groups + 1], starts + (num_versions or len(self)))
        # list their examples, which follow each other
        return ranges(self.example_indices[starts], self.example_indices[ends])

    def made_by(self):
        """Returns the command that made the dataset, as "prepare_sudoku.py --size=6 ..."; "" if not known."""
        # the script stands first
        words = [f"--{name}={value}" for name, value in self.manifest.get("command", {}).items()]
        return shlex.join(words).removeprefix("--script=")

    @functools.cached_property
    def sha256(self):
        """Hex digest that identifies the content of both splits."""
        from puzzles.writer import hashes_of
        return json_hash(self.manifest.get("sha256") or hashes_of(self.path))


def read_manifest(path, split):
    """Returns the dict in manifest.json, after comparing the split's files with it; {} without one."""
    if not os.path.isdir(f"{path}/{split}"):
        raise UserError(f"{path}/{split}: no such dataset: prepare_sudoku.py or another script builds it")

    # the official builder writes no manifest
    file = f"{path}/manifest.json"
    manifest = read_json(file) if os.path.exists(file) else {}
    for name, digest in manifest.get("sha256", {}).items():
        file = f"{path}/{name}"
        is_own = name.startswith((split, "identifiers"))
        if is_own and not (os.path.isfile(file) and file_hash(file) == digest):
            raise UserError(f"{file} is missing or does not match manifest.json: build it again")
    return manifest


def json_hash(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def batch_of(inputs, labels, identifiers, ignored_label):
    """Returns a batch, where the dataset's label of cells that do not count becomes the loss's."""
    labels = labels.astype(np.int32)
    labels[labels == ignored_label] = IGNORE_LABEL
    return {
        "inputs": inputs.astype(np.int32),
        "labels": labels,
        "puzzle_identifiers": identifiers.astype(np.int32),
    }


# ---------------------------------------------------------------------------------------------------------
# The order of the examples

@functools.lru_cache(maxsize=4)  # a batch spans one or two epochs, or more if they are small
def draw_groups(dataset, seed, epoch):
    """Returns the groups of an epoch in random order [n]; they follow from (seed, epoch)."""
    return generator(seed, ORDER, epoch).permutation(dataset.total_groups)


@functools.lru_cache(maxsize=4)
def draw_examples(dataset, seed, epoch):
    """Returns the examples of an epoch, where each group brings all examples of one of its versions.

    Three arrays: versions [n]; members [n], which of its version's examples each one is; translation_draws
    [n, 2], numbers in [0, 1) that move it. All follows from (seed, epoch), so the next batch goes on with a
    group that one batch cuts.
    """
    # a group brings as many examples as its largest version has; a smaller version repeats its examples
    groups = draw_groups(dataset, seed, epoch)
    sizes = dataset.group_sizes[groups]
    example_groups = np.repeat(groups, sizes)
    members = ranges(0 * sizes, sizes)

    # draw a version of each group
    rng = generator(seed, EXAMPLE, epoch)
    version_draws, fixed_draws = rng.random((2, len(groups)))
    versions = draw_versions(dataset.group_indices, example_groups, version_draws[example_groups])

    # one example of each group, drawn at random, stays in place; translation_draws move the others
    fixed_members = (fixed_draws * dataset.group_sizes).astype(int)
    translation_draws = rng.random((len(example_groups), 2))
    translation_draws[members == fixed_members[example_groups]] = 0
    return versions, members % dataset.num_examples[versions], translation_draws


def draw_versions(group_indices, groups, draws):
    """Draws a version of each group, [b]; draws [b]: from 0 to below 1."""
    start = group_indices[groups]
    count = group_indices[groups + 1] - start
    return start + (draws * count).astype(int)


def ranges(starts, ends):
    """Returns the numbers of all ranges start:end, one range after the other."""
    return np.concatenate(list(map(np.arange, starts, ends)))


def rank_slice(batch_size, rank, world):
    """Returns the slice of a global batch that a rank takes."""
    size = batch_size // world
    return slice(rank * size, (rank + 1) * size)


# ---------------------------------------------------------------------------------------------------------
# Random numbers

def generator(seed, *key):
    """Returns a random generator for a key: a stream constant and what it depends on."""
    return np.random.Generator(np.random.Philox([seed, *key]))


def halting_draws(seed, step, batch_size, halt_max_steps, halt_exploration_prob, rank=0, world=1):
    """Returns the minimum halting steps of a step's sequences, int32 [batch_size // world].

    They follow from (seed, step): 0 with probability 1 - halt_exploration_prob, else uniform in
    2..halt_max_steps.
    """
    # the whole batch draws, so that the draws do not depend on the number of ranks
    rng = generator(seed, HALT, step)
    explores = rng.random(batch_size) < halt_exploration_prob
    steps = rng.integers(2, max(halt_max_steps, 2) + 1, batch_size, dtype=np.int32)
    draws = steps * explores * (halt_max_steps >= 2)
    return draws[rank_slice(batch_size, rank, world)]


# ---------------------------------------------------------------------------------------------------------
# Datasets that are made on the fly, for forks

class Generated:
    """A Dataset whose puzzles are made when they are needed, for forks: `data.Dataset = Mine` uses it.

    A subclass has a task, sizes where they differ from these, and a method

        draw(self, rng, n, split) -> questions, answers: tokens [n, cells]

    which makes n puzzles with a numpy.random.Generator, by the rules of puzzles.writer.tokens_of. The puzzles
    for the split "test" must differ from the puzzles for "train". All replicas draw the whole batch of a
    step, from (seed, step), and take slices. The fork also sets data_path to any name, and data_prepare to
    "".
    """

    task = {}  # see puzzles/__init__.py; its grid and symbols are the model's sizes
    total_groups = 1000  # puzzles of an epoch
    test_size = 1000  # test puzzles, the same in every run
    num_puzzle_identifiers = 1
    mean_puzzle_examples = 1
    identifiers_sha256 = ""  # see Dataset

    def __init__(self, path, split):
        self.path = path
        self.split = split
        self.vocab_size = len(self.task["symbols"])
        self.task = self.task | task_of(self.task, None, self.vocab_size)
        self.seq_len = math.prod(self.task["grid"])
        # draw the test puzzles, or as many others: their hash identifies how puzzles are drawn
        self.puzzles = self._batch(generator(0, SUBSET), self.test_size, split)
        self.sha256 = hashlib.sha256(
            self.puzzles["inputs"].tobytes() + self.puzzles["labels"].tobytes()).hexdigest()

    def __len__(self):
        return self.total_groups if self.split == "train" else self.test_size

    def train_batch(self, seed, step, batch_size, rank=0, world=1):
        batch = self._batch(generator(seed, EXAMPLE, step), batch_size, "train")
        own_slice = rank_slice(batch_size, rank, world)
        return {name: array[own_slice] for name, array in batch.items()}

    def test_batch(self, indices):
        return {name: array[indices] for name, array in self.puzzles.items()}

    def subset(self, n, num_versions=0):
        """Returns the indices of the first n test puzzles; num_versions is for ARC."""
        return np.arange(self.test_size)[:n or None]

    def made_by(self):
        return type(self).__name__

    def _batch(self, rng, n, split):
        from puzzles.writer import tokens_of
        tokens = tokens_of(self.task, self.draw(rng, n, split), f"{self.made_by()}.draw")
        return batch_of(*tokens, np.zeros(n), 0)
