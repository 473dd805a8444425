"""A slice whose processes are real, under scripts/tpu.sh. tests/chaos.py is the same at length."""

from chaos import chaos


def test_a_run_that_is_struck_completes_as_if_it_had_not_been(tmp_path, capsys):
    """The slice is preempted during uploads."""
    chaos(tmp_path, ["preemption during slow uploads"], steps=30)
    text = capsys.readouterr().out
    assert "bit for bit those of a run without faults, stopped at []" in text
