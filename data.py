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

import numpy as np
import requests

from configurator import UserError

FIELDS = ("inputs", "labels", "puzzle_identifiers", "puzzle_indices", "group_indices")
METADATA = {"pad_id": int, "ignore_label_id": (int, type(None)), "blank_identifier_id": int, "vocab_size": int, "seq_len": int,
            "num_puzzle_identifiers": int, "total_groups": int, "mean_puzzle_examples": (int, float), "total_puzzles": int}
IGNORED = -100  # the label that no loss counts
COLUMNS = ("source", "question", "answer", "rating")  # of the CSV files
LINKED = ("X-Linked-Size", "X-Linked-Etag")  # the hub's headers: size and SHA-256 of a file that lies elsewhere
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
            raise UserError(f"{os.path.join(path, split)}: no such data set; build it with prepare_sudoku.py")
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


def read_csv(path, cells, question_values, answer_values):
    """Yields the puzzles of a file in blocks (line numbers [n], questions [n, cells], answers [n, cells], ratings [n]).

    The file, .csv or .csv.gz, has the columns source,question,answer,rating in any order. The two dicts map characters to
    numbers below 255; questions and answers come as these, in uint8. Raises UserError with the file, the line and the fault
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
        formed = [len(row) == len(header) and len(row[question]) == len(row[answer]) == cells and is_integer(row[rating]) for row in rows]
        n = (formed + [False]).index(False)
        text = "".join([row[question] + row[answer] for row in rows[:n]]).encode("ascii", "replace")
        text = np.frombuffer(text, dtype=np.uint8).reshape(n, 2, cells)
        questions, answers = values[0][text[:, 0]], values[1][text[:, 1]]
        wrong = (np.maximum(questions, answers) == 255).any(axis=1)
        n = int(wrong.argmax()) if wrong.any() else n
        if n:
            yield np.array(lines[:n]), questions[:n], answers[:n], np.array([int(row[rating]) for row in rows[:n]])
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


def download(url, path, attempts=6, timeout=30.0, wait=1.0):
    """Downloads url to path, unless path exists; what a break or a kill leaves in path + ".part" is gone on with.

    attempts: failures in a row without a new byte before giving up; timeout: seconds without a byte; wait: seconds before the
    second attempt, doubled from one to the next. Size and SHA-256 are checked where the server states them. HF_TOKEN goes to the
    hub only. Raises UserError with the URL: at once where trying again cannot help (a 404, say), else at the last attempt.
    """
    if os.path.exists(path):
        return
    part, failures, furthest = path + ".part", 0, 0
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        while fault := fetch(url, part, timeout):
            have = os.path.getsize(part) if os.path.exists(part) else 0
            failures = 1 if have > furthest else failures + 1
            furthest = max(have, furthest)
            if failures == attempts:
                raise UserError(f"{url} cannot be downloaded ({fault}): run again to go on from the {have / 1e6:,.0f} MB that are there, "
                                "or use files of your own with --source=csv")
            seconds = min(60, wait * 2 ** (failures - 1)) * random.uniform(0.5, 1)
            print(f"{url}: {fault}; trying again in {seconds:.0f} s", file=sys.stderr, flush=True)
            time.sleep(seconds)
        os.replace(part, path)
    except OSError as e:
        raise UserError(f"{path} cannot be written: {e.strerror or e}") from None


def fetch(url, part, timeout):
    """One attempt at the rest of a download. Returns None when part is whole, else what went wrong and may pass."""
    have = os.path.getsize(part) if os.path.exists(part) else 0
    headers = {"Accept-Encoding": "identity"}  # the sizes below are of what is sent
    if have:
        headers["Range"] = f"bytes={have}-"
    if os.environ.get("HF_TOKEN") and url.startswith(hub_endpoint() + "/"):
        headers["Authorization"] = f"Bearer {os.environ['HF_TOKEN']}"
    try:
        with requests.get(url, headers=headers, stream=True, timeout=timeout) as response:
            status = response.status_code
            if status in (408, 429) or status >= 500:
                return f"status {status}"
            if status not in (200, 206, 416):
                hint = "set HF_TOKEN to a token that may read it" if status in (401, 403) else "is the address right?"
                raise UserError(f"{url} cannot be downloaded (status {status}): {hint}")
            span = response.headers.get("Content-Range", "").removeprefix("bytes ")  # "5-9/10" with 206, "*/10" with 416
            if status == 206 and not span.startswith(f"{have}-"):
                os.remove(part)
                return "another range came than was asked for"
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
    except requests.RequestException as e:
        if isinstance(e, ValueError):
            raise UserError(f"{url} is no address that can be downloaded: set HF_ENDPOINT to one like https://huggingface.co") from None
        return network_fault(e)
    size, digest = os.path.getsize(part), linked.get(LINKED[1], "").strip('"')
    if status != 416 and total and size < total:
        return f"broke off at {size:,} of {total:,} bytes"
    if total and size != total:
        os.remove(part)
        return f"{size:,} bytes came where {total:,} were announced"
    if len(digest) == 64 and digest != file_sha256(part):
        os.remove(part)
        return "its SHA-256 is not the one that the hub states"
    return None


def network_fault(e):
    """The cause of a requests exception in words, without the address, which may hold a secret."""
    reason = getattr(e.args[0], "reason", e.args[0]) if e.args else ""
    return f"{type(e).__name__}: {str(reason).rpartition(': ')[2]}"


# Google Cloud Storage over HTTP.

class BucketError(UserError):
    """What a bucket refuses, or has not done after all attempts: one line with the gs:// address."""


class Hiccup(Exception):
    """A fault that may pass; args: what it is, and the seconds that the server asks to wait."""


class Bucket:
    """The objects under gs://bucket/prefix, of Google Cloud Storage or of the emulator at STORAGE_EMULATOR_HOST.

    attempts: failures in a row without a new byte before giving up; wait: seconds before the second attempt, doubled from one to
    the next up to 60 times as many; timeout: seconds without a byte; chunk: bytes of one request, a multiple of 256 KiB. Names are
    relative to the prefix. Raises UserError for a malformed address. Several threads may call the methods, which raise BucketError,
    and OSError for a local file that cannot be read or written.
    """

    def __init__(self, url, *, attempts=8, wait=1.0, timeout=30.0, chunk=1 << 23):
        match = re.fullmatch(r"gs://([a-z0-9][a-z0-9._-]{1,220}[a-z0-9])((?:/[^/\r\n]+)*)/?", url)
        if not match or {".", ".."} & set(match[2].split("/")):
            raise UserError(f"{url!r} is no address in a bucket: write gs://bucket/folder")
        self.bucket, self.prefix = match[1], match[2][1:]
        self.attempts, self.wait, self.timeout, self.chunk = attempts, wait, timeout, chunk
        host = os.environ.get("STORAGE_EMULATOR_HOST", "").rstrip("/")
        self.emulator = host if "://" in host or not host else f"http://{host}"
        self.objects, self.inserts = (f"{self.emulator or 'https://storage.googleapis.com'}{path}/storage/v1/b/{self.bucket}/o"
                                      for path in ("", "/upload"))
        self.session, self.lock, self.token, self.expiry = requests.Session(), threading.Lock(), None, 0
        self.session.headers["Accept-Encoding"] = "identity"  # lengths are of what is sent

    def check(self, write=True):
        """Lists and reads, and writes and deletes a small object with write, in 20 seconds; raises UserError with what fails.

        It does what a run will do: permissions may hold for a prefix only, and to ask for them takes another one.
        """
        probe, name = copy.copy(self), f".probe-{os.urandom(8).hex()}"
        probe.attempts, probe.wait, probe.timeout = min(self.attempts, 3), min(self.wait, 0.1), min(self.timeout, 5)
        probe._json(probe._request("GET", self.objects, params={"prefix": self._full(""), "maxResults": 1}))
        if write:
            probe.write(name, b"probe")
        probe.read(name)
        if write:
            probe.delete(name)

    def upload(self, path, name, progress=None):
        """Sends a file to an object, whole or not at all; counts bytes in progress. Of a file that grows, what it was at first."""
        with open(path, "rb") as f:
            self._insert(f, name, progress)

    def write(self, name, content):
        """Sends bytes to an object."""
        self._insert(io.BytesIO(content), name)

    def read(self, name):
        """The bytes of an object, or None where there is none."""
        response = self._request("GET", self._url(name), name, (200, 404), params={"alt": "media"})
        return response.content if response.status_code == 200 else None

    def delete(self, name):
        """Deletes an object, if it is there."""
        self._request("DELETE", self._url(name), name, (200, 204, 404))

    def list(self):
        """{name: (size in bytes, MD5 in hex or None)} of all objects under the prefix."""
        found, params = {}, {"prefix": self._full(""), "fields": "nextPageToken,items(name,size,md5Hash)"}
        while True:
            page = self._json(self._request("GET", self.objects, params=params))
            for item in page.get("items", []):
                if not item["name"].endswith("/"):  # the console's empty folders
                    md5 = base64.b64decode(item["md5Hash"]).hex() if item.get("md5Hash") else None
                    found[item["name"].removeprefix(params["prefix"])] = int(item["size"]), md5
            if not page.get("nextPageToken"):
                return found
            params["pageToken"] = page["nextPageToken"]

    def download(self, name, path):
        """Fetches an object to path, by way of path + ".part", from which a later call goes on.

        Checks size and MD5; an object without MD5 (a composite one, as gcloud makes them of large files) by its size alone.
        """
        about, part = self._json(self._request("GET", self._url(name), name)), path + ".part"
        size, md5 = int(about["size"]), about.get("md5Hash")
        have = lambda: os.path.getsize(part) if os.path.exists(part) else 0
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)

        def save(response):
            with open(part, "ab" if response.status_code == 206 else "wb") as f:
                for block in response.iter_content(1 << 16):
                    f.write(block)
                    progress.add(f.tell() - progress.done)

        def attempt():
            if have() < size or size == 0:
                headers = {"Range": f"bytes={have()}-"} if have() else {}
                params = {"alt": "media", "generation": about.get("generation")}  # one version, should another replace it
                self._once("GET", self._url(name), name, (200, 206), save, params=params, headers=headers)
            if have() < size:
                raise Hiccup(f"broke off at {have():,} of {size:,} bytes")
            if have() > size or md5 and file_md5(part)[1] != md5:
                os.remove(part)
                raise Hiccup("what came has another size or MD5 than the object")

        with Progress(f"downloading {self._at(name)}", size, "MB", 1e6, have()) as progress:
            self._retry(name, attempt, have)
        os.replace(part, path)

    def _insert(self, f, name, progress=None):
        """One request for up to a chunk; for more a resumable session, which goes on from what the server says it has."""
        size, md5 = file_md5(f)
        about = {"name": self._full(name), "md5Hash": md5}  # the server shows no object with another MD5
        session, unsure, sent, furthest = None, False, 0, 0

        def attempt():
            nonlocal session, unsure, sent, furthest
            while True:
                f.seek(sent)
                if size <= self.chunk:
                    part = f"--{md5}\r\nContent-Type: application/%s\r\n\r\n"
                    body = (part % "json" + json.dumps(about) + "\r\n" + part % "octet-stream").encode() + f.read(size) + f"\r\n--{md5}--".encode()
                    response = self._once("POST", self.inserts, name, params={"uploadType": "multipart"}, data=body,
                                          headers={"Content-Type": f'multipart/related; boundary="{md5}"'})
                elif session is None:
                    response = self._once("POST", self.inserts, name, params={"uploadType": "resumable"}, json=about)
                    session, unsure, sent = response.headers["Location"], False, 0
                    continue
                else:
                    block = b"" if unsure else f.read(min(self.chunk, size - sent))
                    span = "*" if unsure else f"{sent}-{sent + len(block) - 1}"
                    asked, unsure = unsure, True  # until the answer is here
                    response = self._once("PUT", session, name, (200, 201, 308, 400, 404, 410), data=block,
                                          headers={"Content-Range": f"bytes {span}/{size}"})
                status, before = response.status_code, sent
                if status in (400, 404, 410):
                    session, sent = None, 0
                    raise Hiccup(f"status {status}: the server has dropped the upload")
                if status == 308:  # with Range: bytes=0-LAST, or none where nothing has arrived
                    sent, unsure = int(response.headers.get("Range", "-").rpartition("-")[2] or -1) + 1, False
                    if not asked and sent <= before:
                        raise Hiccup("nothing of what was sent has arrived")
                elif self._json(response).get("md5Hash") != md5:
                    session, sent = None, 0
                    self.delete(name)
                    raise Hiccup("it arrived damaged")
                done = sent if status == 308 else size
                if progress and done > furthest:
                    progress.add(done - furthest)
                furthest = max(furthest, done)
                if status != 308:
                    return

        self._retry(name, attempt, lambda: furthest)

    def _full(self, name):
        return f"{self.prefix}/{name}" if self.prefix else name

    def _url(self, name):
        return f"{self.objects}/{urllib.parse.quote(self._full(name), safe='')}"

    def _at(self, name):
        return f"gs://{self.bucket}/{self._full(name)}".rstrip("/") + (f" at {self.emulator}" if self.emulator else "")

    def _json(self, response):
        try:
            return response.json()
        except ValueError:
            raise BucketError(f"{self._at('')}: its answer is not JSON: is that a storage server?") from None

    def _request(self, method, url, name="", *rest, **options):
        return self._retry(name, lambda: self._once(method, url, name, *rest, **options))

    def _retry(self, name, attempt, done=lambda: 0):
        """attempt(), again after a Hiccup, until there were `attempts` in a row in which done() did not rise."""
        failures, furthest = 0, done()
        while True:
            try:
                return attempt()
            except Hiccup as e:
                fault, asked = (*e.args, 0)[:2]
            failures, furthest = 1 if done() > furthest else failures + 1, max(done(), furthest)
            if failures >= self.attempts:
                raise BucketError(f"{self._at(name)}: {fault}; gave up after {failures} attempts")
            seconds = min(60 * self.wait, max(asked, self.wait * 2 ** (failures - 1) * random.uniform(0.5, 1)))
            if seconds >= 5:
                print(f"{self._at(name)}: {fault}; trying again in {seconds:.0f} s", file=sys.stderr, flush=True)
            time.sleep(seconds)

    def _once(self, method, url, name="", ok=(200,), into=None, **options):
        """One attempt at a request, its body read, by into(response) where given; raises Hiccup where another may help."""
        for fresh in (False, True):  # a fresh token after a 401, once
            token = self._token(fresh)

            def authorize(request):  # a plain header would lose to ~/.netrc
                request.headers.update({"Authorization": f"Bearer {token}"} if token else {})
                return request

            try:
                with self.session.request(method, url, auth=authorize, timeout=self.timeout, stream=True, allow_redirects=False,
                                          **options) as response:
                    status = response.status_code
                    if into and status in ok:
                        into(response)
                    elif len(response.content) < int(response.headers.get("Content-Length", 0)):
                        raise Hiccup("the answer broke off")
            except requests.RequestException as e:
                raise Hiccup(network_fault(e)) from None
            if status in ok:
                return response
            if status != 401:
                break
        try:
            fault = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            fault = response.text
        fault = f"status {status} {' '.join(fault.split())[:200]}".replace(token or "\0", "***").strip()
        after = response.headers.get("Retry-After", "")
        if status in (408, 429) or status >= 500 or status == 400 and "MD5" in fault:  # damaged on the way
            raise Hiccup(fault, int(after) if after.isdecimal() else 0)
        mend = {401: ": log in again (gcloud auth login)", 404: ": no such bucket or object",
                403: ": the account needs the role Storage Object Admin on the bucket, a VM also the scope cloud-platform"}
        raise BucketError(f"{self._at(name)}: {fault}{mend.get(status, '')}")

    def _token(self, fresh):
        with self.lock:
            if not self.emulator and (fresh or time.monotonic() >= self.expiry):
                try:
                    self.token, seconds = access_token()
                except UserError as e:
                    if self.token is None:
                        raise BucketError(f"{self._at('')}: {e}") from None
                    raise Hiccup("no fresh access token") from None  # there was one, so this may pass
                self.expiry = time.monotonic() + seconds
            return self.token


def access_token():
    """(OAuth token, seconds to use it) from CLOUDSDK_AUTH_ACCESS_TOKEN, a Google Cloud VM's metadata server or gcloud; or UserError."""
    if os.environ.get("CLOUDSDK_AUTH_ACCESS_TOKEN"):
        return os.environ["CLOUDSDK_AUTH_ACCESS_TOKEN"].strip(), math.inf
    host = os.environ.get("GCE_METADATA_HOST") or "169.254.169.254"  # by number: looking up a name can hang off Google Cloud
    try:
        with requests.Session() as session:
            session.trust_env = False  # no proxy leads to the machine's own metadata
            response = session.get(f"http://{host}/computeMetadata/v1/instance/service-accounts/default/token",
                                   headers={"Metadata-Flavor": "Google"}, timeout=3)
        if response.status_code == 200 and response.headers.get("Metadata-Flavor") == "Google":
            return response.json()["access_token"], response.json()["expires_in"] - 225  # a new one is there 4 minutes ahead
    except (requests.RequestException, KeyError):
        pass
    try:
        done = subprocess.run(["gcloud", "auth", "print-access-token"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=15)
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.strip(), 600  # it may be an old one, which a 401 replaces
    except (OSError, subprocess.SubprocessError):
        pass
    raise UserError("no Google credentials: run `gcloud auth login`, or give the VM a service account and the scope cloud-platform, "
                    "or set CLOUDSDK_AUTH_ACCESS_TOKEN")


def file_md5(file):
    """(size in bytes, MD5 in base64 as the API writes it) of a path or an open file."""
    if isinstance(file, str):
        with open(file, "rb") as f:
            return file_md5(f)
    size, digest = 0, hashlib.md5(usedforsecurity=False)
    for block in iter(lambda: file.read(1 << 20), b""):
        digest.update(block)
        size += len(block)
    return size, base64.b64encode(digest.digest()).decode()


def local_dataset(path, folder=None):
    """The folder of a data set: path itself, or for gs://bucket/.../NAME data/NAME (or folder), downloaded unless it is there.

    One process of a host downloads, the others wait. A kill leaves folder + ".part", from which the next call goes on. Raises
    UserError where the folder holds another data set, and where the bucket, a file in it or the disk's free space will not do.
    """
    if not path.startswith("gs://"):
        return path
    bucket = Bucket(path)
    folder = os.path.normpath(folder or os.path.join("data", bucket.prefix.rpartition("/")[2] or bucket.bucket))
    import fcntl  # not on Windows, where the rest of this file works
    parent, part = os.path.dirname(folder) or ".", folder + ".part"
    try:
        os.makedirs(parent, exist_ok=True)
        with open(folder + ".lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"{folder}: waiting for another process that downloads it", file=sys.stderr, flush=True)
                fcntl.flock(lock, fcntl.LOCK_EX)
            bucket.check(write=False)
            manifest = bucket.read("manifest.json")
            if manifest is None:
                raise UserError(f"{path} holds no manifest.json: put a data set there with `python data.py upload data/NAME {path}`")
            hashes = manifest_hashes(manifest, path)
            if os.path.lexists(folder):
                own = os.path.join(folder, "manifest.json")
                if os.path.exists(own) and read_json(own, "sha256")["sha256"] == hashes:
                    return folder
                raise UserError(f"{folder} holds another data set than {path}: move it away, or name it instead to use it")
            listed, names = bucket.list(), {name: os.path.join(part, name) for name in hashes}
            if lacking := sorted(hashes.keys() - listed.keys()):
                raise UserError(f"{path} lacks {lacking[0]}: upload the data set again")
            names = {name: file for name, file in names.items() if not os.path.exists(file) or file_sha256(file) != hashes[name]}
            needed, free = sum(listed[name][0] for name in names), shutil.disk_usage(parent).free
            if needed > free:
                raise UserError(f"{path} needs {needed / 1e9:.2f} GB in {parent}, where {free / 1e9:.2f} GB are free: make room")
            for name, file in names.items():
                bucket.download(name, file)
                if file_sha256(file) != hashes[name]:
                    os.remove(file)
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
    hashes, bucket = dataset.hashes(), Bucket(url)
    bucket.check()
    there = bucket.read("manifest.json")
    if there is not None and manifest_hashes(there, url) != hashes:
        raise UserError(f"{url} holds another data set: choose another address")
    listed, files = bucket.list(), {name: os.path.join(folder, name) for name in hashes}
    try:
        with Progress(f"uploading to {url}", sum(map(os.path.getsize, files.values())), "MB", 1e6) as progress:
            for name, file in files.items():
                dataset._check_file(name)
                size, md5 = file_md5(file)
                if listed.get(name) == (size, base64.b64decode(md5).hex()):
                    progress.add(size)
                else:
                    bucket.upload(file, name, progress)
        if dataset.manifest:
            bucket.upload(os.path.join(folder, "manifest.json"), "manifest.json")
        else:
            bucket.write("manifest.json", json.dumps({"sha256": hashes}, indent=2).encode())
    except OSError as e:
        raise UserError(f"{folder} cannot be read: {e}") from None


def manifest_hashes(content, where):
    """The table {relative file: SHA-256} of a manifest.json's bytes; raises UserError unless it names a data set's files alone."""
    try:
        hashes = json.loads(content)["sha256"]
        if "train/dataset.json" in hashes and all(re.fullmatch(r"((train|test)/)?\w+\.(json|npy)", name) for name in hashes.keys()):
            return hashes
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise UserError(f"{where}/manifest.json is damaged: upload the data set again")


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
    try:
        main(sys.argv[1:])
    except UserError as e:
        print(f"data.py: {' '.join(str(e).splitlines())}", file=sys.stderr)
        sys.exit(2)
