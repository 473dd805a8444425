"""RSM (arXiv 2603.15641): one supervision step a puzzle, a recursion that deepens in stages, a tied head.

    python train.py config/demo.py examples/rsm.py --H_cycles=2 --L_cycles=3 --max_steps=902 --out_dir=out/rsm

Flags can set the original's batch of 512 and its 14,969 steps.
"""
import model
import optim

new(grad_clip=1.0)
halt_max_steps = eval_halt_max_steps = L_layers = 1
H_cycles = 8
L_cycles = 12
lr = 1e-3
weight_decay = 0.1
# {share of curriculum_epochs: share of the cycles}: (2, 2), (5, 7), then (8, 12)
_stages = {0: 0.2, 0.33: 0.6, 0.67: 1.0}
_update = optim.update


def cycles_at(settings, examples_per_epoch, step):
    # the stage of this step
    epochs = step * settings.global_batch_size / examples_per_epoch
    share = epochs / max(settings.curriculum_epochs, 1e-9)
    depth = _stages[max(first for first in _stages if first <= share)]
    return tuple(max(1, round(depth * cycles)) for cycles in (settings.H_cycles, settings.L_cycles))


def clipped(settings, rates, weights, grads, states):
    # the norm of all gradients together
    scale = (settings.grad_clip / optim.norm(grads)).clamp(max=1)
    grads = {name: grad * scale for name, grad in grads.items()}
    _update(settings, rates, weights, grads, states)


class RSM(model.TRM):
    def __init__(self, settings, **sizes):
        super().__init__(settings, **sizes)
        del self.lm_head

    def lm_head(self, z):
        # the table of the tokens is the head, too
        return z @ self.embed_tokens.embedding_weight.mT

    def losses(self, *arguments):
        # q_halt is not trained
        losses = super().losses(*arguments)
        return losses | dict(loss=losses["lm_loss"])


optim.cycles_at = cycles_at
optim.update = clipped
model.TRM = RSM
