"""The 8 ways to turn a grid, which mazes, ARC's grids and many other puzzles share."""
import numpy as np

# whether rows become columns, then the steps along rows and columns of the result
TURNS = (
    (False, 1, 1),
    (True, -1, 1),  # a quarter
    (False, -1, -1),  # a half
    (True, 1, -1),  # three quarters
    (False, 1, -1),  # left and right exchanged
    (False, -1, 1),  # up and down exchanged
    (True, 1, 1),  # transposed
    (True, -1, -1),  # transposed along the other diagonal
)
WAY_BACK = (0, 3, 2, 1, 4, 5, 6, 7)


def turned(grid, way):
    """Returns a view of a grid that is turned in one of 8 ways, in the official builder's order."""
    is_transposed, row_step, column_step = TURNS[way]
    if is_transposed:
        grid = grid.T
    return grid[::row_step, ::column_step]


def dihedral(size):
    """Returns the 8 turned squares as indices [8, cells]."""
    square = np.arange(size * size).reshape(size, size)
    squares = np.stack([turned(square, way) for way in range(8)])
    return squares.reshape(8, -1)


def orbit_keys(boards, turns, exchanged=()):
    """Returns a list of keys of boards, equal for those that symmetries turn into each other.

    Args:
        boards: tokens [n, cells].
        turns: the symmetries of the grid, as indices [m, cells].
        exchanged: tokens that may change places.
    """
    exchanged = np.array(exchanged, dtype=int)
    keys = []
    for first in range(0, len(boards), 4096):  # as memory allows
        block = boards[first:first + 4096]
        smallest = None
        for turn in turns:
            # replace each exchanged token by the number of the first cell that has it
            moved = block[:, turn]
            has_token = moved[:, None] == exchanged[:, None]  # [n, tokens, cells]
            to = np.tile(np.arange(256, dtype=np.int16), (len(block), 1))
            to[:, exchanged] = 256 + has_token.argmax(axis=2)
            turned_keys = keys_of(np.take_along_axis(to, moved, axis=1))
            smallest = list(map(min, smallest or turned_keys, turned_keys))
        keys += smallest
    return keys


def keys_of(boards):
    """Returns a list of boards [n, cells] as bytes, for sets and dicts."""
    return [board.tobytes() for board in boards]
