"""Makes a maze dataset: Maze-Hard from the hub, your own CSV files, or generated mazes.

    python prepare_maze.py                                               Maze-Hard, 1000 mazes x 8
    python prepare_maze.py --train_csv=train.csv --test_csv=test.csv     columns question,answer
    python prepare_maze.py --source=generate --size=30 --min_path=111    mazes like Maze-Hard's

A maze is a square of the characters "# SGo", row after row: wall, open, start, goal, path. The answer is the
question with the open cells of one shortest path from S to G as "o". Steps go up, down, left and right.
Tokens are the official code's: 0 padding, 1 to 5 these characters. In this file, mazes are tokens [n, cells].
"""
import math

import numpy as np

# isort: off
from configurator import UserError, start
from prepare import (
    check_source, csv_files, distinct, name_output, orbit_keys, read_puzzles, refuse_existing, write_puzzles)
from puzzles import (
    GOAL, LARGEST_MAZE, MAZE, OPEN, START, WALL, dihedral, layers_from, maze_task, pack, solve_mazes, unpack)

# source
source = "hub"  # hub (Maze-Hard from Hugging Face), csv, or generate
train_csv = ""  # training mazes, .csv or .csv.gz; implies csv
test_csv = ""  # test mazes
output_dir = ""  # "": a folder under data/ named after these settings
seed = 0  # decides the choice of mazes, and generated mazes
# mazes from the hub or from CSV files
subsample_size = 0  # training mazes, chosen at random; 0: all; every test maze is kept
# generated mazes
size = 30  # cells of a row
min_path = 111  # least number of steps of the shortest path
num_train = 1000  # training mazes
num_test = 1000  # test mazes
# augmentation
aug = True  # training mazes in all 8 rotations and reflections (off by default in the official builder)

HUB = "sapientinc/maze-30x30-hard-1k"
SYMBOLS = MAZE[1:]
CHUNK = 4096  # grids at a time
WALLS = 0.3, 0.5  # share of a generated grid's cells


def main(settings):
    """Makes the dataset that the settings describe and returns its folder. Raises UserError."""
    fill_in(settings)
    refuse_existing(settings.output_dir)
    if settings.source == "generate":
        num_mazes = settings.num_train + settings.num_test
        mazes = generate(settings.size, num_mazes, settings.seed, settings.min_path)
        train = mazes[:, :settings.num_train]
        test = mazes[:, settings.num_train:]
        counts = {}
    else:
        train, test, counts = mazes_from_files(settings)

    size = math.isqrt(test.shape[2])
    blocks = augmented(*train, size, settings.aug)
    copies = 8 if settings.aug else 1
    write_puzzles(settings, __file__, maze_task(size), blocks, len(train[0]), test, copies, counts)
    return settings.output_dir


def fill_in(settings):
    """Fills in source and output_dir. Raises UserError for a wrong setting."""
    check_source(settings, subsample_size=0, seed=0, size=2, min_path=1, num_train=1, num_test=1)
    if settings.size > LARGEST_MAZE:
        raise UserError(f"size must be at most {LARGEST_MAZE}, not {settings.size}")
    num_mazes = settings.num_train if settings.source == "generate" else settings.subsample_size
    if settings.source == "hub":
        num_mazes = num_mazes or 1000
    name = f"maze-{settings.size}x{settings.size}-path-{settings.min_path}"
    source_names = {"hub": "maze-30x30-hard", "generate": name}
    options = ["aug-8"] if settings.aug else []
    settings.output_dir = name_output(settings, source_names, num_mazes, options)


# ---------------------------------------------------------------------------------------------------------
# Mazes from CSV files

def mazes_from_files(settings):
    """Returns training and test mazes, [2, n, cells] each, and counts; downloads the hub's."""
    train_csv, test_csv = csv_files(settings, HUB)
    test = read_mazes(test_csv, 0)
    train = read_mazes(train_csv, test.shape[2])

    # training mazes that are not in the test set, and each once, whichever way they are turned
    test_keys = set(dihedral_keys(test[0]))
    keys = dihedral_keys(train[0])
    row_of = {}
    for row, key in enumerate(keys):
        if key not in test_keys:
            row_of.setdefault(key, row)
    chosen = list(row_of.values())
    in_test = sum(key in test_keys for key in keys)
    if not chosen:
        raise UserError(f"{train_csv}: no maze is left of {len(keys)} rows: the test set has all of them, "
                        "turned or not")

    # a random choice, in the file's order
    if settings.subsample_size:
        rng = np.random.default_rng([settings.seed, 1])
        chosen = np.sort(rng.permutation(chosen)[:settings.subsample_size])
    counts = {
        "train_rows": len(keys),
        "test_rows": len(test[0]),
        "train_rows_in_test": in_test,
        "train_rows_twice": len(keys) - in_test - len(row_of),
    }
    return train[:, chosen], test, counts


def read_mazes(path, cells):
    """Returns all mazes of a file, [2, n, cells]; cells: see read_csv."""
    table = {ord(symbol): token for token, symbol in enumerate(MAZE)}
    alphabets = SYMBOLS[:-1], SYMBOLS  # the symbols of questions and of answers
    questions, answers, _ = read_puzzles(path, cells, square_task, alphabets, table)
    return np.array([questions, answers])


def square_task(cells, place):
    """Returns the task of mazes with so many cells; raises UserError if they make no square."""
    size = math.isqrt(cells)
    if size * size != cells or size > LARGEST_MAZE:
        raise UserError(f"{place}: a question of {cells} characters is not a square of up to "
                        f"{LARGEST_MAZE} rows")
    return maze_task(size)


def dihedral_keys(questions):
    """Returns keys [n] of mazes, for sets and dicts, equal for the 8 copies of one."""
    return orbit_keys(questions, dihedral(math.isqrt(questions.shape[1])))


# ---------------------------------------------------------------------------------------------------------
# Generated mazes

def generate(size, n, seed, min_path):
    """Returns n questions, no two alike even when turned or reflected, and their answers."""
    name = f"{size}x{size} mazes whose shortest path has min_path={min_path} steps or more"
    return distinct(name, n, generate_chunk, (seed, size, min_path), dihedral_keys)


def generate_chunk(index, seed, size, min_path):
    """Returns the mazes (questions, answers) among CHUNK random grids, which depend on seed and index.

    The method of Lehnert et al. (arXiv 2402.14083), which Maze-Hard's authors cite: 30 to 50% of the cells,
    anywhere, are walls, and grids without a long path are dropped. To drop fewer, one end is the cell
    farthest from a random one, and the other any cell at least min_path steps away.
    """
    rng = np.random.default_rng([seed, index])
    is_open = rng.random((CHUNK, size * size), dtype=np.float32) >= rng.uniform(*WALLS, (CHUNK, 1))
    is_origin = np.zeros_like(is_open)
    is_origin[np.arange(CHUNK), rng.integers(size * size, size=CHUNK)] = True

    # the cells that are farthest from a random one; no two cells are farther apart than twice that
    open_cells = pack(is_open | is_origin, size)
    layers = np.stack(list(layers_from(pack(is_origin, size), open_cells)))
    farthest = layers.any(axis=1).sum(axis=0) - 1
    keep = np.flatnonzero(2 * farthest >= min_path)
    open_cells = open_cells[:, keep]
    one_end = random_cells(layers[farthest[keep], :, keep].T, rng)

    # the other end
    layers = np.stack(list(layers_from(one_end, open_cells)))
    other_end = random_cells(np.bitwise_or.reduce(layers[min_path:], axis=0), rng)
    keep = other_end.any(axis=0)
    swap = rng.random(len(keep)) < 0.5
    questions = np.where(unpack(open_cells), OPEN, WALL).astype(np.uint8)
    questions[unpack(np.where(swap, one_end, other_end))] = START
    questions[unpack(np.where(swap, other_end, one_end))] = GOAL
    questions = questions[keep]
    answers, _ = solve_mazes(questions, size)
    return questions, answers


def random_cells(bits, rng):
    """Returns one random cell of each set [rows, n], as bits; none of an empty set."""
    cells = unpack(bits)
    chosen = np.zeros_like(cells)
    draws = 1 - rng.random(cells.shape, dtype=np.float32)  # above 0
    cell = (cells * draws).argmax(axis=1)
    chosen[np.arange(len(cells)), cell] = True
    return pack(chosen & cells, len(bits))


# ---------------------------------------------------------------------------------------------------------
# Augmented copies

def augmented(questions, answers, size, aug):
    """Yields blocks (inputs, labels), uint8 [n, cells]: each maze or, with aug, its 8 copies in turn.

    A copy's answer is the answer, turned alike. But where the answer follows the rule of solve_mazes, the
    copy gets its own answer by that rule: otherwise the copies would teach 8 rules, and the test set has
    one.
    """
    copies = dihedral(size)[:8 if aug else 1]
    mazes = np.array([questions, answers])
    for first in range(0, len(questions), CHUNK // 8):
        inputs, labels = mazes[:, first:first + CHUNK // 8, copies]  # (n, copies, cells)
        solved, _ = solve_mazes(inputs.reshape(-1, size * size), size)
        solved = solved.reshape(inputs.shape)
        by_rule = (labels[:, :1] == solved[:, :1]).all(axis=2, keepdims=True)
        labels = np.where(by_rule, solved, labels)
        yield np.reshape([inputs, labels], (2, -1, size * size))


if __name__ == "__main__":
    start(main, __file__)
