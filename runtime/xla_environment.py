"""Prepares the environment variables of torch_xla, which must be right before it is imported."""
import glob
import math
import os
import re
from pathlib import Path

from runtime.errors import UserError

# Variables of torch_xla that change what trains without a word.
REFUSED_XLA = {
    "XLA_USE_BF16": "it would keep the weights in 16 bits, see --forward_dtype",
    "XLA_DOWNCAST_BF16": "it would keep the weights in 16 bits, see --forward_dtype",
    "XLA_USE_SPMD": "it would train one replica instead of one on each device",
}
# Variables of the only process of a TPU host, and what they say of the host.
OF_HOST = {
    "CLOUD_TPU_TASK_ID": "TPU_WORKER_ID",
    "TPU_PROCESS_BOUNDS": "TPU_HOST_BOUNDS",
    "TPU_CHIPS_PER_PROCESS_BOUNDS": "TPU_CHIPS_PER_HOST_BOUNDS",
}


def prepare_environment():
    """Prepares the environment for torch_xla's device here; returns in words which it is, "" for none."""
    if os.environ.get("PJRT_DEVICE") == "CPU":
        check_xla_variables()
        # torch_xla reads an empty variable as 0, and words too
        replicas = os.environ["CPU_NUM_DEVICES"] = os.environ.get("CPU_NUM_DEVICES") or "1"
        if not replicas.isdecimal():
            raise UserError(f"CPU_NUM_DEVICES={replicas} in the environment must be a whole number")
        # fewer threads than replicas would deadlock in a collective
        os.environ.setdefault("XLA_THREAD_POOL_SIZE", str(max(16, int(replicas))))
        return "PJRT_DEVICE=CPU"
    if not select_tpu():
        return ""
    check_xla_variables()
    return f"a TPU is here{prepare_processes()}"


def check_xla_variables():
    """Raises UserError for environment variables that torch_xla must not obey."""
    for name, reason in REFUSED_XLA.items():
        value = os.environ.get(name, "")
        if value.lower() not in ("", "0", "false"):
            raise UserError(f"{name}={value} in the environment: {reason}; `env -u {name} python ...`")


def select_tpu():
    """Sets PJRT_DEVICE=TPU and returns True if this host has a TPU; importing torch_xla fixes its device."""
    # Google is also the vendor of the network cards in its clouds, so the chips are counted below
    vendors = [Path(path).read_text().strip() for path in glob.glob("/sys/bus/pci/devices/*/vendor")]
    if "0x1ae0" not in vendors:
        return False
    os.environ["PJRT_DEVICE"] = "TPU"
    from torch_xla._internal import tpu
    if tpu.num_available_chips():
        return True
    del os.environ["PJRT_DEVICE"]
    return False


def prepare_processes():
    """Prepares the environment for xmp.spawn's processes, one for each chip; returns words for what went."""
    from torch_xla._internal import tpu
    # what a process has that is to use one chip of several
    bounds = map(os.environ.get, ("TPU_PROCESS_BOUNDS", "TPU_CHIPS_PER_PROCESS_BOUNDS"))
    num_processes = 1 if {*bounds} == {"1,1,1"} else tpu.num_available_chips()
    environment = name_all_processes(os.environ, num_processes)
    removed = [f"{name}={os.environ.pop(name)}" for name in sorted({*os.environ} - {*environment})]
    os.environ.update(environment)
    if not removed:
        return ""
    return f"; removed from the environment, as not for {num_processes} processes: {' '.join(removed)}"


def name_all_processes(environment, num_processes):
    """Returns a TPU host's environment without what names only one of its num_processes processes.

    Images and clusters set these variables for one process a host, as JAX starts it. In each process of
    xmp.spawn, torch_xla's configure_topology fills in those that are not set, from the number of the host and
    the bounds of hosts and of their chips.
    """
    num_hosts = len(environment.get("TPU_WORKER_HOSTNAMES", "").split(","))
    num_all = num_hosts * num_processes
    wrong = []
    # "local", which Kaggle has, is not even the address of one process
    if len(re.findall(r":\d+", environment.get("TPU_PROCESS_ADDRESSES", ""))) != num_all:
        wrong += ["TPU_PROCESS_ADDRESSES", "TPU_PROCESS_PORT"]
    if num_processes > 1:
        wrong += ["CLOUD_TPU_TASK_ID", "TPU_PROCESS_PORT", "TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES"]
        bounds = re.findall(r"\d+", environment.get("TPU_PROCESS_BOUNDS", ""))
        if math.prod(map(int, bounds)) != num_all:
            wrong += ["TPU_PROCESS_BOUNDS", "TPU_CHIPS_PER_PROCESS_BOUNDS"]
    # what names the only process of a host names the host
    named = {OF_HOST[name]: environment[name] for name in OF_HOST if name in wrong and name in environment}
    return named | {name: value for name, value in environment.items() if name not in wrong}
