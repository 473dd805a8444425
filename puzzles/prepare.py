"""What the prepare scripts share: settings, reading files, processes that generate puzzles, writing.

A script reads or generates puzzles, keeps training puzzles out of the test, draws some, makes copies, and
writes a dataset. In a dataset, a group is one original puzzle (for ARC, one task), and its versions are the
original and its copies by symmetry.
"""
import itertools
import multiprocessing
import os
import re
import shlex
import signal
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np

from puzzles import Kind
from puzzles.keys import keys_of
from puzzles.text import check_text
from puzzles.writer import refuse_existing, write_dataset
from runtime.errors import TransientError, UserError
from runtime.files import Progress
from runtime.process import end_with_parent

JOBS_ALONE = 8  # jobs that one process does before others start; starting takes them a second
JOBS_IN_VAIN = 32  # jobs in a row without a new puzzle, after which distinct() gives up
ROWS = 16384  # rows that are made or judged at a time
BLOCK = 4000  # puzzles that are solved at a time


# ---------------------------------------------------------------------------------------------------------
# Settings

def fill_in_source(settings, dataset_names, aug, others, of_generated, hub_size="full"):
    """Fills in source and output_dir of a prepare script's settings. Raises UserError for a wrong setting.

    Args:
        settings: of the script.
        dataset_names: {source: its name}, for hub and generate.
        aug: what the folder's name says after aug: how many copies, for mazes how many versions.
        others: see name_folder.
        of_generated: names of the settings that only generated puzzles have.
        hub_size: the word for all puzzles of the hub's dataset.
    """
    # files of your own need no --source=csv
    if settings.train_csv or settings.test_csv:
        settings.source = "csv"
    dataset_names = dataset_names | {"csv": os.path.basename(settings.train_csv).split(".")[0]}
    if settings.source not in dataset_names:
        raise UserError(f"source must be one of {', '.join(dataset_names)}, not {settings.source!r}")
    if settings.source == "csv" and not (settings.train_csv and settings.test_csv):
        raise UserError("source=csv needs both --train_csv=FILE and --test_csv=FILE")
    is_generated = settings.source == "generate"
    refuse_idle(settings, ["subsample_size", "min_difficulty"] if is_generated else of_generated)

    # the name says the source, the training puzzles and the copies
    num_puzzles = settings.num_train if is_generated else settings.subsample_size
    everything = hub_size if settings.source == "hub" else "full"
    size = re.sub("000$", "k", str(num_puzzles or everything))
    name_folder(settings, f"{dataset_names[settings.source]}-{size}-aug-{aug}", others)


def refuse_idle(settings, names):
    """Raises UserError for the first of these settings that is not its default."""
    for name in names:
        if getattr(settings, name, None) != settings.defaults.get(name):
            raise UserError(f"{name} does nothing with --source={settings.source}")


def name_folder(settings, name, others=()):
    """Fills in output_dir: by default data/NAME, and which of the `others` differ from their defaults.

    Raises UserError if the folder exists.
    """
    for setting in others:
        value = getattr(settings, setting)
        if value != settings.defaults[setting]:
            name += f"-{setting}-{Path(str(value)).name}"  # of a folder its last part
    settings.output_dir = settings.output_dir or f"data/{name}"
    refuse_existing(settings.output_dir)


# ---------------------------------------------------------------------------------------------------------
# Puzzles of files

def distinct_rows(path, rows, several_answers=False):
    """Yields the first row of each question, as csv_rows does, and prints how many others there are.

    Raises UserError for another answer to the same question, unless there may be several_answers.
    """
    answers = {}
    num_repeated = 0
    for line, row in rows:
        question = row["question"]
        if question not in answers:
            answers[question] = row["answer"]
            yield line, row
        elif answers[question] == row["answer"] or several_answers:
            num_repeated += 1
        else:
            raise UserError(f"{path}:{line}: another answer to the same question stands above; "
                            "prepare_csv.py --several_answers takes the first")
    if num_repeated:
        print(f"{path}: left out {num_repeated:,} rows whose question stands above")


def read_puzzles(path, rows, kind):
    """Returns the puzzles of a file, questions and answers [2, n, cells].

    Args:
        path: the file.
        rows: an iterator of its rows as csv_rows yields them, with the columns question and answer.
        kind: the puzzles' Kind.

    Raises UserError with the first line that is wrong, or else whose answer breaks a rule.
    """
    tokens = dict(zip(kind.symbols[1:], range(1, 256)))
    codes = bytearray()
    lines = []
    progress = Progress(f"reading {path}")
    for line, row in rows:
        lines.append(line)
        for name in "question", "answer":
            check_text(kind, row[name], "".join(tokens), f"{path}:{line}: the {name}")
            codes += bytes(map(tokens.get, row[name]))
        progress.add(1)
    puzzles = np.array(codes).reshape(-1, 2, kind.cells).swapaxes(0, 1).copy()

    # the answers must keep the rules, if these are known
    for first in range(0, len(lines), ROWS):
        questions, answers = puzzles[:, first:first + ROWS]
        judgement = kind.judge(questions, answers)
        if judgement:
            for i in np.flatnonzero(~judgement.solved):
                raise UserError(f"{path}:{lines[first + i]}: {kind.verdict(questions[i], answers[i])} (read "
                                f"as a grid of {kind.rows}x{kind.columns})")
    return puzzles


def read_both(settings, paths, kind, rows_of):
    """Returns training and test puzzles of files, [2, n, cells] each, and {what: how many are left out}.

    It takes the files of the hub as they are. Of your own files it leaves out repeated rows and puzzles with
    several solutions: of the test puzzles, and of the training puzzles as it draws them.

    Args:
        settings: the settings of a prepare script.
        paths: of the training and the test puzzles, from csv_paths.
        kind: the puzzles' Kind.
        rows_of: a function of a path that yields its rows as csv_rows does.
    """
    is_own = settings.source == "csv"
    puzzles = []
    for path in paths:
        rows = rows_of(path)
        if is_own:
            rows = distinct_rows(path, rows)
        puzzles.append(read_puzzles(path, rows, kind))
    train, test = puzzles
    train_path, test_path = paths

    # the hub's puzzles have one solution each, so no search is needed: the plain Kind counts 1 for any puzzle
    solver = kind if is_own else Kind(kind.task)

    # keep all test puzzles that are proper; draw training puzzles that are not among them
    test, num_improper_tests = draw_proper(test_path, test, solver)
    train, counts = drop_test_puzzles(train_path, train, test, kind)
    train, num_improper = draw_proper(train_path, train, solver, settings.subsample_size, settings.seed)
    counts["left out, since they have several solutions"] = num_improper_tests + num_improper
    return train, test, counts


def draw_proper(path, puzzles, kind, num_wanted=0, seed=0):
    """Returns random puzzles that have one solution, and how many others were drawn, which have several.

    The puzzles keep the order of the file. If the search for a second solution takes too long, they count as
    puzzles with one.

    Args:
        path: of the file, for the UserError if no puzzle has one solution.
        puzzles: questions and answers, [2, n, cells].
        kind: the Kind that counts their solutions.
        num_wanted: how many puzzles to draw; 0: all.
        seed: of the draws.
    """
    order = np.random.default_rng([seed, 1]).random(puzzles.shape[1]).argsort()
    num_wanted = num_wanted or len(order)
    num_seen = 0
    drawn = []
    progress = Progress(f"counting solutions of {path}", num_wanted)
    while len(drawn) < num_wanted and num_seen < len(order):
        # for puzzles that are not proper, draw others
        candidates = order[num_seen:][:min(BLOCK, num_wanted - len(drawn))]
        is_proper = np.abs(kind.num_solutions(puzzles[0, candidates])) == 1
        drawn += candidates[is_proper].tolist()
        num_seen += len(candidates)
        progress.add(len(candidates))
    if not drawn:
        raise UserError(f"{path}: no puzzle has one solution, or none is hard enough")
    return puzzles[:, np.sort(drawn)], num_seen - len(drawn)


def drop_test_puzzles(path, train, test, kind):
    """Returns the training puzzles that are no test puzzles, and {what: how many are left out}.

    path: the file of the training puzzles, for the UserError if none is left.
    """
    test_keys = set(kind.keys(test[0]))
    is_test = np.array([key in test_keys for key in kind.keys(train[0])])
    if is_test.all():
        raise UserError(f"{path}: no puzzle is left: each is in the test set, or a symmetry turns it into "
                        "one that is")
    return train[:, ~is_test], {"left out, since the test set has them": is_test.sum()}


# ---------------------------------------------------------------------------------------------------------
# Generated puzzles

def distinct(name, n, make, keys):
    """Returns the first n puzzles with different keys, [2, n, cells]. Raises UserError if there are fewer.

    Args:
        name: what the puzzles are called in messages.
        n: puzzles that are wanted.
        make: a function of a job's number, 0, 1, ..., which returns questions and answers.
        keys: a function of the questions, which returns a list.
    """
    puzzles = {}
    num_in_vain = 0  # jobs in a row without a new puzzle
    progress = Progress(f"generating {name}", n)
    for questions, answers in in_parallel(make):
        for key, *puzzle in zip(keys(questions), questions, answers):
            puzzles.setdefault(key, puzzle)
        if len(puzzles) >= n:
            return np.stack(list(puzzles.values())[:n], axis=1)

        # give up once many jobs in a row bring nothing new: nearly all puzzles that exist are found
        num_new = len(puzzles) - progress.done
        num_in_vain = 0 if num_new else num_in_vain + 1
        if num_in_vain == JOBS_IN_VAIN:
            raise UserError(f"only about {len(puzzles)} {name} can be found: choose fewer than {n}")
        progress.add(num_new)


def in_parallel(make):
    """Yields make(0), make(1), ...: the first results at once, the others from as many processes as cores."""
    yield from map(make, range(JOBS_ALONE))
    # the cores that this process may use; macOS counts all
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    pool = ProcessPoolExecutor(num_cores, multiprocessing.get_context("spawn"), begin_process)
    jobs = deque()
    try:
        for number in itertools.count(JOBS_ALONE):
            jobs.append(pool.submit(make, number))
            # each core has a job, and the next one waits
            if len(jobs) == 2 * num_cores:
                yield jobs.popleft().result()
    except BrokenProcessPool:
        raise TransientError("a process ended before its work was done; is the memory full?") from None
    finally:
        # to end a process while it writes its result would leave this one waiting for the rest
        pool.shutdown(cancel_futures=True)


def begin_process():
    """Prepares a process of in_parallel()."""
    # Ctrl-C reaches it, too, but it ends with its parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()


# ---------------------------------------------------------------------------------------------------------
# The end

def write_puzzles(settings, script, config, kind, train, test, num_copies, left_out):
    """Writes the dataset of a prepare script, says how to train on it, and returns its folder.

    Args:
        settings, script: the prepare script's settings and its path.
        config: the file of config/ that suits the puzzles.
        kind: the puzzles' Kind.
        train, test: questions and answers, tokens [2, n, cells].
        num_copies: how many copies each training puzzle has, or the most.
        left_out: {what: how many}, for the manifest and for the user.
    """
    # make the copies; symmetries take much memory, so a block has few puzzles
    rng = np.random.default_rng([settings.seed, 2])
    test_keys = set(keys_of(test[0]))
    block_size = max(1, ROWS // (1 + num_copies))
    blocks = []
    for block in np.split(train, range(block_size, train.shape[1], block_size), axis=1):
        copies = kind.training_copies(block, num_copies, rng, test_keys)
        # each puzzle stands before its copies, [2, n, 1 + num_copies, cells]
        blocks.append(np.concatenate([block[:, :, None], copies], axis=2))
    versions = np.concatenate(blocks, axis=1)

    # write the files
    counts = left_out | {
        "training puzzles": train.shape[1],
        "copies of each": versions.shape[2] - 1,  # there may be fewer than num_copies
        "test puzzles": test.shape[1],
    }
    manifest = kind.task | {"command": command_of(script, settings), "counts": counts}
    write_dataset(settings.output_dir, {"train": versions, "test": test}, len(kind.symbols), manifest)
    print_report(settings, config, counts)
    return settings.output_dir


def command_of(script, settings):
    """Returns what a manifest says of the command that made the dataset: the script and its settings."""
    command = {"script": os.path.basename(script)} | vars(settings)
    del command["output_dir"]
    return command


def print_report(settings, config, counts):
    """Prints what is in a new dataset, {what: how many}, and the command that trains on it."""
    for what, count in counts.items():
        if count:
            print(f"{what}: {count:,}")
    # train.py, which makes its own dataset, goes on by itself
    if "DATA_PREPARE" in os.environ:
        return
    # the kind of the puzzles may stand in a fork
    forks = [file for file in settings.argv if os.path.basename(file) in settings.forks]
    # a folder may end with a slash, and have a space
    path = os.path.normpath(settings.output_dir)
    flags = ["--data_prepare=", f"--data_path={path}", f"--out_dir=out/{os.path.basename(path)}"]
    print(f"Train on it: python train.py config/{config} {shlex.join([*forks, *flags])}")
