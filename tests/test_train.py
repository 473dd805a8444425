"""train.py as people run it, at tiny sizes: logs, checkpoints, resume, exports, and what forks change."""
import contextlib
import glob
import io
import json
import os
import re
import shutil
import subprocess
import sys
import types
from unittest import mock

import configurator
import numpy as np
import pytest
import torch
from conftest import ROOT, ForkedTrain
from torch.utils._pytree import tree_flatten

import model as models
import prepare_sudoku
import train

TINY = ["--hidden_size=32", "--num_heads=2", "--puzzle_emb_ndim=32", "--puzzle_emb_len=2", "--H_cycles=2",
        "--L_cycles=2", "--halt_max_steps=4", "--forward_dtype=float32", "--global_batch_size=16",
        "--lr=2e-3", "--lr_warmup_steps=5", "--log_interval=5", "--eval_interval=0"]
CURRICULUM = ["--H_cycles=2", "--L_cycles=3", "--H_cycles_start=1", "--L_cycles_start=1", "--lr=5e-4",
              "--halt_exploration_prob=0.9", "--halt_exploration_prob_end=0.1"]
DATA = ["--source=generate", "--size=4", "--num_train=64", "--num_test=40", "--num_aug=5"]  # of the fixture
# The run of the fixture whole.
WHOLE = ["--max_steps=40", "--checkpoint_interval=10", "--keep_last_n=9", "--eval_interval=4",
         "--eval_max_puzzles=20"]


def command(data, out, *flags):
    return [sys.executable, os.path.join(ROOT, "train.py"), f"--data_path={data}", f"--out_dir={out}",
            "--device=cpu", *TINY, *flags]


def run(data, out, *flags, code=0, code_of=train, **env):
    """Runs train.py and returns its output. Later flags win. code_of: a fork.

    Runs in this process, unless it should fail (code) or needs environment variables (env).
    """
    if code or env:
        process = ForkedTrain(command(data, out, *flags)[2:], env={**os.environ, **env})
        text, _ = process.communicate()
        assert process.returncode == code, text
        return text
    c = configurator.configure(train.__file__, command(data, out, *flags)[2:])
    code_of.check_settings(c)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code_of.replica(c, c.device)
    return printed.getvalue()


def popen(argv, **options):
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def forked(data, out, *flags):
    return ForkedTrain(command(data, out, *flags)[2:])


@contextlib.contextmanager
def begun(process, until="training from"):
    """A process that has printed `until`. It is killed at the end."""
    try:
        text = ""
        while until not in text:
            text = process.stdout.readline()
            assert text, "it ended"
        yield process
    finally:
        process.kill()
        process.wait()


def fork(**edits):
    """train.py after edits of the source: {"train", "model" or "device": [(text, its replacement)]}."""
    with mock.patch.dict(sys.modules):
        for name in ("model", "device", "train"):
            path = os.path.join(ROOT, name + ".py")
            with open(path) as f:
                source = f.read()
            for old, new in edits.get(name, ()):
                assert source.count(old) == 1, old
                source = source.replace(old, new)
            module = sys.modules[name] = types.ModuleType(name)
            module.__file__ = path
            exec(compile(source, path, "exec"), vars(module))
    return module


def edited_copy(folder, name, old, new):
    """The path of train.py in a copy of the scripts, where a file has new instead of old."""
    folder.mkdir()
    for path in glob.glob(os.path.join(ROOT, "*.py")):
        shutil.copy(path, folder)
    source = (folder / name).read_text()
    assert source.count(old) == 1
    (folder / name).write_text(source.replace(old, new))
    return str(folder / "train.py")


def lines(out):
    with open(os.path.join(out, "metrics.jsonl")) as f:
        return [json.loads(line) for line in f]


def curve(out, key="train/loss"):
    return {line["step"]: line[key] for line in lines(out) if key in line}


def last_weights(out):
    state = torch.load(train.checkpoint_paths(str(out))[0], weights_only=True)
    return [state["step"], state["weights"], state["optimizer"], state.get("ema")]


def same(a, b):
    (a, structure), (b, other) = tree_flatten(a), tree_flatten(b)
    return structure == other and all(torch.equal(torch.as_tensor(x), torch.as_tensor(y))
                                      for x, y in zip(a, b) if x is not None)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("data") / "sudoku-4x4")
    prepare_sudoku.main(configurator.configure(prepare_sudoku.__file__, [*DATA, f"--output_dir={path}"]))
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
    best = json.load(open(os.path.join(out, "best.json")))["metrics"]["eval/exact_accuracy"]
    assert best == max(line["eval/exact_accuracy"] for line in evaluations[:2])
    # the two losses are apart: their sum rises while accuracy improves
    shown = re.findall(r"step (\d+)/40 \| .*lm_loss (\S+) q_halt_loss (\S+) .*examples/s.* eta ", text)
    for step, *losses in shown:
        for name, loss in zip(("lm_loss", "q_halt_loss"), losses):
            assert loss == f"{curve(out, 'train/' + name)[int(step)]:.4f}"
    assert len(shown) > 6
    assert open(os.path.join(out, "log.txt")).read().strip() in text


@pytest.fixture
def out(whole, tmp_path):
    """A copy of the folder of `whole`."""
    return str(shutil.copytree(whole[0], tmp_path / "copy"))


def test_old_checkpoints_are_deleted(data, out):
    """Only complete ones count, and none after that which a resume found damaged."""
    os.remove(f"{out}/ckpt_00000040.json")
    run(data, out, "--max_steps=39", "--checkpoint_interval=3", "--keep_last_n=2", "--init_from=resume")
    assert sorted(name for name in os.listdir(out) if name.startswith("ckpt") and name < "ckpt_00000040") == [
        "ckpt_00000036.json", "ckpt_00000036.pt", "ckpt_00000039.json", "ckpt_00000039.pt"]


# A fork's optimizer that keeps more than moments.
GRAM = [("    else:\n        raise ValueError", """    elif c.optimizer == "gram":
        state["m"].lerp_(g, 0.1)
        state["gram"].add_(g[:15].view(3, 5))
        state["count"] += 1
        w.sub_(rates["lr"] * torch.sign(state["m"]) * (1 + state["count"] / 9 + state["gram"].sum().tanh()))
    else:
        raise ValueError"""), ("    return {name: torch.zeros_like(w)", """    if c.optimizer == "gram":
        return dict(m=torch.zeros_like(w), gram=torch.ones(3, 5), count=torch.zeros(()))
    return {name: torch.zeros_like(w)""")]
CHOICE = [('"optimizer": (', '"optimizer": ("gram", ')]
RESUMES = {
    "newest truncated": [],
    "newest without json": [],
    "killed in the first checkpoint": [],
    "adamw, rope, softmax": ["--optimizer=adamw", "--micro_batch_size=4", "--mlp_t=False",
                             "--pos_encodings=rope", "--puzzle_emb_ndim=0",
                             "--loss_type=softmax_cross_entropy"],
    "lion, learned positions, bfloat16": ["--optimizer=lion", "--lr=2e-4", "--ema=False", "--mlp_t=False",
                                          "--pos_encodings=learned", "--forward_dtype=bfloat16"],
    "muon, float16": ["--optimizer=muon", "--forward_dtype=float16", "--H_cycles=1", "--L_cycles=1",
                      "--eval_interval=0"],  # float16 is slow here
    "in a curriculum's second stage": [*CURRICULUM, "--curriculum_epochs=10", "--eval_interval=0"],
    "at the border of stages": [*CURRICULUM, "--curriculum_epochs=15", "--eval_interval=8"],
    "a fork's optimizer": ["--optimizer=gram", "--lr=1e-3"],
}


@pytest.mark.parametrize("case", RESUMES)
def test_a_resume_equals_no_interruption(data, whole, tmp_path, case):
    source, out, flags = whole[0], str(tmp_path / "run"), [*WHOLE, *RESUMES[case]]
    code_of = fork(model=GRAM, train=CHOICE) if "fork" in case else train
    if RESUMES[case]:
        source = str(tmp_path / "whole")
        run(data, source, *flags, code_of=code_of)
        assert curve(source)[40] < curve(source)[5]
    shutil.copytree(source, out)
    for path in glob.glob(f"{out}/ckpt_00000040.*"):
        os.remove(path)
    with open(os.path.join(out, "metrics.jsonl"), "a") as f:
        f.write('{"step": 41, "tra')  # half a line, as a crash leaves it
    newest, init_from = os.path.join(out, "ckpt_00000030.pt"), "resume"
    if case == "newest truncated":
        os.truncate(newest, os.path.getsize(newest) // 2)
    if case == "newest without json":
        os.remove(newest[:-3] + ".json")
    if case == "killed in the first checkpoint":
        init_from = "auto"
        for name in set(os.listdir(out)) - {"best.pt", "best.json", "ckpt_00000010.pt"}:
            os.remove(os.path.join(out, name))
    text = run(data, out, *flags, f"--init_from={init_from}", code_of=code_of)
    if case.startswith("newest"):
        assert f"skipped {newest}" in text and "resuming from " + newest.replace("30.pt", "20.pt") in text
    if case == "killed in the first checkpoint":
        assert f"skipped {newest.replace('30.pt', '10.pt')}" in text and "training from step 0 to" in text
    assert same(last_weights(out), last_weights(source))
    assert curve(out) == curve(source) and curve(out, "eval/loss") == curve(source, "eval/loss")


def test_a_resume_names_changed_settings_and_refuses_another_optimizer(data, out):
    path = os.path.join(out, "ckpt_00000040")
    state = torch.load(f"{path}.pt", weights_only=True)
    state["settings"]["best_metric"] = "exact_accuracy"
    torch.save(state, f"{path}.pt")
    with open(f"{path}.json", "w") as f:
        json.dump(dict(sha256=train.file_hash(f"{path}.pt")), f)
    text = run(data, out, "--max_steps=41", "--init_from=resume", "--lr=1e-3")
    assert "best_metric=exact_accuracy in the checkpoint is a setting that this code does not have" in text
    assert "lr is 0.001; the checkpoint had 0.002" in text
    with pytest.raises(configurator.UserError, match="was trained with optimizer=adam_atan2, not lion: "):
        run(data, out, "--max_steps=50", "--init_from=resume", "--optimizer=lion")


def test_nan_stops_the_run_and_names_the_last_good_checkpoint(data, tmp_path):
    """The learning rate overflows float32 weights."""
    run(data, tmp_path, "--max_steps=10")
    text = run(data, tmp_path, "--max_steps=30", "--init_from=resume", "--lr=1e38", "--beta1=0.5",
               "--lr_warmup_steps=0", code=1)
    assert re.search(r"not finite between steps 11 and 15.*ckpt_00000010.pt", text)
    assert "Traceback" not in text
    assert train.checkpoint_paths(str(tmp_path)) == [str(tmp_path / "ckpt_00000010.pt")]


def test_a_complete_run_says_so_and_evaluates_again(data, out):
    run(data, out, "--max_steps=50", "--init_from=resume")
    before = open(os.path.join(out, "metrics.jsonl")).read()
    with open(os.path.join(out, "metrics.jsonl"), "w") as f:  # killed before its last evaluation
        f.write(before[:before.rindex('{"step"')])
    assert "training from step 50 to 50" in run(data, out, "--max_steps=50", "--init_from=resume")
    assert open(os.path.join(out, "metrics.jsonl")).read() == before
    assert "is complete at step 50" in run(data, out, "--max_steps=50", "--init_from=auto")
    again = ["--max_steps=50", "--init_from=resume", "--eval_only"]
    for rank in (0, 1):  # of an earlier evaluation on two ranks
        open(os.path.join(out, f"eval_00000050.{rank}.npz"), "w").close()
    text = run(data, out, *again, "--eval_save_outputs=inputs,preds,q_halt_logits,preds")
    exact = lines(out)[-1]["eval/exact_accuracy"]
    assert f"exact_accuracy {exact:.4f}" in text and "steps 4.0000" in text and "puzzles 40" in text
    assert [name for name in os.listdir(out) if name.startswith("eval_")] == ["eval_00000050.npz"]
    saved = np.load(os.path.join(out, "eval_00000050.npz"))
    assert sorted(saved.files) == ["indices", "inputs", "preds", "q_halt_logits"]
    assert saved["preds"].shape == saved["inputs"].shape == (40, 16) and saved["q_halt_logits"].shape == (40,)
    deeper = run(data, out, *again, "--eval_final_max_puzzles=10", "--eval_halt_max_steps=9",
                 "--eval_show_puzzle")
    assert all(words in deeper for words in ("puzzles 10", "steps 9.0000", "step 8: ", "question"))
    assert open(os.path.join(out, "metrics.jsonl")).read() == before


def test_weights_survive_the_export_to_the_official_code(data, whole, tmp_path):
    exported = str(tmp_path / "model.pt")
    run(data, whole[0], "--max_steps=40", "--init_from=resume", f"--export={exported}")
    official = torch.load(exported, weights_only=True)["weights"]
    assert all(k.startswith("_orig_mod.model.inner.") for k in official)
    assert "_orig_mod.model.inner.L_level.layers.0.mlp_t.down_proj.weight" in official
    ema = torch.load(train.checkpoint_paths(whole[0])[0], weights_only=True)["ema"]
    assert torch.equal(official["_orig_mod.model.inner.lm_head.weight"], ema["lm_head.weight"])
    torch.save(official, tmp_path / "official.pt")
    # out_dir cannot be made: a warning
    text = run(data, tmp_path / "official.pt" / "x", f"--init_from={tmp_path / 'official.pt'}", "--eval_only")
    final = lines(whole[0])[-1]
    values = {k: v for k, v in final.items() if k.startswith("eval/")}
    assert f"step 0 | evaluation: {train.listed(values)}\n" in text
    run(data, tmp_path / "x", f"--init_from={whole[0]}/best.pt", f"--export={tmp_path / 'best.pt'}")
    best = torch.load(tmp_path / "best.pt", weights_only=True)
    evaluations = [line for line in lines(whole[0]) if "eval/loss" in line]
    assert best["metrics"] == max(evaluations, key=lambda line: line["eval/exact_accuracy"])
    assert best["step"] == best["metrics"]["step"] and "init_from" not in best["command"]
    # training can start from it too, at step 0
    run(data, tmp_path / "tuned", f"--init_from={exported}", "--max_steps=5")
    assert curve(str(tmp_path / "tuned"))[5] < curve(whole[0])[5]


def test_a_checkpoint_is_all_that_a_notebook_needs(whole):
    path = train.checkpoint_paths(whole[0])[0]
    state, model = torch.load(path, weights_only=True), models.TRM.load(path)
    assert torch.equal(model.q_head.bias, state["ema"]["q_head.bias"]) and model.q_head.bias[0] != -5
    assert torch.equal(model.puzzle_emb.weights, state["ema"]["puzzle_emb.weights"])


def test_evaluation_does_not_change_training(data, whole, tmp_path):
    run(data, tmp_path / "run", *WHOLE, "--eval_interval=0")
    assert same(last_weights(tmp_path / "run"), last_weights(whole[0]))


def test_torch_compile_trains_the_same_curve_on_the_cpu(data, tmp_path, monkeypatch):
    # Inductor reads this variable. Its C++ for the value "default" does not build on an Intel Xeon with AMX.
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    flags = ["--max_steps=10", "--eval_final_max_puzzles=16", "--H_cycles=1", "--L_cycles=1", "--L_layers=1",
             "--halt_max_steps=2"]
    for name in ("on", "off"):
        run(data, tmp_path / name, *flags, f"--compile={name}")
    for key in ("train/loss", "eval/loss"):
        assert curve(tmp_path / "on", key) == pytest.approx(curve(tmp_path / "off", key), rel=1e-3)
    env = dict(PATH="", CXX="", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "empty"))
    text = run(data, tmp_path / "none", "--compile=on", code=2, **env)
    assert "--compile=on: torch.compile fails on " in text and "Traceback" not in text


def test_half_a_line_is_not_glued_to_the_next(tmp_path):
    """A disk that was full leaves one."""
    log = train.Log(types.SimpleNamespace(out_dir=str(tmp_path)), types.SimpleNamespace(rank=0),
                    types.SimpleNamespace(step=0, state={}))
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 5}\n{"step": 10, "tra')
    log.log_metrics(15, {})
    assert [line["step"] for line in train.read_metrics(str(tmp_path / "metrics.jsonl"))] == [5, 15]


# Forks: what one changes, and nothing else, must be enough.

class ConvolutionBlock(torch.nn.Module):
    def __init__(self, config, length):
        super().__init__()
        self.mix = torch.nn.Conv1d(config.hidden_size, config.hidden_size, 3, padding=1, groups=8)
        self.register_buffer("taper", torch.linspace(1, 0.5, length).view(-1, 1))

    def forward(self, x, rope):
        return models.rms_norm(x + self.mix(x.mT).mT * self.taper.to(x.dtype))


def test_a_fork_with_another_block(data, tmp_path, monkeypatch):
    monkeypatch.setattr(train.TRM, "block", ConvolutionBlock)
    c = configurator.configure(train.__file__, TINY)
    mix, again = (train.new_model(c, seq_len=16, vocab_size=6).L_level.layers[0].mix for _ in range(2))
    assert mix.bias.abs().min() > 0 and torch.equal(mix.bias, again.bias)  # its own start, by the seed
    assert mix.weight.shape == (32, 4, 3) and mix.weight.std().item() == pytest.approx(12 ** -0.5, rel=0.1)
    run(data, tmp_path, "--max_steps=10")
    assert curve(tmp_path)[10] < curve(tmp_path)[5]
    run(data, tmp_path, "--max_steps=15", "--init_from=resume")  # with its buffer
    state = torch.load(train.checkpoint_paths(str(tmp_path))[0], weights_only=True)
    assert (state["weights"]["L_level.layers.0.mix.bias"] != mix.bias).any()


def test_a_fork_with_another_metric(data, tmp_path):
    loss = "            lm_loss=torch.where(counted, lm_loss, 0).sum(),\n"
    step = [(loss, "            z_norm=torch.where(scored, z_H.norm(dim=(1, 2)), 0).sum(),\n" + loss)]
    names = [('"steps", "lm_loss"', '"steps", "z_norm", "lm_loss"')]
    run(data, tmp_path, "--max_steps=10", code_of=fork(model=step + names))
    for key in ("train/z_norm", "eval/z_norm"):  # each position has a root mean square of 1
        assert curve(tmp_path, key)[10] == pytest.approx((18 * 32) ** 0.5, rel=1e-3)
    with pytest.raises(AssertionError, match="METRICS"):
        run(data, tmp_path / "without", "--max_steps=1", code_of=fork(model=step))


def test_a_fork_with_another_schedule(data, tmp_path, monkeypatch):
    """The rate that is logged is the one that is used."""
    flags = ["--max_steps=6", "--log_interval=1", "--lr_warmup_steps=0"]
    run(data, tmp_path / "given", *flags, "--lr=2e-3", "--puzzle_emb_lr=2e-3")
    monkeypatch.setattr(models, "learning_rate", lambda base, step, *_: 2 * base)
    run(data, tmp_path / "scheduled", *flags, "--lr=1e-3", "--puzzle_emb_lr=1e-3")
    assert same(last_weights(tmp_path / "scheduled"), last_weights(tmp_path / "given"))
    assert set(curve(tmp_path / "scheduled", "train/lr").values()) == {2e-3}


def test_an_optimizer_without_a_branch_raises(data, tmp_path):
    with pytest.raises(ValueError, match="optimizer 'gram' is not implemented"):
        run(data, tmp_path, "--max_steps=1", "--optimizer=gram", code_of=fork(train=CHOICE))
