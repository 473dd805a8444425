"""Digits as an axis of the latents (after SE-RRM, arXiv 2603.02193): all digits share all weights.

    python train.py config/demo.py examples/symbols.py --out_dir=out/symbols

The latents are [B, K, L, D], a vector for each of K digits in each cell, and a digit sees the mean of all.
If the digits of a question are renamed, the digits of the answer are renamed alike, up to rounding. So this
suits puzzles whose symbols can be renamed: Sudoku, and datasets of prepare_csv.py with --permute_symbols. The
first two symbols of a task, padding and the empty cell, are not digits.

The original has attention over positions and over digits, one latent, dropout and no halting head.
"""
import torch
import torch.nn.functional as F

import model

hidden_size = 32
num_heads = 1
multiple_of = 64


class SymbolBlock(model.Block):
    def __init__(self, settings, length):
        super().__init__(settings, length)
        self.across_symbols = torch.nn.Linear(settings.hidden_size, settings.hidden_size, bias=False)

    def forward(self, x, rope):
        # across digits: a sum over them and a product with the same weights are all that treats them alike
        x = model.rms_norm(x + self.across_symbols(x.mean(1, keepdim=True)))
        # across positions and across channels, where each digit is a sequence of its own
        return super().forward(x.flatten(0, 1), rope).unflatten(0, x.shape[:2])


class SymbolTRM(model.TRM):
    def __init__(self, settings, **sizes):
        super().__init__(settings, **sizes)
        self.num_digits = sizes["vocab_size"] - 2
        self.lm_head = torch.nn.Linear(settings.hidden_size, 1, bias=False)

    def first_latents(self, B):
        # [B, L, D], the same for all digits
        latents = super().first_latents(B)
        return {name: z.unsqueeze(1).expand(-1, self.num_digits, -1, -1) for name, z in latents.items()}

    def embed(self, inputs, puzzle_rows):
        # what a digit knows of each cell, [B, K, S]: 0 it has another digit, 1 it is empty, 2 it has this one
        digits = torch.arange(2, 2 + self.num_digits, device=inputs.device).view(-1, 1)
        inputs = inputs.unsqueeze(1)
        states = torch.where(inputs == digits, 2, (inputs == 1).int())
        # three rows of the table embed the states
        if self.has_puzzle_emb:
            puzzle_rows = puzzle_rows.repeat_interleave(self.num_digits, 0)
        return super().embed(states.flatten(0, 1), puzzle_rows).unflatten(0, states.shape[:2])

    def answer(self, latents, labels=None):
        z = latents["z_H"]
        scores = self.lm_head(z[:, :, self.prefix:]).squeeze(-1).mT  # [B, S, K]
        # all digits decide whether to halt
        q_halt = self.q_head(z[:, :, 0].mean(1))[:, 0]
        # no cell of an answer is padding or empty
        return F.pad(scores, (2, 0), value=-1e4), q_halt


model.Block = SymbolBlock
model.TRM = SymbolTRM
