"""Builds models: new ones, and the models in files, also under the official code's names."""
import threading
from types import SimpleNamespace

import torch

import model
from puzzles import kind_of
from runtime.errors import UserError, one_line
from runtime.saved import load_weights, read_file

MODEL_LOCK = threading.Lock()  # replicas may be threads, which share torch's generator


def new_model(settings, dataset):
    """Returns a TRM with its first weights for a dataset. Raises UserError if it cannot be built."""
    # the seed is for modules that init_weights does not touch
    with MODEL_LOCK, torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        try:
            return model.TRM(
                settings, seq_len=dataset.seq_len, vocab_size=dataset.vocab_size,
                num_puzzle_identifiers=dataset.num_puzzle_identifiers)
        except (ValueError, RuntimeError) as e:  # RuntimeError: more memory than there is
            raise UserError(one_line(e)) from None


def load_model(path, cells=0, defaults=None):
    """Returns the TRM in a file of scripts/export.py, or the average in a checkpoint of train.py.

    Args:
        path: the file. Nothing in it is executed.
        cells: S of the puzzles to solve; 0: as in training. Attention takes any number.
        defaults: {name: value} of settings that the file may lack, which are newer than it or a fork's.

    The model also has what the file says: task, what puzzles/__init__.py calls a task; test_puzzles, 100 or
    fewer as a batch; forks, those that trained it; the step; data_sha256, the dataset's. Raises ValueError
    for a damaged file, for one of the official code, and for weights that do not fit.
    """
    saved = read_file(path)
    if "task" not in saved:
        raise ValueError(f"{path} does not say what it solves: scripts/export.py makes a model file of a "
                         "checkpoint of the official code")
    settings = SimpleNamespace(**(defaults or {}) | saved["settings"])
    sizes = dict(saved["sizes"])
    if cells:
        sizes["seq_len"] = cells

    # build the model, of the size of these puzzles, with the averaged weights
    try:
        trm = model.TRM(settings, **sizes)
        load_weights(trm, saved.get("ema") or saved["weights"])
    except ValueError as e:
        forks = ", ".join(saved["forks"]) or "no fork"
        raise ValueError(f"{path}: {e}; it was trained with {forks}") from None

    # add what the file says
    for name in ("task", "test_puzzles", "forks", "step", "data_sha256"):
        setattr(trm, name, saved[name])
    trm.task = kind_of(trm.task).resized(sizes["seq_len"]).task
    return trm.eval()
