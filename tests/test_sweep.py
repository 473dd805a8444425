"""scripts/sweep.py: the plan of all runs, and small runs that are complete, killed, damaged and stopped."""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
sys.path.insert(0, os.path.join(ROOT, "scripts"))
import prepare_sudoku  # noqa: E402
import sweep as script  # noqa: E402
import train  # noqa: E402
from configurator import configure  # noqa: E402

TINY = [
    "--hidden_size=32", "--num_heads=2", "--puzzle_emb_ndim=32", "--puzzle_emb_len=2", "--H_cycles=1",
    "--L_cycles=1", "--halt_max_steps=2", "--forward_dtype=float32", "--global_batch_size=16",
    "--micro_batch_size=0", "--lr_warmup_steps=5", "--log_interval=5", "--checkpoint_interval=10",
    "--eval_interval=4", "--wandb_log=False", "--device=cpu"]


@pytest.fixture
def sweep(capfd, monkeypatch):
    """sweep.py in this process: a function of its flags that returns what it prints."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.chdir(ROOT)

    def sweep(*flags, code=0):
        capfd.readouterr()
        exit_code = 0
        try:
            script.command(lambda: script.main(list(flags)), script.__file__)
        except SystemExit as e:
            exit_code = e.code
        text = "".join(capfd.readouterr())
        assert exit_code == code, text
        return text

    yield sweep
    for number, handler in handlers.items():
        signal.signal(number, handler)


def start(*flags):
    """sweep.py as a process."""
    return subprocess.Popen([sys.executable, script.__file__, *flags], stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True, cwd=ROOT)


def child_of(process):
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as f:
        return int(f.read().split()[0])


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def results(folder):
    with open(folder / "results.json") as f:
        return {result["run"]: result for result in json.load(f)}


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("data") / "sudoku-4x4")
    prepare_sudoku.prepare(configure(prepare_sudoku.__file__, [
        "--source=generate", "--size=4", "--num_train=64", "--num_test=40", "--num_aug=5",
        f"--output_dir={path}"]))
    return path


def test_list_and_selection(sweep):
    text = sweep("--list")
    assert text.splitlines()[-1] == "67 runs"
    lines = dict(line.split(None, 1) for line in text.splitlines() if line.startswith("  "))
    names = list(lines)
    assert lines["exp01a"] == "hidden_size=256 num_heads=4 puzzle_emb_ndim=256"
    assert lines["exp01c"] == "the baseline" and text.count("How does accuracy grow with the parameters") == 1
    assert len(names) == 67 and names[0] == "exp01a" and names[-1].startswith("contrib02")
    assert names.index("exp04a_250") < names.index("exp04a_1000")
    assert sweep("--list", "--pattern", "exp02a").splitlines()[-1] == "6 runs"
    assert sweep("--list", "exp01a", "contrib01_curriculum").splitlines()[-1] == "2 runs"
    assert sweep("--list", "exp01a", "--pattern=exp0?a_250").splitlines()[-1] == "2 runs"


def test_dry_run_prints_what_would_run(sweep):
    text = sweep("--dry_run", "--gcs_dir=gs://bucket/study/", "--out_dir=/tmp/study", "--epochs=6144",
                 "exp01a", "exp04a_100", "exp06_f")
    assert [re.split(": |, ", line)[0] for line in text.splitlines() if not line.startswith(" ")] == [
        "exp01a_h256", "exp04a_100_puzzles", "exp06_f_batch49152", "3 runs"]
    assert "3 runs, 1,225 steps, " in text
    assert "differs from the baseline in  hidden_size=256 num_heads=4 puzzle_emb_ndim=256\n" in text
    assert "W&B                           TRM-Exp01-ModelScaling; --wandb_log=False switches it off\n" in text
    assert "1,000 steps of 6,144 sequences, " in text
    assert "100 steps of 6,144" in text and "125 steps of 49,152" in text
    assert ("data/sudoku-extreme-100-aug-1000, 100 puzzles; "
            "missing: python prepare_sudoku.py --subsample_size=100" in text)
    assert ("python train.py config/study/exp01a.py --gcs_dir=gs://bucket/study/exp01a_h256 "
            "--out_dir=/tmp/study/exp01a_h256 --epochs=6144 --init_from=auto" in text)
    assert not os.path.exists("/tmp/study")


@pytest.mark.parametrize("name", ["exp08a", "contrib01_curriculum"])
def test_remaining_flop_is_the_sum_over_steps(data, name):
    flags = [*TINY, "--H_cycles=3", "--L_cycles=6", "--curriculum_epochs=10", f"--data_path={data}"]
    if name == "exp08a":
        flags.append("--curriculum_epochs=0")
    [path] = script.select_files([name], "")
    for total_steps in (60, 17):  # the curriculum ends at step 40
        run = script.StudyRun(path, [*flags, f"--max_steps={total_steps}"])
        plan = train.stages(run.c, run.puzzles)
        assert len(plan) == (1 if name == "exp08a" else 5)
        depths = [train.cycles_at(plan, step) for step in range(total_steps)]
        flop = [16 * run.model.flops_per_example(cycles)[1] for cycles in depths]
        for step in (0, 1, 16, 17, 39, 40, 59, 60):
            assert run.flop_from(step) == sum(flop[step:])


def test_missing_data_is_made_once(sweep, tmp_path):
    flags = ["exp08a", "exp08b", f"--data_path={tmp_path}/4x4", f"--out_dir={tmp_path}/out",
             "--data_prepare=prepare_sudoku.py --source=generate --size=4 --num_train=48 --num_test=9 "
             f"--num_aug=2 --output_dir={tmp_path}/4x4"]
    text = sweep("--dry_run", *flags)
    assert "390 steps of 6,144" in text  # 50,000 epochs of 48 puzzles
    assert not os.listdir(tmp_path)
    assert "data sets: 1, made now: 1" in sweep("--prepare", *flags)
    assert "data sets: 1, made now: 0" in sweep("--prepare", *flags)
    assert "; missing" not in sweep("--dry_run", *flags)


def test_a_bucket_decides_what_is_complete(data, tmp_path, monkeypatch):
    """Every host of a slice sees the bucket, and only one has metrics.jsonl."""
    final = [
        {"step": 30, "train/loss": 1.0, "perf/step_time": 0.5},
        {"step": 60, "train/loss": 1.0, "perf/step_time": 0.7},
        {"step": 60, "final": True, "eval/exact_accuracy": 0.25}]
    text = "".join(json.dumps(row) + "\n" for row in final)
    bucket = {"gs://bucket/study/exp08a_ema_off": text.encode(), "gs://bucket/study/exp08b_ema0.99": None}
    monkeypatch.setattr(script, "Bucket", lambda url: types.SimpleNamespace(read=lambda name: bucket[url]))
    flags = [*TINY, f"--data_path={data}", f"--out_dir={tmp_path}", "--gcs_dir=gs://bucket/study",
             "--max_steps=60"]
    paths = script.select_files(["exp08a", "exp08b"], "")
    in_bucket, local = (script.StudyRun(path, flags) for path in paths)
    os.makedirs(local.c.out_dir)
    with open(os.path.join(local.c.out_dir, "metrics.jsonl"), "w") as f:
        f.write(text)
    assert in_bucket.is_complete() and not local.is_complete()
    for run in (in_bucket, local):
        r = run.result("complete", 50.0, "")
        assert r["steps"] == 60 and r["last_exact_accuracy"] == 0.25
        assert r["train_seconds"] == 36.0 and r["examples_per_sec"] == round(16 / 0.6, 2)


def test_sweeps_write_one_results_file(tmp_path):
    """Several at a time: none loses what another wrote."""
    def write(sweep):
        for run in sweep.runs:
            sweep.record(run, "complete", "")

    def fake(name):
        c = types.SimpleNamespace(out_dir=str(tmp_path / name))
        return types.SimpleNamespace(name=name, c=c, is_complete=lambda: True,
                                     result=lambda *_: dict(run=name))

    sweeps = [script.Sweep([fake(f"{i}_{j}") for j in range(20)], 0, False) for i in range(4)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(write, sweeps))
    assert len(results(tmp_path)) == 80


@pytest.mark.parametrize("flags, words", [
    (["exp01ax"], "exp01ax: no such run in config/study; the closest is exp01a"),
    (["--pattern=exq"], "--pattern=exq"),
    (["--epoch=3"], "unknown setting epoch"),
    (["exp01a", "--lr=fast"], "lr must be float"),
    (["exp01a", "--data_path=nowhere", "--data_prepare="], "nowhere: no such data set"),
    (["exp01a", "--halt_max_steps=0"], "halt_max_steps must be above 0"),
    (["exp01a", "--mlp_t=False", "--num_heads=7"], "exp01a_h256: hidden_size 256 must be a multiple"),
    (["exp01a", "--retries=-1"], "retries must be 0 or more")])
def test_wrong_input(sweep, flags, words):
    text = sweep(*flags, code=2)
    assert words in text and text.count("\n") == 1 and text.startswith("sweep.py: ")


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """The folder of the sweeps below."""
    return tmp_path_factory.mktemp("study")


def test_ctrl_c_stops_the_current_run_cleanly(sweep, data, study):
    flags = [*TINY, f"--data_path={data}", f"--out_dir={study}", "--checkpoint_interval=0"]
    process = start("exp08a", "exp08b", *flags, "--max_steps=100000")
    log = study / "exp08a_ema_off.log"
    wait_for(lambda: log.exists() and "step 10/" in log.read_text())
    child = child_of(process)
    assert os.getpgid(child) == child  # a terminal's Ctrl-C reaches it through the sweep alone
    assert os.getsid(child) == os.getsid(process.pid)  # which scripts/tpu.sh kills as a whole

    second = start("exp08a", *flags, "--max_steps=100000")
    wait_for(lambda: "another sweep has it in progress" in second.stdout.readline())

    began = time.time()
    process.send_signal(signal.SIGINT)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 3 and time.time() - began < 30
    assert "the run saves and stops" in text and "0 of 2 complete" in text
    step = int(re.search(r"stopped at step (\d+), checkpoint saved", log.read_text())[1])
    assert os.path.exists(train.checkpoint_paths(str(study / "exp08a_ema_off"))[0])
    assert results(study)["exp08a_ema_off"]["status"] == "stopped"
    assert not (study / "exp08b_ema0.99").exists() and re.search(r"exp08b_ema0.99 +not started", text)

    # The second sweep, which waited, goes on where the first one stopped.
    wait_for(lambda: f"training from step {step} to 100000" in log.read_text())
    second.send_signal(signal.SIGINT)
    second.communicate(timeout=60)
    assert second.returncode == 3
    step = int(re.findall(r"stopped at step (\d+), checkpoint saved", log.read_text())[-1])

    total_steps = max(60, step + 2)
    assert "1 of 1 complete" in sweep("exp08a", *flags, f"--max_steps={total_steps}", "--eval_interval=0")
    assert f"training from step {step} to {total_steps}" in log.read_text()


def test_complete_killed_and_damaged_runs(sweep, data, study):
    """Four runs: the first is complete, one has a damaged checkpoint, one is killed, one is left alone."""
    flags = [*TINY, f"--data_path={data}", f"--out_dir={study}"]
    if not os.listdir(study):  # without the test above
        sweep("exp08a", *flags, "--max_steps=60")
    steps = results(study)["exp08a_ema_off"]["steps"]
    flags.append(f"--max_steps={steps}")
    before = (study / "exp08a_ema_off" / "metrics.jsonl").read_text()
    four = ["exp08a", "exp08b", "exp09b", "exp10c"]
    damaged, killed = study / "exp08b_ema0.99", study / "exp09b_adamw_beta2_0.95"
    damaged.mkdir()
    (damaged / "ckpt_00000010.pt").write_text("damaged")
    (damaged / "ckpt_00000010.json").write_text("{}")

    process = start(*four, *flags, "--continue_on_failure")
    wait_for(lambda: (killed / "ckpt_00000010.json").exists())
    os.kill(child_of(process), signal.SIGKILL)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 1 and text.splitlines()[-1].startswith("3 of 4 complete")
    assert "[1/4] exp08a_ema_off: complete, skipped" in text
    assert f"[2/4] exp08b_ema0.99: step 0 of {steps}" in text
    found = results(study)
    assert {name: r["status"] for name, r in found.items()} == {
        "exp08a_ema_off": "complete", "exp08b_ema0.99": "failed", "exp09b_adamw_beta2_0.95": "complete",
        "exp10c_lr3e-4": "complete"}
    last = (study / "exp08b_ema0.99.log").read_text().splitlines()[-1]
    assert last.startswith("train.py: --init_from=auto: no complete checkpoint")
    assert f"  failed: {last}" in text
    assert found["exp08b_ema0.99"]["error"] == last
    died, resumed = (study / "exp09b_adamw_beta2_0.95.log").read_text().split("$ python")[1:]
    last = [line for line in died.splitlines() if line.strip()][-1]  # of training, or of an evaluation
    assert f"  died: killed by SIGKILL after {last!r}; resuming from its last checkpoint" in text
    assert "resuming from" in resumed and "training from step 0 " not in resumed

    for name in ("exp09b_adamw_beta2_0.95", "exp10c_lr3e-4"):
        r, rows = found[name], metrics(study / name)
        exact = [row["eval/exact_accuracy"] for row in rows if "eval/exact_accuracy" in row]
        assert r["steps"] == r["total_steps"] == steps
        assert r["best_exact_accuracy"] == max(exact) and r["last_exact_accuracy"] == exact[-1]
        rates = [row["perf/examples_per_sec"] for row in rows if "perf/examples_per_sec" in row]
        assert min(rates) <= r["examples_per_sec"] <= max(rates)
        assert r["train_seconds"] == pytest.approx(steps * 16 / r["examples_per_sec"], abs=0.1)
        assert r["wall_seconds"] > r["train_seconds"] and f"{name:32}" in text
    logged = [row["step"] for row in metrics(killed) if "train/loss" in row]
    assert logged == sorted(set(logged))
    assert (study / "exp08a_ema_off" / "metrics.jsonl").read_text() == before

    shutil.rmtree(damaged)
    assert "4 of 4 complete" in sweep(*four, *flags)
    text = sweep(*four, *flags)
    assert text.count("complete, skipped") == 4
    assert results(study)["exp10c_lr3e-4"]["train_seconds"] == found["exp10c_lr3e-4"]["train_seconds"]


def test_a_damaged_data_set_is_one_line(sweep, tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "dataset.json").write_text('{"seq_len": 16')
    text = sweep("--dry_run", "exp01a", f"--data_path={tmp_path}", code=2)
    assert "dataset.json is damaged" in text and "Traceback" not in text
