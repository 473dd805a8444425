"""Makes a maze dataset: Maze-Hard from the hub, your own CSV files, or generated mazes.

    python prepare_maze.py                                               Maze-Hard, 1000 mazes x 8
    python prepare_maze.py --train_csv=train.csv --test_csv=test.csv     columns question,answer
    python prepare_maze.py --source=generate --size=30 --min_path=111    mazes like those of Maze-Hard

A maze is a square of the characters "# SGo", row after row: wall, open, start, goal, path. The answer is the
question with the open cells of one shortest path from S to G as "o". Steps go up, down, left and right.
Tokens are the official code's: 0 padding, 1 to 5 these characters. In this file, mazes are tokens [n, cells].
"""
import math

import numpy as np

# isort: off
from configurator import UserError, start
from data import (
    check_source, command_of, csv_files, distinct, name_output, refuse_existing, write_dataset)
from prepare_csv import orbit_keys, read_csv, token_blocks
from puzzles import (
    GOAL, LARGEST, MAZE, OPEN, PATH, START, WALL, are_solutions, broken_cells, dihedral, path_steps)

# source
source = "hub"  # hub (Maze-Hard from Hugging Face), csv, or generate
train_csv = ""  # training mazes, .csv or .csv.gz; implies csv
test_csv = ""  # test mazes
output_dir = ""  # "": a folder under data/ named after these settings
seed = 0  # of the choice of mazes and of generated mazes
# mazes from the hub or from CSV files
subsample_size = 0  # training mazes, chosen at random; 0: all; every test maze is kept
# generated mazes
size = 30  # cells of a row
min_path = 111  # least number of steps of the shortest path
num_train = 1000  # training mazes
num_test = 1000  # test mazes
# augmentation
aug = True  # training mazes in all 8 rotations and reflections (off by default in the official builder)
# ---

HUB = "sapientinc/maze-30x30-hard-1k"
SYMBOLS = MAZE[1:]
CHUNK = 4096  # grids at a time
WALLS = 0.3, 0.5  # share of a generated grid's cells


def main(settings):
    """Makes the dataset that the settings describe and returns its folder. Raises UserError."""
    s, counts = complete(settings), {}
    refuse_existing(s.output_dir)
    if s.source == "generate":
        mazes = generate(s.size, s.num_train + s.num_test, s.seed, s.min_path)
        train = [part[:s.num_train] for part in mazes]
        test = [part[s.num_train:] for part in mazes]
    else:
        train, test, counts = mazes_from_files(s)
    size = math.isqrt(test[0].shape[1])
    copies = 8 if s.aug else 1
    counts.update(train_puzzles=len(train[0]), test_puzzles=len(test[0]))
    splits = {"train": (len(train[0]), copies, augmented(*train, size, s.aug)),
              "test": (len(test[0]), 1, [test])}
    write_dataset(s.output_dir, splits, len(MAZE), task_of(size) | dict(
        command=command_of(__file__, s), counts=counts))
    print(f"train: {len(train[0]):,} mazes of {size}x{size}, each in {copies} of 8 rotations and reflections")
    steps = np.sort((test[1] == PATH).sum(axis=1) + 1)
    print(f"test: {len(test[0]):,} mazes, shortest paths of {steps[0]} to {steps[-1]} steps, "
          f"median {steps[len(steps) // 2]}")
    print(f"Train on it: python train.py config/maze.py --data_path={s.output_dir}")
    return s.output_dir


def task_of(size):
    return dict(kind="maze", grid=[size, size], symbols=MAZE)


def complete(settings):
    """The settings with source and output_dir filled in; raises UserError for a wrong one."""
    s = check_source(settings, subsample_size=0, seed=0, size=2, min_path=1, num_train=1, num_test=1)
    if s.size > LARGEST:
        raise UserError(f"size must be at most {LARGEST}, not {s.size}")
    n = {"hub": s.subsample_size or 1000, "csv": s.subsample_size, "generate": s.num_train}[s.source]
    names = {"hub": "maze-30x30-hard", "generate": f"maze-{s.size}x{s.size}-path-{s.min_path}"}
    return name_output(s, names, n, s.aug and "aug-8")


# Mazes from CSV files.

def mazes_from_files(s):
    """Training and test mazes, [questions, answers] each, and a dict of counts; downloads the hub's."""
    train_csv, test_csv = csv_files(s, HUB)
    test = read_mazes(test_csv, 0)
    train = read_mazes(train_csv, test[0].shape[1])
    test_keys, chosen, in_test = set(dihedral_keys(test[0])), {}, 0
    for row, key in enumerate(dihedral_keys(train[0])):
        in_test += key in test_keys
        if key not in test_keys:
            chosen.setdefault(key, row)
    chosen, rows = np.array(list(chosen.values()), dtype=int), len(train[0])
    repeated = rows - in_test - len(chosen)
    if not len(chosen):
        raise UserError(f"{train_csv}: no maze is left of {rows} rows: the test set has all of them, turned "
                        "or not")
    if 0 < s.subsample_size < len(chosen):
        rng = np.random.default_rng([s.seed, 1])
        chosen = np.sort(rng.permutation(chosen)[:s.subsample_size])
    print(f"{train_csv}: {rows:,} rows, {in_test:,} dropped because the test set has them too, "
          f"{repeated:,} because they are repeated, turned and reflected ones included")
    counts = dict(train_rows=rows, test_rows=len(test[0]), train_rows_in_test=in_test,
                  train_rows_twice=repeated)
    return [part[chosen] for part in train], test, counts


def read_mazes(path, cells):
    """All mazes of a file: [questions, answers]; cells: 0: as many as the first has. Raises UserError."""
    table, blocks = {ord(symbol): token for token, symbol in enumerate(SYMBOLS, 1)}, []
    rows = read_csv(path, cells, (SYMBOLS[:-1], SYMBOLS))
    for questions, answers, lines in token_blocks(rows, 4096, table, table):
        cells = questions.shape[1]
        size = math.isqrt(cells)
        if size * size != cells or not 2 <= size <= LARGEST:
            expected = f"a square of 2x2 to {LARGEST}x{LARGEST} cells"
            raise UserError(f"{path}:{lines[0]}: a question of {cells} characters is not {expected}")
        puzzle = task_of(size), questions, answers
        wrong = broken_cells(*puzzle).any(axis=1) | ~are_solutions(*puzzle)
        for i in np.flatnonzero(wrong)[:1]:
            raise UserError(f"{path}:{lines[i]}: {explain(questions[i], answers[i], size)}")
        blocks.append((questions, answers))
    return [np.concatenate(part) for part in zip(*blocks)]


def explain(question, answer, size):
    """Why an answer is not a shortest path of its question, [cells] each, in words."""
    for token in (START, GOAL):
        count = (question == token).sum()
        if count != 1:
            return f"the question has {count} cells {SYMBOLS[token - 1]}, not 1"
    maze = task_of(size), question[None], answer[None]
    broken = broken_cells(*maze)[0]
    if broken.any():
        cell = int(broken.argmax())
        place = f"row {cell // size + 1}, column {cell % size + 1}"
        ours, theirs = SYMBOLS[answer[cell] - 1], SYMBOLS[question[cell] - 1]
        return f"the answer has {ours!r} in {place}, where the question has {theirs!r}"
    (steps,), (shortest,) = path_steps(*maze)
    if not shortest:
        return "the question has no way from S to G"
    if not steps:
        return "the answer's o do not make one line from S to G that does not touch itself"
    return f"the answer's path has {steps} steps where {shortest} are enough"


# Generated mazes.

def generate(size, n, seed, min_path):
    """n questions, no two alike even when turned or reflected, and their answers. Raises UserError."""
    name = f"{size}x{size} mazes whose shortest path has {min_path} steps or more"
    advice = "choose a lower min_path or"
    return distinct(name, n, generate_chunk, seed, (size, min_path), dihedral_keys, advice)


def generate_chunk(task):
    """The mazes (questions, answers) among CHUNK random grids; task: (seed, index, size, min_path).

    The method of Lehnert et al. (arXiv 2402.14083), which Maze-Hard's authors cite: 30 to 50% of the cells,
    anywhere, are walls, and grids without a long path are dropped. To drop fewer, one end is the cell
    farthest from a random one, and the other any cell at least min_path steps away.
    """
    seed, index, size, min_path = task
    rng = np.random.default_rng([seed, index])
    open_cells = rng.random((CHUNK, size * size), dtype=np.float32) >= rng.uniform(*WALLS, (CHUNK, 1))
    origin = np.zeros_like(open_cells)
    origin[np.arange(CHUNK), rng.integers(size * size, size=CHUNK)] = True
    open_cells, origin = pack(open_cells | origin, size), pack(origin, size)
    layers = np.stack(list(layers_from(origin, open_cells)))
    farthest = layers.any(axis=1).sum(axis=0) - 1
    keep = np.flatnonzero(2 * farthest >= min_path)  # no two cells are farther apart than twice that
    open_cells = open_cells[:, keep]
    one_end = random_cells(layers[farthest[keep], :, keep].T, rng)
    layers = np.stack(list(layers_from(one_end, open_cells)))
    other_end = random_cells(np.bitwise_or.reduce(layers[min_path:], axis=0), rng)
    keep = other_end.any(axis=0)
    swap = rng.random(len(keep)) < 0.5
    questions = np.where(unpack(open_cells), OPEN, WALL).astype(np.uint8)
    questions[unpack(np.where(swap, one_end, other_end))] = START
    questions[unpack(np.where(swap, other_end, one_end))] = GOAL
    return questions[keep], solve(questions[keep], size)[0]


def random_cells(bits, rng):
    """One random cell of each set [rows, n], as bits; none of an empty set."""
    cells = unpack(bits)
    chosen = np.zeros_like(cells)
    cell = (cells * (1 - rng.random(cells.shape, dtype=np.float32))).argmax(axis=1)
    chosen[np.arange(len(cells)), cell] = True
    return pack(chosen & cells, len(bits))


# The solver works on many mazes at a time: sets of cells are bits [rows, n], a word for a row of a maze.

def solve(questions, size):
    """The answers and the steps [n] of their shortest paths, 0 if there is none.

    Of several shortest paths it takes the one that, seen from S, goes down where it can, else left, else
    right, else up. So do all labels of Maze-Hard, and a model can learn to match them exactly only because
    there is a rule.
    """
    start = pack(questions == START, size)
    layers = list(layers_from(pack(questions == GOAL, size), pack(questions != WALL, size)))
    steps = sum(step * (layer & start > 0).any(axis=0) for step, layer in enumerate(layers))
    position = np.zeros_like(start)
    path = np.zeros_like(start)
    for step in range(len(layers) - 2, 0, -1):
        position = np.where(steps == step + 1, start, position)
        down, left, right, up = (cells & layers[step] for cells in neighbours(position))
        position = up
        for preferred in (right, left, down):
            position = np.where(preferred.any(axis=0), preferred, position)
        path |= position
    return np.where(unpack(path), np.uint8(PATH), questions), steps


def layers_from(start, open_cells):
    """Yields the sets of cells that are 0, 1, 2, ... steps from start, up to the farthest of any maze."""
    layer = start
    unseen = open_cells & ~start
    while True:
        yield layer
        layer = np.bitwise_or.reduce(neighbours(layer)) & unseen
        if not layer.any():
            return
        unseen &= ~layer


def neighbours(bits):
    """The cells below, left, right and above of a set's cells; bits beyond the right edge mean nothing."""
    nothing = np.zeros_like(bits[:1])
    return np.concatenate([nothing, bits[:-1]]), bits >> 1, bits << 1, np.concatenate([bits[1:], nothing])


def pack(cells, size):
    """Bits [rows, n] of bool [n, cells]."""
    width = 32 if size <= 32 else 64
    padded = np.zeros((len(cells), size, width), dtype=bool)
    padded[:, :, :size] = cells.reshape(len(cells), size, size)
    words = np.packbits(padded, axis=2, bitorder="little").view(f"<u{width // 8}")
    return np.ascontiguousarray(words[:, :, 0].T)


def unpack(bits):
    """Bool [n, cells] of bits [rows, n]."""
    size, n = bits.shape
    words = np.ascontiguousarray(bits.T)[:, :, None].view(np.uint8)
    return np.unpackbits(words, axis=2, count=size, bitorder="little").reshape(n, size * size).astype(bool)


# Augmented copies.

def augmented(questions, answers, size, aug):
    """Yields token blocks (inputs, labels), uint8 [n, cells]: each maze or, with aug, its 8 copies in turn.

    A copy's answer is the answer, turned alike. But where the answer follows the rule of solve(), the copy
    gets its own answer by that rule: otherwise the copies would teach 8 rules, of which the test set has one.
    """
    copies = dihedral(size)[:8 if aug else 1]
    step = CHUNK // 8
    for i in range(0, len(questions), step):
        inputs, labels = (array[i:i + step][:, copies] for array in (questions, answers))
        solved = solve(inputs.reshape(-1, size * size), size)[0].reshape(inputs.shape)
        by_rule = (labels[:, 0] == solved[:, 0]).all(axis=1)
        labels = np.where(by_rule[:, None, None], solved, labels)
        yield [array.reshape(-1, size * size) for array in (inputs, labels)]


def dihedral_keys(questions):
    """Keys [n] of mazes, for sets and dicts, equal for the 8 copies of one."""
    return orbit_keys([[questions]], dihedral(math.isqrt(questions.shape[1])))


if __name__ == "__main__":
    start(main, __file__)
