"""Loads models from files, and solves puzzles with them, for notebooks and scripts."""
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch

import configurator
import evaluate
import model
from puzzles import Judgement, kind_of, sigmoid
from puzzles.sudoku import BOXES
from runtime.device import Device, Place
from runtime.errors import UserError
from runtime.files import Progress, file_hash
from runtime.saved import load_weights, read_file

CELLS_AT_A_TIME = 5_000  # in a batch on the CPU: 61 Sudokus of 9x9 or 5 mazes of 30x30
EXAMPLES = Path(__file__).with_name("examples")


def own_forks(path):
    """Returns the paths of the forks in examples/ that trained the model in a file, in their order.

    It knows them by their text: whoever runs them runs nothing of the file, and nothing that lies elsewhere.
    """
    # a fork's digest is what configurator.add_fork makes of its text
    paths = {file_hash(example)[:8]: str(example) for example in EXAMPLES.glob("*.py")}
    forks = read_file(path).get("forks", {})
    return [paths[digest] for digest in forks.values() if digest in paths]


def load_model(path, cells=0, defaults=None):
    """Returns the TRM in a file of scripts/export.py, or the average in a checkpoint of train.py.

    Args:
        path: the file. Nothing in it is executed.
        cells: S of the puzzles to solve; 0: as in training. Attention takes any number.
        defaults: {name: value} of settings that the file may lack, which are newer than it or a fork's.

    The model also has what the file says: task, what puzzles/__init__.py calls a task; test_puzzles, 100 or
    fewer as a batch; forks, those that trained it; the step; data_sha256, the dataset's. Raises ValueError or
    UserError for a damaged file, for one of the official code, and for weights that do not fit.
    """
    saved = read_file(path)
    if "task" not in saved:
        raise ValueError(f"{path} does not say what it solves: scripts/export.py makes a model file of a "
                         "checkpoint of the official code")
    settings = configurator.Values((defaults or {}) | saved["settings"])
    settings.loss_type = "softmax_cross_entropy"  # no answer depends on it, and a fork's may not be here
    # these puzzles may have another size than those in training
    kind = kind_of(saved["task"])
    if cells:
        kind = kind.resized(cells)
        if kind.cells != cells:
            raise ValueError(f"{path}: there are no puzzles with {cells} cells")
    sizes = saved["sizes"] | dict(seq_len=kind.cells, vocab_size=len(kind.symbols))

    # build the model, of the size of these puzzles, with the averaged weights
    try:
        trm = model.TRM(settings, **sizes, task=kind.task)
        load_weights(trm, saved.get("ema") or saved["weights"])
    except ValueError as e:
        forks = ", ".join(map(" ".join, saved["forks"].items())) or "no fork"
        raise ValueError(f"{path}: {e}; it was trained with {forks}, and needs the same here") from None

    # add what the file says
    for name in ("test_puzzles", "forks", "step", "data_sha256"):
        setattr(trm, name, saved[name])
    return trm.eval()


def fits_every_size(trm):
    """Returns True if symbols have no rows of their own in the table.

    All symbols are then alike, and weights fit any number of them. A copy of a puzzle by symmetry has the
    copy of its answer.
    """
    return len(trm.embed_tokens.embedding_weight) != len(trm.task["symbols"])


def fitting_kinds(trm):
    """Returns the Kinds of puzzles that the weights fit."""
    kind = kind_of(trm.task)
    return sizes_of(kind) if fits_every_size(trm) else [kind]


def sizes_of(kind):
    """Returns the Kinds of Sudokus of every size for a Kind of Sudoku, else the kind alone."""
    if kind.task["kind"] != "sudoku":
        return [kind]
    return [kind.resized(rows * rows) for rows in BOXES]


# ---------------------------------------------------------------------------------------------------------
# Questions, whose answers need not be known, on the CPU

def queue_of(settings, trm, questions, batch_size, identifiers=0):
    """Returns an evaluate.Queue of questions, tokens [n, S], on the CPU; identifiers: [n], or 0 for all."""
    # what a Queue needs of a data.Dataset
    batch = evaluate.unlabeled_batch(questions)
    batch["puzzle_identifiers"][:] = identifiers

    def test_batch(indices):
        return {name: array[indices] for name, array in batch.items()}

    # one replica on the CPU, whatever the environment says
    evaluator = evaluate.Evaluator(settings, trm, Device("cpu", settings, Place()), batch_size)
    test_set = SimpleNamespace(task=trm.task, test_batch=test_batch)
    return evaluate.Queue(evaluator, *evaluate.weights_of(trm), test_set, np.arange(len(questions)))


def answers_to(settings, trm, questions, identifiers=0):
    """Returns the results of an evaluate.Queue, {name: [n, ...]}, for questions; see queue_of."""
    # as many puzzles at a time as CELLS_AT_A_TIME allows, one at least
    n, S = questions.shape
    batch_size = min(n, max(1, CELLS_AT_A_TIME // S))
    queue = queue_of(settings, trm, questions, batch_size, identifiers)
    progress = Progress("solving", n)
    while queue.num_unfinished():
        progress.add(queue.run_steps(lambda: False))
    return queue.results


class Step(NamedTuple):
    """A supervision step of an attempt at one puzzle."""
    attempt: int  # from 1
    number: int  # of the step in its attempt, from 1
    answer: np.ndarray  # tokens [S], turned back
    confidence: float  # from 0 to 1
    judgement: Judgement | None  # by the rules, if they are known


def watch(settings, trm, question):
    """Yields a Step after each supervision step of each attempt at a question, tokens [S]."""
    kind = kind_of(trm.task)
    queue = queue_of(settings, trm, question[None], 1)
    attempt = 1
    number = 0
    while queue.num_unfinished():
        results = queue.run_step()
        number += 1
        # the slot has its attempt until collect() takes it out
        answer = queue.slots[0].turned_back(results["preds"][0].numpy())
        confidence = float(sigmoid(results["q_halt_logits"][0]))
        yield Step(attempt, number, answer, confidence, kind.judge(question[None], answer[None]))
        # the next step begins another attempt, or the puzzle is done
        if results["halted"].all():
            attempt += 1
            number = 0
        queue.collect(results)


def solve(trm, questions, steps=16, attempts=1, identifiers=0):
    """Returns the most confident answer of all steps and attempts, and its confidence from 0 to 1.

    Args:
        trm: a model that load_model has returned.
        questions: tokens, a tensor [n, S], for a tensor of answers [n, S] and one of confidences [n]. A list
            of n strings of the symbols in the model's task, for two lists, and one string, for a string and a
            float, are read as tokens first.
        steps: the most supervision steps of an attempt, which ends once its answer repeats. Models for every
            size take them all.
        attempts: the most attempts at a question, at copies by symmetry, until one is evaluate.SURE.
        identifiers: the puzzle identifiers of tokens [n], for ARC; 0 for all.

    Raises UserError for a string that is not one question of this model, ValueError for another number of
    cells, and for steps or attempts below 1.
    """
    # one string is a list of one
    kind = kind_of(trm.task)
    if isinstance(questions, str):
        [answer], [confidence] = solve(trm, [questions], steps, attempts, identifiers)
        return answer, confidence
    # strings become tokens, and their answers strings
    if isinstance(questions, list):
        if not questions:
            return [], []
        from puzzles.text import parse  # training does without
        tokens = np.concatenate([[*parse(trm.task, text).values()] for text in questions])
        if len(tokens) != len(questions):
            raise UserError("each string must have one puzzle")
        answers, confidences = solve(trm, torch.from_numpy(tokens), steps, attempts, identifiers)
        return list(map(kind.text, answers)), confidences.tolist()

    # from here on questions are tokens
    kind.check_attempts(attempts)
    if min(steps, attempts) < 1:
        raise ValueError(f"steps={steps} and attempts={attempts} must be 1 or more")
    S = trm.sizes["seq_len"]
    if questions.shape[1] != S:
        raise ValueError(f"the question has {questions.shape[1]} cells, not {S}")

    # as solve.py does, whatever the training did
    settings = SimpleNamespace(**vars(trm.settings) | dict(
        eval_halt_max_steps=steps,
        eval_attempts=attempts,
        eval_patience=int(not fits_every_size(trm)),
        forward_dtype="float32",
        compile="off",
        seed=0,
    ))
    results = answers_to(settings, trm, questions.int().numpy(), identifiers)
    answers = torch.from_numpy(results["surest_preds"])
    confidences = sigmoid(results["surest_q_halt_logits"])
    return answers.to(questions.dtype), torch.from_numpy(confidences)
