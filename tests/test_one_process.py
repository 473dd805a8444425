"""Runs that follow each other in one process, as in a notebook: each leaves the process as it was."""
from pathlib import Path

from helpers import ROOT, TINY, arguments, start_script

# Five runs: the last two resume the one that was interrupted and the one that has failed.
NOTEBOOK = """
import os, signal, sys, threading, time
import configurator, train
from runtime.process import STOP, STOP_SIGNALS

def state_of_process():
    wakeup = signal.set_wakeup_fd(-1)
    return [signal.getsignal(number) for number in STOP_SIGNALS], wakeup, dict(os.environ), STOP.is_set()

def run(*flags):
    print(*flags, flush=True)
    try:
        train.main(configurator.configure(train.Settings, [*sys.argv[1:], *flags]))
        print("end: complete")
    except BaseException as error:
        sys.last_value = error  # a notebook keeps the last error, and what its frames hold
        print("end:", repr(error))
    assert state_of_process() == before
    # another cell is interrupted as if there had been no run
    try:
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()
    except KeyboardInterrupt:
        pass

def interrupt():
    path = "third/metrics.jsonl"
    while not (os.path.exists(path) and "train/loss" in open(path).read()):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

os.environ["PJRT_DEVICE"] = "CPU"
before = state_of_process()
# complete, not finite, interrupted
run("--out_dir=first", "--max_steps=2")
run("--out_dir=second", "--max_steps=100000", "--lr=1e9", "--weight_decay=1e9")
threading.Thread(target=interrupt).start()
run("--out_dir=third", "--max_steps=100000", "--eval_final_max_puzzles=8")
# the last two go on in the folders of these
run("--out_dir=third", "--max_steps=100000", "--init_from=auto", "--eval_only")
run("--out_dir=second", "--max_steps=2", "--init_from=auto")
"""


def test_runs_of_one_process_leave_it_as_it_was(data):
    Path("notebook.py").write_text(NOTEBOOK)
    text = start_script("notebook.py", [f"--data_path={data}", *TINY, "--device=cpu"]).output()
    ends = [line[5:] for line in text.splitlines() if line.startswith("end: ")]
    assert ends[0] == "complete" and "not finite" in ends[1]
    assert ends[2:] == ["SystemExit(3)", "complete", "complete"]


IN_A_THREAD = """
import runpy, sys, threading
script = sys.argv.pop(1)
command = threading.Thread(target=runpy.run_path, args=[script], kwargs=dict(run_name="__main__"))
command.start()
command.join()
"""


def test_a_command_in_a_thread_trains_without_handlers(data):
    Path("thread.py").write_text(IN_A_THREAD)
    argv = [f"{ROOT}/train.py", *arguments(data, "run", "--max_steps=2")]
    text = start_script("thread.py", argv).output()
    assert "trained 2 steps" in text and "not in the main thread" in text
