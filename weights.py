"""Builds models: new ones, and the models in files, also under the official code's names."""
import re
import threading
from types import SimpleNamespace

import torch

import configurator
import model
from puzzles import kind_of
from runtime.errors import UserError, one_line
from runtime.files import read_torch_file

MODEL_LOCK = threading.Lock()  # replicas may be threads, which share torch's generator


def new_model(settings, dataset):
    """Returns a TRM with its first weights for a dataset. Raises UserError if it cannot be built."""
    # the seed is for modules that init_weights does not touch
    with MODEL_LOCK, torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        try:
            return model.TRM(
                settings, seq_len=dataset.seq_len, vocab_size=dataset.vocab_size,
                num_puzzle_identifiers=dataset.num_puzzle_identifiers, task=dataset.task)
        except (ValueError, RuntimeError) as e:  # RuntimeError: more memory than there is
            raise UserError(one_line(e)) from None


def load_model(path, cells=0, defaults=None):
    """Returns the TRM in a file of scripts/export.py, or the average in a checkpoint of train.py.

    Args:
        path: the file. Nothing in it is executed.
        cells: S of the puzzles to solve; 0: as in training. Attention takes any number.
        defaults: {name: value} of settings that the file may lack, such as a fork's.

    The model also has what the file says: task, what puzzles/__init__.py calls a task; test_puzzles, 100 or
    fewer as a batch; forks, those that trained it; the step; data_sha256, the dataset's. Raises ValueError
    for a damaged file, for one of the official code, and for weights that do not fit.
    """
    saved = read_file(path)
    if "task" not in saved:
        raise ValueError(f"{path} does not say what it solves: scripts/export.py makes a model file of a "
                         "checkpoint of the official code")
    # a setting that is newer than the file has train.py's default
    import train
    values = configurator.read_settings(train.Settings) | (defaults or {}) | saved["settings"]
    settings = SimpleNamespace(**values)
    # these puzzles may have another size than those in training
    seq_len = cells or saved["sizes"]["seq_len"]
    task = kind_of(saved["task"]).resized(seq_len).task
    sizes = saved["sizes"] | dict(seq_len=seq_len, vocab_size=len(task["symbols"]))

    # build the model, of the size of these puzzles, with the averaged weights
    try:
        trm = model.TRM(settings, **sizes, task=task)
        load_weights(trm, saved.get("ema") or saved["weights"])
    except ValueError as e:
        forks = ", ".join(saved["forks"]) or "no fork"
        raise ValueError(f"{path}: {e}; it was trained with {forks}") from None

    # add what the file says
    for name in ("test_puzzles", "forks", "step", "data_sha256"):
        setattr(trm, name, saved[name])
    return trm.eval()


def read_file(path):
    """Returns the dict in a checkpoint or a model file. Raises ValueError or UserError for other files."""
    saved = read_torch_file(path)
    if "task" in saved and "sizes" not in saved:
        raise UserError(f"{path} is of an earlier version of this code: commit ead55c3 reads it")
    return saved


@torch.no_grad()
def load_weights(trm, official_weights, same_identifiers=True):
    """Loads weights under the official code's names, with or without their prefixes, into a TRM.

    Args:
        trm: a TRM.
        official_weights: {name: tensor}.
        same_identifiers: False if the puzzle identifiers stand for other puzzles than the file's.

    Returns True if the identifiers are others, or if their number is: every row of the puzzle embedding then
    becomes the mean of the file's, as in the official code. Raises ValueError for names or shapes that do not
    fit.
    """
    # the official code's names, without the prefixes of its wrappers
    weights = {}
    for name, t in official_weights.items():
        weights[re.sub(r"^((_orig_mod|module|model|inner)\.)+", "", name)] = t.float()

    # other puzzles have no row of their own in the table: they take the mean
    table = weights.get("puzzle_emb.weights")
    num_rows = trm.sizes["num_puzzle_identifiers"]
    is_averaged = False
    if trm.has_puzzle_emb and table is not None:
        is_averaged = len(table) != num_rows or not same_identifiers
    if is_averaged:
        weights["puzzle_emb.weights"] = table.mean(0, keepdim=True).expand(num_rows, -1)

    try:
        trm.load_state_dict(weights)
    except RuntimeError as e:  # names or shapes, which it lists
        raise ValueError(f"{one_line(e)}: another block or other settings (hidden_size, L_layers, mlp_t, "
                         "puzzle_emb_ndim?)") from None
    return is_averaged
