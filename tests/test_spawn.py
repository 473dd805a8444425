"""xmp.spawn with real processes, as on TPU hosts: where they are, how they start, stop and die."""
import os
import signal
import time
from pathlib import Path
from unittest import mock

import pytest
from helpers import (
    arguments,
    begun,
    curve,
    in_new_process,
    start_script,
    start_train,
    wait_for,
    xla_environment,
)
from servers import stored

from runtime.xla_environment import name_all_processes

pytestmark = pytest.mark.xla

# A host with two chips, for whose number torch_xla asks the chips' plugin. Each process is a world of its
# own, since torch_xla's CPU has no collectives between processes.
TWO_CHIPS = """
import multiprocessing
from unittest import mock
if multiprocessing.current_process().name == "MainProcess":
    from torch_xla._internal import pjrt
    pjrt.plugins.using_dynamic_plugins = lambda: True
    pjrt.plugins.default = lambda: mock.Mock(physical_chip_count=lambda: 2)
"""
# The second process dies once the first has begun, which waits for it. A busy machine lists it two seconds
# late, when it is dead: Python's own pool of processes does not notice its death then.
DIES = TWO_CHIPS + """
import os, time
import train
from runtime import process
process.STOP_TIMEOUT = 3

class SlowList(set):
    def add(self, child):
        time.sleep(2)
        super().add(child)

def replica(settings, device_type):
    if multiprocessing.current_process().name.endswith(":1"):
        os.mkdir(settings.out_dir)
        time.sleep(1000)
    while not os.path.exists(settings.out_dir):
        time.sleep(0.1)
    raise OSError("no answer")  # as a request does

multiprocessing.process._children = SlowList()
train.replica = replica
"""
# Torch_xla's requests to the metadata server have no time limit. One process is enough.
HANGS = """
import multiprocessing, time
import train
from runtime import process
process.START_TIMEOUT = 3
if multiprocessing.current_process().name != "MainProcess":
    from torch_xla._internal import pjrt
    pjrt.initialize_multiprocess = lambda *_: time.sleep(1000)
    pjrt._run_thread_per_device = lambda *_, **__: time.sleep(1000)
"""
# Each process is a run of its own. A process that did not run this file would not know.
APART = TWO_CHIPS + """
import copy, os
import train
assert hidden_size == 32  # the flags before this file count in each process
_replica = train.replica

def replica(settings, device_type):
    rank = os.environ["PJRT_LOCAL_PROCESS_RANK"]
    settings = copy.copy(settings)
    settings.out_dir += rank
    settings.gcs_dir += rank
    open("pid" + rank, "w").write(str(os.getpid()))
    _replica(settings, device_type)

train.replica = replica
"""


def start(data, fork, *flags):
    """Starts train.py, which starts its replicas, one in a process; fork: the text of a config file."""
    Path("fork.py").write_text(fork)
    flags = "fork.py", "--device=xla", "--log_interval=1", *flags
    return start_train(data, "run", *flags, **xla_environment(1))


@pytest.mark.parametrize("fork, words", [(DIES, "OSError: no answer"), (HANGS, "Timeout")])
def test_a_replica_that_breaks_ends_the_run(fork, words, data):
    text = start(data, fork).output(1)
    assert words in text and "a replica died, see above if it said why; to continue: " in text


def test_a_preemption_saves_and_uploads_within_30_seconds(data, bucket_server):
    """SIGTERM reaches all processes of a host at once; each answer of the bucket takes half a second."""
    bucket_server.script.extend(["slow"] * 1000)
    process = start(data, APART, "--max_steps=100000", "--checkpoint_interval=0",
                    "--gcs_dir=gs://bucket/run")
    with begun(process):
        wait_for(lambda: curve("run0") and curve("run1"))  # both train
        began = time.monotonic()
        for pid in process.pid, Path("pid0").read_text(), Path("pid1").read_text():
            os.kill(int(pid), signal.SIGTERM)
        text = process.output(3)
    assert time.monotonic() - began < 30, text
    for rank in "01":
        [saved] = [path.name for path in Path(f"run{rank}").glob("ckpt_*.pt")]
        assert stored(bucket_server, f"run{rank}/{saved}") and f"stopped at step {int(saved[5:13])}" in text


# The topology variables, from which torch_xla's own function makes those of each process.

KAGGLE = dict(
    TPU_SKIP_MDS_QUERY="1", TPU_ACCELERATOR_TYPE="v5litepod-8", TPU_PROCESS_ADDRESSES="local",
    TPU_CHIPS_PER_HOST_BOUNDS="2,4,1", TPU_HOST_BOUNDS="1,1,1", TPU_WORKER_ID="0",
    TPU_WORKER_HOSTNAMES="localhost")
FOUR_HOSTS = KAGGLE | dict(
    TPU_ACCELERATOR_TYPE="v4-32", TPU_CHIPS_PER_HOST_BOUNDS="2,2,1", TPU_HOST_BOUNDS="1,1,4",
    TPU_WORKER_ID="3", TPU_WORKER_HOSTNAMES="trm-0,trm-1,trm-2,trm-3",
    TPU_PROCESS_ADDRESSES="trm-0:8476,trm-1:8476,trm-2:8476,trm-3:8476", TPU_PROCESS_PORT="8476")
# all variables of the only process of a host, and none of the host's own
FOUR_PROCESSES = dict(
    TPU_SKIP_MDS_QUERY="1", TPU_ACCELERATOR_TYPE="v4-32", TPU_WORKER_HOSTNAMES="trm-0,trm-1,trm-2,trm-3",
    TPU_PROCESS_ADDRESSES="trm-0:8476,trm-1:8476,trm-2:8476,trm-3:8476", TPU_PROCESS_PORT="8476",
    CLOUD_TPU_TASK_ID="3", TPU_PROCESS_BOUNDS="1,1,4", TPU_CHIPS_PER_PROCESS_BOUNDS="2,2,1",
    TPU_VISIBLE_CHIPS="0,1,2,3")
# what a TPU VM's metadata server answers
METADATA = {
    "tpu-env": "ACCELERATOR_TYPE: v4-32\nTPU_PROCESS_BOUNDS: '1,1,4'\nWORKER_ID: '2'\n"
               "TPU_CHIPS_PER_PROCESS_BOUNDS: '2,2,1'",
    "worker-network-endpoints": "unused:unused:10.0.0.1,unused:unused:10.0.0.2,unused:unused:10.0.0.3,"
                                "unused:unused:10.0.0.4"}


# environment, metadata, processes a host, host, hosts by address, bounds
TOPOLOGIES = {
    "kaggle": (KAGGLE, {}, 8, 0, ["localhost"], "2,4,1"),
    "v4-32": ({}, METADATA, 4, 2, ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"], "2,2,4"),
    "gke, four hosts": (FOUR_HOSTS, {}, 4, 3, ["trm-0", "trm-1", "trm-2", "trm-3"], "2,2,4"),
    "gke, of processes": (FOUR_PROCESSES, {}, 4, 3, ["trm-0", "trm-1", "trm-2", "trm-3"], "2,2,4"),
}


def test_each_process_has_its_own_place_among_all():
    in_new_process(check_topologies)


def check_topologies():
    for name, topology in TOPOLOGIES.items():
        print(name)
        check_topology(*topology)


def check_topology(environment, answers, num_processes, host, hosts, bounds):
    from torch_xla._internal import tpu
    tpu._get_metadata = answers.__getitem__
    addresses = [f"{name}:{8476 + rank}" for name in hosts for rank in range(num_processes)]
    environment = name_all_processes(environment, num_processes)
    for rank in range(num_processes):
        with mock.patch.dict(os.environ, environment, clear=True):
            tpu.configure_topology(rank, num_processes)
            want = dict(
                TPU_PROCESS_ADDRESSES=",".join(addresses), CLOUD_TPU_TASK_ID=str(host * num_processes + rank),
                TPU_PROCESS_BOUNDS=bounds, TPU_CHIPS_PER_PROCESS_BOUNDS="1,1,1",
                TPU_PROCESS_PORT=str(8476 + rank), TPU_VISIBLE_CHIPS=str(rank))
            assert {name: os.environ[name] for name in want} == want
            assert tpu.num_tpu_workers() == len(hosts)


# Eight chips on the bus, and xmp.spawn prints what its processes would have.
EIGHT_CHIPS = """
import glob, os
from pathlib import Path
from unittest import mock
import torch_xla.distributed.xla_multiprocessing as xmp
from torch_xla._internal import tpu
for _chip in range(8):
    Path(f"pci/{_chip}").mkdir(parents=True)
    Path(f"pci/{_chip}/vendor").write_text("0x1ae0")
    Path(f"pci/{_chip}/device").write_text("0x0063")
_glob = glob.glob
glob.glob = lambda path: _glob(path.replace("/sys/bus/pci/devices", "pci"))

def spawn(function):
    num_processes = tpu.num_local_processes()
    for rank in range(num_processes):
        with mock.patch.dict(os.environ):
            tpu.configure_topology(rank, num_processes)
            print(os.environ["TPU_PROCESS_ADDRESSES"], os.environ["CLOUD_TPU_TASK_ID"])

xmp.spawn = spawn
"""


def test_kaggles_image_has_eight_processes(data):
    Path("fork.py").write_text(EIGHT_CHIPS)
    # torch_xla, where another test imports it, sets PJRT_DEVICE
    variables = KAGGLE | dict(CLOUD_TPU_TASK_ID="0", TPU_PROCESS_BOUNDS="1,1,1", PJRT_DEVICE="")
    flags = arguments(data, "run", "fork.py", "--device=auto")
    text = start_script("train", flags, **variables).output()
    first, *processes = [line for line in text.splitlines() if "localhost:" in line or "device" in line]
    addresses = ",".join(f"localhost:{port}" for port in range(8476, 8484))
    assert processes == [f"{addresses} {rank}" for rank in range(8)], text
    assert "removed from the environment, as not for 8 processes: CLOUD_TPU_TASK_ID=0 TPU_PROC" in first
