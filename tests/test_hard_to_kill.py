"""A run survives kills at any moment, lost machines, full disks and buckets in trouble.

A kill loses at most the steps since the last checkpoint, and what ends one rank ends all. The commands are
real, the storage is emulated.
"""
import errno
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers import (
    DATA,
    ROOT,
    WHOLE,
    arguments,
    begun,
    children,
    curve,
    flip_a_bit,
    hosts,
    last_weights,
    lines,
    run,
    same,
    start_script,
    start_train,
    wait_for,
)
from servers import draw_faults, stored

import train
from runtime.bucket import Bucket
from runtime.errors import UserError
from runtime.files import checkpoint_paths, complete_checkpoints, locked

URL = "--gcs_dir=gs://bucket/run"
FLAGS = [*WHOLE, "--keep_last_n=2", URL]
AUTO = [*WHOLE, "--init_from=auto"]
ENDLESS = ["--max_steps=1000000", "--log_interval=1000"]


def in_bucket():
    return Bucket("gs://bucket/run").list()


def test_kills_and_lost_machines_lose_nothing(data, bucket_server):
    """SIGKILL, then init_from=auto, once on a new machine; requests to the bucket fail at random."""
    # so many steps that a fast machine does not end before it is killed
    flags = ["--max_steps=120", "--checkpoint_interval=5", "--keep_last_n=2"]
    run(data, "whole", *flags)

    def start():
        return begun(start_train(data, "run", *flags, URL, "--init_from=auto"))

    bucket_server.script = draw_faults(0, 0.05)
    with start():
        time.sleep(0.2)
    # killed after an upload
    with start():
        wait_for(lambda: complete_checkpoints(in_bucket()))
    # killed on a new machine, and not killed
    shutil.rmtree("run")
    with start():
        time.sleep(0.1)
    with start() as process:
        process.output()

    # the new machine went on from the bucket's checkpoint
    starts = re.findall(r"^training from step (\d+) ", Path("run/log.txt").read_text(), re.MULTILINE)
    assert int(starts[-1]) > 0
    assert same(last_weights("run"), last_weights("whole"))
    for name in ("metrics.jsonl", "ckpt_00000120.pt"):
        assert stored(bucket_server, f"run/{name}") == Path("run", name).read_bytes()


# Checkpoints that cannot be read.

def lose_the_json(path):
    path.with_suffix(".json").unlink()


@pytest.mark.parametrize("damage, line", [
    (flip_a_bit, "skipped {}: damaged (it does not match the hash in its .json)"),
    (lose_the_json, ""),  # the write was interrupted
])
def test_the_checkpoint_before_a_damaged_one_is_used(data, out, damage, line):
    """The damaged one does not count towards keep_last_n."""
    path = Path(out) / "ckpt_00000040.pt"
    damage(path)
    text = run(data, out, *AUTO, "--max_steps=35", "--checkpoint_interval=5", "--keep_last_n=1")
    assert line.format(path) in text and "training from step 30 to 35" in text
    names = os.listdir(out)
    assert "ckpt_00000035.json" in names and "ckpt_00000030.pt" not in names


def test_another_machine_uses_the_newest_whole_checkpoint_of_the_bucket(data, bucket_server, finished):
    bucket = Bucket("gs://bucket/run")
    run(data, "first", *FLAGS, "--keep_last_n=4", "--max_steps=39")
    bucket.delete("ckpt_00000039.json")  # the last upload was interrupted
    bucket.write("ckpt_00000030.pt", b"something else")
    text = run(data, "second", *FLAGS, "--init_from=auto", "--keep_last_n=9")
    assert text.count("fetching ckpt_00000030") == 3  # the transfer may have damaged it
    assert "ckpt_00000030.pt: damaged" in text and "training from step 20 to 40" in text
    assert same(last_weights("second"), last_weights(finished[0])) and curve("second") == curve(finished[0])

    # if no checkpoint of the bucket is whole, a run does not start from scratch
    for name in complete_checkpoints(bucket.list()):
        bucket.write(f"{name}.json", b"{}")
    text = run(data, "third", URL, "--init_from=auto", code=2)
    assert "no complete checkpoint" in text and "ckpt_00000040.pt: damaged" in text


def test_a_checkpoint_is_uploaded_whole_and_its_json_last(data, bucket_server, monkeypatch):
    """A machine that finds the .json finds all else."""
    write = mock.create_autospec(Bucket.write, side_effect=Bucket.write)
    monkeypatch.setattr(Bucket, "write", write)
    run(data, "run", "--max_steps=8", "--eval_interval=1", URL)  # it evaluates after step 4
    uploads = [call.args[1] for call in write.call_args_list]
    before_the_json = uploads[:uploads.index("ckpt_00000008.json")]
    assert {"ckpt_00000008.pt", "best.pt", "metrics.jsonl"} <= {*before_the_json}


# One run: its folder, its bucket, its machine.

def test_a_folder_and_a_bucket_of_two_runs_are_not_mixed(data, bucket_server, out):
    other = "--gcs_dir=gs://bucket/other"
    run(data, "first", "--max_steps=5", URL)
    assert "is complete" in run(data, out, *AUTO, other)  # a first bucket for a run that had none
    assert f"{URL} holds a run" in run(data, "second", URL, code=2)
    text = run(data, "first", "--max_steps=10", other, "--init_from=auto", code=2)
    assert "first and gs://bucket/other hold two different runs" in text


def test_a_file_system_without_locks_costs_a_warning(monkeypatch, capsys):
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(errno.ENOLCK, "no locks here")))
    with locked("file"):
        pass
    assert "file.lock: cannot be locked (no locks here)" in capsys.readouterr().err


def test_one_process_trains_in_a_folder(data):
    with begun(start_train(data, "run", *ENDLESS)):
        assert "another process trains there" in run(data, "run", "--init_from=auto", code=1)
    assert "training from step 0" in run(data, "run", "--init_from=auto", "--max_steps=5")


def test_a_file_to_begin_with_is_resumed_after_a_preemption(data, bucket_server, finished):
    """tpu.sh keep repeats the same command, on a new disk."""
    again = [*FLAGS, f"--init_from={finished[0]}/ckpt_00000040.pt"]
    assert "training from step 0 to 20" in run(data, "first", *again, "--max_steps=20")
    assert "training from step 20 to 40" in run(data, "second", *again)
    # the file has moved since
    shutil.copy(f"{finished[0]}/ckpt_00000040.pt", "moved.pt")
    assert "is complete" in run(data, "second", *FLAGS, "--init_from=moved.pt")
    # another file
    with pytest.raises(UserError, match="holds a run"):
        run(data, "second", *FLAGS, f"--init_from={finished[0]}/best.pt")


# Stops.

def test_a_stop_leaves_its_checkpoint_in_the_bucket(data, bucket_server):
    """A cleaner has removed out_dir, the bucket fails twice, and two signals come, as under sweep.py."""
    with begun(start_train(data, "run", *ENDLESS, "--checkpoint_interval=0", URL)) as process:
        wait_for(lambda: "step 1:" in Path("run/log.txt").read_text())
        shutil.rmtree("run")
        bucket_server.script = [503] * 2
        os.kill(process.pid, signal.SIGINT)
        with begun(process, "saving and stopping"):
            process.terminate()
            text = process.output(3, timeout=30)
    assert "to continue:" in text and "trying again in 1 s" in text
    [saved] = checkpoint_paths("run")
    assert complete_checkpoints(in_bucket()) == [Path(saved).stem]
    # the steps since the last line have one, too
    assert saved == f"run/ckpt_{lines('run')[-1]['step']:08}.pt"


SLOW_DISK = """
import time
from runtime import checkpoint
_write = checkpoint.Checkpoints.write
def write(self, *arguments):
    time.sleep(5)
    return _write(self, *arguments)
checkpoint.Checkpoints.write = write
"""


@pytest.mark.parametrize("signals, code", [
    ([signal.SIGTERM, signal.SIGHUP, signal.SIGINT], 3),
    ([signal.SIGINT, signal.SIGINT], -signal.SIGKILL)])
def test_signals_in_a_save_are_ignored_but_for_a_second_ctrl_c(data, signals, code):
    """The save takes longer than the 4 seconds after which process.command() ends other commands."""
    Path("slow_disk.py").write_text(SLOW_DISK)
    flags = ["slow_disk.py", *ENDLESS, "--checkpoint_interval=0"]
    with begun(start_train(data, "run", *flags), "step 1:") as process:
        process.terminate()
        with begun(process, "saving and stopping; a second Ctrl-C kills"):
            for number in signals:
                time.sleep(0.2)
                os.kill(process.pid, number)
            text = process.output(code)
    assert bool(checkpoint_paths("run")) == ("to continue:" in text) == (code == 3)


# A sequence takes a tenth of a second, in training or in an evaluation.
SLOW_STEPS = """
import time
import model
from runtime import device, log
new(slow_training=True)
log.SLOW = 0.3
device.LONG = 0.1
_forward = model.TRM.forward

def forward(self, *arguments):
    if self.training == self.settings.slow_training:
        time.sleep(0.1)
    return _forward(self, *arguments)

model.TRM.forward = forward
"""


@pytest.mark.parametrize("flags, phase, words", [
    (["--global_batch_size=3072"], "training from", "stopped at step 0, before its end, nothing to save; "),
    (["--slow_training=False"], "trained 1 steps", "final evaluation stopped; the same command starts it")])
def test_a_stop_drops_a_step_that_takes_long(data, flags, phase, words):
    """The step of training takes 5 minutes, and says so."""
    Path("slow.py").write_text(SLOW_STEPS)
    flags = "slow.py", "--micro_batch_size=1", "--max_steps=1", "--eval_halt_max_steps=999999", *flags
    with begun(start_train(data, "run", *flags), phase) as process, begun(process, "% of a step, "):
        os.kill(process.pid, signal.SIGUSR1)
        assert words in process.output(3, timeout=15)


def test_a_job_that_was_suspended_goes_on_until_its_terminal_closes(data):
    """A batch system suspends it for longer than stall_timeout."""
    with begun(start_train(data, "run", *ENDLESS, "--stall_timeout=6"), "step 1:") as process:
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(7)
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(1)
        os.kill(process.pid, signal.SIGHUP)
        assert "to continue:" in process.output(3, timeout=30)


def test_nohup_keeps_a_run_that_loses_its_terminal(data):
    Path("nohup.py").write_text("import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)")
    flags = "nohup.py", "--max_steps=1000000", "--log_interval=1"
    with begun(start_train(data, "run", *flags), "step 1/") as process:
        os.kill(process.pid, signal.SIGHUP)
        with begun(process, "step 100/"):
            process.terminate()
            process.output(3, timeout=30)


def test_c_code_that_keeps_pythons_lock_is_ended():
    """No thread of Python can end the process."""
    hang = "process.restart_watchdog(1, suspended=1); ctypes.PyDLL(None).sleep(60)"
    code = f"import ctypes, sys; sys.path.append({ROOT!r}); from runtime import process; {hang}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and "Timeout (0:00:02)!" in done.stderr, done.stderr


def test_ctrl_c_while_a_dataset_is_made(data):
    """Nothing of it stays, and no process: neither the one that makes it nor those of its pool."""
    prepare = f"{ROOT}/prepare_sudoku.py --source=generate --size=6 --num_train=1000000 --output_dir=data"
    process = start_train("data", "run", f"--data_prepare={prepare}")
    with begun(process, "is missing; making it"):
        wait_for(lambda: any(children(child) for child in children(process.pid)))
        [script] = children(process.pid)
        for pid in process.pid, script, *children(script):  # as a terminal does
            os.kill(pid, signal.SIGINT)
        text = process.output(3)  # waits until no process has stderr open
    assert not os.path.exists("data") and "prepare_sudoku.py: stopped" in text


def test_a_stop_ends_the_attempts_at_a_request(data, bucket_server):
    bucket_server.script = [503] * 1000
    with begun(start_train(data, "run", URL), "trying again in 2 s") as process:
        process.terminate()
        process.output(3, timeout=10)


def test_ranks_end_with_torchruns_agent(data):
    command = ["--standalone", "--nproc-per-node=1", train.__file__, *arguments(data, "run", *ENDLESS)]
    with begun(start_script("torch.distributed.run", command)) as agent:
        rank, = children(agent.pid)
    wait_for(lambda: not os.path.exists(f"/proc/{rank}"))


# A bucket in trouble.

def test_an_unavailable_bucket_does_not_stop_training(data, bucket_server, finished):
    """A run that is complete here, but not in the bucket, ends with 1: a restart uploads the rest."""
    out = "run"
    with begun(start_train(data, out, *FLAGS, "--log_interval=1")) as process:
        bucket_server.denied = ("insert", "list", "media")
        text = process.output(1)
    assert text.count("upload failed") == text.count("not complete") == 1, text
    assert same(last_weights(out), last_weights(finished[0]))
    bucket_server.denied = ()
    assert "is complete at step 40" in run(data, out, *FLAGS, "--init_from=auto")
    assert "ckpt_00000040.json" in in_bucket()


def test_a_bucket_that_refuses_is_wrong_input(data, bucket_server):
    """Here nothing can be replaced: a retention policy, or a role without storage.objects.delete."""
    bucket_server.denied = ("DELETE",)
    text = run(data, "run", *FLAGS, code=2)
    assert re.search("gs://bucket/run/.probe: status 403 .* without a retention policy", text)
    assert not os.path.exists("run")


# Disks.

def test_what_a_run_did_not_make_stays_where_it_is(data, bucket_server):
    run(data, "run", "--max_steps=2")
    Path("run/thesis.tmp").touch()
    for file in ("ckpt_00000003.pt.tmp", "ckpt_00000003.json.tmp", "best.pt.tmp"):  # a kill left them
        Path("run", file).write_text("part of a checkpoint")
    again = "--max_steps=10", "--checkpoint_interval=5", "--keep_last_n=1", "--init_from=resume", URL
    run(data, "run", *again)
    files = {"ckpt_00000010.pt", "ckpt_00000010.json", "best.pt", "best.json", "run.json", "metrics.jsonl",
             "log.txt"}
    assert set(in_bucket()) == files and set(os.listdir("run")) == files | {"thesis.tmp", "run.lock"}


def test_a_lower_keep_last_n_makes_room_on_a_full_disk(data, out, monkeypatch):
    def save_on_full_disk(state, file):
        if len(list(Path(out).glob("*.pt*"))) > 5:
            raise RuntimeError("[enforce fail] unexpected pos 6464 vs 6358")
        save(state, file)

    save = torch.save
    monkeypatch.setattr(torch, "save", save_on_full_disk)
    run(data, out, *AUTO, "--max_steps=60", "--keep_last_n=1")
    assert checkpoint_paths(out) == [f"{out}/ckpt_00000060.pt"]


# Several ranks, each as on its own host: what ends one must end all, with the right exit code.

SHALLOW = ["--max_steps=20", "--checkpoint_interval=10", "--halt_max_steps=2"]
STALLS = """
import data, time
_train_batch = data.Dataset.train_batch
def stall(self, seed, step, batch_size, rank, world):
    time.sleep(1000 * (rank == 1 and step == 14))
    return _train_batch(self, seed, step, batch_size, rank, world)
data.Dataset.train_batch = stall
"""
BREAKS = """
from runtime import checkpoint
checkpoint.newest_complete = lambda *_: 1 / 0
"""
FULL_DISK = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))  # no file may be larger
"""


def two_ranks(data, flags=((), ()), code=0):
    """Runs two hosts of one rank each, with flags of their own; returns what both print."""
    ranks = []
    for i, environment in enumerate(hosts(2)):
        host = f"host{i}"
        os.makedirs(host, exist_ok=True)
        ranks.append(start_train(data, "run", *SHALLOW, *flags[i], cwd=host, **environment))
    return [rank.output(code) for rank in ranks]


def test_ranks_that_differ_end_before_the_first_step(data, random_puzzles):
    """Rank 0 is on host 1."""
    os.mkdir("host1")
    os.symlink(random_puzzles, "host1/other")
    for text in two_ranks(data, [["--lr=1e-3"], ["--seed=1", "--data_path=other"]], 2):
        assert "\ntrain.py: host 0, rank 1: not as on rank 0: dataset, lr, seed" in text, text
    assert list(Path().rglob("run.json")) == []


def test_two_hosts_of_which_one_has_the_files(data, bucket_server):
    """Rank 1 gets rank 0's weights and step, and makes its own dataset. Both upload what they evaluate."""
    prepare = f"{ROOT}/prepare_sudoku.py --output_dir=data/new {DATA}"
    flags = ["--data_path=data/new/", f"--data_prepare={prepare}", "--eval_save_outputs=preds", URL]
    two_ranks(data, [[*flags, "--max_steps=10"]] * 2)
    Path("host0/run/eval_00000010.2.npz").touch()  # another rank of this host would upload it
    assert "training from step 10 to 20" in two_ranks(data, [[*flags, "--init_from=auto"]] * 2)[0]
    assert sorted(os.listdir("host1/run")) == ["eval_00000010.1.npz", "eval_00000020.1.npz"]
    assert {"eval_00000020.0.npz", "eval_00000020.1.npz"} <= set(in_bucket())
    assert "eval_00000010.2.npz" not in in_bucket()


def test_rank_0_on_another_host_does_not_begin_again_or_further_back(data, bucket_server):
    """torchrun may number the hosts anew. With a bucket, the newest checkpoint is there."""
    run(data, "host1/run", *SHALLOW)
    # rank 0 has an older one
    shutil.copytree("host1/run", "host0/run")
    flip_a_bit(Path("host0/run/ckpt_00000020.pt"))
    auto = ["--init_from=auto", "--max_steps=30"]
    for text in two_ranks(data, [auto] * 2, 2):
        assert "ckpt_00000020 on host 0, and ckpt_00000010 on rank 0's: choose" in text

    # a bucket says which one counts
    text, _ = two_ranks(data, [[*auto, URL]] * 2)
    assert "ckpt_00000010 on rank 0's: training goes on" in text and "training from step 10 to 30" in text


def test_an_error_of_rank_0_that_nobody_expects_ends_all(data):
    """Rank 0 prints its traceback. The others raise a copy of the error, which has none."""
    Path("fork.py").write_text(BREAKS)
    texts = two_ranks(data, [["../fork.py", "--init_from=auto"]] * 2, 1)
    for text in texts:
        assert "ZeroDivisionError" in text, text
    assert "in <lambda>\n" in texts[0]


def test_a_rank_that_stalls_ends_all(data):
    Path("fork.py").write_text(STALLS)
    for text in two_ranks(data, [["../fork.py", "--stall_timeout=5"]] * 2, 1):
        assert "Timeout (0:00:05)!" in text, text
    assert os.path.exists("host0/run/ckpt_00000010.json")


def test_ranks_agree_that_the_last_checkpoint_cannot_be_written(data):
    """Rank 0's disk is full: its peer must not wait for it in the evaluation."""
    Path("fork.py").write_text(FULL_DISK)
    assert "checkpoint not written (is the disk full?): " in two_ranks(data, [["../fork.py"], []], 1)[0]
    assert not list(Path("host0/run").glob("ckpt*"))
