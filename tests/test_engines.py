"""The files for SkyPilot and Kubernetes: their commands start train.py, and the JobSet fits its schema."""
import json
import math
import os
import subprocess

import jsonschema
import pytest
import yaml
from helpers import ROOT

import train
from configurator import configure


@pytest.mark.parametrize("file, program, words", [
    ("sky.yaml", "torchrun", "--nnodes=2 --node-rank=1 --nproc-per-node=8 --master-addr=10.0.0.1 "
                             "--master-port=29500"),
    ("sky-tpu.yaml", "python", "-u")])
def test_the_command_of_a_sky_file_is_one_that_train_accepts(tmp_path, file, program, words):
    (tmp_path / program).write_text('#!/usr/bin/env bash\necho "$@"\n')
    (tmp_path / program).chmod(0o755)
    with open(os.path.join(ROOT, "scripts", file)) as f:
        task = yaml.safe_load(f)
    env = task["envs"] | dict(
        BUCKET="gs://bucket", CONFIG="config/study/exp08a_ema_off.py --lr=2e-4", RUN="study/exp08a_ema_off",
        SKYPILOT_NUM_NODES="2", SKYPILOT_NODE_RANK="1", SKYPILOT_NUM_GPUS_PER_NODE="8",
        SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2", PATH=f"{tmp_path}:{os.environ['PATH']}")
    done = subprocess.run(["bash", "-c", task["run"]], env=env, capture_output=True, text=True, check=True)
    before, _, arguments = done.stdout.partition(" train.py ")
    assert before == words
    settings = configure(train.__file__, arguments.split())
    train.check_settings(settings)
    assert settings.data_path == "gs://bucket/data/sudoku-extreme-1k-aug-1000" and settings.lr == 2e-4
    assert settings.gcs_dir == "gs://bucket/study/exp08a_ema_off" and settings.init_from == "auto"


def test_the_jobset_fits_the_published_schema():
    with open(os.path.join(ROOT, "tests/data/jobset_schema.json")) as f:
        schema = json.load(f)
    with open(os.path.join(ROOT, "scripts/jobset.yaml")) as f:
        jobset = yaml.safe_load(f)
    jsonschema.validate(jobset, schema)
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    [container] = pod["containers"]
    on_exit = job["podFailurePolicy"]["rules"][0]["onExitCodes"]
    assert (on_exit["values"], on_exit["containerName"]) == ([2], container["name"])
    assert job["parallelism"] == job["completions"] and pod["restartPolicy"] == "Never"
    chips = map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"))
    assert math.prod(chips) == job["parallelism"] * container["resources"]["limits"]["google.com/tpu"]
    configure(train.__file__, [*container["command"][3:], *container["args"]])
    job["paralelism"] = 4
    with pytest.raises(jsonschema.ValidationError, match="paralelism"):
        jsonschema.validate(jobset, schema)
