"""Trains a Tiny Recursive Model (arXiv 2510.04871) on a TPU, a CUDA GPU or the CPU.

    python train.py config/demo.py                        6x6 Sudoku, made on the spot, in a minute or two
    python train.py config/sudoku.py --device=cuda        the paper's Sudoku-Extreme, after prepare_sudoku.py
    python train.py config/sudoku.py --init_from=resume   continues from the newest checkpoint of out_dir

The class Settings has the defaults: the paper's recipe for Sudoku-Extreme (MLP). Config files and --key=value
flags override them, and functions take the result as `settings`. A run starts at the end of the file.
"""
import copy
import functools
import math
import os
import sys
import threading
import time
import traceback
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext

import numpy as np
import torch
from torch.utils._pytree import tree_map

import configurator
import data
import evaluate
import model
import optim
import puzzles
from configurator import Above0, From0, From0Below1, From0To1, Rule, one_of
from runtime import checkpoint, errors, process
from runtime.checkpoint import check_start_settings
from runtime.engines import check_batch_size, check_ranks, choose_device, open_device, spawner
from runtime.errors import TransientError, UserError, check_values, one_line
from runtime.files import duration, newest_complete
from runtime.flops import flops_per_example
from runtime.log import Log, check_login
from runtime.process import STOP, StepDropped, restart_watchdog
from runtime.saved import load_start

TO_CONTINUE = "to continue: the same command with --init_from=auto, or as it is if it has --init_from=FILE"
MODEL_LOCK = threading.Lock()  # replicas may be threads, which share torch's generator
EVAL_OUTPUTS = {"inputs", "labels", "attempts", *evaluate.ANSWERS}

# the rules of some settings
From0To1OrMinus1 = Rule("from 0 to 1, or -1", lambda number: 0 <= number <= 1 or number == -1)
NotEmpty = Rule("a name or a path", bool)
Outputs = Rule(f"some of {','.join(sorted(EVAL_OUTPUTS))}",
               lambda text: EVAL_OUTPUTS.issuperset(filter(None, text.split(","))))


class Settings:
    # data
    data_path: NotEmpty = "data/sudoku-extreme-1k-aug-1000"  # folder of the dataset, or its gs:// address
    data_prepare = ""  # command that makes data_path if it is missing ("prepare_sudoku.py --size=6 ...")
    global_batch_size: Above0 = 768  # sequences per step, over all replicas
    micro_batch_size: From0 = 0  # sequences at a time on a replica; 0: all; a CPU may take fewer
    # an epoch counts global_batch_size puzzles a step, although only sequences that have halted take one
    epochs: From0 = 50000  # length of the run without max_steps: steps = epochs x puzzles / global_batch_size
    max_steps: From0 = 0  # length of the run in steps; 0: from epochs
    # model
    hidden_size: Above0 = 512  # width of the network
    num_heads: Above0 = 8  # attention heads
    expansion: Above0 = 4.0  # the hidden width of a SwiGLU is 2/3 x expansion x its width
    multiple_of: Above0 = 256  # hidden widths are rounded up to a multiple of this
    L_layers: Above0 = 2  # layers of the one network
    H_cycles: Above0 = 3  # T of the paper: recursions per step; all but the last without gradient
    L_cycles: Above0 = 6  # n of the paper: latent updates per recursion
    curriculum_epochs: From0 = 0.0  # epochs in which the depth grows from H_ and L_cycles_start; 0: none
    H_cycles_start: Above0 = 1  # H_cycles when the curriculum starts
    L_cycles_start: Above0 = 2  # L_cycles when the curriculum starts
    mlp_t = True  # True: an MLP mixes the positions; False: self-attention
    pos_encodings: one_of(["none", "rope", "learned"]) = "none"  # rope: attention only
    puzzle_emb_ndim: From0 = 512  # width of the puzzle embedding; 0: none
    puzzle_emb_len: From0 = 16  # prefix positions; 0: ceil(puzzle_emb_ndim / hidden_size)
    # on CPUs and GPUs that emulate bfloat16, it becomes float16 or float32; auto: the device's fastest
    forward_dtype: one_of(["auto", "bfloat16", "float32", "float16"]) = "bfloat16"
    # halting
    halt_max_steps: Above0 = 16  # maximum supervision steps of a sequence
    halt_exploration_prob: From0To1 = 0.1  # chance at each step that a sequence must run until a random step
    halt_exploration_prob_end: From0To1OrMinus1 = -1.0  # its value at the end, reached linearly; -1: constant
    # optimizer
    loss_type: one_of(model.LOSSES) = "stablemax_cross_entropy"  # or softmax_cross_entropy
    optimizer: one_of(optim.OPTIMIZERS) = "adam_atan2"  # adam_atan2, adamw or lion
    lr: Above0 = 1e-4  # peak learning rate
    lr_min_ratio: From0To1 = 1.0  # end of the cosine, as a share of lr; 1: constant
    lr_warmup_steps: From0 = 2000  # steps of linear warm-up
    beta1: From0Below1 = 0.9  # decay of the first moment
    beta2: From0Below1 = 0.95  # decay of the second moment
    weight_decay: From0 = 1.0  # decoupled: multiplied by the learning rate
    puzzle_emb_lr: From0 = 1e-4  # learning rate of SignSGD on the puzzle embedding
    puzzle_emb_weight_decay: From0 = 1.0  # decoupled weight decay of the puzzle embedding
    freeze_weights = False  # train only the puzzle embedding
    ema = True  # evaluate and export an exponential moving average of the weights
    ema_rate: From0To1 = 0.999  # decay of that average per step
    seed: From0 = 0  # seeds the first weights, the data order, the copies and the halting draws
    # evaluation
    eval_interval: From0 = 5000  # epochs between evaluations; 0: only at the end
    eval_max_puzzles: From0 = 4096  # test puzzles during training, a fixed random subset; 0: all
    eval_final_max_puzzles: From0 = 0  # test puzzles in the final evaluation; 0: all
    eval_versions: From0 = 0  # versions of each ARC task in evaluations during training; 0: all
    eval_halt_max_steps: From0 = 0  # supervision steps in an evaluation; 0: halt_max_steps
    eval_patience: From0 = 0  # a puzzle leaves once its answer stays for so many steps; 0: never (the paper)
    eval_attempts: Above0 = 1  # most attempts at a puzzle, at copies by symmetry, until one is sure
    eval_save_outputs: Outputs = ""  # any of inputs,labels,preds,q_halt_logits,...: in eval_STEP.npz
    eval_only = False  # run the final evaluation, then stop
    # run
    out_dir: NotEmpty = "out/sudoku"  # checkpoints, metrics.jsonl, log.txt
    gcs_dir = ""  # gs://bucket/folder of only this run: a mirror of out_dir, to resume on another machine
    init_from: NotEmpty = "scratch"  # scratch, resume, auto (resume if there is one) or a FILE to begin with
    checkpoint_interval: From0 = 1000  # steps; sequences start afresh there, to resume exactly; 0: at the end
    keep_last_n: Above0 = 3  # checkpoints to keep, besides best.pt
    log_interval: Above0 = 10  # steps averaged in a line of the log
    stall_timeout: From0 = 1800  # exit if no step finishes for this many seconds; 0: never
    device: one_of(["auto", "xla", "tpu", "cuda", "cpu"]) = "auto"  # xla: torch_xla on a TPU; tpu: TorchTPU
    compile: one_of(["auto", "on", "off"]) = "auto"  # torch.compile; auto: on CUDA (docs/gpu.md)
    # logging
    wandb_log = False  # send metrics.jsonl to Weights & Biases too
    wandb_project: NotEmpty = "trm"  # in your default entity, or WANDB_ENTITY
    wandb_run_name = ""  # empty: the last part of out_dir
    wandb_mode: one_of(["online", "offline", "disabled"]) = "online"  # offline: for `wandb sync`


# A resume takes these settings from the command. It takes all others from the checkpoint, unless a config
# file or a flag assigns them. checkpoint_interval is among the others, since sequences restart there.
RUN_SETTINGS = (
    "data_prepare", "out_dir", "gcs_dir", "init_from", "keep_last_n", "log_interval",
    "stall_timeout", "device", "compile", "eval_only", "eval_save_outputs",
    "wandb_log", "wandb_project", "wandb_run_name", "wandb_mode",
)


def recipe(settings):
    """Returns the settings, of {name: value}, that affect the result."""
    return {name: value for name, value in settings.items() if name not in RUN_SETTINGS}


# ---------------------------------------------------------------------------------------------------------
# The state of training

# A step changes run.state: trees of tensors, float32 but for the sequences. A copy or a fork may add others.
STATE = (
    "weights",  # {name: tensor}, the parameters
    "ema",  # {name: tensor}, their average; {} with ema=False
    "optimizer",  # {name: what optim.optimizer_state returns}
    "puzzle_emb",  # [N, D'], the table of the puzzle embedding
    "sequences",  # see TRM.new_sequences; a resume begins them and all below anew
    "log_sums",  # [1] each, sums since the last log line; METRICS over halted sequences, LOSS_TERMS over all
    "grad_norms",  # [1], sum of the gradient norms since then
)


class Run:
    """What trains on one device: the model, the state of training, and the compiled train and eval steps.

    Functions call it `run`. state: see STATE. saved: a checkpoint, whose EMA and optimizer state it takes.
    """

    def __init__(self, settings, trm, device, saved=None):
        self.settings = settings
        self.model = trm
        self.device = device
        self.batch_size = settings.global_batch_size // device.world  # of this replica
        self.dtype = getattr(torch, settings.forward_dtype)
        # the FLOPs of a training step at a depth, (H_cycles, L_cycles); without one at the full depth
        self.flops_per_example = functools.cache(functools.partial(flops_per_example, trm))
        self.micro_batch_size = device.choose_micro_batch_size(settings, self.flops_per_example())
        # rank 0's state and buffers on all ranks; steps use the weights of run.state, not the model's own
        shared = device.broadcast(dict(state=self.first_state(saved or {}), buffers=self.buffers()))
        self.state = device.put(shared["state"])
        self.load_buffers(shared["buffers"])
        device.prepare(trm)  # moves it there
        if trm.has_puzzle_emb:
            trm.puzzle_emb.weights = trm.puzzle_emb.weights.to("meta")  # two tables would not fit
        self.restart_sequences()
        # the programs
        self.supervision_step = device.compile(trm.call_with)
        self.train_step = device.compile_step(functools.partial(train_step, self))
        self.evaluator = evaluate.Evaluator(settings, trm, device, self.batch_size, self.micro_batch_size)

    def first_state(self, saved):
        """Returns the state before the first step, on the host."""
        weights, puzzle_emb = evaluate.weights_of(self.model)
        average = saved.get("ema") or weights
        optimizer = {name: optim.optimizer_state(self.settings, name, w) for name, w in weights.items()}
        return dict(
            weights=weights,
            ema={name: average[name] for name in weights} if self.settings.ema else {},
            optimizer=optimizer | saved.get("optimizer", {}),
            puzzle_emb=puzzle_emb,
        )

    def buffers(self):
        """Returns the tensors that are saved but not trained, {name: tensor}."""
        trained = {*self.model.weights(), "puzzle_emb.weights"}
        return {name: t for name, t in self.model.state_dict().items() if name not in trained}

    def load_buffers(self, buffers):
        """Gives the model rank 0's buffers, {name: tensor}, of a broadcast. All ranks."""
        # the broadcast rounded them to float32, so a fork's buffers of other types come once more; without
        # any there is no all_gather, which scripts/aot.py could not do with its one replica
        others = {name: t for name, t in self.buffers().items() if t.dtype != torch.float32}
        if others:
            buffers = buffers | self.device.all_gather(others)[0]
        self.model.load_state_dict(buffers, strict=False)

    def restart_sequences(self):
        """Lets all sequences count as halted, so that the next step gives them new puzzles."""
        self.state |= self.device.put(dict(sequences=self.model.new_sequences(self.batch_size, self.dtype)))
        self.restart_sums()

    def restart_sums(self):
        # torch_xla would take tensors without dimensions for constants
        log_sums = {name: torch.zeros(1) for name in (*model.METRICS, *model.LOSS_TERMS)}
        self.state |= self.device.put(dict(log_sums=log_sums, grad_norms=torch.zeros(1)))

    def restore_kept(self, saved):
        """Gives all ranks what a copy or a fork has added to the state of rank 0's checkpoint. All ranks."""
        kept = self.device.all_gather(saved.get("kept", {}))[0]
        self.state |= self.device.put({name: tree for name, tree in kept.items() if name in self.state})

    def evaluate(self, test_set, indices, title, save_to=""):
        """Returns the values of evaluate.evaluate(), with this run's weights; {} once a stop is requested."""
        def should_stop():
            restart_watchdog(self.settings.stall_timeout)  # to ask is a sign of progress
            return STOP.is_set()

        try:
            return evaluate.evaluate(
                self.evaluator, *self.eval_weights(), test_set, indices, title, should_stop, save_to)
        except StepDropped:
            return {}

    def eval_weights(self):
        """Returns the weights that evaluations use, and the puzzle embedding."""
        return self.state["ema"] or self.state["weights"], self.state["puzzle_emb"]

    def take_means(self, num_steps):
        """Returns {"train/loss": ...}, means over the num_steps steps since the last call."""
        sums = {name: float(total.cpu()) for name, total in self.state["log_sums"].items()}
        means = {}
        # LOSS_TERMS count in all sequences, METRICS in those that halted, whose number is "count"
        for name in model.LOSS_TERMS:
            means[f"train/{name}"] = sums[name] / (num_steps * self.settings.global_batch_size)
        for name in model.METRICS:
            if name != "count" and sums["count"]:
                means[f"train/{name}"] = sums[name] / sums["count"]
        means["train/grad_norm"] = float(self.state["grad_norms"].cpu()) / num_steps
        self.restart_sums()
        return means

    def state_dict(self):
        """Returns a copy on the host of what a checkpoint needs; weights and ema are state dicts of TRM."""
        # both state dicts have the buffers and the puzzle embedding
        others = self.buffers()
        if self.model.has_puzzle_emb:
            others["puzzle_emb.weights"] = self.state["puzzle_emb"]
        saved = dict(
            weights=self.state["weights"] | others,
            ema=self.state["ema"] and self.state["ema"] | others,
            optimizer=self.state["optimizer"],
            kept={name: tree for name, tree in self.state.items() if name not in STATE},  # what was added
        )
        # a file holds a tensor of both once
        copied = functools.cache(lambda t: t.to("cpu", copy=True))
        return tree_map(copied, saved)


# ---------------------------------------------------------------------------------------------------------
# The step

@torch.no_grad()
def train_step(run, state, inputs, cycles):
    """Runs one optimizer step, in place on state. On XLA it is one program with one all-reduce.

    All ranks must call it, and every function that says "All ranks": each waits for the others.

    Args:
        run: a Run, for its settings, model and device.
        state: run.state; while XLA captures the program, placeholders take the place of its tensors.
        inputs: see make_inputs.
        cycles: (H_cycles, L_cycles).

    Returns the number of ranks that were asked to stop, [1].
    """
    settings = run.settings
    has_puzzle_emb = run.model.has_puzzle_emb
    run.model.train()

    # cast the float32 weights to forward_dtype, once a step
    weights = run.device.cast_weights(state["weights"], run.dtype)

    # sequences that have halted begin with new puzzles, and all take their rows of the puzzle embedding
    sequences = model.take_new_puzzles(state["sequences"], inputs["puzzles"])
    identifiers = sequences["puzzle_identifiers"]
    batch = dict(sequences=sequences, min_halt_steps=inputs["min_halt_steps"])
    if has_puzzle_emb:
        batch["puzzle_rows"] = state["puzzle_emb"][identifiers]

    # forward and backward, one micro-batch after the other; gradients and statistics add up
    zeros = tree_map(torch.zeros_like, dict(grads=state["weights"], stats=state["log_sums"]))
    body = functools.partial(forward_backward, run, cycles)
    sums, each_sequence = run.device.for_each_micro_batch(body, zeros, weights, batch, run.micro_batch_size)
    tree_map(torch.Tensor.copy_, state["sequences"], each_sequence["sequences"])

    # the division by the batch comes here and not in the loss, where gradients would underflow in float16
    sums["grads"] = {name: grad / settings.global_batch_size for name, grad in sums["grads"].items()}
    if has_puzzle_emb:
        sums["rows"] = optim.pack_rows(identifiers, each_sequence["row_grads"], len(state["puzzle_emb"]),
                                       settings.global_batch_size, inputs["rank"])

    # one all-reduce of all that the ranks share; the gradients are then those of the global batch
    sums["stops"] = inputs["stop_requested"]
    totals = run.device.all_reduce(sums)
    grad_norm = optim.norm(totals["grads"])

    # update the weights
    rates = inputs["rates"]
    if not settings.freeze_weights:
        optim.update(settings, rates, state["weights"], totals["grads"], state["optimizer"])
    # move their average (EMA) towards them; there is none with ema=False
    for name, average in state["ema"].items():
        average.lerp_(state["weights"][name], 1 - settings.ema_rate)
    # update the rows of the puzzle embedding that the batch has
    if has_puzzle_emb:
        optim.sign_sgd(state["puzzle_emb"], totals["rows"], rates["puzzle_emb_lr"],
                       settings.puzzle_emb_weight_decay)

    # add up what the log needs
    for name, total in totals["stats"].items():
        state["log_sums"][name] += total
    state["grad_norms"] += grad_norm
    return totals["stops"].clone()  # a view would keep all of the reduced numbers alive


def forward_backward(run, cycles, weights, micro_batch):
    """Runs forward and backward on the b sequences of micro_batch, with weights in forward_dtype.

    micro_batch: sequences, min_halt_steps [b] and, with a puzzle embedding, puzzle_rows [b, D']. Returns
    dict(grads={name: float32}, stats={name: [1]}), to add up, and dict(sequences, row_grads [b, D']).
    """
    # the gradients are of the weights and of the rows of the puzzle embedding that the batch has
    leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
    parameters = list(leaves.values())
    puzzle_rows = None
    if run.model.has_puzzle_emb:
        puzzle_rows = micro_batch["puzzle_rows"].detach().requires_grad_()
        parameters.append(puzzle_rows)

    # TRM.forward with these weights; zeros for a parameter that does not take part in a fork's loss
    with torch.enable_grad():
        result = run.supervision_step(
            leaves, micro_batch["sequences"], puzzle_rows, micro_batch["min_halt_steps"], cycles)
        check_values(result.values, [*run.state["log_sums"]], len(micro_batch["min_halt_steps"]))
        grads = torch.autograd.grad(result.values["loss"].sum(), parameters, materialize_grads=True)

    # micro-batches add up in float32
    each_sequence = dict(sequences=result.sequences)
    if run.model.has_puzzle_emb:
        each_sequence["row_grads"] = grads[-1].float()
    grads = {name: grad.float() for name, grad in zip(leaves, grads)}

    # sum up for the log: METRICS count sequences that halted, LOSS_TERMS all
    stats = {}
    for name in run.state["log_sums"]:
        values = result.values[name].detach()
        if name in model.METRICS:
            values = torch.where(result.sequences["halted"], values, 0)
        stats[name] = values.sum(0, keepdim=True)
    return dict(grads=grads, stats=stats), each_sequence


def make_inputs(run, train_set, step, total_steps):
    """Returns this rank's inputs of a step. The seed and the step decide the inputs of all ranks together."""
    settings = run.settings
    device = run.device
    batch_size = settings.global_batch_size
    # a puzzle for each sequence, which those that have not halted ignore
    batch = train_set.train_batch(settings.seed, step, batch_size, device.rank, device.world)
    # the step before which each sequence may not halt
    exploration = optim.exploration(settings, step, total_steps)
    min_halt_steps = data.halting_draws(
        settings.seed, step, batch_size, settings.halt_max_steps, exploration, device.rank, device.world)
    # numbers that change by step are inputs: a constant would compile anew at each step
    rates = optim.rates_at(settings, step, total_steps)
    return device.put(dict(
        puzzles=batch,
        min_halt_steps=min_halt_steps,
        rates={name: np.float32([rate]) for name, rate in rates.items()},
        stop_requested=np.float32([STOP.is_set()]),
        rank=np.int32([device.rank]),
    ))


# ---------------------------------------------------------------------------------------------------------
# The loop

def train_loop(run, train_set, test_set, log, checkpoints, start, total_steps):
    """Trains from start.step to the end or until a stop is requested; returns the step reached. All ranks.

    train_set, test_set: Datasets. log: a Log. checkpoints: a Checkpoints. start: a checkpoint.Start.
    """
    settings = run.settings
    examples_per_epoch = optim.official_epoch_examples(train_set)
    checkpoint_interval = settings.checkpoint_interval or total_steps
    step = start.step
    # a run that begins with a checkpoint may evaluate it first, unless the log has its evaluation
    eval_due = False
    if start.path and not start.evaluation:
        eval_due = optim.evaluation_due(settings, examples_per_epoch, step)
    last_cycles = None  # (H_cycles, L_cycles) of the last step
    metrics = {}  # the last line of the log
    read_stops = run.device.fetch(torch.zeros(1))  # waits for the last step's number of requests to stop

    log.restart_clock(step)
    while step < total_steps:
        # evaluate, before the next step: a resume then makes up for an evaluation that was interrupted
        if eval_due:
            indices = test_set.subset(settings.eval_max_puzzles, settings.eval_versions)
            evaluation = run.evaluate(test_set, indices, f"evaluating at step {step}")
            if not evaluation:  # a stop was requested
                break
            check_finite(settings, f"loss not finite in the evaluation at step {step}",
                         evaluation["eval/loss"])
            # the line comes last: a resume does not repeat an evaluation that has one
            checkpoints.save_if_best(step, metrics | evaluation)
            log.write_evaluation(step, evaluation)
            log.restart_clock(step)

        # forward, backward, update, at the depth of this step
        cycles = optim.cycles_at(settings, examples_per_epoch, step)
        inputs = make_inputs(run, train_set, step, total_steps)
        try:
            stops = run.train_step(run.state, inputs, cycles)
        except StepDropped:
            break
        step += 1
        restart_watchdog(settings.stall_timeout)
        # the first step at a depth, which may compile, is left out of the rates
        if cycles != last_cycles:
            log.first_step(step, cycles, stops)
            last_cycles = cycles

        # stop if a rank was asked to before the last step: waiting for this one would leave the device idle
        num_stops = read_stops()
        read_stops = run.device.fetch(stops)
        if num_stops > 0:
            break

        # what is due depends only on the step, so that all ranks decide the same
        eval_due = optim.evaluation_due(settings, examples_per_epoch, step)
        save_due = step % checkpoint_interval == 0 and step < total_steps
        # a line of the log has one depth
        depth_ends = optim.cycles_at(settings, examples_per_epoch, step) != cycles
        if eval_due or save_due or depth_ends or step % settings.log_interval == 0:
            metrics = log_steps(run, log, step, total_steps, cycles)  # waits for the device
            # a run that resumes starts all sequences afresh here, so this one does too
            if save_due:
                checkpoints.save(step, metrics)
                run.restart_sequences()
            log.restart_clock(step)

    # the end, or a stop
    if step > log.step:
        metrics = log_steps(run, log, step, total_steps, cycles)
    checkpoints.save(step, metrics)
    return step


def log_steps(run, log, step, total_steps, cycles):
    """Logs the means of the steps since the last line, at a depth (H_cycles, L_cycles); see check_finite."""
    values = run.take_means(step - log.step)
    check_finite(run.settings, f"loss or gradient not finite between steps {log.step + 1} and {step}",
                 values["train/loss"], values["train/grad_norm"])
    lr = optim.rates_at(run.settings, step - 1, total_steps)["lr"]
    return log.write_train(step, total_steps, values, lr, run.flops_per_example(cycles))


def check_finite(settings, what, *values):
    """Raises UserError unless all values are finite: a restart would repeat them. what: begins its text."""
    if not all(map(math.isfinite, values)):
        last_good = newest_complete(settings.out_dir) or "none"
        raise UserError(f"{what}: lower lr, or begin a new run with an earlier checkpoint; the last good "
                        f"one: {last_good}")


def train_and_evaluate(run, train_set, test_set, log, checkpoints, start, total_steps):
    """Trains, saves, evaluates and uploads; returns True once all of that is done. All ranks."""
    settings = log.settings  # as asked for; run.settings has the dtype of this device
    is_complete = start.step == total_steps and "final" in start.evaluation
    if is_complete:
        log.print0(f"{settings.out_dir} is complete at step {start.step}: --eval_only evaluates it again, "
                   "higher max_steps or epochs continue it")
    else:
        log.begin(run, train_set, checkpoints.run_id, recipe(vars(settings)), total_steps)
        began = time.monotonic()
        step = train_loop(run, train_set, test_set, log, checkpoints, start, total_steps)
        # all ranks leave together: one that went on to the evaluation would wait for rank 0 forever
        if not all(run.device.all_gather(checkpoints.is_written)):
            sys.exit(1)
        if step < total_steps:
            saved = f"checkpoint saved in {settings.out_dir}" if step else "before its end, nothing to save"
            log.print0(f"stopped at step {step}, {saved}; {TO_CONTINUE}")
        else:
            log.print0(f"trained {step - start.step} steps in {duration(time.monotonic() - began)}")
            is_complete = final_evaluation(run, test_set, log, checkpoints, step)

    # finish the upload, whose time limit is its own; a slice may be deleted once its run is complete
    restart_watchdog(0)
    is_uploaded = checkpoints.close(600 if is_complete else 15)
    if not (is_uploaded and checkpoints.is_written) and not STOP.is_set():
        sys.exit(1)
    return is_uploaded and is_complete


def final_evaluation(run, test_set, log, checkpoints, step):
    """Logs an evaluation in full; returns False if it was stopped, or best.pt cannot be written."""
    indices = test_set.subset(run.settings.eval_final_max_puzzles)
    # the arrays of eval_save_outputs and ARC's answers go beside the checkpoint that they belong to
    values = run.evaluate(test_set, indices, "final evaluation", f"eval_{step:08d}")
    if not values:
        log.print0("final evaluation stopped; the same command starts it again")
        return False
    check_finite(run.settings, "loss not finite in the final evaluation", values["eval/loss"])
    if checkpoints:  # not with eval_only: best.pt is of the training run
        checkpoints.save_if_best(step, values)
        if not checkpoints.is_written:
            return False
    # "final" marks the run as complete
    log.write_evaluation(step, {"final": True, **values})
    return True


# ---------------------------------------------------------------------------------------------------------
# A replica

def replica(settings, device_type):
    """Runs one replica from its start to its end, with the command's settings.

    Exits with 3 if a stop came before the run and its upload were complete, with 1 if a file was not saved.
    """
    # the device, and where the run begins; downloads take time, so that the watchdog waits until all is here
    device = open_device(device_type, settings)
    restart_watchdog(0)
    start, saved = checkpoint.open_start(settings, device)
    settings = checkpoint.settings_of(start, settings, RUN_SETTINGS)
    check_batch_size(settings, device)
    # `settings` is what was asked for, which checkpoints keep; `device_settings` has the dtype of this device
    device_settings = copy.copy(settings)
    device_settings.forward_dtype, dtype_note = device.choose_dtype(settings.forward_dtype)

    # data, model, and its weights; data_path stays an address, for a resume on another machine
    train_set, test_set = data.load(data.get_dataset(settings, STOP.is_set))
    puzzles.kind_of(test_set.task).check_attempts(settings.eval_attempts)
    total_steps = length_of(settings, train_set, start)
    trm = new_model(device_settings, train_set)
    if settings.freeze_weights and not trm.has_puzzle_emb:
        raise UserError("freeze_weights trains the puzzle embedding alone, and puzzle_emb_ndim is 0")
    check_ranks(device_settings, train_set, device)
    checkpoint.check_hosts(start, settings, device)
    notes = device.call_on_rank_0(lambda: load_start(start, saved, settings, trm, train_set)) or []
    restart_watchdog(settings.stall_timeout)
    with errors.reporting_full_memory():
        run = Run(device_settings, trm, device, saved)
    run.restore_kept(saved)
    saved.clear()  # frees its memory

    log = Log(settings, device, start.step)
    device.report = log.within_step
    opened = nullcontext()
    if not settings.eval_only:  # the run writes to out_dir
        opened = checkpoint.Checkpoints(start, settings, run, train_set, test_set, puzzles.score, log.print0)
    with log, opened as checkpoints, errors.reporting_full_memory(run.micro_batch_size):
        log.header(trm, train_set, test_set, [dtype_note, *notes])
        if settings.eval_only:
            is_complete = final_evaluation(run, test_set, log, None, start.step)
        else:
            is_complete = train_and_evaluate(run, train_set, test_set, log, checkpoints, start, total_steps)
    if not is_complete:
        sys.exit(3)


def new_model(settings, dataset):
    """Returns a TRM with its first weights for a dataset. Raises UserError if it cannot be built."""
    if settings.mlp_t and settings.pos_encodings == "rope" and "pos_encodings" in settings.assigned:
        raise UserError("pos_encodings=rope needs self-attention: add --mlp_t=False")
    with MODEL_LOCK, torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)  # for modules that init_weights does not touch
        try:
            return model.TRM(
                settings, seq_len=dataset.seq_len, vocab_size=dataset.vocab_size,
                num_puzzle_identifiers=dataset.num_puzzle_identifiers, task=dataset.task)
        except (ValueError, RuntimeError) as e:  # RuntimeError: more memory than there is
            raise UserError(one_line(e)) from None


def length_of(settings, train_set, start):
    """Returns the length of the run in steps. Raises UserError where the run cannot have it."""
    total_steps = optim.count_steps(settings, optim.official_epoch_examples(train_set))
    if total_steps < 1 and not settings.eval_only:
        raise UserError(f"epochs={settings.epochs} of {train_set.total_groups} puzzles are less than one "
                        f"batch of global_batch_size={settings.global_batch_size}")
    if start.is_resume and start.step > total_steps:
        raise UserError(f"{start.path} is past the {total_steps} steps of this run: raise max_steps, epochs")
    return total_steps


# ---------------------------------------------------------------------------------------------------------
# The command

def spawned_replica(settings, device_type):
    """Runs replica(). If it breaks, its process ends: its peers would wait for it forever."""
    try:
        replica(settings, device_type)
    except (UserError, TransientError, SystemExit):  # every rank of the host raises these
        raise
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def main(settings):
    """Checks how the run begins, and runs a replica on each device."""
    check_start_settings(settings)  # before anything takes time
    # from here on a signal requests a stop
    with process.contained():
        device_type, reason = choose_device(settings.device)
        if os.environ.get("RANK", "") in ("", "0"):
            check_login(settings)
            print(f"device {device_type}: {reason}", flush=True)
        spawn = spawner(device_type)
        if not spawn:
            replica(settings, device_type)
            return
        try:
            with process.watching_replicas():
                spawn(configurator.Spawned(spawned_replica, Settings, settings, device_type))
        except BrokenProcessPool:
            raise TransientError(f"a replica died, see above if it said why; {TO_CONTINUE}") from None


# Forks import "train", which must be the file that runs: a copy too, such as mine.py. In the processes of
# spawner(), multiprocessing runs it once more, under the name "__mp_main__".
if __name__ in ("__main__", "__mp_main__"):
    sys.modules["train"] = sys.modules[__name__]
if __name__ == "__main__":
    configurator.start(main, Settings)
