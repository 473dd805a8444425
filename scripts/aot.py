"""What a TPU or a GPU makes of train.py's steps, and the price of a run, without either.

    pip install jax libtpu                            for --slices, and --plan of a slice
    python scripts/aot.py config/baseline.py --slices=v5e:2x4,v6e:2x2     memory, collectives, estimated time
    python scripts/aot.py config/sudoku.py --gpus=h100,a100,rtx4090,t4    kernels, traffic, memory, estimates
    python scripts/aot.py config/baseline.py --plan=v5e:2x4               steps, hours and bytes of a run
    python scripts/aot.py config/sudoku.py --plan=h100:8 --rate=9000      the same at a measured speed

The steps are traced on the CPU and compiled by libtpu, the TPU's own compiler, or by Inductor and Triton with
NVIDIA's assembler: scripts/aot_gpu.py. Nothing runs, and no device has confirmed the estimates. Where
data_path is missing, random puzzles take its place. The settings below are aot.py's own, all others
train.py's. The last line is one JSON object.
"""
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import textwrap
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
from device import LAUNCH, Replayable, end_with_parent, open_device
from model import flatten, optimizer_state

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


def main(argv):
    """Sorts the flags into aot.py's and train.py's, and does what they ask for."""
    own, operands, flags = configurator.split_arguments(__file__, argv)
    flags = [*operands, *flags]
    c = configurator.configure(train.__file__, flags)
    train.check_settings(c)
    if sum(map(bool, (own.slices, own.gpus, own.plan))) != 1:
        raise UserError("give one of --slices=v5e:2x4,v6e:2x2, --gpus=h100,a100 and --plan=v5e:2x4")
    if own.rate and not own.plan or not 0 <= own.rate < math.inf:
        raise UserError(f"--rate={own.rate}: must be examples/s, above 0, measured on --plan=v5e:2x4")
    names = (own.slices or own.gpus or own.plan).split(",")
    for name in names:
        chip, count = chip_and_count(name)
        is_gpu, multiple = chip in aot_gpu.CARDS, count * (c.micro_batch_size or 1)
        if c.global_batch_size % multiple:
            raise UserError(f"global_batch_size {c.global_batch_size} must be a multiple of {multiple} "
                            f"for {name}")
        if own.gpus and name not in aot_gpu.CARDS or own.slices and is_gpu:
            raise UserError(f"{name!r}: --slices takes TPU slices, --gpus {', '.join(aot_gpu.CARDS)}")
    if not own.rate and is_gpu and aot_gpu.untried():
        raise TransientError(f"{aot_gpu.untried()}; --plan with --rate needs no compiler")
    if not own.rate and not is_gpu and not all(map(importlib.util.find_spec, ("jax", "libtpu"))):
        raise UserError("the TPU compiler is missing: pip install jax libtpu; --plan with --rate needs none")
    with tempfile.TemporaryDirectory() as folder:
        path, source = bench.dataset_path(c, folder)
        path = os.path.abspath(path)
        if own.plan:
            show_price(c, flags, path, source, own.plan, own.rate)
        else:
            show_steps(c, flags, path, names)


def chip_and_count(name):
    """("v5e", 8) of v5e:2x4, ("h100", 8) of h100:8. Raises UserError."""
    gpu = re.fullmatch(rf"({'|'.join(aot_gpu.CARDS)})(?::([1-9]\d*))?", name)
    if gpu:
        return gpu[1], int(gpu[2] or 1)
    match = re.fullmatch(r"(v4|v5e|v5p|v6e):([1-9]\d*(?:x[1-9]\d*){1,2})", name)
    if not match:
        raise UserError(f"{name!r} is no TPU slice and no GPU: write v4:2x2x1, v5e:2x4, v5p:2x2x1, v6e:2x2, "
                        f"{', '.join(aot_gpu.CARDS)} or h100:8")
    return match[1], math.prod(map(int, match[2].split("x")))


def show_steps(c, flags, path, names):
    """Compiles both steps for each slice or GPU, prints the figures, and exits with 1 if one fails."""
    found = {}
    for name in names:
        found[name] = compile_steps(c, flags, path, name, STEPS)
        for step, figures in found[name].items():
            print(description(f"{name} {step}", figures), flush=True)
    print(json.dumps(found))
    if any("fault" in figures for steps in found.values() for figures in steps.values()):
        sys.exit(1)


def description(head, figures):
    """The figures of a compiled step as lines for people."""
    if "fault" in figures:
        return f"{head} DOES NOT COMPILE: {figures['fault']}"
    return f"{head}: {'fits' if figures['free_gb'] >= 0 else 'DOES NOT FIT'}\n{listed(figures)}"


def listed(figures):
    texts = [f"{name} {value:,.4g}" if isinstance(value, float) else f"{name} {value}"
             for name, value in figures.items()]
    return textwrap.fill(", ".join(texts), 110, initial_indent="  ", subsequent_indent="  ")


def show_price(c, flags, path, source, name, rate):
    """Prints the steps, hours and bytes of a run. rate: examples/s, or 0 for an estimate."""
    _, chips = chip_and_count(name)
    data = Dataset(path, "train")
    puzzles, model = train.epoch_size(data), bench.new_model(c, data)
    steps = train.count_steps(c, puzzles)
    weights, shapes = flatten(model.parameters()), {name: p.shape for name, p in model.named_parameters()}
    moments = optimizer_state(c, shapes, weights).values()
    checkpoint_gb = 4 * ((1 + c.ema) * len(weights) + sum(t.numel() for t in moments)) / 1e9
    saves = math.ceil(steps / c.checkpoint_interval) if c.checkpoint_interval else 1
    stored = min(saves, c.keep_last_n) + 1
    speed, reason = rate, "at the measured speed"
    if not rate:
        figures = compile_steps(c, flags, path, name, ["train"])["train"]
        if "fault" in figures:
            raise UserError(f"{name}: the step does not compile: {figures['fault']}")
        speed, reason = figures["examples_per_sec"], "at the compiler's estimate, which no run has confirmed"
        if not figures["estimated_ms"]:
            reason = "at the chip's peak, as there is no estimate"
    hours = steps * c.global_batch_size / speed / 3600
    found = dict(
        slice=name, chips=chips, steps=steps, parameters=len(weights), examples_per_sec=speed,
        measured=bool(rate), hours=hours, chip_hours=chips * hours, checkpoints=saves,
        checkpoint_gb=checkpoint_gb, uploaded_gb=saves * checkpoint_gb, stored_gb=stored * checkpoint_gb,
        evaluations=sum(train.evaluation_due(c, puzzles, step) for step in range(1, steps)))
    print(f"{name}, {reason}; dataset: {source}\n{listed(found)}")
    print("the hours leave out compiling (minutes) and the evaluations")
    print(json.dumps(found))


def compile_steps(c, flags, path, name, steps):
    """Compiles steps, of STEPS, for a slice or GPUs: {step: figures, or {"fault": text}}. Raises UserError.

    path: of the dataset.
    """
    chip, count = chip_and_count(name)
    batch_per_chip = c.global_batch_size // count
    if chip in aot_gpu.CARDS:
        flags = [*flags, f"--global_batch_size={batch_per_chip}"]
        found = {step: run_child(f"compiling the {step} step for {name}",
                                 f"aot_gpu.compile_step({flags!r}, {path!r}, {step!r}, {chip!r})")
                 for step in steps}
    else:
        found = compile_for_tpu(c, flags, path, name, steps, batch_per_chip)
    for f in found.values():
        if "fault" not in f:
            ms = f["estimated_ms"] or f["arithmetic_ms"]
            f |= dict(chips=count, batch_per_chip=batch_per_chip,
                      examples_per_sec=1e3 * c.global_batch_size / ms)
    return found


def compile_for_tpu(c, flags, path, name, steps, batch_per_chip):
    """compile_steps for a slice."""
    chip, chips = chip_and_count(name)
    peak, memory, clock = CHIPS[chip]
    forward, training = bench.new_model(c, Dataset(path, "train")).flops_per_example()
    flops = dict(train=training * batch_per_chip, eval=forward * batch_per_chip)
    replicas = min(chips, 2)  # the all-reduce of two fits any number of them
    flags = [*flags, f"--global_batch_size={batch_per_chip * replicas}", "--device=xla"]
    with tempfile.TemporaryDirectory() as folder:
        traced = run_child(f"tracing for {name}", f"trace_steps({folder!r}, {flags!r}, {path!r})",
                           PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(replicas), XLA_THREAD_POOL_SIZE="16")
        if "fault" in traced:
            return {step: dict(fault=f"tracing: {traced['fault']}") for step in steps}
        found = {step: run_child(
            f"compiling the {step} step for {name}",
            f"compile_step({os.path.join(folder, step + '.pb')!r}, {name!r}, {chips})",
            JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1",
            TPU_ACCELERATOR_TYPE="v5litepod-8", TPU_WORKER_HOSTNAMES="localhost") for step in steps}
    for step, f in found.items():
        if "Topology" in f.get("fault", ""):
            raise UserError(f"{name}: the TPU compiler knows no such slice: {f['fault']}")
        if "fault" not in f:
            used = f["arguments_gb"] + f["outputs_gb"] + f["temporaries_gb"] + f["code_gb"]
            f |= dict(tflop=flops[step] / 1e12, free_gb=memory / 1e9 - used,
                      arithmetic_ms=1e3 * flops[step] / peak,
                      estimated_ms=f["cycles"] and 1e3 * f["cycles"] / clock)
    return found


# Tracing and compiling, each in a process of its own: a compiler that crashes must leave a message.

def run_child(label, call, **env):
    """Runs aot.CALL in another process: the JSON object in its last line, or {"fault": what went wrong}."""
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
        return json.loads(output.splitlines()[-1])
    lines = errors.strip().splitlines() or [f"exit code {process.returncode}"]
    found = [line for line in lines if re.match(r"[\w.]*(Error|Exception|NotReplayable)\b", line)]
    return dict(fault=" ".join((found or lines)[-1].removeprefix("device.NotReplayable: ").split())[:500])


def trace_steps(folder, flags, path):
    """Traces both steps on the CPU: trace_replica() on as many replicas as CPU_NUM_DEVICES says."""
    import torch_xla.distributed.xla_multiprocessing as xmp
    c = configurator.configure(train.__file__, flags)
    xmp.spawn(trace_replica, args=(folder, c, path))
    print("{}")


def trace_replica(index, folder, c, path):
    """Writes the two steps, as train.py would have them compiled, to folder/{train,eval}.pb.

    Raises NotReplayable, with the line, where a shape or a branch depends on data.
    """
    end_with_parent()
    device = open_device("xla", c)
    run, next_inputs = bench.new_run(c, device, path)
    steps = dict(train=(run.train_step, run.state, next_inputs()),
                 eval=(run.eval_step, *bench.evaluation_of(run, path)))
    for name, step in steps.items():
        with LAUNCH, Replayable(), torch.no_grad():
            hlo = device.lower(*step)[0].hlo()
        if device.rank == 0:
            with open(os.path.join(folder, f"{name}.pb"), "wb") as f:
                f.write(hlo)


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
    """What a program's collectives return, as ["all-reduce f32[5028931]"]."""
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf" = (.*?) ({kinds})(?:-start)?\(", text)
    return [f"{kind} {re.sub('{.*?}', '', shape)}" for shape, kind in found]


if __name__ == "__main__":
    configurator.command(lambda: main(sys.argv[1:]), __file__)
