"""Failures: kills at any moment, lost machines, transient storage errors. Real commands, emulated storage."""
import hashlib
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import test_train
import torch
from conftest import ROOT, ForkedTrain, children, hosts, wait_for
from test_gcs import emulator, front, stored
from test_train import WHOLE, begun, command, curve, data, edited_copy, forked, last_weights, popen, run, same

import train
from bucket import Bucket

whole = test_train.whole
FLAGS = [*WHOLE, "--keep_last_n=2"]
URL = "--gcs_dir=gs://bucket/run"


def in_bucket():
    return Bucket("gs://bucket/run").list()


def test_twelve_kills_lose_nothing(data, tmp_path):
    """SIGKILL at random moments, also while saving, then init_from=auto: the weights are bitwise equal."""
    flags = ["--max_steps=200", "--checkpoint_interval=5", "--eval_interval=20", "--eval_max_puzzles=20"]
    run(data, tmp_path / "whole", *flags)
    out, draw = str(tmp_path / "run"), random.Random(0)
    for start in range(13):
        process = forked(data, out, *flags, "--init_from=auto")
        text = ""
        for line in process.stdout:
            text += line
            if line.startswith("training from") and start < 12:
                time.sleep(draw.uniform(0, 0.3))
                process.kill()
        assert process.wait() == (-signal.SIGKILL if start < 12 else 0), text
    assert same(last_weights(out), last_weights(tmp_path / "whole"))
    assert curve(out) == curve(tmp_path / "whole") and curve(out, "final") == {200: True}


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
    assert any(fault for _, fault, *_ in front.log)


def test_another_machine_resumes_from_the_bucket(data, front, whole, tmp_path):
    """From its newest complete checkpoint. Without any, it is no start from scratch."""
    out, bucket = str(tmp_path / "run"), Bucket("gs://bucket/run")
    run(data, out, *FLAGS, URL, "--keep_last_n=4", "--max_steps=39")
    bucket.delete("ckpt_00000039.json")  # the last upload was interrupted
    bucket.write("ckpt_00000030.pt", b"something else")
    again = [*FLAGS, URL, "--init_from=auto", "--keep_last_n=9"]
    shutil.rmtree(out)
    text = run(data, out, *again)
    assert "skipped" in text and "ckpt_00000030.pt: damaged" in text
    assert "fetching ckpt_00000020 from gs://bucket/run" in text and "training from step 20 to 40" in text
    assert same(last_weights(out), last_weights(whole[0])) and curve(out) == curve(whole[0])
    for name in in_bucket():
        if name.endswith(".json"):
            bucket.delete(name)
    shutil.rmtree(out)
    assert "no complete checkpoint" in run(data, out, *again, code=2)


def test_an_unavailable_bucket_does_not_stop_training(data, front, whole, tmp_path):
    with begun(forked(data, tmp_path / "run", *FLAGS, URL, "--log_interval=1")) as process:
        front.denied = ("start", "insert", "list", "media")
        text = process.communicate(timeout=60)[0]
    assert process.returncode == 1, text  # complete here, but not in the bucket: a restart uploads the rest
    assert text.count("upload failed") == 1 and text.count("not complete") == 1, text
    assert same(last_weights(tmp_path / "run"), last_weights(whole[0]))
    front.denied = ()
    text = run(data, tmp_path / "run", *FLAGS, URL, "--init_from=auto")
    assert "is complete at step 40" in text and "ckpt_00000040.json" in in_bucket(), text


def ignores_sigint(pid):
    with open(f"/proc/{pid}/status") as f:
        return int(f.read().partition("SigIgn:")[2].split()[0], 16) & 2 > 0


@pytest.mark.parametrize("by", ["Ctrl-C", "SIGTERM"])
def test_a_stop_while_a_dataset_is_made(by, tmp_path):
    """By the processes of a pool, which end too."""
    script = tmp_path / "prepare.py"  # the pool has two processes on any machine
    script.write_text(f"""import sys
sys.path.insert(0, {ROOT!r})
import configurator, data, prepare_sudoku
data.cores = lambda: 2
if __name__ == "__main__":
    configurator.start(prepare_sudoku.main, prepare_sudoku.__file__)
""")
    prepare = f"{script} --source=generate --num_train=1000000 --output_dir={tmp_path / 'data'}"
    flags = [f"--data_path={tmp_path / 'data'}", f"--data_prepare={prepare}", f"--out_dir={tmp_path / 'run'}"]
    process = popen([sys.executable, "train.py", *flags, "--device=cpu"], cwd=ROOT, start_new_session=True)
    with begun(process, "is missing; making it"):
        wait_for(lambda: sum(ignores_sigint(pid) for child in children(process.pid)
                             for pid in children(child)) >= 3)  # a pool's two, and a tracker
        if by == "Ctrl-C":
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        else:
            process.terminate()  # as a sweep does
        said = process.communicate(timeout=120)[0].splitlines()  # waits until no process has stderr open
    said = {line for line in said if "/s," not in line}
    assert process.returncode == 3 and {"prepare_sudoku.py: stopped", "train.py: stopped"} <= said
    assert by == "SIGTERM" or len(said) == 2
    assert not os.path.exists(tmp_path / "data")


def test_a_bucket_that_refuses_is_wrong_input_and_one_that_is_away_is_not(data, front, tmp_path):
    front.denied = ("insert",)
    text = run(data, tmp_path / "run", *FLAGS, URL, code=2)
    assert text.splitlines()[-1].startswith("train.py: ") and "403" in text and "Traceback" not in text
    assert not (tmp_path / "run").exists()
    front.denied, front.script = (), [503] * 3  # a transient error
    run(data, tmp_path / "run", *FLAGS, URL, "--max_steps=10", "--init_from=auto")
    front.script = [503] * 1000  # a first start does not wait for minutes
    text = run(data, tmp_path / "run", *FLAGS, URL, "--max_steps=20", code=1)
    assert "status 503" in text.splitlines()[-1] and "Traceback" not in text


@pytest.mark.parametrize("fault", [
    OSError("No space left on device"),
    RuntimeError("PytorchStreamWriter failed writing file"),
], ids=repr)
def test_a_full_disk_costs_a_checkpoint_and_not_the_run(data, tmp_path, monkeypatch, fault):
    def full(*_):
        raise fault

    monkeypatch.setattr(train.torch, "save", full)
    with pytest.raises(SystemExit, match="1"):
        run(data, tmp_path, "--max_steps=10", "--checkpoint_interval=5")
    text = (tmp_path / "log.txt").read_text()
    assert text.count(f"checkpoint not written: {fault}\n") == 2
    assert list(curve(tmp_path)) == [5, 10]
    assert not list(tmp_path.glob("ckpt_*"))  # nothing half-written stays


def test_sigterm_leaves_its_checkpoint_in_the_bucket(data, front, tmp_path):
    """Although /tmp was cleaned, where the processes of a host find the request."""
    argv = command(data, tmp_path / "run", "--max_steps=100000", "--checkpoint_interval=0", URL)[2:]
    tmp = tmp_path / "tmp"
    tmp.mkdir()
    process = ForkedTrain(argv, env=os.environ | {"TMPDIR": str(tmp)})
    with begun(process, "step 10/"):
        folder, = tmp.iterdir()
        shutil.rmtree(folder)
        process.terminate()
        text = process.communicate(timeout=30)[0]
    assert process.returncode == 3 and "to continue:" in text
    path = train.checkpoint_paths(str(tmp_path / "run"))[0][:-3]
    assert os.path.basename(path) + ".pt" in in_bucket()
    with open(path + ".json", "rb") as f:
        assert Bucket("gs://bucket/run").read(os.path.basename(path) + ".json") == f.read()


# Several ranks, each as on its own host: what ends one must end all, with the right exit code.

SHALLOW = ["--max_steps=20", "--checkpoint_interval=10", "--H_cycles=1", "--L_cycles=1", "--halt_max_steps=2"]


def two_ranks(data, tmp_path, *flags, scripts=None, limit=None):
    """Runs two hosts of one rank each, with flags for each; returns (exit code, output) of both.

    scripts: of forks. limit: the size of the largest file that the first may write, in bytes.
    """
    processes = []
    for rank, environment in enumerate(hosts(2)):
        host = tmp_path / f"host{rank}"
        host.mkdir(exist_ok=True)
        argv = command(data, "run", *SHALLOW, *(flags[rank] if flags else ()))[2:]
        options = dict(cwd=host, env=os.environ | environment)
        if scripts:
            processes.append(popen([sys.executable, scripts[rank], *argv], **options))
        else:
            processes.append(ForkedTrain(argv, **options))
    if limit:
        resource.prlimit(processes[0].pid, resource.RLIMIT_FSIZE, (limit, limit))
    texts = [process.communicate(timeout=60)[0] for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, texts)]


def test_ranks_that_differ_end_before_the_first_step(data, random_puzzles, tmp_path):
    """Rank 0 is on host 1. Of the code every file counts, also one that a fork adds."""
    def check(*flags, code, line, scripts=None):
        for got, text in two_ranks(data, tmp_path, *flags, scripts=scripts):
            assert got == code and f"\ntrain.py: {line}" in text and "step 1" not in text, text

    differ = "host 0, rank 1: {} differ from rank 0's: {}\n".format
    check(["--lr=1e-3"], ["--lr=2e-3", "--seed=1"], code=2, line=differ("settings", "lr, seed"))
    check([], [f"--data_path={random_puzzles}"], code=2, line=differ("dataset", "data_path"))
    odd = ["--global_batch_size=3"]
    check(odd, odd, code=2, line="global_batch_size 3 must be a multiple of 2 ")
    copy = edited_copy(tmp_path / "code", "model.py", "import math\n", "import math\nimport mine\n")
    (tmp_path / "code" / "mine.py").touch()
    for path in (tmp_path / "code").glob("*.py"):
        path.write_text(path.read_text() + "# another version\n")
    imported = "bucket.py, configurator.py, data.py, device.py, mine.py, model.py, puzzles.py, train.py"
    check(code=1, line=differ("code", imported), scripts=[train.__file__, copy])


def test_a_rank_with_wrong_input_leaves_after_its_peers_have_connected(data, tmp_path):
    """Connecting would fail otherwise, and a peer on a busy machine end with 1 instead of 2."""
    line = "            torch.distributed.init_process_group(backend, timeout=timeout)\n"
    busy = "            time.sleep(3)\n            Path('connected').touch()\n"
    slow = edited_copy(tmp_path / "code", "device.py", line, line + busy)
    argv = command(data, "run", "--global_batch_size=3")[2:]
    ranks = [popen([sys.executable, script, *argv], cwd=tmp_path, env=os.environ | host)
             for script, host in zip((train.__file__, slow), hosts(2))]
    with begun(ranks[0], "must be a multiple of 2"):
        assert (tmp_path / "connected").exists()
        assert [rank.wait(120) for rank in ranks] == [2, 2]


def test_two_hosts_of_which_one_has_the_files(data, tmp_path):
    """Rank 1 gets rank 0's weights and step, and writes nothing. Each makes its own dataset."""
    prepare = f"{os.path.join(ROOT, 'prepare_sudoku.py')} --output_dir=data/new {' '.join(test_train.DATA)}"
    flags = ["--lr=2e-4", "--keep_last_n=9", "--eval_interval=4"]
    run(data, tmp_path / "one", *SHALLOW, *flags)
    flags += ["--data_path=data/new/", f"--data_prepare={prepare}"]
    for max_steps, init_from in ((10, "scratch"), (20, "auto")):
        now = [*flags, f"--max_steps={max_steps}", f"--init_from={init_from}"]
        both = two_ranks(data, tmp_path, now, now)
        assert [code for code, _ in both] == [0, 0], both
        trains = [f"training from step {max_steps - 10} to {max_steps}" in text for _, text in both]
        makes = ["data/new/ is missing; making it" in text for _, text in both]
        assert trains == [True, False] and makes == [max_steps == 10] * 2
    one, two = curve(tmp_path / "one"), curve(tmp_path / "host0" / "run")
    assert one.keys() == two.keys() and two == pytest.approx(one, rel=1e-4)
    assert not (tmp_path / "host1" / "run").exists()


def test_a_rank_that_stalls_ends_all(data, tmp_path):
    line = "        rows = rank_slice(batch_size, rank, world)\n"
    stalls = "        if (rank, step) == (1, 14):\n            time.sleep(1000)\n"
    script, flags = edited_copy(tmp_path / "code", "data.py", line, line + stalls), ["--stall_timeout=5"]
    for code, text in two_ranks(data, tmp_path, flags, flags, scripts=[script] * 2):
        assert code == 1 and "Timeout (0:00:05)!" in text, text
    assert os.path.exists(tmp_path / "host0" / "run" / "ckpt_00000010.json")


def test_ranks_agree_that_the_last_checkpoint_cannot_be_written(data, tmp_path):
    """Rank 0's disk is full for files of this size: its peer must not wait for it in the evaluation."""
    (code, text), (peers_code, _) = two_ranks(data, tmp_path, limit=50_000)
    assert (code, peers_code) == (1, 1) and "checkpoint not written" in text, text
    assert sorted(os.listdir(tmp_path / "host0" / "run")) == ["log.txt", "metrics.jsonl"]


def test_puzzle_identifiers_without_a_puzzle_embedding(data, tmp_path):
    """As datasets of the official code have them."""
    path = shutil.copytree(data, tmp_path / "data")
    os.remove(path / "manifest.json")
    for split in (path / "train", path / "test"):
        metadata = (split / "dataset.json").read_text()
        (split / "dataset.json").write_text(metadata.replace('identifiers": 1', 'identifiers": 5'))
        identifiers = np.load(split / "all__puzzle_identifiers.npy")
        np.save(split / "all__puzzle_identifiers.npy", np.arange(len(identifiers)) % 5)
    run(path, tmp_path / "run", "--max_steps=5", "--puzzle_emb_ndim=0", "--puzzle_emb_len=0")
    run(path, tmp_path / "with", "--max_steps=5")
    assert len(torch.load(tmp_path / "with/ckpt_00000005.pt")["weights"]["puzzle_emb.weights"]) == 5


# One training at a time, and a start that can be stopped.

def test_one_training_in_a_folder_and_in_a_bucket(data, front, tmp_path):
    with begun(forked(data, tmp_path / "run", "--max_steps=100000", URL)):
        assert "another process trains there" in run(data, tmp_path / "run", "--init_from=auto", code=1)
        assert "gs://bucket/run holds a run" in run(data, tmp_path / "other", URL, code=2)
    front.script = [None, None, None, b"{}"]  # the claim is not listed yet: another run has just begun
    with pytest.raises(train.TransientError, match="has just begun"):
        train.claim(SimpleNamespace(out_dir=str(tmp_path / "third"), gcs_dir="gs://bucket/run"),
                    Bucket("gs://bucket/run"), False, SimpleNamespace())
    assert "training from step 0" in run(data, tmp_path / "run", "--init_from=auto", "--max_steps=5")


def test_ranks_end_with_torchruns_agent(data, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    with begun(popen([*torchrun, *command(data, tmp_path / "run", "--max_steps=100000")[1:]])) as agent:
        rank, = children(agent.pid)
    wait_for(lambda: not os.path.exists(f"/proc/{rank}"), 20)


def test_a_file_to_begin_with_is_resumed_after_a_preemption(data, front, whole, tmp_path):
    """tpu.sh keep repeats the same command, on a new disk."""
    file, out = train.checkpoint_paths(whole[0])[0], tmp_path / "run"
    again = [*FLAGS, URL, f"--init_from={file}"]
    assert "training from step 0 to 20" in run(data, out, *again, "--max_steps=20")
    shutil.rmtree(out)
    text = run(data, out, *FLAGS, URL, "--max_steps=30", "--init_from=resume")
    assert "training from step 20 to 30" in text
    assert "training from step 30 to 40" in run(data, out, *again)
    for name in ("ckpt_00000040.pt", "ckpt_00000040.json"):
        os.remove(out / name)
    assert "holds a run" in run(data, out, *FLAGS, f"--init_from={whole[0]}/best.pt", code=2)


def test_sigterm_while_the_bucket_is_tried_again(data, front, tmp_path):
    front.script, front.retry_after = [503] * 1000, "50"
    with begun(forked(data, tmp_path / "run", URL, "--init_from=auto"), "trying again in 50 s") as process:
        process.terminate()
        assert process.wait(12) == 3


# What the bucket holds.

def test_a_file_that_cannot_be_uploaded_does_not_stop_the_others(data, front, tmp_path):
    """Its name cannot even be printed. The run ends with 1, since the bucket lacks it."""
    out = tmp_path / "run"
    out.mkdir()
    (out / os.fsdecode(b"\xff.txt")).write_text("")
    text = run(data, out, *FLAGS, URL, code=1)
    assert text.count("upload failed") == 1 and {"ckpt_00000040.json", "metrics.jsonl"} <= in_bucket().keys()


class Killed(BaseException):
    pass


class MemoryBucket(dict):
    """A bucket whose requests fail or end the process, before or after they take effect, as drawn.

    meanwhile() is called in each: training goes on while an upload is under way.
    """

    def __init__(self, draw, meanwhile):
        super().__init__()
        self.draw, self.meanwhile, self.faults = draw, meanwhile, (0.0, 0.0)

    def request(self, effect):
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
        return self.request(lambda: {name: len(content) for name, content in self.items()})

    def download(self, name, path):
        pathlib.Path(path).write_bytes(self[name])

    def complete(self):
        """Steps of the complete checkpoints; the .json tells the hash of its .pt."""
        return [int(n[5:13]) for n, c in self.items() if n.startswith("ckpt") and n.endswith(".json") and
                hashlib.sha256(self.get(n[:-5] + ".pt", b"")).hexdigest() == json.loads(c)["sha256"]]


def test_a_checkpoint_that_cannot_be_read_does_not_end_the_mirror(monkeypatch, tmp_path):
    bucket = MemoryBucket(random.Random(0), lambda: None)
    monkeypatch.setattr(train, "Bucket", lambda *args: bucket)
    monkeypatch.setattr(train.Mirror, "work", lambda self: None)  # copy() is called here instead
    (tmp_path / "ckpt_00000005.json").mkdir()
    (tmp_path / "log.txt").write_text("a line")
    c = SimpleNamespace(out_dir=str(tmp_path), gcs_dir="gs://bucket/run", keep_last_n=1)
    [error] = train.Mirror(c, None, "ckpt_00000005").copy()
    assert isinstance(error, IsADirectoryError) and bucket == {"log.txt": b"a line"}


@pytest.mark.parametrize("seed", range(300))
def test_the_bucket_always_holds_a_complete_checkpoint(monkeypatch, tmp_path, seed):
    """Random checkpoints, slow and failing uploads, kills, lost folders, restarts.

    Where no upload fails, it has the metrics up to its newest checkpoint too.
    """
    draw = random.Random(seed)
    monkeypatch.setattr(train.Mirror, "work", lambda self: None)  # copy() is called here instead
    monkeypatch.setattr(os, "fsync", lambda f: None)
    monkeypatch.setattr(train.torch, "save", lambda state, f: f.write(json.dumps(state).encode()))
    monkeypatch.setattr(train, "read_checkpoint", lambda path: json.loads(open(path, "rb").read()))
    out, log = tmp_path / "run", SimpleNamespace(print0=lambda text: None)
    c = SimpleNamespace(out_dir=str(out), gcs_dir="gs://bucket/run", keep_last_n=draw.choice([1, 2, 3]),
                        init_from="auto", eval_only=False, export="", data_path="")
    step, had_one, has_metrics, checkpoints = 0, False, False, None

    def save():
        nonlocal step
        step += 5
        state = dict(step=step, data="", settings={}, optimizer={}, wandb_id="", best=0, weights={})
        with open(out / "metrics.jsonl", "a") as f:
            f.write(f'{{"step": {step}}}\n')
        checkpoints.write(f"ckpt_{step:08d}", state, {})

    def meanwhile():
        nonlocal had_one
        assert bucket.complete() or not had_one, sorted(bucket)
        had_one = bool(bucket.complete())
        assert not has_metrics or b'"step": %d}' % max(bucket.complete()) in bucket["metrics.jsonl"]
        while checkpoints and draw.random() < 0.3:
            save()

    bucket = MemoryBucket(draw, meanwhile)
    monkeypatch.setattr(train, "Bucket", lambda *args, **options: bucket)
    for _ in range(8):
        out.mkdir(exist_ok=True)
        here = [int(path[-11:-3]) for path in train.checkpoint_paths(out, (".pt", ".json"))]
        expected, bucket.faults = max(bucket.complete() + here, default=0), (0.0, 0.0)
        state = train.find_checkpoint(c, bucket, bucket.list(), lambda note: None)
        step = state.get("step", 0)
        assert step >= expected
        start = SimpleNamespace(state={}, step=step)
        checkpoints = train.Checkpoints(c, SimpleNamespace(rank=0), log, start, data=None)
        bucket.faults = draw.choice([(0.0, 0.0), (0.02, 0.1), (0.1, 0.1), (0.0, 0.5)])
        try:
            for _ in range(draw.randrange(6)):
                save()
                if draw.random() < 0.7:
                    newest = int(checkpoints.mirror.newest[5:])
                    checkpoints.mirror.copy()
                    has_metrics = bucket.faults == (0.0, 0.0)
                    assert not has_metrics or max(bucket.complete(), default=0) >= newest
                    meanwhile()
        except Killed:
            pass
        checkpoints, has_metrics = None, False
        if draw.random() < 0.5:
            shutil.rmtree(out)
