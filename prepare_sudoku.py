"""Makes a Sudoku data set: Sudoku-Extreme from the hub, your own CSV files, or generated puzzles.

    python prepare_sudoku.py                                              Sudoku-Extreme, 1000 puzzles x 1001 copies
    python prepare_sudoku.py --train_csv=train.csv --test_csv=test.csv    columns source,question,answer,rating
    python prepare_sudoku.py --source=generate --size=6                   minimal 6x6 puzzles, made on the spot

Tokens are the official code's: 0 padding, 1 an empty cell, d + 1 the digit d. Boards are digits [n, cells], 0 an empty cell.
"""
import itertools
import os
import time

import numpy as np

from configurator import UserError, start
from data import Progress, check_source, contains, cores, download, hash_boards, hub_url, in_parallel, read_csv, refuse_existing, write_dataset

# source
source = "hub"  # hub (Sudoku-Extreme from Hugging Face), csv, or generate
train_csv = ""  # training puzzles, .csv or .csv.gz; implies csv
test_csv = ""  # test puzzles
size = 9  # cells of a row: 9, 6 (boxes of 2 rows, 3 columns) or 4
output_dir = ""  # "": a folder under data/ named after these settings
seed = 0  # of the choice of puzzles, their copies, and the puzzles generated
# puzzles from the hub or from CSV files
subsample_size = 1000  # training puzzles chosen at random; 0: all; every test puzzle is kept
min_difficulty = 0  # lowest rating kept, in training and test
check_unique = True  # prove by search that each kept puzzle has one solution (30 s per 100,000 and core)
# puzzles generated
num_train = 3000  # training puzzles
num_test = 1000  # test puzzles
# copies
num_aug = 1000  # augmented copies of each training puzzle, besides itself
# ---

BOXES = {4: (2, 2), 6: (2, 3), 9: (3, 3)}  # rows and columns of a box
HUB = "sapientinc/sudoku-extreme"
CHUNK = 16384  # copies at a time
WIDTH = 4096  # boards in the solver at a time: as many as stay in the processor's cache


# The solver. Many boards at a time: candidates [cells, n], bit d - 1 of a cell is set while digit d is possible there. Numpy is
# fast on these as long as every operation runs over the n boards and none chooses among them.

def units(size):
    """Shape of the cells as [bands, rows of a band, stacks, columns of a stack], and the axes within a row, column and box."""
    rows, columns = BOXES[size]
    return (size // rows, rows, size // columns, columns), ((2, 3), (0, 1), (1, 3))


def propagate(candidates, size):
    """One round of naked and hidden singles: the candidates after it, and which boards [n] are broken, solved, or stuck (unchanged)."""
    shape, within = units(size)
    after = candidates.copy()
    cells = after.reshape(*shape, -1)  # (bands, rows, stacks, columns, n), a view
    broken = np.zeros(after.shape[1], dtype=bool)
    for axes in within:  # a digit placed in a unit goes from the unit's other cells
        placed = cells * (cells & (cells - 1) == 0)
        taken = np.bitwise_or.reduce(placed, axis=axes, keepdims=True)
        twice = taken != np.add.reduce(placed, axis=axes, keepdims=True, dtype=np.uint16)
        broken |= twice.any(axis=(0, 1, 2, 3))
        cells &= ~taken | placed
    for axes in within:  # a digit with one cell left in a unit is placed there
        unit = np.moveaxis(cells, axes, (0, 1))
        seen = again = np.uint16(0)
        for i, j in np.ndindex(unit.shape[:2]):
            again = again | seen & unit[i, j]
            seen = seen | unit[i, j]
        broken |= (seen != 2 ** size - 1).any(axis=(0, 1))
        single = cells & np.expand_dims(seen & ~again, axes)
        cells &= single | np.uint16(0xFFFF) * (single == 0)
    still = (after == candidates).all(axis=0) & ~broken
    decided = (after & (after - 1) == 0).all(axis=0)
    return after, broken, still & decided, still & ~decided


def count_solutions(candidates, size, limit):
    """Number of solutions of each board [n], counted up to limit; candidates: [cells, n].

    Depth first over many boards at once: where the singles are stuck, a board is split on one of its cells with the fewest
    candidates.
    """
    n = candidates.shape[1]
    counts, owners = np.zeros(n, dtype=np.int64), np.arange(n)
    cells = np.arange(size * size, dtype=np.uint16)[:, None]
    waiting = [(candidates[:, i:i + WIDTH], owners[i:i + WIDTH]) for i in range(0, n, WIDTH)]
    boards, owners = candidates[:, :0], owners[:0]
    while waiting or len(owners):
        while waiting and len(owners) <= WIDTH // 2:
            more, whose = waiting.pop()
            boards, owners = np.concatenate([boards, more], axis=1), np.concatenate([owners, whose])
        boards, broken, solved, stuck = propagate(boards, size)
        counts += np.bincount(owners[solved], minlength=n)
        alive = ~broken & ~solved & (counts[owners] < limit)
        split = np.flatnonzero(alive & stuck)
        twins = np.take(boards, split, axis=1)
        # (candidates, cell) in one number, so that the minimum finds the cell; cells that are decided come last.
        order = (np.bitwise_count(twins).astype(np.uint16) << 8 | cells) + np.uint16(0x8000) * (twins & (twins - 1) == 0)
        cell, column = np.minimum.reduce(order, axis=0) & 0xFF, np.arange(len(split))
        options = twins[cell, column]
        boards[cell, split] = options & -options  # the lowest digit
        twins[cell, column] = options & (options - 1)  # the others
        alive = np.flatnonzero(alive)
        boards = np.concatenate([np.take(boards, alive, axis=1), twins], axis=1)
        owners = np.concatenate([owners[alive], owners[split]])
        if len(owners) > WIDTH:
            waiting.append((boards[:, WIDTH:], owners[WIDTH:]))
            boards, owners = boards[:, :WIDTH], owners[:WIDTH]
    return np.minimum(counts, limit)


def candidates_of(boards, size):
    """Candidates [cells, n] of boards [n, cells]: a clue leaves one, an empty cell all."""
    return np.append(2 ** size - 1, 1 << np.arange(size)).astype(np.uint16)[boards.T]


# Generated puzzles.

def random_grids(n, size, rng):
    """n filled boards [n, cells]: digits go into random cells with the fewest candidates; a board that breaks starts anew."""
    full = np.uint16(2 ** size - 1)
    bits = 1 << np.arange(size, dtype=np.uint16)
    boards, done = np.full((size * size, n), full), []
    while boards.shape[1]:
        boards, broken, solved, stuck = propagate(boards, size)
        boards[:, broken] = full
        done.append(boards[:, solved])
        boards, stuck = boards[:, ~solved], np.flatnonzero(stuck[~solved])
        left = np.bitwise_count(boards[:, stuck])
        cell = np.argmin(np.where(left == 1, size + 1, left) + rng.random(left.shape), axis=0)
        digit = np.argmax((boards[cell, stuck] & bits[:, None] > 0) * rng.random((size, len(stuck))), axis=0)
        boards[cell, stuck] = bits[digit]
    return (np.bitwise_count(np.concatenate(done, axis=1) - 1) + 1).T.astype(np.uint8)


def generate_chunk(task):
    """Minimal puzzles: task is (seed, index, n, size); returns (questions, answers), both [n, cells].

    Every clue of every board is tried once in random order: it goes where no solution has another digit in its cell.
    """
    seed, index, n, size = task
    rng = np.random.default_rng([seed, index])
    answers = random_grids(n, size, rng)
    boards, full = candidates_of(answers, size), np.uint16(2 ** size - 1)
    column = np.arange(n)
    for cell in rng.permuted(np.tile(np.arange(size * size), (n, 1)), axis=1).T:
        clue = boards[cell, column]
        boards[cell, column] = full ^ clue
        boards[cell, column] = np.where(count_solutions(boards, size, 1), clue, full)
    return np.where(boards.T == full, 0, answers).astype(np.uint8), answers


def generate(size, n, seed, processes):
    """n distinct minimal puzzles with one solution each: (questions, answers), uint8 [n, cells]; the same for any processes.

    Raises UserError where so many cannot be found (there are 85,632 of 4x4, which repeat in other digits and places).
    """
    boards, chunk, chunks = np.zeros((0, 2, size * size), dtype=np.uint8), 512, 0
    with Progress(f"generating {size}x{size} puzzles", n) as progress:
        while len(boards) < n:
            tasks = [(seed, chunks + i, chunk, size) for i in range(-(-(n - len(boards)) // chunk))]
            found = [boards]
            for pair in in_parallel(generate_chunk, tasks, processes):
                found.append(np.stack(pair, axis=1))
                progress.add(min(chunk, n - progress.done))
            before, boards, chunks = len(boards), np.concatenate(found), chunks + len(tasks)
            boards = boards[np.sort(np.unique(hash_boards(boards[:, 0]), return_index=True)[1])]  # the first of each, in order
            progress.done = min(len(boards), n)
            if len(boards) - before < len(tasks) * chunk // 100:
                raise UserError(f"hardly more than {len(boards)} distinct {size}x{size} puzzles can be found: choose fewer than {n}")
    return boards[:n, 0], boards[:n, 1]


# Puzzles from CSV files.

def board_fault(question, answer, size):
    """Which rule of Sudoku a question and its answer, [cells] each, break together, in words."""
    rows, columns = BOXES[size]
    row, column = np.divmod(np.arange(size * size), size)
    for name, board in (("question", question), ("answer", answer)):
        for kind, unit in (("row", row), ("column", column), ("box", row // rows * rows + column // columns)):
            for i, digit in itertools.product(range(size), range(1, size + 1)):
                if (board[unit == i] == digit).sum() > 1:
                    return f"the {name} has digit {digit} twice in {kind} {i + 1}"
    if not count_solutions(candidates_of(question[None], size), size, 1)[0]:
        return "the question has no solution"
    cell = int(np.argmax((question > 0) & (question != answer)))
    return f"the question has {question[cell]} in row {row[cell] + 1}, column {column[cell] + 1} where the answer has {answer[cell]}"


def sound(questions, answers, size):
    """Which boards [n] have an answer that keeps the rules and agrees with the clues; questions, answers: [n, cells]."""
    shape, within = units(size)
    cells = candidates_of(answers, size).reshape(*shape, -1)
    keep = ((questions == 0) | (questions == answers)).all(axis=1)
    for axes in within:
        keep &= (np.bitwise_or.reduce(cells, axis=axes) == 2 ** size - 1).all(axis=(0, 1))
    return keep


def choose(path, settings, n, exclude):
    """Puzzles of a CSV file: n at random (0: all) of those that are rated min_difficulty or more and whose hash is not in exclude.

    exclude: sorted hashes of questions. Returns (lines, questions, answers) in the file's order and the numbers of rows read and
    rows excluded; holds no more than these and a block in memory. Raises UserError with file and line for the first wrong row.
    """
    size, rng = settings.size, np.random.default_rng([settings.seed, 1])
    digits = {str(digit): digit for digit in range(1, size + 1)}
    chosen, read, excluded = [], 0, 0
    for lines, questions, answers, ratings in read_csv(path, size * size, {".": 0, "0": 0} | digits, digits):
        good = sound(questions, answers, size)
        if not good.all():
            i = int(np.argmin(good))
            raise UserError(f"{path}:{lines[i]}: {board_fault(questions[i], answers[i], size)}")
        rated, out = ratings >= settings.min_difficulty, contains(exclude, hash_boards(questions))
        read, excluded, take = read + len(lines), excluded + int((rated & out).sum()), rated & ~out
        chosen.append((rng.random(int(take.sum())), lines[take], questions[take], answers[take]))
        if n:  # the n smallest of random keys are a uniform choice, before it is known how many rows there are
            parts = [np.concatenate(part) for part in zip(*chosen)]
            smallest = np.sort(np.argpartition(parts[0], n)[:n]) if len(parts[0]) > n else slice(None)
            chosen = [tuple(part[smallest] for part in parts)]
    _, *puzzles = [np.concatenate(part) for part in zip(*chosen)]
    if not len(puzzles[0]):
        raise UserError(f"{path}: no puzzle is left of {read} rows: {excluded} are in the test set too, the others are rated below "
                        f"min_difficulty={settings.min_difficulty}")
    return puzzles, read, excluded


def check_uniqueness(path, lines, questions, size, processes):
    """Raises UserError with file and line of the first question that has a second solution."""
    tasks = [(questions[i:i + 2048], size) for i in range(0, len(questions), 2048)]
    with Progress(f"proving {path} unambiguous", len(questions), "puzzles") as progress:
        for (boards, _), ambiguous in zip(tasks, in_parallel(ambiguous_chunk, tasks, processes)):
            if ambiguous.any():
                raise UserError(f"{path}:{lines[progress.done + int(np.argmax(ambiguous))]}: the question has more than one solution")
            progress.add(len(boards))


def ambiguous_chunk(task):
    questions, size = task
    return count_solutions(candidates_of(questions, size), size, 2) > 1


# Copies.

def transform(questions, answers, copies, size, rng):
    """`copies` random symmetric copies of each board: (questions, answers), uint8 [n * copies, cells], a board's copies together.

    The symmetries are those of the official builder: the digits, the bands, the rows of each band, the stacks and the columns
    of each stack are permuted, and where boxes are square the board is transposed half of the time.
    """
    (bands, rows, stacks, columns), _ = units(size)
    n = len(questions) * copies

    def order(groups, members):  # [n, size]: the group's order, and the members' within each
        outer = rng.permuted(np.tile(np.arange(groups), (n, 1)), axis=1)
        inner = rng.permuted(np.tile(np.arange(members), (n, groups, 1)), axis=2)
        return (outer[:, :, None] * members + inner).reshape(n, size)

    stride = np.where(rng.random(n) < (0.5 if rows == columns else 0), 1, size)[:, None]  # 1: transposed
    place = (order(bands, rows) * stride)[:, :, None] + (order(stacks, columns) * (size + 1 - stride))[:, None]
    place += (np.arange(n) // copies * size * size)[:, None, None]
    digit = np.zeros((n, size + 1), dtype=np.uint8)
    digit[:, 1:] = rng.permuted(np.tile(np.arange(1, size + 1, dtype=np.uint8), (n, 1)), axis=1)
    moved = (answers + 16 * (questions > 0).astype(np.uint8)).ravel()[place.reshape(n, size * size)]  # the clues' mark moves along
    new_answers = digit.ravel()[(moved & 15) + (np.arange(n) * (size + 1))[:, None]]
    return new_answers * (moved >> 4), new_answers


def augmented(questions, answers, settings, exclude, counts):
    """Yields token blocks (inputs, labels), uint8 [n, cells]: each puzzle, followed by its num_aug copies.

    A copy whose question is in exclude (sorted hashes) is drawn again; counts["copies_replaced"] tells how many were.
    """
    rng, size, copies = np.random.default_rng([settings.seed, 2]), settings.size, settings.num_aug
    each = max(1, CHUNK // (copies + 1))
    with Progress("writing training examples", len(questions) * (copies + 1)) as progress:
        for i in range(0, len(questions), each):
            originals = questions[i:i + each], answers[i:i + each]
            new = transform(*originals, copies, size, rng)
            for _ in range(100):
                hits = np.flatnonzero(contains(exclude, hash_boards(new[0])))
                if not hits.size:
                    break
                counts["copies_replaced"] += hits.size
                for array, redrawn in zip(new, transform(*(board[hits // copies] for board in originals), 1, size, rng)):
                    array[hits] = redrawn
            else:
                raise UserError("a training puzzle's copies are all in the test set: choose fewer test puzzles or --num_aug=0")
            shape = len(originals[0]), copies, size * size
            yield [np.concatenate([board[:, None], array.reshape(shape)], axis=1).reshape(-1, size * size) + np.uint8(1)
                   for board, array in zip(originals, new)]
            progress.add(shape[0] * (copies + 1))


# The whole.

def complete(settings):
    """The settings with what follows from them filled in: the source and the output folder. Raises UserError for a wrong one."""
    s = check_source(settings, subsample_size=0, num_aug=0, seed=0, num_train=1, num_test=1)
    if s.size not in BOXES or (s.source == "hub" and s.size != 9):
        raise UserError(f"size must be {'9 for the hub' if s.source == 'hub' else '4, 6 or 9'}, not {s.size}")
    if not s.output_dir:
        count = s.num_train if s.source == "generate" else s.subsample_size
        short = "full" if not count else f"{count // 1000}k" if count % 1000 == 0 else str(count)
        stem = os.path.basename(s.train_csv).split(".")[0]
        name = {"hub": "sudoku-extreme", "csv": stem, "generate": f"sudoku-{s.size}x{s.size}"}[s.source]
        extra = [("aug", s.num_aug), ("min", s.min_difficulty if s.source != "generate" else 0), ("seed", s.seed)]
        s.output_dir = f"data/{name}-{short}" + "".join(f"-{key}-{value}" for key, value in extra if value)
    return s


def prepare(settings):
    """Makes the data set that the settings (a namespace of all of them) describe and returns its folder.

    Raises UserError for a wrong setting, a wrong row of a file, or where the folder exists.
    """
    s, begun = complete(settings), time.monotonic()
    refuse_existing(s.output_dir)
    counts = {}
    if s.source == "generate":
        boards = generate(s.size, s.num_train + s.num_test, s.seed, cores())
        train, test = [board[:s.num_train] for board in boards], [board[s.num_train:] for board in boards]
        exclude = np.sort(hash_boards(test[0]))
    else:
        train_csv, test_csv = s.train_csv, s.test_csv
        if s.source == "hub":
            train_csv, test_csv = (f"data/downloads/sudoku-extreme/{split}.csv" for split in ("train", "test"))
            for path in (train_csv, test_csv):
                download(hub_url(HUB, os.path.basename(path)), path)
        (test_lines, *test), counts["test_rows"], _ = choose(test_csv, s, 0, np.zeros(0, dtype=np.uint64))
        exclude = np.sort(hash_boards(test[0]))
        (train_lines, *train), counts["train_rows"], counts["train_rows_in_test"] = choose(train_csv, s, s.subsample_size, exclude)
        if s.check_unique:
            check_uniqueness(train_csv, train_lines, train[0], s.size, cores())
            check_uniqueness(test_csv, test_lines, test[0], s.size, cores())
        print(f"{train_csv}: {counts['train_rows']:,} rows, {counts['train_rows_in_test']:,} dropped that the test set has too")
    counts.update(train_puzzles=len(train[0]), test_puzzles=len(test[0]), copies_replaced=0)
    write_dataset(s.output_dir, {
        "train": (len(train[0]), s.num_aug + 1, augmented(*train, s, exclude, counts)),
        "test": (len(test[0]), 1, [(test[0] + np.uint8(1), test[1] + np.uint8(1))]),
    }, vocab_size=s.size + 2, manifest={
        "kind": "sudoku", "source": s.source, "seed": s.seed, "settings": vars(s), "counts": counts,
        "grid": [s.size, s.size], "box": list(BOXES[s.size]), "symbols": " .123456789"[:s.size + 2]})
    print(f"train: {len(train[0]):,} puzzles, {s.num_aug:,} copies of each ({counts['copies_replaced']:,} replaced that the test set has)")
    print(f"test: {len(test[0]):,} puzzles")
    print(f"{s.output_dir} made in {time.monotonic() - begun:.0f} s; train on it with: python train.py --data_path={s.output_dir}")
    return s.output_dir


def main(settings):
    prepare(settings)


if __name__ == "__main__":
    start(main, __file__)
