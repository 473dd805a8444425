"""kernels.py in Triton's interpreter on the CPU, against model.py's formulas; and compiled for an H100."""
import importlib.util
import json
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch

if not importlib.util.find_spec("triton"):
    pytest.skip("torch brings Triton on Linux alone", allow_module_level=True)
with pytest.MonkeyPatch.context() as environment:  # only Triton's first import reads the variable
    environment.setenv("TRITON_INTERPRET", "1")
    # which the interpreter would import later
    import triton.experimental.gluon.language  # noqa: F401

    import kernels
import bench
import configurator
import device as devices
import model
import train

# [B, L, D]: sizes that the tiles divide, and that they do not
SIZES = [(2, 97, 128), (1, 81, 512), (2, 36, 192), (1, 900, 128)]


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.float16, 3e-3)], ids=str)
@pytest.mark.parametrize("across", [True, False], ids=["positions", "channels"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_mixer_and_its_gradients(size, across, dtype, limit, monkeypatch):
    monkeypatch.setattr(kernels, "has_wgmma", lambda: size[1] != 36)  # with the tiles of both
    torch.manual_seed(0)
    mlp = model.SwiGLU(size[1] if across else size[2], 0.5).to(dtype)
    x = torch.randn(size).to(dtype).requires_grad_()
    weights = torch.randn(size)
    results = []
    for mix in (kernels.mix, model.mix):
        y = mix(x, mlp, across)
        grads = torch.autograd.grad((y.float() * weights).sum(), [x, *mlp.parameters()])
        results.append([y, *grads])
    for got, want in zip(*results):
        assert got.dtype == dtype and got.shape == want.shape
        assert (got - want).abs().max() < limit * want.abs().max()


def test_torch_compile_keeps_the_operators():
    """A whole graph, and what torch itself asks of an operator: its fake, its gradient, no aliases."""
    mlp = model.SwiGLU(16, 0.5)
    x = torch.randn(2, 16, 16, requires_grad=True)
    weights = mlp.gate_up_proj.weight.detach(), mlp.down_proj.weight.detach()
    torch.library.opcheck(kernels.positions, (x, *weights))
    torch.library.opcheck(kernels.channels, (x.detach().view(-1, 16).requires_grad_(), *weights))
    compiled = torch.compile(kernels.mix, fullgraph=True, backend="aot_eager")
    for across in (True, False):
        torch.testing.assert_close(compiled(x, mlp, across), model.mix(x, mlp, across))


@pytest.mark.parametrize("mixer", [["--mlp_t"], ["--mlp_t=False", "--pos_encodings=rope"]], ids=str)
def test_a_training_step_with_the_kernels_is_the_same(mixer, random_puzzles, monkeypatch):
    monkeypatch.setattr(devices, "kernels_can_run", lambda kind, dtype: True)
    called = mock.Mock(wraps=kernels.mix)
    monkeypatch.setattr(kernels, "mix", called)
    gradients = {}
    for choice in ("on", "off"):
        flags = [*mixer, f"--kernels={choice}", "--forward_dtype=float32", "--hidden_size=64",
                 "--num_heads=2", "--puzzle_emb_ndim=64", "--puzzle_emb_len=2", "--H_cycles=1",
                 "--L_cycles=1", "--halt_max_steps=4", "--global_batch_size=4", "--compile=off"]
        settings = configurator.configure(train.__file__, flags)
        run, next_inputs = bench.new_run(settings, devices.Device("cpu", settings), random_puzzles)
        run.train_program(run.state, next_inputs())
        gradients[choice] = run.state["optimizer"]["m"]
        if choice == "on":
            assert called.called
            called.reset_mock()
    assert not called.called
    largest = gradients["off"].abs().max()
    assert (gradients["on"] - gradients["off"]).abs().max() < 1e-4 * largest


def test_the_log_says_that_the_kernels_are_off():
    settings = configurator.configure(train.__file__, ["--kernels=on", "--compile=off"])
    device = devices.Device("cpu", settings)
    assert not device.kernels and device.notes[0].startswith("kernels are off: ")
    settings.kernels = "auto"
    assert not devices.Device("cpu", settings).kernels and not devices.Device("cpu", settings).notes


def test_compiled_for_an_h100_the_kernels_spill_no_register():
    script = os.path.join(os.path.dirname(__file__), "compile_kernels.py")
    done = subprocess.run([sys.executable, script, "90"], stdout=subprocess.PIPE, text=True, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])["sm_90"]
    assert sorted(figures) == ["channels_kernel", "positions_kernel"]
    for kernel in figures.values():
        # an SM has 65536 registers, which two blocks of 8 warps or one share, and 227 KB of shared memory
        assert kernel["spilled"] == 0 and kernel["registers"] <= 255 and kernel["shared"] <= 232448
