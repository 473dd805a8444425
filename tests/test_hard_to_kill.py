"""Failures: kills at any moment, lost machines, transient storage errors. Real commands, emulated storage."""
import functools
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from configurator import configure
from test_gcs import emulator, front, stored
from test_train import ROOT, command, curve, data, last_weights, lines, run, same

import prepare_sudoku
import train
from bucket import Bucket, upload_dataset

FLAGS = ["--max_steps=40", "--checkpoint_interval=10", "--keep_last_n=2", "--eval_interval=4",
         "--eval_max_puzzles=20"]
URL = "--gcs_dir=gs://bucket/run"


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """An uninterrupted run of FLAGS."""
    out = str(tmp_path_factory.mktemp("whole") / "run")
    run(data, out, *FLAGS)
    return out


def in_bucket():
    return Bucket("gs://bucket/run").list()


def test_twelve_kills_lose_nothing(data, tmp_path):
    """SIGKILL at random moments, also while saving, then init_from=auto: the weights are bitwise equal."""
    flags = ["--max_steps=200", "--checkpoint_interval=5", "--eval_interval=20", "--eval_max_puzzles=20"]
    run(data, tmp_path / "whole", *flags)
    out, draw, kills = str(tmp_path / "run"), random.Random(0), 0
    while True:
        process = subprocess.Popen(command(data, out, *flags, "--init_from=auto"), stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, text=True)
        for line in process.stdout:
            if line.startswith("training from") and kills < 12:
                time.sleep(draw.uniform(0, 0.3))
                process.kill()
        process.wait()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
        kills += 1
    assert kills == 12
    assert same(last_weights(out), last_weights(tmp_path / "whole"))
    assert curve(out) == curve(tmp_path / "whole") and lines(out)[-1]["final"]


def test_a_run_is_in_the_bucket_despite_faults(data, front, emulator, tmp_path):
    out = tmp_path / "run"
    front.rate = 0.3
    text = run(data, out, *FLAGS, URL)
    front.rate = 0
    assert "upload failed" not in text and "not complete" not in text
    numbered = sorted(n for n in in_bucket() if n.startswith("ckpt"))
    assert numbered[-2:] == ["ckpt_00000040.json", "ckpt_00000040.pt"] and len(numbered) <= 4
    assert {"metrics.jsonl", "log.txt", "run.json"} <= in_bucket().keys()
    for name in (in_bucket().keys() & set(os.listdir(out))) - {"log.txt"}:
        assert stored(emulator, f"run/{name}") == (out / name).read_bytes(), name
    assert any(fault for _, fault, _ in front.log)


def test_another_machine_resumes_from_the_bucket(data, front, whole, tmp_path):
    out = str(tmp_path / "run")
    run(data, out, *FLAGS, URL, "--max_steps=30")
    assert "holds a run" in run(data, tmp_path / "other", *FLAGS, URL, code=2)
    shutil.rmtree(out)
    text = run(data, out, *FLAGS, URL, "--init_from=auto")
    assert "fetching ckpt_00000030 from gs://bucket/run" in text and "training from step 30 to 40" in text
    assert same(last_weights(out), last_weights(whole)) and curve(out) == curve(whole)


def test_damaged_checkpoints_in_the_bucket_are_skipped(data, front, whole, tmp_path):
    out, bucket = str(tmp_path / "run"), Bucket("gs://bucket/run")
    run(data, out, *FLAGS, URL, "--keep_last_n=4", "--max_steps=39")
    bucket.delete("ckpt_00000039.json")  # the last upload was interrupted
    bucket.write("ckpt_00000030.pt", b"something else")
    shutil.rmtree(out)
    text = run(data, out, *FLAGS, URL, "--init_from=auto", "--keep_last_n=9")
    assert "skipped" in text and "ckpt_00000030.pt: damaged" in text and "training from step 20 to 40" in text
    assert same(last_weights(out), last_weights(whole)) and curve(out) == curve(whole)


def test_an_unavailable_bucket_does_not_stop_training(data, front, whole, tmp_path):
    process = subprocess.Popen(command(data, tmp_path / "run", *FLAGS, URL, "--log_interval=1"),
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    text = ""
    for line in process.stdout:
        text += line
        if line.startswith("training from"):
            front.denied = ("start", "insert", "list", "media")
    assert process.wait(60) == 1, text  # complete here, but not in the bucket: a restart uploads the rest
    assert text.count("upload failed") == 1, text
    assert text.count("not complete") == 1, text
    assert same(last_weights(tmp_path / "run"), last_weights(whole))
    front.denied = ()
    text = run(data, tmp_path / "run", *FLAGS, URL, "--init_from=auto")
    assert "is complete at step 40" in text and "ckpt_00000040.json" in in_bucket(), text


def test_a_stop_is_seen_although_tmp_was_cleaned(tmp_path, monkeypatch):
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setenv(train.STOP_FILE, str(tmp_path / "gone" / "stop"))
    try:
        train.on_signals()
        os.kill(os.getpid(), signal.SIGTERM)
        assert train.stop_requested()
    finally:
        signal.alarm(0)
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("by", ["Ctrl-C", "SIGTERM"])
def test_a_stop_while_a_dataset_is_made(by, tmp_path):
    prepare = f"prepare_sudoku.py --source=generate --num_train=1000000 --output_dir={tmp_path / 'data'}"
    flags = [f"--data_path={tmp_path / 'data'}", f"--data_prepare={prepare}", f"--out_dir={tmp_path / 'run'}"]
    process = subprocess.Popen(
        [sys.executable, "train.py", *flags, "--device=cpu"], cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not process.stdout.readline().endswith("--output_dir=" + str(tmp_path / "data") + "\n"):
        pass
    time.sleep(4)  # by then a pool works
    if by == "Ctrl-C":
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    else:
        process.terminate()  # as a sweep does
    errors = process.communicate(timeout=30)[1].splitlines()  # waits until no process has stderr open
    assert process.returncode == 3 and "train.py: stopped" in errors
    if by == "Ctrl-C":
        assert {line for line in errors if "/s," not in line} == {"prepare_sudoku.py: stopped",
                                                                  "train.py: stopped"}
    assert not os.path.exists(tmp_path / "data")


def test_output_that_nobody_reads_does_not_end_a_run(data, whole, tmp_path):
    """As `| tee log`, where tee dies."""
    process = subprocess.Popen(command(data, tmp_path / "run", *FLAGS), stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True)
    while not process.stdout.readline().startswith("training from"):
        pass
    process.stdout.close()
    assert process.wait(60) == 0
    assert same(last_weights(tmp_path / "run"), last_weights(whole))
    assert "step 40/40" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.parametrize("url,denied,word", [
    ("gs://nowhere/run", (), "404"),
    ("gs://bucket/run", ("start", "insert"), "403"),
    ("bucket/run", (), "gs://bucket/folder"),
])
def test_a_wrong_bucket_fails_before_any_write(data, front, tmp_path, url, denied, word):
    front.denied = denied
    text = run(data, tmp_path / "run", *FLAGS, f"--gcs_dir={url}", code=2)
    assert text.splitlines()[-1].startswith("train.py: ")
    assert word in text
    assert "Traceback" not in text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("fault", [
    OSError("No space left on device"),
    RuntimeError("PytorchStreamWriter failed writing file"),
], ids=repr)
def test_a_full_disk_costs_a_checkpoint_and_not_the_run(monkeypatch, tmp_path, fault):
    def full(*_):
        raise fault

    said = []
    monkeypatch.setattr(train.torch, "save", full)
    c = SimpleNamespace(gcs_dir="", out_dir=str(tmp_path), keep_last_n=1)
    start = SimpleNamespace(best=0.0, step=0)
    log = SimpleNamespace(print0=said.append, wandb_id=None)
    saver = train.Checkpoints(c, SimpleNamespace(rank=0), log, start, "")
    saver.save("ckpt_00000010", 10, SimpleNamespace(state_dict=lambda step: dict(step=step)), {})
    assert not saver.written() and said == [f"checkpoint not written: {fault}"] and saver.written()
    assert os.listdir(tmp_path) == []  # nothing half-written stays


def test_data_is_read_from_the_bucket(data, front, whole, tmp_path):
    upload_dataset(data, "gs://bucket/data/four")
    flags = ["--data_path=gs://bucket/data/four", f"--out_dir={tmp_path / 'run'}"]
    subprocess.run(command(data, "", *FLAGS, *flags), cwd=tmp_path, check=True, capture_output=True)
    assert curve(tmp_path / "run") == curve(whole) and (tmp_path / "data" / "four" / "manifest.json").exists()


def test_sigterm_leaves_its_checkpoint_in_the_bucket(data, front, tmp_path):
    out = str(tmp_path / "run")
    process = subprocess.Popen(command(data, out, "--max_steps=100000", "--checkpoint_interval=0", URL),
                               stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step 10/"):
            process.send_signal(signal.SIGTERM)
            break
    began, text = time.time(), process.stdout.read()
    assert process.wait(30) == 3 and time.time() - began < 30
    name = os.path.basename(train.checkpoint_paths(out)[0])
    assert name in in_bucket() and name[:-3] + ".json" in in_bucket() and "to continue:" in text
    with open(os.path.join(out, name[:-3] + ".json"), "rb") as f:
        assert json.loads(Bucket("gs://bucket/run").read(name[:-3] + ".json")) == json.load(f)


def test_two_hosts_of_which_one_has_the_files(data, whole, tmp_path):
    """torchrun on two hosts, here folders: rank 1 gets rank 0's weights and step, and writes nothing."""
    shallow = ["--H_cycles=1", "--L_cycles=1", "--halt_max_steps=2", "--lr=2e-4"]  # depth amplifies rounding
    run(data, tmp_path / "one", *FLAGS, *shallow, "--keep_last_n=9")
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    for max_steps, init_from in ((20, "scratch"), (40, "auto")):
        hosts = []
        for node in (0, 1):
            (tmp_path / str(node)).mkdir(exist_ok=True)
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}",
                        "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
            flags = [*FLAGS, *shallow, f"--max_steps={max_steps}", f"--init_from={init_from}",
                     "--keep_last_n=9"]
            hosts.append(subprocess.Popen(torchrun + command(data, "run", *flags)[1:],
                                          cwd=tmp_path / str(node), stdout=subprocess.PIPE,
                                          stderr=subprocess.STDOUT, text=True,
                                          env={**os.environ, "OMP_NUM_THREADS": "1"}))
        texts = [host.communicate(timeout=120)[0] for host in hosts]
        assert [host.returncode for host in hosts] == [0, 0], texts
        assert f"training from step {max_steps - 20} to {max_steps}" in texts[0]
        assert "training from" not in texts[1]
    one, two = curve(tmp_path / "one"), curve(tmp_path / "0" / "run")
    assert one.keys() == two.keys() and two == pytest.approx(one, rel=1e-4)
    assert not (tmp_path / "1" / "run").exists()


# Several ranks, each as on its own host: what ends one must end all, with the right exit code.

SHALLOW = ["--max_steps=20", "--checkpoint_interval=10", "--H_cycles=1", "--L_cycles=1", "--halt_max_steps=2"]
SOURCES = ("train.py", "device.py", "model.py", "data.py", "bucket.py", "puzzles.py", "configurator.py")


def two_ranks(data, tmp_path, flags=((), ()), edits=((), ()), limits=(None, None)):
    """Runs two hosts of one rank each; returns (exit code, output) of both.

    edits: (file, old text, new text) for each host's copy of the sources. limits: the largest file, in bytes.
    """
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = str(s.getsockname()[1])
    processes = []
    for rank in (0, 1):
        host = tmp_path / f"host{rank}"
        host.mkdir()
        for name in SOURCES:
            shutil.copy(os.path.join(ROOT, name), host)
        for name, old, new in edits[rank]:
            source = (host / name).read_text()
            assert source.count(old) == 1
            (host / name).write_text(source.replace(old, new))
        env = dict(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0", GROUP_RANK=str(rank),
                   MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        set_limit = limits[rank] and functools.partial(
            resource.setrlimit, resource.RLIMIT_FSIZE, (limits[rank], limits[rank]))
        processes.append(subprocess.Popen(
            [sys.executable, str(host / "train.py"), *command(data, "run", *SHALLOW, *flags[rank])[2:]],
            cwd=host, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **env},
            preexec_fn=set_limit))
    texts = [process.communicate(timeout=60)[0] for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, texts)]


@pytest.mark.parametrize("what,code,flags,edit", [
    ("settings differ from rank 0's: lr", 2, ("--lr=1e-3", "--lr=2e-3"), None),
    ("code differ from rank 0's: model.py", 1, ("--lr=1e-3", "--lr=1e-3"),
     ("model.py", "IGNORE_LABEL = -100  #", "IGNORE_LABEL = -100  # really")),
    ("dataset differ from rank 0's: data_path", 2, ("--data_path={data}", "--data_path={other}"), None),
], ids=["settings", "code", "dataset"])
def test_ranks_that_differ_end_before_the_first_step(data, tmp_path, what, code, flags, edit):
    other = tmp_path / "other"
    prepare_sudoku.main(configure(prepare_sudoku.__file__, [
        "--source=generate", "--size=4", "--num_train=64", "--num_test=40", "--num_aug=5", "--seed=1",
        f"--output_dir={other}"]))
    flags = [[flag.format(data=data, other=other)] for flag in flags]
    for got, text in two_ranks(data, tmp_path, flags, ((), [edit] if edit else ())):
        assert got == code and f"train.py: host 1, rank 1: {what}" in text and "step 1" not in text, text


def test_each_host_makes_its_own_dataset(data, tmp_path):
    """data_prepare on two hosts that share no disk."""
    prepare = (f"{os.path.join(ROOT, 'prepare_sudoku.py')} --source=generate --size=4 --num_train=64 "
               "--num_test=40 --num_aug=5 --output_dir=data/new")
    flags = ["--data_path=data/new", f"--data_prepare={prepare}"]
    for code, text in two_ranks(data, tmp_path, [flags, flags]):
        assert code == 0 and "data/new is missing; making it" in text, text


def test_a_rank_that_stalls_ends_all(data, tmp_path):
    line = "        rows = rank_slice(batch_size, rank, world)\n"
    stalling = line + "        if (rank, step) == (1, 14):\n            time.sleep(1000)\n"
    edits = [[("data.py", line, stalling)]] * 2
    for code, text in two_ranks(data, tmp_path, [["--stall_timeout=5"]] * 2, edits):
        assert code == 1 and "Timeout (0:00:05)!" in text, text
    assert os.path.exists(tmp_path / "host0" / "run" / "ckpt_00000010.json")


def test_ranks_agree_that_the_last_checkpoint_cannot_be_written(data, tmp_path):
    """Rank 0's disk is full for files of this size: its peer must not wait for it in the evaluation."""
    (code, text), (peers_code, _) = two_ranks(data, tmp_path, limits=(50_000, None))
    assert (code, peers_code) == (1, 1) and "checkpoint not written" in text, text
    assert sorted(os.listdir(tmp_path / "host0" / "run")) == ["log.txt", "metrics.jsonl"]


def test_an_unreachable_bucket_is_not_reported_as_wrong_input(data, front, tmp_path):
    run(data, tmp_path / "run", *FLAGS, URL, "--max_steps=10")
    front.script = [503] * 3  # a transient error
    text = run(data, tmp_path / "run", *FLAGS, URL, "--max_steps=20", "--init_from=auto")
    assert "training from step 10 to 20" in text
    front.rate, front.script = 0.0, [503] * 1000
    # a first start does not wait for minutes
    text = run(data, tmp_path / "run", *FLAGS, URL, "--max_steps=20", code=1)
    assert "status 503" in text.splitlines()[-1] and "Traceback" not in text


def test_puzzle_identifiers_without_a_puzzle_embedding(data, tmp_path):
    """As datasets of the official code have them."""
    path = shutil.copytree(data, tmp_path / "data")
    os.remove(path / "manifest.json")
    for split in ("train", "test"):
        metadata = json.loads((path / split / "dataset.json").read_text())
        (path / split / "dataset.json").write_text(json.dumps(metadata | {"num_puzzle_identifiers": 5}))
        identifiers = np.load(path / split / "all__puzzle_identifiers.npy")
        np.save(path / split / "all__puzzle_identifiers.npy", np.arange(len(identifiers)) % 5)
    run(path, tmp_path / "run", "--max_steps=5", "--puzzle_emb_ndim=0", "--puzzle_emb_len=0")
    run(path, tmp_path / "with", "--max_steps=5")


# One training at a time, and a start that can be stopped.

@contextmanager
def started(data, out, *flags):
    """train.py in a process that trains, which is killed at the end."""
    process = subprocess.Popen(command(data, out, *flags), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               text=True)
    try:
        while not process.stdout.readline().startswith("training from"):
            assert process.poll() is None
        yield
    finally:
        process.kill()
        process.wait()


def test_one_training_in_a_folder_and_in_a_bucket(data, front, tmp_path):
    with started(data, tmp_path / "run", "--max_steps=100000", URL):
        assert "another process trains there" in run(data, tmp_path / "run", "--init_from=auto", code=1)
        assert "gs://bucket/run holds a run" in run(data, tmp_path / "other", URL, code=2)
    front.script = [None, None, None, b"{}"]  # the claim is not listed yet: another run has just begun
    with pytest.raises(train.TransientError, match="has just begun"):
        bucket = SimpleNamespace(list=dict, write=Bucket("gs://bucket/run").write)
        train.claim(SimpleNamespace(out_dir=str(tmp_path / "third"), gcs_dir="gs://bucket/run"), bucket,
                    SimpleNamespace())
    assert "training from step 0" in run(data, tmp_path / "run", "--init_from=auto", "--max_steps=5")


def test_ranks_end_with_torchruns_agent(data, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    agent = subprocess.Popen([*torchrun, *command(data, tmp_path / "run", "--max_steps=100000")[1:]],
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not agent.stdout.readline().startswith("training from"):
        assert agent.poll() is None
    rank = int(subprocess.check_output(["pgrep", "-P", str(agent.pid), "-f", "train.py"]).split()[0])
    agent.kill()
    agent.wait()
    deadline = time.time() + 20
    while os.path.exists(f"/proc/{rank}"):
        assert time.time() < deadline
        time.sleep(0.1)


def test_a_file_to_begin_with_is_resumed_after_a_preemption(data, front, whole, tmp_path):
    """tpu.sh keep repeats the same command, on a new disk."""
    file, out = train.checkpoint_paths(whole)[0], tmp_path / "run"
    again = [*FLAGS, URL, f"--init_from={file}"]
    assert "training from step 0 to 20" in run(data, out, *again, "--max_steps=20")
    shutil.rmtree(out)
    assert "training from step 20 to 40" in run(data, out, *again)
    for name in ("ckpt_00000040.pt", "ckpt_00000040.json"):
        os.remove(out / name)
    assert "holds a run" in run(data, out, *FLAGS, f"--init_from={whole}/best.pt", code=2)


def test_sigterm_while_the_bucket_is_tried_again(data, front, tmp_path):
    front.script = [503] * 1000
    process = subprocess.Popen(command(data, tmp_path / "run", URL, "--init_from=auto"), text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while "trying again" not in process.stderr.readline():
        assert process.poll() is None
    process.terminate()
    began = time.time()
    assert process.wait(30) == 3 and time.time() - began < 12


# What the bucket holds.

def test_a_file_that_cannot_be_uploaded_does_not_stop_the_others(data, front, tmp_path):
    """Its name cannot even be printed. The run ends with 1, since the bucket lacks it."""
    out = tmp_path / "run"
    out.mkdir()
    (out / os.fsdecode(b"\xff.txt")).write_text("")
    text = run(data, out, *FLAGS, URL, code=1)
    assert text.count("upload failed") == 1 and {"ckpt_00000040.json", "metrics.jsonl"} <= in_bucket().keys()


def test_a_bucket_without_a_complete_checkpoint_is_no_scratch(data, front, tmp_path):
    run(data, tmp_path / "run", *FLAGS, URL)
    for name in in_bucket():
        if name.endswith(".json"):
            Bucket("gs://bucket/run").delete(name)
    shutil.rmtree(tmp_path / "run")
    assert "no complete checkpoint" in run(data, tmp_path / "run", *FLAGS, URL, "--init_from=auto", code=2)


def test_slow_uploads_lose_no_checkpoint(data, front, tmp_path):
    """An upload takes longer than an interval: a restart begins at the newest that was complete."""
    front.delay, front.script = 0.7, ["slow"] * 10000
    flags = ["--max_steps=100000", "--checkpoint_interval=5", "--keep_last_n=1", URL]
    with started(data, tmp_path / "run", *flags):
        deadline = time.time() + 60
        while not [name for name in in_bucket() if name.startswith("ckpt") and name.endswith(".json")]:
            assert time.time() < deadline
        time.sleep(3)
    front.script = []
    names = in_bucket()
    complete = max(int(n[5:13]) for n in names if n.startswith("ckpt") and n.endswith(".json")
                   and n[:-5] + ".pt" in names)
    shutil.rmtree(tmp_path / "run")
    flags[0] = f"--max_steps={complete + 5}"
    assert f"training from step {complete} to" in run(data, tmp_path / "run", *flags, "--init_from=auto")


class Killed(BaseException):
    pass


class MemoryBucket(dict):
    """A bucket whose requests fail or end the process, before or after they take effect, as drawn.

    meanwhile() is called in each: training goes on while an upload is under way.
    """

    def __init__(self, draw, meanwhile):
        super().__init__()
        self.draw, self.meanwhile, self.faults = draw, meanwhile, (0.0, 0.0)

    def request(self, effect=lambda: None):
        self.meanwhile()
        fault, after = self.draw.random(), self.draw.random() < 0.5
        result = effect() if after or fault > sum(self.faults) else None
        if fault < self.faults[0]:
            raise Killed
        if fault < sum(self.faults):
            raise train.TransientError("a fault")
        return result

    def upload(self, path, name):
        with open(path, "rb") as f:  # opened at once, read while training goes on
            self.request(lambda: self.update({name: f.read()}))

    def write(self, name, content):
        self.request(lambda: self.update({name: content}))

    def read(self, name):
        return self.request(lambda: self.get(name))

    def delete(self, name):
        self.request(lambda: self.pop(name, None))

    def list(self):
        return self.request(lambda: {name: (len(c), hashlib.md5(c).hexdigest()) for name, c in self.items()})

    def download(self, name, path):
        with open(path, "wb") as f:
            f.write(self[name])

    def complete(self):
        """Steps of the complete checkpoints; the .json tells the hash of its .pt."""
        return [int(n[5:13]) for n, c in self.items() if n.startswith("ckpt") and n.endswith(".json") and
                hashlib.sha256(self.get(n[:-5] + ".pt", b"")).hexdigest() == json.loads(c)["sha256"]]


@pytest.mark.parametrize("seed", range(300))
def test_the_bucket_always_holds_a_complete_checkpoint(monkeypatch, tmp_path, seed):
    """Random checkpoints, slow and failing uploads, kills, lost folders, restarts."""
    draw = random.Random(seed)
    monkeypatch.setattr(train.Mirror, "work", lambda self: None)  # copy() is called here instead
    monkeypatch.setattr(os, "fsync", lambda f: None)
    monkeypatch.setattr(train.torch, "save", lambda state, f: f.write(json.dumps(state).encode()))
    monkeypatch.setattr(train, "read_checkpoint", lambda path: json.loads(open(path, "rb").read()))
    out, log = tmp_path / "run", SimpleNamespace(print0=lambda text: None, wandb_id=None)
    c = SimpleNamespace(out_dir=str(out), gcs_dir="gs://bucket/run", keep_last_n=draw.choice([1, 2, 3]),
                        init_from="auto", eval_only=False, export_official="", data_path="")
    step, best, checkpoints = 0, [], None

    def save():
        nonlocal step
        step += 5
        state = dict(step=step, data="", settings={}, optimizer={}, wandb_id="", best=0, weights={})
        checkpoints.write(f"ckpt_{step:08d}", state, {})

    def check():
        best.extend(bucket.complete())
        assert bucket.complete() or not best, sorted(bucket)

    def meanwhile():
        check()
        while checkpoints and draw.random() < 0.3:
            save()

    bucket = MemoryBucket(draw, meanwhile)
    monkeypatch.setattr(train, "Bucket", lambda *args, **options: bucket)
    for _ in range(8):
        out.mkdir(exist_ok=True)
        expected, bucket.faults = max(bucket.complete(), default=0), (0.0, 0.0)
        expected = max([expected, *(int(p[-11:-3]) for p in train.checkpoint_paths(out)
                                    if os.path.exists(p[:-3] + ".json"))])
        state = train.find_checkpoint(c, bucket, SimpleNamespace(sha256=""), lambda note: None)
        step = state.get("step", 0)
        assert step >= expected
        start = SimpleNamespace(best=0, step=step)
        checkpoints = train.Checkpoints(c, SimpleNamespace(rank=0), log, start, "")
        bucket.faults = draw.choice([(0.0, 0.0), (0.02, 0.1), (0.1, 0.1), (0.0, 0.5)])
        try:
            for _ in range(draw.randrange(6)):
                save()
                if draw.random() < 0.7:
                    checkpoints.mirror.copy()
                    check()
        except Killed:
            pass
        checkpoints = None
        if draw.random() < 0.5:
            shutil.rmtree(out)
