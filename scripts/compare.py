"""Compares the losses of two runs, at the steps that both have logged.

    python scripts/compare.py out/one out/cpu 1e-3

The last argument is the limit of the largest relative difference. The exit code is 1 if the difference is
above it, or if there is no such step.
"""
import json
import math
import sys


def losses_of(run):
    """Returns {step: loss} of the run in a folder."""
    with open(f"{run}/metrics.jsonl") as f:
        return {line["step"]: line["train/loss"] for line in map(json.loads, f) if "train/loss" in line}


if __name__ == "__main__":
    _, run, reference, limit = sys.argv
    losses = losses_of(run)
    expected = losses_of(reference)
    errors = [abs(losses[step] / expected[step] - 1) for step in losses.keys() & expected]
    worst = max(errors, default=math.inf)
    print(f"{len(errors)} losses within {worst:.1e} of {reference}")
    sys.exit(not worst <= float(limit))  # a loss may be NaN
