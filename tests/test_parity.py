"""Golden parity with the official code at float32, on any machine.

Each step of train.py starts from the official state before it, and all that it computes is compared with the
official code: halts, metrics, carry, moments, weights, their average and the puzzle embedding. Each step of
an evaluation is compared in the same way, with its answers and q_halt. So only the rounding of a single step
is left. It depends on the machine (the order of sums, the instructions) and is about 1e-6 of a tensor's
largest entry; the limit is 1e-4. Halts and counts must be equal: tests/golden/make.py, which records these
files, keeps no step in which a decision is close.

TRM_GOLDEN is a glob of golden files (default: tests/golden/*_steps.npz).
"""
import glob
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import ROOT

import configurator
import train
from device import Device
from model import LOSS_TERMS, METRICS, TRM, TRMConfig

FILES = sorted(glob.glob(os.environ.get("TRM_GOLDEN") or f"{ROOT}/tests/golden/*_steps.npz"))
LIMIT = 1e-4
OFFICIAL = "model.inner."  # the official names of weights begin with this
PUZZLE_EMB = OFFICIAL + "puzzle_emb.weights"
COUNTS = "/count", "/exact_accuracy", "/q_halt_accuracy", "/steps"
SUMS = METRICS + LOSS_TERMS[1:]  # of the batch; the official code logs the parts of the loss
STATES = "weights/", "m/", "v/", "ema/", "carry/", "eval/carry/"  # files have them before each step, too


# What these tests know of train.py: how a Run is made, given a state, let step, and read.

class Replay:
    """Runs the steps of a golden file; with several replicas, each has its own rows of the batch."""

    def __init__(self, path, kind, **options):
        self.golden = golden = dict(np.load(path))
        config = json.loads(str(golden["config"]))
        self.total_steps = config["train"]["total_steps"]
        settings = configurator.configure(train.__file__, ["--compile=off", "--ema"])
        settings.eval_halt_max_steps = config["model"]["halt_max_steps"]
        for name, value in (config["model"] | config["train"] | options).items():
            setattr(settings, name, value)
        device = train.open_device(kind, settings)
        model = TRM(TRMConfig.of(settings, **{name: config["model"][name] for name in train.SIZES}))
        weights = named(golden, "weights/")
        model.load_named({name: torch.from_numpy(t[0]) for name, t in weights.items()})
        self.run = train.Run(settings, model, device)
        self.rows = slice(device.rank * self.run.batch_size, (device.rank + 1) * self.run.batch_size)

    def steps(self, count):
        """Returns [{name in the file: array}] of the first `count` steps, training before evaluation."""
        num_training = len(self.golden["logits"])
        return [self.train(k) if k < num_training else self.evaluate(k - num_training) for k in range(count)]

    def train(self, k):
        self.load_state(k)
        dataset = SimpleNamespace(train_batch=lambda *_: self.batch(k))
        self.run.train_program(self.run.state, train.make_inputs(self.run, dataset, k, self.total_steps))
        return self.read_state()

    def load_state(self, k):
        """Gives the run the official state before step k."""
        def by_name(kind):
            names = self.run.state["weights"]
            return {name: self.golden[f"{kind}/{OFFICIAL}{name}"][k].copy() for name in names}

        m, v = by_name("m"), by_name("v")
        self.run.state |= self.run.device.put(dict(
            weights=by_name("weights"),
            ema=by_name("ema"),
            optimizer={name: dict(m=m[name], v=v[name]) for name in m},
            puzzle_emb=self.golden["weights/" + PUZZLE_EMB][k].copy(),
            carry=self.carry_before("carry/", k),
        ))

    def read_state(self):
        """Returns all that a training step computed."""
        run = self.run
        saved = run.state_dict(0)
        values = {}
        for kind in "weights", "ema":
            values |= {f"{kind}/{OFFICIAL}{name}": t.numpy().copy() for name, t in saved[kind].items()}
        for name, moments in saved["optimizer"].items():
            values |= {f"{kind}/{OFFICIAL}{name}": t.numpy().copy() for kind, t in moments.items()}
        sums = run.read_sums()
        values |= {"metric/" + name: np.float64(sums[name]) for name in SUMS}
        return values | carry_after(run.state, "carry/")

    def evaluate(self, k):
        """Returns what step k of an evaluation computes from the official carry before it."""
        evaluator = self.run.evaluator
        state = evaluator.new_state()
        state["carry"] = self.run.device.put(self.carry_before("eval/carry/", k))
        results = evaluator.program(state, evaluator.inputs(*self.run.eval_weights(), self.batch(0), None))
        results = {name: t.cpu().numpy() for name, t in results.items()}
        ranks = self.run.device.all_gather({name: results[name].sum() for name in SUMS})
        values = {"eval/metric/" + name: sum(sums[name] for sums in ranks) for name in SUMS}
        values |= {"eval/" + name: results[name] for name in ("preds", "q_halt_logits")}
        return values | carry_after(state, "eval/carry/")

    def batch(self, k):
        return {name: t[k][self.rows] for name, t in named(self.golden, "batch/").items()}

    def carry_before(self, prefix, k):
        carry = {name: t[k][self.rows].copy() for name, t in named(self.golden, prefix).items()}
        return dict(state={name: carry.pop(name) for name in ("z_H", "z_L")}, **carry)


def carry_after(state, prefix):
    carry = dict(state["carry"])
    carry |= carry.pop("state")
    return {prefix + name: t.cpu().numpy().copy() for name, t in carry.items()}


def named(golden, prefix):
    return {name.removeprefix(prefix): t for name, t in golden.items() if name.startswith(prefix)}


# The same list of steps, as the official code computed them.

def official(path):
    golden = dict(np.load(path))
    values = {name: t[1:] if name.startswith(STATES) else t for name, t in golden.items()
              if not name.startswith(("config", "batch/", "eval/logits", "logits", "q_halt_logits"))}
    values["eval/preds"] = golden["eval/logits"].argmax(-1)
    metrics = {name: values.pop(name)[0] for name in list(values) if name.startswith("eval/metric/")}
    evaluation = {name: values.pop(name) for name in list(values) if name.startswith("eval/")}
    steps = []
    for arrays in (values, evaluation):
        num_steps = len(next(iter(arrays.values())))
        steps += [{name: t[k] for name, t in arrays.items()} for k in range(num_steps)]
    steps[-1] |= metrics  # all sequences halt there
    return steps


# Comparing them.

def compare(path, steps):
    """Compares the steps of a Replay with the official code's."""
    for k, (got, want) in enumerate(zip(steps, official(path))):
        for name in sorted(want.keys() - {"puzzle_grad"}):
            label = f"{name} after step {k}"
            assert got[name].shape == want[name].shape, label
            if want[name].dtype.kind in "biu" or name.endswith(COUNTS):
                assert (got[name] == want[name]).all(), label
                continue
            mask = determined(name, want)
            difference = abs(got[name][mask].astype(np.float64) - want[name][mask]).max()
            error = difference / max(abs(want[name][mask]).max(), 1e-12)  # relative to the largest entry
            assert error < LIMIT, f"{label}: {error:.1e}"


def determined(name, want):
    """Returns a mask of the entries that rounding cannot turn.

    atan2 of the moments and the sign in SignSGD have full size however small a gradient is, so rounding gives
    the update of an entry whose gradients are nothing else. Weights and averages are compared where the
    gradients are above 1e-3 of the tensor's largest, or exactly 0. Moments are compared everywhere.
    """
    kind, _, weight = name.partition("/")
    if name == "weights/" + PUZZLE_EMB:
        size = abs(want["puzzle_grad"])
    elif kind in ("weights", "ema") and "v/" + weight in want:
        size = np.sqrt(want["v/" + weight])
    else:
        return ...  # all entries
    mask = (size > 1e-3 * size.max()) | (size == 0)
    assert mask.mean() > 0.9, name
    return mask


each_file = pytest.mark.parametrize("path", FILES, ids=os.path.basename)


@each_file
def test_golden(path):
    steps = len(official(path))
    compare(path, Replay(path, "cpu").steps(steps))
    compare(path, Replay(path, "cpu", micro_batch_size=2).steps(steps))


@pytest.mark.xla
@pytest.mark.parametrize("world", [1, 2])
@each_file
def test_golden_through_xla(path, world, replicas, tmp_path):
    """In micro-batches, and on two replicas."""
    options = dict(micro_batch_size=2) if world == 1 else {}
    replicas(world, xla_replay, path, str(tmp_path), options)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(world)]
    steps = []
    for values in zip(*ranks):
        joined = values[0]
        for name in joined:
            if name.startswith(("carry/", "eval/carry/")) or name.endswith(("logits", "preds")):
                joined[name] = np.concatenate([own[name] for own in values])
        steps.append(joined)
    compare(path, steps)


def xla_replay(rank, path, folder, options):
    torch.save(Replay(path, "xla", **options).steps(len(official(path))), os.path.join(folder, f"{rank}.pt"))


@each_file
def test_the_step_is_one_graph_for_torch_compile(path, monkeypatch):
    """The step that device=cuda compiles, captured whole and differentiated, without code generation."""
    def compiled(step):
        return torch.compile(step, dynamic=False, fullgraph=True, backend="aot_eager")

    monkeypatch.setattr(Device, "compile", lambda self, step: compiled(step))
    compare(path, Replay(path, "cpu").steps(1))
