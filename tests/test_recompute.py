"""recompute: the same gradients in less memory. With -s, prints the peak memory of steps on the CPU."""
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
import configurator  # noqa: E402
import train  # noqa: E402
from model import recomputed_attention  # noqa: E402

TINY = ["--hidden_size=32", "--num_heads=2", "--puzzle_emb_ndim=32", "--puzzle_emb_len=2", "--L_layers=1",
        "--H_cycles=1", "--L_cycles=2", "--forward_dtype=float32", "--global_batch_size=8"]
ATTENTION = ["--mlp_t=false", "--pos_encodings=rope"]
CASES = {
    "mlp": [],
    "attention": ATTENTION,
    "mlp in micro-batches": ["--micro_batch_size=2"],
    "attention in micro-batches": [*ATTENTION, "--micro_batch_size=2"],
}


def step(kind, flags, seq_len=16, vocab_size=6):
    """A function that makes one step on random data, and the Run that it changes."""
    c = configurator.configure(train.__file__, ["--compile=off", *flags])
    device = train.open_device(kind, c)
    run = train.Run(train.TRM(train.TRMConfig.of(c, seq_len=seq_len, vocab_size=vocab_size)), c, device)
    draw = np.random.default_rng(0).integers
    batch = {k: draw(vocab_size, size=(c.global_batch_size, seq_len), dtype=np.int32)
             for k in ("inputs", "labels")}
    batch |= {k: np.zeros(c.global_batch_size, np.int32) for k in ("puzzle_identifiers", "min_halt_steps")}
    rates = np.array([0, 0, 1 - c.beta1, 1 - c.beta2], np.float32)
    inputs = dict(batch=batch, rates=rates, stop_requested=np.zeros(1, np.float32))
    return run, lambda: run.train_program(run.state, device.put(inputs))


def gradient(kind, flags):
    run, go = step(kind, flags)
    go()
    return run.state["m"].cpu().numpy() / (1 - run.c.beta1)


def attention(kind, forward):
    """The results of an attention of 37 positions and the gradients of q, k and v: [4, 2, 3, 37, 8]."""
    c = configurator.configure(train.__file__, ["--compile=off"])
    draw, device = torch.Generator().manual_seed(0), train.open_device(kind, c)
    *qkv, weight = (device.put(torch.randn(2, 3, 37, 8, generator=draw)) for _ in range(4))
    qkv = [t.requires_grad_() for t in qkv]
    out = forward(*qkv)
    return torch.stack([out, *torch.autograd.grad(out, qkv, weight)]).detach().cpu().numpy()


def peak(flags, **sizes):
    """Peak memory of a step on the CPU, in bytes beyond the state of the run."""
    run, go = step("cpu", flags, **sizes)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU],
                                profile_memory=True) as profile:
        go()
    events = sorted((e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"),
                    key=lambda e: e.start_ns())
    return int(np.cumsum([e.nbytes() for e in events]).max())


@pytest.fixture(scope="module")
def xla_gradients(tmp_path_factory):
    """{"case/recompute": gradient, "attention": attention()}, from a new process for torch_xla."""
    path = str(tmp_path_factory.mktemp("xla") / "gradients.npz")
    subprocess.run([sys.executable, __file__, path], check=True, timeout=600,
                   env={**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1"})
    return np.load(path)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["cpu", pytest.param("xla", marks=pytest.mark.xla)])
def test_the_gradients_are_the_same(case, kind, request):
    if kind == "xla":
        xla_gradients = request.getfixturevalue("xla_gradients")
        got, want = (xla_gradients[f"{case}/{r}"] for r in (True, False))
    else:
        got, want = (gradient(kind, [*TINY, *CASES[case], f"--recompute={r}"]) for r in (True, False))
    assert np.linalg.norm(got - want) < 1e-6 * np.linalg.norm(want)
    assert np.linalg.norm(want) > 0


@pytest.mark.parametrize("kind", ["cpu", pytest.param("xla", marks=pytest.mark.xla)])
def test_recomputed_attention_equals_torchs(kind, request):
    if kind == "xla":
        got = request.getfixturevalue("xla_gradients")["attention"]
    else:
        got = attention("cpu", recomputed_attention)
    want = attention("cpu", torch.nn.functional.scaled_dot_product_attention)
    assert np.abs(got - want).max() < 1e-5 and np.abs(want).max() > 1


@pytest.mark.parametrize("flags,sizes", [(["--global_batch_size=8"], dict(seq_len=81, vocab_size=11)),
                                         ([*ATTENTION, "--L_cycles=4", "--global_batch_size=1"],
                                          dict(seq_len=900, vocab_size=6))],
                         ids=["baseline, 8 sequences", "maze, 1 sequence"])
def test_it_takes_less_memory(flags, sizes):
    kept, recomputed = (peak([*flags, f"--recompute={r}"], **sizes) for r in (False, True))
    print(f"peak of a step beyond its state: {kept / 1e6:.0f} MB, recomputed {recomputed / 1e6:.0f} MB")
    assert recomputed < 0.6 * kept


if __name__ == "__main__":
    gradients = {f"{name}/{r}": gradient("xla", [*TINY, *flags, f"--recompute={r}"])
                 for name, flags in CASES.items() for r in (True, False)}
    np.savez(sys.argv[1], attention=attention("xla", recomputed_attention), **gradients)
