"""The Tiny Recursive Model (TRM, arXiv 2510.04871): recursion, supervision step, losses, network.

This file imports no other file of the project. Parameters have the official code's names, without its
"model.inner." prefix. The network computes in the dtype of the weights that it is called with: training
casts the float32 weights once a step.

Letters in shapes: B sequences, S cells of the puzzle, P positions of the puzzle embedding, L = P + S,
D hidden_size, D' puzzle_emb_ndim, V vocabulary, N puzzle identifiers.
"""
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

IGNORE_LABEL = -100  # the label of cells that no loss and no metric counts
# The values of a supervision step, a number for each sequence. The log averages METRICS over the sequences
# that halt, and LOSS_TERMS over all sequences of a training step. "count" is 1 where the sequence has labels.
METRICS = ("count", "accuracy", "exact_accuracy", "q_halt_accuracy", "steps")
LOSS_TERMS = ("loss", "lm_loss", "q_halt_loss")


# ---------------------------------------------------------------------------------------------------------
# The supervision step (paper, sections 2 and 4.6)

class SupervisionStep(NamedTuple):
    """The results of a supervision step on B sequences."""
    sequences: dict  # the sequences after the step, detached; "halted" says which of them have ended
    values: dict  # {name of METRICS or LOSS_TERMS: float32 [B]}; training minimizes "loss"
    answers: torch.Tensor  # the predicted tokens, int32 [B, S]
    q_halt: torch.Tensor  # float32 [B]; positive where the model predicts that its answer is right


class TRM(nn.Module):
    """The network with its embeddings and heads, and all that a sequence goes through.

    model(sequences) is one supervision step with the module's own weights; call_with() takes others. A fork
    may replace the methods that a supervision step goes through; they stand in the order in which it calls
    them. They see parameters in forward_dtype and buffers in their own dtype; ranks do not synchronize
    buffers. self.training is false in evaluations, which do not call halts().

    Args:
        settings: train.py's settings; their seed decides the first weights, which are equal on every device.
        seq_len: the cells of a puzzle, S.
        vocab_size: V.
        num_puzzle_identifiers: N.
        task: what puzzles/__init__.py calls a task, for forks that know more of a puzzle than its sizes.

    Raises ValueError for settings that cannot be built.
    """
    def __init__(self, settings, seq_len, vocab_size, num_puzzle_identifiers=1, task=None):
        super().__init__()
        self.settings = settings
        self.task = task
        self.sizes = dict(
            seq_len=seq_len, vocab_size=vocab_size, num_puzzle_identifiers=num_puzzle_identifiers)
        D = settings.hidden_size
        if settings.loss_type not in LOSSES:  # a checkpoint's may be in a fork
            raise ValueError(f"there is no loss_type {settings.loss_type!r}: run the fork that has it")

        # positions: the puzzle embedding, if there is one, and then the cells
        self.has_puzzle_emb = settings.puzzle_emb_ndim > 0
        self.prefix = 0  # P
        if self.has_puzzle_emb:
            self.prefix = settings.puzzle_emb_len or math.ceil(settings.puzzle_emb_ndim / D)
        if settings.puzzle_emb_ndim > self.prefix * D:
            raise ValueError(f"puzzle_emb_ndim {settings.puzzle_emb_ndim} does not fit "
                             f"puzzle_emb_len {self.prefix} x hidden_size {D}")
        self.length = self.prefix + seq_len  # L

        # The order of the modules is the order in which init_weights draws their weights.
        # Embeddings and heads; SignSGD trains the puzzle embedding, so it is a buffer and no parameter.
        self.embed_tokens = Embedding(vocab_size, D)
        self.lm_head = nn.Linear(D, vocab_size, bias=False)
        self.q_head = nn.Linear(D, 2)  # halt, and the official code's unused "continue"
        if self.has_puzzle_emb:
            self.puzzle_emb = nn.Module()
            table = torch.zeros(num_puzzle_identifiers, settings.puzzle_emb_ndim)
            self.puzzle_emb.register_buffer("weights", table)
        if settings.pos_encodings == "learned":
            self.embed_pos = Embedding(self.length, D)

        # the network and the first latents
        self.L_level = Net(settings, self.length)
        self.register_buffer("H_init", torch.empty(D))
        self.register_buffer("L_init", torch.empty(D))
        self.init_weights(torch.Generator().manual_seed(settings.seed))

    def forward(self, sequences, puzzle_rows=None, min_halt_steps=None, cycles=None):
        """Runs the recursion once on each sequence, scores its answer and decides whether it halts.

        Args:
            sequences: B of them, see new_sequences() and take_new_puzzles().
            puzzle_rows: the rows of the puzzle embedding that belong to them, [B, D'], where there is one.
            min_halt_steps: in training, the least number of steps of each sequence, int32 [B]. In evaluations
                no sequence halts here: evaluate.Evaluator decides when one leaves.
            cycles: (H_cycles, L_cycles); None: those of the settings. Training always passes them.

        Returns a SupervisionStep.
        """
        inputs = sequences["inputs"]
        labels = sequences["labels"]
        steps = sequences["steps"]

        # the first latents are part of the graph, so that parameters can learn them
        latents = {}
        for name, first in self.first_latents(len(inputs)).items():
            carried = sequences["latents"][name]
            latents[name] = where(steps == 0, first.to(carried.dtype), carried)

        # the question, the recursion, the answer
        x = self.embed(inputs, puzzle_rows)
        H_cycles, L_cycles = cycles or (self.settings.H_cycles, self.settings.L_cycles)
        latents = self.deep_recursion(x, latents, H_cycles, L_cycles)
        # labels: for forks that choose among several answers; TRM.answer ignores them
        logits, q_halt = self.answer(latents, labels if self.training else None)
        logits = logits.float()
        q_halt = q_halt.float()
        answers = logits.argmax(-1).to(torch.int32)

        # the loss of each sequence
        solved = self.is_solved(inputs, labels, answers)
        values = self.losses(logits, q_halt, labels, solved)

        # metrics and halting; the next step continues from here, without a gradient to this one
        steps = steps + 1
        with torch.no_grad():
            values |= step_metrics(labels, answers, q_halt, solved, steps)
            halted = torch.zeros_like(solved)
            if self.training:
                halted = self.halts(steps, q_halt, min_halt_steps)
        latents = {name: z.detach() for name, z in latents.items()}
        sequences = sequences | dict(latents=latents, steps=steps, halted=halted)
        return SupervisionStep(sequences, values, answers, q_halt.detach())

    def call_with(self, weights, *arguments):
        """Returns self(*arguments) with weights, {name: tensor}, in place of the module's own parameters."""
        return functional_call(self, weights, arguments)

    # What a sequence goes through. Its latents are a dict of any tensors [B, ...].

    def first_latents(self, B):
        """Returns the latents with which sequences begin, {name: [B, ...]}; parameters may decide them."""
        shape = B, self.length, self.settings.hidden_size
        return dict(z_H=self.H_init.expand(shape), z_L=self.L_init.expand(shape))

    def embed(self, inputs, puzzle_rows):
        """Returns the embedded question x [B, L, D]; inputs: tokens [B, S]; puzzle_rows: [B, D'] or None."""
        D = self.settings.hidden_size
        embedding = self.embed_tokens.embedding_weight
        # A product with a one-hot matrix is exact, and sums its gradient in float32. The gradient of a gather
        # would be a scatter that sums in the low precision.
        vocabulary = torch.arange(len(embedding), device=inputs.device, dtype=inputs.dtype)
        one_hot = inputs.unsqueeze(-1) == vocabulary  # [B, S, V]
        x = one_hot.to(embedding.dtype) @ embedding
        if self.has_puzzle_emb:
            # the row fills the first positions, zeros the others
            padding = self.prefix * D - self.settings.puzzle_emb_ndim
            puzzle = F.pad(puzzle_rows.to(x.dtype), (0, padding))
            x = torch.cat((puzzle.view(-1, self.prefix, D), x), dim=1)
        # sqrt(0.5): the sum of two has the deviation of one
        if self.settings.pos_encodings == "learned":
            x = math.sqrt(0.5) * (x + self.embed_pos.embedding_weight)
        return math.sqrt(D) * x

    # The recursion (paper, figure 3). The paper calls z_H "y", z_L "z", H_cycles "T" and L_cycles "n".

    def deep_recursion(self, x, latents, H_cycles, L_cycles):
        """Runs H_cycles latent recursions on the embedded question x [B, L, D]; the last has a gradient."""
        # all but the last without a gradient
        with torch.no_grad():
            for _ in range(H_cycles - 1):
                latents = self.latent_recursion(x, latents, L_cycles)
        return self.latent_recursion(x, latents, L_cycles)

    def latent_recursion(self, x, latents, L_cycles):
        """Refines the latent z_L L_cycles times, then the answer z_H, both [B, L, D]."""
        net = self.L_level
        z_H = latents["z_H"]
        z_L = latents["z_L"]
        # think: the latent sees the question and the answer so far
        for _ in range(L_cycles):
            z_L = net(z_L + (z_H + x))
        # write: the answer sees only the latent
        z_H = net(z_H + z_L)
        return dict(z_H=z_H, z_L=z_L)

    def answer(self, latents, labels=None):
        """Returns the logits [B, S, V] and q_halt [B] of the latents; labels [B, S]: in training only."""
        # an answer for each cell of the puzzle; the first position says whether to halt
        logits = self.lm_head(latents["z_H"][:, self.prefix:])
        q_halt = self.q_head(latents["z_H"][:, 0])[:, 0]
        return logits, q_halt

    @staticmethod
    def is_solved(inputs, labels, answers):
        """Returns which answers have the label in every scored cell, bool [B]; all arguments are [B, S].

        It is the target of q_halt. A puzzle with several right answers has rules of its own here.
        """
        return ((answers == labels) | (labels == IGNORE_LABEL)).all(-1)

    def losses(self, logits, q_halt, labels, solved):
        """Returns the values of LOSS_TERMS, {name: [B]}; training minimizes "loss".

        Args:
            logits: float32 [B, S, V].
            q_halt: float32 [B].
            labels: [B, S].
            solved: which answers are right, bool [B].
        """
        cell_loss = LOSSES[self.settings.loss_type]
        lm_loss = cell_loss(self.settings, logits, labels)
        # how well q_halt tells whether the answer is right
        q_halt_loss = F.binary_cross_entropy_with_logits(q_halt, solved.float(), reduction="none")
        return dict(loss=lm_loss + 0.5 * q_halt_loss, lm_loss=lm_loss, q_halt_loss=q_halt_loss)

    def halts(self, steps, q_halt, min_halt_steps):
        """Returns which sequences end after a training step, bool [B]; steps, min_halt_steps: int32 [B]."""
        # at q_halt > 0, unless exploration asks for more steps
        wants_to_halt = (steps >= self.settings.halt_max_steps) | (q_halt > 0)
        return wants_to_halt & (steps >= min_halt_steps)

    def new_sequences(self, B, dtype=torch.float32):
        """Returns B sequences that have halted, so that take_new_puzzles() gives each a puzzle.

        A tree of tensors [B, ...]: latents, of first_latents, in dtype; steps; halted; and what the puzzles
        of a batch have.
        """
        # latents have the shapes of the first ones, whatever a fork puts into them
        with torch.no_grad():
            first = self.first_latents(B)
        S = self.sizes["seq_len"]
        return dict(
            latents={name: torch.zeros(z.shape, dtype=dtype) for name, z in first.items()},
            steps=torch.zeros(B, dtype=torch.int32),
            halted=torch.ones(B, dtype=torch.bool),
            inputs=torch.zeros(B, S, dtype=torch.int32),
            labels=torch.full((B, S), IGNORE_LABEL, dtype=torch.int32),
            puzzle_identifiers=torch.zeros(B, dtype=torch.int32),
        )

    # Weights

    def weights(self):
        """Returns {name: float32 tensor} of the parameters that the optimizer trains."""
        return {name: p.detach().float() for name, p in self.named_parameters()}

    def num_parameters(self):
        """Returns how many numbers training changes, those of the puzzle embedding included."""
        table_size = self.puzzle_emb.weights.numel() if self.has_puzzle_emb else 0
        return table_size + sum(w.numel() for w in self.weights().values())

    @torch.no_grad()
    def init_weights(self, generator):
        """Draws truncated normals: deviation 1/sqrt(fan in) for matrices, 1 for the initial latents.

        Layers of other types and their biases, which only forks have, keep torch's values.
        """
        # embeddings and matrices, in the order of the modules
        for module in self.modules():
            if isinstance(module, Embedding):  # embed() scales by sqrt(D)
                truncated_normal(module.embedding_weight, self.settings.hidden_size ** -0.5, generator)
            elif isinstance(module, nn.Linear) and module is not self.q_head:
                truncated_normal(module.weight, module.in_features ** -0.5, generator)
        # q_head begins far below 0, so that no sequence halts before it has learned to
        self.q_head.weight.zero_()
        self.q_head.bias.fill_(-5.0)
        truncated_normal(self.H_init, 1.0, generator)
        truncated_normal(self.L_init, 1.0, generator)


def take_new_puzzles(sequences, puzzles):
    """Returns the sequences, where those that have halted begin again: at step 0, with new puzzles.

    Args:
        sequences: see TRM.new_sequences.
        puzzles: inputs [B, S], labels [B, S] (IGNORE_LABEL is not scored) and puzzle_identifiers [B].
    """
    # TRM.forward gives a sequence its first latents at step 0
    fresh = puzzles | dict(steps=torch.zeros_like(sequences["steps"]))
    halted = sequences["halted"]
    return sequences | {name: where(halted, value, sequences[name]) for name, value in fresh.items()}


def where(mask, new, old):
    """Returns new [B, ...] where the mask [B] is true, elsewhere old [B, ...]."""
    mask = mask.view(-1, *[1] * (old.ndim - 1))
    return torch.where(mask, new, old)


def step_metrics(labels, answers, q_halt, solved, steps):
    """Returns METRICS of each sequence, {name: float32 [B]}; sequences without labels are left out."""
    # count the scored cells of each sequence, and the right ones among them
    is_labeled = labels != IGNORE_LABEL
    num_labeled = is_labeled.sum(-1)
    num_correct = (is_labeled & (answers == labels)).sum(-1)
    # zeros for a sequence without labels
    has_labels = num_labeled > 0
    metrics = dict(
        count=has_labels,
        accuracy=num_correct / num_labeled.clamp(min=1),
        exact_accuracy=has_labels & (num_correct == num_labeled),
        q_halt_accuracy=has_labels & ((q_halt >= 0) == solved),  # >=, as the official metric has it
        steps=torch.where(has_labels, steps, 0),
    )
    return {name: value.float() for name, value in metrics.items()}


# ---------------------------------------------------------------------------------------------------------
# Losses: functions (settings, logits [B, S, V] in float32, labels [B, S]) -> [B], by the values of loss_type

def cross_entropy(scores, labels):
    """Returns the mean cross-entropy of each sequence's scored cells, [B]; scores: logits of a softmax."""
    # cells that are not scored take token 0, and are left out below
    is_labeled = labels != IGNORE_LABEL
    target = torch.where(is_labeled, labels, 0).long().unsqueeze(-1)
    cell_loss = torch.logsumexp(scores, -1) - scores.gather(-1, target).squeeze(-1)  # [B, S]
    # the mean over the scored cells; 0 for a sequence without any
    total = torch.where(is_labeled, cell_loss, 0).sum(-1)
    return total / is_labeled.sum(-1).clamp(min=1)


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
    # log(1 + |x|), with the sign of x
    negative = x < 0
    size = torch.log1p(torch.where(negative, -x, x))
    return torch.where(negative, -size, size)


# ---------------------------------------------------------------------------------------------------------
# The network

def rms_norm(x, dim=-1):
    """Root-mean-square norm over `dim` without a weight, computed in float32."""
    # [B, L, D]: the norm of each position, or with dim=1 of each channel
    y = x.float()
    mean_square = y.square().mean(dim, keepdim=True)
    return (y * torch.rsqrt(mean_square + 1e-5)).to(x.dtype)


class SwiGLU(nn.Module):
    """Gated MLP (arXiv 2002.05202) over the last dimension, or with across=True over the second of three."""

    def __init__(self, width, expansion, multiple_of):
        super().__init__()
        # the hidden width, rounded up; the official code's multiple is 256
        hidden = max(1, round(expansion * width * 2 / 3))
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
    # the angle of a channel of the first half is also the angle of its partner in the second half
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
        if width % (2 * num_heads):  # rotate() halves the channels of a head
            raise ValueError(f"hidden_size {width} must be a multiple of twice num_heads {num_heads}")
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

        # attend [B, heads, L, d], and join the heads [B, L, D]
        out = self.attend(q, k, v)
        return self.o_proj(out.transpose(1, 2).reshape(B, L, D))


class Block(nn.Module):
    """Mixes positions (by an MLP or by attention), then channels; each is a residual followed by its norm."""

    def __init__(self, settings, length):
        super().__init__()
        if settings.mlp_t:
            self.mlp_t = SwiGLU(length, settings.expansion, settings.multiple_of)
        else:
            self.self_attn = Attention(settings.hidden_size, settings.num_heads)
        self.mlp = SwiGLU(settings.hidden_size, settings.expansion, settings.multiple_of)

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

    def __init__(self, settings, length):
        super().__init__()
        self.layers = nn.ModuleList(Block(settings, length) for _ in range(settings.L_layers))
        self.has_rope = settings.pos_encodings == "rope" and not settings.mlp_t
        if self.has_rope:
            # an angle for each position and channel of a head, its two halves alike
            d = settings.hidden_size // (2 * settings.num_heads)
            frequencies = 10000.0 ** (-torch.arange(d).float() / d)
            angle = torch.outer(torch.arange(length).float(), frequencies).repeat(1, 2)
            self.register_buffer("cos", angle.cos(), persistent=False)  # [L, d]
            self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x):
        # x [B, L, D] goes through all layers
        rope = (self.cos, self.sin) if self.has_rope else None
        for layer in self.layers:
            x = layer(x, rope)
        return x


# ---------------------------------------------------------------------------------------------------------
# Weights

class Embedding(nn.Module):
    """A table under the official code's name for it."""

    def __init__(self, num_rows, width):
        super().__init__()
        self.embedding_weight = nn.Parameter(torch.empty(num_rows, width))


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
