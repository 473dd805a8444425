"""What a TPU or a GPU makes of train.py's steps, and the price of a run, without either.

    pip install jax libtpu                                                for --slices
    python scripts/aot.py config/baseline.py --slices=v5e:2x4,v6e:2x2     memory, collectives, estimated time
    python scripts/aot.py config/sudoku.py --gpus=h100,a100,rtx4090,t4    kernels, traffic, memory, estimates
    python scripts/aot.py config/baseline.py --plan=v5e:2x4               steps, hours and bytes of a run
    python scripts/aot.py config/sudoku.py --plan=h100:8 --rate=9000      the same at a measured speed

The steps are traced on the CPU and compiled by libtpu, the TPU's own compiler, or by Inductor and Triton with
NVIDIA's assembler: scripts/aot_gpu.py. Nothing runs. Where data_path
is missing, random puzzles take its place. The settings below are aot.py's own, all others train.py's. The
last line is one JSON object.
"""
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
sys.path.insert(0, ROOT)
import aot_gpu
import configurator  # noqa: E402 (before torch: see there)
import numpy as np
import torch
from configurator import TransientError, UserError

import bench
import train
from data import Dataset
from device import LAUNCH, NotReplayable, Replayable, end_with_parent, open_device

# one of these three
slices = ""  # TPU slices to compile the training and the evaluation step for: v5e:2x4,v6e:2x2,v4:2x2x1
gpus = ""  # GPUs to compile both steps for: h100,a100,rtx4090,t4
plan = ""  # a slice or GPUs to price a whole run on: v5e:2x4 or h100:8
# for the price
rate = 0.0  # examples/s measured there; 0: what the compiler estimates
# ---

STEPS = ("train", "eval")
# Dense bfloat16 FLOP/s of a chip and bytes of its memory, as its maker states them, and cycles/s, which is
# the peak divided by the FLOP of all matrix units in a cycle.
CHIPS = {
    "v4": (275e12, 32e9, 1.05e9),
    "v5e": (197e12, 16e9, 1.5e9),
    "v5p": (459e12, 95e9, 1.75e9),
    "v6e": (918e12, 32e9, 1.75e9),
}


# What the compiler says.

def show_slices(c, flags, path, names):
    """Compiles both steps for each slice, prints what the compiler says, and exits with 1 if one fails."""
    found = {}
    for name in names:
        found[name] = compile_steps(c, flags, path, name, STEPS)
        for step, figures in found[name].items():
            print(description(f"{name} {step:5}", figures), flush=True)
    print("a run compiles these two, and two small ones at its start")
    finish(found)


def finish(found):
    """Prints {name: {step: figures}} as the last line. Exits with 1 if a step failed."""
    print(json.dumps(found))
    if any("fault" in figures for steps in found.values() for figures in steps.values()):
        sys.exit(1)


def show_gpus(c, flags, path, names):
    """show_slices for GPUs, one of each."""
    found = {}
    for name in names:
        found[name] = {step: compile_for_gpu(c, flags, path, name, 1, step) for step in STEPS}
        for step, figures in found[name].items():
            print(aot_gpu.description(f"{name} {step:5}", figures), flush=True)
    print("estimates, which no GPU has confirmed: an operation takes as long as its bytes or its FLOPs do at "
          "the card's peak, without caches and launches; without the optimizer")
    finish(found)


def compile_for_gpu(c, flags, path, name, count, step):
    """The figures of a step, of STEPS, on one of `count` GPUs, or {"fault": text}. Raises UserError."""
    if c.global_batch_size % (count * (c.micro_batch_size or 1)):
        raise UserError(f"global_batch_size {c.global_batch_size} must be a multiple of "
                        f"{count * (c.micro_batch_size or 1)} for {name}:{count}")
    flags = [*flags, f"--global_batch_size={c.global_batch_size // count}"]
    line, fault = run_child(f"compiling the {step} step for {name}",
                            f"gpu_step({flags!r}, {path!r}, {step!r}, {name!r})")
    return dict(fault=fault) if fault else json.loads(line)


def gpu_step(flags, path, step, name):
    """Prints what compile_for_gpu() returns."""
    c = configurator.configure(train.__file__, flags)
    print(json.dumps(aot_gpu.compile_step(c, path, step, name)))


def description(head, f):
    """The figures of a compiled step as lines for people."""
    if "fault" in f:
        return f"{head} DOES NOT COMPILE: {f['fault']}"
    lines = []
    if f["float64_matmuls"]:
        places = ", ".join(f["float64_matmuls"])
        lines.append(f"float64 matmul, which TPUs emulate many times slower: {places}")
    fits = "fits" if f["free_gb"] >= 0 else "DOES NOT FIT"
    lines.append(f"{f['batch_per_chip']} sequences a chip: {fits}, {f['free_gb']:.1f} GB free beside "
                 f"arguments {f['arguments_gb']:.2f}, results {f['outputs_gb']:.2f}, "
                 f"temporaries {f['temporaries_gb']:.2f} and code {f['code_gb']:.2f}; "
                 f"compiled here in {f['compile_s']:.0f} s")
    estimate = "its estimate and collectives are unknown (jaxlib cannot read this program)"
    if f["collectives"] is not None:
        collectives = ", ".join(f"{kind} of {size / 1e6:.1f} MB" for kind, size in f["collectives"])
        estimate = f"the compiler estimates {f['estimated_ms']:.1f} ms; collectives: {collectives or 'none'}"
    lines.append(f"{f['tflop']:.2f} TFLOP, {f['arithmetic_ms']:.1f} ms at the chip's peak; {estimate}")
    lines.append(f"{f['examples_per_sec']:,.0f} examples/s on {f['chips']} chips at that time")
    return "\n".join([f"{head} {lines[0]}"] + [f"{'':{len(head)}} {line}" for line in lines[1:]])


def compile_steps(c, flags, path, name, steps):
    """Compiles steps, of STEPS, for a slice: {step: figures, or {"fault": text}}. Raises UserError.

    path: of the dataset.
    """
    chip, chips = chip_and_count(name)
    multiple = chips * (c.micro_batch_size or 1)
    if c.global_batch_size % multiple:
        raise UserError(f"global_batch_size {c.global_batch_size} must be a multiple of {multiple} "
                        f"for {name}")
    batch_per_chip, found = c.global_batch_size // chips, {}
    forward, training = bench.new_model(c, Dataset(path, "train")).flops_per_example()
    flops = dict(train=training, eval=forward)
    with tempfile.TemporaryDirectory() as folder:
        fault = trace(flags, path, batch_per_chip, min(chips, 2), name, folder)
        if fault:
            return {step: dict(fault=f"tracing: {fault}") for step in steps}
        for step in steps:
            found[step] = compile_for_tpu(os.path.join(folder, step), step, name, chips)
            if "fault" not in found[step]:
                found[step] |= dict(chips=chips, batch_per_chip=batch_per_chip)
                found[step] |= derived(found[step], flops[step] * batch_per_chip, chip)
    return found


def derived(f, flops, chip):
    """The figures that follow from the compiler's: the memory left, and the time of a step."""
    peak, memory, clock = CHIPS[chip]
    used = f["arguments_gb"] + f["outputs_gb"] + f["temporaries_gb"] + f["code_gb"]
    arithmetic_ms = 1e3 * flops / peak
    estimated_ms = 1e3 * f["cycles"] / clock if f["cycles"] else None
    return dict(
        tflop=flops / 1e12, free_gb=memory / 1e9 - used, arithmetic_ms=arithmetic_ms,
        estimated_ms=estimated_ms,
        examples_per_sec=1e3 * f["batch_per_chip"] * f["chips"] / (estimated_ms or arithmetic_ms))


def chip_and_count(name):
    """("v5e", 8) of v5e:2x4, ("h100", 8) of h100:8. Raises UserError."""
    gpu = re.fullmatch(rf"({'|'.join(aot_gpu.CARDS)})(?::([1-9]\d*))?", name)
    if gpu:
        return gpu[1], int(gpu[2] or 1)
    match = re.fullmatch(r"(v4|v5e|v5p|v6e):([1-9]\d*(?:x[1-9]\d*){1,2})", name)
    if not match:
        raise UserError(f"{name!r} is no TPU slice and no GPU: write v4:2x2x1, v5e:2x4, v5p:2x2x1, v6e:2x2, "
                        f"{', '.join(aot_gpu.CARDS)} or {next(iter(aot_gpu.CARDS))}:8")
    return match[1], math.prod(map(int, match[2].split("x")))


# The price of a run.

def show_price(c, flags, path, source, name, rate):
    """Prints the steps, hours and bytes of a run on a slice. rate: examples/s, or 0 for an estimate."""
    _, chips = chip_and_count(name)
    data = Dataset(path, "train")
    puzzles, model = train.epoch_size(data), bench.new_model(c, data)
    steps = train.count_steps(c, puzzles)
    parameters = sum(p.numel() for p in model.parameters())
    checkpoint_gb = 4 * parameters * (3 + c.ema) / 1e9
    saves = math.ceil(steps / c.checkpoint_interval) if c.checkpoint_interval else 1
    evaluations = sum(train.evaluation_due(c, puzzles, step) for step in range(1, steps))
    speed, reason = rate, "measured, as --rate says"
    if not rate:
        speed, reason = fastest(c, flags, path, name, model)
    hours = steps * c.global_batch_size / speed / 3600
    stored = min(saves, c.keep_last_n) + 1
    out = dict(
        slice=name, chips=chips, steps=steps, parameters=parameters, examples_per_sec=speed,
        measured=bool(rate), hours=hours, chip_hours=chips * hours, checkpoints=saves,
        checkpoint_gb=checkpoint_gb, uploaded_gb=saves * checkpoint_gb, stored_gb=stored * checkpoint_gb,
        evaluations=evaluations)
    print(f"dataset      {source}: {puzzles:,.0f} puzzles an epoch\n"
          f"steps        {steps:,} of {c.global_batch_size} sequences, {parameters:,} parameters\n"
          f"speed        {speed:,.0f} examples/s on {name}, {chips} chips ({reason})\n"
          f"training     {hours:.2f} hours, {chips * hours:.1f} chip-hours, without compiling (minutes) and "
          f"{evaluations} evaluations during training\n"
          f"checkpoints  {saves} of {checkpoint_gb:.3f} GB: {saves * checkpoint_gb:.2f} GB written, and "
          "uploaded with gcs_dir (egress, if the bucket is in another region); "
          f"{stored * checkpoint_gb:.2f} GB stored at a time")
    print(json.dumps(out))


def fastest(c, flags, path, name, model):
    """(examples/s that a run on the slice or the GPUs may reach, how that is known)."""
    chip, chips = chip_and_count(name)
    if chip in aot_gpu.CARDS and not aot_gpu.untried():
        figures = compile_for_gpu(c, flags, path, chip, chips, "train")
        if "fault" in figures:
            raise UserError(f"{name}: the step does not compile: {figures['fault']}")
        return (1e3 * c.global_batch_size / figures["estimated_ms"],
                "an estimate from bytes and FLOPs, which no run has confirmed")
    if chip in aot_gpu.CARDS:
        peak = chips * aot_gpu.CARDS[chip].peak
        return peak / model.flops_per_example()[1], f"arithmetic at the GPU's peak: {aot_gpu.untried()}"
    if not has_compiler():
        reason = "arithmetic at the chip's peak, which no run reaches; pip install jax libtpu estimates it"
        return chips * CHIPS[chip][0] / model.flops_per_example()[1], reason
    figures = compile_steps(c, flags, path, name, ["train"])["train"]
    if "fault" in figures:
        raise UserError(f"{name}: the step does not compile: {figures['fault']}")
    if figures["estimated_ms"]:
        return figures["examples_per_sec"], "the compiler's estimate, which no run has confirmed"
    return figures["examples_per_sec"], "arithmetic at the chip's peak, which no run reaches"


def has_compiler():
    return all(importlib.util.find_spec(package) for package in ("jax", "libtpu"))


# Tracing and compiling, each in a process of its own: a compiler that crashes must leave a message.

def run_child(label, call, **env):
    """Runs aot.CALL in another process: (its last line, None), or (None, what went wrong)."""
    code = (f"import os, sys; sys.path.insert(0, {HERE!r}); import aot; "
            f"os.getppid() == {os.getpid()} or sys.exit(1); aot.end_with_parent(); aot.{call}")
    began = time.monotonic()
    command, env = [sys.executable, "-c", code], {**os.environ, **env}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    print(label, file=sys.stderr, flush=True)
    while True:
        try:
            output, errors = process.communicate(timeout=10)
            break
        except subprocess.TimeoutExpired:
            print(f"{label}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    if not process.returncode:
        return (output.splitlines() or [""])[-1], None
    lines = errors.strip().splitlines() or [f"exit code {process.returncode}"]
    found = [line for line in lines if re.match(r"[\w.]*(Error|Exception|NotReplayable)\b", line)]
    return None, " ".join((found or lines)[-1].removeprefix("device.NotReplayable: ").split())[:500]


def trace(flags, path, batch_per_chip, replicas, name, folder):
    """Traces both steps on the CPU, into folder/{train,eval}.pb. Returns what went wrong, or None.

    replicas: 1 or 2; the all-reduce of two fits any number of them.
    """
    flags = [*flags, f"--global_batch_size={batch_per_chip * replicas}", "--device=xla"]
    return run_child(f"tracing for {name}", f"trace_steps({folder!r}, {flags!r}, {path!r})",
                     PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(replicas), XLA_THREAD_POOL_SIZE="16",
                     XLA_IR_DEBUG="1", XLA_HLO_DEBUG="1")[1]


def trace_steps(folder, flags, path):
    """Runs trace_replica() on as many replicas as CPU_NUM_DEVICES says."""
    import torch_xla.distributed.xla_multiprocessing as xmp
    c = configurator.configure(train.__file__, flags)
    xmp.spawn(trace_replica, args=(folder, c, path))


def trace_replica(index, folder, c, path):
    """Writes the two steps, as train.py would have them compiled, to folder/{train,eval}.pb.

    folder/{train,eval}.json lists the lines with float64 matmuls.
    """
    end_with_parent()
    device = open_device("xla", c)
    run, next_inputs = bench.new_run(c, device, path)
    steps = dict(train=(run.train_step, run.state, next_inputs()),
                 eval=(run.eval_step, *bench.evaluation_of(run, path)))
    for name, step in steps.items():
        with LAUNCH, torch.no_grad():
            hlo = lower(device, *step)
        if device.rank == 0:
            with open(os.path.join(folder, f"{name}.pb"), "wb") as f:
                f.write(hlo)
            text = device.xb.get_computation_hlo(device.xb.computation_from_module_proto(name, hlo))
            with open(os.path.join(folder, f"{name}.json"), "w") as f:
                json.dump(float64_matmuls(text), f)


def lower(device, step, state, inputs):
    """A step's program. Raises NotReplayable, with the line, where a shape or a branch depends on data."""
    try:
        with Replayable():
            return device.lower(step, state, inputs)[0].hlo()
    except NotReplayable as e:
        if "random numbers" not in str(e):  # a step that draws them compiles, but is traced at each call
            raise
        print(e, file=sys.stderr)
        return device.lower(step, state, inputs)[0].hlo()


def float64_matmuls(text):
    """Lines of our files with float64 matmuls, of a program's text that names its sources."""
    matmuls = [line for line in text.splitlines() if re.search(r"f64\[.* dot\(", line)]
    sources = [re.search(r'source_file="([^"]*)" source_line=(\d+)', line) for line in matmuls]
    names = {(os.path.basename(source[1]), source[2]) for source in sources if source}
    places = {f"{name}:{line}" for name, line in names if os.path.exists(os.path.join(ROOT, name))}
    if matmuls and not places:
        return ["somewhere"]
    return sorted(places)  # without their backward passes, which are elsewhere


def compile_for_tpu(path, step, name, chips):
    """Compiles path.pb for a slice: the compiler's figures, or {"fault": text}. Raises UserError."""
    line, fault = run_child(
        f"compiling the {step} step for {name}", f"compile_step({path + '.pb'!r}, {name!r}, {chips})",
        JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        TPU_ACCELERATOR_TYPE="v5litepod-8", TPU_WORKER_HOSTNAMES="localhost")
    if fault and "Topology" in fault:
        raise UserError(f"{name}: the TPU compiler knows no such slice: {fault}")
    if fault:
        return dict(fault=fault)
    with open(path + ".json") as f:
        return json.loads(line) | dict(float64_matmuls=json.load(f))


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
    print(json.dumps(dict(
        compile_s=seconds,
        arguments_gb=memory.argument_size_in_bytes / 1e9,
        outputs_gb=memory.output_size_in_bytes / 1e9,
        temporaries_gb=memory.temp_size_in_bytes / 1e9,
        code_gb=memory.generated_code_size_in_bytes / 1e9,
        compiler_tflop=program.cost_analysis()["flops"] / 1e12,
        cycles=estimated_cycles(*read_program(text)) if text else None,
        collectives=collectives(text) if text else None)))


# The text of a compiled program (HLO).

def read_program(text):
    """({name: lines} of all computations of a program, the name of the one where it starts)."""
    bodies, entry = {}, None
    for part in re.split(r"\n(?=(?:ENTRY )?%[\w.\-]+ \()", text):
        head = re.match(r"(ENTRY )?%([\w.\-]+) \(", part)
        if head:
            bodies[head[2]] = part.splitlines()[1:]
            entry = head[2] if head[1] else entry
    return bodies, entry


def estimated_cycles(bodies, name):
    """Cycles that the compiler estimates for the computation of that name; a loop's as often as it runs."""
    total = 0
    for line in bodies[name]:
        cycles = re.search(r'"estimated_cycles":"(\d+)"', line)
        if " while(" in line:
            condition, body = (re.search(rf"{key}=%([\w.\-]+)", line)[1] for key in ("condition", "body"))
            constants = re.findall(r" = [su]32\[\]\S* constant\((\d+)\)", "\n".join(bodies[condition]))
            times = max(map(int, constants), default=1)  # it counts up to a constant
            total += times * estimated_cycles(bodies, body)
        elif cycles:
            total += int(cycles[1])
    return total


def collectives(text):
    """[(kind, bytes)] of a program's collectives."""
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    found = []
    for shape, kind in re.findall(rf" = (.*?) ({kinds})(?:-start)?\(", text):
        arrays = re.findall(r"[a-z]+(\d*)\[([\d,]*)\]", shape)  # of (f32[2,3]{1,0}, pred[])
        found.append((kind, sum(int(bits or 8) // 8 * math.prod(int(n) for n in dimensions.split(",") if n)
                                for bits, dimensions in arrays)))
    return found


def main(argv):
    """Sorts the flags into aot.py's and train.py's, and does what they ask for."""
    own, operands, flags = configurator.split_arguments(__file__, argv)
    flags = [*operands, *flags]
    c = configurator.configure(train.__file__, flags)
    train.check_settings(c)
    if sum(map(bool, (own.slices, own.gpus, own.plan))) != 1:
        raise UserError("give one of --slices=v5e:2x4,v6e:2x2, --gpus=h100,a100 and --plan=v5e:2x4")
    if own.rate and not own.plan:
        raise UserError("--rate needs --plan=v5e:2x4, the slice on which it was measured")
    if not 0 <= own.rate < math.inf:
        raise UserError(f"--rate={own.rate}: must be examples/s, above 0")
    names = (own.slices or own.gpus or own.plan).split(",")
    for name in names:
        is_gpu = chip_and_count(name)[0] in aot_gpu.CARDS
        if own.gpus and name not in aot_gpu.CARDS or own.slices and is_gpu:
            raise UserError(f"{name!r}: --slices takes TPU slices, --gpus {', '.join(aot_gpu.CARDS)}")
    if own.gpus and aot_gpu.untried():
        raise TransientError(f"--gpus: {aot_gpu.untried()}")
    if own.slices and not has_compiler():
        raise UserError("--slices needs the TPU compiler: pip install jax libtpu")
    with tempfile.TemporaryDirectory() as folder:
        path, source = bench.dataset_path(c, folder)
        path = os.path.abspath(path)
        if own.gpus:
            show_gpus(c, flags, path, names)
        elif own.plan:
            show_price(c, flags, path, source, names[0], own.rate)
        else:
            show_slices(c, flags, path, names)


if __name__ == "__main__":
    configurator.command(lambda: main(sys.argv[1:]), __file__)
