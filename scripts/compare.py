"""Compares the losses of two runs, from their first step to the last step that both have logged.

    python scripts/compare.py out/one out/cpu 1e-3

The exit code is 1 if the largest relative difference is above the limit, the last argument.
"""
import json
import sys


def losses_of(run):
    """Returns the losses in a run's folder."""
    with open(f"{run}/metrics.jsonl") as f:
        return [line["train/loss"] for line in map(json.loads, f) if "train/loss" in line]


if __name__ == "__main__":
    _, run, reference, limit = sys.argv
    pairs = zip(losses_of(run), losses_of(reference))
    errors = [abs(loss / expected - 1) for loss, expected in pairs]
    print(f"{len(errors)} losses within {max(errors):.1e} of {reference}")
    sys.exit(max(errors) > float(limit))
