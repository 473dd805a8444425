"""Trains the official code on the CPU, on a dataset of ours, until it solves 90% of 1000 test puzzles.

    git clone https://github.com/SamsungSAILMontreal/TinyRecursiveModels && pip install einops argdantic
    python tests/official.py TinyRecursiveModels data/sudoku-6x6-demo curve.jsonl --lr=1e-3 --seed=0

Its own model, loss, data loader, average, and recipe for Sudoku at the demo's width. Not its own: AdamATan2
in plain PyTorch, and a warm-up of 100 steps instead of 2000. The clock is the processor's, and stops for
evaluations: of 200 test puzzles, and of all 1000 once these are near the target. docs/results.md has what
came out.
"""
import argparse
import itertools
import json
import sys
import time

import torch

parser = argparse.ArgumentParser()
parser.add_argument("official", help="folder of the official code")
parser.add_argument("data")
parser.add_argument("curve", help="file of JSON lines to which evaluations are added")
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--minutes", type=float, default=60, help="of training, at most")
parser.add_argument("--every", type=float, default=1.5, help="minutes between evaluations")
args = parser.parse_args()
TARGET, NEAR, WARMUP, DECAY = 0.9, 0.88, 100, 1.0

sys.path.insert(0, args.official)
from models.ema import EMAHelper
from models.losses import ACTLossHead
from models.recursive_reasoning.trm import TinyRecursiveReasoningModel_ACTV1
from models.sparse_embedding import CastedSparseEmbeddingSignSGD_Distributed
from puzzle_dataset import PuzzleDataset, PuzzleDatasetConfig


class AdamATan2(torch.optim.Optimizer):
    def __init__(self, params, lr, weight_decay, betas=(0.9, 0.95)):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay))
        self.betas, self.step_count = betas, 0

    @torch.no_grad()
    def step(self):
        self.step_count += 1
        bias1, bias2 = (1 - beta ** self.step_count for beta in self.betas)
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p] = self.state[p] or dict(m=torch.zeros_like(p), v=torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                state["m"].lerp_(p.grad, 1 - self.betas[0])
                state["v"].lerp_(p.grad.square(), 1 - self.betas[1])
                p.sub_(torch.atan2(state["m"], (state["v"] / bias2).sqrt()), alpha=group["lr"] / bias1)


def dataset(split, **options):
    return PuzzleDataset(PuzzleDatasetConfig(
        seed=args.seed, dataset_paths=[args.data], rank=0, num_replicas=1, global_batch_size=args.batch,
        **options), split)


@torch.inference_mode()
def exact_accuracy(model, test, puzzles):
    model.eval()
    solved = count = 0
    for _, batch, _ in itertools.islice(test, -(-puzzles // args.batch)):
        carry, finished = model.initial_carry(batch), False
        while not finished:
            carry, _, metrics, _, finished = model(carry=carry, batch=batch, return_keys=[])
        solved, count = solved + metrics["exact_accuracy"].item(), count + metrics["count"].item()
    return solved / count, count


def main():
    torch.random.manual_seed(args.seed)
    torch.set_num_threads(1)
    train = dataset("train", test_set_mode=False, epochs_per_iter=1000)
    test = dataset("test", test_set_mode=True, epochs_per_iter=1)
    names = "seq_len", "vocab_size", "num_puzzle_identifiers"
    sizes = {name: getattr(train.metadata, name) for name in names}
    model = ACTLossHead(TinyRecursiveReasoningModel_ACTV1(dict(
        sizes, batch_size=args.batch, hidden_size=128, num_heads=2, expansion=4, H_layers=0, L_layers=2,
        H_cycles=3, L_cycles=6, pos_encodings="none", mlp_t=True, puzzle_emb_ndim=128, puzzle_emb_len=16,
        halt_max_steps=16, halt_exploration_prob=0.1, forward_dtype="bfloat16", no_ACT_continue=True)),
        "stablemax_cross_entropy")
    embedding = CastedSparseEmbeddingSignSGD_Distributed(
        model.model.puzzle_emb.buffers(), world_size=1, lr=0, weight_decay=DECAY)
    optimizers = {embedding: 1e-4, AdamATan2(model.parameters(), lr=0, weight_decay=DECAY): args.lr}
    ema = EMAHelper(mu=0.999)
    ema.register(model)
    carry, seconds, next_evaluation, began = None, 0.0, args.every * 60, time.process_time()
    for step, (_, batch, size) in enumerate(train, 1):
        model.train()
        carry, loss, *_ = model(carry=carry or model.initial_carry(batch), batch=batch, return_keys=[])
        (loss / size).backward()
        for optimizer, lr in optimizers.items():
            optimizer.param_groups[0]["lr"] = lr * min(1, step / WARMUP)
            optimizer.step()
            optimizer.zero_grad()
        ema.update(model)
        if seconds + time.process_time() - began < next_evaluation:
            continue
        seconds, next_evaluation = seconds + time.process_time() - began, next_evaluation + args.every * 60
        average = ema.ema_copy(model)
        for puzzles in (200, 1000):
            accuracy, puzzles = exact_accuracy(average, test, puzzles)
            row = dict(step=step, minutes=seconds / 60, puzzles=puzzles, exact_accuracy=accuracy,
                       lr=args.lr, batch=args.batch, seed=args.seed)
            print(json.dumps(row), flush=True)
            with open(args.curve, "a") as f:
                print(json.dumps(row), file=f)
            if accuracy < NEAR:
                break
        if puzzles == 1000 and accuracy >= TARGET or seconds >= 60 * args.minutes:
            return
        began = time.process_time()


if __name__ == "__main__":
    main()
