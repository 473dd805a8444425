"""Compiles train.py's two steps with the TPU's own compiler, without a TPU.

    pip install jax==0.10.2 libtpu==0.0.51      in an environment without torch_xla[tpu], which needs 0.0.21
    python scripts/aot.py config/baseline.py --tpu=v4-32

It compiles the programs of the engine that is installed. For TorchTPU, also install what on_cpu.py needs:

    pip install jax==0.10.2                     beside requirements-torchtpu.txt
    python tests/torchtpu/on_cpu.py scripts/aot.py config/baseline.py --tpu=v5e-8

It says whether the steps compile and fit, and how many tensors of the state they overwrite ("donated"). It
estimates their time twice: the compiler's cost model sees a program before it is scheduled; the sum of the
final schedules leaves out waits for memory and other chips. We expect the truth between them; no TPU has
confirmed either. Where data_path is missing, random puzzles take its place. The setting below is aot.py's
own, all others train.py's. The output ends with one JSON object.
"""
import importlib.util
import json
import math
import os
import re
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).parents[1]))
import numpy as np
import torch
from torch.utils._pytree import tree_leaves

import bench
import configurator
import train
from runtime import process
from runtime.errors import UserError
from runtime.replay import Replayable

# Slices in libtpu's words. The number in the name of a v4 or v5p counts cores, two per chip.
TOPOLOGIES = {
    "v4-8": "v4:2x2x1", "v4-16": "v4:2x2x2", "v4-32": "v4:2x2x4", "v4-64": "v4:2x4x4",
    "v5p-8": "v5p:2x2x1", "v5p-16": "v5p:2x2x2", "v5p-32": "v5p:2x2x4", "v5p-64": "v5p:2x4x4",
    "v5e-1": "v5e:1x1", "v5e-4": "v5e:2x2", "v5e-8": "v5e:2x4", "v5e-16": "v5e:4x4", "v5e-32": "v5e:4x8",
    "v6e-1": "v6e:1x1", "v6e-4": "v6e:2x2", "v6e-8": "v6e:2x4", "v6e-16": "v6e:4x4", "v6e-32": "v6e:4x8",
}


class Settings:
    # what to compile for
    tpu: configurator.one_of(TOPOLOGIES) = ""  # a TPU slice, such as v4-32, v5e-8 or v6e-4


# How torch_xla runs the cores of a chip, in libtpu's words: megacore joins two cores into one.
CORES = {"v4": "megacore", "v5p": "megacore", "v5e": "default", "v6e": "default"}
ALL_REDUCE = torch.ops._c10d_functional
# Cycles per second: the peak FLOP/s divided by the FLOP that all matrix units do in a cycle.
CLOCKS = {"v4": 1.05e9, "v5p": 1.75e9, "v5e": 1.5e9, "v6e": 1.75e9}


def main(argv):
    """Prints the figures of both steps. Raises UserError if one does not compile or fit."""
    aot_settings, operands, flags = configurator.split_arguments(Settings, argv)
    settings = configurator.configure(train.Settings, operands + flags)
    train.check_start_settings(settings)
    if not all(map(importlib.util.find_spec, ("libtpu", "jax"))):
        raise UserError("the TPU compiler is missing: see --help")

    # trace each step, then compile it
    topology = TOPOLOGIES[aot_settings.tpu]
    generation, shape = topology.split(":")
    replica, lower = open_engine(settings, math.prod(map(int, shape.split("x"))))
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        settings.data_path = bench.find_or_make_dataset(settings.data_path, folder)
        dump = Path(folder, "libtpu")
        for step, arguments in steps_of(settings, replica).items():
            program, state = lower(replica, *arguments)
            print(f"{topology}: compiling the {step} step, which can take minutes", flush=True)
            memory = compile_program(program, state, topology, CORES[generation], dump)
            figures[step] = memory | read_dump(dump, CLOCKS[generation])
            shutil.rmtree(dump)
    print(json.dumps(figures, indent=2))


# ---------------------------------------------------------------------------------------------------------
# The steps: trace them, compile them

def open_engine(settings, chips):
    """Returns a replica on one of `chips` chips, and the function that lowers its steps. Raises UserError."""
    if importlib.util.find_spec("torch_tpu"):
        if not os.environ.get("CPU_CLIENT"):
            raise UserError("TorchTPU needs a device: python tests/torchtpu/on_cpu.py scripts/aot.py ...")
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=chips)
        replica = train.open_device("tpu", settings)
        lower = lower_torchtpu
    else:
        # one replica of torch_xla on the CPU; the variable makes it keep the all-reduce
        os.environ.update(PJRT_DEVICE="CPU", XLA_ALWAYS_ALLREDUCE="1")
        replica = train.open_device("xla", settings)
        replica.name = "TPU"
        lower = lower_xla
    replica.world = chips
    return replica, lower


def lower_xla(replica, step, state, inputs):
    """Returns a step's program, HLO, and the numbers of its parameters that hold the state.

    Raises NotReplayable, with the line, where a shape or a branch depends on data.
    """
    with torch.no_grad(), Replayable():
        lowering, placeholders, _ = replica.lower(step, state, inputs)
    numbers = [lowering.tensor_parameter_id(t) for t in placeholders]
    return lowering.hlo(), numbers[:len(tree_leaves(state))]


def lower_torchtpu(replica, step, state, inputs):
    """Returns the same as lower_xla; this program is StableHLO."""
    from torch_tpu._internal.compile import tpu_torch_compile
    from torch_tpu._internal.execution_mode import EagerMode, set_eager_mode
    graph, constants, _ = replica.graph_of(step, state, inputs)
    tensors = [*tree_leaves((state, inputs)), *constants]
    # TorchTPU only writes an all-reduce for the chips that it has; until then another operation that no
    # model has stands for it
    for node in graph.graph.find_nodes(op="call_function", target=ALL_REDUCE.all_reduce.default):
        node.target = torch.ops.aten.expm1.default
        node.args = node.args[:1]
    for node in graph.graph.find_nodes(op="call_function", target=ALL_REDUCE.wait_tensor.default):
        node.replace_all_uses_with(node.args[0])
    graph.recompile()
    # what StaticCompiler does, but for the compilation
    placeholders = [tpu_torch_compile.placeholder_like(t, False) for t in tensors]
    with set_eager_mode(EagerMode._INTERNAL_COMPILE_FX_GRAPH):
        results = torch.fx.Interpreter(graph).run(*map(torch.clone, placeholders))
        module = tpu_torch_compile.build_mlir(results, placeholders)
    program = re.sub(
        r"stablehlo\.exponential_minus_one (%\S+) : (\S+)",
        rf'"stablehlo.all_reduce"(\1) <{{replica_groups = dense<{[[*range(replica.world)]]}> : '
        rf"tensor<1x{replica.world}xi64>}}> ({{ ^bb0(%a: tensor<f32>, %b: tensor<f32>): "
        r"%sum = stablehlo.add %a, %b : tensor<f32> stablehlo.return %sum : tensor<f32> }) : (\2) -> \2",
        tpu_torch_compile.serialize_mlir_text(module))
    return program, range(len(tree_leaves(state)))


def steps_of(settings, replica):
    """Returns {"train" or "eval": (its function, state, inputs)} of a replica."""
    replica.compile_step = lambda fn, **_: fn  # the programs are the steps themselves
    run, next_inputs = bench.new_run(settings, replica)
    cycles = settings.H_cycles, settings.L_cycles
    return dict(
        train=(partial(run.train_step, cycles=cycles), run.state, next_inputs()),
        eval=(run.evaluator.eval_step, *bench.evaluation_of(run, next_inputs())),
    )


def compile_program(program, state, topology, cores, dump):
    """Compiles a program for a slice, and returns the memory that it needs on a chip. Raises UserError.

    Args:
        program: HLO, or the text of StableHLO.
        state: numbers of parameters, whose memory the results may take.
        topology: the slice, in libtpu's words.
        cores: how its chips run their cores.
        dump: the folder for what libtpu writes.
    """
    # libtpu asks no cloud which TPU it has
    os.environ.pop("TPU_LIBRARY_PATH", None)  # on_cpu.py's
    os.environ.update(
        JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        TPU_ACCELERATOR_TYPE="v5litepod-8", TPU_WORKER_HOSTNAMES="localhost",
        XLA_FLAGS=f"--xla_dump_to={dump} --xla_dump_hlo_as_text",
        LIBTPU_INIT_ARGS=f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text "
                         "--xla_jf_dump_llo_pass_label_regex=final_bundles")
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax.experimental import topologies
    from jaxlib.mlir import ir
    devices = topologies.get_topology_desc(topology, "tpu", chip_config_name=cores).devices
    options = compiler.get_compile_options(len(devices), 1, [[d.id] for d in devices])
    with mlir.make_ir_context():
        # the program in jax's form, with jax's mark for memory that results may take
        if isinstance(program, bytes):
            program = xla_client._xla.mlir.hlo_to_stablehlo(program)
        module = ir.Module.parse(program)
        function = ir.SymbolTable(module.operation)["main"]
        marks = ["{jax.buffer_donor = true}" if i in state else "{}" for i in range(len(function.arguments))]
        function.attributes["arg_attrs"] = ir.Attribute.parse(f"[{', '.join(marks)}]")
        try:
            compiled = devices[0].client.compile(module, xla_client._xla.DeviceList(tuple(devices)), options)
        except RuntimeError as e:
            raise UserError(str(e)[:600]) from None
    memory = compiled.get_compiled_memory_stats()
    used = (memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes)
    return dict(chips=len(devices), used_gb=used / 1e9, state_tensors=len(state))


# ---------------------------------------------------------------------------------------------------------
# The text of programs and schedules

def read_dump(dump, clock):
    """Returns the figures of the compiled program and of its schedules.

    Args:
        dump: libtpu's folder.
        clock: cycles in a second.
    """
    # The program has computations, {name: text}, and the program's own is the last one:
    #     %region_1.2 (arg: (s32[], f32[4])) -> (s32[], f32[4]) {
    #       ...
    #     }
    text = next(dump.glob("*.after_codegen.txt")).read_text()
    computations = dict(re.findall(r"(?ms)^(?:ENTRY )?%([\w.\-]+) \((.*?)^}(?!\))", text))
    runs = Counter([[*computations][-1]])  # {computation: how often it runs}
    cost_model = 0  # cycles
    runs_of = Counter()  # {shape and estimate of equal instructions: how often they run}
    cycles_of = defaultdict(list)  # {the same: the cycles of their schedules}
    for computation, body in reversed(computations.items()):
        # A loop's body comes before its caller, and runs up to the constant in the loop's condition:
        #     ... while(%tuple.5), condition=%region_2.3, body=%region_1.2
        #     %constant.7 = s32[]{:T(128)} constant(16)
        for condition, loop in re.findall(r"condition=%([\w.\-]+), body=%([\w.\-]+)", body):
            constants = re.findall(r" = [su]\d+\[\]\S* constant\((\d+)\)", computations[condition])
            runs[loop] = runs[computation] * max(map(int, constants))
        # An instruction has a name, a shape, maybe buffers for what it loads, and an estimate:
        #     %fusion.3 = f32[8,128]{1,0:T(8,128)} fusion(%add.1), kind=kLoop, ...
        #         "buffering_level":"2", ... "estimated_cycles":"1827", ...
        instructions = re.findall(
            r'%([\w.\-]+) = (.*?) [\w\-]+\(.*?'
            r'(?:"buffering_level":"(\d+)".*)?"estimated_cycles":"(\d+)"', body)
        for name, shape, buffers, estimate in instructions:
            cost_model += runs[computation] * int(estimate)
            runs_of[shape, estimate] += runs[computation]
            # equal instructions share one schedule, whose file's name begins with a time
            for file in dump.glob(f"{'?' * 19}-{name}-01-final_bundles.txt"):
                cycles_of[shape, estimate].append(schedule_cycles(file.read_text(), int(buffers or 1)))
    # What other units do meanwhile, such as a gather on a v6e's SparseCores, has no schedule and is left out.
    schedules = sum(n * mean(cycles_of[key]) for key, n in runs_of.items() if n)
    # the program's first line has "may-alias)" or "must-alias)" for each tensor that a result overwrites
    return dict(
        donated_tensors=text.count("-alias)"),
        collectives=re.findall(r" = (.*) (all-reduce|all-gather|reduce-scatter)(?:-start)?\(", text),
        schedules_ms=1e3 * schedules / clock,
        cost_model_ms=1e3 * cost_model / clock,
    )


def schedule_cycles(text, buffers):
    """Returns the cycles of a schedule's instructions, or of its matrix products if they take longer.

    A line is an instruction (bundle). These lines of a loop are read, from its start to the jump back:

          0x6   :  { %s21 = smov.u32 0  ;;  %s22 = smov.u32 0 } /* Start region 2 */
          0x9   : > { %378 = vmatmul.bf16.gmra.mxu0 %v5 }
        0x4ae4  : > { %p21_p3 = scmp.ge.s32.totalorder %s24_s23, 4 /* loop exit test */ }
        0x4ae5  : > { %23 = sbr.rel (!%p21_p3) target = $region2 }

    Args:
        text: the schedule.
        buffers: of each loop, for what it loads; its first and last iterations only load and store.
    """
    cycles = np.zeros(2)  # those of the instructions, and those of a matrix unit
    starts = {}  # {region: cycles before it}
    # {the name of a loop's exit test: the iterations}
    ends = dict(re.findall(r"%(\w+) = scmp\S+ %\w+, (\d+) /\* loop exit test", text))
    for bundle in re.findall(r"(?m)^ *(?:0x)?[0-9a-f]+ .*", text):
        starts |= dict.fromkeys(re.findall(r"Start region (\d+)", bundle), cycles)
        # A matrix unit takes a row in a cycle, and the schedules of v4 and v5e do not wait for it. An
        # instruction brings 8 rows, or 16 rows of bfloat16 in pairs. All units do the same.
        products = re.findall(r"vmatmul(?!\.mubr)(\S*)mxu0", bundle)
        cycles = cycles + [1, sum(8 if re.search("f32|lmr", suffix) else 16 for suffix in products)]
        # a jump back repeats what lies between
        jump = re.search(r"sbr\.rel \(!%(\w+)\) target = \$region(\d+)", bundle)
        if jump and jump[2] in starts:
            iterations = max(1, int(ends.get(jump[1], 1)) - 2 * (buffers - 1))
            cycles = cycles + (iterations - 1) * (cycles - starts[jump[2]])
    return max(cycles)


if __name__ == "__main__":
    process.command(main)
