"""Tables for docs/performance.md from the logs of scripts/first_gpu.sh.

    python scripts/first_gpu.py out/first_gpu
"""
import json
import os
import statistics
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from configurator import UserError, command

from data import read_metrics


def main(argv):
    """Prints what the parts in a folder have found so far."""
    if len(argv) != 1 or not os.path.isdir(argv[0]):
        raise UserError("give the folder with the logs of scripts/first_gpu.sh")
    folder, = argv
    print("| step | ms | TFLOP/s | of a matmul | of the peak | evaluation | memory | first step |\n"
          "|---|---|---|---|---|---|---|---|")
    names = ["sudoku", "sudoku_on", "sudoku_eager", "sudoku_fast", "sudoku_fast_on"]
    for name in names + [f"maze_{size}" for size in (24, 48, 96, 192)]:
        f = last_object(os.path.join(folder, name + ".log"))
        if f:
            peak = f"{f['mfu_of_peak']:.0%}" if f["mfu_of_peak"] else "-"
            print(f"| {name} | {f['step_ms']:.1f} ({f['step_ms_min']:.1f} to {f['step_ms_max']:.1f}) | "
                  f"{f['tflops']:.1f} | {f['mfu_of_matmul']:.0%} | {peak} | {f['evaluation_ms']:.1f} ms | "
                  f"{f['peak_memory_gb']:.1f} GB | {f['first_step_s']:.0f} s |")
    runs = {name: read_metrics(os.path.join(folder, name, "metrics.jsonl"))
            for name in ("demo", "demo_cpu", "two", "begin")}
    print("\n| run | steps | examples/s | eval/exact_accuracy | train/loss of the first lines |\n"
          "|---|---|---|---|---|")
    for name, lines in runs.items():
        if lines:
            rates = [line["perf/examples_per_sec"] for line in lines if "perf/examples_per_sec" in line]
            accuracy = [line["eval/exact_accuracy"] for line in lines if "eval/exact_accuracy" in line]
            first = ", ".join(f"{line['train/loss']:.3f}" for line in lines[:4] if "train/loss" in line)
            speed = f"{statistics.median(rates):,.0f}" if rates else "-"
            print(f"| {name} | {lines[-1]['step']} | {speed} | "
                  f"{f'{accuracy[-1]:.1%}' if accuracy else '-'} | {first} |")


def last_object(path):
    """The JSON object in the last line of a log, or None."""
    if os.path.exists(path):
        with open(path) as f:
            lines = f.read().splitlines()
        if lines and lines[-1].startswith("{"):
            return json.loads(lines[-1])
    return None


if __name__ == "__main__":
    command(lambda: main(sys.argv[1:]), __file__)
