"""Trains under scripts/tpu.sh keep on a simulated slice that random faults strike, and checks what comes out.

    python tests/chaos.py --seed=0 --faults=30        # about 10 minutes on 2 cores

The slice has two hosts (folders) and three ranks; rank 0 lives on host 1. Its shells, processes and
checkpoints are real: train.py on the CPU, with gloo. The bucket is gcp-storage-emulator behind the proxy of
test_gcs.py, which fails one request in fifty. The same run without faults follows. The exit code is 0 if the
run completed with the weights that it would have had without faults, never restarted before the newest
complete checkpoint of the bucket, and left no process.
"""
import argparse
import io
import json
import logging
import math
import os
import random
import re
import resource
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
from conftest import hosts
from fake_gcloud import ROOT, Cloud, kill_processes, processes, write_program
from gcp_storage_emulator.server import create_server
from test_gcs import Front, serve
from torch.utils._pytree import keystr, tree_flatten_with_path

from bucket import upload_dataset

# Environment variables that change float32 arithmetic: the hosts have those of the run without faults.
ARITHMETIC = "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR"
THREE_RANKS = ("1 2", "0")  # the ranks of each host
INTERVAL = 5  # steps between checkpoints
SETTINGS = (
    "--device=cpu", "--hidden_size=32", "--num_heads=2", "--puzzle_emb_ndim=32", "--puzzle_emb_len=2",
    "--H_cycles=2", "--L_cycles=2", "--halt_max_steps=4", "--forward_dtype=float32", "--global_batch_size=24",
    "--lr=1e-3", "--lr_warmup_steps=5", "--log_interval=1", f"--checkpoint_interval={INTERVAL}",
    "--keep_last_n=2", "--eval_interval=20", "--eval_max_puzzles=20")
DATA = ("--source=generate", "--size=4", "--num_train=64", "--num_test=40", "--num_aug=5")
# python3 -m venv on a host: links to the Python that runs this, and a pip that installs nothing. On a host
# with several ranks, python starts a process for each.
PYTHON3 = f"""
mkdir -p venv/bin
ln -s {sys.prefix}/lib venv/lib
echo "home = {os.path.dirname(sys._base_executable)}" >venv/pyvenv.cfg
ln -s {sys._base_executable} venv/bin/python3
echo '#!/bin/sh' | tee venv/bin/pip >venv/bin/python
if [[ $RANKS == *' '* ]]; then
  echo 'exec "$HOME/trm/venv/bin/python3" -S {ROOT}/tests/fake_gcloud.py ranks "$@"' >>venv/bin/python
else
  ln -sf python3 venv/bin/python
fi
chmod +x venv/bin/*
"""


def chaos(folder, names, seed=0, steps=200, ranks=THREE_RANKS, poll=1, report=print):
    """Trains under keep while the faults of these names strike, in this order, at moments drawn by the seed.

    ranks: of each host, as "1 2". poll: seconds between keep's checks. Raises AssertionError if the run does
    not complete, or not as one without faults.
    """
    with slice_with_data(folder, ranks, seed) as tpu:
        tpu.start_keep(steps, poll)
        strike(tpu, names, random.Random(seed), steps, report)
        assert tpu.keep.wait(300) == 0, f"keep ended with exit code {tpu.keep.returncode}"
        check_end(tpu, steps)
        check_weights(tpu, steps, report)


def strike(tpu, names, draw, steps, report):
    """Lets the faults strike, each in its share of the run, or every fifth during the restart before it."""
    during_restart = [i % 5 == 4 and names[i - 1] != "a disk that fills" for i in range(len(names))] + [False]
    for i, name in enumerate(names):
        if during_restart[i]:
            rest(tpu, draw.uniform(0, 8))
        else:
            step = 3 + int((steps - 25) * (i + draw.random()) / len(names))
            wait_for(tpu, partial(tpu.is_past, step), f"step {step}")
            rest(tpu, draw.uniform(0, 0.3))
        FAULTS[name](tpu, draw)
        if during_restart[i + 1]:
            report(f"step {tpu.mark.step}: {name}, and during the restart")
            continue
        wait_for(tpu, tpu.has_recovered, f"step after {name}", seconds=240)
        lost = max(0, tpu.mark.step - tpu.runs[-1].first) if tpu.runs[-1].pid != tpu.mark.pid else 0
        report(f"step {tpu.mark.step}: {name}; the next step came after {time.time() - tpu.mark.time:.1f} s, "
               f"{lost} steps were lost")


def rest(tpu, seconds):
    """Waits, and reads what the run prints."""
    end = time.time() + seconds
    while time.time() < end:
        tpu.observe()
        time.sleep(0.02)


def wait_for(tpu, condition, description, seconds=120, pause=0.02):
    """The first true value of condition(); raises AssertionError if there is none, or keep ends."""
    deadline = time.time() + seconds
    while time.time() < deadline:
        tpu.observe()
        value = condition()
        if value:
            return value
        code = tpu.keep and tpu.keep.poll()
        assert code is None, f"keep ended with exit code {code} before the {description}"
        time.sleep(pause)
    raise AssertionError(f"no {description} within {seconds} s")


# Faults.

def kill_rank(tpu, draw, how=signal.SIGKILL):
    ranks = wait_for(tpu, tpu.all_ranks, "process for each rank")
    tpu.set_mark()
    os.kill(draw.choice(sorted(ranks.values())), how)


def kill_parent(tpu, draw):
    """What torchrun's agent is. Its ranks must end by themselves: keep, which would kill them, is held.

    A host with one rank has no agent: its parent is the shell that tpu.sh starts.
    """
    parents = {pid: parent(pid) for pid in wait_for(tpu, tpu.all_ranks, "process for each rank").values()}
    struck = draw.choice(sorted(p for p in parents.values() if list(parents.values()).count(p) > 1))
    orphans = {pid for pid in parents if parents[pid] == struck}
    # A rank notes who its parent is before it loads torch.
    wait_for(tpu, lambda: all("libtorch" in read(f"/proc/{pid}/maps") for pid in orphans), "torch")
    tpu.keep.send_signal(signal.SIGSTOP)
    try:
        tpu.set_mark()
        os.kill(struck, signal.SIGKILL)
        wait_for(tpu, lambda: orphans.isdisjoint(processes(tpu.cloud / "hosts")), "end of its ranks")
    finally:
        tpu.keep.send_signal(signal.SIGCONT)


def preempt(tpu, draw, silently=False):
    wait_for(tpu, tpu.is_ready, "slice")
    tpu.set_mark()
    if silently:
        tpu.lose_host(draw.randrange(tpu.hosts))
    else:
        tpu.preempt()


def preempt_in_save(tpu, draw):
    wait_for(tpu, tpu.has_recovered, "step")
    wait_for(tpu, lambda: list(tpu.out_dir.glob("ckpt_*.tmp")), "half a checkpoint", pause=0.0005)
    tpu.set_mark()
    tpu.preempt()


def preempt_in_upload(tpu, draw):
    """Uploads take 2 s, in which training writes several checkpoints."""
    wait_for(tpu, tpu.has_recovered, "step")
    step = tpu.runs[-1].last + draw.randrange(INTERVAL, 3 * INTERVAL)
    tpu.front.slow_uploads = True
    wait_for(tpu, partial(tpu.is_past, step), f"step {step} with slow uploads")
    preempt(tpu, draw)
    tpu.front.slow_uploads = False


def hang_ssh(tpu, draw):
    """A rank dies, and an ssh connects and never ends, until keep has noticed."""
    before = read(tpu.output).count("run: silent")
    kill_rank(tpu, draw)
    (tpu.cloud / "hang").write_text(str(draw.randrange(tpu.hosts)))
    wait_for(tpu, lambda: read(tpu.output).count("run: silent") > before, "silent host")
    (tpu.cloud / "hang").unlink()


def kill_and_wait(tpu, draw):
    """Kills a rank, and waits until keep has copied the files again and begins to start the run."""
    wait_for(tpu, tpu.all_ranks, "process for each rank")  # a restart may be under way
    starts = len(tpu.calls("host_start"))
    kill_rank(tpu, draw)
    wait_for(tpu, lambda: len(tpu.calls("host_start")) > starts, "restart")


def kill_and_refuse(tpu, draw):
    """The bucket answers 503 for 10 s from the first request after the restart."""
    kill_and_wait(tpu, draw)
    tpu.front.outage = "armed"


def fill_disk(tpu, draw):
    """Rank 0 can write no file past 4 kB: its output and logs neither."""
    pid = wait_for(tpu, tpu.all_ranks, "process for each rank")[0]
    hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
    tpu.set_mark()
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, hard))
    rest(tpu, draw.uniform(0.5, 2))
    with suppress(ProcessLookupError):  # it may have ended
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
    tpu.observe()
    tpu.mark.survived_until = tpu.runs[-1].last


def change_file(tpu, draw):
    """At a restart, model.py is another one on one host, whose ranks would not learn."""
    refusal = re.compile("not that of|differ")
    before = len(refusal.findall(read(tpu.output)))
    kill_and_wait(tpu, draw)
    with open(tpu.home(draw.randrange(tpu.hosts)) / "trm/model.py", "a") as f:
        f.write("\n\ndef learning_rate(*arguments):\n    return 0.0\n")
    wait_for(tpu, lambda: len(refusal.findall(read(tpu.output))) > before, "refusal")


FAULTS = {
    "kill -9 of a rank": kill_rank,
    "kill -9 of a rank's parent": kill_parent,
    "SIGTERM to one rank": partial(kill_rank, how=signal.SIGTERM),
    "a host falls silent, its folder gone": partial(preempt, silently=True),
    "a rank hangs": partial(kill_rank, how=signal.SIGSTOP),
    "preemption": preempt,
    "preemption during a save": preempt_in_save,
    "preemption during slow uploads": preempt_in_upload,
    "10 s of 503 at a restart": kill_and_refuse,
    "an ssh that hangs while a rank dies": hang_ssh,
    "a disk that fills": fill_disk,
    "another model.py on one host": change_file,
}


# The slice and its bucket.

@contextmanager
def slice_with_data(folder, ranks, seed=0):
    """A Slice, whose bucket holds a dataset; ranks: of each host, as "1 2"."""
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    emulator = create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
    emulator.start()
    while not emulator._api._httpd:
        time.sleep(0.01)
    emulator._api._httpd.handle_error = lambda *_: None  # it fails on requests that a fault has cut off
    front = serve(FaultyFront, emulator=emulator._api._httpd.server_port, random=random.Random(seed),
                  outage=None, slow_uploads=False, delay=2)
    front.storage = emulator._storage
    tpu = Slice(folder, ranks, front)
    data = folder / "four"
    command = [sys.executable, ROOT / "prepare_sudoku.py", *DATA, f"--output_dir={data}"]
    subprocess.run(command, check=True, capture_output=True)
    os.environ["STORAGE_EMULATOR_HOST"] = front.url
    try:
        upload_dataset(str(data), "gs://bucket/data/four")
        front.rate = 0.02
        yield tpu
    finally:
        del os.environ["STORAGE_EMULATOR_HOST"]
        if tpu.keep:
            tpu.keep.kill()
        kill_processes(tpu.cloud / "hosts")
        front.stop.set()
        front.server_close()
        emulator.stop()


class Slice(Cloud):
    """The simulated slice with a copy of the project, and what its run prints.

    runs: each run that trained: pid, first and last step. mark: time, pid and step of the last fault.
    """

    def __init__(self, folder, ranks, front):
        world = " ".join(ranks).split()
        shared = {name: os.environ[name] for name in ARITHMETIC if name in os.environ}
        shared |= hosts(len(world))[0] | dict(OMP_NUM_THREADS="1", STORAGE_EMULATOR_HOST=front.url)
        super().__init__(folder, [shared | dict(HOST=str(i), GROUP_RANK=str(i), RANK=r, RANKS=r)
                                  for i, r in enumerate(ranks)])
        for path in (*ROOT.glob("*.py"), *ROOT.glob("requirements*.txt"), ROOT / ".gitignore"):
            shutil.copy(path, self.project)
        write_program(self.cloud / "host_bin/python3", PYTHON3)
        self.front, self.hosts, self.world, self.output = front, len(ranks), len(world), folder / "keep.txt"
        self.main_host = next(i for i, r in enumerate(ranks) if "0" in r.split())
        self.out_dir = self.home(self.main_host) / "trm/out/run"
        self.keep, self.runs = None, []
        self.set_mark()

    def command(self, steps):
        """Of the run, as tpu.sh takes it."""
        return ["train.py", *SETTINGS, f"--max_steps={steps}", "--out_dir=out/run", "--stall_timeout=20",
                "--gcs_dir=gs://bucket/run", "--data_path=gs://bucket/data/four"]

    def start_keep(self, steps, poll):
        with open(self.output, "w") as f:
            self.keep = self.start(
                "keep", *self.command(steps), stdout=f, stderr=f, POLL=str(poll), STOP_WAIT="5", TIMEOUT="10",
                MAX_FAILURES="5",  # the faults come faster than checkpoints
                STORAGE_EMULATOR_HOST=self.front.url)

    def observe(self):
        """Reads what rank 0 printed."""
        run = self.home(self.main_host) / "trm/run"
        try:
            pid, text = read(run / "pid"), read(run / "output.txt")
        except OSError:
            return
        begin = re.search(r"^training from step (\d+) to", text, re.M)
        if not begin:
            return
        if not self.runs or self.runs[-1].pid != pid:
            self.runs.append(SimpleNamespace(pid=pid, first=int(begin[1]), last=int(begin[1])))
        steps = map(int, re.findall(r"^step (\d+)/", text, re.M))
        self.runs[-1].last = max(self.runs[-1].last, *steps, 0)

    def in_bucket(self, name):
        return self.front.storage.get_file("bucket", f"run/{name}")

    def is_past(self, step):
        return self.runs and self.runs[-1].last >= step

    def set_mark(self):
        """A fault strikes."""
        self.observe()
        last = self.runs[-1] if self.runs else SimpleNamespace(pid=None, last=0)
        self.mark = SimpleNamespace(time=time.time(), pid=last.pid, step=last.last, survived_until=math.inf,
                                    complete=self.newest_complete())

    def newest_complete(self):
        """Step of the newest complete checkpoint in the bucket, or 0."""
        names = [item["name"] for item in self.front.storage.get_file_list("bucket", "run/", None)[0]]
        return max((int(name[9:17]) for name in names
                    if re.fullmatch(r"run/ckpt_\d{8}\.json", name) and name[:-4] + "pt" in names), default=0)

    def has_recovered(self):
        """Whether a new run has made a step, or the same one after a fault that it may survive."""
        if not self.runs or self.keep.poll() == 0:
            return bool(self.runs)
        run, mark = self.runs[-1], self.mark
        if run.pid == mark.pid:
            return run.last > mark.survived_until
        assert run.first >= mark.complete, f"restarted at step {run.first}; {mark.complete} was complete"
        return run.last > run.first

    def is_ready(self):
        return all(self.home(host).is_dir() for host in range(self.hosts))

    def all_ranks(self):
        """{rank: pid} of the processes that train, or {} unless there is exactly one for each rank."""
        found = []
        for pid in processes(self.cloud / "hosts", r"python3?\0-u\0train.py\0") if self.is_ready() else ():
            with suppress(OSError):  # it has ended
                found.append((int(re.search(r"\0RANK=(\d+)", read(f"/proc/{pid}/environ"))[1]), pid))
        return dict(found) if sorted(rank for rank, _ in found) == list(range(self.world)) else {}


class FaultyFront(Front):
    """Besides the faults of Front: uploads that take 2 s, and 10 s of 503."""

    def draw(self, kind, length):
        server = self.server
        if server.outage == "armed":
            server.outage = time.time() + 10
        if server.outage and time.time() < server.outage:
            return 503
        if server.slow_uploads and kind == "insert":
            return "slow"
        return super().draw(kind, length)


def parent(pid):
    return int(read(f"/proc/{pid}/stat").rpartition(")")[2].split()[1])


def read(path):
    return Path(path).read_text(encoding="utf-8", errors="replace")


# What must hold at the end.

def check_end(tpu, steps):
    """keep said "complete" once, at the end; so says the log in the bucket; and no process is left."""
    said = read(tpu.output).count("run: complete")
    assert said == 1, f"keep saw {said} complete runs"
    last = json.loads(tpu.in_bucket("metrics.jsonl").decode().splitlines()[-1])
    assert last["step"] == steps and last.get("final"), f"the log in the bucket ends with {last}"
    time.sleep(1)  # for what ends by itself
    left = processes(tpu.cloud / "hosts")
    assert not left, "left behind: " + "; ".join(read(f"/proc/{pid}/cmdline") for pid in left)


def check_weights(tpu, steps, report):
    """The last checkpoint is, bit for bit, that of a run without faults.

    A stop on request saves between two scheduled checkpoints, and all sequences start afresh there. So do
    those of a run without faults that is stopped at the same steps.
    """
    stops = []
    for run in tpu.runs:
        stops = [step for step in stops if step < run.first] + [run.first]
    stops = [step for step in stops if step % INTERVAL]
    got = tensors(torch.load(io.BytesIO(tpu.in_bucket(f"ckpt_{steps:08d}.pt")), weights_only=True))
    wanted, wanted_losses = train_without_faults(tpu, [*stops, steps])
    different = [name for name, tensor in tensors(wanted).items() if not torch.equal(got[name], tensor)]
    assert not different, f"{different} differ from those of a run without faults, stopped at {stops}"
    curve = losses(tpu.in_bucket("metrics.jsonl").decode())
    assert len(curve) >= steps / 2, f"{len(curve)} of {steps} losses"
    assert curve.items() <= wanted_losses.items(), "losses differ from those of a run without faults"
    report(f"weights, average and moments: bit for bit those of a run without faults, stopped at {stops}; "
           f"{len(curve)} of {steps} losses in the log, all equal")


def train_without_faults(tpu, stops):
    """The last checkpoint and {step: loss} of a run that is stopped after these steps."""
    out = Path(tempfile.mkdtemp(dir=tpu.project))
    for step in stops:
        command = [sys.executable, "train.py", *SETTINGS, f"--max_steps={step}", "--data_path=../four",
                   f"--out_dir={out}", "--init_from=auto"]
        ranks = [subprocess.Popen(command, cwd=tpu.project, stdout=subprocess.DEVNULL,
                                  env=os.environ | host | dict(OMP_NUM_THREADS="1"))
                 for host in hosts(tpu.world)]
        assert not any([rank.wait() for rank in ranks]), "the run without faults failed"
    checkpoint = torch.load(out / f"ckpt_{stops[-1]:08d}.pt", weights_only=True)
    return checkpoint, losses(read(out / "metrics.jsonl"))


def losses(text):
    lines = map(json.loads, text.splitlines())
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def tensors(checkpoint):
    """{name: tensor} of all that a checkpoint holds."""
    leaves, _ = tree_flatten_with_path(checkpoint)
    return {keystr(path): leaf for path, leaf in leaves if torch.is_tensor(leaf)}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=30)
    c = parser.parse_args()
    draw, names = random.Random(c.seed), []
    while len(names) < c.faults:
        names += draw.sample(sorted(FAULTS), len(FAULTS))
    folder, began = Path(tempfile.mkdtemp(prefix="chaos-")), time.time()
    try:
        chaos(folder, names[:c.faults], c.seed, 60 * c.faults)
    except AssertionError as e:
        sys.exit(f"chaos.py: {e}; see {folder}")
    shutil.rmtree(folder)
    print(f"complete after {time.time() - began:.0f} s, the run without faults included")


if __name__ == "__main__":
    main()
