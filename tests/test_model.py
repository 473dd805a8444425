"""The network's parts, the loss, the halting and the optimizers, against torch or their definitions.

test_parity.py has what the official code does too: recursion, stablemax, halting, AdamATan2, SignSGD, rates.
"""
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import configurator
import model
import optim
import train
from model import TRM, take_new_puzzles
from optim import pack_rows, sign_sgd
from runtime.flops import flops_per_example


def tiny(seq_len=4, **settings):
    """Returns a network that takes at most 3 supervision steps."""
    defaults = vars(configurator.configure(train.Settings, []))
    small = dict(hidden_size=16, num_heads=2, L_layers=1, H_cycles=2, L_cycles=2, puzzle_emb_ndim=16,
                 puzzle_emb_len=2, halt_max_steps=3, seed=1)
    return TRM(SimpleNamespace(**defaults | small | settings), seq_len, 5, 3)


def draw(high, *shape):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(0), dtype=torch.int32)


def puzzles(n):
    return dict(inputs=draw(5, n, 4), labels=draw(5, n, 8)[:, 4:], puzzle_identifiers=draw(3, n))


def step(net, data, sequences=None, min_halt_steps=None):
    """Runs a supervision step on new puzzles; in training with min_halt_steps."""
    sequences = take_new_puzzles(sequences or net.new_sequences(len(data["inputs"])), data)
    puzzle_rows = net.puzzle_emb.weights[sequences["puzzle_identifiers"]]
    return net.train(min_halt_steps is not None)(sequences, puzzle_rows, min_halt_steps)


# The loss and the halting

def test_stablemax_has_finite_gradients_at_any_logits():
    x = torch.tensor([[value, 0.3, -0.7] for value in (-1e4, 0.0, 1e4)], requires_grad=True)
    log_probabilities = torch.log_softmax(model.log_stablemax(x), -1)
    gradient, = torch.autograd.grad(log_probabilities.sum(), x)
    assert log_probabilities.isfinite().all() and gradient.isfinite().all()


def test_the_softmax_loss_is_torchs_mean_over_a_sequences_labeled_cells():
    logits, _ = problem(3, 4, 5)
    labels = draw(5, 3, 4)
    labels[1, 1:] = model.IGNORE_LABEL
    labels[2, :] = model.IGNORE_LABEL
    cell_losses = F.cross_entropy(logits.mT, labels.long(), reduction="none")  # 0 without a label
    want = cell_losses.sum(1) / torch.tensor([4, 1, 1])
    torch.testing.assert_close(model.softmax_cross_entropy(None, logits, labels), want)


def test_a_loss_that_is_not_here_is_named():
    """test_solve.py solves without it."""
    with pytest.raises(ValueError, match="no loss_type 'sofmax_cross_entropy': run the fork"):
        tiny(loss_type="sofmax_cross_entropy")


def test_q_halt_learns_what_is_solved_says(monkeypatch):
    """A puzzle with several right answers; exact_accuracy stays what the labels say."""
    accepts_all = staticmethod(lambda inputs, labels, answers: torch.ones(len(inputs), dtype=torch.bool))
    monkeypatch.setattr(TRM, "is_solved", accepts_all)
    values = step(tiny(), puzzles(3)).values
    # the loss of -5, the q_halt of a model that has not been trained
    assert values["q_halt_loss"].tolist() == pytest.approx([5.0067] * 3, abs=1e-4)
    assert values["exact_accuracy"].sum() == 0


def test_exploration_delays_halting():
    net = tiny()
    net.q_head.bias.data[0] = 5.0  # the model always wants to halt
    min_halt_steps = torch.tensor([0, 2, 3, 0], dtype=torch.int32)
    sequences = None
    for halted in ([True, False, False, True], [True, True, False, True], [True, False, True, True]):
        sequences = step(net, puzzles(4), sequences, min_halt_steps).sequences
        assert sequences["halted"].tolist() == halted
    assert not step(net, puzzles(4)).sequences["halted"].any()  # an evaluation goes to the full depth


# The network

def test_bfloat16_embedding_gradient_does_not_stall():
    """4096 equal tokens: adding them one by one in bfloat16 would stop at 256."""
    net = tiny(puzzle_emb_ndim=0, seq_len=4096, mlp_t=False).bfloat16()
    x = net.embed(torch.ones(1, 4096, dtype=torch.int32), None)
    gradient, = torch.autograd.grad(x.sum(), net.embed_tokens.embedding_weight)
    assert gradient[1, 0].item() == pytest.approx(4096 * math.sqrt(16), rel=0.01)
    assert gradient[0].abs().max() == 0


# (the first three, the sum of all absolute values), as torch 2.9.1's nn.init.trunc_normal_ draws them. Other
# machines may round the inverse error function otherwise.
INITIAL_WEIGHTS = {
    "embed_tokens.embedding_weight": ([0.18805502, -0.15781654, -0.066514976], 15.075139),
    "L_level.layers.0.mlp.down_proj.weight": ([-0.028107826, 0.053322427, -0.10372321], 208.23399),
    "L_init": ([0.89933664, -0.32561755, 1.0856942], 12.364885),
}


def test_a_seed_means_the_initial_weights_of_torch_2_9():
    weights = tiny().state_dict()
    for name, (first, total) in INITIAL_WEIGHTS.items():
        assert weights[name].flatten()[:3].tolist() == pytest.approx(first, rel=1e-5)
        assert weights[name].abs().sum().item() == pytest.approx(total, rel=1e-5)


def test_flops_are_those_of_the_products():
    """A backward pass costs two forward passes of the last recursion."""
    net = tiny(mlp_t=False)
    training = flops_per_example(net)
    mlp = sum(p.numel() for p in net.L_level.layers[0].mlp.parameters()) * net.length
    attention = 4 * 16 ** 2 * net.length + 2 * net.length ** 2 * 16  # projections and scores
    recursion = 2 * (mlp + attention) * 3
    assert training == pytest.approx(4 * recursion, rel=0.02)


# Optimizers

def problem(*shape):
    """A matrix and the gradients of seven steps."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator), torch.randn((7, *shape), generator=generator)


def adamw(w, gradients):
    """Returns what torch makes of it."""
    w = torch.nn.Parameter(w)
    adamw = torch.optim.AdamW([w], lr=0.03, weight_decay=0.5, betas=(0.9, 0.95), eps=1e-8)
    for g in gradients:
        w.grad = g
        adamw.step()
    return w.detach()


def lion(w, gradients):
    """Returns what its definition says."""
    m = torch.zeros_like(w)
    for g in gradients:
        w = w * (1 - 0.03 * 0.5) - 0.03 * torch.sign(0.9 * m + 0.1 * g)
        m = 0.95 * m + 0.05 * g
    return w


@pytest.mark.parametrize("definition", [adamw, lion])
def test_an_optimizer_is_its_definition(definition):
    """test_parity.py has AdamATan2."""
    w, gradients = problem(6, 4)
    settings = SimpleNamespace(optimizer=definition.__name__, weight_decay=0.5, beta1=0.9, beta2=0.95)
    states = {"w": optim.optimizer_state(settings, "w", w)}
    want = definition(w.clone(), gradients)
    for t, g in enumerate(gradients, 1):
        rates = dict(lr=torch.tensor([0.03]), bias_correction1=torch.tensor([1 - 0.9 ** t]),
                     bias_correction2=torch.tensor([1 - 0.95 ** t]))
        optim.update(settings, rates, {"w": w}, {"w": g}, states)
    torch.testing.assert_close(w, want)


def test_the_sparse_puzzle_embedding_is_signsgd_on_the_rows_in_the_batch():
    """8 sequences on 2 ranks; identifiers come several times, on one rank and on both.

    test_parity.py has fewer identifiers than sequences.
    """
    table, _ = problem(50, 4)
    _, grads = problem(8, 4)
    grads = grads[0]
    identifiers = torch.tensor([3, 1, 3, 4, 0, 3, 1, 49])
    grads[6] = -grads[1]  # the gradients of identifier 1 cancel: its row only decays

    # the dense rule
    dense = torch.zeros_like(table).index_add(0, identifiers, grads)
    is_held = torch.zeros(50, 1).index_fill(0, identifiers, 1)
    want = table - is_held * 0.01 * (0.3 * table + torch.sign(dense))

    first = pack_rows(identifiers[:4], grads[:4], 50, 8, torch.tensor([0]))
    second = pack_rows(identifiers[4:], grads[4:], 50, 8, torch.tensor([1]))
    assert first.shape == (8, 6)  # what ranks exchange does not grow with the table
    sign_sgd(table, first + second, 0.01, 0.3)
    torch.testing.assert_close(table, want, rtol=1e-6, atol=1e-7)


def test_a_row_of_many_sequences_moves_alone():
    """The sum of 8192 identifiers 8191 is beyond the integers that float32 holds."""
    n = 8192
    table = torch.ones(n, 1)
    sign_sgd(table, pack_rows(torch.full((n,), n - 1), table, n, n, rank=None), 0.5, 0)
    assert table.sum() == n - 0.5 == n - 1 + table[-1]
