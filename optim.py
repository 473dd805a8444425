"""Optimizers and schedules.

An optimizer works in place on one float32 weight w with its gradient g. `rates` are tensors of one element,
so that a compiled step does not depend on their values.
"""
import math

import torch

# ---------------------------------------------------------------------------------------------------------
# Optimizers: functions (settings, rates, w, g, **state), in place on w and on its state.
# rates: lr, and bias_correction1, bias_correction2 = 1 - beta^t.

def optimizer_state(settings, name, w):
    """Returns the optimizer's state for a parameter, {keyword argument: float32 tensor}.

    A fork may keep other tensors, of any shape; checkpoints hold them all.
    """
    return dict(m=torch.zeros_like(w), v=torch.zeros_like(w))


def update(settings, rates, weights, grads, states):
    """Runs one step of the optimizer on all weights, in place.

    weights, grads: {name: float32 tensor}. states: {name: what optimizer_state returns}. rates: of rates_at.
    """
    optimize = OPTIMIZERS[settings.optimizer]
    for name, w in weights.items():
        optimize(settings, rates, w, grads[name], **states[name])


def adam_atan2(settings, rates, w, g, m, v):
    """Adam with atan2 instead of division and epsilon (arXiv 2407.05872), scaled as in the official code."""
    root = update_moments(settings, rates, g, m, v)
    step_size = rates["lr"] / rates["bias_correction1"]
    descend(settings, rates, w, torch.atan2(m, root), step_size)


def adamw(settings, rates, w, g, m, v):
    """Adam with decoupled weight decay (arXiv 1711.05101, algorithm 2), epsilon 1e-8."""
    root = update_moments(settings, rates, g, m, v)
    step_size = rates["lr"] / rates["bias_correction1"]
    descend(settings, rates, w, m / (root + 1e-8), step_size)


def lion(settings, rates, w, g, m, v):
    """Lion (arXiv 2302.06675, algorithm 2); v stays zero."""
    momentum = torch.lerp(g, m, settings.beta1)
    descend(settings, rates, w, torch.sign(momentum), rates["lr"])
    m.lerp_(g, 1 - settings.beta2)


def update_moments(settings, rates, g, m, v):
    """Updates Adam's moments in place; returns the square root of the second one, whose bias is corrected."""
    m.lerp_(g, 1 - settings.beta1)
    v.lerp_(g.square(), 1 - settings.beta2)
    corrected = v / rates["bias_correction2"]
    return corrected.sqrt()


def descend(settings, rates, w, direction, step_size):
    """Applies decoupled weight decay, then subtracts direction * step_size, in place on w."""
    decay = rates["lr"] * settings.weight_decay
    w.mul_(1 - decay)
    w.sub_(direction * step_size)


def norm(tensors):
    """Returns the Euclidean norm of all numbers of {name: tensor}, [1]."""
    squares = [t.square().sum() for t in tensors.values()]
    return torch.stack(squares).sum().sqrt().view(1)


OPTIMIZERS = dict(adam_atan2=adam_atan2, adamw=adamw, lion=lion)


# ---------------------------------------------------------------------------------------------------------
# The puzzle embedding: SignSGD on the rows that the global batch holds. Ranks exchange gradients in bins.
# A bin is a row of the table, or a sequence of the batch if the table has more rows: Sudoku has one row, ARC
# many thousands.

def pack_rows(identifiers, row_grads, num_rows, batch_size, rank):
    """Packs the row gradients of one rank; the sum over the ranks is what sign_sgd takes.

    Args:
        identifiers: for each sequence of this rank, its row of the table, int [b].
        row_grads: the gradient of each sequence with respect to its row, [b, D'].
        num_rows: N of the table.
        batch_size: the sequences of all ranks.
        rank: this rank, an int tensor [1]: a constant would give each replica a program of its own.

    Returns [min(num_rows, batch_size), D' + 2]. A bin has the sum of its sequences' gradients, the sum of
    their identifiers, which sign_sgd reads where a bin is one sequence, and their number.
    """
    own_size = len(identifiers)
    bins = identifiers
    if num_rows > batch_size:
        bins = rank * own_size + torch.arange(own_size, device=rank.device)
    columns = [row_grads, identifiers.view(-1, 1), torch.ones_like(row_grads[:, :1])]
    return add_up(torch.cat(columns, dim=1), bins, min(num_rows, batch_size))


def add_up(entries, bins, num_bins):
    """Returns the sums of the entries of each bin, [num_bins, ...], with the same bits at each call.

    entries: [n, ...]. bins: integers [n].
    """
    if num_bins == 1:
        return entries.sum(0, keepdim=True)
    sums = torch.zeros(num_bins, *entries.shape[1:], device=entries.device)
    # on CUDA, index_add adds in an order that varies, by atomic operations; index_put sorts first
    if entries.is_cuda:
        return sums.index_put((bins.long(),), entries, accumulate=True)
    return sums.index_add(0, bins, entries)


def sign_sgd(puzzle_emb, packed, lr, weight_decay):
    """Moves the batch's rows of the puzzle embedding, in place: decoupled decay and the gradient's sign.

    puzzle_emb: [N, D']. packed: the sum of pack_rows over all ranks. lr: [1].
    """
    assert len(puzzle_emb) < 2 ** 24, "float32 holds no larger identifiers"
    if len(packed) == len(puzzle_emb):
        # bin i has all sequences of row i
        rows = slice(None)
        total = packed
    else:
        # a bin has one sequence; bins of the same row add up in the first one of them
        rows = packed[:, -2].long()
        is_same = rows.unsqueeze(0) == rows.unsqueeze(1)  # [bins, bins]
        first_bin = is_same.int().argmax(1)
        total = add_up(packed, first_bin, len(packed))[first_bin]

    # bins of the same row write the same new row; a bin without a sequence writes the old row
    is_held = total[:, -1:] > 0
    old = puzzle_emb[rows]
    change = weight_decay * old + torch.sign(total[:, :-2])
    puzzle_emb[rows] = old - is_held * lr * change


# ---------------------------------------------------------------------------------------------------------
# Schedules: pure functions of the settings and the step, which counts from 0

def official_epoch_examples(dataset):
    """Returns the examples of an epoch as the official code counts them, by the mean over all versions.

    For ARC the stream of train_batch takes more to offer every group once: see Dataset.epoch_examples.
    """
    return dataset.total_groups * dataset.mean_puzzle_examples


def count_steps(settings, examples_per_epoch):
    """Returns the optimizer steps of the whole run."""
    return settings.max_steps or int(settings.epochs * examples_per_epoch / settings.global_batch_size)


def evaluation_due(settings, examples_per_epoch, step):
    """Returns True if the last of `step` steps crossed a multiple of eval_interval epochs."""
    # count examples and not steps: the number of puzzles need not divide into batches
    interval = settings.eval_interval * examples_per_epoch
    examples = step * settings.global_batch_size
    return interval > 0 and examples // interval > (examples - settings.global_batch_size) // interval


def learning_rate(settings, peak, step, total_steps):
    """Returns the rate of a step: linear warm-up to peak, then a cosine to peak * lr_min_ratio at the end."""
    # linear warm-up
    step += 1
    warmup_steps = settings.lr_warmup_steps
    if step < warmup_steps:
        return peak * step / warmup_steps
    # cosine decay
    decay_steps = max(1, total_steps - warmup_steps)
    progress = (step - warmup_steps) / decay_steps
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (settings.lr_min_ratio + (1 - settings.lr_min_ratio) * cosine)


def rates_at(settings, step, total_steps):
    """Returns {name: float}: the learning rates of a step, and Adam's bias corrections."""
    return dict(
        lr=learning_rate(settings, settings.lr, step, total_steps),
        puzzle_emb_lr=learning_rate(settings, settings.puzzle_emb_lr, step, total_steps),
        bias_correction1=1 - settings.beta1 ** (step + 1),
        bias_correction2=1 - settings.beta2 ** (step + 1),
    )


def exploration(settings, step, total_steps):
    """Returns the halt_exploration_prob of a step."""
    first = settings.halt_exploration_prob
    last = settings.halt_exploration_prob_end
    if last == -1:
        return first
    return first + (last - first) * step / max(1, total_steps - 1)


def cycles_at(settings, examples_per_epoch, step):
    """Returns (H_cycles, L_cycles) of a step; in a curriculum they change linearly with the examples."""
    examples = step * settings.global_batch_size
    length = settings.curriculum_epochs * examples_per_epoch  # of the curriculum, in examples

    def grown(first, last):
        return last if examples >= length else first + int((last - first) * examples / length)

    return (
        grown(settings.H_cycles_start, settings.H_cycles),
        grown(settings.L_cycles_start, settings.L_cycles),
    )
