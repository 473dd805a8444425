"""The Tiny Recursive Model (TRM, arXiv 2510.04871): network, loss, supervision step, optimizers, schedules.

Pure torch: it depends on no device, and TRM.load alone reads a file. Parameter names are the official code's,
without its "model.inner." prefix. The network computes in the dtype of the weights it is called with:
training casts the float32 weights once a step and calls the network through torch.func.functional_call.

Letters in shape comments: B sequences, S cells of the puzzle, P positions of the puzzle embedding, L = P +
S, D hidden_size, V vocabulary, N puzzle identifiers.
"""
import math
import operator
from dataclasses import dataclass, fields
from fractions import Fraction

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_map

IGNORE_LABEL = -100  # cells that the loss leaves out
# The names of what supervision_step adds up over sequences: all but count are logged.
METRICS = ("count", "accuracy", "exact_accuracy", "q_halt_accuracy", "steps", "lm_loss", "q_halt_loss")


@dataclass
class TRMConfig:
    seq_len: int  # S
    vocab_size: int  # V
    num_puzzle_identifiers: int = 1  # N
    hidden_size: int = 512
    num_heads: int = 8
    expansion: float = 4.0
    L_layers: int = 2
    H_cycles: int = 3
    L_cycles: int = 6
    mlp_t: bool = True
    pos_encodings: str = "none"
    puzzle_emb_ndim: int = 512
    puzzle_emb_len: int = 16

    @classmethod
    def of(cls, settings, **data):
        """Takes the fields that `settings` has as attributes, and those given."""
        values = {f.name: getattr(settings, f.name) for f in fields(cls) if hasattr(settings, f.name)}
        return cls(**values | data)


def rms_norm(x, dim=-1):
    """Root-mean-square norm over `dim` without a weight, computed in float32."""
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(dim, keepdim=True) + 1e-5)).to(x.dtype)


class SwiGLU(nn.Module):
    """Gated MLP (arXiv 2002.05202) over the last dimension, or with across=True over the second of three."""

    def __init__(self, width, expansion):
        super().__init__()
        inner = math.ceil(round(expansion * width * 2 / 3) / 256) * 256
        self.gate_up_proj = nn.Linear(width, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x, across=False):
        if across:  # a batched matmul from the left; transposing x would copy it twice
            # Two products: the TPU's compiler makes silu(gate) * up a part of the second one.
            gate, up = (w.expand(len(x), -1, -1) @ x for w in self.gate_up_proj.weight.chunk(2))
            return self.down_proj.weight.expand(len(x), -1, -1) @ (F.silu(gate) * up)
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


def rotate(x, cos, sin):
    """Rotary position embedding (arXiv 2104.09864), halves convention.

    x: [B, heads, L, d]; cos, sin: [L, d], float32.
    """
    y = x.float()
    a, b = y.chunk(2, dim=-1)
    return (y * cos + torch.cat((-b, a), dim=-1) * sin).to(x.dtype)


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
        B, L, D = x.shape
        qkv = self.qkv_proj(x).view(B, L, 3, self.num_heads, D // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [B, heads, L, d] each
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        out = self.attend(q, k, v)
        return self.o_proj(out.transpose(1, 2).reshape(B, L, D))


def mix(x, mlp, across=False):
    """The norm of x + mlp(x), over channels or, with across=True, over positions. x: [B, L, D]."""
    return rms_norm(x + mlp(x, across), dim=1 if across else -1)


class Block(nn.Module):
    """Mixes positions (by an MLP or by attention), then channels; each is a residual followed by its norm.

    mix: a function (x, mlp, across), as mix() above. A device may replace it.
    """
    mix = staticmethod(mix)

    def __init__(self, config, length):
        super().__init__()
        if config.mlp_t:
            self.mlp_t = SwiGLU(length, config.expansion)
        else:
            self.self_attn = Attention(config.hidden_size, config.num_heads)
        self.mlp = SwiGLU(config.hidden_size, config.expansion)

    def forward(self, x, rope):  # [B, L, D]
        if hasattr(self, "mlp_t"):
            x = self.mix(x, self.mlp_t, across=True)
        else:
            x = rms_norm(x + self.self_attn(x, rope))
        return self.mix(x, self.mlp)


class Net(nn.Module):
    """The one network of the recursion (paper, section 4.3: a single network for both latents)."""

    def __init__(self, block, config, length):
        super().__init__()
        self.layers = nn.ModuleList(block(config, length) for _ in range(config.L_layers))

    def forward(self, x, rope):
        for layer in self.layers:
            x = layer(x, rope)
        return x


class Recomputed(torch.autograd.Function):
    """fn(*tensors), one tensor; the backward pass computes it again instead of keeping its activations.

    barrier: a function on a list of tensors. A compiler that sees the whole step must not merge the second
    computation with the first; a device with such a compiler sets a barrier here.
    """
    barrier = staticmethod(lambda tensors: tensors)

    @staticmethod
    def forward(ctx, fn, *tensors):
        ctx.fn = fn
        ctx.save_for_backward(*tensors)
        return fn(*tensors)

    @staticmethod
    def backward(ctx, grad):
        *tensors, grad = Recomputed.barrier([*ctx.saved_tensors, grad])
        leaves = [t.detach().requires_grad_() for t in tensors]
        with torch.enable_grad():
            return None, *torch.autograd.grad(ctx.fn(*leaves), leaves, grad)


def recomputed_attention(q, k, v):
    """softmax(q k^T / sqrt(d)) v of [B, heads, L, d]; for the backward pass only q, k and v are kept.

    For XLA, which compiles torch's own attention to something slower: it keeps all scores, in float32, and
    makes a pass over them for rows that a mask leaves empty.
    """
    def attend(q, k, v):  # float32 scores cost nothing: a TPU accumulates bfloat16 products in float32
        scores = (q.float() * q.shape[-1] ** -0.5) @ k.float().mT
        return scores.softmax(-1).to(v.dtype) @ v

    return Recomputed.apply(attend, q, k, v)


def use_recomputed_attention(model, barrier):
    """Gives a model recomputed_attention, and Recomputed the device's barrier."""
    Recomputed.barrier = staticmethod(barrier)
    for layer in model.L_level.layers:
        if hasattr(layer, "self_attn"):
            layer.self_attn.attend = recomputed_attention


class Embedding(nn.Module):
    """A table under the official code's name for it."""

    def __init__(self, rows, width):
        super().__init__()
        self.embedding_weight = nn.Parameter(torch.empty(rows, width))


class TRM(nn.Module):
    """The network with its embeddings and heads.

    config: a TRMConfig; seed: of the initial weights, which are the same on every device. block: the class
    of a layer, called as block(config, L); its forward takes x [B, L, D] and rope, a pair or None.
    Raises ValueError for sizes that cannot be built.
    """
    block = Block

    def __init__(self, config, seed=0):
        super().__init__()
        self.config = c = config
        if c.pos_encodings not in ("none", "rope", "learned"):
            raise ValueError(f"pos_encodings must be none, rope or learned, not {c.pos_encodings}")
        multiple = "an even multiple" if c.pos_encodings == "rope" else "a multiple"
        if not c.mlp_t and c.hidden_size % (c.num_heads * (2 if c.pos_encodings == "rope" else 1)):
            raise ValueError(f"hidden_size {c.hidden_size} must be {multiple} of num_heads {c.num_heads}")
        if round(c.expansion * min(c.hidden_size, c.seq_len) * 2 / 3) < 1:
            raise ValueError(f"expansion {c.expansion} leaves the SwiGLUs no hidden width")
        self.prefix = 0  # P
        if c.puzzle_emb_ndim:
            self.prefix = c.puzzle_emb_len or math.ceil(c.puzzle_emb_ndim / c.hidden_size)
        if c.puzzle_emb_ndim > self.prefix * c.hidden_size:
            raise ValueError(f"puzzle_emb_ndim {c.puzzle_emb_ndim} does not fit "
                             f"puzzle_emb_len {c.puzzle_emb_len} x hidden_size {c.hidden_size}")
        self.length = self.prefix + c.seq_len  # L
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        self.q_head = nn.Linear(c.hidden_size, 2)  # halt, and the official code's unused "continue"
        if c.puzzle_emb_ndim:  # a vector for each identifier; a buffer, since SignSGD trains it
            table = torch.zeros(c.num_puzzle_identifiers, c.puzzle_emb_ndim)
            self.puzzle_emb = nn.Module()
            self.puzzle_emb.register_buffer("weights", table)
        if c.pos_encodings == "learned":
            self.embed_pos = Embedding(self.length, c.hidden_size)
        self.L_level = Net(self.block, c, self.length)
        self.register_buffer("H_init", torch.empty(c.hidden_size))
        self.register_buffer("L_init", torch.empty(c.hidden_size))
        if c.pos_encodings == "rope":
            d = c.hidden_size // c.num_heads
            frequencies = 10000.0 ** (-torch.arange(0, d, 2).float() / d)
            angle = torch.outer(torch.arange(self.length).float(), frequencies).repeat(1, 2)
            self.register_buffer("cos", angle.cos(), persistent=False)  # [L, d]
            self.register_buffer("sin", angle.sin(), persistent=False)
        self.init_weights(torch.Generator().manual_seed(seed))

    @classmethod
    def load(cls, path):
        """The model in a file of `train.py --export`, or in a checkpoint of train.py: its averaged weights.

        model.task: {"kind", "grid": [rows, columns], "symbols": a character for each token}. Nothing in the
        file is executed. Raises ValueError for weights that do not fit.
        """
        saved = torch.load(path, map_location="cpu", weights_only=True)
        model = cls(TRMConfig(**saved["model"]))
        model.load_named(saved.get("ema", saved["weights"]))
        model.task = saved["task"]
        return model.eval()

    @torch.no_grad()
    def solve(self, question, steps=16):
        """The surest answer in so many supervision steps, and how sure the model is, from 0 to 1.

        question: a string of task["symbols"], line breaks aside, for a string and a float; or tokens [B, S],
        for tokens [B, S] and a tensor [B]. Raises ValueError for other symbols or another number of cells.
        """
        if isinstance(question, str):
            symbols = self.task["symbols"]
            tokens = torch.tensor([symbols.index(symbol, 1) for symbol in question if symbol not in "\r\n"])
            answers, sure = self.solve(tokens.view(1, -1), steps)
            return "".join(symbols[token] for token in answers[0]), sure.item()
        B, S = question.shape
        if S != self.config.seq_len:
            raise ValueError(f"the question has {S} cells, not {self.config.seq_len}")
        z_H, z_L = (t.expand(B, self.length, -1) for t in (self.H_init, self.L_init))
        best = torch.full([B], -math.inf, device=question.device)
        answers, identifiers = torch.zeros_like(question), torch.zeros_like(question[:, 0])
        for _ in range(steps):
            z_H, z_L, logits, q_halt = self(z_H, z_L, question, identifiers)
            surer = q_halt >= best
            answers = torch.where(surer.unsqueeze(-1), logits.argmax(-1), answers)
            best = torch.where(surer, q_halt, best)
        return answers, best.sigmoid()

    @torch.no_grad()
    def init_weights(self, generator):
        """Truncated normals of deviation 1/sqrt(fan in), 1 for initial states; q_head says "not solved".

        Parameters of other kinds of modules keep what those gave them.
        """
        def fill(t, std):
            std /= 0.8796256610342398  # a unit normal cut at +-2 has this standard deviation
            nn.init.trunc_normal_(t, std=std, a=-2 * std, b=2 * std, generator=generator)

        for module in self.modules():
            if isinstance(module, Embedding):  # 1/sqrt(D) too: embed() scales by sqrt(D)
                fill(module.embedding_weight, self.config.hidden_size ** -0.5)
            elif isinstance(module, (nn.Linear, nn.Conv1d)) and module is not self.q_head:
                fill(module.weight, module.weight[0].numel() ** -0.5)
        self.q_head.weight.zero_()
        self.q_head.bias.fill_(-5.0)
        fill(self.H_init, 1.0)
        fill(self.L_init, 1.0)

    def load_named(self, named):
        """Copies weights by the official code's names. Raises ValueError for names or shapes that do not fit.

        A puzzle embedding of other puzzles is averaged, as in the official code.
        """
        named = {name.removeprefix("_orig_mod.").removeprefix("model.").removeprefix("inner."): t.float()
                 for name, t in named.items()}
        own, table = self.state_dict(), "puzzle_emb.weights"
        if table in named and table in own and named[table].shape[0] != own[table].shape[0]:
            named[table] = named[table].mean(0, keepdim=True).expand(len(own[table]), -1)
        for problem, names in (("lacks", own.keys() - named.keys()), ("also has", named.keys() - own.keys())):
            if names:
                raise ValueError(f"{problem} {min(names)}: its model has another block or other settings "
                                 "(mlp_t, L_layers, pos_encodings, puzzle_emb_ndim?)")
        for name, t in own.items():
            if named[name].shape != t.shape:
                raise ValueError(f"{name} has shape {list(named[name].shape)}, these settings need "
                                 f"{list(t.shape)}")
        self.load_state_dict(named)

    def embed(self, inputs, puzzle_identifiers):
        """The embedded question x: [B, L, D] from tokens [B, S] and identifiers [B]."""
        c, table = self.config, self.embed_tokens.embedding_weight
        # A matmul with a one-hot matrix: exact, and its gradient is a matmul too, where a gather's is
        # a scatter that sums in the low precision.
        one_hot = inputs.unsqueeze(-1) == torch.arange(c.vocab_size, device=inputs.device, dtype=inputs.dtype)
        x = one_hot.to(table.dtype) @ table
        if self.prefix:
            rows = self.puzzle_emb.weights[puzzle_identifiers].to(x.dtype)
            rows = F.pad(rows, (0, self.prefix * c.hidden_size - c.puzzle_emb_ndim))
            x = torch.cat((rows.view(-1, self.prefix, c.hidden_size), x), dim=1)
        if c.pos_encodings == "learned":
            x = math.sqrt(0.5) * (x + self.embed_pos.embedding_weight)
        return math.sqrt(c.hidden_size) * x

    def recursion(self, x, z_H, z_L, L_cycles):
        """Latent recursion (paper, figure 3): refines the latent z_L L_cycles times, then the answer z_H."""
        rope = (self.cos, self.sin) if self.config.pos_encodings == "rope" else None
        for _ in range(L_cycles):
            z_L = self.L_level(z_L + (z_H + x), rope)
        z_H = self.L_level(z_H + z_L, rope)
        return z_H, z_L

    def forward(self, z_H, z_L, inputs, puzzle_identifiers, cycles=None):
        """Deep recursion (paper, figure 3) of one supervision step. Only the last recursion has a gradient.

        z_H, z_L: [B, L, D]; inputs: [B, S] tokens; puzzle_identifiers: [B]; cycles: (H_cycles, L_cycles),
        by default the config's. Returns z_H, z_L, logits [B, S, V] and q_halt [B], float32, which is
        positive where the model predicts that its answer is correct.
        """
        x = self.embed(inputs, puzzle_identifiers)
        H_cycles, L_cycles = cycles or (self.config.H_cycles, self.config.L_cycles)
        with torch.no_grad():
            for _ in range(H_cycles - 1):
                z_H, z_L = self.recursion(x, z_H, z_L, L_cycles)
        z_H, z_L = self.recursion(x, z_H, z_L, L_cycles)
        logits = self.lm_head(z_H[:, self.prefix:])
        q_halt = self.q_head(z_H[:, 0])[:, 0].float()
        return z_H, z_L, logits, q_halt

    def new_carry(self, batch_size, dtype):
        """The state of sequences between supervision steps. All are halted: the next step gives them data."""
        c = self.config
        return dict(
            z_H=torch.zeros(batch_size, self.length, c.hidden_size, dtype=dtype),
            z_L=torch.zeros(batch_size, self.length, c.hidden_size, dtype=dtype),
            steps=torch.zeros(batch_size, dtype=torch.int32),
            halted=torch.ones(batch_size, dtype=torch.bool),
            inputs=torch.zeros(batch_size, c.seq_len, dtype=torch.int32),
            labels=torch.full((batch_size, c.seq_len), IGNORE_LABEL, dtype=torch.int32),
            puzzle_identifiers=torch.zeros(batch_size, dtype=torch.int32),
        )

    def flops_per_example(self, cycles=None):
        """(FLOPs of a forward pass, of a training step) of a sequence in one supervision step.

        Counts matmuls alone, 2 FLOPs per multiply-add. cycles: (H_cycles, L_cycles), by default the config's.
        """
        c, L, D = self.config, self.length, self.config.hidden_size
        H_cycles, L_cycles = cycles or (c.H_cycles, c.L_cycles)
        named = self.L_level.named_parameters()
        weights = sum(p.numel() * (D if ".mlp_t." in name else L) for name, p in named)
        apply = 2 * c.L_layers * (0 if c.mlp_t else 2 * L * L * D) + 2 * weights
        recursion = (L_cycles + 1) * apply
        heads = 2 * 2 * c.seq_len * c.vocab_size * D  # token embedding and lm_head
        return H_cycles * recursion + heads, (H_cycles + 2) * recursion + 3 * heads


def log_stablemax(x):
    """Logits whose softmax is the stablemax of x (arXiv 2501.04697): log s(x).

    s(x) = x + 1, or 1 / (1 - x) below 0. So log s(x) is log(1 + |x|) with the sign of x: finite in float32,
    and so is its slope, which is 1 at 0 (that of abs or clamp would depend on torch's version).
    """
    negative = x < 0
    size = torch.log1p(torch.where(negative, -x, x))
    return torch.where(negative, -size, size)


def sequence_loss(c, logits, labels):
    """Mean cross-entropy of each sequence's scored cells, [B]. logits: [B, S, V], float32; labels: [B, S]."""
    mask = labels != IGNORE_LABEL
    if c.loss_type not in ("stablemax_cross_entropy", "softmax_cross_entropy"):
        raise ValueError(f"loss_type {c.loss_type!r} is not implemented in sequence_loss")
    scores = log_stablemax(logits) if c.loss_type == "stablemax_cross_entropy" else logits
    target = torch.where(mask, labels, 0).long().unsqueeze(-1)
    cell_loss = torch.logsumexp(scores, -1) - scores.gather(-1, target).squeeze(-1)  # [B, S]
    return torch.where(mask, cell_loss, 0).sum(-1) / mask.sum(-1).clamp(min=1)


def supervision_step(c, model, weights, carry, batch, halt_max_steps, training=True, cycles=None):
    """One step of deep supervision with adaptive halting (paper, sections 2 and 4.6).

    c: settings, of which loss_type and eval_patience count here. weights: {name: tensor} for the network, all
    of one dtype, and "puzzle_emb.weights" [N, D'] in float32. carry: as new_carry; sequences that halted take
    new data from batch, the others continue with theirs. batch: inputs [B, S], labels [B, S] (-100 is not
    scored), puzzle_identifiers [B], and in training min_halt_steps [B], drawn for exploration. A sequence
    halts at halt_max_steps, in training also once q_halt is positive, in an evaluation with eval_patience
    also once its answer stayed the same for so many steps (carry then has preds and repeats as well). cycles:
    (H_cycles, L_cycles), by default the model's.

    Returns the loss, summed over sequences: the mean cross-entropy of a sequence's scored cells + 0.5 * the
    binary cross-entropy of q_halt against "solved", a float32 scalar; the new carry, detached; {name of
    METRICS: sum over the sequences that halted; in training, losses over all}; the answers [B, S]; and
    q_halt [B].
    """
    halted, kept = carry["halted"], {}

    def new_or_carried(name):
        return torch.where(halted.view(-1, *[1] * (carry[name].ndim - 1)), batch[name], carry[name])

    inputs, labels = new_or_carried("inputs"), new_or_carried("labels")
    identifiers = new_or_carried("puzzle_identifiers")
    # TRM.solve begins like this too.
    z_H = torch.where(halted.view(-1, 1, 1), model.H_init.to(carry["z_H"].dtype), carry["z_H"])
    z_L = torch.where(halted.view(-1, 1, 1), model.L_init.to(carry["z_L"].dtype), carry["z_L"])
    steps = torch.where(halted, 0, carry["steps"]) + 1

    z_H, z_L, logits, q_halt = functional_call(model, weights, (z_H, z_L, inputs, identifiers, cycles))

    logits = logits.float()
    lm_loss = sequence_loss(c, logits, labels)
    answer = logits.argmax(-1).to(torch.int32)
    mask = labels != IGNORE_LABEL
    correct, cells = (mask & (answer == labels)).sum(-1), mask.sum(-1)
    solved = correct == cells
    q_halt_loss = F.binary_cross_entropy_with_logits(q_halt, solved.float(), reduction="none")
    with torch.no_grad():
        halts = steps >= halt_max_steps
        if training and halt_max_steps > 1:
            halts = (halts | (q_halt > 0)) & (steps >= batch["min_halt_steps"])
        if c.eval_patience and not training:
            repeated = ~halted & (answer == carry["preds"]).all(-1)
            kept = dict(preds=answer, repeats=torch.where(repeated, carry["repeats"] + 1, 0))
            halts = halts | (kept["repeats"] >= c.eval_patience)
        scored = halts & (cells > 0)  # the rows that pad an evaluation's last batch have no cells
        counted = torch.ones_like(scored) if training else scored
        metrics = dict(
            count=scored.sum(),
            accuracy=torch.where(scored, correct / cells.clamp(min=1), 0).sum(),
            exact_accuracy=(scored & solved).sum(),
            q_halt_accuracy=(scored & ((q_halt >= 0) == solved)).sum(),
            steps=torch.where(scored, steps, 0).sum(),
            lm_loss=torch.where(counted, lm_loss, 0).sum(),
            q_halt_loss=torch.where(counted, q_halt_loss, 0).sum(),
        )
        metrics = {name: value.float() for name, value in metrics.items()}
    assert tuple(metrics) == METRICS, f"METRICS and what supervision_step adds up differ: {tuple(metrics)}"
    carry = dict(z_H=z_H.detach(), z_L=z_L.detach(), steps=steps, halted=halts,
                 inputs=inputs, labels=labels, puzzle_identifiers=identifiers, **kept)
    return lm_loss.sum() + 0.5 * q_halt_loss.sum(), carry, metrics, answer, q_halt.detach()


def normal_noise(keys, steps, shape):
    """Standard normal noise [B, *shape], float32, from integers alone: the same on every device.

    keys, steps: int32 [B], not negative. Each number is a hash of its key, step and place (lowbias32 of C.
    Wellons' hash-prospector, cut to 31 bits), half of it as radius, half as angle (Box and Muller).
    """
    bits = 2 ** 31 - 1  # XLA and torch shift negative numbers differently

    def mix(x):
        x = (x ^ x >> 16) * 0x7FEB352D & bits
        x = (x ^ x >> 15) * 0x046CA68B & bits
        return x ^ x >> 16

    places = torch.arange(math.prod(shape), dtype=torch.int32, device=keys.device)
    x = mix(mix(mix(keys) + steps & bits).unsqueeze(-1) + places & bits)
    radius = torch.sqrt(-2 * torch.log(((x >> 15) + 0.5) / 2 ** 16))
    return (radius * torch.cos((x & 0x7FFF) * (2 * math.pi / 2 ** 15))).view(-1, *shape)


def flatten(tensors):
    """All numbers of the tensors in one vector."""
    return torch.cat([t.reshape(-1) for t in tensors])


def unflatten(vector, shapes):
    """{name: view of vector} for {name: shape}, in order."""
    parts = vector.split([math.prod(shape) for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts)}


def accumulate(body, sums, weights, xs):
    """Adds body(weights, xs[i])[0] to sums for each i, and stacks body's other result, a dict of tensors.

    sums: a tree of tensors; xs: a tree of tensors [n, ...]. Returns the sums and the stacked dict.
    """
    rows = []
    for i in range(len(tree_flatten(xs)[0][0])):
        parts, row = body(weights, tree_map(operator.itemgetter(i), xs))
        sums = tree_map(torch.add, sums, parts)
        rows.append(row)
    return sums, {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


# The optimizers work in place on all weights as one float32 vector w with its gradient g: a few operations
# for the whole model. rates: tensors of one element, so that a compiled step does not depend on their values.

def optimizer_state(c, shapes, w):
    """What c.optimizer keeps between steps, before the first: {name: float32 tensor}. Checkpoints hold it."""
    return {name: torch.zeros_like(w) for name in ("m" if c.optimizer == "lion" else "mv")}


def update_weights(c, shapes, w, g, state, rates):
    """One step of c.optimizer, with c's betas and weight_decay, in place on w and state.

    shapes: {name: shape} of the parts of w; state: as optimizer_state; rates: lr and bias_correction1,
    bias_correction2 = 1 - beta^t.
    """
    if c.optimizer == "adam_atan2":
        adam_atan2(c, rates, w, g, **state)
    elif c.optimizer == "adamw":
        adamw(c, rates, w, g, **state)
    elif c.optimizer == "lion":
        lion(c, rates, w, g, **state)
    elif c.optimizer == "muon":  # for the network's matrices
        w, g, m, v = (unflatten(vector, shapes) for vector in (w, g, state["m"], state["v"]))
        for k, shape in shapes.items():
            if k.startswith("L_level.") and len(shape) == 2:
                muon(c, rates, w[k], g[k], m[k])
            else:
                adam_atan2(c, rates, w[k], g[k], m[k], v[k])
    else:
        raise ValueError(f"optimizer {c.optimizer!r} is not implemented in update_weights")


def adam_atan2(c, rates, w, g, m, v):
    """Adam with atan2 instead of division and epsilon (arXiv 2407.05872), scaled as in the official code."""
    m.lerp_(g, 1 - c.beta1)
    v.lerp_(g.square(), 1 - c.beta2)
    update = torch.atan2(m, (v / rates["bias_correction2"]).sqrt())
    w.mul_(1 - rates["lr"] * c.weight_decay).sub_(update * (rates["lr"] / rates["bias_correction1"]))


def adamw(c, rates, w, g, m, v):
    """Adam with decoupled weight decay (arXiv 1711.05101, algorithm 2), epsilon 1e-8."""
    m.lerp_(g, 1 - c.beta1)
    v.lerp_(g.square(), 1 - c.beta2)
    update = m / ((v / rates["bias_correction2"]).sqrt() + 1e-8)
    w.mul_(1 - rates["lr"] * c.weight_decay).sub_(update * (rates["lr"] / rates["bias_correction1"]))


def lion(c, rates, w, g, m):
    """Lion (arXiv 2302.06675, algorithm 2)."""
    update = torch.sign(torch.lerp(g, m, c.beta1))
    w.mul_(1 - rates["lr"] * c.weight_decay).sub_(update * rates["lr"])
    m.lerp_(g, 1 - c.beta2)


def muon(c, rates, w, g, m):
    """Muon (Jordan et al. 2024) for one matrix [a, b].

    Nesterov momentum, orthogonalised by five Newton-Schulz iterations. The update is scaled by 0.2
    sqrt(max(a, b)) to the size of AdamW's (arXiv 2502.16982), so that lr means the same.
    """
    m.lerp_(g, 1 - c.beta1)
    u = torch.lerp(g, m, c.beta1).bfloat16()
    wide = u if u.shape[0] <= u.shape[1] else u.T
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(5):
        a = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * a + 2.0315 * a @ a) @ wide
    u = (wide if u.shape[0] <= u.shape[1] else wide.T).to(w.dtype)
    w.mul_(1 - rates["lr"] * c.weight_decay).sub_(u * (rates["lr"] * 0.2 * math.sqrt(max(u.shape))))


def sign_sgd(table, g, rows, lr, weight_decay):
    """SignSGD with decoupled decay on the rows of the puzzle embedding that the batch holds; in place.

    table, g: [N, D'], g summed over the batch; rows: [N], nonzero where the batch holds the row.
    """
    table.sub_((rows > 0).unsqueeze(-1) * lr * (weight_decay * table + torch.sign(g)))


# Schedules: pure functions of the settings c and the step, from 0. epoch: examples of one.

def learning_rate(base, step, warmup_steps, total_steps, min_ratio):
    """The rate at a step (from 0): linear warm-up, then a cosine to base * min_ratio at total_steps."""
    step += 1
    if step < warmup_steps:
        return base * step / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return base * (min_ratio + max(0.0, (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))))


def rates(c, step, total_steps):
    """{name: float}: the learning rates of a step, and Adam's bias corrections 1 - beta^t, t = step + 1."""
    schedule = c.lr_warmup_steps, total_steps, c.lr_min_ratio
    return dict(lr=learning_rate(c.lr, step, *schedule),
                puzzle_emb_lr=learning_rate(c.puzzle_emb_lr, step, *schedule),
                bias_correction1=1 - c.beta1 ** (step + 1), bias_correction2=1 - c.beta2 ** (step + 1))


def exploration(c, step, total_steps):
    """The halt_exploration_prob of a step."""
    first, last = c.halt_exploration_prob, c.halt_exploration_prob_end
    return first if last == -1 else first + (last - first) * step / max(1, total_steps - 1)


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
