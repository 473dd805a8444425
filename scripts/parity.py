"""Golden parity: does train.py compute the official code's steps, in float32 on one chip of this machine?

    python scripts/parity.py --device=xla

Each step starts from the official state before it, and all that it computes is compared with the official
code: halts, metrics, carry, moments, weights, their average and the puzzle embedding, but for entries that
rounding can turn (determined() below). Each step of an evaluation is compared in the same way, with its
answers and q_halt. So only the rounding of a single step is left. It depends on the machine (the order of
sums, the instructions) and is about 1e-6 of a tensor's largest entry; the limit is 1e-4. Halts and counts
must be equal: records/golden/make.py, which records these files, keeps no step in which a decision is close.

The last line is one JSON object, the largest error of each file. The exit code is 1 if one is too large.
TRM_GOLDEN is a glob of golden files (default: records/golden/*_steps.npz).
"""
import glob
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

ROOT = str(Path(__file__).parents[1])
sys.path.insert(0, ROOT)
import configurator
import train
from model import LOSS_TERMS, METRICS, TRM
from runtime import process
from runtime.engines import choose_device
from runtime.errors import UserError, check_choices
from runtime.saved import load_weights


class Settings:
    device = "auto"  # auto, xla, tpu, cuda or cpu


FILES = sorted(glob.glob(os.environ.get("TRM_GOLDEN") or f"{ROOT}/records/golden/*_steps.npz"))
LIMIT = 1e-4
OFFICIAL = "model.inner."  # the official names of weights begin with this
PUZZLE_EMB = OFFICIAL + "puzzle_emb.weights"
COUNTS = "/count", "/exact_accuracy", "/q_halt_accuracy", "/steps"
SUMS = METRICS + LOSS_TERMS[1:]  # of the batch; the official code logs the parts of the loss
# What the names of a file's arrays begin with: recorded before each step too; with a row for each sequence;
# and not compared by their names.
STATES = "weights/", "m/", "v/", "ema/", "carry/", "eval/carry/"
BY_SEQUENCE = "carry/", "eval/carry/", "eval/preds", "eval/q_halt_logits"
OTHERS = "config", "batch/", "logits", "q_halt_logits", "eval/logits", "puzzle_grad"


class Replay:
    """Runs the steps of a golden file and compares each; of several replicas each has its rows of the batch.

    It holds what parity knows of train.py: how a Run is made, given a state, let step, and read.
    """

    def __init__(self, path, device_type, **options):
        self.golden = golden = dict(np.load(path))
        golden["eval/preds"] = golden["eval/logits"].argmax(-1)
        config = json.loads(str(golden["config"]))
        self.total_steps = config["train"]["total_steps"]
        settings = configurator.configure(train.Settings, ["--ema"])
        # auto: the capture and its replay
        settings.compile = "auto" if device_type in ("xla", "tpu") else "off"
        settings.eval_halt_max_steps = config["model"]["halt_max_steps"]
        vars(settings).update(config["model"] | config["train"] | options)
        device = train.open_device(device_type, settings)
        device.choose_dtype(settings.forward_dtype)  # on XLA it also makes float32 products exact
        model = TRM(settings, *map(config["model"].get, ("seq_len", "vocab_size", "num_puzzle_identifiers")))
        weights = self.before("weights/", 0)
        load_weights(model, {name: torch.from_numpy(t) for name, t in weights.items()})
        self.run = train.Run(settings, model, device)
        self.worst = 0.0  # the largest error so far
        self.own_sequences = slice(device.rank * self.run.batch_size, (device.rank + 1) * self.run.batch_size)

    def compare_all(self):
        """Runs and compares all steps, of training and of an evaluation."""
        compared = set()
        for k in range(len(self.golden["logits"])):
            compared |= self.train(k)
        for k in range(len(self.golden["eval/logits"])):
            compared |= self.evaluate(k)
        assert compared == {name for name in self.golden if not name.startswith(OTHERS)}

    def before(self, prefix, k):
        """Returns {name without the prefix: array} of the official state before step k."""
        return {name.removeprefix(prefix): t[k].copy() for name, t in self.golden.items()
                if name.startswith(prefix)}

    def own_part(self, prefix, k):
        """Returns what before() does, of this replica's sequences."""
        return {name: t[self.own_sequences] for name, t in self.before(prefix, k).items()}

    def sequences(self, prefix, k):
        """Returns the sequences before step k, which the official code calls carry, on the device."""
        carry = self.own_part(prefix, k)
        latents = {name: carry.pop(name) for name in ("z_H", "z_L")}
        return self.run.device.put(dict(latents=latents, **carry))

    def train(self, k):
        """Runs and compares step k of training; returns the names of what it compared."""
        run = self.run
        m = self.before(f"m/{OFFICIAL}", k)
        v = self.before(f"v/{OFFICIAL}", k)
        ema = self.before(f"ema/{OFFICIAL}", k)
        weights = self.before(f"weights/{OFFICIAL}", k)
        run.state |= run.device.put(dict(
            weights={name: weights[name] for name in run.state["weights"]},
            ema={name: ema[name] for name in run.state["weights"]},
            optimizer={name: dict(m=m[name], v=v[name]) for name in run.state["weights"]},
            puzzle_emb=weights["puzzle_emb.weights"],
        ))
        run.state["sequences"] = self.sequences("carry/", k)
        dataset = SimpleNamespace(train_batch=lambda *_: self.own_part("batch/", k))
        cycles = run.settings.H_cycles, run.settings.L_cycles
        run.train_step(run.state, train.make_inputs(run, dataset, k, self.total_steps), cycles)

        # all that it computed
        saved = run.state_dict()
        trees = {tree_name: saved[tree_name] for tree_name in ("weights", "ema")}
        for tree_name in "m", "v":
            trees[tree_name] = {name: moments[tree_name] for name, moments in saved["optimizer"].items()}
        values = {f"{tree_name}/{OFFICIAL}{name}": t.numpy() for tree_name, tree in trees.items()
                  for name, t in tree.items()}
        sums = {name: float(total.cpu()) for name, total in run.state["log_sums"].items()}
        run.take_means(1)  # the next step starts at 0
        values |= {"metric/" + name: np.float64(sums[name]) for name in SUMS}
        return self.compare(k, values | carry_after(run.state["sequences"], "carry/"))

    def evaluate(self, k):
        """Runs and compares step k of the evaluation, from the official state before it."""
        evaluator = self.run.evaluator
        slots = evaluator.new_slots()
        slots["sequences"] = self.sequences("eval/carry/", k)
        batch = self.own_part("batch/", 0)
        results = evaluator.program(slots, evaluator.inputs(*self.run.eval_weights(), batch))
        results = {name: t.cpu().numpy() for name, t in results.items()}
        values = {"eval/" + name: results[name] for name in ("preds", "q_halt_logits")}
        ranks = self.run.device.all_gather({name: results[name].sum() for name in SUMS})
        if k == len(self.golden["eval/logits"]) - 1:  # all sequences halt there
            values |= {"eval/metric/" + name: sum(sums[name] for sums in ranks) for name in SUMS}
        return self.compare(k, values | carry_after(slots["sequences"], "eval/carry/"))

    def compare(self, k, values):
        """Compares what step k computed, {name: array}, with the official code's; returns the names."""
        compared = values.keys() & self.golden.keys()
        for name in sorted(compared):
            got = values[name]
            want = self.golden[name][-1 if "eval/metric/" in name else k + name.startswith(STATES)]
            if name.startswith(BY_SEQUENCE):
                want = want[self.own_sequences]
            label = f"{name} after step {k}"
            assert got.shape == want.shape, label
            if want.dtype.kind in "biu" or name.endswith(COUNTS):
                assert (got == want).all(), label
                continue
            mask = self.determined(name, k)
            difference = abs(got[mask].astype(np.float64) - want[mask]).max()
            error = difference / max(abs(want[mask]).max(), 1e-12)  # relative to the largest entry
            self.worst = max(self.worst, float(error))
            assert error < LIMIT, f"{label}: {error:.1e}"
        return compared

    def determined(self, name, k):
        """Returns a mask of the entries that rounding cannot turn.

        atan2 of the moments and the sign in SignSGD have full size however small a gradient is, so rounding
        gives the update of an entry whose gradients are nothing else. Weights and averages are compared where
        the gradients are above 1e-3 of the tensor's largest, or exactly 0. Moments are compared everywhere.
        """
        tree_name, _, weight = name.partition("/")
        if name == "weights/" + PUZZLE_EMB:
            size = abs(self.golden["puzzle_grad"][k])
        elif tree_name in ("weights", "ema") and "v/" + weight in self.golden:
            size = np.sqrt(self.golden["v/" + weight][k + 1])
        else:
            return ...  # all entries
        mask = (size > 1e-3 * size.max()) | (size == 0)
        assert mask.mean() > 0.9, name
        return mask


def carry_after(sequences, prefix):
    carry = dict(sequences)
    carry |= carry.pop("latents")
    return {prefix + name: t.cpu().numpy() for name, t in carry.items()}


def main(argv):
    """Replays all files on one chip."""
    settings = configurator.configure(Settings, argv)
    check_choices(settings, {"device": train.CHOICES["device"]})
    if not FILES:
        raise UserError("no golden file: see TRM_GOLDEN")
    device_type, *_ = choose_device(settings.device)
    if device_type == "xla":
        import torch_xla.distributed.xla_multiprocessing as xmp
        xmp.spawn(lambda index: replay_all(device_type), nprocs=1)  # in this process
    else:
        replay_all(device_type)


def replay_all(device_type):
    errors = {}
    exit_code = 0
    for path in FILES:
        replay = Replay(path, device_type)
        name = os.path.basename(path)
        try:
            replay.compare_all()
        except AssertionError as e:
            print(f"{name}: {e}")
            exit_code = 1
        errors[name] = replay.worst
    print(json.dumps(errors))
    sys.exit(exit_code)


if __name__ == "__main__":
    process.command(main)
