"""How fast train.py's own step is, how near to what the machine can do, and what a TPU would make of it.

    python bench.py config/sudoku.py --global_batch_size=32           this machine; any config file and setting of train.py
    python bench.py config/sudoku.py --sweep=global_batch_size=16,32  a table
    python bench.py config/baseline.py --aot=v5e:2x4,v6e:2x2          the TPU compiler's view, without a TPU: pip install jax libtpu
    python bench.py config/baseline.py --plan=v5e:2x4                 steps, hours and bytes of a run

Settings below are bench.py's own; all others are train.py's. The last line is one JSON object with all figures.
"""
import glob
import gzip
import importlib.util
import json
import math
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import torch

import configurator
import train
from configurator import UserError
from data import Dataset, halting_draws, write_dataset
from model import TRM, TRMConfig

# what is measured
steps = 10  # timed, after one that compiles
real_data = False  # a new batch of data_path at each step; else one batch again and again
compare = ""  # file with what an earlier run printed: ratios against it
profile = ""  # folder for a trace of 3 steps, whose most expensive operations are printed
sweep = ""  # NAME=VALUE,VALUE,...: a run for each value, as a table
# without the hardware
aot = ""  # TPU slices to compile for: v5e:2x4,v6e:2x2,v4:2x2x1
plan = ""  # a slice on which the whole run is priced
rate = 0.0  # examples/s measured on that slice, for the plan; 0: the roofline's
# ---

HERE = os.path.dirname(os.path.abspath(__file__))
# A chip's dense bfloat16 FLOP/s, bytes/s and bytes of memory, as its maker states them.
CHIPS = {"v4": (275e12, 1228e9, 32e9), "v5e": (197e12, 819e9, 16e9), "v5p": (459e12, 2765e9, 95e9), "v6e": (918e12, 1640e9, 32e9)}
PRINTED = ("examples_per_sec", "step_ms", "tflops", "forward_ms", "backward_ms", "optimizer_ms", "eval_examples_per_sec", "peak_memory_gb")


def sizes(c):
    """(seq_len, vocab_size, puzzles of an epoch, where that is from) of data_path, or of what its name says where it is not here."""
    if os.path.isdir(c.data_path):
        data = Dataset(c.data_path, "train")
        return data.seq_len, data.vocab_size, data.total_groups * data.mean_puzzle_examples, c.data_path
    grid = re.search(r"(\d+)x(\d+)", c.data_path)
    rows, columns = map(int, grid.groups()) if grid else (9, 9)
    vocab = 6 if "maze" in c.data_path else rows + 2
    return rows * columns, vocab, 1000, f"not here: {rows}x{columns} cells, {vocab} tokens and 1000 puzzles, as its name suggests"


def random_dataset(folder, seq_len, vocab_size):
    """A data set of random tokens, so that feeding is timed through the code that reads real ones."""
    grids = np.random.default_rng(0).integers(1, vocab_size, (2, 4096, seq_len), dtype=np.uint8)
    write_dataset(folder, {split: (512, 8, [grids]) for split in ("train", "test")}, vocab_size, {"grid": [1, seq_len]})


def seconds_of(n, call):
    """Seconds of each of n calls after one that may compile; call returns a tensor of its results, and each is waited for."""
    call().cpu()
    seconds = []
    for _ in range(n):
        began = time.perf_counter()
        call().cpu()
        seconds.append(time.perf_counter() - began)
    return seconds


def matrix_product(device, rows, width, dtype, n):
    """FLOP/s of products [rows, width] x [width, 6 width] and back, the shapes of the MLP's, as the fastest of n calls reach it."""
    normal = lambda *shape: (torch.randn(shape) / math.sqrt(shape[0])).to(dtype)
    state, inputs, pairs = device.put(dict(x=normal(rows, width) * math.sqrt(rows))), device.put(dict(up=normal(width, 6 * width), down=normal(6 * width, width))), 4

    @torch.no_grad()
    def products(state, inputs):
        x = state["x"]
        for _ in range(pairs):
            x = x @ inputs["up"] @ inputs["down"]
        state["x"].copy_(x)
        return (x[0, :1],)

    return pairs * 2 * 2 * rows * width * 6 * width / min(seconds_of(n, lambda: device.call(products, state, inputs)[0]))


def bench(index, c, b, kind, path):
    """Measures on every replica; rank 0 prints."""
    device, data = train.Device(kind), Dataset(path, "train")
    model = TRM(TRMConfig.of(c, seq_len=data.seq_len, vocab_size=data.vocab_size, num_puzzle_identifiers=data.num_puzzle_identifiers), c.seed)
    run, B, micro = train.Run(model, c, device), c.global_batch_size // device.world, c.micro_batch_size or c.global_batch_size // device.world
    fixed = dict(rates=device.put(train.rates(c, 0, 10 ** 6)), signals=device.put(torch.zeros(2)))
    say = device.say = lambda text="": print(text, flush=True) if device.rank == 0 else None

    def batch(step):
        arrays = data.train_batch(c.seed, step, c.global_batch_size, device.rank, device.world)
        draws = halting_draws(c.seed, step, c.global_batch_size, c.halt_max_steps, c.halt_exploration_prob, device.rank, device.world)
        return device.put(arrays | dict(min_halt_steps=draws))

    one, began, count = batch(0), time.perf_counter(), iter(range(1, 10 ** 9))

    def train_step():
        run.train_step(batch(next(count)) if b.real_data else one, **fixed)
        return run.state["sums"]

    train_step().cpu()
    first = time.perf_counter() - began
    if b.profile:
        return profiled(device, b.profile, train_step, say)
    whole = seconds_of(b.steps, train_step)
    began = time.perf_counter()
    for _ in range(b.steps):
        train_step()
    host = (time.perf_counter() - began) / b.steps
    run.state["sums"].cpu()
    pipelined = (time.perf_counter() - began) / b.steps
    began = time.perf_counter()
    for _ in range(20):
        batch(next(count))
    feeding = (time.perf_counter() - began) / 20

    # The parts, each a program of its own.
    vectors = {k: run.state[k] for k in ("weights", "puzzle_emb")}
    packed = device.put(torch.zeros(len(vectors["weights"]) + vectors["puzzle_emb"].numel() + max(1, len(vectors["puzzle_emb"])) + len(train.STATS) - 1))
    rest = {k: v for k, v in run.state.items() if k != "carry"}

    @torch.no_grad()
    def gradients(state, inputs):
        return run.gradients({**inputs["vectors"], **state}, inputs)

    @torch.no_grad()
    def forward(state, inputs):
        def micro_batch(weights, x):
            with torch.enable_grad():
                leaves = {k: t.detach().requires_grad_() for k, t in weights.items()}
                _, carry, sums, _, _ = run.forward(model, leaves, x["carry"], x["batch"], c.halt_max_steps, c.loss_type)
            return [sums], carry

        zeros, weights = torch.zeros(len(train.METRICS), device=device.torch), run.cast(*inputs["vectors"].values())
        (sums,), carry = device.sum_over(micro_batch, [zeros], weights, dict(carry=state["carry"], batch=run.cut(inputs["batch"])))
        for k, t in carry.items():
            state["carry"][k].copy_(t)
        return (sums,)

    @torch.no_grad()
    def optimizer(state, inputs):
        run.apply(state, inputs["packed"], inputs["rates"])
        return (state["sums"].clone(),)

    on_batch, evaluation = dict(batch=one, vectors=vectors), run.new_evaluation()
    carry = dict(carry=run.state["carry"])
    times = dict(
        step=whole, gradients=seconds_of(b.steps, lambda: device.call(gradients, carry, on_batch)[-1]),
        forward=seconds_of(b.steps, lambda: device.call(forward, carry, on_batch)[0]),
        optimizer=seconds_of(b.steps, lambda: device.call(optimizer, rest, dict(packed=packed, rates=fixed["rates"]))[0]),
        evaluation=seconds_of(b.steps, lambda: (run.eval_step(evaluation, one), evaluation["totals"])[1]))
    product = matrix_product(device, B * model.length, c.hidden_size, run.dtype, b.steps) * device.world
    if device.rank:
        return

    ms = {k: 1e3 * statistics.median(v) for k, v in times.items()}
    forward_flops, step_flops = model.flops_per_example()
    seconds, counts = min(pipelined, ms["step"] / 1e3), device.counts()
    peak = next((v for k, v in train.PEAK_FLOPS.items() if k in device.name), None)
    moved = 2 * 4 * sum(t.numel() for t in rest.values()) + 2 * sum(t.numel() * t.element_size() for t in run.state["carry"].values())
    memory = torch.cuda.max_memory_allocated() if kind == "cuda" else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    out = dict(
        device=device.name, kind=kind, replicas=device.world, torch=torch.__version__, python=platform.python_version(), cores=os.cpu_count(),
        settings=train.differences(c), global_batch_size=c.global_batch_size, micro_batch_size=micro, tokens_per_example=model.length,
        parameters=len(vectors["weights"]) + vectors["puzzle_emb"].numel(), steps=b.steps, real_data=b.real_data,
        first_step_s=first, step_ms=ms["step"], step_ms_min=1e3 * min(whole), step_ms_max=1e3 * max(whole), host_ms=1e3 * host,
        examples_per_sec=c.global_batch_size / seconds, tokens_per_sec=c.global_batch_size * model.length / seconds,
        gflop_per_example=step_flops / 1e9, tflops=c.global_batch_size * step_flops / seconds / 1e12, product_tflops=product / 1e12,
        mfu_of_product=c.global_batch_size * step_flops / seconds / product,
        mfu_of_peak=c.global_batch_size * step_flops / seconds / peak / device.world if peak else None,
        state_gb_per_sec=moved / seconds / 1e9, peak_memory_gb=memory / 1e9, feeding_ms=1e3 * feeding, feeding_share=feeding / seconds,
        forward_ms=ms["forward"], backward_ms=ms["gradients"] - ms["forward"], optimizer_ms=ms["optimizer"],
        parts_of_step=(ms["gradients"] + ms["optimizer"]) / ms["step"],
        evaluation_ms=ms["evaluation"], eval_examples_per_sec=1e3 * c.global_batch_size / ms["evaluation"],
        eval_tflops=1e-9 * c.global_batch_size * forward_flops / ms["evaluation"], **counts)
    out = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in out.items()}
    say(report(out))
    if b.compare:
        say(compared(out, b.compare))
    say(json.dumps(out))


def report(f):
    """The figures as lines for people."""
    share = lambda part: f"{f[part]:,.1f} ms ({100 * f[part] / f['step_ms']:.0f}%)"
    peak = f", {100 * f['mfu_of_peak']:.1f}% of the chip's peak" if f["mfu_of_peak"] else "; the chip's peak is not known here"
    return "\n".join([
        f"{f['replicas']} x {f['kind']} ({f['device']}), torch {f['torch']}; {f['settings']}",
        f"{f['parameters']:,} parameters; {f['global_batch_size']} sequences a step in micro-batches of {f['micro_batch_size']}, {f['tokens_per_example']} tokens each",
        f"first step   {f['first_step_s']:,.1f} s, compiling included; left out below",
        f"step         {f['step_ms']:,.1f} ms, median of {f['steps']} ({f['step_ms_min']:,.1f} to {f['step_ms_max']:,.1f}); the host is busy for {f['host_ms']:,.1f}",
        f"throughput   {f['examples_per_sec']:,.1f} examples/s, {f['tokens_per_sec']:,.0f} tokens/s",
        f"arithmetic   {f['gflop_per_example']:,.2f} GFLOP an example, counted: {f['tflops']:,.3f} TFLOP/s, "
        f"{100 * f['mfu_of_product']:.0f}% of a matrix product's {f['product_tflops']:,.3f}{peak}",
        f"memory       {f['peak_memory_gb']:.2f} GB at most; {f['state_gb_per_sec']:.2f} GB/s to read and write the state alone",
        f"parts        forward {share('forward_ms')}, backward {share('backward_ms')}, optimizer and average {share('optimizer_ms')}: "
        f"{100 * f['parts_of_step']:.0f}% of the step together",
        f"feeding      {f['feeding_ms']:.2f} ms of the host, {100 * f['feeding_share']:.2f}% of a step{'' if f['real_data'] else ', not among it'}",
        f"evaluation   {f['evaluation_ms']:,.1f} ms a supervision step: {f['eval_examples_per_sec']:,.1f} examples/s, "
        f"{f['eval_examples_per_sec'] / f['examples_per_sec']:.2f} times the training's"])


def compared(out, path):
    """Ratios of figures against those on the last line of a file."""
    try:
        with open(path, encoding="utf-8") as f:
            before = json.loads(f.read().strip().splitlines()[-1])
        lines = [f"{k:24}{before[k]:>14,.4g}{out[k]:>14,.4g}{out[k] / before[k]:>9.3f}" for k in PRINTED]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as e:
        raise UserError(f"--compare={path}: its last line is not what bench.py prints ({type(e).__name__}: {e})") from None
    return "\n".join([f"{'':24}{'before':>14}{'now':>14}{'ratio':>9}", *lines])


def profiled(device, folder, train_step, say):
    """Traces 3 steps into folder for the usual viewers, and prints what took the longest."""
    os.makedirs(folder, exist_ok=True)
    if device.kind == "xla":
        import torch_xla.debug.profiler as xp
        server = xp.start_server(9012)  # noqa: F841: lives as long as the trace
        xp.start_trace(folder)
        for _ in range(3):
            train_step().cpu()
        xp.stop_trace()
        path = max(glob.glob(os.path.join(folder, "plugins", "profile", "*", "*.trace.json.gz")))
        with gzip.open(path) as f:
            events = json.load(f)["traceEvents"]
        where = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
        spent, calls = Counter(), Counter()
        for e in events:  # a TPU's own line, or the threads that compute on the CPU
            if e.get("ph") == "X" and re.search("XLA Ops|XLAEigen", where.get((e["pid"], e.get("tid")), "")) and "::" not in e["name"]:
                kind = re.sub(r"(\.(clone|remat|\d+))+$", "", e["name"])
                spent[kind] += e["dur"] / 1e3
                calls[kind] += 1
        say("\n".join(f"{milliseconds:10.2f} ms {calls[kind]:7} x {kind}" for kind, milliseconds in spent.most_common(10)))
        return say(f"trace of 3 steps in {path}: open it in https://ui.perfetto.dev, or the folder with xprof or tensorboard --logdir={folder}")
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * (device.kind == "cuda")
    with torch.profiler.profile(activities=activities) as p:
        for _ in range(3):
            train_step().cpu()
    path = os.path.join(folder, f"trace.{device.rank}.json")
    p.export_chrome_trace(path)
    say(p.key_averages().table(sort_by=f"self_{device.kind}_time_total", row_limit=10, max_name_column_width=60))
    say(f"trace of 3 steps in {path}: open it in https://ui.perfetto.dev or chrome://tracing")


def swept(b, argv):
    """A table with a run for each value of a setting, each in a process of its own."""
    name, _, values = b.sweep.partition("=")
    print(f"{name:>20}" + "".join(f"{k:>22}" for k in PRINTED[:3] + PRINTED[-2:]), flush=True)
    rows = []
    for value in values.split(","):
        done = subprocess.run([sys.executable, __file__, *argv, f"--{name}={value}"], capture_output=True, text=True)
        if done.returncode:
            print(f"{value:>20}  {(done.stderr.strip().splitlines() or ['failed'])[-1]}", flush=True)
            continue
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(f"{value:>20}" + "".join(f"{rows[-1][k]:>22,.3f}" for k in PRINTED[:3] + PRINTED[-2:]), flush=True)
    if not rows:
        raise UserError(f"--sweep={b.sweep}: no run succeeded, see above")
    print(json.dumps(rows))


# What a TPU makes of the step: traced here, compiled by the TPU's own compiler, not run.

BYTES = dict(f64=8, s64=8, u64=8, f32=4, s32=4, u32=4, bf16=2, f16=2, s16=2, u16=2, pred=1, s8=1, u8=1)
NO_TRAFFIC = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "copy-done", "slice-start", "slice-done", "async-start", "async-done",
              "conditional", "call", "after-all", "partition-id", "replica-id"}


def lower(index, c, seq_len, vocab_size, folder):
    """Writes the programs of the train step and of the evaluation's, as train.py would have them compiled, to folder/{train,eval}.pb.

    Traced on CPU replicas, with shapes in the place of data: a batch that no machine holds can be asked about.
    """
    device = train.Device("xla")
    model = TRM(TRMConfig.of(c, seq_len=seq_len, vocab_size=vocab_size), c.seed)
    B = c.global_batch_size // device.world
    run = train.Run(model, SimpleNamespace(**vars(c) | dict(global_batch_size=device.world, micro_batch_size=0)), device)  # small, for its weights
    run.c = c
    with torch.device("meta"):
        carry, z = model.new_carry(B, run.dtype), lambda *shape: torch.zeros(shape, dtype=torch.int32)
        batch = dict(inputs=z(B, seq_len), labels=z(B, seq_len), puzzle_identifiers=z(B))
        carry = run.cut(carry)
        state = run.state | dict(carry=carry)
        inputs = dict(batch=batch | dict(min_halt_steps=z(B)), rates=torch.zeros(4), signals=torch.zeros(2))
        evaluation = dict(carry=carry, totals=torch.zeros(len(train.METRICS)))
        weights = {k: run.state[k] for k in ("weights", "puzzle_emb")}
    for name, fn, *arguments in (("train", run.trace_train_step, state, inputs), ("eval", run.trace_eval_step, evaluation, dict(batch=batch, **weights))):
        with train.LAUNCH, torch.no_grad():
            hlo = device.lower(fn, *arguments)[0].hlo()
        if device.rank == 0:
            with open(os.path.join(folder, f"{name}.pb"), "wb") as f:
                f.write(hlo)
            text = device.xb.get_computation_hlo(device.xb.computation_from_module_proto(name, hlo))
            products = [line for line in text.splitlines() if re.search(r"f64\[.* dot\(", line)]
            places = {f"{os.path.basename(m[1])}:{m[2]}" for line in products if (m := re.search(r'source_file="([^"]*)" source_line=(\d+)', line))
                      and os.path.exists(os.path.join(HERE, os.path.basename(m[1])))}  # the others are the backward passes of these
            with open(os.path.join(folder, f"{name}.json"), "w") as f:
                json.dump(sorted(places or {"somewhere"} if products else ()), f)


def lower_main(folder, argv):
    """lower() on as many replicas as CPU_NUM_DEVICES says; folder/sizes.json: [seq_len, vocab_size]."""
    with open(os.path.join(folder, "sizes.json")) as f:
        seq_len, vocab_size = json.load(f)
    import torch_xla.distributed.xla_multiprocessing as xmp
    xmp.spawn(lower, args=(configurator.configure(train.__file__, argv), seq_len, vocab_size, folder))


def compile_main(path, topology, chips):
    """Compiles a program for a slice with libtpu; prints a line of JSON. Writes the optimised program beside it, where jaxlib can read it."""
    from jax.experimental import topologies
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jaxlib.mlir import ir
    devices = list(topologies.get_topology_desc(topology_name=topology, platform="tpu").devices)[:chips]
    options = compiler.get_compile_options(num_replicas=len(devices), num_partitions=1, device_assignment=np.array([[d.id] for d in devices]))
    began = time.time()
    with open(path, "rb") as f, mlir.make_ir_context():
        module = ir.Module.parse(xla_client._xla.mlir.hlo_to_stablehlo(f.read()))
        program = devices[0].client.compile(module, xla_client._xla.DeviceList(tuple(devices)), options)
    seconds, memory, cost = time.time() - began, program.get_compiled_memory_stats(), program.cost_analysis()
    try:
        text = program.hlo_modules()[0].to_string()
    except Exception:  # jaxlib 0.10.2 cannot parse those of v6e
        text = ""
    collectives = re.findall(r" = (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(", text)
    print(json.dumps(dict(
        compile_s=seconds, arguments_gb=memory.argument_size_in_bytes / 1e9, outputs_gb=memory.output_size_in_bytes / 1e9,
        temporaries_gb=memory.temp_size_in_bytes / 1e9, code_gb=memory.generated_code_size_in_bytes / 1e9, compiler_tflop=cost["flops"] / 1e12,
        hbm_gb=hbm_bytes(text) / 1e9 if text else None, collectives=[[kind, shape_bytes(shape, "")] for shape, kind in collectives] if text else None)))


def shape_bytes(shape, outside="S("):
    """Bytes of the arrays in a shape as the compiler writes it; those whose layout has `outside` in it are in VMEM and left out."""
    arrays = re.findall(r"(\w+)\[([\d,]*)\](\{[^}]*\})?", shape)
    return sum(BYTES.get(t, 0) * math.prod(map(int, filter(None, dims.split(",")))) for t, dims, layout in arrays if not outside or outside not in layout)


def hbm_bytes(text):
    """Bytes that an optimised TPU program moves through HBM, from its text.

    Operands and results of all instructions but what lies in VMEM; a loop's body as often as it runs; of a buffer that an instruction
    slices, or updates in place, the slice.
    """
    programs, entry = {}, None
    for part in re.split(r"\n(?=(?:ENTRY )?%[\w.\-]+ \()", text):
        if head := re.match(r"(ENTRY )?%([\w.\-]+) \(", part):
            lines = (re.match(r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)", line) for line in part.splitlines()[1:])
            # {instruction: (shape, operation, operands, what follows the operation, whether it is the result)}
            programs[head[2]] = {m[2]: (m[3], m[4], re.findall(r"%([\w.\-]+)", re.split(r"\), |\)$", m[5])[0]), m[5], m[1]) for m in lines if m}
            entry = head[2] if head[1] else entry

    def slices(name):
        """Of a fusion: {index of a parameter that is only sliced: bytes}, and the bytes written where that is in place, else None."""
        body, read, written = programs[name], {}, None
        origin = lambda n: origin(body[n][2][0]) if body[n][1] == "bitcast" else n
        for n, (_, op, _, rest, _) in body.items():
            if op == "parameter":
                uses = [(o, shape_bytes(s), origin(a[0]) == n) for s, o, a, _, _ in body.values() if o != "bitcast" and any(origin(x) == n for x in a)]
                if uses and all(o in ("dynamic-slice", "dynamic-update-slice") and first for o, _, first in uses):
                    read[int(rest.split(")")[0])] = sum(b for o, b, _ in uses if o == "dynamic-slice")
        updates = {n: shape_bytes(body[origin(a[1])][0]) for n, (_, o, a, _, _) in body.items() if o == "dynamic-update-slice"}
        if updates:
            root = next(n for n, v in body.items() if v[4])
            parts = body[root][2] if body[root][1] == "tuple" else [root]
            written = sum(updates.get(origin(p), shape_bytes(body[p][0])) for p in parts)
        return read, written

    def moved(name):
        total, body = 0, programs[name]
        of = lambda n: shape_bytes(body[n][0]) if n in body else 0
        for shape, op, operands, rest, _ in body.values():
            if op == "while":
                condition, loop = (re.search(rf"{k}=%([\w.\-]+)", rest)[1] for k in ("condition", "body"))
                bounds = [int(v[3].split(")")[0]) for v in programs[condition].values() if v[1] == "constant" and v[0][1:6] == "32[]{"]
                total += max(bounds, default=1) * moved(loop)
            elif op == "copy-start":
                total += shape_bytes(shape) / 2
            elif op in ("dynamic-slice", "dynamic-update-slice"):
                total += 2 * (shape_bytes(shape) if op == "dynamic-slice" else of(operands[1]))
            elif op not in NO_TRAFFIC:
                calls = re.search(r"calls=%([\w.\-]+)", rest)
                read, written = slices(calls[1]) if op == "fusion" and calls else ({}, None)
                total += shape_bytes(shape) if written is None else written
                total += sum(read.get(i, of(n)) for i, n in enumerate(operands))
        return total

    return moved(entry)


def child(call, **env):
    """Runs bench.CALL in a process of its own, so that a compiler that crashes is a message. Returns (its last line, None) or (None, the fault)."""
    done = subprocess.run([sys.executable, "-X", "faulthandler", "-c", f"import sys; sys.path.insert(0, {HERE!r}); import bench; bench.{call}"],
                          capture_output=True, text=True, env={**os.environ, **env})
    if done.returncode == 0:
        return (done.stdout.splitlines() or [""])[-1], None
    text = done.stderr.strip()
    crashed = "Fatal Python error" in text
    places = [f"{os.path.basename(path)}:{line}" for path, line in re.findall(r'File "([^"]+)", line (\d+)', text)
              if os.path.dirname(path) == HERE and os.path.basename(path) not in ("bench.py", "train.py")]
    place = f" ({places[0 if crashed else -1]})" if places else ""  # a crash is told from the most recent call on
    if crashed:
        return None, f"crashed, as it does where a shape or a branch depends on data (a boolean index, nonzero, item, print){place}"
    errors = [line for line in text.splitlines() if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return None, " ".join((errors or text.splitlines() or [f"exit code {done.returncode}"])[-1].split())[:500] + place


def chips_of(topology):
    """("v5e", 8) of v5e:2x4; raises UserError."""
    match = re.fullmatch(r"(v4|v5e|v5p|v6e):(\d+(?:x\d+){1,2})", topology)
    if not match:
        raise UserError(f"{topology!r} is no TPU slice: write v4:2x2x1, v5e:2x4, v5p:2x2x1 or v6e:2x2")
    return match[1], math.prod(map(int, match[2].split("x")))


def compiled(c, argv, topology, programs):
    """{program: figures, or {"fault": text}} of the programs "train" and "eval" on a slice."""
    chip, chips = chips_of(topology)
    each = chips * (c.micro_batch_size or 1)
    if c.global_batch_size % each:
        raise UserError(f"global_batch_size {c.global_batch_size} must be a multiple of {each} for {topology}")
    seq_len, vocab_size, _, _ = sizes(c)
    B, traced, found = c.global_batch_size // chips, min(chips, 2), {}  # the all-reduce of two replicas fits any number of them
    model = TRM(TRMConfig.of(c, seq_len=seq_len, vocab_size=vocab_size))
    forward, step = model.flops_per_example()
    peak, bandwidth, memory = CHIPS[chip]
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "sizes.json"), "w") as f:
            json.dump([seq_len, vocab_size], f)
        flags = [*argv, f"--global_batch_size={B * traced}", "--device=xla"]
        _, fault = child(f"lower_main({folder!r}, {flags!r})", PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(traced), XLA_THREAD_POOL_SIZE="16",
                         XLA_IR_DEBUG="1", XLA_HLO_DEBUG="1")
        if fault:
            return {program: dict(fault=f"tracing: {fault}") for program in programs}
        for program in programs:
            print(f"compiling the {program} step for {topology} (a minute or two)", file=sys.stderr, flush=True)
            line, fault = child(f"compile_main({os.path.join(folder, program + '.pb')!r}, {topology!r}, {chips})", TPU_SKIP_MDS_QUERY="1",
                                JAX_PLATFORMS="cpu", ALLOW_MULTIPLE_LIBTPU_LOAD="1", TPU_ACCELERATOR_TYPE="v5litepod-8", TPU_WORKER_HOSTNAMES="localhost")
            if fault:
                found[program] = dict(fault=fault)
                continue
            f = found[program] = json.loads(line)
            again = c.recompute * (step - forward) / 2  # a differentiated recursion costs two of its forward passes backwards
            f.update(chips=chips, batch_per_chip=B, tflop=(step + again if program == "train" else forward) * B / 1e12,
                     free_gb=memory / 1e9 - f["arguments_gb"] - f["outputs_gb"] - f["temporaries_gb"] - f["code_gb"])
            with open(os.path.join(folder, f"{program}.json")) as g:
                f["float64_products"] = json.load(g)
            f["arithmetic_ms"] = 1e15 * f["tflop"] / peak
            f["memory_ms"] = 1e12 * f["hbm_gb"] / bandwidth if f["hbm_gb"] is not None else None
            f["roofline_ms"] = max(f["arithmetic_ms"], f["memory_ms"] or 0)
            f["examples_per_sec"] = 1e3 * B * chips / f["roofline_ms"]
    return found


def ahead_of_time(c, argv, topologies):
    """Prints what the TPU compiler makes of the train and the evaluation step on each slice."""
    out = {}
    for topology in topologies:
        out[topology] = compiled(c, argv, topology, ("train", "eval"))
        for program, f in out[topology].items():
            head = f"{topology} {program:5}"
            if "fault" in f:
                print(f"{head} DOES NOT COMPILE: {f['fault']}", flush=True)
                continue
            fits = "fits" if f["free_gb"] >= 0 else "DOES NOT FIT"
            read = f"{f['hbm_gb']:.2f} GB through HBM ({1e3 * f['hbm_gb'] / f['batch_per_chip']:.0f} MB an example)" if f["hbm_gb"] is not None else \
                "HBM traffic unknown (jaxlib cannot read this program)"
            bound = "arithmetic" if f["arithmetic_ms"] >= (f["memory_ms"] or 0) else "memory traffic"
            sums = ", ".join(f"{kind} of {size / 1e6:.1f} MB" for kind, size in f["collectives"]) or "none" if f["collectives"] is not None else "unknown"
            if f["float64_products"]:
                print(f"{head} float64 matrix product, which TPUs emulate many times slower: {', '.join(f['float64_products'])}", flush=True)
            print(f"{head} {f['batch_per_chip']} a chip: {fits}, {f['free_gb']:.1f} GB free beside arguments {f['arguments_gb']:.2f}, results "
                  f"{f['outputs_gb']:.2f}, temporaries {f['temporaries_gb']:.2f} and code {f['code_gb']:.2f}; compiled in {f['compile_s']:.0f} s here\n"
                  f"{'':{len(head)}} {f['tflop']:.2f} TFLOP counted, {read}; collectives: {sums}\n"
                  f"{'':{len(head)}} roofline {f['roofline_ms']:.1f} ms, bound by {bound}: {f['examples_per_sec']:,.0f} examples/s on {f['chips']} chips", flush=True)
    print("A run compiles these two, one that sums an evaluation over the chips, and two small ones at its start.")
    print(json.dumps(out))
    if any("fault" in f for found in out.values() for f in found.values()):
        sys.exit(1)


def priced(c, b, argv):
    """Prints what a whole run on a slice takes: steps, hours, bytes."""
    chip, chips = chips_of(b.plan)
    seq_len, vocab_size, puzzles, where = sizes(c)
    model = TRM(TRMConfig.of(c, seq_len=seq_len, vocab_size=vocab_size))
    forward, step = model.flops_per_example()
    steps = c.max_steps or int(c.epochs * puzzles / c.global_batch_size)
    parameters = sum(p.numel() for p in model.parameters())
    checkpoint, saves = 4 * parameters * (3 + c.ema), steps // c.checkpoint_interval + 1 if c.checkpoint_interval else 1
    if b.rate:
        speed, source = b.rate, "measured, as --rate says"
    elif installed():
        f = compiled(c, argv, b.plan, ["train"])["train"]
        if "fault" in f:
            raise UserError(f"{b.plan}: the step does not compile: {f['fault']}")
        speed, source = f["examples_per_sec"], "estimated: the compiled program's roofline, which no run reaches"
    else:
        speed, source = chips * CHIPS[chip][0] / step, "estimated: arithmetic at the chip's peak, which no run reaches (pip install jax libtpu counts memory too)"
    hours = steps * c.global_batch_size / speed / 3600
    evaluations = int(c.epochs / c.eval_interval) if c.eval_interval and not c.max_steps else 0
    out = dict(slice=b.plan, chips=chips, steps=steps, parameters=parameters, examples_per_sec=speed, measured=bool(b.rate), hours=hours,
               chip_hours=chips * hours, checkpoints=saves, checkpoint_gb=checkpoint / 1e9, uploaded_gb=saves * checkpoint / 1e9,
               stored_gb=(min(saves, c.keep_last_n) + 1) * checkpoint / 1e9, evaluations=evaluations)
    print(f"data set     {where}: {puzzles:,.0f} puzzles an epoch\n"
          f"steps        {steps:,} of {c.global_batch_size} sequences, {parameters:,} parameters\n"
          f"speed        {speed:,.0f} examples/s on {chips} x {chip} ({source})\n"
          f"training     {hours:.2f} hours, {chips * hours:.1f} chip-hours, without compiling (minutes) and {evaluations} evaluations on the way\n"
          f"checkpoints  {saves} of {checkpoint / 1e9:.3f} GB (counted): {out['uploaded_gb']:.2f} GB written, and uploaded with gcs_dir (egress where the "
          f"bucket is in another region); {out['stored_gb']:.2f} GB stored at a time")
    print(json.dumps({k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in out.items()}))


def installed():
    return all(importlib.util.find_spec(name) for name in ("jax", "libtpu"))


def main(argv):
    """Sorts the flags into bench.py's and train.py's, and does what they ask for."""
    own = configurator.read_settings(__file__)
    mine = [a for a in argv if a.lstrip("-").partition("=")[0] in own and a.startswith("-")]
    theirs = [a for a in argv if a not in mine]
    b, c = configurator.configure(__file__, [a for a in argv if a in mine or a in ("-h", "--help")]), configurator.configure(train.__file__, theirs)
    train.check_settings(c)
    try:
        TRM(TRMConfig.of(c, **dict(zip(("seq_len", "vocab_size"), sizes(c)))))
    except ValueError as e:
        raise UserError(str(e)) from None
    if b.steps < 1:
        raise UserError(f"steps must be 1 or more, not {b.steps}")
    if b.sweep:
        if not re.fullmatch(r"\w+=[^=]+", b.sweep):
            raise UserError(f"--sweep={b.sweep}: write --sweep=global_batch_size=64,128")
        return swept(b, [a for a in argv if not a.startswith("--sweep")])
    if b.aot and not installed():
        raise UserError("--aot needs the TPU compiler: pip install jax libtpu")
    if b.aot or b.plan:
        for topology in (b.aot or b.plan).split(","):
            chips_of(topology)
        return ahead_of_time(c, theirs, b.aot.split(",")) if b.aot else priced(c, b, theirs)
    kind, reason = train.choose_device(c.device)
    seq_len, vocab_size, _, where = sizes(c)
    print(f"device {kind}: {reason}; data set {where}", flush=True)
    if b.real_data and not os.path.isdir(c.data_path):
        raise UserError(f"--real_data: {c.data_path}: no such data set")
    with tempfile.TemporaryDirectory() as folder:
        path = c.data_path if os.path.isdir(c.data_path) else os.path.join(folder, "random")
        if path != c.data_path:
            random_dataset(path, seq_len, vocab_size)
        if kind == "xla":
            import torch_xla.distributed.xla_multiprocessing as xmp
            xmp.spawn(bench, args=(c, b, kind, path))
        else:
            bench(0, c, b, kind, path)


if __name__ == "__main__":
    configurator.command(lambda: main(sys.argv[1:]), __file__)
