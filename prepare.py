"""What the prepare scripts share: settings, files of puzzles, generators, downloads, and the writer."""
import csv
import gzip
import itertools
import json
import math
import multiprocessing
import os
import platform
import re
import shutil
import signal
import time
import zlib
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress

import numpy as np
import requests

# isort: off
from configurator import TransientError, UserError, end_with_parent
from bucket import RETRIED, network_error, try_again, without_password
from data import Progress, hashes_of, locked, replacing
from puzzles import IGNORE_LABEL, are_solutions, broken_cells, explain, task_of, text_of

POOL_AFTER = 4.0  # seconds of work that are worth processes: each of them imports the main script first


# ---------------------------------------------------------------------------------------------------------
# Settings

def check_source(settings, **minimums):
    """Fills in the source that the files imply. Raises UserError for a wrong setting."""
    # files of one's own need no --source=csv
    if settings.train_csv or settings.test_csv:
        settings.source = "csv"
    if settings.source not in ("hub", "csv", "generate"):
        raise UserError(f"source must be hub, csv or generate, not {settings.source!r}")
    if settings.source == "csv" and not (settings.train_csv and settings.test_csv):
        raise UserError("source=csv needs both --train_csv=FILE and --test_csv=FILE")
    check_minimums(settings, **minimums)


def check_minimums(settings, **minimums):
    """Raises UserError for the first number below its minimum."""
    for name, minimum in minimums.items():
        value = getattr(settings, name)
        if value < minimum:
            raise UserError(f"{name} must be at least {minimum}, not {value}")


def name_output(settings, source_names, num_puzzles, options):
    """Returns the settings' output_dir, or a name made of source, number of puzzles, options and seed.

    Args:
        settings: the settings of a prepare script.
        source_names: {source: its name}, for hub and generate.
        num_puzzles: training puzzles; 0: all.
        options: words to add.
    """
    source = source_names.get(settings.source) or os.path.basename(settings.train_csv).split(".")[0]
    size = re.sub("000$", "k", str(num_puzzles or "full"))
    words = [source, size, *options]
    if settings.seed:
        words.append(f"seed-{settings.seed}")
    return settings.output_dir or "data/" + "-".join(words)


def command_of(script, settings):
    """Returns what a manifest says of the command that made the dataset: the script and its settings."""
    command = {"script": os.path.basename(script)} | vars(settings)
    del command["output_dir"]
    return command


def refuse_existing(path):
    if os.path.lexists(path):
        raise UserError(f"{path} exists already: delete it or choose another --output_dir")


# ---------------------------------------------------------------------------------------------------------
# Files of puzzles

def csv_rows(path, needed, optional=()):
    """Yields (line, [texts of columns]) of a CSV file or of JSON lines, also .gz. Raises UserError.

    Args:
        path: the file.
        needed: names of columns that must be there, as text.
        optional: names of columns that may be missing: then their text is "".
    """
    is_json = ".jsonl" in path[-9:]
    opener = gzip.open if path.endswith(".gz") else open
    header = None
    line = 1
    try:
        with opener(path, "rt", encoding="utf-8-sig", errors="replace", newline="") as f:
            for line, row in enumerate(f if is_json else csv.reader(f), 1):
                if not row or is_json and row.isspace():
                    continue
                if not is_json and not header:
                    header = [name.strip() for name in row]
                    continue

                # a KeyError, TypeError or ValueError if the row is not as it must be
                values = json.loads(row) if is_json else dict(zip(header, row, strict=True))
                texts = [values[name] + "" for name in needed]
                texts += [str(values.get(name) or "") for name in optional]
                yield line, texts
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{path}:{line}: must have {', '.join(needed)}, as text; "
                        "the first line of a CSV file names its columns") from None
    except (OSError, EOFError, csv.Error, zlib.error) as e:
        raise UserError(f"{path}: cannot be read ({e})") from None


def read_csv(path, cells, allowed, *more_columns):
    """Yields (question, answer, texts of more_columns, line) of each row of a file. Raises UserError.

    Args:
        path: the file.
        cells: characters of a question and of an answer; 0: as many as the first question has.
        allowed: two texts, the characters of questions and of answers; "": any.
        more_columns: names of other columns.
    """
    progress = Progress(f"reading {path}", 0)
    for line, row in csv_rows(path, ("question", "answer", *more_columns)):
        cells = cells or len(row[0]) or 1
        # the first wrong character is named, as files have millions of rows
        for name, text, symbols in zip(("question", "answer"), row, allowed):
            if len(text) != cells:
                raise UserError(f"{path}:{line}: the {name} has {len(text)} characters, not {cells}")
            rest = symbols and text.lstrip(symbols)
            if rest:
                raise UserError(f"{path}:{line}: character {cells - len(rest) + 1} of the {name} is "
                                f"{rest[0]!r}, not one of {symbols!r}")
        progress.add(1)
        yield *row, line
    if not progress.done:
        raise UserError(f"{path}:2: no puzzle under the header")


def tokens_of(texts, table):
    """Returns texts of one length as tokens, uint8 [n, cells]; table: {code of a character: token}."""
    # one long text is translated at once: a loop over characters would take minutes
    tokens = "".join(texts).translate(table).encode("latin-1", "replace")
    return np.frombuffer(tokens, dtype=np.uint8).reshape(len(texts), -1)


def read_puzzles(path, cells, task_of_cells, alphabets, table, *more_columns):
    """Returns the columns of a file whose answers keep the rules. Raises UserError with the first wrong line.

    Args:
        path, cells: see read_csv.
        task_of_cells: a function of the number of cells and a prefix for errors, which returns the task.
        alphabets: two texts, the characters of questions and of answers.
        table: {code of a character: token}.
        more_columns: names of other columns.

    Returns arrays: questions and answers, uint8 [n, cells], the other columns, as text, and the lines.
    """
    blocks = []
    rows = read_csv(path, cells, alphabets, *more_columns)
    while block := list(itertools.islice(rows, 4096)):
        *texts, lines = zip(*block)
        questions = tokens_of(texts[0], table)
        answers = tokens_of(texts[1], table)
        task = task_of_cells(questions.shape[1], f"{path}:{lines[0]}")
        right = are_solutions(task, questions, answers) & ~broken_cells(task, questions, answers).any(axis=1)
        if not right.all():
            i = right.argmin()
            raise UserError(f"{path}:{lines[i]}: {explain(task, questions[i], answers[i])}")
        blocks.append((questions, answers, *texts[2:], lines))
    return [np.concatenate(column) for column in zip(*blocks)]


def keys_of(boards):
    """Returns an iterator over the boards [n, cells] as bytes, for sets and dicts."""
    return map(np.ndarray.tobytes, boards)


def orbit_keys(boards, turns, exchanged=()):
    """Returns a list of keys of boards, equal for those that symmetries turn into each other.

    Args:
        boards: tokens [n, cells].
        turns: the symmetries of the grid, as indices [m, cells].
        exchanged: tokens that may change places.
    """
    exchanged = np.array(exchanged, dtype=int)
    smallest = None
    for turn in turns:
        # an exchanged token becomes the number of the first cell that has it
        turned = boards[:, turn]
        has_token = turned[:, None] == exchanged[:, None]  # [n, tokens, cells]
        to = np.tile(np.arange(256, dtype=np.int16), (len(boards), 1))
        to[:, exchanged] = 256 + has_token.argmax(axis=2)
        keys = list(keys_of(np.take_along_axis(to, turned, axis=1)))
        smallest = list(map(min, smallest or keys, keys))
    return smallest


# ---------------------------------------------------------------------------------------------------------
# Generated puzzles

def distinct(name, n, make, arguments, keys):
    """Returns the first n examples with different keys, [2, n, cells]. Raises UserError if they are too few.

    Args:
        name: what the examples are called in messages.
        n: examples that are wanted.
        make: a function of (i, *arguments), which returns questions and answers; i = 0, 1, ...
        arguments: the others.
        keys: a function of the questions, which returns a list.
    """
    examples = {}
    num_done = 0
    progress = Progress(f"generating {name}", n)
    while len(examples) < n:
        # at first 16 tasks, then as many again as were done
        num_before = len(examples)
        num_tasks = max(16, num_done)
        tasks = [(i, *arguments) for i in range(num_done, num_done + num_tasks)]
        for arrays in in_parallel(make, tasks):
            for key, *example in zip(keys(arrays[0]), *arrays):
                examples.setdefault(key, example)
            progress.add(len(examples) - progress.done)
            if len(examples) >= n:
                break
        num_done += num_tasks

        # hardly a new one: nearly all that exist were found
        if len(examples) < min(n, num_before + num_tasks // 8):
            raise UserError(f"only about {len(examples)} {name} can be found: choose fewer than {n}")
    return np.stack(list(examples.values())[:n], axis=1)


def in_parallel(function, tasks):
    """Yields function(*task) of each task, in order, on several processes if that saves time."""
    # how long will it take?
    start = time.monotonic()
    first = function(*tasks[0])
    seconds = (time.monotonic() - start) * (len(tasks) - 1)
    yield first
    if cores() == 1 or seconds < POOL_AFTER:
        yield from itertools.starmap(function, tasks[1:])
        return

    # as many processes as cores; they are killed when the caller has enough, or is stopped
    pool = ProcessPoolExecutor(cores(), multiprocessing.get_context("spawn"), prepare_process)
    try:
        yield from pool.map(function, *zip(*tasks[1:]))
    except BrokenProcessPool:
        raise TransientError("a process ended before its work was done; is the memory full?") from None
    finally:
        for process in multiprocessing.active_children():
            process.kill()
        with suppress(RuntimeError):  # Ctrl-C came while the pool's thread was about to start
            pool.shutdown(cancel_futures=True)


def prepare_process():
    """Lets a process of in_parallel ignore Ctrl-C, which its parent handles, and end with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()


def cores():
    """Returns the number of processor cores that this process may use; macOS counts all."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


# ---------------------------------------------------------------------------------------------------------
# Downloads

def csv_files(settings, repository):
    """Returns the paths of the training and test file, downloaded from Hugging Face where source is hub."""
    if settings.source != "hub":
        return settings.train_csv, settings.test_csv
    endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")

    # data/downloads keeps them for the next run
    folder = f"data/downloads/{os.path.basename(repository)}"
    for split in "train", "test":
        url = f"{endpoint}/datasets/{repository}/resolve/main/{split}.csv"
        download(url, f"{folder}/{split}.csv")
    return f"{folder}/train.csv", f"{folder}/test.csv"


def download(url, path, advice="use files of your own with --source=csv"):
    """Downloads url to path unless path exists; one process of a host does, the others wait."""
    progress = Progress(f"downloading {url}", 0, "MB", 1e6)

    def attempt():
        # sizes are the file's, not a compressed copy's
        headers = {"Accept-Encoding": "identity"}
        try:
            response = requests.get(url, headers=headers, stream=True, timeout=(10, 30))
        except ValueError as e:  # no URL
            raise UserError(f"{url} cannot be downloaded ({network_error(e)})") from None
        status = response.status_code
        if status in RETRIED:
            raise TransientError(f"status {status}")
        if status >= 400:
            raise UserError(f"{url} cannot be downloaded (status {status}): {advice}")
        if response.headers.get("Content-Type", "").startswith("text/html"):
            raise UserError(f"{url}: the answer is a web page; does this network ask for a login?")
        # the whole file, each time
        progress.done = 0
        progress.total = int(response.headers.get("Content-Length", 0))
        f.truncate(f.seek(0))
        for block in response.iter_content(1 << 15):
            f.write(block)
            progress.add(len(block))

    with locked(path):
        if not os.path.exists(path):
            try:
                with replacing(path) as f:
                    try_again(attempt, without_password(url), 6)
            except TransientError as e:
                raise TransientError(f"{e}: run again, or {advice}") from None


# ---------------------------------------------------------------------------------------------------------
# The writer

def write_puzzles(settings, script, task, train_blocks, num_train, test, copies, counts):
    """Writes the dataset of a prepare script, adds its sizes to counts, and says how to train on it.

    Args:
        settings, script: the prepare script's settings and its path.
        task: the puzzles' task.
        train_blocks: iterable of the training examples, see write_dataset.
        num_train: training puzzles.
        test: (questions, answers), tokens [n, cells].
        copies: training examples of each puzzle, itself included.
        counts: a dict for the manifest, which train_blocks may change.
    """
    counts["train_puzzles"] = num_train
    counts["test_puzzles"] = len(test[0])
    splits = {
        "train": (num_train, copies, train_blocks),
        "test": (len(test[0]), 1, [test]),
    }
    manifest = task | {"command": command_of(script, settings), "counts": counts}
    write_dataset(settings.output_dir, splits, len(task["symbols"]), manifest)

    # what the user reads
    for name, count in counts.items():
        print(f"{name}: {count:,}")
    print(f"each training puzzle {copies:,} times")
    print(f"Train on it: python train.py --data_path={settings.output_dir}")


def write_dataset(path, splits, vocab_size, manifest):
    """Writes a dataset to a folder in one move; if interrupted, it leaves nothing under that name.

    Args:
        path: the new folder.
        splits: {"train": (groups, copies, blocks)}: groups of `copies` puzzles with one example each. The
            iterable blocks yields their rows in order, as pairs (inputs, labels), integers [n, seq_len]:
            tokens from 1 (0: padding, of inputs) to vocab_size - 1, and IGNORE_LABEL or 0 for labels that do
            not count.
        vocab_size: tokens, padding included.
        manifest: a dict with "grid" (rows, columns), better also "kind" and "symbols" (see puzzles.py),
            "command" (see command_of), and whatever else describes the dataset. The files' SHA-256 are added.

    Raises UserError if path exists or cannot be written, and for answers that break the rules of their kind.
    """
    task = task_of(manifest, math.prod(manifest["grid"]), vocab_size)
    with new_dataset(path, manifest) as folder:
        for split, (groups, copies, blocks) in splits.items():
            write_split(f"{folder}/{split}", groups, copies, blocks, task)
        write_json(f"{folder}/identifiers.json", ["<blank>"])


@contextmanager
def new_dataset(path, manifest):
    """Yields a folder for the files of a dataset; adds manifest.json to them, and moves the folder to path.

    Raises UserError if path exists or cannot be written.
    """
    # written beside its place, moved when it is whole
    path = os.path.normpath(path)
    part = f"{path}.part-{platform.node()}"  # other hosts may share the folder
    try:
        with locked(part):
            refuse_existing(path)
            shutil.rmtree(part, ignore_errors=True)  # a command that was killed left it
            try:
                yield part
                write_json(os.path.join(part, "manifest.json"), dict(manifest, sha256=hashes_of(part)))
                os.rename(part, path)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    except OSError as e:
        raise UserError(f"{path} cannot be written: {e.strerror or e}") from None


def write_split(folder, groups, copies, blocks, task):
    """Writes the files of one split; see write_dataset."""
    os.makedirs(folder)
    num_rows = groups * copies
    seq_len = math.prod(task["grid"])
    progress = Progress(f"writing {folder}", num_rows)

    # the examples, block by block: there may be more than memory holds
    header = {"descr": "|u1", "fortran_order": False, "shape": (num_rows, seq_len)}
    with open(f"{folder}/all__inputs.npy", "wb") as inputs_file, \
            open(f"{folder}/all__labels.npy", "wb") as labels_file:
        np.lib.format.write_array_header_1_0(inputs_file, header)
        np.lib.format.write_array_header_1_0(labels_file, header)
        for inputs, labels in blocks:
            labels = np.where(labels == IGNORE_LABEL, 0, labels)
            check_rows(task, inputs, labels)
            inputs_file.write(inputs.astype(np.uint8).tobytes())
            labels_file.write(labels.astype(np.uint8).tobytes())
            progress.add(len(inputs))
    assert progress.done == num_rows, f"{progress.done} rows, not {groups} x {copies}"

    # one puzzle an example; total_puzzles: puzzles without copies, as the official builder counts them
    rows = np.arange(num_rows + 1, dtype=np.int32)
    arrays = {
        "puzzle_identifiers": np.zeros_like(rows[1:]),
        "puzzle_indices": rows,
        "group_indices": rows[::copies],
    }
    finish_split(folder, arrays, vocab_size=len(task["symbols"]), seq_len=seq_len, num_puzzle_identifiers=1,
                 total_groups=groups, mean_puzzle_examples=1.0, total_puzzles=groups)


def finish_split(folder, arrays, **sizes):
    """Writes arrays {field: array} of a split, and its dataset.json."""
    for field, array in arrays.items():
        np.save(f"{folder}/all__{field}.npy", array)
    tokens = {"pad_id": 0, "ignore_label_id": 0, "blank_identifier_id": 0}
    write_json(f"{folder}/dataset.json", tokens | sizes | {"sets": ["all"]})


def check_rows(task, inputs, labels):
    """Raises UserError for answers without a cell that counts, and for answers that break a rule."""
    assert inputs.shape == labels.shape and labels.max() < len(task["symbols"])
    if not labels.any(axis=1).all():
        raise UserError("an answer has no cell that counts: a model would learn nothing from it")

    # answers that are known whole keep the rules
    whole = labels.all(axis=1)
    inputs = inputs[whole]
    labels = labels[whole]
    broken = broken_cells(task, inputs, labels)
    if broken is not None and broken.any():
        i = broken.any(axis=1).argmax()
        raise UserError(f"the answer {text_of(task, labels[i])!r} to {text_of(task, inputs[i])!r} breaks a "
                        f"rule of kind {task['kind']}: correct it, or choose another kind")


def write_json(path, value):
    with open(path, "w", encoding="utf-8") as f:
        f.write(json.dumps(value, indent=2) + "\n")
