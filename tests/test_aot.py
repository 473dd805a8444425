"""scripts/aot.py at tiny sizes: what the TPU compiler says, a fork, prices, wrong input and kills."""
import json
import os
import re
import sys

import aot
import pytest
from helpers import ROOT

import bench
import configurator
import train
from data import Dataset

if sys.version_info < (3, 11):
    pytest.importorskip("jax", reason="the TPU compiler needs Python 3.11")
pytestmark = pytest.mark.xla

BASELINE = os.path.join(ROOT, "config", "baseline.py")
TINY = ["--hidden_size=64", "--num_heads=2", "--puzzle_emb_ndim=64", "--puzzle_emb_len=2", "--L_layers=1",
        "--H_cycles=2", "--L_cycles=1", "--halt_max_steps=4", "--global_batch_size=16"]


@pytest.fixture(autouse=True)
def xla_optimises(monkeypatch):
    """Without the flag of conftest.py, which is for the CPU's compiler."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    settings = configurator.configure(train.__file__, ["--data_path=nowhere"])
    return bench.dataset_path(settings, str(tmp_path_factory.mktemp("data")))[0]


def last_object(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_step_is_one_program_with_one_all_reduce_that_fits(dataset, capsys):
    aot.main([*TINY, "--slices=v5e:2x2", "--micro_batch_size=2", f"--data_path={dataset}"])
    figures = last_object(capsys)["v5e:2x2"]
    training, evaluation = figures["train"], figures["eval"]

    # All at once: gradients of the weights and the puzzle embedding, uses of its row, METRICS, stop requests.
    settings = configurator.configure(train.__file__, TINY)
    model = bench.new_model(settings, Dataset(dataset, "train"))
    reduced = sum(p.numel() for p in model.parameters()) + 64 + 1  # gradients, the table's row and its count
    reduced += len(train.METRICS) + len(train.LOSS_TERMS) + 1  # and the stops
    assert len(training["collectives"]) == 1 and evaluation["collectives"] == []
    assert re.search(rf"all-reduce .*\bf32\[{reduced}\]", training["collectives"][0]), reduced

    carry = 2 * 4 * 83 * 64 * 2  # z_H and z_L of 4 sequences a chip
    assert carry < 1e9 * training["arguments_gb"] - 16 * reduced < 3 * carry
    assert training["used_gb"] < 6 and training["chip_gb"] == 16
    assert training["arithmetic_ms"] < evaluation["estimated_ms"] < training["estimated_ms"] < 100
    assert training["examples_per_sec"] == pytest.approx(16e3 / training["estimated_ms"])
    assert figures["run"]["hours"] > 0


def test_a_batch_that_does_not_fit(dataset):
    flags = [*TINY, "--H_cycles=1", "--global_batch_size=20000", "--expansion=64", f"--data_path={dataset}"]
    with pytest.raises(configurator.UserError, match="compiling the train step: .*exceeds available HBM"):
        aot.main([*flags, "--slices=v5e:1x1"])


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


def test_without_the_compiler(monkeypatch):
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(configurator.UserError, match="pip install jax libtpu"):
        aot.main([BASELINE, "--slices=v5e:2x4"])


def test_the_hours_of_a_run_follow_from_its_speed(random_puzzles):
    settings = configurator.configure(train.__file__, [BASELINE])
    run = aot.hours_of(settings, random_puzzles, aot.parse_slice("v5e:2x4", settings), 10000)
    hours = pytest.approx(8138 * 6144 / 10000 / 3600)
    assert run == dict(steps=8138, hours=hours, chip_hours=8 * run["hours"])


@pytest.mark.parametrize("flags, words", [
    ([], "'' is no TPU slice: --slices takes .*v5e:2x4"),
    (["--slices=v5e:2x2,v5e:0x2"], "'v5e:0x2'.*v5e:2x4"),
    (["--slice=v5e:2x2"], "unknown setting slice; the closest"),
    (["--slices=v5e:2x4", "--global_batch_size=12"], "12 must be a multiple of 8"),
    (["--slices=v5e:2x4", "--hidden_size=-1"], "hidden_size"),
])
def test_wrong_input(flags, words):
    with pytest.raises(configurator.UserError, match=words):
        aot.main([*TINY, *flags])
