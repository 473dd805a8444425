"""Writes distances.jsonl: a task of reasoning-gym with a fixed grid, how far each cell is from the nearest 0.

    pip install reasoning-gym
    python examples/distances.py distances.jsonl 6000

Any other task whose answer has as many cells as its question goes the same way: turn both into strings.
"""
import json
import sys

import reasoning_gym


def main(path, n, size=6):
    dataset = reasoning_gym.create_dataset(
        "binary_matrix", size=n, seed=0, min_n=size, max_n=size, p_zero=0.15)
    with open(path, "x") as f:
        for entry in dataset:
            question, answer = (sum(entry["metadata"][name], []) for name in ("matrix", "solution"))
            f.write(json.dumps({
                "question": "".join("." if cell else "0" for cell in question),
                "answer": "".join("0123456789A"[cell] for cell in answer),  # 10 steps are one character, too
            }) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
