"""Checks that train.py computes the official code's steps, in float32 on one chip of this machine.

    python scripts/parity.py --device=xla

Each step starts from the official state before it. All that it computes is compared with the official code:
halts, metrics, carry, moments, weights, their average and the puzzle embedding. Entries that rounding can
turn are left out (determined() below). Each step of an evaluation is compared in the same way, with its
answers and q_halt. So only the rounding of a single step is left. It depends on the machine (the order of
sums, the instructions) and is about 1e-6 of a tensor's largest entry; the limit is 1e-4. Halts and counts
must be equal: records/golden/make.py, which records these files, keeps no step in which a decision is close.

The last line is one JSON object, the largest error of each file. The first error that is too large ends the
script, with exit code 1.
"""
import json
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch.utils._pytree import tree_map

ROOT = str(Path(__file__).parents[1])
sys.path.insert(0, ROOT)
import configurator
import train
from configurator import one_of
from model import TRM
from runtime.engines import choose_device
from runtime.saved import load_weights


class Settings:
    device: one_of(["auto", "xla", "tpu", "cuda", "cpu"]) = "auto"


FILES = sorted(Path(ROOT, "records/golden").glob("*_steps.npz"))
LIMIT = 1e-4
BY_SEQUENCE = "batch", "carry", "eval", "eval/carry"  # trees whose arrays have a row for each sequence


class GoldenRun:
    """Runs the steps of a golden file and compares each; of several replicas each has its rows of the batch.

    It holds what parity knows of train.py: how a Run is made, given a state, let step, and read.
    """

    def __init__(self, path, device_type, **options):
        # an array's name is TREE/NAME; the official names of weights have a prefix
        self.golden = defaultdict(dict)
        for path_of_array, t in np.load(path).items():
            tree_name, _, name = path_of_array.rpartition("/")
            self.golden[tree_name][name.removeprefix("model.inner.")] = t
        evaluation = self.golden["eval"]
        evaluation["preds"] = evaluation.pop("logits").argmax(-1)
        config = json.loads(str(self.golden[""]["config"]))
        settings = configurator.configure(train.Settings, ["--ema"])
        # auto: a TPU captures and replays; torch.compile on a GPU would round otherwise
        settings.compile = "off" if device_type == "cuda" else "auto"
        vars(settings).update(config["model"] | config["train"] | options)
        device = train.open_device(device_type, settings)
        device.choose_dtype(settings.forward_dtype)  # on XLA it also makes float32 products exact
        model = TRM(settings, settings.seq_len, settings.vocab_size, settings.num_puzzle_identifiers)
        load_weights(model, tree_map(torch.from_numpy, self.recorded("weights", 0)))
        self.run = train.Run(settings, model, device)
        self.worst = 0.0  # the largest error so far

    def compare_all(self):
        """Runs and compares all steps, of training and of an evaluation; returns the largest error."""
        for k in range(self.run.settings.total_steps):
            self.train(k)
        for k in range(len(self.golden["eval"]["preds"])):
            self.evaluate(k)
        return self.worst

    def recorded(self, tree_name, k):
        """Returns {name: array} of an official tree at step k; of trees in BY_SEQUENCE, this replica's rows.

        k: a state is recorded before the first step and after each, all else at each step.
        """
        rows = ...
        if tree_name in BY_SEQUENCE:
            first = self.run.device.rank * self.run.batch_size
            rows = slice(first, first + self.run.batch_size)
        return {name: t[k][rows].copy() for name, t in self.golden[tree_name].items()}

    def sequences(self, tree_name, k):
        """Returns the sequences before step k, which the official code calls carry, on the device."""
        carry = self.recorded(tree_name, k)
        latents = {name: carry.pop(name) for name in ("z_H", "z_L")}
        return self.run.device.put(dict(latents=latents, **carry))

    def train(self, k):
        """Runs and compares step k of training."""
        run = self.run
        weights, m, v, ema = (self.recorded(tree_name, k) for tree_name in ("weights", "m", "v", "ema"))
        run.state |= run.device.put(dict(
            weights={name: weights[name] for name in m},
            ema={name: ema[name] for name in m},
            optimizer={name: dict(m=m[name], v=v[name]) for name in m},
            puzzle_emb=weights["puzzle_emb.weights"],
        ))
        run.state["sequences"] = self.sequences("carry", k)
        run.restart_sums()
        dataset = SimpleNamespace(train_batch=lambda *_: self.recorded("batch", k))
        inputs = train.make_inputs(run, dataset, k, run.settings.total_steps)
        run.train_step(run.state, inputs, (run.settings.H_cycles, run.settings.L_cycles))

        # all that it computed
        trees = run.state_dict()
        trees["carry"] = run.state["sequences"]
        for moment in "m", "v":
            trees[moment] = {name: moments[moment] for name, moments in trees["optimizer"].items()}
        for tree_name in "weights", "ema", "m", "v", "carry":
            self.compare(tree_name, trees[tree_name], k + 1)
        self.compare("metric", run.state["log_sums"], k)

    def evaluate(self, k):
        """Runs and compares step k of the evaluation, from the official state before it."""
        evaluator = self.run.evaluator
        slots = evaluator.new_slots()
        slots["sequences"] = self.sequences("eval/carry", k)
        inputs = evaluator.inputs(*self.run.eval_weights(), self.recorded("batch", 0))
        results = tree_map(torch.Tensor.cpu, evaluator.eval_step(slots, inputs))
        self.compare("eval", results, k)
        self.compare("eval/carry", slots["sequences"], k + 1)
        if k + 1 == evaluator.max_steps:
            sums = {name: results[name].sum() for name in self.golden["eval/metric"]}
            ranks = self.run.device.all_gather(sums)
            self.compare("eval/metric", tree_map(lambda *values: sum(values), *ranks), 0)

    def compare(self, tree_name, tree, k):
        """Compares {name: tensor} with an official tree at step k; see recorded."""
        # the official code has the latents of sequences beside the rest
        tree = tree | tree.get("latents", {})
        for name, want in self.recorded(tree_name, k).items():
            got = tree[name].cpu().double().numpy().reshape(want.shape)
            mask = self.determined(tree_name, name, k)
            # relative to the largest entry; halts and counts must be equal
            error = abs(got[mask] - want[mask]).max() / max(abs(want[mask]).max(), 1e-12)
            limit = LIMIT if want.dtype.kind == "f" else 0
            assert error <= limit, f"{tree_name}/{name} at step {k}: {error:.1e}"
            self.worst = max(self.worst, float(error))

    def determined(self, tree_name, name, k):
        """Returns a mask of the entries that rounding cannot turn.

        atan2 of the moments and the sign in SignSGD have full size however small a gradient is, so rounding
        gives the update of an entry whose gradients are nothing else. Weights and averages are compared where
        the gradients are above 1e-3 of the tensor's largest, or exactly 0. Moments are compared everywhere.
        """
        if name == "puzzle_emb.weights":
            size = abs(self.golden[""]["puzzle_grad"][k - 1])
        elif tree_name in ("weights", "ema") and name in self.golden["v"]:
            size = np.sqrt(self.golden["v"][name][k])
        else:
            return ...  # all entries
        mask = (size > 1e-3 * size.max()) | (size == 0)
        assert mask.mean() > 0.9, name
        return mask


def main(settings):
    """Replays all files on one chip."""
    device_type, _ = choose_device(settings.device)
    if device_type == "xla":
        import torch_xla.distributed.xla_multiprocessing as xmp
        xmp.spawn(lambda index: replay_all(device_type), nprocs=1)  # in this process
    else:
        replay_all(device_type)


def replay_all(device_type):
    print(json.dumps({path.name: GoldenRun(path, device_type).compare_all() for path in FILES}))


if __name__ == "__main__":
    configurator.start(main, Settings)
