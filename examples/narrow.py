"""Narrow MLPs: a hidden width of 128 in both, where the official code rounds up to a multiple of 256.

    python train.py config/demo.py examples/narrow.py

A step of the demo costs half the FLOP; docs/records.md has three seeds.
"""
import torch

import model


class Narrow(model.SwiGLU):
    def __init__(self, width, expansion):
        torch.nn.Module.__init__(self)
        self.gate_up_proj = torch.nn.Linear(width, 256, bias=False)  # gate and up, 128 each
        self.down_proj = torch.nn.Linear(128, width, bias=False)


model.SwiGLU = Narrow
