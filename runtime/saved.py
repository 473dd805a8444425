"""Reads checkpoints and model files, also the official code's, and loads their weights into a model."""
import re

import torch

from runtime.errors import UserError
from runtime.files import read_torch_file

WEIGHTS = ("state_dict", "model_state_dict", "model_state", "model")  # where other code's files have them

# Settings that decide the names and the shapes of the weights.
OF_SHAPES = ("hidden_size", "expansion", "multiple_of", "L_layers", "mlp_t", "pos_encodings",
             "puzzle_emb_ndim", "puzzle_emb_len")


def read_file(path):
    """Returns the dict in a checkpoint or a model file. Raises ValueError or UserError for other files."""
    saved = read_torch_file(path)
    if "task" in saved and "sizes" not in saved:
        raise UserError(f"{path} is of an earlier version of this code: commit ead55c3 reads it")
    return saved


def read_checkpoint(path):
    """Returns the dict in a checkpoint of ours, or {"weights": ...} of an official one. Raises UserError."""
    try:
        saved = read_file(path)
        # ours has "weights" among other entries; the official code saves only the weights, others nest them,
        # and may have their average beside them
        if "weights" not in saved:
            weights = next((saved[name] for name in WEIGHTS if isinstance(saved.get(name), dict)), saved)
            saved = {"weights": weights | saved.get("ema_helper", {})}
        if not all(map(torch.is_tensor, saved["weights"].values())):
            raise ValueError("it has no weights")
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; init_from: scratch, resume, auto or FILE") from None
    except Exception as e:  # torch has many for this
        cause = str(e).removeprefix(path).strip() if isinstance(e, ValueError) else type(e).__name__
        raise UserError(f"{path}: cannot be read as a checkpoint ({cause}): damaged, or not one of ours or "
                        "the official code's; init_from: scratch, resume, auto or FILE") from None
    return saved


@torch.no_grad()
def load_weights(trm, official_weights, same_identifiers=True):
    """Loads weights under the official code's names, with or without their prefixes, into a TRM.

    Returns True if the puzzle identifiers stand for other puzzles than the file's, or if their number is
    another: every row of the puzzle embedding then becomes the mean of the file's, as in the official code.
    Raises ValueError for names or shapes that do not fit.
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
    except RuntimeError as e:  # names or shapes: a line for each, after the first
        cause = str(e).splitlines()[1].strip()[:200]
        raise ValueError(f"{cause}: another block or other settings") from None
    return is_averaged


def load_start(start, saved, settings, trm, train_set):
    """Loads the weights of a Start, whose file has `saved`; returns lines that say what differs. Rank 0."""
    path = start.path
    if not path:
        return []
    attention = changed_attention(trm, saved)
    notes = []
    if start.is_resume:
        check_run(start, saved, settings, train_set, attention)
        notes += [f"resuming from {path}"]
        notes += changes(settings, start.saved_settings, sorted(start.saved_settings))
    else:
        check_task(saved, train_set, path)
    notes += [*missing_forks(saved.get("forks", {}), settings.forks), *attention]

    # files of the official code do not say what their identifiers stand for
    sha256 = train_set.identifiers_sha256
    same_identifiers = saved.get("identifiers_sha256", sha256) == sha256
    weights = saved["weights"]
    # the average of frozen weights would drift towards the raw ones: so train on the average itself
    if settings.freeze_weights and not start.is_resume:
        weights = saved.get("ema") or weights
    try:
        is_averaged = load_weights(trm, weights, same_identifiers)
    except ValueError as e:
        if not start.is_resume:
            notes += changes(trm.settings, saved.get("settings", {}), OF_SHAPES)
        raise UserError("; ".join([f"{path}: {e}", *notes])) from None
    if is_averaged and settings.eval_only:
        raise UserError(f"{path} has other puzzle identifiers than {train_set.path}: it can be trained "
                        "further, but not evaluated (docs/arc.md)")
    if is_averaged:
        notes.append(f"{path} has other puzzle identifiers: all start from the mean of its embedding")
    return notes


def check_run(start, saved, settings, train_set, attention):
    """Raises UserError if the run cannot go on with this model and dataset."""
    path = start.path
    if saved["data_sha256"] != train_set.sha256:
        raise UserError(f"{path} was trained on other data than {settings.data_path} (or than a "
                        "fork's second dataset): choose that, or another --out_dir")
    optimizer = start.saved_settings["optimizer"]
    if optimizer != settings.optimizer:
        raise UserError(f"{path} was trained with optimizer={optimizer}: another --out_dir with "
                        "--init_from=FILE begins with its weights")
    if attention:
        raise UserError(f"{path} was trained as another model: {', '.join(attention)}: leave that out, "
                        "or choose another --out_dir")


def changed_attention(trm, saved):
    """Returns a line for each setting of attention that differs from the checkpoint's; no shape shows it."""
    if trm.settings.mlp_t:
        return []
    names = ["num_heads", "pos_encodings"]
    if trm.has_puzzle_emb:
        names.append("puzzle_emb_len")
    # files of the official code have no settings
    return changes(trm.settings, saved.get("settings", {}), names)


def changes(settings, saved_settings, names):
    """Returns a line for each of the settings `names` that has another value in a checkpoint."""
    lines = []
    for name in names:
        value = getattr(settings, name, "no setting here")
        saved_value = saved_settings.get(name, value)
        if value != saved_value:
            lines.append(f"{name} is {value}; the checkpoint had {saved_value}")
    return lines


def check_task(saved, train_set, path):
    """Raises UserError if the weights in the file `path` were trained on another kind of puzzle."""
    # files of the official code do not say their task
    task = saved.get("task", train_set.task)
    ours = train_set.task
    differs = task["kind"] != ours["kind"]
    # weights of another size may fit, with its symbols; padding has no sign, and prepare_csv.py gives it one
    if task["grid"] == ours["grid"]:
        differs |= task["symbols"][1:] != ours["symbols"][1:]
    if task["kind"] and differs:
        raise UserError(f"{path} was trained on kind {task['kind']!r}, symbols {task['symbols']!r}, but "
                        f"{train_set.path} has {ours['symbols']!r}, kind {ours['kind']!r}: leave out the "
                        "config file, or give --data_path")


def missing_forks(saved_forks, forks):
    """Returns a line for each fork {name: digest} that trained the weights in a file and has not run here."""
    lines = []
    for name, digest in saved_forks.items():
        if digest not in forks.values():
            other = f"has {forks[name]} here" if name in forks else "is not among the arguments"
            lines.append(f"trained with the fork {name} {digest}, which {other}: results may differ")
    return lines
