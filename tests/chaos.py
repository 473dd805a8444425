"""Trains under scripts/tpu.sh keep on a simulated slice that random faults strike, and checks what comes out.

    python tests/chaos.py --seed=0 --faults=30        # about 10 minutes on 2 cores

The slice has two hosts (folders) with one rank each; rank 0 lives on host 1. Its shells, processes and
checkpoints are real: train.py on the CPU, with gloo. The bucket is gcp-storage-emulator behind the proxy of
servers.py, which fails one request in fifty. The same run without faults follows. The exit code is 0 if the
run completed with the weights that it would have had without faults, never restarted before the newest
complete checkpoint of the bucket, and left no process.
"""
import argparse
import io
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from fake_gcloud import ROOT, Cloud, kill_processes, processes, write_program
from helpers import TINY, hosts, same, small_dataset, start_script
from servers import draw_faults, serve_bucket, stored, upload

from runtime.files import complete_checkpoints, step_of

INTERVAL = 5  # steps between checkpoints
SETTINGS = (
    "--device=cpu", *TINY, "--global_batch_size=24", "--lr=1e-3", "--log_interval=1",
    f"--checkpoint_interval={INTERVAL}", "--keep_last_n=2", "--eval_interval=20", "--eval_max_puzzles=20")
# what the hosts get of the project
COPY = 'cp -r "$0"/{*.py,puzzles,runtime,requirements*.txt,.gitignore} .'
# python3 -m venv on a host: links to the Python that runs this, and a pip that installs nothing
PYTHON3 = f"""
mkdir -p venv/bin
ln -s {sys.prefix}/lib venv/lib
echo "home = {os.path.dirname(sys._base_executable)}" >venv/pyvenv.cfg
ln -s {sys._base_executable} venv/bin/python3
ln -s python3 venv/bin/python
echo '#!/bin/sh' >venv/bin/pip
chmod +x venv/bin/pip
"""


def chaos(folder, names, seed=0, steps=200):
    """Trains under keep while the faults of these names strike, in this order, at moments drawn by the seed.

    Args:
        folder: for the slice, the project and the bucket's data.
        names: of FAULTS.
        seed: of the moments.
        steps: of the run.

    Raises:
        AssertionError: the run does not complete, or not as one without faults.
    """
    draw = random.Random(seed)
    with slice_with_data(folder, seed) as tpu:
        tpu.start_keep(steps)
        for i, name in enumerate(names):
            # each fault in its share of the run
            step = 3 + int((steps - 25) * (i + draw.random()) / len(names))
            observe_until(tpu, partial(tpu.is_past, step), f"step {step}")
            FAULTS[name](tpu, draw)
            print(f"{name} after step {tpu.runs[-1].last}", flush=True)
            observe_until(tpu, tpu.has_recovered, f"step after {name}", seconds=240)
        assert tpu.keep.wait(300) == 0, f"keep ended with exit code {tpu.keep.returncode}"
        check_end(tpu, steps)
        check_weights(tpu, steps)


def observe_until(tpu, condition, description, seconds=120):
    """Returns the first true value of condition(). Raises AssertionError if none comes, or keep ends."""
    deadline = time.time() + seconds
    while time.time() < deadline:
        tpu.observe()
        value = condition()
        if value:
            return value
        code = tpu.keep.poll()
        assert code is None, f"keep ended with exit code {code} before the {description}"
        time.sleep(0.1)
    raise AssertionError(f"no {description} within {seconds} s")


# Faults.

def kill_rank(tpu, draw, how=signal.SIGKILL):
    ranks = observe_until(tpu, tpu.all_ranks, "process for each rank")
    tpu.note_fault()
    os.kill(draw.choice(ranks), how)


def preempt(tpu, draw):
    observe_until(tpu, tpu.home(1).is_dir, "slice")
    tpu.note_fault()
    tpu.preempt()


def preempt_twice(tpu, draw):
    """Preempts the slice once more while the run starts again."""
    preempt(tpu, draw)
    time.sleep(draw.uniform(0, 8))
    preempt(tpu, draw)


def preempt_in_upload(tpu, draw):
    """Preempts the slice while requests take half a second longer, in which training goes on."""
    step = tpu.runs[-1].last + draw.randrange(INTERVAL, 3 * INTERVAL)
    faults = tpu.bucket_server.script
    tpu.bucket_server.script = ["slow"] * 10_000
    observe_until(tpu, partial(tpu.is_past, step), f"step {step} with a slow bucket")
    preempt(tpu, draw)
    tpu.bucket_server.script = faults


FAULTS = {
    "kill -9 of a rank": kill_rank,
    "SIGTERM to one rank": partial(kill_rank, how=signal.SIGTERM),
    "a rank hangs": partial(kill_rank, how=signal.SIGSTOP),
    "preemption": preempt,
    "preemption during a restart": preempt_twice,
    "preemption during slow uploads": preempt_in_upload,
}


# The slice and its bucket.

@contextmanager
def slice_with_data(folder, seed=0):
    """Yields a Slice, whose bucket holds a dataset."""
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    bucket_server = serve_bucket()
    os.environ["STORAGE_EMULATOR_HOST"] = bucket_server.url
    tpu = Slice(folder, bucket_server)
    try:
        upload(small_dataset(folder / "four"), "gs://bucket/data/four")
        bucket_server.script = draw_faults(seed, 0.02)
        yield tpu
    finally:
        del os.environ["STORAGE_EMULATOR_HOST"]
        if tpu.keep:
            tpu.keep.kill()
        kill_processes(tpu.cloud / "hosts")
        bucket_server.server_close()


class Slice(Cloud):
    """The simulated slice with a copy of the project, and what its run prints.

    runs: each run that trained: pid, first and last step. struck, complete: the pid of the run that the last
    fault struck, and the newest complete checkpoint that the bucket had then.
    """

    def __init__(self, folder, bucket_server):
        shared = dict(OMP_NUM_THREADS="1", STORAGE_EMULATOR_HOST=bucket_server.url)
        rank_0, rank_1 = hosts(2)
        super().__init__(folder, [shared | rank_1 | dict(HOST="0"), shared | rank_0 | dict(HOST="1")])
        subprocess.run(["bash", "-ec", COPY, ROOT], cwd=self.project, check=True)
        write_program(self.cloud / "host_bin/python3", PYTHON3)
        write_program(self.cloud / "bin/python3", "exit 1")  # the user's machine has no torch
        self.bucket_server = bucket_server
        self.output = folder / "keep.txt"
        self.keep = None
        self.runs = []

    def start_keep(self, steps):
        command = ["train.py", *SETTINGS, f"--max_steps={steps}", "--out_dir=out/run", "--stall_timeout=20",
                   "--gcs_dir=gs://bucket/run", "--data_path=gs://bucket/data/four"]
        with open(self.output, "w") as f:
            self.keep = self.start(
                "keep", *command, stdout=f, stderr=f, POLL="1", STOP_WAIT="5", TIMEOUT="10",
                MAX_FAILURES="5")  # the faults come faster than checkpoints

    def observe(self):
        """Tells gcloud what the bucket holds, and reads what rank 0 printed. Returns the bucket's names."""
        with self.bucket_server.lock:
            objects, _ = self.bucket_server.storage.get_file_list("bucket", "run/", None)
        names = [item["name"].removeprefix("run/") for item in objects]
        (self.cloud / "bucket").write_text("\n".join(names))
        with suppress(OSError):
            pid, text = (read(self.home(1) / "trm/run" / name) for name in ("pid", "output.txt"))
            # the step that training starts from, and those of the log
            steps = [int(step) for step in re.findall(r"^(?:training from )?step (\d+)[ /:]", text, re.M)]
            if steps and (not self.runs or self.runs[-1].pid != pid):
                self.runs.append(SimpleNamespace(pid=pid, first=steps[0]))
            if steps:
                self.runs[-1].last = max(steps)
        return names

    def is_past(self, step):
        return self.runs and self.runs[-1].last >= step

    def note_fault(self):
        """Notes what a fault strikes."""
        names = self.observe()
        self.struck = self.runs[-1].pid
        self.complete = max((step_of(name) for name in complete_checkpoints(names)), default=0)

    def has_recovered(self):
        """Returns True if a new run has made a step, or keep is done."""
        run = self.runs[-1]
        if self.keep.poll() == 0:
            return True
        if run.pid == self.struck:
            return False
        assert run.first >= self.complete, f"restarted at step {run.first}; {self.complete} was complete"
        return run.last > run.first

    def all_ranks(self):
        """Returns the pid of the process that trains on each host, or [] unless both do."""
        pids = processes(self.cloud / "hosts", r"python3?\0-u\0train.py\0")
        return pids if len(pids) == 2 else []


def read(path):
    return Path(path).read_text(encoding="utf-8", errors="replace")


# What must hold at the end.

def check_end(tpu, steps):
    """keep said "complete" once, at the end; so says the log in the bucket; and no process is left."""
    assert read(tpu.output).count("run: complete") == 1
    last = json.loads(stored(tpu.bucket_server, "run/metrics.jsonl").decode().splitlines()[-1])
    assert last["step"] == steps and last["final"]
    time.sleep(1)  # for what ends by itself
    assert not processes(tpu.cloud / "hosts"), "a process was left behind"


def check_weights(tpu, steps):
    """The last checkpoint is, bit for bit, that of a run without faults.

    A stop on request saves between two scheduled checkpoints, and all sequences start afresh there. So do
    the sequences of a run without faults that is stopped at the same steps.
    """
    stops = []
    for run in tpu.runs:
        stops = [step for step in stops if step < run.first] + [run.first]
    stops = [step for step in stops if step % INTERVAL]

    # as many ranks, without tpu.sh
    out_dir = Path(tempfile.mkdtemp(dir=tpu.project))
    for step in [*stops, steps]:
        flags = [*SETTINGS, f"--max_steps={step}", f"--data_path={tpu.project.parent}/four",
                 f"--out_dir={out_dir}", "--init_from=auto"]
        ranks = [start_script("train", flags, **host) for host in hosts(2)]
        for rank in ranks:
            rank.output()

    name = f"ckpt_{steps:08d}.pt"
    expected = torch.load(out_dir / name)
    state = torch.load(io.BytesIO(stored(tpu.bucket_server, f"run/{name}")))
    for key in ("weights", "ema", "optimizer"):
        assert same(state[key], expected[key]), f"{key}: not as without faults, stopped at {stops}"
    print(f"weights, average and moments: bit for bit those of a run without faults, stopped at {stops}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=30)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # as on the hosts
    names = random.Random(options.seed).choices(sorted(FAULTS), k=options.faults)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))  # it stays if a check fails
    chaos(folder, names, options.seed, 60 * options.faults)
    shutil.rmtree(folder)
