"""A cloud for tests, whose gcloud is fake_gcloud.sh, and a project whose scripts/tpu.sh they call."""
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = dict(NAME="slice", ZONE="us-central2-b", TYPE="v4-32", PROJECT="mine", POLL="0.05", STOP_WAIT="10")
FOLDERS = """
mkdir -p project/scripts cloud/{bin,host_bin,environments}
touch cloud/calls
git init -q project
cp "$0/scripts/tpu.sh" project/scripts
ln -s "$0/tests/fake_gcloud.sh" cloud/bin/gcloud
printf '#!/bin/sh\\necho t1v-n-0-w-$HOST\\n' >cloud/host_bin/hostname
chmod +x cloud/host_bin/hostname
"""


# The cloud, and the user's machine.

class Cloud:
    """A project with scripts/tpu.sh, and a cloud with one slice (fake_gcloud.sh says what it consists of).

    hosts: an environment for each host, each of which becomes a folder when the slice is created.
    """

    def __init__(self, path, hosts):
        self.project = path / "project"
        self.cloud = path / "cloud"
        self.started = []
        subprocess.run(["bash", "-ec", FOLDERS, ROOT], cwd=path, check=True)
        for i, variables in enumerate(hosts):
            lines = [f"{name}={value}\n" for name, value in variables.items()]
            (self.cloud / f"environments/{i}").write_text("".join(lines))

    def start(self, *args, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **settings):
        """Starts tpu.sh in the project. Returns the process, with one pipe for output and errors."""
        folder = str(self.cloud)
        path = f"{folder}/bin:{os.environ['PATH']}"
        environment = dict(SETTINGS, HOME=folder, CLOUD=folder, TMPDIR=folder, PATH=path) | settings
        process = subprocess.Popen(["bash", "scripts/tpu.sh", *args], cwd=self.project, env=environment,
                                   stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, text=True)
        self.started.append(process)
        return process

    def home(self, host):
        return self.cloud / "hosts" / str(host)

    def preempt(self):
        """Takes the chips back, at once."""
        (self.cloud / "slice").write_text("PREEMPTED\n")
        kill_processes(self.cloud / "hosts")


# The hosts' programs and processes.

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


# The real gcloud.

def refusals(commands):
    """Returns what the real gcloud says of command lines with words that it does not know.

    It only parses them. It finds no account, and nothing reaches a server.
    """
    with tempfile.TemporaryDirectory() as empty:
        environment = dict(PATH=os.environ["PATH"], HOME=empty, CLOUDSDK_CONFIG=empty)
        file = Path(empty, "commands.json")
        file.write_text(json.dumps([{"command_string": command} for command in commands]))
        lint = ["gcloud", "meta", "lint-gcloud-commands", f"--commands-file={file}"]
        results = json.loads(subprocess.check_output(lint, env=environment))
    return [result["error_message"] for result in results if not result["success"]]
