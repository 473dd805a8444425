"""Golden parity: the official code's losses, metrics, logits, halts, gradients, weights and evaluation, at float32.

TRM_GOLDEN: a glob of golden files; tests/golden/*.npz otherwise. Each runs through train.py's own step on the CPU and through torch_xla.
"""
import glob
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
import configurator  # noqa: E402
import train  # noqa: E402
from model import METRICS, TRM, TRMConfig  # noqa: E402

FILES = sorted(glob.glob(os.environ.get("TRM_GOLDEN") or os.path.join(ROOT, "tests", "golden", "*.npz")))
PREFIX = "model.inner."


def trajectory(golden, kind, perturb=0.0, seed=0, hook=True, **settings):
    """Every quantity of a golden file, by its name there, as train.py computes it; perturb: relative change of the initial weights."""
    config = json.loads(str(golden["config"]))
    net, opt = config["model"], config["train"]
    values = {k: v[0] for k, v in configurator.read_settings(os.path.join(ROOT, "train.py")).items()}
    values.update({k: v for k, v in {**net, **opt}.items() if k in values}, ema=True, compile=False, **settings)
    c = SimpleNamespace(**values)
    device = train.Device(kind)
    model = TRM(TRMConfig.of(c, seq_len=net["seq_len"], vocab_size=net["vocab_size"], num_puzzle_identifiers=net["num_puzzle_identifiers"]))
    start = {k[5:]: torch.from_numpy(golden[k]) for k in golden.files if k.startswith("init/")}
    sign = torch.Generator().manual_seed(seed)
    start = {k: t * (1 + perturb * (2 * torch.randint(2, t.shape, generator=sign) - 1)) for k, t in start.items()}
    train.load_weights(model, start, "golden")
    run = train.Run(model, c, device)
    seen = {}
    if hook:
        model.register_forward_hook(lambda module, inputs, out: (
            seen.setdefault("logits", []).append(out[2].detach()), seen.setdefault("q_halt_logits", []).append(out[3].detach()), None)[2])
    update = run.update
    run.update = lambda grad, *rates: (seen.__setitem__("grad", grad.clone()), update(grad, *rates))
    host = lambda parts: torch.cat([p.cpu() for p in parts]).numpy()
    out = {}
    for k in range(len(golden["batch/inputs"])):
        seen.clear()
        batch = {n[6:]: golden[n][k] for n in golden.files if n.startswith("batch/")}
        batch["min_halt_steps"] = np.zeros(c.global_batch_size, np.int32)
        run.sums = device.put(torch.zeros(len(train.STATS)))
        run.train_step(device.put(batch), device.put(train.rates(c, k, opt["total_steps"])), device.put(torch.zeros(2)))
        sums = dict(zip(train.STATS, run.sums.cpu().tolist()))
        out.update({f"metric/{n}/{k}": sums[n] for n in METRICS})
        out[f"metric/loss/{k}"] = sums["lm_loss"] + 0.5 * sums["q_halt_loss"]
        out.update({f"{n}/{k}": host(seen[n]) for n in ("logits", "q_halt_logits") if hook})
        out.update({f"{n}/{k}": host([carry[n] for carry in run.carries]) for n in ("halted", "steps")})
        if k == 0:
            out.update({"grad0/" + PREFIX + n: g.numpy() for n, g in train.unflatten(seen["grad"].cpu(), run.shapes).items()})
    state = run.state_dict(0)
    out.update({"final/" + PREFIX + n: t.numpy().copy() for n, t in state["weights"].items()})
    out.update({"ema/" + PREFIX + n: t.numpy().copy() for n, t in state["ema"].items()})

    c.eval_halt_max_steps = int(golden["eval/steps"])
    batch = device.put({n[6:]: golden[n][0] for n in golden.files if n.startswith("batch/")})
    carry, totals = run.new_evaluation()
    for _ in range(c.eval_halt_max_steps):
        seen.clear()
        run.eval_step(carry, totals, batch)
    out.update({f"eval/{n}": host(seen[n]) for n in ("logits", "q_halt_logits") if hook})
    out.update({f"eval/metric/{n}": v for n, v in zip(METRICS, totals.cpu().tolist())})
    return out


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


def through_xla(path, tmp_path, **settings):
    """trajectory() in a process of its own: autograd must not have run before torch_xla is there."""
    out = str(tmp_path / "xla.npz")
    subprocess.run([sys.executable, __file__, path, out, json.dumps(settings)], check=True, env={**os.environ, "PJRT_DEVICE": "CPU"})
    return np.load(out)


def compare(golden, got):
    """Holds a trajectory against the golden file: 1e-4 relative; flags and counts equal.

    A recursive net can amplify rounding beyond that: in mlp.npz a change of the weights in their last bit (6e-8 relative) moves
    the last logits by percents, and the official code's float32 is 0.7% from its own float64. So the quantities of a step, the
    final weights, their average and the evaluation may also be as far off as twice what such a change of the initial weights does
    to one of their kind. Returns the names that needed this.
    """
    base, moved = trajectory(golden, "cpu"), [trajectory(golden, "cpu", perturb=6e-8, seed=s) for s in (1, 2, 3)]
    allowed = {}
    kind_of = lambda name: name.split("/")[0] if name.startswith(("grad0/", "final/", "ema/", "eval/")) else name.rsplit("/", 1)[1]
    for name in base:
        if np.asarray(base[name]).dtype.kind == "f" and not name.startswith("grad0/"):
            allowed[kind_of(name)] = max([allowed.get(kind_of(name), 0)] + [2 * distance(m[name], base[name]) for m in moved])
    excused, wrong = [], []
    for name, want in golden_values(golden):
        if np.asarray(want).dtype.kind in "bi":
            assert (got[name] == want).all(), name
            continue
        error, limit = distance(got[name], want), allowed.get(kind_of(name), 1e-4)
        if error > 1e-4:
            (excused if error < limit else wrong).append(f"{name} {error:.1e} (allowed here: {limit:.1e})")
    assert not wrong, wrong
    assert {n.split("/")[0] for n, _ in golden_values(golden)} >= {"logits", "grad0", "final", "ema", "eval", "metric", "halted"}
    return excused


@pytest.mark.parametrize("kind", ["cpu", "xla", "cpu in micro-batches"])
@pytest.mark.parametrize("path", FILES, ids=os.path.basename)
def test_golden(path, kind, tmp_path):
    golden = np.load(path)
    size = json.loads(str(golden["config"]))["train"]["global_batch_size"]
    settings = dict(micro_batch_size=next((d for d in range(2, size) if size % d == 0), size)) if "micro" in kind else {}
    excused = compare(golden, through_xla(path, tmp_path) if kind == "xla" else trajectory(golden, "cpu", **settings))
    print(*excused, sep="\n")
    if os.environ.get("TRM_GOLDEN"):
        return
    if os.path.basename(path) == "attention_rope.npz":
        assert not excused
    if os.path.basename(path) == "mlp.npz":
        assert not [n for n in excused if n.split()[0].endswith(("/0", "/1"))]
        assert kind == "xla" or not [n for n in excused if n.startswith(("final/", "ema/"))]


@pytest.mark.parametrize("path", FILES, ids=os.path.basename)
def test_the_step_is_one_graph_for_torch_compile(path, monkeypatch):
    """What device=cuda compiles, captured whole and differentiated ahead of time; the code generator is left out."""
    golden, whole = np.load(path), torch.compile(train.supervision_step, dynamic=False, fullgraph=True, backend="aot_eager")
    want = trajectory(golden, "cpu")
    monkeypatch.setattr(train, "supervision_step", whole)
    got = trajectory(golden, "cpu", hook=False)
    for name in got:
        if name.startswith(("grad0/", "metric/")) and name.endswith(("weight", "/0")):
            assert distance(got[name], want[name]) < 1e-5, name


if __name__ == "__main__":
    np.savez(sys.argv[2], **trajectory(np.load(sys.argv[1]), "xla", **json.loads(sys.argv[3])))
