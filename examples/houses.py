"""Candidates see their row, column and box: a network for puzzles whose units are known, of every size.

    python train.py config/sudoku_houses.py

The latents are [B, D, K, S], a vector for each of K digits in each of S cells. A candidate sees the means of
its units, and of the digits of its cell. puzzles.Kind.units() says which cells are a unit: TRM learns the
rules of any puzzle from examples, and this network is told which cells share a unit.

All digits and all units of a shape share all weights. So the answer follows every symmetry of a question, up
to rounding, and weights fit puzzles of all sizes.
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
    return model.rms_norm(x - x.mean(1, keepdim=True), dim=1)


def product(layer, x):
    """Returns a layer's product along dimension 1 of x [B, D, N]; this order leaves x where it is."""
    return torch.bmm(layer.weight.expand(len(x), -1, -1), x)


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
        # the means of units and digits, each through its matrix, back to the cells
        shape = x.shape
        units = self.units.to(x.dtype)  # [S, units], 1 where a cell is in a unit
        means = x @ (units / units.sum(0))  # [B, D, K, units]
        lines, boxes = means.tensor_split([self.num_lines], dim=-1)
        lines = product(self.across_lines, lines.flatten(2)).view(lines.shape)
        boxes = product(self.across_boxes, boxes.flatten(2)).view(boxes.shape)
        digits = product(self.across_digits, x.mean(2)).unsqueeze(2)
        message = torch.cat((lines, boxes), -1) @ units.mT + digits
        x = norm(x + message).flatten(2)
        # across channels
        return norm(x + self.mlp(x, across=True)).view(shape)


class HouseTRM(model.TRM):
    def __init__(self, settings, **sizes):
        # a digit is impossible, possible or given in a cell: three rows of the table, whatever the size
        super().__init__(settings, **sizes | dict(vocab_size=3))
        self.sizes["vocab_size"] = sizes["vocab_size"]
        self.grid = sizes["vocab_size"] - 2, sizes["seq_len"]  # K, S
        self.lm_head = torch.nn.Linear(settings.hidden_size, 1, bias=False)
        self.q_head = torch.nn.Linear(settings.hidden_size + 1, 2)
        self.init_weights(torch.Generator().manual_seed(settings.seed))

        # which units each cell is in: first rows and columns, then the others
        kind = kind_of(self.task)
        if not kind.unit_shapes:
            raise ValueError(f"puzzles of kind {self.task['kind']!r} have no units: prepare_csv.py --units")
        lines = []
        boxes = []
        for shape, division in zip(kind.unit_shapes, torch.from_numpy(kind.units())):
            divisions = lines if min(shape) == 1 else boxes
            divisions.append(F.one_hot(division).float())  # [S, units]
        for layer in self.L_level.layers:
            layer.num_lines = sum(division.shape[1] for division in lines)
            layer.register_buffer("units", torch.cat(lines + boxes, 1), persistent=False)

    def first_latents(self, B):
        latents = dict(z_H=self.H_init, z_L=self.L_init)
        return {name: z.view(1, -1, 1, 1).expand(B, -1, *self.grid) for name, z in latents.items()}

    def embed(self, inputs, puzzle_rows):
        digits = torch.arange(2, 2 + self.grid[0], device=inputs.device).view(-1, 1)
        inputs = inputs.unsqueeze(1)
        states = torch.where(inputs == digits, 2, (inputs == 1).int())  # [B, K, S]
        return super().embed(states.flatten(1), puzzle_rows).mT.contiguous().view(len(inputs), -1, *self.grid)

    def latent_recursion(self, x, latents, L_cycles):
        # as in model.py, but every pass is kept: each has a loss
        z_H = latents["z_H"]
        z_L = latents["z_L"]
        self.passes = []
        for _ in range(L_cycles):
            z_L = self.L_level(z_L + (z_H + x))
            self.passes.append(z_L)
        return dict(z_H=self.L_level(z_H + z_L), z_L=z_L)

    def scores(self, z):
        """Returns the scores of all digits, [B, S, K], of a latent."""
        return product(self.lm_head, z.flatten(2)).view(len(z), *self.grid).mT

    def answer(self, latents, labels=None):
        z = latents["z_H"]
        scores = self.scores(z)
        # the head that halts sees the mean of all, and by how much the least certain cell prefers its digit
        first, second = scores.detach().topk(2).values.unbind(-1)
        margin = (first - second).amin(-1, keepdim=True)
        q_halt = self.q_head(torch.cat((z.mean((2, 3)), margin), -1))[:, 0]
        # no cell of an answer is padding or empty
        return F.pad(scores, (2, 0), value=-1e4), q_halt

    def losses(self, logits, q_halt, labels, solved):
        values = super().losses(logits, q_halt, labels, solved)
        passes, self.passes = self.passes, []
        for z in passes:
            scores = F.pad(self.scores(z).float(), (2, 0), value=-1e4)
            values["loss"] = values["loss"] + model.cross_entropy(scores, labels) / len(passes)
        return values

    def halts(self, steps, q_halt, min_halt_steps):
        # Unsolved sequences end after different numbers of steps. If all of them began together, each update
        # would see a single depth.
        last_steps = self.settings.halt_max_steps - torch.arange(len(steps), device=steps.device) % 4
        return super().halts(steps, q_halt, min_halt_steps) | (steps >= last_steps)


model.Block = UnitBlock
model.TRM = HouseTRM
