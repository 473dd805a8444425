"""Sudoku: the rules, a solver, a generator of minimal puzzles, and symmetric copies.

Boards are the official code's tokens [n, cells]: 0 padding, 1 an empty cell, d + 1 the digit d. A board has
4, 6, 9, 12 or 16 rows.
"""
import numpy as np

from puzzles import Judgement, Kind
from puzzles.keys import keys_of
from puzzles.symmetries import Symmetries, renamings

SUDOKU = " .123456789ABCDEFG"  # a symbol for each token
EMPTY = 1  # token
# {rows of a board: rows and columns of a box}
BOXES = {
    4: (2, 2),
    6: (2, 3),
    9: (3, 3),
    12: (3, 4),
    16: (4, 4),
}
# the axes of (bands, rows, stacks, columns) that go along a unit
UNIT_AXES = (
    (2, 3),  # a row
    (0, 1),  # a column
    (1, 3),  # a box
)
BOARDS = 4096  # boards in the solver at a time: so many stay in the processor's cache
SEARCH = 500_000  # rounds of the solver, over all boards of one puzzle's search: a second; most need 1000
GENERATIONS = 12  # rounds in which hard puzzles are bred
SHORT_SEARCH = 300  # rounds for each clue of a board with more than 9 rows


class Sudoku(Kind):
    """What is known of Sudokus."""

    has_symmetries = True

    @staticmethod
    def new_task(rows):
        """See Kind. The task has no symbols if there is no such Sudoku."""
        symbols = SUDOKU[:rows + 2] if rows in BOXES else ""
        return {
            "kind": "sudoku",
            "grid": [rows, rows],
            "symbols": symbols,
        }

    @property
    def box(self):
        return BOXES[self.rows]

    @property
    def unit_shapes(self):
        return [[1, self.rows], [self.rows, 1], self.box]

    def judge(self, questions, answers):
        """See Kind. Cells that are empty, differ from a given, or have a digit of their unit break a rule."""
        # find empty cells, and givens that have changed
        is_empty = answers < 2
        is_changed = (questions > 1) & (answers != questions)
        broken = is_empty | is_changed

        # find digits that stand twice in a row, a column or a box
        board = np.arange(len(answers))[:, None]
        for unit in self.units():
            # a number for each digit of each unit of each board
            digits = (board * self.rows + unit) * len(self.symbols) + answers
            broken |= np.bincount(digits.ravel())[digits] > 1
        return Judgement(broken, ~broken.any(axis=1))

    def num_solutions(self, questions):
        return count_solutions(candidates_of(questions, self.rows), self.rows, 2, SEARCH)[0]

    def draw_symmetries(self, n, rng):
        """Draws n Symmetries.

        As the official builder does, it permutes the digits, the bands, the rows of each band, the stacks and
        the columns of each stack; if boxes are square, it transposes half of the boards.
        """
        size = self.rows
        bands, rows, stacks, columns = board_axes(size)

        def random_order(groups, members):  # [n, size]: of groups, and of the members of each
            first = shuffled(rng, n, groups) * members
            members_in_order = shuffled(rng, n, groups, members)
            return (first[:, :, None] + members_in_order).reshape(n, size)

        # draw which cell each cell of a copy comes from
        transposed = rng.random((n, 1, 1)) < 0.5 * (rows == columns)
        rows_from = random_order(bands, rows)[:, :, None]
        columns_from = random_order(stacks, columns)[:, None]
        cells_from = np.where(
            transposed,
            size * columns_from + rows_from,
            size * rows_from + columns_from,
        )

        # draw what each digit becomes; token 2 is digit 1
        digits = range(2, size + 2)
        return Symmetries(
            cells_from.reshape(n, -1),
            renamings(digits, (n,), rng),
        )

    def training_copies(self, puzzles, num_copies, rng, test_keys):
        """See Kind. A copy that is a test question is made anew."""
        _, n, cells = puzzles.shape
        originals = np.repeat(puzzles, num_copies, axis=1)
        copies = np.empty_like(originals)
        wanted = np.arange(n * num_copies)
        while wanted.size:
            symmetries = self.draw_symmetries(len(wanted), rng)
            copies[:, wanted] = symmetries.apply(originals[:, wanted])
            wanted = np.flatnonzero([
                question.tobytes() in test_keys
                for question in copies[0]
            ])
        return copies.reshape(2, n, num_copies, cells)

    def keys(self, questions):
        """See Kind. So many copies of a Sudoku exist that each counts by itself."""
        return keys_of(questions)


def board_axes(size):
    """Returns the bands, rows of a band, stacks and columns of a stack."""
    rows, columns = BOXES[size]
    return columns, rows, rows, columns


# ---------------------------------------------------------------------------------------------------------
# The solver works on many boards at a time: candidates [cells, n], where bit d - 1 is set while digit d is
# possible in the cell. Numpy is fast on these as long as every operation runs over all n boards.

def candidates_of(boards, size):
    """Returns the candidates [cells, n] of boards, tokens [n, cells]; an empty cell has all."""
    digits = 1 << np.arange(size)
    by_token = np.array([0, digits.sum(), *digits], dtype=np.uint16)  # padding has none
    return by_token[boards.T]


def count_solutions(candidates, size, limit, search):
    """Returns the number of solutions of each board [n], counted up to limit, and its rounds of work [n].

    The number is -1 where it is not decided. The solver goes depth first over many boards at once: where the
    singles are stuck, it splits a board in two at one of its cells with the fewest candidates. It gives up a
    board that takes more than `search` rounds.

    candidates: [cells, n].
    """
    n = candidates.shape[1]
    counts = np.zeros(n, dtype=int)
    rounds = np.zeros(n, dtype=int)
    waiting = [(candidates, np.arange(n))]
    while waiting:
        boards, owners = waiting.pop()
        if len(owners) > BOARDS:
            waiting.append((boards[:, BOARDS:], owners[BOARDS:]))
            boards = boards[:, :BOARDS]
            owners = owners[:BOARDS]

        # drop boards that are solved or broken, or whose owner has solutions or rounds enough
        boards, broken, solved, stuck = propagate(boards, size)
        counts += np.bincount(owners[solved], minlength=n)
        rounds += np.bincount(owners, minlength=n)
        goes_on = (counts < limit) & (rounds <= search)
        alive = ~(broken | solved) & goes_on[owners]

        # split the stuck boards at a cell: one copy takes its lowest candidate, the other one the rest
        split = np.flatnonzero(alive & stuck)
        others = boards[:, split]
        column = np.arange(len(split))
        num_options = np.bitwise_count(others)
        num_options[num_options < 2] = size + 1  # decided cells come last
        cell = num_options.argmin(axis=0)
        options = others[cell, column]
        lowest = options & -options
        boards[cell, split] = lowest
        others[cell, column] -= lowest
        if alive.any():
            boards = np.concatenate([boards[:, alive], others], axis=1)
            owners = np.concatenate([owners[alive], owners[split]])
            waiting.append((boards, owners))
    counts[(counts < limit) & (rounds > search)] = -1
    return np.minimum(counts, limit), rounds


def propagate(candidates, size):
    """Runs one round of naked and hidden singles.

    Returns the candidates, and bool [n] each: broken, solved, stuck.
    broken: no solution; solved: all cells decided; stuck: unchanged by this round.
    """
    after = candidates.copy()
    boards = after.reshape(*board_axes(size), -1)  # (bands, rows, stacks, columns, n)
    # views whose first two axes go along a row, a column or a box
    unit_views = [np.moveaxis(boards, axes, (0, 1)) for axes in UNIT_AXES]
    broken = np.zeros(after.shape[1], dtype=bool)

    # remove each placed digit from the other cells of its units
    for cells in unit_views:
        placed = cells * is_decided(cells)
        taken, twice = digits_of_units(placed)
        broken |= twice.any(axis=(0, 1))
        cells &= ~taken | placed

    # place each digit that has one cell left in a unit
    for cells in unit_views:
        seen, again = digits_of_units(cells)
        broken |= (seen != 2 ** size - 1).any(axis=(0, 1))  # a unit lacks a digit
        # keep all candidates of a cell without a single: 0 - 1 has all bits, and a mask would be much slower
        single = cells & seen & ~again
        cells &= single - (single == 0)

    # say what the round came to
    unchanged = (after == candidates).all(axis=0) & ~broken
    decided = is_decided(after).all(axis=0)
    return after, broken, unchanged & decided, unchanged & ~decided


def digits_of_units(cells):
    """Returns the bits that at least one cell of each unit has, and the bits that at least two have.

    cells: uint16; the first two axes go along a unit, and the results do without them.
    """
    seen = 0
    again = 0
    for position in np.ndindex(cells.shape[:2]):
        cell = cells[position]
        again = again | seen & cell
        seen = seen | cell
    return seen, again


def is_decided(candidates):
    """Returns which cells have one candidate, or none, bool."""
    return candidates & (candidates - 1) == 0


# ---------------------------------------------------------------------------------------------------------
# Generated puzzles

def minimal_sudokus(index, seed, n, size):
    """Returns n puzzles of remove_clues (questions, answers), uint8 [n, cells], drawn from seed and index."""
    rng = np.random.default_rng([seed, index])
    answers = random_boards(n, size, rng)
    return remove_clues(answers, answers, size, rng), answers


def hard_sudokus(index, seed, n, size):
    """Returns up to n minimal puzzles, as minimal_sudokus does; most of them need many guesses.

    It chooses the puzzles that take the solver most rounds, and breeds from them: a child has some clues
    more, and loses those that are then needless. The hardest of both live on.
    """
    questions, answers = minimal_sudokus(index, seed, 4 * n, size)
    rng = np.random.default_rng([seed, index, 1])
    for _ in range(GENERATIONS):
        # choose the parents
        _, rounds = count_solutions(candidates_of(questions, size), size, 2, SEARCH)
        parents = rounds.argsort(kind="stable")[-(n // 2):]
        questions = questions[parents]
        answers = answers[parents]

        # each has a child, with two clues more on average
        is_clue = rng.random(questions.shape) < 3 / questions.shape[1]
        children = remove_clues(np.where(is_clue, answers, questions), answers, size, rng)
        questions, first = np.unique(np.concatenate([questions, children]), axis=0, return_index=True)
        answers = np.concatenate([answers, answers])[first]
    return questions, answers


def remove_clues(questions, answers, size, rng):
    """Returns minimal puzzles [n, cells] with clues of these questions.

    It tries every clue once, in random order, and removes it unless that allows another digit in its cell.
    Boards of more than 9 rows keep a clue where SHORT_SEARCH does not tell: few of them are minimal.
    """
    search = SEARCH if size <= 9 else SHORT_SEARCH
    boards = candidates_of(questions, size)
    all_digits = 2 ** size - 1
    column = np.arange(len(questions))
    for cell in shuffled(rng, *questions.shape).T:
        # the cell may have any digit but the clue's
        clue = boards[cell, column]
        boards[cell, column] = all_digits ^ clue
        needed, _ = count_solutions(boards, size, 1, search)
        boards[cell, column] = np.where(needed, clue, all_digits)
    return np.where(boards.T == all_digits, EMPTY, answers)


def random_boards(n, size, rng):
    """Returns n random filled boards [n, cells].

    It chooses a random cell among the cells with the fewest candidates, gives it a random candidate, and
    repeats this until the board is full. Broken boards start over.
    """
    bits = 1 << np.arange(size, dtype=np.uint16)
    all_digits = bits.sum()
    boards = candidates_of(np.full((n, size * size), EMPTY), size)
    done = []
    while boards.shape[1]:
        # empty broken boards
        boards, broken, solved, stuck = propagate(boards, size)
        boards[:, broken] = all_digits
        stuck = np.flatnonzero(stuck)

        # draw a cell
        num_options = np.bitwise_count(boards[:, stuck])
        num_options[num_options == 1] = size + 1  # decided cells come last
        cell = np.argmin(num_options + rng.random(num_options.shape), axis=0)

        # draw its digit
        is_candidate = boards[cell, stuck] & bits[:, None] > 0
        digit = np.argmax(is_candidate * rng.random(is_candidate.shape), axis=0)
        boards[cell, stuck] = bits[digit]

        # take full boards away
        done.append(boards[:, solved])
        boards = boards[:, ~solved]
    # bit d - 1 is token d + 1
    digit_bits = np.concatenate(done, axis=1).T
    return np.bitwise_count(digit_bits - 1) + 2


def shuffled(rng, *shape):
    """Returns random orders of 0, 1, ... along the last axis of an array with this shape."""
    in_order = np.broadcast_to(np.arange(shape[-1]), shape)
    return rng.permuted(in_order, axis=-1)
