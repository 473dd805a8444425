"""How fast train.py's own steps are on this machine, and how near to what it can do.

    python bench.py                                               this machine; on a CPU, at a small batch
    python bench.py config/sudoku.py --global_batch_size=32       any config file and setting of train.py
    python bench.py config/sudoku.py --profile=out/profile        the most expensive operations

The settings below are bench.py's own, all others train.py's. Where data_path is missing, random puzzles take
its place. The last line is one JSON object, except with --profile. scripts/aot.py shows what a TPU or a GPU
makes of the steps.
"""
import glob
import gzip
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
from collections import Counter
from types import SimpleNamespace

import configurator  # before torch: see there
import numpy as np
import torch
from configurator import UserError

import train
from data import Dataset, Progress, write_dataset
from device import choose_device, end_with_parent, open_device, out_of_memory, peak_flops

# what is measured
steps = 0  # steps to time, after a first one that compiles; 0: 10, or 5 on a CPU
profile = ""  # folder for a trace of 3 steps, whose most expensive operations are printed
# ---

CPU_BATCH_SIZE = 32  # where none is given: a step of train.py's default takes a CPU minutes


def bench(index, c, own, kind, path):
    """Measures on every replica; rank 0 prints. index: xmp.spawn's; path: of the dataset."""
    if kind == "xla":
        configurator.protect_output()
        end_with_parent()
    device = open_device(kind, c)
    train.check_batch_size(c, device)
    run, next_inputs = new_run(c, device, path)
    times, rank = SimpleNamespace(), device.rank

    def train_step():
        run.train_program(run.state, next_inputs())
        return run.state["sums"]

    if rank == 0:
        print("".join(note + "\n" for note in device.notes), end="", flush=True)
    times.first = seconds_of(1, train_step, "the first step", rank)[0]
    if own.profile:
        text = trace(device, own.profile, train_step)
        if rank == 0:
            print(text)
        return
    times.steps = seconds_of(own.steps, train_step, f"{own.steps} training steps", rank)
    times.host = times.step_unwaited = statistics.mean(times.steps)
    if kind != "cpu":  # others work while the host prepares the next step
        began = time.perf_counter()
        times.host = seconds_unwaited(own.steps, train_step)
        run.state["sums"].cpu()
        times.step_unwaited = (time.perf_counter() - began) / own.steps
    times.loading = seconds_unwaited(20, next_inputs)
    evaluation, inputs = evaluation_of(run, path)

    def eval_step():
        run.eval_program(evaluation, inputs)
        return evaluation["totals"]

    seconds_of(1, eval_step)  # compiles
    times.evaluation = seconds_of(own.steps, eval_step, f"{own.steps} evaluation steps", rank)
    matmul = matmul_flops(run, own.steps) * device.world
    if rank == 0:
        out = figures(run, own, times, matmul)
        peak = f"; {out['mfu_of_peak']:.1%} of the chip's" if out["mfu_of_peak"] else ""
        print(TABLE.format(peak=peak, **out), json.dumps(out), sep="\n", flush=True)


# train.py's steps and their inputs, which scripts/aot.py compiles.

def new_run(c, device, path):
    """A Run for the dataset at path, and a function that returns the inputs of its next training step."""
    data = Dataset(path, "train")
    run = train.Run(new_model(c, data), c, device)
    total_steps = max(1, train.count_steps(c, train.epoch_size(data)))
    count = itertools.count()
    return run, lambda: train.make_inputs(run, data, next(count), total_steps)


def new_model(c, data):
    return train.new_model(c, **{name: getattr(data, name) for name in train.SIZES})


def evaluation_of(run, path):
    """The state and the inputs of an evaluation's first step."""
    test = Dataset(path, "test")
    solver = train.Solver(run, test, test.subset(run.batch_size))
    solver.fill()
    return solver.state, run.eval_inputs(solver.batch, solver.keys)


def dataset_path(c, folder):
    """(data_path, or where it is missing a dataset in folder with random puzzles of its size; which it is)"""
    if os.path.isdir(c.data_path):
        return c.data_path, c.data_path
    grid = re.search(r"(\d+)x(\d+)", c.data_path)
    rows, columns = map(int, grid.groups()) if grid else (9, 9)
    vocab_size, path = 6 if "maze" in c.data_path else min(rows + 2, 256), os.path.join(folder, "random")
    grids = np.random.default_rng(0).integers(1, vocab_size, (2, 1000, rows * columns), dtype=np.uint8)
    splits = {split: (len(grids[0]), 1, [grids]) for split in ("train", "test")}
    write_dataset(path, splits, vocab_size, {"grid": [rows, columns]})
    return path, f"1000 random puzzles of {rows}x{columns} cells, as {c.data_path} is not here"


# What is timed.

def seconds_of(n, call, label="", rank=0):
    """Seconds of each of n calls. call returns a tensor, which is waited for. label: to show progress."""
    seconds, shown = [], label and rank == 0
    if shown:
        print(f"timing {label}", flush=True)
    progress = Progress(label, n)
    for _ in range(n):
        began = time.perf_counter()
        call().cpu()
        seconds.append(time.perf_counter() - began)
        if shown:
            progress.add(1)
    return seconds


def seconds_unwaited(n, call):
    """Mean seconds that the host is busy with a call, whose results are not waited for."""
    began = time.perf_counter()
    for _ in range(n):
        call()
    return (time.perf_counter() - began) / n


def matmul_flops(run, n):
    """FLOP/s of matmuls like the MLP's: [tokens, D] x [D, 6 D] and back; the fastest of n calls."""
    rows, width, pairs = run.batch_size * run.model.length, run.c.hidden_size, 4

    @torch.no_grad()
    def matmuls(state, inputs):
        x = state["x"]
        for _ in range(pairs):
            x = x @ inputs["up"] @ inputs["down"]
        state["x"].copy_(x)
        return x[0, :1]

    up = torch.randn(width, 6 * width) / width ** 0.5
    down = torch.randn(6 * width, width) / (6 * width) ** 0.5
    state = run.device.put(dict(x=torch.randn(rows, width).to(run.dtype)))
    inputs = run.device.put(dict(up=up.to(run.dtype), down=down.to(run.dtype)))
    program = run.device.compile_step(matmuls)
    seconds = min(seconds_of(n + 1, lambda: program(state, inputs))[1:])
    return pairs * 2 * 2 * rows * width * 6 * width / seconds


def trace(device, folder, train_step):
    """Writes a trace of 3 steps to folder, for the usual viewers. Returns a text: what took the longest."""
    if device.kind == "xla":
        return trace_xla(folder, train_step)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.kind == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        seconds_of(3, train_step)
    path = os.path.join(folder, f"trace.{device.rank}.json")
    profiler.export_chrome_trace(path)
    operations = profiler.key_averages()
    kind = "cuda" if device.kind == "cuda" else "cpu"
    text = operations.table(sort_by=f"self_{kind}_time_total", row_limit=10, max_name_column_width=60)
    return f"{text}\ntrace of 3 steps in {path}: open it in https://ui.perfetto.dev or chrome://tracing"


def trace_xla(folder, train_step):
    import torch_xla.debug.profiler as xp
    server = xp.start_server(9012)  # noqa: F841 (it lives as long as the trace)
    xp.start_trace(folder)
    seconds_of(3, train_step)
    xp.stop_trace()
    path = max(glob.glob(os.path.join(folder, "plugins", "profile", "*", "*.trace.json.gz")))
    with gzip.open(path) as f:
        events = json.load(f)["traceEvents"]
    threads = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    spent, calls = Counter(), Counter()
    for e in events:  # of a TPU's own line, or of the threads that compute on the CPU
        thread = threads.get((e.get("pid"), e.get("tid")), "")
        if e.get("ph") == "X" and re.search("XLA Ops|XLAEigen", thread) and "::" not in e["name"]:
            operation = re.sub(r"(\.(clone|remat|\d+))+$", "", e["name"])
            spent[operation] += e["dur"] / 1e3
            calls[operation] += 1
    lines = [f"{ms:10.2f} ms {calls[operation]:7} x {operation}" for operation, ms in spent.most_common(10)]
    viewers = f"open it in https://ui.perfetto.dev, or the folder with xprof or tensorboard --logdir={folder}"
    return "\n".join([*lines, f"trace of 3 steps in {path}: {viewers}"])


# What is printed.

def figures(run, own, times, matmul):
    """All figures, by name. times: in seconds; matmul: FLOP/s of matmuls on all replicas."""
    c, device, model, B = run.c, run.device, run.model, run.c.global_batch_size
    step, evaluation = statistics.median(times.steps), statistics.median(times.evaluation)
    seconds = min(times.step_unwaited, step)
    step_flops = model.flops_per_example()[1]
    flops, peak = B * step_flops / seconds, peak_flops(device)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if device.kind == "cuda":
        memory = torch.cuda.max_memory_allocated()
    found = dict(
        device=device.name, kind=device.kind, replicas=device.world, torch=torch.__version__,
        python=platform.python_version(), cores=os.cpu_count(), settings=train.differences(c),
        global_batch_size=B, micro_batch_size=c.micro_batch_size or run.batch_size,
        tokens_per_example=model.length, parameters=run.num_parameters, steps=own.steps,
        first_step_s=times.first, step_ms=1e3 * step, step_ms_min=1e3 * min(times.steps),
        step_ms_max=1e3 * max(times.steps), host_ms=1e3 * times.host, examples_per_sec=B / seconds,
        tokens_per_sec=B * model.length / seconds, gflop_per_example=step_flops / 1e9, tflops=flops / 1e12,
        matmul_tflops=matmul / 1e12, mfu_of_matmul=flops / matmul,
        mfu_of_peak=flops / peak / device.world if peak else None, peak_memory_gb=memory / 1e9,
        data_loading_ms=1e3 * times.loading, data_loading_share=times.loading / seconds,
        evaluation_ms=1e3 * evaluation, eval_examples_per_sec=B / evaluation,
        eval_speedup=seconds / evaluation, **device.counts())
    return {name: float(f"{x:.6g}") if isinstance(x, float) else x for name, x in found.items()}


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


# The command.

def main(argv):
    """Measures on this machine's device."""
    own, operands, flags = configurator.split_arguments(__file__, argv)
    flags = [*operands, *flags]
    c = configurator.configure(train.__file__, flags)
    train.check_settings(c)
    if own.steps < 0:
        raise UserError(f"steps must be 0 or more, not {own.steps}")
    if own.profile:
        os.makedirs(own.profile, exist_ok=True)
    kind, reason = choose_device(c.device)
    with tempfile.TemporaryDirectory() as folder:
        path, source = dataset_path(c, folder)
        new_model(c, Dataset(path, "train"))  # raises UserError for sizes that cannot be built
        print(f"device {kind}: {reason}; dataset: {source}", flush=True)
        on_cpu = kind == "cpu" or kind == "xla" and os.environ["PJRT_DEVICE"] == "CPU"
        own.steps = own.steps or (5 if on_cpu else 10)
        if on_cpu:
            c = configure_for_cpu(c, kind, flags)
        if kind == "xla":
            import torch_xla.distributed.xla_multiprocessing as xmp
            xmp.spawn(bench, args=(c, own, kind, path))
        else:
            try:
                bench(0, c, own, kind, path)
            except torch.OutOfMemoryError:
                raise out_of_memory(c) from None


def configure_for_cpu(c, kind, flags):
    """The settings with another default of global_batch_size: of CPU_BATCH_SIZE or more, what divides."""
    replicas = int(os.environ.get("CPU_NUM_DEVICES" if kind == "xla" else "WORLD_SIZE") or 1)
    multiple = replicas * (c.micro_batch_size or 1)
    size = -(-CPU_BATCH_SIZE // multiple) * multiple
    changed = configurator.configure(train.__file__, [f"--global_batch_size={size}", *flags])
    if changed.global_batch_size != c.global_batch_size:
        print(f"global_batch_size is {size}: none was given, and {c.global_batch_size} is slow on a CPU",
              flush=True)
    return changed


if __name__ == "__main__":
    configurator.command(lambda: main(sys.argv[1:]), __file__)
