"""A slice whose processes are real, under scripts/tpu.sh. tests/chaos.py is the same at length."""
import os
import signal

from chaos import THREE_RANKS, chaos, slice_with_data, wait_for
from fake_gcloud import processes


def test_a_run_that_is_struck_completes_as_if_it_had_not_been(tmp_path):
    """A rank is killed, a host has another model.py at the restart; then a preemption during an upload."""
    names, lines = ["another model.py on one host", "preemption during an upload"], []
    records = chaos(tmp_path, names, steps=30, ranks=("1", "0"), poll=0.2, report=lines.append)
    assert all(record.seconds for record in records)
    assert "bit for bit those of a run without faults, stopped at []" in lines[-1]


def test_stop_leaves_no_process(tmp_path):
    """The main process of a host with two ranks is dead, and they live on."""
    with slice_with_data(tmp_path, THREE_RANKS) as tpu:
        for args in (["create"], ["push"], ["setup"], ["run", *tpu.command(10000)]):
            result = tpu.tpu(*args)
            assert result.returncode == 0, result.stderr
        wait_for(tpu, lambda: tpu.runs and tpu.runs[-1].last > 5, "step 5")
        os.kill(tpu.main_process(0), signal.SIGKILL)
        assert len(tpu.all_ranks()) == 3
        assert tpu.tpu("stop").returncode == 0
        assert processes(tpu.cloud / "hosts") == []
        assert tpu.tpu("status").stdout.count(": stop_requested, python train.py") == 2
