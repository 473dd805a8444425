"""Chooses and opens the device of a run: the CPU, a CUDA GPU, or a TPU through torch_xla or TorchTPU.

Each engine for TPUs needs an environment of its own. It is imported only where a TPU is looked for or used.
"""
import importlib.util
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from runtime.device import Device, read_place
from runtime.errors import UserError, writing

# The environment variables in which srun, mpirun, mpiexec, SkyPilot, and Kubeflow's PyTorchJob tell how many
# processes they start.
LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SKYPILOT_NUM_NODES", "PET_NNODES")
# What a device that was asked for needs.
NEEDS = {
    "xla": "torch_xla 2.9.0 and torch 2.9.1 (Python 3.10 to 3.13 on Linux on x86-64), and a TPU or "
           "PJRT_DEVICE=CPU",
    "tpu": "TorchTPU (in requirements-torchtpu.txt for Python 3.12 on Linux on x86-64), and a TPU",
    "cuda": "a GPU that torch sees; --device=cpu trains on the CPU",
}


def choose_device(wanted):
    """Returns xla, tpu, cuda or cpu, and the reason in words; prepares the environment for the device.

    Raises UserError if the wanted device is missing, or if a launcher's processes would train one by one.
    """
    # torch.compile and torch_xla name a folder after the user; a container's user may have no other name
    os.environ.setdefault("USERNAME", str(os.getuid()))
    if wanted in ("xla", "auto") and importlib.util.find_spec("torch_xla"):
        from runtime.xla_environment import prepare_environment
        reason = prepare_environment()
        if reason:
            return "xla", reason
    place = read_place()
    # importing torch has loaded TorchTPU if there is a chip
    accelerator = torch.accelerator.current_accelerator()
    if wanted in ("tpu", "auto") and accelerator and accelerator.type == "tpu":
        return "tpu", "a TPU is here, and TorchTPU"

    # PJRT_DEVICE asks for torch_xla too
    missing = "xla" if wanted == "auto" and os.environ.get("PJRT_DEVICE") else wanted
    has_cuda = torch.cuda.is_available()
    if missing in NEEDS and not (missing == "cuda" and has_cuda):
        raise UserError(f"--device={wanted} needs {NEEDS[missing]}")
    check_launcher(place)
    if hasattr(torch, "tpu"):
        # the first backward pass looks for a TPU, and libtpu would ask a metadata server for one forever
        os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    if wanted == "cpu":
        return "cpu", "--device=cpu"
    if has_cuda:
        return "cuda", "a CUDA GPU is here"
    return "cpu", "no TPU and no CUDA GPU found"


def check_launcher(place):
    """Raises UserError if a launcher has started several processes, of which each would train alone."""
    is_alone = place.world == 1 and not place.must_join
    for name in LAUNCHERS:
        # each of srun's tasks may be a torchrun that does not know the others
        is_apart = name == "SLURM_STEP_NUM_TASKS" and os.environ.get("GROUP_WORLD_SIZE") == "1"
        number = os.environ.get(name, "").rpartition(":")[2]  # PET_NNODES may be MIN:MAX
        if number not in ("", "0", "1") and (is_alone or is_apart):
            raise UserError(f"{name}={os.environ[name]} in the environment: each process would train alone. "
                            "torchrun joins them, see docs/slurm.md; a run in each of them needs "
                            f"`env -u {name} python train.py ...`")


def open_device(device_type, settings):
    """Returns the device of one replica; device_type: from choose_device."""
    if device_type == "xla":
        from runtime.xla import XLADevice
        return XLADevice(settings)
    if device_type == "tpu":
        from runtime.torchtpu import TPUDevice
        return TPUDevice(settings)
    return Device(device_type, settings)


def spawner(device_type):
    """Returns a function that calls another one in a new process for each chip of this host.

    Returns None where this process is a replica itself, as everywhere but on TPUs.
    """
    if device_type == "xla":
        from torch_xla.distributed.xla_multiprocessing import spawn
        # its processes have semaphores, which are files in /dev/shm
        with writing("/dev/shm"):
            ProcessPoolExecutor(1, get_context("spawn"))
        return spawn
    if device_type == "tpu":
        from runtime import torchtpu
        return torchtpu.spawner()


def check_batch_size(settings, device):
    """Raises UserError unless the batch divides into replicas and micro-batches."""
    share, rest = divmod(settings.global_batch_size, device.world)
    if rest:
        raise UserError(f"global_batch_size {settings.global_batch_size} must be a multiple of the "
                        f"{device.world} replicas")
    size = settings.micro_batch_size
    if size and share % size:
        raise UserError(f"micro_batch_size {size} must divide the {share} sequences of a replica")


def check_ranks(settings, train_set, device):
    """Raises UserError if ranks differ in what all must have in common; their disks may differ."""
    # the settings and the dataset, but not where each host keeps its files
    facts = vars(settings) | dict(dataset=train_set.sha256, data_path="", out_dir="")
    ranks = device.all_gather((device.host, facts))
    _, expected = ranks[0]
    for rank, (host, facts) in enumerate(ranks):
        differing = sorted(dict(facts.items() - expected.items()))
        if differing:
            raise UserError(f"host {host}, rank {rank}: not as on rank 0: {', '.join(differing)}")
