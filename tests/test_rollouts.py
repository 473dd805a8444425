"""evaluate.py: slots that are filled again, noisy attempts, and what is saved and shown.

test_solve.py compares the most confident answers with those of TRM.solve and solve.py.
"""

import numpy as np
import pytest
import torch
from helpers import arguments, run

import configurator
import evaluate
import train
from checkpoint import load_weights, newest_whole, read_checkpoint
from data import Dataset
from device import open_device
from evaluate import Evaluator, noise_keys, normal_noise, weights_of

SETTINGS = ["--puzzle_emb_ndim=0", "--multiple_of=256", "--H_cycles=1", "--L_cycles=1", "--ema=False",
            "--eval_halt_max_steps=6"]
NOISY = ["--eval_rollouts=5", "--eval_noise=0.7"]
N = 40  # test puzzles


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """The folder of a run that solves some puzzles and not others."""
    out = str(tmp_path_factory.mktemp("trained") / "run")
    run(data, out, *SETTINGS, "--max_steps=120", "--lr=1e-2", "--halt_max_steps=2", "--weight_decay=0.1")
    return out


def new_evaluator(data, trained, *flags):
    """Returns an Evaluator with the run's last weights, and the test puzzles."""
    settings = configurator.configure(train.__file__, arguments(data, trained, *SETTINGS, *flags))
    test = Dataset(data, "test")
    model = train.new_model(settings, **{name: getattr(test, name) for name in train.SIZES})
    load_weights(model, read_checkpoint(newest_whole(trained))["weights"], trained)
    return Evaluator(settings, model, open_device("cpu", settings), settings.global_batch_size), test


def evaluated(data, trained, *flags):
    """Returns (metrics, saved arrays) of all test puzzles."""
    names = "labels,preds,q_halt_logits,surest_preds,surest_q_halt_logits"
    evaluator, test = new_evaluator(data, trained, f"--eval_save_outputs={names}", *flags)
    path = f"{trained}/test_outputs"
    values = evaluate.evaluate(
        evaluator, *weights_of(evaluator.model), test, np.arange(N), "", lambda: False, path)
    return values, dict(np.load(path + ".npz"))


def left_early(data, trained, patience):
    """Returns (answers, steps) of each puzzle once its answer stayed the same for `patience` steps."""
    evaluator, test = new_evaluator(data, trained, f"--global_batch_size={N}")
    batch = test.test_batch(np.arange(N)) | dict(noise_keys=noise_keys(0, 1, N)[0])
    steps = evaluator.watch(*weights_of(evaluator.model), batch)
    preds = np.stack([step["preds"] for step in steps])  # [steps, N, cells]
    is_same = (preds[1:] == preds[:-1]).all(2)
    leaves = np.lib.stride_tricks.sliding_window_view(is_same, patience, axis=0).all(2)
    leaves[-1] = True
    left_at = leaves.argmax(0) + patience
    return preds[left_at, np.arange(N)], left_at + 1


def test_noise_is_normal_and_depends_on_key_step_and_position():
    noise = normal_noise(torch.arange(100, dtype=torch.int32), torch.full((100,), 7), (20, 5))
    assert noise.mean().abs() < 0.03 and abs(noise.std() - 1) < 0.03 and noise.unique().numel() > 9000
    # the published results drew these numbers
    assert noise[3].flatten()[:3].tolist() == pytest.approx([0.34768, -0.07799, 0.17634], abs=1e-5)


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
    assert evaluated(data, trained, *NOISY)[0] == five != evaluated(data, trained, *NOISY, "--seed=1")[0]


@pytest.mark.parametrize("patience, flags", [(1, ["--micro_batch_size=4"]), (2, ["--global_batch_size=64"])])
def test_puzzles_whose_answer_stays_the_same_leave_early(data, trained, patience, flags):
    """Each keeps the answer with which it left, though its slot took other puzzles before and after."""
    answers, left_at = left_early(data, trained, patience)
    assert len(set(left_at)) > 2 and left_at.min() == patience + 1 and (left_at == 6).any()
    values, saved = evaluated(data, trained, f"--eval_patience={patience}", *flags)
    assert (saved["preds"] != answers).any(1).sum() <= 1  # rounding depends on the batch
    assert values["eval/steps"] == pytest.approx(left_at.mean(), abs=0.1) and values["eval/puzzles"] == N
    assert values["eval/exact_accuracy"] == pytest.approx((saved["preds"] == saved["labels"]).all(1).mean())


@pytest.mark.parametrize("size", [["--global_batch_size=12", "--micro_batch_size=4"],
                                  ["--global_batch_size=7"]], ids=str)
def test_the_answers_do_not_depend_on_the_batch(data, trained, size):
    values, saved = evaluated(data, trained, "--eval_rollouts=2", "--eval_patience=6")  # nobody leaves early
    for flags in ["--eval_patience=0"], ["--eval_patience=6"]:
        other, other_saved = evaluated(data, trained, "--eval_rollouts=2", *flags, *size)
        logits = other_saved["surest_q_halt_logits"]
        assert np.allclose(saved["surest_q_halt_logits"], logits, rtol=1e-3, atol=1e-3)
        assert (saved["surest_preds"] == other_saved["surest_preds"]).mean() > 0.99
        assert other["eval/puzzles"] == N and other == pytest.approx(values, abs=0.03)
