"""scripts/sweep.py: the plan of all runs, and runs that are complete, killed, damaged, stopped or others."""
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import sweep as script
from helpers import ROOT, TINY, children, lines, wait_for

FLAGS = [*TINY, "--H_cycles=1", "--L_cycles=1", "--halt_max_steps=2", "--micro_batch_size=0",
         "--checkpoint_interval=20", "--max_steps=120", "--wandb_log=False", "--device=cpu", "--lr=1e-4"]
EMA_OFF, EMA = "exp08a_ema_off", "exp08b_ema0.99"


@pytest.fixture
def sweep(capfd, monkeypatch):
    """sweep.py in this process: a function of its arguments that returns what it prints."""
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.chdir(ROOT)

    def sweep(*argv, code=0):
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            script.configurator.command(lambda: script.main(argv), script.__file__)
            sys.exit(0)
        text = "".join(capfd.readouterr())
        assert stop.value.code == code, text
        return text

    yield sweep
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def flags(data, tmp_path):
    """Train a tiny model in tmp_path."""
    return [*FLAGS, f"--data_path={data}", f"--out_dir={tmp_path}"]


def listed(text):
    """Returns {run: what --list says of it}."""
    return dict(re.findall(r"^  (\S+) +(.+)", text, re.M))


def test_the_list_has_each_runs_question_size_cost_and_changes_without_a_dataset(sweep):
    text = sweep("--list", "--data_path=nowhere")
    runs = listed(text)
    assert runs["exp01a_h256"] == (
        "8,138 steps   1,484,034 parameters cost  0.31  hidden_size=256 num_heads=4 puzzle_emb_ndim=256")
    assert runs["exp01c_h512"].endswith("cost  1.00  the baseline")
    assert [*runs][::66] == ["exp01a_h256", "contrib02_adaptive_0.3_to_0.05"] and len(runs) == 67
    assert text.startswith("How does accuracy grow with param") and text.count("?\n") == len(script.GROUPS)
    assert "67 runs cost 76.0 times the baseline" in text


def test_names_and_patterns_select_runs_that_begin_with_them(sweep):
    names = [*listed(sweep("--list", "exp04a_100", "--pattern=exp0?a_2*"))]
    assert names == ["exp04a_100_puzzles", "exp04a_250_puzzles", "exp04a_2000_puzzles"]


def test_a_dry_run_prints_the_data_and_the_command_of_each_run_with_a_folder_of_its_own(sweep):
    text = sweep("--dry_run", "exp01a", "config/demo.py", "--gcs_dir=gs://bucket/study/")
    assert text.splitlines()[2:4] == [
        "    data/sudoku-6x6-demo",
        "    python train.py config/study/exp01a_h256.py config/demo.py --gcs_dir=gs://bucket/study/ "
        "--out_dir=out/demo/exp01a_h256 --gcs_dir=gs://bucket/study/exp01a_h256 --init_from=auto"]


@pytest.mark.parametrize("argv, words", [
    (["exp01ax"], "config/study has no exp01ax"),
    (["exp01a", "--halt_max_steps=0"], "halt_max_steps must be above 0"),
    (["exp01a", "--mlp_t=False", "--num_heads=7"], "must be a multiple of num_heads 7")])
def test_wrong_input_is_an_error_of_one_line(sweep, argv, words):
    text = sweep("--list", *argv, code=2)
    assert words in text and text.count("\n") == 1 and text.startswith("sweep.py: ")


def test_prepare_makes_the_data_of_two_runs_once(sweep, tmp_path):
    path = tmp_path / "data"
    command = f"prepare_sudoku.py --source=generate --size=4 --num_train=8 --num_test=4 --output_dir={path}"
    text = sweep("exp08a", "exp08b", "--prepare", f"--data_path={path}", f"--data_prepare={command}")
    assert text.count("is missing; making it") == 1 and os.path.exists(path / "train")


def test_a_stopped_run_goes_on_and_a_folder_with_other_settings_is_refused(sweep, flags, tmp_path):
    command = [sys.executable, script.__file__, "exp08a", "exp08b", *flags]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    log = tmp_path / f"{EMA_OFF}.log"
    wait_for(lambda: log.exists() and "step 10/" in log.read_text())
    child = children(process.pid)[-1]
    assert os.getpgid(child) == child  # a terminal's Ctrl-C reaches it through the sweep alone
    assert os.getsid(child) == os.getsid(process.pid)  # which scripts/tpu.sh kills as a whole
    process.send_signal(signal.SIGINT)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 3 and "the run saves and stops" in text and not (tmp_path / EMA).exists()

    text = sweep("exp08a", "exp08b", *flags, "--lr=0.5", code=2)
    assert f"{tmp_path / EMA_OFF} holds a run with other settings (lr=0.0001): delete it, or choose" in text
    # the first run goes on
    assert "1 of 1 complete" in sweep("exp08a", *flags)
    step = re.search(r"stopped at step (\d+), checkpoint saved", log.read_text())[1]
    assert f"training from step {step} to 120" in log.read_text()
    assert sweep("exp08a", *flags, "--log_interval=9").startswith(f"{EMA_OFF}: complete\n")


def test_a_killed_run_is_resumed_and_a_failure_is_named(sweep, flags, tmp_path):
    (tmp_path / EMA_OFF).mkdir()
    for name in "ckpt_00000010.pt", "ckpt_00000010.json":
        (tmp_path / EMA_OFF / name).write_text("damaged")
    error = f"{EMA_OFF}: failed: train.py: --init_from=auto: no complete checkpoint"
    text = sweep("exp08a", "exp08b", *flags, code=1)
    assert error in text and f"{EMA:32} not reached\n0 of 2 complete" in text

    def kill():
        wait_for((tmp_path / EMA / "ckpt_00000020.json").exists)
        os.kill(children(os.getpid())[-1], signal.SIGKILL)

    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill)
        text = sweep("exp08a", "exp08b", *flags, "--continue_on_failure", code=1)
        killing.result()
    assert error in text and f"\n{EMA:32} complete\n1 of 2 complete" in text
    resumed = (tmp_path / f"{EMA}.log").read_text().split("$ python")[2]
    assert "resuming from" in resumed and lines(tmp_path / EMA)[-1]["final"]
