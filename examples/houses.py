"""Candidates see their row, column and box: one small network for Sudokus of every size.

    python train.py config/sudoku_houses.py

TRM learns the rules of any puzzle from examples; this network is told which cells share a unit, by units() of
the puzzle's kind. The latents are [B, K, S, D], a vector for each of K digits in each of S cells. A candidate
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


def norm(x):
    return F.layer_norm(x, x.shape[-1:])


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
        # the means of units and of digits, each through its matrix, back to the cells
        units = self.units.to(x.dtype)  # [units, S], 1 where a cell is in a unit
        lines, boxes = (units @ x / units.sum(1, keepdim=True)).tensor_split([self.num_lines], 2)
        messages = torch.cat((self.across_lines(lines), self.across_boxes(boxes)), 2)
        digits = self.across_digits(x.mean(1, keepdim=True))
        y = norm(x + units.mT @ messages + digits)
        # across channels
        return norm(y + self.mlp(y))


class HouseTRM(model.TRM):
    def __init__(self, settings, **sizes):
        # a digit is impossible, possible or given in a cell: three rows of the table, whatever the size
        super().__init__(settings, **sizes | dict(vocab_size=3))
        self.sizes["vocab_size"] = sizes["vocab_size"]
        self.grid = sizes["vocab_size"] - 2, sizes["seq_len"]  # K, S
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
        digits = torch.arange(2, 2 + self.grid[0], device=inputs.device).view(-1, 1)
        inputs = inputs.unsqueeze(1)
        states = torch.where(inputs == digits, 2, (inputs == 1).int())  # [B, K, S]
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
        scores = self.lm_head(z).squeeze(-1).mT  # [B, S, K]
        # the halting head sees the mean of all, and by how much the least certain cell prefers its digit
        first, second = scores.detach().topk(2).values.unbind(-1)
        margin = (first - second).amin(-1, keepdim=True)
        q_halt = self.q_head(torch.cat((z.mean((1, 2)), margin), -1))[:, 0]
        # no cell of an answer is padding or empty
        return F.pad(scores, (2, 0), value=-1e4), q_halt

    def losses(self, logits, q_halt, labels, solved):
        values = super().losses(logits, q_halt, labels, solved)
        passes, self.passes = self.passes, []
        for z in passes:
            scores, _ = self.answer(dict(z_H=z))
            values["loss"] = values["loss"] + model.cross_entropy(scores.float(), labels) / len(passes)
        return values

    def halts(self, steps, q_halt, min_halt_steps):
        # unsolved sequences end after different numbers of steps: if all began together, an update would see
        # one depth alone
        last_steps = self.settings.halt_max_steps - torch.arange(len(steps), device=steps.device) % 4
        return super().halts(steps, q_halt, min_halt_steps) | (steps >= last_steps)


model.Block = UnitBlock
model.TRM = HouseTRM
