"""Helpers for files (atomic writes, locks, hashes, JSON, metrics.jsonl), and lines that show progress."""
import fcntl
import hashlib
import json
import os
import sys
import time
import zipfile
from contextlib import contextmanager, suppress
from datetime import timedelta

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
    if start.startswith(b"PK") and not zipfile.is_zipfile(path):
        return ": it is cut off, copy it again"
    return ""
