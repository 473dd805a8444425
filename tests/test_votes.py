"""The vote of ARC against the official evaluator, on recorded predictions for real tasks.

tests/data/arc_votes.npz holds: tasks, 62 ARC-AGI-1 tasks with small grids as Kaggle's four files; preds and
q_halt, made-up answers to all test inputs in all versions (right, wrong alike, wrong each in its own way,
empty); official, what the official code (e7b6871) makes of them: the identifiers of its builder with
--num-aug 12, pass@K and submission.json of its evaluators/arc.py.
"""
import json
from pathlib import Path

import numpy as np
from helpers import ROOT, prepare

import prepare_arc
from data import Dataset
from puzzles.arc import count_votes, merge_votes, submission, vote_values

RECORDED = np.load(f"{ROOT}/tests/data/arc_votes.npz")
OFFICIAL = json.loads(RECORDED["official"].tobytes())


def test_the_vote_is_the_official_evaluators_on_any_number_of_ranks():
    for name, content in json.loads(RECORDED["tasks"].tobytes()).items():
        Path(f"small_{name}.json").write_text(json.dumps(content))
    test = Dataset(prepare("data", prepare_arc, source="small", num_aug=12), "test")
    indices = np.arange(len(test))
    ranks = []
    for rank in range(3):
        own = slice(rank, None, 3)
        ranks.append(count_votes(test, indices[own], RECORDED["preds"][own], RECORDED["q_halt"][own]))
    votes = merge_votes(ranks)
    values = vote_values(test, votes)
    assert {f"ARC/pass@{name.removeprefix('eval/pass')}": value for name, value in values.items()} == \
        OFFICIAL["result"]
    assert submission(test, votes) == OFFICIAL["submission"]
