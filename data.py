"""Datasets, on disk or made on the fly -> batches.

A dataset is a folder in the layout of the official code, plus a manifest:

    data/NAME/manifest.json           the command that made it, counts and the SHA-256 of every file
    data/NAME/identifiers.json        names of the puzzle identifiers
    data/NAME/{train,test}/dataset.json
    data/NAME/{train,test}/all__{inputs,labels,puzzle_identifiers,puzzle_indices,group_indices}.npy

inputs and labels are tokens [N, seq_len], one example a row. Puzzle i has the row puzzle_identifiers[i] of
the model's table, and owns the examples puzzle_indices[i]:puzzle_indices[i + 1]; group g owns the puzzles
group_indices[g]:group_indices[g + 1]: a Sudoku and its augmented copies are one group.

A dataset of prepare_arc.py stores each example of a task once. all__task_indices.npy takes the place of
all__puzzle_indices.npy: all puzzles of group g, the versions of a task, share the stored examples
task_indices[g]:task_indices[g + 1]. all__versions.npy [puzzles, 11] says how each version turns and recolours
them, and batches make the copies.
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

import numpy as np

from puzzles import IGNORE_LABEL, task_of
from puzzles.arc import apply_version, canvas, crop
from runtime.bucket import Bucket
from runtime.errors import TransientError, UserError
from runtime.files import file_hash, hashes_of, locked, read_json

# the arrays of all datasets, of ARC's, and of the others
FIELDS = ("inputs", "labels", "puzzle_identifiers", "group_indices")
ARC_INDICES = ("task_indices", "versions")
INDICES = ("puzzle_indices",)
ORDER, EXAMPLE, HALT, SUBSET = range(4)  # independent random streams of one seed


# ---------------------------------------------------------------------------------------------------------
# Datasets

class Dataset:
    """One split of a dataset, checked when it is loaded.

    inputs and labels are memory-mapped, [N, seq_len]. len() is the number of examples: N, or more where
    batches make versions. task is what puzzles/__init__.py calls a task. Of dataset.json come seq_len,
    vocab_size (tokens, padding included), num_puzzle_identifiers and ignore_label_id (the label of cells that
    do not count); other keys are ignored. total_groups and mean_puzzle_examples (examples of a puzzle, on
    average) are counted. Datasets of the official code, without a manifest, load too.

    Args:
        path: the folder of the dataset.
        split: "train" or "test".

    Raises UserError, which names a file or folder that is missing, damaged or inconsistent.
    """

    versions = None  # only ARC has them

    def __init__(self, path, split):
        self.path = path
        folder = f"{path}/{split}"
        if not os.path.isdir(folder):
            raise UserError(f"{folder}: no such dataset; build it with prepare_sudoku.py, or another script")

        # the official builder writes no manifest
        self.manifest = {}
        if os.path.exists(f"{path}/manifest.json"):
            self.manifest = read_json(f"{path}/manifest.json")
        for name, kind in dict(kind=str, command=dict, sha256=dict).items():
            if not isinstance(self.manifest.setdefault(name, kind()), kind):
                raise UserError(f"{path}/manifest.json: {name} is {self.manifest[name]!r}")
        self.hint = f"build it again with {self.made_by() or 'the command that made it'}"
        for name, digest in self.manifest["sha256"].items():
            file = f"{path}/{name}"
            is_own = name.startswith(f"{split}/") or "/" not in name
            if is_own and not (os.path.isfile(file) and file_hash(file) == digest):
                raise UserError(f"{file} is missing or does not match manifest.json: {self.hint}")

        # what dataset.json says, and the kind of puzzle
        facts = read_json(f"{folder}/dataset.json")
        self.seq_len = self._number(facts, "seq_len")
        self.vocab_size = self._number(facts, "vocab_size")
        self.ignore_label_id = self._number(facts, "ignore_label_id", 0)
        self.task = task_of(self.manifest, self.seq_len, self.vocab_size)
        self.side = self.task["grid"][0]

        # the examples stay on the disk; the indices, which are small, are read
        is_arc = os.path.exists(f"{folder}/all__versions.npy")
        for field in FIELDS + (ARC_INDICES if is_arc else INDICES):
            file = f"{folder}/all__{field}.npy"
            mmap_mode = "r" if field in ("inputs", "labels") else None
            try:
                array = np.load(file, mmap_mode=mmap_mode)
            except (OSError, ValueError, EOFError) as e:
                raise UserError(f"{file} cannot be read (truncated?): {self.hint} ({e})") from None
            if array.dtype.kind not in "biu" and (array % 1 != 0).any():
                raise UserError(f"{file} has numbers that are not whole: {self.hint}")
            setattr(self, field, np.asarray(array))  # a plain view of the file indexes faster than np.memmap
        highest = int(self.puzzle_identifiers.max(initial=0))
        self.num_puzzle_identifiers = self._number(facts, "num_puzzle_identifiers", highest + 1)
        self.total_groups = len(self.group_indices) - 1

        # a puzzle has rows of its own; all versions of an ARC task have the rows of the task
        puzzles = np.arange(len(self.puzzle_identifiers))
        if is_arc:
            self._find_rows(folder, self.task_indices, self.groups_of(puzzles))
        else:
            self._find_rows(folder, self.puzzle_indices, puzzles)
        self.mean_puzzle_examples = len(self) / len(puzzles)

    def _number(self, facts, name, default=None):
        """Returns a whole number of dataset.json; null is IGNORE_LABEL, as in the official code's files."""
        value = facts.get(name, default)
        if name == "ignore_label_id" and value is None:
            return IGNORE_LABEL
        if type(value) not in (int, float) or value % 1:
            raise UserError(f"{self.path}: dataset.json must have {name}, a whole number, not {value!r}: "
                            f"{self.hint}")
        return int(value)

    def _find_rows(self, folder, row_indices, owners):
        """Checks the arrays; finds the rows of each puzzle, and how many examples a group brings to an epoch.

        Args:
            folder: of the split.
            row_indices: owner i has the rows row_indices[i]:row_indices[i + 1].
            owners: the owner of each puzzle's rows [puzzles].

        Raises UserError, which names the arrays whose shapes or numbers do not fit dataset.json.
        """
        shape = (row_indices[-1], self.seq_len)
        lowest_label = min(0, self.ignore_label_id)
        checks = {
            "inputs": self.inputs.shape == shape,
            "labels": self.labels.shape == shape,
            "vocab_size": max(self.inputs.max(initial=0), self.labels.max(initial=0)) < self.vocab_size,
            "tokens from 0": self.inputs.min(initial=0) >= 0 and self.labels.min(initial=0) >= lowest_label,
            "num_puzzle_identifiers": self.puzzle_identifiers.max() < self.num_puzzle_identifiers,
            "indices of rows": len(row_indices) == owners[-1] + 2,
            "number of puzzles": self.group_indices[-1] == len(owners),
        }
        wrong = [name for name, fits in checks.items() if not fits]
        if wrong:
            raise UserError(f"{folder}: dataset.json does not fit {', '.join(wrong)}: {self.hint}")

        self.first_rows = row_indices[owners]
        self.num_examples = np.diff(row_indices)[owners]
        self.puzzle_indices = np.append(0, self.num_examples.cumsum())
        # if the puzzles of a group have different numbers of examples, the smaller ones repeat theirs
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
        columns = []
        for epoch in np.unique(epochs).tolist():
            plan = epoch_plan(self, seed, epoch)
            columns.append([column[positions[epochs == epoch]] for column in plan])
        groups, puzzle_draws, members, translation_draws = map(np.concatenate, zip(*columns))

        # Where each group brings one example, the step draws its puzzles, and not the epoch: all published
        # results on Sudoku and mazes were trained on these draws.
        if self.versions is None and self.epoch_examples == self.total_groups:
            puzzle_draws = generator(seed, EXAMPLE, step).random((batch_size, 2))[part, 0]
        puzzles = random_members(self.group_indices, groups, puzzle_draws)
        # a puzzle with fewer examples than others of its group repeats them
        return self._batch(puzzles, members % self.num_examples[puzzles], translation_draws)

    def test_batch(self, indices):
        """Returns the batch of the examples with these indices; see train_batch."""
        return self._batch(*self.locate(indices))

    def locate(self, indices):
        """Returns the puzzles [n] of these examples, and which of its puzzle's examples each one is [n]."""
        indices = np.asarray(indices, dtype=np.int64)
        puzzles = np.searchsorted(self.puzzle_indices, indices, side="right") - 1
        return puzzles, indices - self.puzzle_indices[puzzles]

    def groups_of(self, puzzles):
        """Returns the groups [n] of puzzles: for ARC the task of each version."""
        return np.searchsorted(self.group_indices, puzzles, side="right") - 1

    @functools.cached_property
    def grids(self):
        """The pairs (input, output) of ARC's tasks, grids of colours, a pair for each stored row."""
        return [[crop(tokens, self.side) for tokens in pair] for pair in zip(self.inputs, self.labels)]

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
        inputs = self.inputs[rows]
        labels = self.labels[rows]
        if self.versions is not None:
            inputs, labels = self._draw_versions(rows, self.versions[puzzles], translation_draws)

        # the dataset's label of cells that do not count becomes the loss's
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
            canvases.append([canvas(grid, self.side, *offset) for grid in grids])
        return np.reshape(canvases, (-1, 2, self.seq_len)).swapaxes(0, 1)

    @functools.cached_property
    def identifier_names(self):
        """What identifiers.json says that the puzzle identifiers stand for, a list; [] without that file."""
        try:
            with open(f"{self.path}/identifiers.json", encoding="utf-8") as f:
                return list(json.load(f))
        except FileNotFoundError:
            return []
        except (OSError, TypeError, ValueError) as e:
            raise UserError(f"{self.path}/identifiers.json cannot be read as a list ({e})") from None

    @property
    def identifiers(self):
        """Hex digest that identifies what the puzzle identifiers stand for; "" if that is not known."""
        names = self.identifier_names
        return hashlib.sha256(json.dumps(names).encode()).hexdigest() if names else ""

    @functools.cached_property
    def task_names(self):
        """The name of each group's task, for datasets with versions."""
        _, *names = self.identifier_names  # the tasks in train
        # the versions of these tasks have the identifiers 1, 2, ...
        first_identifiers = np.load(f"{self.path}/train/all__group_indices.npy") + 1
        identifiers = self.puzzle_identifiers[self.group_indices[:-1]]
        return [names[i] for i in np.searchsorted(first_identifiers, identifiers)]

    def subset(self, n, num_versions=0):
        """Returns the sorted indices of n random puzzles, the same in every run; all if n is 0 or too large.

        Test sets are ordered by source: their first n examples would not represent the whole set. A task with
        several test inputs counts as one, and brings them all. For ARC they come in the first num_versions of
        the task's versions, 0: in all.
        """
        groups = generator(0, SUBSET).permutation(self.total_groups)
        groups = np.sort(groups[:n or None])
        starts = self.group_indices[groups]
        ends = self.group_indices[groups + 1]
        if num_versions:
            ends = np.minimum(ends, starts + num_versions)
        puzzles = ranges(starts, ends)
        return ranges(self.puzzle_indices[puzzles], self.puzzle_indices[puzzles + 1])

    def made_by(self):
        """Returns the command that made the dataset, as "prepare_sudoku.py --size=6 ..."; "" if not known."""
        command = dict(self.manifest.get("command", {}))
        script = command.pop("script", "")
        flags = [f"--{name}={shlex.quote(str(value))}" for name, value in command.items()]
        return " ".join([script, *flags])

    @functools.cached_property
    def sha256(self):
        """Hex digest that identifies the content of both splits."""
        hashes = self.manifest["sha256"] or hashes_of(self.path)
        text = json.dumps(hashes, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


class Generated:
    """A dataset whose puzzles are made when they are needed, for forks: `data.Dataset = Mine` uses it.

    A subclass has a task, sizes where they differ from these, and a method

        draw(self, rng, n, split) -> questions, answers: tokens [n, cells]

    which makes n puzzles with a numpy.random.Generator. For the split "test" it must not make puzzles that it
    makes for "train". All replicas draw the whole batch of a step, from (seed, step), and take their slices.
    """

    task = {}  # see puzzles/__init__.py; its grid and symbols are the model's sizes
    total_groups = 1000  # puzzles of an epoch
    test_size = 1000  # test puzzles, the same in every run
    num_puzzle_identifiers = 1
    mean_puzzle_examples = 1
    identifiers = ""  # see Dataset

    def __init__(self, path, split):
        self.path = path
        self.seq_len = math.prod(self.task["grid"])
        self.vocab_size = len(self.task["symbols"])
        # draw the test puzzles, or as many others: their hash identifies how puzzles are drawn
        self.puzzles = self._batch(generator(0, SUBSET), self.test_size, split)
        content = self.puzzles["inputs"].tobytes() + self.puzzles["labels"].tobytes()
        self.sha256 = hashlib.sha256(content).hexdigest()

    def __len__(self):
        return self.test_size

    def train_batch(self, seed, step, batch_size, rank=0, world=1):
        """See Dataset.train_batch."""
        batch = self._batch(generator(seed, EXAMPLE, step), batch_size, "train")
        part = rank_slice(batch_size, rank, world)
        return {name: array[part] for name, array in batch.items()}

    def test_batch(self, indices):
        """See Dataset.test_batch."""
        return {name: array[indices] for name, array in self.puzzles.items()}

    def subset(self, n, num_versions=0):
        """Returns the indices of the first n test puzzles; num_versions is for ARC."""
        return np.arange(self.test_size)[:n or None]

    def made_by(self):
        return type(self).__name__

    def _batch(self, rng, n, split):
        questions, answers = self.draw(rng, n, split)
        return {
            "inputs": questions.astype(np.int32),
            "labels": answers.astype(np.int32),
            "puzzle_identifiers": np.zeros(n, dtype=np.int32),
        }


def local_dataset(path):
    """Returns the local folder of a dataset: for gs://bucket/.../NAME data/NAME, downloaded if it is missing.

    Any other path is returned as it is. One process of a host downloads, the others wait. Raises UserError
    and TransientError.
    """
    if not path.startswith("gs://"):
        return path
    bucket = Bucket(path)
    folder = f"data/{os.path.basename(bucket.url)}"
    with locked(folder):
        manifest = bucket.read("manifest.json")
        if not manifest:
            raise UserError(f"{path} has no manifest.json: upload the dataset with "
                            f"`gcloud storage rsync -r data/NAME {path}`")
        hashes = json.loads(manifest)["sha256"]

        # one that is here must be the same one
        if os.path.lexists(folder):
            if read_json(f"{folder}/manifest.json")["sha256"] != hashes:
                raise UserError(f"{folder} holds another dataset than {path}: move it away, or name it")
            return folder

        # the folder gets its name once the dataset is whole; loading it checks the hashes
        print(f"downloading {path}", flush=True)
        part = folder + ".part"
        for name in ("manifest.json", *hashes):
            bucket.download(name, f"{part}/{name}")
        for split in ("train", "test"):
            Dataset(part, split)
        os.rename(part, folder)
        return folder


def make_dataset(settings, should_stop=lambda: False):
    """Runs data_prepare if data_path is missing: one process of a host, while the others wait.

    Raises SystemExit once should_stop() returns true.
    """
    try:
        command = shlex.split(settings.data_prepare)
    except ValueError as e:
        raise UserError(f"data_prepare: {e}: {settings.data_prepare}") from None
    if not command or os.path.exists(settings.data_path):
        return
    # the first process of the host makes the dataset, and the others find it made
    with locked(os.path.normpath(settings.data_path) + ".made"):
        if os.path.exists(settings.data_path):
            return
        print(f"{settings.data_path} is missing; making it: python", *command, flush=True)
        process = subprocess.Popen([sys.executable, *command])
        try:
            while process.poll() is None and not should_stop():
                time.sleep(0.1)
        finally:
            process.terminate()  # a stop ends it too: Ctrl-C reaches both processes, SIGTERM only this one
        code = process.wait()
        if should_stop():
            raise SystemExit(3)
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


@functools.lru_cache(maxsize=2)  # a batch spans one or two epochs, or more if they are small
def epoch_plan(dataset, seed, epoch):
    """Returns an epoch's examples in order: groups, draws of their puzzles, members, translation draws.

    The training data are an endless stream of examples, which the batches cut. In each epoch every group
    comes once, in another random order, and brings all examples of one of its puzzles. All follows from
    (seed, epoch), so that a puzzle which a batch cuts goes on in the next one.

    Arrays of n examples: their groups, the number in [0, 1) that draws a puzzle of the group, which of the
    puzzle's examples it is, and two numbers in [0, 1) that move it.
    """
    # list the groups in random order, and number the examples of each
    order = generator(seed, ORDER, epoch).permutation(dataset.total_groups)
    sizes = dataset.group_sizes[order]
    groups = np.repeat(order, sizes)
    members = ranges(np.zeros_like(sizes), sizes)

    # draw one puzzle of each group; all of its examples but one move
    rng = generator(seed, EXAMPLE, epoch)
    puzzle_draws, fixed_draws = rng.random((2, dataset.total_groups))
    translation_draws = rng.random((len(groups), 2))
    fixed_members = (fixed_draws[groups] * dataset.group_sizes[groups]).astype(np.int64)
    translation_draws[members == fixed_members] = 0
    return groups, puzzle_draws[groups], members, translation_draws


def rank_slice(batch_size, rank, world):
    size = batch_size // world
    return slice(rank * size, (rank + 1) * size)


def ranges(starts, ends):
    """Returns the numbers of all ranges start:end, one range after the other."""
    counts = ends - starts
    offsets = starts - counts.cumsum() + counts
    return np.repeat(offsets, counts) + np.arange(counts.sum())


def random_members(indices, owners, draws):
    """Returns a member, in indices[i]:indices[i + 1], of each owner i [b]; draws [b]: uniform in [0, 1)."""
    start = indices[owners]
    count = indices[owners + 1] - start
    return start + (draws * count).astype(np.int64)
