"""scripts/first_chip.py: rehearsals of its commands, and parts that fail, hang or have no time."""
import json
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
    return json.loads(Path("out/results.json").read_text()), ended.value.code


@pytest.mark.parametrize("device, names", [
    ("cpu", ["puzzles", "SIGTERM", "sudoku"]), pytest.param("xla", ["sudoku"], marks=pytest.mark.xla)])
def test_a_rehearsal(monkeypatch, device, names):
    """test_smoke.py trains on XLA, and has the command of a resume."""
    monkeypatch.setenv("CPU_NUM_DEVICES", "2")
    if device == "xla":
        monkeypatch.setenv("PJRT_DEVICE", "CPU")
    parts = {name: first_chip.PARTS[name] for name in names}
    results, code = run_parts(monkeypatch, parts, device)
    assert [*results] == names and not code
    assert '"replicas": 2' in results["sudoku"]["result"]


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
    assert [result["exit_code"] for result in results.values()] == [5, "none in time", 1, 0] and code
    rows = Path("out/results.md").read_text().splitlines()[2:]
    words = "code 5: before / the reason", "none in time: 1", "code 1: 1 losses within 3.3e-01", "| 1 losses"
    assert len(rows) == len(words) and all(text in row for text, row in zip(words, rows))
    assert "\nwaits: left out, it needs " in capsys.readouterr().out


@pytest.mark.parametrize("flags, words", [
    ([], "device must be one of cuda, xla, tpu, cpu, not ''"), (["--device=cpu", "--out_dir=."], "exists")])
def test_wrong_input(flags, words):
    with pytest.raises(UserError, match=words):
        first_chip.main(configurator.configure(first_chip.Settings, flags))
