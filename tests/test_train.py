"""train.py as people run it, at tiny sizes: resume, kills, NaN, checkpoints, CPU against XLA, replicas."""
import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
import configurator  # noqa: E402
import train  # noqa: E402
import xla  # noqa: E402

TINY = ["--hidden_size=32", "--num_heads=2", "--puzzle_emb_ndim=32", "--puzzle_emb_len=2", "--H_cycles=2",
        "--L_cycles=2", "--halt_max_steps=4", "--forward_dtype=float32", "--global_batch_size=16",
        "--lr=2e-3", "--lr_warmup_steps=5", "--log_interval=5", "--eval_interval=0"]
# The run of the fixture whole.
WHOLE = ["--max_steps=40", "--checkpoint_interval=10", "--keep_last_n=9", "--eval_interval=4",
         "--eval_max_puzzles=20"]


def command(data, out, *flags):
    return [sys.executable, os.path.join(ROOT, "train.py"), f"--data_path={data}", f"--out_dir={out}",
            "--device=cpu", *TINY, *flags]


def run(data, out, *flags, code=0, **env):
    """Runs train.py and returns its output. Later flags win.

    Runs in this process, unless it should fail (code), needs environment variables (env) or compiles.
    """
    if code or env or "--compile=on" in flags:
        done = subprocess.run(command(data, out, *flags), capture_output=True, text=True, timeout=300,
                              env={**os.environ, **env})
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr
    c = configurator.configure(train.__file__, command(data, out, *flags)[2:])
    train.check_settings(c)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        train.replica(c, c.device)
    return printed.getvalue()


def lines(out):
    with open(os.path.join(out, "metrics.jsonl")) as f:
        return [json.loads(line) for line in f]


def curve(out, key="train/loss"):
    return {line["step"]: line[key] for line in lines(out) if key in line}


def last_weights(out):
    path = train.checkpoint_paths(str(out))[0]
    state = torch.load(path, weights_only=True)
    tensors = {(part, k): t for part in ("weights", "ema", "m", "v") for k, t in state[part].items()}
    return tensors | {("step",): torch.tensor(state["step"])}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("data") / "sudoku-4x4")
    subprocess.run([sys.executable, os.path.join(ROOT, "prepare_sudoku.py"), "--source=generate", "--size=4",
                    "--num_train=64", "--num_test=40", "--num_aug=5", f"--output_dir={path}"],
                   check=True, capture_output=True)
    return path


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """An uninterrupted run of 40 steps with a checkpoint every 10: (out_dir, its output)."""
    out = str(tmp_path_factory.mktemp("whole") / "run")
    return out, run(data, out, *WHOLE)


def test_a_run_logs_evaluates_and_saves(whole):
    out, text = whole
    saved = [os.path.basename(p) for p in train.checkpoint_paths(out)]
    assert saved == [f"ckpt_000000{s}.pt" for s in (40, 30, 20, 10)]
    assert not [n for n in os.listdir(out) if n.endswith(".tmp")]
    logged = lines(out)
    want = {"train/loss", "train/lm_loss", "train/q_halt_loss", "train/accuracy", "train/exact_accuracy",
            "train/steps", "train/lr", "train/grad_norm", "perf/examples_per_sec", "perf/step_time"}
    assert want <= logged[1].keys()
    assert curve(out)[40] < 0.8 * curve(out)[5]
    evaluations = [line for line in logged if "eval/exact_accuracy" in line]
    # 4 epochs of 64 puzzles are 16 steps of 16 puzzles; the last evaluation is at the end of the run
    assert [line["step"] for line in evaluations] == [16, 32, 40]
    assert [line["eval/puzzles"] for line in evaluations] == [20, 20, 40]
    assert evaluations[-1]["final"]
    assert evaluations[-1]["eval/steps"] == 4
    best = json.load(open(os.path.join(out, "best.json")))
    highest = max(line["eval/exact_accuracy"] for line in evaluations[:2])
    assert best["metrics"]["eval/exact_accuracy"] == highest
    assert "eta" in text
    assert "examples/s" in text
    assert open(os.path.join(out, "log.txt")).read().strip() in text


def test_old_checkpoints_are_deleted(data, tmp_path):
    run(data, tmp_path / "run", "--max_steps=12", "--checkpoint_interval=3", "--keep_last_n=2")
    assert sorted(os.path.basename(n) for n in os.listdir(tmp_path / "run") if n.startswith("ckpt")) == [
        "ckpt_00000009.json", "ckpt_00000009.pt", "ckpt_00000012.json", "ckpt_00000012.pt"]


@pytest.mark.parametrize("damage", [
    "none", "newest truncated", "newest without json", "half a line of metrics"])
def test_resume_equals_the_uninterrupted_run(data, whole, tmp_path, damage):
    out = str(tmp_path / "run")
    shutil.copytree(whole[0], out)
    for name in ("ckpt_00000040.pt", "ckpt_00000040.json"):
        os.remove(os.path.join(out, name))
    newest = os.path.join(out, "ckpt_00000030.pt")
    if damage == "newest truncated":
        with open(newest, "r+b") as f:
            f.truncate(os.path.getsize(newest) // 2)
    if damage == "newest without json":
        os.remove(newest[:-3] + ".json")
    if damage == "half a line of metrics":
        with open(os.path.join(out, "metrics.jsonl"), "a") as f:
            f.write('{"step": 41, "tra')
    text = run(data, out, *WHOLE, "--init_from=resume")
    if damage.startswith("newest"):
        assert f"skipped {newest}" in text and "resuming from " + newest.replace("30", "20") in text
    assert same(last_weights(out), last_weights(whole[0]))
    assert curve(out) == curve(whole[0]) and curve(out, "eval/loss") == curve(whole[0], "eval/loss")


def test_auto_starts_from_scratch_without_a_complete_checkpoint(data, whole, tmp_path):
    """Killed during the first checkpoint: best.pt and a .pt without .json exist, nothing to resume."""
    out = tmp_path / "run"
    out.mkdir()
    for name in ("best.pt", "best.json", "ckpt_00000010.pt"):
        shutil.copy(os.path.join(whole[0], name), out / name)
    text = run(data, out, *WHOLE, "--init_from=auto")
    assert f"skipped {out / 'ckpt_00000010.pt'}" in text and same(last_weights(out), last_weights(whole[0]))


def test_a_longer_run_is_evaluated_at_its_own_end(data, whole, tmp_path):
    """A run killed before its last evaluation resumes with it: the final line of step 40 is not enough."""
    out = str(tmp_path / "run")
    shutil.copytree(whole[0], out)
    run(data, out, "--max_steps=50", "--init_from=resume")
    kept = [line for line in lines(out) if not (line["step"] == 50 and "final" in line)]
    with open(os.path.join(out, "metrics.jsonl"), "w") as f:
        f.writelines(json.dumps(line) + "\n" for line in kept)
    text = run(data, out, "--max_steps=50", "--init_from=resume")
    assert "final evaluation" in text or lines(out)[-1].get("final")
    assert lines(out)[-1]["step"] == 50 and lines(out)[-1]["final"]


def test_pruning_beside_a_damaged_newest_checkpoint_keeps_a_good_one(data, whole, tmp_path):
    out = str(tmp_path / "run")
    shutil.copytree(whole[0], out)
    os.remove(os.path.join(out, "ckpt_00000040.json"))
    run(data, out, "--max_steps=35", "--keep_last_n=1", "--init_from=resume")
    assert os.path.exists(os.path.join(out, "ckpt_00000035.pt"))


def test_sigterm_saves_and_says_how_to_continue(data, tmp_path):
    out = str(tmp_path / "run")
    process = subprocess.Popen(command(data, out, "--max_steps=100000", "--checkpoint_interval=0"),
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for line in process.stdout:
        if line.startswith("step 10/"):
            began = time.time()
            process.send_signal(signal.SIGTERM)
            break
    rest = process.stdout.read()
    assert process.wait(30) == 3 and time.time() - began < 30
    step = int(os.path.basename(train.checkpoint_paths(out)[0])[5:-3])
    assert f"stopped at step {step}" in rest
    assert "to continue: the same command with --init_from=resume" in rest
    text = run(data, out, f"--max_steps={step + 2}", "--checkpoint_interval=0", "--init_from=resume")
    assert f"training from step {step} to {step + 2}" in text


def test_nan_stops_the_run_and_names_the_last_good_checkpoint(data, tmp_path):
    """The learning rate overflows float32 weights."""
    run(data, tmp_path / "run", "--max_steps=10")
    text = run(data, tmp_path / "run", "--max_steps=30", "--init_from=resume", "--lr=1e38",
               "--optimizer=lion", "--lr_warmup_steps=0", code=1)
    assert "not finite between steps 11 and 15" in text
    assert "ckpt_00000010.pt" in text
    assert "Traceback" not in text
    saved = [os.path.basename(p) for p in train.checkpoint_paths(str(tmp_path / "run"))]
    assert saved == ["ckpt_00000010.pt"]


def test_a_complete_run_says_so_and_evaluates_again(data, whole, tmp_path):
    out = str(tmp_path / "run")
    shutil.copytree(whole[0], out)
    before = open(os.path.join(out, "metrics.jsonl")).read()
    assert "is complete at step 40" in run(data, out, "--max_steps=40", "--init_from=auto")
    text = run(data, out, "--max_steps=40", "--init_from=resume", "--eval_only",
               "--eval_save_outputs=inputs,preds,q_halt_logits")
    exact = lines(out)[-1]["eval/exact_accuracy"]
    assert f"40 test puzzles at 4 supervision steps: exact {exact:.4f}" in text
    saved = np.load(os.path.join(out, "eval_00000040.npz"))
    assert saved["preds"].shape == saved["inputs"].shape == (40, 16) and saved["q_halt_logits"].shape == (40,)
    deeper = run(data, out, "--max_steps=40", "--init_from=resume", "--eval_only",
                 "--eval_final_max_puzzles=10", "--eval_halt_max_steps=9", "--eval_show_puzzle")
    assert "10 test puzzles at 9 supervision steps" in deeper and "step 8" in deeper and "question" in deeper
    assert open(os.path.join(out, "metrics.jsonl")).read() == before


def test_weights_survive_the_export_to_the_official_code(data, whole, tmp_path):
    exported = str(tmp_path / "official.pt")
    run(data, whole[0], "--max_steps=40", "--init_from=resume", f"--export_official={exported}")
    official = torch.load(exported, weights_only=True)
    assert all(k.startswith("_orig_mod.model.inner.") for k in official)
    assert "_orig_mod.model.inner.L_level.layers.0.mlp_t.down_proj.weight" in official
    ema = torch.load(train.checkpoint_paths(whole[0])[0], weights_only=True)["ema"]
    assert torch.equal(official["_orig_mod.model.inner.lm_head.weight"], ema["lm_head.weight"])
    text = run(data, tmp_path / "eval", f"--init_from={exported}", "--eval_only")
    final = lines(whole[0])[-1]
    assert (f"exact {final['eval/exact_accuracy']:.4f} surest {final['eval/surest_accuracy']:.4f} "
            f"accuracy {final['eval/accuracy']:.4f} loss {final['eval/loss']:.4f}") in text
    # training can start from it too, at step 0
    run(data, tmp_path / "tuned", f"--init_from={exported}", "--max_steps=5")
    assert curve(str(tmp_path / "tuned"))[5] < curve(whole[0])[5]


def test_evaluation_does_not_change_training(data, whole, tmp_path):
    run(data, tmp_path / "run", "--max_steps=40", "--checkpoint_interval=10", "--keep_last_n=9",
        "--eval_interval=0")
    assert same(last_weights(tmp_path / "run"), last_weights(whole[0]))


def test_an_evaluation_stops_on_request_and_leaves_out_puzzles_without_labels(data, whole, monkeypatch):
    c = configurator.configure(train.__file__, [f"--data_path={data}", f"--out_dir={whole[0]}", *TINY])
    test = train.Dataset(data, "test")
    test.labels = test.labels.copy()
    test.labels[:7] = test.ignore_label_id
    net = train.TRM(train.TRMConfig.of(c, seq_len=test.seq_len, vocab_size=test.vocab_size))

    def evaluated(stop_requested):
        monkeypatch.setattr(train, "stop_requested", stop_requested)
        return train.evaluate(train.Run(net, c, train.open_device("cpu", c)), test, test.subset(0), "")

    assert evaluated(lambda: False)["eval/puzzles"] == 33
    assert evaluated(lambda: True) == {}
    calls = iter(range(1000))
    assert evaluated(lambda: next(calls) > 6) == {}  # in the middle of the second batch


@pytest.mark.parametrize("flags", [
    ["--optimizer=adamw", "--micro_batch_size=4"],
    ["--optimizer=lion", "--lr=2e-4", "--ema=False"],
    ["--optimizer=muon"],
    ["--mlp_t=False", "--pos_encodings=rope", "--puzzle_emb_ndim=0"],
    ["--loss_type=softmax_cross_entropy"],
    ["--forward_dtype=bfloat16"],
    ["--forward_dtype=float16"],
    ["--mlp_t=False", "--pos_encodings=learned"],
], ids=" ".join)
def test_every_setting_trains_and_resumes(data, tmp_path, flags):
    run(data, tmp_path / "a", "--max_steps=20", "--checkpoint_interval=10", *flags)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for name in ("ckpt_00000020.pt", "ckpt_00000020.json"):
        os.remove(tmp_path / "b" / name)
    run(data, tmp_path / "b", "--max_steps=20", "--checkpoint_interval=10", "--init_from=resume", *flags)
    a, b = (torch.load(train.checkpoint_paths(str(tmp_path / n))[0], weights_only=True) for n in "ab")
    assert all(torch.equal(a[part][k], b[part][k]) for part in ("weights", "m", "v") for k in a[part])
    assert curve(tmp_path / "a")[20] < curve(tmp_path / "a")[5]


@pytest.mark.xla
def test_xla_trains_the_demos_curve_with_two_programs(tmp_path):
    data = str(tmp_path / "data")
    subprocess.run([sys.executable, os.path.join(ROOT, "prepare_sudoku.py"), "--source=generate", "--size=6",
                    "--num_train=300", "--num_test=40", "--num_aug=10", f"--output_dir={data}"],
                   check=True, capture_output=True)
    for kind, device_env in (("cpu", {}), ("xla", {"PJRT_DEVICE": "CPU"})):
        # an epoch is 9.4 steps, so the first evaluation follows step 10
        flags = [f"--data_path={data}", f"--out_dir={tmp_path / kind}", f"--device={kind}", "--max_steps=12",
                 "--log_interval=1", "--eval_interval=1", "--eval_max_puzzles=40", "--forward_dtype=float32",
                 "--eval_patience=0"]  # leaving would turn rounding into another number of steps
        subprocess.run([sys.executable, "train.py", "config/demo.py", *flags], cwd=ROOT, check=True,
                       capture_output=True, timeout=300, env={**os.environ, "XLA_FLAGS": "", **device_env})
    got, want = curve(tmp_path / "xla"), curve(tmp_path / "cpu")
    assert len(want) == 12 and max(abs(got[k] / want[k] - 1) for k in want) < 1e-3
    # an evaluation is four times as deep as a training step, so rounding grows further
    evaluated = curve(tmp_path / "cpu", "eval/loss")
    assert len(evaluated) == 2 and curve(tmp_path / "xla", "eval/loss") == pytest.approx(evaluated, rel=3e-2)
    compiles = curve(tmp_path / "xla", "xla/compiles")
    assert [compiles[k] for k in (1, 10, 11, 12)] == [1, 1, 2, 2], compiles
    assert set(curve(tmp_path / "xla", "xla/fallbacks").values()) == {0}
    assert "aten::" not in open(tmp_path / "xla" / "log.txt").read()


def test_torch_compile_trains_the_same_curve_on_the_cpu(data, tmp_path):
    flags = ["--max_steps=10", "--eval_final_max_puzzles=16", "--H_cycles=1", "--L_cycles=1", "--L_layers=1",
             "--halt_max_steps=2"]
    for name in ("on", "off"):
        run(data, tmp_path / name, *flags, f"--compile={name}")
    for key in ("train/loss", "eval/loss"):
        assert curve(tmp_path / "on", key) == pytest.approx(curve(tmp_path / "off", key), rel=1e-3)
    assert "C++ compiler" in run(data, tmp_path / "none", "--compile=on", code=2, PATH="", CXX="")


@pytest.mark.xla
@pytest.mark.parametrize("old,new,why", [
    ("q_halt = self.q_head(z_H[:, 0])[:, 0].float()",
     "q_halt = self.q_head(z_H[:, 0])[:, 0].float() * (2 if z_H.sum().item() > 0 else 1)", "item has"),
    ("z_H = self.L_level(z_H + z_L, rope)",
     "z_H = self.L_level(z_H + z_L + torch.special.bessel_j0(z_L.detach()), rope)",
     "special_bessel_j0 is not"),
    ("z_H = self.L_level(z_H + z_L, rope)",
     "z_H = self.L_level(z_H + F.dropout(z_L, 0.3, self.training), rope)", "bernoulli.p draws"),
], ids=["item", "no XLA operation", "dropout"])
def test_a_fork_that_cannot_be_captured_trains_traced_and_says_so(data, tmp_path, old, new, why):
    """The losses equal the CPU's; random numbers differ from step to step and are off in evaluations."""
    for name in ("train.py", "xla.py", "model.py", "data.py", "configurator.py"):
        shutil.copy(os.path.join(ROOT, name), tmp_path)
    source = (tmp_path / "model.py").read_text()
    assert source.count(old) == 1
    (tmp_path / "model.py").write_text(source.replace(old, new))
    line = source[:source.index(old)].count("\n") + 1
    flags = ["--max_steps=2", "--log_interval=1", "--micro_batch_size=8", "--H_cycles=1", "--L_cycles=1",
             "--halt_max_steps=2", "--eval_final_max_puzzles=16"]
    if "draws" in why:  # updated weights would depend on the random numbers
        flags += ["--lr=1e-9", "--puzzle_emb_lr=0"]
    for kind, env in (("cpu", {}), ("xla", {"PJRT_DEVICE": "CPU"})):
        done = subprocess.run([sys.executable, str(tmp_path / "train.py"),
                               *command(data, tmp_path / kind, *flags)[2:], f"--device={kind}"],
                              capture_output=True, text=True, timeout=300, env={**os.environ, **env})
        assert done.returncode == 0, done.stdout + done.stderr
    warnings = [text for text in done.stdout.splitlines() if "traces" in text]
    # one for training and one for evaluation
    assert len(warnings) == (1 if "draws" in why else 2), done.stdout
    assert all(f"model.py:{line}: {why}" in text for text in warnings), done.stdout
    assert warnings[0] in open(tmp_path / "xla" / "log.txt").read()
    got, want = curve(tmp_path / "xla"), curve(tmp_path / "cpu")
    if "draws" in why:
        evaluated = curve(tmp_path / "cpu", "eval/loss")
        assert curve(tmp_path / "xla", "eval/loss") == pytest.approx(evaluated, rel=1e-3)
    else:
        assert got == pytest.approx(want, rel=1e-3) and len(got) == 2


def test_an_operation_that_cannot_be_replayed_raises():
    x, ints = torch.randn(3, 2), torch.tensor([0, 1])
    calls = (lambda: x.sum().item(), lambda: x[x > 0], lambda: x.nonzero(), lambda: x.unique(),
             lambda: x.masked_select(x > 0), lambda: x.clone().index_put_((x > 0,), ints[0].float()),
             lambda: bool(x.sum() > 0), lambda: torch.rand(2))
    for call in calls:
        with pytest.raises(xla.NotReplayable, match="depends on data|random"), xla.Replayable():
            call()
    with xla.Replayable():
        rows = x[ints]
        x.clone().index_put_((ints,), x[0])
    assert torch.equal(rows, x[:2])


def test_two_processes_train_the_curve_of_one(data, whole, tmp_path):
    """torchrun with gloo: ranks share the batch and the evaluation; the losses are those of one process."""
    # shallow, because depth amplifies rounding
    flags = [*WHOLE, "--max_steps=30", "--lr=2e-4", "--H_cycles=1", "--L_cycles=1", "--halt_max_steps=2"]
    run(data, tmp_path / "one", *flags)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run(torchrun + command(data, tmp_path / "two", *flags)[1:], check=True, capture_output=True,
                   timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"})
    for key in ("train/loss", "eval/loss"):
        one, two = curve(tmp_path / "one", key), curve(tmp_path / "two", key)
        assert one.keys() == two.keys() and two == pytest.approx(one, rel=1e-4)
    assert lines(tmp_path / "two")[-1]["eval/puzzles"] == 40
    # one process continues from there
    run(data, tmp_path / "two", *flags, "--max_steps=35", "--init_from=resume")
