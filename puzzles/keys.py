"""Computes keys that are equal for equal puzzles, for the prepare scripts."""
import numpy as np

from puzzles.symmetries import NUM_TOKENS


def orbit_keys(boards, turns, exchanged=()):
    """Returns a list of keys of boards; boards that symmetries turn into each other have equal keys.

    Args:
        boards: tokens [n, cells].
        turns: the symmetries of the grid, as indices [m, cells].
        exchanged: tokens that may change places.
    """
    keys_by_turn = []
    for turn in turns:
        # replace each exchanged token by the number of the first cell that has it
        moved = boards[:, turn].astype(np.int16)
        renamed = moved.copy()
        for token in exchanged:
            is_token = moved == token
            first_cells = is_token.argmax(axis=1, keepdims=True)
            np.copyto(renamed, NUM_TOKENS + first_cells, where=is_token)
        keys_by_turn.append(keys_of(renamed))
    # the smallest key stands for all turns
    return [
        min(keys)
        for keys in zip(*keys_by_turn)
    ]


def keys_of(boards):
    """Returns a list of boards [n, cells] as bytes, for sets and dicts."""
    return [board.tobytes() for board in boards]
