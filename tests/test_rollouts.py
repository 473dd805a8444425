"""The surest answer of an evaluation, and its noisy attempts."""
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
import configurator  # noqa: E402
import train  # noqa: E402
from model import TRM, TRMConfig, normal_noise  # noqa: E402

SETTINGS = ["--hidden_size=32", "--puzzle_emb_ndim=0", "--L_layers=1", "--H_cycles=1", "--L_cycles=1",
            "--forward_dtype=float32", "--eval_halt_max_steps=5", "--global_batch_size=16", "--ema=False"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("data") / "sudoku-4x4")
    subprocess.run([sys.executable, os.path.join(ROOT, "prepare_sudoku.py"), "--source=generate", "--size=4",
                    "--num_train=64", "--num_test=40", "--num_aug=5", f"--output_dir={path}"],
                   check=True, capture_output=True)
    return path


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
    path = os.path.join(out, "test_outputs.npz")
    return train.evaluate(run, test, test.subset(0), "", path), np.load(path)


def new_run(data, out, *flags):
    c, test = configured(data, out, "--init_from=resume", *flags), train.Dataset(data, "test")
    model = TRM(TRMConfig.of(c, seq_len=test.seq_len, vocab_size=test.vocab_size))
    train.load_weights(model, train.newest_checkpoint(out, print)["weights"], out)
    return train.Run(model, c, train.open_device("cpu", c)), test


def test_noise_is_normal_and_depends_on_key_step_and_place():
    keys = torch.tensor([1, 2, 3, 2 ** 31 - 1] * 8, dtype=torch.int32)
    steps = torch.arange(8, dtype=torch.int32).repeat_interleave(4)
    noise = normal_noise(keys, steps, (50, 40)).view(32, -1)
    assert noise.dtype == torch.float32
    moments = [noise.mean(), noise.std() - 1, (noise ** 3).mean(), (noise ** 4).mean() - 3]
    assert torch.tensor(moments).abs().max() < 0.1, moments
    correlation = torch.corrcoef(noise) - torch.eye(32)
    assert correlation.abs().max() < 5 / 2000 ** 0.5
    assert abs((noise[:, 1:] * noise[:, :-1]).mean()) < 5 / noise.numel() ** 0.5
    again = normal_noise(keys[:5], steps[:5], (50, 40)).view(5, -1)
    assert torch.equal(again, noise[:5])


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


def test_the_surest_answer_is_that_of_the_step_with_the_highest_q_halt(data, trained):
    run, test = new_run(data, trained)
    state = run.new_evaluation()
    for indices in (np.arange(16), np.arange(16, 32)):  # a second batch starts anew
        inputs = run.eval_inputs(test.test_batch(indices, 16))
        steps = [run.eval_program(state, inputs) for _ in range(run.eval_depth)]
        q_halt = torch.stack([rows["q_halt_logits"] for rows in steps])
        best = q_halt.shape[0] - 1 - q_halt.flip(0).argmax(0)  # of equals the last
        assert len(set(best.tolist())) > 1
        preds = torch.stack([rows["preds"] for rows in steps])[best, torch.arange(16)]
        assert torch.equal(steps[-1]["surest_preds"], preds)
        assert torch.equal(steps[-1]["surest_q_halt_logits"], q_halt.max(0).values)


def test_attempts_leave_the_papers_metrics_and_add_theirs(data, trained):
    one, saved_one = evaluated(data, trained)
    four, saved = evaluated(data, trained, "--eval_rollouts=5", "--eval_noise=0.7")
    assert 0.1 < one["eval/exact_accuracy"] < 0.95
    assert one == {name: four[name] for name in one} | {"eval/surest_accuracy": one["eval/surest_accuracy"]}
    assert np.array_equal(saved["preds"], saved_one["preds"])
    solved = (saved["surest_preds"] == saved["labels"]).all(1).mean()
    assert four["eval/surest_accuracy"] == pytest.approx(solved)
    assert four["eval/surest_of_5"] == four["eval/surest_accuracy"]
    assert four["eval/surest_of_1"] == one["eval/surest_accuracy"] == four["eval/any_of_1"]
    best = [four[f"eval/any_of_{n}"] for n in (1, 2, 4, 5)]
    assert best == sorted(best) and best[-1] > best[0]
    assert (saved["surest_q_halt_logits"] >= saved_one["surest_q_halt_logits"]).all()
    assert (saved["surest_q_halt_logits"] > saved_one["surest_q_halt_logits"]).mean() > 0.5
    silent, saved = evaluated(data, trained, "--eval_rollouts=2", "--eval_noise=0")
    assert np.array_equal(saved["surest_preds"], saved_one["surest_preds"])
    assert silent["eval/any_of_2"] == silent["eval/surest_of_1"]
    other, _ = evaluated(data, trained, "--eval_rollouts=5", "--eval_noise=0.7", "--seed=1")
    again, _ = evaluated(data, trained, "--eval_rollouts=5", "--eval_noise=0.7")
    assert again == four != other


def test_the_answers_do_not_depend_on_the_batch(data, trained):
    _, saved = evaluated(data, trained, "--eval_rollouts=2")
    _, small = evaluated(data, trained, "--eval_rollouts=2", "--global_batch_size=12", "--micro_batch_size=4")
    assert np.allclose(saved["surest_q_halt_logits"], small["surest_q_halt_logits"], rtol=1e-3, atol=1e-3)
    assert (saved["surest_preds"] == small["surest_preds"]).mean() > 0.99


def left_early(test, run, patience, attempt=0):
    """(answers, steps) of each test puzzle where its answer stayed the same for `patience` steps."""
    state, answers, left_at = run.new_evaluation(), [], []
    for first in range(0, 40, 8):
        rows = np.arange(first, first + 8)
        inputs = run.eval_inputs(test.test_batch(rows, 16), test.noise_keys(0, rows, attempt, 16))
        steps = [run.eval_program(state, inputs)["preds"].numpy().copy() for _ in range(run.eval_depth)]
        for puzzle in range(8):
            repeats = 0
            for step in range(run.eval_depth):
                same = step and (steps[step][puzzle] == steps[step - 1][puzzle]).all()
                repeats = repeats + 1 if same else 0
                if repeats == patience:
                    break
            answers.append(steps[step][puzzle])
            left_at.append(step + 1)
    return np.stack(answers), np.array(left_at)


@pytest.mark.parametrize("patience", [1, 2])
@pytest.mark.parametrize("flags", [[], ["--micro_batch_size=4"], ["--global_batch_size=8"]], ids=str)
def test_puzzles_whose_answer_stays_the_same_leave_early(data, trained, monkeypatch, patience, flags):
    """Each answer is that of the step where it was repeated, though its place took other puzzles before."""
    run, test = new_run(data, trained, "--eval_halt_max_steps=6")
    answers, left_at = left_early(test, run, patience)
    assert len(set(left_at)) > 2 and left_at.min() == patience + 1 and (left_at == 6).any()
    monkeypatch.setattr(train, "EVAL_BATCHES", 2)  # more than one chunk of 40 puzzles
    values, saved = evaluated(data, trained, "--eval_halt_max_steps=6", f"--eval_patience={patience}", *flags)
    assert (saved["preds"] != answers).any(1).sum() <= 1  # rounding depends on the batch
    assert values["eval/steps"] == pytest.approx(left_at.mean(), abs=0.1) and values["eval/puzzles"] == 40
    assert values["eval/exact_accuracy"] == pytest.approx((saved["preds"] == saved["labels"]).all(1).mean())
    full, _ = evaluated(data, trained, "--eval_halt_max_steps=6")
    assert set(full) == set(values) and full["eval/steps"] == 6


def test_nobody_leaves_with_more_patience_than_steps(data, trained):
    full, saved_full = evaluated(data, trained)
    patient, saved = evaluated(data, trained, "--eval_patience=5")
    assert patient == full
    assert all(np.array_equal(saved[name], saved_full[name]) for name in saved)


def test_attempts_with_noise_leave_early_too(data, trained):
    flags = "--eval_rollouts=3", "--eval_noise=0.7", "--eval_halt_max_steps=9"
    run, test = new_run(data, trained, *flags)
    want = [left_early(test, run, 1, attempt)[0] for attempt in range(3)]
    run, test = new_run(data, trained, *flags, "--eval_patience=1")
    attempts = train.solve_batch(run, test, np.arange(40), run.new_evaluation(), train.Progress("", 0))
    for attempt, answers in zip(attempts, want):
        assert (attempt["preds"] != answers).any(1).sum() <= 1
    assert (want[1] != want[0]).any() and (want[1] != want[2]).any()


def test_no_puzzles_and_a_stop(data, trained, monkeypatch):
    run, test = new_run(data, trained, "--eval_patience=1")
    state, progress = run.new_evaluation(), train.Progress("", 0)
    (arrays,) = train.solve_batch(run, test, np.arange(0), state, progress)
    assert arrays["preds"].shape == (0, 16) and state["totals"].abs().max() == 0
    monkeypatch.setattr(train, "stop_requested", lambda: True)
    assert train.solve_batch(run, test, np.arange(40), state, progress) == []


def test_the_puzzle_shown_keeps_the_answer_with_which_it_left(data, trained, monkeypatch):
    shown = []
    monkeypatch.setattr(train, "side_by_side", lambda grids, *_: shown.append(grids) or "")
    run, test = new_run(data, trained, "--eval_halt_max_steps=9", "--eval_patience=1")
    train.show_puzzle(run, test)
    question, *answers = [(title.split(":")[0], np.array(cells)) for title, cells, _ in shown[0]]
    puzzle = [i for i, row in enumerate(test.test_batch(np.arange(40), 40)["inputs"])
              if np.array_equal(row, question[1])]
    want, left_at = left_early(test, new_run(data, trained, "--eval_halt_max_steps=9")[0], 1)
    late = [cells for title, cells in answers if int(title.split()[1]) >= left_at[puzzle[0]]]
    assert late and all(np.array_equal(cells, want[puzzle[0]]) for cells in late)


def test_surest_and_majority_of_attempts():
    q_halt = np.array([[1.0, 5.0, 0.0], [3.0, 2.0, 0.0], [2.0, 1.0, -1.0]])
    preds = np.array([[[7], [7], [1]], [[8], [8], [2]], [[7], [8], [3]]])
    attempts = [dict(surest_preds=p, surest_q_halt_logits=q) for p, q in zip(preds, q_halt)]
    surest = train.surest_of(attempts)
    assert surest["surest_preds"].tolist() == [[8], [7], [1]]  # of equals the first
    assert surest["surest_q_halt_logits"].tolist() == [3.0, 5.0, 0.0]
    assert train.majority_of(attempts).tolist() == [[7], [8], [1]]


@pytest.mark.parametrize("metric", ["exact_accuracy", "surest_accuracy"])
def test_best_metric_chooses_best_pt(data, tmp_path, monkeypatch, metric):
    """Evaluations with made-up numbers: exact_accuracy is best at step 8, surest_accuracy at step 12."""
    made_up = iter([(0.1, 0.1), (0.5, 0.5), (0.4, 0.6), (0.1, 0.1), (0.0, 0.0)])

    def evaluate(run, *_):
        exact, surest = next(made_up)
        return dict.fromkeys(("eval/accuracy", "eval/loss", "eval/steps"), 0.0) | {
            "eval/puzzles": 40, "eval/exact_accuracy": exact, "eval/surest_accuracy": surest}

    monkeypatch.setattr(train, "evaluate", evaluate)
    c = configured(data, tmp_path, f"--best_metric={metric}", "--max_steps=20", "--eval_interval=1",
                   "--lr_warmup_steps=1")
    train.replica(c, "cpu")
    with open(tmp_path / "best.json") as f:
        best = json.load(f)
    assert best["step"] == {"exact_accuracy": 8, "surest_accuracy": 12}[metric]
    assert train.best_accuracy(c) == {"exact_accuracy": 0.5, "surest_accuracy": 0.6}[metric]
