"""Checks in fifteen minutes whether this code is right on a chip, and how fast it is there.

    python scripts/first_chip.py --device=cuda     NVIDIA GPUs
    python scripts/first_chip.py --device=xla      TPUs, by torch_xla
    python scripts/first_chip.py --device=tpu      TPUs, by TorchTPU
    python scripts/first_chip.py --device=cpu      rehearses it at tiny sizes, in three minutes
    PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 python scripts/first_chip.py --device=xla     the same through XLA
    PJRT_DEVICE=CPU python tests/torchtpu/on_cpu.py scripts/first_chip.py --device=tpu

The check has several parts, whose commands are in first_chip.sh. Each part has the chips for itself. Its
result is its exit code and its last line. A part that fails or hangs does not end the others. A part is left
out if too few minutes remain. Nothing is downloaded. out_dir keeps the output of each part, and all results
in results.md and results.json. The exit code is 1 if a part has failed.
"""
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

ROOT = str(Path(__file__).parents[1])
sys.path.insert(0, ROOT)
import configurator
from runtime.errors import writing


class Settings:
    device: configurator.one_of(["cuda", "xla", "tpu", "cpu"]) = ""
    minutes = 15.0  # in all
    out_dir = "out/first_chip"  # a new folder


BUSY_SECONDS = 30  # chips stay busy for so long after their process was killed
COMMANDS = "scripts/first_chip.sh"
# {part: seconds}, the most valuable first; COMMANDS has their commands. A part starts if so many seconds are
# left, and may take four times as many.
PARTS = {
    "puzzles": 30,
    "parity of one chip, float32": 60,
    "losses of the CPU": 30,
    "losses of one chip, float32": 40,
    "losses of one chip, --compile=off": 90,
    "losses of all chips, float32": 40,
    "losses of all chips, bfloat16": 40,
    "commit, versions, hardware": 10,
    "sudoku": 90,
    "ten steps again": 40,
    "resumed from there": 40,
    "SIGTERM": 40,
    "resumed after it": 40,
    "demo": 90,
    "baseline": 90,
    "sudoku, --compile=off": 90,
    "sudoku_att": 90,
    "maze": 90,
}


def main(settings):
    """Runs the parts for which there is time. Exits with 1 if one has failed."""
    out = Path(settings.out_dir)
    with writing(out):
        out.mkdir(parents=True)

    end = time.monotonic() + 60 * settings.minutes
    results = {}
    table = (
        "| part | result | seconds |\n"
        "|---|---|---|\n"
    )
    for name, seconds in PARTS.items():
        began = time.monotonic()
        limit = min(end - began, 4 * seconds)
        if limit < seconds:
            print(f"{name}: left out, it needs {seconds} s")
            continue
        print(name, flush=True)
        exit_code = run(name, settings, limit)
        if exit_code == "none in time":
            time.sleep(BUSY_SECONDS)
        result = last_words(out / name, exit_code)
        print("   ", result, flush=True)
        # both files are written after each part: a kill keeps the finished ones
        took = time.monotonic() - began
        results[name] = dict(
            exit_code=exit_code,
            result=result,
            seconds=took,
        )
        table += f"| {name} | {result} | {took:.0f} |\n"
        (out / "results.json").write_text(json.dumps(results, indent=1))
        (out / "results.md").write_text(table)

    print(f"Please open an issue of the project with results.md and results.json of {out}")
    sys.exit(any(part["exit_code"] for part in results.values()))


def run(part, settings, limit):
    """Runs a part for at most limit seconds; returns its exit code."""
    running = subprocess.Popen(
        ["bash", COMMANDS, part],
        cwd=ROOT,
        env=os.environ | dict(
            DEVICE=settings.device,
            OUT=os.path.relpath(settings.out_dir, ROOT),
            PYTHON=sys.executable,
        ),
        start_new_session=True,
    )
    try:
        return running.wait(limit)
    except subprocess.TimeoutExpired:
        return "none in time"
    finally:
        # the processes that it has started, too
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)


def last_words(log, exit_code):
    """Returns the last line of a part's output or, if it has failed, the end of both its files, in one line.

    log: the beginning of their paths.
    """
    tail = ["tail", "-n", "1", f"{log}.log"]
    if exit_code:
        tail = ["tail", "-qc", "300", f"{log}.log", f"{log}.err"]
    words = subprocess.check_output(
        tail,
        errors="replace",  # the end may begin within a character
    )
    if exit_code:
        words = f"**failed**, exit code {exit_code}: {words}"
    # neither a | nor the end of a line may stand in a table
    return " ".join(words.replace("|", "/").split())


if __name__ == "__main__":
    configurator.start(main, Settings)
