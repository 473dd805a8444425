"""scripts/sweep.py: the plan of all runs, and runs that are complete, killed, damaged, stopped or others."""
import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import sweep as script
from conftest import ROOT, children, wait_for

import train

PREPARE = ("--data_prepare=prepare_sudoku.py --source=generate --size=4 --num_train=64 --num_test=40 "
           "--num_aug=2 --output_dir=")
TINY = [
    "--hidden_size=32", "--num_heads=2", "--puzzle_emb_ndim=32", "--puzzle_emb_len=2", "--H_cycles=1",
    "--L_cycles=1", "--halt_max_steps=2", "--forward_dtype=float32", "--global_batch_size=16",
    "--micro_batch_size=0", "--lr_warmup_steps=5", "--log_interval=5", "--checkpoint_interval=20",
    "--eval_interval=20", "--max_steps=120", "--wandb_log=False", "--device=cpu"]
NAMES = EMA_OFF, EMA, ADAMW = "exp08a_ema_off", "exp08b_ema0.99", "exp09b_adamw_beta2_0.95"
BUCKET = "--gcs_dir=gs://bucket/study"
METRICS = """{"step": 30, "eval/exact_accuracy": 0.25}
{"step": 120, "train/loss": 1.0}
{"step": 120, "final": true, "eval/exact_accuracy": 0.125}
"""


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


def results(folder):
    return {result["run"]: result for result in json.loads((folder / "results.json").read_text())}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Made by --prepare, once for two runs: a second time would be an error."""
    path = tmp_path_factory.mktemp("data") / "sudoku-4x4"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        script.main(["--prepare", "exp08a", "exp08b", f"--data_path={path}", PREPARE + str(path)])
    return path


def test_list_and_selection(sweep):
    text = sweep("--list")
    lines = [re.split(" FLOP  |  +", line.strip()) for line in text.splitlines() if line.startswith("  ")]
    names, changed = [line[0] for line in lines], {line[0]: line[-1].partition(";")[0] for line in lines}
    assert changed["exp01a"] == "hidden_size=256 num_heads=4 puzzle_emb_ndim=256"
    assert changed["exp01c"] == "the baseline"
    assert text.count("How does accuracy grow with the parameters") == 1
    assert len(names) == 67 and names[0] == "exp01a" and names[-1].startswith("contrib02")
    assert "\n67 runs, " in text and names.index("exp04a_250") < names.index("exp04a_1000")
    assert "\n6 runs, " in sweep("--list", "--pattern=exp02a")
    assert "\n2 runs, " in sweep("--list", "exp01a", "--pattern=exp0?a_250")


def test_the_list_counts_what_would_run(sweep, tmp_path):
    text = sweep("--list", f"--out_dir={tmp_path}/study", "--epochs=6144", "exp01a", "exp04a_100", "exp06_f")
    for words in ("1,000 steps", " 100 steps", "125 steps", "missing: data/sudoku-extreme-100-aug-1000\n",
                  "\n3 runs, 1,225 steps, "):
        assert words in text
    text = sweep("--list", "exp08a", f"--data_path={tmp_path}/new", f"{PREPARE}{tmp_path}/new")
    assert " 520 steps" in text and not os.listdir(tmp_path)  # 50,000 epochs of 64 puzzles


def test_the_command_of_a_run(data, tmp_path):
    [path] = script.select_files(["exp01a"], "")
    flags = [f"--data_path={data}", "--gcs_dir=gs://bucket/study/", f"--out_dir={tmp_path}/study",
             "--lr=2e-4"]
    assert script.StudyRun(path, flags).command[2:] == [
        f"--data_path={data}", "--gcs_dir=gs://bucket/study/exp01a_h256",
        f"--out_dir={tmp_path}/study/exp01a_h256", "--lr=2e-4", "--init_from=auto"]


def test_flop_is_the_sum_over_steps(data):
    [path] = script.select_files(["contrib01_curriculum"], "")
    for epochs, steps in (0, 60), (10, 60), (10, 17):  # the curriculum ends at step 40
        run = script.StudyRun(path, [*TINY, "--H_cycles=3", "--L_cycles=6", f"--curriculum_epochs={epochs}",
                                     f"--data_path={data}", f"--max_steps={steps}"])
        plan = train.stages(run.c, run.puzzles)
        depths = [plan[max(start for start in plan if start <= step)] for step in range(steps)]
        assert run.flop() == sum(16 * run.model.flops_per_example(cycles)[1] for cycles in depths)


@pytest.mark.parametrize("flags, words", [
    ([f"{ROOT}/config/study/exp01a.py"], "a config file gives several runs one out_dir"),
    (["exp01ax"], "exp01ax: no such run in config/study; --list prints all"),
    (["--pattern=exq"], "--pattern=exq"),
    (["exp01a", "--data_path=nowhere", "--data_prepare="], "exp01a_h256: nowhere: no such dataset"),
    (["--launch"], "--launch needs --jobs=FILE"), (["--jobs=x", "--max_jobs=0"], "--max_jobs=1 or more"),
    (["--epoch=3"], "unknown setting epoch"), (["exp01a", "--halt_max_steps=0"], "must be above 0"),
    (["exp01a", "--mlp_t=False", "--num_heads=7"], "exp01a_h256: hidden_size 256 must be a multiple"),
    (["exp01a", "--data_path=damaged"], "dataset.json cannot be read")])
def test_wrong_input(sweep, tmp_path, monkeypatch, flags, words):
    (tmp_path / "damaged" / "train").mkdir(parents=True)
    (tmp_path / "damaged" / "train" / "dataset.json").write_text('{"seq_len": 16')
    monkeypatch.chdir(tmp_path)
    text = sweep("--list", *flags, code=2)
    assert words in text and text.count("\n") == 1 and text.startswith("sweep.py: ")


@pytest.fixture
def write_run(data, tmp_path, monkeypatch):
    """Makes runs that nobody trained, in a folder or a bucket. No process can be started."""
    def write_run(file, *flags, metrics=METRICS):
        [path] = script.select_files([file], "")
        run = script.StudyRun(path, [*write_run.flags, *flags])
        files = {"ckpt_00000040.json": json.dumps({"settings": vars(run.c)}),
                 "ckpt_00000010.json": '{"settings": {"lr": 7.0}}', "metrics.jsonl": metrics}
        folder = tmp_path / (run.c.gcs_dir or run.c.out_dir)
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name).write_text(text)
        return run

    write_run.flags = [*TINY, f"--data_path={data}", f"--out_dir={tmp_path}"]
    monkeypatch.setattr(script, "Bucket", lambda url: types.SimpleNamespace(
        list=lambda: [path.name for path in (tmp_path / url).glob("*")],
        read=lambda name: next((path.read_bytes() for path in (tmp_path / url).glob(name)), None)))
    monkeypatch.setattr(subprocess, "Popen", None)
    return write_run


def test_a_bucket_decides_what_is_complete(sweep, write_run, monkeypatch):
    """Every host of a slice sees the bucket, and only one has metrics.jsonl."""
    local, _ = write_run("exp08b"), write_run("exp08a", BUCKET)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: sys.exit(9))
    text = sweep("exp08a", "exp08b", *write_run.flags, BUCKET, code=9)
    assert f"{EMA_OFF}: complete\n" in text and f"{EMA}: step 120 of 120" in text
    r = local.result("complete", "")
    assert r["best_exact_accuracy"] == 0.25 and r["last_exact_accuracy"] == 0.125
    assert r["steps"] == r["total_steps"] == 120


@pytest.mark.parametrize("complete, place", [(1, "out_dir"), (0, "out_dir"), (1, "gcs_dir"), (0, "gcs_dir")])
def test_runs_with_other_settings_are_left_alone(sweep, write_run, tmp_path, place, complete):
    """Neither skipped as complete nor resumed, and nothing of them is shown, not even from results.json."""
    bucket = [BUCKET] if place == "gcs_dir" else []
    runs = [write_run(file, *bucket, metrics=METRICS * complete) for file in ("exp08a", "exp08b")]
    flags = ["exp08a", "exp08b", *write_run.flags, *bucket]
    before = {run.name: dict(run=run.name, status="complete", best_exact_accuracy=0.25) for run in runs}
    (tmp_path / "results.json").write_text(json.dumps([*before.values()]))
    text = sweep(*flags, "--lr=0.5", code=1)
    for run in runs:
        assert (f"{getattr(run.c, place)} holds a run with other settings (lr=0.0001): delete it, or choose "
                f"another --{place}\n") in text
    assert "0.25" not in text and "0 of 2 complete" in text and results(tmp_path) == before
    if complete:  # settings that do not matter
        text = sweep(*flags, "--log_interval=9", "--micro_batch_size=4", "--wandb_project=other",
                     "--forward_dtype=bfloat16")  # a GPU may have replaced it
        assert "2 of 2 complete" in text and "0.25" in text


@pytest.mark.parametrize("content", ["", "[{", "[1]", '{"exp08a": 1}'])
def test_a_damaged_results_file_is_written_anew(sweep, write_run, tmp_path, content):
    write_run("exp08a")
    (tmp_path / "results.json").write_text(content)
    assert "1 of 1 complete" in sweep("exp08a", *write_run.flags)
    assert results(tmp_path)[EMA_OFF]["best_exact_accuracy"] == 0.25


def test_sweeps_write_one_results_file(tmp_path):
    """Several at a time: none loses what another wrote."""
    def write(name):
        run = object.__new__(script.StudyRun)
        run.name, run.c = name, types.SimpleNamespace(out_dir=str(tmp_path / name), gcs_dir="")
        run.steps, run.flop, run.bucket_rows, run.bucket_settings = 1, lambda: 0, [], {}
        script.Sweep([run], None).finish()

    with ThreadPoolExecutor() as pool:
        list(pool.map(write, map(str, range(80))))
    assert len(results(tmp_path)) == 80


def test_progress_is_a_line_a_minute_with_the_time_left_by_flop(write_run, tmp_path, capsys):
    """One of two equal runs and a quarter of the other took 100 s."""
    runs = [write_run("exp08a"), write_run("exp08b", metrics='{"step": 30}\n')]
    sweep = script.Sweep(runs, None)
    sweep.began, sweep.printed, sweep.flop_before = time.monotonic() - 100, 0, 2 * runs[0].flop()
    (tmp_path / f"{EMA}.log").write_text("step 25/120\nstep 30/120: loss 1\n\n")
    for _ in range(2):
        sweep.show_progress(script.last_line(runs[1].log))
    assert capsys.readouterr().out == "  step 30/120: loss 1 | sweep eta 0:01:00\n"


def test_stopped_complete_killed_and_damaged_runs(sweep, data, tmp_path, monkeypatch):
    """Ctrl-C stops a run, another sweep takes it over; of the next two one is damaged, one is killed."""
    flags = [*TINY, f"--data_path={data}", PREPARE + str(data), f"--out_dir={tmp_path}"]
    first = subprocess.Popen([sys.executable, script.__file__, "exp08a", "exp08b", *flags], text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT)
    log = tmp_path / f"{EMA_OFF}.log"
    wait_for(lambda: log.exists() and "step 10/" in log.read_text())
    child = children(first.pid)[-1]
    assert os.getpgid(child) == child  # a terminal's Ctrl-C reaches it through the sweep alone
    assert os.getsid(child) == os.getsid(first.pid)  # which scripts/tpu.sh kills as a whole

    def stop_first(self, run):
        if len(waited) == 1:  # it waits for the other one
            first.send_signal(signal.SIGINT)
        waited.append(run)
        return train_run(self, run)

    waited = []
    train_run = script.Sweep.train
    with monkeypatch.context() as patch:
        patch.setattr(script.Sweep, "train", stop_first)
        text = sweep("exp08a", *flags)
    assert f"{EMA_OFF}: elsewhere: another sweep has it in progress" in text and "1 of 1 complete" in text
    step = int(re.search(r"stopped at step (\d+), checkpoint saved", log.read_text())[1])
    assert re.findall(r"training from (step \d+ to \d+)", log.read_text())[1:] == [f"step {step} to 120"]
    text = first.communicate(timeout=60)[0]
    assert first.returncode == 3 and "the run saves and stops" in text and "0 of 2 complete" in text
    assert not (tmp_path / EMA).exists() and re.search(f"{EMA} +incomplete", text)

    (tmp_path / EMA).mkdir()
    (tmp_path / EMA / "ckpt_00000010.pt").write_text("damaged")
    (tmp_path / EMA / "ckpt_00000010.json").write_text("{}")

    def kill():
        wait_for((tmp_path / ADAMW / "ckpt_00000020.json").exists)
        os.kill(children(os.getpid())[-1], signal.SIGKILL)

    monkeypatch.setattr(script, "PROGRESS_INTERVAL", 0.5)
    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill)
        text = sweep("exp08a", "exp08b", "exp09b", *flags, "--continue_on_failure", code=1)
        killing.result()
    found = results(tmp_path)
    assert [found[name]["status"] for name in NAMES] == ["complete", "failed", "complete"]
    died, resumed = (tmp_path / f"{ADAMW}.log").read_text().split("$ python")[1:]
    last, error = died.strip().splitlines()[-1], found[EMA]["error"]
    assert error.startswith("train.py: --init_from=auto: no complete checkpoint")
    for words in (f"[1/3] {EMA_OFF}: complete\n", f"[2/3] {EMA}: failed: {error}", "\n2 of 3 complete",
                  f"  died: killed by SIGKILL after {last!r}; resuming from its last checkpoint"):
        assert words in text
    assert re.search(r"\n  step \d+/120.* \| sweep eta \d+", text)
    assert "resuming from" in resumed and "training from step 0 " not in resumed
    assert sweep("exp08a", "exp09b", *flags).count(": complete\n") == 2 and results(tmp_path) == found
