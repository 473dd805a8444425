"""Shampoo on the rows of each matrix of the network, AdamATan2 for all other parameters."""
import torch

import optim

optimizer = "shampoo"
_optimizer_state = optim.optimizer_state


def optimizer_state(settings, name, w):
    state = _optimizer_state(settings, name, w)
    if name.startswith("L_level.") and w.ndim == 2:
        state["gram"] = torch.eye(len(w), device=w.device) * 1e-6
    return state


def shampoo(settings, rates, w, g, m, v, gram=None):
    if gram is None:
        return optim.adam_atan2(settings, rates, w, g, m, v)
    m.lerp_(g, 1 - settings.beta1)
    gram.lerp_(g @ g.T, 1 - settings.beta2)
    direction = inverse_root(gram) @ m
    direction = direction * (0.2 * direction.numel() ** 0.5 / direction.norm())
    optim.descend(settings, rates, w, direction, rates["lr"])


def inverse_root(gram):
    identity = torch.eye(len(gram), device=gram.device)
    y, z = gram / gram.norm(), identity
    for _ in range(12):  # Newton-Schulz
        t = 1.5 * identity - 0.5 * z @ y
        y, z = y @ t, t @ z
    return z


optim.OPTIMIZERS["shampoo"] = shampoo
optim.optimizer_state = optimizer_state
