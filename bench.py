"""How fast train.py's own steps are on this machine.

    python bench.py                                               this machine; on a CPU, at a small batch
    python bench.py config/sudoku.py --global_batch_size=32       any config file and setting of train.py

The settings below are bench.py's own, all others train.py's. Where data_path is missing, random puzzles take
its place. The last line is one JSON object. scripts/aot.py shows what a TPU makes of the steps.
"""
import copy
import itertools
import json
import os
import sys
import tempfile
import time

import numpy as np
import torch

import configurator
import data
import optim
import train
from model import SIZES
from runtime import process
from runtime.device import choose_device, is_compiled, is_out_of_memory, out_of_memory, peak_flops
from runtime.errors import check_numbers
from runtime.flops import flops_per_example
from runtime.prepare import write_dataset
from train import open_device

# what is measured
steps = 0  # steps that follow each other without a wait, up to three times; 0: 20 on a GPU, 2 elsewhere
size = 9  # side of the random puzzles where data_path is missing

CPU_STEP_SECONDS = 3  # a CPU's batch, where none is given, is the largest whose step takes so long, or 1
CPU_BATCH_SIZES = (32, 16, 8, 4, 2, 1)
ROUND_SECONDS = 12  # the steps are repeated until so much time has passed


def bench(index, settings, bench_settings, kind, path, chooses_batch=False):
    """Measures on every replica, and prints on rank 0.

    Args:
        index: the replica's number, from xmp.spawn.
        settings: train.py's settings.
        bench_settings: bench.py's settings.
        kind: what choose_device returns.
        path: the dataset's folder.
        chooses_batch: True lets one timed step choose global_batch_size.
    """
    if kind == "xla":
        process.end_with_parent()
    # the device, and the examples of the config's run
    device = open_device(kind, settings)
    settings = copy.copy(settings)  # replicas may be threads
    settings.forward_dtype, dtype_note = device.choose_dtype(settings.forward_dtype)
    train_set = data.Dataset(path, "train")
    examples = settings.global_batch_size * optim.count_steps(settings, optim.epoch_size(train_set))

    def say(text):
        if device.rank == 0 and text:
            print(text, flush=True)

    # the steps of train.py, at the batch to measure
    say(dtype_note)
    if chooses_batch:
        settings.global_batch_size = choose_batch_size(settings, device, train_set, say)
    train.check_batch_size(settings, device)
    run, next_inputs = new_run(settings, device, train_set)
    # the host's time is hidden behind many steps of a GPU
    steps = bench_settings.steps or (20 if device.kind == "cuda" else 2)

    cycles = settings.H_cycles, settings.L_cycles

    def train_step():
        return run.train_step(run.state, next_inputs(), cycles)

    # the training step; its first call compiles
    say(f"the first training step, {settings.global_batch_size} sequences")
    first_seconds, _ = seconds_of(1, train_step)
    say(f"training steps, after {first_seconds:.1f} s for the first")
    began = time.perf_counter()
    rounds = []
    while not rounds or len(rounds) < 3 and time.perf_counter() - began < ROUND_SECONDS:
        rounds.append(seconds_of(steps, train_step))
    step_seconds, host_seconds = sorted(rounds)[len(rounds) // 2]

    # the step of an evaluation, of the weights that training has left
    say("evaluation steps")
    slots, inputs = evaluation_of(run, path)

    def eval_step():
        return run.evaluator.program(slots, inputs)["loss"]

    seconds_of(1, eval_step)
    eval_seconds, _ = seconds_of(steps, eval_step)

    # the figures
    step_flops = flops_per_example(run.model)
    rate = settings.global_batch_size / step_seconds
    peak = peak_flops(device)
    figures = dict(
        device=device.name,
        kind=device.kind,
        replicas=device.world,
        torch=torch.__version__,
        settings=train.differences(settings),
        parameters=run.model.num_parameters(),
        global_batch_size=settings.global_batch_size,
        compiled=is_compiled(device),
        first_step_s=first_seconds,
        step_ms=1e3 * step_seconds,
        host_ms=1e3 * host_seconds,  # the host is busy, loading included
        examples_per_sec=rate,
        gflop_per_example=step_flops / 1e9,
        tflops=rate * step_flops / 1e12,
        mfu=peak and rate * step_flops / peak / device.world,
        evaluation_ms=1e3 * eval_seconds,
        peak_memory_gb=torch.cuda.max_memory_allocated() / 1e9 or None,  # None without a GPU
        hours_of_the_run=examples / rate / 3600,
        **device.counts(),
    )
    for name, value in figures.items():
        if value is not None:
            text = f"{value:,.4g}" if isinstance(value, float) else value
            say(f"{name:18} {text}")
    say(json.dumps(figures))


def choose_batch_size(settings, device, train_set, say):
    """Returns the batch size that the time of a step with one sequence leaves a CPU."""
    settings.global_batch_size = 1
    run, next_inputs = new_run(settings, device, train_set)
    cycles = settings.H_cycles, settings.L_cycles
    for _ in range(2):  # the first step takes longer
        seconds, _ = seconds_of(1, lambda: run.train_step(run.state, next_inputs(), cycles))
    batch_size = next(n for n in CPU_BATCH_SIZES if n * seconds < CPU_STEP_SECONDS or n == 1)
    say(f"a step of one sequence takes {seconds:.1f} s: {batch_size} at a time")
    return batch_size


# ---------------------------------------------------------------------------------------------------------
# train.py's steps and their inputs, which scripts/aot.py compiles

def new_run(settings, device, train_set):
    """Returns a train.Run for a dataset, and a function that returns its next step's inputs."""
    run = train.Run(settings, new_model(settings, train_set), device)
    total_steps = max(1, optim.count_steps(settings, optim.epoch_size(train_set)))
    count = itertools.count()
    return run, lambda: train.make_inputs(run, train_set, next(count), total_steps)


def new_model(settings, train_set):
    return train.new_model(settings, **{name: getattr(train_set, name) for name in SIZES})


def evaluation_of(run, path):
    """Returns the slots and the inputs of an evaluation's first step."""
    test_set = data.Dataset(path, "test")
    batch = test_set.test_batch(np.resize(test_set.subset(run.batch_size, 1), run.batch_size))
    return run.evaluator.new_slots(), run.evaluator.inputs(*run.eval_weights(), batch)


def dataset_path(settings, folder, size=size):
    """Returns (path, words for it): data_path, or where it is missing 1000 random puzzles in `folder`."""
    # a fork's own class may need no folder
    is_forked = data.Dataset.__module__ != "data"
    if os.path.isdir(settings.data_path) or is_forked:
        return settings.data_path, settings.data_path
    # token 0 is padding
    cells = np.random.default_rng(0).integers(1, size + 2, (2, 1000, size * size), dtype=np.uint8)
    path = os.path.join(folder, "random")
    write_dataset(path, {"train": cells, "test": cells}, size + 2, {"grid": [size, size]})
    return path, f"1000 random puzzles of {size}x{size} cells, as {settings.data_path} is not here"


# ---------------------------------------------------------------------------------------------------------
# What is timed

def seconds_of(n, call):
    """Returns the seconds of each of n calls, and for how many of them the host is busy.

    call returns a tensor. Only the last one is waited for, as in training.
    """
    began = time.perf_counter()
    for _ in range(n):
        result = call()
    host_seconds = time.perf_counter() - began
    result.cpu()
    return (time.perf_counter() - began) / n, host_seconds / n


# ---------------------------------------------------------------------------------------------------------
# The command

def main(argv):
    """Measures on this machine's device."""
    bench_settings, operands, train_arguments = configurator.split_arguments(__file__, argv)
    check_numbers(vars(bench_settings), ["size"])
    settings = configurator.configure(train.__file__, [*operands, *train_arguments])
    train.check_settings(settings)
    kind, reason = choose_device(settings.device)
    # a CPU would take minutes for a step of the default
    is_default = settings.global_batch_size == train.global_batch_size
    is_given = not is_default or any("global_batch_size" in flag for flag in argv)

    with tempfile.TemporaryDirectory() as folder:
        path, source = dataset_path(settings, folder, bench_settings.size)
        print(f"device {kind}: {reason}; dataset: {source}", flush=True)
        try:
            if kind == "xla":
                import torch_xla.distributed.xla_multiprocessing as xmp
                # train.py in the processes of xmp.spawn runs the config files again
                sys.argv[1:] = [*operands, *train_arguments]
                xmp.spawn(bench, args=(settings, bench_settings, kind, path))
            else:
                bench(0, settings, bench_settings, kind, path, kind == "cpu" and not is_given)
        except Exception as e:
            if not is_out_of_memory(e):
                raise
            raise out_of_memory(settings, 1) from None


if __name__ == "__main__":
    process.command(lambda: main(sys.argv[1:]), __file__)
