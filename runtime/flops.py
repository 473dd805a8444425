"""Counts the FLOPs of a model, only matrix products, and knows the peaks of chips."""
import re

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

# The bfloat16 FLOP/s of a chip, with float32 sums and without sparsity, for perf/mfu. Sources are Google's
# page of each TPU, NVIDIA's data sheets (from the L4 on they say "with sparsity", which is halved here), and
# NVIDIA's papers on the architectures of GeForce cards. "H100" and "H200" mean the SXM modules.
PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5litepod": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v6e": 918e12,
    "TPU v7": 1153.5e12,  # of one of a TPU7x's two cores: each is a device
    "RTX 4090": 165e12,
    "RTX 5090": 209.5e12,
    "A10": 125e12,
    "L4": 121e12,
    "L40S": 362e12,
    "A100": 312e12,
    "H100": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200": 989e12,
    "H200 NVL": 835e12,
    "B200": 2250e12,
}


class FlopCounter(TorchDispatchMode):
    """Adds up the FLOPs of products by torch's formulas; torch's own counter is not safe in threads."""
    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        # torch has formulas for products of matrices, attention and convolutions
        if func.overloadpacket in flop_registry:
            self.total += flop_registry[func.overloadpacket](*args, **kwargs or {}, out_val=result)
        return result


def flops_per_example(trm, cycles=None):
    """Returns the FLOPs of a training step for one sequence.

    cycles: see TRM.forward. A fork that reads values cannot be counted, and has 0. The model is in training
    mode afterwards.
    """
    # one sequence on the device "meta", where tensors have shapes and no numbers
    leaves = {name: w.to("meta").requires_grad_() for name, w in trm.weights().items()}
    buffers = {name: t.to("meta") for name, t in trm.named_buffers()}
    sequences = tree_map(lambda t: t.to("meta"), trm.new_sequences(1))
    puzzle_rows = None
    if trm.has_puzzle_emb:
        puzzle_rows = torch.empty(1, trm.settings.puzzle_emb_ndim, device="meta", requires_grad=True)

    # a forward and a backward pass, in training mode
    trm.train()
    try:
        with FlopCounter() as counter:
            result = trm.call_with(leaves | buffers, sequences, puzzle_rows, sequences["steps"], cycles)
            result.values["loss"].sum().backward()
    except RuntimeError:  # item() and the like
        return 0
    return counter.total


def peak_flops(device):
    """Returns the FLOP/s of a chip as its maker states them, or None."""
    # names are whole words, since an L40 is no L4; the longest one counts, since an H100 PCIe is no H100.
    # "Laptop" and "D" after a GeForce's name make it a slower card, and "MIG" names a part of one.
    chips = [chip for chip in PEAK_FLOPS if re.search(rf"\b{chip}\b(?! Laptop| D\b|.* MIG )", device.name)]
    if chips:
        return PEAK_FLOPS[max(chips, key=len)]
