"""Symmetries: what turns a puzzle and its answer into another puzzle and its answer.

A symmetry is an order of the cells and a renaming of the tokens. It makes copies for training, and for
further attempts at a puzzle (evaluate.py). Mazes, ARC's grids and many other puzzles can be turned in 8 ways.
A version of an ARC task is one of these ways and a renaming of colors, for grids of any shape.
"""
from typing import NamedTuple

import numpy as np

from runtime.errors import UserError

NUM_TOKENS = 256  # a renaming has an entry for every value of a byte


class Symmetries(NamedTuple):
    """One symmetry or several: each cell of a copy takes its token from a cell of the puzzle, renamed."""

    order: np.ndarray  # the puzzle's cell that each cell of the copy comes from, [..., cells]
    renaming: np.ndarray  # what each token becomes, uint8 [..., NUM_TOKENS]

    def apply(self, boards):
        """Returns the copies of boards, tokens [..., cells]; the leading dimensions broadcast."""
        # move the tokens, then rename them
        boards, order = np.broadcast_arrays(boards, self.order)
        moved = np.take_along_axis(boards, order, axis=-1)
        shape = *moved.shape[:-1], NUM_TOKENS
        renaming = np.broadcast_to(self.renaming, shape)
        return np.take_along_axis(renaming, moved, axis=-1)

    def undo(self, copies):
        """Returns the boards that belong to copies, tokens [..., cells]: the inverse of apply()."""
        # the order that sorts a permutation is its inverse
        order = self.order.argsort(axis=-1)
        renaming = self.renaming.argsort(axis=-1)
        return Symmetries(order, renaming).apply(copies)


def renamings(exchanged, shape, rng):
    """Returns renamings, uint8 [*shape, NUM_TOKENS], in which `exchanged` tokens change places at random."""
    unchanged = np.arange(NUM_TOKENS, dtype=np.uint8)
    tokens = np.tile(unchanged, (*shape, 1))
    shuffled = rng.permuted(tokens[..., exchanged], axis=-1)
    tokens[..., exchanged] = shuffled
    return tokens


def check_symmetries(kind):
    """Raises UserError unless the symmetries that a task describes suit its grid and its symbols."""
    symmetries = kind.symmetries
    if not isinstance(symmetries, dict) or not symmetries.keys() <= {"dihedral", "permute_symbols"}:
        raise UserError(f"symmetries {symmetries!r}: must be a dict with dihedral or permute_symbols")

    # a symbol that stands twice would take the place of another one, and no renaming would bring that back
    symbols = list(kind.symbols[1:])
    exchanged = symmetries.get("permute_symbols", "")
    is_dihedral = symmetries.get("dihedral", False)
    for symbol in exchanged:
        if exchanged.count(symbol) != symbols.count(symbol):
            raise UserError(f"permute_symbols={exchanged!r}: must be symbols of {symbols}, each once")
    is_square = kind.rows == kind.columns
    if is_dihedral not in (False, is_square):
        raise UserError(f"dihedral={is_dihedral!r}: must be true or false, and grid {kind.grid} square")


def turned(grid, way):
    """Returns a view of a grid that is turned in one of 8 ways, in the official builder's order.

    0: as it is; 1 to 3: by one to three quarters to the left; 4: left and right exchanged; 5: up and down
    exchanged; 6: transposed; 7: transposed along the other diagonal.
    """
    # rows and columns change places first
    if way in (1, 3, 6, 7):
        grid = grid.T
    # then the order of the rows is reversed, and the order of the columns
    if way in (1, 2, 5, 7):
        grid = grid[::-1]
    if way in (2, 3, 4, 7):
        grid = grid[:, ::-1]
    return grid


def dihedral(size):
    """Returns the 8 turned squares as indices [8, cells]."""
    square = np.arange(size * size).reshape(size, size)
    return np.stack([turned(square, way).ravel() for way in range(8)])
