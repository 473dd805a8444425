"""What the TPU's own compiler makes of train.py's steps, and the hours of a run, without a TPU.

    pip install jax libtpu
    python scripts/aot.py config/baseline.py --slices=v5e:2x4,v6e:2x2     memory, time, collectives

The steps are traced on the CPU and compiled by libtpu. Nothing runs, and no TPU has confirmed the estimates.
Where data_path is missing, random puzzles take its place. The settings below are aot.py's own, all others
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
from types import SimpleNamespace
from typing import NamedTuple

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))
import numpy as np
import torch

import bench
import configurator
import optim
import train
from configurator import UserError, end_with_parent
from data import Dataset
from device import PEAK_FLOPS, open_device

# what to compile for
slices = ""  # TPU slices to compile for: v5e:2x4,v6e:2x2,v4:2x2x1

# Bytes of a chip's memory as its maker states them, and cycles/s: the peak FLOP/s divided by the FLOP of all
# matrix units in a cycle.
MEMORY = {"v4": 32e9, "v5e": 16e9, "v5p": 95e9, "v6e": 32e9}
CLOCK = {"v4": 1.05e9, "v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9}


class Slice(NamedTuple):
    """A TPU slice: v5e:2x4 has the name v5e:2x4, the chip v5e and 8 chips."""
    name: str
    chip: str
    chips: int


def main(argv):
    """Prints figures for each slice. Raises UserError at the first step that does not compile."""
    aot_settings, operands, flags = configurator.split_arguments(__file__, argv)
    flags = [*operands, *flags]
    settings = configurator.configure(train.__file__, flags)
    train.check_settings(settings)
    tpu_slices = [parse_slice(name, settings) for name in aot_settings.slices.split(",")]
    if not importlib.util.find_spec("libtpu"):
        raise UserError("the TPU compiler is missing: pip install jax libtpu")

    results = {}
    with tempfile.TemporaryDirectory() as folder:
        path, source = bench.dataset_path(settings, folder)
        print(f"dataset: {source}")
        for tpu_slice in tpu_slices:
            figures = compile_steps(settings, flags, path, tpu_slice)
            figures["run"] = hours_of(settings, path, tpu_slice, figures["train"]["examples_per_sec"])
            results[tpu_slice.name] = figures
            # lines for people; the JSON object at the end has all digits
            for title, values in figures.items():
                print(f"{tpu_slice.name} {title}:")
                for name, value in values.items():
                    text = f"{value:,.4g}" if isinstance(value, float) else value
                    print(f"  {name:16} {text}", flush=True)
    print(json.dumps(results))


def parse_slice(name, settings):
    """Returns the Slice of this name. Raises UserError, also if its chips cannot share a batch evenly."""
    match = re.fullmatch(r"(v4|v5e|v5p|v6e):([1-9]\d*(?:x[1-9]\d*){1,2})", name)
    if not match:
        raise UserError(f"{name!r} is no TPU slice: --slices takes v4:2x2x1, v5e:2x4, v5p:2x2x1 or v6e:2x2")
    chip, topology = match.groups()
    chips = math.prod(map(int, topology.split("x")))
    train.check_batch_size(settings, SimpleNamespace(world=chips))
    return Slice(name, chip, chips)


def hours_of(settings, path, tpu_slice, rate):
    """Returns the steps and hours of a run; rate: examples/s of the slice.

    The hours leave out compiling (minutes) and the evaluations.
    """
    steps = optim.count_steps(settings, optim.epoch_size(Dataset(path, "train")))
    hours = steps * settings.global_batch_size / rate / 3600
    return dict(steps=steps, hours=hours, chip_hours=tpu_slice.chips * hours)


def compile_steps(settings, flags, path, tpu_slice):
    """Compiles the training and the evaluation step for a slice.

    Args:
        settings: train.py's.
        flags: the arguments that gave these settings.
        path: of the dataset.
        tpu_slice: a Slice.

    Returns:
        {"train": figures, "eval": figures}

    Raises:
        UserError: a step cannot be traced or compiled, or does not fit.
    """
    batch_per_chip = settings.global_batch_size // tpu_slice.chips
    replicas = min(tpu_slice.chips, 2)  # the all-reduce of two fits any number of them
    flags = [*flags, f"--global_batch_size={batch_per_chip * replicas}", "--device=xla"]
    forward, training = bench.new_model(settings, Dataset(path, "train")).flops_per_example()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        # the programs, on replicas of torch_xla on the CPU
        run_child(f"{tpu_slice.name}: tracing", f"trace_steps({folder!r}, {flags!r}, {path!r})",
                  PJRT_DEVICE="CPU", CPU_NUM_DEVICES=str(replicas), XLA_THREAD_POOL_SIZE="16")
        # the environment keeps libtpu from asking a cloud which TPU it is on
        for step, flops in ("train", training * batch_per_chip), ("eval", forward * batch_per_chip):
            results[step] = run_child(
                f"{tpu_slice.name}: compiling the {step} step",
                f"compile_for({os.path.join(folder, step)!r}, aot.{tpu_slice}, {batch_per_chip}, {flops})",
                JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1",
                TPU_ACCELERATOR_TYPE="v5litepod-8", TPU_WORKER_HOSTNAMES="localhost")
    return results


# Tracing and compiling, each in a process of its own: a compiler that crashes must leave a message.

def run_child(label, call, **environment):
    """Runs aot.CALL in another process. Returns the JSON object in its last line. Raises UserError."""
    code = f"import sys; sys.path.insert(0, {HERE!r}); import aot; aot.end_with_parent(); aot.{call}"
    print(f"{label}, which can take minutes", file=sys.stderr, flush=True)
    process = subprocess.run([sys.executable, "-c", code], env=os.environ | environment,
                             capture_output=True, text=True)
    if process.returncode:
        # the last error of a traceback, or what a compiler that crashed printed last
        errors = re.findall(r"^[\w.]*(?:Error|NotReplayable)\b.*", process.stderr, re.M)
        raise UserError(f"{label}: {(errors or process.stderr.splitlines())[-1]}")
    return json.loads(process.stdout.splitlines()[-1])


def trace_steps(folder, flags, path):
    """Traces both steps on the CPU: trace_replica() on as many replicas as CPU_NUM_DEVICES says."""
    import torch_xla.distributed.xla_multiprocessing as xmp
    settings = configurator.configure(train.__file__, flags)
    xmp.spawn(trace_replica, args=(folder, settings, path))
    print("{}")


def trace_replica(index, folder, settings, path):
    """Writes the two steps, as train.py would have them compiled, to folder/train and folder/eval.

    Raises NotReplayable, with the line, where a shape or a branch depends on data.
    """
    end_with_parent()
    from xla import LAUNCH, Replayable  # torch_xla takes its device from the environment of this process
    device = open_device("xla", settings)
    run, next_inputs = bench.new_run(settings, device, path)
    steps = dict(
        train=(lambda state, inputs: train.train_step(run, state, inputs), run.state, next_inputs()),
        eval=(run.evaluator.step, *bench.evaluation_of(run, path)),
    )
    for name, step in steps.items():
        with LAUNCH, Replayable(), torch.no_grad():
            program = device.lower(*step)[0].hlo()
        if device.rank == 0:
            with open(os.path.join(folder, name), "wb") as f:
                f.write(program)


def compile_for(path, tpu_slice, batch_per_chip, flops):
    """Compiles the program at path for a slice with libtpu. Prints its figures as a line of JSON.

    flops: FLOP of a step on one chip, counted from the model.
    """
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax.experimental import topologies
    from jaxlib.mlir import ir
    topology = topologies.get_topology_desc(topology_name=tpu_slice.name, platform="tpu")
    devices = topology.devices[:tpu_slice.chips]
    options = compiler.get_compile_options(
        num_replicas=len(devices), num_partitions=1, device_assignment=np.array([[d.id] for d in devices]))
    # torch_xla's program (HLO) in the form that the compiler takes
    with open(path, "rb") as f, mlir.make_ir_context():
        module = ir.Module.parse(xla_client._xla.mlir.hlo_to_stablehlo(f.read()))
        program = devices[0].client.compile(module, xla_client._xla.DeviceList(tuple(devices)), options)

    # what the compiler says
    memory = program.get_compiled_memory_stats()
    used = (memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
            + memory.generated_code_size_in_bytes)
    # at the chip's peak, and as estimated
    arithmetic_ms = 1e3 * flops / PEAK_FLOPS["TPU " + tpu_slice.chip]
    milliseconds = arithmetic_ms
    figures = {}
    try:
        text = program.hlo_modules()[0].to_string()
        milliseconds = 1e3 * estimated_cycles(*read_program(text)) / CLOCK[tpu_slice.chip]
        figures = dict(estimated_ms=milliseconds, collectives=collectives(text))
    except xla_client.XlaRuntimeError:  # jaxlib 0.10.2 cannot read a program for v6e
        pass
    print(json.dumps(figures | dict(
        examples_per_sec=1e3 * batch_per_chip * tpu_slice.chips / milliseconds,
        tflop=flops / 1e12,
        arithmetic_ms=arithmetic_ms,
        arguments_gb=memory.argument_size_in_bytes / 1e9,
        temporaries_gb=memory.temp_size_in_bytes / 1e9,
        used_gb=used / 1e9,
        chip_gb=MEMORY[tpu_slice.chip] / 1e9)))


# The text of a compiled program (HLO).

def read_program(text):
    """Returns {name: text} of all computations of a program, and the name of the one where it starts."""
    computations = {}
    entry = None
    pattern = r"^(ENTRY )?%([\w.\-]+) \((.*?)^}(?!\))"
    for is_entry, name, body in re.findall(pattern, text, re.M | re.S):
        computations[name] = body
        if is_entry:
            entry = name
    return computations, entry


def estimated_cycles(computations, name):
    """Returns the cycles that the compiler estimates for a computation, all iterations of loops included."""
    total = 0
    for line in computations[name].splitlines():
        cycles = re.search(r'"estimated_cycles":"(\d+)"', line)
        if " while(" in line:
            # a loop counts up to the constant in its condition
            condition, body = re.search(r"condition=%([\w.\-]+), body=%([\w.\-]+)", line).groups()
            constants = re.findall(r" = [su]32\[\]\S* constant\((\d+)\)", computations[condition])
            iterations = max(map(int, constants), default=1)
            total += iterations * estimated_cycles(computations, body)
        elif cycles:
            total += int(cycles[1])
    return total


def collectives(text):
    """Returns what a program's collectives return, as ["all-reduce f32[5028931]"]."""
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    matches = re.findall(rf" = (.*?) ({kinds})(?:-start)?\(", text)
    return [f"{kind} {re.sub('{.*?}', '', shape)}" for shape, kind in matches]


if __name__ == "__main__":
    configurator.command(lambda: main(sys.argv[1:]), __file__)
