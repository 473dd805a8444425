"""What can be seen of torchtpu.py without a TPU. It needs its own environment, so pytest does not collect it.

    python -m venv torchtpu-env && torchtpu-env/bin/pip install -r requirements-torchtpu.txt
    torchtpu-env/bin/python tests/torchtpu_check.py

1. train.py's own steps go through TorchTPUDevice, torch.compile and TorchTPU's lowering to StableHLO, which
   XLA runs on the CPU. The results must equal those of train.py on the CPU.
2. The training step of config/baseline.py is lowered for 8 replicas, and libtpu compiles it for a v5e:2x4.

TorchTPU does neither without a TPU. So this replaces private functions of its version 0.2.0. The tensors stay
on the CPU until the graph is lowered. The all-reduce is put in here, since TorchTPU lowers it through a
process group that opens the TPU.
"""
import copy
import os
import re
import sys
import tempfile
import time

os.environ |= dict(
    TORCH_DEVICE_BACKEND_AUTOLOAD="0", TPU_SKIP_MDS_QUERY="1", TPU_ACCELERATOR_TYPE="v5litepod-8",
    TPU_WORKER_HOSTNAMES="localhost", TPU_WORKER_ID="0", JAX_PLATFORMS="cpu", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, os.path.join(ROOT, "scripts")]

import aot
import configurator
import jax
import numpy as np
import torch
import torch_tpu._loader
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jaxlib.mlir import ir
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves, tree_map
from torch_tpu._internal import execution_mode
from torch_tpu._internal import export as export_package
from torch_tpu._internal.compile import tpu_torch_compile
from torch_tpu._internal.export import export

import bench
import torchtpu
import train
from device import open_device

TINY = ["--hidden_size=64", "--num_heads=2", "--puzzle_emb_ndim=64", "--puzzle_emb_len=2", "--H_cycles=2",
        "--L_cycles=2", "--halt_max_steps=3", "--global_batch_size=8", "--micro_batch_size=2",
        "--forward_dtype=float32"]
SLICE, REPLICAS = "v5e:2x4", 8
CPU = torch.device("cpu")
SUM = """"stablehlo.all_reduce"({operand}) <{{replica_groups = dense<[{replicas}]> : tensor<1x{n}xi64>}}> ({{
^bb0(%left: tensor<f32>, %right: tensor<f32>):
  %sum = stablehlo.add %left, %right : tensor<f32>
  stablehlo.return %sum : tensor<f32>
}}) : (tensor<{size}xf32>) -> tensor<{size}xf32>"""

lowered = []  # the StableHLO modules that TorchTPU made: the loop's body, then the program


# The checks.

def main():
    begin_without_tpu()
    check_equal("MLP", TINY)
    check_equal("attention", TINY + ["--mlp_t=False", "--pos_encodings=rope"])
    check_compiles([os.path.join(ROOT, "config", "baseline.py"), f"--global_batch_size={128 * REPLICAS}"])
    print("all checks passed")


def check_equal(label, flags):
    """The same results on the CPU and through TorchTPU: two training steps and one of an evaluation."""
    c, puzzles = configurator.configure(train.__file__, flags), Puzzles()
    runs = [train.Run(bench.new_model(c, puzzles), c, device)
            for device in (open_device("cpu", c), torchtpu_device())]
    worst = 0
    for step in range(2):
        inputs = [train.make_inputs(run, puzzles, step, 100) for run in runs]
        stops = [run.train_program(run.state, x, None) for run, x in zip(runs, inputs)]
        assert tree_leaves(stops[0])[0] == tree_leaves(stops[1])[0]
        worst = max(worst, difference(runs[0].state, runs[1].state))
        runs[1].state = tree_map(torch.clone, runs[0].state)
    states, results = [run.new_evaluation() for run in runs], []
    for run, state in zip(runs, states):
        batch = puzzles.train_batch(c.seed, 2, c.global_batch_size)
        results.append(run.eval_program(state, run.eval_inputs(batch)))
    worst = max(worst, difference([states[0], results[0]], [states[1], results[1]]))
    print(f"{label}: differs from the CPU by {worst:.1e} of a tensor's largest number", flush=True)
    assert worst < 1e-4


def check_compiles(flags):
    """libtpu compiles one program with one loop and one all-reduce."""
    c = configurator.configure(train.__file__, flags)
    torch.distributed.init_process_group("fake", rank=0, world_size=REPLICAS, store=FakeStore())
    device = torchtpu_device()
    device.world, device.all_reduce_cpu = REPLICAS, lambda vector: vector
    puzzles = Puzzles(seq_len=81, vocab_size=11)
    run = train.Run(bench.new_model(c, puzzles), c, device)
    lowered.clear()
    began = time.time()
    try:
        run.train_program(run.state, train.make_inputs(run, puzzles, 0, 100), None)
    except RuntimeError as e:
        assert "replicas" in str(e), e  # the CPU cannot run it
    assert len(lowered) == 2, f"{len(lowered)} modules: the step is not one program"
    text = with_all_reduce(lowered[-1])
    found = {name: text.count(f"stablehlo.{name}") for name in ("while", "all_reduce")}
    print(f"baseline: lowered in {time.time() - began:.0f} s, {found}", flush=True)
    assert found == {"while": 1, "all_reduce": 1}
    with tempfile.TemporaryDirectory() as folder, mlir.make_ir_context():
        path = os.path.join(folder, "train.pb")
        computation = xla_client._xla.mlir.mlir_module_to_xla_computation(text)
        with open(path, "wb") as f:
            f.write(computation.as_serialized_hlo_module_proto())
        aot.compile_step(path, SLICE, REPLICAS)


class Puzzles:
    """Stands for a dataset: random tokens, and five puzzle identifiers."""
    num_puzzle_identifiers = 5

    def __init__(self, seq_len=36, vocab_size=10):
        self.seq_len, self.vocab_size = seq_len, vocab_size

    def train_batch(self, seed, step, batch_size, rank=0, world=1):
        draw, B = np.random.default_rng([seed, step, rank]), batch_size // world
        cells = draw.integers(1, self.vocab_size, (2, B, self.seq_len), dtype=np.int32)
        identifiers = draw.integers(0, self.num_puzzle_identifiers, B, dtype=np.int32)
        return dict(inputs=cells[0], labels=cells[1], puzzle_identifiers=identifiers)


def difference(a, b):
    """The largest difference of two trees, relative to the largest number of the tensor where it is."""
    worst = 0
    for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        if x.numel():
            x, y = x.double(), y.double()
            worst = max(worst, ((x - y).abs().max() / x.abs().max().clamp(min=1e-30)).item())
    return worst


# TorchTPU without a TPU.

def begin_without_tpu():
    """Registers the device "tpu", which TorchTPU does only where one is, and replaces what would open it."""
    torch_tpu._loader._init_device("tpu")
    export.fx_to_mlir = export_package.fx_to_mlir = fx_to_mlir
    tpu_torch_compile.execute = execute
    torch.library.impl("tpu::_optimization_barrier", "CPU", lambda tensors: [t.clone() for t in tensors])


def torchtpu_device():
    device = torchtpu.TorchTPUDevice()
    device.torch = CPU
    return device


def fx_to_mlir(module, args, **kwargs):
    """TorchTPU's function of that name without its last step, which compiles for the TPU it opened."""
    module = for_tpu(module)
    tensors = [a for a in args if torch.is_tensor(a)]
    with execution_mode.set_eager_mode(execution_mode.EagerMode._INTERNAL_COMPILE_FX_GRAPH):
        clones = [a.clone() if torch.is_tensor(a) else a for a in args]
        outputs = export.EagerLikeFxInterpreter(module).run(*clones)
        results, reconstruct, dynamic, indices = export._process_fx_outputs(module, outputs)
        built = tpu_torch_compile.build_mlir(
            result_tensors=results, argument_tensors=tensors, use_stablehlo_bounds=False)
    lowered.append(built)
    return export.ExportedMlir(
        module=built, executable=built, mlir_result_tensors=results, reconstruct_fx_outputs_fn=reconstruct,
        updates_default_generator_state=False, dynamic_outputs=dynamic, unique_output_indices=indices)


def for_tpu(module):
    """A copy of a graph that makes its tensors on the TPU; all-reduces become barriers, to be replaced."""
    module = copy.deepcopy(module)
    functional = torch.ops._c10d_functional
    for graph in (m for m in module.modules() if isinstance(m, torch.fx.GraphModule)):
        for node in list(graph.graph.nodes):
            if node.kwargs.get("device") == CPU:
                node.update_kwarg("device", torch.device("tpu"))
            if node.target is functional.all_reduce.default:
                with graph.graph.inserting_before(node):
                    barrier = graph.graph.call_function(
                        torch.ops.tpu._optimization_barrier, ([node.args[0]],))
                    first = graph.graph.call_function(lambda tensors: tensors[0], (barrier,))
                node.replace_all_uses_with(first)
            if node.target is functional.wait_tensor.default:
                node.replace_all_uses_with(node.args[0])
        for target in (functional.wait_tensor.default, functional.all_reduce.default):
            for node in graph.graph.find_nodes(op="call_function", target=target):
                graph.graph.erase_node(node)
        graph.recompile()
    return module


def with_all_reduce(module):
    """The text of a StableHLO module with an all-reduce where for_tpu() put a barrier."""
    text = tpu_torch_compile.serialize_mlir_text(module, enable_debug_info=False)

    def all_reduce(match):
        replicas = ", ".join(map(str, range(REPLICAS)))
        return SUM.format(operand=match[1], size=match[2], n=REPLICAS, replicas=f"[{replicas}]")

    return re.sub(r"stablehlo\.optimization_barrier (%\w+) : tensor<(\d+)xf32>", all_reduce, text)


def execute(module, args, shapes, reconstruct):
    """TorchTPU's function of that name, by XLA on the CPU."""
    if torch.distributed.is_initialized():
        raise RuntimeError("a program of several replicas")
    text = tpu_torch_compile.serialize_mlir_text(module, enable_debug_info=False)
    devices = tuple(jax.devices("cpu")[:1])
    with mlir.make_ir_context():
        program = devices[0].client.compile_and_load(
            ir.Module.parse(text), xla_client.DeviceList(devices), compiler.get_compile_options(1, 1))
    args = args[0] if isinstance(args[0], (list, tuple)) else args
    outputs = program.execute([jax.numpy.asarray(a.numpy()) for a in args])
    return reconstruct(args, [torch.from_numpy(np.array(a)) for a in outputs])


if __name__ == "__main__":
    main()
