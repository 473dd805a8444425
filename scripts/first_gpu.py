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

# the parts of first_gpu.sh: first bench.py's, then train.py's
BENCHES = ["sudoku", "sudoku_on", "sudoku_eager", "sudoku_fast", "sudoku_fast_on",
           "maze_24", "maze_48", "maze_96", "maze_192"]
RUNS = ["demo", "demo_cpu", "two", "begin"]


def main(argv):
    """Prints what the parts in a folder have measured so far."""
    if len(argv) != 1 or not os.path.isdir(argv[0]):
        raise UserError("give the folder with the logs of scripts/first_gpu.sh")
    folder = argv[0]

    # what bench.py measured, from the last lines of its logs
    print("| step | ms | TFLOP/s | of a matmul | evaluation | memory | first step |\n"
          "|---|---|---|---|---|---|---|")
    for name in BENCHES:
        figures = last_object(os.path.join(folder, name + ".log"))
        if figures:
            print("| {} | {step_ms:.1f} ({step_ms_min:.1f} to {step_ms_max:.1f}) | {tflops:.1f} | "
                  "{mfu_of_matmul:.0%} | {evaluation_ms:.1f} ms | {peak_memory_gb:.1f} GB | "
                  "{first_step_s:.0f} s |".format(name, **figures))

    # how the runs went, from their metrics.jsonl; the loss of a run that works falls from its first lines on
    print("\n| run | steps | examples/s | eval/exact_accuracy | train/loss of the first lines |\n"
          "|---|---|---|---|---|")
    for name in RUNS:
        lines = read_metrics(os.path.join(folder, name, "metrics.jsonl"))
        rates = column(lines, "perf/examples_per_sec") or [0]
        accuracies = column(lines, "eval/exact_accuracy")
        losses = column(lines, "train/loss")
        if losses:
            print(f"| {name} | {lines[-1]['step']} | {statistics.median(rates):,.0f} | {accuracies[-1:]} | "
                  f"{losses[:4]} |")


def column(lines, key):
    """Returns the values of a key in the lines of a metrics.jsonl that have it."""
    return [round(line[key], 3) for line in lines if key in line]


def last_object(path):
    """Returns the JSON object in the last line of a log, or None."""
    if not os.path.exists(path):
        return None
    # the figures are the only line that begins with a brace; a log without its end has none
    with open(path) as f:
        last_line = f.read().rpartition("\n{")[2]
    return json.loads("{" + last_line) if last_line.endswith("}\n") else None


if __name__ == "__main__":
    command(lambda: main(sys.argv[1:]), __file__)
