"""Failures: kills at any moment, lost machines, transient storage errors. Real commands, emulated storage."""
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
from types import SimpleNamespace

import numpy as np
import pytest

import prepare_sudoku
import train
from configurator import configure
from data import Bucket, upload_dataset
from test_gcs import emulator, front, stored  # noqa: F401: fixtures
from test_train import ROOT, command, curve, data, last_weights, lines, run, same  # noqa: F401: fixtures

FLAGS = ["--max_steps=40", "--checkpoint_interval=10", "--keep_last_n=2", "--eval_interval=4",
         "--eval_max_puzzles=20"]
URL = "--gcs_dir=gs://bucket/run"


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):  # noqa: F811
    """An uninterrupted run of FLAGS."""
    out = str(tmp_path_factory.mktemp("whole") / "run")
    run(data, out, *FLAGS)
    return out


def in_bucket():
    return Bucket("gs://bucket/run").list()


def test_twenty_kills_lose_nothing(data, tmp_path):  # noqa: F811
    """SIGKILL at random moments, also while saving, then init_from=auto: the weights are bitwise equal."""
    flags = ["--max_steps=200", "--checkpoint_interval=5", "--eval_interval=20", "--eval_max_puzzles=20"]
    run(data, tmp_path / "whole", *flags)
    out, draw, kills = str(tmp_path / "run"), random.Random(0), 0
    while True:
        process = subprocess.Popen(command(data, out, *flags, "--init_from=auto"), stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, text=True)
        for line in process.stdout:
            if line.startswith("training from") and kills < 20:
                time.sleep(draw.uniform(0, 0.3))
                process.kill()
        process.wait()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
        kills += 1
    assert kills == 20
    assert same(last_weights(out), last_weights(tmp_path / "whole"))
    assert curve(out) == curve(tmp_path / "whole") and lines(out)[-1]["final"]


def test_a_run_is_in_the_bucket_despite_faults(data, front, emulator, tmp_path):  # noqa: F811
    out = tmp_path / "run"
    front.rate = 0.3
    text = run(data, out, *FLAGS, URL)
    front.rate = 0
    assert "upload failed" not in text and "not complete" not in text
    assert {n for n in in_bucket() if not n.startswith("best")} == {
        "ckpt_00000030.pt", "ckpt_00000030.json", "ckpt_00000040.pt", "ckpt_00000040.json",
        "metrics.jsonl", "log.txt"}
    for name in in_bucket():
        assert stored(emulator, f"run/{name}") == (out / name).read_bytes() or name == "log.txt", name
    assert any(fault for _, fault, _ in front.log)


def test_another_machine_resumes_from_the_bucket(data, front, whole, tmp_path):  # noqa: F811
    out = str(tmp_path / "run")
    run(data, out, *FLAGS, URL, "--max_steps=30")
    assert "holds a run" in run(data, tmp_path / "other", *FLAGS, URL, code=2)
    shutil.rmtree(out)
    text = run(data, out, *FLAGS, URL, "--init_from=auto")
    assert "fetching ckpt_00000030 from gs://bucket/run" in text and "training from step 30 to 40" in text
    assert same(last_weights(out), last_weights(whole)) and curve(out) == curve(whole)


def test_damaged_checkpoints_in_the_bucket_are_skipped(data, front, whole, tmp_path):  # noqa: F811
    out, bucket = str(tmp_path / "run"), Bucket("gs://bucket/run")
    run(data, out, *FLAGS, URL, "--keep_last_n=4", "--max_steps=39")
    bucket.delete("ckpt_00000039.json")  # the last upload was interrupted
    bucket.write("ckpt_00000030.pt", b"something else")
    shutil.rmtree(out)
    text = run(data, out, *FLAGS, URL, "--init_from=auto", "--keep_last_n=9")
    assert "skipped" in text and "ckpt_00000030.pt: damaged" in text and "training from step 20 to 40" in text
    assert same(last_weights(out), last_weights(whole)) and curve(out) == curve(whole)


def test_an_unavailable_bucket_does_not_stop_training(data, front, whole, tmp_path):  # noqa: F811
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
def test_a_stop_while_a_data_set_is_made(by, tmp_path):
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


def test_output_that_nobody_reads_does_not_end_a_run(data, whole, tmp_path):  # noqa: F811
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
def test_a_wrong_bucket_fails_before_any_write(data, front, tmp_path, url, denied, word):  # noqa: F811
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
    log = SimpleNamespace(say=said.append, wandb_id=None, path=None)
    saver = train.Checkpoints(c, SimpleNamespace(rank=0), log, start, "")
    saver.save("ckpt_00000010", 10, SimpleNamespace(state_dict=lambda step: dict(step=step)), {})
    assert not saver.written() and said == [f"checkpoint not written: {fault}"] and saver.written()
    assert os.listdir(tmp_path) == []  # nothing half-written stays


def test_data_is_read_from_the_bucket(data, front, whole, tmp_path):  # noqa: F811
    upload_dataset(data, "gs://bucket/data/four")
    flags = ["--data_path=gs://bucket/data/four", f"--out_dir={tmp_path / 'run'}"]
    subprocess.run(command(data, "", *FLAGS, *flags), cwd=tmp_path, check=True, capture_output=True)
    assert curve(tmp_path / "run") == curve(whole) and (tmp_path / "data" / "four" / "manifest.json").exists()


def test_sigterm_leaves_its_checkpoint_in_the_bucket(data, front, tmp_path):  # noqa: F811
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


def test_two_hosts_of_which_one_has_the_files(data, whole, tmp_path):  # noqa: F811
    """torchrun on two hosts, here folders: rank 1 gets rank 0's weights and step; it writes only a log."""
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
    assert os.listdir(tmp_path / "1" / "run") == ["log.host1.txt"]
    assert "training from step 20 to 40" in (tmp_path / "1" / "run" / "log.host1.txt").read_text()


# Several ranks, each as on its own host: what ends one must end all, with the right exit code.

SHALLOW = ["--max_steps=20", "--checkpoint_interval=10", "--H_cycles=1", "--L_cycles=1", "--halt_max_steps=2"]
SOURCES = ("train.py", "xla.py", "model.py", "data.py", "configurator.py")


def two_ranks(data, tmp_path, flags=((), ()), edits=((), ()), limits=(None, None)):  # noqa: F811
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
        limit = limits[rank]
        processes.append(subprocess.Popen(
            [sys.executable, str(host / "train.py"), *command(data, "run", *SHALLOW, *flags[rank])[2:]],
            cwd=host, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **env},
            preexec_fn=limit and (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))))
    texts = [process.communicate(timeout=60)[0] for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, texts)]


@pytest.mark.parametrize("what,code,flags,edit", [
    ("settings", 2, ("--lr=1e-3", "--lr=2e-3"), None),
    ("code", 1, ("--lr=1e-3", "--lr=1e-3"),
     ("model.py", "IGNORE_LABEL = -100  #", "IGNORE_LABEL = -100  # really")),
    ("data set", 2, ("--data_path={data}", "--data_path={other}"), None),
], ids=["settings", "code", "data set"])
def test_ranks_that_differ_end_before_the_first_step(data, tmp_path, what, code, flags, edit):  # noqa: F811
    other = tmp_path / "other"
    prepare_sudoku.prepare(configure(prepare_sudoku.__file__, [
        "--source=generate", "--size=4", "--num_train=64", "--num_test=40", "--num_aug=5", "--seed=1",
        f"--output_dir={other}"]))
    flags = [[flag.format(data=data, other=other)] for flag in flags]
    for got, text in two_ranks(data, tmp_path, flags, ((), [edit] if edit else ())):
        assert got == code and f"train.py: {what} of host 1" in text and "step 1" not in text, text


def test_each_host_makes_its_own_data_set(data, tmp_path):  # noqa: F811
    """data_prepare on two hosts that share no disk."""
    prepare = (f"{os.path.join(ROOT, 'prepare_sudoku.py')} --source=generate --size=4 --num_train=64 "
               "--num_test=40 --num_aug=5 --output_dir=data/new")
    flags = ["--data_path=data/new", f"--data_prepare={prepare}"]
    for code, text in two_ranks(data, tmp_path, [flags, flags]):
        assert code == 0 and "data/new is missing; making it" in text, text


def test_a_rank_that_stalls_ends_all(data, tmp_path):  # noqa: F811
    line = "        rows = rank_slice(batch_size, rank, world)\n"
    stalling = line + "        if (rank, step) == (1, 14):\n            time.sleep(1000)\n"
    edits = [[("data.py", line, stalling)]] * 2
    for code, text in two_ranks(data, tmp_path, [["--stall_timeout=5"]] * 2, edits):
        assert code == 1 and "Timeout (0:00:05)!" in text, text
    assert os.path.exists(tmp_path / "host0" / "run" / "ckpt_00000010.json")


def test_ranks_agree_that_the_last_checkpoint_cannot_be_written(data, tmp_path):  # noqa: F811
    """Rank 0's disk is full for files of this size: its peer must not wait for it in the evaluation."""
    (code, text), (peers_code, _) = two_ranks(data, tmp_path, limits=(50_000, None))
    assert (code, peers_code) == (1, 1) and "checkpoint not written" in text, text
    assert sorted(os.listdir(tmp_path / "host0" / "run")) == ["log.txt", "metrics.jsonl"]


def test_an_unreachable_bucket_is_not_reported_as_wrong_input(data, front, tmp_path):  # noqa: F811
    run(data, tmp_path / "run", *FLAGS, URL, "--max_steps=10")
    front.script = [503] * 3  # a transient error
    text = run(data, tmp_path / "run", *FLAGS, URL, "--max_steps=20", "--init_from=auto")
    assert "training from step 10 to 20" in text
    front.rate, front.script = 0.0, [503] * 1000
    # a first start does not wait for minutes
    text = run(data, tmp_path / "run", *FLAGS, URL, "--max_steps=20", code=1)
    assert "gave up after 3 attempts" in text.splitlines()[-1] and "Traceback" not in text


def test_puzzle_identifiers_without_a_puzzle_embedding(data, tmp_path):  # noqa: F811
    """As data sets of the official code have them."""
    path = shutil.copytree(data, tmp_path / "data")
    os.remove(path / "manifest.json")
    for split in ("train", "test"):
        metadata = json.loads((path / split / "dataset.json").read_text())
        (path / split / "dataset.json").write_text(json.dumps(metadata | {"num_puzzle_identifiers": 5}))
        identifiers = np.load(path / split / "all__puzzle_identifiers.npy")
        np.save(path / split / "all__puzzle_identifiers.npy", np.arange(len(identifiers)) % 5)
    run(path, tmp_path / "run", "--max_steps=5", "--puzzle_emb_ndim=0", "--puzzle_emb_len=0")
    run(path, tmp_path / "with", "--max_steps=5")
