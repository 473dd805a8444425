"""Another layer, with a buffer."""
import torch

import model


class Convolution(torch.nn.Module):
    def __init__(self, settings, length):
        super().__init__()
        self.conv = torch.nn.Conv1d(settings.hidden_size, settings.hidden_size, 3, padding=1, groups=8)
        self.register_buffer("taper", torch.linspace(1, 0.5, length).view(-1, 1))

    def forward(self, x, rope):
        return model.rms_norm(x + self.conv(x.mT).mT * self.taper.to(x.dtype))


model.Block = Convolution
