"""Evaluation: slots that are filled again, noisy attempts, and what is saved and shown.

test_solve.py compares the surest answers with those of model.py and solve.py.
"""
import json
import os

import configurator
import numpy as np
import pytest
import torch
from test_train import data

import train
from model import normal_noise

SETTINGS = ["--hidden_size=32", "--puzzle_emb_ndim=0", "--L_layers=1", "--H_cycles=1", "--L_cycles=1",
            "--forward_dtype=float32", "--eval_halt_max_steps=5", "--global_batch_size=16", "--ema=False"]


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """The folder of a run that solves some puzzles and not others."""
    out = str(tmp_path_factory.mktemp("trained") / "run")
    c = configured(data, out, "--max_steps=120", "--lr=1e-2", "--lr_warmup_steps=5", "--halt_max_steps=2",
                   "--eval_interval=0", "--weight_decay=0.1")
    train.replica(c, "cpu")
    return out


def configured(data, out, *flags):
    c = configurator.configure(train.__file__, [f"--data_path={data}", f"--out_dir={out}", "--device=cpu",
                                                *SETTINGS, *flags])
    train.check_settings(c)
    return c


def evaluated(data, out, *flags):
    """(metrics, saved arrays) of all test puzzles with the run's last weights."""
    names = "labels,preds,q_halt_logits,surest_preds,surest_q_halt_logits"
    run, test = new_run(data, out, f"--eval_save_outputs={names}", *flags)
    path = os.path.join(out, "test_outputs")
    return train.evaluate(run, test, test.subset(0), "", path), np.load(path + ".npz")


def new_run(data, out, *flags):
    c, test = configured(data, out, "--init_from=resume", *flags), train.Dataset(data, "test")
    model = train.new_model(c, seq_len=test.seq_len, vocab_size=test.vocab_size)
    train.load_weights(model, train.newest_checkpoint(out, print)["weights"], out)
    return train.Run(model, c, train.open_device("cpu", c)), test


def test_noise_is_that_of_an_independent_implementation():
    def mix(x):  # Python's integers, cut to 31 bits
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = ((x ^ x >> shift) * factor) % 2 ** 31
        return x ^ x >> 16

    keys = [1, 5, 123456789, 2 ** 31 - 1]
    noise = normal_noise(torch.tensor(keys, dtype=torch.int32), torch.tensor([1, 2, 7, 64]), (2, 3))
    for key, step, row in zip(keys, (1, 2, 7, 64), noise.flatten(1).tolist()):
        for place, value in enumerate(row):
            x = mix((mix((mix(key) + step) % 2 ** 31) + place) % 2 ** 31)
            radius = np.sqrt(-2 * np.log(((x >> 15) + 0.5) / 2 ** 16))
            assert value == pytest.approx(radius * np.cos(2 * np.pi * (x % 2 ** 15) / 2 ** 15), abs=1e-5)


def test_attempts_leave_the_papers_metrics_and_add_theirs(data, trained, monkeypatch):
    monkeypatch.setattr(train.glob, "glob", lambda _: ["gone.npz"])  # a host that shares the folder was first
    noisy = ["--eval_rollouts=5", "--eval_noise=0.7"]
    one, saved_one = evaluated(data, trained)
    five, saved = evaluated(data, trained, *noisy)
    assert 0.1 < one["eval/exact_accuracy"] < 0.95
    changed = {name: five[name] for name in ("eval/surest_accuracy", "eval/any_accuracy")}
    assert five == pytest.approx(one | changed) and "eval/any_accuracy" not in one
    assert np.array_equal(saved["preds"], saved_one["preds"])
    solved = (saved["surest_preds"] == saved["labels"]).all(1).mean()
    assert five["eval/surest_accuracy"] == pytest.approx(solved)
    assert five["eval/any_accuracy"] > max(one["eval/surest_accuracy"], five["eval/surest_accuracy"])
    surer = saved["surest_q_halt_logits"] - saved_one["surest_q_halt_logits"]
    assert (surer >= 0).all() and (surer > 0).mean() > 0.5
    silent, saved = evaluated(data, trained, "--eval_rollouts=2", "--eval_noise=0")
    assert np.array_equal(saved["surest_preds"], saved_one["surest_preds"])
    assert silent["eval/any_accuracy"] == one["eval/surest_accuracy"]
    assert evaluated(data, trained, *noisy)[0] == five != evaluated(data, trained, *noisy, "--seed=1")[0]


def left_early(test, run, patience, attempt=0):
    """(answers, steps) of each test puzzle where its answer stayed the same for `patience` steps."""
    state, answers, left_at = run.new_evaluation(), [], []
    for first in range(0, 40, 8):
        rows = np.arange(first, first + 8)
        keys = np.resize(test.noise_keys(0, rows, attempt), 16)
        inputs = run.eval_inputs(test.test_batch(rows, 16), keys)
        steps = [run.eval_program(state, inputs)["preds"].numpy().copy() for _ in range(run.eval_depth)]
        for puzzle in range(8):
            repeats = step = 0
            while repeats < patience and step < run.eval_depth - 1:
                step += 1
                same = (steps[step][puzzle] == steps[step - 1][puzzle]).all()
                repeats = repeats + 1 if same else 0
            answers.append(steps[step][puzzle])
            left_at.append(step + 1)
    return np.stack(answers), np.array(left_at)


@pytest.mark.parametrize("patience, flags", [(1, []), (2, ["--micro_batch_size=4"]), (
    1, ["--global_batch_size=8"]), (2, ["--global_batch_size=64"])], ids=str)
def test_puzzles_whose_answer_stays_the_same_leave_early(data, trained, patience, flags):
    """Each answer is that of the step where it was repeated, though its slot took other puzzles before."""
    run, test = new_run(data, trained, "--eval_halt_max_steps=6")
    answers, left_at = left_early(test, run, patience)
    assert len(set(left_at)) > 2 and left_at.min() == patience + 1 and (left_at == 6).any()
    values, saved = evaluated(data, trained, "--eval_halt_max_steps=6", f"--eval_patience={patience}", *flags)
    assert (saved["preds"] != answers).any(1).sum() <= 1  # rounding depends on the batch
    assert values["eval/steps"] == pytest.approx(left_at.mean(), abs=0.1) and values["eval/puzzles"] == 40
    assert values["eval/exact_accuracy"] == pytest.approx((saved["preds"] == saved["labels"]).all(1).mean())
    full, _ = evaluated(data, trained, "--eval_halt_max_steps=6")
    assert set(full) == set(values) and full["eval/steps"] == 6


@pytest.mark.parametrize("size", [["--global_batch_size=12", "--micro_batch_size=4"],
                                  ["--global_batch_size=7"], ["--global_batch_size=256"]], ids=str)
def test_the_answers_do_not_depend_on_the_batch(data, trained, size):
    for flags in (["--eval_rollouts=2"], ["--eval_rollouts=2", "--eval_patience=5"]):  # nobody leaves early
        want, saved = evaluated(data, trained, *flags)
        got, other = evaluated(data, trained, *flags, *size)
        assert np.allclose(saved["surest_q_halt_logits"], other["surest_q_halt_logits"], rtol=1e-3, atol=1e-3)
        assert (saved["surest_preds"] == other["surest_preds"]).mean() > 0.99
        assert got["eval/puzzles"] == 40 and got == pytest.approx(want, abs=0.03)  # padding is not counted
    full, saved_full = evaluated(data, trained, "--eval_rollouts=2")
    assert want == pytest.approx(full) and np.array_equal(saved["preds"], saved_full["preds"])


def test_attempts_with_noise_leave_early_too(data, trained):
    flags = "--eval_rollouts=3", "--eval_noise=0.7", "--eval_halt_max_steps=9"
    run, test = new_run(data, trained, *flags)
    want = [left_early(test, run, 1, attempt)[0] for attempt in range(3)]
    flags += "--eval_patience=1",
    solver = train.Solver(*new_run(data, trained, *flags), np.arange(40))
    while solver.left():
        solver.step()
    for attempt, answers in zip(solver.answers["preds"], want):
        assert (attempt != answers).any(1).sum() <= 1
    assert (want[1] != want[0]).any() and (want[1] != want[2]).any()
    _, saved = evaluated(data, trained, *flags)
    q_halt, preds = (solver.answers["surest_" + name] for name in ("q_halt_logits", "preds"))
    assert np.array_equal(saved["surest_q_halt_logits"], q_halt.max(0))
    surest = q_halt.argmax(0)  # of equals the first
    assert len(set(surest)) == 3 and np.array_equal(saved["surest_preds"], preds[surest, np.arange(40)])


def test_a_stop_no_puzzles_and_puzzles_without_labels(data, trained, monkeypatch):
    run, test = new_run(data, trained, "--eval_patience=1")
    assert train.evaluate(run, test, np.arange(0), "")["eval/puzzles"] == 0
    test.labels = test.labels.copy()
    test.labels[:7] = test.ignore_label_id
    assert train.evaluate(run, test, test.subset(0), "")["eval/puzzles"] == 33
    calls = iter(range(1000))
    for stop_requested in (lambda: True, lambda: next(calls) > 6):  # the latter after some have left
        monkeypatch.setattr(train, "stop_requested", stop_requested)
        assert train.evaluate(run, test, test.subset(0), "") == {}


def test_the_puzzle_shown_keeps_the_answer_with_which_it_left(data, trained, monkeypatch):
    run, test = new_run(data, trained, "--eval_halt_max_steps=9", "--eval_patience=1")
    shown = []
    monkeypatch.setattr(train.puzzles, "side_by_side", lambda grids, *_: shown.extend(grids) or "")
    train.show_puzzle(run, test)
    (_, question, _), *answers = shown
    puzzle, = np.flatnonzero((test.test_batch(np.arange(40), 40)["inputs"] == question).all(axis=1))
    want, left_at = left_early(test, new_run(data, trained, "--eval_halt_max_steps=9")[0], 1)
    late = [cells for title, cells, _ in answers if int(title.split(":")[0][5:]) >= left_at[puzzle]]
    assert late and (np.stack(late) == want[puzzle]).all()


def test_best_pt_is_that_of_the_highest_exact_accuracy(data, tmp_path, monkeypatch):
    made_up = iter([0.1, 0.5, 0.4, 0.5, 0.9])  # of equals the first; the last is the final evaluation

    def evaluate(*_):
        zeros = dict.fromkeys(("eval/accuracy", "eval/loss", "eval/steps", "eval/surest_accuracy"), 0.0)
        return zeros | {"eval/puzzles": 40, "eval/exact_accuracy": next(made_up)}

    monkeypatch.setattr(train, "evaluate", evaluate)
    train.replica(configured(data, tmp_path, "--max_steps=20", "--eval_interval=1"), "cpu")
    best = json.load(open(tmp_path / "best.json"))
    assert best["step"] == 8 and best["metrics"]["eval/exact_accuracy"] == 0.5
