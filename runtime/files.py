"""Files: atomic writes, locks, hashes, JSON, metrics.jsonl, checkpoints' names; and lines of progress."""
import fcntl
import glob
import hashlib
import json
import os
import re
import sys
import time
import zipfile
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

from runtime.errors import UserError, writing


def read_json(path):
    """Returns the dict in a JSON file. Raises UserError if it cannot be read."""
    # editors on Windows write a byte order mark
    try:
        with open(path, encoding="utf-8-sig") as f:
            return dict(json.load(f))
    except (OSError, TypeError, ValueError) as e:
        raise UserError(f"{path} cannot be read as a JSON object ({e}): make it again") from None


def file_hash(path):
    # read a megabyte at a time: a file may be larger than the memory
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def locked(path):
    """Holds path + ".lock", which one process at a time can. The file stays."""
    with writing(path):
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        # NFS only locks files that are open for writing
        f = open(path + ".lock", "ab")
    with f:
        lock(f, fcntl.LOCK_EX)
        yield


def lock(file, operation):
    """Locks an open file as fcntl.flock does. A file system without locks costs a warning."""
    try:
        fcntl.flock(file, operation)
    except BlockingIOError:
        raise
    except OSError as e:
        to_stderr(f"{file.name}: cannot be locked ({e.strerror}): start no second process there")


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
    # a kill or a full disk may have cut a line off
    lines = []
    with suppress(FileNotFoundError), open(path, "rb") as f:
        for line in f:
            with suppress(ValueError):
                values = json.loads(line)
                if isinstance(values, dict) and isinstance(values.get("step"), int):
                    lines.append(values)
    return lines


def read_metrics(path):
    """Returns the lines of a metrics.jsonl that have metrics; see read_lines."""
    return [line for line in read_lines(path) if "run" not in line]


def read_facts(path):
    """Returns what the first line of a metrics.jsonl says about its run; {} if it says nothing."""
    return next((line["run"] for line in read_lines(path) if isinstance(line.get("run"), dict)), {})


def duration(seconds):
    """Returns seconds as 1:02:03."""
    return str(timedelta(seconds=round(seconds)))


def to_stderr(text):
    """Prints a line to stderr, if that is still open: a terminal or the reader of a pipe may have left."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


class Progress:
    """Prints how much is done and the time left to stderr every 10 seconds; total: 0 if it is not known."""

    def __init__(self, label, total=0):
        self.label = label
        self.total = total
        self.done = 0
        self.start = time.monotonic()
        self.next_line = 10  # seconds after the start

    def add(self, n):
        self.done += n
        seconds = time.monotonic() - self.start
        if seconds < self.next_line:
            return
        self.next_line = seconds + 10
        text = f"{self.label}: {self.done:,.0f}"
        if self.total:
            seconds_left = seconds * (self.total / max(1, self.done) - 1)
            text += f" of {self.total:,}, {seconds_left:.0f} s left"
        to_stderr(text)


def read_torch_file(path):
    """Returns a dict that torch.save wrote. Nothing in the file is executed. Raises ValueError otherwise."""
    # the prepare scripts do without torch
    import torch
    try:
        # torch does not compare the checksums of the zip archives that it writes
        if zipfile.is_zipfile(path) and zipfile.ZipFile(path).testzip():
            raise ValueError(f"{path} is damaged")
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except (OSError, ValueError):
        raise
    except Exception as e:  # both have many for this
        raise ValueError(f"{path} is damaged, or torch.save did not write it ({type(e).__name__})"
                         f"{other_format(path)}") from None


def other_format(path):
    """Returns a hint at what a file is that torch.load cannot read."""
    with open(path, "rb") as f:
        start = f.read(64)
    # a clone without git-lfs has a few lines of text in place of the file
    if start.startswith(b"version https://git-lfs"):
        return ": it is a Git LFS pointer, git lfs pull fetches the file"
    if start.lstrip().startswith(b"<"):
        return ": it is a web page, not the file behind it"
    if start[8:9] == b"{":
        return ": it looks like safetensors; torch.save(safetensors.torch.load_file(OLD), NEW) converts it"
    return ""


# ---------------------------------------------------------------------------------------------------------
# Checkpoints: their names, and which of them are complete

UNFINISHED = r"(ckpt_\d+|best)\.(pt|json)\.tmp"  # what a process that was killed was writing


def checkpoint_name(step):
    """Returns the name of a step's checkpoint without its ending."""
    return f"ckpt_{step:08d}"


def step_of(name):
    """Returns the step in a checkpoint's name or path, a number to sort by; -1 for another name."""
    match = re.fullmatch(r"ckpt_(\d+)", Path(name).stem)
    return int(match[1]) if match else -1


def complete_checkpoints(names):
    """Returns the numbered checkpoints that have a .pt and a .json among the files `names`, newest first."""
    proven = [name.removesuffix(".json") for name in names if re.fullmatch(r"ckpt_\d+\.json", name)]
    return sorted((name for name in proven if name + ".pt" in names), key=step_of, reverse=True)


def outdated(names, newest, keep_last_n):
    """Returns the files to delete, in order; keeps the newest keep_last_n complete checkpoints.

    names: all files. newest: the newest good checkpoint. Newer ones were found damaged, and do not count.
    """
    steps = [step for step in map(step_of, complete_checkpoints(names)) if step <= step_of(newest)]
    oldest = min(steps[:keep_last_n], default=0)  # the oldest checkpoint that stays
    older = [name for name in names if re.fullmatch(r"ckpt_\d+\.(pt|json)", name) and step_of(name) < oldest]
    unfinished = [name for name in names if re.fullmatch(UNFINISHED, name)]
    # a .json comes before its .pt, which is no checkpoint without it
    return sorted(older + unfinished)


def files_of(folder):
    """Returns the names of the files in a folder; [] if there is no such folder."""
    return glob.glob("*", root_dir=folder)


def checkpoint_paths(out_dir):
    """Returns the paths of the numbered checkpoints that have a .json, newest first."""
    return [f"{out_dir}/{name}.pt" for name in complete_checkpoints(files_of(out_dir))]


def newest_complete(out_dir, say=lambda line: None, newer_than=-1):
    """Returns the path of the newest checkpoint with the hash in its .json, or ""; says which are damaged.

    newer_than: a step. Its checkpoint and older ones are passed over.
    """
    for path in checkpoint_paths(out_dir):
        if step_of(path) <= newer_than:
            break
        cause = "it does not match the hash in its .json"
        try:
            if read_json(path.removesuffix("pt") + "json")["sha256"] == file_hash(path):
                return path
        except Exception as e:  # whatever it is, the one before may be complete
            cause = e
        say(f"skipped {path}: damaged ({cause})")
    return ""
