"""Writes datasets, in the format that data.py describes and reads."""
import glob
import json
import math
import os
import platform
import shutil
from contextlib import contextmanager

import numpy as np

from puzzles import task_of
from runtime.errors import UserError
from runtime.files import file_hash, locked


def write_dataset(path, splits, vocab_size, manifest):
    """Writes a dataset to a folder in one move; if interrupted, it leaves nothing under that name.

    Args:
        path: the new folder.
        splits: {"train": (questions, answers), "test": ...}, integers [n, cells], or [n, versions, cells] for
            puzzles that come in several versions, the original and its copies. They are tokens from 1 to
            vocab_size - 1; smaller values, such as IGNORE_LABEL, are not scored.
        vocab_size: tokens, with 0 for padding.
        manifest: a dict with "grid" (rows, columns), better also "kind" and "symbols" (puzzles/__init__.py),
            "command", and whatever else describes the dataset. The files' SHA-256 are added.

    Raises UserError if path exists or cannot be written, or for arrays and a manifest that do not fit.
    """
    task = task_of(manifest, None, vocab_size)
    with new_dataset(path, manifest) as folder:
        for split, puzzles in splits.items():
            write_split(f"{folder}/{split}", puzzles, task)


@contextmanager
def new_dataset(path, manifest, names=("<blank>",)):
    """Yields a folder for the splits of a dataset; adds the other files, and moves the folder to path.

    Args:
        path: the new folder.
        manifest: what describes the dataset. The files' SHA-256 are added.
        names: what stands for the puzzle identifiers.

    Raises UserError if path exists or cannot be written.
    """
    # the files are written to a folder beside it, which is moved when it is whole
    path = os.path.normpath(path)
    part = f"{path}.part-{platform.node()}"  # other hosts may share the folder
    try:
        with locked(path):
            refuse_existing(path)
            shutil.rmtree(part, ignore_errors=True)  # a command that was killed left it
            try:
                os.mkdir(part)
                yield part
                write_json(f"{part}/identifiers.json", names)
                write_json(f"{part}/manifest.json", manifest | {"sha256": hashes_of(part)})
                os.rename(part, path)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    except OSError as e:
        # numpy says of a full disk how many bytes it took
        cause = e.strerror or f"is the disk full? ({e})"
        raise UserError(f"{path} cannot be written: {cause}") from None


def write_split(folder, puzzles, task):
    """Writes the files of a split; puzzles: see write_dataset."""
    tokens = tokens_of(task, puzzles, os.path.basename(folder))
    _, num_groups, *_, cells = tokens.shape
    inputs, labels = tokens.reshape(2, -1, cells)

    # each version is a puzzle with one example; total_puzzles leaves out the copies, as the official builder
    # does
    rows = np.arange(len(inputs) + 1, dtype=np.int32)
    arrays = {
        "inputs": inputs,
        "labels": labels,
        "puzzle_identifiers": np.zeros_like(rows[1:]),
        "puzzle_indices": rows,
        "group_indices": rows[::len(inputs) // num_groups],
    }
    finish_split(
        folder, arrays, vocab_size=len(task["symbols"]), seq_len=cells, num_puzzle_identifiers=1,
        total_groups=num_groups, mean_puzzle_examples=1.0, total_puzzles=num_groups)


def finish_split(folder, arrays, **sizes):
    """Writes arrays {field: array} of a split, and its dataset.json."""
    os.makedirs(folder, exist_ok=True)
    for field, array in arrays.items():
        np.save(f"{folder}/all__{field}.npy", array)
    tokens = {"pad_id": 0, "ignore_label_id": 0, "blank_identifier_id": 0}
    write_json(f"{folder}/dataset.json", tokens | sizes | {"sets": ["all"]})


def write_json(path, value):
    text = json.dumps(value, indent=2, default=np.generic.item)  # also of numpy's numbers
    with open(path, "w", encoding="utf-8") as f:
        f.write(text + "\n")


def tokens_of(task, puzzles, name):
    """Returns puzzles as tokens, uint8 [2, ..., cells], where 0 is a cell whose answer does not count.

    Args:
        task: the puzzles' task.
        puzzles: questions and answers, integers [n, cells], or [n, versions, cells]. They are tokens from 1
            on; smaller values in an answer, such as IGNORE_LABEL, are not scored.
        name: the name of the puzzles in messages.

    Raises UserError for arrays that do not fit the task.
    """
    cells = math.prod(task["grid"])
    vocab_size = len(task["symbols"])
    tokens = np.maximum(puzzles, 0)
    if tokens.ndim not in (3, 4) or len(tokens) != 2 or tokens.shape[-1] != cells or not tokens.size:
        raise UserError(f"{name}: questions and answers of shape {tokens.shape[1:]}: must be [n, {cells}] "
                        f"for the grid {task['grid']}, with one puzzle at least")
    if tokens[0].min() < 1 or tokens.max() >= vocab_size or tokens.dtype.kind not in "biu":
        raise UserError(f"{name}: tokens must be integers below vocab_size={vocab_size}; those of questions "
                        "count from 1, since 0 is padding")
    return tokens.astype(np.uint8, copy=False)


def refuse_existing(path):
    if path.startswith("~"):  # a shell expands it only at the beginning of a word
        raise UserError(f"--output_dir={path}: write the folder of ~ out")
    if os.path.lexists(path):
        raise UserError(f"{path} exists already: delete it or choose another --output_dir")


def hashes_of(path):
    """Returns {relative path: SHA-256} of the files of a dataset but the manifest."""
    # the names are those of the official layout, in one order on all machines
    names = []
    for pattern in ("*/dataset.json", "*/all__*.npy", "identifiers.json"):
        names += sorted(glob.glob(pattern, root_dir=path))
    return {name: file_hash(f"{path}/{name}") for name in names}
