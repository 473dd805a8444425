"""Optimizers and schedules.

The optimizers work in place on all weights as one float32 vector w with its gradient g: a few operations for
the whole model. `rates` are tensors of one element, so that a compiled step does not depend on their values.
"""
import math

import torch

# ---------------------------------------------------------------------------------------------------------
# The weights as one float32 vector, which the optimizers and the all-reduce work on

def parameter_shapes(model):
    """Returns {name: shape} of the parameters, in the order in which the vector of all weights holds them.

    The longest come first: only the short biases, at the end, can leave a weight at an unaligned address.
    """
    parameters = sorted(model.named_parameters(), key=lambda item: -item[1].numel())
    return {name: p.shape for name, p in parameters}


def flatten(tensors):
    """Returns all numbers of the tensors in one vector."""
    return torch.cat([t.reshape(-1) for t in tensors])


def unflatten(vector, shapes):
    """Returns {name: view of vector} for {name: shape}, in order."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    views = {}
    for (name, shape), part in zip(shapes.items(), vector.split(sizes)):
        views[name] = part.view(shape)
    return views


def cast(vector, shapes, dtype):
    """Returns {name: weight in dtype} of the vector of all weights."""
    return unflatten(vector.to(dtype, copy=True), shapes)  # a copy, since the vector changes in place


# ---------------------------------------------------------------------------------------------------------
# Optimizers: functions (settings, rates, shapes, w, g, m, v), in place on w and the moments m and v.
# rates: lr, and bias_correction1, bias_correction2 = 1 - beta^t; shapes: {name: shape} of the parts of w.

def optimizer_state(settings, shapes, w):
    """Returns the state of the optimizer, {name: float32 tensor}: its keyword arguments after g.

    An optimizer of a fork may keep tensors of other names and shapes. Checkpoints hold them all.
    """
    return dict(m=torch.zeros_like(w), v=torch.zeros_like(w))


def adam_atan2(settings, rates, shapes, w, g, m, v):
    """Adam with atan2 instead of division and epsilon (arXiv 2407.05872), scaled as in the official code."""
    root = update_moments(settings, rates, g, m, v)
    update = torch.atan2(m, root)
    step_size = rates["lr"] / rates["bias_correction1"]
    descend(settings, rates, w, update, step_size)


def adamw(settings, rates, shapes, w, g, m, v):
    """Adam with decoupled weight decay (arXiv 1711.05101, algorithm 2), epsilon 1e-8."""
    root = update_moments(settings, rates, g, m, v)
    update = m / (root + 1e-8)
    step_size = rates["lr"] / rates["bias_correction1"]
    descend(settings, rates, w, update, step_size)


def lion(settings, rates, shapes, w, g, m, v):
    """Lion (arXiv 2302.06675, algorithm 2); v stays zero."""
    momentum = torch.lerp(g, m, settings.beta1)
    update = torch.sign(momentum)
    descend(settings, rates, w, update, rates["lr"])
    m.lerp_(g, 1 - settings.beta2)


def muon(settings, rates, shapes, w, g, m, v):
    """Muon (Jordan et al. 2024) for the matrices of the network, AdamATan2 for all other parameters."""
    weights = unflatten(w, shapes)
    grads = unflatten(g, shapes)
    first_moments = unflatten(m, shapes)
    second_moments = unflatten(v, shapes)
    for name, shape in shapes.items():
        weight = weights[name]
        grad = grads[name]
        first_moment = first_moments[name]
        if name.startswith("L_level.") and len(shape) == 2:
            muon_matrix(settings, rates, weight, grad, first_moment)
        else:
            second_moment = second_moments[name]
            adam_atan2(settings, rates, shapes, weight, grad, first_moment, second_moment)


def muon_matrix(settings, rates, w, g, m):
    """One step of Muon on a matrix [a, b]: Nesterov momentum, orthogonalised by Newton-Schulz iterations.

    The update is scaled by 0.2 sqrt(max(a, b)) to the size of AdamW's (arXiv 2502.16982), so that lr means
    the same for both.
    """
    m.lerp_(g, 1 - settings.beta1)
    x = torch.lerp(g, m, settings.beta1).bfloat16()

    # the iterations are cheaper on the smaller of x x^T and x^T x
    rows, columns = x.shape
    is_tall = rows > columns
    if is_tall:
        x = x.T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        a = x @ x.T
        b = -4.7750 * a + 2.0315 * a @ a
        x = 3.4445 * x + b @ x
    if is_tall:
        x = x.T

    # the update, in float32
    scale = 0.2 * math.sqrt(max(rows, columns))
    step_size = rates["lr"] * scale
    descend(settings, rates, w, x.to(w.dtype), step_size)


def update_moments(settings, rates, g, m, v):
    """Updates Adam's moments in place; returns the square root of the second one, whose bias is corrected."""
    m.lerp_(g, 1 - settings.beta1)
    v.lerp_(g.square(), 1 - settings.beta2)
    corrected = v / rates["bias_correction2"]
    return corrected.sqrt()


def descend(settings, rates, w, update, step_size):
    """Applies decoupled weight decay, then an update times step_size, in place on w."""
    decay = rates["lr"] * settings.weight_decay
    w.mul_(1 - decay)
    w.sub_(update * step_size)


OPTIMIZERS = dict(adam_atan2=adam_atan2, adamw=adamw, lion=lion, muon=muon)


# ---------------------------------------------------------------------------------------------------------
# The puzzle embedding: SignSGD on the rows that the global batch holds. What ranks exchange does not grow
# with the number of rows N: a table with fewer rows than the batch has sequences is exchanged whole.

def pack_rows(identifiers, row_grads, num_rows, batch_size, rank):
    """Packs the row gradients of one rank; the sum over the ranks is what sign_sgd takes.

    Sudoku's table has one row, ARC's have hundreds of thousands.

    Args:
        identifiers: the table's row of each of the rank's sequences, int [b].
        row_grads: the gradient of each sequence with respect to its row, [b, D'].
        num_rows: N of the table.
        batch_size: the sequences of all ranks.
        rank: this rank, an int tensor [1]: a constant would give each replica a program of its own.

    Returns [min(num_rows, batch_size), D' + 1].
    """
    if num_rows <= batch_size:
        # a slot for each row of the table: the sum of its gradients, and how often the batch holds it
        counts = torch.ones_like(row_grads[:, :1])
        counted = torch.cat([row_grads, counts], dim=1)
        width = counted.shape[1]
        slots = torch.zeros(num_rows, width, device=counted.device)
        return slots.index_add(0, identifiers, counted)
    # a slot for each sequence of the batch: its gradient and its identifier; other ranks' slots are zero
    own_identifiers = identifiers.view(-1, 1).float()
    own_slots = torch.cat([row_grads, own_identifiers], dim=1)
    own_size = len(own_slots)
    slots = own_slots.repeat(batch_size // own_size, 1)
    rank_of_slot = torch.arange(batch_size, device=slots.device) // own_size
    is_own = rank_of_slot == rank
    return torch.where(is_own.view(-1, 1), slots, 0)


def sign_sgd(table, packed, batch_size, lr, weight_decay):
    """Moves the rows of the table that the batch holds, in place: decoupled decay and the gradient's sign.

    Args:
        table: the puzzle embedding [N, D'].
        packed: the sum of pack_rows over all ranks.
        batch_size: the sequences of all ranks.
        lr, weight_decay: tensors or numbers.
    """
    grads = packed[:, :-1]
    if len(table) <= batch_size:
        is_held = packed[:, -1:] > 0
        change = weight_decay * table + torch.sign(grads)
        table.sub_(is_held * lr * change)
        return

    # Gradients of one identifier add up in its first slot; each of its slots then writes the same new row.
    identifiers = packed[:, -1].long()
    is_same = identifiers.unsqueeze(0) == identifiers.unsqueeze(1)  # [B, B]
    first_slot = is_same.int().argmax(1)
    total = torch.zeros_like(grads)
    total = total.index_add(0, first_slot, grads)
    old = table[identifiers]
    change = weight_decay * old + torch.sign(total[first_slot])
    table[identifiers] = old - lr * change


# ---------------------------------------------------------------------------------------------------------
# Schedules: pure functions of the settings and the step, which counts from 0

def learning_rate(settings, peak, step, total_steps):
    """Returns the rate of a step: linear warm-up to peak, then a cosine to peak * lr_min_ratio at the end."""
    # warm-up
    step += 1
    warmup_steps = settings.lr_warmup_steps
    if step < warmup_steps:
        return peak * step / warmup_steps
    # cosine
    decay_steps = max(1, total_steps - warmup_steps)
    progress = (step - warmup_steps) / decay_steps
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    last_ratio = settings.lr_min_ratio
    ratio = last_ratio + (1 - last_ratio) * cosine
    return peak * ratio


def rates(settings, step, total_steps):
    """Returns {name: float} of all that depends on the step: learning rates and Adam's bias corrections."""
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
    last_step = max(1, total_steps - 1)
    return first + (last - first) * step / last_step


def cycles_at(settings, examples_per_epoch, step):
    """Returns (H_cycles, L_cycles) of a step. In a curriculum each grows linearly over curriculum_epochs."""
    last = settings.H_cycles, settings.L_cycles
    examples = step * settings.global_batch_size
    length = settings.curriculum_epochs * examples_per_epoch  # the curriculum's, in examples
    if examples >= length:
        return last
    cycles = []
    for first, full in (settings.H_cycles_start, last[0]), (settings.L_cycles_start, last[1]):
        growth = (full - first) * examples // length
        cycles.append(first + int(growth))
    return tuple(cycles)
