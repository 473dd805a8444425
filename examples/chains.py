"""K latents for each puzzle ("Speed is Confidence", arXiv 2601.19085); the best one has the gradient.

    python train.py config/demo.py examples/chains.py --global_batch_size=8 --lr=3e-3 \\
        --curriculum_epochs=1 --max_steps=796

It leaves out the original's Muon, label smoothing and gated norm.
"""
from dataclasses import dataclass

import torch

import model

new(chains=4)


@dataclass
class Config(model.TRMConfig):
    chains: int = 4


class Chains(model.TRM):
    def __init__(self, config, seed=0):
        super().__init__(config, seed)
        self.z_init = torch.nn.Parameter(torch.randn(2, config.chains, config.hidden_size))

    def first_state(self, B):
        K = self.config.chains
        z_H, z_L = self.z_init.view(2, 1, K, 1, -1).expand(2, B, K, self.length, -1)
        return dict(z_H=z_H, z_L=z_L)

    def recursion(self, x, state, H_cycles, L_cycles):
        # the chains are further sequences of the batch
        chains = {name: z.flatten(0, 1) for name, z in state.items()}
        x = x.repeat_interleave(self.config.chains, 0)
        chains = super().recursion(x, chains, H_cycles, L_cycles)
        return {name: z.unflatten(0, (-1, self.config.chains)) for name, z in chains.items()}

    def answer(self, state, labels=None):
        K = self.config.chains
        logits, q_halt = super().answer({name: z.flatten(0, 1) for name, z in state.items()})
        if labels is None:  # an evaluation keeps the most confident chain
            best = q_halt.view(-1, K).argmax(1)
        else:
            loss = model.cross_entropy(logits.float(), labels.repeat_interleave(K, 0))
            best = loss.view(-1, K).argmin(1)
        rows = torch.arange(len(best), device=best.device) * K + best
        return logits[rows], q_halt[rows]


model.TRMConfig = Config
model.TRM = Chains
