"""The network's parts, the loss, the halting and the optimizers, against torch or their definitions.

test_parity.py has what the official code does too: recursion, halting, AdamATan2, SignSGD, learning rates.
"""
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import model
from model import TRM, TRMConfig, supervision_step


def tiny(**settings):
    sizes = dict(seq_len=4, vocab_size=5, hidden_size=16, num_heads=2, L_layers=1, H_cycles=2, L_cycles=2,
                 puzzle_emb_ndim=16, puzzle_emb_len=2, num_puzzle_identifiers=3)
    return TRM(TRMConfig(**{**sizes, **settings}), seed=1)


def batch(n, seed=0, S=4, V=5, N=3):
    g = torch.Generator().manual_seed(seed)

    def draw(high, *shape):
        return torch.randint(high, shape, generator=g, dtype=torch.int32)

    return dict(inputs=draw(V, n, S), labels=draw(V, n, S), puzzle_identifiers=draw(N, n),
                min_halt_steps=torch.zeros(n, dtype=torch.int32))


def step(net, *args, loss_type="stablemax_cross_entropy", **options):
    """supervision_step with the network's own weights."""
    prefix = {"puzzle_emb.weights": net.puzzle_emb.weights} if net.prefix else {}
    c = SimpleNamespace(loss_type=loss_type, eval_patience=0)
    return supervision_step(c, net, dict(net.named_parameters()) | prefix, *args, **options)


@pytest.mark.parametrize("value", [-1e4, -3.0, -1.0, -1e-7, 0.0, 1e-7, 0.5, 1.0, 2.0, 1e4])
def test_stablemax_is_the_definition_with_finite_gradients(value):
    x = torch.tensor([value, 0.3, -0.7], requires_grad=True)
    got = torch.log_softmax(model.log_stablemax(x), -1)
    d = x.detach().double()
    s = torch.where(d < 0, 1 / (1 - d), d + 1)
    assert torch.allclose(got.double(), (s / s.sum()).log(), rtol=1e-5, atol=1e-6)
    gradient, = torch.autograd.grad(got.sum(), x)
    assert gradient.isfinite().all()
    slope, = torch.autograd.grad(model.log_stablemax(x)[0], x)
    assert slope[0].item() == pytest.approx(1 / (1 + abs(value)), rel=1e-5)  # also at 0 and at 1


def test_loss_is_the_mean_over_a_sequences_labelled_cells_summed_over_sequences():
    net, data = tiny(), batch(3)
    data["labels"][1, 1:] = model.IGNORE_LABEL
    data["labels"][2, :] = model.IGNORE_LABEL
    carry = net.new_carry(3, torch.float32)
    loss, carry, sums, answer, q_halt = step(net, carry, data, 1, loss_type="softmax_cross_entropy")
    z = net.H_init.expand(3, net.length, -1), net.L_init.expand(3, net.length, -1)
    _, _, logits, q = net(*z, data["inputs"], data["puzzle_identifiers"])
    p = logits.softmax(-1)

    def cell(i, j):
        return -p[i, j, data["labels"][i, j]].log()

    want = sum(cell(0, j) for j in range(4)) / 4 + cell(1, 0)
    correct = answer == data["labels"]
    solved = torch.tensor([all(correct[0]), bool(correct[1, 0]), True]).float()
    want_q = F.binary_cross_entropy_with_logits(q, solved, reduction="sum")
    sums = {name: total.item() for name, total in sums.items()}
    assert sums["lm_loss"] == pytest.approx(want.item(), rel=1e-5)
    assert sums["q_halt_loss"] == pytest.approx(want_q.item(), rel=1e-5)
    assert loss.item() == pytest.approx((want + 0.5 * want_q).item(), rel=1e-5)
    assert sums["count"] == 2  # no metric counts the sequence without labels


def test_exploration_delays_halting():
    net, data = tiny(), batch(4)
    with torch.no_grad():
        net.q_head.bias[0] = 5.0  # the model always wants to halt
    data["min_halt_steps"] = torch.tensor([0, 2, 3, 0], dtype=torch.int32)
    carry = net.new_carry(4, torch.float32)
    for halted in ([True, False, False, True], [True, True, False, True], [True, False, True, True]):
        carry = step(net, carry, data, 3)[1]
        assert carry["halted"].tolist() == halted
    carry = step(net, net.new_carry(4, torch.float32), data, 3, training=False)[1]
    assert not carry["halted"].any()  # an evaluation goes to the full depth


def test_bfloat16_embedding_gradient_does_not_stall():
    """4096 equal tokens: adding them one by one in bfloat16 would stop at 256."""
    net = tiny(puzzle_emb_ndim=0, seq_len=4096)
    table = net.embed_tokens.embedding_weight.detach().bfloat16().requires_grad_()
    net.embed_tokens.embedding_weight = torch.nn.Parameter(table)
    x = net.embed(torch.ones(1, 4096, dtype=torch.int32), None)
    gradient, = torch.autograd.grad(x.sum(), net.embed_tokens.embedding_weight)
    assert gradient[1, 0].item() == pytest.approx(4096 * math.sqrt(16), rel=0.01)
    assert gradient[0].abs().max() == 0


def test_initial_weights_have_the_stated_deviation_and_cut():
    net = TRM(TRMConfig(seq_len=81, vocab_size=11), seed=3)
    for name, p in net.named_parameters():
        if not name.startswith("q_head") and p.numel() > 20000:
            std = p.shape[1] ** -0.5
            assert p.std().item() == pytest.approx(std, rel=0.02)
            assert p.abs().max().item() <= 2 * std / 0.8796 + 1e-6
    assert (net.q_head.weight == 0).all() and (net.q_head.bias == -5).all()
    assert sum(p.numel() for p in net.parameters()) + net.puzzle_emb.weights.numel() == 5_029_378
    same = TRM(TRMConfig(seq_len=81, vocab_size=11), seed=3)
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), same.state_dict().values()))


def test_unknown_position_encodings_raise():  # sizes that cannot be built: test_wrong_input.py
    with pytest.raises(ValueError):
        tiny(pos_encodings="x")


# Optimizers

def problem(*shape):
    g = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=g), [torch.randn(shape, generator=g) for _ in range(7)]


def ours(optimizer, beta2=0.95, shape=(6, 4)):
    """The weights after the problem's gradients, by update_weights as train.py calls it."""
    w, gradients = problem(*shape)
    c = SimpleNamespace(optimizer=optimizer, weight_decay=0.5, beta1=0.9, beta2=beta2)
    shapes, vector = {"L_level.w": w.shape}, w.flatten()
    state = model.optimizer_state(c, shapes, vector)
    for t, g in enumerate(gradients, 1):
        rates = dict(lr=0.03, bias_correction1=1 - c.beta1 ** t, bias_correction2=1 - c.beta2 ** t)
        model.update_weights(c, shapes, vector, g.flatten(), state,
                             {name: torch.tensor([rate]) for name, rate in rates.items()})
    return vector.view(w.shape)


def theirs(optimizer):
    w, gradients = problem(6, 4)
    w = torch.nn.Parameter(w)
    optimizer = optimizer([w])
    for g in gradients:
        w.grad = g.clone()
        optimizer.step()
    return w.detach()


def test_adamw_and_muon_equal_torchs():
    want = theirs(lambda p: torch.optim.AdamW(p, lr=0.03, betas=(0.9, 0.95), weight_decay=0.5, eps=1e-8))
    torch.testing.assert_close(ours("adamw"), want, rtol=1e-5, atol=1e-6)
    want = theirs(lambda p: torch.optim.Muon(p, lr=0.03, momentum=0.9, weight_decay=0.5,
                                             adjust_lr_fn="match_rms_adamw"))
    assert (ours("muon") - want).norm() / want.norm() < 0.01  # both orthogonalize in bfloat16
    ours("muon", shape=(4, 6))  # the other orientation runs too


def test_lion_is_its_definition():
    w, gradients = problem(6, 4)
    m = torch.zeros_like(w)
    for g in gradients:
        w = w * (1 - 0.03 * 0.5) - 0.03 * torch.sign(0.9 * m + 0.1 * g)
        m = 0.99 * m + 0.01 * g
    torch.testing.assert_close(ours("lion", beta2=0.99), w, rtol=1e-5, atol=1e-6)


def test_flops_equal_torchs_count():
    from torch.utils.flop_counter import FlopCounterMode
    for settings in (dict(puzzle_emb_ndim=20, puzzle_emb_len=0), dict(mlp_t=False)):
        net, data = tiny(**settings), batch(6)
        assert net.length == 6  # with 2 positions of the puzzle embedding
        forward, with_gradient = net.flops_per_example()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            step(net, net.new_carry(6, torch.float32), data, 2)
        assert counter.get_total_flops() == pytest.approx(6 * forward, rel=0.02)
        with FlopCounterMode(display=False) as counter:
            loss = step(net, net.new_carry(6, torch.float32), data, 2)[0]
            torch.autograd.grad(loss, list(net.parameters()))
        assert counter.get_total_flops() == pytest.approx(6 * with_gradient, rel=0.05)
