"""A slice whose processes are real, under scripts/tpu.sh. tests/chaos.py is the same at length."""

from chaos import chaos


def test_a_run_that_is_struck_completes_as_if_it_had_not_been(tmp_path, capsys):
    """A rank is killed; then the slice is preempted during uploads."""
    faults = ["kill -9 of a rank", "preemption during slow uploads"]
    chaos(tmp_path, faults, steps=30, poll=0.5)
    text = capsys.readouterr().out
    assert text.count("the next step came after") == 2
    assert "bit for bit those of a run without faults, stopped at []" in text
