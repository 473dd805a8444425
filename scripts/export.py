"""Makes a model file of a run, a checkpoint, or a checkpoint of the official code.

    python scripts/export.py out/demo model.pt              the newest checkpoint of a run
    python scripts/export.py out/demo/best.pt model.pt      this checkpoint
    python scripts/export.py official.pt model.pt config/sudoku.py --data_path=data/NAME

TRM.load, solve.py, play.py and train.py's init_from take the file, and the official code its "weights". They
are what an evaluation computes with: averaged, and in forward_dtype. A checkpoint of a run has its settings,
sizes, task and 100 test puzzles. Those of an official file come from config files, flags and the dataset.
"""
import os
import sys

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import train
from bucket import local_dataset
from checkpoint import load_weights, newest_whole, read_checkpoint, some_puzzles
from configurator import Settings, UserError, command, configure, split_arguments
from data import Dataset, replacing
from model import SIZES

PREFIX = "_orig_mod.model.inner."  # of the names that the official code gives its weights


def main(argv):
    """Writes the file."""
    _, operands, train_arguments = split_arguments(__file__, argv)
    if len(operands) != 2:
        raise UserError("usage: python scripts/export.py MODEL FILE; MODEL is a run's folder or a checkpoint")
    path, target = operands
    # write a new file; read the newest checkpoint of a run's folder
    if os.path.lexists(target) or not os.path.isdir(os.path.dirname(target) or "."):
        raise UserError(f"{target}: must be a new file in a folder that exists")
    path = newest_whole(path, print) if os.path.isdir(path) else path
    if not os.path.isfile(path):
        raise UserError(f"{operands[0]}: no checkpoint there")
    state = read_checkpoint(path)

    # the settings of the training, unless this command says otherwise
    settings = configure(train.__file__, train_arguments)
    settings.fill(train.recipe(state.get("settings", {})))
    if "puzzles" not in state:
        state = add_dataset(state, settings, path)
    settings = Settings(**train.recipe(vars(settings)))
    if settings.forward_dtype == "auto":  # of the config that comes with an official file
        settings.forward_dtype = "float32"

    # all that does not only serve to train on
    dtype = getattr(torch, settings.forward_dtype)
    weights = state["weights"] | state.get("ema", {})
    names = "model", "task", "data", "identifiers", "puzzles", "step", "forks"
    content = {name: state[name] for name in names}
    content |= dict(
        weights={PREFIX + name.removeprefix(PREFIX): t.to(dtype) for name, t in weights.items()},
        settings=vars(settings),
        command=f"python train.py {train.differences(settings)}",
    )
    # a file that is interrupted leaves nothing
    with replacing(target) as f:
        torch.save(content, f)
    print(f"wrote {target}, weights in {settings.forward_dtype}")


def add_dataset(state, settings, path):
    """Returns the state of an official file, or of a checkpoint without puzzles, with what it lacks.

    path: of its file. Raises UserError if it and the dataset do not fit.
    """
    # the model has the dataset's sizes, and the weights' names without the official code's prefixes
    data = Dataset(local_dataset(settings.data_path), "train")
    model = train.new_model(settings, **{name: getattr(data, name) for name in SIZES})
    if load_weights(model, state["weights"], path):
        raise UserError(f"{path} has other puzzle identifiers than {data.path}")
    added = dict(
        model=model.sizes,
        task=data.task,
        data=data.sha256,
        identifiers=data.identifiers,
        puzzles=some_puzzles(Dataset(data.path, "test")),
        step=0,
        forks={},
    )
    return added | state | dict(weights=model.state_dict())


if __name__ == "__main__":
    command(lambda: main(sys.argv[1:]), __file__)
