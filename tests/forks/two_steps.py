"""Two supervision steps an update; what halts after the first one takes a new puzzle."""
from torch.utils._pytree import tree_map

import data
import optim
import train

_inputs, _gradients = train.make_inputs, train.gradients


def inputs_of_two(run, puzzles, step, total_steps):
    settings, device = run.settings, run.device
    seed = settings.seed + 1
    batch = puzzles.train_batch(seed, step, settings.global_batch_size, device.rank, device.world)
    batch["min_halt_steps"] = data.halting_draws(
        seed, step, settings.global_batch_size, settings.halt_max_steps,
        optim.exploration(settings, step, total_steps), device.rank, device.world)
    return _inputs(run, puzzles, step, total_steps) | device.put(dict(second=batch))


def gradients(run, state, inputs, batch, cycles):
    first = _gradients(run, state, inputs, batch, cycles)
    second = _gradients(run, state, inputs, inputs["second"], cycles)
    return tree_map(lambda a, b: a + b, first, second)


train.make_inputs, train.gradients = inputs_of_two, gradients
