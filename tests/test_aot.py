"""scripts/aot.py at tiny sizes: what the TPU compiler says, how its files are read, wrong input."""
import json
import re
import subprocess
import sys

import aot
import pytest

import bench
import configurator
import train
from data import Dataset
from runtime import errors

if sys.version_info < (3, 11):
    pytest.importorskip("jax", reason="the TPU compiler needs Python 3.11")
pytestmark = pytest.mark.xla

TINY = ["--hidden_size=64", "--num_heads=2", "--puzzle_emb_ndim=64", "--puzzle_emb_len=2", "--L_layers=1",
        "--H_cycles=2", "--L_cycles=1", "--halt_max_steps=4", "--global_batch_size=16"]


def run_aot(*flags):
    return subprocess.run([sys.executable, aot.__file__, *TINY, *flags], capture_output=True, text=True)


def test_a_step_is_one_program_with_one_all_reduce_which_overwrites_its_state(random_puzzles):
    output = run_aot("--tpu=v4-8", "--micro_batch_size=2", f"--data_path={random_puzzles}").stdout
    figures = json.loads(output[output.index("{"):])

    # all gradients, and some metrics, at once
    model = bench.new_model(configurator.configure(train.__file__, TINY), Dataset(random_puzzles, "train"))
    [[shape, _]] = figures["train"]["collectives"]
    size = int(re.search(r"f32\[(\d+)\]", shape)[1])
    assert 0 < size - model.num_parameters() < 50

    for step in figures.values():
        assert step["chips"] == 4
        assert step["donated_tensors"] == step["state_tensors"] > 10
        assert 0 < step["used_gb"] < 0.1
        assert 0 < step["schedules_ms"] < step["cost_model_ms"] < 1


def test_a_batch_that_does_not_fit_is_refused_in_the_compilers_words(random_puzzles):
    flags = ["--H_cycles=1", "--global_batch_size=200000", "--expansion=64", f"--data_path={random_puzzles}"]
    process = run_aot("--tpu=v5e-1", *flags)
    assert process.returncode == 2 and "exceeds available HBM" in process.stderr.splitlines()[-1]


PROGRAM = """\
%body.1 (arg: (TYPE[], f32[24,1000])) -> (TYPE[], f32[24,1000]) {
  %fusion.1 = (f32[9]{0}, bf16[8]{0}) fusion(%x), config={"buffering_level":"3","estimated_cycles":"99"}
  %fusion.2 = (f32[9]{0}, bf16[8]{0}) fusion(%y), config={"buffering_level":"3","estimated_cycles":"99"}
}

%condition.1 (arg.1: TYPE[]) -> pred[] {
  %constant.24 = TYPE[]{:T(128)} constant(24)
}

ENTRY %main.1 (p0: (TYPE[], f32[24,1000])) -> (TYPE[], f32[24,1000]) {
  ROOT %while.1 = (TYPE[], f32[24,1000]{1,0}) while(%p0), condition=%condition.1, body=%body.1
}
"""
LOOP = """\
     0   :  { %s1 = smov.u32 0 }
   0x1 LB: > { %8 = vadd %v1  ;;  %9 = vadd %v2 } /* Start region 7 :: Start region 8 */
   0x2   : > { %p7_p2 = scmp.ge.s32.totalorder %s3, 10 /* loop exit test */ }
   0x3   :  { %12 = sbr.rel (!%p7_p2) target = $region8 }
"""
INNER = """\
   0x1 LB: > { } /* Start region 7 :: Start region 8 */
   0x2 LB: >> { } /* Start region 9 */
   0x3   : >> { %p6_p1 = scmp.ge.s32.totalorder %s5, 5 /* loop exit test */ }
   0x4   : > { %11 = sbr.rel (!%p6_p1) target = $region9 }
"""


@pytest.mark.parametrize("counter", ["s32", "u64"])
def test_a_program_counts_as_often_as_its_loops_run(counter, tmp_path):
    # the second fusion shares the schedule of the first, whose loop has 10 - 4 iterations that compute
    (tmp_path / "1795572765749462644-fusion.1-01-final_bundles.txt").write_text(LOOP)
    assert aot.estimates(PROGRAM.replace("TYPE", counter), tmp_path) == (24 * 2 * (1 + 6 * 3), 24 * 2 * 99)


@pytest.mark.parametrize("changes, cycles", [
    ({}, 1 + 10 * 3),
    ({LOOP.splitlines(True)[1]: INNER}, 1 + 10 * (1 + 5 * 3 + 2)),
    ({"%8 = vadd": "%8 = vmatmul.msk.bf16.gmra.mxu0", "%9 = vadd": "%9 = vmatmul.bf16.gmra.mxu1"}, 10 * 16),
    ({"%8 = vadd": "%8 = vmatmul.lmr.bf16.gmra.16.mxu0", "%9 = vadd": "%9 = vmatmul.f32.gmra.mxu0"}, 10 * 16),
])
def test_a_schedule_takes_as_long_as_its_instructions_or_its_products(changes, cycles):
    text = LOOP
    for old, new in changes.items():
        text = text.replace(old, new)
    assert aot.schedule_cycles(text, buffers=1) == cycles


@pytest.mark.parametrize("flags, words", [
    ([], "tpu must be one of v4-8, .*v6e-32, not ''"),
    (["--tpu=v5e-7"], "tpu must be one of .*v5e-8, .*not 'v5e-7'"),
    (["--tpu=v5e-8", "--hidden_size=-1"], "hidden_size"),
    (["--tpu=v5e-8"], "the TPU compiler is missing"),
])
def test_wrong_input_and_a_missing_compiler(flags, words, monkeypatch):
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(errors.UserError, match=words):
        aot.main([*TINY, *flags])
