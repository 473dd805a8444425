"""Counts the arithmetic of a model: matrix products only, 2 FLOPs a multiply-add."""
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry


class FlopCounter(TorchDispatchMode):
    """Adds up the FLOPs of products by torch's formulas; torch's own counter is not safe in threads."""
    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        schema = func._schema
        # Torch computes the shape of a result in Python, which takes 0.3 ms. It need not do so for a tensor
        # that changes in place, nor for an operation in SEEN. Views and lists of results are not in SEEN.
        if schema.is_mutable and schema.name.endswith("_") and torch.Tag.inplace_view not in func.tags:
            return args[0]
        key = None
        if not schema.is_mutable and len(schema.returns) == 1 and not func.is_view:
            key = (func, describe(args), *kwargs, describe([*kwargs.values()]))
        if key in SEEN:
            flops, shape, stride, dtype = SEEN[key]
            self.total += flops
            return torch.empty_strided(shape, stride, dtype=dtype, device="meta")

        result = func(*args, **kwargs)
        # torch has formulas for products of matrices, attention and convolutions
        flops = 0
        if func.overloadpacket in flop_registry:
            flops = flop_registry[func.overloadpacket](*args, **kwargs, out_val=result)
        self.total += flops
        if key and torch.is_tensor(result) and result.is_meta:
            SEEN[key] = flops, result.shape, result.stride(), result.dtype
        return result


# {what describe() says of an operation and its arguments: (FLOPs, shape, stride, dtype of the result)}
SEEN = {}


def describe(argument):
    """Returns what an operation's result on the device "meta" can depend on."""
    if torch.is_tensor(argument):
        return argument.shape, argument.stride(), argument.dtype, argument.device
    if isinstance(argument, (list, tuple)):
        return tuple(map(describe, argument))
    return type(argument), argument


def flops_per_example(model, cycles=None):
    """Returns the FLOPs of a training step for one sequence.

    cycles: see TRM.forward. A fork that reads values cannot be counted, and has 0.
    """
    # one sequence on the device "meta", where tensors have shapes and no numbers
    leaves = {name: w.to("meta").requires_grad_() for name, w in model.weights().items()}
    buffers = {name: t.to("meta") for name, t in model.named_buffers()}
    sequences = tree_map(lambda t: t.to("meta"), model.new_sequences(1))
    puzzle_rows = None
    if model.has_puzzle_emb:
        puzzle_rows = torch.empty(1, model.settings.puzzle_emb_ndim, device="meta", requires_grad=True)

    # a forward and a backward pass
    steps = sequences["steps"]
    was_training = model.training
    try:
        with FlopCounter() as counter:
            step = model.train().call_with(leaves | buffers, sequences, puzzle_rows, steps, cycles)
            step.values["loss"].sum().backward()
    except RuntimeError:  # item() and the like
        return 0
    finally:
        model.train(was_training)
    return counter.total
