"""scripts/sweep.py: the plan of all runs, and shrunken ones that are complete, killed, broken and stopped."""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types

import pytest

import train
from test_train import ROOT, curve, data, lines  # noqa: F401: fixtures

SWEEP = [sys.executable, os.path.join(ROOT, "scripts", "sweep.py")]
TINY = ["--hidden_size=32", "--num_heads=2", "--puzzle_emb_ndim=32", "--puzzle_emb_len=2", "--H_cycles=1", "--L_cycles=1", "--halt_max_steps=2",
        "--forward_dtype=float32", "--global_batch_size=16", "--micro_batch_size=0", "--lr_warmup_steps=5", "--log_interval=5",
        "--checkpoint_interval=10", "--eval_interval=4", "--wandb_log=False", "--device=cpu", "--max_steps=60"]


def sweep(*flags, code=0):
    """What it printed, errors included."""
    done = subprocess.run([*SWEEP, *flags], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def start(*flags):
    return subprocess.Popen([*SWEEP, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)


def wait_for(what, seconds=60):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.005)


def results(folder):
    with open(folder / "results.json") as f:
        return {result["run"]: result for result in json.load(f)}


def test_list_and_choice():
    text = sweep("--list")
    assert text.splitlines()[-1] == "67 runs"
    names = [line.split()[0] for line in text.splitlines()[:-1]]
    assert names[0] == "exp01a" and names[-1].startswith("contrib02") and names.index("exp04a_250") < names.index("exp04a_1000")
    assert sweep("--list", "--pattern", "exp02a").splitlines()[-1] == "6 runs" and sweep("--list", "exp01a", "contrib01_curriculum").count("\n") == 3


def test_dry_run_tells_what_would_run():
    text = sweep("--dry_run", "--gcs_dir=gs://bucket/study/", "--out_dir=/tmp/study", "--epochs=6144", "exp01a", "exp04a_100", "exp06_f")
    assert [re.split(": |, ", line)[0] for line in text.splitlines() if not line.startswith(" ")] == [
        "exp01a_h256", "exp04a_100_puzzles", "exp06_f_batch49152", "3 runs"]
    assert "3 runs, 1,225 steps, " in text
    assert "differs from the baseline in  epochs=6144 hidden_size=256 num_heads=4 puzzle_emb_ndim=256\n" in text
    assert "1,000 steps of 6,144 sequences, " in text and "100 steps of 6,144" in text and "125 steps of 49,152" in text
    assert "data/sudoku-extreme-100-aug-1000, 100 puzzles; missing: python prepare_sudoku.py --subsample_size=100" in text
    assert ("python train.py config/study/exp01a.py --gcs_dir=gs://bucket/study/ --out_dir=/tmp/study --epochs=6144 "
            "--out_dir=/tmp/study/exp01a_h256 --gcs_dir=gs://bucket/study/exp01a_h256 --init_from=auto") in text
    assert not os.path.exists("/tmp/study")


def test_missing_data_is_made_once(tmp_path):
    flags = ["exp08a", "exp08b", f"--data_path={tmp_path}/4x4", f"--out_dir={tmp_path}/out",
             f"--data_prepare=prepare_sudoku.py --source=generate --size=4 --num_train=48 --num_test=9 --num_aug=2 --output_dir={tmp_path}/4x4"]
    assert "390 steps of 6,144" in sweep("--dry_run", *flags) and not os.listdir(tmp_path)  # 50,000 epochs of 48 puzzles
    assert "data sets: 1, made just now: 1" in sweep("--prepare", *flags)
    assert "data sets: 1, made just now: 0" in sweep("--prepare", *flags) and "; missing" not in sweep("--dry_run", *flags)


def test_where_there_is_a_bucket_it_decides_what_is_complete(data, tmp_path, monkeypatch):  # noqa: F811
    """Every host of a slice sees the bucket, and one alone has metrics.jsonl."""
    monkeypatch.syspath_prepend(os.path.join(ROOT, "scripts"))
    import sweep as script
    final = [{"step": 30, "train/loss": 1.0, "perf/step_time": 0.5}, {"step": 60, "train/loss": 1.0, "perf/step_time": 0.7},
             {"step": 60, "final": True, "eval/exact_accuracy": 0.25}]
    held = "".join(json.dumps(row) + "\n" for row in final)
    bucket = {"gs://bucket/study/exp08a_ema_off": held.encode(), "gs://bucket/study/exp08b_ema0.99": None}
    monkeypatch.setattr(script, "Bucket", lambda url: types.SimpleNamespace(read=lambda name: bucket[url]))
    flags = [*TINY, f"--data_path={data}", f"--out_dir={tmp_path}", "--gcs_dir=gs://bucket/study"]
    here, there = (script.Plan(path, flags) for path in script.chosen(["exp08b", "exp08a"], "")[::-1])
    os.makedirs(here.c.out_dir)
    with open(os.path.join(here.c.out_dir, "metrics.jsonl"), "w") as f:
        f.write(held)
    assert not here.complete() and there.complete()
    for run in (here, there):
        r = run.result("complete", 50.0, "")
        assert (r["steps"], r["last_exact_accuracy"], r["train_seconds"], r["examples_per_sec"]) == (60, 0.25, 36.0, round(16 / 0.6, 2))


@pytest.mark.parametrize("flags, words", [
    (["exp01ax"], "exp01ax: no such run in config/study; the closest is exp01a"), (["--pattern=exq"], "--pattern=exq"),
    (["--epoch=3"], "unknown setting epoch"),
    (["exp01a", "--lr=fast"], "lr must be float"), (["exp01a", "--data_path=nowhere", "--data_prepare="], "nowhere: no such data set"),
    (["exp01a", "--halt_max_steps=0"], "halt_max_steps must be above 0")], ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_wrong_input(flags, words):
    text = sweep(*flags, code=2)
    assert words in text and text.count("\n") == 1 and text.startswith("sweep.py: ")


def test_complete_killed_and_broken_runs(data, tmp_path):  # noqa: F811
    """Four runs: one complete before, one with a damaged checkpoint, one killed in the middle, one that nothing happens to."""
    flags = [*TINY, f"--data_path={data}", f"--out_dir={tmp_path}"]
    sweep("exp08a", *flags)
    before = (tmp_path / "exp08a_ema_off" / "metrics.jsonl").read_text()
    broken, killed = tmp_path / "exp08b_ema0.99", tmp_path / "exp09b_adamw_beta2_0.95"
    broken.mkdir()
    (broken / "ckpt_00000010.pt").write_text("damaged")
    (broken / "ckpt_00000010.json").write_text("{}")
    four = ["exp08a", "exp08b", "exp09b", "exp10c"]

    process = start(*four, *flags, "--continue_on_failure")
    wait_for(lambda: (killed / "ckpt_00000010.json").exists())
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as f:
        os.kill(int(f.read().split()[0]), signal.SIGKILL)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 1 and "[1/4] exp08a_ema_off: complete, skipped" in text and "[2/4] exp08b_ema0.99: step 0 of 60" in text
    assert "SIGKILL); trying again from its last checkpoint" in text and text.splitlines()[-1].startswith("3 of 4 complete")
    found = results(tmp_path)
    assert {name: r["status"] for name, r in found.items()} == {
        "exp08a_ema_off": "complete", "exp08b_ema0.99": "failed", "exp09b_adamw_beta2_0.95": "complete", "exp10c_lr3e-4": "complete"}
    last = (tmp_path / "exp08b_ema0.99.log").read_text().splitlines()[-1]
    assert last.startswith("train.py: --init_from=auto: no complete checkpoint") and f"  failed: {last}" in text
    assert found["exp08b_ema0.99"]["error"] == last
    again = (tmp_path / "exp09b_adamw_beta2_0.95.log").read_text().split("$ python")[-1]
    assert "resuming from" in again and "training from step 0 " not in again

    for name in ("exp09b_adamw_beta2_0.95", "exp10c_lr3e-4"):
        r, rows = found[name], lines(tmp_path / name)
        exact = [row["eval/exact_accuracy"] for row in rows if "eval/exact_accuracy" in row]
        assert (r["steps"], r["total_steps"], r["best_exact_accuracy"], r["last_exact_accuracy"]) == (60, 60, max(exact), exact[-1])
        rates = curve(tmp_path / name, "perf/examples_per_sec").values()
        assert min(rates) <= r["examples_per_sec"] <= max(rates)
        assert r["train_seconds"] == pytest.approx(60 * 16 / r["examples_per_sec"], abs=0.1)
        assert r["wall_seconds"] > r["train_seconds"] and f"{name:32}" in text
    assert list(curve(killed)) == sorted(curve(killed)) and (tmp_path / "exp08a_ema_off" / "metrics.jsonl").read_text() == before

    shutil.rmtree(broken)
    assert "4 of 4 complete" in sweep(*four, *flags)
    text = sweep(*four, *flags)
    assert text.count("complete, skipped") == 4 and results(tmp_path)["exp10c_lr3e-4"]["train_seconds"] == found["exp10c_lr3e-4"]["train_seconds"]


def test_ctrl_c_ends_the_current_run_cleanly(data, tmp_path):  # noqa: F811
    flags = ["exp08a", "exp08b", *TINY, f"--data_path={data}", f"--out_dir={tmp_path}", "--checkpoint_interval=0"]
    process = start(*flags, "--max_steps=100000")
    log = tmp_path / "exp08a_ema_off.log"
    wait_for(lambda: log.exists() and "step 10/" in log.read_text())
    held = sweep(*flags, code=1)  # a second sweep keeps its hands off what the first one runs, and ends with the run that fails
    assert "held by another process" in held and re.search(r"exp08b_ema0.99 +not started", held)
    began = time.time()
    process.send_signal(signal.SIGINT)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 1 and time.time() - began < 30 and "the run saves and stops" in text and "0 of 2 complete" in text
    step = int(re.search(r"stopped at step (\d+), checkpoint saved", log.read_text())[1])
    assert os.path.exists(train.checkpoints(str(tmp_path / "exp08a_ema_off"))[0]) and results(tmp_path)["exp08a_ema_off"]["status"] == "stopped"
    assert not (tmp_path / "exp08b_ema0.99").exists() and re.search(r"exp08b_ema0.99 +not started", text)
    assert "2 of 2 complete" in sweep(*flags, f"--max_steps={step + 2}", "--eval_interval=0")
    assert f"training from step {step} to {step + 2}" in log.read_text()
