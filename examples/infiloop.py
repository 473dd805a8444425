"""InfiLoop (arXiv 2610.11570): each latent is a running mean of the states so far, weighted by a gate.

    python train.py config/demo.py examples/infiloop.py --lr=3e-3 --max_steps=844 --out_dir=out/infiloop

Flags can set the original's depth: H_cycles 6, L_cycles 12 and 12 supervision steps.
"""
import torch

import model


class InfiLoop(model.TRM):
    def __init__(self, settings, **sizes):
        super().__init__(settings, **sizes)
        self.gate_H = torch.nn.Parameter(torch.zeros(settings.hidden_size))
        self.gate_L = torch.nn.Parameter(torch.zeros(settings.hidden_size))

    def first_latents(self, B):
        # sums of the weights so far
        zeros = self.H_init.new_zeros(B, self.length, 1)
        return super().first_latents(B) | dict(sum_H=zeros, sum_L=zeros)

    def latent_recursion(self, x, latents, L_cycles):
        z_H, z_L, sum_H, sum_L = (latents[name] for name in ("z_H", "z_L", "sum_H", "sum_L"))
        for _ in range(L_cycles):
            z_L, sum_L = self.add(z_L, sum_L, self.L_level(z_L + (z_H + x)), self.gate_L)
        z_H, sum_H = self.add(z_H, sum_H, self.L_level(z_H + z_L), self.gate_H)
        return dict(z_H=z_H, z_L=z_L, sum_H=sum_H, sum_L=sum_L)

    def add(self, mean, total, z, gate):
        """Returns the mean and its sum of weights with another state z."""
        weight = torch.exp(model.rms_norm(z) @ gate).unsqueeze(-1)
        # each new state halves the weights of the older ones
        total = 0.5 * total + weight
        return mean + weight / total * (z - mean), total


model.TRM = InfiLoop
