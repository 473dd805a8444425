"""Trains the official code on the CPU, on a dataset of ours, until it solves 90% of 1000 test puzzles.

    git clone https://github.com/SamsungSAILMontreal/TinyRecursiveModels && pip install einops argdantic
    python records/official.py TinyRecursiveModels data/sudoku-6x6-demo curve.jsonl --lr=1e-3 --seed=0

The model, loss, data loader, average and recipe are the official code's for Sudoku, at the demo's width. Two
things differ: AdamATan2 is in plain PyTorch, and the warm-up has 100 steps instead of 2000. The clock counts
the processor's time and stops for evaluations. These take 200 test puzzles, and all 1000 once the 200 are
near the target. records/results.md has the results.
"""
import argparse
import itertools
import json
import math
import sys
import time
from pathlib import Path

import torch

parser = argparse.ArgumentParser()
parser.add_argument("official", help="folder of the official code")
parser.add_argument("data")
parser.add_argument("curve", help="file of JSON lines to which evaluations are added")
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
TARGET = 0.9  # of all test puzzles
NEAR = 0.88  # of 200 of them: then all are evaluated
WARMUP = 100  # steps
DECAY = 1.0
INTERVAL = 90  # seconds of training between evaluations
LIMIT = 3600  # seconds of training

sys.path[:0] = [args.official, str(Path(__file__).with_name("golden"))]
from make import AdamATan2
from models.ema import EMAHelper
from models.losses import ACTLossHead
from models.recursive_reasoning.trm import TinyRecursiveReasoningModel_ACTV1
from models.sparse_embedding import CastedSparseEmbeddingSignSGD_Distributed
from puzzle_dataset import PuzzleDataset, PuzzleDatasetConfig


def dataset(split, **options):
    return PuzzleDataset(PuzzleDatasetConfig(
        seed=args.seed, dataset_paths=[args.data], rank=0, num_replicas=1, global_batch_size=args.batch,
        **options), split)


@torch.inference_mode()
def exact_accuracy(model, test, puzzles):
    """Returns the share of the first test puzzles that the model solves, and how many it was asked."""
    model.eval()
    solved = 0
    count = 0
    for _, batch, _ in itertools.islice(test, math.ceil(puzzles / args.batch)):
        # all supervision steps; the metrics of the last one count
        carry = model.initial_carry(batch)
        finished = False
        while not finished:
            carry, _, metrics, _, finished = model(carry=carry, batch=batch, return_keys=[])
        solved += metrics["exact_accuracy"].item()
        count += metrics["count"].item()
    return solved / count, count


def main():
    # the official data and model
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
    # two optimizers, and the average of the weights
    embedding = CastedSparseEmbeddingSignSGD_Distributed(
        model.model.puzzle_emb.buffers(), world_size=1, lr=0, weight_decay=DECAY)
    optimizers = {embedding: 1e-4, AdamATan2(model.parameters(), DECAY): args.lr}
    ema = EMAHelper(mu=0.999)
    ema.register(model)

    # train until the target or the limit
    carry = None
    next_evaluation = INTERVAL
    began = time.process_time()
    for step, (_, batch, size) in enumerate(train, 1):
        # a step of training
        model.train()
        carry, loss, *_ = model(carry=carry or model.initial_carry(batch), batch=batch, return_keys=[])
        (loss / size).backward()
        for optimizer, lr in optimizers.items():
            optimizer.param_groups[0]["lr"] = lr * min(1, step / WARMUP)
            optimizer.step()
            optimizer.zero_grad()
        ema.update(model)

        # an evaluation
        seconds = time.process_time() - began
        if seconds < next_evaluation:
            continue
        next_evaluation += INTERVAL
        # 200 puzzles, and all if these are near the target
        average = ema.ema_copy(model)
        for most in 200, 1000:
            accuracy, puzzles = exact_accuracy(average, test, most)
            # a line of the curve
            row = vars(args) | dict(step=step, minutes=seconds / 60, puzzles=puzzles, exact_accuracy=accuracy)
            with open(args.curve, "a") as f:
                print(json.dumps(row), file=f)
            if accuracy < NEAR:
                break
        if puzzles == 1000 and accuracy >= TARGET or seconds >= LIMIT:
            return
        # the clock goes on where it stood
        began = time.process_time() - seconds


if __name__ == "__main__":
    main()
