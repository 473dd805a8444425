"""The CPU, CUDA and Apple's GPU: one set of methods, which train.py uses; xla.py has them for TPUs.

torch_xla is imported where a TPU is looked for or used: other machines can do without it.
"""
import atexit
import glob
import importlib.util
import os
import platform
import re
import textwrap
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_map

from configurator import UserError
from model import Block

# A chip's dense bfloat16 FLOP/s as its maker states them, for perf/mfu.
PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v6e": 918e12,
    "A100": 312e12,
    "H100": 989e12,
    "H200": 989e12,
    "L40S": 362e12,
}


# ---------------------------------------------------------------------------------------------------------
# Which device

def choose_device(wanted):
    """Returns (xla, cuda, mps or cpu; the reason in words). Raises UserError if the wanted one is missing."""
    # torch_xla on a TPU, or on the CPU where the environment says so
    pjrt = os.environ.get("PJRT_DEVICE")
    if wanted in ("xla", "auto"):
        has_xla = importlib.util.find_spec("torch_xla")
        if has_xla and pjrt == "CPU":
            # fewer threads than replicas would deadlock in a collective
            replicas = int(os.environ.get("CPU_NUM_DEVICES", 1))
            os.environ.setdefault("XLA_THREAD_POOL_SIZE", str(max(16, replicas)))
            return "xla", "PJRT_DEVICE=CPU"
        if has_xla and has_tpu():
            return "xla", "a TPU is here"
        if wanted == "xla" or pjrt:
            raise UserError(f"--device={wanted}: no TPU on this machine, or torch_xla is not installed (pip "
                            "install -r requirements.txt); PJRT_DEVICE=CPU runs torch_xla on the CPU")

    # GPUs: auto takes CUDA's, and Apple's only if it is asked for by name
    if wanted in ("cuda", "auto") and torch.cuda.is_available():
        return "cuda", torch.cuda.get_device_name()
    if wanted == "mps" and torch.backends.mps.is_available():
        return "mps", "Apple's GPU, which nobody has tested yet"
    if wanted in ("cuda", "mps"):
        raise UserError(f"--device={wanted}: torch sees no such GPU; --device=cpu trains on the CPU")
    return "cpu", "--device=cpu" if wanted == "cpu" else "no TPU and no CUDA GPU found"


def has_tpu():
    """Returns True if this host has a TPU. Sets PJRT_DEVICE: importing torch_xla fixes its device."""
    # network cards of Google's clouds are Google's PCI devices too
    vendors = [Path(path).read_text().strip() for path in glob.glob("/sys/bus/pci/devices/*/vendor")]
    if "0x1ae0" not in vendors:
        return False
    os.environ["PJRT_DEVICE"] = "TPU"
    from torch_xla._internal import tpu
    if tpu.num_available_chips():
        return True
    del os.environ["PJRT_DEVICE"]
    return False


def open_device(kind, settings):
    """Returns the device of one replica; kind: from choose_device. Sets forward_dtype if need be."""
    if kind == "xla":
        from xla import XLADevice
        device = XLADevice()
    else:
        device = Device(kind, settings)
        device.join_replicas(settings)

    # older GPUs emulate bfloat16, many times more slowly
    dtype, reason = device.fastest_dtype()
    is_emulated = kind == "cuda" and settings.forward_dtype == "bfloat16" != dtype
    if settings.forward_dtype == "auto" or is_emulated:
        settings.forward_dtype = dtype
        device.notes.append(f"forward_dtype is {dtype}: {reason}")
    return device


# ---------------------------------------------------------------------------------------------------------
# The device

class Device:
    """The CPU, a CUDA GPU or Apple's GPU; the first two alone or under torchrun.

    torch: the torch.device. rank: this replica's number among `world`. local_rank: its number on this host,
    which has number `host`.
    notes: lines for the log. print0: a function that prints a line.
    """

    def __init__(self, kind, settings):
        self.kind = kind
        self.print0 = print
        self.notes = []
        self.rank = 0
        self.world = 1
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.host = int(os.environ.get("GROUP_RANK", 0))
        self.torch = torch.device(kind)
        self.name = platform.machine()
        if kind == "cuda":
            self.open_gpu()

        # torch.compile and the Triton kernels, where the settings and the machine allow them
        self.compiles = settings.compile == "on"
        if settings.compile == "auto" and kind == "cuda":
            problem = compile_error(self.torch)
            self.compiles = not problem
            if problem:
                self.notes.append(f"compile is off, which is slower: torch.compile fails ({problem})")
        self.kernels = settings.kernels == "on" and kernels_can_run(kind, settings.forward_dtype)
        if settings.kernels == "on" and not self.kernels:
            self.notes.append("kernels are off: they need a GPU of compute capability 8.0 or higher, and a "
                              "forward_dtype of 16 bits")

    def join_replicas(self, settings):
        """Waits for the replicas that torchrun starts beside this one, if it does."""
        if "RANK" in os.environ:
            if "WORLD_SIZE" not in os.environ:
                raise UserError("RANK is set without WORLD_SIZE: start with torchrun, or unset RANK")
            backend = "nccl" if self.kind == "cuda" else "gloo"
            timeout = timedelta(seconds=settings.stall_timeout or 10 ** 6)
            dist.init_process_group(backend, timeout=timeout)
            if backend == "gloo":  # its threads may abort at the end; NCCL would wait for a peer that died
                atexit.register(dist.destroy_process_group)
                # A rank that meets wrong input leaves at once. If a peer has not connected by then, that
                # fails, and the peer ends with 1 instead of 2.
                dist.barrier()
            self.rank = dist.get_rank()
            self.world = dist.get_world_size()

    def open_gpu(self):
        """Chooses this replica's GPU."""
        self.torch = torch.device("cuda", self.local_rank)
        self.name = torch.cuda.get_device_name(self.torch)
        torch.cuda.set_device(self.torch)
        torch.set_float32_matmul_precision("high")  # TF32, for what is not in forward_dtype

    def fastest_dtype(self):
        """Returns the forward_dtype for forward_dtype=auto, and the reason in words."""
        if self.kind == "cpu":
            # one line of flags for each core; other processors compute bfloat16 many times more slowly
            cpuinfo = Path("/proc/cpuinfo")
            if cpuinfo.exists() and re.search("avx512_bf16|amx_bf16", cpuinfo.read_text()):
                return "bfloat16", "this processor has instructions for it"
        elif self.kind == "cuda":
            if torch.cuda.is_bf16_supported(including_emulation=False):
                return "bfloat16", f"{self.name} has units for it"
            if torch.cuda.get_device_capability() >= (7, 0):
                return "float16", f"{self.name} has no bfloat16 units"
        return "float32", f"{self.name} has no units for 16-bit numbers"

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
        # the copy starts now, and its event is before all that is launched later
        host = torch.empty_like(x, device="cpu", pin_memory=True)
        event = torch.cuda.Event()
        host.copy_(x, non_blocking=True)
        event.record()

        def wait():
            event.synchronize()
            return host

        return wait

    def all_reduce(self, vector):
        """Returns the sum of the ranks' vectors, within a step. All ranks."""
        if self.world > 1:
            dist.all_reduce(vector)
        return vector

    def all_gather(self, value):
        """Returns every rank's value, any Python object, in the order of the ranks. All ranks."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

    def broadcast(self, vector):
        """Returns rank 0's vector, on the host of every rank. All ranks."""
        if self.world == 1:
            return vector
        # NCCL only takes tensors on a GPU
        vector = self.put(vector)
        dist.broadcast(vector, 0)
        return vector.cpu()

    def prepare(self, model):
        """Moves the model here, and chooses its mixers."""
        model.to(self.torch)
        if self.kernels:
            from kernels import mix  # which imports Triton
            for layer in model.L_level.layers:
                if type(layer) is Block:
                    layer.mix = mix

    def compile(self, fn):
        """Returns fn through torch.compile, where the settings ask for that."""
        if not self.compiles:
            return fn
        torch._dynamo.config.recompile_limit = 64  # a compilation for each stage of a curriculum
        return torch.compile(fn, dynamic=False)

    def compile_step(self, fn):
        """Returns fn(state, inputs, *static), which changes the tensors of state in place."""
        return fn

    @staticmethod
    def for_each_micro_batch(body, sums, weights, micro_batches):
        """Runs body(weights, micro_batch) on each micro-batch; on XLA it is a loop inside the program.

        Args:
            body: returns what is added to sums, and a dict of tensors.
            sums: a tree of tensors, zeros at the start.
            weights: {name: tensor}.
            micro_batches: a tree of tensors [micro-batches, ...].

        Returns the sums, and {name: [micro-batches, ...]} of the dicts.
        """
        results = []
        for i in range(len(tree_flatten(micro_batches)[0][0])):
            addends, result = body(weights, tree_map(lambda t: t[i], micro_batches))  # noqa: B023
            sums = tree_map(torch.add, sums, addends)
            results.append(result)
        return sums, tree_map(lambda *tensors: torch.stack(tensors), *results)

    def counts(self):
        """Returns the compiler's numbers for metrics.jsonl."""
        return {}


# ---------------------------------------------------------------------------------------------------------
# Helpers

def compile_error(device):
    """Returns why torch.compile fails for a device (no Triton, no C compiler, too old a GPU), or ""."""
    def add_one(x):
        return x + 1

    try:
        torch.compile(add_one)(torch.ones(8, device=device))
    except Exception as e:  # torch has many for this
        return textwrap.shorten(f"{type(e).__name__}: {e}", 200)
    return ""


def kernels_can_run(kind, dtype):
    """Returns True if kernels.py can run here: in float32 it needs more shared memory than some GPUs have."""
    return kind == "cuda" and torch.cuda.get_device_capability() >= (8, 0) and dtype != "float32"


def out_of_memory(settings):
    """Returns the UserError for a GPU that is full."""
    batch_size = settings.global_batch_size // int(os.environ.get("WORLD_SIZE", 1))
    size = settings.micro_batch_size or batch_size
    return UserError(f"out of GPU memory with {size} sequences at a time: a smaller --micro_batch_size that "
                     f"divides {batch_size} gives the same result")


def peak_flops(device):
    """Returns the FLOP/s of a chip as its maker states them, or None."""
    for chip, flops in PEAK_FLOPS.items():
        if chip in device.name:
            return flops
    return None
