"""Datasets on disk -> batches; then the files that several scripts read or write.

A dataset is a folder in the layout of the official code, plus a manifest:

    data/NAME/manifest.json           the command that made it, counts and the SHA-256 of every file
    data/NAME/identifiers.json        names of the puzzle identifiers
    data/NAME/{train,test}/dataset.json
    data/NAME/{train,test}/all__{inputs,labels,puzzle_identifiers,puzzle_indices,group_indices}.npy

inputs and labels are [N, seq_len], one example a row. Puzzle i owns the examples
puzzle_indices[i]:puzzle_indices[i + 1], and group g the puzzles group_indices[g]:group_indices[g + 1]: a
Sudoku and its augmented copies are one group.

A dataset of prepare_arc.py stores each example of a task once. all__task_indices.npy takes the place of
all__puzzle_indices.npy: all puzzles of group g, the versions of a task, share the stored examples
task_indices[g]:task_indices[g + 1]. all__versions.npy [puzzles, 11] says how each version turns and recolours
them, and batches make the copies.
"""
import fcntl
import functools
import hashlib
import json
import math
import os
import shlex
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from datetime import timedelta

import numpy as np

from configurator import TransientError, UserError
from puzzles import IGNORE_LABEL, apply_version, canvas, crop, task_of

FIELDS = (
    "inputs",  # [N, seq_len], tokens
    "labels",  # [N, seq_len], tokens
    "puzzle_identifiers",  # [puzzles], rows of the model's table
    "puzzle_indices",  # [puzzles + 1], rows of inputs and labels
    "group_indices",  # [groups + 1], puzzles
)
ARC_FIELDS = (
    "inputs",
    "labels",
    "puzzle_identifiers",
    "task_indices",  # [groups + 1], rows of inputs and labels
    "group_indices",
    "versions",  # [puzzles, 11]
)
SPLIT_FILES = ("dataset.json", *(f"all__{field}.npy" for field in dict.fromkeys(FIELDS + ARC_FIELDS)))
FILES = (*(f"{split}/{name}" for split in ("test", "train") for name in SPLIT_FILES), "identifiers.json")
METADATA = (
    "pad_id",  # token of padding
    "ignore_label_id",  # label of cells that do not count
    "blank_identifier_id",  # puzzle identifier of padding
    "vocab_size",  # tokens, padding included
    "seq_len",  # cells of a puzzle
    "num_puzzle_identifiers",
    "total_groups",
    "mean_puzzle_examples",  # examples of a puzzle, on average
)
ORDER, EXAMPLE, HALT, SUBSET, NOISE = range(5)  # independent random streams of one seed


# ---------------------------------------------------------------------------------------------------------
# Datasets

class Dataset:
    """One split of a dataset, checked when it is loaded.

    inputs and labels are memory-mapped, [N, seq_len]. len() is the number of examples: N, or more where
    versions are made when they are needed. The keys of dataset.json are attributes. task is what puzzles.py
    calls a task. Datasets of the official code, without a manifest, load too.

    Args:
        path: the folder of the dataset.
        split: "train" or "test".

    Raises UserError, which names a file or folder that is missing, damaged or inconsistent.
    """

    def __init__(self, path, split):
        self.path = path
        folder = f"{path}/{split}"
        if not os.path.isdir(folder):
            raise UserError(f"{folder}: no such dataset; build it with prepare_sudoku.py, or another script")

        # the official builder writes no manifest
        self.manifest = {}
        manifest_path = f"{path}/manifest.json"
        if os.path.exists(manifest_path):
            self.manifest = read_json(manifest_path, "sha256")
        self.hint = f"build it again with {self.made_by() or 'the command that made it'}"

        # the sizes
        self.check_file(f"{split}/dataset.json")
        metadata = read_json(f"{folder}/dataset.json", *METADATA)
        vars(self).update(metadata)
        self.task = task_of(self.manifest, self.seq_len, self.vocab_size)

        # the examples stay on the disk; the indices, which are small, are read
        self.has_versions = f"{split}/all__versions.npy" in self.manifest.get("sha256", {})
        for field in ARC_FIELDS if self.has_versions else FIELDS:
            name = f"{split}/all__{field}.npy"
            self.check_file(name)
            mmap_mode = "r" if field in ("inputs", "labels") else None
            try:
                array = np.load(f"{path}/{name}", mmap_mode=mmap_mode)
            except (OSError, ValueError, EOFError) as e:
                raise UserError(f"{path}/{name} cannot be read (truncated?): {self.hint} ({e})") from None
            setattr(self, field, np.asarray(array))  # a plain view of the file indexes faster than np.memmap

        # shapes, tokens and identifiers agree with dataset.json, and indices end where their arrays do
        row_indices = self.task_indices if self.has_versions else self.puzzle_indices
        num_owners = self.total_groups if self.has_versions else len(self.puzzle_identifiers)
        example_shape = (row_indices[-1], self.seq_len)
        fits = [
            len(self.inputs) > 0,
            row_indices.shape == (num_owners + 1,),
            self.inputs.shape == example_shape,
            self.labels.shape == example_shape,
            self.inputs.max(initial=0) < self.vocab_size,
            self.labels.max(initial=0) < self.vocab_size,
            self.puzzle_identifiers.max(initial=0) < self.num_puzzle_identifiers,
            self.group_indices.shape == (self.total_groups + 1,),
            self.group_indices[-1] == len(self.puzzle_identifiers),
        ]
        if not all(fits):
            raise UserError(f"{folder}: dataset.json and the arrays do not fit each other: {self.hint}")
        self._count_examples()

    def _count_examples(self):
        """Finds each puzzle's stored rows, and how many examples each group brings to an epoch."""
        if self.has_versions:
            # all versions of a task share its rows, which hold grids
            tasks = self.groups_of(range(len(self.versions)))
            self.num_examples = np.diff(self.task_indices)[tasks]
            self.first_rows = self.task_indices[tasks]
            self.puzzle_indices = np.append(0, self.num_examples.cumsum())
            self.side = math.isqrt(self.seq_len)
            self.grids = []
            for pair in zip(self.inputs, self.labels):
                self.grids.append([crop(tokens, self.side) for tokens in pair])
        else:
            self.num_examples = np.diff(self.puzzle_indices)
            self.first_rows = self.puzzle_indices[:-1]

        # what a group brings to an epoch: if its puzzles are of several sizes, the smaller ones repeat theirs
        self.group_sizes = np.maximum.reduceat(self.num_examples, self.group_indices[:-1])
        self.epoch_examples = int(self.group_sizes.sum())

    def __len__(self):
        return int(self.puzzle_indices[-1])

    def train_batch(self, seed, step, batch_size, rank=0, world=1):
        """Returns the rank's slice of a step's global batch: a pure function of (seed, step).

        Args:
            seed, step: choose the examples.
            batch_size: sequences of the global batch, which does not depend on the number of ranks.
            rank, world: the slice, b = batch_size // world sequences.

        Returns a dict of int32 arrays: inputs [b, seq_len], labels [b, seq_len] (IGNORE_LABEL where no label
        counts), puzzle_identifiers [b]. Thread-safe.
        """
        part = rank_slice(batch_size, rank, world)
        positions = np.arange(step * batch_size + part.start, step * batch_size + part.stop)
        epochs, positions = np.divmod(positions, self.epoch_examples)
        if self.has_versions or self.epoch_examples > self.total_groups:
            return self._batch_of_whole_puzzles(seed, epochs, positions)

        # one example a group: the whole batch draws, so that the draws do not depend on the number of ranks
        groups = []
        for epoch in np.unique(epochs).tolist():
            order = epoch_order(seed, epoch, self.total_groups)
            groups.extend(order[positions[epochs == epoch]])
        draws = generator(seed, EXAMPLE, step).random((batch_size, 2))[part]
        puzzles = random_members(self.group_indices, np.array(groups), draws[:, 0])
        return self._batch(puzzles, members=0)

    def _batch_of_whole_puzzles(self, seed, epochs, positions):
        """Returns the batch of the examples at some positions of the stream of whole puzzles.

        The training data are an endless stream of examples that the batches cut. In each epoch every group
        comes once, in another random order, and brings all examples of one of its puzzles. The draws follow
        from (seed, epoch), so that a puzzle which a batch cuts goes on in the next one.

        Args:
            seed: the run's seed.
            epochs, positions: where the examples are in the stream [b], ascending.
        """
        columns = []
        for epoch in np.unique(epochs).tolist():
            in_epoch = positions[epochs == epoch]

            # the group and its example at each position
            order = epoch_order(seed, epoch, self.total_groups)
            ends = self.group_sizes[order].cumsum()
            turns = np.searchsorted(ends, in_epoch, side="right")
            groups = order[turns]
            sizes = self.group_sizes[groups]
            members = in_epoch - ends[turns] + sizes

            # one random puzzle of each group
            rng = generator(seed, EXAMPLE, epoch)
            puzzle_draws, fixed_draws = rng.random((2, self.total_groups))
            puzzles = random_members(self.group_indices, groups, puzzle_draws[groups])

            # every example but one of a puzzle moves
            translation_draws = rng.random((self.epoch_examples, 2))[in_epoch]
            fixed_members = (fixed_draws[groups] * sizes).astype(np.int64)
            translation_draws[members == fixed_members] = 0
            members = members % self.num_examples[puzzles]
            columns.append((puzzles, members, translation_draws))
        return self._batch(*map(np.concatenate, zip(*columns)))

    def test_batch(self, indices, size):
        """Returns the examples with these indices, as train_batch does, padded to size rows."""
        batch = self._batch(*self.locate(indices))

        # every batch has the same shape, so that one program evaluates all of them
        padding = {
            "inputs": self.pad_id,
            "labels": IGNORE_LABEL,
            "puzzle_identifiers": self.blank_identifier_id,
        }
        for name, value in padding.items():
            rows = np.full((size, *batch[name].shape[1:]), value, dtype=np.int32)
            rows[:len(indices)] = batch[name]
            batch[name] = rows
        return batch

    def locate(self, indices):
        """Returns the puzzles [n] of these examples, and which of its puzzle's examples each one is [n]."""
        indices = np.asarray(indices, dtype=np.int64)
        puzzles = np.searchsorted(self.puzzle_indices, indices, side="right") - 1
        return puzzles, indices - self.puzzle_indices[puzzles]

    def groups_of(self, puzzles):
        """Returns the groups [n] of puzzles: for ARC the task of each version."""
        return np.searchsorted(self.group_indices, puzzles, side="right") - 1

    def pairs(self, group):
        """Returns the pairs (input, output) of an ARC task: grids of colours."""
        first, end = self.task_indices[group:group + 2]
        return self.grids[first:end]

    def _batch(self, puzzles, members, translation_draws=0):
        """Returns the batch of some examples.

        Args:
            puzzles: numbers of puzzles [b].
            members: which of its puzzle's examples each one is [b].
            translation_draws: numbers in [0, 1), [b, 2]; 0: nothing moves.
        """
        rows = self.first_rows[puzzles] + members
        if self.has_versions:
            inputs, labels = self._draw_versions(rows, self.versions[puzzles], translation_draws)
        else:
            inputs = self.inputs[rows]
            labels = self.labels[rows]

        # the dataset's label that does not count becomes the loss's
        labels = labels.astype(np.int32)
        labels[labels == self.ignore_label_id] = IGNORE_LABEL
        return {
            "inputs": inputs.astype(np.int32),
            "labels": labels,
            "puzzle_identifiers": self.puzzle_identifiers[puzzles].astype(np.int32),
        }

    def _draw_versions(self, rows, versions, translation_draws):
        """Returns inputs and labels [b, seq_len]: canvases with the versions of the grids in rows [b]."""
        canvases = []
        translation_draws = np.broadcast_to(translation_draws, (len(rows), 2))
        for row, version, draws in zip(rows, versions, translation_draws):
            grids = [apply_version(grid, version) for grid in self.grids[row]]

            # both are moved alike, as far as there is room for them
            room = self.side + 1 - np.maximum(grids[0].shape, grids[1].shape)
            offset = (draws * room).astype(np.int64)
            canvases += [canvas(grid, self.side, *offset) for grid in grids]
        pairs = np.reshape(canvases, (-1, 2, self.seq_len))
        return pairs[:, 0], pairs[:, 1]

    @functools.cached_property
    def task_names(self):
        """The name of each group's task, for datasets with versions."""
        _, *names = read_json(f"{self.path}/identifiers.json")  # the tasks in train
        # the versions of these tasks have the identifiers 1, 2, ...
        first_identifiers = np.load(f"{self.path}/train/all__group_indices.npy") + 1
        identifiers = self.puzzle_identifiers[self.group_indices[:-1]]
        return [names[i] for i in np.searchsorted(first_identifiers, identifiers)]

    def subset(self, n, num_versions=0):
        """Returns the sorted indices of n random puzzles, the same in every run; all if n is 0 or too large.

        Test sets are ordered by source: their first n examples would not represent the whole set. For ARC, n
        counts tasks, and all their test inputs come in the first num_versions of their versions, 0: in all.
        """
        rng = generator(0, SUBSET)
        if not self.has_versions:
            return np.sort(rng.permutation(len(self))[:n or None])
        groups = np.sort(rng.permutation(self.total_groups)[:n or None])
        examples = []
        for group in groups:
            puzzles = range(*self.group_indices[group:group + 2])
            for puzzle in puzzles[:num_versions or None]:
                examples += range(*self.puzzle_indices[puzzle:puzzle + 2])
        return np.array(examples)

    def made_by(self):
        """Returns the command that made the dataset, as "prepare_sudoku.py --size=6 ..."; "" if not known."""
        command = dict(self.manifest.get("command", {}))
        words = [command.pop("script", "")]
        for name, value in command.items():
            words.append(f"--{name}={shlex.quote(str(value))}")
        return " ".join(words)

    @functools.cached_property
    def sha256(self):
        """Hex digest that identifies the content of both splits."""
        text = json.dumps(self.hashes(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def hashes(self):
        """Returns {relative file: SHA-256} of both splits, from the manifest or else from the files."""
        return self.manifest.get("sha256") or hashes_of(self.path)

    def check_file(self, name):
        """Raises UserError if the file is missing or does not match the manifest."""
        if self.manifest:
            path = f"{self.path}/{name}"
            if not os.path.isfile(path) or self.manifest["sha256"].get(name) != file_hash(path):
                raise UserError(f"{path} is missing or does not match manifest.json: {self.hint}")


def make_dataset(settings):
    """Runs data_prepare if data_path is missing: one process of a host, while the others wait."""
    try:
        command = shlex.split(settings.data_prepare)
    except ValueError as e:
        raise UserError(f"data_prepare: {e}: {settings.data_prepare}") from None
    if not command or os.path.exists(settings.data_path):
        return
    # the first process of the host makes it, and the others find it made
    with locked(os.path.normpath(settings.data_path) + ".made"):
        if os.path.exists(settings.data_path):
            return
        print(f"{settings.data_path} is missing; making it: python", *command, flush=True)
        process = subprocess.Popen([sys.executable, *command])
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.terminate()  # Ctrl-C reaches it, but SIGTERM does not
            process.wait()
            raise
        if not os.path.exists(settings.data_path):
            error = UserError if code in (0, 2) else TransientError
            raise error(f"data_prepare did not make data_path={settings.data_path}: {settings.data_prepare}")


# ---------------------------------------------------------------------------------------------------------
# Random numbers

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


def generator(seed, *key):
    """Returns a random generator for a key: a stream constant and what it depends on."""
    sequence = np.random.SeedSequence([seed, *key])
    return np.random.Generator(np.random.Philox(sequence))


@functools.lru_cache(maxsize=4)  # a batch spans one or two epochs, or more if they are small
def epoch_order(seed, epoch, total_groups):
    return generator(seed, ORDER, epoch).permutation(total_groups)


def rank_slice(batch_size, rank, world):
    size = batch_size // world
    return slice(rank * size, (rank + 1) * size)


def random_members(indices, owners, draws):
    """Returns a member, in indices[i]:indices[i + 1], of each owner i [b]; draws [b]: uniform in [0, 1)."""
    start = indices[owners]
    count = indices[owners + 1] - start
    return start + (draws * count).astype(np.int64)


# ---------------------------------------------------------------------------------------------------------
# Files

def read_json(path, *keys):
    """Returns the object in a JSON file; raises UserError if it is unreadable or lacks one of the keys."""
    try:
        with open(path, encoding="utf-8") as f:
            value = json.load(f)
    except (OSError, ValueError) as e:
        raise UserError(f"{path} cannot be read as JSON: build the dataset again ({e})") from None
    missing = [key for key in keys if key not in value]
    if missing:
        raise UserError(f"{path} lacks {', '.join(missing)}: build the dataset again")
    return value


def hashes_of(path):
    """Returns {relative file: SHA-256} of the files of a dataset that exist."""
    # a dataset has the arrays of ARC or those of other puzzles, not both
    hashes = {}
    for name in FILES:
        file = f"{path}/{name}"
        if os.path.exists(file):
            hashes[name] = file_hash(file)
    return hashes


def file_hash(path):
    # a megabyte at a time: a file may be larger than the memory
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def locked(path):
    """Holds path + ".lock", which one process at a time can; the others wait."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    name = path + ".lock"

    # the file that is locked must be the one that has the name: another owner may just have removed it
    held = False
    while not held:
        f = open(name, "ab")  # NFS only locks files that are open for writing
        fcntl.flock(f, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            held = os.path.samefile(f.fileno(), name)
    try:
        yield
    finally:
        with suppress(OSError):
            os.remove(name)
        f.close()


@contextmanager
def replacing(path):
    """Writes path atomically: yields a binary file that becomes path once it is on the disk."""
    # os.replace is atomic, but only what is on the disk survives a power failure
    try:
        with open(path + ".tmp", "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(path + ".tmp", path)
    # a writer that failed or was interrupted leaves nothing
    finally:
        if os.path.exists(path + ".tmp"):
            os.remove(path + ".tmp")


def read_lines(path):
    """Returns the dicts with a step in a metrics.jsonl, without damaged lines; [] if it is missing."""
    lines = []
    with suppress(FileNotFoundError), open(path, "rb") as f:
        for line in f:
            with suppress(ValueError):
                values = json.loads(line)
                if isinstance(values, dict) and "step" in values:
                    lines.append(values)
    return lines


def read_metrics(path):
    """Returns the lines of a metrics.jsonl that have metrics; see read_lines."""
    return [line for line in read_lines(path) if "run" not in line]


def read_facts(path):
    """Returns what the first line of a metrics.jsonl says about its run; {} if it says nothing."""
    for line in read_lines(path):
        if "run" in line:
            return line["run"]
    return {}


def duration(seconds):
    """Returns seconds as 1:02:03."""
    return str(timedelta(seconds=round(seconds)))


class Progress:
    """Prints how much is done and the time left to stderr every 10 seconds.

    Args:
        label: what the lines begin with.
        total: how much there is to do; 0 if that is not known.
        unit: what is counted.
        scale: how much one unit is, as 1e6 for bytes and the unit MB.
    """

    def __init__(self, label, total, unit="", scale=1):
        self.label = label
        self.total = total
        self.unit = unit
        self.scale = scale
        self.done = 0
        self.start = time.monotonic()
        self.printed = self.start

    def add(self, n):
        self.done += n
        now = time.monotonic()
        if now < self.printed + 10:
            return
        self.printed = now

        # done of total unit, time left
        text = f"{self.label}: {self.done / self.scale:,.0f}"
        if self.total:
            seconds = (now - self.start) * (self.total / max(1, self.done) - 1)
            text += f" of {self.total / self.scale:,.0f} {self.unit}".rstrip()
            text += f", {seconds:.0f} s left"
        print(text, file=sys.stderr, flush=True)
