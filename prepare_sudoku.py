"""Makes a Sudoku dataset: Sudoku-Extreme from the hub, your own CSV files, or generated puzzles.

    python prepare_sudoku.py                              Sudoku-Extreme: 1000 puzzles x 1001
    python prepare_sudoku.py --train_csv=A --test_csv=B   columns question,answer,rating
    python prepare_sudoku.py --source=generate --size=6   minimal 6x6 puzzles

Tokens are the official code's: 0 padding, 1 an empty cell, d + 1 the digit d. In this file, boards are
digits [n, cells], 0 an empty cell.
"""
import functools
import itertools

import numpy as np

# isort: off
from configurator import UserError, start
from data import (
    Progress, board_keys, check_source, command_of, csv_files, distinct, in_parallel, name_output,
    refuse_existing, write_dataset)
from prepare_csv import read_csv, token_blocks
from puzzles import BOXES, SUDOKU, broken_cells, units_of

# source
source = "hub"  # hub (Sudoku-Extreme from Hugging Face), csv, or generate
train_csv = ""  # training puzzles, .csv or .csv.gz; implies csv
test_csv = ""  # test puzzles
size = 9  # cells of a row: 9, 6 (boxes of 2 rows, 3 columns) or 4
output_dir = ""  # "": a folder under data/ named after these settings
seed = 0  # of the choice of puzzles, their copies, and generated puzzles
# puzzles from the hub or from CSV files
subsample_size = 1000  # training puzzles, chosen at random; 0: all; every test puzzle is kept
min_difficulty = 0  # lowest rating that is kept, in training and test
check_unique = True  # prove that each kept puzzle has one solution (30 s per 100,000 puzzles and core)
# generated puzzles
num_train = 3000  # training puzzles
num_test = 1000  # test puzzles, the same for each num_train
# augmentation
num_aug = 1000  # augmented copies of each training puzzle, besides itself
# ---

HUB = "sapientinc/sudoku-extreme"
COPIES = 16384  # copies made at a time
WIDTH = 4096  # boards in the solver at a time: as many as stay in the processor's cache


def main(settings):
    """Makes the dataset that the settings describe and returns its folder. Raises UserError."""
    s, counts = complete(settings), {}
    refuse_existing(s.output_dir)
    if s.source == "generate":
        boards = generate(s.size, s.num_train + s.num_test, s.seed)
        train = [board[s.num_test:] for board in boards]
        test = [board[:s.num_test] for board in boards]  # the same for each num_train
    else:
        train, test, counts = puzzles_from_files(s)
    counts.update(train_puzzles=len(train[0]), test_puzzles=len(test[0]), copies_replaced=0)
    examples = augmented(*train, s, set(board_keys(test[0])), counts)
    splits = {"train": (len(train[0]), s.num_aug + 1, examples),
              "test": (len(test[0]), 1, [[board + np.uint8(1) for board in test]])}
    write_dataset(s.output_dir, splits, s.size + 2, task_of(s.size) | dict(
        command=command_of(__file__, s), counts=counts, box=BOXES[s.size]))
    print(f"train: {len(train[0]):,} puzzles, {s.num_aug:,} copies of each "
          f"({counts['copies_replaced']:,} drawn again because the test set has them)")
    print(f"test: {len(test[0]):,} puzzles")
    print(f"Train on it: python train.py --data_path={s.output_dir}")
    return s.output_dir


def task_of(size):
    return dict(kind="sudoku", grid=[size, size], symbols=SUDOKU[:size + 2])


def complete(settings):
    """The settings with source and output_dir filled in; raises UserError for a wrong one."""
    s = check_source(settings, subsample_size=0, num_aug=0, seed=0, num_train=1, num_test=1)
    if s.source == "hub" and s.size != 9:
        raise UserError(f"size must be 9 for the hub, not {s.size}")
    if s.size not in BOXES:
        raise UserError(f"size must be 4, 6 or 9, not {s.size}")
    generated = s.source == "generate"
    names = {"hub": "sudoku-extreme", "generate": f"sudoku-{s.size}x{s.size}"}
    hardest = s.min_difficulty and not generated and f"min-{s.min_difficulty}"
    return name_output(s, names, s.num_train if generated else s.subsample_size,
                       s.num_aug and f"aug-{s.num_aug}", hardest)


# Puzzles from CSV files.

def puzzles_from_files(s):
    """Training and test puzzles, [questions, answers] each, and counts; downloads the hub's."""
    train_csv, test_csv = csv_files(s, HUB)
    (test_lines, *test), test_rows, _ = choose(test_csv, s, 0, set())
    exclude = set(board_keys(test[0]))
    (train_lines, *train), train_rows, in_test = choose(train_csv, s, s.subsample_size, exclude)
    if s.check_unique:
        check_uniqueness(train_csv, train_lines, train[0], s.size)
        check_uniqueness(test_csv, test_lines, test[0], s.size)
    print(f"{train_csv}: {train_rows:,} rows, {in_test:,} dropped because the test set has them too")
    return train, test, dict(test_rows=test_rows, train_rows=train_rows, train_rows_in_test=in_test)


def choose(path, settings, n, exclude):
    """n random puzzles (0: all) of a CSV file, rated min_difficulty or more, whose key is not in exclude.

    exclude: a set of board_keys of questions. Returns (lines, questions, answers), in the file's order, and
    the numbers of rows read and excluded; memory holds no more than these. Raises UserError with a line.
    """
    size, rng = settings.size, np.random.default_rng([settings.seed, 1])
    digits = SUDOKU[2:size + 2]
    table = {ord(digit): int(digit) for digit in "0" + digits} | {ord("."): 0}
    chosen, rows_read, rows_excluded = [], 0, 0
    rows = read_csv(path, size * size, (".0" + digits, digits), "rating")
    for questions, answers, ratings, lines in token_blocks(rows, 4096, table, table):
        broken = broken_cells(task_of(size), questions + 1, answers + 1).any(axis=1)
        for i in np.flatnonzero(broken)[:1]:
            raise UserError(f"{path}:{lines[i]}: {explain(questions[i], answers[i], size)}")
        for line, rating in zip(lines, ratings):
            if not rating.strip().removeprefix("-").isdecimal():
                raise UserError(f"{path}:{line}: the rating {rating!r} is not an integer")
        hard_enough = np.array([int(rating) >= settings.min_difficulty for rating in ratings])
        excluded = np.array([key in exclude for key in board_keys(questions)])
        take = hard_enough & ~excluded
        rows_read += len(lines)
        rows_excluded += int((hard_enough & excluded).sum())
        columns = np.array(lines), questions, answers
        chosen.append([rng.random(int(take.sum())), *(column[take] for column in columns)])
        if n:  # the n smallest of random keys: a uniform choice of rows whose number is not known
            parts = [np.concatenate(part) for part in zip(*chosen)]
            smallest = np.sort(np.argsort(parts[0])[:n])
            chosen = [[part[smallest] for part in parts]]
    _, *puzzles = [np.concatenate(part) for part in zip(*chosen)]
    if not len(puzzles[0]):
        raise UserError(f"{path}: no puzzle is left of {rows_read} rows: {rows_excluded} are in the test set "
                        f"too, the others are rated below min_difficulty={settings.min_difficulty}")
    return puzzles, rows_read, rows_excluded


def explain(question, answer, size):
    """Which rule of Sudoku a question and its answer, [cells] each, break, in words."""
    for name, board in ("question", question), ("answer", answer):
        for kind, unit in zip(("row", "column", "box"), units_of(size)):
            for i, digit in itertools.product(range(size), range(1, size + 1)):
                if (board[unit == i] == digit).sum() > 1:
                    return f"the {name} has digit {digit} twice in {kind} {i + 1}"
    if not count_solutions(candidates_of(question[None], size), size, 1)[0]:
        return "the question has no solution"
    cell = int(np.argmax((question > 0) & (question != answer)))
    place = f"row {cell // size + 1}, column {cell % size + 1}"
    return f"the question has {question[cell]} in {place}, where the answer has {answer[cell]}"


def check_uniqueness(path, lines, questions, size):
    """Raises UserError with file and line of the first question that has a second solution."""
    tasks = [candidates_of(questions[i:i + 2048], size) for i in range(0, len(questions), 2048)]
    progress = Progress(f"checking that {path} is unambiguous", len(questions), "puzzles")
    for counts in in_parallel(functools.partial(count_solutions, size=size, limit=2), tasks):
        for i in np.flatnonzero(counts > 1)[:1]:
            line = lines[progress.done + i]
            raise UserError(f"{path}:{line}: the question has more than one solution")
        progress.add(len(counts))


# Generated puzzles.

def generate(size, n, seed):
    """n distinct minimal puzzles with one solution each: (questions, answers), uint8 [n, cells]."""
    name = f"distinct {size}x{size} puzzles"
    return distinct(name, n, generate_chunk, seed, (512, size), board_keys, "choose")


def generate_chunk(task):
    """Minimal puzzles (questions, answers), uint8 [n, cells]; task: (seed, index, n, size).

    Every clue is tried once, in random order: it is removed unless that allows another digit in its cell.
    """
    seed, index, n, size = task
    rng = np.random.default_rng([seed, index])
    answers = random_grids(n, size, rng)
    boards = candidates_of(answers, size)
    full = np.uint16(2 ** size - 1)
    column = np.arange(n)
    for cell in rng.permuted(np.tile(np.arange(size * size), (n, 1)), axis=1).T:
        clue = boards[cell, column]
        boards[cell, column] = full ^ clue
        boards[cell, column] = np.where(count_solutions(boards, size, 1), clue, full)
    return np.where(boards.T == full, 0, answers).astype(np.uint8), answers


def random_grids(n, size, rng):
    """n random filled boards [n, cells]: fewest candidates first; broken boards start over."""
    full = np.uint16(2 ** size - 1)
    bits = 1 << np.arange(size, dtype=np.uint16)
    boards = np.full((size * size, n), full)
    done = []
    while boards.shape[1]:
        boards, broken, solved, stuck = propagate(boards, size)
        boards[:, broken] = full
        done.append(boards[:, solved])
        boards, stuck = boards[:, ~solved], np.flatnonzero(stuck[~solved])
        num_candidates = np.bitwise_count(boards[:, stuck])
        key = np.where(num_candidates == 1, size + 1, num_candidates)
        cell = np.argmin(key + rng.random(key.shape), axis=0)
        is_candidate = boards[cell, stuck] & bits[:, None] > 0
        digit = np.argmax(is_candidate * rng.random((size, len(stuck))), axis=0)
        boards[cell, stuck] = bits[digit]
    return (np.bitwise_count(np.concatenate(done, axis=1) - 1) + 1).T.astype(np.uint8)


# The solver works on many boards at a time: candidates [cells, n], where bit d - 1 is set while digit d is
# possible in the cell. Numpy is fast on these as long as every operation runs over all n boards.

def count_solutions(candidates, size, limit):
    """Number of solutions of each board [n], counted up to limit; candidates: [cells, n].

    Depth first over many boards at once: where the singles are stuck, a board is split on one of its cells
    with the fewest candidates.
    """
    n = candidates.shape[1]
    counts = np.zeros(n, dtype=np.int64)
    cells = np.arange(size * size, dtype=np.uint16)[:, None]
    waiting = [(candidates, np.arange(n))]
    while waiting:
        boards, owners = waiting.pop()
        if len(owners) > WIDTH:
            waiting += [(boards[:, WIDTH:], owners[WIDTH:]), (boards[:, :WIDTH], owners[:WIDTH])]
            continue
        boards, broken, solved, stuck = propagate(boards, size)
        counts += np.bincount(owners[solved], minlength=n)
        alive = ~broken & ~solved & (counts[owners] < limit)
        split = np.flatnonzero(alive & stuck)
        twins = np.take(boards, split, axis=1)
        # Candidates and cell in one number, whose minimum finds the cell; decided cells wrap around.
        order = (np.bitwise_count(twins) - np.uint8(2)).astype(np.uint16) << 8 | cells
        cell = np.minimum.reduce(order, axis=0) & 0xFF
        column = np.arange(len(split))
        options = twins[cell, column]
        boards[cell, split] = options & -options  # the lowest digit
        twins[cell, column] = options & (options - 1)  # the others
        alive = np.flatnonzero(alive)
        if len(alive):
            boards = np.concatenate([np.take(boards, alive, axis=1), twins], axis=1)
            waiting.append((boards, np.concatenate([owners[alive], owners[split]])))
    return np.minimum(counts, limit)


def propagate(candidates, size):
    """One round of naked and hidden singles: (candidates, broken, solved, stuck), bool [n] the last three.

    broken: no solution; solved: all cells decided; stuck: unchanged by this round.
    """
    axes_of_units = (2, 3), (0, 1), (1, 3)  # of a row, a column, a box
    after = candidates.copy()
    cells = after.reshape(*shape_of(size), -1)  # (bands, rows, stacks, columns, n), a view
    broken = np.zeros(after.shape[1], dtype=bool)
    for axes in axes_of_units:  # a digit placed in a unit leaves the unit's other cells
        placed = cells * (cells & (cells - 1) == 0)
        taken = np.bitwise_or.reduce(placed, axis=axes, keepdims=True)
        twice = taken != np.add.reduce(placed, axis=axes, keepdims=True, dtype=np.uint16)
        broken |= twice.any(axis=(0, 1, 2, 3))
        cells &= ~taken | placed
    for axes in axes_of_units:  # a digit with one cell left in a unit is placed there
        unit = np.moveaxis(cells, axes, (0, 1))
        seen = again = np.uint16(0)
        for i, j in np.ndindex(unit.shape[:2]):
            again = again | seen & unit[i, j]
            seen = seen | unit[i, j]
        broken |= (seen != 2 ** size - 1).any(axis=(0, 1))
        single = cells & np.expand_dims(seen & ~again, axes)
        cells &= single | np.uint16(0xFFFF) * (single == 0)
    unchanged = (after == candidates).all(axis=0) & ~broken
    decided = (after & (after - 1) == 0).all(axis=0)
    return after, broken, unchanged & decided, unchanged & ~decided


def candidates_of(boards, size):
    """Candidates [cells, n] of boards [n, cells]: a clue leaves one, an empty cell all."""
    return np.append(2 ** size - 1, 1 << np.arange(size)).astype(np.uint16)[boards.T]


def shape_of(size):
    """Bands, rows of a band, stacks and columns of a stack."""
    rows, columns = BOXES[size]
    return size // rows, rows, size // columns, columns


# Augmented copies.

def augmented(questions, answers, settings, exclude, counts):
    """Yields token blocks (inputs, labels), uint8 [n, cells]: each puzzle, then its num_aug copies.

    A copy whose question is in exclude (board_keys) is drawn again: counts["copies_replaced"].
    """
    size, copies = settings.size, settings.num_aug
    rng = np.random.default_rng([settings.seed, 2])
    step = max(1, COPIES // (copies + 1))
    for i in range(0, len(questions), step):
        originals = questions[i:i + step], answers[i:i + step]
        new = transform(*originals, copies, size, rng)
        for _ in range(100):
            hits = np.flatnonzero([key in exclude for key in board_keys(new[0])])
            if not hits.size:
                break
            counts["copies_replaced"] += hits.size
            redrawn = (boards[hits // copies] for boards in originals)
            new[0][hits], new[1][hits] = transform(*redrawn, 1, size, rng)
        else:
            raise UserError("all copies of a puzzle are test puzzles: take fewer, or --num_aug=0")
        shape = len(originals[0]), copies, size * size
        groups = [np.concatenate([boards[:, None], array.reshape(shape)], axis=1)
                  for boards, array in zip(originals, new)]
        yield [group.reshape(-1, size * size) + np.uint8(1) for group in groups]


def transform(questions, answers, copies, size, rng):
    """`copies` random symmetric copies of each board: (questions, answers), uint8 [n * copies, cells].

    As the official builder does, it permutes the digits, the bands, the rows of each band, the stacks and
    the columns of each stack; if boxes are square, it transposes half of the boards.
    """
    bands, rows, stacks, columns = shape_of(size)
    n = len(questions) * copies

    def random_order(groups, members):  # [n, size]: of groups, and of the members of each
        outer = rng.permuted(np.tile(np.arange(groups), (n, 1)), axis=1)
        inner = rng.permuted(np.tile(np.arange(members), (n, groups, 1)), axis=2)
        return (outer[:, :, None] * members + inner).reshape(n, size)

    transposed = rng.random(n) < (0.5 if rows == columns else 0)
    stride = np.where(transposed, 1, size)[:, None]
    rows_from = random_order(bands, rows) * stride
    columns_from = random_order(stacks, columns) * (size + 1 - stride)
    cells_from = rows_from[:, :, None] + columns_from[:, None]
    cells_from += (np.arange(n) // copies * size * size)[:, None, None]
    digits = np.zeros((n, size + 1), dtype=np.uint8)
    digits[:, 1:] = rng.permuted(np.tile(np.arange(1, size + 1, dtype=np.uint8), (n, 1)), axis=1)
    marked = answers + 16 * (questions > 0).astype(np.uint8)  # clues keep their mark as they move
    moved = marked.ravel()[cells_from.reshape(n, size * size)]
    new_answers = digits.ravel()[(moved & 15) + (np.arange(n) * (size + 1))[:, None]]
    return new_answers * (moved >> 4), new_answers


if __name__ == "__main__":
    start(main, __file__)
