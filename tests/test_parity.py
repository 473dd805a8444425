"""Golden parity with the official code (scripts/parity.py), in micro-batches and on two replicas of XLA."""
import os

import parity
import pytest
from helpers import on_replicas

each_file = pytest.mark.parametrize("path", parity.FILES, ids=os.path.basename)


@each_file
@pytest.mark.parametrize("micro_batch_size", [0, 2])
def test_training_repeats_the_official_codes_recorded_steps(path, micro_batch_size):
    parity.GoldenRun(path, "cpu", micro_batch_size=micro_batch_size).compare_all()


@pytest.mark.xla
@each_file
def test_two_replicas_of_xla_repeat_them_too(path):
    on_replicas(2, xla_replay, path)


def xla_replay(rank, path):
    parity.GoldenRun(path, "xla", micro_batch_size=1).compare_all()
