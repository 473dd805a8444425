"""A TPU through TorchTPU, PyTorch/XLA's successor: an experiment, which no TPU has run.

TorchTPUDevice has the methods of device.py's Device. It uses TorchTPU's public interface alone. torch_tpu is
imported when --device=tpu asks for it and not before. docs/tpu.md has the set-up, and what was seen without a
TPU.
"""
import importlib.util
import os

import torch
from configurator import UserError
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from model import accumulate, use_recomputed_attention


class TorchTPUDevice:
    """A TPU chip through TorchTPU, alone or under torchrun, which starts one process for each chip.

    A step is traced once to a graph, and torch.compile makes one program of it.
    """
    kind = "tpu"
    notes = ("TorchTPU is an experiment: no TPU has run this code",)  # lines for the log

    def __init__(self):
        self.torch, self.name = torch.device("tpu"), torch.tpu.get_device_name()
        self.print0, self.rank, self.world = print, 0, 1
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.host = int(os.environ.get("GROUP_RANK", 0))
        if "RANK" in os.environ:
            torch.distributed.init_process_group("cpu:gloo,tpu:tpu_dist")
            self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def put(self, tree):
        return tree_map(lambda x: torch.as_tensor(x).to(self.torch), tree)

    def fetch(self, x):
        return x.cpu

    def all_reduce(self, vector):
        if self.world == 1:
            return vector
        from torch.distributed._functional_collectives import all_reduce  # dist.all_reduce is not traceable
        return all_reduce(vector, "sum", torch.distributed.group.WORLD)

    def all_reduce_cpu(self, vector):
        if self.world > 1:
            vector = vector.clone()
            torch.distributed.all_reduce(vector)  # by gloo: it compiles nothing
        return vector

    def prepare(self, model):
        model.to(self.torch)
        use_recomputed_attention(model, torch.tpu.ops.optimization_barrier)

    def compile(self, fn):
        return fn  # compile_step() compiles the whole step

    def compile_step(self, fn):
        """fn(state, inputs, *static) as one program for each static, traced and compiled by the first call.

        What fn reads besides its arguments must not change.
        """
        programs = {}

        def call(state, inputs, *static):
            tensors, structure = tree_flatten((state, inputs))
            if static not in programs:
                programs[static] = self.capture(fn, tensors, structure, static)
            program, structure = programs[static]
            new_state, outputs = tree_unflatten(program(*tensors), structure)
            state.update(new_state)
            return outputs

        return call

    def capture(self, fn, tensors, structure, static):
        """(fn as a compiled function of the tensors of (state, inputs), structure of its results)."""
        structures = []

        def step(*tensors):
            state, inputs = tree_unflatten([t.clone() for t in tensors], structure)
            outputs = fn(state, inputs, *static)
            results, results_structure = tree_flatten((state, outputs))
            structures.append(results_structure)
            return results

        torch._dynamo.config.recompile_limit = 64  # a compilation for each stage of a curriculum
        with torch.no_grad():
            graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors)

        @torch.tpu.distributed.spmd_safe  # otherwise the all-reduce becomes a program of its own
        def call(*tensors):
            return graph(*tensors)

        return torch.compile(call, backend="tpu", fullgraph=True, dynamic=False), structures[0]

    def accumulate(self, body, sums, weights, xs):
        """As model.accumulate, but a loop inside the program, whose memory does not grow with its length."""
        if len(tree_leaves(xs)[0]) == 1:
            return accumulate(body, sums, weights, xs)
        carry, carry_structure = tree_flatten((sums, weights))
        rows, rows_structure = tree_flatten(xs)
        structures = []

        def step(*tensors):
            sums, weights = tree_unflatten(tensors[:len(carry)], carry_structure)
            parts, row = body(weights, tree_unflatten(tensors[len(carry):], rows_structure))
            row, row_structure = tree_flatten(row)
            structures.append(row_structure)
            sums = tree_map(torch.add, sums, parts)
            return tree_leaves(sums) + [t.clone() for t in tree_leaves(weights) + row]

        # A graph of its own: the scan takes no gradients inside a Python function.
        with disable_proxy_modes_tracing():
            graph = make_fx(step)(*map(torch.empty_like, carry), *[torch.empty_like(t[0]) for t in rows])
        # The scan wants neither arguments nor results that are views: hence the clones, here and above.
        results = torch.ops.higher_order.scan(graph, [t.clone() for t in carry], rows, ())
        sums, _ = tree_unflatten(results[:len(carry)], carry_structure)
        return sums, tree_unflatten(results[len(carry):], structures[0])

    def counts(self):
        return {}


def load():
    """Loads TorchTPU, and returns its TPU's name. Raises UserError where either is missing."""
    if importlib.util.find_spec("torch_tpu") is None:
        raise UserError("--device=tpu: torch_tpu is not installed: pip install -r requirements-torchtpu.txt")
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "1"  # configurator.py has set it to 0
    import torch_tpu  # noqa: F401
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # for the processes that this one starts
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != "tpu":
        raise UserError("--device=tpu: TorchTPU finds no TPU on this machine; --device=cpu trains on the CPU")
    return torch.tpu.get_device_name()
