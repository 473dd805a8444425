"""Solves puzzles with a model: train.py's evaluations, scripts/solve.py and scripts/play.py.

A batch has slots, and a slot works on one attempt at one puzzle. After each supervision step a slot keeps the
last answer and the most confident one so far ("surest": of the step where q_halt was highest). An attempt
leaves its slot after eval_halt_max_steps, or once its answer has not changed for eval_patience steps; then
the slot takes the next puzzle of the queue. A puzzle without a sure answer waits there for another attempt:
at a copy of itself by symmetry, whose answer is turned back.
"""
import math
from collections import Counter
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_map

import model
import puzzles
from puzzles import IGNORE_LABEL
from puzzles.arc import count_votes, merge_votes, vote_values
from runtime.device import Device, cast_weights
from runtime.files import Progress
from runtime.outputs import save_outputs, save_submission

SUREST = ("surest_preds", "surest_q_halt_logits", "surest_steps")  # answers of all attempts
ANSWERS = ("preds", "q_halt_logits", *SUREST)


# ---------------------------------------------------------------------------------------------------------
# One step of a batch

class Evaluator:
    """Runs supervision steps without gradients on a batch of slots.

    Args:
        settings: train.py's settings, of which forward_dtype, micro_batch_size, seed, the halting and the
            eval_ settings are read.
        trm: a TRM.
        device: a device.Device, or an object with its methods.
        batch_size: the number of slots on this device.
    """

    def __init__(self, settings, trm, device, batch_size):
        self.settings = settings
        self.model = trm
        self.device = device
        self.batch_size = batch_size
        self.depth = settings.eval_halt_max_steps or settings.halt_max_steps
        self.dtype = getattr(torch, settings.forward_dtype)
        self.supervision_step = device.compile(trm.call_with)
        self.program = device.compile_step(self.step)

    def new_slots(self):
        """Returns {"sequences": of TRM.new_sequences, "kept": {name: [slots, ...]}}; all slots are free."""
        sequences = self.model.new_sequences(self.batch_size, self.dtype)
        # the last answer and the most confident one, for keep_answers
        kept = dict(
            preds=torch.zeros_like(sequences["inputs"]),
            repeats=torch.zeros_like(sequences["steps"]),
            surest_preds=torch.zeros_like(sequences["inputs"]),
            surest_q_halt_logits=torch.zeros(self.batch_size),
            surest_steps=torch.zeros_like(sequences["steps"]),
        )
        return self.device.put(dict(sequences=sequences, kept=kept))

    def inputs(self, weights, table, batch):
        """Returns the inputs of program(), on the device.

        Args:
            weights: {name: float32 tensor}, on the device.
            table: the puzzle embedding [N, D'], on the device.
            batch: what free slots take: inputs and labels [B, S], puzzle_identifiers [B].
        """
        return dict(
            puzzles=self.device.put(batch),
            weights=weights,
            table=table,
        )

    @torch.no_grad()
    def step(self, slots, inputs):
        """Runs one supervision step of all slots, in place on them. On XLA it is one program.

        Returns {name: [B, ...]}: ANSWERS, METRICS and LOSS_TERMS of each slot after this step, and halted.
        """
        self.model.eval()
        weights = cast_weights(self.device, inputs["weights"], self.dtype)

        # free slots start on the puzzles of the batch; the loop gets rows of the embedding, never all of it
        sequences = model.take_new_puzzles(slots["sequences"], inputs["puzzles"])
        examples = dict(sequences=sequences, kept=slots["kept"])
        if self.model.has_puzzle_emb:
            examples["puzzle_rows"] = inputs["table"][sequences["puzzle_identifiers"]]
        _, results = self.device.for_each_micro_batch(
            self.step_micro_batch, {}, weights, examples, self.settings.micro_batch_size)
        tree_map(torch.Tensor.copy_, slots, results["slots"])
        return results["values"]

    def step_micro_batch(self, weights, examples):
        """Runs a supervision step of some slots, for device.for_each_micro_batch.

        Returns {}, since nothing adds up, and dict(slots=..., values=...); values are what step() returns.
        """
        is_new = examples["sequences"]["steps"] == 0
        step = self.supervision_step(weights, examples["sequences"], examples.get("puzzle_rows"))

        # keep the answers that count; slots whose answer is final halt
        kept = keep_answers(examples["kept"], step, is_new)
        halted = step.sequences["steps"] >= self.depth
        if self.settings.eval_patience:
            halted |= kept["repeats"] >= self.settings.eval_patience
        results = dict(
            slots=dict(sequences=step.sequences | dict(halted=halted), kept=kept),
            values=step.values | kept | dict(q_halt_logits=step.q_halt, halted=halted),
        )
        return {}, results

    def watch(self, weights, table, batch):
        """Yields the results of step() as arrays, after each supervision step of one batch; see inputs()."""
        slots = self.new_slots()
        inputs = self.inputs(weights, table, batch)
        for _ in range(self.depth):
            results = self.program(slots, inputs)
            yield {name: t.cpu().numpy() for name, t in results.items()}


def keep_answers(kept, step, is_new):
    """Returns the answers that count after a SupervisionStep: the last one and the most confident one."""
    is_repeated = (step.answers == kept["preds"]).all(-1) & ~is_new
    # the later of two equally confident answers counts
    is_surer = is_new | (step.q_halt >= kept["surest_q_halt_logits"])
    return dict(
        preds=step.answers,
        repeats=torch.where(is_repeated, kept["repeats"] + 1, 0),
        surest_preds=model.where(is_surer, step.answers, kept["surest_preds"]),
        surest_q_halt_logits=torch.where(is_surer, step.q_halt, kept["surest_q_halt_logits"]),
        surest_steps=torch.where(is_surer, step.sequences["steps"], kept["surest_steps"]),
    )


# ---------------------------------------------------------------------------------------------------------
# A queue of attempts

class Queue:
    """Solves n puzzles on the slots of an Evaluator, in up to eval_attempts attempts each.

    results, {name: [n, ...]}, zeros until a puzzle's first attempt leaves:
        preds, q_halt_logits, METRICS, LOSS_TERMS: of the first attempt, at the puzzle itself.
        SUREST: the most confident answer of all attempts; a tie goes to the earliest.
        attempts: how many there were.

    Args:
        evaluator: an Evaluator.
        weights, table: see Evaluator.inputs.
        test: a Dataset, or an object with its task and test_batch.
        indices: which of its examples [n].
    """

    def __init__(self, evaluator, weights, table, test, indices):
        self.evaluator = evaluator
        self.weights = weights
        self.table = table
        self.test = test
        self.indices = indices
        self.waiting = np.arange(len(indices))  # puzzles that wait for an attempt
        self.slots = np.full(evaluator.batch_size, -1)  # the puzzle in each slot; -1: free
        self.halted = self.slots < 0  # slots that take a new puzzle at the next step
        self.copies = {}  # {puzzle without a sure answer: an iterator of its copies}
        self.current = {}  # {the same: the symmetry and the copy of its next attempt}
        self.slot_tensors = evaluator.new_slots()

        # answers take a byte a cell, since a test set may have a third of a billion cells
        n = len(indices)
        seq_len = evaluator.model.sizes["seq_len"]
        names = (*ANSWERS, *model.METRICS, *model.LOSS_TERMS)
        self.results = {name: np.zeros(n, dtype=np.float32) for name in names}
        for name in ("preds", "surest_preds"):
            self.results[name] = np.zeros((n, seq_len), dtype=np.uint8)
        self.results["attempts"] = np.zeros(n, dtype=np.int32)

        # free slots repeat their last puzzle, zeros at first, until they halt; nothing collects the results
        questions = np.zeros((evaluator.batch_size, seq_len), dtype=np.int32)
        self.batch = unlabeled_batch(questions)

    def num_unfinished(self):
        """Returns the number of puzzles that wait or run."""
        return len(self.waiting) + np.count_nonzero(self.slots >= 0)

    def run(self, should_stop):
        """Runs as many supervision steps as an attempt may take, fewer if the queue is empty before.

        should_stop: a function; once it returns true, no further step begins. Returns the number of puzzles
        that have finished.
        """
        num_before = self.num_unfinished()
        for step in range(1, self.evaluator.depth + 1):
            if should_stop() or not self.num_unfinished():
                break
            self.fill()
            results = self.evaluator.program(self.slot_tensors, self.inputs)
            # without eval_patience all attempts leave together: no result is read before the last step
            if self.evaluator.settings.eval_patience or step == self.evaluator.depth:
                self.collect(results)
        return num_before - self.num_unfinished()

    def fill(self):
        """Gives the free slots the next puzzles, which are inputs of the next step."""
        # the waiting puzzles go into free slots
        free = np.flatnonzero(self.halted & (self.slots < 0))[:len(self.waiting)]
        if not len(free):
            return
        self.slots[free] = self.waiting[:len(free)]
        self.waiting = self.waiting[len(free):]

        # the first attempt is at the puzzle itself; the others are at copies, without labels
        batch = self.test.test_batch(self.indices[self.slots[free]])
        for i, puzzle in enumerate(self.slots[free]):
            if puzzle in self.current:
                _, batch["inputs"][i] = self.current[puzzle]
                batch["labels"][i] = IGNORE_LABEL
        for name, array in batch.items():
            self.batch[name][free] = array
        self.inputs = self.evaluator.inputs(self.weights, self.table, self.batch)

    def collect(self, results):
        """Keeps the results of the attempts that leave, and lets puzzles without a sure answer wait again."""
        self.halted = results["halted"].cpu().numpy()
        leaving = np.flatnonzero(self.halted & (self.slots >= 0))
        if not len(leaving):
            return
        puzzle = self.slots[leaving]
        self.slots[leaving] = -1

        # turn the answers to copies back
        kept = self.results
        new = {name: results[name].cpu().numpy()[leaving] for name in kept if name != "attempts"}
        for i, number in enumerate(puzzle):
            if number in self.current:
                symmetries, _ = self.current.pop(number)
                new["surest_preds"][i] = symmetries.undo(new["surest_preds"][i])

        # the first attempt counts by itself, and the surest answer of all
        is_first = kept["attempts"][puzzle] == 0
        is_surer = is_first | (new["surest_q_halt_logits"] > kept["surest_q_halt_logits"][puzzle])
        for name, array in new.items():
            counts = is_surer if name in SUREST else is_first
            kept[name][puzzle[counts]] = array[counts]
        kept["attempts"][puzzle] += 1

        # try again where that answer is not sure
        is_sure = sigmoid(kept["surest_q_halt_logits"][puzzle]) >= model.SURE
        is_last = kept["attempts"][puzzle] >= self.evaluator.settings.eval_attempts
        for number in puzzle[is_sure | is_last].tolist():
            self.copies.pop(number, None)
        for number in puzzle[~is_sure & ~is_last].tolist():
            self.try_again(number)

    def try_again(self, puzzle):
        """Lets a puzzle wait for an attempt at another copy, if there is one."""
        if puzzle not in self.copies:
            index = self.indices[puzzle]
            [question] = self.test.test_batch([index])["inputs"]
            seed = self.evaluator.settings.seed
            self.copies[puzzle] = puzzles.copies(self.test.task, question, seed, index)
        copy = next(self.copies[puzzle], None)
        if copy:
            self.current[puzzle] = copy
            self.waiting = np.append(self.waiting, puzzle)


def unlabeled_batch(questions):
    """Returns the batch of questions, tokens int32 [n, S], without answers and identifiers."""
    return dict(
        inputs=questions,
        labels=np.full_like(questions, IGNORE_LABEL),
        puzzle_identifiers=np.zeros(len(questions), dtype=np.int32),
    )


# ---------------------------------------------------------------------------------------------------------
# The evaluation of a test set, on all ranks

def evaluate(evaluator, weights, table, test, indices, label, should_stop, save_to=""):
    """Returns {"eval/...": number} for test puzzles, or {} if a stop is requested. All ranks.

    Args:
        evaluator: an Evaluator.
        weights, table: see Evaluator.inputs.
        test: a Dataset.
        indices: which of its examples, for all ranks.
        label: the beginning of the lines that show the progress.
        should_stop: a function that says whether this host is asked to stop.
        save_to: the name in out_dir, without its ending, of the arrays in eval_save_outputs. "": neither
            they nor submission.json, ARC's answers, are written.
    """
    settings = evaluator.settings
    device = evaluator.device
    own_indices = indices[device.rank::device.world]

    queue = Queue(evaluator, weights, table, test, own_indices)
    progress = Progress(f"{label}, puzzles", len(own_indices))

    # ranks need different numbers of steps: they meet now and then, and leave or stop together
    num_unfinished = 1
    while num_unfinished:
        num_finished = queue.run(should_stop)
        if device.rank == 0:
            progress.add(num_finished)
        ranks = device.all_gather((should_stop(), queue.num_unfinished()))
        num_stops, num_unfinished = np.sum(ranks, axis=0)
        if num_stops:
            return {}

    # the last answer of the first attempt, as in the paper, and the surest answer of all attempts
    arrays = test.test_batch(own_indices) | queue.results
    if save_to and settings.eval_save_outputs:
        save_outputs(settings, device, save_to, own_indices, arrays, should_stop)

    # add up the figures of all ranks, and ARC's votes
    sums = eval_sums(test, arrays)
    if settings.eval_attempts > 1:
        sums["attempts"] = int(queue.results["attempts"].sum())
    values = eval_values(device.all_gather(sums))
    if test.task["kind"] == "arc":
        own_votes = count_votes(test, own_indices, arrays["preds"], arrays["q_halt_logits"])
        votes = merge_votes(device.all_gather(own_votes))
        values |= vote_values(test, votes)
        if save_to and device.rank == 0:
            save_submission(settings, test, votes, should_stop)
    return values


def eval_sums(test, arrays):
    """Returns {name: sum over this rank's puzzles} of METRICS, LOSS_TERMS and the judgements of answers."""
    sums = {}
    for name in (*model.METRICS, *model.LOSS_TERMS):
        counted = arrays["count"] * arrays[name]
        sums[name] = float(counted.sum(dtype=np.float64))
    return sums | puzzles.count_correct(test.task, arrays)


def eval_values(ranks):
    """Returns {"eval/...": number} of the ranks' sums."""
    total = Counter()
    for sums in ranks:
        total.update(sums)
    count = total.pop("count")
    values = {}
    for name, value in total.items():
        values["eval/" + name] = value / max(count, 1)
    values["eval/puzzles"] = int(count)
    return values


# ---------------------------------------------------------------------------------------------------------
# Questions without known answers, for notebooks and scripts

CELLS_AT_A_TIME = 5_000  # in a batch on the CPU: 61 Sudokus of 9x9 or 5 mazes of 30x30


class Questions(NamedTuple):
    """Puzzles without known answers, as Queue takes them."""
    task: dict
    batch: dict  # of unlabeled_batch

    def test_batch(self, indices):
        return {name: array[indices] for name, array in self.batch.items()}


def answers_to(settings, trm, task, batch, report=lambda num_finished: None):
    """Returns the results of a Queue, {name: [n, ...]}, for n questions. It works on the CPU.

    Args:
        settings: see Evaluator.
        trm: a TRM on the CPU.
        task: the questions' task.
        batch: the questions, of unlabeled_batch.
        report: a function that gets the number of questions that were finished, now and then.
    """
    n, cells = batch["inputs"].shape
    num_batches = math.ceil(n * cells / CELLS_AT_A_TIME)
    batch_size = math.ceil(n / num_batches)
    evaluator = Evaluator(settings, trm, Device("cpu", settings, is_alone=True), batch_size)
    queue = Queue(evaluator, *weights_of(trm), Questions(task, batch), np.arange(n))
    while queue.num_unfinished():
        report(queue.run(lambda: False))
    return queue.results


def solve(trm, questions, steps=16, attempts=1, identifiers=None):
    """Returns the most confident answer of all steps and attempts, and its confidence from 0 to 1.

    Args:
        trm: a model that TRM.load has returned.
        questions: a string of the symbols in its task, for a string and a float; a list of strings, for two
            lists; or tokens, a tensor [n, S], for two tensors.
        steps: the number of supervision steps of an attempt.
        attempts: the most attempts at a question, at copies by symmetry, until an answer is SURE.
        identifiers: the puzzle identifiers of tokens [n], for ARC; None: 0 for all.

    Raises UserError for a string that is no question of this model, ValueError for another number of cells
    and for a model that is not of TRM.load.
    """
    if not hasattr(trm, "task"):
        raise ValueError("this model does not know its puzzle: TRM.load reads one that does from a file")
    puzzles.check_attempts(trm.task, attempts)

    # tokens of all questions
    if torch.is_tensor(questions):
        tokens = questions.int().numpy()
    else:
        texts = [questions] if isinstance(questions, str) else questions
        tokens = np.stack([puzzles.parse_question(trm.task, text)[1] for text in texts])
    _, cells = tokens.shape
    if cells != trm.sizes["seq_len"]:
        raise ValueError(f"the question has {cells} cells, not {trm.sizes['seq_len']}")
    batch = unlabeled_batch(tokens)
    if identifiers is not None:
        batch["puzzle_identifiers"] = identifiers.int().numpy()

    # all steps of each attempt, in float32
    settings = SimpleNamespace(**vars(trm.settings) | dict(
        eval_halt_max_steps=steps, eval_attempts=attempts, eval_patience=0, micro_batch_size=0,
        forward_dtype="float32", compile="off", seed=0))
    results = answers_to(settings, trm, trm.task, batch)
    answers = results["surest_preds"]
    confidences = sigmoid(results["surest_q_halt_logits"])

    # the answers in the form of the questions
    if torch.is_tensor(questions):
        return torch.from_numpy(answers).to(questions.dtype), torch.from_numpy(confidences)
    answers = [puzzles.text_of(trm.task, answer) for answer in answers]
    if isinstance(questions, str):
        return answers[0], float(confidences[0])
    return answers, confidences.tolist()


# ---------------------------------------------------------------------------------------------------------
# Helpers

def weights_of(trm):
    """Returns a TRM's weights and its puzzle embedding, for Evaluator.inputs."""
    table = trm.puzzle_emb.weights if trm.has_puzzle_emb else torch.zeros(1, 1)
    return trm.weights(), table


def sigmoid(logits):
    return 1 / (1 + np.exp(-np.float64(logits)))
