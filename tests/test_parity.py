"""Golden parity with the official code at float32: metrics, logits, halts, gradients, weights, evaluation.

TRM_GOLDEN is a glob of golden files (default: tests/golden/*.npz). Each runs through train.py's step
on the CPU and through torch_xla.
"""
import collections
import functools
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
from model import METRICS, TRM, TRMConfig

FILES = sorted(glob.glob(os.environ.get("TRM_GOLDEN") or os.path.join(ROOT, "tests", "golden", "*.npz")))
PREFIX = "model.inner."
# a row for each sequence of the batch
SLICED = ("logits/", "q_halt_logits/", "halted/", "steps/", "eval/logits", "eval/q_halt_logits")


def trajectory(golden, kind, perturb=0.0, seed=0, **settings):
    """Every quantity of a golden file, by its name there, as train.py computes it.

    perturb: relative change of the initial weights. The values come from the state after each step: logits
    and q from z_H through the heads, the first gradient from the first moment. With several replicas, each
    returns the rows of its slice of the batch, and all return the same sums and weights.
    """
    run = new_run(golden, kind, perturb, seed, settings)
    c, device, model = run.c, run.device, run.model
    total_steps = json.loads(str(golden["config"]))["train"]["total_steps"]
    rows = slice(device.rank * run.batch_size, (device.rank + 1) * run.batch_size)
    z_dims = dict(halted=0, steps=0, z_H=2)

    def carried(state, name):
        return state["carry"][name].cpu().flatten(0, -(z_dims[name] + 1)).clone().numpy()

    def heads(state, weights):
        z_H = torch.from_numpy(carried(state, "z_H"))
        logits = z_H[:, model.prefix:] @ weights["lm_head.weight"].T
        q_halt_logits = z_H[:, 0] @ weights["q_head.weight"][0] + weights["q_head.bias"][0]
        return {"logits": logits.numpy(), "q_halt_logits": q_halt_logits.numpy()}

    def named(vector):
        return {n: t.clone() for n, t in train.unflatten(vector.cpu(), run.shapes).items()}

    out = {}
    for k in range(len(golden["batch/inputs"])):
        batch = {n[6:]: golden[n][k][rows] for n in golden.files if n.startswith("batch/")}
        batch["min_halt_steps"] = np.zeros(run.batch_size, np.int32)
        before = named(run.state["weights"])
        rates = {n: np.float32([rate]) for n, rate in train.rates(c, k, total_steps).items()}
        inputs = dict(batch=batch, rates=rates, stop_requested=np.zeros(1, np.float32))
        run.train_program(run.state, device.put(inputs))
        sums = run.read_sums()
        out.update({f"metric/{n}/{k}": sums[n] for n in METRICS})
        out[f"metric/loss/{k}"] = sums["lm_loss"] + 0.5 * sums["q_halt_loss"]
        out.update({f"{n}/{k}": v for n, v in heads(run.state, before).items()})
        out.update({f"{n}/{k}": carried(run.state, n) for n in ("halted", "steps")})
        if k == 0:
            moments = named(run.state["optimizer"]["m"])
            out.update({"grad0/" + PREFIX + n: m.numpy() / (1 - c.beta1) for n, m in moments.items()})
    state = run.state_dict(0)
    out.update({"final/" + PREFIX + n: t.numpy().copy() for n, t in state["weights"].items()})
    out.update({"ema/" + PREFIX + n: t.numpy().copy() for n, t in state["ema"].items()})

    c.eval_halt_max_steps = int(golden["eval/steps"])
    run.eval_depth = c.eval_halt_max_steps
    inputs = run.eval_inputs({n[6:]: golden[n][0][rows] for n in golden.files if n.startswith("batch/")})
    evaluation = run.new_evaluation()
    for _ in range(c.eval_halt_max_steps):
        run.eval_program(evaluation, inputs)
    out.update({f"eval/{n}": v for n, v in heads(evaluation, named(run.state["ema"])).items()})
    totals = device.all_reduce_cpu(evaluation["totals"])
    out.update({f"eval/metric/{n}": v for n, v in zip(METRICS, totals.tolist())})
    return out


def new_run(golden, kind, perturb, seed, settings):
    """A Run with the settings and the initial weights of a golden file, the weights changed by perturb."""
    config = json.loads(str(golden["config"]))
    net, opt = config["model"], config["train"]
    values = {k: v[0] for k, v in configurator.read_settings(os.path.join(ROOT, "train.py")).items()}
    values.update({k: v for k, v in {**net, **opt}.items() if k in values}, ema=True, compile="off",
                  **settings)
    c = SimpleNamespace(**values)
    device = train.open_device(kind, c)
    model = TRM(TRMConfig.of(c, seq_len=net["seq_len"], vocab_size=net["vocab_size"],
                             num_puzzle_identifiers=net["num_puzzle_identifiers"]))
    start = {k[5:]: torch.from_numpy(golden[k]) for k in golden.files if k.startswith("init/")}
    sign = torch.Generator().manual_seed(seed)
    start = {k: t * (1 + perturb * (2 * torch.randint(2, t.shape, generator=sign) - 1))
             for k, t in start.items()}
    train.load_weights(model, start, "golden")
    return train.Run(model, c, device)


def golden_values(golden):
    """The file's quantities, with metric/NAME [K] as K numbers metric/NAME/k."""
    for name in golden.files:
        if name.startswith("metric/"):
            yield from ((f"{name}/{k}", v) for k, v in enumerate(golden[name]))
        elif name.split("/")[0] not in ("config", "init", "batch") and name != "eval/steps":
            yield name, golden[name]


def distance(a, b):
    """The largest difference, relative to the largest entry of b."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape
    return np.abs(a - b).max() / max(np.abs(b).max(), 1e-3)


def through_xla(replicas, path, tmp_path, world, **settings):
    """trajectory() on replicas of torch_xla, whose slices are joined."""
    replicas(world, replica, path, str(tmp_path), settings)
    parts = [np.load(tmp_path / f"{rank}.npz") for rank in range(world)]
    joined = {name: parts[0][name] for name in parts[0].files}
    for name in joined:
        if name.startswith(SLICED):
            joined[name] = np.concatenate([part[name] for part in parts])
    return joined


@functools.cache
def on_cpu(path):
    return trajectory(np.load(path), "cpu")


@functools.cache
def allowances(path):
    """{kind of quantity: the error it may have} by the rule of compare()."""
    golden, base = np.load(path), on_cpu(path)
    moved = [trajectory(golden, "cpu", perturb=6e-8, seed=s) for s in (1, 2, 3)]
    allowed = collections.defaultdict(float)
    for name in base:
        if np.asarray(base[name]).dtype.kind == "f" and not name.startswith("grad0/"):
            distances = [2 * distance(m[name], base[name]) for m in moved]
            allowed[kind_of(name)] = max(allowed[kind_of(name)], *distances)
    return allowed


def kind_of(name):
    if name.startswith(("grad0/", "final/", "ema/", "eval/")):
        return name.split("/")[0]
    return name.rsplit("/", 1)[1]


def compare(path, got):
    """Compares a trajectory with the golden file: 1e-4 relative; flags and counts must be equal.

    A recursive network can amplify rounding beyond that. In mlp.npz a change of the weights in their last bit
    (6e-8 relative) moves the last logits by percents, and the official code's float32 is 0.7% from its own
    float64. So the quantities of a step, the final weights, their average and the evaluation may differ by up
    to twice what such a change of the initial weights does to a quantity of the same kind. Returns the names
    that needed this.
    """
    golden, allowed, excused = dict(golden_values(np.load(path))), allowances(path), []
    for name, want in golden.items():
        if np.asarray(want).dtype.kind in "bi":
            assert (got[name] == want).all(), name
            continue
        error, limit = distance(got[name], want), allowed.get(kind_of(name), 1e-4)
        if error > 1e-4:
            excused.append(f"{name} {error:.1e} (allowed here: {limit:.1e})")
            assert error < limit, excused[-1]
    compared = {name.split("/")[0] for name in golden}
    assert compared >= {"logits", "grad0", "final", "ema", "eval", "metric", "halted"}
    return excused


@pytest.mark.parametrize("kind", ["cpu", "cpu in micro-batches", *(
    pytest.param(kind, marks=pytest.mark.xla) for kind in ("xla in micro-batches", "xla on 2 replicas"))])
@pytest.mark.parametrize("path", FILES, ids=os.path.basename)
def test_golden(path, kind, tmp_path, request):
    golden = np.load(path)
    size = json.loads(str(golden["config"]))["train"]["global_batch_size"]
    settings = {}
    if "micro" in kind:
        settings["micro_batch_size"] = next((d for d in range(2, size) if size % d == 0), size)
    world = 2 if "replicas" in kind and size % 2 == 0 else 1
    if kind.startswith("xla"):
        got = through_xla(request.getfixturevalue("replicas"), path, tmp_path, world, **settings)
    else:
        got = on_cpu(path) if kind == "cpu" else trajectory(golden, "cpu", **settings)
    excused = compare(path, got)
    print(*excused, sep="\n")
    if os.environ.get("TRM_GOLDEN"):
        return
    if os.path.basename(path) == "attention_rope.npz":
        assert not excused
    if os.path.basename(path) == "mlp.npz":
        assert not [n for n in excused if n.split()[0].endswith(("/0", "/1"))]
        assert kind.startswith("xla") or not [n for n in excused if n.startswith(("final/", "ema/"))]


@pytest.mark.parametrize("path", FILES, ids=os.path.basename)
def test_the_step_is_one_graph_for_torch_compile(path, monkeypatch):
    """The step that device=cuda compiles, captured whole and differentiated, without code generation."""
    whole = torch.compile(train.supervision_step, dynamic=False, fullgraph=True, backend="aot_eager")
    want = on_cpu(path)
    monkeypatch.setattr(train, "supervision_step", whole)
    got = trajectory(np.load(path), "cpu")
    for name in got:
        if name.startswith(("grad0/", "metric/")) and name.endswith(("weight", "/0")):
            assert distance(got[name], want[name]) < 1e-5, name


def replica(rank, path, folder, settings):
    np.savez(os.path.join(folder, f"{rank}.npz"), **trajectory(np.load(path), "xla", **settings))
