"""A gcloud for tests: a cloud with one slice, whose hosts are folders and whose ssh runs real shells there.

A folder, $CLOUD, holds the cloud: `slice` and `queue` (states of the TPU VM and of its request), hosts.json
(an environment for each host), hosts/N (the home folder of host N, its whole disk), host_bin (programs of the
hosts' image), calls (the commands so far). Files named refuse, no_ssh, logged_out (may hold the message) and
hang (the number of a host, whose ssh connects and never ends) change the answers. Only stdout is the answer,
as with the real gcloud; a notice of updates follows on stderr. A flag that gcloud's reference does not list
is refused.

Cloud is for the tests: it makes all this, and a project whose scripts/tpu.sh they call.
"""
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = dict(NAME="slice", ZONE="us-central2-b", TYPE="v4-32", POLL="0.05", STOP_WAIT="10")
# Flags that gcloud's reference lists for each command, as read in 2025: those that tpu.sh and its guide use.
# https://cloud.google.com/sdk/gcloud/reference/
EVERY_COMMAND = {"--project", "--quiet", "--format", "--zone"}
DOCUMENTED = {
    "compute tpus queued-resources create": {
        "--runtime-version", "--accelerator-type", "--node-id", "--internal-ips", "--network",
        "--reserved", "--service-account", "--spot", "--subnetwork"},
    "compute tpus queued-resources describe": set(),
    "compute tpus queued-resources delete": {"--force"},
    "compute tpus tpu-vm describe": set(),
    "compute tpus tpu-vm ssh": {"--internal-ip", "--ssh-flag", "--worker", "--command"},
    "compute tpus tpu-vm scp": {"--internal-ip", "--scp-flag", "--worker"},
    "storage ls": {"--recursive"},
}
NO_LOGIN = """ERROR: (gcloud.{}) There was a problem refreshing your current auth tokens: Reauthentication \
failed. cannot prompt during non-interactive execution.
Please run:

  $ gcloud auth login

to obtain new credentials."""


# For tests.

class Cloud:
    """A project with scripts/tpu.sh, and a cloud with one slice.

    hosts: an environment for each host, each of which becomes a folder when the slice is created.
    """

    def __init__(self, path, hosts):
        self.project = path / "project"
        self.cloud = path / "cloud"
        for folder in (self.project / "scripts", self.cloud / "bin", self.cloud / "host_bin"):
            folder.mkdir(parents=True)
        (self.cloud / "hosts.json").write_text(json.dumps(hosts))
        shutil.copy(ROOT / "scripts/tpu.sh", self.project / "scripts")
        subprocess.run(["git", "init", "-q"], cwd=self.project, check=True)
        write_program(self.cloud / "bin/gcloud", f'exec {sys.executable} -S {__file__} "$@"')
        write_program(self.cloud / "host_bin/hostname", "echo t1v-n-0-w-$HOST")

    def start(self, *args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **settings):
        """Starts tpu.sh in the project. Returns the process."""
        environment = dict(HOME=os.environ["HOME"], CLOUD=str(self.cloud), TMPDIR=str(self.cloud),
                           PATH=f"{self.cloud / 'bin'}:{os.environ['PATH']}")
        return subprocess.Popen(
            ["bash", "scripts/tpu.sh", *args], cwd=self.project, env=environment | SETTINGS | settings,
            stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, text=True)

    def tpu(self, *args, code=0, **settings):
        """Returns what tpu.sh prints on stdout and on stderr until it ends with this exit code."""
        return finish(self.start(*args, **settings), code)

    def calls(self, word=""):
        path = self.cloud / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [shlex.split(line) for line in lines if word in line]

    def home(self, host):
        return self.cloud / "hosts" / str(host)

    def preempt(self):
        """Takes the chips back, at once."""
        (self.cloud / "slice").write_text("PREEMPTED\n")
        kill_processes(self.cloud / "hosts")


def finish(process, code):
    """Returns what a process prints on stdout and on stderr until it ends with this exit code."""
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stdout + stderr
    return stdout, stderr


def write_program(path, text):
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def processes(folder, command=""):
    """Returns the pids of what runs on the host with this home folder, or on all hosts in this folder.

    command: a pattern of their arguments, each of which ends with a zero. Zombies are left out.
    """
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            environment = os.fsdecode((process / "environ").read_bytes())
            arguments = os.fsdecode((process / "cmdline").read_bytes())
            if f"FAKE_HOST={folder}" in environment and re.search(command, arguments):
                pids.append(int(process.name))
    return pids


def kill_processes(folder):
    while pids := processes(folder):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


# gcloud.

def main(arguments):
    cloud = Path(os.environ["CLOUD"])
    with open(cloud / "calls", "a") as f:
        f.write(shlex.join(arguments) + "\n")
    name, operands, flags = parse(arguments)
    if (cloud / "logged_out").exists():
        sys.exit(read(cloud / "logged_out") or NO_LOGIN.format(name.replace(" ", ".")))
    if (cloud / "queue").exists() and not read(cloud / "slice"):
        for host in range(len(json.loads(read(cloud / "hosts.json")))):
            (cloud / "hosts" / str(host)).mkdir(parents=True)
        (cloud / "queue").write_text("ACTIVE\n")
        (cloud / "slice").write_text("READY\n")
    vm = read(cloud / "slice")
    queue = read(cloud / "queue")
    if name == "storage ls":
        print(read(cloud / "bucket") or fail(name, "One or more URLs matched no objects."))
    elif name.endswith("create"):
        if (cloud / "refuse").exists():
            fail(name, "RESOURCE_EXHAUSTED: quota limit 'TPUV4sPreemptiblePodPerProjectPerZone' exceeded")
        (cloud / "queue").write_text("WAITING_FOR_RESOURCES\n")
    elif name.endswith("delete"):
        kill_processes(cloud / "hosts")
        shutil.rmtree(cloud / "hosts", ignore_errors=True)
        (cloud / "queue").unlink(missing_ok=True)
        (cloud / "slice").unlink(missing_ok=True)
    elif name.endswith("describe"):
        state = vm if "tpu-vm" in name else queue
        print(state or fail(name, "NOT_FOUND: Resource 'projects/p/nodes/slice' was not found"), flush=True)
        print("Updates are available for some Google Cloud CLI components.", file=sys.stderr)
    elif vm == "READY":
        on_workers(cloud, name, operands, flags)
    else:
        fail(name, f"the TPU is in state {vm}, and cannot be used" if vm else "NOT_FOUND: no such TPU")


def read(path):
    return path.read_text().strip() if path.exists() else ""


def fail(name, message, code=1):
    print(f"ERROR: (gcloud.{name.replace(' ', '.')}) {message}", file=sys.stderr)
    sys.exit(code)


def parse(arguments):
    """Returns (command, operands, {flag: value}). A flag that is not documented is an error."""
    words = [a for a in arguments if not a.startswith("--")]
    flags = dict(a.partition("=")[::2] for a in arguments if a.startswith("--"))
    for name, documented in DOCUMENTED.items():
        if " ".join(words).startswith(name):
            unknown = flags.keys() - EVERY_COMMAND - documented
            if unknown:
                fail(name, f"unrecognized arguments: {unknown}", 2)
            return name, words[len(name.split()):], flags
    fail("", f"Invalid choice: {shlex.join(arguments)}", 2)


def on_workers(cloud, name, operands, flags):
    """Does ssh or scp on all workers at once. Exits with the code of the first that failed."""
    environments = json.loads(read(cloud / "hosts.json"))
    assert flags["--worker"] == "all"

    def work(number):
        """Returns the exit code; 255 without a connection, or if the host dies meanwhile."""
        home = cloud / "hosts" / str(number)
        if read(cloud / "hang") == str(number):
            time.sleep(3600)
        if not home.is_dir() or (cloud / "no_ssh").exists():
            return 255
        if name.endswith("scp"):
            shutil.copy(operands[0], home / operands[1].partition(":")[2])
            return 0
        environment = dict(PATH=f"{cloud / 'host_bin'}:/usr/local/bin:/usr/bin:/bin", HOME=str(home),
                           FAKE_HOST=str(home), CLOUD=str(cloud)) | environments[number]
        code = subprocess.run(["bash", "-c", flags["--command"]], cwd=home, env=environment).returncode
        return 255 if code < 0 else code

    with ThreadPoolExecutor() as pool:
        codes = list(pool.map(work, range(len(environments))))
    if 255 in codes:
        fail(name, "[/usr/bin/ssh] exited with return code [255].", 255)
    sys.exit(max(codes))


if __name__ == "__main__":
    main(sys.argv[1:])
