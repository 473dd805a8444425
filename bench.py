"""How fast train.py's own steps are on this machine, and how near to what it can do.

    python bench.py                                               this machine; on a CPU, at a small batch
    python bench.py config/sudoku.py --global_batch_size=32       any config file and setting of train.py
    python bench.py config/sudoku.py --profile=out/profile        the most expensive operations

The settings below are bench.py's own, all others train.py's. Where data_path is missing, random puzzles take
its place. The last line is one JSON object, except with --profile. scripts/aot.py shows what a TPU makes of
the steps.
"""
import itertools
import json
import os
import re
import statistics
import sys
import tempfile
import time

import numpy as np
import torch

import configurator
import train
from data import Dataset
from device import choose_device, open_device, out_of_memory, peak_flops
from evaluate import Queue, noise_keys
from puzzles.files import write_dataset

# what is measured
steps = 2  # steps that follow each other without a wait, as in training; five times
profile = ""  # folder for a trace of 3 steps, whose most expensive operations are printed

CPU_BATCH_SIZE = "--global_batch_size=32"  # where none is given: a step of the default takes a CPU minutes


def bench(index, settings, bench_settings, kind, path):
    """Measures on every replica, and prints on rank 0.

    Args:
        index: the replica's number, from xmp.spawn.
        settings: train.py's settings.
        bench_settings: bench.py's settings.
        kind: what choose_device returns.
        path: the dataset's folder.
    """
    if kind == "xla":
        configurator.end_with_parent()
    # the device, and train.py's run on it
    device = open_device(kind, settings)
    train.check_batch_size(settings, device)
    run, next_inputs = new_run(settings, device, path)

    def say(text):
        if device.rank == 0:
            print(text, flush=True)

    def train_step():
        run.train_program(run.state, next_inputs())
        return run.state["sums"]

    # the training step; its first call compiles
    say("\n".join([*device.notes, "the first step"]))
    first_step = seconds_of(1, train_step)[0]
    if bench_settings.profile:
        say(trace(device, bench_settings.profile, train_step))
        return
    say(f"{5 * bench_settings.steps} training steps, after {first_step:.1f} s for the first")
    rounds = [seconds_of(bench_settings.steps, train_step) for _ in range(5)]
    step, host = map(statistics.median, zip(*rounds))

    # the step of an evaluation
    state, inputs = evaluation_of(run, path)

    def eval_step():
        return run.evaluator.program(state, inputs)["loss"]

    seconds_of(1, eval_step)
    eval_seconds = seconds_of(bench_settings.steps, eval_step)[0]

    # the figures
    matmul_flops = matmul_rate(run) * device.world
    step_flops = run.model.flops_per_example()[1]
    rate = settings.global_batch_size / step
    peak = peak_flops(device)
    figures = dict(
        device=device.name,
        kind=device.kind,
        replicas=device.world,
        torch=torch.__version__,
        settings=train.differences(settings),
        parameters=run.model.num_parameters(),
        global_batch_size=settings.global_batch_size,
        micro_batch_size=settings.micro_batch_size or run.batch_size,
        tokens_per_example=run.model.length,
        first_step_s=first_step,
        step_ms=1e3 * step,
        step_ms_min=1e3 * min(rounds)[0],
        step_ms_max=1e3 * max(rounds)[0],
        host_ms=1e3 * host,  # the host is busy, loading included
        examples_per_sec=rate,
        gflop_per_example=step_flops / 1e9,
        tflops=rate * step_flops / 1e12,
        matmul_tflops=matmul_flops / 1e12,
        mfu_of_matmul=rate * step_flops / matmul_flops,
        mfu_of_peak=peak and rate * step_flops / peak / device.world,
        evaluation_ms=1e3 * eval_seconds,
        peak_memory_gb=torch.cuda.max_memory_allocated() / 1e9,  # 0 without a GPU
        **device.counts(),
    )
    for name, value in figures.items():
        text = f"{value:,.4g}" if isinstance(value, float) else value
        say(f"{name:18} {text}")
    say(json.dumps(figures))


# ---------------------------------------------------------------------------------------------------------
# train.py's steps and their inputs, which scripts/aot.py compiles

def new_run(settings, device, path):
    """Returns a train.Run for the dataset at path, and a function that returns its next step's inputs."""
    data = train.Dataset(path, "train")
    run = train.Run(settings, new_model(settings, data), device)
    total_steps = max(1, train.count_steps(settings, train.epoch_size(data)))
    count = itertools.count()
    return run, lambda: train.make_inputs(run, data, next(count), total_steps)


def new_model(settings, data):
    return train.new_model(settings, **{name: getattr(data, name) for name in train.SIZES})


def evaluation_of(run, path):
    """Returns the state and the inputs of an evaluation's first step."""
    test = train.Dataset(path, "test")
    indices = test.subset(run.batch_size, 1)[:run.batch_size]
    keys = noise_keys(run.settings.seed, run.settings.eval_rollouts, len(indices))
    queue = Queue(run.evaluator, *run.eval_weights(), lambda i: test.test_batch(indices[i], len(i)), keys)
    return queue.state, queue.fill()


def dataset_path(settings, folder):
    """Returns (path, words for it): data_path, or where it is missing random puzzles of its size."""
    # a fork's own class may need no folder
    if os.path.isdir(settings.data_path) or train.Dataset is not Dataset:
        return settings.data_path, settings.data_path
    # its size is in the name of the folder, as in data/sudoku-6x6; token 0 is padding
    size = re.search(r"(\d+)x(\d+)", settings.data_path + " 9x9")
    grid = [int(size[1]), int(size[2])]
    vocab_size = grid[0] + 2
    shape = (2, 1000, grid[0] * grid[1])  # inputs and labels
    cells = np.random.default_rng(0).integers(1, vocab_size, shape, dtype=np.uint8)
    splits = {split: (1000, 1, [cells]) for split in ("train", "test")}
    path = os.path.join(folder, "random")
    write_dataset(path, splits, vocab_size, {"grid": grid})
    return path, f"1000 random puzzles of {grid} cells, as {settings.data_path} is not here"


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


def matmul_rate(run):
    """Returns the FLOP/s of products like the MLP's, [tokens, D] x [D, 6 D] and back; the fastest of five."""
    tokens = run.batch_size * run.model.length
    width = run.settings.hidden_size

    @torch.no_grad()
    def matmuls(state, inputs):
        product = state["x"] @ inputs["up"] @ inputs["down"]
        state["x"].copy_(product)
        return product[0, :1]

    # products that neither grow nor vanish
    state = run.device.put(dict(x=torch.randn(tokens, width).to(run.dtype)))
    up = torch.randn(width, 6 * width) / width ** 0.5
    down = torch.randn(6 * width, width) / (6 * width) ** 0.5
    inputs = run.device.put(dict(up=up.to(run.dtype), down=down.to(run.dtype)))
    program = run.device.compile_step(matmuls)
    seconds = min(seconds_of(4, lambda: program(state, inputs)) for _ in range(5))[0]
    return 2 * 2 * tokens * width * 6 * width / seconds


def trace(device, folder, train_step):
    """Writes a trace of 3 steps to folder, for the usual viewers. Returns a text: what took the longest."""
    os.makedirs(folder, exist_ok=True)
    if device.kind == "xla":
        import torch_xla.debug.profiler as xp
        server = xp.start_server(9012)  # noqa: F841 (it lives as long as the trace)
        xp.start_trace(folder)
        seconds_of(3, train_step)
        xp.stop_trace()
        return f"trace of 3 steps in {folder}: open it with xprof or tensorboard --logdir={folder}"
    # without arguments it traces the CPU and, if there is one, the GPU
    with torch.profiler.profile() as profiler:
        seconds_of(3, train_step)
    path = os.path.join(folder, f"trace.{device.rank}.json")
    profiler.export_chrome_trace(path)
    kind = "cuda" if device.kind == "cuda" else "cpu"
    table = profiler.key_averages().table(f"self_{kind}_time_total", row_limit=10, max_name_column_width=60)
    return f"{table}\ntrace of 3 steps in {path}: open it in https://ui.perfetto.dev or chrome://tracing"


# ---------------------------------------------------------------------------------------------------------
# The command

def main(argv):
    """Measures on this machine's device."""
    bench_settings, operands, train_arguments = configurator.split_arguments(__file__, argv)
    configurator.check_bounds(bench_settings, {"steps": "[1, 1e6]"})
    flags = [*operands, *train_arguments]
    settings = configurator.configure(train.__file__, flags)
    kind, reason = choose_device(settings.device)
    if kind == "cpu" or os.environ.get("PJRT_DEVICE") == "CPU":
        settings = configurator.configure(train.__file__, [CPU_BATCH_SIZE, *flags])
    train.check_settings(settings)

    with tempfile.TemporaryDirectory() as folder:
        path, source = dataset_path(settings, folder)
        new_model(settings, train.Dataset(path, "train"))  # raises UserError for sizes that cannot be built
        print(f"device {kind}: {reason}; dataset: {source}", flush=True)
        try:
            if kind == "xla":
                import torch_xla.distributed.xla_multiprocessing as xmp
                xmp.spawn(bench, args=(settings, bench_settings, kind, path))
            else:
                bench(0, settings, bench_settings, kind, path)
        except torch.OutOfMemoryError:
            raise out_of_memory(settings) from None


if __name__ == "__main__":
    configurator.command(lambda: main(sys.argv[1:]), __file__)
