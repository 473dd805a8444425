"""examples/houses.py: exact under the symmetries of Sudoku, with weights that fit every size.

examples/symbols.py: exact where symbols are renamed.
"""
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import ROOT, in_new_process, last_weights, prepare, remove, run, same

import configurator
import optim
import train
from puzzles import kind_of
from puzzles.sudoku import Sudoku
from runtime.errors import UserError

LATIN = dict(kind="latin", grid=[3, 3], symbols="_.123")
RENAMED = dict(kind="mine", grid=[6, 6], symbols="_.abcdef", symmetries=dict(permute_symbols="abcdef"))
FLAGS = ["--puzzle_emb_ndim=0", "--L_layers=1", "--H_cycles=1", "--L_cycles=3"]


def example(name, task, *flags):
    """Returns a model of an example for puzzles of a task, with random heads."""
    settings = configurator.configure(train.Settings, [f"{ROOT}/examples/{name}.py", *FLAGS, *flags])
    sizes = dict(seq_len=np.prod(task["grid"]), vocab_size=len(task["symbols"]), num_puzzle_identifiers=1)
    trm = train.new_model(settings, SimpleNamespace(**sizes, task=task)).double().eval()
    torch.nn.init.normal_(trm.q_head.weight)
    return trm


def supervision_step(trm, questions, step=0):
    tokens = torch.from_numpy(questions.astype(np.int32))
    steps = torch.full((len(tokens),), step)
    puzzles = dict(inputs=tokens, labels=tokens, steps=steps)
    sequences = trm.new_sequences(len(tokens), torch.float64) | puzzles
    return trm(sequences, min_halt_steps=torch.zeros_like(steps))


def answer_copies(name, task):
    kind = kind_of(task)
    trm = example(name, task)
    rng = np.random.default_rng(0)
    questions = rng.integers(1, len(task["symbols"]), (30, np.prod(task["grid"])))
    symmetries = kind.draw_symmetries(30, rng)
    first = supervision_step(trm, questions)
    second = supervision_step(trm, symmetries.apply(questions))
    # some answer depends on the question, and all follow it
    assert len(np.unique(first.answers)) > 2 and first.q_halt.std() > 1e-3
    assert (symmetries.apply(first.answers.numpy()) == second.answers.numpy()).all()
    torch.testing.assert_close(second.q_halt, first.q_halt)


@pytest.mark.parametrize("name, task", [
    ("houses", Sudoku.new_task(9)), ("symbols", RENAMED)])
def test_a_copy_by_symmetry_has_the_copy_of_the_answer(name, task):
    in_new_process(answer_copies, name, task)


def test_a_run_on_two_sizes_resumes_with_the_same_bits():
    """Every second step is on the other size. The weights can then begin a run of the other size alone."""
    for size in 4, 6:
        prepare(f"data{size}", source="generate", size=size, num_train=40, num_test=20, num_aug=0)
    forks = [f"{ROOT}/examples/{name}.py" for name in ("houses", "soap", "sizes")]
    flags = [*forks, *FLAGS, "--hidden_size=16", "--max_steps=7", "--checkpoint_interval=3",
             "--other_data_path=data4", "--other_interval=2"]
    run("data6", "whole", *flags)
    shutil.copytree("whole", "resumed")
    remove("resumed", "ckpt_0000000[67].*")
    assert "training from step 3" in run("data6", "resumed", *flags, "--init_from=auto")
    assert same(last_weights("resumed"), last_weights("whole"))
    # a resume on another second dataset is refused
    text = run("data6", "resumed", *flags, "--other_data_path=data6", "--init_from=auto", code=2)
    assert "was trained on other data" in text

    # without the other size the weights are others
    run("data6", "alone", *flags, "--other_interval=100")
    assert not same(last_weights("alone"), last_weights("whole"))

    run("data4", "four", *flags, "--init_from=whole/ckpt_00000007.pt")
    # TRM has weights of its own for each size
    text = run("data6", "trm", forks[2], "--other_data_path=data4", "--max_steps=2", code=2)
    assert "needs a network whose weights fit every size" in text


def see_ends():
    trm = example("houses", Sudoku.new_task(4), "--halt_max_steps=8").train()
    questions = np.random.default_rng(0).integers(1, 6, (20, 16))
    # after which step each sequence ends if no answer is sure, and if all are
    ends = {}
    for is_sure in False, True:
        torch.nn.init.constant_(trm.q_head.bias, 1e9 if is_sure else -1e9)
        halted = np.stack([halts_after(trm, questions, step) for step in range(1, 9)])
        ends[is_sure] = 1 + halted.argmax(0)
    assert {*ends[False]} == {4, 5, 6, 7, 8}
    # some run on to their last step
    runs_on = ends[True] == ends[False]
    assert 0 < runs_on.sum() < 10 and (ends[True][~runs_on] == 1).all()
    # a sequence ends alone as it does in a batch
    assert np.concatenate([halts_after(trm, question[None], 5) for question in questions]).tolist() == [
        *halts_after(trm, questions, 5)]


def halts_after(trm, questions, step):
    return supervision_step(trm, questions, step - 1).sequences["halted"].numpy()


def test_where_a_sequence_ends_in_training_follows_from_its_puzzle():
    in_new_process(see_ends)


def see_losses():
    trm = example("houses", Sudoku.new_task(4), "--loss_type=softmax_cross_entropy", "--L_cycles=1").train()
    questions = np.random.default_rng(0).integers(2, 6, (20, 16))
    sequences, values, *_ = supervision_step(trm, questions)
    # the one pass
    scores, _ = trm.answer(dict(z_H=sequences["latents"]["z_L"]))
    expected = torch.nn.functional.cross_entropy(scores.mT, torch.from_numpy(questions), reduction="none")
    of_pass = values["loss"] - values["lm_loss"] - 0.5 * values["q_halt_loss"]
    torch.testing.assert_close(of_pass, expected.mean(1), check_dtype=False, rtol=1e-4, atol=1e-4)


def test_each_pass_has_the_loss_of_loss_type():
    in_new_process(see_losses)


def see_units():
    trm = example("houses", LATIN | dict(units=[[1, 3], [3, 1]]), "--L_cycles=1")
    # the cells whose first latent changes with a given in the corner
    questions = np.ones((2, 9))
    questions[1, 0] = 2
    z_L = supervision_step(trm, questions).sequences["latents"]["z_L"]  # [2, S, K, D]
    change = (z_L[0] - z_L[1]).abs().amax((1, 2))
    assert (change > 1e-9).tolist() == [True, True, True, *[True, False, False] * 2]
    configurator.FORKS.clear()  # as in a process of its own
    with pytest.raises(UserError, match="latin.*--units"):
        example("houses", LATIN)


def test_a_candidate_sees_the_units_that_its_task_has():
    """Latin squares have rows and columns, and no boxes."""
    in_new_process(see_units)


def descend_by_soap():
    settings = configurator.configure(train.Settings, [f"{ROOT}/examples/soap.py", "--weight_decay=0"])
    g = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    w = torch.zeros_like(g)
    state = {name: t.double() for name, t in optim.optimizer_state(settings, "L_level.w", g).items()}
    rates = optim.rates_at(settings, 999, 1000)
    for _ in range(1000):
        before = w.clone()
        optim.OPTIMIZERS["soap"](settings, rates, w, g, **state)
    # atan2(s, s) = pi / 4 for each singular value s
    u, _, v = torch.linalg.svd(g, full_matrices=False)
    torch.testing.assert_close((before - w) / rates["lr"], np.pi / 4 * u @ v, rtol=1e-3, atol=1e-3)


def test_soap_moves_equally_along_each_singular_vector_of_a_constant_gradient():
    in_new_process(descend_by_soap)
