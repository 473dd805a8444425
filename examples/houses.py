"""Candidates see their row, column and box: one small network for Sudokus of every size.

    python train.py config/sudoku_houses.py

TRM learns the rules of any puzzle from examples; this network is told which cells share a unit, by units() of
the puzzle's kind. The latents are [B, S, K, D], a vector for each of K digits in each of S cells. A candidate
sees the means of its units and of its cell's digits. All digits and units share their weights, so an answer
follows every symmetry of its question, up to rounding, and weights fit puzzles of all sizes.
"""
import torch
import torch.nn.functional as F

import model
from puzzles import kind_of

hidden_size = 32
num_heads = 1
multiple_of = 32
puzzle_emb_ndim = 0
mlp_t = False  # no weight belongs to a cell
H_cycles = 1  # all passes have a gradient: with five in a chain, training on 9x9 lost what it had learned
loss_type = "bounded"


def norm(x):
    return F.layer_norm(x, x.shape[-1:])


def bounded_loss(settings, logits, labels):
    """Returns the mean of 2 - 2 sqrt(p) over the scored cells, [B]; p: the probability of the right digit.

    It is the generalized cross-entropy of arXiv 1805.07836 with q = 1/2. A digit that is wrong and certain
    has little gradient; by the cross-entropy, it has the most.
    """
    is_labeled = labels != model.IGNORE_LABEL
    target = torch.where(is_labeled, labels, 0).long().unsqueeze(-1)
    log_p = logits.log_softmax(-1).gather(-1, target).squeeze(-1)  # [B, S]
    total = torch.where(is_labeled, 2 - 2 * (log_p / 2).exp(), 0).sum(-1)
    return total / is_labeled.sum(-1).clamp(min=1)


class UnitBlock(torch.nn.Module):
    def __init__(self, settings, length):
        super().__init__()
        D = settings.hidden_size
        # rows and columns share a matrix, so that a transposed question has the transposed answer
        self.across_lines = torch.nn.Linear(D, D, bias=False)
        self.across_boxes = torch.nn.Linear(D, D, bias=False)
        self.across_digits = torch.nn.Linear(D, D, bias=False)
        self.mlp = model.SwiGLU(D, settings.expansion, settings.multiple_of)

    def forward(self, x, rope):
        # the mean over each unit, [B, units, K, D], through the matrix of lines or of boxes
        units = self.units.to(x.dtype)  # [units, S], 1 where a cell is in a unit
        means = (units / units.sum(1, keepdim=True)) @ x.flatten(2)
        lines, boxes = means.unflatten(2, x.shape[2:]).tensor_split([self.num_lines], 1)
        from_units = torch.cat((self.across_lines(lines), self.across_boxes(boxes)), 1)
        # each cell gets the sum over its units, and the mean over its digits through a matrix
        to_cells = (units.mT @ from_units.flatten(2)).view_as(x)
        to_cells = to_cells + self.across_digits(x.mean(2, keepdim=True))
        y = norm(x + to_cells)
        # across channels
        return norm(y + self.mlp(y))


class UnitTRM(model.TRM):
    def __init__(self, settings, **sizes):
        # a digit is impossible, possible or given in a cell: three rows of the table, whatever the size
        super().__init__(settings, **sizes | dict(vocab_size=3))
        self.sizes["vocab_size"] = sizes["vocab_size"]
        self.grid = sizes["seq_len"], sizes["vocab_size"] - 2  # S, K
        self.lm_head = torch.nn.Linear(settings.hidden_size, 1, bias=False)
        self.q_head = torch.nn.Linear(settings.hidden_size + 1, 2)
        self.init_weights(torch.Generator().manual_seed(settings.seed))
        # the units of the puzzle, rows and columns first
        kind = kind_of(self.task)
        units = [F.one_hot(division).float() for division in torch.from_numpy(kind.units())]
        for layer in self.L_level.layers:
            layer.num_lines = sum(kind.grid)
            layer.register_buffer("units", torch.cat(units, 1).mT, persistent=False)

    def first_latents(self, B):
        shape = B, *self.grid, -1
        return dict(z_H=self.H_init.expand(shape), z_L=self.L_init.expand(shape))

    def embed(self, inputs, puzzle_rows):
        if self.training:
            # a number that follows from the puzzle, for halts()
            self.keys = (inputs * torch.arange(inputs.shape[1], device=inputs.device)).sum(-1)

        # three states of each candidate
        digits = torch.arange(2, 2 + self.grid[1], device=inputs.device)
        inputs = inputs.unsqueeze(-1)
        states = torch.where(inputs == digits, 2, (inputs == 1).int())  # [B, S, K]
        return super().embed(states.flatten(1), puzzle_rows).view(len(inputs), *self.grid, -1)

    def latent_recursion(self, x, latents, L_cycles):
        # as in model.py, but it keeps every pass, since each has a loss
        z_H = latents["z_H"]
        z_L = latents["z_L"]
        self.passes = []
        for _ in range(L_cycles):
            z_L = self.L_level(z_L + (z_H + x))
            self.passes.append(z_L)
        return dict(z_H=self.L_level(z_H + z_L), z_L=z_L)

    def answer(self, latents, labels=None):
        z = latents["z_H"]
        scores = self.lm_head(z).squeeze(-1)  # [B, S, K]
        # the halting head sees the mean of all, and by how much the least certain cell prefers its digit
        first, second = scores.detach().topk(2).values.unbind(-1)
        margin = (first - second).amin(-1, keepdim=True)
        q_halt = self.q_head(torch.cat((z.mean((1, 2)), margin), -1))[:, 0]
        # no cell of an answer is padding or empty
        return F.pad(scores, (2, 0), value=-1e4), q_halt

    def losses(self, logits, q_halt, labels, solved):
        values = super().losses(logits, q_halt, labels, solved)
        cell_loss = model.LOSSES[self.settings.loss_type]
        passes = self.passes
        self.passes = []
        for z in passes:
            scores, _ = self.answer(dict(z_H=z))
            loss = cell_loss(self.settings, scores.float(), labels)
            values["loss"] = values["loss"] + loss / len(passes)
        return values

    def halts(self, steps, q_halt, min_halt_steps):
        keys = self.keys
        self.keys = None  # a tensor that is kept between steps would be a result of XLA's program
        # Sequences end after 8 to 16 of 16 steps at the latest: if all ended after 16, those that began
        # together would stay together, and an update would see one depth alone.
        most = self.settings.halt_max_steps
        num_ends = most // 2 + 1
        is_last = steps >= most - keys % num_ends
        # an eighth of the puzzles goes on until then although it is solved: otherwise, deep evaluations would
        # lose solved boards
        goes_on = keys // num_ends % 8 == 0
        return is_last | (super().halts(steps, q_halt, min_halt_steps) & ~goes_on)


model.LOSSES["bounded"] = bounded_loss
model.Block = UnitBlock
model.TRM = UnitTRM
