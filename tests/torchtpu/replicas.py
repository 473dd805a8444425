"""Lets several processes train over XLA's CPU client, which has no collectives between processes.

TorchTPU takes each process for a TPU that is alone, and gloo sums copies on the host. A program is cut at its
all-reduce, so that this cannot show how TorchTPU compiles and executes the all-reduce.
"""
import os
from unittest import mock

import torch
import torch.distributed as dist
from torch.fx.passes.split_module import split_module
from torch_tpu._internal.compile.compiler import StaticCompiler

KERNELS = torch.library.Library("c10d", "IMPL")
ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
compile_whole = StaticCompiler.__call__


def install():
    """Takes the place of TorchTPU's process group."""
    dist.Backend.register_backend("tpu_dist", create_group, devices=["tpu"])
    KERNELS.impl("allreduce_", all_reduce, "PrivateUse1")


def create_group(store, rank, world, timeout):
    # TorchTPU looks for other replicas at its first operation
    others = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    with mock.patch.dict(os.environ):
        for name in others:
            os.environ.pop(name, None)
        torch.zeros(1, device="tpu").cpu()
    StaticCompiler.__call__ = compile_in_parts
    return dist.ProcessGroupGloo(store, rank, world, timeout)


def all_reduce(tensors, group, reduce_op, sparse_indices, async_op=True, timeout=-1):
    """Sums the replicas' tensors, in place."""
    gloo = dist.ProcessGroup.unbox(group)._get_backend(torch.device("tpu"))
    copies = [t.cpu() for t in tensors]
    work = gloo.allreduce(copies, dist.AllreduceOptions())
    work.wait()
    for t, copy in zip(tensors, copies):
        t.copy_(copy)
    return tensors, work.boxed()


def compile_in_parts(compiler, graph, tensors, donated_inputs=None, **options):
    """Compiles what comes before the all-reduce and what comes after it; the all-reduce runs by itself."""
    collectives = graph.graph.find_nodes(op="call_function", target=ALL_REDUCE)
    if not collectives:
        return compile_whole(compiler, graph, tensors, donated_inputs=donated_inputs, **options)
    nodes = list(graph.graph.nodes)
    first = nodes.index(collectives[0])
    # the operation after it waits for its result
    parts = {node: (i >= first) + (i > first + 1) for i, node in enumerate(nodes)}
    whole = split_module(graph, graph, parts.get)
    for name in "submod_0", "submod_2":
        setattr(whole, name, Part(compiler, getattr(whole, name)))
    return whole


class Part(torch.nn.Module):
    """A part of a program, which its first call compiles."""

    def __init__(self, compiler, graph):
        super().__init__()
        self.compiler = compiler
        self.graph = graph
        self.program = None

    def forward(self, *tensors):
        self.program = self.program or compile_whole(self.compiler, self.graph, tensors)
        return self.program(*tensors)
