"""xmp.spawn with real processes, as on TPU hosts: how they start, stop and die."""
import os
import signal
import time
from pathlib import Path

import pytest
from helpers import begun, children, start_train, stored, xla_environment

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
# The second process dies once the first has begun, which waits for it. It starts a second late, as on a busy
# machine: Python's own pool of processes does not notice its death then.
DIES = TWO_CHIPS + """
import os, time
from concurrent.futures import ProcessPoolExecutor
import train
from runtime import process
process.STOP_TIMEOUT = 3
_start = ProcessPoolExecutor._spawn_process

def slow_start(self):
    time.sleep(1)
    _start(self)

def replica(settings, kind, began):
    if multiprocessing.current_process().name.endswith(":1"):
        os.mkdir(settings.out_dir)
        time.sleep(1000)
    while not os.path.exists(settings.out_dir):
        time.sleep(0.1)
    raise OSError("no answer")  # as a request does

ProcessPoolExecutor._spawn_process = slow_start
train.replica = replica
"""
# Torch_xla's requests to the metadata server have no time limit. One process is enough.
HANGS = """
import multiprocessing, time
import train
train.START_TIMEOUT = 3
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

def replica(settings, kind, began):
    rank = os.environ["PJRT_LOCAL_PROCESS_RANK"]
    settings = copy.copy(settings)
    settings.out_dir += rank
    settings.gcs_dir += rank
    _replica(settings, kind, began)

train.replica = replica
"""
# SIGTERM comes before there is a replica, and once more just after a replica's process has begun.
EARLY = """
import multiprocessing, os, signal, time
from concurrent.futures import ProcessPoolExecutor
_start = ProcessPoolExecutor._spawn_process

def start(self):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1)
    _start(self)
    for replica in self._processes.values():
        replica.terminate()

if multiprocessing.current_process().name == "MainProcess":
    ProcessPoolExecutor._spawn_process = start
"""


def start(data, fork, *flags):
    """Starts train.py, which starts its replicas, one in a process; fork: the text of a config file."""
    Path("fork.py").write_text(fork)
    flags = "fork.py", "--device=xla", "--log_interval=1", "--H_cycles=1", "--L_cycles=1", *flags
    return start_train(data, "run", *flags, **xla_environment(1))


@pytest.mark.parametrize("fork, words", [(DIES, "OSError: no answer"), (HANGS, "Timeout")])
def test_a_replica_that_breaks_ends_the_run(fork, words, data):
    text = start(data, fork).output(1)
    assert words in text and "a replica died, see above; --init_from=auto continues" in text


def test_a_preemption_saves_and_uploads_within_30_seconds(data, front, emulator):
    """SIGTERM reaches all processes of a host at once; each answer of the bucket takes half a second."""
    front.script.extend(["slow"] * 1000)
    process = start(data, APART, "--max_steps=100000", "--checkpoint_interval=0",
                    "--gcs_dir=gs://bucket/run")
    with begun(process, "step 3/"), begun(process, "step 3/"):  # both runs train
        began = time.monotonic()
        for pid in [process.pid, *children(process.pid)]:
            os.kill(pid, signal.SIGTERM)
        text = process.output(3)
    assert time.monotonic() - began < 30, text
    for rank in "01":
        [saved] = [path.name for path in Path(f"run{rank}").glob("ckpt_*.pt")]
        assert stored(emulator, f"run{rank}/{saved}") and f"stopped at step {int(saved[5:13])}" in text


def test_a_preemption_at_the_start_stops_the_run(data):
    assert "stopped at step " in start(data, EARLY, "--max_steps=100000").output(3)
