"""What both engines for TPUs share: a step that is captured once and replayed, and its attention."""
import os
import traceback

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from runtime.errors import UserError

# torch's tags of operations that read the values of their arguments
NEED_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


# ---------------------------------------------------------------------------------------------------------
# What a replay cannot do

class NotReplayable(UserError):
    """A step cannot be captured and replayed; the message names the operation and its line."""


class Replayable(TorchDispatchMode):
    """Raises NotReplayable before an operation that a replay would get wrong.

    Such an operation needs values, which a capture does not have (torch_xla would crash), or XLA leaves it to
    the host, or it draws random numbers, which every replay would repeat.
    """
    supports_higher_order_operators = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):  # TorchTPU's loop, whose body was checked before
            return func(*args, **kwargs)
        problem = self.find_problem(func, args, kwargs)
        if not problem:
            return func(*args, **kwargs)
        # the innermost line outside this file and installed packages: a fork's, where it has one
        packages = os.path.dirname(os.path.dirname(torch.__file__))
        line = ""
        for frame in traceback.extract_stack():
            if not frame.filename.startswith((packages, __file__)):
                line = f"{os.path.basename(frame.filename)}:{frame.lineno}: "
        operation = func.name().removeprefix("aten::").replace("_local_scalar_dense", "item")
        raise NotReplayable(f"{line}{operation} {problem}")

    def find_problem(self, func, args, kwargs):
        """Returns what is wrong with an operation, in words, or ""."""
        aten = torch.ops.aten
        needs_values = not NEED_VALUES.isdisjoint(func.tags)
        if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_):
            # the result of an index by integers has a known shape, the result of an index by a mask does not
            needs_values = any(index is not None and index.dtype == torch.bool for index in args[1])
        if needs_values:
            return "has a value or a shape that depends on data (torch.where has none)"
        if torch.Tag.nondeterministic_seeded in func.tags:
            return "draws random numbers"

        # an operation that XLA does not have would run on the host
        tensors = tree_leaves((args, kwargs))
        if any(torch.is_tensor(t) and t.device.type == "xla" for t in tensors):
            keys = ("XLA", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
            if not any(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in keys):
                return "is not among XLA's operations"
            if str(kwargs.get("device")) == "cpu":
                return "reads from the device"
        return ""


# ---------------------------------------------------------------------------------------------------------
# The replay

def replayed(capture, fn):
    """Returns fn(state, inputs, *static) as one program for each static, captured once and then replayed.

    What fn reads besides its arguments must not change. capture(fn, state, inputs, *static) returns the
    program, a function (state, inputs). It raises NotReplayable for what cannot be captured.
    """
    programs = {}

    def call(state, inputs, *static):
        if static not in programs:
            programs[static] = capture(fn, state, inputs, *static)
        return programs[static](state, inputs)

    return call


# ---------------------------------------------------------------------------------------------------------
# Attention

class Recomputed(torch.autograd.Function):
    """fn(*tensors), one tensor; the backward pass computes it again instead of keeping its activations."""

    @staticmethod
    def forward(ctx, fn, *tensors):
        ctx.fn = fn
        ctx.save_for_backward(*tensors)
        return fn(*tensors)

    @staticmethod
    def backward(ctx, grad):
        # new values to XLA, so that it does not merge these computations with the first ones
        tensors = tree_map(torch.clone, [*ctx.saved_tensors, grad])
        if grad.device.type == "xla":
            import torch_xla.core.xla_model as xm
            xm.optimization_barrier_(tensors)
        elif grad.device.type == "tpu":
            tensors = torch.tpu.ops.optimization_barrier(tensors)
        leaves = [t.detach().requires_grad_() for t in tensors[:-1]]
        with torch.enable_grad():
            return None, *torch.autograd.grad(ctx.fn(*leaves), leaves, tensors[-1])


def recomputed_attention(q, k, v):
    """softmax(q k^T / sqrt(d)) v of [B, heads, L, d]; for the backward pass only q, k and v are kept.

    XLA compiles torch's own attention to something slower: it keeps all scores, in float32, and makes a pass
    over them for rows that a mask leaves empty.
    """
    def attend(q, k, v):  # float32 scores cost nothing: a TPU accumulates bfloat16 products in float32
        scores = (q.float() * q.shape[-1] ** -0.5) @ k.float().mT
        return scores.softmax(-1).to(v.dtype) @ v

    if q.device.type == "meta":  # the FLOPs of the model do not count what is computed twice
        return attend(q, k, v)
    return Recomputed.apply(attend, q, k, v)


def write_out_attention(trm):
    """Lets the layers of a model use recomputed_attention."""
    for layer in trm.L_level.layers:
        if hasattr(layer, "self_attn"):
            layer.self_attn.attend = recomputed_attention
