"""scripts/first_chip.py: rehearsals of its commands, and parts that fail, hang or have no time."""
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import first_chip
import pytest
from helpers import ROOT

import bench
import configurator
import train


def run_parts(monkeypatch, parts, device="cpu"):
    """Runs these parts; returns {name: result} and the exit code."""
    monkeypatch.setattr(first_chip, "PARTS", parts)
    with pytest.raises(SystemExit) as ended:
        flags = [f"--device={device}", "--out_dir=out"]
        first_chip.main(configurator.configure(first_chip.Settings, flags))
    return json.loads(Path("out/results.json").read_text()), ended.value.code


def test_its_commands_pass_a_rehearsal_on_the_cpu(monkeypatch):
    """test_smoke.py trains on XLA, and has the command of a resume; test_bench.py measures on XLA."""
    names = ["puzzles", "SIGTERM"]
    results, code = run_parts(monkeypatch, {name: first_chip.PARTS[name] for name in names})
    assert [*results] == names and not code


@pytest.mark.parametrize("device", ["cuda", "xla"])
def test_the_other_parts_use_settings_that_there_are(device, monkeypatch):
    """A stand-in for Python prints its arguments, which are then the last line of a part."""
    Path("python").write_text('#!/bin/sh\necho "$@"\n')
    Path("python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", os.path.abspath("python"))

    # every part runs but the one that has no time
    results, code = run_parts(monkeypatch, first_chip.PARTS | {"SIGTERM": 1e9}, device)
    assert len(results) == len(first_chip.PARTS) - 1 and not code, results

    # each command of train.py or bench.py is valid
    monkeypatch.chdir(ROOT)
    commands = [re.search(r"(?:train|bench)\.py (.*)", part["result"]) for part in results.values()]
    commands = [command[1].split() for command in commands if command]
    assert len(commands) == 8
    for command in commands:
        _, operands, flags = configurator.split_arguments(bench.Settings, command)
        train.check_start_settings(configurator.configure(train.Settings, operands + flags))


COMMANDS = """
exec >$OUT/$1.log 2>$OUT/$1.err
case $1 in
  fails) echo 'before |'; echo the reason >&2; exit 5 ;;
  hangs) echo 1; sleep 99 ;;
esac
"""


def test_a_part_that_fails_does_not_end_the_others(monkeypatch, capsys):
    Path("commands.sh").write_text(COMMANDS)
    monkeypatch.setattr(first_chip, "COMMANDS", os.path.abspath("commands.sh"))
    monkeypatch.setattr(first_chip, "BUSY_SECONDS", 0)
    results, code = run_parts(monkeypatch, {"fails": 9, "hangs": 0.5, "works": 9, "waits": 9e9})
    assert [result["exit_code"] for result in results.values()] == [5, "none in time", 0] and code

    # the table has a line for each part that ran, and a part that needs more time than is left does not run
    fails, hangs, works = Path("out/results.md").read_text().splitlines()[2:]
    assert "code 5: before / the reason" in fails and "none in time: 1" in hangs and "| works |" in works
    assert "\nwaits: left out, it needs " in capsys.readouterr().out


@pytest.mark.parametrize("loss, limit, code", [("2", 0.3, 1), ("2", 0.4, 0), ("NaN", 0.4, 1)])
def test_losses_are_compared_by_step(loss, limit, code):
    """The other run has a line of step 0 too, which is compared with none."""
    other = '{"step": 0, "train/loss": 5}\n{"step": 1, "train/loss": 3}'
    for run, text in ("a", f'{{"step": 1, "train/loss": {loss}}}'), ("b", other):
        Path(run).mkdir()
        Path(run, "metrics.jsonl").write_text(text)
    done = subprocess.run([sys.executable, f"{ROOT}/scripts/compare.py", "a", "b", str(limit)])
    assert done.returncode == code
