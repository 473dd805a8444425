"""How fast train.py's own steps are on this machine, and how near to what it can do.

    python bench.py                                                   about a minute, at a batch that fits
    python bench.py config/sudoku.py --global_batch_size=32           any config file and setting of train.py
    python bench.py config/sudoku.py --sweep=global_batch_size=16,32  a table
    python bench.py config/sudoku.py --profile=out/profile            the most expensive operations

The settings below are bench.py's own, all others train.py's. The last line is one JSON object.
scripts/aot.py shows what a TPU would make of the steps.
"""
import glob
import gzip
import itertools
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from types import SimpleNamespace

import configurator  # before torch: see there
import numpy as np
import torch

try:
    import resource
except ModuleNotFoundError:  # Windows
    resource = None

import train
from configurator import UserError
from data import Dataset, Progress, halting_draws, write_dataset
from model import update_weights

# what is measured
steps = 10  # steps timed, after a first one that compiles; if not given, fewer where a CPU is slow
real_data = False  # a new batch of data_path at each step; else one batch again and again
compare = ""  # file with what an earlier run printed: ratios to it
profile = ""  # folder for a trace of 3 steps, whose most expensive operations are printed
sweep = ""  # NAME=VALUE,VALUE,...: a run for each value, as a table
# ---

BUDGET = 45  # seconds of measuring on a CPU, if neither the batch nor the steps are given
FEWEST_STEPS = 4  # a larger batch is worth more than steps beyond these
STEP_AND_EVALUATION = 1.65  # duration of both, in training steps
COMPARED = ("examples_per_sec", "step_ms", "tflops", "optimizer_ms", "eval_examples_per_sec",
            "peak_memory_gb")


def bench(index, c, own, kind, path):
    """Measures on every replica; rank 0 prints. index: xmp.spawn's; path: of the data set."""
    if kind == "xla":
        train.end_with_parent()
    device = train.open_device(kind, c)
    train.check_batch_size(c, device)
    run, next_batch, train_step = make_training(c, device, Dataset(path, "train"), own.real_data)
    times, rank = SimpleNamespace(), device.rank
    if rank == 0:
        print("".join(note + "\n" for note in device.notes), end="", flush=True)
    label = "first step" if kind == "cpu" and c.compile != "on" else "first step, which compiles"
    times.first = seconds_of(1, train_step, label, rank)[0]
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
    times.feeding = seconds_unwaited(20, next_batch)
    evaluation, inputs = run.new_evaluation(), run.eval_inputs(next_batch())

    def eval_step():
        run.eval_program(evaluation, inputs)
        return evaluation["totals"]

    seconds_of(1, eval_step)  # compiles
    times.evaluation = seconds_of(own.steps, eval_step, f"{own.steps} evaluation steps", rank)
    times.optimizer = optimizer_seconds(run, own.steps)
    product = product_flops(run, own.steps) * device.world
    if rank == 0:
        out = figures(run, own, times, product)
        print(TABLE.format_map(out))
        if out["mfu_of_peak"]:
            print(f"peak         {out['mfu_of_peak']:.1%} of the chip's")
        if own.compare:
            print(ratios(out, own.compare))
        print(json.dumps(out), flush=True)


def make_training(c, device, data, real_data=False):
    """A Run, a function that makes its next batch, and one that trains a step and returns a tensor of it."""
    sizes = {name: getattr(data, name) for name in ("seq_len", "vocab_size", "num_puzzle_identifiers")}
    run = train.Run(train.new_model(c, **sizes), c, device)
    count = itertools.count()

    def next_batch():
        step = next(count)
        batch = data.train_batch(c.seed, step, c.global_batch_size, device.rank, device.world)
        batch["min_halt_steps"] = halting_draws(c.seed, step, c.global_batch_size, c.halt_max_steps,
                                                c.halt_exploration_prob, device.rank, device.world)
        return device.put(batch)

    def train_step():
        batch = next_batch() if real_data else first_batch
        run.train_program(run.state, dict(batch=batch, rates=rates, stop_requested=no_stop))
        return run.state["sums"]

    first_batch = next_batch()
    rates, no_stop = device.put(train.rates(c, 0, 10 ** 6)), device.put(torch.zeros(1))
    return run, next_batch, train_step


def figures(run, own, times, product):
    """All figures, by name. times: in seconds; product: FLOP/s of matrix products on all replicas."""
    c, device, model, B = run.c, run.device, run.model, run.c.global_batch_size
    step, evaluation = statistics.median(times.steps), statistics.median(times.evaluation)
    seconds = min(times.step_unwaited, step)
    eval_flops, step_flops = model.flops_per_example()
    flops, peak = B * step_flops / seconds, train.peak_flops(device)
    state = [*run.state["carry"].values(), *(t for name, t in run.state.items() if name != "carry")]
    memory = torch.cuda.max_memory_allocated() if device.kind == "cuda" else peak_memory()
    return rounded(dict(
        device=device.name, kind=device.kind, replicas=device.world, torch=torch.__version__,
        python=platform.python_version(), cores=os.cpu_count(), settings=train.differences(c),
        global_batch_size=B, micro_batch_size=c.micro_batch_size or run.batch_size,
        tokens_per_example=model.length, parameters=run.num_parameters, steps=own.steps,
        real_data=own.real_data, first_step_s=times.first, step_ms=1e3 * step,
        step_ms_min=1e3 * min(times.steps), step_ms_max=1e3 * max(times.steps), host_ms=1e3 * times.host,
        examples_per_sec=B / seconds, tokens_per_sec=B * model.length / seconds,
        gflop_per_example=step_flops / 1e9, tflops=flops / 1e12, product_tflops=product / 1e12,
        mfu_of_product=flops / product, mfu_of_peak=flops / peak / device.world if peak else None,
        state_gb_per_sec=2e-9 * sum(t.numel() * t.element_size() for t in state) / seconds,
        peak_memory_gb=memory / 1e9, feeding_ms=1e3 * times.feeding, feeding_share=times.feeding / seconds,
        optimizer_ms=1e3 * times.optimizer, optimizer_share=times.optimizer / seconds,
        evaluation_ms=1e3 * evaluation, eval_examples_per_sec=B / evaluation,
        eval_speedup=seconds / evaluation, eval_tflops=1e-12 * B * eval_flops / evaluation,
        **device.counts()))


TABLE = """\
{replicas} x {kind} ({device}), torch {torch}; {settings}
{parameters:,} parameters; {global_batch_size} sequences a step in micro-batches of {micro_batch_size}, \
{tokens_per_example} tokens each
first step   {first_step_s:,.1f} s, compiling included; left out below
step         {step_ms:,.1f} ms, median of {steps} ({step_ms_min:,.1f} to {step_ms_max:,.1f}); \
the host is busy for {host_ms:,.1f}
throughput   {examples_per_sec:,.1f} examples/s, {tokens_per_sec:,.0f} tokens/s
arithmetic   {gflop_per_example:,.2f} GFLOP an example, counted: {tflops:,.3f} TFLOP/s, \
{mfu_of_product:.0%} of a matrix product's {product_tflops:,.3f}
memory       {peak_memory_gb:.2f} GB at most; {state_gb_per_sec:.2f} GB/s to read and write the state alone
optimizer    {optimizer_ms:,.1f} ms by itself and without the average, {optimizer_share:.1%} of a step
feeding      {feeding_ms:.2f} ms of the host, {feeding_share:.2%} of a step, a part of it with --real_data
evaluation   {evaluation_ms:,.1f} ms a step, which is a forward pass: {eval_examples_per_sec:,.1f} \
examples/s, {eval_speedup:.2f} times the training's"""


def ratios(out, path):
    """A table: the figures beside those on the last line of a file."""
    before, lines = read_figures(path), [f"{'':24}{'before':>14}{'now':>14}{'ratio':>9}"]
    for name in COMPARED:
        ratio = out[name] / before[name]
        lines.append(f"{name:24}{before[name]:>14,.4g}{out[name]:>14,.4g}{ratio:>9.3f}")
    return "\n".join(lines)


def read_figures(path):
    """The figures on the last line of a file. Raises UserError unless an earlier run printed them."""
    try:
        with open(path, encoding="utf-8") as f:
            before = json.loads(f.read().strip().splitlines()[-1])
        for name in COMPARED:
            1 / before[name]
    except (OSError, ValueError, KeyError, TypeError, IndexError, ZeroDivisionError) as e:
        raise UserError(f"--compare={path}: its last line is not what bench.py prints "
                        f"({type(e).__name__}: {e})") from None
    return before


# What is timed.

def seconds_of(n, call, label="", rank=0):
    """Seconds of each of n calls. call returns a tensor, which is waited for. label: to show progress."""
    shown, seconds = label and rank == 0, []
    if shown:
        print(f"timing {label}", flush=True)
    with Progress(label, n) as progress:
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


def optimizer_seconds(run, n):
    """Median seconds of update_weights, as a program of its own."""
    @torch.no_grad()
    def update(state, inputs):
        lr, _, bias1, bias2 = inputs["rates"].unbind()
        weights, m, v = state["weights"], state["m"], state["v"]
        update_weights(run.c, run.shapes, weights, inputs["grad"], m, v, lr, bias1, bias2)
        return weights[:1].clone()

    state = {name: run.state[name] for name in ("weights", "m", "v")}
    grad = torch.ones(len(state["weights"]))
    inputs = run.device.put(dict(grad=grad, rates=train.rates(run.c, 0, 10 ** 6)))
    program = run.device.program(update)
    return statistics.median(seconds_of(n + 1, lambda: program(state, inputs))[1:])


def product_flops(run, n):
    """FLOP/s of matrix products as the MLP's: [tokens, D] x [D, 6 D] and back; the fastest of n calls."""
    rows, width, pairs = run.batch_size * run.model.length, run.c.hidden_size, 4

    @torch.no_grad()
    def products(state, inputs):
        x = state["x"]
        for _ in range(pairs):
            x = x @ inputs["up"] @ inputs["down"]
        state["x"].copy_(x)
        return x[0, :1]

    up = torch.randn(width, 6 * width) / width ** 0.5
    down = torch.randn(6 * width, width) / (6 * width) ** 0.5
    state = run.device.put(dict(x=torch.randn(rows, width).to(run.dtype)))
    inputs = run.device.put(dict(up=up.to(run.dtype), down=down.to(run.dtype)))
    program = run.device.program(products)
    seconds = min(seconds_of(n + 1, lambda: program(state, inputs))[1:])
    return pairs * 2 * 2 * rows * width * 6 * width / seconds


def peak_memory():
    """Bytes of memory that this process has held at most; 0 where Python cannot tell, as on Windows."""
    if not resource:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def trace(device, folder, train_step):
    """Writes a trace of 3 steps to folder, for the usual viewers. Returns a text: what took the longest."""
    os.makedirs(folder, exist_ok=True)
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
    server = xp.start_server(9012)  # noqa: F841: lives as long as the trace
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


# A batch that fits.

def fit_to_cpu(c, own, data, kind, batch_given, steps_given):
    """Where they are not given, takes a batch and steps that fit BUDGET and memory. Prints what to expect."""
    default = c.global_batch_size
    few = min(8, default)
    print(f"trying a step of {few} sequences", flush=True)
    step_on_cpu(c, data, kind, 1)  # initialises libraries
    memory_before = peak_memory()
    seconds = step_on_cpu(c, data, kind, few) / few
    memory = max(1, peak_memory() - memory_before) / few  # of a sequence, and a little more
    round_steps = STEP_AND_EVALUATION
    if kind == "xla":
        round_steps += 1  # the training steps are timed twice
    if not batch_given:
        fewest = own.steps if steps_given else FEWEST_STEPS
        largest = BUDGET / round_steps / (fewest + 1) / seconds
        if hasattr(os, "sysconf"):  # Windows has none
            half_of_all = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2
            largest = min(largest, half_of_all / memory)
        multiple = c.micro_batch_size or 1
        if kind == "xla":
            multiple *= int(os.environ.get("CPU_NUM_DEVICES") or 1)
        fitting = 2 ** int(math.log2(max(1, largest))) // multiple * multiple
        c.global_batch_size = min(default, max(multiple, fitting))
    step = seconds * c.global_batch_size
    if not steps_given:
        own.steps = min(own.steps, max(1, int(BUDGET / round_steps / step) - 1))
    if c.global_batch_size != default:
        print(f"global_batch_size {c.global_batch_size} fits this machine; a step of {default}, the default, "
              f"would take about {train.duration(seconds * default)}", flush=True)
    total = step * (4 if own.profile else round_steps * (own.steps + 1))
    if total > 10:
        timed = 3 if own.profile else own.steps
        print(f"expected: {step:.1f} s a step, {timed} of them timed, {train.duration(total)} in all without "
              "compiling", flush=True)


def step_on_cpu(c, data, kind, sequences):
    """Seconds of a training step on this CPU, in one process and not compiled."""
    changes = dict(global_batch_size=sequences, micro_batch_size=0, compile="off")
    if kind == "xla":
        changes["forward_dtype"] = "float32"  # as XLA multiplies bfloat16 on a CPU
    c = SimpleNamespace(**vars(c) | changes)
    return seconds_of(1, make_training(c, train.open_device("cpu", c), data)[2])[0]


# The command.

def main(argv):
    """Measures on this machine's device, or once for each value of a sweep."""
    own, c, flags = configure(__file__, argv)
    if own.steps < 1:
        raise UserError(f"steps must be 1 or more, not {own.steps}")
    if own.sweep and not re.fullmatch(r"\w+=[^=]+", own.sweep):
        raise UserError(f"--sweep={own.sweep}: write --sweep=global_batch_size=64,128")
    if own.sweep and own.profile:
        raise UserError("--profile is for one run, not for a --sweep")
    if own.profile:
        os.makedirs(own.profile, exist_ok=True)
    if own.compare:
        read_figures(own.compare)
    if own.real_data and not os.path.isdir(c.data_path):
        raise UserError(f"--real_data: {c.data_path}: no such data set")
    kind, reason = train.choose_device(c.device)
    seq_len, vocab_size, _, source = sizes(c)
    print(f"device {kind}: {reason}; data set {source}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = c.data_path
        if not os.path.isdir(path):  # random tokens, fed by the code that feeds real ones
            path = os.path.join(folder, "random")
            grids = np.random.default_rng(0).integers(1, vocab_size, (2, 4096, seq_len), dtype=np.uint8)
            splits = {split: (512, 8, [grids]) for split in ("train", "test")}
            write_dataset(path, splits, vocab_size, {"grid": [1, seq_len]})
        alone = kind == "cpu" and "RANK" not in os.environ  # under torchrun all ranks must take the same
        on_cpu = alone or kind == "xla" and os.environ["PJRT_DEVICE"] == "CPU"
        if on_cpu and not own.sweep.startswith("global_batch_size="):
            batch_given = is_given("global_batch_size", flags)
            steps_given = any(re.match("--?steps=", flag) for flag in argv)
            fit_to_cpu(c, own, Dataset(path, "train"), kind, batch_given, steps_given)
        if own.sweep:
            run_sweep(own.sweep, [*argv, f"--global_batch_size={c.global_batch_size}"])
        elif kind == "xla":
            import torch_xla.distributed.xla_multiprocessing as xmp
            xmp.spawn(bench, args=(c, own, kind, path))
        else:
            try:
                bench(0, c, own, kind, path)
            except torch.OutOfMemoryError:
                raise train.out_of_memory(c) from None


def run_sweep(sweep, argv):
    """Prints a table with a run for each value of a setting, each in a process of its own."""
    argv = [a for a in argv if not a.lstrip("-").startswith("sweep=")]
    name, _, values = sweep.partition("=")
    columns, rows = COMPARED[:3] + COMPARED[-2:], []
    print(f"{name:>20}" + "".join(f"{column:>22}" for column in columns), flush=True)
    for value in values.split(","):
        command = [sys.executable, __file__, *argv, f"--{name}={value}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"{value:>20}  {(done.stderr.strip().splitlines() or ['failed'])[-1]}", flush=True)
            continue
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(f"{value:>20}" + "".join(f"{rows[-1][column]:>22,.3f}" for column in columns), flush=True)
    if not rows:
        raise UserError(f"--sweep={sweep}: no run succeeded, see above")
    print(json.dumps(rows))


def configure(script, argv):
    """(a script's settings, train.py's settings, the part of argv that sets the latter). Raises UserError."""
    own, flags = configurator.split_flags(script, argv)
    own, c = configurator.configure(script, own), configurator.configure(train.__file__, flags)
    train.check_settings(c)
    seq_len, vocab_size, _, _ = sizes(c)
    train.new_model(c, seq_len=seq_len, vocab_size=vocab_size)
    return own, c, flags


def is_given(name, flags):
    """Whether flags or config files set a setting of train.py, whatever its value is before."""
    values = [vars(configurator.configure(train.__file__, [f"--{name}={n}", *flags]))[name] for n in (1, 2)]
    return values[0] == values[1]


def sizes(c):
    """(seq_len, vocab_size, puzzles of an epoch, their source) of data_path; by its name if it is missing."""
    if os.path.isdir(c.data_path):
        data = Dataset(c.data_path, "train")
        return data.seq_len, data.vocab_size, train.epoch_size(data), c.data_path
    grid = re.search(r"(\d+)x(\d+)", c.data_path)
    rows, columns = map(int, grid.groups()) if grid else (9, 9)
    vocab_size = 6 if "maze" in c.data_path else rows + 2
    source = f"not here: {rows}x{columns} cells, {vocab_size} tokens and 1000 puzzles, as its name suggests"
    return rows * columns, vocab_size, 1000, source


def rounded(figures):
    """The same with 6 digits a number."""
    return {name: float(f"{x:.6g}") if isinstance(x, float) else x for name, x in figures.items()}


if __name__ == "__main__":
    configurator.command(lambda: main(sys.argv[1:]), __file__)
