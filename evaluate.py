"""Solves puzzles with a model, for train.py's evaluations and for scripts/solve.py.

A batch has slots. Each slot works on one attempt at one puzzle, and keeps the last answer and the surest
answer of this attempt: the answer of the step where q_halt was highest. An attempt leaves its slot after
eval_halt_max_steps, or once its answer has not changed for eval_patience steps. Then the slot takes the next
puzzle of the queue. With eval_attempts above 1, a puzzle without a sure answer waits for another attempt.
This attempt solves a copy by symmetry, and its answer is mapped back to the puzzle.
"""
import functools
import json
import os
from collections import deque
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_map

import model
from puzzles import IGNORE_LABEL, kind_of, sigmoid
from runtime.errors import TransientError, UserError, check_values
from runtime.files import Progress, replacing, to_stderr

SUREST = ("surest_preds", "surest_q_halt_logits", "surest_steps")  # answers of all attempts
ANSWERS = ("preds", "q_halt_logits", *SUREST)
# An answer with so much confidence is sure: the puzzle gets no further attempt. records/results.md says why.
SURE = 0.95


# ---------------------------------------------------------------------------------------------------------
# One step of a batch

def weights_of(trm):
    """Returns a TRM's weights and its puzzle embedding, for Evaluator.inputs."""
    puzzle_emb = trm.puzzle_emb.weights if trm.has_puzzle_emb else torch.zeros(1, 1)
    return trm.weights(), puzzle_emb


class Evaluator:
    """Runs supervision steps without gradients on a batch of slots.

    It reads forward_dtype, seed and the settings of halting and evaluations. micro_batch_size: the slots to
    compute at a time; 0: all.
    """

    def __init__(self, settings, trm, device, batch_size, micro_batch_size=0):
        self.settings = settings
        self.model = trm
        self.device = device
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        self.max_steps = settings.eval_halt_max_steps or settings.halt_max_steps
        self.dtype = getattr(torch, settings.forward_dtype)
        self.supervision_step = device.compile(trm.call_with)
        self.eval_step = device.compile_step(self.step_all_slots)

    def new_slots(self):
        """Returns {"sequences": of TRM.new_sequences, "answers": {name: [slots, ...]}}; all are free."""
        sequences = self.model.new_sequences(self.batch_size, self.dtype)
        # the last answer and the most confident one, for update_answers
        answers = dict(
            preds=torch.zeros_like(sequences["inputs"]),
            repeats=torch.zeros_like(sequences["steps"]),
            surest_preds=torch.zeros_like(sequences["inputs"]),
            surest_q_halt_logits=torch.zeros(self.batch_size),
            surest_steps=torch.zeros_like(sequences["steps"]),
        )
        return self.device.put(dict(sequences=sequences, answers=answers))

    def inputs(self, weights, puzzle_emb, batch):
        """Returns the inputs of eval_step: what weights_of returns, on the device, and a Dataset's batch."""
        return dict(puzzles=self.device.put(batch), weights=weights, puzzle_emb=puzzle_emb)

    @torch.no_grad()
    def step_all_slots(self, slots, inputs):
        """Runs one supervision step of all slots, in place on them. On XLA it is one program.

        Returns {name: [B, ...]}: ANSWERS, repeats, METRICS and LOSS_TERMS of each slot after this step, and
        halted.
        """
        self.model.eval()
        weights = self.device.cast_weights(inputs["weights"], self.dtype)

        # free slots start on the puzzles of the batch; the loop gets rows of the embedding, never all of it
        sequences = model.take_new_puzzles(slots["sequences"], inputs["puzzles"])
        batch = dict(sequences=sequences, answers=slots["answers"])
        if self.model.has_puzzle_emb:
            batch["puzzle_rows"] = inputs["puzzle_emb"][sequences["puzzle_identifiers"]]
        _, (new_slots, values) = self.device.for_each_micro_batch(
            self.step_slots, {}, weights, batch, self.micro_batch_size)
        tree_map(torch.Tensor.copy_, slots, new_slots)
        return values

    def step_slots(self, weights, micro_batch):
        """Runs a supervision step of some slots.

        Returns {}, since only training adds something up; the slots after the step, and the values of all.
        """
        is_new = micro_batch["sequences"]["steps"] == 0
        result = self.supervision_step(weights, micro_batch["sequences"], micro_batch.get("puzzle_rows"))
        check_values(result.values, (), len(is_new))

        # keep the answers that count; slots whose answer is final halt
        answers = update_answers(micro_batch["answers"], result, is_new)
        halted = result.sequences["steps"] >= self.max_steps
        if self.settings.eval_patience:
            halted |= answers["repeats"] >= self.settings.eval_patience
        new_slots = dict(sequences=result.sequences | dict(halted=halted), answers=answers)
        values = result.values | answers | dict(q_halt_logits=result.q_halt, halted=halted)
        return {}, (new_slots, values)


def update_answers(answers, result, is_new):
    """Returns the answers that count after a SupervisionStep: the last one and the most confident one."""
    is_repeated = (result.answers == answers["preds"]).all(-1) & ~is_new
    # the later of two equally confident answers counts
    is_surer = is_new | (result.q_halt >= answers["surest_q_halt_logits"])
    return dict(
        preds=result.answers,
        repeats=torch.where(is_repeated, answers["repeats"] + 1, 0),
        surest_preds=model.where(is_surer, result.answers, answers["surest_preds"]),
        surest_q_halt_logits=torch.where(is_surer, result.q_halt, answers["surest_q_halt_logits"]),
        surest_steps=torch.where(is_surer, result.sequences["steps"], answers["surest_steps"]),
    )


# ---------------------------------------------------------------------------------------------------------
# A queue of attempts

class Attempt(NamedTuple):
    """An attempt at a puzzle: at the puzzle itself, or at a copy by symmetry."""
    puzzle: int  # its number in the queue
    copies: object = None  # an iterator, see Kind.copies, of further copies; None: it is the puzzle itself
    symmetry: object = None  # what makes the copy, and turns its answer back

    def turned_back(self, answer):
        """Returns the answer to the puzzle, tokens [S], of an answer to the copy."""
        return self.symmetry.undo(answer).ravel() if self.symmetry else answer


class Queue:
    """Solves n puzzles on the slots of an Evaluator, in up to eval_attempts attempts each.

    results, {name: [n, ...]}, zeros until a puzzle's first attempt leaves:
        preds, q_halt_logits (the official names of answers and q_halt), METRICS, LOSS_TERMS: of the first
            attempt, at the puzzle itself.
        SUREST: the most confident answer of all attempts; a tie goes to the earlier attempt.
        attempts: how many there were.

    weights, puzzle_emb: {name: tensor} and [N, D'] on the evaluator's device, as in weights_of. The puzzles
    are the examples `indices`, int [n], of test_set, a Dataset or an object with its task and test_batch.
    """

    def __init__(self, evaluator, weights, puzzle_emb, test_set, indices):
        self.evaluator = evaluator
        self.weights = weights
        self.puzzle_emb = puzzle_emb
        self.test_set = test_set
        self.indices = indices
        self.waiting = deque(map(Attempt, range(len(indices))))
        self.slots = [None] * evaluator.batch_size  # the Attempt in each slot; None: free
        self.halted = np.ones(evaluator.batch_size, bool)  # slots that take a new one at the next step
        self.slot_tensors = evaluator.new_slots()
        self.inputs = None  # what eval_step gets; fill() makes it

        # answers take a byte a cell, since a test set may have a third of a billion cells
        n = len(indices)
        S = evaluator.model.sizes["seq_len"]
        self.results = {"attempts": np.zeros(n, np.int32)}
        for name in (*ANSWERS, *model.METRICS, *model.LOSS_TERMS):
            self.results[name] = np.zeros(n, np.float32)
        for name in ("preds", "surest_preds"):
            self.results[name] = np.zeros((n, S), np.uint8)

        # free slots repeat their last puzzle, zeros at first, until they halt; nothing collects the results
        self.batch = unlabeled_batch(np.zeros((evaluator.batch_size, S), np.int32))

    def num_unfinished(self):
        """Returns the number of puzzles that wait or run."""
        return len(self.waiting) + len(self.slots) - self.slots.count(None)

    def run_steps(self, should_stop):
        """Runs as many supervision steps as an attempt may take, fewer if the queue is empty before.

        should_stop: a function; once it returns true, no further step begins. Returns the number of puzzles
        that have finished.
        """
        num_before = self.num_unfinished()
        for supervision_step in range(1, self.evaluator.max_steps + 1):
            if should_stop() or not self.num_unfinished():
                break
            results = self.run_step()
            # without eval_patience all attempts leave together: no result is read before the last step
            if self.evaluator.settings.eval_patience or supervision_step == self.evaluator.max_steps:
                self.collect(results)
        return num_before - self.num_unfinished()

    def run_step(self):
        """Runs a supervision step of all slots and returns its results, on the device."""
        self.fill()
        return self.evaluator.eval_step(self.slot_tensors, self.inputs)

    def fill(self):
        """Gives the free slots the next attempts, which are inputs of the next step."""
        # as many free slots as there are attempts that wait
        free = [i for i, attempt in enumerate(self.slots) if attempt is None and self.halted[i]]
        free = free[:len(self.waiting)]
        if not free:
            return
        # their questions take the slots' places in the batch; all else in it stays
        attempts = [self.waiting.popleft() for _ in free]
        batch = self.test_set.test_batch(self.indices[[attempt.puzzle for attempt in attempts]])
        for slot, attempt, question in zip(free, attempts, batch["inputs"]):
            self.slots[slot] = attempt
            # the labels stay the puzzle's: nobody reads the metrics of a copy
            if attempt.symmetry:
                question[:] = attempt.symmetry.apply(question)
        for name, array in batch.items():
            self.batch[name][free] = array
        self.inputs = self.evaluator.inputs(self.weights, self.puzzle_emb, self.batch)

    def collect(self, results):
        """Takes the attempts that halted out of their slots."""
        # this waits for the device
        arrays = {name: t.cpu().numpy() for name, t in results.items()}
        self.halted = arrays["halted"]
        for i, attempt in enumerate(self.slots):
            if attempt and self.halted[i]:
                self.slots[i] = None
                result = {name: array[i] for name, array in arrays.items()}
                result["surest_preds"] = attempt.turned_back(result["surest_preds"])
                self.record(attempt, result)

    def record(self, attempt, result):
        """Records what counts of an attempt's results, and tries again if no answer is sure."""
        puzzle = attempt.puzzle
        results = self.results
        surest = results["surest_q_halt_logits"]

        # the first attempt sets all results; a later one sets only the surest answer, if its own is surer
        names = ()
        if attempt.symmetry is None:
            names = results.keys() & result.keys()
        elif result["surest_q_halt_logits"] > surest[puzzle]:
            names = SUREST
        for name in names:
            results[name][puzzle] = result[name]
        results["attempts"][puzzle] += 1

        # an unsure puzzle waits for an attempt at another copy, if there is one
        is_sure = sigmoid(surest[puzzle]) >= SURE
        if not is_sure and results["attempts"][puzzle] < self.evaluator.settings.eval_attempts:
            copies = attempt.copies or self.copies_of(self.indices[puzzle])
            symmetry = next(copies, None)
            if symmetry:
                self.waiting.append(Attempt(puzzle, copies, symmetry))

    def copies_of(self, index):
        """Returns an iterator over the copies of an example of test_set."""
        [question] = self.test_set.test_batch([index])["inputs"]
        return kind_of(self.test_set.task).copies(question, self.evaluator.settings.seed, index)


def unlabeled_batch(questions):
    """Returns the batch of questions, tokens int32 [n, S], without answers and identifiers."""
    return dict(
        inputs=questions,
        labels=np.full_like(questions, IGNORE_LABEL),
        puzzle_identifiers=np.zeros(len(questions), np.int32),
    )


# ---------------------------------------------------------------------------------------------------------
# The evaluation of a test set, on all ranks

def evaluate(evaluator, weights, puzzle_emb, test_set, indices, title, should_stop, save_to=""):
    """Returns {"eval/...": number} for test puzzles, or {} if a stop is requested. All ranks.

    Args:
        evaluator, weights, puzzle_emb, test_set: see Queue.
        indices: which of its examples, int [n]; each rank takes its part of them.
        title: the beginning of the lines that show the progress.
        should_stop: a function that says whether this host is asked to stop.
        save_to: file stem in out_dir for eval_save_outputs. Empty: writes nothing, submission.json included.
    """
    settings = evaluator.settings
    device = evaluator.device
    own_indices = indices[device.rank::device.world]
    queue = Queue(evaluator, weights, puzzle_emb, test_set, own_indices)
    if not solve_all(queue, title, should_stop):
        return {}

    # the last answer of the first attempt, as in the paper, and the surest answer of all attempts
    arrays = test_set.test_batch(own_indices) | queue.results
    values = means(device.all_gather(eval_sums(settings, test_set, arrays)))

    # ARC: the versions of a task vote. puzzles/arc.py counts the votes, which all ranks gather here.
    # Rank 0 saves the answers that have won, if all examples took part.
    save = functools.partial(save_file, settings, device, should_stop)
    if kind_of(test_set.task).versions_vote:
        from puzzles import arc  # other puzzles do without
        votes = arc.count_votes(test_set, own_indices, arrays["preds"], arrays["q_halt_logits"])
        elected = arc.merge_votes(device.all_gather(votes))
        values |= arc.vote_values(test_set, elected)
        if save_to and device.rank == 0:
            if len(indices) == len(test_set):
                answers = json.dumps(arc.submission(test_set, elected))
                save("submission.json", lambda f: f.write(answers.encode()))
            else:
                to_stderr(f"submission.json is not written: these are {len(indices)} of {len(test_set)} "
                          "examples")

    # each rank saves its arrays
    if save_to and settings.eval_save_outputs:
        wanted = {name: arrays[name] for name in settings.eval_save_outputs.split(",") if name}
        part = f".{device.rank}" if device.world > 1 else ""
        save(f"{save_to}{part}.npz", lambda f: np.savez_compressed(f, indices=own_indices, **wanted))
    return values


def solve_all(queue, title, should_stop):
    """Returns True once the queues of all ranks are empty, False if a stop is requested. All ranks."""
    device = queue.evaluator.device
    progress = Progress(f"{title}, puzzles", len(queue.indices))
    # ranks need different numbers of steps: after each round they compare, and leave or stop together
    while True:
        num_finished = queue.run_steps(should_stop)
        if device.rank == 0:
            progress.add(num_finished)
        ranks = device.all_gather((should_stop(), queue.num_unfinished()))
        num_stops, num_unfinished = np.sum(ranks, axis=0)
        if num_stops or not num_unfinished:
            return num_stops == 0


def eval_sums(settings, test_set, arrays):
    """Returns {name: sum over puzzles} of METRICS, LOSS_TERMS and the judgements of answers."""
    values = {name: arrays[name] for name in (*model.METRICS, *model.LOSS_TERMS)}  # [n] each

    # the rules judge the last answers and the surest ones; these are compared with the labels, too
    kind = kind_of(test_set.task)
    for prefix in "", "surest_":
        for name, counts in kind.metrics(arrays["inputs"], arrays[prefix + "preds"]).items():
            values[prefix + name] = counts
    labels = arrays["labels"]
    is_right = (arrays["surest_preds"] == labels) | (labels == IGNORE_LABEL)
    values["surest_accuracy"] = is_right.all(1)
    if settings.eval_attempts > 1:
        values["attempts"] = arrays["attempts"]
    # "count" is 0 for puzzles without a label, which take no part in the means
    return {name: float((arrays["count"] * value).sum(dtype=np.float64)) for name, value in values.items()}


def means(ranks):
    """Returns {"eval/...": mean over the puzzles} of the ranks' sums, and the number of puzzles."""
    total = {name: sum(sums[name] for sums in ranks) for name in ranks[0]}
    count = total.pop("count")
    values = {f"eval/{name}": value / max(count, 1) for name, value in total.items()}
    return values | {"eval/puzzles": int(count)}


# ---------------------------------------------------------------------------------------------------------
# Files that an evaluation leaves in out_dir

def save_file(settings, device, should_stop, name, write):
    """Writes a file of out_dir. Uploads it unless the training run's mirror will: it copies rank 0's files.

    What fails costs a line on stderr, and not the evaluation. write: a function of the open file.
    """
    path = f"{settings.out_dir}/{name}"
    try:
        os.makedirs(settings.out_dir, exist_ok=True)
        with replacing(path) as f:
            write(f)
        if settings.gcs_dir and (device.rank or settings.eval_only):
            from runtime.bucket import Bucket
            Bucket(settings.gcs_dir, should_stop).write(name, Path(path))
    except (OSError, UserError, TransientError, SystemExit) as e:  # SystemExit: a stop was requested
        to_stderr(f"{path}: not saved: {e}")
