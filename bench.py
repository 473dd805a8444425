"""Measures how fast train.py's own steps are on this machine.

    python bench.py                                               this machine; on a CPU, at a small batch
    python bench.py config/sudoku.py --global_batch_size=32       any config file and setting of train.py

The settings below are bench.py's own, all others are train.py's. If data_path is missing, data_prepare makes
it. Without data_prepare, random puzzles take its place, and --size decides what a step costs. The second to
last line says how many steps an hour has, as --max_steps=N. The last line has all figures as one JSON object.
scripts/aot.py estimates the time of the steps on a TPU.
"""
import copy
import itertools
import json
import os
import tempfile
import time

import numpy as np
import torch

import configurator
import data
import train
from configurator import From0, Rule
from puzzles.writer import write_dataset
from runtime import process
from runtime.engines import check_batch_size, choose_device, open_device, spawner
from runtime.errors import reporting_full_memory
from runtime.flops import flops_per_example, peak_flops


class Settings:
    # what is measured
    steps: From0 = 0  # steps in a row without a wait, three times; 0: 20 on a GPU, 3 elsewhere
    replica_batch_size: From0 = 0  # sequences on each replica; 0: global_batch_size is divided among them
    # side of the random puzzles where data_path is missing and no data_prepare makes it
    size: Rule("from 1 to 254", lambda side: 0 < side < 255) = 9  # a token is a byte


CPU_BATCH_SIZE = 4  # of a replica on a CPU, where none is given: a step of the default takes minutes there


def bench(settings, num_steps, device_type, replica_batch_size):
    """Measures on every replica, and prints on rank 0; settings: train.py's."""
    device = open_device(device_type, settings)
    process.restart_watchdog(0)  # of the start of a new process

    # the steps of train.py, at the batch to measure
    if device_type == "cpu" and "global_batch_size" not in settings.assigned:
        replica_batch_size = replica_batch_size or CPU_BATCH_SIZE
    with reporting_full_memory():
        run, next_inputs = new_run(settings, device, replica_batch_size)
    with reporting_full_memory(run.micro_batch_size):
        figures = measure(run, next_inputs, num_steps)
    # the config's run has its own batch, whatever the measured one is
    batch_size = settings.global_batch_size
    steps_per_hour = figures["steps_per_hour"] = 3600 * figures["examples_per_sec"] / batch_size

    if device.rank == 0:
        print(f"an hour of training, without evaluations, has --max_steps={max(1, int(steps_per_hour))}"
              f" of {batch_size} sequences")
        print(json.dumps(figures))


def measure(run, next_inputs, num_steps):
    """Returns {name: figure} of both steps. All ranks.

    Args:
        run, next_inputs: of new_run.
        num_steps: steps that follow each other; 0: so many that they hide the host's time of a GPU.
    """
    settings = run.settings
    device = run.device
    num_steps = num_steps or (20 if device.type == "cuda" else 3)

    # the training step, at the full depth; its first call compiles
    def train_step():
        return run.train_step(run.state, next_inputs(), (settings.H_cycles, settings.L_cycles))

    first_seconds, _ = seconds_of(1, train_step)
    # the median of three rounds counts
    rounds = [seconds_of(num_steps, train_step) for _ in range(3)]
    step_seconds, host_seconds = sorted(rounds)[1]

    # the step of an evaluation, of the weights that training has left
    slots, inputs = evaluation_of(run, next_inputs())

    def eval_step():
        return run.evaluator.eval_step(slots, inputs)["loss"]

    eval_step().cpu()  # the first call compiles
    eval_seconds, _ = seconds_of(num_steps, eval_step)

    # the figures
    step_flops = flops_per_example(run.model)
    rate = settings.global_batch_size / step_seconds
    peak = peak_flops(device)
    return dict(
        device=device.name,
        kind=device.type,
        replicas=device.world,
        torch=torch.__version__,
        settings=settings.flags(),
        parameters=run.model.num_parameters(),
        global_batch_size=settings.global_batch_size,
        sequences_at_a_time=run.micro_batch_size,
        compiled=device.compiles,
        first_step_s=first_seconds,
        step_ms=1e3 * step_seconds,
        host_ms=1e3 * host_seconds,  # the host is busy, loading included
        examples_per_sec=rate,
        gflop_per_example=step_flops / 1e9,
        tflops=rate * step_flops / 1e12,
        mfu=peak and rate * step_flops / peak / device.world,
        evaluation_ms=1e3 * eval_seconds,
        peak_memory_gb=device.peak_memory() / 1e9 or None,  # None on a CPU and with TorchTPU
        **device.counts(),
    )


# ---------------------------------------------------------------------------------------------------------
# train.py's steps and their inputs, which scripts/aot.py compiles

def new_run(settings, device, replica_batch_size=0):
    """Returns a train.Run for the dataset, and a function that returns its next step's inputs.

    The Run's settings have the forward_dtype and the batch in use. Raises UserError for a batch that does not
    divide. replica_batch_size: see Settings.
    """
    settings = copy.copy(settings)  # replicas may be threads
    settings.forward_dtype, _ = device.choose_dtype(settings.forward_dtype)
    if replica_batch_size:
        settings.global_batch_size = replica_batch_size * device.world
    check_batch_size(settings, device)
    # the dataset has the model's sizes
    train_set = data.Dataset(settings.data_path, "train")
    run = train.Run(settings, train.new_model(settings, train_set), device)
    # the last argument, the length of the run, only decides numbers such as the rates
    count = itertools.count()
    return run, lambda: train.make_inputs(run, train_set, next(count), 1_000_000)


def evaluation_of(run, inputs):
    """Returns the slots and the inputs of an evaluation step on the puzzles in a training step's inputs."""
    return run.evaluator.new_slots(), run.evaluator.inputs(*run.eval_weights(), inputs["puzzles"])


def find_or_make_dataset(path, folder, size=Settings.size):
    """Returns a dataset's folder; if it is missing, says so and makes 1000 random puzzles in folder."""
    # a fork's own class may need no folder
    if os.path.isdir(path) or issubclass(data.Dataset, data.Generated):
        return path
    print(f"dataset: 1000 random puzzles of {size}x{size} cells, see --size, as {path} is not here")
    # random tokens stand for questions and answers; 0 is padding
    cells = np.random.default_rng(0).integers(1, size + 2, (2, 1000, size * size), dtype=np.uint8)
    random_path = f"{folder}/random"
    write_dataset(random_path, {"train": cells, "test": cells}, size + 2, {"grid": [size, size]})
    return random_path


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
    bench_settings, operands, train_arguments = configurator.split_arguments(Settings, argv)
    settings = configurator.configure(train.Settings, operands + train_arguments)
    train.check_start_settings(settings)
    device_type, reason = choose_device(settings.device)

    print(f"device {device_type}: {reason}; the first steps can take minutes", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = data.get_dataset(settings, lambda: False)
        settings.data_path = find_or_make_dataset(path, folder, bench_settings.size)
        arguments = settings, bench_settings.steps, device_type, bench_settings.replica_batch_size
        spawn = spawner(device_type)
        if spawn:
            spawn(configurator.Spawned(bench, train.Settings, *arguments))
        else:
            bench(*arguments)


if __name__ == "__main__":
    process.command(main)
