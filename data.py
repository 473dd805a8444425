"""Data sets on disk -> batches; then the writer, CSV files and downloads of the prepare scripts; buckets.

A data set is a folder in the layout of the official code, plus a manifest:

    data/NAME/manifest.json           source, seed, counts and the SHA-256 of every file
    data/NAME/identifiers.json        names of the puzzle identifiers
    data/NAME/{train,test}/dataset.json
    data/NAME/{train,test}/all__{inputs,labels,puzzle_identifiers,puzzle_indices,group_indices}.npy

inputs and labels are [N, seq_len], one example a row. Puzzle i owns the examples
puzzle_indices[i]:puzzle_indices[i + 1], and group g the puzzles group_indices[g]:group_indices[g + 1]: a
Sudoku and its augmented copies are one group.

Batches are a pure function of (seed, step). A resumed run and a run on another number of replicas see the
same data.

    python data.py upload data/NAME gs://bucket/data/NAME
    python data.py download gs://bucket/data/NAME [data/NAME]
"""
import base64
import copy
import csv
import errno
import functools
import gzip
import hashlib
import io
import itertools
import json
import math
import multiprocessing
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import zlib
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import requests

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None

from configurator import TransientError, UserError, command

FIELDS = ("inputs", "labels", "puzzle_identifiers", "puzzle_indices", "group_indices")
METADATA = {  # of dataset.json
    "pad_id": int,
    "ignore_label_id": (int, type(None)),
    "blank_identifier_id": int,
    "vocab_size": int,
    "seq_len": int,
    "num_puzzle_identifiers": int,
    "total_groups": int,
    "mean_puzzle_examples": (int, float),
    "total_puzzles": int,
}
IGNORED = -100  # the label of cells that no loss and no metric counts
WALL, OPEN, START, GOAL, PATH = range(1, 6)  # tokens of a maze, "# SGo"
ORDER, EXAMPLE, HALT, SUBSET, NOISE = range(5)  # independent random streams of one seed


class Dataset:
    """One split of a data set, checked when it is loaded.

    path: the data set's folder; split: "train" or "test". inputs and labels are memory-mapped, [N, seq_len];
    len() is N. The keys of dataset.json are attributes. Data sets of the official code load too: no manifest,
    any integer dtype. Raises UserError, which names the file, if anything is missing, damaged or
    inconsistent.
    """

    def __init__(self, path, split):
        self.path = path
        self.split = split
        folder = os.path.join(path, split)
        if not os.path.isdir(folder):
            raise UserError(f"{folder}: no such data set; build it with prepare_sudoku.py or prepare_maze.py")
        self._read_manifest(os.path.join(path, "manifest.json"))
        for name in ["dataset.json"] + [f"all__{field}.npy" for field in FIELDS]:
            self.check_file(f"{split}/{name}")
        self._read_metadata(os.path.join(folder, "dataset.json"))
        self.inputs = self._load("inputs", 2, "r")
        self.labels = self._load("labels", 2, "r")
        self.puzzle_identifiers = self._load("puzzle_identifiers", 1)
        self.puzzle_indices = self._load("puzzle_indices", 1)
        self.group_indices = self._load("group_indices", 1)
        self._check_values()
        self._check_indices()

    def __len__(self):
        return len(self.inputs)

    def train_batch(self, seed, step, batch_size, rank=0, world=1):
        """The rank's slice of a step's global batch: a pure function of (seed, step), whatever the world.

        Every group comes once an epoch, in a new random order each epoch; a batch may span epochs. The puzzle
        within the group and the example within the puzzle are drawn uniformly. Returns int32 arrays of b =
        batch_size // world rows: {"inputs": [b, seq_len], "labels": [b, seq_len] (-100: not counted),
        "puzzle_identifiers": [b]}. Thread-safe.
        """
        rows = rank_slice(batch_size, rank, world)
        positions = np.arange(step * batch_size + rows.start, step * batch_size + rows.stop)
        epochs, positions = np.divmod(positions, self.total_groups)
        groups = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            order = epoch_order(seed, epoch, self.total_groups)
            groups[epochs == epoch] = order[positions[epochs == epoch]]
        draws = generator(seed, EXAMPLE, step).random((batch_size, 2))[rows]
        starts, stops = self.group_indices[groups], self.group_indices[groups + 1]
        puzzles = uniform_between(starts, stops, draws[:, 0])
        starts, stops = self.puzzle_indices[puzzles], self.puzzle_indices[puzzles + 1]
        examples = uniform_between(starts, stops, draws[:, 1])
        return self._batch(examples, puzzles)

    def test_batch(self, indices, size):
        """The examples with these indices, as train_batch returns them, padded to size rows (not counted)."""
        indices = np.asarray(indices, dtype=np.int64)
        puzzles = np.searchsorted(self.puzzle_indices, indices, side="right") - 1
        padding = {"inputs": self.pad_id, "labels": IGNORED, "puzzle_identifiers": self.blank_identifier_id}
        batch = {}
        for key, rows in self._batch(indices, puzzles).items():
            batch[key] = np.full((size,) + rows.shape[1:], padding[key], dtype=np.int32)
            batch[key][:len(rows)] = rows
        return batch

    def noise_keys(self, seed, indices, attempt, size):
        """Keys of model.normal_noise for these examples, int32 [size]; 0, no noise, for the first attempt."""
        keys = np.zeros(size, dtype=np.int32)
        if attempt:
            draws = generator(seed, NOISE, attempt).integers(1, 2 ** 31, len(self), dtype=np.int32)
            keys[:len(indices)] = draws[indices]
        return keys

    def _batch(self, examples, puzzles):
        labels = self.labels[examples].astype(np.int32)
        if self.ignore_label_id is not None:
            labels[labels == self.ignore_label_id] = IGNORED
        return {
            "inputs": self.inputs[examples].astype(np.int32),
            "labels": labels,
            "puzzle_identifiers": self.puzzle_identifiers[puzzles].astype(np.int32),
        }

    def subset(self, n):
        """Sorted indices [n] of n random examples, the same in every run; all of them if n is 0 or too large.

        Test sets are ordered by source: their first n examples would not represent the whole set.
        """
        if n == 0 or n >= len(self):
            return np.arange(len(self))
        return np.sort(generator(0, SUBSET).permutation(len(self))[:n])

    @functools.cached_property
    def sha256(self):
        """Hex digest that identifies the content of both splits."""
        return hashlib.sha256(json.dumps(self.hashes(), sort_keys=True).encode()).hexdigest()

    def hashes(self):
        """{relative file: SHA-256} of both splits, from the manifest if there is one, else from the files."""
        if self.manifest.get("sha256"):
            return self.manifest["sha256"]
        return {name: file_sha256(os.path.join(self.path, name)) for name in dataset_files(self.path)}

    def check_file(self, name):
        """Raises UserError if the file is missing or does not match the manifest."""
        path = os.path.join(self.path, name)
        if not os.path.isfile(path):
            raise UserError(f"{path} is missing: {self.hint}")
        if self.manifest and self.manifest["sha256"].get(name) != file_sha256(path):
            raise UserError(f"{path} does not match manifest.json (changed or truncated): {self.hint}")

    def _read_manifest(self, path):
        self.manifest = read_json(path, "sha256") if os.path.exists(path) else {}
        if not isinstance(self.manifest.get("sha256", {}), dict):
            raise UserError(f"{path}: sha256 must be a table of the files: build the data set again")
        kind = self.manifest.get("kind")
        self.hint = f"build it again with prepare_{kind}.py" if kind else "build it again"

    def _read_metadata(self, path):
        metadata = read_json(path, "sets", *METADATA)
        if metadata["sets"] != ["all"]:
            raise UserError(f'{path}: sets must be ["all"], not {metadata["sets"]!r}: use one set only')
        for key, types in METADATA.items():
            if not isinstance(metadata[key], types):
                raise UserError(f"{path}: {key} must be a number, not {metadata[key]!r}: {self.hint}")
            setattr(self, key, metadata[key])

    def _load(self, field, dims, mmap_mode=None):
        path = self._array_path(field)
        try:
            array = np.load(path, mmap_mode=mmap_mode)
        except (OSError, ValueError, EOFError) as e:
            raise UserError(f"{path} cannot be read (truncated?): {self.hint} ({e})") from None
        integers = array.dtype.kind in "iu"
        if not integers or array.ndim != dims or (dims == 2 and array.shape[1] != self.seq_len):
            expected = f"[N, {self.seq_len}]" if dims == 2 else "[N]"
            actual = f"{array.dtype} of {list(array.shape)}"
            raise UserError(f"{path} must hold integers of shape {expected}, not {actual}: {self.hint}")
        return np.asarray(array)  # still memory-mapped: a plain view indexes faster than np.memmap

    def _check_values(self):
        if len(self.labels) != len(self):
            raise self._error("labels", f"has {len(self.labels)} rows, but all__inputs.npy has {len(self)}")
        limits = {
            "inputs": self.vocab_size,
            "labels": self.vocab_size,
            "puzzle_identifiers": self.num_puzzle_identifiers,
        }
        for field, limit in limits.items():
            low = getattr(self, field).min(initial=0)
            high = getattr(self, field).max(initial=0)
            if high >= limit:
                raise self._error(field, f"holds {high}, beyond the {limit - 1} that dataset.json allows")
            if low < 0 and (field, low) != ("labels", self.ignore_label_id):
                raise self._error(field, f"holds {low}")

    def _check_indices(self):
        num_puzzles = len(self.puzzle_identifiers)
        for field, entries, end, unit in (
            ("puzzle_indices", num_puzzles + 1, len(self), "examples"),
            ("group_indices", self.total_groups + 1, num_puzzles, "puzzles"),
        ):
            indices = getattr(self, field)
            if len(indices) < 2 or indices[0] != 0 or indices[-1] != end or (np.diff(indices) <= 0).any():
                raise self._error(field, f"must rise from 0 to the number of {unit}, {end}")
            if len(indices) != entries:
                raise self._error(field, f"must have {entries} entries, not {len(indices)}")

    def _array_path(self, field):
        return os.path.join(self.path, self.split, f"all__{field}.npy")

    def _error(self, field, message):
        return UserError(f"{self._array_path(field)} {message}: {self.hint}")


def halting_draws(seed, step, batch_size, halt_max_steps, halt_exploration_prob, rank=0, world=1):
    """Minimum halting steps of the sequences of a step, int32 [batch_size // world], from (seed, step) alone.

    0 with probability 1 - halt_exploration_prob, else uniform in 2..halt_max_steps.
    """
    rng = generator(seed, HALT, step)
    explores = rng.random(batch_size) < halt_exploration_prob
    steps = rng.integers(2, max(halt_max_steps, 2) + 1, batch_size, dtype=np.int32)
    draws = np.where(explores & (halt_max_steps >= 2), steps, 0).astype(np.int32)
    return draws[rank_slice(batch_size, rank, world)]


def generator(seed, *key):
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, *key])))


@functools.lru_cache(maxsize=4)  # a batch spans one or two epochs, or more if they are small
def epoch_order(seed, epoch, total_groups):
    return generator(seed, ORDER, epoch).permutation(total_groups)


def rank_slice(batch_size, rank, world):
    if batch_size % world:
        raise UserError(f"a batch of {batch_size} cannot be divided among {world} replicas: "
                        f"choose a multiple of {world}")
    size = batch_size // world
    return slice(rank * size, (rank + 1) * size)


def uniform_between(start, stop, draws):
    """Uniform integers in start..stop - 1 from draws uniform in [0, 1). All arrays are [b]."""
    return start + (draws * (stop - start)).astype(np.int64)


def path_metrics(inputs, labels, preds, grid):
    """Which answers to mazes are a path from S to G, and which a shortest one: two bool arrays [n].

    inputs, labels (a shortest path each), preds: tokens [n, cells]; grid: (rows, columns). In a path, S and G
    are where the question has them, every "o" is on a cell that is open in the question, and the "o" form one
    line from S to G: each touches two other cells of the line, S and G touch one. Stray cells, gaps, forks
    and rings break a path.
    """
    n = len(inputs)
    rows, columns = grid
    start = inputs == START
    goal = inputs == GOAL
    path = preds == PATH
    line = np.pad((path | start | goal).reshape(n, rows, columns), ((0, 0), (1, 1), (1, 1)))
    touching = sum(np.roll(line, shift, axis).astype(np.uint8) for shift in (-1, 1) for axis in (1, 2))
    touching = touching[:, 1:-1, 1:-1].reshape(inputs.shape)
    cell_fits = ((preds == START) == start) & ((preds == GOAL) == goal) & (~path | (inputs == OPEN))
    cell_fits &= np.where(path, touching == 2, (touching == 1) | ~(start | goal))
    fits = cell_fits.all(axis=1) & (start.sum(axis=1) == 1) & (goal.sum(axis=1) == 1)
    valid = np.zeros(n, dtype=bool)
    valid[fits] = ~has_rings(line[fits], start[fits].argmax(axis=1), columns)
    return valid, valid & (path.sum(axis=1) == (labels == PATH).sum(axis=1))


def has_rings(line, start, columns):
    """Which grids have rings beside the line from start, bool [n]: it walks along the line and erases it.

    line: bool [n, rows + 2, columns + 2], a grid with a border; start: cells [n] in the grid without its
    border.
    """
    width = columns + 2
    steps = np.array([-width, -1, 1, width])
    n = np.arange(len(line))
    remaining = line.reshape(len(line), line.shape[1] * width).copy()
    position = (start // columns + 1) * width + start % columns + 1
    for _ in range(int(remaining.sum(axis=1).max(initial=0))):
        remaining[n, position] = False
        onward = remaining[n[:, None], position[:, None] + steps]
        position += steps[onward.argmax(axis=1)] * onward.any(axis=1)
    return remaining.any(axis=1)


# The files of a data set.

def write_dataset(path, splits, vocab_size, manifest):
    """Writes a data set to a folder in one move: if killed on the way, it leaves nothing under that name.

    splits: {"train": (groups, copies, blocks)}: groups of `copies` puzzles with one example each. The
    iterable blocks yields their rows in order, as pairs (inputs, labels), uint8 [n, seq_len]. Token 0 is the
    padding and the ignored label. manifest: a dict with "grid" (rows, columns) and whatever else describes
    the data set. It is written last, together with the SHA-256 of every file. Raises UserError if path exists
    or cannot be written.
    """
    path = os.path.normpath(path)
    refuse_existing(path)
    part = f"{path}.part-{platform.node()}-{os.getpid()}"  # other hosts may share the folder
    seq_len = math.prod(manifest["grid"])
    shutil.rmtree(part, ignore_errors=True)
    try:
        os.makedirs(part)
        names = []
        for split, (groups, copies, blocks) in splits.items():
            names += write_split(part, split, groups, copies, blocks, seq_len, vocab_size)
        names.append(write_json(part, "identifiers.json", ["<blank>"]))
        hashes = {name: file_sha256(os.path.join(part, name)) for name in names}
        write_json(part, "manifest.json", dict(manifest, sha256=hashes))
        refuse_existing(path)
        os.rename(part, path)
    except OSError as e:
        raise UserError(f"{path} cannot be written: {e.strerror or e}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_split(path, split, groups, copies, blocks, seq_len, vocab_size):
    """Writes the files of one split and returns their names, relative to path; see write_dataset."""
    rows = groups * copies
    if rows >= 2 ** 31:
        raise UserError(f"{rows:,} {split} examples: 32-bit indices count to {2 ** 31 - 1:,}, choose fewer")
    os.mkdir(os.path.join(path, split))
    names = [f"{split}/all__labels.npy", f"{split}/all__inputs.npy"]
    labels_path, inputs_path = (os.path.join(path, name) for name in names)
    with open(labels_path, "wb") as labels, open(inputs_path, "wb") as inputs:
        header = {"descr": "|u1", "fortran_order": False, "shape": (rows, seq_len)}
        for file in (inputs, labels):
            np.lib.format.write_array_header_1_0(file, header)
        count = 0
        for block in blocks:
            for file, array in zip((inputs, labels), block):
                file.write(np.ascontiguousarray(array, dtype=np.uint8).reshape(-1, seq_len).data)
            count += len(block[0])
    if count != rows:
        raise ValueError(f"{split}: expected {rows} rows, got {count}")
    for field, array in (
        ("puzzle_identifiers", np.zeros(rows)),
        ("puzzle_indices", np.arange(rows + 1)),
        ("group_indices", np.arange(0, rows + 1, copies)),
    ):
        names.append(f"{split}/all__{field}.npy")
        np.save(os.path.join(path, names[-1]), array.astype(np.int32))
    names.append(write_json(path, f"{split}/dataset.json", {
        "pad_id": 0,
        "ignore_label_id": 0,
        "blank_identifier_id": 0,
        "vocab_size": vocab_size,
        "seq_len": seq_len,
        "num_puzzle_identifiers": 1,
        "total_groups": groups,
        "mean_puzzle_examples": 1.0,
        "total_puzzles": groups,  # not counting copies, as in the official builder
        "sets": ["all"],
    }))
    return names


def write_json(folder, name, value):
    """Writes a value to a file of the folder and returns the file's name."""
    with open(os.path.join(folder, name), "w", encoding="utf-8", newline="\n") as f:
        f.write(json.dumps(value, indent=2) + "\n")
    return name


def read_json(path, *keys):
    """The object in a JSON file; raises UserError if the file is unreadable or lacks one of the keys."""
    try:
        with open(path, encoding="utf-8") as f:
            value = json.load(f)
    except (OSError, ValueError) as e:
        raise UserError(f"{path} cannot be read as JSON: build the data set again ({e})") from None
    missing = [key for key in keys if not isinstance(value, dict) or key not in value]
    if missing:
        raise UserError(f"{path} lacks {', '.join(missing)}: build the data set again")
    return value


def refuse_existing(path):
    if os.path.lexists(path):
        raise UserError(f"{path} exists already: delete it or choose another --output_dir")


def dataset_files(path):
    """Relative names of a data set's files, those of both splits that exist, without the manifest."""
    names = []
    for split in ("test", "train"):
        names += [f"{split}/dataset.json"] + [f"{split}/all__{field}.npy" for field in FIELDS]
    return [name for name in names + ["identifiers.json"] if os.path.exists(os.path.join(path, name))]


HASHES_LOCK = threading.Lock()


def file_sha256(path):
    """Hex SHA-256 of a file; a process reads a file again only if it has changed."""
    stat = os.stat(path)
    with HASHES_LOCK:  # replicas that are threads wait here for the one that reads
        return cached_sha256(os.path.abspath(path), stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=None)
def cached_sha256(path, size, mtime_ns):
    with open(path, "rb") as f:
        return size_and_digest(f, hashlib.sha256())[1]


def file_md5(path):
    """(size in bytes, hex MD5) of a file."""
    with open(path, "rb") as f:
        return size_and_digest(f, hashlib.md5())


def size_and_digest(f, digest):
    size = 0
    while block := f.read(1 << 20):
        digest.update(block)
        size += len(block)
    return size, digest.hexdigest()


# CSV files of puzzles.

COLUMNS = ("source", "question", "answer", "rating")
UNKNOWN = 255  # what a character stands for that is not allowed


def read_csv(path, cells, question_values, answer_values, rated=True):
    """Yields a file's puzzles in blocks (lines [n], questions [n, cells], answers [n, cells], ratings [n]).

    The file, .csv or .csv.gz, has the columns source, question, answer and rating in any order. cells:
    characters of a question; 0: as many as the first one has. The two dicts map characters to values below
    255; questions and answers are returned as these values, uint8. rated: whether ratings must be integers;
    if not, they are returned as 0. Raises UserError with file and line for the first wrong row, after
    yielding the rows before it.
    """
    numbered_rows = csv_rows(path)
    _, header = next(numbered_rows, (1, []))
    header = [name.strip() for name in header]
    for name in COLUMNS:
        if name not in header:
            raise UserError(f"{path}:1: no column {name}; the first line must be {','.join(COLUMNS)}")
    question, answer, rating = (header.index(name) for name in COLUMNS[1:])
    values = np.full((2, 256), UNKNOWN, dtype=np.uint8)
    for table, characters in zip(values, (question_values, answer_values)):
        table[[ord(character) for character in characters]] = list(characters.values())

    def is_well_formed(row):
        return (
            len(row) == len(header)
            and len(row[question]) == len(row[answer]) == cells
            and (not rated or is_integer(row[rating]))
        )

    empty = True
    while block := list(itertools.islice(numbered_rows, 16384)):
        empty = False
        lines, rows = zip(*block)
        if not cells and len(rows[0]) == len(header):
            cells = len(rows[0][question])
        n = next((i for i, row in enumerate(rows) if not is_well_formed(row)), len(rows))
        text = "".join([row[question] + row[answer] for row in rows[:n]]).encode("ascii", "replace")
        text = np.frombuffer(text, dtype=np.uint8).reshape(n, 2, cells)
        questions = values[0][text[:, 0]]
        answers = values[1][text[:, 1]]
        wrong = (np.maximum(questions, answers) == UNKNOWN).any(axis=1)
        n = int(wrong.argmax()) if wrong.any() else n
        if n:
            ratings = [int(row[rating]) if rated else 0 for row in rows[:n]]
            yield np.array(lines[:n]), questions[:n], answers[:n], np.array(ratings)
        if n < len(rows):
            message = row_error(rows[n], header, cells, question_values, answer_values)
            raise UserError(f"{path}:{lines[n]}: {message}")
    if empty:
        raise UserError(f"{path}:2: no puzzle under the header")


def csv_rows(path):
    """Yields (line number, row) of a .csv or .csv.gz file; raises UserError if it cannot be read."""
    try:
        raw = open(path, "rb")
    except OSError as e:
        raise UserError(f"{path}: cannot be read ({e.strerror})") from None
    with raw, Progress(f"reading {path}", os.path.getsize(path), "MB", 1e6) as progress:
        stream = gzip.open(raw) if path.endswith(".gz") else raw
        reader = csv.reader(io.TextIOWrapper(stream, encoding="utf-8-sig", errors="replace", newline=""))
        try:
            for row in reader:
                if reader.line_num % 4096 == 0:
                    progress.add(raw.tell() - progress.done)
                if row:
                    yield reader.line_num, row
        except (OSError, EOFError, csv.Error, zlib.error) as e:
            raise UserError(f"{path}:{reader.line_num + 1}: cannot be read ({e})") from None


def row_error(row, header, cells, question_values, answer_values):
    """What is wrong with the form of a CSV row, in words."""
    if len(row) != len(header):
        return f"{len(row)} columns, but the header has {len(header)}"
    for name, values in (("question", question_values), ("answer", answer_values)):
        text = row[header.index(name)]
        if len(text) != cells:
            return f"the {name} has {len(text)} characters, not {cells}"
        for position, character in enumerate(text, 1):
            if character not in values:
                return f"character {position} of the {name} is {character!r}, not one of {''.join(values)!r}"
    return f"the rating {row[header.index('rating')]!r} is not an integer"


def is_integer(text):
    return len(text) < 19 and text.strip().removeprefix("-").isdecimal()


# Shared by the prepare scripts.

def check_source(settings, **minimums):
    """A copy of a prepare script's settings with source filled in.

    Raises UserError for an unknown source, one without its files, or a setting below its minimum.
    """
    s = SimpleNamespace(**vars(settings))
    if s.train_csv or s.test_csv:
        s.source = "csv"
    if s.source not in ("hub", "csv", "generate"):
        raise UserError(f"source must be hub, csv or generate, not {s.source!r}")
    if s.source == "csv" and not (s.train_csv and s.test_csv):
        raise UserError("source=csv needs both --train_csv=FILE and --test_csv=FILE")
    for name, minimum in minimums.items():
        if getattr(s, name) < minimum:
            raise UserError(f"{name} must be at least {minimum}, not {getattr(s, name)}")
    return s


def short_count(n):
    """A number of puzzles in the name of a data set: 3k for 3000, full for 0."""
    if n == 0:
        return "full"
    return f"{n // 1000}k" if n % 1000 == 0 else str(n)


def hash_boards(boards):
    """Hashes uint64 [n] of boards [n, cells]; 64 bits are enough to take equal hashes for equal boards."""
    n, cells = boards.shape
    padded = np.zeros((n, -(-cells // 8) * 8), dtype=np.uint8)
    padded[:, :cells] = boards
    hashes = np.zeros(n, dtype=np.uint64)
    for word in padded.view(np.uint64).T:
        hashes = (hashes ^ word) * np.uint64(0x9E3779B97F4A7C15)
        hashes ^= hashes >> np.uint64(29)
    return hashes


def contains(sorted_hashes, hashes):
    """Which of the hashes are among the sorted ones, bool [n]."""
    if not len(sorted_hashes):
        return np.zeros(len(hashes), dtype=bool)
    positions = np.searchsorted(sorted_hashes, hashes).clip(max=len(sorted_hashes) - 1)
    return sorted_hashes[positions] == hashes


POOL_AFTER = 2.0  # seconds that a pool must save: each of its processes imports the main script first


def in_parallel(function, tasks, processes):
    """Yields function(task) of each task in order, on several processes if that saves time."""
    start = time.monotonic()
    for done, task in enumerate(tasks, 1):
        yield function(task)
        remaining = len(tasks) - done
        seconds_left = (time.monotonic() - start) / done * remaining
        workers = min(processes, remaining)
        if workers > 1 and seconds_left * (1 - 1 / processes) > POOL_AFTER:
            ignore = signal.SIGINT, signal.SIG_IGN  # Ctrl-C reaches this process, which ends them
            with multiprocessing.get_context("spawn").Pool(workers, signal.signal, ignore) as pool:
                yield from pool.imap(function, tasks[done:])
            return


def cores():
    """Number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def lock(file, wait=True):
    """Locks an open file until it is closed. wait=False: raises BlockingIOError if another process has it.

    Does nothing where there is no fcntl, as on Windows.
    """
    if fcntl:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def locked(path, wait=True):
    """Lets one process of this host at a time work on path. Waits, or raises BlockingIOError, as lock()."""
    name = f"trm-{zlib.crc32(os.path.abspath(path).encode()):08x}.lock"
    with open(os.path.join(tempfile.gettempdir(), name), "w") as lock_file:
        lock(lock_file, wait)
        yield


class Progress:
    """A progress line on stderr: how much is done, the rate and the time left. Silent for 2 seconds.

    scale: how many of what add() counts make one printed unit; done: what was there before, which the rate
    leaves out.
    """

    def __init__(self, label, total, unit="", scale=1, done=0):
        self.label = label
        self.total = total
        self.unit = f" {unit}" if unit else ""
        self.scale = scale
        self.done = done
        self.done_before = done
        self.start = time.monotonic()
        self.interval = 0.2 if sys.stderr.isatty() else 10.0
        self.next_print = self.start + max(2.0, self.interval)
        self.printed = False

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self.printed:
            self._print(last=True)

    def add(self, n):
        self.done += n
        if time.monotonic() >= self.next_print:
            self.next_print = time.monotonic() + self.interval
            self._print()

    def _print(self, last=False):
        seconds = time.monotonic() - self.start
        rate = (self.done - self.done_before) / max(seconds, 1e-9)
        if last:
            duration = f"{seconds:.0f} s"
        elif rate and self.total:
            duration = f"{(self.total - self.done) / rate:.0f} s left"
        else:
            duration = "? s left"
        count = f"{self.done / self.scale:,.0f}/{self.total / self.scale:,.0f}{self.unit}"
        line = f"{self.label}: {count}, {rate / self.scale:,.1f}{self.unit}/s, {duration}"
        try:
            if sys.stderr.isatty():  # overwrites itself
                print("\r" + line.ljust(79), end="\n" if last else "", file=sys.stderr, flush=True)
            else:
                print(line, file=sys.stderr, flush=True)
        except OSError:  # a full disk, or nobody reads it any more
            pass
        self.printed = True


# Downloads.

def hub_endpoint():
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def hub_url(repo, name):
    """URL of a file of a dataset repository on the Hugging Face hub, or on the mirror in HF_ENDPOINT."""
    return f"{hub_endpoint()}/datasets/{repo}/resolve/main/{name}"


def download(url, path, attempts=6, timeout=30.0, wait=1.0):
    """Downloads url to path unless path exists. A download that was interrupted resumes from path + ".part".

    attempts: failures in a row without a new byte before giving up; timeout: seconds without a byte; wait:
    seconds before the second attempt, doubled from one to the next. Checks size and SHA-256 if the server
    states them. HF_TOKEN is sent to the hub only. One process of a host downloads, the others wait. Raises
    UserError with the URL at once if trying again cannot help (404, say), TransientError after the last
    attempt.
    """
    part = path + ".part"
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with locked(path):
            if os.path.exists(path):
                return
            retry(lambda: fetch(url, part, timeout), lambda: size_so_far(part), attempts, wait, url)
            os.replace(part, path)
    except TransientError as e:
        resume = f"run again to resume after {size_so_far(part) / 1e6:,.0f} MB"
        hint = f"{resume}, or use files of your own with --source=csv"
        raise TransientError(f"{url} cannot be downloaded ({e}): {hint}") from None
    except OSError as e:
        raise UserError(f"{path} cannot be written: {e.strerror or e}") from None


def fetch(url, part, timeout):
    """One attempt at the rest of a download; raises TransientError or a requests exception if it fails."""
    offset = size_so_far(part)
    headers = {"Accept-Encoding": "identity"}  # sizes are those of the file, not of a compressed copy
    if offset:
        headers["Range"] = f"bytes={offset}-"
    token = os.environ.get("HF_TOKEN", "").strip()
    if token and url.startswith(hub_endpoint() + "/"):
        headers["Authorization"] = f"Bearer {token}"
    try:
        with requests.get(url, headers=headers, stream=True, timeout=timeout) as response:
            save_rest(response, url, part, offset)
    except ValueError:
        hint = "set HF_ENDPOINT to a URL like https://huggingface.co"
        raise UserError(f"{url} is not a URL that can be downloaded: {hint}") from None


def save_rest(response, url, part, offset):
    """Appends a response's body to part, the first offset bytes of a file, and checks the whole file."""
    status = response.status_code
    if status in (408, 429) or status >= 500:
        raise TransientError(f"status {status}")
    if status not in (200, 206, 416):
        hint = "set HF_TOKEN to a token that may read it" if status in (401, 403) else "is the address right?"
        raise UserError(f"{url} cannot be downloaded (status {status}): {hint}")
    # 206 comes with "bytes 5-9/10", 416 (the range begins past the end) with "bytes */10".
    byte_range, _, total = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
    if status == 206 and not byte_range.startswith(f"{offset}-"):
        os.remove(part)
        raise TransientError("the server sent another range than it was asked for")
    if status == 200:
        total = response.headers.get("Content-Length", "")
        offset = 0
    digest = ""
    for hop in response.history + [response]:  # the hub states size and hash on its redirect, not on the file
        total = hop.headers.get("X-Linked-Size", total)
        digest = hop.headers.get("X-Linked-Etag", digest).strip('"')
    total = int(total) if total.isdecimal() else None
    if status != 416:
        with Progress(f"downloading {url}", total or 0, "MB", 1e6, offset) as progress:
            append_body(response, part, offset, progress)
    size = os.path.getsize(part)
    if status != 416 and total and size < total:
        raise TransientError(f"broke off at {size:,} of {total:,} bytes")
    if total and size != total:
        os.remove(part)
        raise TransientError(f"received {size:,} bytes, but the server states {total:,}")
    if len(digest) == 64 and digest != file_sha256(part):
        os.remove(part)
        raise TransientError("its SHA-256 is not the one that the hub states")


def append_body(response, path, offset, progress):
    """Writes a response's body to path, after its first offset bytes."""
    progress.done = offset
    with open(path, "ab" if offset else "wb") as f:
        for block in response.iter_content(1 << 15):
            f.write(block)
            progress.add(len(block))


def size_so_far(path):
    return os.path.getsize(path) if os.path.exists(path) else 0


def retry(attempt, bytes_done, attempts, wait, label):
    """attempt(), repeated after a TransientError or a network error up to `attempts` times.

    Counting starts over when bytes_done() has risen. wait: seconds before the second attempt, doubled from
    one to the next up to 60. Raises the last failure as a TransientError.
    """
    failures = 0
    furthest = bytes_done()
    while True:
        try:
            return attempt()
        except TransientError as e:
            error = e
        except requests.RequestException as e:
            error = TransientError(network_error(e))
        failures = 1 if bytes_done() > furthest else failures + 1
        furthest = max(furthest, bytes_done())
        if failures == attempts:
            raise error
        seconds = min(60, wait * 2 ** (failures - 1)) * random.uniform(0.5, 1)
        if seconds >= 1:
            print(f"{label}: {error}; trying again in {seconds:.0f} s", file=sys.stderr, flush=True)
        time.sleep(seconds)


def network_error(e):
    """The cause of a requests exception in words, without the URL, which may hold a secret."""
    reason = getattr(e.args[0], "reason", e.args[0]) if e.args else ""
    return f"{type(e).__name__}: {str(reason).rpartition(': ')[2]}"


# Google Cloud Storage over HTTP.

class BucketError(UserError):
    """A bucket refuses a request, and would again: one line with the gs:// address."""


class Bucket:
    """The objects under gs://bucket/prefix, in Google Cloud Storage or the emulator at STORAGE_EMULATOR_HOST.

    attempts: failures in a row without a new byte before giving up; wait: seconds before the second attempt,
    doubled from one to the next; timeout: seconds without a byte; chunk: bytes of one request, a multiple of
    256 KiB. Object names are relative to the prefix. Raises UserError for a malformed address. The methods
    are thread-safe. They raise BucketError if the bucket refuses (exit code 2), TransientError after the last
    attempt (exit code 1), and OSError for local files.
    """

    def __init__(self, url, *, attempts=8, wait=1.0, timeout=30.0, chunk=1 << 23):
        address = r"gs://([a-z0-9][a-z0-9._-]{1,220}[a-z0-9])/((?:[^/\r\n]+/)*)"
        match = re.fullmatch(address, url.removesuffix("/") + "/")
        if not match or {".", ".."} & set(match[2].split("/")):
            raise UserError(f"{url!r} is not an address in a bucket: write gs://bucket/folder")
        self.bucket, self.prefix = match.groups()
        self.attempts = attempts
        self.wait = wait
        self.timeout = timeout
        self.chunk = chunk
        self.emulator = os.environ.get("STORAGE_EMULATOR_HOST", "").rstrip("/")
        if self.emulator and "://" not in self.emulator:
            self.emulator = f"http://{self.emulator}"
        server = self.emulator or "https://storage.googleapis.com"
        self.objects = f"{server}/storage/v1/b/{self.bucket}/o"
        self.inserts = f"{server}/upload/storage/v1/b/{self.bucket}/o?uploadType=resumable"
        self.token = None
        self.token_expiry = 0
        self.session = requests.Session()
        self.session.headers["Accept-Encoding"] = "identity"  # sizes are those of the objects as stored
        self.session.auth = lambda request: request  # otherwise requests replaces the token with ~/.netrc's

    def check(self, write=True, patient=False):
        """Tries what a run will do: list, read and, with write, write and delete an object.

        Gives up within 20 s; with patient only after all attempts, which takes minutes. Asking the API for
        permissions would take another permission, and permissions may hold for a prefix only.
        """
        probe = copy.copy(self)
        if not patient:
            probe.attempts = min(self.attempts, 3)
            probe.wait = min(self.wait, 0.1)
            probe.timeout = min(self.timeout, 5)
        name = f".probe-{os.urandom(8).hex()}"
        probe._json(self.objects, prefix=self.prefix, maxResults=1)
        if write:
            probe.write(name, b"probe")
            probe.delete(name)
        probe.read(name)

    def upload(self, path, name):
        """Uploads a file, all of it or nothing. If it grows meanwhile, what it held at first is uploaded."""
        with open(path, "rb") as f:  # the file may be replaced meanwhile
            self._insert(f, name, *size_and_digest(f, hashlib.md5()))

    def write(self, name, content):
        """Uploads bytes."""
        self._insert(io.BytesIO(content), name, len(content), hashlib.md5(content).hexdigest())

    def read(self, name):
        """The bytes of an object, or None if there is none."""
        options = dict(ok=(200, 404), params={"alt": "media"})
        response = self._retry(name, lambda: self._request("GET", self._url(name), name, **options))
        return response.content if response.status_code == 200 else None

    def delete(self, name):
        """Deletes an object if it exists."""
        self._retry(name, lambda: self._request("DELETE", self._url(name), name, ok=(200, 204, 404)))

    def list(self):
        """{name: (size in bytes, hex MD5 or None)} of all objects under the prefix."""
        found = {}
        params = {"prefix": self.prefix, "fields": "nextPageToken,items(name,size,md5Hash)"}
        while True:
            page = self._json(self.objects, **params)
            for item in page.get("items", []):
                if not item["name"].endswith("/"):  # an empty folder of the web console
                    found[item["name"].removeprefix(self.prefix)] = size_and_md5(item)
            if "nextPageToken" not in page:
                return found
            params["pageToken"] = page["nextPageToken"]

    def download(self, name, path):
        """Downloads an object to path by way of path + ".part", from which a later call resumes.

        Checks size and MD5, or the size alone if the object has no MD5: a composite one, as gcloud makes of
        large files.
        """
        size, md5 = size_and_md5(self._json(self._url(name), name))
        part = path + ".part"
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)

        def attempt():
            offset = size_so_far(part)
            if offset < size or size == 0:
                headers = {"Range": f"bytes={offset}-"} if offset else {}
                options = dict(ok=(200, 206), params={"alt": "media"}, headers=headers, stream=True)
                response = self._request("GET", self._url(name), name, **options)
                append_body(response, part, offset if response.status_code == 206 else 0, progress)
            if size_so_far(part) != size or (md5 and file_md5(part)[1] != md5):
                os.remove(part)
                raise TransientError("the download has another size or MD5 than the object")

        with Progress(f"downloading {self._address(name)}", size, "MB", 1e6, size_so_far(part)) as progress:
            self._retry(name, attempt, lambda: size_so_far(part))
        os.replace(part, path)

    def _insert(self, f, name, size, md5):
        """Uploads the first size bytes of f in a session that resumes, after an error, where it was."""
        metadata = {"name": self.prefix + name, "md5Hash": base64.b64encode(bytes.fromhex(md5)).decode()}
        session = None
        furthest = 0

        def attempt():
            nonlocal session, furthest
            offset = -1  # unknown: the first request asks for it
            if session is None:
                session = self._request("POST", self.inserts, name, json=metadata).headers["Location"]
                offset = 0
            while True:
                response = self._send_chunk(session, f, offset, size, name)
                if response.status_code != 308:  # not "resume incomplete"
                    break
                received = 0
                if "Range" in response.headers:  # bytes=0-LAST; absent if nothing has arrived
                    received = int(response.headers["Range"].removeprefix("bytes=0-")) + 1
                if received <= offset:
                    raise TransientError("nothing of what was sent has arrived")
                offset = received
                furthest = max(furthest, offset)
            status = response.status_code
            if status >= 400 or size_and_md5(response.json()) != (size, md5):
                session = None
                raise TransientError(f"status {status}: the server dropped the upload, or it arrived damaged")

        self._retry(name, attempt, lambda: furthest)

    def _send_chunk(self, session, f, offset, size, name):
        """The response to the chunk of f at offset or, if the offset is unknown (-1), to asking for it."""
        chunk = b""
        if offset >= 0:
            f.seek(offset)
            chunk = f.read(min(self.chunk, size - offset))
        span = f"{offset}-{offset + len(chunk) - 1}" if chunk else "*"
        headers = {"Content-Range": f"bytes {span}/{size}"}
        ok = (200, 201, 308, 400, 404, 410)
        return self._request("PUT", session, name, ok, data=chunk, headers=headers)

    def _url(self, name):
        return f"{self.objects}/{urllib.parse.quote(self.prefix + name, safe='')}"

    def _address(self, name):
        address = f"gs://{self.bucket}/{self.prefix}{name}".rstrip("/")
        return f"{address} at {self.emulator}" if self.emulator else address

    def _json(self, url, name="", **params):
        return self._retry(name, lambda: self._request("GET", url, name, params=params).json())

    def _retry(self, name, attempt, bytes_done=lambda: 0):
        address = self._address(name)
        try:
            return retry(attempt, bytes_done, self.attempts, self.wait, address)
        except TransientError as e:
            raise TransientError(f"{address}: {e}; gave up after {self.attempts} attempts") from None

    def _request(self, method, url, name, ok=(200,), headers=None, **options):
        """The response, whose status is one of ok.

        Raises TransientError or a requests exception if another attempt may help, else BucketError.
        """
        options.update(timeout=self.timeout, allow_redirects=False)
        for fresh in (False, True):  # once with a fresh token after a 401
            token = self._token(fresh)
            headers = dict(headers or {})
            if token:
                headers["Authorization"] = f"Bearer {token}"
            response = self.session.request(method, url, headers=headers, **options)
            status = response.status_code
            if status in ok:
                return response
            if status != 401:
                break
        try:
            message = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = response.text
        if token:
            message = message.replace(token, "***")
        message = f"status {status} {' '.join(message.split())[:200]}".strip()
        if status in (408, 429) or status >= 500:
            raise TransientError(message)
        hint = {
            401: ": log in again (gcloud auth login)",
            403: ": the account needs the role Storage Object Admin, and a VM the scope cloud-platform",
            404: ": no such bucket or object",
        }.get(status, "")
        raise BucketError(f"{self._address(name)}: {message}{hint}")

    def _token(self, fresh):
        if not self.emulator and (fresh or time.monotonic() >= self.token_expiry):
            self.token, seconds = access_token()
            self.token_expiry = time.monotonic() + seconds
        return self.token


def access_token():
    """(OAuth token, seconds to use it) from CLOUDSDK_AUTH_ACCESS_TOKEN, a VM's metadata server or gcloud.

    Raises TransientError if none of them has one.
    """
    if os.environ.get("CLOUDSDK_AUTH_ACCESS_TOKEN"):
        return os.environ["CLOUDSDK_AUTH_ACCESS_TOKEN"].strip(), math.inf
    # By number: looking up the name can hang outside Google Cloud.
    host = os.environ.get("GCE_METADATA_HOST") or "169.254.169.254"
    url = f"http://{host}/computeMetadata/v1/instance/service-accounts/default/token"
    no_proxy = {"http": ""}  # a proxy does not lead to the machine's own metadata
    try:
        response = requests.get(url, headers={"Metadata-Flavor": "Google"}, proxies=no_proxy, timeout=3)
        response.raise_for_status()
        token = response.json()
        return token["access_token"], token["expires_in"] - 225  # a new one is there 4 minutes before the end
    except (requests.RequestException, KeyError):
        pass
    gcloud = ["gcloud", "auth", "print-access-token"]
    try:
        streams = dict(stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        token = subprocess.check_output(gcloud, text=True, timeout=15, **streams).strip()
        return token, 600  # it may be an old one, which is replaced after a 401
    except (OSError, subprocess.SubprocessError):
        hint = "run `gcloud auth login`, or give the VM a service account and the scope cloud-platform"
        raise TransientError(f"no Google credentials: {hint}, or set CLOUDSDK_AUTH_ACCESS_TOKEN") from None


def size_and_md5(item):
    """(size in bytes, hex MD5 or None) of an object, from the API's description of it."""
    md5 = base64.b64decode(item["md5Hash"]).hex() if item.get("md5Hash") else None
    return int(item["size"]), md5


# Data sets in buckets.

def local_dataset(path, folder=None, patient=False):
    """The local folder of a data set: path itself; for gs://bucket/.../NAME data/NAME, downloaded if missing.

    folder: another place than data/NAME; patient: as Bucket.check. One process of a host downloads, the
    others wait. A download that was killed resumes from folder + ".part". Raises UserError if folder holds
    another data set, the bucket refuses, its files do not match their manifest or the disk is full, and
    TransientError if the bucket does not answer.
    """
    if not path.startswith("gs://"):
        return path
    bucket = Bucket(path)
    folder = os.path.normpath(folder or os.path.join("data", path.rstrip("/").rpartition("/")[2]))
    try:
        os.makedirs(os.path.dirname(folder) or ".", exist_ok=True)
        with open(folder + ".lock", "w") as lock_file:
            lock(lock_file)
            bucket.check(write=False, patient=patient)
            manifest, hashes = remote_manifest(bucket, path)
            if not os.path.lexists(folder):
                download_dataset(bucket, path, folder, manifest, hashes)
            elif Dataset(folder, "train").hashes() != hashes:
                hint = "move it away, or name it instead to use it"
                raise UserError(f"{folder} holds another data set than {path}: {hint}")
            return folder
    except OSError as e:
        # A full disk may have room later; anything else stays as it is.
        error = TransientError if e.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT) else UserError
        raise error(f"{folder} cannot be written: {e.strerror or e}") from None


def remote_manifest(bucket, url):
    """A data set's manifest.json in a bucket as (bytes, {file: SHA-256}); raises UserError if damaged."""
    content = bucket.read("manifest.json") or b""
    try:
        hashes = json.loads(content)["sha256"]
        # Other names might lead out of the folder.
        valid = hashes and all(re.fullmatch(r"((train|test)/)?\w+\.(json|npy)", name) for name in hashes)
    except (ValueError, KeyError, TypeError):
        valid = False
    if not valid:
        hint = f"upload the data set with `python data.py upload data/NAME {url}`"
        raise UserError(f"{url} has no manifest.json, or a damaged one: {hint}")
    return content, hashes


def download_dataset(bucket, url, folder, manifest, hashes):
    """Downloads a data set to folder by way of folder + ".part", which may hold some of its files already."""
    part = folder + ".part"
    parent = os.path.dirname(folder) or "."

    def is_complete(name):
        file = os.path.join(part, name)
        return os.path.exists(file) and file_sha256(file) == hashes[name]

    missing = [name for name in hashes if not is_complete(name)]
    required = sum(size for name, (size, _) in bucket.list().items() if name in missing)
    free = shutil.disk_usage(parent).free
    if required > free:
        sizes = f"{required / 1e9:.2f} GB in {parent}, where {free / 1e9:.2f} GB are free"
        raise UserError(f"{url} needs {sizes}: make room")
    for name in missing:
        bucket.download(name, os.path.join(part, name))
        if not is_complete(name):
            raise UserError(f"{url}/{name} does not match manifest.json: upload the data set again")
    with open(os.path.join(part, "manifest.json"), "wb") as f:
        f.write(manifest)
    os.rename(part, folder)


def upload_dataset(folder, url):
    """Uploads a data set, checked, to a bucket: manifest.json last, files that are there already not again.

    A data set of the official builder gets a manifest in the bucket. Raises UserError if url holds another
    data set.
    """
    Dataset(folder, "train")
    dataset = Dataset(folder, "test")
    manifest = dataset.manifest or {"sha256": dataset.hashes()}
    content = (json.dumps(manifest, indent=2) + "\n").encode()
    bucket = Bucket(url)
    bucket.check()
    if bucket.read("manifest.json") not in (None, content):
        raise UserError(f"{url} holds another data set: choose another address")
    remote_files = bucket.list()
    files = {name: os.path.join(folder, name) for name in manifest["sha256"]}
    with Progress(f"uploading to {url}", sum(map(os.path.getsize, files.values())), "MB", 1e6) as progress:
        for name, file in files.items():
            dataset.check_file(name)
            if remote_files.get(name) != file_md5(file):
                bucket.upload(file, name)
            progress.add(os.path.getsize(file))
    bucket.write("manifest.json", content)


# Commands.

USAGE = "python data.py upload data/NAME gs://bucket/data/NAME | download gs://bucket/data/NAME [folder]"


def main(argv):
    """Runs `upload` or `download`; raises UserError."""
    if len(argv) == 3 and argv[0] == "upload":
        upload_dataset(*argv[1:])
        print(f"{argv[1]} is in {argv[2]}")
    elif len(argv) in (2, 3) and argv[0] == "download" and argv[1].startswith("gs://"):
        print(f"{argv[1]} is in {local_dataset(*argv[1:])}")
    else:
        raise UserError(f"usage: {USAGE}")


if __name__ == "__main__":
    command(lambda: main(sys.argv[1:]), __file__)
