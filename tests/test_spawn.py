"""xmp.spawn with real processes, as on TPU hosts: how they start, stop and die."""
import os
import signal
import subprocess
import time

import pytest
from helpers import ROOT, begun, children, command, popen, stored

pytestmark = pytest.mark.xla

# A fork in each process: the two replicas are runs of their own.
APART = """
import os
import time
import train
train.STOP_TIMEOUT = 3
_replica = train.replica

def replica(settings, kind):
    rank = os.environ["PJRT_LOCAL_PROCESS_RANK"]
    {}
    settings.out_dir += rank
    settings.gcs_dir += rank if settings.gcs_dir else ""
    _replica(settings, kind)

train.replica = replica
"""


def start(data, out, tmp_path, code, *flags):
    """Starts train.py on two processes; code: what each does first."""
    fork = tmp_path / "fork.py"
    fork.write_text(code if "import" in code else APART.format(code))
    argv = command(data, out, str(fork), "--device=xla", "--log_interval=1", *flags,
                   script=f"{ROOT}/tests/spawn_two.py")
    env = os.environ | {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1", "PYTHONPATH": ROOT}
    return popen(argv, env=env, start_new_session=True)


def end(process, seconds):
    """Returns the exit code and the output of a process that ends by itself within so many seconds."""
    try:
        text, _ = process.communicate(timeout=seconds)
        return process.returncode, text
    finally:
        subprocess.run(["pkill", "-9", "-s", str(process.pid)])  # its session


def test_an_error_of_one_replica_ends_the_others(data, tmp_path):
    """Requests' errors are OSErrors. torch_xla waits for rank 0 first, which waits for its peer."""
    code = "if rank == '1': raise OSError('a server that does not answer')\n    time.sleep(1000)"
    status, text = end(start(data, tmp_path / "run", tmp_path, code), 60)
    assert status == 1 and "a server that does not answer" in text and "a replica died" in text


def test_a_replica_that_hangs_before_it_begins_ends_by_itself(data, tmp_path):
    """torch_xla's requests to the metadata server have no time limit."""
    code = """
import time
import train
train.START_TIMEOUT = 3
if __import__("multiprocessing").current_process().name != "MainProcess":
    from torch_xla._internal import pjrt
    pjrt.initialize_multiprocess = lambda *_: time.sleep(1000)
    pjrt._run_thread_per_device = lambda *_, **__: time.sleep(1000)
"""
    status, text = end(start(data, tmp_path / "run", tmp_path, code), 60)
    assert status == 1 and "Timeout" in text and "a replica died" in text


def test_a_replica_that_is_killed_ends_the_run(data, tmp_path):
    process = start(data, tmp_path / "run", tmp_path, "pass", "--max_steps=100000")
    with begun(process, "step 3/"):
        os.kill(children(process.pid)[-1], signal.SIGKILL)
        status, text = end(process, 60)
    assert status == 1 and "--init_from=auto continues" in text


def test_a_preemption_saves_and_uploads_within_30_seconds(data, front, emulator, tmp_path):
    """SIGTERM reaches all processes of a host at once; each answer of the bucket takes half a second."""
    front.script.extend(["slow"] * 1000)
    flags = ["--max_steps=100000", "--checkpoint_interval=0", "--gcs_dir=gs://bucket/run"]
    process = start(data, tmp_path / "run", tmp_path, "train.STOP_TIMEOUT = 60", *flags)
    with begun(process, "step 3/"):
        began = time.monotonic()
        os.killpg(process.pid, signal.SIGTERM)
        status, text = end(process, 60)
    assert status == 3 and time.monotonic() - began < 30, text
    for rank in "01":
        [saved] = [path.name for path in (tmp_path / f"run{rank}").glob("ckpt_*.pt")]
        assert stored(emulator, f"run{rank}/{saved}") and f"stopped at step {int(saved[5:13])}" in text
