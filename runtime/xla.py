"""A TPU chip through PyTorch/XLA, with the methods of device.Device.

A step is traced and compiled once, and then replayed. Tracing takes the host longer than a step takes a TPU.
With PJRT_DEVICE=CPU the device is the CPU, and replicas are threads of one process.
"""
import os
import pickle
import threading
from contextlib import suppress
from functools import partial

import torch
import torch_xla
import torch_xla.backends
import torch_xla.core.xla_builder as xb
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.runtime as xr
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from runtime.device import Device, Place
from runtime.replay import Replayable, replayed, write_out_attention

XLAC = torch_xla._XLAC
# where replicas are threads, one compiles while it holds this lock, and the others find its program
LAUNCH = threading.Lock()


class XLADevice(Device):
    """A TPU chip, or with PJRT_DEVICE=CPU a replica on the CPU. See device.Device for the methods."""

    def __init__(self, settings):
        place = Place(rank=xr.global_ordinal(), world=xr.world_size(), host=xr.host_index())
        super().__init__("xla", settings, place)
        self.compiles = True
        # with --compile=off a step is traced at each call, and its memory grows with its micro-batches
        self.captures_steps = settings.compile != "off"
        self.torch_device = torch_xla.device()
        self.replicas_are_threads = self.world > 1 and os.environ["PJRT_DEVICE"] == "CPU"
        # The backward pass stays on this thread. Gradients that another thread still holds when the step ends
        # would become outputs of the program, which makes it a different program.
        torch.autograd.set_multithreading_enabled(False)
        # the name of the chip in PEAK_FLOPS
        if os.environ["PJRT_DEVICE"] == "TPU":
            from torch_xla._internal import tpu
            chip = os.environ.get("TPU_ACCELERATOR_TYPE") or tpu.get_tpu_env()["ACCELERATOR_TYPE"]
            self.name = "TPU " + chip

    def choose_dtype(self, wanted):
        note = ""
        if wanted == "auto":
            wanted = "bfloat16" if self.name.startswith("TPU") else "float32"
            note = f"forward_dtype is {wanted} on {self.name}"
        # by default a TPU rounds float32 factors to bfloat16
        if wanted == "float32" and torch_xla.backends.get_mat_mul_precision() != "highest":
            torch_xla.backends.set_mat_mul_precision("highest")
        return wanted, note

    def sum_of_ranks(self, vector):
        return xm.all_reduce(xm.REDUCE_SUM, vector)

    def all_reduce_cpu(self, vector):
        """Returns the sum of the ranks' vectors, on the host. All ranks."""
        total = self.all_reduce(self.put(vector))
        self.launch(total)
        return total.cpu()

    def all_gather(self, value):
        """Gathers by sums, since torch_xla's own rendezvous deadlocks where replicas are threads."""
        if self.world == 1:
            return [value]
        content = bytearray(pickle.dumps(value))
        sizes = torch.zeros(self.world)
        sizes[self.rank] = len(content)
        # a row is longer than its content, which pickle allows: a multiple of 4096, since a TPU compiles anew
        # for each width, and since float32 rounds sizes above 2^24
        width = 4096 * (int(self.all_reduce_cpu(sizes).max()) // 4096 + 1)
        table = torch.zeros(self.world, width)
        table[self.rank, :len(content)] = torch.frombuffer(content, dtype=torch.uint8)
        table = self.all_reduce_cpu(table).byte()
        return [pickle.loads(row.numpy()) for row in table]

    def vector_of_rank_0(self, vector):
        return self.all_reduce_cpu(vector if self.rank == 0 else torch.zeros_like(vector))

    def prepare(self, trm):
        super().prepare(trm)
        write_out_attention(trm)  # XLA makes torch's own attention slow

    def compile(self, fn):
        return fn  # compile_step() compiles the whole step

    def compile_step(self, fn):
        """See replay.replayed. With --compile=off fn is traced at every call, as is usual with torch_xla."""
        return replayed(self.capture, fn) if self.captures_steps else partial(self.call_lazily, fn)

    def call_lazily(self, fn, state, inputs, *static):
        """Traces fn, and runs what it has traced."""
        # threads keep the old state: to free it, the launch would wait for peers that wait for LAUNCH
        new_state = tree_map(torch.clone, state) if self.replicas_are_threads else state
        outputs = fn(new_state, inputs, *static)
        self.launch(tree_leaves(outputs)[0])
        state.update(new_state)
        return outputs

    def capture(self, fn, state, inputs, *static):
        """Compiles fn, and returns the function (state, inputs) that runs its program."""
        # trace it; the next all-reduce would follow the one in fn, whose numbers are not there
        try:
            with LAUNCH, torch.no_grad(), Replayable():
                lowering, placeholders, structure = self.lower(fn, state, inputs, *static)
        finally:
            XLAC._set_all_reduce_token(str(self.torch_device), None)
        # a parameter of the program is one of the inputs or a constant that fn made; -1: an unused input
        sources = {lowering.tensor_parameter_id(t): i for i, t in enumerate(placeholders)}
        constants = lowering.device_parameter_id_tensor_mapping()
        parameters = sorted((sources.keys() | constants.keys()) - {-1})

        def arguments(state, inputs):
            """Returns the arguments of the program, in the order of its parameters."""
            tensors = tree_leaves((state, inputs))
            # what a fork computed between steps is a program of its own
            if any(XLAC._check_tensor_need_materialization(tensors)):
                self.launch(tensors[0])
            return [tensors[sources[p]] if p in sources else constants[p] for p in parameters]

        # compile without running, as torch.compile's backend "openxla" does; the new state takes the memory
        # of the old one
        examples = arguments(state, inputs)
        for t in tree_leaves(state):
            XLAC._set_buffer_donation(t, True)
        XLAC._xla_set_enable_alias_with_buffer_donor_config(True)
        computation = xb.computation_from_module_proto("step", lowering.hlo())
        with LAUNCH:
            results = XLAC._xla_user_computation("xla::_op_step", examples, computation)
            program = XLAC._get_graph_hash(results)
            XLAC._xla_warm_up_cache(results, [])
        # the compiled program has an order of its own
        numbers = {XLAC._xla_get_tensor_id(t): i for i, t in enumerate(examples)}
        ids, _ = XLAC._get_tensors_xla_device_data_node(results)
        order = [numbers[id] for id in ids]
        assert len(order) == len(examples), "inputs of the step share their memory"

        def replay(state, inputs):
            tensors = arguments(state, inputs)  # kept: freeing one would wait for the program
            results = XLAC._run_cached_graph(program, [tensors[i] for i in order])
            new_state, outputs = tree_unflatten(results, structure)
            state.update(new_state)
            if self.replicas_are_threads:
                results[0].cpu()  # waits without Python's lock, which peers need
            return outputs

        return replay

    def lower(self, fn, state, inputs, *static):
        """Returns fn's program, not compiled: (LoweringContext, its parameters, structure of its results)."""
        lowering = XLAC.lowering.LoweringContext("step")
        lowering.set_name_string("step")
        placeholders = tree_map(lambda t: xb.create_placeholder_tensor(t.shape, t.dtype), (state, inputs))
        # clones, since a placeholder that fn changed in place would no longer stand for its input
        state, inputs = tree_map(torch.clone, placeholders)
        outputs = fn(state, inputs, *static)
        results, structure = tree_flatten((state, outputs))
        lowering.build(results)
        return lowering, tree_leaves(placeholders), structure

    def launch(self, result):
        """Runs what was traced since the last call, one program; result: one of its results. All ranks."""
        if self.replicas_are_threads:
            # sync() frees buffers while it holds Python's lock, and waits for peers that need the lock
            with LAUNCH:
                XLAC._xla_step_marker(XLAC._xla_get_default_device(), [], wait=False)
            result.cpu()
        torch_xla.sync()

    def scan(self, body, sums, weights, micro_batches):
        """Runs body on micro_batches [n, size, ...] in a loop, whose memory does not grow with its length.

        Returns the sums and the trees of body, [n, size, ...].
        """
        from torch_xla.experimental.scan import _scan_impl_pytree

        def scan_body(carry, micro_batch):
            sums, weights = carry
            # the scan turns bools into integers
            micro_batch = tree_map(torch.Tensor.type_as, micro_batch, micro_batches)
            addends, result = body(weights, micro_batch)
            sums = tree_map(torch.add, sums, addends)
            # the scan does not accept the same tensors as its next carry
            weights = {name: w * 1 for name, w in weights.items()}
            return (sums, weights), result

        (sums, _), results = _scan_impl_pytree(scan_body, (sums, weights), micro_batches)
        return sums, results

    def peak_memory(self):
        with suppress(RuntimeError):  # the CPU has no such number
            return xm.get_memory_info(self.torch_device).get("peak_bytes_used", 0)
        return 0

    def counts(self):
        """Returns how many programs were compiled, the seconds this took, and operations on the host."""
        compile_data = met.metric_data("CompileTime") or (0, 0)  # their number, nanoseconds, samples
        fallbacks = [name for name in met.counter_names() if name.startswith("aten::")]
        return {
            "xla/compiles": compile_data[0],
            "xla/compile_time": compile_data[1] / 1e9,
            "xla/fallbacks": sum(map(met.counter_value, fallbacks)),
        }
