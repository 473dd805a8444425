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
    """sweep.py in this process: a function of its arguments that returns what it and its runs print."""
    monkeypatch.chdir(ROOT)

    def sweep(*argv, code=0):
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            script.main(argv)
            sys.exit(0)
        text = "".join(capfd.readouterr())
        assert stop.value.code == code, text
        return text

    return sweep


@pytest.fixture
def flags(data, tmp_path):
    """Train a tiny model in tmp_path."""
    return [*FLAGS, f"--data_path={data}", f"--out_dir={tmp_path}"]


def test_the_list_has_each_runs_question_size_cost_and_changes_without_a_dataset(sweep):
    text = sweep("--list", "--data_path=nowhere")
    runs = dict(re.findall(r"^  (\S+) +(.+)", text, re.M))
    assert runs["exp01a_h256"] == (
        "8,138 steps   1,484,034 parameters cost  0.31  hidden_size=256 num_heads=4 puzzle_emb_ndim=256")
    assert runs["exp01c_h512"].endswith("cost  1.00  the baseline")
    assert [*runs][::66] == ["exp01a_h256", "contrib02_adaptive_0.3_to_0.05"] and len(runs) == 67
    assert text.startswith("How does accuracy grow with param") and text.count("?\n") == len(script.GROUPS)
    assert "67 runs cost 76.0 times the baseline" in text


def test_names_and_patterns_select_runs_that_begin_with_them():
    names = [file.stem for file in script.select_files(["exp04a_100"], "exp0?a_2*")]
    assert names == ["exp04a_100_puzzles", "exp04a_250_puzzles", "exp04a_2000_puzzles"]


def test_a_dry_run_prints_the_data_and_the_command_of_each_run_with_a_folder_of_its_own(sweep):
    text = sweep("--dry_run", "exp01a", "config/demo.py", "--gcs_dir=gs://bucket/study/")
    assert text.splitlines()[2:4] == [
        "    data/sudoku-6x6-demo",
        "    python train.py config/study/exp01a_h256.py config/demo.py --gcs_dir=gs://bucket/study/ "
        "--out_dir=out/demo/exp01a_h256 --gcs_dir=gs://bucket/study/exp01a_h256 --init_from=auto"]


@pytest.mark.parametrize("argv, words", [
    (["exp01ax"], "config/study has no exp01ax"),
    (["exp01a", "--halt_max_steps=0"], "halt_max_steps must be above 0")])
def test_wrong_input_is_an_error_before_the_first_run(argv, words):
    with pytest.raises(script.UserError, match=words):
        script.main(argv)


def test_prepare_makes_the_data_of_two_runs_once(sweep, tmp_path):
    path = tmp_path / "data"
    command = f"prepare_sudoku.py --source=generate --size=4 --num_train=8 --num_test=4 --output_dir={path}"
    text = sweep("exp08a", "exp08b", "--prepare", f"--data_path={path}", f"--data_prepare={command}")
    assert text.count("is missing; making it") == 1 and os.path.exists(path / "train")


@pytest.mark.parametrize("kill", [os.kill, os.killpg], ids=["SIGINT", "Ctrl-C"])  # a terminal's reaches both
def test_a_stopped_run_saves_and_goes_on(sweep, flags, tmp_path, kill):
    process = subprocess.Popen([sys.executable, script.__file__, "exp08a", "exp08b", *flags], cwd=ROOT,
                               stdout=subprocess.PIPE, text=True, start_new_session=True)
    log = tmp_path / EMA_OFF / "log.txt"
    wait_for(lambda: log.exists() and "step 10/" in log.read_text())
    kill(process.pid, signal.SIGINT)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 3 and not (tmp_path / EMA).exists()
    # the first run goes on
    step = re.search(r"stopped at step (\d+), checkpoint saved", text)[1]
    assert f"training from step {step} to 120" in sweep("exp08a", *flags)


def test_a_complete_run_is_skipped_and_a_folder_with_other_settings_is_refused(sweep, flags, tmp_path):
    assert f"{EMA_OFF:32} complete\n1 of 1 complete" in sweep("exp08a", *flags)
    assert sweep("exp08a", *flags, "--log_interval=9").startswith(f"{EMA_OFF:32} complete\n")
    with pytest.raises(script.UserError, match=r"holds a run with other settings \(lr=0.0001\): delete it"):
        sweep("exp08a", "exp08b", *flags, "--lr=0.5")


def test_a_killed_run_is_resumed_and_a_failure_is_named(sweep, flags, tmp_path):
    (tmp_path / EMA_OFF).mkdir()
    for name in "ckpt_00000010.pt", "ckpt_00000010.json":
        (tmp_path / EMA_OFF / name).write_text("damaged")
    failed = f"{EMA_OFF:32} failed with exit code 2\n{EMA:32}"
    text = sweep("exp08a", "exp08b", *flags, code=1)
    assert "train.py: --init_from=auto: no complete checkpoint" in text
    assert f"{failed} not reached\n0 of 2 complete" in text

    def kill():
        wait_for((tmp_path / EMA / "ckpt_00000020.json").exists)
        os.kill(children(os.getpid())[-1], signal.SIGKILL)

    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill)
        text = sweep("exp08a", "exp08b", *flags, "--continue_on_failure", code=1)
        killing.result()
    assert f"{failed} complete\n1 of 2 complete" in text and "resuming from" in text
    assert lines(tmp_path / EMA)[-1]["final"]
