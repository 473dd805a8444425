"""K latents for each puzzle ("Speed is Confidence", arXiv 2601.19085); the best one has the gradient.

    python train.py config/demo.py examples/chains.py --global_batch_size=8 --lr=3e-3 \\
        --curriculum_epochs=1 --max_steps=796 --out_dir=out/chains

It leaves out the original's Muon, label smoothing and gated norm.
"""
import torch

import model

new(chains=4)


class Chains(model.TRM):
    def __init__(self, settings, **sizes):
        super().__init__(settings, **sizes)
        self.z_init = torch.nn.Parameter(torch.randn(2, settings.chains, settings.hidden_size))

    def first_latents(self, B):
        K = self.settings.chains
        # each chain begins with latents of its own
        z_H, z_L = self.z_init.view(2, 1, K, 1, -1).expand(2, B, K, self.length, -1)
        return dict(z_H=z_H, z_L=z_L)

    def deep_recursion(self, x, latents, H_cycles, L_cycles):
        # the chains are further sequences of the batch
        chains = {name: z.flatten(0, 1) for name, z in latents.items()}
        x = x.repeat_interleave(self.settings.chains, 0)
        chains = super().deep_recursion(x, chains, H_cycles, L_cycles)
        return {name: z.unflatten(0, (-1, self.settings.chains)) for name, z in chains.items()}

    def answer(self, latents, labels=None):
        K = self.settings.chains
        logits, q_halt = super().answer({name: z.flatten(0, 1) for name, z in latents.items()})
        if labels is None:  # an evaluation keeps the most confident chain
            best = q_halt.view(-1, K).argmax(1)
        else:
            # training keeps the chain with the smallest loss
            loss = model.cross_entropy(logits.float(), labels.repeat_interleave(K, 0))
            best = loss.view(-1, K).argmin(1)
        rows = torch.arange(len(best), device=best.device) * K + best
        return logits[rows], q_halt[rows]


model.TRM = Chains
