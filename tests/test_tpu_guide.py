"""What the guide gives to other machines fits them: Kaggle's notebook, Kubernetes' file, the study's loop."""
import glob
import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from unittest import mock

import first_chip
import jsonschema
import pytest
import yaml
from helpers import DATA, ROOT, TINY, code_cells, curve, run_config, start_script, xla_environment
from test_spawn import KAGGLE

import train
from configurator import configure


def read(name):
    return Path(ROOT, name).read_text()


def test_the_jobset_fits_the_published_schema_and_train(monkeypatch):
    monkeypatch.chdir(ROOT)
    jobset = yaml.safe_load(read("scripts/jobset.yaml"))
    jsonschema.validate(jobset, json.loads(read("tests/data/jobset_schema.json")))
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    [container] = job["template"]["spec"]["containers"]
    configure(train.Settings, [*container["command"][3:], *container["args"]])


def test_the_guides_loop_has_all_runs_of_the_study():
    loop = re.search(r"for file in .*?; do", read("docs/study.md"))[0] + " echo $file; done"
    files = subprocess.check_output(["bash", "-c", loop], cwd=ROOT, text=True).split()
    assert sorted(files) == sorted(glob.glob("config/study/*.py", root_dir=ROOT))


@pytest.mark.xla
def test_the_notebook_continues_an_earlier_session(data, tmp_path, monkeypatch, pyplot):
    """Its cells run in order, with Kaggle's variables and folders, on XLA's CPU, without internet."""
    for name, value in (KAGGLE | xla_environment(2)).items():
        monkeypatch.setenv(name, value)
    flags = [*TINY, "--log_interval=1", "--eval_halt_max_steps=4", "--eval_final_max_puzzles=16"]
    # the inputs: a copy of the code, and what a session of two steps has left
    copy = tmp_path / "kaggle/input/datasets/me/code"
    copy.mkdir(parents=True)
    for name in "configurator.py", "config":
        os.symlink(Path(ROOT, name), copy / name)
    earlier = tmp_path / "kaggle/input/notebooks/me/train/run"
    run_config("sudoku_speed.py", earlier, *flags, f"--data_path={data}", "--max_steps=2")
    # neither GPUs nor internet
    monkeypatch.setattr("subprocess.check_output", lambda command: b"0")
    monkeypatch.setattr("socket.create_connection", mock.Mock(side_effect=OSError))

    def shell(command):
        script_command = re.search(rf"{copy}/(?:scripts/)?(\w+)\.py (.*)", command)
        if command.startswith("cp "):
            subprocess.run(shlex.split(command), check=True)
        elif script_command:  # what is neither makes TorchTPU's environment
            script, arguments = script_command.groups()
            if script == "first_chip":  # it has a test of its own
                configure(first_chip.Settings, shlex.split(arguments))
            else:
                own = DATA.split() if script == "prepare_sudoku" else []
                output[script] = start_script(script, [*shlex.split(arguments), *own]).output()

    output = {}  # of each script
    space = dict(shell=shell)
    for cell in code_cells("kaggle_tpu.ipynb"):
        # the folders, a puzzle of 4x4 cells, and at last the settings
        cell = re.sub("/(kaggle|tmp)/", rf"{tmp_path}/\1/", cell)
        cell = re.sub('puzzle = ".*"', 'puzzle = "1..............4"', cell)
        exec(cell, space)
        space["flags"] = shlex.join([*flags, "--max_steps=4"])

    # training goes on where the earlier session has ended
    assert "2 x xla" in output["train"] and "training from step 2 to 4" in output["train"]
    assert "step 4: " in output["solve"]
    assert [*curve("run")] == [1, 2, 3, 4] and len(pyplot.get_fignums()) == 2


@pytest.mark.parametrize("gpus, variable, device", [
    (2, "", "cuda"), (0, "TPU_WORKER_ID", "xla"), (0, "", "cpu")])
def test_the_notebook_finds_the_chips(monkeypatch, gpus, variable, device):
    """It never asks torch_xla, which would hold them."""
    monkeypatch.setattr("subprocess.check_output", lambda command: b"%d" % gpus)
    monkeypatch.setattr("glob.glob", lambda pattern: [])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setattr("os.environ", {variable: ""})
    first, second, *_ = code_cells("kaggle_tpu.ipynb")
    space = dict(code=ROOT)
    exec(first.partition("repository =")[0] + second, space)
    assert space["device"] == device
    assert ("--nproc-per-node=2" in space["launch"]) == (gpus == 2)
