"""Files of puzzles: what the prepare scripts share. Settings, CSV files, generators, downloads, the writer.

Every script goes the same way: it reads or generates puzzles, drops the training puzzles that the test has,
draws some, makes copies, and writes a dataset.
"""
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
from contextlib import contextmanager

import numpy as np
import requests

# isort: off
from configurator import TransientError, UserError, end_with_parent
from bucket import RETRIED, network_error, try_again, without_password
from data import Progress, hashes_of, locked, replacing
from puzzles import IGNORE_LABEL, judge, task_of, verdict

SECONDS_ALONE = 2  # that one process works before it starts others, which take a second to begin
ROWS = 16384  # examples that are made at a time


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


def name_output(settings, source_names, num_copies, everything="full"):
    """Returns the settings' output_dir, or a name made of source, training puzzles and copies.

    Args:
        settings: the settings of a prepare script.
        source_names: {source: its name}, for hub and generate.
        num_copies: of each training puzzle, for the name.
        everything: the word for all puzzles of a source.
    """
    source = source_names.get(settings.source) or os.path.basename(settings.train_csv).split(".")[0]
    num_puzzles = settings.num_train if settings.source == "generate" else settings.subsample_size
    size = re.sub("000$", "k", str(num_puzzles or everything))
    return settings.output_dir or f"data/{source}-{size}-aug-{num_copies}"


def refuse_existing(path):
    if os.path.lexists(path):
        raise UserError(f"{path} exists already: delete it or choose another --output_dir")


# ---------------------------------------------------------------------------------------------------------
# CSV files

def csv_rows(path, needed, optional=()):
    """Yields (line, [texts of columns]) of a CSV file, also .gz. Raises UserError.

    Args:
        path: the file.
        needed: names of columns that must be there.
        optional: names of columns that may be missing: then their text is "".
    """
    opener = gzip.open if path.endswith(".gz") else open
    line = 1
    try:
        with opener(path, "rt", encoding="utf-8-sig", errors="replace", newline="") as f:
            reader = csv.DictReader(f)
            reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
            for row in reader:
                # a KeyError or ValueError if the row is not as it must be
                line = reader.line_num
                texts = [row[name] for name in needed]
                if None in texts or None in row:
                    raise ValueError
                yield line, texts + [row.get(name, "") for name in optional]
    except (KeyError, ValueError):
        raise UserError(f"{path}:{line}: must have {', '.join(needed)}; "
                        "the first line of the file names its columns") from None
    except (OSError, EOFError, csv.Error, zlib.error) as e:
        raise UserError(f"{path}: cannot be read ({e})") from None


def read_puzzles(path, rows, cells, tables, task_of_cells):
    """Reads the puzzles of a file. Raises UserError with the first line that is wrong or breaks a rule.

    Args:
        path: the file.
        rows: its rows as csv_rows yields them, of the columns question and answer.
        cells: characters of a question and of an answer; 0: as many as the first question has.
        tables: {character: token} for questions, and for answers, whose token 0 does not count.
        task_of_cells: a function of the number of cells, which returns the task.

    Returns the puzzles, questions and answers [2, n, cells], and their lines [n].
    """
    blocks = []
    progress = Progress(f"reading {path}", 0)
    while block := list(itertools.islice(rows, 4096)):
        lines, texts = zip(*block)
        cells = cells or len(texts[0][0]) or 1
        task = task_of_cells(cells)
        tokens = []
        for name, column, table in zip(("question", "answer"), zip(*texts), tables):
            check_texts(path, lines, name, column, cells, "".join(table))
            # one long text is translated at once: a loop over characters would take minutes
            codes = "".join(column).translate(str.maketrans(table)).encode("latin-1")
            tokens.append(np.frombuffer(codes, dtype=np.uint8).reshape(-1, cells))
        puzzles = np.array(tokens)

        # answers that are known whole keep the rules
        judgement = judge(task, *puzzles)
        if judgement:
            right = judgement.solved & ~judgement.broken.any(axis=1) | ~puzzles[1].all(axis=1)
            for i in np.flatnonzero(~right):
                raise UserError(f"{path}:{lines[i]}: {verdict(task, *puzzles[:, i])}")
        blocks.append((puzzles, lines))
        progress.add(len(block))
    if not blocks:
        raise UserError(f"{path}:2: no puzzle under the header, or none that is hard enough")
    puzzles, lines = zip(*blocks)
    return np.concatenate(puzzles, axis=1), np.concatenate(lines)


def check_texts(path, lines, name, texts, cells, symbols):
    """Raises UserError for the first text of a column with another number of cells or another character."""
    for line, text in zip(lines, texts):
        if len(text) != cells:
            raise UserError(f"{path}:{line}: the {name} has {len(text)} characters, not {cells}")
        rest = text.lstrip(symbols)
        if rest:
            raise UserError(f"{path}:{line}: character {cells - len(rest) + 1} of the {name} is "
                            f"{rest[0]!r}, not one of {symbols!r}")


def table_of(symbols, first_token=1):
    """Returns {symbol: token} with ascending tokens."""
    return {symbol: token for token, symbol in enumerate(symbols, first_token)}


def read_both(settings, hub, read, keys_of, once=False):
    """Returns training and test puzzles of files, [2, n, cells] each, and {what: how many are left out}.

    Args:
        settings: the settings of a prepare script.
        hub: the repository on Hugging Face that has the files, unless the settings name some.
        read: a function of a path and the cells of a puzzle, 0 if they are not known: returns [2, n, cells].
        keys_of: a function of questions that returns a list of keys, equal for puzzles that count as one.
        once: whether of equal training puzzles the first one alone is kept.
    """
    train_path, test_path = csv_files(settings, hub)
    test = read(test_path, 0)
    train = read(train_path, test.shape[2])
    keys = keys_of(train[0])
    rows = rows_to_train_on(train_path, keys, set(keys_of(test[0])))
    counts = {"left out, since the test set has them": len(keys) - len(rows)}
    if once:
        first_rows = {keys[row]: row for row in reversed(rows)}
        counts["left out, since they are repeated"] = len(rows) - len(first_rows)
        rows = sorted(first_rows.values())

    # some at random, in the file's order
    rows = np.array(rows)
    if settings.subsample_size:
        order = np.random.default_rng([settings.seed, 1]).random(len(rows)).argsort()
        rows = np.sort(rows[order[:settings.subsample_size]])
    return train[:, rows], test, counts


def rows_to_train_on(path, keys, test_keys):
    """Returns the rows of a file whose keys are not among test_keys. Raises UserError if there are none."""
    rows = [row for row, key in enumerate(keys) if key not in test_keys]
    if not rows:
        raise UserError(f"{path}: no puzzle is left of {len(keys)}: each is in the test set, or a symmetry "
                        "turns it into one that is")
    return rows


# ---------------------------------------------------------------------------------------------------------
# Generated puzzles

def distinct(name, n, make, arguments, keys):
    """Returns the first n puzzles with different keys, [2, n, cells]. Raises UserError if they are too few.

    Args:
        name: what the puzzles are called in messages.
        n: puzzles that are wanted.
        make: a function of (i, *arguments), which returns questions and answers; i = 0, 1, ...
        arguments: the others.
        keys: a function of the questions, which returns a list.
    """
    puzzles = {}
    num_done = 0
    progress = Progress(f"generating {name}", n)
    while True:
        # at first a few tasks, then three times as many as were done
        num_before = len(puzzles)
        num_tasks = max(4, 3 * num_done)
        tasks = [(i, *arguments) for i in range(num_done, num_done + num_tasks)]
        for questions, answers in in_parallel(make, tasks):
            for key, *puzzle in zip(keys(questions), questions, answers):
                puzzles.setdefault(key, puzzle)
            progress.add(len(puzzles) - progress.done)
            if len(puzzles) >= n:
                return np.stack(list(puzzles.values())[:n], axis=1)

        # hardly a new one: nearly all that exist were found
        num_done += num_tasks
        if len(puzzles) < num_before + num_tasks // 8:
            raise UserError(f"only about {len(puzzles)} {name} can be found: choose fewer than {n}")


def in_parallel(function, tasks):
    """Yields function(*task) of each task, in order; after some time from as many processes as cores."""
    n = cores()
    start = time.monotonic()
    while tasks and (n == 1 or time.monotonic() < start + SECONDS_ALONE):
        yield function(*tasks[0])
        tasks = tasks[1:]

    # A pipe from each process, so that one that is killed while it sends holds up no other. They are killed
    # when the caller has enough, or is stopped.
    context = multiprocessing.get_context("spawn")
    readers = []
    processes = []
    try:
        for i in range(min(n, len(tasks))):
            reader, writer = context.Pipe(duplex=False)
            arguments = function, tasks[i::n], writer
            process = context.Process(target=send_results, args=arguments, daemon=True)
            process.start()
            writer.close()
            readers.append(reader)
            processes.append(process)
        for i in range(len(tasks)):
            yield readers[i % n].recv()
    except EOFError:
        raise TransientError("a process ended before its work was done; is the memory full?") from None
    finally:
        for process in processes:
            process.kill()


def send_results(function, tasks, writer):
    """Sends function(*task) of each task, in a process of in_parallel."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    end_with_parent()
    for task in tasks:
        writer.send(function(*task))


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

def write_puzzles(settings, script, config, task, train, test, num_copies, copies_of, counts):
    """Writes the dataset of a prepare script, and says how to train on it.

    Args:
        settings, script: the prepare script's settings and its path.
        config: the file of config/ that suits the puzzles.
        task: the puzzles' task.
        train, test: questions and answers, tokens [2, n, cells].
        num_copies: training examples of each puzzle, itself included.
        copies_of: a function of some puzzles [2, n, cells] that returns them before their copies,
            [2, n, num_copies, cells].
        counts: {what: how many}, for the manifest and for the user; copies_of may change it.
    """
    _, num_train, cells = train.shape
    _, num_test, _ = test.shape

    def blocks():
        step = max(1, ROWS // num_copies)
        for first in range(0, num_train, step):
            yield copies_of(train[:, first:first + step]).reshape(2, -1, cells)

    counts |= {
        "training puzzles": num_train,
        "copies of each": num_copies - 1,
        "test puzzles": num_test,
    }
    splits = {"train": (num_train, num_copies, blocks()), "test": (num_test, 1, [test])}
    manifest = task | {"command": command_of(script, settings), "counts": counts}
    write_dataset(settings.output_dir, splits, len(task["symbols"]), manifest)
    print_report(settings, config, counts)


def command_of(script, settings):
    """Returns what a manifest says of the command that made the dataset: the script and its settings."""
    command = {"script": os.path.basename(script)} | vars(settings)
    del command["output_dir"]
    return command


def print_report(settings, config, counts):
    """Prints what is in a new dataset, {what: how many}, and the command that trains on it."""
    for what, count in counts.items():
        if count:
            print(f"{what}: {count:,}")
    path = settings.output_dir
    print(f"Train on it: python train.py config/{config} --data_prepare= --data_path={path} "
          f"--out_dir=out/{os.path.basename(path)}")


def write_dataset(path, splits, vocab_size, manifest):
    """Writes a dataset to a folder in one move; if interrupted, it leaves nothing under that name.

    Args:
        path: the new folder.
        splits: {"train": (groups, copies, blocks)}: groups of `copies` puzzles with one example each. The
            iterable blocks yields their rows in order, as pairs (inputs, labels), integers [n, seq_len]:
            tokens from 1 (0: padding, of inputs) to vocab_size - 1, and IGNORE_LABEL or 0 for labels that do
            not count.
        vocab_size: tokens, padding included.
        manifest: a dict with "grid" (rows, columns), better also "kind" and "symbols" (see __init__.py),
            "command" (see command_of), and whatever else describes the dataset. The files' SHA-256 are added.

    Raises UserError if path exists or cannot be written.
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
        with locked(path):
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
    vocab_size = len(task["symbols"])
    progress = Progress(f"making {folder}", num_rows)
    inputs = np.empty((num_rows, seq_len), dtype=np.uint8)
    labels = np.empty_like(inputs)
    for block in blocks:
        block = np.asarray(block)
        part = slice(progress.done, progress.done + block.shape[1])
        inputs[part], labels[part] = np.where(block == IGNORE_LABEL, 0, block)
        progress.add(block.shape[1])
    assert progress.done == num_rows and labels.max() < vocab_size
    if not labels.any(axis=1).all():
        raise UserError("an answer has no cell that counts: a model would learn nothing from it")

    # one puzzle an example; total_puzzles: puzzles without copies, as the official builder counts them
    rows = np.arange(num_rows + 1, dtype=np.int32)
    arrays = {
        "inputs": inputs,
        "labels": labels,
        "puzzle_identifiers": np.zeros_like(rows[1:]),
        "puzzle_indices": rows,
        "group_indices": rows[::copies],
    }
    finish_split(folder, arrays, vocab_size=vocab_size, seq_len=seq_len, num_puzzle_identifiers=1,
                 total_groups=groups, mean_puzzle_examples=1.0, total_puzzles=groups)


def finish_split(folder, arrays, **sizes):
    """Writes arrays {field: array} of a split, and its dataset.json."""
    for field, array in arrays.items():
        np.save(f"{folder}/all__{field}.npy", array)
    tokens = {"pad_id": 0, "ignore_label_id": 0, "blank_identifier_id": 0}
    write_json(f"{folder}/dataset.json", tokens | sizes | {"sets": ["all"]})


def write_json(path, value):
    with open(path, "w", encoding="utf-8") as f:
        f.write(json.dumps(value, indent=2) + "\n")
