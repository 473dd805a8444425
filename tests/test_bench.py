"""bench.py at tiny sizes: figures, the default batch, forks.

test_model.py counts FLOPs.
"""
import json

import pytest
from helpers import ROOT, TINY, start_script, xla_environment

import bench
from runtime.errors import UserError

MODEL = [flag for flag in TINY if "batch_size" not in flag]


@pytest.mark.parametrize("device, replicas", [
    ("cpu", 1),
    pytest.param("xla", 2, marks=pytest.mark.xla),
])
def test_figures_are_those_of_a_forks_dataset_and_steps(device, replicas):
    """One fork makes its puzzles on the fly, and the other one's steps take an input of their own."""
    forks = [f"{ROOT}/tests/forks/{name}.py" for name in ("latin_squares", "entropy")]
    argv = [*MODEL, f"--device={device}", *forks, "--steps=1", "--global_batch_size=16"]
    text = start_script("bench", argv, **xla_environment(2)).output()
    figures = json.loads(text.splitlines()[-1])
    want = dict(kind=device, replicas=replicas, global_batch_size=16)
    assert figures | want == figures and "random puzzles" not in text
    assert 0 < figures["host_ms"] < figures["step_ms"]
    assert figures["examples_per_sec"] == pytest.approx(16e3 / figures["step_ms"])
    assert min(figures[name] for name in ("tflops", "steps_per_hour", "evaluation_ms")) > 0


def test_a_batch_that_does_not_fit_is_wrong_input():
    with pytest.raises(UserError, match="^out of memory on the device: "):
        bench.main([*MODEL, "--device=cpu", "--data_path=x", "--replica_batch_size=2000000000"])


@pytest.mark.parametrize("flags, size, steps", [
    ([], 4, 18),
    (["--global_batch_size=32"], 32, 3600)])
def test_a_cpu_has_a_small_batch_where_none_is_given(flags, size, steps, monkeypatch, capsys):
    """A step is made to take a second. The steps of an hour are counted in batches of the run, of 768."""
    monkeypatch.setattr(bench, "seconds_of", lambda n, call: (1.0, 1.0))
    bench.main([*MODEL, "--device=cpu", *flags, "--data_path=data/missing", "--size=6"])
    text = capsys.readouterr().out
    assert "1000 random puzzles of 6x6 cells" in text  # in place of the missing dataset
    assert f'"global_batch_size": {size},' in text and f" --max_steps={steps} of " in text
