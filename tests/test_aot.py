"""scripts/aot.py at tiny sizes: what the TPU's own compiler makes of a step, and wrong input in words."""
import json
from pathlib import Path

import aot
import pytest
from helpers import DEEP, TINY, needs, start_script

from runtime import errors

pytestmark = pytest.mark.xla


def run_aot(*flags, code=0):
    needs("jax")
    needs("libtpu")
    return start_script("aot", [*TINY, *DEEP, *flags]).output(code)


def test_a_step_is_one_program_with_one_all_reduce_which_overwrites_its_state(random_puzzles):
    text = run_aot("--tpu=v4-8", "--micro_batch_size=2", f"--data_path={random_puzzles}")
    figures = json.loads(text[text.index("\n{"):text.rindex("}") + 1])
    assert [name for _, name in figures["train"]["collectives"]] == ["all-reduce"]
    for step in figures.values():
        assert step["chips"] == 4
        assert step["donated_tensors"] == step["state_tensors"] > 10
        assert 0 < step["used_gb"] < 0.1
        assert 0 < step["schedules_ms"] < step["cost_model_ms"] < 1


def test_a_batch_that_does_not_fit_is_refused_in_the_compilers_words(random_puzzles):
    flags = ["--H_cycles=1", "--global_batch_size=50000", "--expansion=256", f"--data_path={random_puzzles}"]
    assert "exceeds available HBM" in run_aot("--tpu=v5e-1", *flags, code=2).splitlines()[-1]


@pytest.mark.parametrize("flags, words", [
    (["--tpu=v5e-7"], "tpu must be one of .*v5e-8, .*not 'v5e-7'"),
    (["--tpu=v5e-8"], "the TPU compiler is missing"),
])
def test_wrong_input_and_a_missing_compiler(flags, words, monkeypatch):
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(errors.UserError, match=words):
        aot.main([*TINY, *DEEP, *flags])


def test_what_other_units_do_has_no_schedule_and_does_not_count():
    """The program has a gather on a v6e's SparseCores, as libtpu 0.0.52 writes it."""
    program = """HloModule step

%gather.1 (a: f32[4]) -> f32[4] {
  ROOT %gather_offload.1 = f32[4] fusion(%a), backend_config={"estimated_cycles":"9223372036854775807"}
}

ENTRY %main (a: f32[4]) -> f32[4] {
  ROOT %add.1 = f32[4] fusion(%a), backend_config={"estimated_cycles":"100"}
}
"""
    Path("step.after_codegen.txt").write_text(program)
    Path(f"{'1' * 19}-add.1-01-final_bundles.txt").write_text("  0x0 : { nop }\n" * 40)
    figures = aot.read_dump(Path(), clock=1e9)
    assert (figures["schedules_ms"], figures["cost_model_ms"]) == pytest.approx((40e-6, 100e-6))
