"""Solves puzzles with a model: train.py's evaluations, scripts/solve.py and scripts/play.py.

A batch has slots, and a slot works on one attempt at one puzzle. After each supervision step a slot keeps the
last answer and the most confident one so far ("surest": of the step where q_halt was highest). An attempt
leaves its slot after eval_halt_max_steps, or once its answer has not changed for eval_patience steps; then
the slot takes the next attempt of the queue. All attempts at a puzzle but the first get noise on the latent.
"""
import json
import math
import os
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from torch.utils._pytree import tree_map

import model as models
import puzzles
from bucket import Bucket
from configurator import TransientError, UserError
from data import NOISE, Progress, generator, replacing
from device import cast_weights
from puzzles import IGNORE_LABEL, arc

ANSWERS = ("preds", "q_halt_logits", "surest_preds", "surest_q_halt_logits", "surest_steps")
BITS_31 = 2 ** 31 - 1  # XLA and torch shift negative numbers differently


# ---------------------------------------------------------------------------------------------------------
# One step of a batch

class Evaluator:
    """Runs supervision steps without gradients on a batch of slots.

    Args:
        settings: train.py's settings, of which loss_type, forward_dtype, micro_batch_size, the halting and
            the eval_ settings are read.
        model: a TRM.
        device: a device.Device, or an object with its methods.
        batch_size: the number of slots on this device.
    """

    def __init__(self, settings, model, device, batch_size):
        self.settings = settings
        self.model = model
        self.device = device
        self.batch_size = batch_size
        self.depth = settings.eval_halt_max_steps or settings.halt_max_steps
        self.dtype = getattr(torch, settings.forward_dtype)
        self.supervision_step = device.compile(model.supervision_step)
        self.program = device.compile_step(self.step)

    def new_state(self):
        """Returns {"carry": TRM.new_carry, "kept": {name: [slots, ...]}}; all slots are free."""
        carry = self.model.new_carry(self.batch_size, self.dtype)
        # the last answer and the most confident one, for keep_answers
        kept = dict(
            preds=torch.zeros_like(carry["inputs"]),
            repeats=torch.zeros_like(carry["steps"]),
            surest_preds=torch.zeros_like(carry["inputs"]),
            surest_q_halt_logits=torch.zeros(self.batch_size),
            surest_steps=torch.zeros_like(carry["steps"]),
        )
        return self.device.put(dict(carry=carry, kept=kept))

    def inputs(self, weights, table, batch):
        """Returns the inputs of program(), on the device.

        Args:
            weights: {name: float32 tensor}, on the device.
            table: the puzzle embedding [N, D'], on the device.
            batch: what free slots take: inputs and labels [B, S], puzzle_identifiers and noise_keys [B].
        """
        return dict(
            batch=self.device.put(batch),
            weights=weights,
            table=table,
        )

    @torch.no_grad()
    def step(self, state, inputs):
        """Runs one supervision step of all slots, in place on state. On XLA it is one program.

        Returns {name: [B, ...]}: ANSWERS, METRICS and LOSS_TERMS of each slot after this step, and halted.
        """
        self.model.eval()
        weights = cast_weights(self.device, inputs["weights"], self.dtype)

        # free slots start on the puzzles of the batch; the loop gets rows of the embedding, never all of it
        sequences = models.take_new_puzzles(state["carry"], inputs["batch"])
        slots = dict(sequences=sequences, kept=state["kept"], noise_keys=inputs["batch"]["noise_keys"])
        if self.model.prefix:
            slots["puzzle_rows"] = inputs["table"][sequences["puzzle_identifiers"]]
        _, results = self.device.for_each_micro_batch(
            self.step_micro_batch, {}, weights, slots, self.settings.micro_batch_size)
        tree_map(torch.Tensor.copy_, state, results["state"])
        return results["values"]

    def step_micro_batch(self, weights, slots):
        """Runs a supervision step of some slots, for device.for_each_micro_batch.

        Returns {}, since nothing adds up, and dict(state=..., values=...); values are what step() returns.
        """
        if self.model.prefix:
            weights = weights | dict(puzzle_rows=slots["puzzle_rows"])
        step = self.supervision_step(self.settings, weights, slots["sequences"])
        is_new = slots["sequences"]["steps"] == 0

        # keep the answers that count; slots whose answer is final halt, and the others get noise
        kept = keep_answers(slots["kept"], step, is_new)
        halted = step.carry["steps"] >= self.depth
        if self.settings.eval_patience:
            halted |= kept["repeats"] >= self.settings.eval_patience
        carry = step.carry | dict(halted=halted)
        if self.settings.eval_rollouts > 1:
            carry["state"] = self.add_noise(carry, slots["noise_keys"])

        values = step.values | kept | dict(q_halt_logits=step.q_halt, halted=halted)
        results = dict(
            state=dict(carry=carry, kept=kept),
            values=values,
        )
        return {}, results

    def add_noise(self, carry, keys):
        """Returns the state of the recursion with noise for all attempts whose key is not 0."""
        def noise(shape):
            numbers = normal_noise(keys, carry["steps"], shape)
            numbers *= self.settings.eval_noise
            numbers = models.where(keys == 0, torch.zeros_like(numbers), numbers)
            return numbers.to(self.dtype)

        return self.model.noisy(carry["state"], noise)

    def watch(self, weights, table, batch):
        """Yields the results of step() as arrays, after each supervision step of one batch; see inputs()."""
        state = self.new_state()
        inputs = self.inputs(weights, table, batch)
        for _ in range(self.depth):
            results = self.program(state, inputs)
            yield {name: t.cpu().numpy() for name, t in results.items()}


def keep_answers(kept, step, is_new):
    """Returns the answers that count after a SupervisionStep: the last one and the most confident one."""
    is_repeated = (step.answers == kept["preds"]).all(-1) & ~is_new
    # the later of two equally confident answers counts
    is_surer = is_new | (step.q_halt >= kept["surest_q_halt_logits"])
    return dict(
        preds=step.answers,
        repeats=torch.where(is_repeated, kept["repeats"] + 1, 0),
        surest_preds=models.where(is_surer, step.answers, kept["surest_preds"]),
        surest_q_halt_logits=torch.where(is_surer, step.q_halt, kept["surest_q_halt_logits"]),
        surest_steps=torch.where(is_surer, step.carry["steps"], kept["surest_steps"]),
    )


# ---------------------------------------------------------------------------------------------------------
# A queue of attempts

class Queue:
    """Solves n puzzles, eval_rollouts times each, on the slots of an Evaluator.

    results: {name of ANSWERS, METRICS or LOSS_TERMS: [attempts, n, ...]}, zeros until an attempt leaves.

    Args:
        evaluator: an Evaluator.
        weights, table: see Evaluator.inputs.
        test: a Dataset.
        indices: which of its examples [n].
        keys: noise keys int32 [attempts, n], from noise_keys.
    """

    def __init__(self, evaluator, weights, table, test, indices, keys):
        self.evaluator = evaluator
        self.weights = weights
        self.table = table
        self.test = test
        self.indices = indices
        self.keys = keys
        self.attempts = len(keys)
        self.waiting = np.arange(keys.size)  # attempt i is at puzzle i // attempts
        self.slots = np.full(evaluator.batch_size, -1)  # the attempt in each slot; -1: free
        self.state = evaluator.new_state()
        seq_len = evaluator.model.config.seq_len

        # answers take a byte a cell, since a test set may have a third of a billion cells
        names = (*ANSWERS, *models.METRICS, *models.LOSS_TERMS)
        self.results = {name: np.zeros(keys.shape, dtype=np.float32) for name in names}
        for name in ("preds", "surest_preds"):
            self.results[name] = np.zeros((*keys.shape, seq_len), dtype=np.uint8)

        # slots without an attempt repeat their last puzzle, zeros at first, and nothing collects the results
        questions = np.zeros((evaluator.batch_size, seq_len), dtype=np.int32)
        self.batch = unlabelled_batch(questions)

    def num_unfinished(self):
        """Returns the number of attempts that wait or run."""
        return len(self.waiting) + np.count_nonzero(self.slots >= 0)

    def run(self, should_stop):
        """Runs as many supervision steps as an attempt may take, fewer if the queue is empty before.

        should_stop: a function; once it returns true, no further step begins. Returns the number of attempts
        that have finished.
        """
        num_finished = 0
        for step in range(1, self.evaluator.depth + 1):
            if should_stop() or not self.num_unfinished():
                break
            self.fill()
            results = self.evaluator.program(self.state, self.inputs)
            # without eval_patience all attempts leave together: no result is read before the last step
            if self.evaluator.settings.eval_patience or step == self.evaluator.depth:
                num_finished += self.collect(results)
        return num_finished

    def fill(self):
        """Gives the free slots the next attempts, which are inputs of the next step."""
        # the waiting attempts go into free slots
        free = np.flatnonzero(self.slots < 0)[:len(self.waiting)]
        if not len(free):
            return
        self.slots[free] = self.waiting[:len(free)]
        self.waiting = self.waiting[len(free):]

        # so do their puzzles and the keys of their noise
        puzzle, attempt = np.divmod(self.slots[free], self.attempts)
        batch = self.test.test_batch(self.indices[puzzle])
        batch["noise_keys"] = self.keys[attempt, puzzle]
        for name, array in batch.items():
            self.batch[name][free] = array
        self.inputs = self.evaluator.inputs(self.weights, self.table, self.batch)

    def collect(self, results):
        """Keeps the results of the attempts that leave, and frees their slots. Returns their number."""
        halted = results["halted"].cpu().numpy()
        leaving = np.flatnonzero(halted & (self.slots >= 0))
        puzzle, attempt = np.divmod(self.slots[leaving], self.attempts)
        if len(leaving):
            for name, collected in self.results.items():
                array = results[name].cpu().numpy()
                collected[attempt, puzzle] = array[leaving]
        self.slots[leaving] = -1
        return len(leaving)


def unlabelled_batch(questions):
    """Returns the batch of questions, tokens int32 [n, S], without answers, identifiers and noise."""
    return dict(
        inputs=questions,
        labels=np.full_like(questions, IGNORE_LABEL),
        puzzle_identifiers=np.zeros(len(questions), dtype=np.int32),
        noise_keys=np.zeros(len(questions), dtype=np.int32),
    )


def surest_attempts(results):
    """Returns the attempt with the most confident answer of each puzzle, [...]; of equals, the first.

    results: {name: [attempts, ...]} of a Queue, or of Evaluator.watch for attempts at one puzzle.
    """
    return results["surest_q_halt_logits"].argmax(0)


def surest_answers(results):
    """Returns {name of ANSWERS: [n, ...]}, the surest_ ones, of the most confident attempt at each puzzle."""
    attempts = surest_attempts(results)
    puzzle = np.arange(len(attempts))
    names = [name for name in ANSWERS if name.startswith("surest_")]
    return {name: results[name][attempts, puzzle] for name in names}


def noise_keys(seed, attempts, n):
    """Returns the keys of normal_noise, int32 [attempts, n]; 0, no noise, for the first attempt."""
    keys = np.zeros((attempts, n), dtype=np.int32)
    for attempt in range(1, attempts):
        random = generator(seed, NOISE, attempt)
        keys[attempt] = random.integers(1, 2 ** 31, n, dtype=np.int32)
    return keys


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
        save_to: path, without its ending, of the arrays in eval_save_outputs. "": neither they nor
            submission.json, ARC's answers, are written.
    """
    settings = evaluator.settings
    device = evaluator.device
    own_indices = indices[device.rank::device.world]

    # the noise of a puzzle does not depend on the number of ranks
    keys = noise_keys(settings.seed, settings.eval_rollouts, len(test))[:, own_indices]
    queue = Queue(evaluator, weights, table, test, own_indices, keys)
    progress = Progress(f"{label}, attempts", keys.size)

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

    # take the last answer of the first attempt, as in the paper, and the surest answer of all attempts
    arrays = test.test_batch(own_indices)
    for name, array in queue.results.items():
        arrays[name] = array[0]
    arrays |= surest_answers(queue.results)
    if save_to and settings.eval_save_outputs:
        save_outputs(settings, device, save_to, own_indices, arrays, should_stop)

    # add up the figures of all ranks, and ARC's votes
    sums = eval_sums(test, arrays, queue.results)
    values = eval_values(device.all_gather(sums))
    if test.task["kind"] == "arc":
        own_votes = count_votes(test, own_indices, arrays["preds"], arrays["q_halt_logits"])
        votes = merge_votes(device.all_gather(own_votes))
        values |= vote_values(test, votes)
        if save_to and device.rank == 0:
            save_submission(f"{settings.out_dir}/submission.json", submission(test, votes))
    return values


def eval_sums(test, arrays, results):
    """Returns {name: sum over this rank's puzzles} of METRICS, LOSS_TERMS and the judgements of answers."""
    sums = {}
    for name in (*models.METRICS, *models.LOSS_TERMS):
        counted = arrays["count"] * arrays[name]
        sums[name] = float(counted.sum(dtype=np.float64))
    return sums | puzzles.count_correct(test.task, arrays, results["surest_preds"])


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


def save_outputs(settings, device, path, indices, arrays, should_stop):
    """Writes this rank's part of eval_save_outputs, and uploads it: the mirror has only rank 0's folder.

    What fails costs a line on stderr.
    """
    name = f"{path}.{device.rank}.npz" if device.world > 1 else f"{path}.npz"
    wanted = {key: arrays[key] for key in settings.eval_save_outputs.split(",") if key}
    try:
        os.makedirs(settings.out_dir, exist_ok=True)
        with replacing(name) as f:
            np.savez_compressed(f, indices=indices, **wanted)
        if settings.gcs_dir:
            Bucket(settings.gcs_dir, should_stop).write(os.path.basename(name), Path(name).read_bytes())
    except (OSError, UserError, TransientError, SystemExit) as e:  # SystemExit: a stop was requested
        print(f"{name}: not saved: {e}", file=sys.stderr)


def save_submission(path, answers):
    """Writes ARC's answers. What fails costs a line on stderr, and not the evaluation."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with replacing(path) as f:
            f.write(json.dumps(answers).encode())
    except OSError as e:
        print(f"{path}: not saved: {e}", file=sys.stderr)


# ---------------------------------------------------------------------------------------------------------
# ARC-AGI: the versions of a task vote on the answer to each of its test inputs

PASSES = (1, 2, 5, 10, 100, 1000)  # pass@K: the right answer is among the K with the most votes


def count_votes(test, indices, preds, q_halt):
    """Returns {(group, member): {answer: [the confidence of each of its votes]}} of test examples.

    A group is a task, a member one of its test inputs. Answers are the keys of grids (arc.grid_key) in the
    task's own version.

    Args:
        test: a Dataset with versions.
        indices: which of its examples [n].
        preds: their answers, tokens [n, S].
        q_halt: the confidence of each answer, logits [n].
    """
    versions, members = test.locate(indices)
    groups = test.groups_of(versions)
    confidences = 1 / (1 + np.exp(-q_halt.astype(np.float64)))
    votes = {}
    columns = versions, groups.tolist(), members.tolist(), preds, confidences.tolist()
    for version, group, member, tokens, confidence in zip(*columns):
        # bring the answer back to the task's own colours and orientation
        grid = arc.undo_version(arc.crop(tokens, test.side), test.versions[version])
        answer = arc.grid_key(grid)
        candidates = votes.setdefault((group, member), {})
        candidates.setdefault(answer, []).append(confidence)
    return votes


def merge_votes(ranks):
    """Returns the sum of the ranks' votes."""
    total = {}
    for votes in ranks:
        for test_input, candidates in votes.items():
            merged = total.setdefault(test_input, {})
            for answer, confidences in candidates.items():
                merged.setdefault(answer, []).extend(confidences)
    return total


def elect(candidates):
    """Returns the answers to one test input, by their votes, then by their mean confidence."""
    def standing(answer):
        confidences = candidates[answer]
        return len(confidences), sum(confidences) / len(confidences)

    return sorted(candidates, key=standing, reverse=True)


def vote_values(test, votes):
    """Returns {"eval/pass1": share, ...} of the tasks that were voted on and have known answers.

    A task counts by the share of its test inputs that are solved (official evaluators/arc.py).
    """
    solved = dict.fromkeys(PASSES, 0.0)
    num_tasks = 0
    groups = {group for group, _ in votes}
    for group in sorted(groups):
        pairs = test.pairs(group)
        if not all(answer.size for _, answer in pairs):  # not known
            continue
        num_tasks += 1
        for member, (_, answer) in enumerate(pairs):
            elected = elect(votes[group, member])
            for k in PASSES:
                solved[k] += (arc.grid_key(answer) in elected[:k]) / len(pairs)

    # the mean over the tasks
    values = {}
    for k, total in solved.items():
        values[f"eval/pass{k}"] = total / max(1, num_tasks)
    return values


def submission(test, votes):
    """Returns {task: [{"attempt_1": grid, "attempt_2": grid}, ...]}, an entry a test input, as for Kaggle."""
    attempts = {}
    for group, member in sorted(votes):
        # a single answer is given twice
        elected = elect(votes[group, member])
        best = {}
        for name, (shape, cells) in dict(attempt_1=elected[0], attempt_2=elected[:2][-1]).items():
            best[name] = np.frombuffer(cells, dtype=np.uint8).reshape(shape).tolist()
        attempts.setdefault(test.task_names[group], []).append(best)
    return attempts


# ---------------------------------------------------------------------------------------------------------
# Helpers

def weights_of(model):
    """Returns a model's weights and its puzzle embedding, for Evaluator.inputs."""
    table = model.puzzle_emb.weights if model.prefix else torch.zeros(1, 1)
    return model.weights(), table


def normal_noise(keys, steps, shape):
    """Returns standard normal noise [B, *shape], float32, from integers alone: the same on every device.

    keys, steps: int32 [B], not negative. Each number is a hash of its key, step and position, half of it as
    radius, half as angle (Box and Muller).
    """
    numbers = math.prod(shape)
    positions = torch.arange(numbers, dtype=torch.int32, device=keys.device)
    x = hash31(keys)
    x = hash31((x + steps) & BITS_31)
    x = x.unsqueeze(-1) + positions
    x = hash31(x & BITS_31)

    # the upper 16 bits as a uniform number between 0 and 1, the lower 15 as a part of a turn
    upper = x >> 15
    lower = x & 0x7FFF
    uniform = (upper + 0.5) / 2 ** 16
    angle = lower * (2 * math.pi / 2 ** 15)
    radius = torch.sqrt(-2 * torch.log(uniform))
    noise = radius * torch.cos(angle)
    return noise.view(-1, *shape)


def hash31(x):
    """Returns a hash of integers below 2^31 (lowbias32 of C. Wellons' hash-prospector, cut to 31 bits)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & BITS_31
    x = ((x ^ (x >> 15)) * 0x046CA68B) & BITS_31
    return x ^ (x >> 16)
