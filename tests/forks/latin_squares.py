"""4x4 Latin squares made on the fly: a question has as few cells as leave one answer."""
import itertools

import numpy as np

import data
from data import Generated

data_path = "latin"
data_prepare = ""
_rows = np.array(list(itertools.permutations(range(2, 6))))  # token 1 is an empty cell
_grids = _rows[np.array(list(itertools.product(range(24), repeat=4)))]
_grids = _grids[(np.sort(_grids, axis=1) == np.arange(2, 6)[:, None]).all((1, 2))]
SQUARES = data.generator(0, data.SUBSET).permutation(_grids.reshape(-1, 16))  # 576


class LatinSquares(Generated):
    task = {"kind": "latin", "grid": [4, 4], "symbols": "_.1234",
            "symmetries": {"dihedral": True, "permute_symbols": "1234"}}
    test_size = 100

    def draw(self, rng, n, split):
        labels = rng.choice(SQUARES[:476] if split == "train" else SQUARES[476:], n)
        order = rng.random(labels.shape).argsort(1)  # the cells from the first given to the last
        inputs = labels.copy()
        for givens in range(16, 4, -1):  # takes one away after the other while the answer is the only one
            fewer = np.where(order < givens, labels, 1)
            fits = ((fewer[:, None] == SQUARES) | (fewer[:, None] == 1)).all(2).sum(1) == 1
            inputs[fits] = fewer[fits]
        return inputs, labels


data.Dataset = LatinSquares
