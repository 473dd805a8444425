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
import platform
import re
import resource
import statistics
import sys
import tempfile
import time
from typing import NamedTuple

import numpy as np
import torch

import configurator
import train
from configurator import UserError
from data import Dataset, Progress
from device import choose_device, end_with_parent, open_device, out_of_memory, peak_flops
from evaluate import Queue, noise_keys
from prepare import write_dataset

# what is measured
steps = 0  # steps to time, after a first one that compiles; 0: 10, or 5 on a CPU
profile = ""  # folder for a trace of 3 steps, whose most expensive operations are printed
# ---

CPU_BATCH_SIZE = 32  # where none is given: a step of train.py's default takes a CPU minutes


class Times(NamedTuple):
    """What was timed, in seconds."""
    first_step: float  # compiling included
    steps: list  # each step, with a wait for its end
    unwaited_step: float  # the mean of steps that follow each other without a wait
    host: float  # how long the host is busy with one of them
    loading: float  # a batch and its copy to the device
    eval_steps: list  # each step of an evaluation


def bench(index, settings, own, kind, path):
    """Measures on every replica, and prints on rank 0.

    Args:
        index: of the replica, from xmp.spawn.
        settings: of train.py.
        own: bench.py's settings.
        kind: as choose_device returns it.
        path: of the dataset.
    """
    if kind == "xla":
        end_with_parent()
    # the device, and train.py's run on it
    device = open_device(kind, settings)
    train.check_batch_size(settings, device)
    for note in device.notes if device.rank == 0 else ():
        print(note, flush=True)
    run, next_inputs = new_run(settings, device, path)

    def train_step():
        run.train_program(run.state, next_inputs())
        return run.state["sums"]

    # the training step
    first_step = seconds_of(1, train_step, "the first step", device.rank)[0]
    if own.profile:
        text = trace(device, own.profile, train_step)
        if device.rank == 0:
            print(text)
        return
    # each step with a wait for its end, then all of them with one wait, as training does it
    waited = seconds_of(own.steps, train_step, f"{own.steps} training steps", device.rank)
    began = time.perf_counter()
    host = seconds_unwaited(own.steps, train_step)
    run.state["sums"].cpu()
    unwaited = (time.perf_counter() - began) / own.steps
    loading = seconds_unwaited(20, next_inputs)

    # the step of an evaluation
    state, inputs = evaluation_of(run, path)

    def eval_step():
        return run.evaluator.program(state, inputs)["loss"]

    seconds_of(1, eval_step)  # compiles
    eval_steps = seconds_of(own.steps, eval_step, f"{own.steps} evaluation steps", device.rank)

    # the figures, on rank 0
    times = Times(first_step, waited, unwaited, host, loading, eval_steps)
    matmul = matmul_flops(run, own.steps) * device.world
    if device.rank == 0:
        out = figures(run, times, matmul)
        peak = f"; {out['mfu_of_peak']:.1%} of the chip's" if out["mfu_of_peak"] else ""
        print(TABLE.format(peak=peak, **out))
        print(json.dumps(out), flush=True)


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
    grid = re.search(r"(\d+)x(\d+)", settings.data_path)
    # its size is in the name of the folder, as in data/sudoku-6x6; token 0 is padding
    rows, columns = map(int, grid.groups()) if grid else (9, 9)
    vocab_size = 6 if "maze" in settings.data_path else min(rows + 2, 256)
    cells = np.random.default_rng(0).integers(1, vocab_size, (2, 1000, rows * columns), dtype=np.uint8)
    splits = {split: (1000, 1, [cells]) for split in ("train", "test")}
    path = os.path.join(folder, "random")
    write_dataset(path, splits, vocab_size, {"grid": [rows, columns]})
    return path, f"1000 random puzzles of {rows}x{columns} cells, as {settings.data_path} is not here"


# ---------------------------------------------------------------------------------------------------------
# What is timed

def seconds_of(n, call, label="", rank=0):
    """Returns the seconds of each of n calls.

    Args:
        n: how often to call.
        call: returns a tensor, which is waited for.
        label: shows the progress under this name; "": does not.
        rank: only rank 0 shows it.
    """
    is_shown = label and rank == 0
    if is_shown:
        print(f"timing {label}", flush=True)
    progress = Progress(label, n)
    seconds = []
    for _ in range(n):
        began = time.perf_counter()
        call().cpu()
        seconds.append(time.perf_counter() - began)
        if is_shown:
            progress.add(1)
    return seconds


def seconds_unwaited(n, call):
    """Returns the mean seconds that the host is busy with a call, whose results are not waited for."""
    began = time.perf_counter()
    for _ in range(n):
        call()
    return (time.perf_counter() - began) / n


def matmul_flops(run, n):
    """Returns the FLOP/s of products like the MLP's, [tokens, D] x [D, 6 D] and back; the fastest of n."""
    tokens = run.batch_size * run.model.length
    width = run.settings.hidden_size

    @torch.no_grad()
    def matmuls(state, inputs):
        x = state["x"]
        for _ in range(4):
            x = x @ inputs["up"] @ inputs["down"]
        state["x"].copy_(x)
        return x[0, :1]

    up = torch.randn(width, 6 * width) / width ** 0.5
    down = torch.randn(6 * width, width) / (6 * width) ** 0.5
    state = run.device.put(dict(x=torch.randn(tokens, width).to(run.dtype)))
    inputs = run.device.put(dict(up=up.to(run.dtype), down=down.to(run.dtype)))
    program = run.device.compile_step(matmuls)
    seconds = min(seconds_of(n + 1, lambda: program(state, inputs))[1:])
    return 4 * 2 * 2 * tokens * width * 6 * width / seconds


def trace(device, folder, train_step):
    """Writes a trace of 3 steps to folder, for the usual viewers. Returns a text: what took the longest."""
    if device.kind == "xla":
        import torch_xla.debug.profiler as xp
        server = xp.start_server(9012)  # noqa: F841 (it lives as long as the trace)
        xp.start_trace(folder)
        seconds_of(3, train_step)
        xp.stop_trace()
        return f"trace of 3 steps in {folder}: open it with xprof or tensorboard --logdir={folder}"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.kind == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        seconds_of(3, train_step)
    path = os.path.join(folder, f"trace.{device.rank}.json")
    profiler.export_chrome_trace(path)
    kind = "cuda" if device.kind == "cuda" else "cpu"
    operations = profiler.key_averages()
    text = operations.table(sort_by=f"self_{kind}_time_total", row_limit=10, max_name_column_width=60)
    return f"{text}\ntrace of 3 steps in {path}: open it in https://ui.perfetto.dev or chrome://tracing"


# ---------------------------------------------------------------------------------------------------------
# What is printed

def figures(run, times, matmul):
    """Returns all figures, by name; matmul: FLOP/s of matrix products on all replicas."""
    settings = run.settings
    device = run.device
    B = settings.global_batch_size
    step = statistics.median(times.steps)
    eval_step = statistics.median(times.eval_steps)
    seconds = min(times.unwaited_step, step)
    step_flops = run.model.flops_per_example()[1]
    flops = B * step_flops / seconds
    peak = peak_flops(device)

    # the most memory so far, of the process or on the GPU; macOS counts bytes, Linux kilobytes
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if device.kind == "cuda":
        memory = torch.cuda.max_memory_allocated()

    values = dict(
        device=device.name,
        kind=device.kind,
        replicas=device.world,
        torch=torch.__version__,
        python=platform.python_version(),
        cores=os.cpu_count(),
        settings=train.differences(settings),
        global_batch_size=B,
        micro_batch_size=settings.micro_batch_size or run.batch_size,
        tokens_per_example=run.model.length,
        parameters=run.num_parameters,
        steps=len(times.steps),
        first_step_s=times.first_step,
        step_ms=1e3 * step,
        step_ms_min=1e3 * min(times.steps),
        step_ms_max=1e3 * max(times.steps),
        host_ms=1e3 * times.host,
        examples_per_sec=B / seconds,
        tokens_per_sec=B * run.model.length / seconds,
        gflop_per_example=step_flops / 1e9,
        tflops=flops / 1e12,
        matmul_tflops=matmul / 1e12,
        mfu_of_matmul=flops / matmul,
        mfu_of_peak=flops / peak / device.world if peak else None,
        peak_memory_gb=memory / 1e9,
        data_loading_ms=1e3 * times.loading,
        data_loading_share=times.loading / seconds,
        evaluation_ms=1e3 * eval_step,
        eval_examples_per_sec=B / eval_step,
        eval_speedup=seconds / eval_step,
        **device.counts(),
    )
    return {name: float(f"{x:.6g}") if isinstance(x, float) else x for name, x in values.items()}


TABLE = """\
{replicas} x {kind} ({device}), torch {torch}; {settings}
{parameters:,} parameters; {global_batch_size} sequences a step in micro-batches of {micro_batch_size}, \
{tokens_per_example} tokens each
first step   {first_step_s:,.1f} s, compiling included; left out below
step         {step_ms:,.1f} ms, median of {steps} ({step_ms_min:,.1f} to {step_ms_max:,.1f}); \
the host is busy for {host_ms:,.1f}
throughput   {examples_per_sec:,.1f} examples/s, {tokens_per_sec:,.0f} tokens/s
arithmetic   {gflop_per_example:,.2f} GFLOP an example, counted: {tflops:,.3f} TFLOP/s, \
{mfu_of_matmul:.0%} of a matmul's {matmul_tflops:,.3f}{peak}
memory       {peak_memory_gb:.2f} GB at most
data loading {data_loading_ms:.2f} ms of the host, {data_loading_share:.2%} of a step, a part of it
evaluation   {evaluation_ms:,.1f} ms a step, which is a forward pass: {eval_examples_per_sec:,.1f} \
examples/s, {eval_speedup:.2f} times the training's"""


# ---------------------------------------------------------------------------------------------------------
# The command

def main(argv):
    """Measures on this machine's device."""
    own, operands, train_arguments = configurator.split_arguments(__file__, argv)
    flags = [*operands, *train_arguments]
    if own.steps < 0:
        raise UserError(f"steps must be 0 or more, not {own.steps}")
    if own.profile:
        os.makedirs(own.profile, exist_ok=True)
    settings = configurator.configure(train.__file__, flags)
    kind, reason = choose_device(settings.device)

    # smaller defaults for a CPU
    on_cpu = kind == "cpu" or os.environ.get("PJRT_DEVICE") == "CPU"
    own.steps = own.steps or (5 if on_cpu else 10)
    if on_cpu:
        replicas = int(os.environ.get("CPU_NUM_DEVICES" if kind == "xla" else "WORLD_SIZE") or 1)
        multiple = replicas * (settings.micro_batch_size or 1)
        batch_size = -(-CPU_BATCH_SIZE // multiple) * multiple
        default = settings.global_batch_size
        settings = configurator.configure(train.__file__, [f"--global_batch_size={batch_size}", *flags])
        if settings.global_batch_size != default:
            print(f"global_batch_size is {batch_size}: none was given, and {default} is slow on a CPU")
    train.check_settings(settings)

    with tempfile.TemporaryDirectory() as folder:
        path, source = dataset_path(settings, folder)
        new_model(settings, train.Dataset(path, "train"))  # raises UserError for sizes that cannot be built
        print(f"device {kind}: {reason}; dataset: {source}", flush=True)
        if kind == "xla":
            import torch_xla.distributed.xla_multiprocessing as xmp
            xmp.spawn(bench, args=(settings, own, kind, path))
            return
        try:
            bench(0, settings, own, kind, path)
        except torch.OutOfMemoryError:
            raise out_of_memory(settings) from None


if __name__ == "__main__":
    configurator.command(lambda: main(sys.argv[1:]), __file__)
