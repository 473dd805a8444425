"""A `sky` for tests: a queue of managed jobs, whose hosts are folders and whose commands run in real shells.

A folder, $SKY, holds it: hosts.json (an environment for each host), bin (programs of the hosts' image), and
jobs/NAME/ with the hosts' folders, `preempted` (made by a test that killed the hosts) and job.json, which has
the status, the exit codes of each attempt, and when the first began and the last ended.

As SkyPilot 0.14: a host that fails ends the others with SIGKILL; recover_on_exit_codes and preempted hosts
start the job again on new disks; everything else but success is FAILED.
"""
import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import yaml
from fake_gcloud import kill_processes, write_program
from fake_gcloud import processes as alive

SKY = Path(os.environ.get("SKY", "."))
ENDED = "SUCCEEDED", "FAILED"
IGNORED = shutil.ignore_patterns(".*", "__pycache__", "docs", "tests", "out", "data")


def main(arguments):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    launch, queue = commands.add_parser("launch"), commands.add_parser("queue")
    for flag in ("--yes", "--detach-run"):
        launch.add_argument(flag, action="store_true", required=True)
    launch.add_argument("--name", required=True)
    launch.add_argument("file")
    launch.add_argument("--env", action="append", type=lambda text: text.split("=", 1), default=[])
    for flag in ("--all", "--skip-finished"):
        queue.add_argument(flag, action="store_true", required=True)
    queue.add_argument("--output", choices=["json"], required=True)
    c = parser.parse_args(arguments)
    if c.command == "queue":
        jobs = [json.loads(path.read_bytes()) for path in sorted(SKY.glob("jobs/*/job.json"))]
        print("a notice")
        print(json.dumps([job for job in jobs if job["status"] not in ENDED], indent=2))
        return
    task = yaml.safe_load(Path(c.file).read_text())
    for key, value in c.env:
        assert key in task["envs"], key
        task["envs"][key] = value
    assert None not in task["envs"].values(), "SkyPilot refuses a variable without a value"
    (SKY / "jobs" / c.name).mkdir(parents=True)  # a second job of this name is an error
    save(dict(job_name=c.name, status="PENDING", codes=[], began=time.time(), task=task))
    subprocess.Popen([sys.executable, __file__, "controller", c.name], start_new_session=True,
                     stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                     env=os.environ | dict(FAKE_HOST=str(SKY / "controllers")))


def save(job):
    path = SKY / "jobs" / job["job_name"] / "job.json"
    path.with_suffix(".tmp").write_text(json.dumps(job))
    path.with_suffix(".tmp").replace(path)


def controller(name):
    """A job from its first attempt to its end."""
    folder = SKY / "jobs" / name
    job = json.loads((folder / "job.json").read_bytes())
    recovered = job["task"]["resources"]["job_recovery"]["recover_on_exit_codes"]
    while job["status"] not in ENDED:
        save(job | dict(status="RUNNING"))
        codes = attempt(folder, job["task"], len(job["codes"]))
        preempted = (folder / "preempted").exists()
        (folder / "preempted").unlink(missing_ok=True)
        job["codes"].append(codes)
        if not any(codes):
            job["status"] = "SUCCEEDED"
        elif not preempted and not {*recovered} & {*codes}:
            job["status"] = "FAILED"
    save(job | dict(ended=time.time()))


def attempt(folder, task, number):
    """The exit codes of all hosts."""
    hosts = json.loads((SKY / "hosts.json").read_text())
    accelerator, _, count = task["resources"]["accelerators"].partition(":")
    gpus = "0" if accelerator.startswith("tpu") else count
    processes = []
    for rank, host in enumerate(hosts):
        home = folder / f"host{rank}"
        shutil.rmtree(home, ignore_errors=True)
        shutil.copytree(task["workdir"], home, ignore=IGNORED)
        variables = dict(SKYPILOT_NODE_IPS="\n".join(["127.0.0.1"] * len(hosts)), SKYPILOT_NODE_RANK=rank,
                         SKYPILOT_NUM_NODES=len(hosts), SKYPILOT_NUM_GPUS_PER_NODE=gpus,
                         **task["envs"], **task["secrets"])
        variables["PATH"] = f"{SKY / 'bin'}:/usr/local/bin:/usr/bin:/bin"  # not what a startup file says
        exports = "".join(f"export {key}={shlex.quote(str(value))}\n" for key, value in variables.items())
        (home / "setup.sh").write_text(exports + task["setup"])
        (home / "run.sh").write_text(exports + task["run"])
        # A home of its own: with the user's ~/.bashrc a real pip was found, and installed the requirements.
        environment = os.environ | dict(HOME=str(home), FAKE_HOST=str(home), PIP_NO_INDEX="1",
                                        ATTEMPT=str(number)) | host
        options = dict(cwd=home, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        with open(folder / f"log{number}.{rank}", "w") as log:
            if subprocess.run(["bash", "-i", "setup.sh"], stdout=log, **options).returncode:
                return [1]
            processes.append(subprocess.Popen(["bash", "-i", "run.sh"], stdout=log, start_new_session=True,
                                              **options))
    codes = [None]
    while None in codes and not any(codes):
        time.sleep(0.02)
        codes = [ended(process, folder / f"host{i}") for i, process in enumerate(processes)]
    kill_processes(folder)
    return [137 if code is None else code for code in codes]


def ended(process, home):
    """The exit code of a host whose output has ended: SkyPilot reads it until no process holds it open."""
    return None if process.poll() is None or alive(home) else process.returncode


class Engine:
    """For tests: $SKY with a `sky` in programs/."""

    def __init__(self, path, hosts):
        self.path = path
        (path / "bin").mkdir(parents=True)
        (path / "programs").mkdir()
        self.set_hosts(hosts)
        shift = "[[ $1 == jobs ]] && shift || exit 2"
        write_program(path / "programs/sky", f'{shift}\nexec {sys.executable} {__file__} "$@"')
        write_program(path / "bin/python", f'exec {sys.executable} "$@"')
        write_program(path / "bin/pip", 'echo "$*" >>"$SKY/pip"; [[ -e ${!#} ]]')
        write_program(path / "bin/sleep", "")

    def set_hosts(self, hosts):
        (self.path / "hosts.json").write_text(json.dumps(hosts))

    def job(self, name):
        path = self.path / "jobs" / name / "job.json"
        return json.loads(path.read_bytes()) if path.exists() else dict(status="")

    def wait(self, name, seconds=120):
        """The job, once it has ended."""
        end = time.monotonic() + seconds
        while (job := self.job(name))["status"] not in ENDED and time.monotonic() < end:
            time.sleep(0.02)
        logs = sorted((self.path / "jobs" / name).glob("log*"))
        job["logs"] = [path.read_text() for path in logs]
        assert job["status"] in ENDED, "\n".join(job["logs"])
        return job

    def preempt(self, name):
        (self.path / "jobs" / name / "preempted").touch()
        kill_processes(self.path / "jobs" / name)


if __name__ == "__main__":
    controller(sys.argv[2]) if sys.argv[1] == "controller" else main(sys.argv[1:])
