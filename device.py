"""CPU, CUDA, Apple's GPU and, through PyTorch/XLA, the TPU: one set of methods for all, which train.py uses.

torchtpu.py has them once more, for an experiment. torch_xla is imported where a TPU is looked for or used:
other machines can do without it.
"""
import atexit
import glob
import importlib.util
import multiprocessing
import os
import pickle
import platform
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from configurator import PARENT, UserError
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from model import Block, accumulate, use_recomputed_attention

# A chip's dense bfloat16 FLOP/s as its maker states them, for perf/mfu.
PEAK_FLOPS = {"TPU v4": 275e12, "TPU v5lite": 197e12, "TPU v5e": 197e12, "TPU v5p": 459e12, "TPU v6e": 918e12,
              "A100": 312e12, "H100": 989e12, "H200": 989e12, "L40S": 362e12}
LAUNCH = threading.Lock()  # for XLA replicas that are threads: one compiles, the others find its program


def choose_device(wanted):
    """(xla, tpu, cuda, mps or cpu; the reason in words). Raises UserError if the wanted one is missing."""
    if wanted == "tpu":
        import torchtpu  # an experiment, which forks may leave out
        return "tpu", torchtpu.load()
    if wanted in ("xla", "auto"):
        pjrt, has_xla = os.environ.get("PJRT_DEVICE"), importlib.util.find_spec("torch_xla") is not None
        chips = tpu_chips() if has_xla else 0
        if has_xla and pjrt == "CPU":
            replicas = int(os.environ.get("CPU_NUM_DEVICES") or 1)
            os.environ.setdefault("XLA_THREAD_POOL_SIZE", str(max(16, replicas)))  # fewer would deadlock
            return "xla", "PJRT_DEVICE=CPU"
        if chips:
            os.environ["PJRT_DEVICE"] = "TPU"
            return "xla", f"{chips} TPU chips on this host"
        if wanted == "xla" or pjrt:
            problem = "no TPU on this machine; PJRT_DEVICE=CPU in the environment runs torch_xla on the CPU"
            missing = "torch_xla is not installed: pip install -r requirements.txt"
            raise UserError(f"--device={wanted}: {problem if has_xla else missing}")
    available = dict(cuda=torch.cuda.is_available(), mps=torch.backends.mps.is_available())
    if wanted in ("cuda", "mps") and not available[wanted]:
        raise UserError(f"--device={wanted}: torch sees no such GPU; --device=cpu trains on the CPU")
    if wanted in ("cuda", "auto") and available["cuda"]:
        return "cuda", torch.cuda.get_device_name()
    if wanted == "mps":
        return "mps", "Apple's GPU, which nobody has tested yet"
    hint = "; --device=mps is Apple's GPU" if available["mps"] else ""
    return "cpu", "--device=cpu" if wanted == "cpu" else "no TPU and no CUDA GPU found" + hint


def tpu_chips():
    """TPU chips of this host. Importing torch_xla fixes its device: only where a PCI device is Google's."""
    if not any("0x1ae0" in Path(path).read_text() for path in glob.glob("/sys/bus/pci/devices/*/vendor")):
        return 0
    chosen = os.environ.setdefault("PJRT_DEVICE", "TPU")
    from torch_xla._internal import tpu
    chips = tpu.num_available_chips()  # network cards of Google's clouds have that vendor too
    if not chips and chosen == "TPU":
        del os.environ["PJRT_DEVICE"]
    return chips


def open_device(kind, c):
    """The device of one replica; kind: as choose_device returns it. May change c.forward_dtype."""
    if kind == "tpu":
        import torchtpu
        return torchtpu.TorchTPUDevice()
    return XLADevice() if kind == "xla" else Device(kind, c)


class Device:
    """The CPU, a CUDA GPU or Apple's GPU; the first two alone or under torchrun.

    torch: the torch.device; rank of world replicas; local_rank on this host, number `host`; notes: lines for
    the log; print0: prints a line.
    """

    def __init__(self, kind, c):
        self.kind, self.print0, self.rank, self.world = kind, print, 0, 1
        self.notes = []
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.host = int(os.environ.get("GROUP_RANK", 0))
        self.compiles = c.compile == "on" or c.compile == "auto" and kind == "cuda"
        self.torch, self.name = torch.device(kind), platform.processor() or platform.machine()
        if kind == "cuda":
            self.open_gpu(c)
        if self.compiles and (error := compile_error(self.torch)):
            if c.compile == "on":
                raise UserError(f"--compile=on: torch.compile fails on {self.name} ({error}); "
                                "--compile=auto trains without it, more slowly")
            self.compiles = False
            self.notes.append(f"compile is off, which is slower: torch.compile fails here ({error})")
        self.kernels = c.kernels == "on"  # auto: until a GPU has measured them
        if self.kernels and (error := kernels_error(kind, c.forward_dtype)):
            self.kernels = False
            self.notes.append(f"kernels are off: {error}")
        if "RANK" in os.environ:
            backend = "nccl" if kind == "cuda" else "gloo"
            timeout = timedelta(seconds=c.stall_timeout or 10 ** 6)
            torch.distributed.init_process_group(backend, timeout=timeout)
            if backend == "gloo":  # whose threads may abort at the end; NCCL would wait for a peer that died
                atexit.register(torch.distributed.destroy_process_group)
                # A rank that now meets wrong input leaves: not before all peers have connected, whose
                # connecting would fail. They meet the same input, and must end with the same exit code.
                torch.distributed.barrier()
            self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def open_gpu(self, c):
        """Chooses this replica's GPU. On older GPUs changes c.forward_dtype. Raises UserError."""
        if self.local_rank >= torch.cuda.device_count():
            raise UserError(f"replica {self.local_rank} of this host has no GPU: "
                            f"torchrun --nproc-per-node={torch.cuda.device_count()}")
        self.torch = torch.device("cuda", self.local_rank)
        self.name = torch.cuda.get_device_name(self.torch)
        torch.cuda.set_device(self.torch)
        torch.set_float32_matmul_precision("high")  # TF32, for what is not in forward_dtype
        try:
            torch.ones(1, device=self.torch).add(1).cpu()
        except RuntimeError as e:
            raise UserError(f"{self.name}: torch {torch.__version__} cannot use it ({one_line(e)}); "
                            "another build of torch may, and --device=cpu trains on the CPU") from None
        if c.forward_dtype == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
            c.forward_dtype = "float16" if torch.cuda.get_device_capability()[0] >= 7 else "float32"
            self.notes.append(f"forward_dtype is {c.forward_dtype}, not bfloat16: {self.name} has no "
                              "bfloat16 units; results differ by rounding")

    def put(self, tree):
        """Copies arrays and tensors in dicts to the device."""
        def put_one(x):
            x = torch.as_tensor(x)
            if self.kind == "cuda" and x.device.type == "cpu":
                x = x.pin_memory()  # a copy from pageable memory would wait for the steps under way
            return x.to(self.torch, non_blocking=self.kind == "cuda")  # unsafe on mps: pytorch#189690

        return tree_map(put_one, tree)

    def fetch(self, x):
        """Begins to copy a tensor to the host. Returns a function that waits for it, and nothing newer."""
        if self.kind != "cuda":
            return lambda: x
        host, event = torch.empty_like(x, device="cpu", pin_memory=True), torch.cuda.Event()
        host.copy_(x, non_blocking=True)
        event.record()

        def wait():
            event.synchronize()
            return host

        return wait

    def all_reduce(self, vector):
        """The sum of the ranks' vectors, within a step. All ranks."""
        if self.world > 1:
            torch.distributed.all_reduce(vector)
        return vector

    def all_reduce_cpu(self, vector):
        """The sum of the ranks' vectors, on the host. All ranks."""
        return self.all_reduce(self.put(vector)).cpu()

    def prepare(self, model):
        """Moves the model here, and chooses its mixers."""
        model.to(self.torch)
        if self.kernels:
            from kernels import mix  # which imports Triton
            for layer in model.L_level.layers:
                if type(layer) is Block:
                    layer.mix = mix

    def compile(self, fn):
        """fn through torch.compile, where the settings ask for that."""
        if not self.compiles:
            return fn
        torch._dynamo.config.recompile_limit = 64  # a compilation for each stage of a curriculum
        return torch.compile(fn, dynamic=False)

    def compile_step(self, fn):
        """fn(state, inputs, *static), which changes the tensors of state in place and returns others."""
        return fn

    def accumulate(self, body, sums, weights, xs):
        """model.accumulate, of micro-batches; on XLA a loop inside the program."""
        return accumulate(body, sums, weights, xs)

    def counts(self):
        """The compiler's numbers for metrics.jsonl."""
        return {}


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
        self.torch, self.print0, self.name = torch_xla.device(), print, platform.machine()
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

    def all_reduce_cpu(self, vector):
        total = self.all_reduce(self.put(vector))
        self.launch(total)
        return total.cpu()

    def prepare(self, model):
        model.to(self.torch)
        use_recomputed_attention(model, self.barrier)

    def compile(self, fn):
        return fn  # compile_step() compiles the whole step

    def compile_step(self, fn):
        """fn(state, inputs, *static) as one program for each static: traced by the first call, then replayed.

        What fn reads besides its arguments must not change. What cannot be captured is traced at each call.
        """
        captured = {}

        def call(state, inputs, *static):
            if static not in captured:
                try:
                    with LAUNCH, torch.no_grad():
                        captured[static] = self.capture(fn, state, inputs, *static)
                except NotReplayable as e:
                    if self.threads:
                        raise UserError(f"{e}; replicas on the CPU cannot do without a replay") from None
                    self.print0(f"{e}; so torch_xla traces this step anew each time, which is slower")
                    captured[static] = None
            if not captured[static]:
                self.tracing = True
                outputs = fn(state, inputs, *static)
                self.tracing = False
                self.xla.sync()
                return outputs
            replay, structure = captured[static]
            tensors = tree_flatten((state, inputs))[0]  # kept: freeing one would wait for the program
            results = replay(tensors)
            new_state, outputs = tree_unflatten(results, structure)
            state.update(new_state)
            self.launch(results[0])
            return outputs

        return call

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

    def launch(self, result):
        """Runs what was traced since the last call, one program; result: one of its results. All ranks."""
        if self.threads:
            # sync() frees buffers while it holds Python's lock, and waits for peers that need the lock.
            with LAUNCH:
                self.xla._XLAC._xla_step_marker(self.xla._XLAC._xla_get_default_device(), [], wait=False)
            result.cpu()
        self.xla.sync()

    def accumulate(self, body, sums, weights, xs):
        """As model.accumulate, but a loop inside the program, whose memory does not grow with its length."""
        from torch_xla.experimental.scan import _scan_impl_pytree

        def step(carry, x):
            sums, weights = carry
            x = tree_map(lambda t, like: t.to(like.dtype), x, xs)  # the scan turns bools into integers
            parts, row = body(weights, x)
            # The scan wants a carry of new tensors.
            return (tree_map(torch.add, sums, parts), {name: w * 1 for name, w in weights.items()}), row

        if self.tracing or len(tree_flatten(xs)[0][0]) == 1:
            return accumulate(body, sums, weights, xs)
        (sums, _), rows = _scan_impl_pytree(step, (sums, weights), xs)
        return sums, rows

    def barrier(self, tensors):
        """The same tensors as new values to XLA, so that it does not merge computations on both."""
        tensors = [t.clone() for t in tensors]
        self.xm.optimization_barrier_(tensors)
        return tensors

    def counts(self):
        """So far: programs compiled, seconds that took, operations run on the host."""
        compiles, compile_ns = (self.metrics.metric_data("CompileTime") or (0, 0))[:2]
        fallbacks = [name for name in self.metrics.counter_names() if name.startswith("aten::")]
        return {"xla/compiles": compiles, "xla/compile_time": compile_ns / 1e9,
                "xla/fallbacks": sum(map(self.metrics.counter_value, fallbacks))}


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


def broadcast(device, vector):
    """Rank 0's vector, on the host of every rank. All ranks."""
    if device.world == 1:
        return vector
    return device.all_reduce_cpu(vector if device.rank == 0 else torch.zeros_like(vector))


def all_gather(device, value):
    """Every rank's value, any Python object, in the order of the ranks. All ranks.

    By sums, which all devices have: torch_xla's own rendezvous deadlocks where replicas are threads.
    """
    if device.world == 1:
        return [value]
    content = np.frombuffer(pickle.dumps(value), dtype=np.uint8)
    sizes = torch.zeros(device.world)
    sizes[device.rank] = len(content)
    sizes = [int(size) for size in device.all_reduce_cpu(sizes)]
    table = torch.zeros(device.world, -(-max(sizes) // 4096) * 4096)  # few sizes: each compiles on a TPU
    table[device.rank, :len(content)] = torch.tensor(content.astype(np.float32))
    table = device.all_reduce_cpu(table.flatten()).view(device.world, -1).numpy().astype(np.uint8)
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(table, sizes)]


def end_with_parent():
    """Ends this process once the one that started it is gone: a rank would wait for its peers forever."""
    starter = multiprocessing.parent_process()
    parent = starter.pid if starter else PARENT

    def watch():
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def compile_error(device):
    """Why torch.compile cannot compile for a device (no Triton, no C compiler, too old a GPU), or ""."""
    def add_one(x):
        return x + 1

    try:
        torch.compile(add_one)(torch.ones(8, device=device))
    except Exception as e:  # torch has many for this
        return f"{type(e).__name__}: {one_line(e)}".partition(" Set TORCHDYNAMO")[0]  # advice on debugging it
    return ""


def kernels_error(kind, dtype):
    """Why kernels.py cannot run here, or ""."""
    if kind != "cuda" or torch.cuda.get_device_capability() < (8, 0):
        return "they need a GPU of compute capability 8.0 or higher"
    if dtype == "float32":
        return "in float32 they need more shared memory than some GPUs have"
    return "" if importlib.util.find_spec("triton") else "Triton is not installed"


def one_line(error):
    """The beginning of an error's message."""
    return " ".join(str(error).split())[:200]


def out_of_memory(c):
    """The UserError for a GPU that is full. It names the next smaller micro_batch_size."""
    batch_size = c.global_batch_size // int(os.environ.get("WORLD_SIZE", 1))
    size = c.micro_batch_size or batch_size
    smaller = next((n for n in range(size // 2, 0, -1) if batch_size % n == 0), 0)
    mend = f"--micro_batch_size={smaller} gives the same result" if smaller else "--device=cpu has more"
    return UserError(f"out of GPU memory with {size} sequences at a time: {mend}")


def peak_flops(device):
    """FLOP/s of a chip as its maker states them, or None."""
    return next((flops for chip, flops in PEAK_FLOPS.items() if chip in device.name), None)
