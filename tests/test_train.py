"""What a run logs, saves, resumes and exports: replica() in this process, at tiny sizes.

test_resume.py and test_smoke.py run the command.
"""
import json
import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import export
import numpy as np
import pytest
import torch
from helpers import (
    CURRICULUM,
    WHOLE,
    curve,
    last_weights,
    lines,
    newest,
    remove,
    run,
    same,
)

import evaluate
from puzzles import score
from runtime.checkpoint import Checkpoints
from runtime.errors import UserError
from runtime.files import checkpoint_paths, to_stderr
from runtime.log import listed

# A run

def test_a_run_logs_evaluates_and_saves(finished):
    out, text = finished
    saved = [os.path.basename(path) for path in checkpoint_paths(out)]
    assert saved == [f"ckpt_000000{step}.pt" for step in (40, 30, 20, 10)]
    assert {"train/exact_accuracy", "train/lr", "train/grad_norm", "perf/step_time"} <= lines(out)[1].keys()
    assert curve(out)[40] < 0.8 * curve(out)[5]
    assert len(re.findall(r"step \d+/40 \| .*lm_loss \S+ q_halt_loss \S+ .*examples/s.* eta ", text)) > 6
    assert Path(out, "log.txt").read_text().strip() in text

    # 4 epochs of 64 puzzles are 16 steps of 16 puzzles; the last evaluation is at the end of the run
    assert curve(out, "eval/puzzles") == {16: 20, 32: 20, 40: 40}
    assert curve(out, "final") == {40: True} and curve(out, "eval/steps")[40] == 4
    exact = curve(out, "eval/exact_accuracy")
    best = json.loads(Path(out, "best.json").read_text())
    assert best["metrics"]["eval/exact_accuracy"] == max(exact.values())


def test_best_pt_is_the_best_evaluation_the_final_one_included(data, monkeypatch):
    evaluations = [{"eval/exact_accuracy": accuracy, "eval/loss": 1} for accuracy in (0.2, 0.1, 0.3)]
    monkeypatch.setattr(evaluate, "means", mock.Mock(side_effect=evaluations))
    run(data, "run", *WHOLE)
    best = json.loads(Path("run/best.json").read_text())
    assert best["step"] == 40 and best["metrics"] == {"eval/exact_accuracy": 0.3, "eval/loss": 1}


def test_arc_is_scored_by_two_tries_and_other_puzzles_by_their_rules_if_they_have_any():
    values = {"eval/exact_accuracy": 0.5, "eval/valid_accuracy": 0.7}
    assert score(values) == 0.7 and score(values | {"eval/pass1": 0.1, "eval/pass2": 0.2}) == 0.2


def interrupted(source, out):
    """Copies a run of 40 steps as a crash after its 30th leaves it."""
    shutil.copytree(source, out)
    remove(out, "ckpt_00000040.*")
    with open(f"{out}/metrics.jsonl", "a") as f:
        f.write('{"step": 41, "tra')  # half a line
    return out


def check_resume(data, source, out, step, *flags):
    """A resume begins at this step, and ends as the run in `source` did."""
    assert f"training from step {step} to" in run(data, out, *WHOLE, "--init_from=auto", *flags)
    assert same(last_weights(out), last_weights(source))
    assert curve(out) == curve(source) and curve(out, "eval/loss") == curve(source, "eval/loss")


RESUMES = {
    "adamw, rope, softmax": ["--optimizer=adamw", "--micro_batch_size=4", "--mlp_t=False",
                             "--pos_encodings=rope", "--puzzle_emb_ndim=0",
                             "--loss_type=softmax_cross_entropy"],
    "lion, learned positions, float16": ["--optimizer=lion", "--lr=2e-4", "--ema=False", "--mlp_t=False",
                                         "--pos_encodings=learned", "--forward_dtype=float16"],
    "at the border of stages": [*CURRICULUM, "--curriculum_epochs=15", "--forward_dtype=bfloat16"],
}


@pytest.mark.parametrize("flags", RESUMES.values(), ids=RESUMES)
def test_a_resume_equals_no_interruption(data, flags):
    run(data, "whole", *WHOLE, *flags)
    check_resume(data, "whole", interrupted("whole", "run"), 30, *flags)


def test_a_run_killed_in_its_first_checkpoint_begins_again(data, finished):
    out = interrupted(finished[0], "run")
    for name in set(os.listdir(out)) - {"best.pt", "best.json", "ckpt_00000010.pt"}:
        os.remove(f"{out}/{name}")
    check_resume(data, finished[0], out, 0)


def test_a_resume_makes_up_for_an_evaluation_that_was_stopped(data, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="3"):
        patch.setattr(evaluate, "evaluate", lambda *args: {})  # as if a stop was requested
        run(data, "run", *WHOLE)
    run(data, "run", *WHOLE, "--init_from=resume")
    assert curve("run", "eval/puzzles") == {16: 20, 32: 20, 40: 40}


def test_best_pt_of_steps_that_a_run_did_not_take_counts_no_more(data, out):
    """A run whose newest checkpoints are lost goes on further back, maybe with other settings."""
    Path(out, "best.json").write_text(json.dumps({"step": 32, "metrics": {"eval/exact_accuracy": 1.0}}))
    remove(out, "ckpt_000000[34]0.*")
    run(data, out, *WHOLE, "--init_from=auto", "--weight_decay=0.3")
    assert json.loads(Path(out, "best.json").read_text())["settings"]["weight_decay"] == 0.3


def test_a_best_pt_that_cannot_be_written_costs_the_final_evaluation(data, monkeypatch):
    """A resume makes up for it."""
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="1"):
        patch.setattr(Checkpoints, "write", lambda self, name, *_: name != "best")
        run(data, "run", "--max_steps=1")
    assert not curve("run", "eval/puzzles")
    run(data, "run", "--init_from=auto", "--max_steps=1")
    assert curve("run", "final") and os.path.exists("run/best.pt")


def test_a_resume_refuses_another_optimizer(data, out):
    with pytest.raises(UserError, match="was trained with optimizer=adam_atan2: "):
        run(data, out, "--max_steps=50", "--init_from=resume", "--optimizer=lion")


def test_nan_stops_the_run_and_names_the_last_good_checkpoint(data):
    """The weight decay overflows float32 weights. The newest checkpoint is damaged."""
    run(data, "run", "--max_steps=10", "--checkpoint_interval=5")
    with open("run/ckpt_00000010.pt", "ab") as f:
        f.write(b"damaged")
    with pytest.raises(UserError, match=r"not finite between steps 6 and 10.*ckpt_00000005.pt"):
        run(data, "run", "--max_steps=30", "--init_from=resume", "--lr=1e9", "--weight_decay=1e9")
    assert checkpoint_paths("run") == ["run/ckpt_00000010.pt", "run/ckpt_00000005.pt"]


def test_a_complete_run_says_so_and_evaluates_again(data, out):
    metrics = Path(out, "metrics.jsonl")
    before = metrics.read_text()
    metrics.write_text(before[:before.rindex('{"step"')])  # killed before its last evaluation
    assert "training from step 40 to 40" in run(data, out, *WHOLE, "--init_from=resume")
    assert metrics.read_text() == before
    assert "is complete at step 40" in run(data, out, *WHOLE, "--init_from=auto")
    deeper = run(data, out, *WHOLE, "--init_from=resume", "--eval_only", "--eval_halt_max_steps=9",
                 "--eval_save_outputs=inputs,preds,q_halt_logits")
    assert "steps 9.0000" in deeper and metrics.read_text() == before
    saved = np.load(f"{out}/eval_00000040.npz")
    shapes = {name: saved[name].shape for name in saved.files}
    assert shapes == dict(indices=(40,), inputs=(40, 16), preds=(40, 16), q_halt_logits=(40,))


def test_an_export_has_the_official_names_and_loads_back(data, finished):
    """test_solve.py exports an official file."""
    export.main([finished[0], "model.pt"])
    official = torch.load("model.pt", weights_only=True)["weights"]
    average = {"_orig_mod.model.inner." + name: t for name, t in newest(finished[0])["ema"].items()}
    assert same(official, average)

    # it scores the same, without a batch of training puzzles; out_dir cannot be made, which is a warning
    torch.save(official, "official.pt")
    text = run(data, "official.pt/x", "--init_from=official.pt", "--eval_only", "--epochs=0")
    values = {name: value for name, value in lines(finished[0])[-1].items() if name.startswith("eval/")}
    assert f"step 0 | evaluation: {listed(values)}\n" in text

    # training can start from a file, at step 0, and evaluates it first; a run that was killed does so again
    begin = "--init_from=model.pt", "--max_steps=5", "--eval_interval=9"
    run(data, "tuned", *begin)
    assert curve("tuned")[5] < curve(finished[0])[5]
    assert curve("tuned", "eval/loss")[0] == values["eval/loss"]
    remove("tuned", "ckpt_*")
    run(data, "tuned", *begin)
    assert [line["step"] for line in lines("tuned") if "eval/loss" in line] == [0, 5]


def test_frozen_weights_are_the_average_and_stay_as_they_are(data, finished):
    average = newest(finished[0])["ema"]
    run(data, "run", f"--init_from={checkpoint_paths(finished[0])[0]}", "--freeze_weights", "--max_steps=2")
    tuned = newest("run")
    for name in average.keys() - {"puzzle_emb.weights"}:
        torch.testing.assert_close(tuned["ema"][name], average[name])
        assert torch.equal(tuned["weights"][name], average[name])
    assert not torch.equal(tuned["ema"]["puzzle_emb.weights"], average["puzzle_emb.weights"])


def test_an_export_needs_a_checkpoint_alone(finished):
    export.main([f"{finished[0]}/best.pt", "best.pt"])
    best = torch.load("best.pt", weights_only=True)
    assert best["step"] == 16 and "--lr=0.002" in best["command"] and "init_from" not in best["command"]
    with pytest.raises(UserError, match="best.pt: must be a new file in a folder that exists"):
        export.main([finished[0], "best.pt"])


def test_lines_of_progress_need_no_terminal(monkeypatch):
    """Ctrl-C ends `train.py 2>&1 | tee`, too: a stop in an evaluation must still save."""
    stderr = mock.Mock(write=mock.Mock(side_effect=BrokenPipeError))
    monkeypatch.setattr(sys, "stderr", stderr)
    to_stderr("1 of 2")
    assert stderr.write.called


def test_evaluation_does_not_change_training(data, finished):
    run(data, "run", *WHOLE, "--eval_interval=0")
    assert same(last_weights("run"), last_weights(finished[0]))


def test_torch_compile_trains_the_same_curve_on_the_cpu(data, monkeypatch):
    """Each step is captured whole, as device=cuda needs it. Inductor's C++ would take a minute to build."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, fullgraph=True, backend="aot_eager"))
    flags = ["--max_steps=10", "--eval_final_max_puzzles=16", "--mlp_t=False", "--pos_encodings=rope",
             "--halt_max_steps=2"]
    for name in ("on", "off"):
        run(data, name, *flags, f"--compile={name}")
    for key in ("train/loss", "eval/loss"):
        assert curve("on", key) == pytest.approx(curve("off", key), rel=1e-3)
