"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner (arXiv 2409.11321), for the network's matrices.

    python train.py config/demo_houses.py    (it runs this fork)

The gradient G [n, m] of each matrix has two averages, of G G^T and of G^T G. One step of orthogonal iteration
updates their eigenbases, in which Adam's second moment and AdamATan2's direction are computed. All other
parameters have AdamATan2. A step costs O(n^3 + m^3) a matrix, which is little in small networks. It runs on
CPUs and CUDA GPUs: XLA lacks the QR decomposition. examples/houses.py learns in a third of the steps with it,
config/demo.py at its rate learns less (records/houses.md).
"""
import torch

import optim

optimizer = "soap"
_GRAM_BETA = 0.95  # of the averages of G G^T and G^T G
_optimizer_state = optim.optimizer_state


def optimizer_state(settings, name, w):
    state = _optimizer_state(settings, name, w)
    if name.startswith("L_level.") and w.ndim == 2:
        for side, n in enumerate(w.shape):
            state[f"gram{side}"] = torch.zeros(n, n, device=w.device)
            state[f"basis{side}"] = torch.eye(n, device=w.device)
    return state


def soap(settings, rates, w, g, m, v, gram0=None, gram1=None, basis0=None, basis1=None):
    if gram0 is None:
        return optim.adam_atan2(settings, rates, w, g, m, v)
    # the averages, and their eigenbases, those of the largest eigenvalues first
    for gram, basis, square in (gram0, basis0, g @ g.T), (gram1, basis1, g.T @ g):
        gram.lerp_(square, 1 - _GRAM_BETA)
        # where the average is zero, the basis stays
        basis.copy_(torch.linalg.qr(gram @ basis + 1e-9 * basis).Q)

    # Adam's moments, the second in the eigenbases; the direction, back in the basis of w
    m.lerp_(g, 1 - settings.beta1)
    v.lerp_((basis0.T @ g @ basis1).square(), 1 - settings.beta2)
    root = (v / rates["bias_correction2"]).sqrt()
    # 1e-8: a direction that has no gradient at all must not move
    direction = torch.atan2(basis0.T @ m @ basis1, root + 1e-8)
    step_size = rates["lr"] / rates["bias_correction1"]
    optim.descend(settings, rates, w, basis0 @ direction @ basis1.T, step_size)


optim.OPTIMIZERS["soap"] = soap
optim.optimizer_state = optimizer_state
