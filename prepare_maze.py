"""Makes a maze data set: Maze-Hard from the hub, your own CSV files, or generated mazes.

    python prepare_maze.py                                                Maze-Hard, 1000 mazes x 8 dihedral copies
    python prepare_maze.py --train_csv=train.csv --test_csv=test.csv      columns source,question,answer,rating
    python prepare_maze.py --source=generate --size=30 --min_path=111     mazes like Maze-Hard's, made on the spot

A maze is a square of the characters "# SGo": wall, open, start, goal, path; row after row. The answer is the question with the
open cells of one shortest path from S to G as "o"; steps go up, down, left and right. Tokens are the official code's: 0 padding,
1 to 5 these characters.
"""
import math
import os
import time

import numpy as np

from configurator import UserError, start
from data import (GOAL, OPEN, PATH, START, WALL, Progress, check_source, contains, cores, download, hash_boards, hub_url, in_parallel,
                  path_metrics, read_csv, refuse_existing, write_dataset)

# source
source = "hub"  # hub (Maze-Hard from Hugging Face), csv, or generate
train_csv = ""  # training mazes, .csv or .csv.gz; implies csv
test_csv = ""  # test mazes
output_dir = ""  # "": a folder under data/ named after these settings
seed = 0  # of the choice of mazes and the mazes generated
# mazes from the hub or from CSV files
subsample_size = 0  # training mazes chosen at random; 0: all; every test maze is kept
check_paths = True  # refuse a file with an answer that is not a shortest path
# mazes generated
size = 30  # cells of a row
min_path = 111  # steps of the shortest path at least
num_train = 1000  # training mazes
num_test = 1000  # test mazes
# copies
aug = True  # training mazes in all 8 rotations and reflections (the official builder leaves them out by default)
# ---

HUB = "sapientinc/maze-30x30-hard-1k"
SYMBOLS = "# SGo"
CHUNK = 4096  # grids at a time
WALLS = 0.3, 0.5  # share of a generated grid's cells
LARGEST = 64  # cells of a row: the bits of a word


# The solver. Many mazes at a time: sets of cells as bits [rows, n], a word for each row of each maze.

def pack(cells, size):
    """Bits [rows, n] of bool [n, cells]."""
    width = 32 if size <= 32 else 64
    padded = np.zeros((len(cells), size, width), dtype=bool)
    padded[:, :, :size] = cells.reshape(len(cells), size, size)
    return np.ascontiguousarray(np.packbits(padded, axis=2, bitorder="little").view(f"<u{width // 8}")[:, :, 0].T)


def unpack(bits):
    """Bool [n, cells] of bits [rows, n]."""
    words = np.ascontiguousarray(bits.T)[:, :, None].view(np.uint8)
    return np.unpackbits(words, axis=2, count=len(bits), bitorder="little").reshape(len(words), len(bits) ** 2).astype(bool)


def neighbours(bits):
    """The cells below, left, right and above of those of a set; those beyond the right edge are bits that no open cell has."""
    nothing = np.zeros_like(bits[:1])
    return np.concatenate([nothing, bits[:-1]]), bits >> 1, bits << 1, np.concatenate([bits[1:], nothing])


def layers_from(start, open_cells):
    """Yields the sets of cells that are 0, 1, 2, ... steps from start, up to the farthest of any maze; sets: bits [rows, n]."""
    unseen, layer = open_cells & ~start, start
    while True:
        yield layer
        layer = np.bitwise_or.reduce(neighbours(layer)) & unseen
        if not layer.any():
            return
        unseen &= ~layer


def solve(questions, size):
    """The answers, tokens [n, cells], and the steps [n] of their shortest paths, 0 where there is none; questions: tokens [n, cells].

    Of several shortest paths it is the one that goes down where it can, else left, else right, else up, seen from S: all labels of
    Maze-Hard are so, and a model can only learn to meet them exactly if there is a rule.
    """
    start = pack(questions == START, size)
    layers = list(layers_from(pack(questions == GOAL, size), pack(questions != WALL, size)))
    steps = sum(step * (layer & start > 0).any(axis=0) for step, layer in enumerate(layers))
    at, way = np.zeros_like(start), np.zeros_like(start)
    for step in range(len(layers) - 2, 0, -1):
        down, left, right, up = (cells & layers[step] for cells in neighbours(np.where(steps == step + 1, start, at)))
        at = np.where(down.any(axis=0), down, np.where(left.any(axis=0), left, np.where(right.any(axis=0), right, up)))
        way |= at
    return np.where(unpack(way), np.uint8(PATH), questions), steps


# Generated mazes.

def pick(bits, rng):
    """One random cell of each set [rows, n], as bits; none of an empty set."""
    cells = unpack(bits)
    chosen = np.zeros_like(cells)
    chosen[np.arange(len(cells)), (cells * (1 - rng.random(cells.shape, dtype=np.float32))).argmax(axis=1)] = True
    return pack(chosen & cells, len(bits))


def generate_chunk(task):
    """The questions, tokens [n, cells], found among CHUNK random grids; task: (seed, index, size, min_path).

    The way of Lehnert et al. (arXiv 2402.14083), which Maze-Hard's authors name as theirs: 30 to 50% of the cells, anywhere, are
    walls, and what has no long path is dropped. To drop less, one end is the cell farthest from a random one, and the other
    any cell that is min_path steps away or more.
    """
    seed, index, size, min_path = task
    rng = np.random.default_rng([seed, index])
    cells = rng.random((CHUNK, size * size), dtype=np.float32) >= rng.uniform(*WALLS, (CHUNK, 1))
    somewhere = np.zeros_like(cells)
    somewhere[np.arange(CHUNK), rng.integers(size * size, size=CHUNK)] = True
    cells = pack(cells | somewhere, size)
    layers = np.stack(list(layers_from(pack(somewhere, size), cells)))
    farthest = layers.any(axis=1).sum(axis=0) - 1
    keep = np.flatnonzero(2 * farthest >= min_path)  # no two cells are farther apart than twice that
    cells, one = cells[:, keep], pick(layers[farthest[keep], :, keep].T, rng)
    other = pick(np.bitwise_or.reduce(np.stack(list(layers_from(one, cells)))[min_path:], axis=0), rng)
    keep = other.any(axis=0)
    swap = rng.random(len(keep)) < 0.5
    questions = np.where(unpack(cells), OPEN, WALL).astype(np.uint8)
    questions[unpack(np.where(swap, one, other))], questions[unpack(np.where(swap, other, one))] = START, GOAL
    return questions[keep]


def generate(size, n, seed, min_path, processes):
    """n questions, tokens [n, cells], no two alike even when turned or reflected; the same for any number of processes.

    Raises UserError where so many cannot be found.
    """
    found, chunks = {}, 0  # by hash, in order
    with Progress(f"generating {size}x{size} mazes", n) as progress:
        while len(found) < n:
            before, tasks = len(found), [(seed, chunks + i, size, min_path) for i in range(max(16, chunks))]
            for questions in in_parallel(generate_chunk, tasks, processes):
                for key, question in zip(dihedral_hash(questions).tolist(), questions):
                    found.setdefault(key, question)
                progress.add(min(n, len(found)) - progress.done)
                if len(found) >= n:
                    break
            chunks += len(tasks)
            if len(found) < min(n, before + len(tasks) // 8):
                raise UserError(f"hardly more than {len(found)} {size}x{size} mazes whose shortest path has {min_path} steps or more can be "
                                f"found: choose a lower min_path or fewer than {n}")
    return np.array(list(found.values())[:n])


def wrong_answers(questions, answers, size):
    """Which answers are not a shortest path of their questions, bool [n]; tokens [n, cells]."""
    wrong = []
    for i in range(0, len(questions), CHUNK):
        question, answer = questions[i:i + CHUNK], answers[i:i + CHUNK]
        valid, _ = path_metrics(question, answer, answer, (size, size))
        drawn = answer == PATH
        wrong.append(~valid | ((question != answer) & ~drawn).any(axis=1) | (drawn.sum(axis=1) + 1 != solve(question, size)[1]))
    return np.concatenate(wrong)


# Mazes from CSV files.

def maze_fault(question, answer, size):
    """Why an answer is no shortest path of its question, tokens [cells] each, in words."""
    for token in (START, GOAL):
        if (question == token).sum() != 1:
            return f"the question has {(question == token).sum()} cells {SYMBOLS[token - 1]}, not 1"
    differs = (question != answer) & ((question != OPEN) | (answer != PATH))
    if differs.any():
        row, column = divmod(int(differs.argmax()), size)
        return (f"the answer has {SYMBOLS[answer[differs][0] - 1]!r} in row {row + 1}, column {column + 1} where the question has "
                f"{SYMBOLS[question[differs][0] - 1]!r}")
    length, drawn = int(solve(question[None], size)[1][0]), int((answer == PATH).sum()) + 1
    if not length:
        return "the question has no way from S to G"
    if not path_metrics(question[None], answer[None], answer[None], (size, size))[0][0]:
        return "the answer's o do not make one line from S to G that touches itself nowhere, as a shortest path does"
    return f"the answer's path has {drawn} steps where {length} are enough"


def read_mazes(path, size, check):
    """All mazes of a CSV file: (questions, answers), tokens [n, cells]. size: cells of a row; 0: any.

    Raises UserError with file and line for the first wrong row; check: whether an answer that is not a shortest path is one.
    """
    tokens, blocks = {character: token for token, character in enumerate(SYMBOLS, 1)}, []
    questions_have = {character: token for character, token in tokens.items() if token != PATH}
    for lines, questions, answers, _ in read_csv(path, size * size, questions_have, tokens, rated=False):
        cells = questions.shape[1]
        size = math.isqrt(cells)
        if size * size != cells or not 2 <= size <= LARGEST:
            raise UserError(f"{path}:{lines[0]}: a question of {cells} characters is not a square of 2x2 to {LARGEST}x{LARGEST} cells")
        wrong = wrong_answers(questions, answers, size) if check else np.zeros(1, dtype=bool)
        if wrong.any():
            i = int(wrong.argmax())
            raise UserError(f"{path}:{lines[i]}: {maze_fault(questions[i], answers[i], size)}")
        blocks.append((questions, answers))
    return [np.concatenate(part) for part in zip(*blocks)]


# Copies.

def dihedral(size):
    """The 8 rotations and reflections of a square as indices [8, cells] into its cells, in the official builder's order."""
    square = np.arange(size * size).reshape(size, size)
    turned = [np.rot90(square, k) for k in range(4)]
    return np.stack(turned + [np.fliplr(square), np.flipud(square), square.T, np.fliplr(turned[1])]).reshape(8, -1)


def dihedral_hash(questions):
    """Hashes uint64 [n] of mazes [n, cells]: equal for the 8 copies of one."""
    return np.min([hash_boards(questions[:, copy]) for copy in dihedral(math.isqrt(questions.shape[1]))], axis=0)


def augmented(questions, answers, size, aug):
    """Yields token blocks (inputs, labels), uint8 [n, cells]: each maze or, with aug, its 8 copies, the first as it is.

    A copy's answer is the answer turned alike. But if that follows the rule of solve() among shortest paths, the turned one does not,
    and the copy's own answer by the rule is taken: or the copies would teach 8 rules, one of which the test set has.
    """
    copies = dihedral(size)[:8 if aug else 1]
    for i in range(0, len(questions), CHUNK // 8):
        inputs, labels = (array[i:i + CHUNK // 8][:, copies] for array in (questions, answers))
        solved = solve(inputs.reshape(-1, size * size), size)[0].reshape(inputs.shape)
        by_rule = (labels[:, 0] == solved[:, 0]).all(axis=1)
        yield [array.reshape(-1, size * size) for array in (inputs, np.where(by_rule[:, None, None], solved, labels))]


# The whole.

def complete(settings):
    """The settings with what follows from them filled in: the source and the output folder. Raises UserError for a wrong one."""
    s = check_source(settings, subsample_size=0, seed=0, size=2, min_path=1, num_train=1, num_test=1)
    if s.size > LARGEST:
        raise UserError(f"size must be at most {LARGEST}, not {s.size}")
    if not s.output_dir:
        count = s.num_train if s.source == "generate" else s.subsample_size or (1000 if s.source == "hub" else 0)
        short = "full" if not count else f"{count // 1000}k" if count % 1000 == 0 else str(count)
        stem = os.path.basename(s.train_csv).split(".")[0]
        name = {"hub": "maze-30x30-hard", "csv": stem, "generate": f"maze-{s.size}x{s.size}-path-{s.min_path}"}[s.source]
        s.output_dir = f"data/{name}-{short}" + "-aug-8" * s.aug + f"-seed-{s.seed}" * (s.seed > 0)
    return s


def prepare(settings):
    """Makes the data set that the settings (a namespace of all of them) describe and returns its folder.

    Raises UserError for a wrong setting, a wrong row of a file, or where the folder exists.
    """
    s, begun, counts = complete(settings), time.monotonic(), {}
    refuse_existing(s.output_dir)
    if s.source == "generate":
        size, questions = s.size, generate(s.size, s.num_train + s.num_test, s.seed, s.min_path, cores())
        answers = np.concatenate([solve(questions[i:i + CHUNK], size)[0] for i in range(0, len(questions), CHUNK)])
        assert not wrong_answers(questions, answers, size).any()
        train, test = ([part[which] for part in (questions, answers)] for which in (slice(s.num_train), slice(s.num_train, None)))
    else:
        train_csv, test_csv = s.train_csv, s.test_csv
        if s.source == "hub":
            train_csv, test_csv = (f"data/downloads/{os.path.basename(HUB)}/{split}.csv" for split in ("train", "test"))
            for path in (train_csv, test_csv):
                download(hub_url(HUB, os.path.basename(path)), path)
        test = read_mazes(test_csv, 0, s.check_paths)
        size = math.isqrt(test[0].shape[1])
        train = read_mazes(train_csv, size, s.check_paths)
        hashes = dihedral_hash(train[0])
        first = np.isin(np.arange(len(hashes)), np.unique(hashes, return_index=True)[1])
        fresh = ~contains(np.sort(dihedral_hash(test[0])), hashes)
        counts.update(train_rows=len(hashes), test_rows=len(test[0]), train_rows_in_test=int((~fresh).sum()),
                      train_rows_twice=int((fresh & ~first).sum()))
        chosen = np.flatnonzero(fresh & first)
        if not len(chosen):
            raise UserError(f"{train_csv}: no maze is left of {len(hashes)} rows: all are in the test set too, as they are or turned or reflected")
        if 0 < s.subsample_size < len(chosen):
            chosen = np.sort(np.random.default_rng([s.seed, 1]).permutation(chosen)[:s.subsample_size])
        train = [part[chosen] for part in train]
        print(f"{train_csv}: {len(hashes):,} rows, {counts['train_rows_in_test']:,} dropped that the test set has too, "
              f"{counts['train_rows_twice']:,} that came before, turned and reflected ones included")
    copies = 8 if s.aug else 1
    counts.update(train_puzzles=len(train[0]), test_puzzles=len(test[0]))
    write_dataset(s.output_dir, {
        "train": (len(train[0]), copies, augmented(*train, size, s.aug)),
        "test": (len(test[0]), 1, [test]),
    }, vocab_size=len(SYMBOLS) + 1, manifest={
        "kind": "maze", "source": s.source, "seed": s.seed, "settings": vars(s), "counts": counts, "grid": [size, size], "symbols": "_" + SYMBOLS})
    print(f"train: {len(train[0]):,} mazes of {size}x{size}, each in {copies} of its 8 rotations and reflections (--aug={s.aug})")
    steps = np.sort((test[1] == PATH).sum(axis=1) + 1)
    print(f"test: {len(test[0]):,} mazes, shortest paths of {steps[0]} to {steps[-1]} steps, {steps[len(steps) // 2]} in the median")
    print(f"{s.output_dir} made in {time.monotonic() - begun:.0f} s; train on it with: python train.py config/maze.py --data_path={s.output_dir}")
    return s.output_dir


def main(settings):
    prepare(settings)


if __name__ == "__main__":
    start(main, __file__)
