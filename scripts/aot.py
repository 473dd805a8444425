"""What a TPU makes of train.py's steps, and the price of a run, without a TPU.

    pip install jax libtpu
    python scripts/aot.py config/baseline.py --slices=v5e:2x4,v6e:2x2     memory, HBM traffic, time at best
    python scripts/aot.py config/baseline.py --plan=v5e:2x4               steps, hours and bytes of a run
    python scripts/aot.py config/baseline.py --plan=v5e:2x4 --rate=9000   the same at a measured speed

The steps are traced on the CPU and compiled by libtpu, the TPU's own compiler. Nothing runs. The settings
below are aot.py's own, all others train.py's. The last line is one JSON object.
"""
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import namedtuple
from types import SimpleNamespace

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
sys.path.insert(0, ROOT)
import configurator  # noqa: E402; before torch: see there
import numpy as np  # noqa: E402
import torch  # noqa: E402

import bench  # noqa: E402
import train  # noqa: E402
from configurator import UserError  # noqa: E402
from model import METRICS, TRM, TRMConfig  # noqa: E402
from xla import LAUNCH  # noqa: E402

# one of these two
slices = ""  # TPU slices to compile the train and the evaluation step for: v5e:2x4,v6e:2x2,v4:2x2x1
plan = ""  # a slice to price a whole run on
# for the price
rate = 0.0  # examples/s measured on that slice; 0: an upper bound
# ---

# Dense bfloat16 FLOP/s of a chip, bytes/s and bytes of its memory, as its maker states them, and cycles/s,
# which is the peak divided by the FLOP of all matrix units in a cycle.
CHIPS = {
    "v4": (275e12, 1228e9, 32e9, 1.05e9),
    "v5e": (197e12, 819e9, 16e9, 1.5e9),
    "v5p": (459e12, 2765e9, 95e9, 1.75e9),
    "v6e": (918e12, 1640e9, 32e9, 1.75e9),
}


# The compiler's view.

def show_slices(c, flags, names):
    """Compiles both steps for each slice, prints what the compiler says, and exits with 1 if one fails."""
    found = {}
    for name in names:
        found[name] = compile_steps(c, flags, name, ("train", "eval"))
        for step, figures in found[name].items():
            print(description(f"{name} {step:5}", figures), flush=True)
    print("a run compiles these two, and two small ones at its start")
    print(json.dumps(found))
    if any("fault" in figures for steps in found.values() for figures in steps.values()):
        sys.exit(1)


def description(head, f):
    """The figures of a compiled step as lines for people."""
    if "fault" in f:
        return f"{head} DOES NOT COMPILE: {f['fault']}"
    lines = []
    if f["float64_products"]:
        places = ", ".join(f["float64_products"])
        lines.append(f"float64 matrix product, which TPUs emulate many times slower: {places}")
    fits = "fits" if f["free_gb"] >= 0 else "DOES NOT FIT"
    lines.append(f"{f['batch_per_chip']} sequences a chip: {fits}, {f['free_gb']:.1f} GB free beside "
                 f"arguments {f['arguments_gb']:.2f}, results {f['outputs_gb']:.2f}, "
                 f"temporaries {f['temporaries_gb']:.2f} and code {f['code_gb']:.2f}; "
                 f"compiled here in {f['compile_s']:.0f} s")
    traffic = "HBM traffic and collectives unknown (jaxlib cannot read this program)"
    if f["hbm_gb"] is not None:
        megabytes = 1e3 * f["hbm_gb"] / f["batch_per_chip"]
        collectives = ", ".join(f"{kind} of {size / 1e6:.1f} MB" for kind, size in f["collectives"])
        traffic = (f"{f['hbm_gb']:.2f} GB through HBM ({megabytes:.0f} MB an example); "
                   f"collectives: {collectives or 'none'}")
    lines.append(f"{f['tflop']:.2f} TFLOP counted, {traffic}")
    bound = "arithmetic" if f["arithmetic_ms"] >= (f["memory_ms"] or 0) else "memory traffic"
    lines.append(f"roofline {f['roofline_ms']:.1f} ms, bound by {bound}: at most "
                 f"{f['examples_per_sec']:,.0f} examples/s on {f['chips']} chips")
    if f["estimated_ms"] is not None:
        lines.append(f"the compiler estimates {f['estimated_ms']:.1f} ms")
    return "\n".join([f"{head} {lines[0]}"] + [f"{'':{len(head)}} {line}" for line in lines[1:]])


def compile_steps(c, flags, name, steps):
    """Compiles steps ("train", "eval") for a slice: {step: figures, or {"fault": text}}. Raises UserError."""
    chip, chips = chip_and_count(name)
    multiple = chips * (c.micro_batch_size or 1)
    if c.global_batch_size % multiple:
        raise UserError(f"global_batch_size {c.global_batch_size} must be a multiple of {multiple} "
                        f"for {name}")
    seq_len, vocab_size, _, _ = bench.sizes(c)
    model = TRM(TRMConfig.of(c, seq_len=seq_len, vocab_size=vocab_size))
    batch_per_chip, found = c.global_batch_size // chips, {}
    replicas = min(chips, 2)  # the all-reduce of two replicas fits any number of them
    flags = [*flags, f"--global_batch_size={batch_per_chip * replicas}", "--device=xla"]
    with tempfile.TemporaryDirectory() as folder:
        _, fault = run_child(
            f"tracing for {name}", f"trace_steps({folder!r}, {flags!r}, {seq_len}, {vocab_size})",
            PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(replicas), XLA_THREAD_POOL_SIZE="16",
            XLA_IR_DEBUG="1", XLA_HLO_DEBUG="1")
        if fault:
            return {step: dict(fault=f"tracing: {fault}") for step in steps}
        for step in steps:
            path = os.path.join(folder, step)
            line, fault = run_child(
                f"compiling the {step} step for {name}", f"compile_step({path + '.pb'!r}, {name!r}, {chips})",
                JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1",
                TPU_ACCELERATOR_TYPE="v5litepod-8", TPU_WORKER_HOSTNAMES="localhost")
            if fault and "Topology" in fault:
                raise UserError(f"{name}: the TPU compiler knows no such slice: {fault}")
            if fault:
                found[step] = dict(fault=fault)
                continue
            found[step] = figures = json.loads(line)
            figures |= dict(chips=chips, batch_per_chip=batch_per_chip)
            figures |= roofline(figures, step_flops(c, model, step) * batch_per_chip, chip)
            with open(path + ".json") as f:
                figures["float64_products"] = json.load(f)
    return found


def step_flops(c, model, step):
    """FLOPs of the matrix products of a step for one sequence."""
    forward, training = model.flops_per_example()
    if step == "eval":
        return forward
    # The backward pass of the last recursion costs two of its forward passes, and recomputing it one more.
    return training + (training - forward) / 2 * c.recompute


def roofline(f, flops, chip):
    """The figures that follow from the compiler's: the memory left, and a lower bound on a step's time."""
    peak, bandwidth, memory, clock = CHIPS[chip]
    used = f["arguments_gb"] + f["outputs_gb"] + f["temporaries_gb"] + f["code_gb"]
    arithmetic_ms = 1e3 * flops / peak
    memory_ms = 1e12 * f["hbm_gb"] / bandwidth if f["hbm_gb"] is not None else None
    roofline_ms = max(arithmetic_ms, memory_ms or 0)
    estimated_ms = 1e3 * f["cycles"] / clock if f["cycles"] is not None else None
    return dict(
        tflop=flops / 1e12, free_gb=memory / 1e9 - used, arithmetic_ms=arithmetic_ms, memory_ms=memory_ms,
        roofline_ms=roofline_ms, estimated_ms=estimated_ms,
        examples_per_sec=1e3 * f["batch_per_chip"] * f["chips"] / roofline_ms)


def chip_and_count(name):
    """("v5e", 8) of v5e:2x4. Raises UserError."""
    match = re.fullmatch(r"(v4|v5e|v5p|v6e):([1-9]\d*(?:x[1-9]\d*){1,2})", name)
    if not match:
        raise UserError(f"{name!r} is no TPU slice: write v4:2x2x1, v5e:2x4, v5p:2x2x1 or v6e:2x2")
    return match[1], math.prod(map(int, match[2].split("x")))


# The price of a run.

def show_price(c, flags, name, rate):
    """Prints the steps, hours and bytes of a run on a slice. rate: examples/s, or 0 for an upper bound."""
    _, chips = chip_and_count(name)
    seq_len, vocab_size, puzzles, source = bench.sizes(c)
    model = TRM(TRMConfig.of(c, seq_len=seq_len, vocab_size=vocab_size))
    steps = train.count_steps(c, puzzles)
    parameters = sum(p.numel() for p in model.parameters())
    checkpoint_gb = 4 * parameters * (3 + c.ema) / 1e9
    saves = math.ceil(steps / c.checkpoint_interval) if c.checkpoint_interval else 1
    evaluations = sum(train.evaluation_due(c, puzzles, step) for step in range(1, steps))
    speed, reason = (rate, "measured, as --rate says") if rate else fastest(c, flags, name, model)
    hours = steps * c.global_batch_size / speed / 3600
    stored = min(saves, c.keep_last_n) + 1
    out = dict(
        slice=name, chips=chips, steps=steps, parameters=parameters, examples_per_sec=speed,
        measured=bool(rate), hours=hours, chip_hours=chips * hours, checkpoints=saves,
        checkpoint_gb=checkpoint_gb, uploaded_gb=saves * checkpoint_gb, stored_gb=stored * checkpoint_gb,
        evaluations=evaluations)
    print(f"data set     {source}: {puzzles:,.0f} puzzles an epoch\n"
          f"steps        {steps:,} of {c.global_batch_size} sequences, {parameters:,} parameters\n"
          f"speed        {speed:,.0f} examples/s on {name}, {chips} chips ({reason})\n"
          f"training     {hours:.2f} hours, {chips * hours:.1f} chip-hours, without compiling (minutes) and "
          f"{evaluations} evaluations on the way\n"
          f"checkpoints  {saves} of {checkpoint_gb:.3f} GB: {saves * checkpoint_gb:.2f} GB written, and "
          "uploaded with gcs_dir (egress, if the bucket is in another region); "
          f"{stored * checkpoint_gb:.2f} GB stored at a time")
    print(json.dumps(bench.rounded(out)))


def fastest(c, flags, name, model):
    """(examples/s that no run on the slice exceeds, how that is known)."""
    if not has_compiler():
        chip, chips = chip_and_count(name)
        reason = "arithmetic at the chip's peak, which no run reaches; pip install jax libtpu counts memory"
        return chips * CHIPS[chip][0] / model.flops_per_example()[1], reason
    figures = compile_steps(c, flags, name, ["train"])["train"]
    if "fault" in figures:
        raise UserError(f"{name}: the step does not compile: {figures['fault']}")
    return figures["examples_per_sec"], "the compiled step's roofline, which no run reaches"


def has_compiler():
    return all(importlib.util.find_spec(package) for package in ("jax", "libtpu"))


# Tracing and compiling, each in a process of its own: a compiler that crashes must leave a message.

def run_child(label, call, **env):
    """Runs aot.CALL in another process: (its last line, None), or (None, what went wrong)."""
    code = (f"import sys; sys.path.insert(0, {HERE!r}); import aot; "
            f"aot.end_with_parent({os.getpid()}); aot.{call}")
    began = time.monotonic()
    command, env = [sys.executable, "-X", "faulthandler", "-c", code], {**os.environ, **env}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    print(label, file=sys.stderr, flush=True)
    while True:
        try:
            output, errors = process.communicate(timeout=10)
            break
        except subprocess.TimeoutExpired:
            print(f"{label}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    if process.returncode:
        return None, fault_of(errors.strip(), process.returncode)
    return (output.splitlines() or [""])[-1], None


def fault_of(text, code):
    """One line for what a failed child wrote to stderr, with the line of the model that caused it."""
    crashed = "Fatal Python error" in text
    places = []
    for path, line in re.findall(r'File "([^"]+)", line (\d+)', text):
        folder, name = os.path.split(path)
        if folder == ROOT and name not in ("bench.py", "train.py", "xla.py"):
            places.append(f"{name}:{line}")
    place = ""
    if places:
        place = f" ({places[0 if crashed else -1]})"  # a crash lists the most recent call first
    if crashed:
        return ("crashed, as it does where a shape or a branch depends on data "
                f"(a boolean index, nonzero, item, print){place}")
    lines = text.splitlines() or [f"exit code {code}"]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return " ".join((errors or lines)[-1].split())[:500] + place


def end_with_parent(parent):
    """Ends this process when its parent, a process id, is gone: nobody reads its result any more."""
    def watch():
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def trace_steps(folder, flags, seq_len, vocab_size):
    """Runs trace_replica() on as many replicas as CPU_NUM_DEVICES says."""
    import torch_xla.distributed.xla_multiprocessing as xmp
    c = configurator.configure(train.__file__, flags)
    xmp.spawn(trace_replica, args=(os.getpid(), folder, c, seq_len, vocab_size))


def trace_replica(index, parent, folder, c, seq_len, vocab_size):
    """Writes the two steps, as train.py would have them compiled, to folder/{train,eval}.pb.

    Shapes take the place of data, so that a batch which fits no memory here can be compiled.
    folder/{train,eval}.json lists the lines with float64 matrix products.
    """
    end_with_parent(parent)
    device = train.open_device("xla", c)
    model = TRM(TRMConfig.of(c, seq_len=seq_len, vocab_size=vocab_size), c.seed)
    small = SimpleNamespace(**vars(c) | dict(global_batch_size=device.world, micro_batch_size=0))
    run = train.Run(model, small, device)  # for its weights; its carry is of one sequence
    run.c = c  # the traced steps are those of the whole batch
    B = c.global_batch_size // device.world
    with torch.device("meta"):
        rows = torch.zeros(B, dtype=torch.int32)
        cells = torch.zeros(B, seq_len, dtype=torch.int32)
        batch = dict(inputs=cells, labels=cells, puzzle_identifiers=rows)
        carry = run.split(model.new_carry(B, run.dtype))
        train_inputs = dict(batch=batch | dict(min_halt_steps=rows), rates=torch.zeros(4),
                            stop_requested=torch.zeros(1))
        evaluation = dict(carry=run.eval_carry(B), totals=torch.zeros(len(METRICS)))
    weights = {name: run.state[name] for name in ("weights", "puzzle_emb")}
    for name, fn, state, inputs in (("train", run.train_step, run.state | dict(carry=carry), train_inputs),
                                    ("eval", run.eval_step, evaluation, dict(batch=batch, **weights))):
        with LAUNCH, torch.no_grad():
            hlo = device.lower(fn, state, inputs)[0].hlo()
        if device.rank == 0:
            with open(os.path.join(folder, f"{name}.pb"), "wb") as f:
                f.write(hlo)
            text = device.xb.get_computation_hlo(device.xb.computation_from_module_proto(name, hlo))
            with open(os.path.join(folder, f"{name}.json"), "w") as f:
                json.dump(float64_products(text), f)


def float64_products(text):
    """Lines of our files with float64 matrix products, of a program's text that names its sources."""
    products = [line for line in text.splitlines() if re.search(r"f64\[.* dot\(", line)]
    sources = [re.search(r'source_file="([^"]*)" source_line=(\d+)', line) for line in products]
    names = {(os.path.basename(source[1]), source[2]) for source in sources if source}
    places = {f"{name}:{line}" for name, line in names if os.path.exists(os.path.join(ROOT, name))}
    if products and not places:
        return ["somewhere"]
    return sorted(places)  # without their backward passes, which are elsewhere


def compile_step(path, name, chips):
    """Compiles the program at path for a slice with libtpu. Prints what that says as a line of JSON."""
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax.experimental import topologies
    from jaxlib.mlir import ir
    devices = list(topologies.get_topology_desc(topology_name=name, platform="tpu").devices)[:chips]
    options = compiler.get_compile_options(
        num_replicas=len(devices), num_partitions=1, device_assignment=np.array([[d.id] for d in devices]))
    began = time.time()
    with open(path, "rb") as f, mlir.make_ir_context():
        module = ir.Module.parse(xla_client._xla.mlir.hlo_to_stablehlo(f.read()))
        program = devices[0].client.compile(module, xla_client._xla.DeviceList(tuple(devices)), options)
    seconds, memory = time.time() - began, program.get_compiled_memory_stats()
    try:
        text = program.hlo_modules()[0].to_string()
    except Exception:  # jaxlib 0.10.2 cannot parse those of v6e
        text = ""
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    collectives = re.findall(rf" = (.*?) ({kinds})(?:-start)?\(", text)
    hbm_gb = cycles = None
    if text:
        bodies, entry = read_program(text)
        hbm_gb = moved_bytes(bodies, entry) / 1e9
        cycles = estimated_cycles(bodies, entry) or None  # no program takes none
    print(json.dumps(dict(
        compile_s=seconds,
        arguments_gb=memory.argument_size_in_bytes / 1e9,
        outputs_gb=memory.output_size_in_bytes / 1e9,
        temporaries_gb=memory.temp_size_in_bytes / 1e9,
        code_gb=memory.generated_code_size_in_bytes / 1e9,
        compiler_tflop=program.cost_analysis()["flops"] / 1e12,
        hbm_gb=hbm_gb,
        cycles=cycles,
        collectives=[[kind, shape_bytes(shape)] for shape, kind in collectives] if text else None)))


# The text of a compiled program (HLO): how long it takes, and what it moves through HBM.

Instruction = namedtuple("Instruction", "shape operation operands rest is_root")
ITEM_BYTES = dict(f64=8, s64=8, u64=8, f32=4, s32=4, u32=4, bf16=2, f16=2, s16=2, u16=2, pred=1, s8=1, u8=1)
NO_TRAFFIC = {
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "copy-done", "slice-start",
    "slice-done", "async-start", "async-done", "conditional", "call", "after-all", "partition-id",
    "replica-id"}
SLICING = ("dynamic-slice", "dynamic-update-slice")


def read_program(text):
    """({name: {name: Instruction}} of all computations of a program, the name of the one where it starts)."""
    bodies, entry = {}, None
    for part in re.split(r"\n(?=(?:ENTRY )?%[\w.\-]+ \()", text):
        head = re.match(r"(ENTRY )?%([\w.\-]+) \(", part)
        if not head:
            continue
        body = bodies[head[2]] = {}
        entry = head[2] if head[1] else entry
        for line in part.splitlines()[1:]:
            match = re.match(r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)", line)
            if match:
                root, name, shape, operation, rest = match.groups()
                operands = re.findall(r"%([\w.\-]+)", re.split(r"\), |\)$", rest)[0])
                body[name] = Instruction(shape, operation, operands, rest, bool(root))
    return bodies, entry


def estimated_cycles(bodies, name):
    """Cycles that the compiler estimates for the computation of that name; a loop's as often as it runs."""
    total = 0
    for i in bodies[name].values():
        cycles = re.search(r'"estimated_cycles":"(\d+)"', i.rest)
        if i.operation == "while":
            times, loop = loop_of(bodies, i)
            total += times * estimated_cycles(bodies, loop)
        elif cycles:
            total += int(cycles[1])
    return total


def moved_bytes(bodies, name):
    """Bytes that the computation of that name moves through HBM."""
    body, total = bodies[name], 0
    for i in body.values():
        sizes = [hbm_shape_bytes(body[operand].shape) if operand in body else 0 for operand in i.operands]
        if i.operation == "while":
            times, loop = loop_of(bodies, i)
            total += times * moved_bytes(bodies, loop)
        elif i.operation == "copy-start":
            total += hbm_shape_bytes(i.shape) / 2
        elif i.operation == "dynamic-slice":
            total += 2 * hbm_shape_bytes(i.shape)
        elif i.operation == "dynamic-update-slice":
            total += 2 * sizes[1]
        elif i.operation not in NO_TRAFFIC:
            read, written = {}, None
            calls = re.search(r"calls=%([\w.\-]+)", i.rest)
            if i.operation == "fusion" and calls:
                read, written = sliced_bytes(bodies[calls[1]])
            total += hbm_shape_bytes(i.shape) if written is None else written
            total += sum(read.get(n, size) for n, size in enumerate(sizes))
    return total


def loop_of(bodies, loop):
    """(how often a while instruction runs its body, the name of its body)."""
    condition, body = (re.search(rf"{key}=%([\w.\-]+)", loop.rest)[1] for key in ("condition", "body"))
    constants = [i for i in bodies[condition].values()
                 if i.operation == "constant" and i.shape[1:6] == "32[]{"]
    return max((int(i.rest.split(")")[0]) for i in constants), default=1), body  # it counts up to a constant


def sliced_bytes(body):
    """A fusion's ({index of a parameter that it only slices: bytes}, bytes it writes in place, or None)."""
    def origin(name):  # what a chain of bitcasts shows
        return origin(body[name].operands[0]) if body[name].operation == "bitcast" else name

    read = {}
    for name, parameter in body.items():
        if parameter.operation != "parameter":
            continue
        users = [i for i in body.values() if i.operation != "bitcast" and name in map(origin, i.operands)]
        if users and all(i.operation in SLICING and origin(i.operands[0]) == name for i in users):
            slices = [hbm_shape_bytes(i.shape) for i in users if i.operation == "dynamic-slice"]
            read[int(parameter.rest.split(")")[0])] = sum(slices)
    updates = {name: hbm_shape_bytes(body[origin(i.operands[1])].shape)
               for name, i in body.items() if i.operation == "dynamic-update-slice"}
    if not updates:
        return read, None
    root = next(name for name, i in body.items() if i.is_root)
    results = body[root].operands if body[root].operation == "tuple" else [root]
    return read, sum(updates.get(origin(name), hbm_shape_bytes(body[name].shape)) for name in results)


def hbm_shape_bytes(shape):
    """Bytes of the arrays in a shape that lie in HBM: not those in VMEM, whose layout says S(1)."""
    return shape_bytes(re.sub(r"\w+\[[\d,]*\]\{[^}]*S\([^}]*\}", "", shape))


def shape_bytes(shape):
    """Bytes of the arrays in a shape as the compiler writes it: (f32[2,3]{1,0}, pred[])."""
    total = 0
    for item, dimensions in re.findall(r"(\w+)\[([\d,]*)\]", shape):
        total += ITEM_BYTES.get(item, 0) * math.prod(int(n) for n in dimensions.split(",") if n)
    return total


def main(argv):
    """Sorts the flags into aot.py's and train.py's, and does what they ask for."""
    own, c, flags = bench.configure(__file__, argv)
    if bool(own.slices) == bool(own.plan):
        raise UserError("give either --slices=v5e:2x4,v6e:2x2 or --plan=v5e:2x4")
    if own.rate and not own.plan:
        raise UserError("--rate needs --plan=v5e:2x4, the slice on which it was measured")
    if not 0 <= own.rate < math.inf:
        raise UserError(f"--rate={own.rate}: must be examples/s, above 0")
    names = own.slices.split(",") if own.slices else [own.plan]
    for name in names:
        chip_and_count(name)
    if own.plan:
        show_price(c, flags, own.plan, own.rate)
        return
    if not has_compiler():
        raise UserError("--slices needs the TPU compiler: pip install jax libtpu")
    show_slices(c, flags, names)


if __name__ == "__main__":
    configurator.command(lambda: main(sys.argv[1:]), __file__)
