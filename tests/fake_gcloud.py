"""A gcloud for tests: a cloud with one slice, whose hosts are folders and whose ssh runs real shells there.

A folder, $CLOUD, holds the cloud: `slice` and `queue` (states of the TPU VM and of its request), hosts.json
(an environment for each host), hosts/N (the home folder of host N, its whole disk), host_bin (programs of the
hosts' image), calls (the commands so far). Files named refuse, no_capacity, no_ssh, logged_out (may hold the
message) and hang (the number of a host, whose ssh connects and never ends) change the answers. Only stdout is
the answer, as of the real one; a notice of updates follows on stderr. A flag that gcloud's reference does not
list is refused.

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
# Those with = need a value. https://cloud.google.com/sdk/gcloud/reference/
EVERY_COMMAND = {"--project=", "--quiet", "--format=", "--zone="}
DOCUMENTED = {
    "compute tpus queued-resources create": {
        "--runtime-version=", "--accelerator-type=", "--node-id=", "--internal-ips", "--network=",
        "--reserved", "--service-account=", "--spot", "--subnetwork="},
    "compute tpus queued-resources describe": set(),
    "compute tpus queued-resources delete": {"--force"},
    "compute tpus tpu-vm describe": set(),
    "compute tpus tpu-vm ssh": {"--internal-ip", "--ssh-flag=", "--worker=", "--command="},
    "compute tpus tpu-vm scp": {"--internal-ip", "--scp-flag=", "--worker="},
    "storage ls": {"--recursive"},
}
ALPHA = {  # the flags that gcloud alpha has besides
    "compute tpus queued-resources create": {"--reservation=", "--provisioning-model="},
    "compute tpus tpu-vm ssh": {"--tunnel-through-iap"},
    "compute tpus tpu-vm scp": {"--tunnel-through-iap"},
}
NO_LOGIN = """ERROR: (gcloud.{}) There was a problem refreshing your current auth tokens: Reauthentication \
failed. cannot prompt during non-interactive execution.
Please run:

  $ gcloud auth login

to obtain new credentials."""
UPDATES = "Updates are available for some Google Cloud CLI components.  To install them,\nplease run:"


# For tests.

class Cloud:
    """A project with scripts/tpu.sh, and a cloud with one slice.

    hosts: an environment for each host, each of which becomes a folder when the slice is created.
    """

    def __init__(self, path, hosts):
        self.project, self.cloud = path / "project", path / "cloud"
        for folder in (self.project / "scripts", self.cloud / "bin", self.cloud / "host_bin"):
            folder.mkdir(parents=True)
        (self.cloud / "hosts.json").write_text(json.dumps(hosts))
        shutil.copy(ROOT / "scripts/tpu.sh", self.project / "scripts")
        subprocess.run(["git", "init", "-q"], cwd=self.project, check=True)
        write_program(self.cloud / "bin/gcloud", f'exec {sys.executable} -S {__file__} "$@"')
        write_program(self.cloud / "host_bin/hostname", "echo t1v-n-0-w-$HOST")

    def start(self, *args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **settings):
        """tpu.sh, as a process that runs. TMPDIR: its archive has the same name in all tests."""
        environment = {k: v for k, v in os.environ.items() if k in ("HOME", "LANG")}
        path = f"{self.cloud / 'bin'}:{os.environ['PATH']}"
        environment |= dict(PATH=path, CLOUD=str(self.cloud), TMPDIR=str(self.cloud))
        return subprocess.Popen(
            ["bash", self.project / "scripts/tpu.sh", *args], env=environment | SETTINGS | settings,
            stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, text=True)

    def tpu(self, *args, code=0, **settings):
        """What tpu.sh prints on stdout and on stderr until it ends with this exit code."""
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

    def lose_host(self, host):
        """It falls silent: its peers are not told, its disk is gone, ssh does not reach it."""
        for pid in processes(self.home(host)):
            with suppress(ProcessLookupError):  # it has ended
                os.kill(pid, signal.SIGSTOP)
        self.home(host).rename(self.cloud / f"lost{time.time()}")


def finish(process, code):
    """What a process prints on stdout and on stderr until it ends with this exit code."""
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stdout + stderr
    return stdout, stderr


def write_program(path, text):
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def processes(folder, command=""):
    """Pids of what runs on the host with this home folder, or on all hosts in this folder; no zombies.

    command: a pattern of their arguments, each of which ends with a zero.
    """
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            environment, arguments = (
                os.fsdecode((process / name).read_bytes()) for name in ("environ", "cmdline"))
            home = re.search(r"(?:^|\0)FAKE_HOST=([^\0]*)", environment)
            if home and Path(home[1]).is_relative_to(folder) and re.search(command, arguments):
                found.append(int(process.name))
    return found


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
    name, positional, flags = parse(arguments)
    if (cloud / "logged_out").exists():
        sys.exit((cloud / "logged_out").read_text() or NO_LOGIN.format(name.replace(" ", ".")))
    vm = (cloud / "slice").read_text().strip() if (cloud / "slice").exists() else None
    queue = cloud / "queue"
    if queue.exists() and not vm and not (cloud / "no_capacity").exists():
        for host in range(len(json.loads((cloud / "hosts.json").read_text()))):
            (cloud / "hosts" / str(host)).mkdir(parents=True)
        queue.write_text("ACTIVE\n")
        (cloud / "slice").write_text("READY\n")
        vm = "READY"
    if name.endswith("resources create"):
        if (cloud / "refuse").exists():
            fail(name, "RESOURCE_EXHAUSTED: quota limit 'TPUV4sPreemptiblePodPerProjectPerZone' exceeded")
        if queue.exists():
            fail(name, f"ALREADY_EXISTS: Resource 'queuedResources/{positional[0]}' already exists")
        queue.write_text("WAITING_FOR_RESOURCES\n")
        print(f"Create request issued for: [{positional[0]}]", file=sys.stderr)
    elif name.endswith("resources delete"):
        kill_processes(cloud / "hosts")
        shutil.rmtree(cloud / "hosts", ignore_errors=True)
        queue.unlink(missing_ok=True)
        (cloud / "slice").unlink(missing_ok=True)
    elif name.endswith("describe"):
        state = vm if name.endswith("vm describe") else queue.exists() and queue.read_text().strip()
        print(state or fail(name, "NOT_FOUND: Resource 'projects/p/nodes/slice' was not found"), flush=True)
        print(UPDATES, file=sys.stderr)
    elif name.endswith(("ssh", "scp")):
        if vm != "READY":
            fail(name, f"the TPU is in state {vm}, and cannot be used" if vm else "NOT_FOUND: no such TPU")
        on_workers(cloud, name, positional, flags)
    else:
        list_objects(cloud, name, positional[0])


def fail(name, message, code=1):
    print(f"ERROR: (gcloud.{name.replace(' ', '.')}) {message}", file=sys.stderr)
    sys.exit(code)


def parse(arguments):
    """(command, positional arguments, {flag: value}). A flag that is not documented is an error."""
    alpha = arguments[:1] == ["alpha"]
    arguments = arguments[alpha:]
    name = next((n for n in DOCUMENTED if arguments[:len(n.split())] == n.split()), None)
    if not name:
        fail("", f"Invalid choice: {shlex.join(arguments)}", 2)
    allowed = DOCUMENTED[name] | EVERY_COMMAND | (ALPHA.get(name, set()) if alpha else set())
    arguments = arguments[len(name.split()):]
    flags = [a for a in arguments if a.startswith("--")]
    for flag in flags:
        if re.match("--[a-z-]+=?", flag).group() not in allowed:
            fail(name, f"unrecognized arguments: {flag}", 2)
    return name, [a for a in arguments if a not in flags], dict(f.partition("=")[::2] for f in flags)


def on_workers(cloud, name, positional, flags):
    """ssh or scp, on all workers at once; exits with the code of the first that failed."""
    environments = json.loads((cloud / "hosts.json").read_text())
    if flags.get("--worker") != "all" or name.endswith("ssh") and "--command" not in flags:
        fail(name, "not simulated")

    def work(number):
        """The exit code; 255 without a connection, or if the host dies meanwhile."""
        home, hang = cloud / "hosts" / str(number), cloud / "hang"
        print(f"{name[-3:].upper()}: Attempting to connect to worker {number}...", file=sys.stderr)
        if hang.exists() and hang.read_text() == str(number):
            time.sleep(3600)
        if not home.is_dir() or (cloud / "no_ssh").exists():
            print(f"ssh: connect to host 10.0.0.{number} port 22: Connection timed out", file=sys.stderr)
            return 255
        if name.endswith("scp"):
            shutil.copy(positional[0], home / positional[1].partition(":")[2])
            return 0
        path = f"{cloud / 'host_bin'}:/usr/local/bin:/usr/bin:/bin"
        environment = dict(PATH=path, HOME=str(home), FAKE_HOST=str(home), CLOUD=str(cloud))
        environment |= environments[number]
        code = subprocess.run(["bash", "-c", flags["--command"]], cwd=home, env=environment).returncode
        return 255 if code < 0 else code

    with ThreadPoolExecutor() as pool:
        codes = [*pool.map(work, range(len(environments)))]
    for number, code in enumerate(codes):
        if code == 255:
            fail(name, "[/usr/bin/ssh] exited with return code [255].", 255)
        if code:
            print(f"##### Command execution on worker {number} failed with exit status {code}. Continuing.",
                  file=sys.stderr)
            sys.exit(code)


def list_objects(cloud, name, url):
    """gs://BUCKET/PREFIX: from the emulator at STORAGE_EMULATOR_HOST, or the file `bucket` of the cloud."""
    if "STORAGE_EMULATOR_HOST" in os.environ:
        bucket, _, prefix = url.removeprefix("gs://").partition("/")
        import urllib.request  # slow, and needed by a few calls only
        server = os.environ["STORAGE_EMULATOR_HOST"]
        try:
            with urllib.request.urlopen(f"{server}/storage/v1/b/{bucket}/o?prefix={prefix}", timeout=10) as f:
                print(*(f"gs://{bucket}/{item['name']}" for item in json.load(f).get("items", [])), sep="\n")
        except OSError as e:
            fail(name, str(e))
    elif (cloud / "bucket").exists():
        print((cloud / "bucket").read_text(), end="")
    else:
        fail(name, "One or more URLs matched no objects.")


def start_ranks(arguments):
    """Python on a host with several ranks: as xmp.spawn, a process for each; if one is killed, all end."""
    def terminate(*_):
        for process in ranks:
            process.terminate()

    ranks = []
    for local_rank, rank in enumerate(os.environ["RANKS"].split()):
        environment = os.environ | dict(RANK=rank, LOCAL_RANK=str(local_rank), TORCHELASTIC_RUN_ID="chaos")
        ranks.append(subprocess.Popen([sys.executable, *arguments], env=environment))
    signal.signal(signal.SIGTERM, terminate)
    while None in (codes := [process.poll() for process in ranks]):
        if any(code and code < 0 for code in codes):
            terminate()
        time.sleep(0.05)
    print(f"exit codes of ranks {os.environ['RANKS']}: {codes}", file=sys.stderr)
    sys.exit(1 if min(codes) < 0 else max(codes))


if __name__ == "__main__":
    if sys.argv[1] == "ranks":
        start_ranks(sys.argv[2:])
    else:
        main(sys.argv[1:])
