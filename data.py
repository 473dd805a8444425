"""Datasets on disk -> batches; downloads; buckets; and the writer that the prepare scripts share.

A data set is a folder in the layout of the official code, with a manifest added:

    data/NAME/manifest.json           what it was made from, counts, the SHA-256 of every file
    data/NAME/identifiers.json        names of the puzzle identifiers
    data/NAME/{train,test}/dataset.json, all__{inputs,labels,puzzle_identifiers,puzzle_indices,group_indices}.npy

Examples (inputs, labels: [N, seq_len]) are the rows; puzzle i owns the rows puzzle_indices[i]:puzzle_indices[i + 1], and
group g the puzzles group_indices[g]:group_indices[g + 1] (a Sudoku with its augmented copies). Batches are a pure function
of (seed, step), so that a resumed run and a run on another number of replicas see the same data.

    python data.py upload data/NAME gs://bucket/data/NAME
    python data.py download gs://bucket/data/NAME [data/NAME]
"""
import base64
import copy
import csv
import functools
import gzip
import hashlib
import io
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.parse
import zlib
from types import SimpleNamespace

import numpy as np
import requests

from configurator import UserError, command

FIELDS = ("inputs", "labels", "puzzle_identifiers", "puzzle_indices", "group_indices")
METADATA = {"pad_id": int, "ignore_label_id": (int, type(None)), "blank_identifier_id": int, "vocab_size": int, "seq_len": int,
            "num_puzzle_identifiers": int, "total_groups": int, "mean_puzzle_examples": (int, float), "total_puzzles": int}
IGNORED = -100  # the label that no loss counts
COLUMNS = ("source", "question", "answer", "rating")  # of the CSV files
LINKED = ("X-Linked-Size", "X-Linked-Etag")  # the hub's headers: size and SHA-256 of a file that lies elsewhere
POOL_AFTER = 2.0  # seconds that other processes must save before they are started: each imports the main script first
WALL, OPEN, START, GOAL, PATH = range(1, 6)  # tokens of a maze, "# SGo"
ORDER, EXAMPLE, HALT, SUBSET = range(4)  # independent random streams of one seed


class Dataset:
    """One split of a data set: its examples memory-mapped, its index arrays in memory, everything checked.

    path: folder of the data set; split: "train" or "test". Reads those of the official code too (no manifest, any integer
    dtype). inputs and labels are [N, seq_len]; len() is N. sha256 identifies the content of the whole data set.
    Raises UserError, one line with the file and the mend, for anything missing, damaged or inconsistent.
    """

    def __init__(self, path, split):
        self.path, self.split = path, split
        if not os.path.isdir(os.path.join(path, split)):
            raise UserError(f"{os.path.join(path, split)}: no such data set; build it with prepare_sudoku.py or prepare_maze.py")
        manifest = os.path.join(path, "manifest.json")
        self.manifest = read_json(manifest, "sha256") if os.path.exists(manifest) else {}
        if not isinstance(self.manifest.get("sha256", {}), dict):
            raise UserError(f"{manifest}: sha256 must be a table of the files: build the data set again")
        kind = self.manifest.get("kind")
        self.mend = f"build it again with prepare_{kind}.py" if kind else "build it again"
        for name in ["dataset.json"] + [f"all__{field}.npy" for field in FIELDS]:
            self._check_file(f"{split}/{name}")
        self._read_metadata(os.path.join(path, split, "dataset.json"))
        self.inputs, self.labels = self._load("inputs", 2, "r"), self._load("labels", 2, "r")
        self.puzzle_identifiers = self._load("puzzle_identifiers", 1)
        self.puzzle_indices = self._load("puzzle_indices", 1)
        self.group_indices = self._load("group_indices", 1)
        self._check_content()

    def __len__(self):
        return len(self.inputs)

    @functools.cached_property
    def sha256(self):
        """Hex digest of the table {relative file: SHA-256} of both splits."""
        return hashlib.sha256(json.dumps(self.hashes(), sort_keys=True).encode()).hexdigest()

    def hashes(self):
        """{relative file: SHA-256} of both splits, from the manifest or else from the files."""
        return self.manifest.get("sha256") or {name: file_sha256(os.path.join(self.path, name)) for name in dataset_files(self.path)}

    def _check_file(self, name):
        """Raises UserError unless the file is there and is the one that the manifest, where there is one, describes."""
        path = os.path.join(self.path, name)
        if not os.path.isfile(path):
            raise UserError(f"{path} is missing: {self.mend}")
        if self.manifest and self.manifest["sha256"].get(name) != file_sha256(path):
            raise UserError(f"{path} does not match manifest.json (changed or cut off): {self.mend}")

    def _read_metadata(self, path):
        metadata = read_json(path, "sets", *METADATA)
        if metadata["sets"] != ["all"]:
            raise UserError(f'{path}: sets must be ["all"], not {metadata["sets"]!r}: data sets of several sets are not supported')
        for key, types in METADATA.items():
            if not isinstance(metadata[key], types):
                raise UserError(f"{path}: {key} must be a number, not {metadata[key]!r}: {self.mend}")
            setattr(self, key, metadata[key])

    def _load(self, field, dims, mmap_mode=None):
        path = os.path.join(self.path, self.split, f"all__{field}.npy")
        try:
            array = np.load(path, mmap_mode=mmap_mode)
        except (OSError, ValueError, EOFError) as e:
            raise UserError(f"{path} cannot be read (cut off?): {self.mend} ({e})") from None
        if array.ndim != dims or array.dtype.kind not in "iu" or (dims == 2 and array.shape[1] != self.seq_len):
            want = f"[N, {self.seq_len}]" if dims == 2 else "[N]"
            raise UserError(f"{path} must hold integers of shape {want}, not {array.dtype} of {list(array.shape)}: {self.mend}")
        return np.asarray(array)  # still the map: a plain view indexes faster than np.memmap

    def _check_content(self):
        def wrong(field, fault):
            return UserError(f"{os.path.join(self.path, self.split, f'all__{field}.npy')} {fault}: {self.mend}")

        if len(self.labels) != len(self):
            raise wrong("labels", f"has {len(self.labels)} rows where all__inputs.npy has {len(self)}")
        for field, limit in (("inputs", self.vocab_size), ("labels", self.vocab_size), ("puzzle_identifiers", self.num_puzzle_identifiers)):
            low, high = getattr(self, field).min(initial=0), getattr(self, field).max(initial=0)
            if high >= limit:
                raise wrong(field, f"holds {high}, beyond the {limit - 1} that dataset.json allows")
            if low < 0 and (field, low) != ("labels", self.ignore_label_id):
                raise wrong(field, f"holds {low}")
        puzzles = len(self.puzzle_identifiers)
        for field, entries, end, what in (("puzzle_indices", puzzles + 1, len(self), "examples"),
                                          ("group_indices", self.total_groups + 1, puzzles, "puzzles")):
            indices = getattr(self, field)
            if len(indices) < 2 or indices[0] != 0 or indices[-1] != end or (np.diff(indices) <= 0).any():
                raise wrong(field, f"must rise from 0 to the number of {what}, {end}")
            if len(indices) != entries:
                raise wrong(field, f"must have {entries} entries, not {len(indices)}")

    def _batch(self, examples, puzzles):
        labels = self.labels[examples].astype(np.int32)
        if self.ignore_label_id is not None:
            labels[labels == self.ignore_label_id] = IGNORED
        identifiers = self.puzzle_identifiers[puzzles].astype(np.int32)
        return {"inputs": self.inputs[examples].astype(np.int32), "labels": labels, "puzzle_identifiers": identifiers}

    def train_batch(self, seed, step, batch_size, rank=0, world=1):
        """The rank's slice of the global batch of a step: a pure function of (seed, step), the same for any world.

        Every group comes once an epoch, in an order drawn anew for each epoch; a batch may span epochs. The puzzle within the
        group and the example within the puzzle are uniform draws. Returns int32 {"inputs": [b, seq_len], "labels": [b, seq_len]
        (-100: not counted), "puzzle_identifiers": [b]}, b = batch_size // world. Safe to call from several threads.
        """
        rows = rank_slice(batch_size, rank, world)
        epochs, places = np.divmod(np.arange(step * batch_size + rows.start, step * batch_size + rows.stop), self.total_groups)
        groups = np.concatenate([epoch_order(seed, epoch, self.total_groups)[places[epochs == epoch]]
                                 for epoch in np.unique(epochs).tolist()])
        draws = generator(seed, EXAMPLE, step).random((batch_size, 2))[rows]
        puzzles = uniform_between(self.group_indices[groups], self.group_indices[groups + 1], draws[:, 0])
        examples = uniform_between(self.puzzle_indices[puzzles], self.puzzle_indices[puzzles + 1], draws[:, 1])
        return self._batch(examples, puzzles)

    def test_batch(self, indices, size):
        """The examples of the given indices as train_batch returns them, filled up to size rows that no metric counts."""
        indices = np.asarray(indices, dtype=np.int64)
        batch = self._batch(indices, np.searchsorted(self.puzzle_indices, indices, side="right") - 1)
        fill = {"inputs": self.pad_id, "labels": IGNORED, "puzzle_identifiers": self.blank_identifier_id}
        for key, rows in batch.items():
            batch[key] = np.full((size,) + rows.shape[1:], fill[key], dtype=np.int32)
            batch[key][:len(rows)] = rows
        return batch

    def subset(self, n):
        """Sorted indices [n] of n random examples, the same for every run and seed; of all where n is 0 or too large.

        Test sets are ordered by source, so their first n examples would not stand for the whole.
        """
        if n == 0 or n >= len(self):
            return np.arange(len(self))
        return np.sort(generator(0, SUBSET).permutation(len(self))[:n])


def halting_draws(seed, step, batch_size, halt_max_steps, halt_exploration_prob, rank=0, world=1):
    """Minimum halting steps of the sequences of a step, int32 [batch_size // world]; a pure function of (seed, step).

    0 with probability 1 - halt_exploration_prob, else uniform in 2..halt_max_steps.
    """
    rng = generator(seed, HALT, step)
    explore = rng.random(batch_size) < halt_exploration_prob
    steps = rng.integers(2, max(halt_max_steps, 2) + 1, batch_size, dtype=np.int32)
    return np.where(explore & (halt_max_steps >= 2), steps, 0).astype(np.int32)[rank_slice(batch_size, rank, world)]


def generator(seed, *key):
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, *key])))


@functools.lru_cache(maxsize=4)  # a batch reads one or two epochs, unless the data set is so small that drawing again is cheap
def epoch_order(seed, epoch, total_groups):
    return generator(seed, ORDER, epoch).permutation(total_groups)


def rank_slice(batch_size, rank, world):
    if batch_size % world:
        raise UserError(f"a batch of {batch_size} cannot be divided among {world} replicas: choose a multiple of {world}")
    return slice(rank * (batch_size // world), (rank + 1) * (batch_size // world))


def uniform_between(start, stop, draws):
    """start + a uniform integer below stop - start, from draws uniform in [0, 1). All arrays are [b]."""
    return start + (draws * (stop - start)).astype(np.int64)


# Answers to mazes.

def path_metrics(inputs, labels, preds, grid):
    """Which answers are a path from S to G, and which a shortest one: two bool [n].

    inputs, labels (a shortest path each), preds: tokens [n, cells]; grid: (rows, columns). A path: S and G are where the question
    has them, every "o" is on a cell that is open in the question, and the "o" make one line from S to G: each touches two
    others of the line, S and G one. So an "o" elsewhere, a gap, a fork or a ring make it none.
    """
    n, (rows, columns) = len(inputs), grid
    start, goal, drawn = inputs == START, inputs == GOAL, preds == PATH
    line = np.pad((drawn | start | goal).reshape(n, rows, columns), ((0, 0), (1, 1), (1, 1)))
    touching = sum(np.roll(line, shift, axis).astype(np.uint8) for shift in (-1, 1) for axis in (1, 2))
    touching = touching[:, 1:-1, 1:-1].reshape(inputs.shape)
    fits = ((preds == START) == start) & ((preds == GOAL) == goal) & (~drawn | (inputs == OPEN))
    fits &= np.where(drawn, touching == 2, (touching == 1) | ~(start | goal))
    good = np.flatnonzero(fits.all(axis=1) & (start.sum(axis=1) == 1) & (goal.sum(axis=1) == 1))
    # What is left is a line from S to G and perhaps rings beside it: nothing may remain when the line is wiped out from S on.
    steps, width, row = np.array([-columns - 2, -1, 1, columns + 2]), columns + 2, np.arange(len(good))
    left, at = line[good].reshape(len(good), (rows + 2) * width), start[good].argmax(axis=1)
    at = (at // columns + 1) * width + at % columns + 1
    for _ in range(int(left.sum(axis=1).max(initial=0))):
        left[row, at] = False
        onward = left[row[:, None], at[:, None] + steps]
        at += steps[onward.argmax(axis=1)] * onward.any(axis=1)
    valid = np.zeros(n, dtype=bool)
    valid[good] = ~left.any(axis=1)
    return valid, valid & (drawn.sum(axis=1) == (labels == PATH).sum(axis=1))


# Files of a data set.

HASHES, HASHES_LOCK = {}, threading.Lock()


def file_sha256(path):
    """Hex SHA-256 of a file; a file that has not changed is read once a process."""
    with HASHES_LOCK:
        stat = os.stat(path)
        key = os.path.abspath(path), stat.st_size, stat.st_mtime_ns
        if key not in HASHES:
            digest = hashlib.sha256()
            with open(path, "rb") as f:
                for block in iter(lambda: f.read(1 << 20), b""):
                    digest.update(block)
            HASHES[key] = digest.hexdigest()
        return HASHES[key]


def dataset_files(path):
    """Relative names of the files that a manifest lists, as far as they exist."""
    names = [f"{split}/{name}" for split in ("test", "train") for name in ["dataset.json"] + [f"all__{field}.npy" for field in FIELDS]]
    return [name for name in names + ["identifiers.json"] if os.path.exists(os.path.join(path, name))]


def read_json(path, *keys):
    """The object in a JSON file; raises UserError unless it is readable and has the keys."""
    try:
        with open(path, encoding="utf-8") as f:
            value = json.load(f)
    except (OSError, ValueError) as e:
        raise UserError(f"{path} cannot be read as JSON: build the data set again ({e})") from None
    missing = [key for key in keys if not isinstance(value, dict) or key not in value]
    if missing:
        raise UserError(f"{path} lacks {', '.join(missing)}: build the data set again")
    return value


class HashedFile:
    """A file for writing that enters its SHA-256 in a table {relative name: digest} when it is closed."""

    def __init__(self, folder, name, table):
        os.makedirs(os.path.dirname(os.path.join(folder, name)), exist_ok=True)
        self.file, self.digest, self.name, self.table = open(os.path.join(folder, name), "wb"), hashlib.sha256(), name, table

    def write(self, block):
        self.digest.update(block)
        return self.file.write(block)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.file.close()
        self.table[self.name] = self.digest.hexdigest()


def refuse_existing(path):
    if os.path.lexists(path):
        raise UserError(f"{path} exists already: delete it or choose another --output_dir")


def write_dataset(path, splits, vocab_size, manifest):
    """Writes a data set to a folder in one move: a kill on the way leaves nothing under its name.

    splits: {"train": (groups, copies, blocks)}: groups of `copies` puzzles of one example each, whose rows the iterable blocks
    yields in order as pairs (inputs, labels), uint8 [n, seq_len]. Token 0 is the padding and the label that is not counted.
    manifest: dict with "grid" (rows, columns) and whatever else tells what the data set is; it is written last, with the
    SHA-256 of every file. Raises UserError where path exists or cannot be written.
    """
    path = os.path.normpath(path)
    refuse_existing(path)
    part, table, seq_len = f"{path}.part-{os.getpid()}", {}, math.prod(manifest["grid"])
    shutil.rmtree(part, ignore_errors=True)
    try:
        for split, (groups, copies, blocks) in splits.items():
            rows, written = groups * copies, 0
            if rows >= 2 ** 31:
                raise UserError(f"{rows:,} {split} examples are more than the layout's 32-bit indices can count: choose fewer")
            name = f"{split}/all__%s.npy"
            with HashedFile(part, name % "inputs", table) as inputs, HashedFile(part, name % "labels", table) as labels:
                for file in (inputs, labels):
                    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": (rows, seq_len)})
                for block in blocks:
                    for file, array in zip((inputs, labels), block):
                        file.write(np.ascontiguousarray(array, dtype=np.uint8).reshape(-1, seq_len).data)
                    written += len(block[0])
            if written != rows:
                raise ValueError(f"{split}: {written} rows came where {rows} were announced")
            for field, array in (("puzzle_identifiers", np.zeros(rows)), ("puzzle_indices", np.arange(rows + 1)),
                                 ("group_indices", np.arange(0, rows + 1, copies))):
                with HashedFile(part, name % field, table) as file:
                    np.lib.format.write_array(file, array.astype(np.int32))
            # total_puzzles counts groups, not copies: so does the official builder.
            write_json(part, f"{split}/dataset.json", table, {
                "pad_id": 0, "ignore_label_id": 0, "blank_identifier_id": 0, "vocab_size": vocab_size, "seq_len": seq_len,
                "num_puzzle_identifiers": 1, "total_groups": groups, "mean_puzzle_examples": 1.0, "total_puzzles": groups, "sets": ["all"]})
        write_json(part, "identifiers.json", table, ["<blank>"])
        write_json(part, "manifest.json", {}, dict(manifest, sha256=table))
        refuse_existing(path)
        os.rename(part, path)
    except OSError as e:
        raise UserError(f"{path} cannot be written: {e.strerror or e}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_json(folder, name, table, value):
    with HashedFile(folder, name, table) as file:
        file.write((json.dumps(value, indent=2) + "\n").encode())


def csv_rows(path):
    """Yields (line number, row) of a .csv or .csv.gz file; raises UserError where it cannot be read."""
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


def read_csv(path, cells, question_values, answer_values, rated=True):
    """Yields the puzzles of a file in blocks (line numbers [n], questions [n, cells], answers [n, cells], ratings [n]).

    The file, .csv or .csv.gz, has the columns source,question,answer,rating in any order. cells: 0 for as many as the first
    question has. The two dicts map characters to numbers below 255; questions and answers come as these, in uint8. rated:
    whether ratings must be integers; they are 0 where not. Raises UserError with the file, the line and the fault
    of the first row that is not so, after yielding the rows before it.
    """
    numbered = csv_rows(path)
    _, header = next(numbered, (1, []))
    header = [name.strip() for name in header]
    for name in COLUMNS:
        if name not in header:
            raise UserError(f"{path}:1: no column {name}; the first line must be {','.join(COLUMNS)}")
    question, answer, rating = (header.index(name) for name in COLUMNS[1:])
    values = np.full((2, 256), 255, dtype=np.uint8)
    for i, known in enumerate((question_values, answer_values)):
        values[i, [ord(character) for character in known]] = list(known.values())
    empty = True
    while block := list(itertools.islice(numbered, 16384)):
        empty = False
        lines, rows = zip(*block)
        cells = cells or len((rows[0] + header)[question])
        formed = [len(row) == len(header) and len(row[question]) == len(row[answer]) == cells and (not rated or is_integer(row[rating]))
                  for row in rows]
        n = (formed + [False]).index(False)
        text = "".join([row[question] + row[answer] for row in rows[:n]]).encode("ascii", "replace")
        text = np.frombuffer(text, dtype=np.uint8).reshape(n, 2, cells)
        questions, answers = values[0][text[:, 0]], values[1][text[:, 1]]
        wrong = (np.maximum(questions, answers) == 255).any(axis=1)
        n = int(wrong.argmax()) if wrong.any() else n
        if n:
            yield np.array(lines[:n]), questions[:n], answers[:n], np.array([int(row[rating]) if rated else 0 for row in rows[:n]])
        if n < len(rows):
            raise UserError(f"{path}:{lines[n]}: {row_fault(rows[n], header, cells, question_values, answer_values)}")
    if empty:
        raise UserError(f"{path}:2: no puzzle under the header")


def is_integer(text):
    return len(text) < 19 and text.strip().removeprefix("-").isdecimal()


def row_fault(row, header, cells, question_values, answer_values):
    """What is wrong with the form of a row of a CSV file, in words."""
    if len(row) != len(header):
        return f"{len(row)} columns where the header has {len(header)}"
    for name, values in (("question", question_values), ("answer", answer_values)):
        text = row[header.index(name)]
        if len(text) != cells:
            return f"the {name} has {len(text)} characters, not {cells}"
        for place, character in enumerate(text, 1):
            if character not in values:
                return f"character {place} of the {name} is {character!r}, not one of {''.join(values)!r}"
    return f"the rating {row[header.index('rating')]!r} is not an integer"


# What the prepare scripts share besides.

def check_source(settings, **least):
    """A copy of a prepare script's settings with source filled in.

    Raises UserError for a wrong source, one without its files, or a setting below its value in least.
    """
    s = SimpleNamespace(**vars(settings))
    s.source = "csv" if s.train_csv or s.test_csv else s.source
    if s.source not in ("hub", "csv", "generate"):
        raise UserError(f"source must be hub, csv or generate, not {s.source!r}")
    if s.source == "csv" and not (s.train_csv and s.test_csv):
        raise UserError("source=csv needs both --train_csv=FILE and --test_csv=FILE")
    for name, value in least.items():
        if getattr(s, name) < value:
            raise UserError(f"{name} must be at least {value}, not {getattr(s, name)}")
    return s


def hash_boards(boards):
    """Hashes uint64 [n] of boards [n, cells]: 64 bits, so that equal hashes stand for equal boards."""
    padded = np.zeros((len(boards), -(-boards.shape[1] // 8) * 8), dtype=np.uint8)
    padded[:, :boards.shape[1]] = boards
    value = np.zeros(len(boards), dtype=np.uint64)
    for word in padded.view(np.uint64).T:
        value = (value ^ word) * np.uint64(0x9E3779B97F4A7C15)
        value ^= value >> np.uint64(29)
    return value


def contains(sorted_hashes, hashes):
    if not len(sorted_hashes):
        return np.zeros(len(hashes), dtype=bool)
    return sorted_hashes[np.searchsorted(sorted_hashes, hashes).clip(max=len(sorted_hashes) - 1)] == hashes


def in_parallel(function, tasks, processes):
    """Yields function(task) of each task in order; on several processes where that saves more than their start costs."""
    begun = time.monotonic()
    for done, task in enumerate(tasks, 1):
        yield function(task)
        left = (time.monotonic() - begun) / done * (len(tasks) - done)
        if min(processes, len(tasks) - done) > 1 and left * (1 - 1 / processes) > POOL_AFTER:
            with multiprocessing.get_context("spawn").Pool(min(processes, len(tasks) - done)) as pool:
                yield from pool.imap(function, tasks[done:])
            return


def cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


# Downloads and progress.

class Progress:
    """A line on stderr with what is done of total, the rate and the time left; nothing for a job of under 2 seconds.

    scale: how many of what add() counts make one printed unit. `done` was there before the start and gives no rate.
    """

    def __init__(self, label, total, unit="", scale=1, done=0):
        self.label, self.total, self.unit, self.scale, self.done, self.before = label, total, unit, scale, done, done
        self.start = time.monotonic()
        self.interval = 0.2 if sys.stderr.isatty() else 10.0
        self.next = self.start + max(2.0, self.interval)
        self.shown = False

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self.shown:
            self._print(last=True)

    def add(self, n):
        self.done += n
        if time.monotonic() >= self.next:
            self.next = time.monotonic() + self.interval
            self._print()

    def _print(self, last=False):
        seconds = time.monotonic() - self.start
        rate = (self.done - self.before) / max(seconds, 1e-9)
        done, total, unit = self.done / self.scale, self.total / self.scale, f" {self.unit}" if self.unit else ""
        left = f"{seconds:.0f} s" if last else f"{(self.total - self.done) / rate:.0f} s left" if rate and self.total else "? s left"
        line = f"{self.label}: {done:,.0f}/{total:,.0f}{unit}, {rate / self.scale:,.1f}{unit}/s, {left}"
        tty = sys.stderr.isatty()
        print(("\r" if tty else "") + line.ljust(79 if tty else 0), end="" if tty and not last else "\n", file=sys.stderr, flush=True)
        self.shown = True


def hub_endpoint():
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def hub_url(repo, name):
    """Address of a file of a dataset repository on the Hugging Face hub, or on the mirror that HF_ENDPOINT names."""
    return f"{hub_endpoint()}/datasets/{repo}/resolve/main/{name}"


class Hiccup(Exception):
    """A fault that may pass."""


def retry(attempt, done, attempts, wait, label):
    """attempt(), again after a Hiccup or a fault of the network, until there were `attempts` in a row in which done() did not rise.

    wait: seconds before the second one, doubled from one to the next up to 60. Raises Hiccup at the last.
    """
    failures, furthest = 0, done()
    while True:
        try:
            return attempt()
        except (Hiccup, requests.RequestException) as e:
            fault = e if isinstance(e, Hiccup) else Hiccup(network_fault(e))
        failures = 1 if done() > furthest else failures + 1
        furthest = max(furthest, done())
        if failures == attempts:
            raise fault
        seconds = min(60, wait * 2 ** (failures - 1)) * random.uniform(0.5, 1)
        if seconds >= 1:
            print(f"{label}: {fault}; trying again in {seconds:.0f} s", file=sys.stderr, flush=True)
        time.sleep(seconds)


def download(url, path, attempts=6, timeout=30.0, wait=1.0):
    """Downloads url to path, unless path exists; what a break or a kill leaves in path + ".part" is gone on with.

    attempts: failures in a row without a new byte before giving up; timeout: seconds without a byte; wait: seconds before the
    second attempt, doubled from one to the next. Size and SHA-256 are checked where the server states them. HF_TOKEN goes to the
    hub only. Raises UserError with the URL: at once where trying again cannot help (a 404, say), else at the last attempt.
    """
    if os.path.exists(path):
        return
    part = path + ".part"
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        retry(lambda: fetch(url, part, timeout), lambda: size_so_far(part), attempts, wait, url)
        os.replace(part, path)
    except Hiccup as e:
        raise UserError(f"{url} cannot be downloaded ({e}): run again to go on from the {size_so_far(part) / 1e6:,.0f} MB that are there, "
                        "or use files of your own with --source=csv") from None
    except OSError as e:
        raise UserError(f"{path} cannot be written: {e.strerror or e}") from None


def fetch(url, part, timeout):
    """One attempt at the rest of a download; raises Hiccup, or requests' own exceptions, unless part is whole."""
    have = size_so_far(part)
    headers = {"Accept-Encoding": "identity"}  # the sizes below are of what is sent
    if have:
        headers["Range"] = f"bytes={have}-"
    if os.environ.get("HF_TOKEN") and url.startswith(hub_endpoint() + "/"):
        headers["Authorization"] = f"Bearer {os.environ['HF_TOKEN']}"
    try:
        with requests.get(url, headers=headers, stream=True, timeout=timeout) as response:
            status = response.status_code
            if status in (408, 429) or status >= 500:
                raise Hiccup(f"status {status}")
            if status not in (200, 206, 416):
                hint = "set HF_TOKEN to a token that may read it" if status in (401, 403) else "is the address right?"
                raise UserError(f"{url} cannot be downloaded (status {status}): {hint}")
            span = response.headers.get("Content-Range", "").removeprefix("bytes ")  # "5-9/10" with 206, "*/10" with 416
            if status == 206 and not span.startswith(f"{have}-"):
                os.remove(part)
                raise Hiccup("another range came than was asked for")
            # The hub states size and hash on its redirect, not on the file.
            linked = {key: hop.headers[key] for hop in response.history + [response] for key in LINKED if key in hop.headers}
            total = linked.get(LINKED[0]) or (response.headers.get("Content-Length", "") if status == 200 else span.partition("/")[2])
            total = int(total) if total.isdecimal() else None
            if status != 416:
                have = have if status == 206 else 0
                with open(part, "ab" if have else "wb") as f, Progress(f"downloading {url}", total or 0, "MB", 1e6, have) as progress:
                    for block in response.iter_content(1 << 15):
                        f.write(block)
                        progress.add(len(block))
    except ValueError:
        raise UserError(f"{url} is no address that can be downloaded: set HF_ENDPOINT to one like https://huggingface.co") from None
    size, digest = os.path.getsize(part), linked.get(LINKED[1], "").strip('"')
    if status != 416 and total and size < total:
        raise Hiccup(f"broke off at {size:,} of {total:,} bytes")
    if total and size != total:
        os.remove(part)
        raise Hiccup(f"{size:,} bytes came where {total:,} were announced")
    if len(digest) == 64 and digest != file_sha256(part):
        os.remove(part)
        raise Hiccup("its SHA-256 is not the one that the hub states")


def size_so_far(path):
    return os.path.getsize(path) if os.path.exists(path) else 0


def network_fault(e):
    """The cause of a requests exception in words, without the address, which may hold a secret."""
    reason = getattr(e.args[0], "reason", e.args[0]) if e.args else ""
    return f"{type(e).__name__}: {str(reason).rpartition(': ')[2]}"


# Google Cloud Storage over HTTP.

class BucketError(UserError):
    """What a bucket refuses, or has not done after all attempts: one line with the gs:// address."""


class Bucket:
    """The objects under gs://bucket/prefix, of Google Cloud Storage or of the emulator at STORAGE_EMULATOR_HOST.

    attempts: failures in a row without a new byte before giving up; wait: seconds before the second attempt, doubled from one to
    the next; timeout: seconds without a byte; chunk: bytes of one request, a multiple of 256 KiB. Names are relative to the prefix.
    Raises UserError for a malformed address. Several threads may call the methods, which raise BucketError, and OSError for a
    local file that cannot be read or written.
    """

    def __init__(self, url, *, attempts=8, wait=1.0, timeout=30.0, chunk=1 << 23):
        match = re.fullmatch(r"gs://([a-z0-9][a-z0-9._-]{1,220}[a-z0-9])/((?:[^/\r\n]+/)*)", url.removesuffix("/") + "/")
        if not match or {".", ".."} & set(match[2].split("/")):
            raise UserError(f"{url!r} is no address in a bucket: write gs://bucket/folder")
        self.bucket, self.prefix = match.groups()
        self.attempts, self.wait, self.timeout, self.chunk = attempts, wait, timeout, chunk
        host = os.environ.get("STORAGE_EMULATOR_HOST", "").rstrip("/")
        self.emulator = host if "://" in host or not host else f"http://{host}"
        server = self.emulator or "https://storage.googleapis.com"
        self.objects = f"{server}/storage/v1/b/{self.bucket}/o"
        self.inserts = f"{server}/upload/storage/v1/b/{self.bucket}/o?uploadType=resumable"
        self.session, self.token, self.expiry = requests.Session(), None, 0
        self.session.headers["Accept-Encoding"] = "identity"  # lengths are of what is sent
        self.session.auth = lambda request: request  # or else ~/.netrc replaces the token

    def check(self, write=True):
        """Lists and reads, and writes and deletes a small object with write, in 20 seconds; raises UserError with what fails.

        It does what a run will do: permissions may hold for a prefix only, and to ask for them takes another one.
        """
        probe, name = copy.copy(self), f".probe-{os.urandom(8).hex()}"
        probe.attempts, probe.wait, probe.timeout = min(self.attempts, 3), min(self.wait, 0.1), min(self.timeout, 5)
        probe._json(self.objects, prefix=self.prefix, maxResults=1)
        if write:
            probe.write(name, b"probe")
            probe.delete(name)
        probe.read(name)

    def upload(self, path, name):
        """Sends a file to an object, whole or not at all. Of a file that grows, what it was at first."""
        with open(path, "rb") as f:
            self._insert(f, name, *file_md5(path))

    def write(self, name, content):
        """Sends bytes to an object."""
        self._insert(io.BytesIO(content), name, len(content), hashlib.md5(content).hexdigest())

    def read(self, name):
        """The bytes of an object, or None where there is none."""
        response = self._retry(name, lambda: self._request("GET", self._url(name), name, (200, 404), params={"alt": "media"}))
        return response.content if response.status_code == 200 else None

    def delete(self, name):
        """Deletes an object, if it is there."""
        self._retry(name, lambda: self._request("DELETE", self._url(name), name, (200, 204, 404)))

    def list(self):
        """{name: (size in bytes, MD5 in hex or None)} of all objects under the prefix."""
        found, page = {}, {"nextPageToken": None}
        while "nextPageToken" in page:
            page = self._json(self.objects, prefix=self.prefix, fields="nextPageToken,items(name,size,md5Hash)", pageToken=page["nextPageToken"])
            for item in page.get("items", []):
                if not item["name"].endswith("/"):  # the console's empty folders
                    found[item["name"].removeprefix(self.prefix)] = size_and_md5(item)
        return found

    def download(self, name, path):
        """Fetches an object to path, by way of path + ".part", from which a later call goes on.

        Checks size and MD5; an object without MD5 (a composite one, as gcloud makes them of large files) by its size alone.
        """
        size, md5 = size_and_md5(self._json(self._url(name), name))
        part = path + ".part"
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)

        def attempt():
            have = size_so_far(part)
            if have < size or size == 0:
                response = self._request("GET", self._url(name), name, (200, 206), params={"alt": "media"}, stream=True,
                                         headers={"Range": f"bytes={have}-"} if have else {})
                with open(part, "ab" if response.status_code == 206 else "wb") as f:
                    for block in response.iter_content(1 << 16):
                        f.write(block)
                        progress.add(f.tell() - progress.done)
            if size_so_far(part) != size or md5 and file_md5(part)[1] != md5:
                os.remove(part)
                raise Hiccup("what came has another size or MD5 than the object")

        with Progress(f"downloading {self._at(name)}", size, "MB", 1e6, size_so_far(part)) as progress:
            self._retry(name, attempt, lambda: size_so_far(part))
        os.replace(part, path)

    def _insert(self, f, name, size, md5):
        """Sends the first size bytes of f in a resumable session, which after a fault goes on from what the server says it has."""
        about = {"name": self.prefix + name, "md5Hash": base64.b64encode(bytes.fromhex(md5)).decode()}  # no other MD5 is accepted
        session, furthest = None, 0

        def attempt():
            nonlocal session, furthest
            sent = -1  # not known: the first request asks
            if session is None:
                session = self._request("POST", self.inserts, name, json=about).headers["Location"]
                sent = 0
            while True:
                f.seek(max(sent, 0))
                block = f.read(min(self.chunk, size - sent)) if sent >= 0 else b""
                span = f"{sent}-{sent + len(block) - 1}" if block else "*"
                response = self._request("PUT", session, name, (200, 201, 308, 400, 404, 410), data=block,
                                         headers={"Content-Range": f"bytes {span}/{size}"})
                if response.status_code != 308:
                    break
                before, sent = sent, 0
                if "Range" in response.headers:  # bytes=0-LAST, and none where nothing has arrived
                    sent = int(response.headers["Range"].removeprefix("bytes=0-")) + 1
                if sent <= before:
                    raise Hiccup("nothing of what was sent has arrived")
                furthest = max(furthest, sent)
            if response.status_code >= 400 or size_and_md5(response.json()) != (size, md5):
                session = None
                raise Hiccup(f"status {response.status_code}: the server has dropped the upload, or it arrived damaged")

        self._retry(name, attempt, lambda: furthest)

    def _url(self, name):
        return f"{self.objects}/{urllib.parse.quote(self.prefix + name, safe='')}"

    def _at(self, name):
        return f"gs://{self.bucket}/{self.prefix}{name}".rstrip("/") + (f" at {self.emulator}" if self.emulator else "")

    def _json(self, url, name="", **params):
        return self._retry(name, lambda: self._request("GET", url, name, params=params).json())

    def _retry(self, name, attempt, done=lambda: 0):
        try:
            return retry(attempt, done, self.attempts, self.wait, self._at(name))
        except Hiccup as e:
            raise BucketError(f"{self._at(name)}: {e}; gave up after {self.attempts} attempts") from None

    def _request(self, method, url, name, ok=(200,), headers={}, **options):
        """The response, its status one of ok. Raises Hiccup or a fault of requests where another attempt may help, else BucketError."""
        for fresh in (False, True):  # a fresh token after a 401, once
            token = self._token(fresh)
            authorization = {"Authorization": f"Bearer {token}"} if token else {}
            response = self.session.request(method, url, headers={**headers, **authorization}, timeout=self.timeout,
                                            allow_redirects=False, **options)
            status = response.status_code
            if status in ok:
                return response
            if status != 401:
                break
        try:
            fault = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            fault = response.text
        fault = f"status {status} {' '.join(fault.split())[:200]}".replace(token or "\0", "***").strip()
        if status in (408, 429) or status >= 500:
            raise Hiccup(fault)
        mend = {401: ": log in again (gcloud auth login)", 404: ": no such bucket or object",
                403: ": the account needs the role Storage Object Admin on the bucket, a VM also the scope cloud-platform"}
        raise BucketError(f"{self._at(name)}: {fault}{mend.get(status, '')}")

    def _token(self, fresh):
        if not self.emulator and (fresh or time.monotonic() >= self.expiry):
            self.token, seconds = access_token()
            self.expiry = time.monotonic() + seconds
        return self.token


def access_token():
    """(OAuth token, seconds to use it) from CLOUDSDK_AUTH_ACCESS_TOKEN, a Google Cloud VM's metadata server or gcloud, or Hiccup."""
    if os.environ.get("CLOUDSDK_AUTH_ACCESS_TOKEN"):
        return os.environ["CLOUDSDK_AUTH_ACCESS_TOKEN"].strip(), math.inf
    host = os.environ.get("GCE_METADATA_HOST") or "169.254.169.254"  # by number: looking up a name can hang off Google Cloud
    try:
        response = requests.get(f"http://{host}/computeMetadata/v1/instance/service-accounts/default/token", timeout=3,
                                headers={"Metadata-Flavor": "Google"}, proxies={"http": ""})  # no proxy leads to the machine's own metadata
        response.raise_for_status()
        return response.json()["access_token"], response.json()["expires_in"] - 225  # a new one is there 4 minutes ahead
    except (requests.RequestException, KeyError):
        pass
    try:
        done = subprocess.run(["gcloud", "auth", "print-access-token"], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=15, check=True)
        return done.stdout.strip(), 600  # it may be an old one, which a 401 replaces
    except (OSError, subprocess.SubprocessError):
        raise Hiccup("no Google credentials: run `gcloud auth login`, or give the VM a service account and the scope cloud-platform, "
                     "or set CLOUDSDK_AUTH_ACCESS_TOKEN") from None


def size_and_md5(item):
    """(size in bytes, MD5 in hex or None) of an object, from what the API says about it."""
    return int(item["size"]), base64.b64decode(item["md5Hash"]).hex() if item.get("md5Hash") else None


def file_md5(path):
    """(size in bytes, MD5 in hex) of a file."""
    size, digest = 0, hashlib.md5()
    with open(path, "rb") as f:
        for block in iter(lambda: f.read(1 << 20), b""):
            digest.update(block)
            size += len(block)
    return size, digest.hexdigest()


def local_dataset(path, folder=None):
    """The folder of a data set: path itself, or for gs://bucket/.../NAME data/NAME (or folder), downloaded unless it is there.

    One process of a host downloads, the others wait. A kill leaves folder + ".part", from which the next call goes on. Raises
    UserError where the folder holds another data set, and where the bucket, a file in it or the disk's free space will not do.
    """
    if not path.startswith("gs://"):
        return path
    bucket = Bucket(path)
    folder = os.path.normpath(folder or os.path.join("data", path.rstrip("/").rpartition("/")[2]))
    import fcntl  # not on Windows, where the rest of this file works
    parent, part = os.path.dirname(folder) or ".", folder + ".part"
    try:
        os.makedirs(parent, exist_ok=True)
        with open(folder + ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            bucket.check(write=False)
            manifest = bucket.read("manifest.json") or b""
            try:
                hashes = json.loads(manifest)["sha256"]
                damaged = not hashes or not all(re.fullmatch(r"((train|test)/)?\w+\.(json|npy)", name) for name in hashes)
            except (ValueError, KeyError, TypeError):
                damaged = True
            if damaged:  # or a name leads out of the folder
                raise UserError(f"{path} holds no manifest.json, or a damaged one: upload one with `python data.py upload data/NAME {path}`")
            if os.path.lexists(folder):
                if Dataset(folder, "train").hashes() == hashes:
                    return folder
                raise UserError(f"{folder} holds another data set than {path}: move it away, or name it instead to use it")

            def arrived(name):
                file = os.path.join(part, name)
                return os.path.exists(file) and file_sha256(file) == hashes[name]

            missing = [name for name in hashes if not arrived(name)]
            needed, free = sum(size for name, (size, _) in bucket.list().items() if name in missing), shutil.disk_usage(parent).free
            if needed > free:
                raise UserError(f"{path} needs {needed / 1e9:.2f} GB in {parent}, where {free / 1e9:.2f} GB are free: make room")
            for name in missing:
                bucket.download(name, os.path.join(part, name))
                if not arrived(name):
                    raise UserError(f"{path}/{name} does not match manifest.json: upload the data set again")
            with open(os.path.join(part, "manifest.json"), "wb") as f:
                f.write(manifest)
            os.rename(part, folder)
            return folder
    except OSError as e:
        raise UserError(f"{folder} cannot be written: {e.strerror or e}") from None


def upload_dataset(folder, url):
    """Uploads a checked data set to a bucket, manifest.json last; files that are there already are left. Raises UserError.

    One of the official builder, without a manifest, gets one in the bucket. Another data set there is not overwritten.
    """
    dataset = [Dataset(folder, split) for split in ("train", "test")][-1]
    manifest = dataset.manifest or {"sha256": dataset.hashes()}
    content, bucket = (json.dumps(manifest, indent=2) + "\n").encode(), Bucket(url)
    bucket.check()
    if bucket.read("manifest.json") not in (None, content):
        raise UserError(f"{url} holds another data set: choose another address")
    listed, files = bucket.list(), {name: os.path.join(folder, name) for name in manifest["sha256"]}
    with Progress(f"uploading to {url}", sum(map(os.path.getsize, files.values())), "MB", 1e6) as progress:
        for name, file in files.items():
            dataset._check_file(name)
            if listed.get(name) != file_md5(file):
                bucket.upload(file, name)
            progress.add(os.path.getsize(file))
    bucket.write("manifest.json", content)


def main(argv):
    """The commands upload and download; raises UserError."""
    if len(argv) == 3 and argv[0] == "upload":
        upload_dataset(*argv[1:])
        print(f"{argv[1]} is in {argv[2]}")
    elif argv[:1] == ["download"] and len(argv) in (2, 3) and argv[1].startswith("gs://"):
        print(f"{argv[1]} is in {local_dataset(*argv[1:])}")
    else:
        raise UserError("usage: python data.py upload data/NAME gs://bucket/data/NAME | download gs://bucket/data/NAME [folder]")


if __name__ == "__main__":
    command(lambda: main(sys.argv[1:]), __file__)
