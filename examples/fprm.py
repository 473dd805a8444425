"""FPRM (arXiv 2606.18206): one latent, a norm before each layer, learned scales of residuals.

    python train.py config/demo.py examples/fprm.py --lr=3e-3 --max_steps=750 --out_dir=out/fprm

It leaves out the original's convolution, its first state of deviation 6 and AdamW at a constant rate of 1e-3.
"""
import torch

import model


class PreNormBlock(model.Block):
    def __init__(self, settings, length):
        super().__init__(settings, length)
        self.scales = torch.nn.Parameter(torch.tensor([[0.75, 0.25], [0.75, 0.25]]))

    def forward(self, x, rope):
        # across positions
        (keep_t, add_t), (keep, add) = self.scales
        if hasattr(self, "mlp_t"):
            x = keep_t * x + add_t * self.mlp_t(model.rms_norm(x, dim=1), across=True)
        else:
            x = keep_t * x + add_t * self.self_attn(model.rms_norm(x), rope)
        # across channels
        return keep * x + add * self.mlp(model.rms_norm(x))


class FPRM(model.TRM):
    def first_latents(self, B):
        return dict(z_L=super().first_latents(B)["z_L"])

    def deep_recursion(self, x, latents, H_cycles, L_cycles):
        # all passes have a gradient
        z = latents["z_L"]
        for _ in range(H_cycles * (L_cycles + 1)):
            z = self.L_level(z + x)
        return dict(z_L=z)

    def answer(self, latents, labels=None):
        return super().answer(dict(z_H=model.rms_norm(latents["z_L"])))


model.Block = PreNormBlock
model.TRM = FPRM
