"""Datasets on disk -> batches; then the writer, and what the prepare scripts share, such as downloads.

A dataset is a folder in the layout of the official code, plus a manifest:

    data/NAME/manifest.json           the command that made it, counts and the SHA-256 of every file
    data/NAME/identifiers.json        names of the puzzle identifiers
    data/NAME/{train,test}/dataset.json
    data/NAME/{train,test}/all__{inputs,labels,puzzle_identifiers,puzzle_indices,group_indices}.npy

inputs and labels are [N, seq_len], one example a row. Puzzle i owns the examples
puzzle_indices[i]:puzzle_indices[i + 1], and group g the puzzles group_indices[g]:group_indices[g + 1]: a
Sudoku and its augmented copies are one group.
"""
import fcntl
import functools
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import platform
import shlex
import shutil
import signal
import sys
import time
from contextlib import contextmanager, suppress
from datetime import timedelta

import numpy as np
import requests
from configurator import TransientError, UserError, configure
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from puzzles import IGNORED, check_rows, task_of

FIELDS = ("inputs", "labels", "puzzle_identifiers", "puzzle_indices", "group_indices")
SPLIT_FILES = ("dataset.json", *(f"all__{field}.npy" for field in FIELDS))
FILES = (*(f"{split}/{name}" for split in ("test", "train") for name in SPLIT_FILES), "identifiers.json")
METADATA = ("pad_id", "ignore_label_id", "blank_identifier_id", "vocab_size", "seq_len",
            "num_puzzle_identifiers", "total_groups", "mean_puzzle_examples")
POOL_AFTER = 2.0  # seconds that a pool must save: each of its processes imports the main script first
RETRIED = {408, 429, *range(500, 600)}  # statuses of a server that may answer later
ORDER, EXAMPLE, HALT, SUBSET, NOISE = range(5)  # independent random streams of one seed


class Dataset:
    """One split of a dataset, checked when it is loaded.

    split: "train" or "test". inputs and labels are memory-mapped, [N, seq_len]; len() is N. The keys of
    dataset.json are attributes; task: as puzzles.py describes it. Datasets of the official code, without a
    manifest, load too. Raises UserError, which names a file that is missing, damaged or inconsistent.
    """

    def __init__(self, path, split):
        self.path = path
        folder = os.path.join(path, split)
        if not os.path.isdir(folder):
            raise UserError(f"{folder}: no such dataset; build it with prepare_sudoku.py, or another script")
        manifest = os.path.join(path, "manifest.json")
        self.manifest = read_json(manifest, "sha256") if os.path.exists(manifest) else {}
        script = self.manifest.get("command", {}).get("script", "the command that made it")
        self.hint = f"build it again with {script}"
        for name in SPLIT_FILES:
            self.check_file(f"{split}/{name}")
        vars(self).update(read_json(os.path.join(folder, "dataset.json"), *METADATA))
        for field in FIELDS:
            path = os.path.join(folder, f"all__{field}.npy")
            try:
                array = np.load(path, mmap_mode="r" if field in ("inputs", "labels") else None)
            except (OSError, ValueError, EOFError) as e:
                raise UserError(f"{path} cannot be read (truncated?): {self.hint} ({e})") from None
            setattr(self, field, np.asarray(array))  # a plain view of the file indexes faster than np.memmap
        self._check_arrays(folder)
        try:
            self.task = task_of(self.manifest, self.seq_len, self.vocab_size)
        except UserError as e:
            raise UserError(f"{manifest}: {e}: {self.hint}") from None

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
        puzzles = random_members(self.group_indices, groups, draws[:, 0])
        examples = random_members(self.puzzle_indices, puzzles, draws[:, 1])
        return self._batch(examples, puzzles)

    def test_batch(self, indices, size):
        """The examples with these indices, as train_batch returns them, padded to size rows (not counted)."""
        indices = np.asarray(indices, dtype=np.int64)
        puzzles = np.searchsorted(self.puzzle_indices, indices, side="right") - 1
        batch, missing = self._batch(indices, puzzles), size - len(indices)
        padding = self.pad_id, IGNORED, self.blank_identifier_id
        for key, value in zip(batch, padding):
            rest = np.full((missing, *batch[key].shape[1:]), value, dtype=np.int32)
            batch[key] = np.concatenate([batch[key], rest])
        return batch

    def noise_keys(self, seed, indices, attempt):
        """Keys of model.normal_noise for these examples, int32 [n]; 0, no noise, for the first attempt."""
        if not attempt:
            return np.zeros(len(indices), dtype=np.int32)
        return generator(seed, NOISE, attempt).integers(1, 2 ** 31, len(self), dtype=np.int32)[indices]

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
        return np.sort(generator(0, SUBSET).permutation(len(self))[:n or None])

    @functools.cached_property
    def sha256(self):
        """Hex digest that identifies the content of both splits."""
        return hashlib.sha256(json.dumps(self.hashes(), sort_keys=True).encode()).hexdigest()

    def hashes(self):
        """{relative file: SHA-256} of both splits, from the manifest if there is one, else from the files."""
        return self.manifest.get("sha256") or hashes_of(self.path)

    def check_file(self, name):
        """Raises UserError if the file is missing or does not match the manifest."""
        path = os.path.join(self.path, name)
        if not os.path.isfile(path):
            raise UserError(f"{path} is missing: {self.hint}")
        if self.manifest and self.manifest["sha256"].get(name) != file_hash(path):
            raise UserError(f"{path} does not match manifest.json (changed or truncated): {self.hint}")

    def _check_arrays(self, folder):
        """Raises UserError for the first array that contradicts dataset.json or the other arrays."""
        examples, puzzles = len(self), len(self.puzzle_identifiers)
        for field, shape, end in (
            ("inputs", [examples, self.seq_len], self.vocab_size),
            ("labels", [examples, self.seq_len], self.vocab_size),
            ("puzzle_identifiers", [puzzles], self.num_puzzle_identifiers),
            ("puzzle_indices", [puzzles + 1], examples + 1),
            ("group_indices", [self.total_groups + 1], puzzles + 1),
        ):
            array = getattr(self, field)
            low, high = array.min(initial=0), array.max(initial=0)
            if array.dtype.kind not in "iu" or list(array.shape) != shape:
                wrong = f"must hold integers of shape {shape}, not {array.dtype} of {list(array.shape)}"
            elif high >= end or low < 0 and (field, low) != ("labels", self.ignore_label_id):
                wrong = f"holds {low} to {high}, where dataset.json allows 0 to {end - 1}"
            elif field.endswith("indices") and (
                    array[0] != 0 or array[-1] != end - 1 or (array[1:] <= array[:-1]).any()):
                wrong = f"must rise from 0 to {end - 1}"
            else:
                continue
            raise UserError(f"{folder}/all__{field}.npy {wrong}: {self.hint}")


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
    size = batch_size // world
    return slice(rank * size, (rank + 1) * size)


def random_members(indices, owners, draws):
    """A member, in indices[i]:indices[i + 1], of each owner i [b], from draws [b] uniform in [0, 1)."""
    start, stop = indices[owners], indices[owners + 1]
    return start + (draws * (stop - start)).astype(np.int64)


# The files of a dataset.

def write_dataset(path, splits, vocab_size, manifest):
    """Writes a dataset to a folder in one move; if interrupted, it leaves nothing under that name.

    splits: {"train": (groups, copies, blocks)}: groups of `copies` puzzles with one example each. The
    iterable blocks yields their rows in order, as pairs (inputs, labels), integers [n, seq_len]: tokens from
    1 (0: padding, of inputs) to vocab_size - 1, and IGNORED for labels that do not count. manifest: a dict
    with "grid" (rows, columns), better also "kind" and "symbols" (see puzzles.py), "command" (as command_of),
    and whatever else describes the dataset; the files' SHA-256 are added. Raises UserError for what does not
    fit, and if path exists or cannot be written.
    """
    if not 2 <= vocab_size <= 256:
        raise UserError(f"{vocab_size - 1} symbols are too many for a dataset: 255 are the most")
    task = task_of({"grid": []} | manifest, math.prod(manifest.get("grid", [])), vocab_size)
    path = os.path.normpath(path)
    part = f"{path}.part-{platform.node()}"  # other hosts may share the folder
    try:
        with locked(part):
            refuse_existing(path)
            shutil.rmtree(part, ignore_errors=True)  # of a command that was killed
            try:
                for split, values in splits.items():
                    write_split(os.path.join(part, split), *values, task)
                write_json(os.path.join(part, "identifiers.json"), ["<blank>"])
                write_json(os.path.join(part, "manifest.json"), dict(manifest, sha256=hashes_of(part)))
                os.rename(part, path)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    except OSError as e:
        raise UserError(f"{path} cannot be written: {e.strerror or e}") from None


def write_split(folder, groups, copies, blocks, task):
    """Writes the files of one split; see write_dataset."""
    os.makedirs(folder)
    rows, seq_len, vocab_size = groups * copies, math.prod(task["grid"]), len(task["symbols"])
    progress = Progress(f"writing {folder}", rows, "rows")
    header = {"descr": "|u1", "fortran_order": False, "shape": (rows, seq_len)}
    with open(f"{folder}/all__inputs.npy", "wb") as inputs, open(f"{folder}/all__labels.npy", "wb") as labels:
        for file in (inputs, labels):
            np.lib.format.write_array_header_1_0(file, header)
        for block in blocks:
            block = [np.asarray(array) for array in block]
            check_rows(task, *block)
            for file, array in zip((inputs, labels), block):
                file.write(np.where(array == IGNORED, 0, array).astype(np.uint8, order="C").data)
            progress.add(len(block[0]))
    if progress.done != rows or not rows:
        name = os.path.basename(folder)
        raise UserError(f"{name} has {progress.done} rows: must be {groups} x {copies}, above 0")
    np.save(f"{folder}/all__puzzle_identifiers.npy", np.zeros(rows, dtype=np.int32))
    np.save(f"{folder}/all__puzzle_indices.npy", np.arange(rows + 1, dtype=np.int32))
    np.save(f"{folder}/all__group_indices.npy", np.arange(0, rows + 1, copies, dtype=np.int32))
    write_json(os.path.join(folder, "dataset.json"), dict(
        pad_id=0, ignore_label_id=0, blank_identifier_id=0, vocab_size=vocab_size, seq_len=seq_len,
        num_puzzle_identifiers=1, total_groups=groups, mean_puzzle_examples=1.0,
        total_puzzles=groups, sets=["all"]))  # puzzles without copies, as the official builder counts them


def write_json(path, value):
    with open(path, "w", encoding="utf-8") as f:
        f.write(json.dumps(value, indent=2) + "\n")


def read_json(path, *keys):
    """The object in a JSON file; raises UserError if the file is unreadable or lacks one of the keys."""
    try:
        with open(path, encoding="utf-8") as f:
            value = json.load(f)
    except (OSError, ValueError) as e:
        raise UserError(f"{path} cannot be read as JSON: build the dataset again ({e})") from None
    missing = [key for key in keys if not isinstance(value, dict) or key not in value]
    if missing:
        raise UserError(f"{path} lacks {', '.join(missing)}: build the dataset again")
    return value


def refuse_existing(path):
    if os.path.lexists(path):
        raise UserError(f"{path} exists already: delete it or choose another --output_dir")


def hashes_of(path):
    """{relative file: SHA-256} of those of a dataset's FILES that exist."""
    return {name: file_hash(f"{path}/{name}") for name in FILES if os.path.exists(f"{path}/{name}")}


def file_hash(path):
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def command_of(script, settings):
    """What a manifest says of the command that made the dataset: the script and its settings."""
    values = {key: value for key, value in vars(settings).items() if key != "output_dir"}
    return {"script": os.path.basename(script)} | values


def made_by_another_command(path, data_prepare):
    """How the command that made the dataset at path differs from data_prepare; "" if not, or if not known."""
    manifest = os.path.join(path, "manifest.json")
    made = read_json(manifest).get("command") if os.path.exists(manifest) else None
    script, *flags = shlex.split(data_prepare) or [""]
    if not made or not os.path.exists(script):
        return ""
    made = command_of(script, configure(script, [])) | made  # it may be older than a setting
    wanted = command_of(script, configure(script, flags))
    if wanted.get("train_csv") and "source" in wanted:
        wanted["source"] = "csv"  # as check_source does
    different = [key for key in wanted if made[key] != wanted[key]]
    return "; ".join(f"{key} is {made[key]!r} in it, {wanted[key]!r} in data_prepare" for key in different)


# Shared by the prepare scripts.

def check_source(s, **minimums):
    """Returns a prepare script's settings, with the source that its files imply. Raises UserError."""
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


def name_output(s, names, n, *options):
    """Returns a prepare script's settings with output_dir: named after source, puzzles, options and seed."""
    names["csv"] = os.path.basename(s.train_csv).split(".")[0]
    thousands = f"{n // 1000}k" if n % 1000 == 0 else str(n)
    parts = names[s.source], thousands if n else "full", *options, s.seed and f"seed-{s.seed}"
    s.output_dir = s.output_dir or "data/" + "-".join(filter(None, parts))
    return s


def board_keys(boards):
    """The boards [n, cells] as a list of bytes, for sets and dicts."""
    return np.ascontiguousarray(boards, dtype=np.uint8).view(f"V{boards.shape[1]}").ravel().tolist()


def distinct(name, n, make, seed, arguments, keys, advice):
    """The first n examples of make((seed, i, *arguments)), i = 0, 1, ..., whose keys differ, as arrays.

    make: returns arrays of examples; keys: a function of the first. Raises UserError, with advice, if there
    are not enough.
    """
    found, tasks_done = {}, 0
    progress = Progress(f"generating {name}", n)
    while len(found) < n:
        count_before = len(found)
        tasks = [(seed, tasks_done + i, *arguments) for i in range(max(16, tasks_done))]
        for arrays in in_parallel(make, tasks):
            for key, *example in zip(keys(arrays[0]), *arrays):
                found.setdefault(key, example)
            progress.add(min(n, len(found)) - progress.done)
            if len(found) >= n:
                break
        tasks_done += len(tasks)
        if len(found) < min(n, count_before + len(tasks) // 8):
            raise UserError(f"only about {len(found)} {name} can be found: {advice} fewer than {n}")
    return [np.array(array) for array in zip(*itertools.islice(found.values(), n))]


def in_parallel(function, tasks):
    """Yields function(task) of each task in order, on several processes if that saves time."""
    start = time.monotonic()
    first, rest = function(tasks[0]), tasks[1:]
    seconds = (time.monotonic() - start) * len(rest)
    yield first
    workers = max(1, min(cores(), len(rest)))
    if seconds * (1 - 1 / workers) <= POOL_AFTER:
        yield from map(function, rest)
        return
    context, processes, pipes = multiprocessing.get_context("spawn"), [], []
    try:
        for i in range(workers):  # with a pipe each: nothing waits for a process that was killed
            pipe, theirs = context.Pipe(duplex=False)
            arguments = function, rest[i::workers], theirs
            processes.append(context.Process(target=work, args=arguments, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(pipe)
        for i in range(len(rest)):
            yield pipes[i % workers].recv()
    except (EOFError, OSError):  # the latter within a result
        raise TransientError("a process ended before its work was done; is the memory full?") from None
    finally:
        for process in processes:
            process.kill()


def work(function, tasks, pipe):
    """Sends function(task) of each task, in a process of in_parallel."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the process that started it
    with suppress(BrokenPipeError):  # the receiver has ended
        for task in tasks:
            pipe.send(function(task))


def cores():
    """Number of processor cores that this process may use; macOS counts all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@contextmanager
def locked(path, wait=True):
    """Holds path + ".lock", which one process at a time can; wait=False: or else raises BlockingIOError."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    name, held = path + ".lock", False
    while not held:
        f = open(os.open(name, os.O_RDONLY | os.O_CREAT, 0o666))  # another user's will do
        try:
            fcntl.flock(f, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            held = os.path.samestat(os.fstat(f.fileno()), os.stat(name))
        except FileNotFoundError:  # its last owner has just removed it
            continue
    try:
        yield
    finally:
        with suppress(OSError):
            os.remove(name)
        f.close()


@contextmanager
def replacing(path):
    """Writes path atomically: yields a binary file that becomes path once it is on the disk."""
    try:
        with open(path + ".tmp", "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(path + ".tmp", path)
    finally:
        if os.path.exists(path + ".tmp"):
            os.remove(path + ".tmp")


def read_metrics(path):
    """The lines of a metrics.jsonl, as parse_metrics returns them; [] if there is none."""
    with suppress(FileNotFoundError), open(path, "rb") as f:
        return parse_metrics(f)
    return []


def parse_metrics(lines):
    """The dicts with a step in lines of a metrics.jsonl, without what a crash or a full disk has damaged."""
    found = []
    for line in lines:
        with suppress(ValueError):
            values = json.loads(line)
            if isinstance(values, dict) and type(values.get("step")) is int:
                found.append(values)
    return found


def saved_settings(files, read):
    """The settings in the newest .json of a checkpoint that can be read, or {}; read(file): its bytes."""
    for file in sorted(files, reverse=True):
        with suppress(OSError, ValueError, KeyError, TypeError):  # an interrupted upload or download
            return dict(json.loads(read(file))["settings"])
    return {}


def duration(seconds):
    """Seconds as 1:02:03."""
    return str(timedelta(seconds=round(seconds)))


class Progress:
    """Prints how much is done, in units of `scale`, the rate and the time left to stderr every 10 seconds."""

    def __init__(self, label, total, unit="", scale=1):
        self.label, self.total, self.unit, self.scale = label, total, unit and f" {unit}", scale
        self.done = 0
        self.start = self.printed = time.monotonic()

    def add(self, n):
        self.done += n
        now = time.monotonic()
        if now >= self.printed + 10:
            self.printed = now
            rate = self.done / (now - self.start)
            total = f"/{self.total / self.scale:,.0f}" if self.total else ""
            left = f", {(self.total - self.done) / rate:.0f} s left" if self.total and self.done else ""
            print(f"{self.label}: {self.done / self.scale:,.0f}{total}{self.unit}, "
                  f"{rate / self.scale:,.1f}{self.unit}/s{left}", file=sys.stderr, flush=True)


# HTTP: downloads from the hub, and what bucket.py shares with them.

def session(label, attempts, stop=lambda: False):
    """A requests.Session that tries again after network errors and the statuses RETRIED.

    It returns the last response. label: what its lines on stderr begin with. stop: a function; if it returns
    true in a wait, KeyboardInterrupt is raised.
    """
    class Patience(Retry):
        def sleep(self, response=None):
            asked = response and self.get_retry_after(response) or 0  # by the server
            seconds = max(min(60, asked), self.get_backoff_time())
            if seconds >= 1:
                last = self.history[-1]
                cause = f"status {last.status}" if last.status else network_error(last.error)
                print(f"{label}: {cause}; trying again in {seconds:.0f} s", file=sys.stderr, flush=True)
            for _ in range(math.ceil(seconds) or 1):
                if stop():
                    raise KeyboardInterrupt
                time.sleep(min(1, seconds))

    retries = Patience(attempts - 1, allowed_methods=None, status_forcelist=RETRIED,
                       backoff_factor=0.5, backoff_max=60, backoff_jitter=1, raise_on_status=False)
    http = requests.Session()
    http.headers["Accept-Encoding"] = "identity"  # sizes are those of the file, not of a compressed copy
    for scheme in ("http://", "https://"):
        http.mount(scheme, HTTPAdapter(max_retries=retries))
    return http


def receive(get, f, label, progress=None):
    """Writes get(headers), a streamed response of status 200 or 206, to the empty file f; returns the last.

    Where one breaks off, another goes on. Raises TransientError after three in a row without a new byte.
    """
    failures = 0
    while True:
        begin = f.tell()
        response = get({"Range": f"bytes={begin}-"} if begin else {})
        if response.status_code == 200:  # the whole file
            f.truncate(f.seek(0))
        elif response.status_code != 206:
            return response
        try:
            for block in response.iter_content(1 << 15):
                f.write(block)
                if progress:
                    progress.add(len(block))
            return response
        except requests.RequestException as e:
            failures = 1 if f.tell() > begin else failures + 1
            if failures == 3:
                raise TransientError(f"{label}: {network_error(e)}") from None


def network_error(e):
    """The cause of a network error in words, without the URL, which may hold a secret."""
    cause = e.args[0] if isinstance(e, requests.RequestException) and e.args else e
    cause = getattr(cause, "reason", None) or cause
    return f"{type(e).__name__}: {str(cause).rpartition(': ')[2]}"


def csv_files(s, repo):
    """Paths of the training and test files, downloaded from the Hugging Face hub where source is hub."""
    if s.source != "hub":
        return s.train_csv, s.test_csv
    endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    paths = [f"data/downloads/{os.path.basename(repo)}/{split}.csv" for split in ("train", "test")]
    for path in paths:
        download(f"{endpoint}/datasets/{repo}/resolve/main/{os.path.basename(path)}", path)
    return paths


def download(url, path):
    """Downloads url to path unless path exists; one process of a host does, the others wait."""
    http = session(url, attempts=6)
    hint = "run again, or use files of your own with --source=csv"

    def get(headers):
        try:
            response = http.get(url, headers=headers, stream=True, timeout=(10, 30))
        except requests.RequestException as e:
            error = UserError if isinstance(e, ValueError) else TransientError  # no URL, in HF_ENDPOINT
            raise error(f"{url} cannot be downloaded ({network_error(e)}): {hint}") from None
        if response.status_code >= 400:
            error = TransientError if response.status_code in RETRIED else UserError
            raise error(f"{url} cannot be downloaded (status {response.status_code}): {hint}")
        progress.total = int(response.headers.get("Content-Length", 0)) + progress.done
        return response

    with locked(path):
        if not os.path.exists(path):
            progress = Progress(f"downloading {url}", 0, "MB", 1e6)
            with replacing(path) as f:
                receive(get, f, url, progress)
