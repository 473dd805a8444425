"""Models in files, and how notebooks and scripts ask them."""
import math
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_map

import configurator
import evaluate
import model
from puzzles import Judgement, kind_of, sigmoid
from runtime.device import Device, Place
from runtime.errors import UserError
from runtime.saved import load_weights, read_file

CELLS_AT_A_TIME = 5_000  # in a batch on the CPU: 61 Sudokus of 9x9 or 5 mazes of 30x30


def load_model(path, cells=0, defaults=None):
    """Returns the TRM in a file of scripts/export.py, or the average in a checkpoint of train.py.

    Args:
        path: the file. Nothing in it is executed.
        cells: S of the puzzles to solve; 0: as in training. Attention takes any number.
        defaults: {name: value} of settings that the file may lack, which are newer than it or a fork's.

    The model also has what the file says: task, what puzzles/__init__.py calls a task; test_puzzles, 100 or
    fewer as a batch; forks, those that trained it; the step; data_sha256, the dataset's. Raises ValueError
    for a damaged file, for one of the official code, and for weights that do not fit.
    """
    saved = read_file(path)
    if "task" not in saved:
        raise ValueError(f"{path} does not say what it solves: scripts/export.py makes a model file of a "
                         "checkpoint of the official code")
    settings = configurator.Values((defaults or {}) | saved["settings"])
    # these puzzles may have another size than those in training
    seq_len = cells or saved["sizes"]["seq_len"]
    task = kind_of(saved["task"]).resized(seq_len).task
    sizes = saved["sizes"] | dict(seq_len=seq_len, vocab_size=len(task["symbols"]))

    # build the model, of the size of these puzzles, with the averaged weights
    try:
        trm = model.TRM(settings, **sizes, task=task)
        load_weights(trm, saved.get("ema") or saved["weights"])
    except ValueError as e:
        forks = ", ".join(saved["forks"]) or "no fork"
        raise ValueError(f"{path}: {e}; it was trained with {forks}") from None

    # add what the file says
    for name in ("test_puzzles", "forks", "step", "data_sha256"):
        setattr(trm, name, saved[name])
    return trm.eval()


# ---------------------------------------------------------------------------------------------------------
# Questions, whose answers need not be known, on the CPU

def queue_of(settings, trm, task, batch, batch_size):
    """Returns an evaluate.Queue of the questions of an unlabeled_batch, on the CPU."""
    evaluator = evaluate.Evaluator(settings, trm, Device("cpu", settings, Place()), batch_size)
    indices = np.arange(len(batch["inputs"]))
    questions = SimpleNamespace(task=task, test_batch=lambda indices: tree_map(lambda t: t[indices], batch))
    return evaluate.Queue(evaluator, *evaluate.weights_of(trm), questions, indices)


def answers_to(settings, trm, task, batch, report=lambda num_finished: None):
    """Returns the results of an evaluate.Queue, {name: [n, ...]}, for the n questions of a batch.

    report: a function that gets the number of questions that were finished, now and then.
    """
    n, S = batch["inputs"].shape
    num_batches = math.ceil(n * S / CELLS_AT_A_TIME) or 1
    queue = queue_of(settings, trm, task, batch, math.ceil(n / num_batches))
    while queue.num_unfinished():
        report(queue.run_steps(lambda: False))
    return queue.results


class Step(NamedTuple):
    """A supervision step of an attempt at one puzzle."""
    attempt: int  # from 1
    number: int  # of the step in its attempt, from 1
    answer: np.ndarray  # tokens [S], turned back
    confidence: float  # from 0 to 1
    judgement: Judgement | None  # by the rules, if they are known


def watch(settings, trm, kind, question):
    """Yields a Step after each supervision step of each attempt at a question, tokens [S]."""
    batch = evaluate.unlabeled_batch(question[None])
    queue = queue_of(settings, trm, kind.task, batch, 1)
    attempt = 1
    number = 0
    while queue.num_unfinished():
        results = queue.eval_step()
        number += 1
        answer = queue.slots[0].turned_back(results["preds"][0].numpy())
        confidence = float(sigmoid(results["q_halt_logits"][0]))
        yield Step(attempt, number, answer, confidence, kind.judge(question[None], answer[None]))
        if results["halted"].all():
            attempt += 1
            number = 0
        queue.collect(results)


def solve(trm, questions, steps=16, attempts=1, identifiers=0):
    """Returns the most confident answer of all steps and attempts, and its confidence from 0 to 1.

    Args:
        trm: a model that load_model has returned.
        questions: a string of the symbols in its task, for a string and a float; a list of strings, for two
            lists; or tokens, a tensor [n, S], for two tensors.
        steps: the most supervision steps of an attempt, which ends once its answer repeats.
        attempts: the most attempts at a question, at copies by symmetry, until an answer is SURE.
        identifiers: the puzzle identifiers of tokens [n], for ARC; 0 for all.

    Raises UserError for a string that is no question of this model, ValueError for another number of cells,
    for steps or attempts below 1, and for a model that load_model has not returned.
    """
    if isinstance(questions, str):
        [answer], [confidence] = solve(trm, [questions], steps, attempts, identifiers)
        return answer, confidence
    if trm.task is None:
        raise ValueError("this model does not know its puzzle: weights.load_model reads one that does")
    kind = kind_of(trm.task)
    kind.check_attempts(attempts)

    if min(steps, attempts) < 1:
        raise ValueError(f"steps={steps} and attempts={attempts} must be 1 or more")

    # tokens of all questions
    is_text = not torch.is_tensor(questions)
    if is_text:
        from puzzles.text import parse  # training does without
        tokens = np.concatenate([[*parse(trm.task, text).values()] for text in questions])
        if len(tokens) != len(questions):
            raise UserError("each string must have one puzzle")
    else:
        tokens = questions.int().numpy()
    batch = evaluate.unlabeled_batch(tokens)
    batch["puzzle_identifiers"][:] = identifiers
    S = trm.sizes["seq_len"]
    if tokens.shape[1] != S:
        raise ValueError(f"the question has {tokens.shape[1]} cells, not {S}")

    # as solve.py does, whatever the training did
    settings = SimpleNamespace(**vars(trm.settings) | dict(
        eval_halt_max_steps=steps, eval_attempts=attempts, eval_patience=1,
        forward_dtype="float32", compile="off", seed=0))
    results = answers_to(settings, trm, trm.task, batch)
    answers = results["surest_preds"]
    confidences = sigmoid(results["surest_q_halt_logits"])

    # the answers in the form of the questions
    if is_text:
        return [kind.text(answer) for answer in answers], confidences.tolist()
    return torch.from_numpy(answers).to(questions.dtype), torch.from_numpy(confidences)
