"""Datasets that are made on the fly, for forks."""
import hashlib
import math

import numpy as np

from data import EXAMPLE, SUBSET, generator, rank_slice, tokens_of
from puzzles import IGNORE_LABEL, task_of
from runtime.errors import UserError


class Generated:
    """A dataset whose puzzles are made when they are needed, for forks: `data.Dataset = Mine` uses it.

    A subclass has a task, sizes where they differ from these, and a method

        draw(self, rng, n, split) -> questions, answers: tokens [n, cells]

    which makes n puzzles with a numpy.random.Generator, for which the rules of data.tokens_of hold. The
    puzzles for the split "test" must differ from the puzzles for "train". All replicas draw the whole batch
    of a step, from (seed, step), and take slices. The fork also sets data_path to any name, and data_prepare
    to "".
    """

    task = {}  # see puzzles/__init__.py; its grid and symbols are the model's sizes
    total_groups = 1000  # puzzles of an epoch
    test_size = 1000  # test puzzles, the same in every run
    num_puzzle_identifiers = 1
    mean_puzzle_examples = 1
    identifiers_sha256 = ""  # see Dataset

    def __init__(self, path, split):
        self.path = path
        self.split = split
        self.vocab_size = len(self.task.get("symbols", ""))
        self.task = self.task | task_of(self.task, None, self.vocab_size)
        self.seq_len = math.prod(self.task["grid"])
        if min(self.test_size, self.total_groups) < 1:
            raise UserError(f"{self.made_by()}: test_size and total_groups must be above 0")
        # draw the test puzzles, or as many others: their hash identifies how puzzles are drawn
        self.puzzles = self._batch(generator(0, SUBSET), self.test_size, split)
        content = self.puzzles["inputs"].tobytes() + self.puzzles["labels"].tobytes()
        self.sha256 = hashlib.sha256(content).hexdigest()

    def __len__(self):
        return self.total_groups if self.split == "train" else self.test_size

    def train_batch(self, seed, step, batch_size, rank=0, world=1):
        """See Dataset.train_batch."""
        batch = self._batch(generator(seed, EXAMPLE, step), batch_size, "train")
        own_slice = rank_slice(batch_size, rank, world)
        return {name: array[own_slice] for name, array in batch.items()}

    def test_batch(self, indices):
        """See Dataset.test_batch."""
        return {name: array[indices] for name, array in self.puzzles.items()}

    def subset(self, n, num_versions=0):
        """Returns the indices of the first n test puzzles; num_versions is for ARC."""
        return np.arange(self.test_size)[:n or None]

    def made_by(self):
        return type(self).__name__

    def _batch(self, rng, n, split):
        name = f"{self.made_by()}.draw"
        tokens = tokens_of(self.task, self.draw(rng, n, split), name)
        if tokens.shape != (2, n, self.seq_len):
            raise UserError(f"{name}: questions and answers of shape {tokens.shape[1:]}, not {n} puzzles")
        inputs, labels = tokens.astype(np.int32)
        labels[labels == 0] = IGNORE_LABEL
        return {
            "inputs": inputs,
            "labels": labels,
            "puzzle_identifiers": np.zeros(n, dtype=np.int32),
        }
