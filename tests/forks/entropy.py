"""A term of the loss, and a metric."""
import model

new(entropy_weight=0.1)
model.METRICS += ("z_norm",)
model.LOSS_TERMS += ("entropy",)


class WithEntropy(model.TRM):
    def losses(self, logits, q_halt, labels, solved):
        losses = super().losses(logits, q_halt, labels, solved)
        entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean(-1)  # the cells' mean
        return losses | dict(entropy=entropy, loss=losses["loss"] + self.settings.entropy_weight * entropy)

    def forward(self, *arguments):
        result = super().forward(*arguments)
        result.values["z_norm"] = result.sequences["latents"]["z_H"].float().norm(dim=(1, 2))
        return result


model.TRM = WithEntropy
