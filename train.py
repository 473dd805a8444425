"""Trains a Tiny Recursive Model (arXiv 2510.04871) on a TPU, a CUDA GPU or the CPU.

    python train.py config/demo.py                        6x6 Sudoku, made on the spot, in a minute or two
    python train.py config/sudoku.py --device=cuda        the paper's Sudoku-Extreme, after prepare_sudoku.py
    python train.py config/sudoku.py --init_from=resume   continues from the newest checkpoint of out_dir

The settings below are the paper's Sudoku-Extreme recipe (MLP). Config files and --key=value flags override
them.
"""
import atexit
import faulthandler
import glob
import json
import math
import os
import platform
import re
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict
from types import SimpleNamespace

import configurator  # before torch: see there
import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

# isort: off
import puzzles
from bucket import Bucket, local_dataset
from configurator import TransientError, UserError, read_settings
from data import (Dataset, Progress, duration, file_hash, halting_draws, locked, made_by_another_command,
                  read_metrics, replacing)
from device import (all_gather, broadcast, choose_device, end_with_parent, open_device, out_of_memory,
                    peak_flops)
from model import (IGNORE_LABEL, METRICS, TRM, TRMConfig, exploration, flatten, normal_noise, optimizer_state,
                   rates, sign_sgd, stages, supervision_step, unflatten, update_weights)

# data
data_path = "data/sudoku-extreme-1k-aug-1000"  # folder of the dataset, or its gs:// address
data_prepare = ""  # command that makes data_path if it is missing ("prepare_sudoku.py --size=6 ...")
global_batch_size = 768  # sequences per step, over all replicas
micro_batch_size = 0  # sequences at a time on a replica, gradients are summed; 0: its whole batch
epochs = 50000  # an epoch offers each puzzle once, in one copy; sequences that halted take it
max_steps = 0  # length of the run in steps; 0: from epochs
# model
hidden_size = 512  # D
num_heads = 8  # attention heads
expansion = 4.0  # hidden width of the SwiGLUs, before the 2/3 of gating
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
forward_dtype = "bfloat16"  # bfloat16, float32 or float16; weights, optimizer and loss stay float32
# halting
halt_max_steps = 16  # maximum supervision steps of a sequence
halt_exploration_prob = 0.1  # probability, at each step, that a random number of steps must precede a halt
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
ema = True  # evaluate and export an exponential moving average of the weights
ema_rate = 0.999  # decay of that average per step
seed = 0  # of the weights, the data order, the copies and the halting draws
# evaluation
eval_interval = 5000  # epochs between evaluations; 0: only at the end
eval_max_puzzles = 4096  # test puzzles during training, a fixed random subset; 0: all
eval_final_max_puzzles = 0  # test puzzles in the final evaluation; 0: all
eval_halt_max_steps = 0  # supervision steps in an evaluation; 0: halt_max_steps
eval_patience = 0  # a puzzle leaves once its answer has not changed for this many steps; 0: never (the paper)
eval_rollouts = 1  # attempts at each puzzle, all but the first with noise; the surest answer counts
eval_noise = 1.0  # standard deviation of that noise, added to the latent z_L after each supervision step
eval_save_outputs = ""  # any of inputs,labels,preds,q_halt_logits,surest_...: saved to out_dir/eval_STEP.npz
eval_show_puzzle = False  # end by printing an unseen puzzle and its answers after steps 1, 2, 4, ...
eval_only = False  # run the final evaluation, then stop
# run
out_dir = "out/sudoku"  # checkpoints, metrics.jsonl, log.txt
gcs_dir = ""  # gs://bucket/folder of this run alone: a mirror of out_dir, to resume on another machine
init_from = "scratch"  # scratch, resume, auto (resume if there is a checkpoint) or a FILE to begin with
checkpoint_interval = 1000  # steps; sequences start afresh there, for an exact resume; 0: only at the end
keep_last_n = 3  # checkpoints to keep, besides best.pt
export = ""  # write a model FILE (averaged weights, sizes, task, 100 test puzzles), then stop
log_interval = 10  # steps averaged in a line of the log
stall_timeout = 1800  # exit if no step finishes for this many seconds; 0: never
device = "auto"  # auto, xla, cuda, mps (Apple's GPU), cpu or tpu (TorchTPU); auto never takes mps or tpu
compile = "auto"  # torch.compile: auto (on CUDA), on (on the CPU too: a minute, then 10% faster) or off
kernels = "auto"  # Triton kernels for the MLPs on CUDA: off, on, auto (off until a GPU has measured them)
# logging
wandb_log = False  # send metrics.jsonl to Weights & Biases too
wandb_project = "trm"  # in your default entity, or WANDB_ENTITY
wandb_run_name = ""  # empty: the last part of out_dir
wandb_mode = "online"  # online, offline (for `wandb sync`) or disabled; without login or network: offline
# ---

STATS = METRICS + ("grad_norm",)  # what the steps between two lines of the log add up
STOP_FILE = "TRM_STOP_FILE"  # environment variable: the file that asks the replicas of this host to stop


# The step.

class Run:
    """What training changes, on the device, and the two steps that change it: of training and of evaluation.

    state: weights and their average ema, a float32 vector each; optimizer, a dict; puzzle_emb [N, D']; sums
    of STATS since the last line of the log; and the carry, in micro-batches: [micro-batches, sequences in
    one, ...].
    """

    def __init__(self, model, c, device, saved=None):
        """saved: ema and optimizer of a checkpoint, if it has them. All ranks start from rank 0's state."""
        self.model, self.c, self.device = model, c, device
        self.batch_size = c.global_batch_size // device.world
        self.dtype = getattr(torch, c.forward_dtype)
        self.eval_depth = c.eval_halt_max_steps or c.halt_max_steps
        # Longest first: only the short biases, at the end, can leave a weight at an unaligned address.
        parameters = sorted(model.named_parameters(), key=lambda item: -item[1].numel())
        self.shapes = {name: p.shape for name, p in parameters}
        self.state = self.first_state(dict(parameters), saved or {})
        self.num_parameters = len(self.state["weights"]) + self.state["puzzle_emb"].numel()
        device.prepare(model)
        self.supervision_step = device.compile(supervision_step)
        self.train_program = device.compile_step(self.train_step)
        self.eval_program = device.compile_step(self.eval_step)
        self.restart()

    @torch.no_grad()
    def train_step(self, state, inputs, cycles=None):
        """One optimizer step, in place on state. On XLA it is one program with one all-reduce. All ranks.

        inputs: as make_inputs. cycles: (H_cycles, L_cycles), by default the model's. Returns the number of
        ranks that were asked to stop [1].
        """
        c, model = self.c, self.model.train()
        weights = self.cast(state["weights"], state["puzzle_emb"])
        micro_batches = dict(carry=state["carry"], batch=self.split(inputs["batch"]))
        zeros = {name: torch.zeros_like(t, dtype=torch.float32) for name, t in weights.items()}
        zeros = dict(grads=zeros, **self.zeros())
        sums, carry = self.device.accumulate(
            lambda weights, x: self.train_micro_batch(weights, x, cycles), zeros, weights, micro_batches)
        for name, t in carry.items():
            state["carry"][name].copy_(t)

        # The one collective sums all that ranks share. Only here are gradients divided by the batch:
        # float16 has no room in the backward pass for numbers that small.
        parts = dict(grads=flatten(sums["grads"].values()) / c.global_batch_size, rows=sums["rows"],
                     metrics=torch.stack([*sums["metrics"].values()]), stops=inputs["stop_requested"])
        reduced = self.device.all_reduce(flatten(parts.values()))
        reduced = unflatten(reduced, {name: part.shape for name, part in parts.items()})
        grad, puzzle_grad = reduced["grads"].split([len(state["weights"]), state["puzzle_emb"].numel()])

        if model.prefix:
            sign_sgd(state["puzzle_emb"], puzzle_grad.view_as(state["puzzle_emb"]), reduced["rows"],
                     inputs["rates"]["puzzle_emb_lr"], c.puzzle_emb_weight_decay)
        update_weights(c, self.shapes, state["weights"], grad, state["optimizer"], inputs["rates"])
        if c.ema:
            state["ema"].lerp_(state["weights"], 1 - c.ema_rate)
        state["sums"] += torch.cat([reduced["metrics"], grad.square().sum().sqrt().view(1)])
        return reduced["stops"].clone()  # a view would keep all of the reduced vector alive

    def train_micro_batch(self, weights, x, cycles):
        """What the all-reduce adds up for sequences x, carry and batch; and their new carry.

        The former is a dict: grads {name: float32}, rows [N] (how often the batch holds each row of the
        puzzle embedding) and metrics {name of METRICS: sum}. weights: {name: tensor}, in forward_dtype.
        """
        with torch.enable_grad():
            leaves = {name: t.detach().requires_grad_() for name, t in weights.items()}
            loss, carry, metrics, _, _ = self.supervision_step(
                self.c, self.model, leaves, x["carry"], x["batch"], self.c.halt_max_steps, cycles=cycles)
            grads = torch.autograd.grad(loss, list(leaves.values()))
        rows = self.zeros()["rows"]
        if self.model.prefix:
            identifiers = carry["puzzle_identifiers"]
            rows = rows.index_add(0, identifiers, torch.ones_like(identifiers, dtype=torch.float32))
        grads = {name: g.float() for name, g in zip(leaves, grads)}
        return dict(grads=grads, rows=rows, metrics=metrics), carry

    @torch.no_grad()
    def eval_step(self, state, inputs):
        """One supervision step of an evaluation, in place on state. On XLA it is one program. No collective.

        state: as new_evaluation; its totals count the sequences that halt, which take new data at the next
        step. inputs: as eval_inputs. Returns preds [B, S] and q_halt_logits [B] of this step, and
        surest_preds and surest_q_halt_logits of that step so far where q_halt was highest.
        """
        self.model.eval()
        weights = self.cast(inputs["weights"], inputs["puzzle_emb"])
        micro_batches = dict(carry=state["carry"], batch=self.split(inputs["batch"]))
        metrics, rows = self.device.accumulate(
            self.eval_micro_batch, self.zeros()["metrics"], weights, micro_batches)
        for name, t in state["carry"].items():
            t.copy_(rows[name])
        state["totals"] += torch.stack([*metrics.values()])
        names = "preds", "q_halt_logits", "surest_preds", "surest_q_halt_logits"
        return {name: rows[name].flatten(0, 1) for name in names}

    def eval_micro_batch(self, weights, x):
        """{name of METRICS: sum} of sequences x, carry and batch; and their new carry, with their answers."""
        before, batch = x["carry"], x["batch"]
        _, carry, metrics, answer, q_halt = self.supervision_step(
            self.c, self.model, weights, before, batch, self.eval_depth, training=False)
        surer = before["halted"] | (q_halt >= before["surest_q_halt_logits"])  # halted: a new puzzle
        carry["surest_preds"] = torch.where(surer.unsqueeze(-1), answer, before["surest_preds"])
        carry["surest_q_halt_logits"] = torch.where(surer, q_halt, before["surest_q_halt_logits"])
        if "noise_keys" in batch:
            noise = normal_noise(batch["noise_keys"], carry["steps"], carry["z_L"].shape[1:])
            noise *= torch.where(batch["noise_keys"] == 0, 0, self.c.eval_noise).view(-1, 1, 1)
            carry["z_L"] = carry["z_L"] + noise.to(self.dtype)
        return metrics, carry | dict(preds=answer, q_halt_logits=q_halt)

    def eval_inputs(self, batch, noise_keys=None):
        """The inputs of eval_step: the averaged weights where there are any.

        noise_keys: int32 [B], of the noise on each sequence, 0: none. Ignored if eval_rollouts is 1.
        """
        if self.c.eval_rollouts > 1:
            keys = np.zeros(self.batch_size, dtype=np.int32) if noise_keys is None else noise_keys
            batch = batch | dict(noise_keys=keys)
        weights = self.state["ema" if self.c.ema else "weights"]
        return dict(batch=self.device.put(batch), weights=weights, puzzle_emb=self.state["puzzle_emb"])

    def cast(self, vector, puzzle_emb):
        """{name: weight in forward_dtype} of a vector of all weights, and the puzzle embedding in float32."""
        weights = unflatten(vector.to(self.dtype, copy=True), self.shapes)  # the vector changes in place
        return weights | {"puzzle_emb.weights": puzzle_emb} if self.model.prefix else weights

    def split(self, rows):
        """{name: [micro-batches, sequences in one, ...]} of {name: [sequences, ...]}."""
        return {k: t.view(-1, self.c.micro_batch_size or len(t), *t.shape[1:]) for k, t in rows.items()}

    def zeros(self):
        """The rows and metrics of train_micro_batch for no sequences."""
        metrics = {name: torch.zeros((), device=self.device.torch) for name in METRICS}
        rows = max(1, len(self.state["puzzle_emb"]))  # XLA: not empty
        return dict(rows=torch.zeros(rows, device=self.device.torch), metrics=metrics)

    def restart(self):
        """Gives every sequence new data at the next step, and resets the log's sums."""
        carry = self.split(self.model.new_carry(self.batch_size, self.dtype))
        self.state |= self.device.put(dict(carry=carry, sums=torch.zeros(len(STATS))))

    def new_evaluation(self):
        """The state of an evaluation: a carry, with the surest answers, and totals [METRICS]."""
        carry = self.model.new_carry(self.batch_size, self.dtype)
        carry["surest_preds"] = torch.zeros_like(carry["inputs"])
        carry["surest_q_halt_logits"] = torch.zeros(self.batch_size)
        if self.c.eval_patience:
            carry["preds"] = torch.zeros_like(carry["inputs"])
            carry["repeats"] = torch.zeros_like(carry["steps"])
        return self.device.put(dict(carry=self.split(carry), totals=torch.zeros(len(METRICS))))

    def read_sums(self):
        """{name of STATS: sum over the steps since the last call}. Waits for the device."""
        sums = dict(zip(STATS, self.state["sums"].cpu().tolist()))
        self.state["sums"] = self.device.put(torch.zeros(len(STATS)))
        return sums

    @torch.no_grad()
    def first_state(self, parameters, saved):
        """weights, ema, optimizer and puzzle_emb on the device: rank 0's, as are the initial latents."""
        def as_vector(t):  # state_dict splits vectors by the names of the weights
            return flatten(t[name] for name in self.shapes) if isinstance(t, dict) else t

        model, weights = self.model, flatten(parameters.values())
        optimizer = optimizer_state(self.c, self.shapes, weights) | saved.get("optimizer", {})
        first = dict(weights=weights, ema=as_vector(saved.get("ema", weights)),
                     optimizer={name: as_vector(t) for name, t in optimizer.items()},
                     puzzle_emb=model.puzzle_emb.weights if model.prefix else torch.zeros(0, 1),
                     H_init=model.H_init, L_init=model.L_init)
        tensors, structure = tree_flatten(first)
        vector = broadcast(self.device, flatten(t.float() for t in tensors))
        parts = unflatten(vector, {i: t.shape for i, t in enumerate(tensors)})
        first = tree_unflatten([part.clone() for part in parts.values()], structure)
        for name in ("H_init", "L_init"):
            getattr(model, name).copy_(first.pop(name))
        return self.device.put(first)

    def state_dict(self, step):
        """A copy on the host of all that a resume needs; weights and ema are state dicts of the model."""
        def by_name(t):  # forks may reorder the weights, and an optimizer may keep other tensors
            t = t.to("cpu", copy=True)
            return unflatten(t, self.shapes) if t.shape == self.state["weights"].shape else t

        others = {name: t.cpu() for name, t in self.model.state_dict().items() if name not in self.shapes}
        if self.model.prefix:
            others["puzzle_emb.weights"] = self.state["puzzle_emb"].to("cpu", copy=True)
        state = dict(step=step, model=asdict(self.model.config))
        state["weights"] = by_name(self.state["weights"]) | others
        state["optimizer"] = {name: by_name(t) for name, t in self.state["optimizer"].items()}
        return state | (dict(ema=by_name(self.state["ema"]) | others) if self.c.ema else {})


def make_inputs(run, data, step, total_steps):
    """The inputs of train_step `step`, on the device: this rank's batch, rates and stop_requested [1]."""
    c, device = run.c, run.device
    batch = data.train_batch(c.seed, step, c.global_batch_size, device.rank, device.world)
    batch["min_halt_steps"] = halting_draws(c.seed, step, c.global_batch_size, c.halt_max_steps,
                                            exploration(c, step, total_steps), device.rank, device.world)
    step_rates = {name: np.float32([value]) for name, value in rates(c, step, total_steps).items()}
    return device.put(dict(batch=batch, rates=step_rates, stop_requested=np.float32([stop_requested()])))


# The loop.

def train(run, data, test, log, checkpoints, step, total_steps):
    """Trains from `step` to the end or until a stop is requested; returns the step reached. All ranks."""
    c, device, epoch = run.c, run.device, epoch_size(data)
    plan, cycles = stages(c, epoch), None
    stop = False
    previous_stops = None  # a function: how many ranks were asked to stop at the step before
    log.restart_clock(step)
    while step < total_steps and not stop:
        previous_cycles, cycles = cycles, plan[max(first for first in plan if first <= step)]
        inputs = make_inputs(run, data, step, total_steps)
        stops = device.fetch(run.train_program(run.state, inputs, cycles))
        stop = previous_stops is not None and bool(previous_stops() > 0)  # does not wait for this step
        previous_stops, step = stops, step + 1
        restart_watchdog(c)
        if cycles != previous_cycles:
            log.first_step(step, run, cycles)

        # What follows depends on the step and on reduced sums alone, so that all ranks decide the same.
        last = step == total_steps
        save_due = stop or last or c.checkpoint_interval and step % c.checkpoint_interval == 0
        eval_due = not stop and not last and evaluation_due(c, epoch, step)
        if not (save_due or eval_due or step % c.log_interval == 0 or step in plan):  # a line has one depth
            continue
        sums = run.read_sums()  # waits for the device
        if not math.isfinite(sums["lm_loss"] + sums["q_halt_loss"] + sums["grad_norm"]):
            checkpoints.written()
            saved = checkpoint_paths(c.out_dir, (".pt", ".json"))
            raise TransientError(f"loss or gradient not finite between steps {log.step + 1} and {step}; "
                                 f"the last good checkpoint: {(saved or ['none yet'])[0]}")
        metrics = log.train(step, total_steps, sums, run, cycles)
        if eval_due:
            evaluation = evaluate(run, test, test.subset(c.eval_max_puzzles), f"evaluating at step {step}")
            stop = not evaluation  # it was interrupted
            if evaluation:
                log.evaluation(step, evaluation)
                metrics |= evaluation
                checkpoints.save_if_best(step, run, metrics)
        if save_due or stop:
            checkpoints.save(f"ckpt_{step:08d}", step, run, metrics)
            run.restart()  # a run that resumes starts all sequences afresh here, so this one does too
        log.restart_clock(step)
    return step


def train_and_evaluate(run, data, test, log, checkpoints, first_step, total_steps):
    """Trains to the end, saves, evaluates and uploads. All ranks.

    Exits with 3 if it was stopped before, with 1 if the last checkpoint cannot be written or, at the end,
    uploaded.
    """
    began, done = time.time(), False
    step = train(run, data, test, log, checkpoints, first_step, total_steps)
    # All ranks leave together: one that went on to the evaluation would wait for rank 0 forever.
    if not all(all_gather(run.device, checkpoints.written())):
        sys.exit(1)
    if step < total_steps:
        log.print0(f"stopped at step {step}, checkpoint saved in {run.c.out_dir}; "
                   "to continue: the same command with --init_from=resume")
    else:
        if step > first_step:
            log.print0(f"trained {step - first_step} steps in {duration(time.time() - began)}")
        done = final_evaluation(run, test, log, step)
    faulthandler.cancel_dump_traceback_later()  # what follows has time limits of its own
    uploaded = not checkpoints.mirror or checkpoints.mirror.close(600 if done else 15)
    log.close(30 if done else 10)
    if not (done and uploaded):  # a slice may be deleted once its run says that it is complete
        sys.exit(1 if done else 3)


def epoch_size(data):
    """Examples of an epoch."""
    return data.total_groups * data.mean_puzzle_examples


def count_steps(c, epoch):
    """Optimizer steps of the whole run; epoch: examples of one."""
    return c.max_steps or int(c.epochs * epoch / c.global_batch_size)


def evaluation_due(c, epoch, step):
    """Whether the last of `step` steps completed another eval_interval epochs."""
    interval, examples = c.eval_interval * epoch, step * c.global_batch_size
    return interval > 0 and examples // interval > (examples - c.global_batch_size) // interval


# Evaluation: a queue of puzzles, and a batch of slots that take the next one when theirs has left.

class Solver:
    """Solves the test puzzles `indices`, eval_rollouts times each, all but the first time with noise.

    answers: {name: [attempts, puzzles, ...]}, what eval_step returned when a puzzle left.
    """

    def __init__(self, run, test, indices):
        self.run, self.test, self.indices, self.attempts = run, test, indices, run.c.eval_rollouts
        n, slots = len(indices), run.batch_size
        self.next, self.end = 0, n * self.attempts  # the queue: attempt i is at puzzle i // attempts
        self.slots = np.full(slots, -1)  # the attempt in each slot; -1: free
        self.state, self.batch = run.new_evaluation(), test.test_batch([], slots)
        self.keys = np.zeros(slots, dtype=np.int32)
        self.noise_keys = np.stack([test.noise_keys(run.c.seed, indices, attempt)
                                    for attempt in range(self.attempts)])
        tokens = np.min_scalar_type(test.vocab_size)
        self.answers = {name: np.zeros((self.attempts, n, test.seq_len), tokens)
                        for name in ("preds", "surest_preds")}
        self.answers |= {name: np.zeros((self.attempts, n), np.float32)
                         for name in ("q_halt_logits", "surest_q_halt_logits")}

    def left(self):
        """How many attempts have not left."""
        return self.end - self.next + (self.slots >= 0).sum()

    def fill(self):
        """Gives the free slots the next attempts of the queue."""
        free = np.flatnonzero(self.slots < 0)[:self.end - self.next]
        self.slots[free] = np.arange(self.next, self.next + len(free))
        self.next += len(free)
        puzzle, attempt = np.divmod(self.slots[free], self.attempts)
        rows = self.test.test_batch(self.indices[puzzle], len(free))
        rows["labels"][attempt > 0] = IGNORE_LABEL  # the device's totals are those of the first attempts
        for name, array in rows.items():
            self.batch[name][free] = array
        self.keys[free] = self.noise_keys[attempt, puzzle]

    def step(self):
        """Fills the free slots, runs a step, and collects what has left: how many attempts."""
        self.fill()
        inputs = self.run.eval_inputs(self.batch, self.keys)
        # Without eval_patience all puzzles leave together, and nothing waits for the device before.
        for _ in range(1 if self.run.c.eval_patience else self.run.eval_depth):
            outputs = self.run.eval_program(self.state, inputs)
            restart_watchdog(self.run.c)
        halted = self.state["carry"]["halted"].cpu().numpy().ravel()
        left = np.flatnonzero(halted & (self.slots >= 0))
        puzzle, attempt = np.divmod(self.slots[left], self.attempts)
        for name, t in outputs.items() if len(left) else ():
            self.answers[name][attempt, puzzle] = t.cpu().numpy()[left]
        self.slots[left] = -1
        self.batch["labels"][left] = IGNORE_LABEL  # a slot that stays free is not counted again
        return len(left)


def evaluate(run, test, indices, label, save_to=None):
    """Evaluates the test puzzles `indices`: {"eval/...": number}, or {} if a stop is requested. All ranks.

    save_to: where eval_save_outputs go, a path without its ending.
    """
    c, device = run.c, run.device
    if save_to and device.local_rank == 0:
        for path in glob.glob(glob.escape(save_to) + "*.npz"):  # an earlier one may have had more ranks
            with suppress(FileNotFoundError):  # hosts may share the folder
                os.remove(path)
    mine, any_left = indices[device.rank::device.world], True
    solver = Solver(run, test, mine)
    progress = Progress(label, len(mine) * c.eval_rollouts, "puzzles", c.eval_rollouts)
    while any_left:
        for _ in range(run.eval_depth if c.eval_patience else 1):
            if stop_requested() or not solver.left():
                break
            done = solver.step()
            if device.rank == 0:
                progress.add(done)
        # Ranks need different numbers of steps, and meet here.
        stops, left = zip(*all_gather(device, (stop_requested(), solver.left())))
        if any(stops):
            return {}
        any_left = any(left)
    answers = solver.answers
    surest = answers["surest_q_halt_logits"].argmax(0), np.arange(len(mine))  # of each puzzle's attempts
    arrays = test.test_batch(mine, len(mine))
    arrays |= {name: a[surest] if name.startswith("surest") else a[0] for name, a in answers.items()}
    if save_to:
        save_outputs(c, device, save_to, mine, arrays)
    sums = dict(zip(METRICS, solver.state["totals"].cpu().tolist()))
    sums |= puzzles.count_correct(test.task, arrays, answers["surest_preds"])
    return eval_values(all_gather(device, sums))


def eval_values(ranks):
    """{"eval/...": number} of the ranks' sums, of METRICS and of puzzles.count_correct."""
    sums = {name: sum(rank[name] for rank in ranks) for name in ranks[0]}
    values = {"eval/" + name: value / max(sums["count"], 1) for name, value in sums.items()}
    lm_loss, q_halt_loss, _ = (values.pop("eval/" + name) for name in ("lm_loss", "q_halt_loss", "count"))
    return values | {"eval/loss": lm_loss + 0.5 * q_halt_loss, "eval/puzzles": int(sums["count"])}


def save_outputs(c, device, path, indices, arrays):
    """Writes the rank's part of eval_save_outputs. If the disk is full, that is logged."""
    path += f".{device.rank}.npz" if device.world > 1 else ".npz"
    arrays = {name: arrays[name] for name in c.eval_save_outputs.split(",") if name}
    try:
        os.makedirs(c.out_dir, exist_ok=True)
        with replacing(path) as f:
            np.savez_compressed(f, indices=indices, **arrays)
    except OSError as e:
        device.print0(f"{path}: not written: {e}")


def final_evaluation(run, test, log, step):
    """The final evaluation, in the log. Returns False if it was interrupted. All ranks."""
    c = run.c
    save_to = os.path.join(c.out_dir, f"eval_{step:08d}") if c.eval_save_outputs else None
    values = evaluate(run, test, test.subset(c.eval_final_max_puzzles), "final evaluation", save_to)
    if not values:
        how = "" if c.eval_only else " with --init_from=resume"
        log.print0(f"final evaluation stopped; the same command{how} starts it again")
        return False
    log.evaluation(step, {"final": True, **values})
    if c.eval_show_puzzle:
        log.print0("\n" + show_puzzle(run, test))
    return True


def show_puzzle(run, test):
    """A text: a test puzzle and the answers after supervision steps 1, 2, 4, ..., wrong cells marked with *.

    All ranks.
    """
    arrays = test.test_batch(test.subset(1), run.batch_size)
    question, labels = arrays["inputs"][0], arrays["labels"][0]
    inputs, state, step, halted = run.eval_inputs(arrays), run.new_evaluation(), 0, False
    grids = [("question", question, [False] * test.seq_len)]
    while not halted:
        answer = run.eval_program(state, inputs)["preds"][0].cpu().numpy()
        step, halted = step + 1, bool(state["carry"]["halted"].flatten()[0])
        if halted or step & (step - 1) == 0:
            wrong = (answer != labels) & (labels != IGNORE_LABEL)
            result = f"{wrong.sum()} wrong" if wrong.any() else "solved"
            grids.append((f"step {step}: {result}", answer, wrong))
    return puzzles.side_by_side(grids, test.task["symbols"], *test.task["grid"])


# Checkpoints: ckpt_STEP.pt and best.pt in out_dir, each with a .json, written after it, that holds its hash.

NUMBERED = re.compile(r"(ckpt_\d{8,})\.(pt|json)")


class Checkpoints:
    """Writes rank 0's checkpoints on a background thread, prunes them, and tells the bucket's mirror."""

    def __init__(self, c, device, log, start, data):
        self.c, self.rank, self.log = c, device.rank, log
        self.best, self.data = start.state.get("best", -1.0), data
        self.settings = dict(vars(c))
        if start.step and "settings" in start.state:  # where the run began, which a resume must not hide
            self.settings["init_from"] = start.state["settings"]["init_from"]
        self.writer, self.writing, self.mirror = ThreadPoolExecutor(1), None, None
        if self.rank == 0:
            for path in glob.glob(os.path.join(glob.escape(c.out_dir), "*.tmp")):  # of a killed process
                os.remove(path)
            if c.gcs_dir:
                self.mirror = Mirror(c, log, f"ckpt_{start.step:08d}")

    def save(self, name, step, run, metrics):
        """Begins to write out_dir/name.pt and its .json, after the one before: memory holds one copy."""
        if self.rank == 0:
            self.written()
            state = run.state_dict(step)
            state |= dict(settings=self.settings, data=self.data.sha256, task=self.data.task,
                          wandb_id=self.log.wandb_id, best=self.best)
            self.writing = self.writer.submit(self.write, name, state, metrics)

    def write(self, name, state, metrics):
        path = os.path.join(self.c.out_dir, name)
        with replacing(path + ".pt") as f:
            torch.save(state, f)
        description = dict(step=state["step"], sha256=file_hash(path + ".pt"), data=state["data"],
                           settings=state["settings"], metrics=metrics)
        with replacing(path + ".json") as f:
            f.write(json.dumps(description, indent=1).encode())
        for old in outdated(os.listdir(self.c.out_dir), name, self.c.keep_last_n):
            os.remove(os.path.join(self.c.out_dir, old))
        if self.mirror and name != "best":
            self.mirror.update(name)

    def save_if_best(self, step, run, metrics):
        """Saves best.pt if no earlier evaluation was better."""
        if metrics["eval/exact_accuracy"] > self.best:
            self.best = metrics["eval/exact_accuracy"]
            self.save("best", step, run, metrics)

    def written(self):
        """Waits for the checkpoint that is being written. False, and a line in the log, if it failed."""
        writing, self.writing = self.writing, None
        try:
            if writing:
                writing.result()
        except (OSError, RuntimeError) as e:  # torch.save reports a full disk by a RuntimeError
            self.log.print0(f"checkpoint not written: {e}")
            return False
        return True


def numbered(names, endings=(".pt", ".json")):
    """The numbered checkpoints, newest first, of which `names` has the files with these endings."""
    found = {match[1] for match in map(NUMBERED.fullmatch, names) if match}
    return sorted((name for name in found if all(name + e in names for e in endings)), reverse=True)


def outdated(names, newest, keep):
    """Which of the files `names` to delete, in this order, once the checkpoint `newest` is complete.

    All but the last `keep` complete ones. Those after `newest` were found damaged, and do not count.
    """
    kept = [name for name in numbered(names) if name <= newest][:keep]
    older = [name for name in numbered(names, ()) if name <= newest and name not in kept]
    return [name + e for name in older for e in (".json", ".pt") if name + e in names]


def checkpoint_paths(out_dir, endings=(".pt",)):
    """Paths of the numbered checkpoints that have files with these endings, newest first."""
    names = os.listdir(out_dir) if os.path.isdir(out_dir) else []
    return [os.path.join(out_dir, name + ".pt") for name in numbered(names, endings)]


def newest_checkpoint(out_dir, say):
    """The state of the newest complete checkpoint, or {}. Says which it skips, and why."""
    for path in checkpoint_paths(out_dir):
        try:
            with open(path[:-3] + ".json", "rb") as f:
                if json.load(f)["sha256"] != file_hash(path):
                    raise ValueError("it does not match the hash in its .json")
            state = read_checkpoint(path)
            say(f"resuming from {path}")
            return state
        except FileNotFoundError:
            say(f"skipped {path}: its .json is missing, so the write was interrupted")
        except (ValueError, KeyError, TypeError, UserError) as e:
            say(f"skipped {path}: damaged ({e})")
    return {}


def read_checkpoint(path):
    """The state in one of our checkpoints, or {"weights": ...} of an official one. Raises UserError."""
    warnings.filterwarnings("ignore", "Detected pickle protocol")  # the error says it in one line
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path}: no such checkpoint; init_from is scratch, resume, auto or a file") from None
    except Exception as e:
        raise UserError(f"{path}: cannot be read as a checkpoint ({type(e).__name__}): "
                        "damaged, or not one of ours or the official code's") from None
    weights = state.get("weights", state) if isinstance(state, dict) else None
    if not isinstance(weights, dict) or not weights or not all(
            isinstance(name, str) and torch.is_tensor(t) for name, t in weights.items()):
        raise UserError(f"{path}: holds no weights by name: not a checkpoint of ours or of the official code")
    return state if "weights" in state else {"weights": weights}


def write_model(c, model, start, data, test):
    """Writes a file for TRM.load, solve.py, init_from and, by its "weights", the official code.

    The weights are those of an evaluation, in forward_dtype: what the network computes with.
    """
    groups = {name: group for name, (_, _, group) in read_settings(__file__).items()}
    settings = {name: v for name, v in vars(c).items() if groups[name] not in ("run", "logging")}
    made_by = vars(c) | start.state.get("settings", {})
    made_by = SimpleNamespace(**{name: made_by[name] for name in [*settings, "init_from"]})
    weights = model.state_dict() | (start.state.get("ema", {}) if c.ema else {})
    folder = c.out_dir if c.init_from in ("resume", "auto") else os.path.dirname(c.init_from)
    lines = read_metrics(os.path.join(folder, "metrics.jsonl"))
    batch = test.test_batch(test.subset(100), min(100, len(test)))
    saved = dict(
        weights={"_orig_mod.model.inner." + name: t.to(getattr(torch, c.forward_dtype), copy=True)
                 for name, t in weights.items()},
        model=asdict(model.config), task=data.task, data=data.sha256, step=start.step, settings=settings,
        command="python train.py " + differences(made_by),
        metrics=next((v for v in reversed(lines) if v["step"] == start.step and "eval/loss" in v), {}),
        puzzles={name: torch.from_numpy(batch[name]).short() for name in ("inputs", "labels")})
    try:
        with replacing(c.export) as f:
            torch.save(saved, f)
    except OSError as e:
        raise UserError(f"--export={c.export}: {e.strerror}") from None
    print(f"wrote {c.export}: {os.path.getsize(c.export):,} bytes, weights in {c.forward_dtype}")


def load_weights(model, named, where):
    """Loads weights by the official code's names. Raises UserError if they do not fit; where: their file."""
    try:
        model.load_named(named)
    except ValueError as e:
        raise UserError(f"{where}: {e}") from None


class Mirror:
    """A thread that copies out_dir to gcs_dir: the newest checkpoint, .pt before .json, then other files.

    A checkpoint that a newer one overtakes is skipped whole. What fails is tried again at the next update,
    and training continues.
    """

    def __init__(self, c, log, newest):
        """newest: the name of the checkpoint from which the run starts, without its ending."""
        self.c, self.log, self.newest = c, log, newest
        self.bucket, self.failing, self.closing = Bucket(c.gcs_dir), False, False
        self.copied = {}  # {name of a file: its version}; "ckpt" if a checkpoint is complete
        self.changed = threading.Event()
        self.thread = threading.Thread(target=self.work, daemon=True)  # does not keep the process alive
        self.thread.start()

    def update(self, newest=None):
        """Begins to copy what is new; newest: the name of a checkpoint that is complete."""
        self.newest = newest or self.newest
        self.changed.set()

    def close(self, seconds):
        """Copies what is new, within the given time. Returns whether the bucket has everything."""
        self.closing = True
        self.update()
        self.log.print0(f"uploading to {self.c.gcs_dir}, for {seconds} s at most")
        self.thread.join(seconds)
        complete = not (self.thread.is_alive() or self.failing)
        if not complete:
            self.log.print0(f"upload to {self.c.gcs_dir} not complete; --init_from=auto uploads the rest")
        return complete

    def work(self):
        last = False
        while not last:
            self.changed.wait()
            self.changed.clear()
            last = self.closing
            failed_before, self.failing = self.failing, True  # until it has succeeded
            errors = self.copy()
            self.failing = bool(errors)
            if errors and not failed_before:
                self.log.print0(f"upload failed, the next checkpoint tries again: {errors[0]}")

    def copy(self):
        """Copies what is new. Returns the errors: a file that fails does not stop the next."""
        errors, newest, contents = [], self.newest, None
        try:
            contents = self.checkpoint(newest)  # now, as a newer one prunes it
        except OSError as e:
            errors.append(e)
        others = [entry.name for entry in os.scandir(self.c.out_dir) if entry.is_file()]
        # A checkpoint's metrics come before it, or a kill between the two would lose them. But those of the
        # first come after it: metrics without a checkpoint are a run that cannot be resumed.
        for name in ["metrics.jsonl", newest, "best", *others]:
            try:
                if name in (newest, "best"):
                    self.copy_checkpoint(name, contents if name == newest else self.checkpoint(name))
                elif not re.fullmatch(r"ckpt_.*|best\..*|.*\.(tmp|part|lock)", name) and (
                        name != "metrics.jsonl" or "ckpt" in self.copied):
                    self.copy_file(name)
            except Exception as e:  # whatever it is, training continues
                errors.append(e)
        return errors

    def checkpoint(self, name):
        """The bytes of name.pt and name.json; None if there is none, or a newer one is complete."""
        path = os.path.join(self.c.out_dir, name)
        with suppress(FileNotFoundError):
            with open(path + ".json", "rb") as description, open(path + ".pt", "rb") as weights:
                return weights.read(), description.read()

    def copy_checkpoint(self, name, contents):
        """Copies name.pt and name.json, then deletes what is outdated in the bucket."""
        if not contents:
            return
        if self.bucket.read(name + ".json") != contents[1]:
            self.bucket.write(name + ".pt", contents[0])
            self.bucket.write(name + ".json", contents[1])
        self.copied[name.partition("_")[0]] = 0
        for old in outdated(self.bucket.list(), name, self.c.keep_last_n):
            self.bucket.delete(old)

    def copy_file(self, name):
        path = os.path.join(self.c.out_dir, name)
        found = os.stat(path)
        version = found.st_mtime_ns, found.st_size  # two lines may be of one tick of the clock
        if self.copied.get(name) != version:
            self.bucket.upload(path, name)
            self.copied[name] = version


# Logs.

class Log:
    """Lines for people and for programs. A file that cannot be written costs a warning and not the run.

    Rank 0 prints, and writes out_dir/log.txt and metrics.jsonl. step: that of the last line of metrics.
    """

    def __init__(self, c, device, start):
        self.c, self.device, self.step, self.wandb_id = c, device, start.step, start.state.get("wandb_id")
        self.follower, self.warned = None, False
        if device.rank == 0:
            with suppress(OSError):  # append() says so
                os.makedirs(c.out_dir, exist_ok=True)

    def print0(self, text):
        """Prints a line on rank 0, and adds it to log.txt."""
        if self.device.rank == 0:
            print(text, flush=True)
            self.append("log.txt", text)

    def log_metrics(self, step, values):
        """Adds a line to metrics.jsonl."""
        if self.device.rank == 0:
            values = {k: float(f"{v:.8g}") if isinstance(v, float) else v for k, v in values.items()}
            self.append("metrics.jsonl", json.dumps({"step": step, **values}))

    def append(self, name, line):
        path = os.path.join(self.c.out_dir, name)
        try:
            with open(path, "a+b") as f:
                if f.tell() and f.seek(-1, os.SEEK_END) and f.read(1) != b"\n":
                    f.write(b"\n")  # a full disk has left half a line
                f.write(line.encode(errors="backslashreplace") + b"\n")
        except OSError as e:
            if not self.warned:
                print(f"{path}: cannot be written ({e.strerror}); training continues", file=sys.stderr)
            self.warned = True

    def header(self, run, data, test, notes):
        """What the run is, and on what."""
        c, device = self.c, self.device
        self.print0(f"# python {platform.python_version()}, torch {torch.__version__}, "
                    f"{platform.platform()}, {os.cpu_count()} cores, {device.world} x {device.kind} "
                    f"({device.name}); settings that differ from train.py's: {differences(c) or 'none'}")
        self.print0(f"{run.num_parameters:,} parameters; "
                    f"{len(data):,} training examples of {data.total_groups:,} puzzles, "
                    f"{len(test):,} test puzzles in {c.data_path}")
        for note in [*device.notes, *notes]:
            self.print0(note)

    def begin(self, total_steps, **facts):
        """Drops the lines past the step where the run starts, and starts W&B. facts: for W&B's config."""
        self.print0(f"training from step {self.step} to {total_steps}, "
                    f"{self.c.global_batch_size} sequences a step")
        if self.device.rank == 0:
            path = os.path.join(self.c.out_dir, "metrics.jsonl")
            kept = [line for line in read_metrics(path) if line["step"] <= self.step]
            with replacing(path) as f:
                f.write("".join(json.dumps(line) + "\n" for line in kept).encode())
            if self.c.wandb_log:
                self.start_wandb(facts)

    def restart_clock(self, step):
        """Leaves compiling, an evaluation or a checkpoint out of the rates."""
        self.clock, self.timed_from = time.perf_counter(), step

    def first_step(self, step, run, cycles):
        """Reports the time of the first step at a depth, which compiles."""
        run.state["sums"].cpu()  # waits for the device
        seconds = time.perf_counter() - self.clock
        self.print0(f"step {step}: {seconds:.1f} s for the first step at H_cycles {cycles[0]}, L_cycles "
                    f"{cycles[1]}, compiling included; left out of the rates below")
        self.restart_clock(step)

    def train(self, step, total_steps, sums, run, cycles):
        """Logs the steps since the last line, and returns the metrics; sums: as Run.read_sums returns."""
        c, values = self.c, train_values(self.c, sums, step - self.step)
        line = f"step {step}/{total_steps} | {listed(values)}"
        values["train/lr"] = rates(c, step - 1, total_steps)["lr"]
        if step > self.timed_from:
            seconds = (time.perf_counter() - self.clock) / (step - self.timed_from)
            speed = c.global_batch_size / seconds
            flops = run.model.flops_per_example(cycles)[1]
            values |= {"perf/examples_per_sec": speed, "perf/step_time": seconds,
                       "perf/tflops": speed * flops / 1e12}
            if peak := peak_flops(self.device):
                values["perf/mfu"] = speed * flops / peak / self.device.world
            line += f" | {speed:,.0f} examples/s {1e3 * seconds:,.0f} ms"
            line += f" | eta {duration((total_steps - step) * seconds)}"
        values |= self.device.counts()
        self.log_metrics(step, values)
        self.print0(line)
        self.step = step
        return values

    def evaluation(self, step, values):
        if not self.c.eval_only:  # metrics.jsonl is the record of the training run
            self.log_metrics(step, values)
        self.print0(f"step {step} | evaluation: {listed(values)}")

    def start_wandb(self, facts):
        """Starts scripts/wandb_follow.py, which sends metrics.jsonl to Weights & Biases.

        It is a process of its own, which can be killed: wandb can hang in init, in finish and in its exit
        hooks. facts: added to the settings in W&B's config.
        """
        c, mode = self.c, self.c.wandb_mode
        if mode == "online":  # the environment may keep a run from that, but not send an offline one there
            mode = os.environ.get("WANDB_MODE") or mode
        if mode == "disabled":
            return
        self.wandb_id = self.wandb_id or secrets.token_hex(4)
        run = dict(id=self.wandb_id, project=c.wandb_project, config=vars(c) | facts, command=sys.argv,
                   name=c.wandb_run_name or os.path.basename(os.path.abspath(c.out_dir)))
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "scripts", "wandb_follow.py")
        try:
            with replacing(os.path.join(c.out_dir, "wandb.json")) as f:
                f.write(json.dumps(run, indent=1).encode())
            self.follower = subprocess.Popen(
                [sys.executable, script, c.out_dir, "--child", f"--mode={mode}"],
                stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)  # without Ctrl-C
        except OSError as e:
            self.print0(f"W&B: off, it cannot be started ({e}); metrics.jsonl has everything")
        atexit.register(self.close, 10)  # where an error ends the run

    def close(self, seconds):
        """Ends what start_wandb started, by closing its stdin, within `seconds`."""
        if not self.follower:
            return
        self.follower.stdin.close()
        try:
            code = self.follower.wait(seconds)
            problem = f"exit code {code}" if code not in (0, 1) else ""  # 1: it has said why
        except subprocess.TimeoutExpired:
            os.killpg(self.follower.pid, signal.SIGKILL)  # and what wandb has started
            problem = f"no end within {seconds} s, killed"
        if problem:
            self.print0(f"W&B: {problem}; python scripts/wandb_follow.py {self.c.out_dir} sends the rest")
        self.follower = None


def train_values(c, sums, steps):
    """Means over `steps` steps: losses over all sequences, the other METRICS over those that halted."""
    means = {}
    for name in METRICS[1:]:
        count = steps * c.global_batch_size if name.endswith("_loss") else sums["count"]
        if count:
            means["train/" + name] = sums[name] / count
    loss = means["train/lm_loss"] + 0.5 * means["train/q_halt_loss"]
    return means | {"train/loss": loss, "train/grad_norm": sums["grad_norm"] / steps}


def listed(values):
    """{"train/accuracy": 0.5, ...} as "accuracy 0.5000 ..."."""
    return " ".join(f"{name.partition('/')[2]} " + (f"{v:.4f}" if isinstance(v, float) else str(v))
                    for name, v in values.items() if "/" in name)


# Where a run starts.

CLAIM = "run.json"  # in the bucket's folder: a run has begun there


def agree_on_start(c, device, data, model, total_steps):
    """Where the run starts. All ranks, though only rank 0 reads out_dir and gcs_dir; all raise its error.

    Returns step, complete (nothing is left to do), and for rank 0 alone: state (of a checkpoint, weights
    alone are loaded already), notes (lines for the log) and lock.
    """
    start, error = SimpleNamespace(step=0, complete=False, state={}, notes=[], lock=None), None
    if device.rank == 0:
        try:
            find_start(c, data, model, total_steps, start)
        except KeyboardInterrupt:  # a stop was requested
            error = SystemExit(3)
        except (UserError, TransientError, OSError) as e:
            error = e
    ranks = all_gather(device, SimpleNamespace(
        host=device.host, dataset={"data_path": data.sha256}, code=imported_files(), error=error,
        settings={name: value for name, value in vars(c).items() if name not in ("data_path", "out_dir")},
        step=start.step, complete=start.complete))
    check_same(ranks)
    if ranks[0].error:
        raise ranks[0].error
    start.step, start.complete = ranks[0].step, ranks[0].complete
    return start


def imported_files():
    """{name: SHA-256} of the files in this folder that are imported: the code, also that of forks."""
    folder, hashes = os.path.dirname(os.path.abspath(__file__)) + os.sep, {}
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None) or ""
        if path.startswith(folder) and "site-packages" not in path:
            hashes[path.removeprefix(folder)] = file_hash(path)
    return hashes


def check_same(ranks):
    """Raises an error if ranks have another dataset, other settings or other code than rank 0."""
    # tpu.sh copies the code at a restart.
    for what, error in (("dataset", UserError), ("settings", UserError), ("code", TransientError)):
        for rank, facts in enumerate(ranks):
            differing = dict(getattr(facts, what).items() ^ getattr(ranks[0], what).items())
            if differing:
                names = ", ".join(sorted(differing))
                raise error(f"host {facts.host}, rank {rank}: {what} differ from rank 0's: {names}")


def find_start(c, data, model, total_steps, start):
    """Fills in `start` from init_from, loads its weights into the model and locks out_dir. Rank 0 alone.

    Raises UserError where init_from, out_dir and gcs_dir do not fit together, and KeyboardInterrupt if a stop
    is requested while the bucket does not answer.
    """
    patient = c.init_from != "scratch"  # a restart has time to wait for the bucket
    bucket = Bucket(c.gcs_dir, stop=stop_requested, patient=patient) if c.gcs_dir else None
    reads_only = bool(c.eval_only or c.export)
    file = c.init_from if c.init_from not in ("scratch", "resume", "auto") else ""
    if bucket:
        bucket.check(write=not reads_only)
    remote = bucket.list() if bucket else {}
    state = {}
    if c.init_from != "scratch" and not (file and reads_only):
        state = find_checkpoint(c, bucket, remote, start.notes.append)
    is_another = c.init_from == "scratch" or file and state and state["settings"]["init_from"] != file
    local = os.listdir(c.out_dir) if os.path.isdir(c.out_dir) else []
    for setting, names in ("out_dir", local), ("gcs_dir", remote):
        holds_run = any(name.startswith(("ckpt_", "best.", "metrics.", CLAIM)) for name in names)
        if holds_run and is_another and not reads_only:
            raise UserError(f"{getattr(c, setting)} holds a run: --init_from=auto continues it, "
                            f"--{setting}=... starts another")
    source = c.out_dir if state or not file else file
    if state:
        resume(c, state, data, total_steps, start, reads_only)
    elif file:
        state = read_checkpoint(file)
        start.state = {name: state[name] for name in ("ema", "settings") if name in state}
        start.step = state.get("step", 0) if reads_only else 0
    if state:
        load_weights(model, state["weights"], source)
    if not reads_only:
        claim(c, bucket, CLAIM in remote, start)


def find_checkpoint(c, bucket, remote, say):
    """The newest complete checkpoint of out_dir or the bucket; {} if init_from starts without one."""
    notes = []
    state = newest_checkpoint(c.out_dir, notes.append)
    for name in numbered(remote):
        if name <= f"ckpt_{state.get('step', -1):08d}":
            break
        notes.append(f"fetching {name} from {c.gcs_dir}")
        logs = {"metrics.jsonl", "log.txt", "wandb.json", "best.pt", "best.json"} & remote.keys()
        for file in [*logs, name + ".pt", name + ".json"]:
            bucket.download(file, os.path.join(c.out_dir, file))
        state = newest_checkpoint(c.out_dir, notes.append)
    # metrics.jsonl is uploaded after a checkpoint.
    had_one = "metrics.jsonl" in remote or checkpoint_paths(c.out_dir, (".json",))
    if not state and (c.init_from == "resume" or c.eval_only or c.export or had_one):
        where = c.out_dir + (f" and {c.gcs_dir}" if bucket else "")
        problem = f"--init_from={c.init_from}: no complete checkpoint in {where}"
        hint = "another out_dir or gcs_dir" if had_one else "--init_from=auto"
        raise UserError("; ".join([problem, *notes, f"{hint} starts from scratch"]))
    for note in notes:
        say(note)
    return state


def resume(c, state, data, total_steps, start, reads_only):
    """Fills in `start` from a checkpoint of this run. Raises UserError."""
    missing = {"optimizer", "settings", "data", "wandb_id", "best"} - state.keys()
    if missing:
        raise UserError(f"the checkpoint in {c.out_dir} is of another version of this code: it lacks "
                        f"{', '.join(sorted(missing))}; --init_from=FILE begins with its weights alone")
    if state["data"] != data.sha256:
        raise UserError(f"{c.data_path} is not the dataset that the checkpoint in {c.out_dir} "
                        "was trained on: choose that one, or another --out_dir")
    if state["step"] > total_steps and not reads_only:
        raise UserError(f"{c.out_dir} is at step {state['step']}, past the {total_steps} steps of this run: "
                        "raise max_steps or epochs")
    settings = state["settings"]
    if settings["optimizer"] != c.optimizer and not reads_only:
        raise UserError(f"{c.out_dir} was trained with optimizer={settings['optimizer']}, not {c.optimizer}: "
                        "--init_from=FILE --out_dir=... begins another run with its weights")
    for name, before in settings.items():
        if name not in vars(c):
            start.notes.append(f"{name}={before} in the checkpoint is a setting that this code does not have")
        elif before != getattr(c, name) and name not in ("init_from", "eval_only", "export"):
            start.notes.append(f"{name} is {getattr(c, name)}; the checkpoint had {before}")
    start.state, start.step = state, state["step"]
    lines = read_metrics(os.path.join(c.out_dir, "metrics.jsonl"))
    start.complete = start.step == total_steps and any(
        line.get("final") and line["step"] == start.step for line in lines)


def claim(c, bucket, is_claimed, start):
    """Locks out_dir until the process ends, and claims the bucket's folder: one training at a time.

    Raises TransientError if another process trains there, since it may end.
    """
    start.lock = locked(os.path.join(c.out_dir, "run"), wait=False)
    try:
        start.lock.__enter__()
    except BlockingIOError:
        raise TransientError(f"--out_dir={c.out_dir}: another process trains there") from None
    except OSError as e:
        raise UserError(f"--out_dir={c.out_dir}: cannot be written to ({e.strerror})") from None
    if bucket and not is_claimed:
        owner = dict(host=platform.node(), process=os.getpid(), out_dir=os.path.abspath(c.out_dir))
        if not bucket.write(CLAIM, json.dumps(owner).encode(), new=True):
            raise TransientError(f"--gcs_dir={c.gcs_dir}: another run has just begun there")


# Setting up.

def replica(c, kind):
    """The whole run of one replica. Checks all input before it writes anything."""
    restart_watchdog(c)
    device = open_device(kind, c)
    check_batch_size(c, device)
    data, test = Dataset(c.data_path, "train"), Dataset(c.data_path, "test")
    model = new_model(c, **{name: getattr(data, name) for name in SIZES})
    for name in SIZES:
        if getattr(test, name) != getattr(data, name):
            raise UserError(f"{c.data_path}: train and test differ in {name}: build it again")
    total_steps = count_steps(c, epoch_size(data))
    if total_steps < 1:
        raise UserError(f"epochs={c.epochs} of {data.total_groups} puzzles are less than one batch "
                        f"of global_batch_size={c.global_batch_size}")
    start = agree_on_start(c, device, data, model, total_steps)
    if c.export:
        if device.rank == 0:
            print("".join(note + "\n" for note in start.notes), end="")
            write_model(c, model, start, data, test)
        return
    run, log = Run(model, c, device, start.state), Log(c, device, start)
    device.print0 = log.print0
    notes = start.notes + puzzles.label_notes(data, test)
    if max(stages(c, epoch_size(data))) >= total_steps:
        notes.append("the run ends before its curriculum does: it never trains at the depth of evaluations")
    log.header(run, data, test, notes)
    if c.eval_only:
        if not final_evaluation(run, test, log, start.step):
            sys.exit(3)
        return
    checkpoints = Checkpoints(c, device, log, start, data)
    start.state = {}  # frees the memory of the checkpoint
    if start.complete:
        log.print0(f"{c.out_dir} is complete at step {start.step}: --eval_only evaluates it again, "
                   "a higher max_steps or epochs continues it")
        if checkpoints.mirror and not checkpoints.mirror.close(600):  # what the last upload left out
            sys.exit(1)
    else:
        log.begin(total_steps, data_sha256=data.sha256, parameters=run.num_parameters)
        train_and_evaluate(run, data, test, log, checkpoints, start.step, total_steps)


def check_batch_size(c, device):
    """Raises UserError unless the batch divides into replicas and micro-batches."""
    multiple = device.world * (c.micro_batch_size or 1)
    if c.global_batch_size % multiple:
        raise UserError(f"global_batch_size {c.global_batch_size} must be a multiple of {multiple} "
                        f"({device.world} replicas x micro_batch_size {c.micro_batch_size or 1}), "
                        f"as {-(-c.global_batch_size // multiple) * multiple}")


SIZES = "seq_len", "vocab_size", "num_puzzle_identifiers"  # of a dataset, and of a model for it


def new_model(c, **sizes):
    """A model of the settings with its first weights. Raises UserError for sizes that cannot be built."""
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(c.seed)  # of what init_weights leaves to the modules
            return TRM(TRMConfig.of(c, **sizes), c.seed)
    except ValueError as e:
        raise UserError(str(e)) from None


# Settings.

CHOICES = {
    "pos_encodings": ("none", "rope", "learned"),
    "forward_dtype": ("bfloat16", "float32", "float16"),
    "loss_type": ("stablemax_cross_entropy", "softmax_cross_entropy"),
    "optimizer": ("adam_atan2", "adamw", "lion", "muon"),
    "device": ("auto", "xla", "cuda", "mps", "cpu", "tpu"),
    "compile": ("auto", "on", "off"),
    "kernels": ("auto", "on", "off"),
    "wandb_mode": ("online", "offline", "disabled"),
}
ABOVE_0 = ("global_batch_size", "hidden_size", "num_heads", "expansion", "L_layers", "H_cycles", "L_cycles",
           "halt_max_steps", "lr", "log_interval", "keep_last_n", "eval_rollouts")  # other numbers: 0 or more
SHARES = "beta1", "beta2", "ema_rate", "halt_exploration_prob", "halt_exploration_prob_end"  # from 0 to 1
EVAL_OUTPUTS = ("inputs", "labels", "preds", "q_halt_logits", "surest_preds", "surest_q_halt_logits")


def check_settings(c):
    """Raises UserError for the first value that no run could use."""
    for name, choices in CHOICES.items():
        if getattr(c, name) not in choices:
            raise UserError(f"{name} must be one of {', '.join(choices)}, not {getattr(c, name)!r}")
    for name, value in vars(c).items():
        if type(value) in (int, float) and (name, value) != ("halt_exploration_prob_end", -1):
            bounds = "above 0" if name in ABOVE_0 else "from 0 to 1" if name in SHARES else "0 or more"
            below = value <= 0 if name in ABOVE_0 else value < 0
            above = value > 1 if name in SHARES else value >= 2 ** 63 and type(value) is int
            if below or above or not math.isfinite(value):
                raise UserError(f"{name} must be {bounds}, not {value}")
    for name in ("H_cycles", "L_cycles") if c.curriculum_epochs else ():
        first, last = getattr(c, name + "_start"), getattr(c, name)
        if not 1 <= first <= last:
            raise UserError(f"{name}_start must be from 1 to {name} ({last}), not {first}")
    if not c.epochs and not c.max_steps:
        raise UserError("epochs and max_steps are both 0: set one of them")
    for name in filter(None, c.eval_save_outputs.split(",")):
        if name not in EVAL_OUTPUTS:
            raise UserError(f"eval_save_outputs: unknown {name!r}; choose from {','.join(EVAL_OUTPUTS)}")
    for name in ("data_path", "out_dir", "init_from", "wandb_project"):
        if not getattr(c, name):
            raise UserError(f"{name} must not be empty")
    for name in ("eval_only", "export"):
        if getattr(c, name) and c.init_from == "scratch":
            raise UserError(f"{name} needs weights: --init_from=resume (the newest checkpoint of out_dir) "
                            "or --init_from=FILE")
    if os.path.lexists(c.export):
        raise UserError(f"--export={c.export}: exists already; choose another name")
    if c.gcs_dir:
        Bucket(c.gcs_dir)  # raises UserError for a malformed address


def differences(c):
    """The settings that differ from their defaults, as flags."""
    defaults = read_settings(__file__)
    return shlex.join(f"--{name}={v}" for name, v in vars(c).items() if v != defaults[name][0])


# Processes.

def stop_requested():
    """Whether this host was asked to save and stop."""
    return os.path.exists(os.environ.get(STOP_FILE, ""))


def on_signals():
    """SIGTERM and SIGINT create the stop file, at which the replicas save and stop. A second one kills."""
    def handler(number, _):
        os.makedirs(os.path.dirname(os.environ[STOP_FILE]), exist_ok=True)  # /tmp may have been cleaned
        open(os.environ[STOP_FILE], "w").close()
        signal.signal(number, signal.SIG_DFL)
        if __name__ == "__main__":
            print(f"{signal.Signals(number).name}: saving and stopping; a second one kills", file=sys.stderr)
        else:
            signal.alarm(60)  # the reason may be that another replica died: then no peer answers

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)


def restart_watchdog(c):
    """Ends this process with 1, after the stacks of all threads, unless called again within stall_timeout."""
    if c.stall_timeout:
        faulthandler.dump_traceback_later(c.stall_timeout, exit=True, file=sys.__stderr__)


def xla_replica(index, c, kind):
    """replica() for xmp.spawn. If it breaks, its process ends: its peers would wait for it forever."""
    configurator.protect_output()
    end_with_parent()
    try:
        replica(c, kind)
    except (UserError, TransientError, OSError, SystemExit):  # of all ranks of a host
        raise
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def make_dataset(c):
    """Runs data_prepare if data_path is missing: one process of a host, while the others wait."""
    try:
        command = shlex.split(c.data_prepare)
    except ValueError as e:
        raise UserError(f"data_prepare: {e}: {c.data_prepare}") from None
    if command and not os.path.exists(c.data_path):
        with locked(os.path.normpath(c.data_path) + ".made"):
            code = 0 if os.path.exists(c.data_path) else run_python(command, c.data_path)
        if not os.path.exists(c.data_path):
            error = TransientError if code not in (0, 2) else UserError
            raise error(f"data_prepare did not make data_path={c.data_path}: {c.data_prepare}")
    difference = made_by_another_command(c.data_path, c.data_prepare)
    if difference:
        raise UserError(f"{c.data_path} was made by another command than data_prepare: {difference}; "
                        "another --data_path keeps both")


def run_python(command, path):
    print(f"{path} is missing; making it: python", *command, flush=True)
    process = subprocess.Popen([sys.executable, *command])
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.terminate()  # Ctrl-C reaches it, but SIGTERM does not
        process.wait()
        raise


def main(c):
    """Checks the settings, makes the dataset if it is missing, and runs a replica on each device."""
    check_settings(c)
    kind, reason = choose_device(c.device)
    if os.environ.get("RANK", "0") == "0":
        print(f"device {kind}: {reason}", flush=True)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's; after another launcher the parent may leave
        end_with_parent()
    c.data_path = local_dataset(c.data_path)
    make_dataset(c)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[STOP_FILE] = os.path.join(folder, "stop")
        on_signals()
        try:
            if kind == "xla":
                import torch_xla.distributed.xla_multiprocessing as xmp
                xmp.spawn(xla_replica, args=(c, kind))
            else:
                replica(c, kind)
        except torch.OutOfMemoryError:
            raise out_of_memory(c) from None
        except BrokenProcessPool:
            raise TransientError("a replica died, see above; --init_from=auto continues from the last "
                                 f"checkpoint in {c.out_dir}") from None


if __name__ == "__mp_main__":  # a process that xmp.spawn started
    on_signals()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the main process too, which asks to stop
if __name__ == "__main__":
    configurator.start(main, __file__)
