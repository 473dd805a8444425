"""What the guide gives to other machines fits them: Kubernetes' file, and the loop over the study."""
import glob
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import yaml
from helpers import ROOT

import train
from configurator import configure


def read(name):
    return Path(ROOT, name).read_text()


def test_the_jobset_fits_the_published_schema_and_its_slice(monkeypatch):
    monkeypatch.chdir(ROOT)
    jobset = yaml.safe_load(read("scripts/jobset.yaml"))
    jsonschema.validate(jobset, json.loads(read("tests/data/jobset_schema.json")))
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    container = pod["containers"][0]
    topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    assert math.prod(map(int, topology.split("x"))) == 4 * job["parallelism"] == 4 * job["completions"]
    assert container["resources"]["limits"] == {"google.com/tpu": 4}
    configure(train.Settings, [*container["command"][3:], *container["args"]])


def test_the_guides_loop_has_all_runs_of_the_study_and_their_datasets(monkeypatch, capsys):
    guide = read("docs/tpu.md")
    loop = re.search(r"for file in .*?; do", guide)[0] + " echo $file; done"
    files = subprocess.check_output(["bash", "-c", loop], cwd=ROOT, text=True).split()
    assert sorted(files) == sorted(glob.glob("config/study/*.py", root_dir=ROOT))

    [code] = re.findall(r'python -c "(.*?)" \$1', guide, re.S)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["-c", "config/study/exp04b_2000_copies.py"])
    exec(code, {})
    assert capsys.readouterr().out == "data/sudoku-extreme-1k-aug-2000\n"
