"""Trains under scripts/tpu.sh keep on a simulated slice that random faults strike, and checks what comes out.

    python tests/chaos.py --seed=0 --faults=20

The slice has two hosts (folders) and three ranks; rank 0 lives on host 1. Its shells, processes and
checkpoints are real: train.py on the CPU, with gloo. The bucket is gcp-storage-emulator behind the proxy of
test_gcs.py, which fails one request in fifty. The same run without faults follows, then a table. The exit
code is 0 if the run completed with the weights that it would have had without faults, and left no process.
"""
import argparse
import collections
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
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from gcp_storage_emulator.server import create_server

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from data import upload_dataset  # noqa: E402
from fake_gcloud import Cloud, kill_processes, processes, write_program  # noqa: E402
from test_gcs import STEP, Front, serve  # noqa: E402

FILES = ("train.py", "xla.py", "model.py", "data.py", "configurator.py", "requirements.txt",
         "requirements-tpu.txt", ".gitignore")
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
ln -s python3 venv/bin/python
echo '#!/bin/sh' >venv/bin/pip
if [[ $RANKS == *' '* ]]; then
  rm venv/bin/python
  echo '#!/bin/sh' >venv/bin/python
  echo 'exec "$HOME/trm/venv/bin/python3" -S {ROOT}/tests/fake_gcloud.py ranks "$@"' >>venv/bin/python
fi
chmod +x venv/bin/*
"""


class Failure(Exception):
    """The run did not survive, or its result is wrong."""


def chaos(folder, names, seed=0, steps=200, ranks=THREE_RANKS, poll=1, report=partial(print, flush=True)):
    """Trains under keep while the faults of these names strike, in this order, at moments drawn by the seed.

    ranks: of each host, as "1 2". poll: seconds between keep's checks. Returns a record of each fault: name,
    seconds to the next step and steps lost (None if the next fault came first). Raises Failure if anything is
    not as it must be.
    """
    with slice_with_data(folder, ranks, seed) as tpu:
        try:
            tpu.start_keep(steps, poll)
            records = strike(tpu, names, random.Random(seed), steps, report)
            code = tpu.keep.wait(300)
            if code:
                raise Failure(f"keep ended with exit code {code}")
            check_end(tpu, steps)
            check_weights(tpu, steps, report)
        except BaseException:
            report(f"{tpu.output}:\n" + "\n".join(read(tpu.output).splitlines()[-60:]))
            raise
    return records


def strike(tpu, names, draw, steps, report):
    """Lets the faults strike, each in its share of the run, or every fifth during the restart before it."""
    records = []
    during_restart = [i % 5 == 4 and names[i - 1] != "a disk that fills" for i in range(len(names))] + [False]
    for i, name in enumerate(names):
        if during_restart[i]:
            rest(tpu, draw.uniform(0, 8))
        else:
            step = 3 + int((steps - 10) * (i + draw.random()) / len(names))
            wait_for(tpu, lambda: tpu.runs and tpu.runs[-1].last >= step, f"step {step}")
            rest(tpu, draw.uniform(0, 0.3))
        FAULTS[name](tpu, draw)
        record = SimpleNamespace(name=name, step=tpu.mark.step, seconds=None, lost=None)
        records.append(record)
        if during_restart[i + 1]:
            report(f"step {record.step}: {name}, and during the restart")
            continue
        wait_for(tpu, tpu.has_recovered, f"step after {name}", seconds=240)
        record.seconds = time.time() - tpu.mark.time
        record.lost = tpu.steps_lost()
        report(f"step {record.step}: {name}; the next step came after {record.seconds:.1f} s, "
               f"{record.lost} steps were lost")
    return records


def rest(tpu, seconds):
    """Waits, and reads what the run prints."""
    end = time.time() + seconds
    while time.time() < end:
        tpu.observe()
        time.sleep(0.02)


def wait_for(tpu, condition, description, seconds=120, pause=0.02):
    """The first true value of condition(); raises Failure if there is none, or keep ends."""
    deadline = time.time() + seconds
    while time.time() < deadline:
        tpu.observe()
        value = condition()
        if value:
            return value
        if tpu.keep and tpu.keep.poll() is not None:
            raise Failure(f"keep ended with exit code {tpu.keep.returncode} before the {description}")
        time.sleep(pause)
    raise Failure(f"no {description} within {seconds} s")


# Faults.

def kill_rank(tpu, draw):
    ranks = wait_for(tpu, tpu.all_ranks, "process for each rank")
    tpu.set_mark()
    os.kill(draw.choice(sorted(ranks.values())), signal.SIGKILL)


def kill_main(tpu, draw):
    """The python that tpu.sh started; its ranks live on where they are processes of their own."""
    host = draw.randrange(tpu.hosts)
    pid = wait_for(tpu, lambda: tpu.main_process(host), "main process")
    tpu.set_mark()
    os.kill(pid, signal.SIGKILL)


def kill_waiter(tpu, draw):
    """The shell on a host that waits for python; python lives on."""
    host = draw.randrange(tpu.hosts)
    wait_for(tpu, lambda: tpu.main_process(host), "main process")
    tpu.set_mark()
    os.kill(tpu.waiter(host), signal.SIGKILL)


def terminate(tpu, draw):
    host = draw.randrange(tpu.hosts)
    pid = wait_for(tpu, lambda: tpu.all_ranks() and tpu.main_process(host), "main process")
    tpu.set_mark()
    os.kill(pid, signal.SIGTERM)


def lose_host(tpu, draw):
    wait_for(tpu, lambda: all(tpu.home(host).is_dir() for host in range(tpu.hosts)), "folder for each host")
    tpu.set_mark()
    tpu.lose_host(draw.randrange(tpu.hosts))


def freeze_rank(tpu, draw):
    """It hangs, and tells nobody; its peers wait for it."""
    ranks = wait_for(tpu, tpu.all_ranks, "process for each rank")
    tpu.set_mark()
    os.kill(draw.choice(sorted(ranks.values())), signal.SIGSTOP)


def preempt(tpu, draw):
    wait_for(tpu, tpu.vm_is_ready, "slice")
    tpu.set_mark()
    tpu.preempt()


def preempt_in_save(tpu, draw):
    """While a checkpoint is half written."""
    wait_for(tpu, tpu.has_recovered, "step")
    pid = wait_for(tpu, tpu.all_ranks, "process for each rank")[0]

    def stopped_in_save():
        if not has_temporary_checkpoint(tpu):
            return False
        os.kill(pid, signal.SIGSTOP)
        if not has_temporary_checkpoint(tpu):  # too late
            os.kill(pid, signal.SIGCONT)
            return False
        return True

    wait_for(tpu, stopped_in_save, "checkpoint that is half written", pause=0.0005)
    tpu.set_mark()
    tpu.preempt()


def has_temporary_checkpoint(tpu):
    try:
        return any(re.fullmatch(r"ckpt_\d+\.pt\.tmp", name) for name in os.listdir(tpu.out_dir))
    except OSError:
        return False


def preempt_in_upload(tpu, draw):
    """While half of a checkpoint has arrived in the bucket."""
    tpu.front.held.clear()
    tpu.front.hold = True
    wait_for(tpu, tpu.front.held.is_set, "upload")
    tpu.set_mark()
    tpu.preempt()


def kill_and_refuse(tpu, draw):
    """The bucket answers 503 for 10 s from the first request after the restart."""
    kill_and_wait(tpu, draw)
    tpu.front.outage = "armed"


def kill_and_wait(tpu, draw):
    """Kills a rank, and waits until keep has copied the files again and begins to start the run."""
    starts = len(tpu.calls("host_start"))
    kill_rank(tpu, draw)
    wait_for(tpu, lambda: len(tpu.calls("host_start")) > starts, "restart")


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
    refusals = read(tpu.output).count(": not that of host")
    kill_and_wait(tpu, draw)
    with open(tpu.home(draw.randrange(tpu.hosts)) / "trm/model.py", "a") as f:
        f.write("\n\ndef learning_rate(*arguments):\n    return 0.0\n")
    wait_for(tpu, lambda: read(tpu.output).count(": not that of host") > refusals, "refusal")


FAULTS = {
    "kill -9 of a rank": kill_rank,
    "kill -9 of a host's main process": kill_main,
    "kill -9 of tpu.sh on a host": kill_waiter,
    "SIGTERM to one host": terminate,
    "a host falls silent, its folder gone": lose_host,
    "a rank hangs": freeze_rank,
    "preemption": preempt,
    "preemption during a save": preempt_in_save,
    "preemption during an upload": preempt_in_upload,
    "10 s of 503 at a restart": kill_and_refuse,
    "a disk that fills": fill_disk,
    "another model.py on one host": change_file,
}


# The slice and its bucket.

@contextmanager
def slice_with_data(folder, ranks, seed=0):
    """A Slice, whose bucket holds a data set; ranks: of each host, as "1 2"."""
    with bucket_server(seed) as front:
        tpu = Slice(folder, ranks, front)
        command = [sys.executable, ROOT / "prepare_sudoku.py", *DATA, f"--output_dir={tpu.data}"]
        subprocess.run(command, check=True, capture_output=True)
        upload_dataset(str(tpu.data), "gs://bucket/data/four")
        front.rate = 0.02
        try:
            yield tpu
        finally:
            if tpu.keep:
                tpu.keep.kill()
            kill_processes(tpu.cloud / "hosts")


class Slice(Cloud):
    """The simulated slice with a copy of the project, and what its run prints.

    runs: each run that trained: pid, first and last step. mark: time, pid and step of the last fault.
    """

    def __init__(self, folder, ranks, front):
        world = " ".join(ranks).split()
        shared = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port(), WORLD_SIZE=str(len(world)),
                      OMP_NUM_THREADS="1", STORAGE_EMULATOR_HOST=front.url)
        hosts = [shared | dict(HOST=str(i), GROUP_RANK=str(i), LOCAL_RANK="0", RANK=r, RANKS=r)
                 for i, r in enumerate(ranks)]
        super().__init__(folder, hosts)
        for name in FILES:
            shutil.copy(ROOT / name, self.project)
        write_program(self.cloud / "host_bin/python3", PYTHON3)
        self.front, self.hosts, self.world, self.output = front, len(hosts), len(world), folder / "keep.txt"
        self.main_host = next(i for i, r in enumerate(ranks) if "0" in r.split())
        self.out_dir = self.home(self.main_host) / "trm/out/run"
        self.data, self.keep, self.runs = folder / "four", None, []
        self.set_mark()

    def command(self, steps):
        """Of the run, as tpu.sh takes it."""
        return ["train.py", *SETTINGS, f"--max_steps={steps}", "--out_dir=out/run", "--stall_timeout=20",
                "--gcs_dir=gs://bucket/run", "--data_path=gs://bucket/data/four"]

    def start_keep(self, steps, poll):
        with open(self.output, "w") as f:
            self.keep = self.start(
                "keep", *self.command(steps), stdout=f, stderr=f, POLL=str(poll), STOP_WAIT="5",
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

    def set_mark(self):
        """A fault strikes."""
        self.observe()
        last = self.runs[-1] if self.runs else SimpleNamespace(pid=None, last=0)
        self.mark = SimpleNamespace(time=time.time(), pid=last.pid, step=last.last, survived_until=math.inf)

    def has_recovered(self):
        """Whether a new run has made a step, or the same one after a fault that it may survive."""
        if not self.runs or self.keep.poll() == 0:
            return bool(self.runs)
        run = self.runs[-1]
        return run.last > (run.first if run.pid != self.mark.pid else self.mark.survived_until)

    def steps_lost(self):
        """Steps of the run that the last fault struck, which the present run makes again."""
        struck = next((run for run in self.runs if run.pid == self.mark.pid), None)
        if struck is None or struck is self.runs[-1]:
            return 0
        return max(0, struck.last - self.runs[-1].first)

    def vm_is_ready(self):
        path = self.cloud / "slice"
        return path.exists() and path.read_text() == "READY\n"

    def all_ranks(self):
        """{rank: pid} of the processes that train, or {} unless there is exactly one for each rank."""
        found = []
        reachable = [self.home(host) for host in range(self.hosts) if self.home(host).is_dir()]
        for pid in [pid for home in reachable for pid in processes(home)]:
            try:
                arguments = read(f"/proc/{pid}/cmdline").split("\0")
                environment = dict(v.partition("=")[::2] for v in read(f"/proc/{pid}/environ").split("\0"))
            except OSError:  # it has ended
                continue
            is_launcher = any(a.endswith(("tpu.sh", "fake_gcloud.py")) for a in arguments)
            if "train.py" in arguments and not is_launcher:
                found.append((int(environment.get("RANK", -1)), pid))
        return dict(found) if sorted(rank for rank, _ in found) == list(range(self.world)) else {}

    def waiter(self, host):
        """Pid of `tpu.sh host_run`."""
        return int(read(self.home(host) / "trm/run/pid"))

    def main_process(self, host):
        """Pid of the python that host_run waits for, or None."""
        try:
            waiter = self.waiter(host)
            for pid in processes(self.home(host)):
                if int(read(f"/proc/{pid}/stat").rpartition(")")[2].split()[1]) == waiter:
                    return pid
        except (OSError, ValueError):
            pass
        return None


class FaultyFront(Front):
    """Besides the faults of Front: holds the upload of a checkpoint, and 10 s of 503."""

    def draw(self, kind, length):
        server = self.server
        if server.outage == "armed":
            server.outage = time.time() + 10
        if server.outage and time.time() < server.outage:
            return 503
        if server.hold and kind == "chunk" and length > 100_000:
            server.hold = False
            server.held.set()
            return "stall"
        fault = super().draw(kind, length)
        return 503 if fault == 401 else fault  # two in a row for one of several clients would be a refusal


@contextmanager
def bucket_server(seed):
    """An emulator with one bucket behind a FaultyFront, whose address is in STORAGE_EMULATOR_HOST."""
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    emulator = create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
    emulator.start()
    while not emulator._api._httpd:
        time.sleep(0.01)
    emulator._api._httpd.handle_error = lambda *_: None  # it fails on requests that a fault has cut off
    front = serve(
        FaultyFront, emulator=emulator._api._httpd.server_port, rate=0.0, random=random.Random(seed), slow=0,
        script=[], log=[], paths=[], tokens=None, denied=(), finished={}, step=STEP, page=1000, whole=b"",
        composite=False, outage=None, hold=False, held=threading.Event())
    front.storage = emulator._storage
    os.environ["STORAGE_EMULATOR_HOST"] = front.url
    try:
        yield front
    finally:
        del os.environ["STORAGE_EMULATOR_HOST"]
        front.stop.set()
        front.shutdown()
        front.server_close()
        emulator.stop()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as s:
        return str(s.getsockname()[1])


def read(path):
    with open(path, encoding="utf-8", errors="replace") as f:
        return f.read()


# What must hold at the end.

def check_end(tpu, steps):
    """keep said "complete" once, at the end; so says the log in the bucket; and no process is left."""
    said = re.findall("run: complete", read(tpu.output))
    if len(said) != 1:
        raise Failure(f"keep saw {len(said)} complete runs")
    last = in_bucket(tpu, "metrics.jsonl").decode().splitlines()[-1]
    if json.loads(last)["step"] != steps or not json.loads(last).get("final"):
        raise Failure(f"the log in the bucket ends with {last}")
    time.sleep(1)  # for what ends by itself
    if left := processes(tpu.cloud / "hosts"):
        raise Failure("left behind: " + "; ".join(read(f"/proc/{pid}/cmdline") for pid in left))


def check_weights(tpu, steps, report):
    """The last checkpoint is, bit for bit, that of a run without faults.

    A stop on request saves between two scheduled checkpoints, and all sequences start afresh there. So do
    those of a run without faults that is stopped at the same steps. How much one without any stop differs is
    reported.
    """
    got = torch.load(io.BytesIO(in_bucket(tpu, f"ckpt_{steps:08d}.pt")), weights_only=True)
    stops = []
    for run in tpu.runs:
        stops = [step for step in stops if step < run.first] + [run.first]
    stops = [step for step in stops if step % INTERVAL]
    wanted = train_without_faults(tpu, [*stops, steps])
    for part in ("weights", "ema", "m", "v"):
        for name, tensor in wanted.state[part].items():
            if not torch.equal(got[part][name], tensor):
                raise Failure(f"{part} {name} differ from those of a run without faults; stops at {stops}")
    curve = losses(in_bucket(tpu, "metrics.jsonl").decode())
    if not curve or any(wanted.losses[step] != loss for step, loss in curve.items()):
        raise Failure("the losses differ from those of a run without faults")
    report(f"weights, average and moments: bit for bit those of a run without faults, stopped at {stops}; "
           f"{len(curve)} of {steps} losses in the log, all equal")
    if stops:
        unstopped = train_without_faults(tpu, [steps])
        difference, norm = (math.sqrt(sum(t.square().sum() for t in tensors)) for tensors in (
            [got["weights"][name] - t for name, t in unstopped.state["weights"].items()],
            unstopped.state["weights"].values()))
        report(f"without these stops: loss {unstopped.losses[steps]:.4f} at the end, not "
               f"{wanted.losses[steps]:.4f}; weights differ by {100 * difference / norm:.2g}% of their norm")


def in_bucket(tpu, name):
    return tpu.front.storage.get_file("bucket", f"run/{name}")


def train_without_faults(tpu, stops):
    """The last checkpoint (state) and {step: loss} (losses) of a run that is stopped after these steps."""
    out = Path(tempfile.mkdtemp(dir=tpu.project))
    for step in stops:
        shared = os.environ | dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port(), OMP_NUM_THREADS="1",
                                   WORLD_SIZE=str(tpu.world))
        command = [sys.executable, "train.py", *SETTINGS, f"--max_steps={step}", f"--data_path={tpu.data}",
                   f"--out_dir={out}", "--init_from=auto"]
        ranks = [subprocess.Popen(command, cwd=tpu.project, env=shared | dict(RANK=str(r), LOCAL_RANK=str(r)),
                                  stdout=subprocess.DEVNULL) for r in range(tpu.world)]
        if any([rank.wait() for rank in ranks]):
            raise Failure("the run without faults failed")
    state = torch.load(out / f"ckpt_{stops[-1]:08d}.pt", weights_only=True)
    return SimpleNamespace(state=state, losses=losses(read(out / "metrics.jsonl")))


def losses(text):
    lines = map(json.loads, text.splitlines())
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def table(records):
    """Markdown: each fault, how often, median and highest of the time to the next step and the steps lost."""
    def summary(values, unit):
        return f"{statistics.median(values):.0f}{unit}, at most {max(values):.0f}{unit}" if values else "-"

    lines = ["| fault | times | time to the next step | steps lost |", "|---|---|---|---|"]
    for name, count in sorted(collections.Counter(record.name for record in records).items()):
        measured = [record for record in records if record.name == name and record.seconds is not None]
        seconds, lost = summary([r.seconds for r in measured], " s"), summary([r.lost for r in measured], "")
        lines.append(f"| {name} | {count} | {seconds} | {lost} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200)
    c = parser.parse_args()
    draw, names = random.Random(c.seed), []
    while len(names) < c.faults:
        names += draw.sample(sorted(FAULTS), len(FAULTS))
    folder, began = Path(tempfile.mkdtemp(prefix="chaos-")), time.time()
    try:
        records = chaos(folder, names[:c.faults], c.seed, c.steps)
    except Failure as e:
        sys.exit(f"chaos.py: {e}; see {folder}")
    shutil.rmtree(folder)
    print(f"{table(records)}\ncomplete after {time.time() - began:.0f} s, the runs without faults included")


if __name__ == "__main__":
    main()
