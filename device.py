"""The CPU, CUDA and Apple's GPU: one set of methods, which train.py uses; xla.py has them for TPUs.

torch_xla is imported where a TPU is looked for or used: other machines can do without it.
"""
import atexit
import glob
import importlib.util
import multiprocessing
import os
import platform
import threading
import time
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
    has_xla = importlib.util.find_spec("torch_xla") is not None
    if wanted in ("xla", "auto"):
        pjrt = os.environ.get("PJRT_DEVICE")
        if has_xla and pjrt == "CPU":
            # fewer threads than replicas would deadlock in a collective
            replicas = int(os.environ.get("CPU_NUM_DEVICES") or 1)
            os.environ.setdefault("XLA_THREAD_POOL_SIZE", str(max(16, replicas)))
            return "xla", "PJRT_DEVICE=CPU"
        chips = tpu_chips() if has_xla else 0
        if chips:
            os.environ["PJRT_DEVICE"] = "TPU"
            return "xla", f"{chips} TPU chips on this host"
        if (wanted == "xla" or pjrt) and not has_xla:
            raise UserError(f"--device={wanted}: torch_xla is not installed: pip install -r requirements.txt")
        if wanted == "xla" or pjrt:
            raise UserError(f"--device={wanted}: no TPU on this machine; "
                            "PJRT_DEVICE=CPU in the environment runs torch_xla on the CPU")
    # GPUs: CUDA's is taken by auto, Apple's only by name
    has_cuda = torch.cuda.is_available()
    has_mps = torch.backends.mps.is_available()
    if wanted == "cuda" and not has_cuda or wanted == "mps" and not has_mps:
        raise UserError(f"--device={wanted}: torch sees no such GPU; --device=cpu trains on the CPU")
    if has_cuda and wanted in ("cuda", "auto"):
        return "cuda", torch.cuda.get_device_name()
    if wanted == "mps":
        return "mps", "Apple's GPU, which nobody has tested yet"
    if wanted == "cpu":
        return "cpu", "--device=cpu"
    # neither is here
    hint = "; --device=mps is Apple's GPU" if has_mps else ""
    return "cpu", "no TPU and no CUDA GPU found" + hint


def tpu_chips():
    """Returns the number of TPU chips of this host.

    Importing torch_xla fixes its device, so this happens only where a PCI device is Google's.
    """
    vendors = [Path(path).read_text().strip() for path in glob.glob("/sys/bus/pci/devices/*/vendor")]
    if "0x1ae0" not in vendors:
        return 0
    chosen = os.environ.setdefault("PJRT_DEVICE", "TPU")
    from torch_xla._internal import tpu
    chips = tpu.num_available_chips()  # network cards of Google's clouds have that vendor too
    if not chips and chosen == "TPU":
        del os.environ["PJRT_DEVICE"]
    return chips


def open_device(kind, settings):
    """Returns the device of one replica; kind: as choose_device returns it. Resolves forward_dtype=auto."""
    if kind == "xla":
        from xla import XLADevice
        device = XLADevice()
    else:
        device = Device(kind, settings)
    if settings.forward_dtype == "auto":
        settings.forward_dtype, reason = device.fastest_dtype()
        device.notes.append(f"forward_dtype is {settings.forward_dtype}: {reason}")
    return device


# ---------------------------------------------------------------------------------------------------------
# The device

class Device:
    """The CPU, a CUDA GPU or Apple's GPU; the first two alone or under torchrun.

    torch: the torch.device. rank: of world replicas. local_rank: on this host, which has number `host`.
    notes: lines for the log. print0: a function that prints a line.
    """

    def __init__(self, kind, settings):
        self.kind = kind
        self.print0 = print
        self.notes = []
        self.rank = 0
        self.world = 1
        self.local_rank = int(os.environ.get("LOCAL_RANK") or 0)
        self.host = int(os.environ.get("GROUP_RANK") or 0)
        self.torch = torch.device(kind)
        self.name = platform.processor() or platform.machine()
        if kind == "cuda":
            self.open_gpu(settings)

        # torch.compile and the Triton kernels, where the settings and the machine allow them
        self.compiles = settings.compile == "on" or settings.compile == "auto" and kind == "cuda"
        compile_problem = compile_error(self.torch) if self.compiles else ""
        if compile_problem and settings.compile == "on":
            raise UserError(f"--compile=on: torch.compile fails on {self.name} ({compile_problem}); "
                            "--compile=auto trains without it, more slowly")
        if compile_problem:
            self.compiles = False
            self.notes.append(f"compile is off, which is slower: torch.compile fails ({compile_problem})")
        self.kernels = settings.kernels == "on"  # auto: off until a GPU has measured them
        kernels_problem = kernels_error(kind, settings.forward_dtype) if self.kernels else ""
        if kernels_problem:
            self.kernels = False
            self.notes.append(f"kernels are off: {kernels_problem}")

        # the other replicas
        if "RANK" in os.environ:
            if "WORLD_SIZE" not in os.environ:
                raise UserError("RANK is set without WORLD_SIZE: start with torchrun, or unset RANK")
            backend = "nccl" if kind == "cuda" else "gloo"
            timeout = timedelta(seconds=settings.stall_timeout or 10 ** 6)
            dist.init_process_group(backend, timeout=timeout)
            if backend == "gloo":  # its threads may abort at the end; NCCL would wait for a peer that died
                atexit.register(dist.destroy_process_group)
                # A rank that meets wrong input leaves at once. If a peer has not connected by then, that
                # fails, and the peer ends with 1 instead of 2.
                dist.barrier()
            self.rank = dist.get_rank()
            self.world = dist.get_world_size()

    def open_gpu(self, settings):
        """Chooses this replica's GPU; on older GPUs replaces bfloat16. Raises UserError."""
        if self.local_rank >= torch.cuda.device_count():
            raise UserError(f"replica {self.local_rank} of this host has no GPU: "
                            f"torchrun --nproc-per-node={torch.cuda.device_count()}")
        self.torch = torch.device("cuda", self.local_rank)
        self.name = torch.cuda.get_device_name(self.torch)
        torch.cuda.set_device(self.torch)
        torch.set_float32_matmul_precision("high")  # TF32, for what is not in forward_dtype
        # a build of torch has kernels for some generations of GPUs
        try:
            torch.ones(1, device=self.torch).add(1).cpu()
        except RuntimeError as e:
            raise UserError(f"{self.name}: torch {torch.__version__} cannot use it ({one_line(e)}); "
                            "another build of torch may, and --device=cpu trains on the CPU") from None
        # older GPUs emulate bfloat16, many times more slowly
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        if settings.forward_dtype == "bfloat16" and not has_bfloat16:
            settings.forward_dtype, reason = self.fastest_dtype()
            self.notes.append(f"forward_dtype is {settings.forward_dtype}, not bfloat16: {reason}; "
                              "results differ by rounding")

    def fastest_dtype(self):
        """Returns the forward_dtype for forward_dtype=auto, and the reason in words."""
        if self.kind == "cpu":
            # one line of flags for each core; other processors compute bfloat16 many times more slowly
            cpuinfo = Path("/proc/cpuinfo")
            flags = cpuinfo.read_text() if cpuinfo.exists() else ""
            if "avx512_bf16" in flags or "amx_bf16" in flags:
                return "bfloat16", "this processor has instructions for it"
            return "float32", "this processor has no instructions for bfloat16"
        if self.kind == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
            return "bfloat16", f"{self.name} has units for it"
        if self.kind == "cuda" and torch.cuda.get_device_capability()[0] >= 7:
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
        # NCCL takes tensors on a GPU alone
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

    def for_each_micro_batch(self, body, sums, weights, micro_batches):
        """Runs body(weights, micro_batch) on each micro-batch; on XLA it is a loop inside the program.

        Args:
            body: returns what is added to sums, and a dict of tensors.
            sums: a tree of tensors, zeros at the start.
            weights: {name: tensor}.
            micro_batches: a tree of tensors [micro-batches, ...].

        Returns the sums, and {name: [micro-batches, ...]} of the dicts.
        """
        return for_each_micro_batch(body, sums, weights, micro_batches)

    def counts(self):
        """Returns the compiler's numbers for metrics.jsonl."""
        return {}


def for_each_micro_batch(body, sums, weights, micro_batches):
    """See Device.for_each_micro_batch."""
    results = []
    num_micro_batches = len(tree_flatten(micro_batches)[0][0])
    for i in range(num_micro_batches):
        micro_batch = tree_map(lambda t: t[i], micro_batches)  # noqa: B023
        addends, result = body(weights, micro_batch)
        sums = tree_map(torch.add, sums, addends)
        results.append(result)
    # the dicts of the micro-batches as one dict
    stacked = {name: torch.stack([result[name] for result in results]) for name in results[0]}
    return sums, stacked


# ---------------------------------------------------------------------------------------------------------
# Helpers

def end_with_parent():
    """Ends this process once the one that started it is gone: a rank would wait for its peers forever."""
    starter = multiprocessing.parent_process()
    parent = starter.pid if starter else os.getppid()

    def watch():
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def compile_error(device):
    """Returns why torch.compile fails for a device (no Triton, no C compiler, too old a GPU), or ""."""
    def add_one(x):
        return x + 1

    try:
        torch.compile(add_one)(torch.ones(8, device=device))
    except Exception as e:  # torch has many for this
        return f"{type(e).__name__}: {one_line(e)}".partition(" Set TORCHDYNAMO")[0]  # advice on debugging it
    return ""


def kernels_error(kind, dtype):
    """Returns why kernels.py cannot run here, or ""."""
    if kind != "cuda" or torch.cuda.get_device_capability() < (8, 0):
        return "they need a GPU of compute capability 8.0 or higher"
    if dtype == "float32":
        return "in float32 they need more shared memory than some GPUs have"
    return "" if importlib.util.find_spec("triton") else "Triton is not installed"


def one_line(error):
    """Returns the beginning of an error's message."""
    return " ".join(str(error).split())[:200]


def out_of_memory(settings):
    """Returns the UserError for a GPU that is full; it names the next smaller micro_batch_size."""
    batch_size = settings.global_batch_size // int(os.environ.get("WORLD_SIZE", 1))
    size = settings.micro_batch_size or batch_size
    smaller = [n for n in range(1, size // 2 + 1) if batch_size % n == 0]
    mend = f"--micro_batch_size={smaller[-1]} gives the same result" if smaller else "--device=cpu has more"
    return UserError(f"out of GPU memory with {size} sequences at a time: {mend}")


def peak_flops(device):
    """Returns the FLOP/s of a chip as its maker states them, or None."""
    for chip, flops in PEAK_FLOPS.items():
        if chip in device.name:
            return flops
    return None
