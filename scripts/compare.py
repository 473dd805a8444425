"""Compares the losses of two runs, from their first step to the last step that both have logged.

    python scripts/compare.py out/one out/cpu 1e-3

The exit code is 1 if the largest relative difference is above the limit, the last argument.
"""
import json
import sys


def losses_of(run):
    """Returns the losses in a run's folder."""
    with open(f"{run}/metrics.jsonl") as f:
        lines = list(map(json.loads, f))
    return [line["train/loss"] for line in lines if "train/loss" in line]


if __name__ == "__main__":
    _, run, reference, limit = sys.argv
    pairs = list(zip(losses_of(run), losses_of(reference)))
    worst = max(abs(loss / expected - 1) for loss, expected in pairs)
    print(f"{len(pairs)} losses within {worst:.1e} of {reference}")
    sys.exit(worst > float(limit))
