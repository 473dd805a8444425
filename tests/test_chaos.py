"""A slice whose processes are real, under scripts/tpu.sh. tests/chaos.py is the same at length."""
import os
import signal

from chaos import THREE_RANKS, chaos, parent, slice_with_data, wait_for
from fake_gcloud import processes


def test_a_run_that_is_struck_completes_as_if_it_had_not_been(tmp_path):
    """A rank is killed, a host has another model.py at the restart; then a preemption during uploads."""
    names, lines = ["another model.py on one host", "preemption during slow uploads"], []
    chaos(tmp_path, names, steps=30, ranks=("1", "0"), poll=0.2, report=lines.append)
    assert ["the next step came after" in line for line in lines] == [True, True, False]
    assert "bit for bit those of a run without faults, stopped at []" in lines[-1]


def test_stop_leaves_no_process(tmp_path):
    """A rank is frozen, and the parent of the ranks of its host is dead."""
    with slice_with_data(tmp_path, THREE_RANKS) as tpu:
        tpu.tpu("run", *tpu.command(10000))
        wait_for(tpu, lambda: tpu.runs and tpu.runs[-1].last > 5, "step 5")
        frozen = tpu.all_ranks()[1]
        os.kill(frozen, signal.SIGSTOP)
        os.kill(parent(frozen), signal.SIGKILL)
        tpu.tpu("stop")
        assert processes(tpu.cloud / "hosts") == []
        assert tpu.tpu("status")[0].count(": stop_requested, python train.py") == 2
