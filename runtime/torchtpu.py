"""A TPU chip through TorchTPU, with the methods of device.Device. One process drives one chip.

make_fx captures a step, which is compiled as one program and replayed, as with torch_xla. This program
overwrites the state. torch.compile would make the same program, but copy its results into the state.
"""
import os
import socket
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
import torch.distributed as dist
from torch._higher_order_ops.scan import scan_op
from torch._subclasses import FakeTensorMode
from torch.distributed._functional_collectives import all_reduce
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from runtime.device import TORCHRUN, Device
from runtime.errors import UserError
from runtime.replay import Replayable, replayed, write_out_attention

warnings.filterwarnings("ignore", "<TorchTpu/ApiStage/ExperimentalApi/>")


class TPUDevice(Device):
    """A TPU chip, alone or among others. See device.Device for the methods."""
    backend = "cpu:gloo,tpu:tpu_dist"  # sums stay on the chips, Python's objects on the hosts

    def __init__(self, settings):
        super().__init__("tpu", settings)
        self.compiles = self.captures_steps = settings.compile != "off"
        self.name = torch.tpu.get_device_name()  # a name of PEAK_FLOPS
        self.num_programs = 0
        self.compile_seconds = 0.0

    def choose_dtype(self, wanted):
        wanted, note = super().choose_dtype(wanted)
        # by default a TPU rounds float32 factors to bfloat16
        if wanted == "float32":
            torch.set_float32_matmul_precision("highest")
        return wanted, note

    def fastest_dtype(self):
        return "bfloat16", f"{self.name} has units for it"

    def sum_of_ranks(self, vector):
        return all_reduce(vector, "sum", dist.group.WORLD)

    def prepare(self, trm):
        super().prepare(trm)
        write_out_attention(trm)  # TorchTPU makes torch's own attention a kernel that only a TPU can run

    def compile(self, fn):
        return fn  # compile_step() compiles the whole step

    def compile_step(self, fn):
        """See replay.replayed. With --compile=off operations run one by one."""
        return replayed(self.capture, fn) if self.captures_steps else fn

    def capture(self, fn, state, inputs, *static):
        """Compiles fn and returns a function with its arguments and results, which runs the program."""
        from torch_tpu._internal.compile.compiler import StaticCompiler
        began = time.monotonic()
        graph, constants, structure = self.graph_of(fn, state, inputs, *static)
        tensors = [*tree_leaves((state, inputs)), *constants]
        # the new state takes the memory of the old one
        donated = list(range(len(tree_leaves(state))))
        program = StaticCompiler()(graph, tensors, donated_inputs=donated, module_name="step")
        self.num_programs += 1
        self.compile_seconds += time.monotonic() - began

        def replay(state, inputs):
            results = program(*tree_leaves((state, inputs)), *constants)
            new_state, outputs = tree_unflatten(list(results), structure)
            state.update(new_state)
            return outputs

        return replay

    def graph_of(self, fn, state, inputs, *static):
        """Returns a graph of fn, its constants, and the structure of its results.

        The graph takes the tensors of state and inputs, and then the constants: tensors that fn reads without
        receiving them, such as the model's buffers. It returns the new state and fn's results.
        """
        def step(state, inputs):
            outputs = fn(state, inputs, *static)
            return state, outputs

        # the loop cannot copy the tensors of make_fx's own mode
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            return trace(step, tree_map(mode.from_tensor, (state, inputs)))

    def scan(self, body, sums, weights, micro_batches):
        """Runs body on micro_batches [n, size, ...] in a loop, whose memory does not grow with its length.

        Returns the sums and the trees of body, [n, size, ...].
        """
        # the loop takes flat lists of tensors, and the graph of its body
        def step(sums, micro_batch, weights):
            addends, result = body(weights, micro_batch)
            return tree_map(torch.add, sums, addends), tree_map(torch.clone, result)

        with disable_proxy_modes_tracing():
            first = tree_map(lambda t: t[0], micro_batches)
            examples = tree_map(torch.empty_like, (sums, first, weights))
            graph, constants, structure = trace(step, examples)
        results = scan_op(
            graph, tree_leaves(sums), tree_leaves(micro_batches), [*tree_leaves(weights), *constants])
        return tree_unflatten(list(results), structure)

    def counts(self):
        return {"tpu/compiles": self.num_programs, "tpu/compile_time": self.compile_seconds}


def silu(x):
    half = x.float() / 2
    return (half + half * half.tanh()).to(x.dtype)


def silu_backward(grad, x):
    sigmoid = 0.5 + 0.5 * (x.float() / 2).tanh()
    return (grad.float() * sigmoid * (1 + x.float() * (1 - sigmoid))).to(x.dtype)


# TorchTPU writes SiLU as x / (1 + exp(-x)), and this division takes a TPU a fifth of an evaluation step
DECOMPOSITIONS = {torch.ops.aten.silu.default: silu, torch.ops.aten.silu_backward.default: silu_backward}


def trace(fn, arguments):
    """Returns the graph of fn(*arguments), the other tensors that fn reads, and the structure of its results.

    arguments: trees of tensors. The graph takes their leaves, and then the others; its results are leaves.
    """
    tensors, structure = tree_flatten(arguments)
    structures = []

    def flat(*tensors):
        # clones, since a tensor that fn changes in place would no longer stand for its input
        arguments = tree_unflatten(list(map(torch.clone, tensors)), structure)
        with Replayable():
            results, structure_of_results = tree_flatten(fn(*arguments))
        structures.append(structure_of_results)
        return results

    graph = make_fx(flat, DECOMPOSITIONS)(*tensors)
    # make_fx lets the graph hold them
    held = {}  # {name: the nodes that read it}
    for node in graph.graph.find_nodes(op="get_attr"):
        value = getattr(graph, node.target)
        if torch.is_tensor(value) and value.device.type == "tpu":
            held.setdefault(node.target, []).append(node)
    first = next(node for node in graph.graph.nodes if node.op != "placeholder")
    for name, nodes in held.items():
        with graph.graph.inserting_before(first):
            placeholder = graph.graph.placeholder(name)
        placeholder.meta = nodes[0].meta
        for node in nodes:
            node.replace_all_uses_with(placeholder)
            graph.graph.erase_node(node)
    graph.recompile()
    return graph, [getattr(graph, name) for name in held], structures[0]


# ---------------------------------------------------------------------------------------------------------
# Replicas

def spawner():
    """Returns a function that calls another one in a new process for each chip; None: this one is enough."""
    if all(map(os.environ.get, TORCHRUN)):
        # without it TorchTPU aborts at its first operation
        if not os.environ.get("TORCH_TPU_SLICEBUILDER_ADDRESSES"):
            raise UserError("TORCH_TPU_SLICEBUILDER_ADDRESSES is not in the environment: before torchrun, "
                            "run eval \"$(python -m torch.tpu.distributed | sed 's/^/export /')\"")
        return None
    torch.tpu.distributed.set_tpu_launch_env()
    num_hosts = int(os.environ.get("NNODES") or 1)
    num_chips = len(os.environ["TORCH_TPU_SLICEBUILDER_ADDRESSES"].split(","))
    return None if num_chips == 1 else lambda function: spawn(function, num_hosts, num_chips // num_hosts)


def spawn(function, num_hosts, local_world):
    """Calls function(local rank) in local_world new processes, each with torchrun's variables."""
    host = int(os.environ.get("NODE_RANK") or 0)
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    os.environ.update(
        WORLD_SIZE=str(num_hosts * local_world), LOCAL_WORLD_SIZE=str(local_world), GROUP_RANK=str(host))
    with ProcessPoolExecutor(local_world, get_context("spawn")) as pool:
        list(pool.map(call_as, [function] * local_world, range(local_world)))


def free_port():
    """Returns a port that no process of this host uses."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def call_as(function, local_rank):
    """Calls function(local_rank) as this replica of the host."""
    rank = int(os.environ["GROUP_RANK"]) * int(os.environ["LOCAL_WORLD_SIZE"]) + local_rank
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(local_rank))
    function(local_rank)
