"""kernels.py in Triton's interpreter on the CPU, against model.py's formulas; and compiled for GPUs."""
import importlib.util
import json
import os
from unittest import mock

import pytest
import torch
from conftest import ROOT

if not importlib.util.find_spec("triton"):
    pytest.skip("torch brings Triton on Linux alone", allow_module_level=True)
with pytest.MonkeyPatch.context() as environment:  # of Triton's first import alone
    environment.setenv("TRITON_INTERPRET", "1")
    import triton.experimental.gluon.language  # which the interpreter would import later

    import kernels
import aot
import aot_gpu
import configurator
import test_aot
import test_parity
from test_aot import dataset

import bench
import device as devices
import model
import train

# [B, L, D]: sizes that the tiles divide, and that they do not
SIZES = [(2, 97, 128), (1, 81, 512), (2, 36, 192), (1, 128, 256), (1, 900, 128)]


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.float16, 3e-3)], ids=str)
@pytest.mark.parametrize("across", [True, False], ids=["positions", "channels"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_mixer_and_its_gradients(size, across, dtype, limit, monkeypatch):
    monkeypatch.setattr(kernels, "has_wgmma", lambda: size[1] != 36)  # with the tiles of both
    torch.manual_seed(0)
    mlp = model.SwiGLU(size[1] if across else size[2], 0.5).to(dtype)
    x, weights = torch.randn(size).to(dtype).requires_grad_(), torch.randn(size)
    found = []
    for mix in (kernels.mix, model.mix):
        y = mix(x, mlp, across)
        grads = torch.autograd.grad((y.float() * weights).sum(), [x, *mlp.parameters()])
        found.append([y, *grads])
    for got, want in zip(*found):
        assert got.dtype == dtype and got.shape == want.shape
        assert (got - want).abs().max() < limit * want.abs().max()


def test_torch_compile_keeps_the_operators():
    """Whole graphs, and what torch itself asks of an operator: its fake, its gradient, no aliases."""
    mlp, x = model.SwiGLU(16, 0.5), torch.randn(2, 16, 16, requires_grad=True)
    weights = mlp.gate_up_proj.weight.detach(), mlp.down_proj.weight.detach()
    for operator, given in (kernels.positions, x), (kernels.channels, x.view(-1, 16)):
        torch.library.opcheck(operator, (given.detach().requires_grad_(), *weights))
    for across in (True, False):
        compiled = torch.compile(kernels.mix, fullgraph=True, backend="aot_eager")
        got, want = (mix(x, mlp, across) for mix in (compiled, model.mix))
        torch.testing.assert_close(got, want)
        got, want = (torch.autograd.grad(y.square().sum(), x)[0] for y in (got, want))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


STEPS = [path for path in test_parity.FILES if path.endswith("_steps.npz")]


@pytest.mark.parametrize("path", STEPS, ids=os.path.basename)
def test_golden(path, monkeypatch):
    """The first golden training steps with the kernels, as the setting chooses them."""
    monkeypatch.setattr(devices, "kernels_error", lambda kind, dtype: "")
    monkeypatch.setattr(kernels, "has_wgmma", lambda: True)
    mix = mock.Mock(wraps=kernels.mix)
    monkeypatch.setattr(kernels, "mix", mix)
    steps = test_parity.replay(path, "cpu", count=1, kernels="on")
    assert mix.called
    test_parity.compare(path, steps)


def test_where_the_kernels_run(monkeypatch):
    settings = configurator.configure(train.__file__, ["--kernels=on", "--compile=off"])
    device = devices.Device("cpu", settings)
    assert not device.kernels and device.notes == [
        "kernels are off: they need a GPU of compute capability 8.0 or higher"]
    for capability, error in ((7, 5), "8.0"), ((8, 0), ""):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        got = devices.kernels_error("cuda", "bfloat16")
        assert error in got and bool(error) == bool(got)
    assert "float32" in devices.kernels_error("cuda", "float32")
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)
    assert devices.kernels_error("cuda", "float16") == "Triton is not installed"
    settings.kernels = "auto"
    assert not devices.Device("cpu", settings).kernels and not devices.Device("cpu", settings).notes


# Compiled for GPUs that are not here.

@pytest.mark.skipif(aot_gpu.untried() != "", reason=aot_gpu.untried())
def test_the_real_step_for_an_h100(dataset):
    """With fewer recursions, which compile faster: traffic, time, no spilled registers at batch 768."""
    flags = [os.path.join(ROOT, "config", "sudoku.py"), "--kernels=on", "--H_cycles=2", "--L_cycles=2"]
    c = configurator.configure(train.__file__, flags)
    f = aot.compile_steps(c, flags, dataset, "h100", ["train"])["train"]
    assert f["compiled"] and f["hbm_gb"] < 60 and f["estimated_ms"] < 26 and f["peak_gb"] < 16, f
    assert f["operations"] == f["launches"] > 100 and f["largest_micro_batch_size"] == 768
    assert len(f["own_kernels"]) == 4 and not any(k["spilled"] for k in f["own_kernels"].values())
    # At least the arithmetic at the card's peak; what is computed again is on top.
    arithmetic = 768e3 * bench.new_model(c, train.Dataset(dataset, "train")).flops_per_example()[1] / 989e12
    assert arithmetic < f["estimated_ms"] < 3 * arithmetic
    assert f["free_gb"] == pytest.approx(80 - f["peak_gb"])
    text = aot.description("h100 train", f)
    assert text.startswith("h100 train: fits\n") and "'channels_kernel': {'registers': " in text


@pytest.mark.skipif(aot_gpu.untried() != "", reason=aot_gpu.untried())
def test_a_line_that_no_gpu_can_compile_is_named(dataset, tmp_path, monkeypatch, capsys):
    place = test_aot.fork(tmp_path, monkeypatch)
    monkeypatch.setattr(aot, "STEPS", ("train",))
    with pytest.raises(SystemExit) as exit:
        aot.main([*test_aot.TINY, "--gpus=t4", f"--data_path={dataset}"])
    text = capsys.readouterr().out
    assert exit.value.code == 1 and f"t4 train DOES NOT COMPILE: {place}: " in text
    assert json.loads(text.splitlines()[-1])["t4"]["train"]["compiled"] is False


def test_a_node_that_inductor_cannot_lower_is_named():
    def lower(node):
        raise NotImplementedError

    node = torch.fx.Graph().placeholder("x")
    node.meta["stack_trace"] = f'  File "{ROOT}/model.py", line 7, in forward\n    y = x'
    with pytest.raises(NotImplementedError) as error:
        lower(node)
    assert aot_gpu.place(error.value) == "model.py:7: "


def test_other_versions_than_those_tried(monkeypatch, capsys):
    monkeypatch.setitem(aot_gpu.TRIED, "torch", "1.0.0")
    with pytest.raises(SystemExit) as exit:
        configurator.command(lambda: aot.main(["--gpus=h100"]), aot.__file__)
    error = capsys.readouterr().err
    assert exit.value.code == 1 and error.count("\n") == 1 and "'torch': '1.0.0'" in error


def test_a_plan_for_rented_gpus(monkeypatch, capsys):
    config = os.path.join(ROOT, "config", "sudoku.py")
    monkeypatch.setattr(aot, "run_child", lambda *_: dict(estimated_ms=96.0))
    monkeypatch.setattr(aot_gpu, "untried", lambda: "")
    aot.main([config, "--plan=h100:8"])
    f = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert f["chips"] == 8 and f["examples_per_sec"] == pytest.approx(8000)
    assert f["chip_hours"] == pytest.approx(8 * f["steps"] * 768 / 8000 / 3600)
    with pytest.raises(configurator.UserError, match="multiple of 7"):
        aot.main([config, "--plan=a100:7"])


@pytest.mark.parametrize("flags", [["--gpus=h200"], ["--gpus=h100:8"], ["--slices=h100"],
                                   ["--gpus=h100", "--plan=h100:8"]], ids=str)
def test_wrong_gpus(flags):
    with pytest.raises(configurator.UserError, match="h100"):
        aot.main(flags)
