"""Golden parity with the official code at float32, on any machine.

Each step of train.py starts from the official state before it, and everything after it is compared with the
official code's: logits, halts, metrics, carry, moments, weights, their average and the puzzle embedding. So is
each step of an evaluation. So the rounding of one step is all that is compared. It depends on the machine (the
order of sums, the instructions), and is about 1e-6 of a tensor's largest entry; the limit is 1e-4. Halts and
counts are equal: tests/golden/make.py, which records these files, leaves out steps with a close decision.

TRM_GOLDEN is a glob of golden files (default: tests/golden/*.npz). It may also name files with a trajectory
from initial weights (init/NAME, batch/NAME, logits/0, ...) in place of the state before each step, for any
settings. Of these the first two steps are compared.
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
# Between the two steps of a trajectory lies our own update, of which an entry whose gradient is rounding
# noise takes the sign. That may change the second step's logits and losses by more than its own rounding.
LIMIT_AFTER_AN_UPDATE = 1e-3
OFFICIAL = "model.inner."  # how the names of the official weights begin
PUZZLE_EMB = OFFICIAL + "puzzle_emb.weights"
COUNTS = "/count", "/exact_accuracy", "/q_halt_accuracy", "/steps"


# What these tests know of train.py: how a Run is made, put into a state, let step and read.

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
    first = named(golden, "init/") or {name: t[0] for name, t in named(golden, "weights/").items()}
    train.load_weights(model, {name: torch.from_numpy(t) for name, t in first.items()}, "golden")
    return train.Run(model, c, device)


def load_state(run, golden, k):
    """Gives the run the official state before step k."""
    def vector(kind):
        return flatten(torch.from_numpy(golden[f"{kind}/{OFFICIAL}{name}"][k]) for name in run.shapes)

    run.state |= run.device.put(dict(
        weights=vector("weights"), ema=vector("ema"), optimizer=dict(m=vector("m"), v=vector("v")),
        carry=load_carry(run, golden, "carry/", k)))
    if run.model.prefix:
        run.state["puzzle_emb"] = run.device.put(golden["weights/" + PUZZLE_EMB][k])


def step(run, golden, k):
    """Trains for step k, and returns all that came out: {name in golden files: array}."""
    c, weights = run.c, {name: t.clone() for name, t in unflatten(run.state["weights"].cpu(), run.shapes).items()}
    total_steps = json.loads(str(golden["config"]))["train"]["total_steps"]
    batch = batch_of(run, golden, k) | dict(min_halt_steps=np.zeros(run.batch_size, np.int32))
    rates = {name: np.float32([rate]) for name, rate in train.rates(c, k, total_steps).items()}
    inputs = dict(batch=batch, rates=rates, stop_requested=np.zeros(1, np.float32))
    run.train_program(run.state, run.device.put(inputs))

    sums, state = run.read_sums(), run.state_dict(0)
    tensors = dict(weights=state["weights"], ema=state["ema"])
    tensors |= {name: unflatten(run.state["optimizer"][name].cpu(), run.shapes) for name in ("m", "v")}
    values = {f"{kind}/{OFFICIAL}{name}": t.numpy().copy() for kind in tensors for name, t in tensors[kind].items()}
    values |= {"metric/" + name: np.float64(sums[name]) for name in METRICS}
    values |= read_carry(run.state["carry"], "carry/")
    return values | heads(run, weights, values["carry/z_H"], "")


def evaluate(run, golden, k):
    """What step k of the official evaluation gives with the average, from the official carry before it."""
    inputs = run.eval_inputs(batch_of(run, golden, 0))
    state = run.new_evaluation()
    state["carry"] |= run.device.put(load_carry(run, golden, "eval/carry/", k))
    outputs = run.eval_program(state, inputs)
    totals = run.device.all_reduce_cpu(state["totals"])
    values = {"eval/metric/" + name: np.float64(total) for name, total in zip(METRICS, totals.tolist())}
    values |= read_carry(state["carry"], "eval/carry/")
    values |= heads(run, unflatten(run.state["ema"].cpu(), run.shapes), values["eval/carry/z_H"], "eval/")
    return values | {"eval/" + name: outputs[name].cpu().numpy() for name in ("preds", "q_halt_logits")}


def load_carry(run, golden, prefix, k):
    return run.split({name: torch.from_numpy(t[k][rows(run)]) for name, t in named(golden, prefix).items()})


def read_carry(carry, prefix):
    return {prefix + name: t.cpu().flatten(0, 1).numpy().copy() for name, t in carry.items()}


def heads(run, weights, z_H, prefix):
    """logits and q_halt_logits, which a step does not return: the heads of the latent z_H after it."""
    z_H = torch.from_numpy(z_H)
    logits = z_H[:, run.model.prefix:] @ weights["lm_head.weight"].T
    q_halt_logits = z_H[:, 0] @ weights["q_head.weight"][0] + weights["q_head.bias"][0]
    return {prefix + "logits": logits.numpy(), prefix + "q_halt_logits": q_halt_logits.numpy()}


def batch_of(run, golden, k):
    return {name: t[k][rows(run)] for name, t in named(golden, "batch/").items()}


def rows(run):
    """This rank's slice of the batch."""
    return slice(run.device.rank * run.batch_size, (run.device.rank + 1) * run.batch_size)


def replay(path, kind, **settings):
    """[{name: array}] of the steps of a golden file, training first, then its evaluation.

    With several replicas, each returns its rows of the batch, and all return the same sums and weights.
    """
    golden = read(path)
    run = new_run(golden, kind, **settings)
    if is_trajectory(golden):
        return [step(run, golden, k) for k in range(2)]
    steps = []
    for k in range(len(golden["logits"])):
        load_state(run, golden, k)
        steps.append(step(run, golden, k))
    load_state(run, golden, len(golden["logits"]))
    return steps + [evaluate(run, golden, k) for k in range(len(golden["eval/logits"]))]


# What the official code says.

def read(path):
    return dict(np.load(path))


def is_trajectory(golden):
    return "init/" + OFFICIAL + "H_init" in golden


def named(golden, prefix):
    """{name: array} of the arrays that begin with prefix."""
    return {name.removeprefix(prefix): t for name, t in golden.items() if name.startswith(prefix)}


def official(golden):
    """[{name: array}] as replay() returns."""
    if is_trajectory(golden):
        return first_steps(golden)
    states = "weights/", "m/", "v/", "ema/", "carry/", "eval/carry/"
    values = {name: t[1:] if name.startswith(states) else t for name, t in golden.items() if name != "config"}
    values["eval/preds"] = values["eval/logits"].argmax(-1)
    totals = {name: values.pop(name)[0] for name in golden if name.startswith("eval/metric/")}

    def steps_of(names, count):
        return [{name: values[name][k] for name in names} for k in range(count)]

    evaluation = steps_of([name for name in values if name.startswith("eval/")], len(values["eval/logits"]))
    evaluation[-1] |= totals  # the sequences leave there
    return steps_of(values.keys() - evaluation[0].keys(), len(values["logits"])) + evaluation


def first_steps(golden):
    """The first two steps of a trajectory; the first gradient is there as the first moment."""
    steps = []
    for k in range(2):
        values = {"carry/" + name: golden[f"{name}/{k}"] for name in ("halted", "steps")}
        values |= {name: golden[f"{name}/{k}"] for name in ("logits", "q_halt_logits")}
        values |= {"metric/" + name: t[k] for name, t in named(golden, "metric/").items() if name != "loss"}
        steps.append(values)
    beta1 = json.loads(str(golden["config"]))["train"]["beta1"]
    steps[0] |= {"m/" + name: t * (1 - beta1) for name, t in named(golden, "grad0/").items()}
    return steps


# Comparing them.

def compare(golden, steps):
    """Compares what replay() returned with the official code. Returns the largest deviation and its name."""
    worst = 0.0, ""
    for k, want in enumerate(official(golden)):
        limit = LIMIT_AFTER_AN_UPDATE if k == 1 and is_trajectory(golden) else LIMIT
        for name in sorted(want.keys() & steps[k].keys()):
            got = steps[k][name]
            assert got.shape == want[name].shape, name
            if want[name].dtype.kind in "biu" or name.endswith(COUNTS):
                assert (got == want[name]).all(), (name, k)
                continue
            sure = is_sure(name, want)
            error = distance(got[sure], want[name][sure])
            assert error < limit, f"{name} after step {k}: {error:.1e}"
            worst = max(worst, (error, f"{name} after step {k}"))
    return worst


def is_sure(name, want):
    """Where an entry of the state after a step is more than the sign of rounding noise.

    atan2 of both moments and the sign of SignSGD keep their size as a gradient approaches 0. So the weight and
    average of an entry are compared unless its gradients are below 1e-4 of the tensor's largest, which
    rounding may turn. (Gradients of exactly 0 stay so.) The moments of all entries are compared.
    """
    kind, _, weight = name.partition("/")
    if name == "weights/" + PUZZLE_EMB:
        size = abs(want["puzzle_grad"])
    elif kind in ("weights", "ema") and "v/" + weight in want:
        size = np.sqrt(want["v/" + weight])
    else:
        return ...
    sure = (size > 1e-4 * size.max()) | (size == 0)
    assert sure.mean() > 0.9, name
    return sure


def distance(got, want):
    """The largest difference, relative to the largest entry of want."""
    return abs(got.astype(np.float64) - want).max() / max(abs(want).max(), 1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", FILES, ids=os.path.basename)
def test_golden(path, kind, tmp_path, request):
    golden = read(path)
    size = json.loads(str(golden["config"]))["train"]["global_batch_size"]
    settings = {}
    if "micro" in kind:
        settings["micro_batch_size"] = next((d for d in range(2, size) if size % d == 0), size)
    if kind.startswith("xla"):
        world = 2 if "replicas" in kind and size % 2 == 0 else 1
        steps = through_xla(request.getfixturevalue("replicas"), path, tmp_path, world, **settings)
    else:
        steps = replay(path, "cpu", **settings)
    print("largest deviation: {:.1e} {}".format(*compare(golden, steps)))


def through_xla(replicas, path, folder, world, **settings):
    """replay() on replicas of torch_xla, whose rows of the batch are joined."""
    replicas(world, replica, path, str(folder), settings)
    ranks = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]
    sliced = ("carry/", "logits", "q_halt_logits", "eval/carry/", "eval/logits", "eval/q_halt", "eval/preds")
    return [{name: np.concatenate([step[name] for step in steps]) if name.startswith(sliced) else steps[0][name]
             for name in steps[0]} for steps in zip(*ranks)]


def replica(rank, path, folder, settings):
    torch.save(replay(path, "xla", **settings), os.path.join(folder, f"{rank}.pt"))


@pytest.mark.parametrize("path", FILES, ids=os.path.basename)
def test_the_step_is_one_graph_for_torch_compile(path, monkeypatch):
    """The step that device=cuda compiles, captured whole and differentiated, without code generation."""
    whole = torch.compile(train.supervision_step, dynamic=False, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(train, "supervision_step", whole)
    compare(read(path), replay(path, "cpu"))
