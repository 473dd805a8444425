"""The network's parts, the loss, the halting and the optimizers, against torch or their definitions."""
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


def step(net, *args, **settings):
    """supervision_step with the network's own weights."""
    prefix = {"puzzle_emb.weights": net.puzzle_emb.weights} if net.prefix else {}
    return supervision_step(net, dict(net.named_parameters()) | prefix, *args, **settings)


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


@pytest.mark.parametrize("loss_type", ["stablemax_cross_entropy", "softmax_cross_entropy"])
def test_loss_is_the_mean_over_a_sequences_labelled_cells_summed_over_sequences(loss_type):
    net, data = tiny(), batch(3)
    data["labels"][1, 1:] = model.IGNORE_LABEL
    data["labels"][2, :] = model.IGNORE_LABEL
    carry = net.new_carry(3, torch.float32)
    loss, carry, sums, answer, q_halt = step(net, carry, data, 1, loss_type)
    z = net.H_init.expand(3, net.length, -1), net.L_init.expand(3, net.length, -1)
    _, _, logits, q = net(*z, data["inputs"], data["puzzle_identifiers"])
    stablemax = torch.where(logits < 0, 1 / (1 - logits), logits + 1)
    p = stablemax if loss_type.startswith("stable") else logits.exp()
    p = p / p.sum(-1, keepdim=True)

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


def test_sequences_halt_and_take_new_data():
    net, first, second = tiny(), batch(4, 1), batch(4, 2)
    with torch.no_grad():
        net.q_head.bias[0] = 5.0  # the model always wants to halt
    first["min_halt_steps"] = second["min_halt_steps"] = torch.tensor([0, 2, 3, 0], dtype=torch.int32)
    carry = net.new_carry(4, torch.float32)
    carry = step(net, carry, first, 3)[1]
    assert carry["halted"].tolist() == [True, False, False, True] and carry["steps"].tolist() == [1, 1, 1, 1]
    _, carry, sums, _, _ = step(net, carry, second, 3)
    assert carry["steps"].tolist() == [1, 2, 2, 1] and carry["halted"].tolist() == [True, True, False, True]
    for i, source in enumerate([second, first, first, second]):
        assert all((carry[name][i] == source[name][i]).all() for name in ("inputs", "labels"))
    assert sums["steps"] == 4  # 1 + 2 + 1 of those that halted
    carry = step(net, net.new_carry(4, torch.float32), first, 3, training=False)[1]
    assert not carry["halted"].any()  # an evaluation goes to the full depth


def test_only_the_last_recursion_is_differentiated():
    """With H_cycles = 2, the gradient is that of H_cycles = 1 from the state after the first recursion."""
    net, data = tiny(), batch(3)
    g = torch.Generator().manual_seed(0)
    z = torch.randn(3, net.length, 16, generator=g), torch.zeros(3, net.length, 16)
    def gradient(z):
        _, _, logits, _ = net(*z, data["inputs"], data["puzzle_identifiers"])
        return torch.autograd.grad(logits.square().sum(), net.L_level.layers[0].mlp.down_proj.weight)[0]

    got = gradient(z)
    with torch.no_grad():
        middle = net.recursion(net.embed(data["inputs"], data["puzzle_identifiers"]), *z)
    net.config.H_cycles = 1
    assert torch.equal(got, gradient(middle))


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


def test_sizes_that_cannot_be_built_raise():  # the others: test_wrong_input.py
    with pytest.raises(ValueError):
        tiny(pos_encodings="x")


@pytest.mark.parametrize("settings, length", [
    (dict(), 6), (dict(puzzle_emb_ndim=0), 4), (dict(puzzle_emb_ndim=20, puzzle_emb_len=0), 6),
    (dict(mlp_t=False, pos_encodings="learned"), 6), (dict(mlp_t=False, pos_encodings="none"), 6)])
def test_shapes(settings, length):
    net = tiny(**settings)
    loss, carry, sums, answer, q = step(net, net.new_carry(3, torch.float32), batch(3), 2)
    assert net.length == length and carry["z_H"].shape == (3, length, 16) and loss.isfinite()
    assert answer.shape == (3, 4) and q.shape == (3,)


# Optimizers

def problem(shape=(6, 4)):
    g = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=g), [torch.randn(shape, generator=g) for _ in range(7)]


def ours(optimizer, *shape, **betas):
    """The weights after the problem's gradients, by update_weights as train.py calls it."""
    w, gradients = problem(*shape)
    c = SimpleNamespace(optimizer=optimizer, weight_decay=0.5, **betas)
    shapes, vector = {"L_level.w": w.shape}, w.flatten()
    state = model.optimizer_state(c, shapes, vector)
    for t, g in enumerate(gradients, 1):
        rates = dict(lr=0.03, bias_correction1=1 - c.beta1 ** t, bias_correction2=1 - c.beta2 ** t)
        model.update_weights(c, shapes, vector, g.flatten(), state,
                             {name: torch.tensor([rate]) for name, rate in rates.items()})
    return vector.view(w.shape)


def theirs(optimizer):
    w, gradients = problem()
    w = torch.nn.Parameter(w)
    optimizer = optimizer([w])
    for g in gradients:
        w.grad = g.clone()
        optimizer.step()
    return w.detach()


def test_adamw_and_muon_equal_torchs():
    want = theirs(lambda p: torch.optim.AdamW(p, lr=0.03, betas=(0.9, 0.95), weight_decay=0.5, eps=1e-8))
    got = ours("adamw", beta1=0.9, beta2=0.95)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    want = theirs(lambda p: torch.optim.Muon(p, lr=0.03, momentum=0.9, weight_decay=0.5,
                                             adjust_lr_fn="match_rms_adamw"))
    got = ours("muon", beta1=0.9, beta2=0.95)
    assert (got - want).norm() / want.norm() < 0.01  # both orthogonalize in bfloat16
    ours("muon", (4, 6), beta1=0.9, beta2=0.95)  # the other orientation runs too


def test_adam_atan2_and_lion_by_their_definitions():
    w, gradients = problem()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t, g in enumerate(gradients, 1):
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        w = w * (1 - 0.03 * 0.5) - 0.03 / (1 - 0.9 ** t) * torch.atan2(m, v.sqrt() / math.sqrt(1 - 0.95 ** t))
    got = ours("adam_atan2", beta1=0.9, beta2=0.95)
    torch.testing.assert_close(got, w, rtol=1e-5, atol=1e-6)
    w, gradients = problem()
    m = torch.zeros_like(w)
    for g in gradients:
        w = w * (1 - 0.03 * 0.5) - 0.03 * torch.sign(0.9 * m + 0.1 * g)
        m = 0.99 * m + 0.01 * g
    got = ours("lion", beta1=0.9, beta2=0.99)
    torch.testing.assert_close(got, w, rtol=1e-5, atol=1e-6)


def test_sign_sgd_updates_only_the_rows_of_the_batch():
    table, g = torch.ones(3, 2), torch.tensor([[2.0, -1.0], [5.0, 5.0], [0.0, -3.0]])
    model.sign_sgd(table, g, torch.tensor([2.0, 0.0, 1.0]), torch.tensor(0.1), 0.5)
    torch.testing.assert_close(table, torch.tensor([[0.85, 1.05], [1.0, 1.0], [0.95, 1.05]]))


def test_learning_rate_schedule():
    for step, ratio, rate in [(0, 1, 0.1), (8, 1, 0.9), (9, 1, 1), (60, 1, 1), (109, 1, 1), (59, 0.1, 0.55),
                              (109, 0.1, 0.1), (9, 0.0, 1)]:
        assert model.learning_rate(1.0, step, 10, 110, ratio) == pytest.approx(rate)


def test_flops_equal_torchs_count():
    from torch.utils.flop_counter import FlopCounterMode
    for settings in (dict(), dict(mlp_t=False)):
        net, data = tiny(**settings), batch(6)
        forward, with_gradient = net.flops_per_example()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            step(net, net.new_carry(6, torch.float32), data, 2)
        assert counter.get_total_flops() == pytest.approx(6 * forward, rel=0.02)
        with FlopCounterMode(display=False) as counter:
            loss = step(net, net.new_carry(6, torch.float32), data, 2)[0]
            torch.autograd.grad(loss, list(net.parameters()))
        assert counter.get_total_flops() == pytest.approx(6 * with_gradient, rel=0.05)
