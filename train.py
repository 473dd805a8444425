"""Trains a Tiny Recursive Model (arXiv 2510.04871) on a TPU, a CUDA GPU or the CPU.

    python train.py config/demo.py                        6x6 Sudoku, made on the spot, in a minute or two
    python train.py config/sudoku.py --device=cuda        the paper's Sudoku-Extreme, after prepare_sudoku.py
    python train.py config/sudoku.py --init_from=resume   continues from the newest checkpoint of out_dir

The file holds the settings, the step and the loop; then what they call; at the end how a run starts:
replica() and main(). The settings below are the paper's Sudoku-Extreme recipe (MLP). Config files and
--key=value flags override them; in every process these globals hold the values in force.
"""
import copy
import faulthandler
import json
import math
import multiprocessing
import os
import platform
import shlex
import signal
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict

import numpy as np
import requests
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

import configurator
from bucket import Bucket, local_dataset
from checkpoint import Checkpoints, checkpoint_paths
from configurator import (
    TransientError,
    UserError,
    check_bounds,
    check_choices,
    end_with_parent,
    read_settings,
)
from data import Dataset, duration, halting_draws, make_dataset, read_metrics, replacing
from device import choose_device, open_device, out_of_memory, peak_flops
from evaluate import ANSWERS, Evaluator, evaluate, split, weights_of
from model import (
    LOSS_TERMS,
    LOSSES,
    METRICS,
    TRM,
    TRMConfig,
    supervision_step,
    take_new_puzzles,
)
from optim import (
    OPTIMIZERS,
    cast,
    cycles_at,
    exploration,
    flatten,
    optimizer_state,
    pack_rows,
    parameter_shapes,
    rates,
    sign_sgd,
    unflatten,
)

# data
data_path = "data/sudoku-extreme-1k-aug-1000"  # folder of the dataset, or its gs:// address
data_prepare = ""  # command that makes data_path if it is missing ("prepare_sudoku.py --size=6 ...")
global_batch_size = 768  # sequences per step, over all replicas
micro_batch_size = 0  # sequences at a time on a replica, gradients are summed; 0: its whole batch
epochs = 50000  # an epoch offers each puzzle once, in one copy; only sequences that halted take it
max_steps = 0  # length of the run in steps; 0: from epochs
# model
hidden_size = 512  # D
num_heads = 8  # attention heads
expansion = 4.0  # hidden width of a SwiGLU: 2/3 x expansion x width, up to a multiple of 256
L_layers = 2  # layers of the one network
H_cycles = 3  # T of the paper: recursions per step; all but the last without gradient
L_cycles = 6  # n of the paper: latent updates per recursion
curriculum_epochs = 0  # epochs over which the depth grows from H_cycles_start, L_cycles_start; 0: constant
H_cycles_start = 1  # H_cycles when the curriculum starts
L_cycles_start = 2  # L_cycles when the curriculum starts
mlp_t = True  # True: an MLP mixes the positions; False: self-attention
pos_encodings = "none"  # none, rope (attention only) or learned
puzzle_emb_ndim = 512  # width of the puzzle embedding; 0: none
puzzle_emb_len = 16  # prefix positions; 0: ceil(puzzle_emb_ndim / hidden_size)
forward_dtype = "bfloat16"  # bfloat16, float32, float16 or auto; weights, optimizer and loss stay float32
# halting
halt_max_steps = 16  # maximum supervision steps of a sequence
halt_exploration_prob = 0.1  # probability, at each step, that a sequence must first reach a random step
halt_exploration_prob_end = -1.0  # its value at the end of the run, reached linearly; -1: constant
# optimizer
loss_type = "stablemax_cross_entropy"  # or softmax_cross_entropy
optimizer = "adam_atan2"  # adam_atan2, adamw, lion or muon (with adam_atan2 for all other parameters)
lr = 1e-4  # peak learning rate
lr_min_ratio = 1.0  # end of the cosine, as a share of lr; 1: constant
lr_warmup_steps = 2000  # steps of linear warm-up
beta1 = 0.9  # decay of the first moment; muon's momentum
beta2 = 0.95  # decay of the second moment
weight_decay = 1.0  # decoupled: multiplied by the learning rate
puzzle_emb_lr = 1e-4  # learning rate of SignSGD on the puzzle embedding
puzzle_emb_weight_decay = 1.0  # decoupled weight decay of the puzzle embedding
freeze_weights = False  # train the puzzle embedding alone
ema = True  # evaluate and export an exponential moving average of the weights
ema_rate = 0.999  # decay of that average per step
seed = 0  # decides the weights, the data order, the copies and the halting draws
# evaluation
eval_interval = 5000  # epochs between evaluations; 0: only at the end
eval_max_puzzles = 4096  # test puzzles during training, a fixed random subset; 0: all
eval_final_max_puzzles = 0  # test puzzles in the final evaluation; 0: all
eval_versions = 0  # versions of each ARC task in evaluations during training; 0: all
eval_halt_max_steps = 0  # supervision steps in an evaluation; 0: halt_max_steps
eval_patience = 0  # a puzzle leaves once its answer has not changed for this many steps; 0: never (the paper)
eval_rollouts = 1  # attempts at each puzzle, all but the first with noise; the surest answer counts
eval_noise = 1.0  # standard deviation of that noise, added to the latent z_L after each supervision step
eval_save_outputs = ""  # any of inputs,labels,preds,q_halt_logits,surest_...: saved to out_dir/eval_STEP.npz
eval_only = False  # run the final evaluation, then stop
# run
out_dir = "out/sudoku"  # checkpoints, metrics.jsonl, log.txt
gcs_dir = ""  # gs://bucket/folder of this run alone: a mirror of out_dir, to resume on another machine
init_from = "scratch"  # scratch, resume, auto (resume if there is a checkpoint) or a FILE to begin with
checkpoint_interval = 1000  # steps; sequences start afresh there, for an exact resume; 0: only at the end
keep_last_n = 3  # checkpoints to keep, besides best.pt
log_interval = 10  # steps averaged in a line of the log
stall_timeout = 1800  # exit if no step finishes for this many seconds; 0: never
device = "auto"  # auto, xla, cuda, mps (Apple's GPU) or cpu; auto never takes mps
compile = "auto"  # torch.compile: auto (on CUDA), on (on the CPU too: a minute, then 10% faster) or off
kernels = "auto"  # Triton kernels for the MLPs on CUDA: off, on, auto (off until a GPU has measured them)
# logging
wandb_log = False  # send metrics.jsonl to Weights & Biases too
wandb_project = "trm"  # in your default entity, or WANDB_ENTITY
wandb_run_name = ""  # empty: the last part of out_dir
wandb_mode = "online"  # online, offline (for `wandb sync`) or disabled; without login or network: offline

# Sums over micro-batches and ranks: METRICS of sequences that halted, LOSS_TERMS of all sequences.
BATCH_STATS = METRICS + LOSS_TERMS
# Sums over the steps between two lines of the log.
STATS = (*BATCH_STATS, "grad_norm")

# Settings that say where and how a run takes place, and not what it trains.
RUN_SETTINGS = (
    "out_dir", "gcs_dir", "init_from", "checkpoint_interval", "keep_last_n", "log_interval",
    "stall_timeout", "device", "compile", "kernels", "eval_only", "eval_save_outputs",
    "wandb_log", "wandb_project", "wandb_run_name", "wandb_mode",
)


# ---------------------------------------------------------------------------------------------------------
# The step

@torch.no_grad()
def train_step(run, state, inputs, cycles=None):
    """Runs one optimizer step, in place on state. On XLA it is one program with one all-reduce. All ranks.

    Args:
        run: a Run.
        state: run.state.
        inputs: what make_inputs returns.
        cycles: (H_cycles, L_cycles); by default the model's.

    Returns the number of ranks that were asked to stop, [1].
    """
    settings = run.settings
    model = run.model.train()

    # cast the float32 weights to forward_dtype, once a step
    weights = cast(state["weights"], run.shapes, run.dtype)

    # sequences that have halted start on the puzzles of the batch, and take their rows of the embedding
    batch = split(inputs["batch"], settings.micro_batch_size)  # [micro-batches, sequences in one, ...]
    sequences = take_new_puzzles(model, state["carry"], batch)
    identifiers = sequences["puzzle_identifiers"]
    micro_batches = dict(sequences=sequences, min_halt_steps=batch["min_halt_steps"])
    if model.prefix:
        micro_batches["puzzle_rows"] = state["puzzle_emb"][identifiers]

    # forward and backward, one micro-batch after the other; gradients and statistics add up
    grads = {name: torch.zeros_like(w, dtype=torch.float32) for name, w in weights.items()}
    zeros = dict(grads=grads, stats=torch.zeros(len(BATCH_STATS), device=run.device.torch))
    sums, results = run.device.for_each_micro_batch(
        lambda weights, micro_batch: forward_backward(run, weights, micro_batch, cycles),
        zeros, weights, micro_batches)
    carry = results["carry"]
    assert carry.keys() == state["carry"].keys(), "supervision_step must return every entry of the carry"
    for name, t in carry.items():
        state["carry"][name].copy_(t)

    # One all-reduce sums what all ranks share. The division by the batch comes here, and not in the loss: a
    # gradient divided by 768 underflows in float16.
    shared = dict(grads=flatten(sums["grads"].values()) / settings.global_batch_size, stats=sums["stats"],
                  stops=inputs["stop_requested"])
    if model.prefix:
        row_grads = results["row_grads"].flatten(0, 1)
        shared["rows"] = pack_rows(identifiers.flatten(), row_grads, len(state["puzzle_emb"]),
                                   settings.global_batch_size, inputs["rank"])
    reduced = run.device.all_reduce(flatten(shared.values()))
    reduced = unflatten(reduced, {name: t.shape for name, t in shared.items()})

    # update the weights and their average, and the puzzle embedding
    step_rates = inputs["rates"]
    if not settings.freeze_weights:
        update = OPTIMIZERS[settings.optimizer]
        update(settings, step_rates, run.shapes, state["weights"], reduced["grads"], **state["optimizer"])
    if settings.ema:
        state["ema"].lerp_(state["weights"], 1 - settings.ema_rate)
    if model.prefix:
        sign_sgd(state["puzzle_emb"], reduced["rows"], settings.global_batch_size,
                 step_rates["puzzle_emb_lr"], settings.puzzle_emb_weight_decay)

    # add up what the log needs
    grad_norm = reduced["grads"].square().sum().sqrt().view(1)
    state["sums"] += torch.cat([reduced["stats"], grad_norm])
    return reduced["stops"].clone()  # a view would keep all of the reduced vector alive


def forward_backward(run, weights, micro_batch, cycles):
    """Runs forward and backward on one micro-batch.

    Args:
        run: a Run.
        weights: {name: tensor}, in forward_dtype.
        micro_batch: sequences and min_halt_steps of supervision_step, and puzzle_rows [b, D'].
        cycles: (H_cycles, L_cycles) or None.

    Returns what the micro-batches and ranks add up, dict(grads={name: float32}, stats=BATCH_STATS), and
    what belongs to each sequence, dict(carry=..., row_grads [b, D']).
    """
    # the gradients are of the weights and of the rows of the puzzle embedding that the batch has
    leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
    if "puzzle_rows" in micro_batch:
        leaves["puzzle_rows"] = micro_batch["puzzle_rows"].detach().requires_grad_()
    with torch.enable_grad():
        step = run.supervision_step(run.settings, run.model, leaves, micro_batch["sequences"],
                                    micro_batch["min_halt_steps"], cycles)
        grads = torch.autograd.grad(step.values["loss"].sum(), list(leaves.values()))
    # micro-batches add up in float32
    grads = {name: grad.float() for name, grad in zip(leaves, grads)}
    results = dict(carry=step.carry)
    if "puzzle_rows" in grads:
        results["row_grads"] = grads.pop("puzzle_rows")

    # METRICS count sequences that halted, LOSS_TERMS all
    halted = step.carry["halted"]
    stats = [torch.where(halted, step.values[name], 0).sum() for name in METRICS]
    stats += [step.values[name].detach().sum() for name in LOSS_TERMS]
    return dict(grads=grads, stats=torch.stack(stats)), results


def make_inputs(run, data, step, total_steps):
    """Returns this rank's inputs of train_step `step`, on the device.

    The ranks' batches together are a pure function of the seed and the step, whatever the number of ranks.
    """
    settings = run.settings
    device = run.device
    # the puzzles, and the step before which each sequence may not halt
    batch = data.train_batch(settings.seed, step, settings.global_batch_size, device.rank, device.world)
    batch["min_halt_steps"] = halting_draws(
        settings.seed, step, settings.global_batch_size, settings.halt_max_steps,
        exploration(settings, step, total_steps), device.rank, device.world)
    # numbers that change by step are inputs: a constant would compile anew at each step
    step_rates = {name: np.float32([rate]) for name, rate in rates(settings, step, total_steps).items()}
    return device.put(dict(batch=batch, rates=step_rates, stop_requested=np.float32([stop_requested()]),
                           rank=np.int32([device.rank])))


# ---------------------------------------------------------------------------------------------------------
# The loop

def train(run, data, test, log, checkpoints, start, total_steps):
    """Trains from start.step to the end or until a stop is requested; returns the step reached. All ranks."""
    settings = run.settings
    examples_per_epoch = epoch_size(data)
    step = start.step
    is_evaluated = start.is_evaluated
    cycles = None  # (H_cycles, L_cycles) of the last step
    metrics = {}  # the last line of the log
    stop = False

    def read_previous_stops():  # how many ranks were asked to stop at the last step: there is none yet
        return 0

    log.restart_clock(step)
    while step < total_steps and not stop:
        # evaluate, before the next step: a resume then makes up for an evaluation that was interrupted
        if not is_evaluated and evaluation_due(settings, examples_per_epoch, step):
            indices = test.subset(settings.eval_max_puzzles, settings.eval_versions)
            evaluation = run.evaluate(test, indices, f"evaluating at step {step}")
            if not evaluation:  # a stop was requested
                checkpoints.save(step, run, metrics)
                break
            log.evaluation(step, evaluation)
            checkpoints.save_if_best(step, run, metrics | evaluation)
            log.restart_clock(step)
        is_evaluated = False

        # the depth of this step
        last_cycles = cycles
        cycles = cycles_at(settings, examples_per_epoch, step)

        # forward, backward, update; the stop flags are read a step late, so that the host need not wait
        inputs = make_inputs(run, data, step, total_steps)
        read_stops = run.device.fetch(run.train_program(run.state, inputs, cycles))
        stop = bool(read_previous_stops() > 0)
        read_previous_stops = read_stops
        step += 1
        restart_watchdog(settings.stall_timeout)
        if cycles != last_cycles:
            log.first_step(step, run, cycles)

        # what is due depends on the step and on reduced sums alone, so that all ranks decide the same
        save_due = stop or step == total_steps or is_multiple(step, settings.checkpoint_interval)
        log_due = save_due or is_multiple(step, settings.log_interval)
        log_due |= evaluation_due(settings, examples_per_epoch, step)
        log_due |= cycles_at(settings, examples_per_epoch, step) != cycles  # a line of the log has one depth
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
    paths = checkpoint_paths(settings.out_dir)
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
            log.print0(f"trained {step - start.step} steps in {duration(time.monotonic() - began)}")
        # the evaluation in full; a stop interrupts it
        is_complete = final_evaluation(run, test, log, step)
    # a bucket may take longer than stall_timeout; the upload has a time limit of its own
    restart_watchdog(0)
    is_uploaded = checkpoints.close(600 if is_complete else 15)
    log.close()
    # the exit code
    if not is_uploaded:  # a slice may be deleted once its run says that it is complete
        sys.exit(1)
    if not is_complete:
        sys.exit(3)


def epoch_size(data):
    """Returns the examples of an epoch as the official code counts them, by the mean over all puzzles."""
    return data.total_groups * data.mean_puzzle_examples


def count_steps(settings, examples_per_epoch):
    """Returns the optimizer steps of the whole run."""
    return settings.max_steps or int(settings.epochs * examples_per_epoch / settings.global_batch_size)


def is_multiple(step, interval):
    """Returns True if this step completes another interval; never for interval 0."""
    return interval > 0 and step % interval == 0


def evaluation_due(settings, examples_per_epoch, step):
    """Returns True if this step crosses a multiple of eval_interval epochs."""
    # examples, not steps: the number of puzzles need not divide into batches
    interval = settings.eval_interval * examples_per_epoch
    examples = step * settings.global_batch_size
    return interval > 0 and examples // interval > (examples - settings.global_batch_size) // interval


# ---------------------------------------------------------------------------------------------------------
# Evaluation at the end

def final_evaluation(run, test, log, step):
    """Logs the final evaluation. Returns False if it was interrupted. All ranks."""
    settings = run.settings
    indices = test.subset(settings.eval_final_max_puzzles)
    # the arrays of eval_save_outputs and ARC's answers go beside the checkpoint that they belong to
    save_to = os.path.join(settings.out_dir, f"eval_{step:08d}")
    values = run.evaluate(test, indices, "final evaluation", save_to)
    if not values:
        how = "" if settings.eval_only else " with --init_from=resume"
        log.print0(f"final evaluation stopped; the same command{how} starts it again")
        return False
    # "final" marks the run as complete
    log.evaluation(step, {"final": True, **values})
    return True


# ---------------------------------------------------------------------------------------------------------
# The state of training

class Run:
    """Training state on one device, and the programs of the train and eval steps.

    state: weights and their average ema, a float32 vector each; optimizer, {name: vector}; puzzle_emb
    [N, D']; sums of STATS since the last line of the log; and the carry, {name: [micro-batches, sequences in
    one, ...]}. The weights are in the order of shapes.

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
        self.shapes = parameter_shapes(model)
        # the weights, the average and the moments, equal on all ranks
        self.state = self.first_state(saved or {})
        if model.prefix:
            # the model shares the table, whose memory would be taken twice
            model.puzzle_emb.weights = self.state["puzzle_emb"]
        # the programs; the model holds its sizes and its code, and state holds the weights
        device.prepare(model)
        self.supervision_step = device.compile(supervision_step)
        self.train_program = device.compile_step(
            lambda state, inputs, cycles=None: train_step(self, state, inputs, cycles))
        self.evaluator = Evaluator(settings, model, device, self.batch_size)
        self.restart()

    @torch.no_grad()
    def first_state(self, saved):
        """Builds the state from the model and a checkpoint, and broadcasts rank 0's to all ranks."""
        def as_vector(t):  # state_dict splits vectors by the names of the weights
            return flatten(t[name] for name in self.shapes) if isinstance(t, dict) else t

        # all that a run starts with; a checkpoint replaces the average and the moments
        model = self.model
        weights, puzzle_emb = weights_of(model)
        optimizer = optimizer_state(self.settings, self.shapes, weights)
        optimizer |= {name: as_vector(t) for name, t in saved.get("optimizer", {}).items()}
        state = dict(
            weights=weights,
            ema=as_vector(saved.get("ema", weights)),
            optimizer=optimizer,
            puzzle_emb=puzzle_emb,
            H_init=model.H_init,
            L_init=model.L_init,
        )
        # one vector travels from rank 0 to all ranks
        tensors, structure = tree_flatten(state)
        vector = self.device.broadcast(flatten(t.float() for t in tensors))
        received = unflatten(vector, {i: t.shape for i, t in enumerate(tensors)})
        state = tree_unflatten([t.clone() for t in received.values()], structure)
        # the latents stay in the model, which does not train them
        model.H_init.copy_(state.pop("H_init"))
        model.L_init.copy_(state.pop("L_init"))
        return self.device.put(state)

    def restart(self):
        """Gives every sequence a new puzzle at the next step, and resets the log's sums."""
        # all sequences count as halted, so that the next step gives them puzzles
        carry = self.model.new_carry(self.batch_size, self.dtype)
        carry = split(carry, self.settings.micro_batch_size)
        self.state |= self.device.put(dict(carry=carry, sums=torch.zeros(len(STATS))))

    def read_sums(self):
        """Returns {name of STATS: sum over the steps since the last call}. Waits for the device."""
        sums = dict(zip(STATS, self.state["sums"].cpu().tolist()))
        self.state["sums"] = self.device.put(torch.zeros(len(STATS)))
        return sums

    def eval_weights(self):
        """Returns the vector of weights that evaluations use, and the puzzle embedding."""
        return self.state["ema" if self.settings.ema else "weights"], self.state["puzzle_emb"]

    def evaluate(self, test, indices, label, save_to=""):
        """See evaluate.evaluate()."""
        # an evaluation counts as progress, and sees a stop after each step
        def should_stop():
            restart_watchdog(self.settings.stall_timeout)
            return stop_requested()

        return evaluate(self.evaluator, *self.eval_weights(), test, indices, label, should_stop, save_to)

    def state_dict(self, step):
        """Returns a copy on the host of all that a resume needs; weights and ema are state dicts."""
        def by_name(t):  # forks may reorder the weights; their optimizers may keep other shapes
            t = t.to("cpu", copy=True)
            return unflatten(t, self.shapes) if t.shape == self.state["weights"].shape else t

        # the latents, which do not train, and the puzzle embedding, which is no parameter of the model
        buffers = {name: t.cpu() for name, t in self.model.state_dict().items() if name not in self.shapes}
        if self.model.prefix:
            buffers["puzzle_emb.weights"] = self.state["puzzle_emb"].to("cpu", copy=True)
        saved = dict(
            step=step,
            model=asdict(self.model.config),
            weights=by_name(self.state["weights"]) | buffers,
            optimizer={name: by_name(t) for name, t in self.state["optimizer"].items()},
        )
        if self.settings.ema:
            saved["ema"] = by_name(self.state["ema"]) | buffers
        return saved


MODEL_LOCK = threading.Lock()  # replicas may be threads, which share torch's generator
# Sizes that a dataset and a model for it have in common.
SIZES = "seq_len", "vocab_size", "num_puzzle_identifiers"


def new_model(settings, **sizes):
    """Returns a model with its first weights. Raises UserError for sizes that cannot be built."""
    # the seed is for modules that init_weights does not touch
    with MODEL_LOCK, torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        try:
            return TRM(TRMConfig.of(settings, **sizes), settings.seed)
        except (ValueError, RuntimeError) as e:  # RuntimeError: more memory than there is
            raise UserError(" ".join(str(e).split())[:200]) from None


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
        self.has_warned = False
        if device.rank == 0:
            with suppress(OSError):  # append() says so
                os.makedirs(settings.out_dir, exist_ok=True)

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
        # eight digits are what float32 has
        rounded = {"step": step}
        for name, value in values.items():
            rounded[name] = float(f"{value:.8g}") if isinstance(value, float) else value
        self.append("metrics.jsonl", json.dumps(rounded))
        if self.wandb:
            try:
                self.wandb.log(rounded)
            except Exception as e:  # its process was killed
                self.wandb = None
                self.print0(f"W&B: stopped ({type(e).__name__}: {e}); metrics.jsonl has everything")

    def append(self, name, line):
        path = os.path.join(self.settings.out_dir, name)
        try:
            with open(path, "ab") as f:
                f.write(line.encode(errors="backslashreplace") + b"\n")
        except OSError as e:
            if not self.has_warned:
                print(f"{path}: cannot be written ({e.strerror}); training continues", file=sys.stderr)
            self.has_warned = True

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
        for note in [*device.notes, *notes]:
            self.print0(note)

    def begin(self, run_id, total_steps, facts):
        """Drops the lines past the step where the run starts, and starts W&B; facts: for W&B's config."""
        settings = self.settings
        self.print0(f"training from step {self.step} to {total_steps}, "
                    f"{settings.global_batch_size} sequences a step")
        if self.device.rank != 0:
            return
        # a killed run may have logged steps past its last checkpoint, which this one repeats
        path = os.path.join(settings.out_dir, "metrics.jsonl")
        kept = [line for line in read_metrics(path) if line["step"] <= self.step]
        with replacing(path) as f:
            f.write("".join(json.dumps(line) + "\n" for line in kept).encode())
        if settings.wandb_log:
            self.wandb = start_wandb(settings, run_id, facts, self.print0)

    def restart_clock(self, step):
        """Leaves compiling, an evaluation or a checkpoint out of the rates."""
        self.clock = time.perf_counter()
        self.timed_from = step

    def first_step(self, step, run, cycles):
        """Reports the time of the first step at a depth, which compiles."""
        run.state["sums"].cpu()  # waits for the device
        # the first step is apart: later ones at this depth do not compile
        seconds = time.perf_counter() - self.clock
        self.print0(f"step {step}: {seconds:.1f} s for the first step at H_cycles {cycles[0]}, L_cycles "
                    f"{cycles[1]}, compiling included; left out of the rates below")
        self.restart_clock(step)

    def train(self, step, total_steps, sums, run, cycles):
        """Logs the steps since the last line, and returns the metrics; sums: of Run.read_sums."""
        settings = self.settings
        # the metrics
        values = train_values(settings, sums, step - self.step)
        line = f"step {step}/{total_steps} | {listed(values)}"
        values["train/lr"] = rates(settings, step - 1, total_steps)["lr"]
        # the speed, unless all these steps compiled
        if step > self.timed_from:
            seconds = (time.perf_counter() - self.clock) / (step - self.timed_from)
            speed = settings.global_batch_size / seconds
            # arithmetic of the model at this depth
            flops = speed * run.model.flops_per_example(cycles)[1]
            values["perf/examples_per_sec"] = speed
            values["perf/step_time"] = seconds
            values["perf/tflops"] = flops / 1e12
            peak = peak_flops(self.device)
            if peak:
                values["perf/mfu"] = flops / peak / self.device.world
            line += f" | {speed:,.0f} examples/s {1e3 * seconds:,.0f} ms"
            line += f" | eta {duration((total_steps - step) * seconds)}"
        # what the compiler counts, on XLA
        values |= self.device.counts()
        self.log_metrics(step, values)
        self.print0(line)
        self.step = step
        return values

    def evaluation(self, step, values):
        if not self.settings.eval_only:  # metrics.jsonl is the record of the training run
            self.log_metrics(step, values)
        self.print0(f"step {step} | evaluation: {listed(values)}")

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
        if mode == "online":
            try:
                # a server that hangs would hold wandb.init for minutes; so would a prompt for a key
                requests.head(wandb.setup().settings.base_url, timeout=5)
                wandb.login(timeout=5)
            except Exception as e:  # requests and wandb have many for this
                mode = "offline"
                say(f"W&B: offline ({type(e).__name__}: {' '.join(str(e).split())[:100]})")
        # a run that resumes has the id of its first start, and adds to what W&B has of it
        run = wandb.init(
            id=run_id, resume="allow", mode=mode, dir=settings.out_dir, project=settings.wandb_project,
            name=settings.wandb_run_name or os.path.basename(os.path.abspath(settings.out_dir)),
            config=vars(settings) | facts, settings=dict(console="off", init_timeout=60))
        wandb.define_metric("*", step_metric="step")  # W&B drops rows whose own step goes back
        hint = f"`wandb sync {os.path.dirname(run.dir)}` uploads it" if mode == "offline" else run.url
        say(f"W&B: {mode}, {hint}")
        return run
    except Exception as e:  # training goes on, whatever it is
        say(f"W&B: off ({type(e).__name__}: {' '.join(str(e).split())[:200]}); metrics.jsonl has everything")
        return None


def train_values(settings, sums, steps):
    """Returns means over `steps` steps: LOSS_TERMS over all sequences, METRICS over those that halted."""
    # LOSS_TERMS are sums over all sequences of the steps
    values = {"train/grad_norm": sums["grad_norm"] / steps}
    for name in LOSS_TERMS:
        values[f"train/{name}"] = sums[name] / (steps * settings.global_batch_size)
    # METRICS are sums over the sequences that halted, which "count" counts
    for name in METRICS:
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
    """Runs one replica from its start to its end. Checks all input before it writes anything."""
    # the device, which chooses forward_dtype=auto; nothing changes the settings from here on
    settings = copy.copy(settings)  # replicas may be threads
    device = open_device(kind, settings)
    settings.freeze()
    globals().update(vars(settings))  # the values in force
    check_batch_size(settings, device)

    # data and model
    data = Dataset(settings.data_path, "train")
    test = Dataset(settings.data_path, "test")
    for name in SIZES:
        if getattr(test, name) != getattr(data, name):
            raise UserError(f"{settings.data_path}: train and test differ in {name}: build it again")
    model = new_model(settings, **{name: getattr(data, name) for name in SIZES})
    # the length of the run
    total_steps = count_steps(settings, epoch_size(data))
    if total_steps < 1:
        raise UserError(f"epochs={settings.epochs} of {data.total_groups} puzzles are less than one batch "
                        f"of global_batch_size={settings.global_batch_size}")

    # where to start
    checkpoints = Checkpoints(settings, device, data, test)
    start = checkpoints.find_start(model, total_steps, stop_requested)
    # the watchdog begins here: what came before may have had to wait for a download
    restart_watchdog(settings.stall_timeout)
    run = Run(settings, model, device, start.state)
    start = start._replace(state={})  # frees the memory of the checkpoint
    # say what the run is, and on what
    log = Log(settings, device, start.step)
    device.print0 = log.print0
    log.header(run, data, test, checkpoints.notes)

    # evaluate, finish an upload, or train
    if settings.eval_only:
        if not final_evaluation(run, test, log, start.step):
            sys.exit(3)
        return
    checkpoints.open(start, log.print0, request_stop)
    if start.is_complete:
        log.print0(f"{settings.out_dir} is complete at step {start.step}: --eval_only evaluates it again, "
                   "a higher max_steps or epochs continues it")
        restart_watchdog(0)  # the upload has a time limit of its own
        if not checkpoints.close(600):  # what the last upload left out
            sys.exit(1)
        return
    # train
    facts = dict(data_sha256=data.sha256, parameters=model.num_parameters())
    log.begin(checkpoints.run_id, total_steps, facts)
    train_and_evaluate(run, data, test, log, checkpoints, start, total_steps)


def check_batch_size(settings, device):
    """Raises UserError unless the batch divides into replicas and micro-batches."""
    # the next larger batch that fits is what most users want
    multiple = device.world * (settings.micro_batch_size or 1)
    if settings.global_batch_size % multiple:
        fitting = -(-settings.global_batch_size // multiple) * multiple
        raise UserError(f"global_batch_size {settings.global_batch_size} must be a multiple of {multiple} "
                        f"({device.world} replicas x micro_batch_size {settings.micro_batch_size or 1}), "
                        f"for example {fitting}")


# ---------------------------------------------------------------------------------------------------------
# What settings may be

# The values that a setting may have.
CHOICES = {
    "pos_encodings": ("none", "rope", "learned"),
    "forward_dtype": ("auto", "bfloat16", "float32", "float16"),
    "loss_type": LOSSES,
    "optimizer": OPTIMIZERS,
    "device": ("auto", "xla", "cuda", "mps", "cpu"),
    "compile": ("auto", "on", "off"),
    "kernels": ("auto", "on", "off"),
    "wandb_mode": ("online", "offline", "disabled"),
}
POSITIVE_INT = "[1, 2e9]"  # counts that are int32 on the device
# Intervals as mathematics writes them; every other number must be 0 or more.
BOUNDS = {
    "global_batch_size": "[1, 1e8]",
    "micro_batch_size": "[0, 1e8]",
    "hidden_size": "[1, 1e6]",
    "num_heads": "[1, 1e6]",
    "expansion": "(0, 1e6]",
    "L_layers": "[1, 1e6]",
    "H_cycles": "[1, 1e6]",
    "L_cycles": "[1, 1e6]",
    "halt_max_steps": "[1, 1e9]",
    "halt_exploration_prob": "[0, 1]",
    "halt_exploration_prob_end": "[-1, 1]",
    "lr": "(0, inf)",
    "lr_min_ratio": "[0, 1]",
    "beta1": "[0, 1)",
    "beta2": "[0, 1)",
    "ema_rate": "[0, 1]",
    "weight_decay": "[0, inf)",
    "puzzle_emb_lr": "[0, inf)",
    "puzzle_emb_weight_decay": "[0, inf)",
    "eval_halt_max_steps": "[0, 1e9]",
    "eval_rollouts": "[1, 1e6]",
    "eval_noise": "[0, 1e9]",
    "keep_last_n": "[1, 1e9]",
    "log_interval": "[1, 1e9]",
    "stall_timeout": "[0, 1e6]",
}
# Arrays that an evaluation can save.
EVAL_OUTPUTS = ("inputs", "labels", *ANSWERS)
# The values above, before any override: this file is read again, since its globals change.
DEFAULTS = {name: setting.default for name, setting in read_settings(__file__).items()}


def check_settings(settings):
    """Raises UserError for the first value that no run could use."""
    # each setting by itself
    check_choices(settings, CHOICES)
    check_bounds(settings, BOUNDS)
    # settings that have to fit together
    if -1 < settings.halt_exploration_prob_end < 0:
        raise UserError(f"halt_exploration_prob_end must be -1 or in [0, 1], "
                        f"not {settings.halt_exploration_prob_end}")
    for name in "H_cycles", "L_cycles":
        first = getattr(settings, name + "_start")
        last = getattr(settings, name)
        if settings.curriculum_epochs and not 1 <= first <= last:
            raise UserError(f"{name}_start must be from 1 to {name} ({last}), not {first}")
    if not settings.epochs and not settings.max_steps:
        raise UserError("epochs and max_steps are both 0: set one of them")
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
        Bucket(settings.gcs_dir)  # raises UserError for a malformed address


def recipe(settings):
    """Returns those of {name: value} that say what a run trains, and not where and how it runs."""
    names = DEFAULTS.keys() - RUN_SETTINGS
    return {name: value for name, value in settings.items() if name in names}


def differences(settings):
    """Returns the settings that differ from their defaults, as flags."""
    # in the order of the settings above
    changed = {name: value for name, value in vars(settings).items() if value != DEFAULTS[name]}
    return shlex.join(f"--{name}={value}" for name, value in changed.items())


# ---------------------------------------------------------------------------------------------------------
# Processes. Replicas may be processes of their own; a file tells them that their host is asked to stop.

STOP_FILE = "TRM_STOP_FILE"  # environment variable with the path of that file
stop_file = None  # its descriptor
# True in a process that xmp.spawn started, which imports this file again, by itself or from a fork's script.
IS_SPAWNED = multiprocessing.current_process().name != "MainProcess" and STOP_FILE in os.environ


def open_stop_file():
    """Keeps the stop file open, so that cleaning /tmp cannot prevent a stop."""
    global stop_file
    stop_file = os.open(os.environ[STOP_FILE], os.O_RDWR)


def stop_requested():
    """Returns whether this host was asked to save and stop."""
    return stop_file is not None and os.pread(stop_file, 1, 0) == b"1"


def request_stop():
    """Asks all replicas of this host to save and stop."""
    os.pwrite(stop_file, b"1", 0)  # over a byte that is there: a full disk cannot prevent this


def on_signals():
    """Lets SIGTERM, SIGINT and SIGHUP request a stop. A second one kills."""
    def handler(number, _):
        request_stop()
        # from here on the system handles it: a second signal kills
        signal.signal(number, signal.SIG_DFL)
        if IS_SPAWNED:
            signal.alarm(60)  # the reason may be that another replica died: then no peer answers
        else:
            # os.write, since print is not reentrant; the terminal may be closed
            with suppress(OSError):
                name = signal.Signals(number).name
                os.write(2, f"{name}: saving and stopping; a second one kills\n".encode())

    # a closed terminal sends SIGHUP
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it
            signal.signal(number, handler)


def restart_watchdog(seconds):
    """Ends this process with 1, after the stacks of all threads, unless called again within so many seconds.

    0 calls it off.
    """
    # a C thread: Python code that hangs in a collective cannot prevent it
    faulthandler.cancel_dump_traceback_later()
    if seconds:
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)


def xla_replica(index, settings, kind):
    """Runs replica() for xmp.spawn. If it breaks, its process ends: its peers would wait for it forever."""
    end_with_parent()
    try:
        replica(settings, kind)
    except (UserError, TransientError, OSError, SystemExit):  # every rank of the host raises it
        raise
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def main(settings):
    """Checks the settings, makes the dataset if it is missing, and runs a replica on each device."""
    # the settings, before anything takes time
    check_settings(settings)
    kind, reason = choose_device(settings.device)
    if os.environ.get("RANK", "0") == "0":
        print(f"device {kind}: {reason}", flush=True)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's; after another launcher the parent may leave
        end_with_parent()
    # the dataset: from a bucket, from disk, or made here
    settings.data_path = local_dataset(settings.data_path)
    make_dataset(settings)
    # the stop file, which replicas in processes of their own see too
    with tempfile.TemporaryDirectory() as folder:
        os.environ[STOP_FILE] = os.path.join(folder, "stop")
        with open(os.environ[STOP_FILE], "wb") as f:
            f.write(b"0")
        open_stop_file()
        on_signals()
        try:
            # torch_xla starts a process for each chip; every other device has this process alone
            if kind == "xla":
                import torch_xla.distributed.xla_multiprocessing as xmp
                xmp.spawn(xla_replica, args=(settings, kind))
            else:
                replica(settings, kind)
        # what breaks in a replica, in words
        except torch.OutOfMemoryError:
            raise out_of_memory(settings) from None
        except BrokenProcessPool:
            raise TransientError("a replica died, see above; --init_from=auto continues from the last "
                                 f"checkpoint in {settings.out_dir}") from None
        finally:
            del os.environ[STOP_FILE]


if IS_SPAWNED:
    open_stop_file()
    on_signals()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the main process too, which asks to stop
if __name__ == "__main__":
    configurator.start(main, __file__)
