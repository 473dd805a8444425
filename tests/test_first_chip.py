"""scripts/first_chip.py: rehearsals of its commands, and parts that fail, hang or have no time."""
import json
import re
from pathlib import Path

import first_chip
import pytest

import configurator
from runtime.errors import UserError


def run_parts(monkeypatch, parts, device="cpu"):
    """Runs these parts; returns {name: result} and the exit code."""
    monkeypatch.setattr(first_chip, "PARTS", parts)
    with pytest.raises(SystemExit) as ended:
        first_chip.main(configurator.configure(first_chip.Settings, [f"--device={device}", "--out_dir=out"]))
    rows = [line.split(" | ") for line in Path("out/results.md").read_text().splitlines()[2:]]
    return {row[0].removeprefix("| "): row[1] for row in rows}, ended.value.code


@pytest.mark.parametrize("device, names", [
    ("cpu", ["SIGTERM", "resumed after it", "sudoku"]),
    pytest.param("xla", ["losses of the CPU", "losses of one chip, float32", "losses of all chips, float32"],
                 marks=pytest.mark.xla)])
def test_a_rehearsal(monkeypatch, device, names):
    monkeypatch.setenv("CPU_NUM_DEVICES", "2")
    if device == "xla":
        monkeypatch.setenv("PJRT_DEVICE", "CPU")
    parts = {name: first_chip.PARTS[name] for name in ["puzzles", *names]}
    results, code = run_parts(monkeypatch, parts, device)
    assert [*results] == [*parts] and not code
    if device == "cpu":
        step = re.search(r"stopped at step (\d+)", results["SIGTERM"])[1]
        assert f"training from step {step} to 100" in Path("out/stopped/log.txt").read_text()
        assert json.loads(results["sudoku"])["replicas"] == 2
    else:
        for run, replicas in ("one", 1), ("all", 2):
            assert f"{replicas} x xla" in Path(f"out/{run}/log.txt").read_text()


def test_a_part_that_fails_does_not_end_the_others(monkeypatch, capsys):
    for run, loss in ("a", 2), ("b", 3):
        Path(run).mkdir()
        Path(run, "metrics.jsonl").write_text('{"step": 0}\n{"step": 1, "train/loss": %d}\n' % loss)
    runs = f"{Path('a').resolve()} {Path('b').resolve()}"
    parts = {
        "fails": (9, "echo 'before |'; echo the reason >&2; exit 5"),
        "hangs": (0.5, "echo 1; sleep 99"),
        "differs": (9, f"$COMPARE {runs} 0.3"),
        "agrees": (9, f"$COMPARE {runs} 0.4"),
        "waits": (9e9, "true"),
    }
    monkeypatch.setattr(first_chip, "BUSY_SECONDS", 0)
    results, code = run_parts(monkeypatch, parts)
    words = {
        "fails": "**failed**, exit code 5: before / the reason",
        "hangs": "**failed**, exit code none in time: 1",
        "differs": "**failed**, exit code 1: 1 losses within 3.3e-01",
        "agrees": "1 losses within 3.3e-01",
    }
    assert results.keys() == words.keys() and code
    assert all(results[name].startswith(text) for name, text in words.items())
    assert "\n15.0 minutes left: waits\n    left out: it needs " in capsys.readouterr().out


@pytest.mark.parametrize("flags, words", [
    ([], "device must be one of cuda, xla, tpu, cpu, not ''"), (["--device=cpu", "--out_dir=."], "exists"),
    (["--device=cpu", "--out_dir=a b"], "has a space")])
def test_wrong_input(flags, words):
    with pytest.raises(UserError, match=words):
        first_chip.main(configurator.configure(first_chip.Settings, flags))
