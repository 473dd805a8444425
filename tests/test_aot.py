"""scripts/aot.py at tiny sizes: what the TPU compiler says, forks, prices, wrong input and kills."""
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import time

import aot
import configurator
import pytest
from conftest import ROOT

import bench
import train
from data import Dataset

if sys.version_info < (3, 11):
    pytest.importorskip("jax", reason="the TPU compiler needs Python 3.11")
pytestmark = pytest.mark.xla

TINY = ["--hidden_size=64", "--num_heads=2", "--puzzle_emb_ndim=64", "--puzzle_emb_len=2", "--L_layers=1",
        "--H_cycles=2", "--L_cycles=1", "--halt_max_steps=4", "--global_batch_size=16"]


@pytest.fixture(autouse=True)
def xla_optimises(monkeypatch):
    """Without the flag of conftest.py, which is for the CPU's compiler."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    c = configurator.configure(train.__file__, ["--data_path=nowhere"])
    return bench.dataset_path(c, str(tmp_path_factory.mktemp("data")))[0]


def test_what_a_tpu_makes_of_the_step(dataset, capsys):
    aot.main([*TINY, "--slices=v5e:2x2", "--micro_batch_size=2", f"--data_path={dataset}"])
    text = capsys.readouterr().out
    f, e = map(json.loads(text.splitlines()[-1])["v5e:2x2"].get, ("train", "eval"))
    assert len(f["collectives"]) == 1 and e["collectives"] == []
    model = bench.new_model(configurator.configure(train.__file__, TINY), Dataset(dataset, "train"))
    # All at once: gradients of the weights and the puzzle embedding, uses of its row, METRICS, stop requests.
    reduced = sum(p.numel() for p in model.parameters()) + 64 + 1 + len(train.METRICS) + 1
    assert re.search(rf"all-reduce .*\bf32\[{reduced}\]", f["collectives"][0]), (reduced, f["collectives"])
    carry = 2 * 4 * 83 * 64 * 2  # z_H and z_L of 4 sequences a chip
    assert carry < 1e9 * f["arguments_gb"] - 16 * reduced < 3 * carry
    assert f["batch_per_chip"] == 4 and f["free_gb"] > 10 and "v5e:2x2 train: fits\n" in text
    assert f["arithmetic_ms"] < e["estimated_ms"] < f["estimated_ms"] < 100
    assert f"estimated_ms {f['estimated_ms']:.4g}" in " ".join(text.split())
    assert "train: DOES NOT FIT" in aot.description("train", f | dict(free_gb=-0.1))
    assert f["examples_per_sec"] == pytest.approx(16e3 / f["estimated_ms"])
    for figures in f, e:  # the compiler counts the loop over the two micro-batches once
        assert 2 * figures["compiler_tflop"] == pytest.approx(figures["tflop"], rel=0.1)


INPUT = """
make_inputs_before, train_step_before = make_inputs, Run.train_step
def make_inputs(run, *args):
    return make_inputs_before(run, *args) | run.device.put(dict(temperature=np.ones((7, 13), np.float32)))
Run.train_step = lambda self, state, inputs, *cycles: (
    inputs["temperature"].mean() * train_step_before(self, state, inputs, *cycles))
"""
BLOCK = """
class Mixer(Block):
    def forward(self, x, rope):
        y = x if x.sum() > 0 else -x
        return super().forward(x + y, rope)
TRM.block = Mixer
"""


def fork(folder, monkeypatch):
    """Copies the project, with INPUT and BLOCK. Returns the place of BLOCK's branch on data."""
    (folder / "scripts").mkdir()
    for path in [*glob.glob(os.path.join(ROOT, "*.py")), aot.__file__, aot.aot_gpu.__file__]:
        shutil.copy(path, folder / os.path.relpath(path, ROOT))
    for name, text in (("train.py", INPUT), ("model.py", BLOCK)):
        with open(folder / name, "a") as f:
            f.write(text)
    monkeypatch.setattr(aot, "HERE", str(folder / "scripts"))  # which tracing and compiling import
    before = (folder / "model.py").read_text().partition("y = x if")[0]
    return f"model.py:{len(before.splitlines())}"


def test_a_fork_with_a_branch_on_data_learns_where(dataset, tmp_path, monkeypatch, capsys):
    """Its inputs are traced, and its block."""
    place = fork(tmp_path, monkeypatch)
    with pytest.raises(SystemExit) as exit:
        aot.main([*TINY, "--slices=v5e:1x1", f"--data_path={dataset}"])
    text = capsys.readouterr().out
    assert exit.value.code == 1 and "depends on data" in text
    assert f"train DOES NOT COMPILE: tracing: {place}: " in text


def test_a_batch_that_does_not_fit(dataset):
    flags = [*TINY, "--global_batch_size=20000", "--expansion=64"]
    c = configurator.configure(train.__file__, flags)
    found = aot.compile_steps(c, flags, dataset, "v5e:1x1", ["eval"])
    assert "exceeds available HBM" in aot.description("eval", found["eval"])


HLO = """\
%body (arg: (TYPE[], f32[24,1000])) -> (TYPE[], f32[24,1000]) {
  %fusion.1 = f32[1000]{0} fusion(%xs, %i), calls=%sliced, backend_config={"estimated_cycles":"100"}
}
%condition (arg.1: TYPE[]) -> pred[] {
  %constant.24 = TYPE[]{:T(128)} constant(24)
}
ENTRY %main (p0: (TYPE[], f32[24,1000])) -> (TYPE[], f32[24,1000]) {
  %all = (f32[2,3]{1,0}, bf16[4]{0:S(1)}, pred[]) all-reduce-start(%p0), replica_groups={}
  ROOT %while.1 = (TYPE[], f32[24,1000]{1,0}) while(%p0), condition=%condition, body=%body
}
"""


@pytest.mark.parametrize("counter", ["s32", "u32"])
def test_cycles_and_collectives_of_a_program(counter):
    text = HLO.replace("TYPE", counter)
    assert aot.estimated_cycles(*aot.read_program(text)) == 24 * 100
    assert aot.collectives(text) == ["all-reduce (f32[2,3], bf16[4], pred[])"]


def test_a_plan_counts_steps_hours_and_bytes(monkeypatch, capsys):
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)  # no compiler
    config = os.path.join(ROOT, "config", "baseline.py")
    with pytest.raises(configurator.UserError, match="pip install jax libtpu"):
        aot.main([config, "--plan=v5e:2x4"])
    aot.main([config, "--plan=v5e:2x4", "--rate=10000"])
    text = capsys.readouterr().out
    f = json.loads(text.splitlines()[-1])
    assert f["examples_per_sec"] == 10000
    assert f["hours"] == pytest.approx(8138 * 6144 / f["examples_per_sec"] / 3600, rel=1e-4)
    assert f["measured"] and "at the measured speed" in text
    assert f["checkpoint_gb"] == pytest.approx(16 * f["parameters"] / 1e9, rel=1e-4)
    aot.main([config, "--plan=v5e:2x4", "--rate=10000", "--optimizer=lion"])  # it has one moment
    lion = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert lion["checkpoint_gb"] == pytest.approx(12 * f["parameters"] / 1e9, rel=1e-4)
    assert f["steps"] == 8138 and f["checkpoints"] == 9
    assert f["evaluations"] == 9  # the last interval ends with the run, which has its own
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: True)
    figures = dict(examples_per_sec=9000, estimated_ms=None)  # a v6e's, which cannot be read
    monkeypatch.setattr(aot, "compile_steps", lambda *_: {"train": figures})
    aot.main([config, "--plan=v6e:2x4"])
    assert "at the chip's peak, as there is no estimate" in capsys.readouterr().out


@pytest.mark.parametrize("flags, words", [
    ([], "--slices.*--plan"),
    (["--slices=v5e:2x2", "--plan=v5e:2x2"], "--slices.*--plan"),
    (["--slices=v5e:2x2,v5e:0x2"], "'v5e:0x2'.*v5e:2x4"),
    (["--slice=v5e:2x2"], "unknown setting slice; the closest"),
    (["--slices=v5e:2x4", "--global_batch_size=12"], "12 must be a multiple of 8"),
    (["--plan=h100:3", "--rate=5"], "16 must be a multiple of 3 for h100:3"),
    (["--slices=v5e:2x2", "--rate=5"], "--rate.*--plan"),
    (["--plan=v5e:2x4", "--rate=-1"], "--rate=-1.0.*above 0"),
    (["--plan=v5e:2x4", "--hidden_size=-1"], "hidden_size"),
])
def test_wrong_input(flags, words):
    with pytest.raises(configurator.UserError, match=words):
        aot.main([*TINY, *flags])


def test_a_kill_ends_what_the_command_started():
    """A process that traces, and its replica. Those that compile are started in the same way."""
    process = subprocess.Popen([sys.executable, aot.__file__, *TINY, "--L_cycles=999", "--slices=v5e:1x1"],
                               start_new_session=True)

    def wait(is_reached, seconds):
        deadline, group = time.monotonic() + seconds, ["pgrep", "-g", str(process.pid)]
        while not is_reached(len(subprocess.run(group, capture_output=True).stdout.split())):
            assert time.monotonic() < deadline
            time.sleep(0.2)

    wait(lambda processes: processes >= 4, 300)  # multiprocessing starts one too
    process.kill()
    process.wait()
    wait(lambda processes: processes == 0, 30)
