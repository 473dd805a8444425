"""scripts/tpu.sh: its restart loop against a simulated cloud, its commands against the real gcloud's parser.

The hosts run a simulated train.py here, which is fast. tests/test_chaos.py runs the real one.
"""
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_gcloud import ROOT, Cloud, kill_processes, processes, refusals, write_program
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
  *failed) [[ $HOST == 1 ]] || wait_for_term; echo "train.py: a replica died" >&2; exit 1 ;;
  *busy) [[ $HOST == 1 ]] || wait_for_term
    echo "TPU initialization failed: open(/dev/vfio/0): Device or resource busy" >&2; exit 1 ;;
  *unhealthy) echo UNHEALTHY_TENSORFLOW >"$CLOUD/health"; exit 1 ;;
  *wrong) echo "train.py: lr must be above 0" >&2; exit 2 ;;
  *terminated) stop ;;
  *running) wait_for_term ;;
  *killed) start_worker; kill -KILL $$ ;;
  *deaf) trap '' TERM; start_worker; echo "ignoring SIGTERM"; while [[ -d $CLOUD ]]; do sleep 0.1; done ;;
  *unreachable) [[ $HOST == 0 ]] || { mv "$HOME" "$CLOUD/lost"; wait_for_term; } ;;
  *complete) [[ $HOST == 0 ]] || echo "trained 20 steps in 3 s" ;;
esac
"""
PROJECT = """
mkdir config data
touch train.py config/baseline.py requirements.txt requirements-tpu.txt data/large.npy deleted.py netrc
echo /data/ >.gitignore
cat >train.py <<'END'  # refuses a flag
import sys
if "--lrr=1" in sys.argv and "--help" in sys.argv:
    print("train.py: --lrr=1: unknown setting", file=sys.stderr)
    sys.exit(2)
END
git add train.py scripts deleted.py
rm deleted.py  # git ls-files names it nevertheless
"""


# The simulation.

class SimulatedTraining(Cloud):
    """A slice of two hosts, whose train.py ends as planned."""

    def __init__(self, path):
        super().__init__(path, [{"HOST": "0"}, {"HOST": "1"}])
        subprocess.run(["bash", "-ec", PROJECT], cwd=self.project, check=True)
        write_program(self.cloud / "host_bin/python3", PYTHON3)
        write_program(self.cloud / "train", TRAIN)

    def plan(self, *fates):
        (self.cloud / "plan").write_text("\n".join(fates) + "\n")

    def tpu(self, *args, code=0, **settings):
        """Returns what tpu.sh prints until it ends with this exit code."""
        return finish(self.start(*args, **settings), code)

    def keep(self, *args, code=0, **settings):
        """Returns what keep prints until it ends with this exit code."""
        return self.tpu("keep", *RUN, *args, code=code, **settings)

    def start_keep(self, words, **settings):
        """Starts keep. Returns it once it has printed these words."""
        keep = self.start("keep", *RUN, **settings)
        read_until(words, keep)
        return keep

    def stop(self, keep):
        """Calls tpu.sh stop, at which keep ends."""
        self.tpu("stop")
        assert "stopped on request" in finish(keep, 3)

    def wait_for(self, words):
        """Waits until status prints them for both hosts. Returns what it printed."""
        wait_for(lambda: self.tpu("status").count(words) == 2, seconds=60)
        return self.tpu("status")

    def calls(self, word=""):
        """Returns the commands of gcloud that contain this word."""
        return [line for line in (self.cloud / "calls").read_text().splitlines() if word in line]

    def trained(self, host=0):
        """Returns the command of each run on a host."""
        return (self.cloud / f"trained{host}").read_text().splitlines()


def finish(process, code):
    """Returns what a process prints until it ends with this exit code."""
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code, output
    return output


def read_until(words, process):
    text = ""
    while words not in text:
        line = process.stdout.readline()
        assert line, text
        text += line


CALLS = {}  # {a form of a command without its values: the command}, of all tests of this file


@pytest.fixture
def cloud(tmp_path):
    """A SimulatedTraining, whose commands the last test of this file gives to the real gcloud."""
    cloud = SimulatedTraining(tmp_path)
    yield cloud
    # what still runs
    for process in cloud.started:
        process.kill()
    kill_processes(cloud.cloud / "hosts")
    for call in cloud.calls():
        CALLS[re.sub(r"/\S*|=.*?(?<!\\)(?= --|$)", "", call)] = f"gcloud {call}"


# What gcloud is asked for.

def test_flags_and_files_of_the_settings_reach_the_hosts(cloud):
    cloud.plan("complete")
    cloud.keep(PROJECT="other", NETRC="netrc", CREATE_FLAGS="--network=mine --reserved --internal-ips",
               SSH_FLAGS="--internal-ip --ssh-flag=-v")
    cloud.tpu("status", SSH_FLAGS="--tunnel-through-iap")  # which only gcloud alpha knows
    assert (cloud.home(1) / ".netrc").exists()
    assert cloud.calls("--network=mine --reserved") and cloud.calls("--scp-flag=-v")
    for call in cloud.calls("--internal-ip"):
        assert "--zone=us-central2-b --project=other --quiet" in call
    assert not list(Path("cloud").glob("tmp.*"))  # keep's own files


def test_a_refused_request_ends_run_with_the_reason(cloud):
    Path("cloud/refuse").touch()
    assert "quota" in cloud.tpu("run", *RUN, TYPE="v5e-8", SPOT="1", code=1)
    [call] = cloud.calls("create")
    assert "--accelerator-type=v5litepod-8 --runtime-version=v2-alpha-tpuv5-lite --spot" in call


# keep, until the run is complete.

CASES = {  # how runs end: keep's exit code, words that it prints, runs and slices
    "a preemption and a SIGTERM":
        (["checkpoint, preempted", "terminated", "complete"], 0, "PREEMPTED", 3, 2),

    # The checkpoint ends the count of failures.
    "failures": (["failed", "checkpoint, failed", "failed", "failed"], 1, "giving up", 4, 1),
    # Another run would not get the chips that they hold.
    "workers that outlive their run": (["killed", "complete"], 0, "failed", 2, 1),
    # The first failure may be due to a process that still holds the chips.
    "busy chips": (["busy", "busy", "complete"], 0, "replacing the slice", 3, 2),
    "unhealthy chips": (["unhealthy", "failed", "complete"], 0, "health: UNHEALTHY_TENSORFLOW", 3, 2),
    # One host says complete. Before anything is deleted, ssh's reason is shown.
    "a silent host": (["unreachable", "complete"], 0, "answer: ssh: connect to host 10.0.0.1 port 22", 2, 2),
}


@pytest.mark.parametrize("fates, code, words, runs, slices", CASES.values(), ids=CASES)
def test_keep_restarts_a_run_until_it_is_complete(cloud, fates, code, words, runs, slices):
    cloud.plan(*fates)
    output = cloud.keep(code=code)
    assert words in output and output.count("run: complete") == (code == 0)
    assert len(cloud.trained()) == len(cloud.trained(1)) == runs
    assert len(cloud.calls("create")) == slices
    assert not processes(cloud.cloud / "hosts", "venv/bin/python")


def test_a_run_gets_its_arguments_options_and_files_again(cloud):
    """However an earlier run ended, keep starts a new one."""
    cloud.plan("wrong", "failed", "complete")
    assert "lr must be above 0" in cloud.keep(code=2)
    cloud.keep("--seed=1 2", "--init_from=start.pt", LIBTPU_INIT_ARGS="--xla_tpu_a=true --xla_tpu_b=2")
    command = f"TPU --xla_tpu_a=true --xla_tpu_b=2 -u {' '.join(RUN)} --seed=1 2 --init_from=start.pt"
    command = command.replace("train.py", "train.py --init_from=auto")  # the later one counts
    assert cloud.trained() == [f"TPU -u train.py --init_from=auto {' '.join(RUN[1:])}", command, command]
    assert (cloud.home(1) / "trm/config/baseline.py").exists() and not (cloud.home(1) / "trm/data").exists()


def test_broken_ssh_does_not_cost_a_slice_that_trains(cloud):
    """Neither one that hangs, nor one that fails while checkpoints come or the bucket does not answer."""
    cloud.plan("running")
    bucket = Path("cloud/bucket")
    bucket.write_text("gs://bucket/runs/x/ckpt_00000000.json\n")
    keep = cloud.start_keep("run: running", TIMEOUT="2")
    Path("cloud/hang").touch()
    read_until("no error from ssh within 2 s", keep)
    Path("cloud/hang").unlink()
    read_until("run: running", keep)
    Path("cloud/no_ssh").touch()
    for listing in ("gs://bucket/runs/x/ckpt_00000001.json\n", ""):
        bucket.write_text(listing)
        read_until("checkpoints: waiting", keep)
    Path("cloud/no_ssh").unlink()
    cloud.stop(keep)
    assert not cloud.calls("delete")


def test_a_wrong_key_ends_keep_and_costs_no_slice(cloud):
    cloud.plan("running")
    cloud.tpu("run", *RUN)
    for message in (
            "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key for tpu.1-0 has changed and you "
            "have requested strict checking.\nHost key verification failed.",
            "me@10.0.0.1: Permission denied (publickey)."):
        Path("cloud/no_ssh").write_text(message)
        output = cloud.keep(code=2)
        assert message.splitlines()[-1] in output
        assert output.endswith("mend the keys of this machine, then repeat the command\n")
    assert not cloud.calls("delete")
    Path("cloud/no_ssh").unlink()
    cloud.stop(cloud.start_keep("run: running"))


def test_a_missing_login_ends_any_command_and_network_trouble_does_not(cloud):
    """gcloud reports a name server that does not answer as a problem with the login."""
    trouble = Path("cloud/logged_out")
    trouble.write_text("ERROR: There was a problem refreshing your current auth tokens: Unable to find the "
                       "server at google; gcloud auth login")
    cloud.plan("running")
    keep = cloud.start_keep("Unable to find the server")
    read_until("slice: NO_ANSWER", keep)
    trouble.unlink()
    read_until("run: running", keep)
    trouble.write_text("")
    assert "Reauthentication failed" in finish(keep, 2)
    for command in "status", "logs", "ssh", "stop", "delete":
        [line] = cloud.tpu(command, code=2).splitlines()
        assert line.startswith("tpu.sh: ERROR: (gcloud) There was a problem")
    trouble.unlink()


# The hosts.

def test_setup_waits_for_the_lists_that_a_new_host_is_updating(cloud):
    """As apt 2.6.1 does: `update` fails at once while another process holds the lock of the lists."""
    programs = Path("cloud/host_bin")
    (programs / "python3").rename("cloud/python3.11-venv")
    write_program(programs / "python3", 'exec "$HOME/bin/python3-venv" || exit 1')
    write_program(programs / "sleep", "touch ~/unlocked")
    write_program(programs / "sudo", """
        [[ $* != *update* || -e ~/unlocked ]] || exit 100
        [[ $* != *install* ]] || { mkdir ~/bin; cp "$CLOUD/python3.11-venv" ~/bin/python3-venv; }""")
    cloud.plan("complete")
    assert "failed" not in cloud.keep()


# stop, and the other commands.

def test_a_stop_holds_until_a_later_keep(cloud):
    """Also while the hosts are set up."""
    cloud.plan("running")
    Path("cloud/slow").touch()
    keep = cloud.start("keep", *RUN)
    wait_for(Path("cloud/pip").exists)
    time.sleep(2)  # tpu.sh compares whole seconds, and a busy machine takes one to start a shell
    cloud.tpu("stop")
    Path("cloud/slow").unlink()
    assert "stopped on request" in finish(keep, 3)
    assert not os.path.exists("cloud/trained0")
    time.sleep(1)  # a command in the second of the stop would be stopped too
    cloud.stop(cloud.start_keep("run: running"))


def test_stop_kills_a_run_that_does_not_end(cloud):
    cloud.plan("deaf")
    cloud.tpu("run", *RUN)
    cloud.wait_for("ignoring SIGTERM")
    assert cloud.tpu("stop", STOP_WAIT="1").count("still running after 1 s: killing it") == 2
    # on a busy machine a killed process needs a moment to end
    wait_for(lambda: not processes(cloud.cloud / "hosts", "venv/bin/python"), seconds=10)
    cloud.wait_for(": stop_requested, python train.py")


def test_a_run_is_started_watched_and_deleted_by_hand(cloud):
    cloud.plan("running", "complete")
    cloud.tpu("run", *RUN)
    status = cloud.wait_for("training")
    assert "slice: READY" in status and status.count(": running, python train.py") == 2
    assert "a run is in progress" in cloud.tpu("run", *RUN, code=2)
    assert "runs something else" in cloud.keep("--seed=1", code=2)
    read_until("step 10: loss 1.0", cloud.start("logs"))
    output = cloud.tpu("ssh", "echo", "$HOST", "a b")
    assert "0 a b" in output and "1 a b" in output
    cloud.stop(cloud.start_keep("run: running"))
    cloud.tpu("delete")
    assert "slice: NONE" in cloud.tpu("status")


# Wrong input: one line before anything is paid for.

WRONG_INPUT = [
    ("status", dict(NAME="My_TPU"), "NAME=My_TPU"),
    ("status", dict(PROJECT=""), "PROJECT is empty"),
    ("keep train.py", dict(TYPE="v4-33"), "8, 16, 32, 64 or a multiple of 128"),
    ("run nothing.py", {}, "script"),
    ("run train.py config/baselin.py", {}, "config/baselin.py: no such file"),
    ("keep train.py --lrr=1", {}, "unknown setting"),
    ("keep train.py --gcs_dir=gs://b/r --init_from=scratch", {}, "leave out --init_from=scratch"),
    ("keep train.py --gcs_dir=/tmp", {}, "--gcs_dir"),
    ("keep train.py --gcs_dir=gs://b/r", dict(GIT_DIR="/nowhere"), "no git checkout"),
]


def test_wrong_input_is_named_in_one_line(cloud):
    for arguments, settings, words in WRONG_INPUT:
        [line] = cloud.tpu(*arguments.split(), **settings, code=2).splitlines()
        assert line.startswith("tpu.sh: ") and words in line


def test_a_key_with_a_passphrase_needs_an_agent(cloud):
    """keep's ssh runs in the background, and would wait for the passphrase for ever."""
    key = Path("cloud/.ssh/google_compute_engine")
    key.parent.mkdir()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", key], check=True)
    assert f"{key} has a passphrase" in cloud.keep(code=2)
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "secret", "-N", "", "-f", key], check=True)
    cloud.plan("complete")
    cloud.keep()


# The real gcloud.

@pytest.mark.skipif(not shutil.which("gcloud"), reason="gcloud is not installed")
def test_the_real_gcloud_takes_all_commands_of_the_script_and_of_the_docs():
    text = "".join(page.read_text().replace("\\\n", " ") for page in ROOT.glob("docs/*.md"))
    text = re.sub(r"\$(\w+|\{.*?\})", "value", text)
    blocks = "".join(re.findall(r"```sh\n(.*?)```", text, re.S))
    commands = re.findall(r"gcloud (?:'.*?'|[^#)\n])*", blocks)
    assert len(commands) > 5
    assert refusals([*commands, *CALLS.values()]) == []


# Other shell scripts.

def test_shell_scripts_pass_shellcheck():
    shellcheck = Path(sys.executable).with_name("shellcheck")
    scripts = [*ROOT.glob("scripts/*.sh"), ROOT / "tests/fake_gcloud.sh"]
    subprocess.run([shellcheck, *scripts], check=True)
