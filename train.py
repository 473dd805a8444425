"""Trains a Tiny Recursive Model (arXiv 2510.04871) on a TPU, a CUDA GPU or the CPU.

    python train.py config/demo.py                        6x6 Sudoku, made on the spot, in a minute or two
    python train.py config/sudoku.py --device=cuda        the paper's Sudoku-Extreme, after prepare_sudoku.py
    python train.py config/sudoku.py --init_from=resume   continues from the newest checkpoint of out_dir

The file holds the settings, the step and the loop; then what they call; at the end how a run starts:
replica() and main(). The settings below are defaults, the paper's Sudoku-Extreme recipe (MLP). Config files
and --key=value flags override them, and functions take the result as `settings`.
"""
import copy
import functools
import json
import math
import multiprocessing
import os
import platform
import shlex
import sys
import threading
import time
import traceback
from collections import Counter
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress

import numpy as np
import requests
import torch
from torch.utils._pytree import tree_map

import configurator
import data as datasets
import evaluate
import model as models
import optim
import puzzles
from runtime import bucket, checkpoint, files, process
from runtime import device as devices
from runtime.errors import TransientError, UserError, one_line
from runtime.flops import flops_per_example
from runtime.process import START_TIMEOUT, STOP, on_signals, restart_watchdog, watch_replicas

# data
data_path = "data/sudoku-extreme-1k-aug-1000"  # folder of the dataset, or its gs:// address
data_prepare = ""  # command that makes data_path if it is missing ("prepare_sudoku.py --size=6 ...")
global_batch_size = 768  # sequences per step, over all replicas
micro_batch_size = 0  # sequences at a time on a replica, gradients are summed; 0: its whole batch
epochs = 50000  # an epoch offers each puzzle once, in one copy; a sequence takes one once it has halted
max_steps = 0  # length of the run in steps; 0: from epochs
max_minutes = 0.0  # or in minutes, from the start to the end of the final evaluation; 0: from steps or epochs
# model
hidden_size = 512  # D
num_heads = 8  # attention heads
expansion = 4.0  # hidden width of a SwiGLU: 2/3 x expansion x width, up to a multiple of multiple_of
multiple_of = 256  # small models train on half the FLOP with 128: records/records.md
L_layers = 2  # layers of the one network
H_cycles = 3  # T of the paper: recursions per step; all but the last without gradient
L_cycles = 6  # n of the paper: latent updates per recursion
curriculum_epochs = 0.0  # epochs over which the depth grows from H_cycles_start, L_cycles_start; 0: constant
H_cycles_start = 1  # H_cycles when the curriculum starts
L_cycles_start = 2  # L_cycles when the curriculum starts
mlp_t = True  # True: an MLP mixes the positions; False: self-attention
pos_encodings = "none"  # none, rope (attention only) or learned
puzzle_emb_ndim = 512  # width of the puzzle embedding; 0: none
puzzle_emb_len = 16  # prefix positions; 0: ceil(puzzle_emb_ndim / hidden_size)
forward_dtype = "bfloat16"  # or float32, float16, auto; becomes float16 or float32 where it would be emulated
# halting
halt_max_steps = 16  # maximum supervision steps of a sequence
halt_exploration_prob = 0.1  # probability, at each step, that a sequence must first reach a random step
halt_exploration_prob_end = -1.0  # its value at the end of the run, reached linearly; -1: constant
# optimizer
loss_type = "stablemax_cross_entropy"  # or softmax_cross_entropy
optimizer = "adam_atan2"  # adam_atan2, adamw or lion
lr = 1e-4  # peak learning rate
lr_min_ratio = 1.0  # end of the cosine, as a share of lr; 1: constant
lr_warmup_steps = 2000  # steps of linear warm-up
beta1 = 0.9  # decay of the first moment
beta2 = 0.95  # decay of the second moment
weight_decay = 1.0  # decoupled: multiplied by the learning rate
puzzle_emb_lr = 1e-4  # learning rate of SignSGD on the puzzle embedding
puzzle_emb_weight_decay = 1.0  # decoupled weight decay of the puzzle embedding
freeze_weights = False  # train only the puzzle embedding
ema = True  # evaluate and export an exponential moving average of the weights
ema_rate = 0.999  # decay of that average per step
seed = 0  # seeds the first weights, the data order, the copies and the halting draws
# evaluation
eval_interval = 5000  # epochs between evaluations; 0: only at the end
eval_max_puzzles = 4096  # test puzzles during training, a fixed random subset; 0: all
eval_final_max_puzzles = 0  # test puzzles in the final evaluation; 0: all
eval_versions = 0  # versions of each ARC task in evaluations during training; 0: all
eval_halt_max_steps = 0  # supervision steps in an evaluation; 0: halt_max_steps
eval_patience = 0  # a puzzle leaves once its answer has not changed for this many steps; 0: never (the paper)
eval_attempts = 1  # most attempts at a puzzle, at copies by symmetry, until an answer is sure; 1: the paper's
eval_save_outputs = ""  # any of inputs,labels,preds,q_halt_logits,surest_...: saved to out_dir/eval_STEP.npz
eval_only = False  # run the final evaluation, then stop
# run
out_dir = "out/sudoku"  # checkpoints, metrics.jsonl, log.txt
gcs_dir = ""  # gs://bucket/folder of only this run: a mirror of out_dir, to resume on another machine
init_from = "scratch"  # scratch, resume, auto (resume if there is a checkpoint) or a FILE to begin with
checkpoint_interval = 1000  # steps; sequences start afresh there, for an exact resume; 0: only at the end
keep_last_n = 3  # checkpoints to keep, besides best.pt
log_interval = 10  # steps averaged in a line of the log
stall_timeout = 1800  # exit if no step finishes for this many seconds; 0: never
device = "auto"  # auto, xla, cuda or cpu
compile = "auto"  # torch.compile: auto (CUDA), on (CPU too: 10 to 40% faster) or off; on XLA: docs/tpu.md
# logging
wandb_log = False  # send metrics.jsonl to Weights & Biases too
wandb_project = "trm"  # in your default entity, or WANDB_ENTITY
wandb_run_name = ""  # empty: the last part of out_dir
wandb_mode = "online"  # online, offline (for `wandb sync`) or disabled; without login or network: offline

# Settings that say where and how a run takes place, and not what it trains, but for a FILE in init_from.
# (checkpoint_interval changes the training: sequences start afresh at each checkpoint.)
RUN_SETTINGS = (
    "out_dir", "gcs_dir", "init_from", "keep_last_n", "log_interval",
    "stall_timeout", "device", "compile", "eval_only", "eval_save_outputs",
    "wandb_log", "wandb_project", "wandb_run_name", "wandb_mode",
)


# ---------------------------------------------------------------------------------------------------------
# The step

@torch.no_grad()
def train_step(run, state, inputs, cycles=None):
    """Runs one optimizer step, in place on state. On XLA it is one program with one all-reduce. All ranks.

    Args:
        run: a Run, for its settings, model and device.
        state: run.state; while XLA captures the program, placeholders take the place of its tensors.
        inputs: what make_inputs returns.
        cycles: (H_cycles, L_cycles) of this step; None: those of the settings.

    Returns the number of ranks that were asked to stop, [1].
    """
    settings = run.settings
    model = run.model.train()

    # cast the float32 weights to forward_dtype, once a step
    weights = devices.cast_weights(run.device, state["weights"], run.dtype)

    # sequences that have halted begin with new puzzles, and all take their rows of the puzzle embedding
    sequences = models.take_new_puzzles(state["sequences"], inputs["puzzles"])
    identifiers = sequences["puzzle_identifiers"]
    examples = dict(sequences=sequences, min_halt_steps=inputs["min_halt_steps"])
    if model.has_puzzle_emb:
        examples["puzzle_rows"] = state["puzzle_emb"][identifiers]

    # forward and backward, one micro-batch after the other; gradients and statistics add up
    zeros = dict(
        grads={name: torch.zeros_like(w) for name, w in state["weights"].items()},
        stats=torch.zeros(len(run.stat_names) - 1, device=run.device.torch),
    )
    body = functools.partial(forward_backward, run, cycles)
    sums, results = run.device.for_each_micro_batch(body, zeros, weights, examples, settings.micro_batch_size)
    tree_map(torch.Tensor.copy_, state["sequences"], results["sequences"])

    # the division by the batch comes here and not in the loss, where gradients would underflow in float16
    sums["grads"] = {name: grad / settings.global_batch_size for name, grad in sums["grads"].items()}
    if model.has_puzzle_emb:
        sums["rows"] = optim.pack_rows(identifiers, results["row_grads"], len(state["puzzle_emb"]),
                                       settings.global_batch_size, inputs["rank"])

    # one all-reduce of all that the ranks share
    sums["stops"] = inputs["stop_requested"]
    totals = run.device.all_reduce(sums)
    grad_norm = optim.norm(totals["grads"])

    # update the weights, their moving average, and the rows of the puzzle embedding
    rates = inputs["rates"]
    if not settings.freeze_weights:
        optim.update(settings, rates, state["weights"], totals["grads"], state["optimizer"])
    if settings.ema:
        for name, average in state["ema"].items():
            average.lerp_(state["weights"][name], 1 - settings.ema_rate)
    if model.has_puzzle_emb:
        optim.sign_sgd(state["puzzle_emb"], totals["rows"], rates["puzzle_emb_lr"],
                       settings.puzzle_emb_weight_decay)

    # add up what the log needs
    state["log_sums"] += torch.cat([totals["stats"], grad_norm])
    return totals["stops"].clone()  # a view would keep all of the reduced numbers alive


def forward_backward(run, cycles, weights, examples):
    """Runs forward and backward on one micro-batch.

    Args:
        run, cycles: see train_step.
        weights: {name: tensor}, in forward_dtype.
        examples: sequences, min_halt_steps [b] and, with a puzzle embedding, puzzle_rows [b, D'].

    Returns what micro-batches add up, dict(grads={name: float32}, stats=[...]), and what belongs to each
    sequence, dict(sequences=..., row_grads [b, D']).
    """
    # the gradients are of the weights and of the rows of the puzzle embedding that the batch has
    leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
    parameters = list(leaves.values())
    puzzle_rows = None
    if run.model.has_puzzle_emb:
        puzzle_rows = examples["puzzle_rows"].detach().requires_grad_()
        parameters.append(puzzle_rows)
    with torch.enable_grad():
        step = run.supervision_step(leaves, examples["sequences"], puzzle_rows, examples["min_halt_steps"],
                                    cycles)
        # zeros for a parameter that does not take part, such as q_head in a loss without q_halt
        grads = torch.autograd.grad(step.values["loss"].sum(), parameters, materialize_grads=True)

    # micro-batches add up in float32
    results = dict(sequences=step.sequences)
    if run.model.has_puzzle_emb:
        results["row_grads"] = grads[-1].float()
    grads = {name: grad.float() for name, grad in zip(leaves, grads)}

    # METRICS count sequences that halted, LOSS_TERMS all
    halted = step.sequences["halted"]
    stats = [torch.where(halted, step.values[name], 0).sum() for name in models.METRICS]
    stats += [step.values[name].detach().sum() for name in models.LOSS_TERMS]
    num_sequences = torch.ones_like(step.q_halt).sum()
    return dict(grads=grads, stats=torch.stack([*stats, num_sequences])), results


def make_inputs(run, data, step, total_steps):
    """Returns this rank's inputs of train_step `step`, on the device.

    The ranks' batches together are a pure function of the seed and the step, whatever the number of ranks.
    """
    settings = run.settings
    device = run.device
    # the puzzles, and the step before which each sequence may not halt
    puzzles = data.train_batch(settings.seed, step, settings.global_batch_size, device.rank, device.world)
    min_halt_steps = datasets.halting_draws(
        settings.seed, step, settings.global_batch_size, settings.halt_max_steps,
        optim.exploration(settings, step, total_steps), device.rank, device.world)
    # numbers that change by step are inputs: a constant would compile anew at each step
    rates = optim.rates(settings, step, total_steps)
    return device.put(dict(
        puzzles=puzzles,
        min_halt_steps=min_halt_steps,
        rates={name: np.float32([rate]) for name, rate in rates.items()},
        stop_requested=np.float32([STOP.is_set()]),
        rank=np.int32([device.rank]),
    ))


# ---------------------------------------------------------------------------------------------------------
# The loop

def train(run, data, test, log, checkpoints, start, total_steps):
    """Trains from start.step to the end or until a stop is requested; returns the step reached. All ranks."""
    settings = run.settings
    examples_per_epoch = optim.epoch_size(data)
    step = start.step
    is_evaluated = start.is_evaluated
    cycles = None  # (H_cycles, L_cycles) of the last step
    metrics = {}  # the last line of the log
    read_previous_stops = None  # a function: how many ranks were asked to stop at the last step
    stop = False

    log.restart_clock(step)
    while step < total_steps and not stop:
        # evaluate, before the next step: a resume then makes up for an evaluation that was interrupted
        if not is_evaluated and optim.evaluation_due(settings, examples_per_epoch, step):
            indices = test.subset(settings.eval_max_puzzles, settings.eval_versions)
            evaluation = run.evaluate(test, indices, f"evaluating at step {step}")
            if not evaluation:  # a stop was requested
                checkpoints.save(step, run, metrics)
                break
            # the line comes last: a resume does not repeat an evaluation that has one
            checkpoints.save_if_best(step, run, metrics | evaluation)
            log.evaluation(step, evaluation)
            log.restart_clock(step)
        is_evaluated = False

        # the depth of this step
        last_cycles = cycles
        cycles = optim.cycles_at(settings, examples_per_epoch, step)

        # forward, backward, update; the stop flags are read a step late, so that the host need not wait
        inputs = make_inputs(run, data, step, total_steps)
        read_stops = run.device.fetch(run.train_program(run.state, inputs, cycles))
        stop = read_previous_stops is not None and bool(read_previous_stops() > 0)
        read_previous_stops = read_stops
        step += 1
        restart_watchdog(settings.stall_timeout)
        if cycles != last_cycles:
            log.first_step(step, run, cycles)

        # what is due depends only on the step and on reduced sums, so that all ranks decide the same
        save_due = stop or step == total_steps or is_multiple(step, settings.checkpoint_interval)
        log_due = save_due or is_multiple(step, settings.log_interval)
        log_due |= optim.evaluation_due(settings, examples_per_epoch, step)
        log_due |= optim.cycles_at(settings, examples_per_epoch, step) != cycles  # a line has one depth
        if not log_due:
            continue

        # log
        sums = run.read_sums()  # waits for the device
        if not math.isfinite(sums["loss"] + sums["grad_norm"]):
            raise not_finite(settings, checkpoints, log.step + 1, step)
        metrics = log.train(step, total_steps, sums, run, cycles)

        # save; a run that resumes starts all sequences afresh here, so this one does too
        if save_due:
            checkpoints.save(step, run, metrics)
            run.restart()
        log.restart_clock(step)
    return step


def not_finite(settings, checkpoints, first_step, last_step):
    """Returns the error for a loss or a gradient that is not finite, which names the last good checkpoint."""
    checkpoints.wait()
    paths = checkpoint.checkpoint_paths(settings.out_dir)
    newest = paths[0] if paths else "none yet"
    return TransientError(f"loss or gradient not finite between steps {first_step} and {last_step}; "
                          f"the last good checkpoint: {newest}")


def train_and_evaluate(run, data, test, log, checkpoints, start, total_steps):
    """Trains to the end, saves, evaluates and uploads. All ranks.

    Exits with 3 if it was stopped early, with 1 if the last checkpoint cannot be written or uploaded.
    """
    # monotonic: the system's clock can be changed during a run
    began = time.monotonic()
    is_complete = False
    step = train(run, data, test, log, checkpoints, start, total_steps)
    # all ranks leave together: one that went on to the evaluation would wait for rank 0 forever
    if not all(run.device.all_gather(checkpoints.wait())):
        sys.exit(1)
    if step < total_steps:
        log.print0(f"stopped at step {step}, checkpoint saved in {run.settings.out_dir}; "
                   "to continue: the same command with --init_from=resume")
    else:
        if step > start.step:
            log.print0(f"trained {step - start.step} steps in {files.duration(time.monotonic() - began)}")
        # the evaluation in full; a stop interrupts it
        is_complete = final_evaluation(run, test, log, checkpoints, step)
    # a bucket may take longer than stall_timeout; the upload has a time limit of its own
    restart_watchdog(0)
    is_uploaded = checkpoints.close(600 if is_complete else 15)
    log.close()
    # the exit code
    if not is_uploaded:  # a slice may be deleted once its run says that it is complete
        sys.exit(1)
    if not is_complete:
        sys.exit(3)


def is_multiple(step, interval):
    """Returns True if this step completes another interval; never for interval 0."""
    return interval > 0 and step % interval == 0


# ---------------------------------------------------------------------------------------------------------
# The length of a run in minutes

BEGAN = time.monotonic()  # main() sets it anew; a spawned replica has the time of its import


def fit_minutes(run, data, test, log):
    """Replaces max_minutes by max_steps, and by a curriculum and a warm-up that fit, before the first step.

    It times steps, and leaves the state as it was. All ranks; rank 0 decides. Raises UserError if no time is
    left to train.
    """
    settings = run.settings
    # how many of the config's steps have each depth: the curriculum keeps its share
    examples_per_epoch = optim.epoch_size(data)
    total_steps = optim.count_steps(settings, examples_per_epoch)
    depths = Counter(optim.cycles_at(settings, examples_per_epoch, step) for step in range(total_steps))

    # the mean time of a step
    state = tree_map(lambda t: t.to("cpu", copy=True), run.state)
    step_seconds = 0.0
    for cycles, count in depths.items():
        def train_step():
            return run.train_program(run.state, make_inputs(run, data, 0, total_steps), cycles)  # noqa: B023

        step_seconds += count / total_steps * time_steps(run, train_step)
    run.state = run.device.put(state)

    # the time of a step in an evaluation
    questions = np.zeros((run.batch_size, data.seq_len), dtype=np.int32)
    inputs = run.evaluator.inputs(*run.eval_weights(), evaluate.unlabelled_batch(questions))
    slots = run.evaluator.new_slots()
    eval_step_seconds = time_steps(run, lambda: run.evaluator.program(slots, inputs)["halted"])

    def evaluation_seconds(indices):
        # a puzzle was seen to take 1.4 attempts where 8 were allowed
        attempts = len(indices) * min(settings.eval_attempts, 1.5)
        batches = math.ceil(attempts / settings.global_batch_size)
        # with eval_patience, puzzles were seen to leave after a sixth to a half of the steps
        depth = run.evaluator.depth / (3 if settings.eval_patience else 1)
        return batches * depth * eval_step_seconds

    # the steps for which there is time; 3% are for checkpoints and for what times vary
    final_seconds = evaluation_seconds(test.subset(settings.eval_final_max_puzzles))
    if settings.eval_interval:
        evaluations_per_step = settings.global_batch_size / (settings.eval_interval * examples_per_epoch)
        indices = test.subset(settings.eval_max_puzzles, settings.eval_versions)
        step_seconds += evaluations_per_step * evaluation_seconds(indices)
    seconds_left = 0.97 * 60 * settings.max_minutes - (time.monotonic() - BEGAN) - final_seconds
    max_steps = run.device.all_gather(int(seconds_left / step_seconds))[0]
    estimate = f"the final evaluation takes about {final_seconds:.0f} s"
    if max_steps < 1:
        # the same command with other values may begin here
        if run.device.rank == 0:
            os.remove(f"{settings.out_dir}/run.json")
        raise UserError(f"max_minutes={settings.max_minutes:g} leaves no time to train: {estimate}, and "
                        "--eval_final_max_puzzles shortens it")
    log.print0(f"max_minutes={settings.max_minutes:g}: max_steps is {max_steps}, of "
               f"{1e3 * step_seconds:.0f} ms each with the evaluations between them; {estimate}")

    # settings that would train the same run; a warm-up of the whole run would never reach the peak
    settings.max_steps = max_steps
    settings.max_minutes = 0.0
    settings.curriculum_epochs *= max_steps / total_steps
    settings.lr_warmup_steps = min(settings.lr_warmup_steps, max_steps // 10)


def time_steps(run, step):
    """Returns the seconds of a step, once it is compiled: those of rank 0. All ranks.

    step: a function that begins one and returns a tensor.
    """
    enough_seconds = min(5, 0.6 * run.settings.max_minutes)
    restart_watchdog(run.settings.stall_timeout)
    step().cpu()
    # twice as many, until it takes long enough
    n = 1
    seconds = 0.0
    while seconds < enough_seconds:
        n *= 2
        began = time.perf_counter()
        for _ in range(n):
            result = step()
        result.cpu()  # waits for the device
        seconds = run.device.all_gather(time.perf_counter() - began)[0]
    return seconds / n


# ---------------------------------------------------------------------------------------------------------
# Evaluation at the end

def final_evaluation(run, test, log, checkpoints, step):
    """Logs the final evaluation, and saves best.pt if it is the best. All ranks.

    Returns False if it was interrupted.
    """
    settings = run.settings
    indices = test.subset(settings.eval_final_max_puzzles)
    # the arrays of eval_save_outputs and ARC's answers go beside the checkpoint that they belong to
    values = run.evaluate(test, indices, "final evaluation", f"eval_{step:08d}")
    if not values:
        how = "" if settings.eval_only else " with --init_from=resume"
        log.print0(f"final evaluation stopped; the same command{how} starts it again")
        return False
    if not settings.eval_only:  # best.pt is of the training run
        checkpoints.save_if_best(step, run, values)
    # "final" marks the run as complete
    log.evaluation(step, {"final": True, **values})
    return True


# ---------------------------------------------------------------------------------------------------------
# The state of training

class Run:
    """Training state on one device, and the programs of the train and eval steps.

    state: weights, their average ema and the optimizer's state, by the parameters' names; puzzle_emb [N, D'];
    log_sums of stat_names since the last line of the log; and sequences, of TRM.new_sequences.

    Args:
        settings: the run's settings.
        model: a TRM, which moves to the device.
        device: a device.Device, or an object with its methods.
        saved: ema and optimizer of a checkpoint, if it has them. All ranks start from rank 0's state.
    """

    def __init__(self, settings, model, device, saved=None):
        self.settings = settings
        self.model = model
        self.device = device
        self.batch_size = settings.global_batch_size // device.world
        self.dtype = getattr(torch, settings.forward_dtype)
        # the FLOPs of a training step at a depth, (H_cycles, L_cycles)
        self.flops_per_example = functools.cache(lambda cycles: flops_per_example(model, cycles))
        # what the log sums up: METRICS of sequences that halted, LOSS_TERMS of all
        self.stat_names = (*models.METRICS, *models.LOSS_TERMS, "sequences", "grad_norm")
        # the state, equal on all ranks; the model keeps its code and its sizes, but for the buffers
        self.state = self.first_state(saved or {})
        device.prepare(model)
        if model.has_puzzle_emb:
            model.puzzle_emb.weights = model.puzzle_emb.weights.to("meta")  # two tables would not fit
        # the programs
        self.supervision_step = device.compile(model.call_with)
        self.train_program = device.compile_step(
            lambda state, inputs, cycles=None: train_step(self, state, inputs, cycles))
        self.evaluator = evaluate.Evaluator(settings, model, device, self.batch_size)
        self.restart()

    @torch.no_grad()
    def first_state(self, saved):
        """Builds the state from the model and a checkpoint, and broadcasts rank 0's to all ranks."""
        # all that a run starts with; a checkpoint replaces the average and the optimizer's state
        model = self.model
        weights, table = evaluate.weights_of(model)
        optimizer = {name: optim.optimizer_state(self.settings, name, w) for name, w in weights.items()}
        state = self.device.broadcast(dict(
            weights=weights,
            ema={name: saved.get("ema", weights)[name] for name in weights},
            optimizer=optimizer | saved.get("optimizer", {}),
            puzzle_emb=table,
            buffers=self.buffers(),
        ))
        # buffers, such as the first latents, stay in the model
        for name, t in state.pop("buffers").items():
            model.get_buffer(name).copy_(t)
        return self.device.put(state)

    def buffers(self):
        """Returns {name: tensor} of what checkpoints hold and training does not change."""
        trained = {*self.model.weights(), *self.model.tied, "puzzle_emb.weights"}
        return {name: t for name, t in self.model.state_dict().items() if name not in trained}

    def restart(self):
        """Gives every sequence a new puzzle at the next step, and resets the log's sums."""
        # all sequences count as halted, so that the next step gives them puzzles
        sequences = self.model.new_sequences(self.batch_size, self.dtype)
        log_sums = torch.zeros(len(self.stat_names))
        self.state |= self.device.put(dict(sequences=sequences, log_sums=log_sums))

    def read_sums(self):
        """Returns {name of stat_names: sum over the steps since the last call}. Waits for the device."""
        sums = dict(zip(self.stat_names, self.state["log_sums"].cpu().tolist()))
        self.state["log_sums"] = self.device.put(torch.zeros(len(self.stat_names)))
        return sums

    def eval_weights(self):
        """Returns the weights that evaluations use, and the puzzle embedding."""
        return self.state["ema" if self.settings.ema else "weights"], self.state["puzzle_emb"]

    def evaluate(self, test, indices, label, save_to=""):
        """See evaluate.evaluate()."""
        # an evaluation counts as progress, and sees a stop after each step
        def should_stop():
            restart_watchdog(self.settings.stall_timeout)
            return STOP.is_set()

        weights, table = self.eval_weights()
        return evaluate.evaluate(self.evaluator, weights, table, test, indices, label, should_stop, save_to)

    def state_dict(self, step):
        """Returns a copy on the host of all that a resume needs; weights and ema are state dicts."""
        state_dicts = ("weights", "ema") if self.settings.ema else ("weights",)
        state = {name: self.state[name] for name in (*state_dicts, "optimizer", "puzzle_emb")}
        state = tree_map(lambda t: t.to("cpu", copy=True), state)
        # what both state dicts have in common, and the names of tied weights
        others = tree_map(torch.Tensor.cpu, self.buffers())
        table = state.pop("puzzle_emb")
        if self.model.has_puzzle_emb:
            others["puzzle_emb.weights"] = table
        for key in state_dicts:
            weights = state[key]
            weights |= others | {name: weights[other] for name, other in self.model.tied.items()}
        return dict(step=step, model=self.model.sizes, forks=dict(configurator.FORKS), **state)


MODEL_LOCK = threading.Lock()  # replicas may be threads, which share torch's generator


def new_model(settings, **sizes):
    """Returns a model with its first weights. Raises UserError for sizes that cannot be built."""
    # the seed is for modules that init_weights does not touch
    with MODEL_LOCK, torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        try:
            return models.TRM(settings, **sizes)
        except (ValueError, RuntimeError) as e:  # RuntimeError: more memory than there is
            raise UserError(one_line(e)) from None


# ---------------------------------------------------------------------------------------------------------
# Logs

class Log:
    """Prints lines and writes log.txt and metrics.jsonl of out_dir, on rank 0; sends metrics to W&B.

    A line that cannot be appended costs a warning and not the run. `step` is the step of the last line
    of metrics.
    """

    def __init__(self, settings, device, step):
        self.settings = settings
        self.device = device
        self.step = step
        self.wandb = None

    def print0(self, text):
        """Prints a line on rank 0, and adds it to log.txt."""
        if self.device.rank == 0:
            with suppress(OSError):  # the reader of a pipe has left, or the disk is full
                print(text, flush=True)
            self.append("log.txt", text)

    def log_metrics(self, step, values):
        """Adds a line to metrics.jsonl, and a row at W&B."""
        if self.device.rank != 0:
            return
        line = {"step": step, **values}
        self.append("metrics.jsonl", json.dumps(line))
        if self.wandb:
            try:
                self.wandb.log(line)
            except Exception as e:  # its process was killed
                self.wandb = None
                self.print0(f"W&B: stopped ({one_line(e)}); metrics.jsonl has everything")

    def append(self, name, line):
        path = os.path.join(self.settings.out_dir, name)
        try:
            os.makedirs(self.settings.out_dir, exist_ok=True)
            with open(path, "ab") as f:
                f.write(line.encode(errors="backslashreplace") + b"\n")
        except OSError as e:
            self.warn(path, e)

    def warn(self, path, error):
        print(f"{path}: cannot be written ({error.strerror}); training continues", file=sys.stderr)

    def header(self, run, data, test, notes):
        """Says what the run is, and on what."""
        settings = self.settings
        device = self.device
        # versions and machine, and the settings that are the run's own
        self.print0(f"# python {platform.python_version()}, torch {torch.__version__}, "
                    f"{platform.platform()}, {os.cpu_count()} cores, {device.world} x {device.kind} "
                    f"({device.name}); settings unlike train.py's: {differences(settings) or 'none'}")
        # sizes of the model and of the dataset, and the command that makes the dataset again
        command = data.made_by() or "made by an unknown command"
        self.print0(f"{run.model.num_parameters():,} parameters; "
                    f"{len(data):,} training examples of {data.total_groups:,} puzzles, "
                    f"{len(test):,} test puzzles in {settings.data_path} ({command})")
        for note in notes:
            self.print0(note)

    def begin(self, run_id, facts):
        """Writes the first line of metrics.jsonl, drops lines past the first step, and starts W&B.

        Args:
            run_id: W&B's id of the run.
            facts: {name: value} of what the run is, besides its settings.
        """
        settings = self.settings
        self.print0(f"training from step {self.step} to {facts['total_steps']}, "
                    f"{settings.global_batch_size} sequences a step")
        if self.device.rank != 0:
            return
        # the first line, which scripts read; a run that resumes may have begun on other hardware
        path = os.path.join(settings.out_dir, "metrics.jsonl")
        hardware = f"{self.device.world} x {self.device.kind} ({self.device.name})"
        hardware = sorted({hardware, *files.read_facts(path).get("hardware", [])})
        first_line = {"step": 0, "run": dict(settings=recipe(vars(settings)), hardware=hardware, **facts)}
        # a killed run may have logged steps past its last checkpoint, which this one repeats
        kept = [line for line in files.read_metrics(path) if line["step"] <= self.step]
        try:
            with files.replacing(path) as f:
                f.write("".join(json.dumps(line) + "\n" for line in [first_line, *kept]).encode())
        except OSError as e:
            self.warn(path, e)
        if settings.wandb_log:
            self.wandb = start_wandb(settings, run_id, facts, self.print0)

    def restart_clock(self, step):
        """Leaves compiling, an evaluation or a checkpoint out of the rates."""
        self.clock = time.perf_counter()
        self.timed_from = step

    def first_step(self, step, run, cycles):
        """Reports the time of the first step at a depth, which compiles."""
        run.state["log_sums"].cpu()  # waits for the device
        self.flops_per_example = run.flops_per_example(cycles)
        # the first step is apart: later ones at this depth do not compile
        seconds = time.perf_counter() - self.clock
        if devices.is_compiled(self.device):
            how = "compiling included"
        elif self.device.compiles:
            how = "not compiled, since torch.compile failed (see stderr)"
        else:
            how = "not compiled"
        self.print0(f"step {step}: {seconds:.1f} s for the first step at H_cycles {cycles[0]}, L_cycles "
                    f"{cycles[1]}, {how}; left out of the rates below")
        self.restart_clock(step)

    def train(self, step, total_steps, sums, run, cycles):
        """Logs the steps since the last line, and returns the metrics; sums: of Run.read_sums."""
        settings = self.settings
        # the metrics
        values = train_values(sums, step - self.step)
        line = f"step {step}/{total_steps} | {listed(values)}"
        values["train/lr"] = optim.rates(settings, step - 1, total_steps)["lr"]
        # the speed, unless all these steps compiled
        if step > self.timed_from:
            seconds = (time.perf_counter() - self.clock) / (step - self.timed_from)
            speed = settings.global_batch_size / seconds
            # arithmetic of the model at this depth
            flops = speed * self.flops_per_example
            values |= {
                "perf/examples_per_sec": speed,
                "perf/step_time": seconds,
                "perf/tflops": flops / 1e12,
            }
            peak = devices.peak_flops(self.device)
            if peak:
                values["perf/mfu"] = flops / peak / self.device.world
            line += f" | {speed:,.0f} examples/s {1e3 * seconds:,.0f} ms"
            line += f" | eta {files.duration((total_steps - step) * seconds)}"
        # what the compiler counts, on XLA
        values |= self.device.counts()
        self.log_metrics(step, values)
        self.print0(line)
        self.step = step
        return values

    def evaluation(self, step, values):
        if not self.settings.eval_only:  # metrics.jsonl is the record of the training run
            self.log_metrics(step, values)
        attempts = self.settings.eval_attempts
        which = f" (surest_accuracy: of up to {attempts} attempts, else of the first)" if attempts > 1 else ""
        self.print0(f"step {step} | evaluation{which}: {listed(values)}")

    def close(self):
        """Ends W&B, which can hang: the watchdog then ends the process, whose checkpoints are complete."""
        if self.wandb:
            restart_watchdog(60)
            with suppress(Exception):
                self.wandb.finish()
        restart_watchdog(0)


def start_wandb(settings, run_id, facts, say):
    """Returns W&B's run, or None where it cannot start.

    A run without a key or a server is offline from its start: once wandb.init has begun to wait for a
    server, it cannot be told to give up.
    """
    try:
        # the environment variable is W&B's own, and goes before the setting
        import wandb
        mode = os.environ.get("WANDB_MODE") or settings.wandb_mode
        try:
            # a server that hangs would hold wandb.init for minutes; so would a prompt for a key
            if mode == "online":
                requests.head(wandb.setup().settings.base_url, timeout=5)
                wandb.login(timeout=5)
        except Exception as e:  # requests and wandb have many for this
            mode = "offline"
            say(f"W&B: offline ({one_line(e)})")
        # a run that resumes has the id of its first start, and adds to what W&B has of it
        name = settings.wandb_run_name or os.path.basename(os.path.abspath(settings.out_dir))
        run = wandb.init(
            id=run_id, resume="allow", mode=mode, dir=settings.out_dir,
            project=settings.wandb_project, name=name, config=vars(settings) | facts,
            settings=dict(console="off", init_timeout=60))
        wandb.define_metric("*", step_metric="step")  # W&B drops rows whose own step goes back
        hint = f"`wandb sync {os.path.dirname(run.dir)}` uploads it" if mode == "offline" else run.url
        say(f"W&B: {mode}, {hint}")
        return run
    except Exception as e:  # training goes on, whatever it is
        say(f"W&B: off ({one_line(e)}); metrics.jsonl has everything")
        return None


def train_values(sums, steps):
    """Returns means over `steps` steps: LOSS_TERMS over all sequences, METRICS over those that halted."""
    # LOSS_TERMS are sums over all sequences of the steps
    values = {"train/grad_norm": sums["grad_norm"] / steps}
    for name in models.LOSS_TERMS:
        values[f"train/{name}"] = sums[name] / sums["sequences"]
    # METRICS are sums over the sequences that halted, which "count" counts
    for name in models.METRICS:
        if name != "count" and sums["count"]:
            values[f"train/{name}"] = sums[name] / sums["count"]
    return values


def listed(values):
    """Returns {"train/accuracy": 0.5, ...} as "accuracy 0.5000 ..."."""
    # names without a slash are for programs
    texts = []
    for name, value in values.items():
        if "/" in name:
            text = f"{value:.4f}" if isinstance(value, float) else str(value)
            texts.append(f"{name.partition('/')[2]} {text}")
    return " ".join(texts)


# ---------------------------------------------------------------------------------------------------------
# A replica

def replica(settings, kind):
    """Runs one replica from its start to its end. Checks settings and datasets before it writes anything."""
    # the device
    device = open_device(kind, settings)
    settings = copy.copy(settings)  # replicas may be threads
    # the settings: what no config file and no flag assigned comes from the checkpoint that this run goes on
    # with, which only rank 0's host may have
    start, saved = checkpoint.find_start(settings, device, STOP.is_set)
    resumed = recipe(start.settings)
    if resumed and settings.max_minutes:  # a run keeps the length that max_minutes gave it
        names = "max_steps", "curriculum_epochs", "lr_warmup_steps"
        vars(settings).update({name: resumed[name] for name in names}, max_minutes=0.0)
    settings.fill(resumed)
    check_settings(settings)
    # the forward_dtype that the device is fast in
    settings.forward_dtype, dtype_note = device.choose_dtype(settings.forward_dtype)
    check_batch_size(settings, device)

    # data and model
    get_dataset(settings)
    data = datasets.Dataset(settings.data_path, "train")
    test = datasets.Dataset(settings.data_path, "test")
    for name in models.SIZES:
        if getattr(test, name) != getattr(data, name):
            raise UserError(f"{settings.data_path}: train and test differ in {name}: build it again")
    puzzles.check_attempts(test.task, settings.eval_attempts)
    model = new_model(settings, **{name: getattr(data, name) for name in models.SIZES})
    # the length of the run
    total_steps = optim.count_steps(settings, optim.epoch_size(data))
    if total_steps < 1:
        raise UserError(f"epochs={settings.epochs} of {data.total_groups} puzzles are less than one batch "
                        f"of global_batch_size={settings.global_batch_size}")

    # the weights to start with
    start = checkpoint.load_start(start, saved, settings, device, model, data, total_steps)
    # the watchdog begins here: what came before may have had to wait for a download
    restart_watchdog(settings.stall_timeout)
    run = Run(settings, model, device, saved)
    saved.clear()  # frees its memory
    log = Log(settings, device, start.step)
    checkpoints = None
    if not settings.eval_only:
        checkpoints = checkpoint.Checkpoints(settings, device, start, data, test, log.print0)
    # say what the run is, and on what
    log.header(run, data, test, filter(None, [dtype_note, *start.notes]))

    # evaluate, finish an upload, or train
    if settings.eval_only:
        if not final_evaluation(run, test, log, checkpoints, start.step):
            sys.exit(3)
        return
    if start.is_complete:
        log.print0(f"{settings.out_dir} is complete at step {start.step}: --eval_only evaluates it again, "
                   "a higher max_steps or epochs continues it")
        restart_watchdog(0)  # the upload has a time limit of its own
        if not checkpoints.close(600):  # what the last upload left out
            sys.exit(1)
        return
    # train
    if settings.max_minutes:
        fit_minutes(run, data, test, log)
    total_steps = optim.count_steps(settings, optim.epoch_size(data))
    log.begin(checkpoints.run_id, dict(
        total_steps=total_steps,
        parameters=model.num_parameters(),
        flops_per_example=run.flops_per_example((settings.H_cycles, settings.L_cycles)),
        examples=len(data),
        puzzles=data.total_groups,
        data_sha256=data.sha256,
        init_from=start.init_from,
        forks=dict(configurator.FORKS),
    ))
    train_and_evaluate(run, data, test, log, checkpoints, start, total_steps)


def open_device(kind, settings):
    """Returns the device of one replica; kind: from choose_device."""
    if kind == "xla":
        from runtime.xla import XLADevice
        return XLADevice(settings)
    return devices.Device(kind, settings)


def check_batch_size(settings, device):
    """Raises UserError unless the batch divides into replicas and micro-batches."""
    share, rest = divmod(settings.global_batch_size, device.world)
    if rest:
        raise UserError(f"global_batch_size {settings.global_batch_size} must be a multiple of the "
                        f"{device.world} replicas")
    size = settings.micro_batch_size
    if size and share % size:
        fitting = max(n for n in range(1, share + 1) if n < size and share % n == 0)
        raise UserError(f"micro_batch_size {size} must divide the {share} sequences of a replica: {fitting} "
                        "does, and any other size gives the same result")


# ---------------------------------------------------------------------------------------------------------
# What settings may be

# The values that a setting may have.
CHOICES = {
    "pos_encodings": ("none", "rope", "learned"),
    "forward_dtype": ("auto", "bfloat16", "float32", "float16"),
    "loss_type": models.LOSSES,
    "optimizer": optim.OPTIMIZERS,
    "device": ("auto", "xla", "cuda", "cpu"),
    "compile": ("auto", "on", "off"),
    "wandb_mode": ("online", "offline", "disabled"),
}
# Numbers above 0, and numbers from 0 to 1; all others are 0 or more.
POSITIVE = (
    "global_batch_size", "hidden_size", "num_heads", "expansion", "multiple_of", "L_layers", "H_cycles",
    "L_cycles", "halt_max_steps", "lr", "eval_attempts", "keep_last_n", "log_interval",
)
SHARES = ("halt_exploration_prob", "halt_exploration_prob_end", "lr_min_ratio", "beta1", "beta2", "ema_rate")
# Arrays that an evaluation can save.
EVAL_OUTPUTS = ("inputs", "labels", "attempts", *evaluate.ANSWERS)


def check_settings(settings):
    """Raises UserError for the first value that no run could use."""
    check_each(settings)
    # settings that have to fit together
    for name in "H_cycles", "L_cycles":
        first = getattr(settings, name + "_start")
        last = getattr(settings, name)
        if settings.curriculum_epochs and not 1 <= first <= last:
            raise UserError(f"{name}_start must be from 1 to {name} ({last}), not {first}")
    if not settings.epochs and not settings.max_steps:
        raise UserError("epochs and max_steps are both 0: set one of them")
    if settings.max_minutes and settings.max_steps:
        raise UserError(f"max_minutes={settings.max_minutes:g} and max_steps={settings.max_steps}: one of "
                        "them must be 0")


def check_each(settings):
    """Raises UserError for the first setting that is wrong whatever the others of a recipe are."""
    # numbers and choices
    configurator.check_choices(settings, CHOICES)
    numbers = dict(vars(settings))
    if settings.halt_exploration_prob_end == -1:
        del numbers["halt_exploration_prob_end"]
    configurator.check_numbers(numbers, POSITIVE, SHARES)
    # lists of names
    for name in filter(None, settings.eval_save_outputs.split(",")):
        if name not in EVAL_OUTPUTS:
            raise UserError(f"eval_save_outputs: unknown {name!r}; choose from {','.join(EVAL_OUTPUTS)}")
    # paths and addresses
    for name in ("data_path", "out_dir", "init_from", "wandb_project"):
        if not getattr(settings, name):
            raise UserError(f"{name} must not be empty")
    if settings.out_dir.startswith(("gs://", "~")):
        raise UserError(f"--out_dir={settings.out_dir}: must be a folder of this machine, written out; "
                        "--gcs_dir mirrors it to a bucket")
    # what needs weights
    if settings.eval_only and settings.init_from == "scratch":
        raise UserError("eval_only needs weights: --init_from=resume (the newest checkpoint of out_dir) "
                        "or --init_from=FILE")
    if settings.gcs_dir:
        bucket.Bucket(settings.gcs_dir)  # raises UserError for a malformed address


def recipe(settings):
    """Returns those of {name: value} that say what a run trains, and not where and how it runs."""
    return {name: value for name, value in settings.items() if name not in RUN_SETTINGS}


def differences(settings):
    """Returns the settings that differ from their defaults, as flags."""
    # in the order of the settings above; a fork's come last
    known = configurator.read_settings(__file__)
    changed = {name: value for name, value in vars(settings).items() if value != known[name].default}
    return shlex.join(f"--{name}={value}" for name, value in changed.items())


# ---------------------------------------------------------------------------------------------------------
# The command

def xla_replica(index, settings, kind):
    """Runs replica() for xmp.spawn. If it breaks, its process ends: its peers would wait for it forever."""
    process.end_with_parent()
    try:
        replica(settings, kind)
    except (UserError, TransientError, SystemExit):  # every rank of the host raises it
        raise
    except BaseException as e:
        # XLA's compiler says so, on every rank: no restart helps
        if "RESOURCE_EXHAUSTED" in str(e):
            import torch_xla.runtime as xr
            raise devices.out_of_memory(settings, xr.world_size()) from None
        traceback.print_exc()
        os._exit(1)


def get_dataset(settings):
    """Brings the dataset to the folder data_path: from a bucket, or made here; it may be there already."""
    settings.data_path = datasets.local_dataset(settings.data_path)
    datasets.make_dataset(settings, STOP.is_set)


def main(settings):
    """Checks the settings, makes the dataset if it is missing, and runs a replica on each device."""
    global BEGAN
    BEGAN = time.monotonic()
    # the settings, before anything takes time; replica() has those of a checkpoint too, and checks them all
    check_each(settings)
    kind, reason = devices.choose_device(settings.device)
    if kind == "xla" or devices.read_place().rank == 0:
        print(f"device {kind}: {reason}", flush=True)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's; after another launcher the parent may leave
        process.end_with_parent()
    # the dataset, unless a checkpoint may say which one it is
    if settings.init_from == "scratch" or "data_path" in settings.assigned:
        get_dataset(settings)
    on_signals()
    try:
        # torch_xla starts a process for each chip; every other device has only this process
        if kind == "xla":
            import torch_xla.distributed.xla_multiprocessing as xmp
            watch_replicas()
            xmp.spawn(xla_replica, args=(settings, kind))
        else:
            replica(settings, kind)
    # what breaks in a replica, in words
    except BrokenProcessPool:
        raise TransientError("a replica died, see above; --init_from=auto continues from the last "
                             f"checkpoint in {settings.out_dir}") from None
    except Exception as e:
        if not devices.is_out_of_memory(e):
            raise
        raise devices.out_of_memory(settings, devices.read_place().world) from None


if multiprocessing.current_process().name != "MainProcess" and __name__ == "train":
    # xmp.spawn has started this process, with the main process's argv. Forks replace classes and functions
    # here, too; replica() receives the main process's settings.
    configurator.configure(__file__, sys.argv[1:])
    on_signals(is_spawned=True)
    # torch_xla looks for the chips next, and may wait forever; replica() restarts the watchdog
    restart_watchdog(START_TIMEOUT)
if __name__ == "__main__":
    import train  # the module that forks import, and not this second copy of it
    process.start(train.main, train.__file__)
