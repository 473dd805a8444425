"""Counts the FLOPs of a model: only matrix products, with 2 FLOPs for a multiply-add."""
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry


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
