"""The files for SkyPilot and Kubernetes, what their commands do on hosts, and the study as jobs."""
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest
import yaml
from conftest import hosts
from fake_gcloud import kill_processes, processes, write_program
from fake_sky import Engine
from test_gcs import emulator, front
from test_sweep import NAMES, PREPARE, TINY, data, results, script, sweep, wait_for

from bucket import Bucket, upload_dataset

ROOT = pathlib.Path(__file__).resolve().parents[1]
FILES = ["scripts/sky.yaml", "scripts/sky-tpu.yaml"]
EMA_OFF, EMA, _ = NAMES
# Simulates train.py: rank r of attempt n does what line n of plan says at position r.
TRAIN = r"""
rank=${RANK:-$SKYPILOT_NODE_RANK}
echo "$*" >>"$SKY/trained$rank"
fate=$(sed -n "$((ATTEMPT + 1))p" "$SKY/plan" | cut -d ' ' -f $((rank + 1)))
case $fate in
  waits) /bin/sleep 60 ;;
  killed) kill -KILL $$ ;;
  *) exit "$fate" ;;
esac
"""


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Its jobs have two hosts, which gloo joins. What still runs is killed at the end."""
    path = tmp_path / "sky"
    monkeypatch.setenv("SKY", str(path))
    monkeypatch.setenv("PATH", f"{path / 'programs'}:{os.environ['PATH']}")
    yield Engine(path, hosts(2))
    kill_processes(path)


def launch(file, *env):
    command = ["sky", "jobs", "launch", "--yes", "--detach-run", "--name=job", file]
    subprocess.run([*command, *(f"--env={text}" for text in env)], check=True, cwd=ROOT)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("plan, codes", [
    (["0 0"], [[0, 0]]),
    (["3 waits", "waits 1", "0 0"], [[3, 137], [137, 1], [0, 0]]),
    (["killed waits", "0 0"], [[1, 137], [0, 0]]),
    (["2 waits"], [[2, 137]])])
def test_a_restart_follows_all_exit_codes_but_2(engine, file, plan, codes):
    write_program(engine.path / "bin/python", TRAIN)
    (engine.path / "plan").write_text("\n".join(plan) + "\n")
    launch(file, "BUCKET=gs://bucket", "DATA=gs://d", "CONFIG=config/baseline.py --wandb_run_name='a b'")
    job = engine.wait("job")
    assert job["codes"] == codes and job["status"] == ("SUCCEEDED" if plan[-1] == "0 0" else "FAILED")
    device = "--device=xla " if "tpu" in file else ""
    assert (engine.path / "trained0").read_text().splitlines()[0] == (
        f"-u train.py {device}config/baseline.py --wandb_run_name=a b --data_path=gs://d "
        "--gcs_dir=gs://bucket/runs/baseline --init_from=auto --wandb_log=False")
    requirements = "requirements-tpu.txt" if "tpu" in file else "requirements-gpu.txt"
    installed = (engine.path / "pip").read_text().splitlines()
    assert installed == [f"install --quiet --no-cache-dir -r {requirements}"] * 2 * len(codes)
    assert not processes(engine.path / "jobs")


def test_several_gpus_on_each_of_two_machines_are_ranks_in_their_order(engine, tmp_path):
    task = yaml.safe_load((ROOT / FILES[0]).read_text())
    task["resources"]["accelerators"] = "H100:2"
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(task))
    engine.set_hosts([{}, {}])
    write_program(engine.path / "bin/python", r"""
        echo "$RANK $LOCAL_RANK $GROUP_RANK $WORLD_SIZE $MASTER_ADDR:$MASTER_PORT" >"$SKY/rank$RANK"
        [[ $RANK != 3 ]] || exit 2; /bin/sleep 200""")
    launch(str(tmp_path / "two.yaml"), "BUCKET=gs://bucket")
    job = engine.wait("job")
    assert job["codes"] == [[137, 2]] and not processes(engine.path / "jobs")
    ranks = [(engine.path / f"rank{rank}").read_text() for rank in range(4)]
    assert ranks == [f"{rank} {rank % 2} {rank // 2} 4 127.0.0.1:29500\n" for rank in range(4)]


def test_a_run_on_a_slice_resumes_after_a_kill(front, data, engine):
    """Two hosts, joined by gloo: one loses its Python. The next attempt has new disks."""
    upload_dataset(str(data), "gs://bucket/data/tiny")
    flags = " ".join([*TINY, "--max_steps=60", "--data_prepare=", "--stall_timeout=60"])
    launch(FILES[1], "BUCKET=gs://bucket", "DATA=gs://bucket/data/tiny",
           f"CONFIG=config/study/exp08a.py {flags}")
    run = Bucket("gs://bucket/runs/exp08a")
    wait_for(lambda: b'"step": 20' in (run.read("metrics.jsonl") or b""))
    os.kill(processes(engine.path / "jobs/job/host1", r"train\.py")[0], signal.SIGKILL)
    job = engine.wait("job")
    assert job["status"] == "SUCCEEDED" and job["codes"][1:] == [[0, 0]], job
    first, second = (int(re.search(r"training from step (\d+) to 60", log)[1]) for log in job["logs"][::2])
    assert first == 0 and 20 <= second < 60
    rows = run.read("metrics.jsonl").splitlines()
    steps = [json.loads(row)["step"] for row in rows if b"train/loss" in row]
    assert steps == [*range(5, 61, 5)] and b"final" in rows[-1]


def test_the_study_has_a_job_for_each_run_that_is_not_complete(front, sweep, data):
    metrics = json.dumps({"step": 520, "final": True, "eval/exact_accuracy": 0.5}).encode()
    flags = [f"--data_path={data}", PREPARE + str(data), "--out_dir=out/none", "--lr=2e-4",
             "--gcs_dir=gs://bucket/here/study"]
    Bucket(f"gs://bucket/here/study/{EMA_OFF}").write("metrics.jsonl", metrics)
    text = sweep(f"--jobs={FILES[1]}", *flags)
    lines = [line for line in text.splitlines() if line.startswith("sky ")]
    assert len(lines) == 66 and f"{EMA_OFF}: complete" in text and f"={EMA_OFF}" not in text
    assert lines[0] == (
        "sky jobs launch --yes --detach-run --name=study-exp01a_h256 scripts/sky-tpu.yaml "
        "--env=BUCKET=gs://bucket/here "
        "'--env=CONFIG=config/study/exp01a.py --lr=2e-4 --data_prepare=' "
        f"--env=DATA=gs://bucket/here/data/{data.name} --env=RUN=study/exp01a_h256")
    assert "need --gcs_dir" in sweep(f"--jobs={FILES[1]}", "--gcs_dir=gs://bucket", *flags[:2], code=2)


def test_the_study_on_an_engine_to_its_report(front, sweep, data, engine, tmp_path, monkeypatch):
    """One of two runs was started before; a time each; one is preempted; results come from the bucket."""
    upload_dataset(str(data), f"gs://bucket/data/{data.name}")
    engine.set_hosts(hosts(1))
    monkeypatch.setattr(script, "PROGRESS_INTERVAL", 0.3)
    out = tmp_path / "study"
    flags = [EMA_OFF[:6], EMA[:6], *TINY, "--max_steps=200", f"--data_path={data}", PREPARE + str(data),
             f"--out_dir={out}", "--gcs_dir=gs://bucket/study"]
    jobs = [f"study-{EMA_OFF}", f"study-{EMA}"]
    command = next(line for line in sweep(f"--jobs={FILES[0]}", *flags).splitlines() if EMA in line)
    subprocess.run(command, shell=True, check=True, cwd=ROOT)

    def preempt():
        wait_for(lambda: b'"step": 20' in (Bucket(f"gs://bucket/study/{EMA}").read("metrics.jsonl") or b""))
        engine.preempt(jobs[1])

    with ThreadPoolExecutor(1) as pool:
        preempting = pool.submit(preempt)
        text = sweep(f"--jobs={FILES[0]}", "--launch", "--max_jobs=1", *flags)
        preempting.result()
    assert "2 of 2 complete" in text
    first, second = (engine.wait(name) for name in jobs)
    assert second["ended"] < first["began"]  # max_jobs
    assert len(second["codes"]) == 2 and first["codes"] == [[0]]
    assert text.count("starting the job") == 1 and f"{EMA_OFF}: starting the job {jobs[0]}\n" in text
    assert re.search(r"\n  1 jobs in the queue, [01] waiting \| sweep eta \d+", text)
    assert f"{EMA}: complete" in text

    text = sweep("--pull", *flags)
    assert "2 of 2 complete" in text and results(out)[EMA]["steps"] == 200
    assert not [*out.glob("*/*.pt")]
    report = [sys.executable, ROOT / "scripts/report.py", out, f"--out_dir={tmp_path}/report"]
    subprocess.run(report, check=True)
    assert "| exp08 | 2 | - |" in (tmp_path / "report/report.md").read_text()
    assert sweep(f"--jobs={FILES[0]}", *flags).count("sky jobs") == 0
    assert "need" not in sweep(f"--jobs={FILES[0]}", "--launch", *flags)  # nothing is left to start


def test_without_skypilot_a_launch_says_so(front, sweep, data, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    flags = ["exp08a", f"--data_path={data}", PREPARE + str(data), "--gcs_dir=gs://bucket/study", "--launch"]
    assert "no program `sky` in PATH" in sweep(f"--jobs={FILES[0]}", *flags, code=2)


def test_the_jobset_fits_the_published_schema():
    schema = json.loads((ROOT / "tests/data/jobset_schema.json").read_text())
    jobset = yaml.safe_load((ROOT / "scripts/jobset.yaml").read_text())
    jsonschema.validate(jobset, schema)
    [job] = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    [container], [rule] = pod["containers"], spec["podFailurePolicy"]["rules"]
    assert spec["parallelism"] == spec["completions"] and rule["onExitCodes"]["values"] == [2]
    assert rule["onExitCodes"]["containerName"] == container["name"] and pod["restartPolicy"] == "Never"
    chips = map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"))
    assert math.prod(chips) == spec["parallelism"] * container["resources"]["limits"]["google.com/tpu"]
    script.configure(script.train.__file__, [*container["command"][3:], *container["args"]])
    spec["paralelism"] = 4
    with pytest.raises(jsonschema.ValidationError, match="paralelism"):
        jsonschema.validate(jobset, schema)
