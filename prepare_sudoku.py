"""Makes a Sudoku dataset: Sudoku-Extreme from the hub, your own CSV files, or generated puzzles.

    python prepare_sudoku.py                              Sudoku-Extreme: 1000 puzzles x 1001
    python prepare_sudoku.py --train_csv=A --test_csv=B   columns question,answer,rating
    python prepare_sudoku.py --source=generate --size=6   minimal 6x6 puzzles

Boards are the official code's tokens [n, cells]: 0 padding, 1 an empty cell, d + 1 the digit d.
"""
import numpy as np

# isort: off
from configurator import UserError, start
from data import Progress
from prepare import (
    check_source, csv_files, distinct, in_parallel, keys_of, name_output, read_puzzles, refuse_existing,
    write_puzzles)
from puzzles import (
    BOXES, SUDOKU, box_shape, candidates_of, count_solutions, propagate, sudoku_task)

# source
source = "hub"  # hub (Sudoku-Extreme from Hugging Face), csv, or generate
train_csv = ""  # training puzzles, .csv or .csv.gz; implies csv
test_csv = ""  # test puzzles
size = 9  # cells of a row: 9, 6 (boxes of 2 rows, 3 columns) or 4
output_dir = ""  # "": a folder under data/ named after these settings
seed = 0  # decides the choice of puzzles, their copies, and generated puzzles
# puzzles from the hub or from CSV files
subsample_size = 1000  # training puzzles, chosen at random; 0: all; every test puzzle is kept
min_difficulty = 0  # lowest rating that is kept, in training and test
check_unique = True  # prove that each kept puzzle has one solution (30 s per 100,000 puzzles and core)
# generated puzzles
num_train = 3000  # training puzzles
num_test = 1000  # test puzzles, the same for each num_train
# augmentation
num_aug = 1000  # augmented copies of each training puzzle, besides itself

HUB = "sapientinc/sudoku-extreme"
EMPTY = 1  # token
COPIES = 16384  # copies made at a time


def main(settings):
    """Makes the dataset that the settings describe and returns its folder. Raises UserError."""
    fill_in(settings)
    refuse_existing(settings.output_dir)

    # the puzzles: [2, n, cells], questions and answers
    if settings.source == "generate":
        counts = {}
        boards = generate(settings.size, settings.num_train + settings.num_test, settings.seed)
        test = boards[:, :settings.num_test]  # the same for each num_train
        train = boards[:, settings.num_test:]
    else:
        train_csv, test_csv = csv_files(settings, HUB)
        test, test_rows, _ = choose(test_csv, settings, 0, set())
        test_keys = set(keys_of(test[0]))
        train, train_rows, in_test = choose(train_csv, settings, settings.subsample_size, test_keys)
        counts = {
            "test_rows": test_rows,
            "train_rows": train_rows,
            "train_rows_in_test": in_test,
        }

    # and the copies
    test_keys = set(keys_of(test[0]))
    blocks = augmented(train, settings, test_keys, counts)
    task = sudoku_task(settings.size)
    group_size = settings.num_aug + 1
    write_puzzles(settings, __file__, task, blocks, len(train[0]), test, group_size, counts)
    return settings.output_dir


def fill_in(settings):
    """Fills in source and output_dir. Raises UserError for a wrong setting."""
    check_source(settings, subsample_size=0, num_aug=0, seed=0, num_train=1, num_test=1)
    if settings.source == "hub" and settings.size != 9:
        raise UserError(f"size must be 9 for the hub, not {settings.size}")
    if settings.size not in BOXES:
        raise UserError(f"size must be 4, 6 or 9, not {settings.size}")

    # the name of the folder
    options = []
    if settings.num_aug:
        options.append(f"aug-{settings.num_aug}")
    if settings.source == "generate":
        num_puzzles = settings.num_train
    else:
        num_puzzles = settings.subsample_size
        if settings.min_difficulty:
            options.append(f"min-{settings.min_difficulty}")
    source_names = {"hub": "sudoku-extreme", "generate": f"sudoku-{settings.size}x{settings.size}"}
    settings.output_dir = name_output(settings, source_names, num_puzzles, options)


# ---------------------------------------------------------------------------------------------------------
# Puzzles from CSV files

def choose(path, settings, n, test_keys):
    """Returns random puzzles of a CSV file, [2, n, cells], in the file's order.

    Args:
        path: the file.
        settings: puzzles must be rated min_difficulty or more; check_unique.
        n: puzzles to choose; 0: all.
        test_keys: set of keys_of questions that are left out.

    Returns also the numbers of rows read and of those left out. Raises UserError with a line.
    """
    digits = SUDOKU[2:settings.size + 2]
    table = {ord(symbol): token for token, symbol in enumerate(SUDOKU)}
    table[ord("0")] = EMPTY
    alphabets = ".0" + digits, digits  # the symbols of questions and of answers
    columns = read_puzzles(
        path, settings.size ** 2, lambda *_: sudoku_task(settings.size), alphabets, table, "rating")
    questions, answers, ratings, lines = columns

    # the puzzles that are hard enough, and not in the test set
    is_hard = []
    for rating, line in zip(ratings, lines):
        try:
            is_hard.append(int(rating) >= settings.min_difficulty)
        except ValueError:
            raise UserError(f"{path}:{line}: the rating {str(rating)!r} is not an integer") from None
    in_test = np.array([key in test_keys for key in keys_of(questions)])
    usable = np.flatnonzero(is_hard & ~in_test)
    num_in_test = int(np.sum(is_hard & in_test))
    if not usable.size:
        raise UserError(f"{path}: no puzzle is left of {len(lines)} rows: {num_in_test} are in the test set "
                        f"too, the others are rated below min_difficulty={settings.min_difficulty}")

    # n of them at random, in the file's order
    if n:
        rng = np.random.default_rng([settings.seed, 1])
        order = rng.random(len(usable)).argsort()
        usable = usable[np.sort(order[:n])]
    if settings.check_unique:
        check_uniqueness(path, lines[usable], questions[usable], settings.size)
    chosen = np.array([questions[usable], answers[usable]])
    return chosen, len(lines), num_in_test


def check_uniqueness(path, lines, questions, size):
    """Raises UserError with file and line of the first question that has a second solution."""
    progress = Progress(f"checking that {path} is unambiguous", len(questions))
    tasks = []
    for first in range(0, len(questions), 2048):
        candidates = candidates_of(questions[first:first + 2048], size)
        tasks.append((candidates, size, 2))

    for counts in in_parallel(count_solutions, tasks):
        if counts.max() > 1:
            line = lines[progress.done + counts.argmax()]
            raise UserError(f"{path}:{line}: the question has more than one solution")
        progress.add(len(counts))


# ---------------------------------------------------------------------------------------------------------
# Generated puzzles

def generate(size, n, seed):
    """Returns n distinct minimal puzzles with one solution each, questions and answers [2, n, cells]."""
    name = f"distinct {size}x{size} puzzles"
    return distinct(name, n, generate_chunk, (seed, 512, size), keys_of)


def generate_chunk(index, seed, n, size):
    """Returns n minimal puzzles (questions, answers), uint8 [n, cells], which depend on seed and index.

    It tries every clue once, in random order, and removes it unless that allows another digit in its cell.
    """
    rng = np.random.default_rng([seed, index])
    answers = random_grids(n, size, rng)
    boards = candidates_of(answers, size)
    all_digits = np.uint16(2 ** size - 1)
    column = np.arange(n)
    cells = np.tile(np.arange(size * size), (n, 1))
    for cell in rng.permuted(cells, axis=1).T:
        clue = boards[cell, column]
        boards[cell, column] = all_digits ^ clue
        needed = count_solutions(boards, size, 1)
        boards[cell, column] = np.where(needed, clue, all_digits)
    is_empty = boards.T == all_digits
    return np.where(is_empty, np.uint8(EMPTY), answers), answers


def random_grids(n, size, rng):
    """Returns n random filled boards [n, cells].

    A random digit in a random cell of those with the fewest candidates, again and again; broken boards start
    over.
    """
    all_digits = np.uint16(2 ** size - 1)
    bits = 1 << np.arange(size, dtype=np.uint16)
    boards = np.full((size * size, n), all_digits)
    done = []
    while boards.shape[1]:
        boards, broken, solved, stuck = propagate(boards, size)
        boards[:, broken] = all_digits
        done.append(boards[:, solved])
        boards = boards[:, ~solved]
        stuck = np.flatnonzero(stuck[~solved])

        key = np.bitwise_count(boards[:, stuck])
        key[key == 1] = size + 1  # decided cells come last
        cell = np.argmin(key + rng.random(key.shape), axis=0)
        is_candidate = boards[cell, stuck] & bits[:, None] > 0
        digit = np.argmax(is_candidate * rng.random((size, len(stuck))), axis=0)
        boards[cell, stuck] = bits[digit]
    filled = np.concatenate(done, axis=1).T
    return np.bitwise_count(filled - 1).astype(np.uint8) + np.uint8(2)  # bit d - 1 is token d + 1


# ---------------------------------------------------------------------------------------------------------
# Augmented copies

def augmented(puzzles, settings, test_keys, counts):
    """Yields blocks [2, n, cells], inputs and labels: each puzzle, then its num_aug copies.

    A copy whose question is in test_keys (keys_of) is drawn again: counts["copies_replaced"].
    """
    counts["copies_replaced"] = 0
    copies = settings.num_aug
    rng = np.random.default_rng([settings.seed, 2])
    block_size = max(1, COPIES // (copies + 1))
    for first in range(0, puzzles.shape[1], block_size):
        originals = puzzles[:, first:first + block_size]
        new = transform(originals, copies, settings.size, rng)

        # no copy of a training puzzle is a test puzzle
        for _ in range(100):
            hits = np.flatnonzero([key in test_keys for key in keys_of(new[0])])
            if not hits.size:
                break
            counts["copies_replaced"] += hits.size
            repeated = originals[:, hits // copies]
            new[:, hits] = transform(repeated, 1, settings.size, rng)
        else:
            raise UserError("all copies of a puzzle are test puzzles: take fewer, or --num_aug=0")

        # each puzzle before its copies
        _, n, cells = originals.shape
        new = new.reshape(2, n, copies, cells)
        groups = np.concatenate([originals[:, :, None], new], axis=2)
        yield groups.reshape(2, -1, cells)


def transform(boards, copies, size, rng):
    """Returns `copies` random symmetric copies of each puzzle [2, n, cells], as [2, n * copies, cells].

    As the official builder does, it permutes the digits, the bands, the rows of each band, the stacks and
    the columns of each stack; if boxes are square, it transposes half of the boards.
    """
    bands, rows, stacks, columns = box_shape(size)
    n = boards.shape[1] * copies

    def random_order(groups, members):  # [n, size]: of groups, and of the members of each
        outer = np.tile(np.arange(groups), (n, 1))
        outer = rng.permuted(outer, axis=1)
        inner = np.tile(np.arange(members), (n, groups, 1))
        inner = rng.permuted(inner, axis=2)
        return (outer[:, :, None] * members + inner).reshape(n, size)

    # the cell that each cell of a copy comes from
    transposed = rng.random(n) < (0.5 if rows == columns else 0)
    row_stride = np.where(transposed, 1, size)[:, None]
    column_stride = size + 1 - row_stride
    rows_from = random_order(bands, rows) * row_stride
    columns_from = random_order(stacks, columns) * column_stride
    cells_from = rows_from[:, :, None] + columns_from[:, None]
    cells_from = cells_from.reshape(n, size * size)

    # and what its token becomes
    digits = np.arange(2, size + 2, dtype=np.uint8)
    digits = np.tile(digits, (n, 1))
    digits = rng.permuted(digits, axis=1)
    tokens = np.pad(digits, [(0, 0), (2, 0)], constant_values=EMPTY)
    copy = np.arange(n)[:, None]
    board_from = copy // max(copies, 1)
    return tokens[copy, boards[:, board_from, cells_from]]


if __name__ == "__main__":
    start(main, __file__)
