"""evaluate.py: slots that are filled again, noisy attempts, and what is saved and shown.

test_solve.py compares the most confident answers with those of TRM.solve and solve.py.
"""
import json
import os

import numpy as np
import pytest
import torch

import configurator
import evaluate
import train
from checkpoint import load_weights, newest_whole, read_checkpoint
from data import Dataset
from device import open_device
from evaluate import Evaluator, noise_keys, normal_noise, weights_of

SETTINGS = ["--hidden_size=32", "--puzzle_emb_ndim=0", "--L_layers=1", "--H_cycles=1", "--L_cycles=1",
            "--forward_dtype=float32", "--eval_halt_max_steps=6", "--global_batch_size=16", "--ema=False"]
NOISY = ["--eval_rollouts=5", "--eval_noise=0.7"]
N = 40  # test puzzles


def configured(data, out, *flags):
    paths = [f"--data_path={data}", f"--out_dir={out}", "--device=cpu"]
    settings = configurator.configure(train.__file__, [*paths, *SETTINGS, *flags])
    train.check_settings(settings)
    return settings


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """The folder of a run that solves some puzzles and not others."""
    out = str(tmp_path_factory.mktemp("trained") / "run")
    train.replica(configured(data, out, "--max_steps=120", "--lr=1e-2", "--lr_warmup_steps=5",
                             "--halt_max_steps=2", "--eval_interval=0", "--weight_decay=0.1"), "cpu")
    return out


def new_evaluator(data, trained, *flags):
    settings = configured(data, trained, *flags)
    test = Dataset(data, "test")
    model = train.new_model(settings, **{name: getattr(test, name) for name in train.SIZES})
    load_weights(model, read_checkpoint(newest_whole(trained))["weights"], trained)
    return Evaluator(settings, model, open_device("cpu", settings), settings.global_batch_size), test


def evaluated(data, trained, *flags, indices=None, should_stop=lambda: False):
    """Returns (metrics, saved arrays) of test puzzles with the run's last weights."""
    names = "labels,preds,q_halt_logits,surest_preds,surest_q_halt_logits"
    evaluator, test = new_evaluator(data, trained, f"--eval_save_outputs={names}", *flags)
    indices = np.arange(N) if indices is None else indices
    path = os.path.join(trained, "test_outputs")
    values = evaluate.evaluate(
        evaluator, *weights_of(evaluator.model), test, indices, "", should_stop, path)
    return values, dict(np.load(path + ".npz")) if values else {}


def left_early(data, trained, patience, attempt, *flags):
    """Returns (answers, steps) of each puzzle once its answer stayed the same for `patience` steps."""
    evaluator, test = new_evaluator(data, trained, *flags, f"--global_batch_size={N}")
    keys = noise_keys(0, evaluator.settings.eval_rollouts, N)[attempt]
    steps = list(evaluator.watch(*weights_of(evaluator.model), test.test_batch(np.arange(N), N), keys))
    answers = []
    left_at = []
    for puzzle in range(N):
        repeats = step = 0
        while repeats < patience and step < len(steps) - 1:
            step += 1
            is_same = (steps[step]["preds"][puzzle] == steps[step - 1]["preds"][puzzle]).all()
            repeats = repeats + 1 if is_same else 0
        answers.append(steps[step]["preds"][puzzle])
        left_at.append(step + 1)
    return np.stack(answers), np.array(left_at)


def test_noise_is_normal_and_depends_on_key_step_and_position_alone():
    noise = normal_noise(torch.arange(1, 101, dtype=torch.int32), torch.full((100,), 7), (20, 5))
    assert noise.mean().abs() < 0.03 and abs(noise.std() - 1) < 0.03 and noise.unique().numel() > 9000
    alone = normal_noise(torch.tensor([3, 3], dtype=torch.int32), torch.tensor([7, 8]), (2, 3))
    assert torch.equal(alone[0].flatten(), noise[2].flatten()[:6]) and (alone[0] != alone[1]).all()
    # the published results drew these numbers
    assert alone.flatten()[:3].tolist() == pytest.approx([0.34768, -0.07799, 0.17634], abs=1e-5)


def test_attempts_leave_the_papers_metrics_and_add_theirs(data, trained):
    one, saved_one = evaluated(data, trained)
    five, saved = evaluated(data, trained, *NOISY)
    assert 0.1 < one["eval/exact_accuracy"] < 0.95
    changed = {name: five[name] for name in ("eval/surest_accuracy", "eval/any_accuracy")}
    assert five == pytest.approx(one | changed) and "eval/any_accuracy" not in one
    assert np.array_equal(saved["preds"], saved_one["preds"])
    solved = (saved["surest_preds"] == saved["labels"]).all(1).mean()
    assert five["eval/surest_accuracy"] == pytest.approx(solved)
    assert five["eval/any_accuracy"] > max(one["eval/surest_accuracy"], five["eval/surest_accuracy"])
    surer = saved["surest_q_halt_logits"] - saved_one["surest_q_halt_logits"]
    assert (surer >= 0).all() and (surer > 0).mean() > 0.5
    assert evaluated(data, trained, *NOISY)[0] == five != evaluated(data, trained, *NOISY, "--seed=1")[0]


@pytest.mark.parametrize("patience, flags", [(1, []), (2, ["--micro_batch_size=4"]), (
    2, ["--global_batch_size=64"])], ids=str)
def test_puzzles_whose_answer_stays_the_same_leave_early(data, trained, patience, flags):
    """Each keeps the answer with which it left, though its slot took other puzzles before and after."""
    answers, left_at = left_early(data, trained, patience, 0)
    assert len(set(left_at)) > 2 and left_at.min() == patience + 1 and (left_at == 6).any()
    values, saved = evaluated(data, trained, f"--eval_patience={patience}", *flags)
    assert (saved["preds"] != answers).any(1).sum() <= 1  # rounding depends on the batch
    assert values["eval/steps"] == pytest.approx(left_at.mean(), abs=0.1) and values["eval/puzzles"] == N
    assert values["eval/exact_accuracy"] == pytest.approx((saved["preds"] == saved["labels"]).all(1).mean())
    full, _ = evaluated(data, trained)
    assert set(full) == set(values) and full["eval/steps"] == 6


@pytest.mark.parametrize("size", [["--global_batch_size=12", "--micro_batch_size=4"],
                                  ["--global_batch_size=7"], ["--global_batch_size=256"]], ids=str)
def test_the_answers_do_not_depend_on_the_batch(data, trained, size):
    values, saved = evaluated(data, trained, "--eval_rollouts=2", "--eval_patience=6")  # nobody leaves early
    for flags in ["--eval_patience=0"], ["--eval_patience=6"]:
        other, other_saved = evaluated(data, trained, "--eval_rollouts=2", *flags, *size)
        logits = other_saved["surest_q_halt_logits"]
        assert np.allclose(saved["surest_q_halt_logits"], logits, rtol=1e-3, atol=1e-3)
        assert (saved["surest_preds"] == other_saved["surest_preds"]).mean() > 0.99
        assert other["eval/puzzles"] == N and other == pytest.approx(values, abs=0.03)


def test_best_pt_is_the_first_with_the_highest_exact_accuracy(data, tmp_path, monkeypatch):
    made_up = iter([0.1, 0.5, 0.4, 0.5, 0.9])  # the last is the final evaluation
    monkeypatch.setattr(evaluate, "evaluate", lambda *_: {
        "eval/exact_accuracy": next(made_up), "eval/loss": 0.0, "eval/puzzles": N})
    train.replica(configured(data, tmp_path, "--max_steps=20", "--eval_interval=1"), "cpu")
    best = json.loads((tmp_path / "best.json").read_text())
    assert best["step"] == 8 and best["metrics"]["eval/exact_accuracy"] == 0.5
