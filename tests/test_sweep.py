"""scripts/sweep.py: the plan of all runs, and runs that are complete, killed, damaged, stopped or others."""
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import sweep as script
from helpers import ROOT, children, wait_for

PREPARE = ("--data_prepare=prepare_sudoku.py --source=generate --size=4 --num_train=64 --num_test=40 "
           "--num_aug=2 --output_dir=")
TINY = [
    "--hidden_size=32", "--num_heads=2", "--puzzle_emb_ndim=32", "--puzzle_emb_len=2", "--H_cycles=1",
    "--L_cycles=1", "--halt_max_steps=2", "--forward_dtype=float32", "--global_batch_size=16",
    "--micro_batch_size=0", "--lr_warmup_steps=5", "--log_interval=5", "--checkpoint_interval=20",
    "--eval_interval=20", "--max_steps=120", "--wandb_log=False", "--device=cpu"]
EMA_OFF, EMA, ADAMW = "exp08a_ema_off", "exp08b_ema0.99", "exp09b_adamw_beta2_0.95"


@pytest.fixture
def sweep(capfd, monkeypatch):
    """sweep.py in this process: a function of its flags that returns what it prints."""
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.chdir(ROOT)

    def sweep(*flags, code=0):
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            script.configurator.command(lambda: script.main(list(flags)), script.__file__)
            sys.exit(0)
        text = "".join(capfd.readouterr())
        assert stop.value.code == code, text
        return text

    yield sweep
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Made by --prepare, once for two runs: a second time would be an error."""
    path = tmp_path_factory.mktemp("data") / "sudoku-4x4"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        script.main(["--prepare", "exp08a", "exp08b", f"--data_path={path}", PREPARE + str(path)])
    return path


def test_the_list_has_each_runs_question_size_and_changes(sweep, tmp_path):
    lines = sweep("--list").splitlines()
    runs = dict(re.split("  +", line.strip(), maxsplit=1) for line in lines if line.startswith("  "))
    assert runs["exp01a_h256"].endswith("weights  hidden_size=256 num_heads=4 puzzle_emb_ndim=256")
    assert runs["exp01c_h512"] == "8,138 steps   5,028,866 weights  the baseline"
    names = [*runs]
    assert len(names) == 67 and names[0] == "exp01a_h256" and names[-1].startswith("contrib02")
    assert names.index("exp04a_250_puzzles") < names.index("exp04a_1000_puzzles")
    assert len([line for line in lines if line.startswith("How does accuracy grow with par")]) == 1
    # without a dataset, and nothing is written
    text = sweep("--list", "exp08a", f"--data_path={tmp_path}/new", f"{PREPARE}{tmp_path}/new")
    assert " 520 steps" in text and not os.listdir(tmp_path)  # 50,000 epochs of 64 puzzles


@pytest.mark.parametrize("flags, names", [
    (["exp04a_100"], ["exp04a_100_puzzles"]),
    (["exp08a_ema_off", "--pattern=exp0?a_250"], ["exp04a_250_puzzles", "exp08a_ema_off"]),
    (["--pattern=exp07"], ["exp07a_float32", "exp07b_bfloat16", "exp07c_float16"])])
def test_names_and_patterns_select_runs_that_begin_with_them(sweep, flags, names):
    text = sweep("--list", *flags)
    assert [line.split()[0] for line in text.splitlines() if line.startswith("  ")] == names


def test_a_dry_run_prints_the_command_of_each_run(sweep):
    text = sweep("--dry_run", "exp01a", "--gcs_dir=gs://bucket/study/", "--out_dir=out/wide", "--lr=2e-4")
    assert ("    data/sudoku-extreme-1k-aug-1000\n    python train.py config/study/exp01a_h256.py "
            "--gcs_dir=gs://bucket/study/exp01a_h256 --out_dir=out/wide/exp01a_h256 --lr=2e-4 "
            "--init_from=auto\n") in text


@pytest.mark.parametrize("flags, words", [
    ([f"{ROOT}/config/study/exp01a_h256.py"], "a config file gives several runs one out_dir"),
    (["exp01ax"], "exp01ax: no such run in config/study; --list prints all"),
    (["--pattern=exq"], "--pattern=exq"),
    (["exp01a", "--data_path=nowhere", "--data_prepare="], "nowhere: no such dataset"),
    (["--epoch=3"], "unknown setting epoch"),
    (["exp01a", "--halt_max_steps=0"], "halt_max_steps must be above 0"),
    (["exp01a", "--mlp_t=False", "--num_heads=7"], "hidden_size 256 must be a multiple"),
    (["exp01a", "--data_path=damaged"], "dataset.json cannot be read")])
def test_wrong_input_is_an_error_of_one_line(sweep, tmp_path, monkeypatch, flags, words):
    (tmp_path / "damaged" / "train").mkdir(parents=True)
    (tmp_path / "damaged" / "train" / "dataset.json").write_text('{"seq_len": 16')
    monkeypatch.chdir(tmp_path)
    text = sweep("--list", *flags, code=2)
    assert words in text and text.count("\n") == 1 and text.startswith("sweep.py: ")


def test_a_folder_with_a_run_of_other_settings_stops_the_sweep_before_its_first_run(sweep, data, tmp_path):
    flags = ["exp08a", "exp08b", *TINY, f"--data_path={data}", f"--out_dir={tmp_path}"]
    folder = tmp_path / EMA
    folder.mkdir()
    [path] = script.select_files([EMA], "")
    settings = vars(script.StudyRun(path, flags[2:]).settings) | dict(
        lr=0.5, log_interval=9, data_path="the/local/copy")
    (folder / "ckpt_00000040.json").write_text(json.dumps({"settings": settings}))
    text = sweep(*flags, code=2)
    assert f"{folder} holds a run with other settings (lr=0.5): delete it, or choose another" in text
    assert os.listdir(tmp_path) == [EMA]


def test_stopped_complete_killed_and_damaged_runs(sweep, data, tmp_path):
    """Ctrl-C stops a run, another sweep takes it over; of the next two one is damaged, one is killed."""
    flags = [*TINY, f"--data_path={data}", PREPARE + str(data), f"--out_dir={tmp_path}"]
    first = subprocess.Popen([sys.executable, script.__file__, "exp08a", "exp08b", *flags], text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT)
    log = tmp_path / f"{EMA_OFF}.log"
    wait_for(lambda: log.exists() and "step 10/" in log.read_text())
    child = children(first.pid)[-1]
    assert os.getpgid(child) == child  # a terminal's Ctrl-C reaches it through the sweep alone
    assert os.getsid(child) == os.getsid(first.pid)  # which scripts/tpu.sh kills as a whole

    with ThreadPoolExecutor(1) as pool:  # the second sweep waits for the first
        pool.submit(lambda: first.send_signal(signal.SIGINT))
        text = sweep("exp08a", *flags)
    assert "1 of 1 complete" in text
    step = int(re.search(r"stopped at step (\d+), checkpoint saved", log.read_text())[1])
    assert re.findall(r"training from (step \d+ to \d+)", log.read_text())[1:] == [f"step {step} to 120"]
    text = first.communicate(timeout=60)[0]
    assert first.returncode == 3 and "the run saves and stops" in text and not (tmp_path / EMA).exists()

    (tmp_path / EMA).mkdir()
    (tmp_path / EMA / "ckpt_00000010.pt").write_text("damaged")
    (tmp_path / EMA / "ckpt_00000010.json").write_text("{}")

    def kill():
        wait_for((tmp_path / ADAMW / "ckpt_00000020.json").exists)
        os.kill(children(os.getpid())[-1], signal.SIGKILL)

    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill)
        text = sweep("exp08a", "exp08b", "exp09b", *flags, "--continue_on_failure", code=1)
        killing.result()
    error = f"{EMA}: failed: train.py: --init_from=auto: no complete checkpoint"
    for words in (f"{EMA_OFF}: complete\n", error, f"{ADAMW}: died with exit code -9\n",
                  f"\n{ADAMW:32} complete\n2 of 3 complete"):
        assert words in text
    resumed = (tmp_path / f"{ADAMW}.log").read_text().split("$ python")[2]
    assert "resuming from" in resumed and "training from step 0 " not in resumed
    assert sweep("exp08a", "exp09b", *flags).count(": complete\n") == 2
