"""Schedules: the curriculum of depth and the decay of exploration, each a pure function of the step.

Resumes within them are in test_train.py, their programs on XLA in test_replicas.py, wrong settings in
test_wrong_input.py.
"""
import re
from collections import Counter

import pytest
from helpers import CURRICULUM, ROOT, curve, run

import configurator
import train
from optim import cycles_at, exploration

# 64 puzzles in batches of 16: 6 epochs are 24 steps, 12 at (1, 1) and 12 at (1, 2), then (2, 3).
FLAGS = [*CURRICULUM, "--curriculum_epochs=6", "--max_steps=32", "--checkpoint_interval=8", "--keep_last_n=9"]


def test_the_depth_of_each_step():
    config = f"{ROOT}/config/baseline.py"
    settings = configurator.configure(train.Settings, [config, "--curriculum_epochs=10000"])
    # 10,000,000 / 6144 = 1627.6
    num_steps = Counter(cycles_at(settings, 1000.0, step) for step in range(2000))
    assert [*num_steps.items()] == [((1, 2), 407), ((1, 3), 407), ((2, 4), 407), ((2, 5), 407), ((3, 6), 372)]


def test_exploration_falls_in_a_line():
    falling = configurator.configure(train.Settings, CURRICULUM)
    assert [exploration(falling, step, 5) for step in range(5)] == pytest.approx([0.9, 0.7, 0.5, 0.3, 0.1])


def test_the_log_says_what_changes_and_evaluations_are_at_full_depth(data):
    text = run(data, "run", *FLAGS, "--eval_interval=2", "--eval_max_puzzles=0")
    assert re.findall(r"step (\d+): .* s for the first step at H_cycles (\d), L_cycles (\d)", text) == [
        ("1", "1", "1"), ("13", "1", "2"), ("25", "2", "3")]
    # no line covers two stages
    assert list(curve("run")) == [5, 8, 10, 12, 15, 16, 20, 24, 25, 30, 32]
    full_depth = "--H_cycles=2", "--L_cycles=3"
    text = run(data, "eval", "--init_from=run/ckpt_00000008.pt", "--eval_only", *full_depth)
    assert f" loss {curve('run', 'eval/loss')[8]:.4f}" in text
