"""A term of the loss, and a metric."""
import model

new(entropy_weight=0.1)
model.METRICS += ("certainty",)
model.LOSS_TERMS += ("entropy",)


class WithEntropy(model.TRM):
    def losses(self, logits, q_halt, labels, solved):
        values = super().losses(logits, q_halt, labels, solved)
        p = logits.softmax(-1)
        entropy = -(p * logits.log_softmax(-1)).sum(-1).mean(-1)  # the cells' mean
        loss = values["loss"] + self.settings.entropy_weight * entropy
        return values | dict(loss=loss, entropy=entropy, certainty=p.amax(-1).mean(-1))


model.TRM = WithEntropy
