"""The Tiny Recursive Model (TRM, arXiv 2510.04871): recursion, supervision step, losses, network.

Pure torch: this file knows no device, and only TRM.load reads a file. Parameters have the official code's
names, without its "model.inner." prefix. The network computes in the dtype of the weights that it is called
with: training casts the float32 weights once a step.

Letters in shapes: B sequences, S cells of the puzzle, P positions of the puzzle embedding, L = P + S,
D hidden_size, D' puzzle_emb_ndim, V vocabulary, N puzzle identifiers.
"""
import math
import pickle
import re
import zipfile
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from puzzles import IGNORE_LABEL, parse_question, text_of

# The values of a supervision step, a number for each sequence. The log averages METRICS over the sequences
# that halt, and LOSS_TERMS over all sequences of a training step. "count" is 1 where the sequence has labels.
METRICS = ("count", "accuracy", "exact_accuracy", "q_halt_accuracy", "steps")
LOSS_TERMS = ("loss", "lm_loss", "q_halt_loss")


# ---------------------------------------------------------------------------------------------------------
# The recursion (paper, figure 3)

def latent_recursion(net, x, z_H, z_L, L_cycles):
    """Refines the latent z_L L_cycles times, then the answer z_H; x is the embedded question [B, L, D].

    The paper calls z_H "y", z_L "z" and L_cycles "n".
    """
    # think: the latent sees the question and the answer so far
    for _ in range(L_cycles):
        z_L = net(z_L + (z_H + x))
    # write: the answer sees only the latent
    z_H = net(z_H + z_L)
    return z_H, z_L


def deep_recursion(net, x, z_H, z_L, H_cycles, L_cycles):
    """Runs H_cycles latent recursions (the paper's "T"); only the last one has a gradient."""
    with torch.no_grad():
        for _ in range(H_cycles - 1):
            z_H, z_L = latent_recursion(net, x, z_H, z_L, L_cycles)
    return latent_recursion(net, x, z_H, z_L, L_cycles)


# ---------------------------------------------------------------------------------------------------------
# The supervision step (paper, sections 2 and 4.6)

class SupervisionStep(NamedTuple):
    """The results of a supervision step on B sequences."""
    carry: dict  # the sequences after the step, detached; "halted" says which of them have ended
    values: dict  # {name of METRICS or LOSS_TERMS: float32 [B]}; "loss" is what training minimises
    answers: torch.Tensor  # the predicted tokens, int32 [B, S]
    q_halt: torch.Tensor  # float32 [B]; positive where the model predicts that its answer is right


def take_new_puzzles(carry, batch):
    """Returns the carry in which the sequences that have halted have the puzzles of the batch, at step 0.

    Args:
        carry: the sequences as TRM.new_carry describes them.
        batch: inputs [B, S], labels [B, S] (IGNORE_LABEL is not scored) and puzzle_identifiers [B].
    """
    fresh = dict(
        steps=torch.zeros_like(carry["steps"]),
        inputs=batch["inputs"],
        labels=batch["labels"],
        puzzle_identifiers=batch["puzzle_identifiers"],
    )
    sequences = dict(carry)
    for name, value in fresh.items():
        sequences[name] = where(carry["halted"], value, carry[name])
    return sequences


def where(mask, new, old):
    """Returns new [B, ...] where the mask [B] is true, elsewhere old [B, ...]."""
    mask = mask.view(-1, *[1] * (old.ndim - 1))
    return torch.where(mask, new, old)


class TRM(nn.Module):
    """The network with its embeddings and heads, and all that a sequence goes through.

    config: a TRMConfig. seed: decides the initial weights, which are the same on every device.
    Raises ValueError for sizes that cannot be built.

    A fork replaces methods: first_state, recursion, answer, losses, halts, noisy, supervision_step, and
    is_solved. Training, evaluations and solve() call them; only training calls halts(), and only evaluations
    call noisy(). They see parameters in forward_dtype, and buffers in their own dtype; ranks do not
    synchronise buffers. self.training is false in evaluations.
    """
    tied = {}  # {name of a parameter: name of the one that takes its place}, for forks

    def __init__(self, config, seed=0):
        super().__init__()
        config.check()
        self.config = config
        self.prefix = config.prefix  # P
        self.length = self.prefix + config.seq_len  # L

        # The order of the modules is the order in which init_weights draws their weights.
        # Embeddings and heads; SignSGD trains the puzzle embedding, so it is a buffer and no parameter.
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.q_head = nn.Linear(config.hidden_size, 2)  # halt, and the official code's unused "continue"
        if config.puzzle_emb_ndim:
            table = torch.zeros(config.num_puzzle_identifiers, config.puzzle_emb_ndim)
            self.puzzle_emb = nn.Module()
            self.puzzle_emb.register_buffer("weights", table)
        if config.pos_encodings == "learned":
            self.embed_pos = Embedding(self.length, config.hidden_size)

        # the network and the initial latents
        self.L_level = Net(config, self.length)
        self.register_buffer("H_init", torch.empty(config.hidden_size))
        self.register_buffer("L_init", torch.empty(config.hidden_size))
        self.init_weights(torch.Generator().manual_seed(seed))

    # What a sequence goes through. The state of its recursion is a dict of any tensors [B, ...].

    def first_state(self, B):
        """Returns the state in which sequences begin, {name: [B, ...]}; it may depend on parameters."""
        shape = B, self.length, self.config.hidden_size
        return dict(z_H=self.H_init.expand(shape), z_L=self.L_init.expand(shape))

    def recursion(self, x, state, H_cycles, L_cycles):
        """Returns the state after one deep recursion on the embedded question x [B, L, D]."""
        z_H, z_L = deep_recursion(self.L_level, x, state["z_H"], state["z_L"], H_cycles, L_cycles)
        return dict(z_H=z_H, z_L=z_L)

    def answer(self, state, labels=None):
        """Returns the logits [B, S, V] and q_halt [B] of a state; labels [B, S]: in training only."""
        # an answer for each cell of the puzzle; the first position says whether to halt
        logits = self.lm_head(state["z_H"][:, self.prefix:])
        q_halt = self.q_head(state["z_H"][:, 0])[:, 0]
        return logits, q_halt

    def losses(self, settings, logits, q_halt, labels, solved):
        """Returns the values of LOSS_TERMS, {name: [B]}; training minimises "loss".

        Args:
            settings: train.py's settings, of which loss_type is read.
            logits: float32 [B, S, V].
            q_halt: float32 [B].
            labels: [B, S].
            solved: which answers are right, bool [B].
        """
        # the cells, and how well q_halt tells whether the answer is right
        lm_loss = LOSSES[settings.loss_type](settings, logits, labels)
        q_halt_loss = F.binary_cross_entropy_with_logits(q_halt, solved.float(), reduction="none")
        return dict(loss=lm_loss + 0.5 * q_halt_loss, lm_loss=lm_loss, q_halt_loss=q_halt_loss)

    def halts(self, settings, steps, q_halt, min_halt_steps):
        """Returns which sequences end after a training step, bool [B]; steps, min_halt_steps: int32 [B]."""
        # at q_halt > 0, unless exploration asks for more steps
        wants_to_halt = (steps >= settings.halt_max_steps) | (q_halt > 0)
        return wants_to_halt & (steps >= min_halt_steps)

    def noisy(self, state, noise):
        """Returns the state with noise, for another attempt in an evaluation; noise: of a shape [...]."""
        z_L = state["z_L"]
        return state | dict(z_L=z_L + noise(z_L.shape[1:]))

    @staticmethod
    def is_solved(inputs, labels, answers):
        """Returns which answers have the label in every scored cell, bool [B]; all arguments are [B, S].

        It is the target of q_halt. A puzzle with several right answers has rules of its own here.
        """
        return ((answers == labels) | (labels == IGNORE_LABEL)).all(-1)

    def forward(self, state, is_new, inputs, puzzle_rows=None, labels=None, cycles=None):
        """Runs the recursion of one supervision step.

        Args:
            state: {name: [B, ...]}, what first_state or the last step returned.
            is_new: which sequences begin now, bool [B].
            inputs: the question's tokens [B, S].
            puzzle_rows: rows of the puzzle embedding [B, D'], where the model has one.
            labels: in training the answer's tokens [B, S].
            cycles: (H_cycles, L_cycles); by default the config's.

        Returns the state, logits [B, S, V] and q_halt [B].
        """
        # inside the forward pass, so that the first state can be learned
        first = self.first_state(len(inputs))
        state = {name: where(is_new, first[name].to(t.dtype), t) for name, t in state.items()}
        # the question, the recursion, the answer
        x = self.embed(inputs, puzzle_rows)
        H_cycles, L_cycles = cycles or (self.config.H_cycles, self.config.L_cycles)
        state = self.recursion(x, state, H_cycles, L_cycles)
        logits, q_halt = self.answer(state, labels)
        return state, logits, q_halt

    def supervision_step(self, settings, weights, sequences, min_halt_steps=None, cycles=None):
        """Runs the recursion once on each sequence, scores its answer and decides whether it halts.

        Args:
            settings: train.py's settings, of which loss_type and halt_max_steps are read.
            weights: {name: tensor} of the network, all of one dtype, and "puzzle_rows" [B, D'] in float32,
                the rows of the puzzle embedding that belong to the sequences.
            sequences: what take_new_puzzles returns.
            min_halt_steps: in training, the least number of steps of each sequence, int32 [B]. None in
                evaluations, which run the full depth: no sequence halts here.
            cycles: (H_cycles, L_cycles); by default the model's.

        Returns a SupervisionStep.
        """
        # the rows of the puzzle embedding are no parameter; a tied parameter has another one's weights
        weights = dict(weights)
        puzzle_rows = weights.pop("puzzle_rows", None)
        weights |= {name: weights[other] for name, other in self.tied.items()}
        inputs = sequences["inputs"]
        labels = sequences["labels"]
        is_new = sequences["steps"] == 0
        steps = sequences["steps"] + 1
        is_training = min_halt_steps is not None

        # the forward pass, with these weights in place of the model's own
        arguments = (sequences["state"], is_new, inputs, puzzle_rows, labels if is_training else None, cycles)
        state, logits, q_halt = functional_call(self, weights, arguments)
        logits = logits.float()
        q_halt = q_halt.float()
        answers = logits.argmax(-1).to(torch.int32)

        # the loss of each sequence
        solved = self.is_solved(inputs, labels, answers)
        values = self.losses(settings, logits, q_halt, labels, solved)

        # halting, and the metrics
        with torch.no_grad():
            halted = torch.zeros_like(solved)
            if is_training:
                halted = self.halts(settings, steps, q_halt, min_halt_steps)
            values |= step_metrics(labels, answers, q_halt, solved, steps)

        # the next step continues from here, without a gradient to this one
        state = {name: t.detach() for name, t in state.items()}
        carry = sequences | dict(state=state, steps=steps, halted=halted)
        return SupervisionStep(carry, values, answers, q_halt.detach())

    def new_carry(self, batch_size, dtype):
        """Returns what sequences carry from one supervision step to the next, a tree of tensors [B, ...].

        All of them are halted, so that the next step gives them new puzzles. dtype: of the state.
        """
        # the state has the shapes of the first one, whatever a fork puts into it
        with torch.no_grad():
            first = self.first_state(batch_size)
        seq_len = self.config.seq_len
        return dict(
            state={name: torch.zeros(t.shape, dtype=dtype) for name, t in first.items()},
            steps=torch.zeros(batch_size, dtype=torch.int32),
            halted=torch.ones(batch_size, dtype=torch.bool),
            inputs=torch.zeros(batch_size, seq_len, dtype=torch.int32),
            labels=torch.full((batch_size, seq_len), IGNORE_LABEL, dtype=torch.int32),
            puzzle_identifiers=torch.zeros(batch_size, dtype=torch.int32),
        )

    @torch.no_grad()
    def solve(self, question, steps=16, identifiers=None):
        """Returns the most confident answer of all supervision steps, and its confidence from 0 to 1.

        Args:
            question: tokens [B, S], for tokens [B, S] and a tensor [B]; or a string of task["symbols"], for a
                string and a float; or a list of strings, for a list of each.
            steps: the number of supervision steps.
            identifiers: with tokens, the puzzle identifier of each question [B], for ARC; None: 0 for all.

        Raises UserError for a string that is no question of this model, ValueError for another number of
        cells.
        """
        # strings: to tokens and back
        if isinstance(question, str):
            [answer], [confidence] = self.solve([question], steps)
            return answer, confidence
        if isinstance(question, list):
            rows = [parse_question(self.task, text)[1] for text in question]
            answers, confidences = self.solve(torch.from_numpy(np.stack(rows)), steps)
            return [text_of(self.task, answer) for answer in answers], confidences.tolist()

        # tokens
        B, S = question.shape
        if S != self.config.seq_len:
            raise ValueError(f"the question has {S} cells, not {self.config.seq_len}")
        # sequences that begin with these questions
        if identifiers is None:
            identifiers = torch.zeros(B)
        batch = dict(
            inputs=question.int(),
            labels=torch.full((B, S), IGNORE_LABEL, dtype=torch.int32),
            puzzle_identifiers=identifiers.int(),
        )
        sequences = take_new_puzzles(self.new_carry(B, torch.float32), batch)
        weights = self.weights()
        if self.prefix:
            weights["puzzle_rows"] = self.puzzle_emb.weights[batch["puzzle_identifiers"]]

        # the answer of the step where q_halt is highest
        best = torch.full((B,), -math.inf)
        answers = batch["inputs"]
        for _ in range(steps):
            step = self.supervision_step(self.settings, weights, sequences)
            sequences = step.carry
            answers = where(step.q_halt >= best, step.answers, answers)
            best = torch.maximum(step.q_halt, best)
        return answers.to(question), best.sigmoid()

    # Weights

    def weights(self):
        """Returns {name: float32 tensor} of the parameters that the optimizer trains."""
        named = self.named_parameters()
        return {name: p.detach().float() for name, p in named if name not in self.tied}

    def embed(self, inputs, puzzle_rows):
        """Returns the embedded question x [B, L, D]; inputs: tokens [B, S]; puzzle_rows: [B, D'] or None."""
        config = self.config
        table = self.embed_tokens.embedding_weight
        # A product with a one-hot matrix is exact, and so is its gradient's sum in float32. The gradient of
        # a gather would be a scatter that sums in the low precision.
        vocabulary = torch.arange(config.vocab_size, device=inputs.device, dtype=inputs.dtype)
        one_hot = inputs.unsqueeze(-1) == vocabulary  # [B, S, V]
        x = one_hot.to(table.dtype) @ table
        if self.prefix:
            # the row fills the first positions, zeros the others
            padding = self.prefix * config.hidden_size - config.puzzle_emb_ndim
            puzzle = F.pad(puzzle_rows.to(x.dtype), (0, padding))
            puzzle = puzzle.view(-1, self.prefix, config.hidden_size)
            x = torch.cat((puzzle, x), dim=1)
        # sqrt(0.5): the sum of two has the deviation of one
        if config.pos_encodings == "learned":
            x = math.sqrt(0.5) * (x + self.embed_pos.embedding_weight)
        return math.sqrt(config.hidden_size) * x

    def num_parameters(self):
        """Returns how many numbers training changes, those of the puzzle embedding included."""
        table_size = self.puzzle_emb.weights.numel() if self.prefix else 0
        return table_size + sum(w.numel() for w in self.weights().values())

    def flops_per_example(self, settings, cycles=None):
        """Returns the FLOPs of a sequence in one supervision step: (of a forward pass, of a training step).

        It counts matrix products only, 2 FLOPs a multiply-add. cycles: see forward. A fork that reads values
        cannot be counted, and has (0, 0).
        """
        def count(min_halt_steps):
            with FlopCounter() as counter:
                step = self.supervision_step(settings, leaves | buffers, carry, min_halt_steps, cycles)
                if min_halt_steps is not None:
                    step.values["loss"].sum().backward()
            return counter.total

        # one sequence on the device "meta", where tensors have shapes and no numbers
        leaves = self.weights()
        if self.prefix:
            leaves["puzzle_rows"] = torch.empty(1, self.config.puzzle_emb_ndim)
        leaves = {name: t.to("meta").requires_grad_() for name, t in leaves.items()}
        buffers = {name: t.to("meta") for name, t in self.named_buffers()}
        carry = tree_map(lambda t: t.to("meta"), self.new_carry(1, torch.float32))
        try:
            return count(None), count(carry["steps"])
        except RuntimeError:  # item() and the like
            return 0, 0

    @torch.no_grad()
    def init_weights(self, generator):
        """Draws truncated normals: deviation 1/sqrt(fan in) for matrices, 1 for the initial latents.

        q_head starts at -5, which says "not solved". Layers of other types, in forks, keep their own values.
        """
        # embeddings and matrices, in the order of the modules
        for module in self.modules():
            if isinstance(module, Embedding):  # embed() scales by sqrt(D)
                truncated_normal(module.embedding_weight, self.config.hidden_size ** -0.5, generator)
            elif isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)) and module is not self.q_head:
                truncated_normal(module.weight, module.weight[0].numel() ** -0.5, generator)
        # q_head begins far below 0, so that no sequence halts before it has learned to
        self.q_head.weight.zero_()
        self.q_head.bias.fill_(-5.0)
        truncated_normal(self.H_init, 1.0, generator)
        truncated_normal(self.L_init, 1.0, generator)

    def load_named(self, named):
        """Loads weights under the official code's names, with or without their prefixes.

        Returns True if the embedding has another number of rows: every row then becomes their mean, as in
        the official code. Raises ValueError for names or shapes that do not fit.
        """
        # the official code's names, without the prefixes of its wrappers
        weights = {}
        for name, t in named.items():
            weights[re.sub(r"^((_orig_mod|module|model|inner)\.)+", "", name)] = t.float()

        # other puzzles have no row of their own in the table: they take the mean
        expected = self.state_dict()
        table = weights.get("puzzle_emb.weights")
        num_rows = self.config.num_puzzle_identifiers
        is_averaged = self.prefix > 0 and table is not None and len(table) != num_rows
        if is_averaged:
            weights["puzzle_emb.weights"] = table.mean(0, keepdim=True).expand(num_rows, -1)

        # names and shapes must be these; a part of them would train in silence
        hint = "another block or other settings (hidden_size, L_layers, mlp_t, puzzle_emb_ndim?)"
        if expected.keys() - weights.keys():
            raise ValueError(f"lacks {min(expected.keys() - weights.keys())}: {hint}")
        if weights.keys() - expected.keys():
            raise ValueError(f"also has {min(weights.keys() - expected.keys())}: {hint}")
        for name, t in expected.items():
            if weights[name].shape != t.shape:
                raise ValueError(f"{name} has shape {list(weights[name].shape)}, not {list(t.shape)}: {hint}")
        self.load_state_dict(weights)
        return is_averaged

    @classmethod
    def load(cls, path, cells=0):
        """Returns the model in a file of scripts/export.py, or the average in a checkpoint of train.py.

        cells: of a puzzle; 0: as in training. Attention takes any number.

        Besides its config, the model has what the file says:
            task: the puzzle, {"kind", "grid": [rows, columns], "symbols": a character for each token}.
            settings: those of the training.
            puzzles: 100 test puzzles or fewer, {"inputs", "labels": [n, S], "puzzle_identifiers": [n]}.
            forks: the forks that trained it, see configurator.missing_forks.
            step, data: the steps of the training, and the SHA-256 of its dataset.

        Nothing in the file is executed. Raises ValueError for a damaged file, for one of the official code,
        and for weights that do not fit.
        """
        saved = read_torch_file(path)
        if "task" not in saved:
            raise ValueError(f"{path} does not say what it solves: scripts/export.py makes a model file of a "
                             "checkpoint of the official code")
        # build the model, of the size of these puzzles, with the averaged weights
        sizes = dict(saved["model"])
        sizes["seq_len"] = cells or sizes["seq_len"]
        forks = saved.get("forks", {})
        try:
            model = cls(TRMConfig(**sizes))
            model.load_named(saved.get("ema", saved["weights"]))
        except (TypeError, ValueError) as e:  # TypeError: a size that TRMConfig does not have
            hint = f"; it was trained with {', '.join(forks)}" if forks else ""
            raise ValueError(f"{path}: {e}{hint}") from None

        # add what the file says; older checkpoints say less
        model.task = saved["task"]
        model.settings = SimpleNamespace(**saved["settings"])
        # answers do not depend on the loss, which may be a fork's
        if model.settings.loss_type not in LOSSES:
            model.settings.loss_type = "softmax_cross_entropy"
        model.puzzles = saved.get("puzzles", {})
        model.forks = forks
        model.step = saved.get("step", 0)
        model.data = saved.get("data", "")
        return model.eval()


class FlopCounter(TorchDispatchMode):
    """Adds up the FLOPs of products by torch's formulas; torch's own counter is not safe in threads."""
    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # torch has formulas for products of matrices, attention and convolutions
        if func.overloadpacket in flop_registry:
            self.total += flop_registry[func.overloadpacket](*args, **kwargs, out_val=result)
        return result


def step_metrics(labels, answers, q_halt, solved, steps):
    """Returns METRICS of each sequence, {name: float32 [B]}; sequences without labels are left out."""
    # count the scored cells of each sequence, and the right ones among them
    is_labelled = labels != IGNORE_LABEL
    num_labelled = is_labelled.sum(-1)
    num_correct = (is_labelled & (answers == labels)).sum(-1)
    # zeros for a sequence without labels
    has_labels = num_labelled > 0
    metrics = dict(
        count=has_labels,
        accuracy=num_correct / num_labelled.clamp(min=1),
        exact_accuracy=has_labels & (num_correct == num_labelled),
        q_halt_accuracy=has_labels & ((q_halt >= 0) == solved),  # >=, as the official metric has it
        steps=torch.where(has_labels, steps, 0),
    )
    return {name: value.float() for name, value in metrics.items()}


# ---------------------------------------------------------------------------------------------------------
# Losses: functions (settings, logits [B, S, V] in float32, labels [B, S]) -> [B], by the values of loss_type

def cross_entropy(scores, labels):
    """Returns the mean cross-entropy of each sequence's scored cells, [B]; scores: logits of a softmax."""
    # cells that are not scored take token 0, and are left out below
    is_labelled = labels != IGNORE_LABEL
    target = torch.where(is_labelled, labels, 0).long().unsqueeze(-1)
    cell_loss = torch.logsumexp(scores, -1) - scores.gather(-1, target).squeeze(-1)  # [B, S]
    # the mean over the scored cells; 0 for a sequence without any
    total = torch.where(is_labelled, cell_loss, 0).sum(-1)
    return total / is_labelled.sum(-1).clamp(min=1)


def stablemax_cross_entropy(settings, logits, labels):
    return cross_entropy(log_stablemax(logits), labels)


def softmax_cross_entropy(settings, logits, labels):
    return cross_entropy(logits, labels)


LOSSES = dict(stablemax_cross_entropy=stablemax_cross_entropy, softmax_cross_entropy=softmax_cross_entropy)


def log_stablemax(x):
    """Returns logits whose softmax is the stablemax of x (arXiv 2501.04697): log s(x).

    s(x) is x + 1, or 1 / (1 - x) below 0, so log s(x) is log(1 + |x|) with the sign of x. This form and its
    slope are finite in float32. The slope at 0 is 1; written with abs or clamp it would depend on torch's
    version.
    """
    negative = x < 0
    size = torch.log1p(torch.where(negative, -x, x))
    return torch.where(negative, -size, size)


# ---------------------------------------------------------------------------------------------------------
# The network

def rms_norm(x, dim=-1):
    """Root-mean-square norm over `dim` without a weight, computed in float32."""
    y = x.float()
    mean_square = y.square().mean(dim, keepdim=True)
    return (y * torch.rsqrt(mean_square + 1e-5)).to(x.dtype)


class SwiGLU(nn.Module):
    """Gated MLP (arXiv 2002.05202) over the last dimension, or with across=True over the second of three."""

    def __init__(self, width, expansion, multiple_of=256):
        super().__init__()
        # the hidden width, rounded up; the official code's multiple is 256
        hidden = round(expansion * width * 2 / 3)
        hidden = math.ceil(hidden / multiple_of) * multiple_of
        self.gate_up_proj = nn.Linear(width, 2 * hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x, across=False):
        if across:
            # A batched product from the left, since transposing x would copy it twice. Gate and up are two
            # products: the TPU's compiler makes silu(gate) * up a part of the second one.
            gate_weight, up_weight = self.gate_up_proj.weight.chunk(2)
            gate = gate_weight.expand(len(x), -1, -1) @ x
            up = up_weight.expand(len(x), -1, -1) @ x
            down_weight = self.down_proj.weight.expand(len(x), -1, -1)
            return down_weight @ (F.silu(gate) * up)
        # along the last dimension one product gives both
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


def rotate(x, cos, sin):
    """Rotary position embedding (arXiv 2104.09864), halves convention; x [B, heads, L, d], cos [L, d]."""
    y = x.float()
    first, second = y.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (y * cos + turned * sin).to(x.dtype)


class Attention(nn.Module):
    """Self-attention over all positions.

    attend: a function (q, k, v) -> softmax(q k^T / sqrt(d)) v of tensors [B, heads, L, d]. A device may
    replace it.
    """
    attend = staticmethod(F.scaled_dot_product_attention)

    def __init__(self, width, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv_proj = nn.Linear(width, 3 * width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x, rope):
        # queries, keys and values of all heads in one product
        B, L, D = x.shape
        qkv = self.qkv_proj(x).view(B, L, 3, self.num_heads, D // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [B, heads, L, d] each

        # positions turn queries and keys
        if rope is not None:
            q = rotate(q, *rope)
            k = rotate(k, *rope)

        # attend, and join the heads
        out = self.attend(q, k, v)
        return self.o_proj(out.transpose(1, 2).reshape(B, L, D))


class Block(nn.Module):
    """Mixes positions (by an MLP or by attention), then channels; each is a residual followed by its norm."""

    def __init__(self, config, length):
        super().__init__()
        if config.mlp_t:
            self.mlp_t = SwiGLU(length, config.expansion, config.multiple_of)
        else:
            self.self_attn = Attention(config.hidden_size, config.num_heads)
        self.mlp = SwiGLU(config.hidden_size, config.expansion, config.multiple_of)

    def forward(self, x, rope):
        """Returns x [B, L, D] after the layer; rope: the pair (cos, sin) [L, d], or None."""
        # across positions: the first P are the puzzle embedding's, the others the cells, row by row
        if hasattr(self, "mlp_t"):
            x = rms_norm(x + self.mlp_t(x, across=True), dim=1)
        else:
            x = rms_norm(x + self.self_attn(x, rope))
        # across channels
        return rms_norm(x + self.mlp(x))


class Net(nn.Module):
    """The one network of the recursion (paper, section 4.3: a single network for both latents)."""

    def __init__(self, config, length):
        super().__init__()
        self.layers = nn.ModuleList(Block(config, length) for _ in range(config.L_layers))
        self.has_rope = config.pos_encodings == "rope"
        if self.has_rope:
            # an angle for each position and channel of a head, its two halves alike
            d = config.hidden_size // config.num_heads
            frequencies = 10000.0 ** (-torch.arange(0, d, 2).float() / d)
            angle = torch.outer(torch.arange(length).float(), frequencies).repeat(1, 2)
            self.register_buffer("cos", angle.cos(), persistent=False)  # [L, d]
            self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x):
        rope = (self.cos, self.sin) if self.has_rope else None
        for layer in self.layers:
            x = layer(x, rope)
        return x


# ---------------------------------------------------------------------------------------------------------
# Sizes, embeddings and files

@dataclass
class TRMConfig:
    """The sizes of a model; the settings of the same names explain them."""
    seq_len: int  # S
    vocab_size: int  # V
    num_puzzle_identifiers: int = 1  # N
    hidden_size: int = 512  # D
    num_heads: int = 8
    expansion: float = 4.0
    multiple_of: int = 256
    L_layers: int = 2
    H_cycles: int = 3
    L_cycles: int = 6
    mlp_t: bool = True
    pos_encodings: str = "none"
    puzzle_emb_ndim: int = 512  # D'
    puzzle_emb_len: int = 16  # P

    @classmethod
    def of(cls, settings, **sizes):
        """Takes the fields that `settings` has as attributes, and the given sizes of the dataset."""
        names = {field.name for field in fields(cls)}
        values = {name: value for name, value in vars(settings).items() if name in names}
        return cls(**values | sizes)

    @property
    def prefix(self):
        """P, the positions that the puzzle embedding takes; 0 without one."""
        if not self.puzzle_emb_ndim:
            return 0
        return self.puzzle_emb_len or math.ceil(self.puzzle_emb_ndim / self.hidden_size)

    def check(self):
        """Raises ValueError for sizes that cannot be built."""
        if not self.mlp_t and self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size {self.hidden_size} must be a multiple of "
                             f"num_heads {self.num_heads}")
        if self.pos_encodings == "rope" and not self.mlp_t and self.hidden_size // self.num_heads % 2:
            raise ValueError(f"hidden_size {self.hidden_size} must be an even multiple of "
                             f"num_heads {self.num_heads} for rope")
        if round(self.expansion * min(self.hidden_size, self.seq_len) * 2 / 3) < 1:
            raise ValueError(f"expansion {self.expansion} leaves the SwiGLUs no hidden width")
        if self.puzzle_emb_ndim > self.prefix * self.hidden_size:
            raise ValueError(f"puzzle_emb_ndim {self.puzzle_emb_ndim} does not fit "
                             f"puzzle_emb_len {self.puzzle_emb_len} x hidden_size {self.hidden_size}")


class Embedding(nn.Module):
    """A table under the official code's name for it."""

    def __init__(self, num_rows, width):
        super().__init__()
        self.embedding_weight = nn.Parameter(torch.empty(num_rows, width))


def read_torch_file(path):
    """Returns what torch.save wrote. Nothing in the file is executed. Raises ValueError if it is damaged."""
    # torch does not compare the checksums of the zip archives that it writes
    if zipfile.is_zipfile(path) and zipfile.ZipFile(path).testzip():
        raise ValueError(f"{path} is damaged")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as e:
        raise ValueError(f"{path} is damaged, or torch.save did not write it ({type(e).__name__})"
                         f"{other_format(path)}") from None


def other_format(path):
    """Returns a hint at what a file is that torch.load cannot read, or ""."""
    with open(path, "rb") as f:
        start = f.read(64)
    if start.startswith(b"version https://git-lfs"):
        return ": it is a Git LFS pointer, git lfs pull fetches the file"
    if start.lstrip().startswith(b"<"):
        return ": it is a web page, not the file behind it"
    if start[8:9] == b"{":
        return ": it looks like safetensors; torch.save(safetensors.torch.load_file(OLD), NEW) converts it"
    if start.startswith(b"PK") and not zipfile.is_zipfile(path):
        return ": it is cut off, copy it again"
    return ""


def truncated_normal(t, std, generator):
    """Fills t with a normal cut at two deviations and scaled to standard deviation std.

    By the inverse of the normal's distribution, as torch 2.9 does it, so that a seed gives the same weights
    with every version of torch.
    """
    std /= 0.8796256610342398  # the standard deviation of a unit normal cut at +-2
    # a uniform number between the distribution's values at the two cuts, then its inverse
    edge = math.erf(2 / math.sqrt(2))
    t.uniform_(-edge, edge, generator=generator)
    t.erfinv_()
    # rounding may pass the cut
    t.mul_(std * math.sqrt(2))
    t.clamp_(-2 * std, 2 * std)
