"""How many steps a run of max_minutes has time for."""
import math
import time

import numpy as np
from torch.utils._pytree import tree_map

import optim
from runtime.errors import UserError
from runtime.process import restart_watchdog


def fit_minutes(run, make_inputs, train_set, test_set, start, began, say):
    """Times steps before the first one, and returns the settings of a run that fits max_minutes.

    The state stays as it was. All ranks; rank 0 decides.

    Args:
        run: a train.Run.
        make_inputs: train.make_inputs.
        train_set, test_set: the Datasets.
        start: a checkpoint.Start.
        began: time.monotonic() when the command began.
        say: a function for a line of the log.

    Returns {name: value}: max_steps in place of max_minutes, and a curriculum and a warm-up that fit. Raises
    UserError if no time is left to train.
    """
    settings = run.settings
    evaluator = run.evaluator
    examples_per_epoch = optim.epoch_size(train_set)
    total_steps = optim.count_steps(settings, examples_per_epoch) or 1

    # time a training step of the full depth; the curriculum's others take less, in proportion to their FLOPs
    full = settings.H_cycles, settings.L_cycles
    inputs = make_inputs(run, train_set, 0, total_steps)
    state = tree_map(lambda t: t.to("cpu", copy=True), run.state)
    step_seconds = time_steps(run, lambda: run.train_step(run.state, inputs, full))
    run.state = run.device.put(state)
    # a thousand steps of the notional run stand for all
    steps = range(0, total_steps, math.ceil(total_steps / 1000))
    depths = [optim.cycles_at(settings, examples_per_epoch, step) for step in steps]
    full_flops = run.flops_per_example(full)
    if full_flops:  # a fork's may be unknown
        step_seconds *= sum(map(run.flops_per_example, depths)) / len(steps) / full_flops

    # time a step of an evaluation
    final_indices = test_set.subset(settings.eval_final_max_puzzles)
    batch = test_set.test_batch(np.resize(final_indices, run.batch_size))
    inputs = evaluator.inputs(*run.eval_weights(), batch)
    slots = evaluator.new_slots()
    eval_step_seconds = time_steps(run, lambda: evaluator.program(slots, inputs)["loss"])

    def evaluation_seconds(indices):
        # most sets of puzzles took 1.0 to 1.9 of 8 attempts at a puzzle, the hardest took 6
        attempts = len(indices) * min(settings.eval_attempts, 1.5)
        batches = math.ceil(attempts / settings.global_batch_size)
        # with eval_patience, trained models were seen to take a sixth to a half of the steps, and untrained
        # ones all
        return batches * evaluator.max_steps * eval_step_seconds

    # a step's share of the evaluations during training, and one of a file's weights before the first step
    final_seconds = evaluation_seconds(final_indices)
    first_seconds = 0
    if settings.eval_interval:
        steps_between = settings.eval_interval * examples_per_epoch / settings.global_batch_size
        seconds = evaluation_seconds(test_set.subset(settings.eval_max_puzzles, settings.eval_versions))
        step_seconds += seconds / max(1, steps_between)
        first_seconds = 0 if start.is_evaluated else seconds

    # the steps for which there is time; 3% are for checkpoints and for what times vary
    seconds_left = 0.97 * 60 * settings.max_minutes - (time.monotonic() - began)
    seconds_left -= first_seconds + final_seconds
    max_steps = run.device.all_gather(int(seconds_left / step_seconds))[0]
    estimate = f"the final evaluation takes about {final_seconds:.0f} s"
    if first_seconds:
        estimate += f", and one before the first step {first_seconds:.0f} s"
    if max_steps < 1:
        raise UserError(f"max_minutes={settings.max_minutes:g} leaves no time to train: {estimate} "
                        "(see eval_final_max_puzzles and eval_max_puzzles)")
    say(f"max_minutes={settings.max_minutes:g}: max_steps is {max_steps}, of {1e3 * step_seconds:.0f} ms "
        f"each with the evaluations between them; {estimate}")

    # settings that would train the same run; a warm-up of the whole run would never reach the peak
    return dict(
        max_steps=max_steps,
        max_minutes=0.0,
        curriculum_epochs=settings.curriculum_epochs * max_steps / total_steps,
        lr_warmup_steps=min(settings.lr_warmup_steps, max_steps // 10),
    )


def keep_length(settings, resumed):
    """Gives a run that resumes the length that it has, if max_minutes asks for another one.

    If max_minutes and max_steps are both set, the last one that was assigned counts; the other becomes 0.

    resumed: {name: value} of its checkpoint's settings, {} for a new run. Returns a line for the log, or "".
    """
    if settings.max_minutes and settings.max_steps:
        lengths = [name for name in settings.assigned if name in ("max_minutes", "max_steps")]
        if lengths[-1:] == ["max_minutes"]:
            settings.max_steps = 0
        else:
            settings.max_minutes = 0.0
    if not (resumed and settings.max_minutes):
        return ""
    note = f"max_minutes={settings.max_minutes:g} chose the length of a new run; this one keeps its own"
    names = "max_steps", "curriculum_epochs", "lr_warmup_steps"
    vars(settings).update({name: resumed[name] for name in names}, max_minutes=0.0)
    return note


def time_steps(run, begin_step):
    """Returns the seconds of a step on rank 0, once it is compiled. All ranks.

    begin_step: a function that begins one and returns a tensor.
    """
    enough_seconds = min(5, 0.6 * run.settings.max_minutes)
    restart_watchdog(run.settings.stall_timeout)
    begin_step().cpu()
    # twice as many, until it takes long enough
    n = 1
    seconds = 0.0
    while seconds < enough_seconds:
        n *= 2
        began = time.perf_counter()
        for _ in range(n):
            result = begin_step()
            restart_watchdog(run.settings.stall_timeout)
        result.cpu()  # waits for the device
        seconds = run.device.all_gather(time.perf_counter() - began)[0]
    return seconds / n
