"""bench.py as people run it, at tiny sizes; its counts against torch's and the TPU compiler's; forks that no TPU takes."""
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
pytest.importorskip("jax", reason="the TPU compiler needs Python 3.11") if sys.version_info < (3, 11) else None
import bench  # noqa: E402
import configurator  # noqa: E402
import train  # noqa: E402

TINY = ["--hidden_size=32", "--num_heads=2", "--puzzle_emb_ndim=32", "--puzzle_emb_len=2", "--H_cycles=2", "--L_cycles=2", "--halt_max_steps=4",
        "--forward_dtype=float32", "--global_batch_size=16"]


def run(*flags, code=0, root=ROOT, **env):
    """(figures of the last line, what was printed, stderr)"""
    done = subprocess.run([sys.executable, os.path.join(root, "bench.py"), *flags], capture_output=True, text=True, timeout=500, env={**os.environ, **env})
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1]) if code < 2 else None, done.stdout, done.stderr


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "cpu.txt"
    found, text, _ = run(*TINY, "--device=cpu", "--steps=5")
    path.write_text(text)
    return found, path


def test_throughput_on_the_cpu(figures):
    f, path = figures
    assert f["kind"] == "cpu" and f["replicas"] == 1 and f["steps"] == 5 and f["tokens_per_example"] == 83
    assert f["step_ms_min"] <= f["step_ms"] <= f["step_ms_max"] and f["examples_per_sec"] >= 0.99 * 16e3 / f["step_ms"]
    assert f["tflops"] == pytest.approx(f["examples_per_sec"] * f["gflop_per_example"] / 1e3, rel=1e-4)
    assert f["mfu_of_product"] == pytest.approx(f["tflops"] / f["product_tflops"], rel=1e-4)
    assert f["forward_ms"] > 0 and f["backward_ms"] > 0 and 0 < f["optimizer_ms"] < f["step_ms"] and f["peak_memory_gb"] > 0.1
    for word in ("first step", "examples/s", "of a matrix product's", "forward", "feeding", "evaluation", "times the training's"):
        assert word in path.read_text()


def test_compare_and_real_data(figures, tmp_path):
    data = str(tmp_path / "sudoku")
    subprocess.run([sys.executable, os.path.join(ROOT, "prepare_sudoku.py"), "--source=generate", "--size=4", "--num_train=64", "--num_test=40",
                    "--num_aug=5", f"--output_dir={data}"], check=True, capture_output=True)
    f, text, _ = run(*TINY, "--device=cpu", "--steps=3", "--real_data", f"--data_path={data}", f"--compare={figures[1]}")
    assert f["tokens_per_example"] == 18 and f["real_data"]
    ratio = next(line for line in text.splitlines() if line.startswith("examples_per_sec")).split()[-1]
    assert float(ratio) == pytest.approx(f["examples_per_sec"] / figures[0]["examples_per_sec"], rel=1e-2)


def test_replicas_through_xla():
    f, _, _ = run(*TINY, "--micro_batch_size=2", "--steps=2", PJRT_DEVICE="CPU", CPU_NUM_DEVICES="2")
    assert f["kind"] == "xla" and f["replicas"] == 2 and f["micro_batch_size"] == 2 and f["xla/fallbacks"] == 0


def test_sweep_and_profile(tmp_path):
    rows, text, _ = run(*TINY, "--device=cpu", "--steps=1", "--sweep=global_batch_size=4,x,8")
    assert [r["global_batch_size"] for r in rows] == [4, 8] and "global_batch_size must be int" in text
    text = subprocess.run([sys.executable, os.path.join(ROOT, "bench.py"), *TINY, "--device=cpu", f"--profile={tmp_path / 'p'}"], capture_output=True,
                          text=True, check=True).stdout
    assert "aten::" in text and "perfetto" in text
    assert any(e.get("name", "").startswith("aten::") for e in json.load(open(tmp_path / "p" / "trace.0.json"))["traceEvents"])


def test_profile_through_xla(tmp_path):
    text = subprocess.run([sys.executable, os.path.join(ROOT, "bench.py"), *TINY, "--device=xla", f"--profile={tmp_path / 'p'}"], capture_output=True,
                          text=True, check=True, env={**os.environ, "PJRT_DEVICE": "CPU"}).stdout
    assert " ms " in text and " x dot\n" in text and "perfetto" in text


@pytest.mark.parametrize("flags,words", [
    (["--stepz=3"], ["stepz", "closest"]), (["--steps=0"], ["steps must be 1 or more"]), (["--aot=v9:2x2"], ["v9:2x2", "v5e:2x4"]),
    (["--compare=nowhere.txt"], ["nowhere.txt"]), (["--real_data", "--data_path=nowhere"], ["nowhere", "no such data set"]), (["--sweep=lr"], ["--sweep"]),
    (["--plan=v5e"], ["v5e"]), (["--plan=v5e:2x4", "--global_batch_size=12"], ["12", "multiple of 8"]), (["config/nowhere.py"], ["config/nowhere.py"]),
    (["--hidden_size=-1"], ["hidden_size"])], ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_wrong_input(flags, words):
    _, _, error = run(*TINY, "--device=cpu", "--steps=1", *flags, code=2)
    assert len(error.splitlines()) == 1 and error.startswith("bench.py: ") and all(word in error for word in words), error


@pytest.mark.parametrize("mixer", [[], ["--mlp_t=False", "--pos_encodings=rope"]], ids=["mlp", "attention"])
def test_the_counted_flops_are_torchs(mixer):
    c = configurator.configure(train.__file__, [*TINY, "--compile=False", *mixer])
    model = train.TRM(train.TRMConfig.of(c, seq_len=16, vocab_size=6))
    run, z = train.Run(model, c, train.Device("cpu")), lambda *shape: torch.zeros(shape, dtype=torch.int32)
    batch = dict(inputs=z(16, 16), labels=z(16, 16), puzzle_identifiers=z(16), min_halt_steps=z(16))
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # the CPU's fused one it does not count
        run.gradients(run.state, dict(batch=batch))
    assert counter.get_total_flops() == pytest.approx(16 * model.flops_per_example()[1], rel=0.02)  # the q head is not counted


HLO = """HloModule step

%sliced (param_0: f32[24,1000], param_1: s32[]) -> f32[1000] {
  %param_0 = f32[24,1000]{1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  %dynamic-slice.1 = f32[1,1000]{1,0} dynamic-slice(%param_0, %param_1), dynamic_slice_sizes={1,1000}
  ROOT %bitcast.1 = f32[1000]{0} bitcast(%dynamic-slice.1)
}

%body (arg: (s32[], f32[24,1000])) -> (s32[], f32[24,1000]) {
  %arg = (s32[], f32[24,1000]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %xs = f32[24,1000]{1,0} get-tuple-element(%arg), index=1
  %fusion.1 = f32[1000]{0} fusion(%xs, %i), kind=kLoop, calls=%sliced
  %near = bf16[1000]{0:T(256)S(1)} convert(%fusion.1)
  ROOT %tuple.1 = (s32[], f32[24,1000]{1,0}) tuple(%i, %xs)
}

%condition (arg.1: (s32[], f32[24,1000])) -> pred[] {
  %arg.1 = (s32[], f32[24,1000]{1,0}) parameter(0)
  %constant.24 = s32[]{:T(128)} constant(24)
  %i.1 = s32[] get-tuple-element(%arg.1), index=0
  ROOT %compare.1 = pred[] compare(%i.1, %constant.24), direction=LT
}

ENTRY %main (p0: (s32[], f32[24,1000])) -> (s32[], f32[24,1000]) {
  %p0 = (s32[], f32[24,1000]{1,0}) parameter(0)
  ROOT %while.1 = (s32[], f32[24,1000]{1,0}) while(%p0), condition=%condition, body=%body
}
"""


def test_hbm_traffic_of_a_program():
    """24 times: the slice read and written by the fusion, with its index, and read again for what stays in VMEM."""
    assert bench.hbm_bytes(HLO) == 24 * (4000 + 4000 + 4 + 4000)
    assert bench.shape_bytes("(f32[2,3]{1,0}, bf16[4]{0:S(1)}, pred[])") == 25


def test_a_plan_counts_steps_hours_and_bytes():
    f, text, _ = run(os.path.join(ROOT, "config", "baseline.py"), "--plan=v5e:2x4", "--rate=10000")
    assert f["steps"] == 8138 and f["hours"] == pytest.approx(8138 * 6144 / 1e4 / 3600, rel=1e-4) and f["measured"] and "measured" in text
    assert f["checkpoint_gb"] == pytest.approx(16 * f["parameters"] / 1e9, rel=1e-4) and f["checkpoints"] == 9


# The TPU compiler.

def test_what_a_tpu_makes_of_the_step():
    found, text, _ = run(*TINY, "--aot=v5e:2x2", "--forward_dtype=bfloat16", "--micro_batch_size=2")
    f, e = found["v5e:2x2"]["train"], found["v5e:2x2"]["eval"]
    assert f["collectives"] == [["all-reduce", f["collectives"][0][1]]] and e["collectives"] == []
    c = configurator.configure(train.__file__, TINY)
    model = train.TRM(train.TRMConfig.of(c, seq_len=81, vocab_size=11))
    reduced = sum(p.numel() for p in model.parameters()) + 32 + 1 + len(train.STATS) - 1  # with the puzzle embedding's; all of it at once
    assert f["collectives"][0][1] == pytest.approx(4 * reduced, abs=8)  # torch_xla's token rides along
    carry = 2 * 4 * 83 * 32 * 2  # z_H and z_L of 4 sequences a chip
    assert carry < 1e9 * f["arguments_gb"] - 16 * reduced < 3 * carry
    assert f["batch_per_chip"] == 4 and 0 < f["hbm_gb"] and f["free_gb"] > 10 and "fits" in text and not f["float64_products"]


def test_the_counted_flops_are_the_compilers():
    """Wide enough that what is not a matrix product is little."""
    found, _, _ = run("--hidden_size=512", "--L_layers=1", "--H_cycles=1", "--L_cycles=1", "--global_batch_size=8", "--aot=v5e:1x1")
    for f in found["v5e:1x1"].values():
        assert f["compiler_tflop"] == pytest.approx(f["tflop"], rel=0.1)


@pytest.mark.parametrize("old,new,word", [
    ("logits = self.lm_head(z_H[:, self.prefix:])", "logits = self.lm_head(z_H[z_H[:, 0, 0] > 0][:, self.prefix:])", "depends on data"),
    ("logits = self.lm_head(z_H[:, self.prefix:])", "logits = z_H[:, self.prefix:].double() @ self.lm_head.weight.double().T", "float64 matrix product"),
    ("", "", "exceeds available HBM")], ids=["a dynamic shape", "float64", "batch 100,000"])
def test_a_broken_fork_hears_why(tmp_path, old, new, word):
    for name in ("bench.py", "train.py", "model.py", "data.py", "configurator.py"):
        shutil.copy(os.path.join(ROOT, name), tmp_path)
    source = (tmp_path / "model.py").read_text()
    assert old in source
    (tmp_path / "model.py").write_text(source.replace(old, new, 1) if old else source)
    flags = [*TINY, "--forward_dtype=bfloat16", *([] if old else ["--hidden_size=512", "--global_batch_size=100000"])]
    _, text, _ = run(*flags, "--aot=v5e:1x1", code=0 if "float64" in word else 1, root=str(tmp_path))
    line = next(line for line in text.splitlines() if word in line)
    if old:
        number = source.replace(old, new, 1).splitlines().index(f"        {new}") + 1
        assert any(f"model.py:{n}" in line for n in ((number,) if "float64" in word else (number, number + 1, number + 2))), line
