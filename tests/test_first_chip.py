"""scripts/first_chip.py: rehearsals of its commands, and parts that fail, hang or have no time."""
import functools
import json
import os
import re
import subprocess
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import first_chip
import pytest
from helpers import NewProcess, TrainProcess, hosts, run_script, xla_environment

import configurator
from runtime.errors import UserError


class Forked(NewProcess):
    """Takes the place of subprocess.Popen: torch is imported already. Starts two processes for torchrun."""

    def __init__(self, command, stdout, **options):
        is_script = [word.endswith(".py") for word in command]
        script, *argv = command[is_script.index(True):]
        name = Path(script).stem
        first, *others = hosts(2) if "-m" in command else [{}]
        self.peers = [TrainProcess(argv, script=name, **rank) for rank in others]
        writer = Connection(os.dup(stdout.fileno()), readable=False)
        super().__init__(run_script, (name, argv), environment=first, writer=writer)
        self.start()

    def poll(self):
        self.join(0)
        return self.returncode

    @property
    def returncode(self):
        return self.exitcode


def rehearse(monkeypatch, device, names):
    """Runs these parts of a rehearsal; returns {name: result}."""
    list_parts = first_chip.list_parts
    monkeypatch.setattr(
        first_chip, "list_parts", lambda *args: {name: list_parts(*args)[name] for name in names})
    monkeypatch.setattr(first_chip, "subprocess", SimpleNamespace(**vars(subprocess) | dict(Popen=Forked)))
    first_chip.main(configurator.configure(first_chip.Settings, [f"--device={device}", "--out_dir=out"]))
    assert os.listdir("..") == ["out"]  # it leaves nothing elsewhere
    return json.loads(Path("results.json").read_text())["parts"]


def test_a_rehearsal_on_the_cpu(monkeypatch, capsys):
    names = first_chip.list_parts("cpu", is_rehearsal=True)
    results = rehearse(monkeypatch, "cpu", names)
    assert [*results] == [*names] and all(result["ok"] for result in results.values())
    assert results["resumed from there"]["text"] == "the same bits"
    step = re.search(r"stopped at step (\d+)", results["SIGTERM"]["text"]).group(1)
    assert f"training from step {step} to 100" in results["resumed after it"]["text"]
    assert results["sudoku"]["figures"]["replicas"] == 2
    text = capsys.readouterr().out
    assert "\n15.0 minutes left: parity" in f"\n{text}" and "2 x cpu" in text and "open an issue" in text
    assert all(f"\n| {name} | " in text for name in names)


@pytest.mark.xla
def test_a_rehearsal_through_xla(monkeypatch):
    for name, value in xla_environment(2).items():
        monkeypatch.setenv(name, value)
    names = ["losses of the CPU", "losses of one chip, float32", "losses of all chips, float32",
             "sudoku"]
    results = rehearse(monkeypatch, "xla", names)
    assert all(result["ok"] for result in results.values())
    figures = results["sudoku"]["figures"]
    want = {"kind": "xla", "replicas": 2, "global_batch_size": 16, "xla/fallbacks": 0}
    assert figures | want == figures
    assert "2 x xla" in Path("results.md").read_text()
    hardware = [json.loads(Path(run, "metrics.jsonl").read_text().partition("\n")[0])["run"]["hardware"]
                for run in ("cpu", "one")]
    assert hardware[0][0].startswith("1 x cpu") and hardware[1][0].startswith("1 x xla")


def test_a_part_that_fails_does_not_end_the_others(monkeypatch, capsys):
    fail = "import sys; print('before |'); sys.exit('the reason')"
    hang = "import time; print(1, flush=True); time.sleep(99)"
    parts = {
        "fails": first_chip.Part(9, f'-c "{fail}"', first_chip.judge_parity),
        "hangs": first_chip.Part(0.5, f"-c '{hang}'", first_chip.judge_parity),
        "is alone": first_chip.Part(9, "-c 0", functools.partial(first_chip.compare_losses, "a", "b", 1)),
        "differs": first_chip.Part(9, "-c 0", lambda output: (False, "by 2", 2)),
        "waits": first_chip.Part(9e9, "-c 0", first_chip.judge_parity),
        "is right": first_chip.Part(9, "-c 0", lambda output: (True, "by 1", 1)),
    }
    monkeypatch.setattr(first_chip, "list_parts", lambda *args: parts)
    monkeypatch.setattr(first_chip, "BUSY_SECONDS", 0)
    with pytest.raises(SystemExit, match="^1$"):
        first_chip.main(configurator.configure(first_chip.Settings, ["--device=cpu", "--out_dir=out"]))
    rows = Path("results.md").read_text().splitlines()[4:]
    words = [r"before \\\| the reason", "no end after 2 s: 1 ", r"max\(\) arg is an empty",
             r"\*\*failed\*\*: by 2", "left out: it needs ", r"\| by 1 \|"]
    assert len(rows) == len(words) and all(map(re.search, words, rows))


@pytest.mark.parametrize("flags, words", [
    ([], "device must be one of cuda, xla, tpu, cpu, not ''"), (["--device=cpu", "--out_dir=."], "exists"),
    (["--device=cpu", "--minutes=-1"], "minutes must be above 0")])
def test_wrong_input(flags, words):
    with pytest.raises(UserError, match=words):
        first_chip.main(configurator.configure(first_chip.Settings, flags))
