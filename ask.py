"""Asks a model on the CPU, for notebooks, scripts/solve.py and scripts/play.py: no answers need be known."""
import math
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch

import evaluate
from puzzles import Judgement, kind_of
from runtime.device import Device

CELLS_AT_A_TIME = 5_000  # in a batch on the CPU: 61 Sudokus of 9x9 or 5 mazes of 30x30


class Questions(NamedTuple):
    """Puzzles without known answers, as evaluate.Queue takes them."""
    task: dict
    batch: dict  # of evaluate.unlabeled_batch

    def test_batch(self, indices):
        return {name: array[indices] for name, array in self.batch.items()}


def queue_of(settings, trm, task, batch, batch_size):
    """Returns an evaluate.Queue of questions, on the CPU.

    Args:
        settings: see evaluate.Evaluator.
        trm: a TRM on the CPU.
        task: the questions' task.
        batch: the questions, of evaluate.unlabeled_batch.
        batch_size: the number of slots.
    """
    evaluator = evaluate.Evaluator(settings, trm, Device("cpu", settings, is_alone=True), batch_size)
    indices = np.arange(len(batch["inputs"]))
    return evaluate.Queue(evaluator, *evaluate.weights_of(trm), Questions(task, batch), indices)


def answers_to(settings, trm, task, batch, report=lambda num_finished: None):
    """Returns the results of an evaluate.Queue, {name: [n, ...]}, for n questions.

    Args: see queue_of. report: a function that gets the number of questions that were finished, now and then.
    """
    n, cells = batch["inputs"].shape
    num_batches = math.ceil(n * cells / CELLS_AT_A_TIME) or 1
    queue = queue_of(settings, trm, task, batch, math.ceil(n / num_batches))
    while queue.num_unfinished():
        report(queue.run(lambda: False))
    return queue.results


class Step(NamedTuple):
    """A supervision step of an attempt at one puzzle."""
    attempt: int  # from 1
    number: int  # of the step in its attempt, from 1
    answer: np.ndarray  # tokens [cells], turned back
    confidence: float  # from 0 to 1
    judgement: Judgement | None  # by the rules, if they are known


def watch(settings, trm, kind, question):
    """Yields a Step after each supervision step of each attempt at a question, tokens [cells]."""
    batch = evaluate.unlabeled_batch(question[None])
    queue = queue_of(settings, trm, kind.task, batch, 1)
    attempt, number = 1, 0
    for results in queue.watch():
        number += 1
        [answer] = results["preds"]
        [confidence] = evaluate.sigmoid(results["q_halt_logits"]).tolist()
        yield Step(attempt, number, answer, confidence, kind.judge(question[None], answer[None]))
        if results["halted"].all():
            attempt, number = attempt + 1, 0


def solve(trm, questions, steps=16, attempts=1, identifiers=0):
    """Returns the most confident answer of all steps and attempts, and its confidence from 0 to 1.

    Args:
        trm: a model that weights.load_model has returned.
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
        tokens = np.stack([kind.parse(text) for text in questions])
    else:
        tokens = questions.int().numpy()
    batch = evaluate.unlabeled_batch(tokens)
    batch["puzzle_identifiers"][:] = identifiers
    cells = tokens.shape[1]
    if cells != trm.sizes["seq_len"]:
        raise ValueError(f"the question has {cells} cells, not {trm.sizes['seq_len']}")

    # as solve.py does, whatever the training did
    settings = SimpleNamespace(**vars(trm.settings) | dict(
        eval_halt_max_steps=steps, eval_attempts=attempts, eval_patience=1,
        forward_dtype="float32", compile="off", seed=0))
    results = answers_to(settings, trm, trm.task, batch)
    answers = results["surest_preds"]
    confidences = evaluate.sigmoid(results["surest_q_halt_logits"])

    # the answers in the form of the questions
    if is_text:
        return [kind.text(answer) for answer in answers], confidences.tolist()
    return torch.from_numpy(answers).to(questions.dtype), torch.from_numpy(confidences)
