"""Trains a Tiny Recursive Model (arXiv 2510.04871) on a TPU, a CUDA GPU or the CPU.

    python train.py config/demo.py                          6x6 Sudoku, made on the spot, solved in 3 minutes on 2 cores
    python train.py config/sudoku.py --device=cuda          the paper's Sudoku-Extreme, after python prepare_sudoku.py
    python train.py config/sudoku.py --init_from=resume     goes on from the newest checkpoint of out_dir

Settings below are the paper's Sudoku-Extreme recipe (MLP); config files and --key=value flags override them.
"""
import atexit
import glob
import importlib.util
import inspect
import json
import math
import os
import platform
import queue
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
from fractions import Fraction

import numpy as np
import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from configurator import UserError, read_settings, start
from data import Bucket, BucketError, Dataset, Progress, file_sha256, halting_draws, local_dataset, path_metrics
from model import IGNORE_LABEL, METRICS, TRM, TRMConfig, adam_atan2, adamw, learning_rate, lion, muon, sign_sgd, supervision_step

# data
data_path = "data/sudoku-extreme-1k-aug-1000"  # a data set that a prepare script or the official builder wrote, or its gs:// address
data_prepare = ""  # command that makes data_path where it is missing ("prepare_sudoku.py --size=6 ...")
global_batch_size = 768  # sequences a step, over all replicas
micro_batch_size = 0  # sequences at a time on a replica, their gradients summed; 0: its whole batch
recompute = False  # the backward pass computes each layer's activations again: far less memory, a fifth more arithmetic
epochs = 50000  # an epoch shows each puzzle once, in one of its augmented copies
max_steps = 0  # stop after so many steps; 0: from epochs
# model
hidden_size = 512  # D
num_heads = 8  # of the attention
expansion = 4.0  # hidden width of the SwiGLUs, before the 2/3 of gating
L_layers = 2  # layers of the one network
H_cycles = 3  # T of the paper: recursions a step; all but the last without gradient
L_cycles = 6  # n of the paper: latent updates a recursion
curriculum_epochs = 0  # training grows from the two below to full depth over so many epochs; evaluation is always at full depth
H_cycles_start = 1  # of the curriculum
L_cycles_start = 2  # of the curriculum
mlp_t = True  # True: an MLP mixes the positions; False: self-attention
pos_encodings = "none"  # none, rope (attention only) or learned
puzzle_emb_ndim = 512  # width of the puzzle embedding; 0: none
puzzle_emb_len = 16  # positions it takes; 0: as many as it fills
forward_dtype = "bfloat16"  # bfloat16, float32 or float16; weights, optimizer and loss stay float32
# halting
halt_max_steps = 16  # supervision steps a sequence gets at most
halt_exploration_prob = 0.1  # share of steps at which a sequence must go on to a random depth
halt_exploration_prob_end = -1.0  # what that comes to at the run's end, linearly; -1: constant
# optimizer
loss_type = "stablemax_cross_entropy"  # or softmax_cross_entropy
optimizer = "adam_atan2"  # adam_atan2, adamw, lion or muon (adam_atan2 for what is not a matrix of the network)
lr = 1e-4  # peak
lr_min_ratio = 1.0  # the cosine's end, as a share of lr; 1: constant
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
eval_max_puzzles = 4096  # fixed pseudo-random subset of the test set for evaluations on the way; 0: the whole of it
eval_final_max_puzzles = 0  # the same for the one at the end
eval_halt_max_steps = 0  # supervision steps at evaluation; 0: halt_max_steps
eval_save_outputs = ""  # of inputs,labels,preds,q_halt_logits: saved to out_dir/eval_STEP.npz by the evaluation at the end
eval_show_puzzle = False  # end by printing an unseen puzzle and its answers after steps 1, 2, 4, ...
eval_only = False  # evaluate as at the end, then stop
# run
out_dir = "out/sudoku"  # checkpoints, metrics.jsonl, log.txt
gcs_dir = ""  # gs://bucket/folder of this run alone: gets a copy of these, from which another machine goes on
init_from = "scratch"  # scratch, resume, auto (resume where there is a checkpoint), or a checkpoint file, ours or official
checkpoint_interval = 1000  # steps; sequences start afresh there, so that a resumed run equals one that was not interrupted
keep_last_n = 3  # checkpoints kept, besides best.pt
export_official = ""  # write the evaluated weights to this file under the official code's names, then stop
log_interval = 10  # steps averaged in a line of the log
device = "auto"  # auto, xla, cuda or cpu
compile = "auto"  # torch.compile: auto (on CUDA), on (on the CPU too: a minute at first, then a tenth faster) or off
# logging
wandb_log = False  # metrics.jsonl's numbers go to Weights & Biases too
wandb_project = "trm"  # in your default entity, or WANDB_ENTITY
wandb_run_name = ""  # empty: the last part of out_dir
wandb_mode = "online"  # online, offline (wandb sync uploads it later) or disabled; without login or network: offline
# ---

CHOICES = dict(pos_encodings=("none", "rope", "learned"), forward_dtype=("bfloat16", "float32", "float16"),
               loss_type=("stablemax_cross_entropy", "softmax_cross_entropy"), optimizer=("adam_atan2", "adamw", "lion", "muon"),
               device=("auto", "xla", "cuda", "cpu"), wandb_mode=("online", "offline", "disabled"), compile=("auto", "on", "off"))
POSITIVE = ("global_batch_size", "hidden_size", "num_heads", "expansion", "L_layers", "H_cycles", "L_cycles", "halt_max_steps",
            "lr", "log_interval", "keep_last_n")
NOT_NEGATIVE = ("micro_batch_size", "epochs", "max_steps", "puzzle_emb_ndim", "puzzle_emb_len", "lr_min_ratio", "lr_warmup_steps",
                "weight_decay", "puzzle_emb_lr", "puzzle_emb_weight_decay", "seed", "eval_interval", "eval_max_puzzles", "eval_final_max_puzzles",
                "eval_halt_max_steps", "checkpoint_interval", "curriculum_epochs")
BELOW_ONE = ("beta1", "beta2", "ema_rate")  # and at least 0
STOP_FILE = "TRM_STOP_FILE"  # environment variable: the file that asks all processes of this host to save and stop
OUTPUTS = ("inputs", "labels", "preds", "q_halt_logits")
OFFICIAL_PREFIX = "_orig_mod.model.inner."
# dense bfloat16 FLOP/s of a chip, as its maker states them: for perf/mfu
PEAK_FLOPS = {"TPU v4": 275e12, "TPU v5lite": 197e12, "TPU v5p": 459e12, "TPU v6e": 918e12, "A100": 312e12, "H100": 989e12, "H200": 989e12,
              "L40S": 362e12}
STATS = METRICS + ("grad_norm", "stop", "seconds")  # what a step adds up; all but grad_norm are sums over replicas too


def check_settings(c):
    """Raises UserError for the first value that no run could use."""
    for name, choices in CHOICES.items():
        if getattr(c, name) not in choices:
            raise UserError(f"{name} must be one of {', '.join(choices)}, not {getattr(c, name)!r}")
    for name in POSITIVE + NOT_NEGATIVE + BELOW_ONE:
        value = getattr(c, name)
        if not math.isfinite(value) or value < 0 or (name in POSITIVE and value == 0) or (name in BELOW_ONE and value >= 1):
            need = "above 0" if name in POSITIVE else "from 0 to below 1" if name in BELOW_ONE else "0 or more"
            raise UserError(f"{name} must be {need}, not {value}")
    if not 0 <= c.halt_exploration_prob <= 1:
        raise UserError(f"halt_exploration_prob must be from 0 to 1, not {c.halt_exploration_prob}")
    if not 0 <= c.halt_exploration_prob_end <= 1 and c.halt_exploration_prob_end != -1:
        raise UserError(f"halt_exploration_prob_end must be from 0 to 1, or -1 (constant), not {c.halt_exploration_prob_end}")
    for name in ("H_cycles", "L_cycles") if c.curriculum_epochs else ():
        if not 1 <= getattr(c, name + "_start") <= getattr(c, name):
            raise UserError(f"{name}_start must be from 1 to {name} ({getattr(c, name)}), not {getattr(c, name + '_start')}")
    if not c.epochs and not c.max_steps:
        raise UserError("epochs and max_steps are both 0: set one of them")
    wrong = [k for k in c.eval_save_outputs.split(",") if k and k not in OUTPUTS]
    if wrong:
        raise UserError(f"eval_save_outputs: unknown {wrong[0]!r}; choose from {','.join(OUTPUTS)}")
    for name in ("data_path", "out_dir", "init_from", "wandb_project"):
        if not getattr(c, name):
            raise UserError(f"{name} must not be empty")
    if set(c.wandb_project) & set("/\\#?%:") or len(c.wandb_project) > 128:
        raise UserError(f"wandb_project must have at most 128 characters and none of /\\#?%:, not {c.wandb_project!r}")
    if c.gcs_dir:
        Bucket(c.gcs_dir)
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # where torch.compile looks for it
    if c.compile == "on" and not shutil.which(compiler):
        raise UserError(f"--compile=on needs a C++ compiler and finds no {compiler!r} (CXX names another): --compile=auto does without on a CPU")
    if c.seed >= 2 ** 63:
        raise UserError(f"seed must be below 2**63, not {c.seed}")
    for name in ("eval_only", "export_official"):
        if getattr(c, name) and c.init_from == "scratch":
            raise UserError(f"{name} needs weights: --init_from=resume (the newest checkpoint of out_dir) or --init_from=FILE")
    if os.path.lexists(c.export_official):
        raise UserError(f"--export_official={c.export_official}: exists already; choose another name")
    for name, folder in (("out_dir", c.out_dir), ("export_official", os.path.dirname(c.export_official) if c.export_official else ".")):
        above = os.path.abspath(folder)
        while name == "out_dir" and not os.path.lexists(above):
            above = os.path.dirname(above)
        if not os.path.isdir(above) or not os.access(above, os.W_OK):
            raise UserError(f"--{name}={getattr(c, name)}: {above} is not a folder that can be written to")


# Hardware.

def tpu_chips():
    """TPU chips of this host. Imports torch_xla only where the PCI bus has something of Google's: on import it chooses a device."""
    vendors = []
    for path in glob.glob("/sys/bus/pci/devices/*/vendor"):
        with open(path) as f:
            vendors.append(f.read().strip())
    if "0x1ae0" not in vendors:
        return 0
    chosen = os.environ.setdefault("PJRT_DEVICE", "TPU")
    from torch_xla._internal import tpu
    chips = tpu.num_available_chips()  # network cards of Google's clouds have that vendor too
    if not chips and chosen == "TPU":
        del os.environ["PJRT_DEVICE"]
    return chips


def choose_device(wanted):
    """Returns ("xla", "cuda" or "cpu", the reason in words); raises UserError where the wanted one is not there."""
    pjrt, installed = os.environ.get("PJRT_DEVICE"), importlib.util.find_spec("torch_xla") is not None
    chips = tpu_chips() if installed and wanted in ("xla", "auto") else 0
    if wanted == "xla" or wanted == "auto" and (pjrt or chips):
        if not installed:
            raise UserError(f"--device={wanted}: torch_xla is not installed: pip install -r requirements.txt")
        if pjrt == "CPU":
            os.environ.setdefault("XLA_THREAD_POOL_SIZE", "16")  # replicas that outnumber its threads would wait for each other forever
            return "xla", "PJRT_DEVICE=CPU"
        if pjrt not in (None, "", "TPU"):
            raise UserError(f"PJRT_DEVICE={pjrt}: must be TPU or CPU, or unset")
        if not chips:
            raise UserError(f"--device={wanted}: no TPU on this machine; PJRT_DEVICE=CPU in the environment runs torch_xla on the CPU")
        os.environ["PJRT_DEVICE"] = "TPU"
        return "xla", f"{chips} TPU chips on this host"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("--device=cuda: torch sees no CUDA GPU; --device=cpu trains on the CPU")
    if wanted == "cuda" or wanted == "auto" and torch.cuda.is_available():
        return "cuda", torch.cuda.get_device_name()
    return "cpu", "asked for" if wanted == "cpu" else "no TPU and no GPU found"


class Recomputed(torch.autograd.Function):
    """fn(*tensors), computed once more in the backward pass: of its activations none is kept. fn returns one tensor."""

    @staticmethod
    def forward(ctx, barrier, fn, *tensors):
        ctx.barrier, ctx.fn = barrier, fn
        ctx.save_for_backward(*tensors)
        return fn(*tensors)

    @staticmethod
    def backward(ctx, grad):
        *tensors, grad = ctx.barrier([*ctx.saved_tensors, grad])
        leaves = [t.detach().requires_grad_() for t in tensors]
        with torch.enable_grad():
            return None, None, *torch.autograd.grad(ctx.fn(*leaves), leaves, grad)


class NotReplayable(Exception):
    """A step cannot be captured once and replayed; the message names the operation and its line."""


class Replayable(TorchDispatchMode):
    """Raises NotReplayable ahead of an operation that needs values, of which a capture has none (torch_xla would crash), or that XLA
    leaves to the host, or that draws random numbers, which every replay would repeat."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, aten, why = kwargs or {}, torch.ops.aten, ""
        lowered = any(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)
                      for key in ("XLA", "CompositeExplicitAutograd", "CompositeImplicitAutograd"))
        on_xla = any(torch.is_tensor(t) and t.device.type == "xla" for t in tree_flatten((args, kwargs))[0])
        if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_):
            why = "has a shape that depends on data" if any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]) else ""
        elif {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
            why = "has a value or a shape that depends on data"
        elif on_xla and not lowered:
            why = "is not among XLA's operations"
        elif on_xla and torch.device(kwargs.get("device") or "meta").type == "cpu":
            why = "reads from the device"
        elif torch.Tag.nondeterministic_seeded in func.tags:
            why = "draws random numbers"
        if why:
            here = [f for f in traceback.extract_stack() if os.path.dirname(f.filename) == os.path.dirname(os.path.abspath(__file__))]
            name = func.name().removeprefix("aten::").replace("_local_scalar_dense", "item")
            place = [f for f in here if f.filename != os.path.abspath(__file__)] or here
            raise NotReplayable(f"{os.path.basename(place[-1].filename)}:{place[-1].lineno}: {name} {why}")
        return func(*args, **kwargs)


LAUNCH = threading.Lock()  # of XLA replicas that are threads: one compiles, the others find the program in the cache


class Device:
    """The seam to the hardware and to the other replicas: everything that knows torch_xla, CUDA or torch.distributed.

    kind: xla, cuda or cpu. rank of world replicas, each with its share of the global batch; local_rank on this host.
    """

    def __init__(self, kind):
        self.kind, self.rank, self.world, self.name, self.say = kind, 0, 1, platform.processor() or platform.machine(), print
        self.host, self.local_rank = int(os.environ.get("GROUP_RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))  # torchrun's
        if kind == "xla":
            import torch_xla
            import torch_xla.core.xla_builder as xb
            import torch_xla.core.xla_model as xm
            import torch_xla.debug.metrics
            import torch_xla.runtime as xr
            self.xla, self.xb, self.xm, self.metrics, self.torch = torch_xla, xb, xm, torch_xla.debug.metrics, torch_xla.device()
            self.rank, self.world = xr.global_ordinal(), xr.world_size()
            self.host, self.local_rank = divmod(self.rank, xr.local_process_count() * xr.addressable_device_count())
            self.threads = self.world > 1 and os.environ["PJRT_DEVICE"] == "CPU"
            self.programs, self.traces = {}, False  # traces: whether a step that cannot be replayed is under way
            # The backward pass stays on this thread: one of its own could still hold gradients when the step ends, and what is
            # alive then becomes an output of the program, so another program to compile.
            torch.autograd.set_multithreading_enabled(False)
            if os.environ["PJRT_DEVICE"] == "TPU":
                from torch_xla._internal import tpu
                self.name = "TPU " + (os.environ.get("TPU_ACCELERATOR_TYPE") or tpu.get_tpu_env()["ACCELERATOR_TYPE"])
            return
        self.torch = torch.device(kind, self.local_rank) if kind == "cuda" else torch.device(kind)
        if kind == "cuda":
            torch.cuda.set_device(self.torch)
            torch.set_float32_matmul_precision("high")
            self.name = torch.cuda.get_device_name()
        if "RANK" in os.environ:  # torchrun
            import torch.distributed as dist
            dist.init_process_group("nccl" if kind == "cuda" else "gloo")
            self.dist, self.rank, self.world = dist, dist.get_rank(), dist.get_world_size()

    def put(self, x):
        """A tensor, an array or a dict of them, on the device."""
        if isinstance(x, dict):
            return {k: self.put(v) for k, v in x.items()}
        x = x if torch.is_tensor(x) else torch.as_tensor(x)
        if self.kind == "cuda" and x.device.type == "cpu":
            x = x.pin_memory()  # a copy from pageable memory waits for the steps that are under way
        return x.to(self.torch, non_blocking=True)

    def all_reduce(self, vector):
        """The sum of the replicas' vectors. All ranks."""
        if self.world > 1 and self.kind == "xla":
            return self.xm.all_reduce(self.xm.REDUCE_SUM, vector)
        if self.world > 1:
            self.dist.all_reduce(vector)
        return vector

    def from_rank_0(self, vector):
        """Rank 0's vector, on the host of every rank. All ranks; one program."""
        if self.world > 1:
            vector = self.all_reduce(self.put(vector if self.rank == 0 else torch.zeros_like(vector)))
            self.end_step(vector)
        return vector.cpu()

    def end_step(self, result):
        """Launches what was traced since the last call as one program; result is one of its results. All ranks."""
        if self.kind == "xla" and self.threads:
            # sync() would free buffers of the running program with Python's lock held, and the peers that it waits for need it.
            with LAUNCH:
                self.xla._XLAC._xla_step_marker(self.xla._XLAC._xla_get_default_device(), [], wait=False)
            result.cpu()
        if self.kind == "xla":
            self.xla.sync()

    def call(self, fn, state, inputs, *static):
        """fn(state, inputs, *static), which changes the tensors of state in place and returns others, as one program. All ranks.

        state, inputs: dicts of tensors, nested or not; static: anything hashable. On XLA the first call with a static traces fn,
        and the others replay that: what fn reads besides its arguments must not change. What cannot be replayed is traced every time.
        """
        if self.kind != "xla":
            return fn(state, inputs, *static)
        if (fn, static) not in self.programs:
            try:
                with LAUNCH, torch.no_grad():
                    self.programs[fn, static] = self.capture(fn, state, inputs, *static)
            except NotReplayable as e:
                if self.threads:
                    raise UserError(f"{e}, so the step cannot be replayed, which several replicas on the CPU need") from None
                self.programs[fn, static] = None, None
                self.say(f"{e}: so torch_xla traces this step anew each time, where one that can be captured is replayed; the device may wait for that")
        replay, spec = self.programs[fn, static]
        if not replay:
            self.traces = True
            outputs = fn(state, inputs, *static)
            self.traces = False
            self.xla.sync()
            return outputs
        held = tree_flatten((state, inputs))[0]  # until the program has run: freeing a buffer that it reads would wait for it
        results = replay(held)
        new, outputs = tree_unflatten(results, spec)
        state.update(new)
        self.end_step(results[0])
        return outputs

    def sum_over(self, body, sums, weights, xs):
        """Sums body(weights, xs[i])[0], a list of tensors like sums, over i, and stacks its other result. xs: tensors [n, ...] in dicts.

        On XLA a loop inside the program, whose memory does not grow with n.
        """
        if self.kind == "xla" and not self.traces and len(tree_flatten(xs)[0][0]) > 1:
            from torch_xla.experimental.scan import _scan_impl_pytree

            def scanned(carry, x):
                sums, weights = carry
                parts, row = body(weights, tree_map(lambda t, like: t.to(like.dtype), x, xs))  # the scan's own bools arrive as integers
                return ([a + b for a, b in zip(sums, parts)], {k: w * 1 for k, w in weights.items()}), row

            (sums, _), rows = _scan_impl_pytree(scanned, (sums, weights), xs)
            return sums, rows
        rows = []
        for i in range(len(tree_flatten(xs)[0][0])):
            parts, row = body(weights, tree_map(lambda t: t[i], xs))
            sums = [a + b for a, b in zip(sums, parts)]
            rows.append(row)
            if self.kind == "xla" and self.traces:  # no program for all of them, which no memory may hold
                self.xla.sync()
        return sums, {k: torch.stack([row[k] for row in rows]) for k in rows[0]}

    def recompute(self, layer, x, *args):
        """layer(x, *args), of which the backward pass keeps x and the weights alone."""
        if torch.compiler.is_compiling():
            return torch.utils.checkpoint.checkpoint(layer, x, *args, use_reentrant=False)
        names, weights = zip(*layer.named_parameters())  # as arguments: by the backward pass the layer has its own again
        call = lambda x, *weights: torch.func.functional_call(layer, dict(zip(names, weights)), (x, *args))
        return Recomputed.apply(self.barrier, call, x, *weights)

    def attention(self, q, k, v):
        """softmax(q k^T / sqrt(d)) v of [B, heads, L, d], of which the backward pass keeps q, k and v alone.

        For XLA, which makes more of torch's own: a pass over the scores for rows that a mask leaves empty, and all scores kept, in float32.
        """
        def attend(q, k, v):  # the scores in float32 at no cost: a TPU adds up its products of bfloat16 numbers so
            return ((q.float() * q.shape[-1] ** -0.5) @ k.float().mT).softmax(-1).to(v.dtype) @ v

        return Recomputed.apply(self.barrier, attend, q, k, v)

    def barrier(self, tensors):
        """The same tensors. XLA takes them for others: it would merge a second computation from the first ones with the first."""
        if self.kind == "xla":
            tensors = [t.clone() for t in tensors]
            self.xm.optimization_barrier_(tensors)
        return tensors

    def capture(self, fn, state, inputs, *static):
        """Traces fn once. Returns a function from the tensors of (state, inputs) to those of (new state, outputs), and these' structure."""
        with Replayable():
            lowering, holders, spec = self.lower(fn, state, inputs, *static)
        program = self.xb.computation_from_module_proto("step", lowering.hlo())
        source = {lowering.tensor_parameter_id(h): i for i, h in enumerate(holders)}
        constants = lowering.device_parameter_id_tensor_mapping()
        ids = sorted((set(constants) | set(source)) - {-1})
        replay = lambda tensors: self.xla._XLAC._xla_user_computation(
            "xla::_op_step", [tensors[source[i]] if i in source else constants[i] for i in ids], program)
        return replay, spec

    def lower(self, fn, state, inputs, *static):
        """The program of fn, not compiled: a torch_xla LoweringContext, the placeholders of its parameters, the structure of its results."""
        lowering = self.xla._XLAC.lowering.LoweringContext("step")
        lowering.set_name_string("step")
        tensors, spec = tree_flatten((state, inputs))
        holders = [self.xb.create_placeholder_tensor(t.shape, t.dtype) for t in tensors]
        state, inputs = tree_unflatten([h.clone() for h in holders], spec)
        results, spec = tree_flatten((state, fn(state, inputs, *static) or ()))
        lowering.build(results)
        return lowering, holders, spec

    def counts(self):
        """XLA's own counts so far: programs compiled, seconds that took, operations that fell back to the host, seconds of transfers."""
        if self.kind != "xla":
            return {}
        number = lambda name: (self.metrics.metric_data(name) or (0, 0))[:2]
        fallbacks = sum(self.metrics.counter_value(name) for name in self.metrics.counter_names() if name.startswith("aten::"))
        transfers = sum(number(name)[1] for name in ("TransferToDeviceTime", "TransferFromDeviceTime"))
        return {"xla/compiles": number("CompileTime")[0], "xla/compile_time": number("CompileTime")[1] / 1e9, "xla/fallbacks": fallbacks,
                "xla/transfer_time": transfers / 1e9}


# The step.

def flatten(tensors):
    """One vector of all the tensors' numbers."""
    return torch.cat([t.reshape(-1) for t in tensors])


def unflatten(vector, shapes):
    """{name: view of vector} in the order of shapes, {name: shape}."""
    parts = vector.split([math.prod(s) for s in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts)}


class Run:
    """What training changes, on the device, and the steps that change it.

    state: weights, their average ema and moments m and v (a float32 vector each), puzzle_emb [N, D'], sums (STATS, of the steps
    since the last line of the log) and carry, that of every micro-batch: [micro-batches, sequences in one, ...].
    """

    def __init__(self, model, c, device, saved=None):
        """saved: a checkpoint's ema, m and v, as far as it has them; weights are the model's. Rank 0's go to all ranks."""
        saved = saved or {}
        # Longest first: every weight but the short biases starts at an even address of the vector.
        params = dict(sorted(model.named_parameters(), key=lambda kv: -kv[1].numel()))
        self.shapes = {name: p.shape for name, p in params.items()}
        self.c, self.device = c, device
        self.batch_size = c.global_batch_size // device.world
        weights = flatten(p.detach() for p in params.values())
        vector = lambda named: flatten(named[k] for k in self.shapes)
        start = dict(weights=weights, ema=vector(saved["ema"]) if "ema" in saved else weights)
        start |= {k: vector(saved[k]) if k in saved else torch.zeros_like(weights) for k in ("m", "v")}
        start |= dict(puzzle_emb=model.puzzle_emb.weights if model.prefix else torch.zeros(0, 1))
        parts = device.from_rank_0(flatten(start.values())).split([t.numel() for t in start.values()])
        start = {k: part.view_as(t) for part, (k, t) in zip(parts, start.items())}
        self.state = {k: device.put(t.clone()) for k, t in start.items()}
        self.model = model.to(device.torch)
        self.model.L_level.recompute = device.recompute if c.recompute else None
        for layer in self.model.L_level.layers if device.kind == "xla" and not c.mlp_t else ():
            layer.self_attn.attend = device.attention
        self.forward = supervision_step
        if device.kind != "xla" and c.compile == "on" or device.kind == "cuda" and c.compile == "auto":
            torch._dynamo.config.recompile_limit = 64  # each stage of a curriculum is one; past it torch.compile gives up
            self.forward = torch.compile(supervision_step, dynamic=False)
        self.dtype = getattr(torch, c.forward_dtype)
        self.eval_depth = c.eval_halt_max_steps or c.halt_max_steps
        self.restart()

    def restart(self):
        """Gives every sequence new data at the next step."""
        self.state |= self.device.put(dict(carry=self.new_carry(), sums=torch.zeros(len(STATS))))

    def new_carry(self):
        """A carry on the host, cut into micro-batches."""
        return self.cut(self.model.new_carry(self.batch_size, self.dtype))

    def cut(self, rows):
        """{name: [micro-batches, sequences in one, ...]} of {name: [sequences, ...]}."""
        return {k: t.view(-1, self.c.micro_batch_size or len(t), *t.shape[1:]) for k, t in rows.items()}

    def cast(self, vector, puzzle_emb):
        """Weights for the network from a vector of them: cast once, the puzzle embedding left in float32."""
        weights = unflatten(vector.to(self.dtype, copy=True), self.shapes)  # never views of what the step changes in place
        return weights | {"puzzle_emb.weights": puzzle_emb} if self.model.prefix else weights

    def train_step(self, batch, rates, signals, cycles=None):
        """One optimizer step: one program with one all-reduce, in which nothing depends on the host. All ranks.

        batch: the rank's tensors of Dataset.train_batch and min_halt_steps; rates: [lr, puzzle_emb_lr, 1 - beta1^t, 1 - beta2^t];
        signals: [2], the last entries of STATS, from this rank; cycles: (H_cycles, L_cycles) in the place of the model's.
        """
        self.device.call(self.trace_train_step, self.state, dict(batch=batch, rates=rates, signals=signals), cycles)

    @torch.no_grad()
    def trace_train_step(self, state, inputs, cycles=None):
        """The work of train_step; changes state in place."""
        packed = torch.cat([*self.gradients(state, inputs, cycles), inputs["signals"]])
        self.apply(state, self.device.all_reduce(packed), inputs["rates"])

    def gradients(self, state, inputs, cycles=None):
        """This rank's share of what the ranks sum, as vectors: gradients of weights and puzzle embedding over the global batch, how often
        the batch has each of its rows, METRICS. Moves the carry on."""
        self.model.train()
        c, weights = self.c, self.cast(state["weights"], state["puzzle_emb"])

        def micro_batch(weights, x):
            with torch.enable_grad():
                leaves = {k: t.detach().requires_grad_() for k, t in weights.items()}
                loss, carry, sums, _, _ = self.forward(self.model, leaves, x["carry"], x["batch"], c.halt_max_steps, c.loss_type, cycles=cycles)
                grads = torch.autograd.grad(loss, list(leaves.values()))
            rows = carry["puzzle_identifiers"]
            held = torch.zeros_like(start[-2]).index_add(0, rows, torch.ones_like(rows, dtype=torch.float32))
            return [g.float() for g in grads] + [held, sums], carry

        zeros = lambda *shape: torch.zeros(shape, device=self.device.torch)
        start = [zeros(*t.shape) for t in weights.values()] + [zeros(max(1, len(state["puzzle_emb"]))), zeros(len(METRICS))]
        xs = dict(carry=state["carry"], batch=self.cut(inputs["batch"]))
        (*grads, held, sums), carry = self.device.sum_over(micro_batch, start, weights, xs)
        for k, t in carry.items():
            state["carry"][k].copy_(t)
        return flatten(grads) / c.global_batch_size, held, sums  # divided after the backward pass: float16 has no room for gradients that small

    def apply(self, state, packed, rates):
        """What follows the reduction: the optimizers, the average, the sums of the log."""
        c, (lr, puzzle_emb_lr, bias1, bias2) = self.c, rates.unbind()
        parts = [len(state["weights"]), state["puzzle_emb"].numel(), max(1, len(state["puzzle_emb"])), len(METRICS) + 2]
        grad, puzzle_grad, held, sums = packed.split(parts)
        if self.model.prefix:
            sign_sgd(state["puzzle_emb"], puzzle_grad.view_as(state["puzzle_emb"]), held, puzzle_emb_lr, c.puzzle_emb_weight_decay)
        self.update(state, grad, lr, bias1, bias2)
        if c.ema:
            state["ema"].lerp_(state["weights"], 1 - c.ema_rate)
        state["sums"] += torch.cat([sums[:-2], grad.square().sum().sqrt().view(1), sums[-2:]])

    def update(self, state, grad, lr, bias1, bias2):
        """The optimizer, in place on the weights and their moments."""
        c, w, m, v = self.c, state["weights"], state["m"], state["v"]
        if c.optimizer == "adam_atan2":
            adam_atan2(w, grad, m, v, lr, bias1, bias2, c.beta1, c.beta2, c.weight_decay)
        elif c.optimizer == "adamw":
            adamw(w, grad, m, v, lr, bias1, bias2, c.beta1, c.beta2, c.weight_decay)
        elif c.optimizer == "lion":
            lion(w, grad, m, lr, c.beta1, c.beta2, c.weight_decay)
        else:
            for name, *parts in zip(self.shapes, *(unflatten(t, self.shapes).values() for t in (w, grad, m, v))):
                if name.startswith("L_level.") and parts[0].ndim == 2:
                    muon(*parts[:3], lr, c.beta1, c.weight_decay)
                else:
                    adam_atan2(*parts, lr, bias1, bias2, c.beta1, c.beta2, c.weight_decay)

    def new_evaluation(self):
        """The state of an evaluation: a carry and totals [7]."""
        return self.device.put(dict(carry=self.new_carry(), totals=torch.zeros(len(METRICS))))

    def eval_step(self, state, batch):
        """One supervision step of an evaluation: one program, without a collective. Returns answers [B, S] and q_halt [B].

        state: as new_evaluation; its totals grow when the full depth is reached, and the next step then takes new data.
        """
        weights = self.state["ema" if self.c.ema else "weights"]
        return self.device.call(self.trace_eval_step, state, dict(batch=batch, weights=weights, puzzle_emb=self.state["puzzle_emb"]))

    @torch.no_grad()
    def trace_eval_step(self, state, inputs):
        """The work of eval_step; changes state in place."""
        def micro_batch(weights, x):
            _, carry, sums, answer, q_halt = self.forward(
                self.model, weights, x["carry"], x["batch"], self.eval_depth, self.c.loss_type, training=False)
            return [sums], carry | dict(answer=answer, q_halt=q_halt)

        self.model.eval()
        weights = self.cast(inputs["weights"], inputs["puzzle_emb"])
        xs = dict(carry=state["carry"], batch=self.cut(inputs["batch"]))
        (sums,), rows = self.device.sum_over(micro_batch, [torch.zeros_like(state["totals"])], weights, xs)
        for k, t in state["carry"].items():
            t.copy_(rows[k])
        state["totals"] += torch.where(rows["halted"].flatten()[0], sums, 0)
        return rows["answer"].flatten(0, 1), rows["q_halt"].flatten()

    def state_dict(self, step):
        """A copy of everything a resume needs, on the host, by the official names."""
        host = lambda k: self.state[k].to("cpu", copy=True)  # training goes on while it is written
        named = lambda k: unflatten(host(k), self.shapes)
        buffers = {k: t.cpu() for k, t in self.model.named_buffers() if k in ("H_init", "L_init")}
        if self.model.prefix:
            buffers["puzzle_emb.weights"] = host("puzzle_emb")
        state = dict(step=step, weights=named("weights") | buffers, m=named("m"), v=named("v"))
        return state | {"ema": named("ema")} if self.c.ema else state


def rates(c, step, total_steps):
    """The numbers that change with the step (from 0): [lr, puzzle_emb_lr, 1 - beta1^t, 1 - beta2^t], t = step + 1; float32."""
    base = [learning_rate(r, step, c.lr_warmup_steps, total_steps, c.lr_min_ratio) for r in (c.lr, c.puzzle_emb_lr)]
    return np.array(base + [1 - c.beta1 ** (step + 1), 1 - c.beta2 ** (step + 1)], np.float32)


def exploration(c, step, total_steps):
    """The halt_exploration_prob of a step (from 0)."""
    end = c.halt_exploration_prob if c.halt_exploration_prob_end == -1 else c.halt_exploration_prob_end
    return c.halt_exploration_prob + (end - c.halt_exploration_prob) * step / max(1, total_steps - 1)


def stages(c, epoch):
    """The curriculum: {first step: (H_cycles, L_cycles)}, each as deep as the share of curriculum_epochs that is done; epoch in examples."""
    if not c.curriculum_epochs:
        return {0: (c.H_cycles, c.L_cycles)}
    start, growth = (c.H_cycles_start, c.L_cycles_start), (c.H_cycles - c.H_cycles_start, c.L_cycles - c.L_cycles_start)
    shares = {0} | {Fraction(i, n) for n in growth for i in range(1, n + 1)}
    return {math.ceil(share * c.curriculum_epochs * epoch / c.global_batch_size): tuple(a + int(share * n) for a, n in zip(start, growth))
            for share in sorted(shares)}


def depth(plan, step):
    """(H_cycles, L_cycles) of a step (from 0); plan: as stages returns it."""
    return plan[max(start for start in plan if start <= step)]


def steps_left(plan, flops, step, total_steps):
    """The steps from step on, counted in steps as long as the one before it; plan: as stages returns it, flops: of a step at each depth."""
    ranges = [(max(start, step), min(end, total_steps), plan[start]) for start, end in zip(plan, [*plan, total_steps][1:])]
    return sum(max(0, end - start) * flops[cycles] for start, end, cycles in ranges) / flops[depth(plan, step - 1)]


# Evaluation.

def evaluate(run, data, indices, label, asked, save_to=None):
    """Evaluates the puzzles `indices` of data at full depth: {"eval/...": number}. All ranks.

    asked: a function that tells whether to stop; {} is returned then. save_to: a .npz for eval_save_outputs.
    """
    c, size, device, saved = run.c, run.batch_size, run.device, {}
    paths = np.zeros(2)  # mazes answered by a path, and by a shortest one
    mine = indices[device.rank::device.world]
    state = run.new_evaluation()
    with Progress(label, len(mine) if device.rank == 0 else 0, "puzzles") as progress:
        for i in range(0, -(-len(indices) // device.world), size):  # as many batches on every rank
            rows = mine[i:i + size]
            arrays = data.test_batch(rows, size)
            batch = device.put(arrays)
            for _ in range(run.eval_depth):
                if not asked():
                    answer, q_halt = run.eval_step(state, batch)
            if asked():
                break
            arrays |= dict(preds=answer.cpu().numpy(), q_halt_logits=q_halt.cpu().numpy())  # waits for the device
            if data.manifest.get("kind") == "maze":
                paths += np.sum(path_metrics(*(arrays[k][:len(rows)] for k in ("inputs", "labels", "preds")), data.manifest["grid"]), axis=1)
            for k in filter(None, c.eval_save_outputs.split(",") if save_to else ()):
                saved.setdefault(k, []).append(arrays[k][:len(rows)])
            progress.add(len(rows))
    totals = torch.cat([state["totals"].cpu(), torch.tensor(paths, dtype=torch.float32)])  # on the host: not one more program
    if asked():  # the other ranks learn it from the sum
        totals.fill_(math.nan)
    totals = device.all_reduce(device.put(totals))
    device.end_step(totals)
    *totals, valid, optimal = totals.cpu().tolist()
    sums = dict(zip(METRICS, totals))
    if math.isnan(sums["count"]):
        return {}
    if saved:
        np.savez_compressed(save_to, indices=mine, **{k: np.concatenate(v) for k, v in saved.items()})
    count = max(sums["count"], 1)
    values = {"eval/accuracy": sums["accuracy"] / count, "eval/exact_accuracy": sums["exact_accuracy"] / count,
              "eval/loss": (sums["lm_loss"] + 0.5 * sums["q_halt_loss"]) / count, "eval/q_halt_accuracy": sums["q_halt_accuracy"] / count,
              "eval/steps": sums["steps"] / count, "eval/puzzles": int(sums["count"])}
    return values | ({"eval/path_valid": valid / count, "eval/path_optimal": optimal / count} if data.manifest.get("kind") == "maze" else {})


def show_puzzle(run, data):
    """A text: a test puzzle and the model's answers after supervision steps 1, 2, 4, ...; * marks wrong cells. All ranks.

    Of one batch it is the puzzle that these steps improved the most.
    """
    depth = run.eval_depth
    arrays = data.test_batch(data.subset(run.batch_size), run.batch_size)
    batch, state, answers = run.device.put(arrays), run.new_evaluation(), {}
    for step in range(1, depth + 1):
        answer, _ = run.eval_step(state, batch)
        if step & (step - 1) == 0 or step == depth:
            answers[step] = answer.cpu().numpy()
    errors = {step: ((answer != arrays["labels"]) & (arrays["labels"] != IGNORE_LABEL)) for step, answer in answers.items()}
    i = int((errors[1].sum(1) - errors[depth].sum(1)).argmax())
    symbols = data.manifest.get("symbols") or [str(t) for t in range(data.vocab_size)]
    rows, columns = data.manifest.get("grid") or [1, data.seq_len]
    grids = [("question", arrays["inputs"][i], [False] * data.seq_len)]
    for step, wrong in errors.items():
        grids.append((f"step {step}: " + (f"{wrong[i].sum()} wrong" if wrong[i].any() else "solved"), answers[step][i], wrong[i]))
    return side_by_side(grids, symbols, rows, columns)


def side_by_side(grids, symbols, rows, columns):
    """A text: grids next to each other, as many as 120 characters hold; each is (title, tokens, which cells to mark with *)."""
    draw = lambda tokens, wrong: [("*" if w else " ") + symbols[t] + " " for t, w in zip(tokens, wrong)]
    width = max(3 * columns, *(len(title) for title, _, _ in grids)) + 2
    lines, across = [], max(1, 120 // width)
    for j in range(0, len(grids), across):
        lines.append("".join(title.ljust(width) for title, _, _ in grids[j:j + across]))
        cells = [draw(tokens, wrong) for _, tokens, wrong in grids[j:j + across]]
        lines += ["".join("".join(x[r * columns:(r + 1) * columns]).ljust(width) for x in cells) for r in range(rows)] + [""]
    return "\n".join(line.rstrip() for line in lines)


# Checkpoints and logs.

def write_atomically(path, write):
    """write(file) to a temporary name, then fsync and rename: path holds all of it or what it held before."""
    with open(path + ".tmp", "wb") as f:
        write(f)
        f.flush()
        os.fsync(f.fileno())
    os.replace(path + ".tmp", path)


def save_checkpoint(c, name, state, metrics):
    """Writes out_dir/name.pt, then name.json with its hash: a checkpoint without its json is not complete. Prunes old ones."""
    path = os.path.join(c.out_dir, name)
    write_atomically(path + ".pt", lambda f: torch.save(state, f))
    about = dict(step=state["step"], sha256=file_sha256(path + ".pt"), data=state["data"], settings=state["settings"], metrics=metrics)
    write_atomically(path + ".json", lambda f: f.write(json.dumps(about, indent=1).encode()))
    for old in [p for p in checkpoints(c.out_dir) if p <= path + ".pt"][c.keep_last_n:]:  # one past it that a resume skipped does not count
        os.remove(old)
        if os.path.exists(old[:-3] + ".json"):
            os.remove(old[:-3] + ".json")


def checkpoints(out_dir):
    """Paths of the numbered checkpoints, newest first."""
    return sorted(glob.glob(os.path.join(glob.escape(out_dir), "ckpt_*.pt")), reverse=True)


def newest_checkpoint(out_dir, say):
    """The state of the newest complete checkpoint, or {}; says which it passes over, and why."""
    for path in checkpoints(out_dir):
        try:
            with open(path[:-3] + ".json", "rb") as f:
                if json.load(f)["sha256"] != file_sha256(path):
                    raise ValueError("it does not match the hash in its .json")
            say(f"resuming from {path}")
            return read_checkpoint(path)
        except FileNotFoundError:
            say(f"skipped {path}: its .json is missing, the write was cut off")
        except (ValueError, KeyError, TypeError, UserError) as e:
            say(f"skipped {path}: damaged ({e})")
    return {}


def read_checkpoint(path):
    """A checkpoint of ours as saved, or an official one as {"weights": ...}. Raises UserError."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path}: no such checkpoint; init_from is scratch, resume, auto or a file") from None
    except Exception as e:
        raise UserError(f"{path}: cannot be read as a checkpoint ({type(e).__name__}): damaged, or not one of ours or the official code's") from None
    named = state.get("weights", state) if isinstance(state, dict) else {}
    if not named or not isinstance(named, dict) or not all(isinstance(k, str) and torch.is_tensor(t) for k, t in named.items()):
        raise UserError(f"{path}: holds no weights by name: not a checkpoint of ours or of the official code")
    return state if "weights" in state else {"weights": named}


def load_weights(model, named, where):
    """Copies weights by official names into the model; raises UserError for names or shapes that do not fit its settings."""
    named = {k.removeprefix("_orig_mod.").removeprefix("model.").removeprefix("inner."): t.float() for k, t in named.items()}
    own = model.state_dict()
    table = "puzzle_emb.weights"
    if table in named and table in own and named[table].shape[1:] == own[table].shape[1:] and named[table].shape != own[table].shape:
        named[table] = named[table].mean(0, keepdim=True).expand_as(own[table])  # other puzzles: as the official code does
    for what, keys in (("lacks", own.keys() - named.keys()), ("also has", named.keys() - own.keys())):
        if keys:
            raise UserError(f"{where}: {what} {sorted(keys)[0]}: its model has other settings (mlp_t, L_layers, pos_encodings, puzzle_emb_ndim?)")
    for k in own:
        if named[k].shape != own[k].shape:
            raise UserError(f"{where}: {k} has shape {list(named[k].shape)}, these settings need {list(own[k].shape)}")
    model.load_state_dict(named)


def is_complete(out_dir, step):
    """Whether metrics.jsonl holds the evaluation at the end, at that step."""
    return any('"final": true' in line and line_step(line) == step for line in metrics_lines(out_dir))


def metrics_lines(out_dir):
    """The whole lines of metrics.jsonl so far."""
    path = os.path.join(out_dir, "metrics.jsonl")
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as f:
        return [line for line in f if line.endswith("\n")]


def line_step(line):
    """The step of a line of metrics.jsonl; infinity for what a crash of the machine left."""
    try:
        return json.loads(line)["step"]
    except ValueError:
        return math.inf


class Saver:
    """Writes rank 0's checkpoints behind the training thread, and copies what a run leaves to gcs_dir behind that."""

    def __init__(self, c, device, log):
        self.c, self.log, self.rank, self.writer, self.writing = c, log, device.rank, ThreadPoolExecutor(1), None
        self.bucket = Bucket(c.gcs_dir) if c.gcs_dir and device.local_rank == 0 else None
        self.uploads, self.failing = queue.Queue(), False
        threading.Thread(target=self.uploader, daemon=True).start()  # a daemon: a bucket that stalls does not keep the process

    def save(self, name, state, metrics):
        """Begins to write out_dir/name.pt; waits for the one before, so that there is never more than one copy in memory."""
        self.written()
        self.writing = self.writer.submit(self.write, name, state, metrics)

    def write(self, name, state, metrics):
        save_checkpoint(self.c, name, state, metrics)
        self.upload()

    def written(self):
        """Waits for what is being written; False, and a line for people, where it failed."""
        writing, self.writing = self.writing, None
        try:
            if writing:
                writing.result()
            return True
        except (OSError, RuntimeError) as e:  # torch.save tells of a full disk by a RuntimeError
            self.log.say(f"checkpoint not written: {e}")
            return False

    def upload(self):
        """Begins to copy what is new."""
        if self.bucket:
            self.uploads.put(None)

    def uploader(self):
        while True:
            self.uploads.get()
            try:
                self.copy_run() if self.rank == 0 else self.copy_log()
                self.failing = False
            except (BucketError, OSError) as e:
                if not self.failing:
                    self.log.say(f"upload failed, training goes on and the next checkpoint tries again: {e}")
                self.failing = True
            self.uploads.task_done()

    def copy_log(self):
        self.bucket.upload(self.log.text.name, os.path.basename(self.log.text.name))

    def copy_run(self):
        """Copies what the bucket lacks, a checkpoint's .json last: without it, it is not complete. Prunes as save_checkpoint does."""
        self.copy_log()
        self.bucket.upload(os.path.join(self.c.out_dir, "metrics.jsonl"), "metrics.jsonl")
        own = checkpoints(self.c.out_dir)
        for path in own + [os.path.join(self.c.out_dir, "best.pt")]:
            name = os.path.basename(path)[:-3]
            try:
                with open(path[:-3] + ".json", "rb") as f:
                    about = f.read()
                if self.bucket.read(name + ".json") != about:
                    self.bucket.upload(path, name + ".pt")
                    self.bucket.write(name + ".json", about)
            except FileNotFoundError:  # not complete, or pruned since
                pass
        names = {n.partition(".")[0] for n in self.bucket.list() if n.startswith("ckpt_") and own and n <= os.path.basename(own[0])}
        for name in sorted(names, reverse=True)[self.c.keep_last_n:]:
            self.bucket.delete(name + ".json")
            self.bucket.delete(name + ".pt")

    def close(self, seconds):
        """Copies what is new, within the given time."""
        self.upload()
        began, told = time.monotonic(), False
        while self.uploads.unfinished_tasks and time.monotonic() < began + seconds:
            time.sleep(0.05)
            if time.monotonic() > began + 5 and not told:
                self.log.say(f"uploading to {self.c.gcs_dir}, for {seconds} s at most")
                told = True
        if self.uploads.unfinished_tasks or self.failing:
            self.log.say(f"upload to {self.c.gcs_dir} not complete; {self.c.out_dir} has it all")


def restore(c, state, say):
    """Fetches the newest complete checkpoint of gcs_dir, and the run's log, where it is newer than state. Returns its state, or state."""
    bucket = Bucket(c.gcs_dir)
    there = bucket.list()
    for name in sorted((n[:-5] for n in there if n.startswith("ckpt_") and n.endswith(".json")), reverse=True):
        if int(name[5:]) <= state.get("step", -1):
            break
        say(f"fetching {name} from {c.gcs_dir}")
        for file in [n for n in ("metrics.jsonl", "log.txt", "best.pt", "best.json") if n in there] + [name + ".pt", name + ".json"]:
            bucket.download(file, os.path.join(c.out_dir, file))
        state = newest_checkpoint(c.out_dir, say)
    return state


class Log:
    """One line an event to rank 0's console and, on each host, to a file; numbers to out_dir/metrics.jsonl from rank 0."""

    def __init__(self, out_dir, device):
        self.out_dir, self.rank, self.text, self.wandb = out_dir, device.rank, None, None
        if device.local_rank == 0:
            os.makedirs(out_dir, exist_ok=True)
            name = f"log.host{device.host}.txt" if device.host else "log.txt"
            self.text = open(os.path.join(out_dir, name), "a", encoding="utf-8")

    def say(self, text):
        """A line for people."""
        if self.rank == 0:
            print(text, flush=True)
        if self.text:
            print(text, file=self.text, flush=True)

    def cut(self, step):
        """Drops what lies past step, and a last line that a kill cut off."""
        if self.rank == 0:
            kept = [line for line in metrics_lines(self.out_dir) if line_step(line) <= step]
            write_atomically(os.path.join(self.out_dir, "metrics.jsonl"), lambda f: f.write("".join(kept).encode()))

    def metrics(self, step, values):
        """A line of metrics.jsonl."""
        if self.rank == 0:
            line = {"step": step, **{k: round(v, 8) if isinstance(v, float) else v for k, v in values.items()}}
            with open(os.path.join(self.out_dir, "metrics.jsonl"), "a", encoding="utf-8") as f:
                f.write(json.dumps(line) + "\n")
            if self.wandb:
                self.wandb.send(line)


class WandB:
    """Sends metrics to Weights & Biases from a process of its own, and never waits for it before close(). Ranks but 0 stay silent.

    Not from a thread: wandb can hang in init, in finish and in its atexit hooks, and of the two only a process can be killed.
    """

    def __init__(self, c, rank, run_id, say, **facts):
        """run_id: of the run to go on with, or None; say: prints a line; facts: for the config, beside the settings."""
        self.id, self.say, self.process, self.unsent, self.folder = run_id, say, None, bytearray(), os.path.join(c.out_dir, "wandb")
        # The environment may keep a run from going online; nothing makes an offline one go there.
        mode = (os.environ.get("WANDB_MODE") or "online") if c.wandb_mode == "online" else c.wandb_mode
        if rank or not self.wanted(c) or mode == "disabled":
            return
        self.id = run_id or secrets.token_hex(4)
        options = dict(mode=mode, project=c.wandb_project, name=c.wandb_run_name or os.path.basename(os.path.abspath(c.out_dir)),
                       id=self.id, resume="allow", dir=c.out_dir, config=vars(c) | facts, argv=sys.argv)
        program = inspect.getsource(wandb_process) + "\nwandb_process()"  # without the rest of this file, which imports torch
        try:
            self.process = subprocess.Popen([sys.executable, "-c", program, json.dumps(options)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                            stderr=subprocess.DEVNULL, bufsize=0, start_new_session=True)  # away from Ctrl-C
        except OSError as e:
            return say(f"W&B: off, its process does not start ({e}); metrics.jsonl has it all")
        for pipe in (self.process.stdin, self.process.stdout):
            os.set_blocking(pipe.fileno(), False)
        atexit.register(self.close, 10, 1)  # where an error ends the run

    @staticmethod
    def wanted(c):
        """Whether a run logs to W&B, by its settings alone: the same on all ranks."""
        return c.wandb_log and c.wandb_mode != "disabled" and not c.eval_only

    def send(self, values):
        """Logs {"step": step, name: number, ...}; the name eval/example takes a text as show_puzzle() makes it."""
        if self.process and not self.process.stdin.closed and len(self.unsent) < 2 ** 24:
            self.unsent += json.dumps(values).encode() + b"\n"
            self.pump()

    def pump(self):
        """Moves what the pipes take and hold; what does not fit stays for the next call."""
        try:
            while self.unsent:
                del self.unsent[:os.write(self.process.stdin.fileno(), self.unsent)]
        except (BlockingIOError, BrokenPipeError):
            pass
        code = self.process.poll()
        for line in (self.process.stdout.read() or b"").decode(errors="replace").splitlines():
            if line.startswith("W&B: "):
                self.say(line)
        if code is not None:
            self.process = None
            if code not in (0, 3):  # 3: it has said why
                self.say(f"W&B: off, its process died (exit code {code}); metrics.jsonl has it all")

    def close(self, seconds=30, exit_code=0):
        """Ends the run, and its process within the given time."""
        self.send({"exit_code": exit_code})
        end = time.monotonic() + seconds
        while self.process and time.monotonic() < end:
            if not self.unsent:
                self.process.stdin.close()
            time.sleep(0.02)
            self.pump()
        if self.process:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process = None
            self.say(f"W&B: no end within {seconds} s, killed; metrics.jsonl has it all, and "
                     f"wandb sync --include-online {self.folder}/*run-*-{self.id} uploads what it wrote")


def wandb_process():
    """The process of WandB: metrics arrive on stdin as lines of JSON, words for people leave on stdout. Uses nothing of this file."""
    import html
    import json
    import os
    import signal
    import sys
    *command, told = sys.orig_argv
    options, environment = json.loads(told), dict(os.environ)
    sys.argv = options.pop("argv")  # wandb notes it as the run's command
    reason, online, wandb, run = options.pop("reason", ""), options["mode"] == "online", None, None
    say = lambda text: os.write(1, ("W&B: " + " ".join(text.split())[:400] + "\n").encode())

    def late(*_):
        raise TimeoutError("no answer within 20 s")

    for number in (signal.SIGTERM, signal.SIGINT):  # the trainer decides when to end
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, late)
    try:
        import requests
        import wandb
        signal.alarm(20)
        if online:
            server = wandb.setup().settings.base_url
            try:  # wandb's own check is slow to give up; auth: nothing secret goes out, so any certificate will do
                requests.head(server, timeout=5, verify=False, auth=lambda request: request)
            except requests.RequestException:
                raise ConnectionError(f"no answer from {server}") from None
            wandb.login()  # raises without a key that the server knows; cannot ask for one, stdin being a pipe
        run = wandb.init(**options, settings=wandb.Settings(silent=True, console="off"))
        signal.alarm(0)
        run.define_metric("*", step_metric="step")  # not wandb's own step, which cannot go back as a resume does
        say(run.url if online else f"offline{reason}: wandb sync {os.path.dirname(run.dir)} uploads it")
        exit_code = 1  # unless the trainer says otherwise: it may die
        for values in map(json.loads, sys.stdin):
            if "exit_code" in values:
                exit_code = values["exit_code"]
                continue
            if "eval/example" in values:
                values["eval/example"] = wandb.Html(f"<pre>{html.escape(values['eval/example'])}</pre>")
            run.log(values)
            if "final" in values:
                run.summary.update({k.replace("eval/", "final/"): v for k, v in values.items() if k.startswith("eval/")})
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)  # ends a wandb that hangs where the trainer is gone
        run.finish(exit_code)
        os._exit(0)  # wandb's atexit hooks wait 10 s for a server that stalls, offline too
    except BaseException as e:
        signal.alarm(0)
        if online and wandb and not run:  # in a new image of the process: after a failure wandb can hang in its offline mode too
            told = json.dumps(json.loads(told) | dict(mode="offline", reason=f" ({type(e).__name__}: {e})"))
            os.execve(sys.executable, [*command, told], environment)
        say(f"off ({type(e).__name__}: {e}); metrics.jsonl has it all")
        os._exit(3)


# Training.

def train_values(c, sums, steps):
    """The log's numbers from the sums of `steps` steps: losses a sequence, the rest over the sequences that halted, if any did."""
    lm_loss, q_halt_loss = (sums[k] / (steps * c.global_batch_size) for k in ("lm_loss", "q_halt_loss"))
    values = {"train/loss": lm_loss + 0.5 * q_halt_loss, "train/lm_loss": lm_loss, "train/q_halt_loss": q_halt_loss,
              "train/grad_norm": sums["grad_norm"] / steps}
    if sums["count"]:
        values |= {f"train/{k}": sums[k] / sums["count"] for k in ("accuracy", "exact_accuracy", "q_halt_accuracy", "steps")}
    return values


def train_line(values, step, total_steps, left):
    """A line of the console for train_values and the rates; left: as steps_left."""
    line = f"step {step}/{total_steps} | loss {values['train/loss']:.4f}"
    if "train/steps" in values:
        line += " | accuracy {train/accuracy:.3f} exact {train/exact_accuracy:.3f} halting step {train/steps:.1f}".format_map(values)
    if "perf/step_time" in values:
        line += f" | {values['perf/examples_per_sec']:,.0f} examples/s {1e3 * values['perf/step_time']:,.0f} ms"
        line += f" | eta {duration(left * values['perf/step_time'])}"
    return line


def eval_line(values, step):
    """A line of the console for an evaluation."""
    line = (f"step {step} | {values['eval/puzzles']:,} test puzzles at {values['eval/steps']:.0f} supervision steps: "
            f"exact {values['eval/exact_accuracy']:.4f} accuracy {values['eval/accuracy']:.4f} loss {values['eval/loss']:.4f}")
    if "eval/path_valid" in values:
        line += " path valid {eval/path_valid:.4f} optimal {eval/path_optimal:.4f}".format_map(values)
    return line


def duration(seconds):
    """Seconds as 1h02m, 3m04s or 5s."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"


def find_start(c, data, model, total_steps, say):
    """The checkpoint to start from, its weights in the model: (its state or {}, whether to resume it, the best accuracy so far).

    Rank 0 alone. Raises UserError where init_from and out_dir do not fit.
    """
    reads_only = c.eval_only or c.export_official
    if c.gcs_dir:
        Bucket(c.gcs_dir).check(write=not reads_only)
    if c.init_from in ("resume", "auto"):
        notes = []
        state = newest_checkpoint(c.out_dir, notes.append)
        state = restore(c, state, notes.append) if c.gcs_dir else state
        damaged = [path for path in checkpoints(c.out_dir) if os.path.exists(path[:-3] + ".json")]  # complete once, so worth a look
        if not state and (c.init_from == "resume" or reads_only or damaged):
            mend = "--out_dir=... starts another run" if damaged else "--init_from=auto starts anew"
            where = c.out_dir + (f" and {c.gcs_dir}" if c.gcs_dir else "")
            raise UserError("; ".join([f"--init_from={c.init_from}: no complete checkpoint in {where}", *notes, mend]))
        for note in notes:
            say(note)
        if state and state["data"] != data.sha256:
            raise UserError(f"{c.data_path} is not the data set that the checkpoint in {c.out_dir} was trained on: "
                            "choose that one, or another --out_dir")
    elif not reads_only and (checkpoints(c.out_dir) or any(os.path.exists(os.path.join(c.out_dir, n)) for n in ("best.pt", "metrics.jsonl"))):
        raise UserError(f"{c.out_dir} holds a run: --init_from=auto goes on with it, --out_dir=... starts another")
    elif not reads_only and c.gcs_dir and any(n.startswith(("ckpt_", "best.", "metrics.")) for n in Bucket(c.gcs_dir).list()):
        raise UserError(f"{c.gcs_dir} holds a run: --init_from=auto goes on with it, --gcs_dir=... starts another")
    else:
        state = read_checkpoint(c.init_from) if c.init_from != "scratch" else {}
    resumed = bool(state) and c.init_from in ("resume", "auto")
    if state:
        load_weights(model, state["weights"], c.out_dir if resumed else c.init_from)
    if resumed and state["step"] > total_steps and not reads_only:
        raise UserError(f"{c.out_dir} is at step {state['step']}, past the {total_steps} steps asked for: raise max_steps or epochs")
    best_json, best = os.path.join(c.out_dir, "best.json"), -1.0
    if resumed and os.path.exists(best_json):
        try:
            with open(best_json, "rb") as f:
                best = json.load(f)["metrics"]["eval/exact_accuracy"]
        except (ValueError, KeyError, TypeError) as e:
            raise UserError(f"{best_json}: damaged ({e}); remove it and best.pt") from None
    for k, v in vars(c).items():
        if resumed and state["settings"].get(k) != v and k not in ("init_from", "eval_only"):
            say(f"{k} is {v}; the checkpoint had {state['settings'].get(k)}")
    return state, resumed, best


def export_official(c, model, state):
    """Writes the weights that an evaluation would use as a checkpoint that the official code loads."""
    weights = model.state_dict() | (state.get("ema", {}) if c.ema else {})
    for k in ("H_init", "L_init"):  # the official code holds these two in the dtype of its forward pass
        weights[k] = weights[k].to(getattr(torch, c.forward_dtype))
    official = {OFFICIAL_PREFIX + k: t.clone() for k, t in weights.items()}
    write_atomically(c.export_official, lambda f: torch.save(official, f))
    print(f"wrote {c.export_official}: {len(official)} tensors of step {state.get('step', 0)} under the official code's names")


def train(index, c, kind):
    """The whole run of one replica. index: of the replica on its host."""
    began, parent = time.time(), os.getppid() if kind == "xla" else 0  # a process of xmp.spawn's stops if its parent is gone
    device = Device(kind)
    each, what = device.world * (c.micro_batch_size or 1), f"{device.world} replica" + "s" * (device.world > 1)
    if c.global_batch_size % each:
        below = max(1, c.global_batch_size // each) * each
        what += f" x micro_batch_size {c.micro_batch_size}" if c.micro_batch_size else ""
        raise UserError(f"global_batch_size {c.global_batch_size} must be a multiple of {each} ({what}): the nearest are {below} and {below + each}")
    data, test = Dataset(c.data_path, "train"), Dataset(c.data_path, "test")
    for name in ("seq_len", "vocab_size", "num_puzzle_identifiers"):
        if getattr(data, name) != getattr(test, name):
            raise UserError(f"{c.data_path}: {name} is {getattr(data, name)} in train, {getattr(test, name)} in test: build it again")
    try:
        model = TRM(TRMConfig.of(c, seq_len=data.seq_len, vocab_size=data.vocab_size, num_puzzle_identifiers=data.num_puzzle_identifiers), c.seed)
    except ValueError as e:
        raise UserError(str(e)) from None
    epoch = data.total_groups * data.mean_puzzle_examples
    total_steps = c.max_steps or int(c.epochs * epoch / c.global_batch_size)
    if total_steps < 1:
        raise UserError(f"epochs={c.epochs} of {data.total_groups} puzzles are less than one batch of global_batch_size={c.global_batch_size}")

    # Nothing is written before every input has been found good. Rank 0 alone reads out_dir, so that no other host needs it.
    notes, state, resumed, best, fault = [], {}, False, -1.0, None
    if device.rank == 0:
        try:
            state, resumed, best = find_start(c, data, model, total_steps, notes.append)
        except UserError as e:
            fault = e
    step = state["step"] if resumed else 0
    complete = step == total_steps and is_complete(c.out_dir, step)
    facts = torch.tensor([fault is not None, step, complete], dtype=torch.float32)
    failed, step, complete = map(int, device.from_rank_0(facts).tolist())
    if failed:
        raise fault or UserError("rank 0 found wrong input: see its message")
    if c.export_official:
        if device.rank == 0:
            for note in notes:
                print(note)
            export_official(c, model, state)
        return
    run = Run(model, c, device, state if resumed else {k: v for k, v in state.items() if k == "ema"})
    wandb_id = state.get("wandb_id") if resumed else None
    del state

    log = Log(c.out_dir, device)
    device.say = log.say
    saver = Saver(c, device, log)
    log.say(f"# python {platform.python_version()}, torch {torch.__version__}, {platform.platform()}, {os.cpu_count()} cores, "
            f"{device.world} x {kind} ({device.name}); settings that differ from train.py's: {differences(c)}")
    parameters = len(run.state["weights"]) + run.state["puzzle_emb"].numel()
    log.say(f"{parameters:,} parameters; "
            f"{len(data):,} training examples of {data.total_groups:,} puzzles, {len(test):,} test puzzles in {c.data_path}")
    for note in notes:
        log.say(note)
    asked = lambda: bool(os.path.exists(os.environ[STOP_FILE]) or parent and os.getppid() != parent)
    if c.eval_only:
        finish(run, test, log, step, "evaluation", asked)
        return
    if complete:
        return log.say(f"{c.out_dir} is complete at step {step}: --eval_only evaluates it again, a higher max_steps or epochs goes on")
    log.cut(step)
    log.say(f"training from step {step} to {total_steps}, {c.global_batch_size} sequences a step")
    log.wandb = WandB(c, device.rank, wandb_id, log.say, data_sha256=data.sha256, parameters=parameters)

    def save(name, metrics):
        if device.rank == 0:
            saver.save(name, run.state_dict(step) | dict(settings=vars(c), data=data.sha256, wandb_id=log.wandb.id), metrics)

    peak = next((v for k, v in PEAK_FLOPS.items() if k in device.name), None)
    plan = stages(c, epoch)
    flops = {cycles: model.flops_per_example(cycles)[1] for cycles in plan.values()}

    first = logged = timed_from = step  # where this process, the next line of the log, the clock began
    clock = time.perf_counter()
    saved, stop = step or None, False
    while step < total_steps and not stop:
        if step == first or step in plan:
            cycles, compiled = depth(plan, step), step
            seconds, look_every = 0.0, 1  # of a step, as last measured; a stop is looked for at every step, until all ranks know that time
            if len(plan) > 1:
                log.say(f"curriculum: H_cycles {cycles[0]}, L_cycles {cycles[1]} from step {step + 1} on")
        batch = data.train_batch(c.seed, step, c.global_batch_size, device.rank, device.world)
        batch["min_halt_steps"] = halting_draws(
            c.seed, step, c.global_batch_size, c.halt_max_steps, exploration(c, step, total_steps), device.rank, device.world)
        run.train_step(device.put(batch), device.put(rates(c, step, total_steps)), device.put(torch.tensor([float(asked()), seconds])), cycles)
        step += 1
        if step == compiled + 1:
            run.state["sums"].cpu()
            log.say(f"step {step}: {time.perf_counter() - clock:.1f} s for the first step, compiling included; left out of the rates below")
            clock, timed_from = time.perf_counter(), step

        # What is decided here depends on the step and on reduced sums alone, so that all ranks decide the same.
        last = step == total_steps
        scheduled = last or (c.checkpoint_interval and step % c.checkpoint_interval == 0)
        examples, interval = step * c.global_batch_size, c.eval_interval * epoch
        due = not last and interval and examples // interval > (examples - c.global_batch_size) // interval
        in_log = step % c.log_interval == 0 or scheduled or due or step in plan
        if not in_log and step % look_every:
            continue
        sums = dict(zip(STATS, run.state["sums"].cpu().tolist()))  # waits for the device
        stop = sums["stop"] > 0
        if not in_log and not stop:
            continue
        values = train_values(c, sums, step - logged)
        if not math.isfinite(values["train/loss"] + values["train/grad_norm"]):
            saver.written()
            kept = os.path.join(c.out_dir, f"ckpt_{saved:08d}.pt") if saved else "none yet"
            raise FloatingPointError(f"loss or gradient not finite between steps {logged + 1} and {step}; the last good checkpoint: {kept}")
        values["train/lr"] = learning_rate(c.lr, step - 1, c.lr_warmup_steps, total_steps, c.lr_min_ratio)
        if step > timed_from:
            seconds = (time.perf_counter() - clock) / (step - timed_from)
            values |= {"perf/examples_per_sec": c.global_batch_size / seconds, "perf/step_time": seconds}
            if peak:
                values["perf/mfu"] = c.global_batch_size / seconds * flops[cycles] / peak / device.world
        values |= device.counts()
        if sums["seconds"]:  # of the step, by all ranks' clocks: a stop is seen within 5 seconds
            look_every = max(1, int(5 * device.world * (step - logged) / sums["seconds"]))
        log.metrics(step, values)
        log.say(train_line(values, step, total_steps, steps_left(plan, flops, step, total_steps)))
        logged, run.state["sums"] = step, device.put(torch.zeros(len(STATS)))
        if due:
            evaluation = evaluate(run, test, test.subset(c.eval_max_puzzles), f"evaluating at step {step}", asked)
            stop = stop or not evaluation
            if evaluation:
                log.metrics(step, evaluation)
                log.say(eval_line(evaluation, step))
                if WandB.wanted(c):
                    log.wandb.send({"step": step, "eval/example": show_puzzle(run, test)})
                values |= evaluation
            if evaluation and evaluation["eval/exact_accuracy"] > best:
                best = evaluation["eval/exact_accuracy"]
                save("best", values)
        if scheduled or stop:
            save(f"ckpt_{step:08d}", values)
            if device.rank:
                saver.upload()
            saved = step
            run.restart()
        clock, timed_from = time.perf_counter(), step
    if not saver.written():
        sys.exit(1)
    if stop and step < total_steps:
        saver.close(15)
        log.say(f"stopped at step {step}, checkpoint saved in {c.out_dir}; the same command with --init_from=resume goes on")
        return log.wandb.close(10, 1)
    if first < total_steps:
        log.say(f"trained {total_steps - first} steps in {duration(time.time() - began)}")
    if values := finish(run, test, log, step, "final evaluation", asked):
        log.metrics(step, {"final": True, **values})
    saver.close(600 if values else 15)
    log.wandb.close(*(() if values else (10, 1)))


def finish(run, test, log, step, label, asked):
    """The evaluation at the end, {} where it was stopped; shows a puzzle. All ranks."""
    c, device = run.c, run.device
    outputs = os.path.join(c.out_dir, f"eval_{step:08d}{f'.{device.rank}' if device.world > 1 else ''}.npz")
    values = evaluate(run, test, test.subset(c.eval_final_max_puzzles), label, asked, outputs)
    if not values:
        log.say(f"{label} stopped; the same command with --init_from=resume starts it again")
        return values
    log.say(eval_line(values, step))
    text = show_puzzle(run, test) if c.eval_show_puzzle or WandB.wanted(c) else ""
    if c.eval_show_puzzle:
        log.say("\n" + text)
    if WandB.wanted(c):
        log.wandb.send({"step": step, "eval/example": text})
    return values


def differences(c):
    """The settings that differ from their defaults, as flags."""
    defaults = read_settings(__file__)
    return " ".join(f"--{k}={v}" for k, v in vars(c).items() if v != defaults[k][0]) or "none"


def on_signals():
    """SIGTERM or SIGINT leaves the stop file for the replicas, which save and stop; a second one kills."""
    def handler(number, _):
        open(os.environ[STOP_FILE], "w").close()
        signal.signal(number, signal.SIG_DFL)
        if __name__ == "__main__":
            print(f"{signal.Signals(number).name}: stopping after this step; a second one kills", file=sys.stderr, flush=True)
        else:
            signal.alarm(60)  # the parent ends its processes so when one of them has died, and then no peer answers any more

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)


def replica(index, c, kind):
    """train() as xmp.spawn calls it: a replica that breaks takes its process along, where its peers would wait for it forever."""
    try:
        train(index, c, kind)
    except (UserError, FloatingPointError, SystemExit):  # those every replica raises, or none waits
        raise
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def main(c):
    """Checks the settings, makes the data set where asked to, and runs train() on each device."""
    check_settings(c)
    kind, reason = choose_device(c.device)
    c.data_path = local_dataset(c.data_path)
    main_process = os.environ.get("RANK", "0") == "0"
    if main_process:
        print(f"device {kind}: {reason}", flush=True)
    if c.data_prepare and not os.path.exists(c.data_path) and main_process:
        print(f"{c.data_path} is missing; making it: python {c.data_prepare}", flush=True)
        try:
            prepare = shlex.split(c.data_prepare)
        except ValueError as e:
            raise UserError(f"data_prepare: {e}: {c.data_prepare}") from None
        if subprocess.run([sys.executable] + prepare).returncode:
            raise UserError(f"data_prepare failed, see above: {c.data_prepare}")
        if not os.path.exists(c.data_path):
            raise UserError(f"data_prepare did not make data_path={c.data_path}: {c.data_prepare}")
    while c.data_prepare and not os.path.exists(c.data_path):  # another rank of torchrun makes it
        time.sleep(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[STOP_FILE] = os.path.join(folder, "stop")
        on_signals()
        try:
            if kind == "xla":
                import torch_xla.distributed.xla_multiprocessing as xmp
                xmp.spawn(replica, args=(c, kind))
            else:
                train(0, c, kind)
        except FloatingPointError as e:
            print(f"train.py: {e}", file=sys.stderr)
            sys.exit(1)
        except BrokenProcessPool:
            print(f"train.py: a replica died, see above; --init_from=auto goes on from the last checkpoint in {c.out_dir}", file=sys.stderr)
            sys.exit(1)


if __name__ == "__mp_main__":  # a process that xmp.spawn started
    on_signals()
if __name__ == "__main__":
    start(main, __file__)
