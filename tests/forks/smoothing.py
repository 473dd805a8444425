"""Label smoothing and gradient clipping: --label_smoothing=0.1 --grad_clip=1."""
import model
import optim

new(label_smoothing=0.0, grad_clip=0.0)
_update = optim.update


class Smoothed(model.TRM):
    def losses(self, settings, logits, q_halt, labels, solved):
        losses = super().losses(settings, logits, q_halt, labels, solved)
        if not self.training:  # evaluations with and without smoothing can be compared
            return losses
        given = labels != model.IGNORE_LABEL
        uniform = -(logits.log_softmax(-1).mean(-1) * given).sum(-1) / given.sum(-1).clamp(min=1)
        change = settings.label_smoothing * (uniform - losses["lm_loss"])
        return losses | dict(loss=losses["loss"] + change, lm_loss=losses["lm_loss"] + change)


def clipped(settings, rates, weights, grads, states):
    if settings.grad_clip:
        scale = (settings.grad_clip / optim.norm(grads)).clamp(max=1)
        grads = {name: grad * scale for name, grad in grads.items()}
    _update(settings, rates, weights, grads, states)


optim.update = clipped
model.TRM = Smoothed
