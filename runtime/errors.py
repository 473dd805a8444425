"""The two errors that process.command expects, and functions that raise them."""
from contextlib import contextmanager


class UserError(Exception):
    """Wrong input: one line that says what is wrong, where, and how to fix it. The exit code is 2."""


class TransientError(Exception):
    """A network or a server failed, and may work later: one line. The exit code is 1."""


@contextmanager
def writing(path):
    """Raises UserError for an OSError in its block, where a file or a folder at path is written."""
    try:
        yield
    except OSError as e:
        if e.errno is None:  # an error of requests, which is an OSError too
            raise
        raise UserError(f"{path}: cannot be written ({e.strerror})") from None


def one_line(error):
    """Returns an error's type and the beginning of its text."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def is_out_of_memory(error):
    """Returns True if a device's or the host's memory was full, in a step or in a compiler."""
    # Google's servers use the same word for a quota
    if isinstance(error, (UserError, TransientError)):
        return False
    error = getattr(error, "inner_exception", error)  # torch.compile wraps it
    words = "out of memory", "can't allocate memory", "RESOURCE_EXHAUSTED"  # CUDA's, the CPU's, TPUs'
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


@contextmanager
def reporting_full_memory(micro_batch_size=1):
    """Raises UserError for a full memory in its block, where so many sequences are computed at a time."""
    try:
        yield
    except Exception as e:
        if not is_out_of_memory(e):
            raise
        advice = "a lower global_batch_size or hidden_size needs less"
        if micro_batch_size > 1:
            advice = (f"a --micro_batch_size below {micro_batch_size} gives the same result, if it divides "
                      "the sequences of a replica")
        raise UserError(f"out of memory on the device: {advice}") from None


def check_values(values, names, batch_size):
    """Raises UserError unless a SupervisionStep has values of these names, and all are [batch_size]."""
    for name in names:
        if name not in values:
            raise UserError(f"model.py's METRICS or LOSS_TERMS has {name!r}, but TRM.forward returns no such "
                            "value")
    for name, value in values.items():
        if value.shape != (batch_size,):
            raise UserError(f"{name}, a term of the loss or a metric, must be a number for each sequence, "
                            f"[{batch_size}], and is {list(value.shape)}")
