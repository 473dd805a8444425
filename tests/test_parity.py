"""Golden parity with the official code at float32, on any machine.

Each step of train.py starts from the official state before it, and all that it computes is compared with the
official code: logits, halts, metrics, carry, moments, weights, their average and the puzzle embedding. Each
step of an evaluation is compared in the same way. So only the rounding of a single step is left. It depends
on the machine (the order of sums, the instructions) and is about 1e-6 of a tensor's largest entry; the limit
is 1e-4. Halts and counts must be equal: tests/golden/make.py, which records these files, keeps no step in
which a decision is close.

TRM_GOLDEN is a glob of golden files (default: tests/golden/*.npz). It may name trajectories as well, of any
settings. These start from initial weights (init/NAME) and have logits/k, halted/k, metric/NAME ... after each
step and the first gradient (grad0/NAME), but not the state before each step; two steps of them are compared.
"""
import glob
import json
import os
from types import SimpleNamespace

import configurator
import numpy as np
import pytest
import torch
from conftest import ROOT

import train
from model import METRICS, TRM, TRMConfig, flatten, unflatten

FILES = sorted(glob.glob(os.environ.get("TRM_GOLDEN") or os.path.join(ROOT, "tests", "golden", "*.npz")))
KINDS = ["cpu", "cpu in micro-batches", *(
    pytest.param(kind, marks=pytest.mark.xla) for kind in ("xla in micro-batches", "xla on 2 replicas"))]
LIMIT = 1e-4
# Our own update lies between the two steps of a trajectory. Weights whose gradient is rounding noise move by
# the learning rate in either direction there, which changes what the second step computes by 4e-5.
LIMIT_AFTER_UPDATE = 1e-3
OFFICIAL = "model.inner."  # the official names of weights begin with this
PUZZLE_EMB = OFFICIAL + "puzzle_emb.weights"
COUNTS = "/count", "/exact_accuracy", "/q_halt_accuracy", "/steps"
STATES = "weights/", "m/", "v/", "ema/", "carry/", "eval/carry/"  # files have them before each step, too
SLICED = "carry/", "logits", "q_halt_logits", "eval/carry/", "eval/logits", "eval/q_halt_logits", "eval/preds"


# What these tests know of train.py: how a Run is made, given a state, let step, and read.

def new_run(golden, kind, **settings):
    """A Run with the settings and the first weights of a golden file."""
    config = json.loads(str(golden["config"]))
    defaults = configurator.read_settings(os.path.join(ROOT, "train.py"))
    values = {name: default for name, (default, *_) in defaults.items()}
    values |= {k: v for k, v in {**config["model"], **config["train"]}.items() if k in values}
    values |= dict(ema=True, compile="off", eval_halt_max_steps=config["model"]["halt_max_steps"])
    c = SimpleNamespace(**values | settings)
    device = train.open_device(kind, c)
    model = TRM(TRMConfig.of(c, **{name: config["model"][name] for name in train.SIZES}))
    weights = named(golden, "init/") or {name: t[0] for name, t in named(golden, "weights/").items()}
    train.load_weights(model, {name: torch.from_numpy(t) for name, t in weights.items()}, "golden")
    return train.Run(model, c, device)


def load_state(run, golden, k):
    """Gives the run the official state before step k."""
    def vector(kind):
        return flatten(torch.from_numpy(golden[f"{kind}/{OFFICIAL}{name}"][k]) for name in run.shapes)

    run.state |= run.device.put(dict(
        weights=vector("weights"), ema=vector("ema"), optimizer=dict(m=vector("m"), v=vector("v")),
        puzzle_emb=golden["weights/" + PUZZLE_EMB][k], carry=carry_before(run, golden, "carry/", k)))


def step(run, golden, k):
    """Trains for step k."""
    total_steps = json.loads(str(golden["config"]))["train"]["total_steps"]
    batch = batch_of(run, golden, k) | dict(min_halt_steps=np.zeros(run.batch_size, np.int32))
    rates = {name: np.float32([rate]) for name, rate in train.rates(run.c, k, total_steps).items()}
    inputs = dict(batch=batch, rates=rates, stop_requested=np.zeros(1, np.float32))
    run.train_program(run.state, run.device.put(inputs))


def read_state(run, weights_before):
    """{name in golden files: array} of all that a step computed.

    It does not return logits and q_halt_logits: they are the heads, before the update, of the new latent z_H.
    """
    state = run.state_dict(0)
    tensors = dict(weights=state["weights"], ema=state["ema"])
    for moment in "m", "v":
        tensors[moment] = unflatten(run.state["optimizer"][moment].cpu(), run.shapes)
    values = {}
    for kind in tensors:
        values |= {f"{kind}/{OFFICIAL}{name}": t.numpy().copy() for name, t in tensors[kind].items()}
    sums = run.read_sums()
    values |= {"metric/" + name: np.float64(sums[name]) for name in METRICS}
    values |= carry_after(run.state["carry"], "carry/")
    return values | heads(run, weights_before, values["carry/z_H"], "")


def evaluate(run, golden, k):
    """What step k of an evaluation computes with the average, from the official carry before it."""
    state = run.new_evaluation()
    state["carry"] |= run.device.put(carry_before(run, golden, "eval/carry/", k))
    outputs = run.eval_program(state, run.eval_inputs(batch_of(run, golden, 0)))
    totals = run.device.all_reduce_cpu(state["totals"]).tolist()
    values = {"eval/metric/" + name: np.float64(total) for name, total in zip(METRICS, totals)}
    values |= carry_after(state["carry"], "eval/carry/")
    values |= heads(run, unflatten(run.state["ema"].cpu(), run.shapes), values["eval/carry/z_H"], "eval/")
    return values | {"eval/" + name: outputs[name].cpu().numpy() for name in ("preds", "q_halt_logits")}


def batch_of(run, golden, k):
    return {name: t[k][rows(run)] for name, t in named(golden, "batch/").items()}


def carry_before(run, golden, prefix, k):
    return run.split({name: torch.from_numpy(t[k][rows(run)]) for name, t in named(golden, prefix).items()})


def carry_after(carry, prefix):
    return {prefix + name: t.cpu().flatten(0, 1).numpy().copy() for name, t in carry.items()}


def rows(run):
    """This rank's slice of the batch."""
    return slice(run.device.rank * run.batch_size, (run.device.rank + 1) * run.batch_size)


def heads(run, weights, z_H, prefix):
    z_H = torch.from_numpy(z_H)
    logits = z_H[:, run.model.prefix:] @ weights["lm_head.weight"].T
    q_halt_logits = z_H[:, 0] @ weights["q_head.weight"][0] + weights["q_head.bias"][0]
    return {prefix + "logits": logits.numpy(), prefix + "q_halt_logits": q_halt_logits.numpy()}


# A list of steps, as train.py computes them and as the official code did: first training, then evaluation.

def replay(path, kind, count=None, **settings):
    """[{name: array}] of a golden file's first `count` steps, by default of all, as train.py computes them.

    With several replicas, each returns its rows of the batch, and all return the same sums and weights.
    """
    golden = read(path)
    run, steps = new_run(golden, kind, **settings), []
    for k in range(len(official(golden)))[:count]:
        if not is_trajectory(golden):
            load_state(run, golden, min(k, len(golden["logits"])))
            if k >= len(golden["logits"]):
                steps.append(evaluate(run, golden, k - len(golden["logits"])))
                continue
        before = run.state["weights"].to("cpu", copy=True)
        step(run, golden, k)
        steps.append(read_state(run, unflatten(before, run.shapes)))
    return steps


def official(golden):
    """[{name: array}] of a golden file's steps, as the official code computed them."""
    if is_trajectory(golden):
        return official_trajectory(golden)
    values = {name: t[1:] if name.startswith(STATES) else t for name, t in golden.items()
              if not name.startswith(("config", "batch/"))}
    evaluation = named(values, "eval/")
    evaluation["preds"] = evaluation["logits"].argmax(-1)
    metrics = {"eval/" + name: evaluation.pop(name)[0] for name in list(evaluation) if "metric/" in name}
    steps = [{name: t[k] for name, t in values.items() if not name.startswith("eval/")}
             for k in range(len(values["logits"]))]
    steps += [{"eval/" + name: t[k] for name, t in evaluation.items()}
              for k in range(len(evaluation["logits"]))]
    steps[-1] |= metrics  # all sequences halt there
    return steps


def official_trajectory(golden):
    """The first two steps. The first moment after the first step is there as its gradient."""
    steps = []
    for k in range(2):
        values = {"carry/" + name: golden[f"{name}/{k}"] for name in ("halted", "steps")}
        values |= {name: golden[f"{name}/{k}"] for name in ("logits", "q_halt_logits")}
        values |= {"metric/" + name: golden["metric/" + name][k] for name in METRICS}
        steps.append(values)
    beta1 = json.loads(str(golden["config"]))["train"]["beta1"]
    steps[0] |= {"m/" + name: t * (1 - beta1) for name, t in named(golden, "grad0/").items()}
    return steps


def read(path):
    return dict(np.load(path))


def is_trajectory(golden):
    return "carry/z_H" not in golden


def named(golden, prefix):
    return {name.removeprefix(prefix): t for name, t in golden.items() if name.startswith(prefix)}


# Comparing them.

def compare(path, steps):
    """Compares what replay() returned with the official code. Returns the largest deviation, in words."""
    golden, worst = read(path), (0.0, "")
    for k, (got, want) in enumerate(zip(steps, official(golden))):
        limit = LIMIT_AFTER_UPDATE if k == 1 and is_trajectory(golden) else LIMIT
        for name in sorted(want.keys() - {"puzzle_grad"}):
            label = f"{name} after step {k}"
            assert got[name].shape == want[name].shape, label
            if want[name].dtype.kind in "biu" or name.endswith(COUNTS):
                assert (got[name] == want[name]).all(), label
                continue
            mask = determined(name, want)
            error = distance(got[name][mask], want[name][mask])
            assert error < limit, f"{label}: {error:.1e}"
            worst = max(worst, (error, label))
    return "{:.1e}: {}".format(*worst)


def determined(name, want):
    """A mask of the entries that rounding cannot turn.

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


def distance(got, want):
    """The largest difference, relative to the largest entry of want."""
    return abs(got.astype(np.float64) - want).max() / max(abs(want).max(), 1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", FILES, ids=os.path.basename)
def test_golden(path, kind, tmp_path, request):
    size = json.loads(str(read(path)["config"]))["train"]["global_batch_size"]
    settings = {}
    if "micro" in kind:
        settings["micro_batch_size"] = next((d for d in range(2, size) if size % d == 0), size)
    if kind.startswith("xla"):
        world = 2 if "replicas" in kind and size % 2 == 0 else 1
        steps = through_xla(request.getfixturevalue("replicas"), path, tmp_path, world, **settings)
    else:
        steps = replay(path, "cpu", **settings)
    print("largest deviation", compare(path, steps))


def through_xla(replicas, path, folder, world, **settings):
    """replay() on replicas of torch_xla, whose rows of the batch are joined."""
    replicas(world, replica, path, str(folder), settings)
    ranks = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]
    joined = ranks[0]
    for k, values in enumerate(joined):
        for name in values:
            if name.startswith(SLICED):
                values[name] = np.concatenate([steps[k][name] for steps in ranks])
    return joined


def replica(rank, path, folder, settings):
    torch.save(replay(path, "xla", **settings), os.path.join(folder, f"{rank}.pt"))


@pytest.mark.parametrize("path", FILES, ids=os.path.basename)
def test_the_step_is_one_graph_for_torch_compile(path, monkeypatch):
    """The step that device=cuda compiles, captured whole and differentiated, without code generation."""
    whole = torch.compile(train.supervision_step, dynamic=False, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(train, "supervision_step", whole)
    compare(path, replay(path, "cpu", count=1))
