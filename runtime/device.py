"""The CPU and CUDA GPUs as devices of a run. xla.py and torchtpu.py have the same methods for TPUs."""
import atexit
import os
import platform
import re
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from runtime.errors import UserError, one_line
from runtime.files import to_stderr
from runtime.process import STOP, StepDropped, end_with_parent, start_thread

CPU_FLOP = 1e11  # most FLOP of a micro-batch on a CPU: two cores take 2 to 15 seconds
LONG = 5  # seconds after which a request to stop drops the rest of a step
# The environment variables that tell a replica where the others are.
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ADDRESS_TIMEOUT = 20  # seconds in which the name MASTER_ADDR must get an address; a cluster's may come late


# ---------------------------------------------------------------------------------------------------------
# Which replica

class Place(NamedTuple):
    """Which replica this process is, as torchrun's environment variables say."""
    rank: int = 0
    world: int = 1
    local_rank: int = 0  # the number of its GPU
    host: int = 0
    must_join: bool = False  # it has yet to meet the others, where the variables say


def read_place():
    """Returns this process's Place; it is alone unless the environment says where it meets other replicas.

    Clusters and images set some of these variables for every process. Raises UserError if they say that
    there are others, but not where.
    """
    given = {name: os.environ.get(name, "") for name in (*TORCHRUN, "LOCAL_RANK", "GROUP_RANK")}
    # Ray Train, accelerate and Lightning join the processes themselves
    has_joined = dist.is_initialized()
    has_all = all(given[name] for name in TORCHRUN)
    # nobody else is there: no launcher has set the variables, or only to say that this process is alone
    if not (has_joined or has_all) and given["RANK"] in ("", "0") and given["WORLD_SIZE"] in ("", "1"):
        return Place()
    with suppress(ValueError):  # of a variable that is no number
        local_rank = int(given["LOCAL_RANK"] or 0)
        host = int(given["GROUP_RANK"] or 0)
        if has_joined:
            return Place(dist.get_rank(), dist.get_world_size(), local_rank, host)
        rank = int(given["RANK"])
        world = int(given["WORLD_SIZE"])
        # torch would wait for a rank beyond the others
        if has_all and 0 <= rank < world and 0 < int(given["MASTER_PORT"]) < 2 ** 16:
            return Place(rank, world, local_rank, host, must_join=True)
    variables = " ".join(f"{name}={value}" for name, value in given.items())
    raise UserError(f"{variables} in the environment: several replicas need the first four, as torchrun "
                    "sets them, RANK below WORLD_SIZE, MASTER_PORT below 65536; one process needs "
                    "`env -u RANK -u WORLD_SIZE python train.py ...`")


# ---------------------------------------------------------------------------------------------------------
# The device

class Device:
    """The CPU or a CUDA GPU, alone or under torchrun.

    type: "cpu", "cuda", "xla" or "tpu". rank: this replica's number among `world`. host: its host's number.
    """
    backend = ""  # of torch.distributed; "": NCCL on CUDA, gloo on the CPU
    captures_steps = False  # a step is one program, in which scan() is the loop over micro-batches

    def __init__(self, device_type, settings, place=None):
        """place: which replica this is; None: as the environment says."""
        place = place or read_place()
        self.type = device_type
        self.rank = place.rank
        self.world = place.world
        self.host = place.host
        self.torch_device = torch.device(device_type)
        self.name = platform.machine()
        self.report = lambda seconds, share: None  # see for_each_micro_batch
        # whether the network goes through torch.compile
        self.must_compile = settings.compile == "on"
        self.compiles = self.must_compile or settings.compile == "auto" and device_type == "cuda"
        # each replica of a host has a GPU of its own
        if device_type == "cuda":
            self.torch_device = torch.device("cuda", place.local_rank)
            torch.cuda.set_device(self.torch_device)
            self.name = torch.cuda.get_device_name(self.torch_device)
        if place.must_join:
            self.join_replicas(settings)

    def join_replicas(self, settings):
        """Waits for the replicas that torchrun starts beside this one. A request to stop ends the process."""
        if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's; after another launcher the parent may leave
            end_with_parent()
        # torch waits in C code, where no signal reaches Python: a thread ends the process
        has_joined = threading.Event()

        def watch():
            while not has_joined.wait(0.5):
                if STOP.is_set():
                    os._exit(3)

        start_thread(watch)
        try:
            wait_for_address(os.environ["MASTER_ADDR"])
            backend = self.backend or ("nccl" if self.type == "cuda" else "gloo")
            # the watchdog has its own limit during training; before, the others wait while rank 0 downloads
            timeout = timedelta(seconds=max(settings.stall_timeout or 10 ** 6, 1800))
            dist.init_process_group(backend, timeout=timeout)
            if "gloo" in backend:
                # gloo's threads may abort at the end of the process; NCCL's end would wait for a dead peer
                atexit.register(dist.destroy_process_group)
                # a rank that meets wrong input leaves at once; a peer that has not connected by then would
                # end with 1 instead of 2
                self.all_gather(None)
        finally:
            has_joined.set()

    def choose_dtype(self, wanted):
        """Returns the forward_dtype to use instead of the wanted one, and a note for the log, or ""."""
        fastest, reason = self.fastest_dtype()
        # older GPUs and processors emulate bfloat16, many times more slowly
        is_emulated = wanted == "bfloat16" and fastest != "bfloat16"
        if wanted == "auto" or is_emulated:
            return fastest, f"forward_dtype is {fastest}: {reason}"
        return wanted, ""

    def fastest_dtype(self):
        """Returns the fastest forward_dtype, and the reason in words."""
        if self.type == "cpu":
            cpuinfo = Path("/proc/cpuinfo")
            if cpuinfo.exists() and re.search("avx512_bf16|amx_bf16", cpuinfo.read_text()):
                return "bfloat16", "this processor has instructions for it"
        elif torch.cuda.is_bf16_supported(including_emulation=False):
            return "bfloat16", f"{self.name} has units for it"
        elif torch.cuda.get_device_capability() >= (7, 0):
            return "float16", f"{self.name} has no bfloat16 units"
        return "float32", f"no instructions for 16-bit numbers were found on {self.name}"

    def put(self, tree):
        """Returns a tree of arrays and tensors on the device; on the CPU they may share their memory."""
        def put_one(x):
            x = torch.as_tensor(x)
            if self.type == "cuda" and x.device.type == "cpu":
                x = x.pin_memory()  # a copy from pageable memory would wait for the steps under way
            return x.to(self.torch_device, non_blocking=self.type == "cuda")

        return tree_map(put_one, tree)

    def fetch(self, x):
        """Begins to copy a tensor to the host. Returns a function that waits for it, and nothing newer."""
        if self.type != "cuda":
            return x.cpu
        # the event follows this copy to pinned memory, and comes before all work that is launched later
        host = x.to("cpu", non_blocking=True)
        event = torch.cuda.Event()
        event.record()

        def wait():
            event.synchronize()
            return host

        return wait

    def all_reduce(self, tree):
        """Returns the sum of the ranks' trees of float32 tensors, by one collective. All ranks."""
        if self.world == 1:
            return tree
        # joined to one vector, all tensors need one collective
        vector, restore = flatten(tree)
        return restore(self.sum_of_ranks(vector))

    def sum_of_ranks(self, vector):
        dist.all_reduce(vector)
        return vector

    def all_gather(self, value):
        """Returns every rank's value, any Python object, in the order of the ranks. All ranks."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

    def call_on_rank_0(self, call):
        """Returns what call() returns on rank 0, elsewhere None. Its error is raised on all ranks."""
        result = None
        error = None
        if self.rank == 0:
            try:
                result = call()
            except (Exception, SystemExit) as e:
                error = e
        error_of_rank_0 = self.all_gather(error)[0]
        if error_of_rank_0:
            raise error or error_of_rank_0  # rank 0's own has a traceback
        return result

    def broadcast(self, tree):
        """Returns a copy of rank 0's tree of tensors in float32, on the host of every rank. All ranks."""
        vector, restore = flatten(tree)
        if self.world > 1:
            vector = self.vector_of_rank_0(vector).cpu()
        return tree_map(torch.clone, restore(vector))

    def vector_of_rank_0(self, vector):
        """Returns rank 0's vector; all ranks have one of its length."""
        if self.type == "cuda":  # NCCL only takes tensors on a GPU
            vector = self.put(vector)
        dist.broadcast(vector, 0)
        return vector

    def prepare(self, trm):
        trm.to(self.torch_device)

    def compile(self, fn):
        """Returns fn through torch.compile, where the settings ask for that."""
        if not self.compiles:
            return fn
        torch._dynamo.config.recompile_limit = 64  # a compilation for each stage of a curriculum
        # torch compiles, and may fail, at the first call for each depth
        compiled = torch.compile(fn, dynamic=False)

        def call(*args):
            nonlocal compiled
            try:
                return compiled(*args)
            except torch._dynamo.exc.TorchDynamoException as e:
                if self.must_compile:
                    raise
                # without Triton or a C compiler, "auto" trains without torch.compile
                to_stderr(f"torch.compile failed: {one_line(e)}")
                self.compiles = False
                compiled = fn
                return fn(*args)

        return call

    def compile_step(self, fn):
        """Returns fn(state, inputs, *static), which changes the tensors of state in place."""
        return fn

    def choose_micro_batch_size(self, settings, flops):
        """Returns how many sequences to compute at a time, which changes no result but by rounding.

        On a CPU it is at most what takes some seconds: only between micro-batches can a stop take effect.
        flops: of a training step for a sequence.
        """
        share = settings.global_batch_size // self.world
        size = settings.micro_batch_size or share
        # the largest part of the share that is fast enough, and divides it
        if self.type == "cpu" and flops * size > CPU_FLOP:
            limit = max(1, int(CPU_FLOP / flops))
            size = max(n for n in range(1, limit + 1) if share % n == 0)
        return size

    def for_each_micro_batch(self, body, sums, weights, batch, size):
        """Runs body(weights, micro_batch) on each micro-batch.

        Args:
            body: returns what is added to sums, and a tree of tensors [size, ...].
            sums: a tree of tensors, zeros at the start.
            weights: {name: tensor}.
            batch: a tree of tensors [B, ...].
            size: of a micro-batch; 0: all B.

        Returns the sums, and the trees joined, [B, ...]. Calls self.report with the seconds since the first
        micro-batch, which compiles, and with the share of the others that is done. Raises StepDropped if a
        stop is requested during a long step and there is one replica.
        """
        num_sequences = len(tree_leaves(batch)[0])
        size = size or num_sequences
        # in a program, the loop is one of its operations
        if self.captures_steps and size < num_sequences:
            micro_batches = tree_map(lambda t: t.unflatten(0, (-1, size)), batch)
            sums, results = self.scan(body, sums, weights, micro_batches)
            return sums, tree_map(lambda t: t.flatten(0, 1), results)

        results = []
        began = 0.0
        for first in range(0, num_sequences, size):
            micro_batch = tree_map(lambda t: t[first:first + size], batch)  # noqa: B023
            addends, result = body(weights, micro_batch)
            sums = tree_map(torch.add, sums, addends)
            results.append(result)
            # how far it is; a stop drops the rest
            began = began or time.monotonic()
            if first:
                seconds = time.monotonic() - began
                share = first / (num_sequences - size)
                self.report(seconds, share)
                if self.world == 1 and STOP.is_set() and seconds > LONG and share < 1:
                    raise StepDropped
        return sums, tree_map(lambda *parts: torch.cat(parts), *results)

    def cast_weights(self, weights, dtype):
        """Returns {name: weight in dtype}, once for all products of a step."""
        weights = {name: w.to(dtype) for name, w in weights.items()}
        if self.type != "cuda":
            return weights
        # cuBLAS loads 2 bytes at a time where the contiguous dimension is odd, such as the MLP mixer's 97:
        # products take 2 to 3 times as long. Unless it is a multiple of 8, the other one becomes contiguous.
        for name, w in weights.items():
            if w.ndim == 2 and w.shape[1] % 8:
                weights[name] = w.t().contiguous().t()
        return weights

    def peak_memory(self):
        """Returns the most bytes in use at a time; 0 on a CPU and with TorchTPU."""
        return torch.cuda.max_memory_allocated()

    def counts(self):
        """Returns the compiler's numbers for metrics.jsonl."""
        return {}


# ---------------------------------------------------------------------------------------------------------
# Helpers

def wait_for_address(name):
    """Waits until a host's name has an address, for ADDRESS_TIMEOUT."""
    for _ in range(ADDRESS_TIMEOUT + 1):
        with suppress(OSError, UnicodeError):
            socket.getaddrinfo(name, None)
            return
        time.sleep(1)
    raise UserError(f"MASTER_ADDR={name} in the environment: this name has no address")


def flatten(tree):
    """Returns a tree of tensors as a float32 vector, and a function that makes such a tree of a vector."""
    tensors, structure = tree_flatten(tree)
    vector = torch.cat([t.reshape(-1).float() for t in tensors])

    def restore(vector):
        parts = vector.split([t.numel() for t in tensors])
        views = [part.view(t.shape) for part, t in zip(parts, tensors)]
        return tree_unflatten(views, structure)

    return vector, restore
