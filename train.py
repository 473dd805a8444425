"""Trains a Tiny Recursive Model (arXiv 2510.04871) on a TPU, a CUDA GPU or the CPU.

    python train.py config/demo.py                        6x6 Sudoku, made on the spot, in 2 minutes
    python train.py config/sudoku.py --device=cuda        the paper's Sudoku-Extreme, after prepare_sudoku.py
    python train.py config/sudoku.py --init_from=resume   continues from the newest checkpoint of out_dir

The settings below are the paper's Sudoku-Extreme recipe (MLP). Config files and --key=value flags override
them.
"""
import atexit
import faulthandler
import glob
import hashlib
import importlib.util
import json
import math
import multiprocessing
import os
import platform
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from datetime import timedelta
from fractions import Fraction
from types import SimpleNamespace

import configurator  # before torch: see there
import numpy as np
import torch
from torch.utils._pytree import tree_map

import xla
from configurator import TransientError, UserError, read_settings
from data import (Bucket, Dataset, Progress, file_md5, file_sha256, halting_draws, local_dataset,
                  locked, path_metrics)
from model import (IGNORE_LABEL, METRICS, TRM, TRMConfig, accumulate, flatten, learning_rate, normal_noise,
                   sign_sgd, supervision_step, unflatten, update_weights)

# data
data_path = "data/sudoku-extreme-1k-aug-1000"  # a data set's folder, or its gs:// address
data_prepare = ""  # command that makes data_path where it is missing ("prepare_sudoku.py --size=6 ...")
global_batch_size = 768  # sequences a step, over all replicas
micro_batch_size = 0  # sequences at a time on a replica, their gradients summed; 0: its whole batch
recompute = False  # compute activations again in the backward pass: far less memory, a fifth more arithmetic
epochs = 50000  # an epoch offers each puzzle once, in one copy; sequences that halted take it
max_steps = 0  # length of the run in steps; 0: from epochs
# model
hidden_size = 512  # D
num_heads = 8  # of the attention
expansion = 4.0  # hidden width of the SwiGLUs, before the 2/3 of gating
L_layers = 2  # layers of the one network
H_cycles = 3  # T of the paper: recursions a step; all but the last without gradient
L_cycles = 6  # n of the paper: latent updates a recursion
curriculum_epochs = 0  # epochs over which the depth grows from the next two settings to full; 0: full at once
H_cycles_start = 1  # of the curriculum
L_cycles_start = 2  # of the curriculum
mlp_t = True  # True: an MLP mixes the positions; False: self-attention
pos_encodings = "none"  # none, rope (attention only) or learned
puzzle_emb_ndim = 512  # width of the puzzle embedding; 0: none
puzzle_emb_len = 16  # positions that it takes; 0: as many as it fills
forward_dtype = "bfloat16"  # bfloat16, float32 or float16; weights, optimizer and loss stay float32
# halting
halt_max_steps = 16  # the most supervision steps that a sequence gets
halt_exploration_prob = 0.1  # probability that a sequence must go on to a random step before it may halt
halt_exploration_prob_end = -1.0  # its value at the end of the run, reached linearly; -1: constant
# optimizer
loss_type = "stablemax_cross_entropy"  # or softmax_cross_entropy
optimizer = "adam_atan2"  # adam_atan2, adamw, lion or muon (adam_atan2 for what is no matrix of the network)
lr = 1e-4  # peak
lr_min_ratio = 1.0  # end of the cosine, as a share of lr; 1: constant
lr_warmup_steps = 2000  # linear
beta1 = 0.9  # first moment; muon's momentum
beta2 = 0.95  # second moment
weight_decay = 1.0  # decoupled: times the rate
puzzle_emb_lr = 1e-4  # SignSGD on the puzzle embedding
puzzle_emb_weight_decay = 1.0  # decoupled, on the rows in the batch
ema = True  # evaluate and export an exponential moving average of the weights
ema_rate = 0.999  # share of the average that a step keeps
seed = 0  # of the weights, the order, the copies and the halting draws
# evaluation
eval_interval = 5000  # epochs between evaluations; 0: only at the end
eval_max_puzzles = 4096  # test puzzles of the evaluations on the way, a fixed random subset; 0: all
eval_final_max_puzzles = 0  # test puzzles of the one at the end
eval_halt_max_steps = 0  # supervision steps at evaluation; 0: halt_max_steps
eval_patience = 0  # leave a puzzle once its answer has not changed for so many steps; 0: never (the paper)
eval_rollouts = 1  # attempts at each puzzle, all but the first with noise; the surest answer counts
eval_noise = 1.0  # standard deviation of that noise, on the latent z_L after each supervision step
eval_save_outputs = ""  # of inputs,labels,preds,q_halt_logits and surest_...: saved to out_dir/eval_STEP.npz
eval_show_puzzle = False  # end by printing an unseen puzzle and its answers after steps 1, 2, 4, ...
eval_only = False  # evaluate as at the end, then stop
# run
out_dir = "out/sudoku"  # checkpoints, metrics.jsonl, log.txt
gcs_dir = ""  # gs://bucket/folder for this run alone: a mirror of out_dir, to resume on another machine
init_from = "scratch"  # scratch, resume, auto (resume if there is a checkpoint) or a file, ours or official
checkpoint_interval = 1000  # steps; sequences start afresh there, so that a resume changes nothing; 0: none
keep_last_n = 3  # checkpoints kept, besides best.pt
best_metric = "exact_accuracy"  # chooses best.pt among the evaluations on the way; or surest_accuracy
export_official = ""  # write the evaluated weights to this file under the official code's names, then stop
log_interval = 10  # steps averaged in a line of the log
stall_timeout = 1800  # seconds without the end of a step after which a replica ends: a peer is gone; 0: never
device = "auto"  # auto, xla, cuda, mps (Apple's GPU), cpu or tpu (TorchTPU); auto never takes mps or tpu
compile = "auto"  # torch.compile: auto (on CUDA), on (on the CPU too: a minute, then 10% faster) or off
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
    """What training changes, on the device, and the two programs that change it: a training and an eval step.

    state: weights, their average ema and moments m and v (a float32 vector each), puzzle_emb [N, D'], sums
    (STATS, of the steps since the last line of the log) and the carry, in micro-batches: [micro-batches,
    sequences in one, ...].
    """

    def __init__(self, model, c, device, saved=None):
        """saved: ema, m and v of a checkpoint, if it has them. All ranks start from rank 0's state."""
        self.model, self.c, self.device = model, c, device
        self.batch_size = c.global_batch_size // device.world
        self.dtype = getattr(torch, c.forward_dtype)
        self.eval_depth = c.eval_halt_max_steps or c.halt_max_steps
        # Longest first: only the short biases, at the end, can leave a weight at an unaligned address.
        parameters = sorted(model.named_parameters(), key=lambda item: -item[1].numel())
        self.shapes = {name: p.shape for name, p in parameters}
        self.state = self.first_state(dict(parameters), saved or {})
        self.num_parameters = len(self.state["weights"]) + self.state["puzzle_emb"].numel()
        model.L_level.recompute = c.recompute
        device.prepare(model)
        self.supervision_step = device.compile(supervision_step)
        self.train_program = device.program(self.train_step)
        self.eval_program = device.program(self.eval_step)
        self.restart()

    @torch.no_grad()
    def train_step(self, state, inputs, cycles=None):
        """One optimizer step, in place on state. On XLA it is one program with one all-reduce. All ranks.

        inputs: batch, this rank's part of Dataset.train_batch and min_halt_steps; rates [4], as rates()
        returns them; stop_requested [1]. cycles: (H_cycles, L_cycles), by default the model's. Returns the
        number of ranks that were asked to stop [1].
        """
        c, model = self.c, self.model.train()
        weights = self.cast(state["weights"], state["puzzle_emb"])

        def micro_batch(weights, x):
            with torch.enable_grad():
                leaves = {name: t.detach().requires_grad_() for name, t in weights.items()}
                loss, carry, metrics, _, _ = self.supervision_step(
                    model, leaves, x["carry"], x["batch"], c.halt_max_steps, c.loss_type, cycles=cycles)
                grads = torch.autograd.grad(loss, list(leaves.values()))
            rows = torch.zeros(no_rows.shape, device=no_rows.device)
            if model.prefix:
                identifiers = carry["puzzle_identifiers"]
                rows = rows.index_add(0, identifiers, torch.ones_like(identifiers, dtype=torch.float32))
            return [*(g.float() for g in grads), rows, metrics], carry

        no_rows = torch.zeros(max(1, len(state["puzzle_emb"])), device=self.device.torch)  # XLA: not empty
        zeros = [torch.zeros(t.shape, device=t.device) for t in weights.values()]
        zeros += [no_rows, torch.zeros(len(METRICS), device=self.device.torch)]
        xs = dict(carry=state["carry"], batch=self.split(inputs["batch"]))
        (*grads, rows_in_batch, metrics), carry = self.device.sum_over(micro_batch, zeros, weights, xs)
        for name, t in carry.items():
            state["carry"][name].copy_(t)

        # The one collective sums all that ranks share. Only here are gradients divided by the batch:
        # float16 has no room in the backward pass for numbers that small.
        grads = flatten(grads) / c.global_batch_size
        parts = [grads, rows_in_batch, metrics, inputs["stop_requested"]]
        packed = self.device.all_reduce(torch.cat(parts))
        grads, rows_in_batch, metrics, stop_count = packed.split([len(part) for part in parts])
        grad, puzzle_grad = grads.split([len(state["weights"]), state["puzzle_emb"].numel()])

        lr, puzzle_emb_lr, c1, c2 = inputs["rates"].unbind()
        if model.prefix:
            sign_sgd(state["puzzle_emb"], puzzle_grad.view_as(state["puzzle_emb"]), rows_in_batch,
                         puzzle_emb_lr, c.puzzle_emb_weight_decay)
        update_weights(c, self.shapes, state["weights"], grad, state["m"], state["v"], lr, c1, c2)
        if c.ema:
            state["ema"].lerp_(state["weights"], 1 - c.ema_rate)
        state["sums"] += torch.cat([metrics, grad.square().sum().sqrt().view(1)])
        return stop_count.clone()  # a view would keep all of `packed` alive

    @torch.no_grad()
    def eval_step(self, state, inputs):
        """One supervision step of an evaluation, in place on state. On XLA it is one program. No collective.

        state: as new_evaluation; its totals count the sequences that halt, which take new data at the next
        step. inputs: as eval_inputs. Returns preds [B, S] and q_halt_logits [B] of this step, and
        surest_preds and surest_q_halt_logits of that step so far where q_halt was highest.
        """
        model = self.model.eval()

        def micro_batch(weights, x):
            before, batch = x["carry"], x["batch"]
            _, carry, metrics, answer, q_halt = self.supervision_step(
                model, weights, before, batch, self.eval_depth, self.c.loss_type, training=False,
                patience=self.c.eval_patience)
            surer = before["halted"] | (q_halt >= before["surest_q_halt_logits"])  # halted: a new puzzle
            carry["surest_preds"] = torch.where(surer.unsqueeze(-1), answer, before["surest_preds"])
            carry["surest_q_halt_logits"] = torch.where(surer, q_halt, before["surest_q_halt_logits"])
            if "noise_keys" in batch:
                noise = normal_noise(batch["noise_keys"], carry["steps"], carry["z_L"].shape[1:])
                noise *= torch.where(batch["noise_keys"] == 0, 0, self.c.eval_noise).view(-1, 1, 1)
                carry["z_L"] = carry["z_L"] + noise.to(self.dtype)
            return [metrics], carry | dict(preds=answer, q_halt_logits=q_halt)

        weights = self.cast(inputs["weights"], inputs["puzzle_emb"])
        xs = dict(carry=state["carry"], batch=self.split(inputs["batch"]))
        (metrics,), rows = self.device.sum_over(micro_batch, [torch.zeros_like(state["totals"])], weights, xs)
        for name, t in state["carry"].items():
            t.copy_(rows[name])
        state["totals"] += metrics
        names = "preds", "q_halt_logits", "surest_preds", "surest_q_halt_logits"
        return {name: rows[name].flatten(0, 1) for name in names}

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

    def restart(self):
        """Gives every sequence new data at the next step, and starts the sums of the log anew."""
        carry = self.split(self.model.new_carry(self.batch_size, self.dtype))
        self.state |= self.device.put(dict(carry=carry, sums=torch.zeros(len(STATS))))

    def new_evaluation(self):
        """The state of an evaluation: a carry, with the surest answers, and totals [METRICS]."""
        carry = self.eval_carry(self.batch_size)
        return self.device.put(dict(carry=carry, totals=torch.zeros(len(METRICS))))

    def eval_carry(self, batch_size):
        carry = self.model.new_carry(batch_size, self.dtype)
        carry["surest_preds"] = torch.zeros_like(carry["inputs"])
        carry["surest_q_halt_logits"] = torch.zeros(batch_size)
        if self.c.eval_patience:
            carry["preds"] = torch.zeros_like(carry["inputs"])
            carry["repeats"] = torch.zeros_like(carry["steps"])
        return self.split(carry)

    def read_sums(self):
        """{name of STATS: sum over the steps since the last call}. Waits for the device."""
        sums = dict(zip(STATS, self.state["sums"].cpu().tolist()))
        self.state["sums"] = self.device.put(torch.zeros(len(STATS)))
        return sums

    @torch.no_grad()
    def first_state(self, parameters, saved):
        """weights, ema, m, v and puzzle_emb on the device: those of rank 0, as are the initial states."""
        weights = flatten(p.detach() for p in parameters.values())
        first = dict(weights=weights, ema=weights, m=torch.zeros_like(weights), v=torch.zeros_like(weights))
        for name in ("ema", "m", "v"):
            if name in saved:
                first[name] = flatten(saved[name][k] for k in self.shapes)
        first["puzzle_emb"] = self.model.puzzle_emb.weights if self.model.prefix else torch.zeros(0, 1)
        first |= {name: getattr(self.model, name) for name in ("H_init", "L_init")}
        vector = from_rank_0(self.device, flatten(first.values()))
        first = unflatten(vector, {name: t.shape for name, t in first.items()})
        for name in ("H_init", "L_init"):
            getattr(self.model, name).copy_(first.pop(name))
        return {name: self.device.put(t.clone()) for name, t in first.items()}

    def state_dict(self, step):
        """A copy on the host of all that a resume needs, under the official names."""
        def copy(name):
            return self.state[name].to("cpu", copy=True)

        weights = unflatten(copy("weights"), self.shapes)
        weights |= {k: t.cpu() for k, t in self.model.named_buffers() if k in ("H_init", "L_init")}
        if self.model.prefix:
            weights["puzzle_emb.weights"] = copy("puzzle_emb")
        state = dict(step=step, weights=weights)
        for name in ("m", "v", "ema") if self.c.ema else ("m", "v"):
            state[name] = unflatten(copy(name), self.shapes)
        return state


# The loop.

def train(run, data, test, log, checkpoints, step, total_steps):
    """Trains from `step` to the end or until a stop is requested; returns the step reached. All ranks."""
    c, device, epoch = run.c, run.device, epoch_size(data)
    plan, cycles = stages(c, epoch), None
    stop = False
    previous_stops = None  # a function: how many ranks were asked to stop at the step before
    log.restart_clock(step)
    while step < total_steps and not stop:
        new_stage = step in plan or cycles is None
        cycles = cycles_at(plan, step)
        if new_stage and len(plan) > 1:
            log.say(f"curriculum: H_cycles {cycles[0]}, L_cycles {cycles[1]} from step {step + 1} on")

        batch = data.train_batch(c.seed, step, c.global_batch_size, device.rank, device.world)
        batch["min_halt_steps"] = halting_draws(c.seed, step, c.global_batch_size, c.halt_max_steps,
                                                exploration(c, step, total_steps), device.rank, device.world)
        inputs = device.put(dict(batch=batch, rates=rates(c, step, total_steps),
                                 stop_requested=np.float32([stop_requested()])))
        stops = device.fetch(run.train_program(run.state, inputs, cycles))
        stop = previous_stops is not None and bool(previous_stops() > 0)  # does not wait for this step
        previous_stops, step = stops, step + 1
        restart_watchdog(c)
        if new_stage:
            log.first_step(step, run)

        # What follows depends on the step and on reduced sums alone, so that all ranks decide the same.
        last = step == total_steps
        save_due = stop or last or c.checkpoint_interval and step % c.checkpoint_interval == 0
        eval_due = not stop and not last and evaluation_due(c, epoch, step)
        if not (save_due or eval_due or step % c.log_interval == 0 or step in plan):  # a line has one depth
            continue
        sums = run.read_sums()  # waits for the device
        if not math.isfinite(sums["lm_loss"] + sums["q_halt_loss"] + sums["grad_norm"]):
            raise FloatingPointError(f"loss or gradient not finite between steps {log.step + 1} and {step}; "
                                     f"the last good checkpoint: {checkpoints.last_good()}")
        metrics = log.train(step, total_steps, sums, run, cycles)
        if eval_due:
            evaluation = evaluate(run, test, test.subset(c.eval_max_puzzles), f"evaluating at step {step}")
            stop = not evaluation  # it was interrupted
            if evaluation:
                log.evaluation(step, evaluation, show_puzzle(run, test) if wandb_wanted(c) else "")
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
    began = time.time()
    step = train(run, data, test, log, checkpoints, first_step, total_steps)
    # All ranks leave together: one that went on to the evaluation would wait for rank 0 forever.
    written = from_rank_0(run.device, torch.tensor([float(checkpoints.written())])).item()
    if not written:
        sys.exit(1)
    final = {}
    if step < total_steps:
        log.say(f"stopped at step {step}, checkpoint saved in {run.c.out_dir}; "
                "to continue: the same command with --init_from=resume")
    else:
        if step > first_step:
            log.say(f"trained {step - first_step} steps in {duration(time.time() - began)}")
        final = final_evaluation(run, test, log, step)
    faulthandler.cancel_dump_traceback_later()  # what follows has time limits of its own
    uploaded = checkpoints.close(600 if final else 15)
    log.close(30 if final else 10)
    if not final:
        sys.exit(3)
    if not uploaded:  # a slice may be deleted once its run says that it is complete
        sys.exit(1)


# Evaluation.

EVAL_BATCHES = 64  # taken at a time with eval_patience: places are filled again as puzzles leave


def evaluate(run, test, indices, label, save_to=None):
    """Evaluates the test puzzles `indices`: {"eval/...": number}, or {} if a stop is requested. All ranks.

    save_to: a .npz file for eval_save_outputs.
    """
    device, size = run.device, run.batch_size
    if run.c.eval_patience:
        size *= EVAL_BATCHES
    mine = indices[device.rank::device.world]
    state, counts, saved, interrupted = run.new_evaluation(), {}, {}, False
    saved_names = [name for name in run.c.eval_save_outputs.split(",") if name and save_to]
    with Progress(label, len(mine) * run.c.eval_rollouts, "puzzles", run.c.eval_rollouts) as progress:
        for i in range(0, math.ceil(len(indices) / device.world), size):  # as many batches on every rank
            rows = mine[i:i + size]
            attempts = solve_batch(run, test, rows, state, progress)
            interrupted = len(attempts) < run.c.eval_rollouts
            if interrupted:
                break
            arrays = attempts[0] | surest_of(attempts)
            for name, solved in judge(test, attempts, arrays).items():
                counts[name] = counts.get(name, 0) + solved.sum()
            for name in saved_names:
                saved.setdefault(name, []).append(arrays[name])
    if saved and not interrupted:  # before the sum: once it is there, all ranks have saved theirs
        save_outputs(save_to, mine, saved, run.device.say)
    if device.sum_on_host(torch.tensor([float(interrupted)])).item():  # on this rank or another
        return {}
    sums = torch.cat([state["totals"].cpu(), torch.tensor([*counts.values()]).float()])
    sums = dict(zip([*METRICS, *counts], device.sum_on_host(sums).tolist()))
    return eval_values(sums)


def solve_batch(run, test, indices, state, progress):
    """The answers of each attempt at the test puzzles `indices`: a list of eval_rollouts dicts of arrays.

    Each holds what test_batch and eval_step return. The list is shorter if a stop is requested.
    """
    n, attempts = len(indices), []
    arrays = test.test_batch(indices, n + 1)  # the last row is padding
    unscored = np.full_like(arrays["labels"], IGNORE_LABEL)
    for attempt in range(run.c.eval_rollouts):
        keys = test.noise_keys(run.c.seed, indices, attempt, n + 1)
        labels = unscored if attempt else arrays["labels"]  # the totals are those of the first attempt
        answers = solve_rows(run, arrays | dict(labels=labels), keys, state, progress)
        if answers is None:
            return attempts
        attempts.append({name: a[:n] for name, a in (arrays | answers).items()})
    return attempts


def solve_rows(run, rows, noise_keys, state, progress):
    """What eval_step returns for each row when its sequence halts, as arrays; None if a stop is requested.

    rows: {name: [n + 1, ...]}, the last of them padding. A place of the batch takes the next row when its
    sequence halts. Without eval_patience they all do so together, and nothing waits for the device before.
    """
    n, answers, next_row = len(noise_keys) - 1, {}, 0  # row n is the padding
    all_halted = torch.ones(state["carry"]["halted"].shape, dtype=torch.bool)
    state["carry"]["halted"] = run.device.put(all_halted)  # padding of the last call may not have
    place = np.full(run.batch_size, n)  # the row that each place solves
    halted = np.ones(run.batch_size, dtype=bool)
    while True:
        free = np.flatnonzero(halted)
        place[free] = np.minimum(np.arange(next_row, next_row + len(free)), n)
        next_row += len(free)
        inputs = run.eval_inputs({name: a[place] for name, a in rows.items()}, noise_keys[place])
        for _ in range(1 if run.c.eval_patience else run.eval_depth):
            if stop_requested():
                return None
            outputs = run.eval_program(state, inputs)
            restart_watchdog(run.c)
        halted = state["carry"]["halted"].cpu().numpy().ravel()
        for name, t in outputs.items():
            answer = t.cpu().numpy()
            answers.setdefault(name, np.zeros((n + 1, *answer.shape[1:]), answer.dtype))
            answers[name][place[halted]] = answer[halted]
        if run.device.rank == 0:
            progress.add((place[halted] < n).sum())
        place[halted] = n
        if next_row >= n and (place == n).all():
            return answers


def surest_of(attempts):
    """surest_preds and surest_q_halt_logits of the attempts, for each puzzle those of the surest one."""
    q_halt = np.stack([arrays["surest_q_halt_logits"] for arrays in attempts])
    preds = np.stack([arrays["surest_preds"] for arrays in attempts])
    surest = q_halt.argmax(0), np.arange(q_halt.shape[1])
    return dict(surest_preds=preds[surest], surest_q_halt_logits=q_halt[surest])


def majority_of(attempts):
    """For each puzzle, the answer that most attempts give; of several, the surest."""
    preds = np.stack([arrays["surest_preds"] for arrays in attempts])
    q_halt = np.stack([arrays["surest_q_halt_logits"] for arrays in attempts])
    votes = np.stack([(preds == answer).all(-1).sum(0) for answer in preds])
    return preds[np.where(votes == votes.max(0), q_halt, -np.inf).argmax(0), np.arange(preds.shape[1])]


def judge(test, attempts, arrays):
    """{name of a metric: which of a batch's puzzles it counts, bool [n]}, for all but METRICS.

    arrays: inputs, labels, preds and surest_preds. The keys do not depend on the puzzles.
    """
    labels, is_maze = arrays["labels"], test.manifest.get("kind") == "maze"

    def is_solved(preds):
        scored = labels != IGNORE_LABEL
        return ((preds == labels) | ~scored).all(1) & scored.any(1)

    answers = {"": arrays["preds"], "surest_": arrays["surest_preds"]}
    if is_maze and len(attempts) > 1:
        answers["majority_"] = majority_of(attempts)
    counted = {name + "accuracy": is_solved(preds) for name, preds in answers.items() if name}
    if is_maze:
        for name, preds in answers.items():
            valid, optimal = path_metrics(arrays["inputs"], labels, preds, test.manifest["grid"])
            counted |= {name + "path_valid": valid, name + "path_optimal": optimal}
    if len(attempts) > 1:
        solved = np.stack([is_solved(attempt["surest_preds"]) for attempt in attempts])
        powers = [2 ** i for i in range(len(attempts).bit_length())]
        q_halt = np.stack([attempt["surest_q_halt_logits"] for attempt in attempts])
        for n in sorted({*powers, len(attempts)}):
            counted[f"surest_of_{n}"] = solved[q_halt[:n].argmax(0), np.arange(len(labels))]
            counted[f"any_of_{n}"] = solved[:n].any(0)
    return counted


def eval_values(sums):
    """{"eval/...": number} of the sums over all ranks, of METRICS and of judge's counts."""
    count = max(sums["count"], 1)
    values = {"eval/" + name: value / count for name, value in sums.items()}
    for name in ("count", "lm_loss", "q_halt_loss"):
        del values["eval/" + name]
    values["eval/loss"] = (sums["lm_loss"] + 0.5 * sums["q_halt_loss"]) / count
    values["eval/puzzles"] = int(sums["count"])
    return values


def save_outputs(path, indices, parts, say):
    """Writes eval_save_outputs; a disk that is full costs a line in the log."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with replacing(path) as f:
            np.savez_compressed(f, indices=indices, **{name: np.concatenate(p) for name, p in parts.items()})
    except OSError as e:
        say(f"{path}: not written: {e}")


def final_evaluation(run, test, log, step):
    """The evaluation at the end, in the log; {} if it was interrupted. All ranks."""
    c, device = run.c, run.device
    rank = f".{device.rank}" if device.world > 1 else ""
    outputs = os.path.join(c.out_dir, f"eval_{step:08d}{rank}.npz")
    label = "evaluation" if c.eval_only else "final evaluation"
    values = evaluate(run, test, test.subset(c.eval_final_max_puzzles), label, outputs)
    if not values:
        how = "" if c.eval_only else " with --init_from=resume"
        log.say(f"{label} stopped; the same command{how} starts it again")
        return {}
    example = show_puzzle(run, test) if c.eval_show_puzzle or wandb_wanted(c) else ""
    if c.eval_only:
        log.say(eval_line(values, step))  # metrics.jsonl is the record of the training run
    else:
        log.evaluation(step, {"final": True, **values}, example if wandb_wanted(c) else "")
    if c.eval_show_puzzle:
        log.say("\n" + example)
    return values


def show_puzzle(run, test):
    """A text: a test puzzle and the answers after supervision steps 1, 2, 4, ..., wrong cells marked with *.

    Of one batch, it is the puzzle that these steps improved the most. With eval_patience, the answer with
    which it left stays. All ranks.
    """
    arrays = test.test_batch(test.subset(run.batch_size), run.batch_size)
    inputs, state, answers = run.eval_inputs(arrays), run.new_evaluation(), {}
    answer, labels = arrays["inputs"], arrays["labels"]
    left = np.zeros(run.batch_size, dtype=bool)  # the device starts these again
    for step in range(1, run.eval_depth + 1):
        preds = run.eval_program(state, inputs)["preds"].cpu().numpy()
        restart_watchdog(run.c)
        answer = np.where(left[:, None], answer, preds)
        left |= state["carry"]["halted"].cpu().numpy().ravel()
        if step & (step - 1) == 0 or step == run.eval_depth:
            answers[step] = answer
    wrong = {step: (answer != labels) & (labels != IGNORE_LABEL) for step, answer in answers.items()}
    i = int((wrong[1].sum(1) - wrong[run.eval_depth].sum(1)).argmax())
    symbols = test.manifest.get("symbols") or [str(token) for token in range(test.vocab_size)]
    rows, columns = test.manifest.get("grid") or [1, test.seq_len]
    grids = [("question", arrays["inputs"][i], [False] * test.seq_len)]
    for step, answer in answers.items():
        count = wrong[step][i].sum()
        title = f"step {step}: " + (f"{count} wrong" if count else "solved")
        grids.append((title, answer[i], wrong[step][i]))
    return side_by_side(grids, symbols, rows, columns)


def side_by_side(grids, symbols, rows, columns):
    """A text: grids next to each other, as many as 120 characters hold.

    grids: [(title, tokens, which cells to mark with *)], each with `rows` x `columns` cells.
    """
    width = max(3 * columns, *(len(title) for title, _, _ in grids)) + 2
    per_line, lines = max(1, 120 // width), []
    for j in range(0, len(grids), per_line):
        shown = grids[j:j + per_line]
        lines.append("".join(title.ljust(width) for title, _, _ in shown))
        for first in range(0, rows * columns, columns):
            line = ""
            for _, tokens, marked in shown:
                cells = range(first, first + columns)
                line += " ".join(("*" if marked[k] else " ") + symbols[tokens[k]] for k in cells).ljust(width)
            lines.append(line)
        lines.append("")
    return "\n".join(line.rstrip() for line in lines)


# Schedules: pure functions of the step, from 0.

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


def rates(c, step, total_steps):
    """[lr, puzzle_emb_lr, 1 - beta1^t, 1 - beta2^t], t = step + 1; float32."""
    lr, puzzle_emb_lr = (learning_rate(peak, step, c.lr_warmup_steps, total_steps, c.lr_min_ratio)
                         for peak in (c.lr, c.puzzle_emb_lr))
    return np.float32([lr, puzzle_emb_lr, 1 - c.beta1 ** (step + 1), 1 - c.beta2 ** (step + 1)])


def exploration(c, step, total_steps):
    """The halt_exploration_prob of a step."""
    first, last = c.halt_exploration_prob, c.halt_exploration_prob_end
    if last == -1:
        return first
    return first + (last - first) * step / max(1, total_steps - 1)


def stages(c, epoch):
    """The curriculum: {first step: (H_cycles, L_cycles)}, growing with the share of its epochs done."""
    if not c.curriculum_epochs:
        return {0: (c.H_cycles, c.L_cycles)}
    growth = c.H_cycles - c.H_cycles_start, c.L_cycles - c.L_cycles_start
    shares = {Fraction(0)} | {Fraction(i, n) for n in growth for i in range(1, n + 1)}
    plan = {}
    for share in sorted(shares):
        first_step = math.ceil(share * c.curriculum_epochs * epoch / c.global_batch_size)
        H_growth, L_growth = (int(share * n) for n in growth)
        plan[first_step] = c.H_cycles_start + H_growth, c.L_cycles_start + L_growth
    return plan


def cycles_at(plan, step):
    """(H_cycles, L_cycles) of a step; plan: as stages returns it."""
    return plan[max(first for first in plan if first <= step)]


# Checkpoints: ckpt_STEP.pt and best.pt in out_dir, each with a .json, written after it, that holds its hash.

class Checkpoints:
    """Writes rank 0's checkpoints on a background thread, prunes them, and tells the bucket's mirror."""

    def __init__(self, c, device, log, start, data_sha256):
        self.c, self.rank, self.log = c, device.rank, log
        self.best, self.data_sha256 = start.best, data_sha256
        self.writer, self.writing, self.mirror = ThreadPoolExecutor(1), None, None
        if self.rank == 0:
            remove(*glob.glob(os.path.join(glob.escape(c.out_dir), "*.tmp")))  # of a process that was killed
        if c.gcs_dir and log.path:
            self.mirror = Mirror(c, log, start.step, everything=device.rank == 0)

    def save(self, name, step, run, metrics):
        """Begins to write out_dir/name.pt and its .json, after the one before: memory holds one copy."""
        if self.rank == 0:
            self.written()
            state = run.state_dict(step)
            state |= dict(settings=vars(self.c), data=self.data_sha256, wandb_id=self.log.wandb_id)
            self.writing = self.writer.submit(self.write, name, state, metrics)
        elif self.mirror:
            self.mirror.update()

    def write(self, name, state, metrics):
        path = os.path.join(self.c.out_dir, name)
        with replacing(path + ".pt") as f:
            torch.save(state, f)
        description = dict(step=state["step"], sha256=file_sha256(path + ".pt"), data=state["data"],
                           settings=state["settings"], metrics=metrics)
        with replacing(path + ".json") as f:
            f.write(json.dumps(description, indent=1).encode())
        if checkpoint_step(name + ".pt") is not None:
            self.prune(path + ".pt")
        if self.mirror:
            self.mirror.update()

    def prune(self, newest):
        """Removes all but keep_last_n; those after `newest` were found damaged and do not count."""
        older = [path for path in checkpoint_paths(self.c.out_dir) if path <= newest]
        for path in older[self.c.keep_last_n:]:
            remove(path, json_of(path))

    def save_if_best(self, step, run, metrics):
        """Saves best.pt if no earlier evaluation was better."""
        accuracy = metrics["eval/" + self.c.best_metric]
        if accuracy > self.best:
            self.best = accuracy
            self.save("best", step, run, metrics)

    def written(self):
        """Waits for the checkpoint that is being written. False, and a line in the log, if it failed."""
        writing, self.writing = self.writing, None
        try:
            if writing:
                writing.result()
        except (OSError, RuntimeError) as e:  # torch.save reports a full disk by a RuntimeError
            self.log.say(f"checkpoint not written: {e}")
            self.best = best_accuracy(self.c)  # that of the file that is there
            return False
        return True

    def last_good(self):
        """Path of the newest complete checkpoint, for an error message."""
        self.written()
        complete = [path for path in checkpoint_paths(self.c.out_dir) if os.path.exists(json_of(path))]
        return complete[0] if complete else "none yet"

    def close(self, seconds):
        """Waits for the mirror, up to `seconds`. Returns whether the bucket has everything."""
        return not self.mirror or self.mirror.close(seconds)


@contextmanager
def replacing(path):
    """A file for writing that becomes path once it is complete and on the disk, and is removed on failure."""
    try:
        with open(path + ".tmp", "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(path + ".tmp", path)
    except BaseException:
        remove(path + ".tmp")
        raise


def remove(*paths):
    for path in paths:
        if os.path.exists(path):
            os.remove(path)


def checkpoint_step(name):
    """N for ckpt_N.pt, None for any other name of a file."""
    match = re.fullmatch(r"ckpt_(\d{8,})\.pt", name)
    return int(match[1]) if match else None


def checkpoint_paths(out_dir):
    """Paths of the numbered checkpoints, newest first."""
    names = os.listdir(out_dir) if os.path.isdir(out_dir) else []
    numbered = sorted((name for name in names if checkpoint_step(name) is not None), key=checkpoint_step)
    return [os.path.join(out_dir, name) for name in reversed(numbered)]


def json_of(path):
    """The .json that describes the checkpoint in path."""
    return path[:-3] + ".json"


def newest_checkpoint(out_dir, say):
    """The state of the newest complete checkpoint, or {}. Says which it skips, and why."""
    for path in checkpoint_paths(out_dir):
        try:
            with open(json_of(path), "rb") as f:
                if json.load(f)["sha256"] != file_sha256(path):
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


def load_weights(model, named, where):
    """Copies weights by official names into the model. Raises UserError for names or shapes that do not fit.

    where: their source, for the error. A puzzle embedding of other puzzles is averaged, as officially.
    """
    named = {name.removeprefix("_orig_mod.").removeprefix("model.").removeprefix("inner."): t.float()
             for name, t in named.items()}
    own, table = model.state_dict(), "puzzle_emb.weights"
    if table in named and table in own and named[table].shape[0] != own[table].shape[0]:
        named[table] = named[table].mean(0, keepdim=True).expand(len(own[table]), -1)
    hint = "its model has other settings (mlp_t, L_layers, pos_encodings, puzzle_emb_ndim?)"
    for problem, names in (("lacks", own.keys() - named.keys()), ("also has", named.keys() - own.keys())):
        if names:
            raise UserError(f"{where}: {problem} {min(names)}: {hint}")
    for name, t in own.items():
        if named[name].shape != t.shape:
            raise UserError(f"{where}: {name} has shape {list(named[name].shape)}, "
                            f"these settings need {list(t.shape)}")
    model.load_state_dict(named)


def write_official(c, model, state):
    """Writes the weights that an evaluation would use as a checkpoint that the official code loads."""
    weights = model.state_dict() | (state.get("ema", {}) if c.ema else {})
    for name in ("H_init", "L_init"):  # the official code holds these in the dtype of its forward pass
        weights[name] = weights[name].to(getattr(torch, c.forward_dtype))
    official = {"_orig_mod.model.inner." + name: t.clone() for name, t in weights.items()}
    with replacing(c.export_official) as f:
        torch.save(official, f)
    print(f"wrote {c.export_official}: {len(official)} tensors under the official code's names")


def find_start(c, data, model, total_steps, start):
    """Fills in `start` from init_from and loads its weights into the model. Rank 0 only.

    Raises UserError where init_from, out_dir and gcs_dir do not fit together.
    """
    bucket = Bucket(c.gcs_dir) if c.gcs_dir else None
    reads_only = bool(c.eval_only or c.export_official)
    resumes = c.init_from in ("resume", "auto")
    if bucket:
        bucket.check(write=not reads_only, patient=resumes)  # a restart has time to wait for the bucket
    if resumes:
        state = find_checkpoint(c, bucket, data, start.notes.append)
    else:
        if not reads_only:
            refuse_other_run(c, bucket)
        state = read_checkpoint(c.init_from) if c.init_from != "scratch" else {}
    if not state:
        return
    load_weights(model, state["weights"], c.out_dir if resumes else c.init_from)
    if not resumes:
        start.state = {"ema": state["ema"]} if "ema" in state else {}
        return
    if state["step"] > total_steps and not reads_only:
        raise UserError(f"{c.out_dir} is at step {state['step']}, past the {total_steps} steps of this run: "
                        "raise max_steps or epochs")
    for name, value in vars(c).items():
        before = state["settings"].get(name)
        if before != value and name not in ("init_from", "eval_only"):
            start.notes.append(f"{name} is {value}; the checkpoint had {before}")
    start.step, start.state, start.wandb_id = state["step"], state, state["wandb_id"]
    start.best = best_accuracy(c)
    lines = metrics_lines(c.out_dir)
    start.complete = start.step == total_steps and any(
        '"final": true' in line and line_step(line) == start.step for line in lines)


def find_checkpoint(c, bucket, data, say):
    """The newest complete checkpoint of out_dir or the bucket; {} if init_from=auto starts from scratch."""
    notes = []
    state = newest_checkpoint(c.out_dir, notes.append)
    if bucket:
        state = download_newer(c, bucket, state, notes.append)
    had_one = any(os.path.exists(json_of(path)) for path in checkpoint_paths(c.out_dir))
    if not state and (c.init_from == "resume" or c.eval_only or c.export_official or had_one):
        where = f"{c.out_dir} and {c.gcs_dir}" if bucket else c.out_dir
        hint = "--out_dir=... starts another run" if had_one else "--init_from=auto starts from scratch"
        problem = f"--init_from={c.init_from}: no complete checkpoint in {where}"
        raise UserError("; ".join([problem, *notes, hint]))
    for note in notes:
        say(note)
    if state and state["data"] != data.sha256:
        raise UserError(f"{c.data_path} is not the data set that the checkpoint in {c.out_dir} "
                        "was trained on: choose that one, or another --out_dir")
    return state


def download_newer(c, bucket, state, say):
    """state, or the bucket's newest complete checkpoint if it is newer: downloaded, with the run's log."""
    remote_files = bucket.list()
    complete = [n for n in remote_files if checkpoint_step(n) is not None and json_of(n) in remote_files]
    for name in sorted(complete, key=checkpoint_step, reverse=True):
        if checkpoint_step(name) <= state.get("step", -1):
            break
        say(f"fetching {name[:-3]} from {c.gcs_dir}")
        logs = ["metrics.jsonl", "log.txt", "wandb.json", "best.pt", "best.json"]
        for file in [*logs, name, json_of(name)]:
            if file in remote_files:
                bucket.download(file, os.path.join(c.out_dir, file))
        state = newest_checkpoint(c.out_dir, say)
    return state


def refuse_other_run(c, bucket):
    """Raises UserError if out_dir or the bucket's folder holds a run."""
    files = [os.path.join(c.out_dir, name) for name in ("best.pt", "metrics.jsonl")]
    if checkpoint_paths(c.out_dir) or any(map(os.path.exists, files)):
        raise UserError(f"{c.out_dir} holds a run: "
                        "--init_from=auto continues it, --out_dir=... starts another")
    if bucket and any(name.startswith(("ckpt_", "best.", "metrics.")) for name in bucket.list()):
        raise UserError(f"{c.gcs_dir} holds a run: "
                        "--init_from=auto continues it, --gcs_dir=... starts another")


def best_accuracy(c):
    """The best_metric of best.pt, or -1 where there is none."""
    path = os.path.join(c.out_dir, "best.json")
    if not os.path.exists(path):
        return -1.0
    try:
        with open(path, "rb") as f:
            return json.load(f)["metrics"].get("eval/" + c.best_metric, -1.0)
    except (ValueError, KeyError, TypeError) as e:
        raise UserError(f"{path}: damaged ({e}); remove it and best.pt") from None


class Mirror:
    """A thread that copies what is new in out_dir to gcs_dir. If that fails, the next update tries again.

    Rank 0 copies everything, another host its log. Only numbered checkpoints of this run are deleted there.
    """

    def __init__(self, c, log, first_step, everything):
        """first_step: where this run starts. The bucket's checkpoints up to there are its own."""
        self.c, self.log, self.first_step, self.everything = c, log, first_step, everything
        self.bucket, self.own, self.failing, self.closing = Bucket(c.gcs_dir), None, False, False
        self.changed = threading.Event()
        self.thread = threading.Thread(target=self.work, daemon=True)  # does not keep the process alive
        self.thread.start()

    def update(self):
        """Begins to copy what is new."""
        self.changed.set()

    def close(self, seconds):
        """Copies what is new, within the given time. Returns whether it did; logs of other hosts may lack."""
        self.closing = True
        self.update()
        self.thread.join(5)
        if self.thread.is_alive():
            self.log.say(f"uploading to {self.c.gcs_dir}, for {seconds} s at most")
            self.thread.join(seconds - 5)
        complete = not (self.thread.is_alive() or self.failing)
        if not complete:
            self.log.say(f"upload to {self.c.gcs_dir} not complete; {self.c.out_dir} has everything, and "
                         "the same command with --init_from=auto uploads the rest")
        return complete or not self.everything

    def work(self):
        last = False
        while not last:
            self.changed.wait()
            self.changed.clear()
            last = self.closing
            try:
                self.copy()
                self.failing = False
            except Exception as e:  # whatever it is, training continues
                if not self.failing:
                    self.log.say(f"upload failed, the next checkpoint tries again: {e}")
                self.failing = True

    def copy(self):
        remote_files = self.bucket.list()
        if self.own is None:
            steps = {name: checkpoint_step(name) for name in remote_files}
            self.own = {name for name, step in steps.items() if step is not None and step <= self.first_step}
        for name in self.files():
            path = os.path.join(self.c.out_dir, name)
            try:
                if remote_files.get(name) != file_md5(path):
                    self.bucket.upload(path, name)
            except FileNotFoundError:  # pruned in the meantime
                continue
            if checkpoint_step(name) is not None:
                self.own.add(name)
        if not self.everything:
            return
        for name in sorted(self.own)[:-self.c.keep_last_n]:
            self.bucket.delete(json_of(name))
            self.bucket.delete(name)
            self.own.remove(name)

    def files(self):
        """Names of the files to copy: logs, then the newest checkpoint, a .json always after its .pt."""
        if not self.everything:
            return [os.path.basename(self.log.path)]
        names = {entry.name for entry in os.scandir(self.c.out_dir) if entry.is_file()}
        complete = sorted((n for n in names if n.endswith(".pt") and json_of(n) in names), reverse=True)
        pairs = [name for weights in complete for name in (weights, json_of(weights))]
        skipped = {n for n in names if n.startswith(("ckpt_", "best.")) or n.endswith((".tmp", ".part"))}
        return sorted(names - skipped) + pairs


# Logs.

class Log:
    """Lines for people and for programs. A file that cannot be written costs a warning and not the run.

    Rank 0 prints, and writes out_dir/log.txt and metrics.jsonl; each other host has a log.hostN.txt.
    step: that of the last line of numbers.
    """

    def __init__(self, c, device, start):
        self.c, self.device, self.step, self.wandb_id = c, device, start.step, start.wandb_id
        self.wandb, self.warned, self.path = None, False, None
        self.metrics_path = os.path.join(c.out_dir, "metrics.jsonl")
        if device.rank == 0:
            self.path = os.path.join(c.out_dir, "log.txt")
        elif device.local_rank == 0 and device.host != start.main_host:
            self.path = os.path.join(c.out_dir, f"log.host{device.host}.txt")
        if self.path:
            os.makedirs(c.out_dir, exist_ok=True)

    def say(self, text):
        """A line for people."""
        if self.device.rank == 0:
            try:
                print(text, flush=True)
            except OSError:  # a full disk, or nobody reads it any more; log.txt may still have room
                pass
        if self.path:
            self.append(self.path, text)

    def numbers(self, step, values):
        """A line of metrics.jsonl."""
        if self.device.rank == 0:
            values = {k: float(f"{v:.8g}") if isinstance(v, float) else v for k, v in values.items()}
            self.append(self.metrics_path, json.dumps({"step": step, **values}))

    def append(self, path, line):
        try:
            with open(path, "a", encoding="utf-8") as f:
                f.write(line + "\n")
        except OSError as e:
            if not self.warned:
                print(f"{path}: cannot be written ({e.strerror}); training continues", file=sys.stderr)
            self.warned = True

    def header(self, run, data, test, notes):
        """What the run is, and on what."""
        c, device = self.c, self.device
        self.say(f"# python {platform.python_version()}, torch {torch.__version__}, {platform.platform()}, "
                 f"{os.cpu_count()} cores, {device.world} x {device.kind} ({device.name}); "
                 f"settings that differ from train.py's: {differences(c)}")
        self.say(f"{run.num_parameters:,} parameters; "
                 f"{len(data):,} training examples of {data.total_groups:,} puzzles, "
                 f"{len(test):,} test puzzles in {c.data_path}")
        for note in [*device.notes, *notes]:
            self.say(note)

    def begin(self, total_steps, **facts):
        """Drops the lines past the step where the run starts, and starts W&B. facts: for W&B's config."""
        self.say(f"training from step {self.step} to {total_steps}, "
                 f"{self.c.global_batch_size} sequences a step")
        if self.device.rank == 0:
            kept = [line for line in metrics_lines(self.c.out_dir) if line_step(line) <= self.step]
            with replacing(self.metrics_path) as f:
                f.write("".join(kept).encode())
            if wandb_wanted(self.c) and wandb_mode_of(self.c) != "disabled":
                self.wandb = WandB(self.c, self.wandb_id, self.say, facts)
                self.wandb_id = self.wandb.id

    def restart_clock(self, step):
        """Leaves compiling, an evaluation or a checkpoint out of the rates."""
        self.clock, self.timed_from = time.perf_counter(), step

    def first_step(self, step, run):
        """Reports the time of the first step, which compiles."""
        run.state["sums"].cpu()  # waits for the device
        seconds = time.perf_counter() - self.clock
        self.say(f"step {step}: {seconds:.1f} s for the first step, compiling included; "
                 "left out of the rates below")
        self.restart_clock(step)

    def train(self, step, total_steps, sums, run, cycles):
        """Logs the steps since the last line, and returns the numbers; sums: as Run.read_sums returns."""
        c, values = self.c, train_values(self.c, sums, step - self.step)
        values["train/lr"] = learning_rate(c.lr, step - 1, c.lr_warmup_steps, total_steps, c.lr_min_ratio)
        line = f"step {step}/{total_steps} | loss {values['train/loss']:.4f}"
        if "train/steps" in values:
            line += " | accuracy {train/accuracy:.3f} exact {train/exact_accuracy:.3f}".format_map(values)
            line += f" halting step {values['train/steps']:.1f}"
        if step > self.timed_from:
            seconds = (time.perf_counter() - self.clock) / (step - self.timed_from)
            speed = c.global_batch_size / seconds
            values |= {"perf/examples_per_sec": speed, "perf/step_time": seconds}
            flops = run.model.flops_per_example(cycles)[1]
            values["perf/tflops"] = speed * flops / 1e12
            if peak := peak_flops(self.device):
                values["perf/mfu"] = speed * flops / peak / self.device.world
            line += f" | {speed:,.0f} examples/s {1e3 * seconds:,.0f} ms"
            line += f" | eta {duration((total_steps - step) * seconds)}"
        values |= self.device.counts()
        self.numbers(step, values)
        self.say(line)
        self.step = step
        return values

    def evaluation(self, step, values, example=""):
        """Logs an evaluation; example: for W&B, as show_puzzle returns it."""
        self.numbers(step, values | ({"eval/example": example} if example else {}))
        self.say(eval_line(values, step))

    def close(self, seconds):
        """Ends W&B, within the given time, and the output."""
        if self.wandb:
            self.wandb.close(seconds)
        try:
            sys.stdout.flush()
        except OSError:  # the interpreter would try once more, and change the exit code
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def train_values(c, sums, steps):
    """Means over `steps` steps: the losses over all sequences, the rest over the sequences that halted."""
    lm_loss, q_halt_loss = (sums[name] / (steps * c.global_batch_size) for name in ("lm_loss", "q_halt_loss"))
    values = {"train/loss": lm_loss + 0.5 * q_halt_loss, "train/lm_loss": lm_loss,
              "train/q_halt_loss": q_halt_loss, "train/grad_norm": sums["grad_norm"] / steps}
    if sums["count"]:
        for name in ("accuracy", "exact_accuracy", "q_halt_accuracy", "steps"):
            values["train/" + name] = sums[name] / sums["count"]
    return values


def eval_line(values, step):
    """A line of the console for an evaluation."""
    line = (f"step {step} | {values['eval/puzzles']:,} test puzzles at {values['eval/steps']:.4g} "
            f"supervision steps: exact {values['eval/exact_accuracy']:.4f} "
            f"surest {values['eval/surest_accuracy']:.4f} "
            f"accuracy {values['eval/accuracy']:.4f} loss {values['eval/loss']:.4f}")
    if "eval/path_valid" in values:
        line += " path valid {eval/path_valid:.4f} optimal {eval/path_optimal:.4f}".format_map(values)
    for text, prefix in (("surest of", "eval/surest_of_"), ("any right of", "eval/any_of_")):
        found = {name.removeprefix(prefix): v for name, v in values.items() if name.startswith(prefix)}
        if found:
            line += f" | {text} {', '.join(found)}: {', '.join(f'{v:.4f}' for v in found.values())}"
    if "eval/majority_accuracy" in values:
        line += " | majority {eval/majority_accuracy:.4f}".format_map(values)
    return line


def duration(seconds):
    """Seconds as 1h02m, 3m04s or 5s."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"


def metrics_lines(out_dir):
    """The complete lines of metrics.jsonl."""
    path = os.path.join(out_dir, "metrics.jsonl")
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8", errors="replace") as f:
        return [line for line in f if line.endswith("\n")]


def line_step(line):
    """The step of a line of metrics.jsonl; infinity for a line that a crash damaged."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


def wandb_wanted(c):
    """Whether the run logs to W&B. By its settings alone: the same on all ranks."""
    return c.wandb_log and not c.eval_only and c.wandb_mode != "disabled"


def wandb_mode_of(c):
    """The environment may keep a run from going online, but not send an offline one there."""
    return (os.environ.get("WANDB_MODE") or "online") if c.wandb_mode == "online" else c.wandb_mode


class WandB:
    """Starts scripts/wandb_follow.py, which sends metrics.jsonl to Weights & Biases, and ends it.

    It is a process of its own, which can be killed: wandb can hang in init, in finish and in its exit hooks.
    """

    def __init__(self, c, run_id, say, facts):
        """run_id: of the run to continue, or None. facts: for W&B's config, besides the settings."""
        self.id, self.say, self.out_dir, self.process = run_id or secrets.token_hex(4), say, c.out_dir, None
        path, lines = os.path.join(c.out_dir, "wandb.json"), len(metrics_lines(c.out_dir))
        sent = lines if run_id else 0  # how many lines W&B has
        try:
            with open(path, encoding="utf-8") as f:
                earlier = json.load(f)
            if earlier["id"] == run_id:
                sent = min(lines, earlier["sent"])
        except (OSError, ValueError, KeyError, TypeError):  # none, or damaged
            pass
        name = c.wandb_run_name or os.path.basename(os.path.abspath(c.out_dir))
        description = dict(id=self.id, project=c.wandb_project, name=name, mode=wandb_mode_of(c),
                           config=vars(c) | facts, command=sys.argv, sent=sent)
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "scripts", "wandb_follow.py")
        try:
            with replacing(path) as f:
                f.write(json.dumps(description, indent=1).encode())
            self.process = subprocess.Popen(
                [sys.executable, script, c.out_dir, "--child"], stdin=subprocess.PIPE,
                stderr=subprocess.DEVNULL, start_new_session=True)  # which Ctrl-C does not reach
        except OSError as e:
            say(f"W&B: off, it cannot be started ({e}); metrics.jsonl has everything")
        atexit.register(self.close, 10)  # where an error ends the run

    def close(self, seconds):
        """Closes its stdin, which tells it that training has ended, and waits up to `seconds`."""
        if not self.process:
            return
        self.process.stdin.close()
        try:
            code = self.process.wait(seconds)
            if code not in (0, 1):  # 1: it has said why
                self.say(f"W&B: off, its process died (exit code {code}); metrics.jsonl has everything")
        except subprocess.TimeoutExpired:
            if hasattr(os, "killpg"):
                os.killpg(self.process.pid, signal.SIGKILL)  # and what wandb has started
            else:  # Windows
                self.process.kill()
            self.say(f"W&B: no end within {seconds} s, killed; metrics.jsonl has everything, and "
                     f"python scripts/wandb_follow.py {self.out_dir} --again sends it")
        self.process = None


# Devices: the CPU and CUDA GPUs. xla.py has the TPU, with the same methods.

# A chip's dense bfloat16 FLOP/s as its maker states them, for perf/mfu.
PEAK_FLOPS = {"TPU v4": 275e12, "TPU v5lite": 197e12, "TPU v5e": 197e12, "TPU v5p": 459e12, "TPU v6e": 918e12,
              "A100": 312e12, "H100": 989e12, "H200": 989e12, "L40S": 362e12}


def open_device(kind, c):
    """The device of one replica; kind as choose_device returns it."""
    if kind == "xla":
        return xla.XLADevice()
    if kind == "tpu":
        import torchtpu
        return torchtpu.TorchTPUDevice()
    return Device(kind, c)


class Device:
    """The CPU, a CUDA GPU or Apple's GPU; the first two alone or under torchrun.

    torch: the torch.device; rank of world replicas; local_rank on this host, number `host`; notes: lines for
    the log.
    """

    def __init__(self, kind, c):
        self.kind, self.say, self.rank, self.world = kind, print, 0, 1
        self.notes = []
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.host = int(os.environ.get("GROUP_RANK", 0))
        self.compiles = c.compile == "on" or c.compile == "auto" and kind == "cuda"
        self.torch, self.name = torch.device(kind), platform.processor() or platform.machine()
        if kind == "cuda":
            if self.local_rank >= torch.cuda.device_count():
                raise UserError(f"replica {self.local_rank} of this host has no GPU: "
                                f"torchrun --nproc-per-node={torch.cuda.device_count()}")
            self.torch = torch.device("cuda", self.local_rank)
            self.name = torch.cuda.get_device_name(self.torch)
            torch.cuda.set_device(self.torch)
            torch.set_float32_matmul_precision("high")  # TF32, for what is not in forward_dtype
            self.adapt(c)
        if "RANK" in os.environ:
            backend = "nccl" if kind == "cuda" else "gloo"
            patience = timedelta(seconds=c.stall_timeout or 10 ** 6)
            torch.distributed.init_process_group(backend, timeout=patience)
            if backend == "gloo":  # whose threads may abort at the end; NCCL would wait for a peer that died
                atexit.register(torch.distributed.destroy_process_group)
            self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def adapt(self, c):
        """Does without what this GPU lacks: changes c.forward_dtype or runs eagerly, and notes that.

        Raises UserError for a GPU that this build of torch has no kernels for, and for --compile=on.
        """
        try:
            torch.ones(1, device=self.torch).add(1).cpu()
        except RuntimeError as e:
            raise UserError(f"{self.name}: torch {torch.__version__} cannot use it ({one_line(e)}); "
                            "another build of torch may, and --device=cpu trains on the CPU") from None
        if c.forward_dtype == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
            c.forward_dtype = "float16" if torch.cuda.get_device_capability()[0] >= 7 else "float32"
            self.notes.append(f"forward_dtype is {c.forward_dtype}, not bfloat16: {self.name} has no "
                              "bfloat16 units; results differ by rounding")
        fault = compile_fault(self.torch) if self.compiles else ""
        if fault and c.compile == "on":
            raise UserError(f"--compile=on: torch.compile fails on {self.name} ({fault}); "
                            "--compile=auto trains without it, more slowly")
        if fault:
            self.compiles = False
            self.notes.append(f"compile is off, which is slower: torch.compile fails here ({fault})")

    def put(self, tree):
        """Arrays and tensors in dicts, on the device."""
        def put_one(x):
            x = torch.as_tensor(x)
            if self.kind == "cuda" and x.device.type == "cpu":
                x = x.pin_memory()  # a copy from pageable memory would wait for the steps under way
            return x.to(self.torch, non_blocking=self.kind == "cuda")  # unsafe on mps: pytorch#189690

        return tree_map(put_one, tree)

    def fetch(self, x):
        """Begins to copy a tensor to the host. Returns a function that waits for it, and nothing newer."""
        if self.kind != "cuda":
            return lambda: x
        host, event = torch.empty_like(x, device="cpu", pin_memory=True), torch.cuda.Event()
        host.copy_(x, non_blocking=True)
        event.record()

        def wait():
            event.synchronize()
            return host

        return wait

    def all_reduce(self, vector):
        """The sum of the ranks' vectors, within a step. All ranks."""
        if self.world > 1:
            torch.distributed.all_reduce(vector)
        return vector

    def sum_on_host(self, vector):
        """The sum of the ranks' vectors, on the host. All ranks."""
        return self.all_reduce(self.put(vector)).cpu()

    def prepare(self, model):
        model.to(self.torch)

    def compile(self, fn):
        """fn through torch.compile, where the settings ask for that."""
        if not self.compiles:
            return fn
        torch._dynamo.config.recompile_limit = 64  # a compilation for each stage of a curriculum
        return torch.compile(fn, dynamic=False)

    def program(self, fn):
        """fn(state, inputs, *static), which changes the tensors of state in place and returns others."""
        return fn

    def sum_over(self, body, sums, weights, xs):
        """The sums of body over the micro-batches in xs, as accumulate."""
        return accumulate(body, sums, weights, xs)

    def counts(self):
        """The compiler's numbers for metrics.jsonl."""
        return {}


def compile_fault(device):
    """Why torch.compile cannot compile for a GPU (no Triton, no C compiler, too old), or ""."""
    def add_one(x):
        return x + 1

    try:
        torch.compile(add_one)(torch.ones(8, device=device))
    except Exception as e:  # torch has many for this
        return f"{type(e).__name__}: {one_line(e)}".partition(" Set TORCHDYNAMO")[0]  # advice on debugging it
    return ""


def one_line(error):
    """The beginning of an error's message."""
    return " ".join(str(error).split())[:200]


def out_of_memory(c):
    """The UserError for a GPU that is full. It names the next smaller micro_batch_size, half as large."""
    batch_size = c.global_batch_size // int(os.environ.get("WORLD_SIZE", 1))
    size = c.micro_batch_size or batch_size
    smaller = [n for n in range(1, size // 2 + 1) if batch_size % n == 0]
    if not smaller:
        return UserError("out of GPU memory with one sequence at a time: --recompute needs less")
    return UserError(f"out of GPU memory with {size} sequences at a time: "
                     f"--micro_batch_size={smaller[-1]} needs less and gives the same result")


def from_rank_0(device, vector):
    """Rank 0's vector, on the host of every rank. All ranks."""
    if device.world == 1:
        return vector
    return device.sum_on_host(vector if device.rank == 0 else torch.zeros_like(vector))


def text_from_rank_0(device, text):
    """Rank 0's text, cut to 4000 bytes. All ranks."""
    numbers = torch.zeros(4000)
    content = text.encode()[:len(numbers)]
    numbers[:len(content)] = torch.tensor(list(content), dtype=torch.float32)
    return bytes(int(x) for x in from_rank_0(device, numbers)).rstrip(b"\0").decode(errors="replace")


def peak_flops(device):
    """FLOP/s of a chip as its maker states them, or None."""
    return next((flops for chip, flops in PEAK_FLOPS.items() if chip in device.name), None)


def choose_device(wanted):
    """(xla, tpu, cuda, mps or cpu; the reason in words). Raises UserError if the wanted one is missing."""
    if wanted == "tpu":
        import torchtpu  # an experiment, which forks may leave out
        return "tpu", torchtpu.load()
    pjrt = os.environ.get("PJRT_DEVICE")
    has_xla = importlib.util.find_spec("torch_xla") is not None
    chips = xla.tpu_chips() if has_xla and wanted in ("xla", "auto") else 0
    if wanted == "xla" or wanted == "auto" and (pjrt or chips):
        if not has_xla:
            raise UserError(f"--device={wanted}: torch_xla is not installed: pip install -r requirements.txt")
        if pjrt == "CPU":
            replicas = int(os.environ.get("CPU_NUM_DEVICES") or 1)
            os.environ.setdefault("XLA_THREAD_POOL_SIZE", str(max(16, replicas)))  # fewer would deadlock
            return "xla", "PJRT_DEVICE=CPU"
        if pjrt not in (None, "", "TPU"):
            raise UserError(f"PJRT_DEVICE={pjrt}: must be TPU or CPU, or unset")
        if not chips:
            raise UserError(f"--device={wanted}: no TPU on this machine; "
                            "PJRT_DEVICE=CPU in the environment runs torch_xla on the CPU")
        os.environ["PJRT_DEVICE"] = "TPU"
        return "xla", f"{chips} TPU chips on this host"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("--device=cuda: torch sees no CUDA GPU; --device=cpu trains on the CPU")
    if wanted == "cuda" or wanted == "auto" and torch.cuda.is_available():
        return "cuda", torch.cuda.get_device_name()
    has_mps = torch.backends.mps.is_available()
    if wanted == "mps" and not has_mps:
        raise UserError("--device=mps: torch sees no Apple GPU; --device=cpu trains on the CPU")
    if wanted == "mps" and "RANK" in os.environ:
        raise UserError("--device=mps: torchrun cannot use it, since torch has no all-reduce for Apple's GPU")
    if wanted == "mps":
        return "mps", "Apple's GPU, which nobody has tested yet"
    if wanted == "cpu":
        return "cpu", "--device=cpu"
    return "cpu", "no TPU and no CUDA GPU found" + ("; --device=mps is Apple's GPU" if has_mps else "")


# Setting up.

def replica(c, kind):
    """The whole run of one replica. Checks all input before it writes anything."""
    restart_watchdog(c)
    device = open_device(kind, c)
    check_batch_size(c, device)
    data, test = Dataset(c.data_path, "train"), Dataset(c.data_path, "test")
    model = build_model(c, data, test)
    total_steps = count_steps(c, epoch_size(data))
    if total_steps < 1:
        raise UserError(f"epochs={c.epochs} of {data.total_groups} puzzles are less than one batch "
                        f"of global_batch_size={c.global_batch_size}")
    start = agree_on_start(c, device, data, model, total_steps)
    if c.export_official:
        if device.rank == 0:
            print(*start.notes, sep="\n")
            write_official(c, model, start.state)
        return
    run = Run(model, c, device, start.state)
    log = Log(c, device, start)
    device.say = log.say
    log.header(run, data, test, start.notes)
    if c.eval_only:
        if not final_evaluation(run, test, log, start.step):
            sys.exit(3)
    elif start.complete:
        log.say(f"{c.out_dir} is complete at step {start.step}: --eval_only evaluates it again, "
                "a higher max_steps or epochs continues it")
        if not Checkpoints(c, device, log, start, data.sha256).close(600):  # what the last upload left out
            sys.exit(1)
    else:
        start.state = {}  # frees the checkpoint
        checkpoints = Checkpoints(c, device, log, start, data.sha256)
        log.begin(total_steps, data_sha256=data.sha256, parameters=run.num_parameters)
        train_and_evaluate(run, data, test, log, checkpoints, start.step, total_steps)


def check_batch_size(c, device):
    """Raises UserError unless the batch divides into replicas and micro-batches."""
    multiple = device.world * (c.micro_batch_size or 1)
    if c.global_batch_size % multiple == 0:
        return
    below = max(1, c.global_batch_size // multiple) * multiple
    reason = f"{device.world} replica" + ("s" if device.world > 1 else "")
    if c.micro_batch_size:
        reason += f" x micro_batch_size {c.micro_batch_size}"
    raise UserError(f"global_batch_size {c.global_batch_size} must be a multiple of {multiple} ({reason}): "
                    f"the nearest are {below} and {below + multiple}")


def build_model(c, data, test):
    """The model for a data set, with its first weights. Raises UserError for sizes that do not fit."""
    sizes = {name: getattr(data, name) for name in ("seq_len", "vocab_size", "num_puzzle_identifiers")}
    for name, size in sizes.items():
        if getattr(test, name) != size:
            raise UserError(f"{c.data_path}: {name} is {size} in train, {getattr(test, name)} in test: "
                            "build it again")
    return new_model(c, **sizes)


def new_model(c, **sizes):
    """A model of the settings with its first weights. Raises UserError for sizes that cannot be built."""
    try:
        return TRM(TRMConfig.of(c, **sizes), c.seed)
    except ValueError as e:
        raise UserError(str(e)) from None


def agree_on_start(c, device, data, model, total_steps):
    """Where the run starts. All ranks: only rank 0 reads out_dir and gcs_dir, and an error there ends all.

    Returns step, complete (nothing is left to do), main_host (that of rank 0), and for rank 0 alone: state
    (ema, m and v of a checkpoint), best (accuracy so far), notes (lines for the log), wandb_id.
    """
    start = SimpleNamespace(step=0, complete=False, main_host=0, state={}, best=-1.0, notes=[], wandb_id=None)
    error = None
    if device.rank == 0:
        try:
            find_start(c, data, model, total_steps, start)
        except (UserError, TransientError, OSError) as e:
            error = e
    facts = [error is not None, isinstance(error, UserError), start.step, start.complete]
    table = gather(device, [device.host, *fingerprint(c, data), *facts])
    refuse_differences(table)
    start.main_host, (failed, is_wrong_input, start.step, start.complete) = table[0][0], table[0][-4:]
    if failed:  # xmp.spawn shows the error of one process of a host, which need not be rank 0's
        raise (UserError if is_wrong_input else TransientError)(text_from_rank_0(device, str(error)))
    return start


def gather(device, numbers):
    """Every rank's numbers: whole, and below 2**24, which float32 holds exactly. All ranks."""
    if device.world == 1:
        return [numbers]
    table = torch.zeros(device.world, len(numbers))
    table[device.rank] = torch.tensor(numbers, dtype=torch.float32)
    table = device.sum_on_host(table.flatten()).view(device.world, -1)
    return [[int(x) for x in row] for row in table.tolist()]


def fingerprint(c, data):
    """Two numbers each for the data set, the settings and the code."""
    settings = {name: value for name, value in vars(c).items() if name not in ("data_path", "out_dir")}
    folder, sources = os.path.dirname(os.path.abspath(__file__)), b""
    for name in ("train.py", "xla.py", "model.py", "data.py", "configurator.py"):
        with open(os.path.join(folder, name), "rb") as f:
            sources += f.read()
    digests = [data.sha256]
    for content in (json.dumps(settings, sort_keys=True).encode(), sources):
        digests.append(hashlib.sha256(content).hexdigest())
    return [int(digest[i:i + 6], 16) for digest in digests for i in (0, 6)]


def refuse_differences(table):
    """Raises an error if ranks have another data set, other settings or other code than rank 0.

    table: rows of host, fingerprint, ... Other code is a TransientError: tpu.sh copies the code at a restart.
    """
    errors = {"data set": UserError, "settings": UserError, "code": TransientError}
    for i, (name, error) in zip((1, 3, 5), errors.items()):
        others = [row for row in table if row[i:i + 2] != table[0][i:i + 2]]
        if others:
            hosts = ", ".join(str(host) for host in sorted({row[0] for row in others}))
            raise error(f"{name} of host {hosts} ({len(others)} of {len(table)} replicas): not that of "
                        f"host {table[0][0]}, where rank 0 is")


# Settings.

CHOICES = {
    "pos_encodings": ("none", "rope", "learned"),
    "forward_dtype": ("bfloat16", "float32", "float16"),
    "loss_type": ("stablemax_cross_entropy", "softmax_cross_entropy"),
    "optimizer": ("adam_atan2", "adamw", "lion", "muon"),
    "best_metric": ("exact_accuracy", "surest_accuracy"),
    "device": ("auto", "xla", "cuda", "mps", "cpu", "tpu"),
    "compile": ("auto", "on", "off"),
    "wandb_mode": ("online", "offline", "disabled"),
}
BOUNDS = (  # (description, test, settings)
    ("above 0", lambda v: v > 0,
     "global_batch_size hidden_size num_heads expansion L_layers H_cycles L_cycles halt_max_steps lr "
     "log_interval keep_last_n eval_rollouts"),
    ("0 or more", lambda v: v >= 0,
     "micro_batch_size epochs max_steps puzzle_emb_ndim puzzle_emb_len lr_min_ratio lr_warmup_steps "
     "weight_decay puzzle_emb_lr puzzle_emb_weight_decay eval_interval eval_max_puzzles "
     "eval_final_max_puzzles eval_halt_max_steps eval_patience eval_noise checkpoint_interval "
     "curriculum_epochs stall_timeout"),
    ("0 or more, and below 2**63", lambda v: 0 <= v < 2 ** 63, "seed"),
    ("from 0 to below 1", lambda v: 0 <= v < 1, "beta1 beta2 ema_rate"),
    ("from 0 to 1", lambda v: 0 <= v <= 1, "halt_exploration_prob"),
    ("from 0 to 1, or -1 (constant)", lambda v: 0 <= v <= 1 or v == -1, "halt_exploration_prob_end"),
)
EVAL_OUTPUTS = ("inputs", "labels", "preds", "q_halt_logits", "surest_preds", "surest_q_halt_logits")


def check_settings(c):
    """Raises UserError for the first value that no run could use."""
    for name, choices in CHOICES.items():
        if getattr(c, name) not in choices:
            raise UserError(f"{name} must be one of {', '.join(choices)}, not {getattr(c, name)!r}")
    for bounds, is_valid, names in BOUNDS:
        for name in names.split():
            value = getattr(c, name)
            if not (math.isfinite(value) and is_valid(value)):
                raise UserError(f"{name} must be {bounds}, not {value}")
    if c.curriculum_epochs:
        for name in ("H_cycles", "L_cycles"):
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
    if set(c.wandb_project) & set("/\\#?%:") or len(c.wandb_project) > 128:
        raise UserError("wandb_project must have at most 128 characters and none of /\\#?%:, "
                        f"not {c.wandb_project!r}")
    for name in ("eval_only", "export_official"):
        if getattr(c, name) and c.init_from == "scratch":
            raise UserError(f"{name} needs weights: --init_from=resume (the newest checkpoint of out_dir) "
                            "or --init_from=FILE")
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # torch.compile's
    if c.compile == "on" and not shutil.which(compiler):
        raise UserError(f"--compile=on needs a C++ compiler and finds no {compiler!r} (CXX names another); "
                        "--compile=auto needs none on a CPU")
    if c.gcs_dir:
        Bucket(c.gcs_dir)  # raises UserError for a malformed address
    check_folders(c)


def check_folders(c):
    """Raises UserError unless out_dir can be written, and export_official as a new file."""
    if os.path.lexists(c.export_official):
        raise UserError(f"--export_official={c.export_official}: exists already; choose another name")
    folders = {"out_dir": os.path.abspath(c.out_dir)}
    while not os.path.lexists(folders["out_dir"]):  # the nearest that exists
        folders["out_dir"] = os.path.dirname(folders["out_dir"])
    if c.export_official:
        folders["export_official"] = os.path.dirname(os.path.abspath(c.export_official))
    for name, folder in folders.items():
        if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
            raise UserError(f"--{name}={getattr(c, name)}: {folder} is not a folder that can be written to")


def differences(c):
    """The settings that differ from their defaults, as flags."""
    defaults = read_settings(__file__)
    return " ".join(f"--{name}={v}" for name, v in vars(c).items() if v != defaults[name][0]) or "none"


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
        elif hasattr(signal, "alarm"):
            signal.alarm(60)  # the reason may be that another replica died: then no peer answers

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)


def end_with_parent():
    """Ends this process, which xmp.spawn started, once the main process is gone: nothing else would."""
    def watch():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def restart_watchdog(c):
    """Ends this process with 1, after the stacks of all threads, unless called again within stall_timeout."""
    if c.stall_timeout:
        faulthandler.dump_traceback_later(c.stall_timeout, exit=True, file=sys.__stderr__)


def xla_replica(index, c, kind):
    """replica() for xmp.spawn. If it breaks, its process ends: its peers would wait for it forever."""
    end_with_parent()
    try:
        replica(c, kind)
    except (UserError, TransientError, FloatingPointError, SystemExit):  # on all replicas, or all of a host
        raise
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def make_dataset(c):
    """Runs data_prepare if data_path is missing: one process of a host, while the others wait."""
    if not c.data_prepare or os.path.exists(c.data_path):
        return
    try:
        command = shlex.split(c.data_prepare)
    except ValueError as e:
        raise UserError(f"data_prepare: {e}: {c.data_prepare}") from None
    with locked(c.data_path):
        if os.path.exists(c.data_path):
            return
        print(f"{c.data_path} is missing; making it: python {c.data_prepare}", flush=True)
        code = subprocess.run([sys.executable, *command]).returncode
        if code and not os.path.exists(c.data_path):  # another host that shares the folder may have made it
            error = UserError if code == 2 else TransientError
            raise error(f"data_prepare failed, see above: {c.data_prepare}")
        if not os.path.exists(c.data_path):
            raise UserError(f"data_prepare did not make data_path={c.data_path}: {c.data_prepare}")


def main(c):
    """Checks the settings, makes the data set if it is missing, and runs a replica on each device."""
    check_settings(c)
    kind, reason = choose_device(c.device)
    if os.environ.get("RANK", "0") == "0":
        print(f"device {kind}: {reason}", flush=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)  # ends what makes the data, too
    c.data_path = local_dataset(c.data_path, patient=True)
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
        except FloatingPointError as e:
            print(f"train.py: {e}", file=sys.stderr)
            sys.exit(1)
        except BrokenProcessPool:
            print("train.py: a replica died, see above; --init_from=auto continues from the last checkpoint "
                  f"in {c.out_dir}", file=sys.stderr)
            sys.exit(1)


if __name__ == "__mp_main__":  # a process that xmp.spawn started
    on_signals()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the main process too, which asks to stop
if __name__ == "__main__":
    configurator.start(main, __file__)
