"""What several test files use: commands and runs at tiny sizes. servers.py has the servers."""
import contextlib
import importlib.util
import io
import json
import logging
import os
import re
import socket
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import fork_server
import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_flatten

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, os.path.join(ROOT, "scripts")]
import configurator
import evaluate
import model
import prepare_sudoku
import train
from runtime.files import checkpoint_paths, read_metrics

# A model for tests. Those that depend on the depth add DEEP.
TINY = ["--hidden_size=32", "--num_heads=2", "--multiple_of=32", "--L_layers=1", "--H_cycles=1",
        "--L_cycles=1", "--puzzle_emb_ndim=32", "--puzzle_emb_len=2", "--halt_max_steps=4",
        "--forward_dtype=float32", "--global_batch_size=16", "--lr=2e-3", "--lr_warmup_steps=5",
        "--log_interval=5", "--eval_interval=0"]
DEEP = ["--H_cycles=2", "--L_cycles=2"]
CURRICULUM = ["--H_cycles=2", "--L_cycles=3", "--H_cycles_start=1", "--L_cycles_start=1", "--lr=5e-4",
              "--halt_exploration_prob=0.9", "--halt_exploration_prob_end=0.1"]
DATA = "--source=generate --size=4 --num_train=64 --num_test=40 --num_aug=5"  # of the fixture data
# The run of the fixture finished.
WHOLE = ["--max_steps=40", "--checkpoint_interval=10", "--keep_last_n=9", "--eval_interval=4",
         "--eval_max_puzzles=20"]
# The model of the fixture arc_folder.
ARC_MODEL = [*TINY, "--expansion=2", "--puzzle_emb_len=1", "--halt_max_steps=3", "--max_steps=20"]


# Runs of the commands.

def arguments(data, out, *flags):
    """Returns train.py's arguments for a tiny model. Later flags win."""
    return [f"--data_path={data}", f"--out_dir={out}", "--device=cpu", *TINY, *flags]


def run(data, out, *flags, code=0):
    """Runs train.py and returns its output: in this process, unless it should fail or has a fork.

    Later flags win.
    """
    if code or any(flag.endswith(".py") and f"{ROOT}/config" not in flag for flag in flags):
        return start_train(data, out, *flags).output(code)
    settings = configurator.configure(train.Settings, arguments(data, out, *flags))
    train.check_start_settings(settings)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        train.replica(settings, settings.device)
    return printed.getvalue()


def run_config(name, path, *flags):
    """Runs train.py with a config file of the project in a folder, on the dataset PATH-data."""
    paths = [f"--data_path={path}-data", f"--out_dir={path}"]
    return run("", "", f"{ROOT}/config/{name}", *paths, *flags)


# Processes: see fork_server.py for how they start.

def start_script(name, argv, cwd=".", **environment):
    """Starts a script as `python NAME.py ...` does; returns its process, see fork_server.run_script."""
    return fork_server.PipedProcess(fork_server.run_script, (name, argv), cwd, **environment)


def start_train(data, out, *flags, script="train", **options):
    """Starts train.py, or a copy of it, for a tiny model."""
    return start_script(script, arguments(data, out, *flags), **options)


@contextlib.contextmanager
def begun(process, until="training from"):
    """Yields a process that has printed `until`, and kills it at the end."""
    try:
        text = ""
        while until not in text:
            text = process.stdout.readline()
            assert text, "it ended"
        yield process
    finally:
        process.kill()
        process.wait()


def in_new_process(function, *args):
    """Calls function(*args) in another process, where it may run forks; returns what it prints."""
    return fork_server.PipedProcess(function, args).output()


# What a run leaves.

def lines(out):
    """Returns the lines of a run's metrics.jsonl."""
    return read_metrics(os.path.join(out, "metrics.jsonl"))


def curve(out, key="train/loss"):
    """Returns {step: value} of one of a run's metrics."""
    return {line["step"]: line[key] for line in lines(out) if key in line}


def newest(out):
    """Returns the newest checkpoint."""
    return torch.load(checkpoint_paths(str(out))[0], weights_only=True)


def last_weights(out):
    """Returns step, weights, moments and average of the newest checkpoint."""
    state = newest(out)
    return [state["step"], state["weights"], state["optimizer"], state.get("ema")]


def judgements(task, arrays):
    """Returns how many answers count in each metric that an evaluation adds to model.METRICS."""
    own = dict.fromkeys((*model.METRICS, *model.LOSS_TERMS), np.ones(1))
    sums = evaluate.eval_sums(SimpleNamespace(eval_attempts=1), SimpleNamespace(task=task), own | arrays)
    return {name: total for name, total in sums.items() if name not in own}


# Datasets.

def dataset_settings(script=prepare_sudoku, **changes):
    """Returns the settings of a script that makes datasets."""
    return configurator.configure(script.Settings, [f"--{key}={value}" for key, value in changes.items()])


def prepare(path, script=prepare_sudoku, **changes):
    """Makes a dataset and returns its path."""
    return script.main(dataset_settings(script, output_dir=path, **changes))


def small_dataset(path):
    """Makes a dataset of 64 4x4 Sudokus with 5 copies each, and 40 test puzzles; returns its path."""
    flags = [*DATA.split(), f"--output_dir={path}"]
    return prepare_sudoku.main(configurator.configure(prepare_sudoku.Settings, flags))


# What else the tests need.

def wait_for(condition, seconds=120):
    """Waits until condition() is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def children(pid):
    """Returns the processes that a process has started, in this order."""
    with open(f"/proc/{pid}/task/{pid}/children") as f:
        return list(map(int, f.read().split()))


def hosts(n):
    """Returns environments of ranks 0 to n - 1, which gloo joins. Rank 0 is on the last of n hosts."""
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = str(s.getsockname()[1])
    return [dict(RANK=str(i), LOCAL_RANK="0", GROUP_RANK=str(n - 1 - i), WORLD_SIZE=str(n),
                 MASTER_ADDR="127.0.0.1", MASTER_PORT=port) for i in range(n)]


def needs(package):
    """Skips a test that needs a package which no command of the project needs, if it is not installed."""
    if not importlib.util.find_spec(package):
        pytest.skip(f"needs {package}")


def remove(out, pattern):
    """Removes files of a run."""
    for path in Path(out).glob(pattern):
        path.unlink()


def same(a, b):
    """Returns whether two trees have the same structure and equal tensors."""
    a, structure = tree_flatten(a)
    b, other = tree_flatten(b)
    return structure == other and all(torch.equal(torch.as_tensor(x), torch.as_tensor(y))
                                      for x, y in zip(a, b) if x is not None)


def flip_a_bit(path):
    """Changes a bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def code_cells(name):
    """Returns the code of a notebook in examples/, by cells. Jupyter's !COMMAND becomes shell(COMMAND)."""
    notebook = json.loads(Path(ROOT, "examples", name).read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    # a command may go on after a backslash, and has values of Python in braces
    cells = [cell.replace("\\\n", "") for cell in cells]
    return [re.sub("^( *)!(.*)", r"\1shell(f'''\2''')", cell, flags=re.M) for cell in cells]


# Replicas of torch_xla on the CPU: threads of one process.

def xla_environment(world):
    """Returns the environment variables of a process with so many replicas."""
    return dict(PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(world))


def on_replicas(world, function, *args):
    """Lets each of so many replicas call function(rank, *args), and returns what they print."""
    environment = xla_environment(world) | dict(XLA_THREAD_POOL_SIZE="16")
    return fork_server.PipedProcess(run_replicas, (function, args), **environment).output()


def run_replicas(function, args):
    logging.disable(logging.WARNING)  # that replicas set the precision of products several times
    import torch_xla.runtime as xr
    from torch_xla._internal import pjrt

    def replica():
        try:
            function(xr.global_ordinal(), *args)
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # the others would wait for it

    pjrt._run_thread_per_device(0, 1, replica, pjrt.initialize_multiprocess)
