"""Records what the official code does in a few training steps and one evaluation: *_steps.npz of this folder.

    git clone https://github.com/SamsungSAILMontreal/TinyRecursiveModels && pip install einops pydantic
    python records/golden/make.py TinyRecursiveModels

Its own model, loss, SignSGD and average, in float32 on the CPU; only AdamATan2 is written in plain PyTorch
here. scripts/parity.py starts each step from the official state before it, so a file has, for K steps:

- `config`: JSON with `model` (the official settings) and `train` (rates, schedule, decay, average).
- `weights/NAME`, `m/NAME`, `v/NAME`, `ema/NAME` [K + 1, ...]: weights, moments and average, before the first
  step and after each. weights has the puzzle embedding and the initial latents too.
- `carry/NAME` [K + 1, B, ...]: the carry before the first step and after each.
- `batch/NAME` [K, B, ...]: what sequences that halted at the step before take.
- `logits` and `q_halt_logits` [K, B, ...]; `metric/NAME` [K]: sums over the batch.
- `puzzle_grad` [K, N, D']: the gradient of the puzzle embedding, whose sign SignSGD takes.
- `eval/...`: E supervision steps on batch 0 with the average: carry [E + 1, ...], logits and q_halt_logits
  [E, ...], and the metrics after the last step.

No decision is a close call: each q_halt and the lead of each answer over the next best is far larger than
rounding, so that halts, steps and counts are the same on every machine. Some puzzle is solved.
"""
import json
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, sys.argv[1])
from models.ema import EMAHelper
from models.losses import ACTLossHead
from models.recursive_reasoning.trm import TinyRecursiveReasoningModel_ACTV1
from models.sparse_embedding import CastedSparseEmbeddingSignSGD_Distributed

BATCH_SIZE, SEQ_LEN, VOCAB_SIZE, PUZZLES, STEPS = 6, 9, 6, 5, 4
MODEL = dict(batch_size=BATCH_SIZE, seq_len=SEQ_LEN, vocab_size=VOCAB_SIZE, num_puzzle_identifiers=PUZZLES,
             hidden_size=8, num_heads=2, expansion=4, H_layers=0, L_layers=2, H_cycles=2, L_cycles=3,
             puzzle_emb_ndim=12, puzzle_emb_len=2, halt_max_steps=3, halt_exploration_prob=0.0,
             forward_dtype="float32", no_ACT_continue=True)
TRAIN = dict(lr=3e-3, lr_min_ratio=0.1, lr_warmup_steps=2, weight_decay=0.5, beta1=0.9, beta2=0.95,
             puzzle_emb_lr=0.01, puzzle_emb_weight_decay=0.3, ema_rate=0.9, total_steps=STEPS,
             global_batch_size=BATCH_SIZE)
FILES = {
    "mlp_steps": dict(mlp_t=True, pos_encodings="none"),
    "attention_rope_steps": dict(mlp_t=False, pos_encodings="rope"),
}
CLOSE_CALL = 5e-3  # a q_halt, or a lead among logits, below this is a decision that rounding might turn


class AdamATan2(torch.optim.Optimizer):
    """The official optimizer's update, which it computes in CUDA alone."""

    def __init__(self, params, weight_decay, betas=(0.9, 0.95)):
        super().__init__(params, dict(lr=0.0, weight_decay=weight_decay))
        self.betas = betas
        self.step_count = 0
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = dict(m=torch.zeros_like(p), v=torch.zeros_like(p))

    @torch.no_grad()
    def step(self):
        self.step_count += 1
        bias1, bias2 = (1 - beta ** self.step_count for beta in self.betas)
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                state["m"].lerp_(p.grad, 1 - self.betas[0])
                state["v"].lerp_(p.grad.square(), 1 - self.betas[1])
                # Its kernel corrects the bias of m outside of atan2.
                p.sub_(torch.atan2(state["m"], (state["v"] / bias2).sqrt()), alpha=group["lr"] / bias1)


class Recorder:
    """Appends arrays under names, and stacks those of one name."""

    def __init__(self):
        self.arrays = {}

    def add(self, prefix, tensors):
        for name, t in tensors.items():
            self.arrays.setdefault(prefix + name, []).append(t.detach().clone().numpy())

    def add_carry(self, prefix, carry):
        inner = carry.inner_carry
        self.add(prefix, dict(z_H=inner.z_H, z_L=inner.z_L, steps=carry.steps, halted=carry.halted,
                              **carry.current_data))

    def stacked(self):
        return {name: np.stack(arrays) for name, arrays in self.arrays.items()}


def random_batch(generator, some_unscored):
    """Puzzles without a pattern. One has a single scored cell, and one has none if some_unscored."""
    def integers(high, *shape):
        return torch.randint(high, shape, generator=generator, dtype=torch.int32)

    labels = integers(VOCAB_SIZE, BATCH_SIZE, SEQ_LEN)
    scored = torch.rand(labels.shape, generator=generator) < 0.6
    scored[1] = True
    scored[2] &= not some_unscored
    scored[3] = torch.arange(SEQ_LEN) == 4
    return dict(inputs=integers(VOCAB_SIZE, BATCH_SIZE, SEQ_LEN), labels=torch.where(scored, labels, -100),
                puzzle_identifiers=integers(PUZZLES, BATCH_SIZE))


def has_close_calls(logits, q_halt_logits):
    best, second = logits.topk(2, -1).values.unbind(-1)
    return min((best - second).min(), q_halt_logits.abs().min()) < CLOSE_CALL


def learning_rate(base, step):
    """The official schedule (pretrain.py), at the step counted from 1."""
    if step < TRAIN["lr_warmup_steps"]:
        return base * step / TRAIN["lr_warmup_steps"]
    progress = (step - TRAIN["lr_warmup_steps"]) / max(1, STEPS - TRAIN["lr_warmup_steps"])
    ratio = TRAIN["lr_min_ratio"]
    return base * (ratio + max(0.0, (1 - ratio) * 0.5 * (1.0 + np.cos(np.pi * progress))))


def make(settings, seed):
    """The arrays of a file, or None if a decision is a close call or no puzzle is solved."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = ACTLossHead(TinyRecursiveReasoningModel_ACTV1(MODEL | settings), "stablemax_cross_entropy")
    inner = model.model.inner
    with torch.no_grad():  # the official ones are zeros, and q_halt -5, at which no sequence halts early
        inner.q_head.weight.normal_(std=0.5)
        inner.q_head.bias.zero_()
        inner.puzzle_emb.weights.normal_()
        for p in inner.L_level.parameters():  # a step with smaller weights amplifies rounding less
            p.mul_(0.5)
    table = CastedSparseEmbeddingSignSGD_Distributed(
        inner.puzzle_emb.buffers(), world_size=1, lr=0, weight_decay=TRAIN["puzzle_emb_weight_decay"])
    adam = AdamATan2(model.parameters(), TRAIN["weight_decay"], (TRAIN["beta1"], TRAIN["beta2"]))
    ema = EMAHelper(mu=TRAIN["ema_rate"])
    ema.register(model)
    recorder = Recorder()

    def add_state(carry):
        parameters = dict(model.named_parameters())
        recorder.add("weights/", model.state_dict())
        recorder.add("m/", {name: adam.state[p]["m"] for name, p in parameters.items()})
        recorder.add("v/", {name: adam.state[p]["v"] for name, p in parameters.items()})
        recorder.add("ema/", ema.shadow)
        recorder.add_carry("carry/", carry)

    # The evaluation takes the first batch, and the official q_halt_loss counts puzzles without scored cells.
    batches = [random_batch(generator, some_unscored=k > 0) for k in range(STEPS)]
    carry = zero_carry(model, batches[0])
    add_state(carry)
    for k, batch in enumerate(batches):
        model.train()
        carry, loss, metrics, outputs, _ = model(
            carry=carry, batch=batch, return_keys=["logits", "q_halt_logits"])
        if has_close_calls(**outputs):
            return None
        (loss / BATCH_SIZE).backward()
        grad = torch.zeros_like(inner.puzzle_emb.weights)
        grad.index_add_(0, inner.puzzle_emb.local_ids, inner.puzzle_emb.local_weights.grad)
        for optimizer, lr in ((table, TRAIN["puzzle_emb_lr"]), (adam, TRAIN["lr"])):
            optimizer.param_groups[0]["lr"] = learning_rate(lr, k + 1)
            optimizer.step()
            optimizer.zero_grad()
        ema.update(model)
        recorder.add("batch/", batch)
        recorder.add("", outputs | dict(puzzle_grad=grad))
        recorder.add("metric/", metrics)
        add_state(carry)

    average = ema.ema_copy(model).eval()
    carry = zero_carry(average, batches[0])
    recorder.add_carry("eval/carry/", carry)
    finished = False
    while not finished:
        with torch.inference_mode():
            carry, _, metrics, outputs, finished = average(
                carry=carry, batch=batches[0], return_keys=["logits", "q_halt_logits"])
        if has_close_calls(**outputs):
            return None
        recorder.add_carry("eval/carry/", carry)
        recorder.add("eval/", outputs)
    recorder.add("eval/metric/", metrics)
    if not any(recorder.arrays["metric/exact_accuracy"]):
        return None
    config = dict(model=MODEL | settings, train=TRAIN)
    return recorder.stacked() | dict(config=json.dumps(config))


def zero_carry(model, batch):
    """The initial carry, in which all sequences have halted; the official one is uninitialized memory."""
    carry = model.initial_carry(batch)
    for t in (carry.inner_carry.z_H, carry.inner_carry.z_L, *carry.current_data.values()):
        t.zero_()
    return carry


def main():
    torch.set_num_threads(1)
    for name, settings in FILES.items():
        seed = 0
        while (arrays := make(settings, seed)) is None:
            seed += 1
        path = Path(__file__).with_name(name + ".npz")
        np.savez_compressed(path, **arrays)
        print(f"{path}: seed {seed}, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
