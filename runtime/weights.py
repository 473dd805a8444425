"""Reads weights from files: under the official code's names, and with what a model file says."""
import re

import torch

from runtime.files import read_torch_file


def read_model(path):
    """Returns the dict in a model file or a checkpoint; see TRM.load, also for the errors."""
    saved = read_torch_file(path)
    if "task" not in saved:
        raise ValueError(f"{path} does not say what it solves: scripts/export.py makes a model file of a "
                         "checkpoint of the official code")
    return saved


@torch.no_grad()
def load_weights(model, named, same_identifiers=True):
    """Loads weights under the official code's names, with or without their prefixes, into a TRM.

    Args:
        model: a TRM.
        named: {name: tensor}.
        same_identifiers: False if the puzzle identifiers stand for other puzzles than the file's.

    Returns True if the identifiers are others, or if their number is: every row of the puzzle embedding then
    becomes the mean of the file's, as in the official code. Raises ValueError for names or shapes that do not
    fit.
    """
    # the official code's names, without the prefixes of its wrappers
    weights = {}
    for name, t in named.items():
        weights[re.sub(r"^((_orig_mod|module|model|inner)\.)+", "", name)] = t.float()

    # other puzzles have no row of their own in the table: they take the mean
    table = weights.get("puzzle_emb.weights")
    num_rows = model.sizes["num_puzzle_identifiers"]
    is_averaged = False
    if model.has_puzzle_emb and table is not None:
        is_averaged = len(table) != num_rows or not same_identifiers
    if is_averaged:
        weights["puzzle_emb.weights"] = table.mean(0, keepdim=True).expand(num_rows, -1)

    # names and shapes must be these; a part of them would train in silence
    expected = model.state_dict()
    hint = "another block or other settings (hidden_size, L_layers, mlp_t, puzzle_emb_ndim?)"
    if expected.keys() - weights.keys():
        raise ValueError(f"lacks {min(expected.keys() - weights.keys())}: {hint}")
    if weights.keys() - expected.keys():
        raise ValueError(f"also has {min(weights.keys() - expected.keys())}: {hint}")
    for name, t in expected.items():
        if weights[name].shape != t.shape:
            raise ValueError(f"{name} has shape {list(weights[name].shape)}, not {list(t.shape)}: {hint}")
    model.load_state_dict(weights)
    return is_averaged
