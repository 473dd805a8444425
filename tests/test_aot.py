"""scripts/aot.py at tiny sizes: what the TPU's own compiler makes of a step."""
import json

import pytest
from helpers import DEEP, TINY, needs, start_script

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
