"""The TPU behind train.py, through PyTorch/XLA: all that touches torch_xla, but for the calls of xmp.spawn.

XLADevice has the methods of train.py's Device. torch_xla is imported when a device is opened and not before,
so that other machines can do without it.
"""
import glob
import os
import platform
import threading
import traceback

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from configurator import UserError
from model import Recomputed, accumulate, recomputed_attention

LAUNCH = threading.Lock()  # for XLA replicas that are threads: one compiles, the others find its program


class XLADevice:
    """A TPU chip through PyTorch/XLA. With PJRT_DEVICE=CPU it is the CPU, and replicas are threads.

    A step is traced and compiled once, and replayed: tracing takes the host longer than the step takes a TPU.
    """
    kind = "xla"
    notes = ()  # lines for the log

    def __init__(self):
        import torch_xla
        import torch_xla.core.xla_builder as xb
        import torch_xla.core.xla_model as xm
        import torch_xla.debug.metrics
        import torch_xla.runtime as xr
        self.xla, self.xb, self.xm, self.metrics = torch_xla, xb, xm, torch_xla.debug.metrics
        self.torch, self.say, self.name = torch_xla.device(), print, platform.machine()
        self.rank, self.world = xr.global_ordinal(), xr.world_size()
        self.local_rank, self.host = xr.local_ordinal(), xr.host_index()  # ordinals need not follow the hosts
        self.threads = self.world > 1 and os.environ["PJRT_DEVICE"] == "CPU"
        self.tracing = False  # whether a step that cannot be captured is being traced
        # The backward pass stays on this thread. Gradients that another thread still holds when the step ends
        # would become outputs of the program, which makes it a different program.
        torch.autograd.set_multithreading_enabled(False)
        if os.environ["PJRT_DEVICE"] == "TPU":
            from torch_xla._internal import tpu
            chip = os.environ.get("TPU_ACCELERATOR_TYPE") or tpu.get_tpu_env()["ACCELERATOR_TYPE"]
            self.name = "TPU " + chip

    def put(self, tree):
        return tree_map(lambda x: torch.as_tensor(x).to(self.torch), tree)

    def fetch(self, x):
        return x.cpu

    def all_reduce(self, vector):
        return self.xm.all_reduce(self.xm.REDUCE_SUM, vector) if self.world > 1 else vector

    def sum_on_host(self, vector):
        # Short vectors get one length, so that they share a program: a stop must not wait for a compiler.
        padded = torch.nn.functional.pad(vector, (0, max(0, max(64, 16 * self.world) - len(vector))))
        padded = self.all_reduce(self.put(padded))
        self.launch(padded)
        return padded.cpu()[:len(vector)]

    def prepare(self, model):
        model.to(self.torch)
        Recomputed.barrier = staticmethod(self.barrier)
        for layer in model.L_level.layers:
            if hasattr(layer, "self_attn"):
                layer.self_attn.attend = recomputed_attention

    def compile(self, fn):
        return fn  # program() compiles the whole step

    def program(self, fn):
        """fn(state, inputs, *static) as one program for each static: traced by the first call, then replayed.

        What fn reads besides its arguments must not change. What cannot be captured is traced at each call.
        """
        captured = {}

        def call(state, inputs, *static):
            if static not in captured:
                captured[static] = self.try_capture(fn, state, inputs, *static)
            if not captured[static]:
                return self.trace(fn, state, inputs, *static)
            replay, structure = captured[static]
            tensors = tree_flatten((state, inputs))[0]  # kept: freeing one would wait for the program
            results = replay(tensors)
            new_state, outputs = tree_unflatten(results, structure)
            state.update(new_state)
            self.launch(results[0])
            return outputs

        return call

    def try_capture(self, fn, state, inputs, *static):
        """As capture; None, and a line in the log, where the step cannot be captured."""
        try:
            with LAUNCH, torch.no_grad():
                return self.capture(fn, state, inputs, *static)
        except NotReplayable as e:
            if self.threads:
                raise UserError(f"{e}; replicas on the CPU need a step that can be replayed") from None
            self.say(f"{e}; so torch_xla traces this step anew each time, and the device may wait for that")
            return None

    def capture(self, fn, state, inputs, *static):
        """Traces fn: (function from the tensors of (state, inputs) to results, structure of the results)."""
        with Replayable():
            lowering, placeholders, structure = self.lower(fn, state, inputs, *static)
        program = self.xb.computation_from_module_proto("step", lowering.hlo())
        sources = {lowering.tensor_parameter_id(t): i for i, t in enumerate(placeholders)}
        constants = lowering.device_parameter_id_tensor_mapping()
        parameters = sorted((set(constants) | set(sources)) - {-1})  # -1: an unused input

        def replay(tensors):
            arguments = [tensors[sources[p]] if p in sources else constants[p] for p in parameters]
            return self.xla._XLAC._xla_user_computation("xla::_op_step", arguments, program)

        return replay, structure

    def lower(self, fn, state, inputs, *static):
        """fn's program, not compiled: (LoweringContext, its parameters, the structure of its results)."""
        lowering = self.xla._XLAC.lowering.LoweringContext("step")
        lowering.set_name_string("step")
        tensors, structure = tree_flatten((state, inputs))
        placeholders = [self.xb.create_placeholder_tensor(t.shape, t.dtype) for t in tensors]
        # Clones: a placeholder that fn changed in place would no longer stand for its input.
        state, inputs = tree_unflatten([t.clone() for t in placeholders], structure)
        outputs = fn(state, inputs, *static)
        results, structure = tree_flatten((state, outputs))
        lowering.build(results)
        return lowering, placeholders, structure

    def trace(self, fn, state, inputs, *static):
        """fn(state, inputs, *static), which cannot be captured."""
        self.tracing = True
        try:
            outputs = fn(state, inputs, *static)
        finally:
            self.tracing = False
        self.xla.sync()
        return outputs

    def launch(self, result):
        """Runs what was traced since the last call, one program; result: one of its results. All ranks."""
        if self.threads:
            # sync() frees buffers while it holds Python's lock, and waits for peers that need the lock.
            with LAUNCH:
                self.xla._XLAC._xla_step_marker(self.xla._XLAC._xla_get_default_device(), [], wait=False)
            result.cpu()
        self.xla.sync()

    def sum_over(self, body, sums, weights, xs):
        """As accumulate, but a loop inside the program, whose memory does not grow with its length."""
        from torch_xla.experimental.scan import _scan_impl_pytree

        def step(carry, x):
            sums, weights = carry
            x = tree_map(lambda t, like: t.to(like.dtype), x, xs)  # the scan turns bools into integers
            parts, row = body(weights, x)
            # The scan wants a carry of new tensors.
            return ([a + b for a, b in zip(sums, parts)], {name: w * 1 for name, w in weights.items()}), row

        def body_and_sync(weights, x):
            result = body(weights, x)
            self.xla.sync()
            return result

        if self.tracing:  # a program for each micro-batch: one for all might not fit
            return accumulate(body_and_sync, sums, weights, xs)
        if len(tree_flatten(xs)[0][0]) == 1:
            return accumulate(body, sums, weights, xs)
        (sums, _), rows = _scan_impl_pytree(step, (sums, weights), xs)
        return sums, rows

    def barrier(self, tensors):
        """The same tensors as new values to XLA, so that it does not merge computations on both."""
        if tensors[0].device.type != "xla":  # a model on the CPU beside one on XLA
            return tensors
        tensors = [t.clone() for t in tensors]
        self.xm.optimization_barrier_(tensors)
        return tensors

    def counts(self):
        """So far: programs compiled, seconds that took, operations run on the host, seconds of transfers."""
        def count_and_ns(name):
            return (self.metrics.metric_data(name) or (0, 0))[:2]

        compiles, compile_ns = count_and_ns("CompileTime")
        fallbacks = [name for name in self.metrics.counter_names() if name.startswith("aten::")]
        transfer_ns = count_and_ns("TransferToDeviceTime")[1] + count_and_ns("TransferFromDeviceTime")[1]
        return {"xla/compiles": compiles, "xla/compile_time": compile_ns / 1e9,
                "xla/fallbacks": sum(map(self.metrics.counter_value, fallbacks)),
                "xla/transfer_time": transfer_ns / 1e9}


class NotReplayable(Exception):
    """A step cannot be captured and replayed; the message names the operation and its line."""


class Replayable(TorchDispatchMode):
    """Raises NotReplayable before an operation that a replay would get wrong.

    It needs values, of which a capture has none (torch_xla would crash), or XLA leaves it to the host, or it
    draws random numbers, which every replay would repeat.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        problem = self.find_problem(func, args, kwargs)
        if not problem:
            return func(*args, **kwargs)
        folder = os.path.dirname(os.path.abspath(__file__))
        frames = [f for f in traceback.extract_stack() if os.path.dirname(f.filename) == folder]
        frame = ([f for f in frames if f.filename != os.path.abspath(__file__)] or frames)[-1]
        name = func.name().removeprefix("aten::").replace("_local_scalar_dense", "item")
        raise NotReplayable(f"{os.path.basename(frame.filename)}:{frame.lineno}: {name} {problem}")

    def find_problem(self, func, args, kwargs):
        aten = torch.ops.aten
        if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_):
            has_mask = any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
            return "has a shape that depends on data" if has_mask else ""
        if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
            return "has a value or a shape that depends on data"
        if any(torch.is_tensor(t) and t.device.type == "xla" for t in tree_flatten((args, kwargs))[0]):
            keys = "XLA", "CompositeExplicitAutograd", "CompositeImplicitAutograd"
            if not any(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in keys):
                return "is not among XLA's operations"
            if torch.device(kwargs.get("device") or "meta").type == "cpu":
                return "reads from the device"
        return "draws random numbers" if torch.Tag.nondeterministic_seeded in func.tags else ""


def tpu_chips():
    """TPU chips of this host. Importing torch_xla fixes its device: only where a PCI device is Google's."""
    vendors = []
    for path in glob.glob("/sys/bus/pci/devices/*/vendor"):
        with open(path) as f:
            vendors.append(f.read().strip())
    if "0x1ae0" not in vendors:
        return 0
    chosen = os.environ.setdefault("PJRT_DEVICE", "TPU")
    from torch_xla._internal import tpu
    chips = tpu.num_available_chips()  # network cards of Google's clouds have that vendor too
    if not chips and chosen == "TPU":
        del os.environ["PJRT_DEVICE"]
    return chips
