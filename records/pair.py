"""Times the official code's training step beside ours, in one process: config/sudoku.py, random puzzles.

    git clone https://github.com/SamsungSAILMontreal/TinyRecursiveModels && pip install einops pydantic
    git -C TinyRecursiveModels checkout e7b6871
    python records/pair.py TinyRecursiveModels out/pair                       on a CUDA GPU
    python records/pair.py TinyRecursiveModels out/pair --device=cpu --tiny   a rehearsal

The model, loss, SignSGD and average are the official code's. Both sides begin with the same weights and take
turns in rounds ABBA. OUT/pair.jsonl gets each line as soon as it is measured. The sides differ in five ways:

- The official code takes its whole batch at once, ours takes micro-batches unless micro_batch_size is 0.
- adam-atan2 is a CUDA extension. Its formula in torch._foreach operations takes its place.
- The official side finds its batches ready in pinned memory, since its data loader is another process. Ours
  makes its batch inside the step, as train.py does.
- The official side reads its metrics at each step, as pretrain.py does, and so waits for the GPU.
- The official loss is in float64, ours is in float32.

The numbers in results.md came from a longer script with the same steps. Three things are simpler here. Our
first step also starts the compiler. Each variant builds and compiles both sides anew, for which the compiler
may find code in its cache. peak_gb is of the second to fourth step, there it was of the rounds.
"""
import argparse
import gc
import itertools
import json
import sys
import time
from pathlib import Path
from statistics import median

import torch

parser = argparse.ArgumentParser()
parser.add_argument("official", help="folder of the official code")
parser.add_argument("out", help="folder to which pair.jsonl is written")
parser.add_argument("--device", default="cuda")  # or cpu
parser.add_argument("--tiny", action="store_true", help="small sizes, for a rehearsal")
args = parser.parse_args()
CUDA = args.device == "cuda"
MICRO_BATCH = 192
SIZES = {}  # beside config/sudoku.py's
if args.tiny:
    MICRO_BATCH = 4
    SIZES = dict(global_batch_size=8, hidden_size=64, puzzle_emb_ndim=64, H_cycles=2, L_cycles=1,
                 forward_dtype="float32")
# compile, micro_batch_size of ours (0: the whole batch), steps of a round
VARIANTS = ("on", MICRO_BATCH, 10), ("on", 0, 10), ("off", 0, 5), ("off", MICRO_BATCH, 5)

ROOT = str(Path(__file__).resolve().parent.parent)
sys.path[:0] = [ROOT, args.official, f"{ROOT}/records/golden"]
from make import AdamATan2
from models.ema import EMAHelper
from models.losses import ACTLossHead
from models.recursive_reasoning.trm import TinyRecursiveReasoningModel_ACTV1
from models.sparse_embedding import CastedSparseEmbeddingSignSGD_Distributed

import bench
import configurator
import data
import train


class ForeachAdamATan2(AdamATan2):
    """Updates all parameters with few kernels."""

    @torch.no_grad()
    def step(self):
        self.step_count += 1
        beta1, beta2 = self.betas
        [group] = self.param_groups
        params = group["params"]
        grads = [p.grad for p in params]
        m = [self.state[p]["m"] for p in params]
        v = [self.state[p]["v"] for p in params]
        # decay the weights, and update both moments
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_lerp_(m, grads, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, grads, grads, 1 - beta2)
        # update the weights; there is no _foreach_atan2
        roots = torch._foreach_sqrt(torch._foreach_div(v, 1 - beta2 ** self.step_count))
        updates = list(map(torch.atan2, m, roots))
        torch._foreach_add_(params, updates, alpha=-group["lr"] / (1 - beta1 ** self.step_count))


def official_steps(settings):
    """Yields when it is ready, and after each step of the official code, which follows its pretrain.py."""
    # the model, which picks the settings that it knows, and our first weights
    train_set, _ = data.load(settings.data_path)
    trm = train.new_model(settings, train_set)
    batch_size = settings.global_batch_size
    config = dict(vars(settings), **trm.sizes, batch_size=batch_size, H_layers=0, no_ACT_continue=True)
    with torch.device(args.device):
        head = ACTLossHead(TinyRecursiveReasoningModel_ACTV1(config), settings.loss_type)
    head.model.inner.load_state_dict(trm.state_dict())
    if settings.compile == "on":
        head = torch.compile(head)
    # two optimizers with their rates, and the average of the weights; AdamATan2's betas are the recipe's
    embedding = CastedSparseEmbeddingSignSGD_Distributed(
        head.model.puzzle_emb.buffers(), world_size=1, lr=0, weight_decay=settings.puzzle_emb_weight_decay)
    adam = ForeachAdamATan2(head.parameters(), settings.weight_decay)
    optimizers = {embedding: settings.puzzle_emb_lr, adam: settings.lr}
    ema = EMAHelper(mu=settings.ema_rate)
    ema.register(head)
    # batches on the host
    batches = []
    for step in range(8):
        batch = train_set.train_batch(settings.seed, step, batch_size)
        batches.append({name: torch.tensor(array, pin_memory=CUDA) for name, array in batch.items()})
    carry = None
    yield

    for step, batch in enumerate(itertools.cycle(batches), 1):
        # forward and backward
        batch = {name: t.to(args.device) for name, t in batch.items()}
        with torch.device(args.device):
            carry = carry or head.initial_carry(batch)
        carry, loss, metrics, *_ = head(carry=carry, batch=batch, return_keys=[])
        (loss / batch_size).backward()
        # update the weights; the rate is constant after the warm-up
        for optimizer, lr in optimizers.items():
            optimizer.param_groups[0]["lr"] = lr * min(1, step / settings.lr_warmup_steps)
            optimizer.step()
            optimizer.zero_grad()
        # read the metrics, and update the average
        torch.stack(list(metrics.values())).cpu()
        ema.update(head)
        yield


def our_steps(settings):
    """Yields when it is ready, and after each step of train.py."""
    run, next_inputs = bench.new_run(settings, train.open_device(args.device, settings))
    while True:
        yield
        run.train_step(run.state, next_inputs(), (settings.H_cycles, settings.L_cycles))


def put(**line):
    """Prints a line of JSON, and adds it to the file."""
    text = json.dumps(line)
    print(text, flush=True)
    with open(f"{args.out}/pair.jsonl", "a") as f:
        print(text, file=f)


def mark():
    """Returns a CUDA event behind the GPU's work so far, or the time."""
    if CUDA:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    return time.perf_counter()


def milliseconds(begin, end):
    if CUDA:
        end.synchronize()
        return begin.elapsed_time(end)
    return 1e3 * (end - begin)


def measure(side, num_steps):
    """Returns the milliseconds of each step."""
    marks = [mark()]
    for _ in range(num_steps):
        next(side)
        marks.append(mark())
    return [round(milliseconds(*pair), 2) for pair in itertools.pairwise(marks)]


def first_steps(side):
    """Builds a side; returns the seconds of its first step, and the peak memory of the next ones."""
    # what is there before does not count
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    next(side)
    # the first step compiles
    [first_ms] = measure(side, 1)
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    measure(side, 3)
    peak_gb = (torch.cuda.max_memory_allocated() - before) / 1e9
    return dict(first_step_s=first_ms / 1e3, peak_gb=peak_gb)


def compare(num_steps, **variant):
    """Measures both sides in turns, and puts lines: for each side, each round, and all rounds of a side.

    variant: settings beside config/sudoku.py's.
    """
    settings = configurator.configure(train.Settings, [f"{ROOT}/config/sudoku.py"])
    vars(settings).update(variant)
    # random puzzles, made once
    settings.data_path = bench.find_or_make_dataset(f"{args.out}/random", args.out)
    # both sides compile anew
    torch._dynamo.reset()
    sides = dict(ours=our_steps(settings), official=official_steps(settings))
    for name, side in sides.items():
        put(**variant, side=name, **first_steps(side))
    # the rounds
    all_ms = dict(ours=[], official=[])
    for name in "ours", "official", "official", "ours":
        # the first step does not count, since the other side has used the caches
        steps_ms = measure(sides[name], num_steps + 1)[1:]
        put(**variant, side=name, steps_ms=steps_ms)
        all_ms[name] += steps_ms
    for name, ms in all_ms.items():
        put(**variant, side=name, median_ms=median(ms), range_ms=[min(ms), max(ms)], n=len(ms))


def main():
    Path(args.out).mkdir(parents=True, exist_ok=True)
    put(torch=torch.__version__, gpu=torch.cuda.get_device_name() if CUDA else None)
    for compiled, micro_batch_size, num_steps in VARIANTS:
        compare(num_steps, compile=compiled, micro_batch_size=micro_batch_size, **SIZES)


if __name__ == "__main__":
    main()
