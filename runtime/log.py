"""A run's log: lines on the terminal and in log.txt, and metrics in metrics.jsonl and at Weights & Biases."""
import json
import os
import platform
import time
from contextlib import contextmanager, suppress

import torch

from runtime import files
from runtime.errors import UserError, one_line
from runtime.flops import peak_flops
from runtime.process import restart_watchdog

SLOW = 30  # seconds of a step that is reported before its end, and between its lines


class Log:
    """Prints lines and writes log.txt and metrics.jsonl of out_dir, on rank 0; sends metrics to W&B.

    A line that cannot be appended costs a warning and not the run. step: of the last line of metrics.
    """

    def __init__(self, settings, device, step):
        self.settings = settings
        self.device = device
        self.step = step
        self.wandb = None  # what wandb.init returns
        self.hardware = f"{device.world} x {device.type} ({device.name})"
        self.next_line = 0.0  # when within_step may print again
        self.restart_clock(step)

    def print0(self, text):
        """Prints a line on rank 0, and adds it to log.txt."""
        if self.device.rank == 0:
            # the reader of a pipe has left, the disk is full, or the terminal's encoding lacks a character
            with suppress(OSError, UnicodeError):
                print(text, flush=True)
            self.append("log.txt", text)

    def write_metrics(self, step, values):
        """Adds a line to metrics.jsonl, and a row at W&B."""
        if self.device.rank != 0:
            return
        line = {"step": step, **values}
        self.append("metrics.jsonl", json.dumps(line))
        try:
            if self.wandb:
                self.wandb.log(line)
        except Exception as e:  # its process was killed
            self.stop_wandb("stopped", e)

    def append(self, name, line):
        with self.warning_if_unwritable(name) as path:
            os.makedirs(self.settings.out_dir, exist_ok=True)
            with open(path, "ab") as f:
                f.write(f"{line}\n".encode(errors="backslashreplace"))

    @contextmanager
    def warning_if_unwritable(self, name):
        """Yields the path of a file of out_dir; if the block cannot write it, training goes on."""
        path = f"{self.settings.out_dir}/{name}"
        try:
            yield path
        except OSError as e:
            files.to_stderr(f"{path}: cannot be written ({e.strerror}); training continues")

    # -----------------------------------------------------------------------------------------------------
    # The start of a run

    def header(self, trm, train_set, test_set, notes):
        """Logs what the run is, and on what; notes: further lines."""
        self.print0(f"# python {platform.python_version()}, torch {torch.__version__}, "
                    f"{platform.platform()}, {os.cpu_count()} cores, {self.hardware}; "
                    f"forks: {self.settings.forks or 'none'}; "
                    f"other settings unlike train.py's: {self.settings.flags() or 'none'}")
        command = train_set.made_by() or "made by an unknown command"
        self.print0(f"{trm.num_parameters():,} parameters; "
                    f"{len(train_set):,} training examples of {train_set.total_groups:,} puzzles, "
                    f"{len(test_set):,} test puzzles in {self.settings.data_path} ({command})")
        for note in filter(None, notes):
            self.print0(note)

    def begin(self, run, train_set, run_id, recipe, total_steps):
        """Says how far this run goes, and begins its metrics.jsonl and W&B.

        run_id: of Checkpoints; it continues W&B's curves after a restart. recipe: {name: value} of the
        settings that say what the run trains.
        """
        self.print0(f"training from step {self.step} to {total_steps}, "
                    f"{self.settings.global_batch_size} sequences a step")
        if self.device.rank != 0:
            return
        facts = dict(
            settings=recipe,
            total_steps=total_steps,
            parameters=run.model.num_parameters(),
            flops_per_example=run.flops_per_example(),
            examples=len(train_set),
            puzzles=train_set.total_groups,
            data_sha256=train_set.sha256,
            init_from=self.settings.init_from,
            forks=self.settings.forks,
        )
        self.begin_metrics(facts)
        if self.settings.wandb_log:
            self.start_wandb(run_id, facts)

    def begin_metrics(self, facts):
        """Writes the first line of metrics.jsonl, and drops lines past the first step. Rank 0."""
        # a run that resumes may have begun on other hardware
        with self.warning_if_unwritable("metrics.jsonl") as path:
            hardware = sorted({self.hardware, *files.read_facts(path).get("hardware", [])})
            lines = [{"step": 0, "run": facts | dict(hardware=hardware)}]
            # a killed run may have logged steps past its last checkpoint, which this one repeats; one that
            # begins at step 0 repeats all
            lines += [line for line in files.read_metrics(path) if line["step"] <= self.step and self.step]
            with files.replacing(path) as f:
                f.write("".join(json.dumps(line) + "\n" for line in lines).encode())

    def start_wandb(self, run_id, facts):
        """Starts W&B's run, or continues it; training does without. Rank 0."""
        settings = self.settings
        try:
            import wandb
            name = settings.wandb_run_name or os.path.basename(os.path.abspath(settings.out_dir))
            self.wandb = wandb.init(
                id=run_id, resume="allow", mode=settings.wandb_mode, dir=settings.out_dir,
                project=settings.wandb_project, name=name, config=vars(settings) | facts,
                settings=dict(console="off", init_timeout=60))
            wandb.define_metric("*", step_metric="step")  # W&B drops rows whose own step goes back
            self.print0(f"W&B: {settings.wandb_mode}, {self.wandb.url or self.wandb.dir}")
        except Exception as e:  # whatever it is
            self.stop_wandb("off", e)

    def stop_wandb(self, word, error):
        self.wandb = None
        self.print0(f"W&B: {word} ({one_line(error)}); metrics.jsonl has everything")

    # -----------------------------------------------------------------------------------------------------
    # Steps and evaluations

    def restart_clock(self, step):
        """Leaves compiling, an evaluation or a checkpoint out of the rates."""
        self.clock = time.perf_counter()
        self.timed_from = step

    def first_step(self, step, cycles, result):
        """Reports the time of the first step at a depth, which compiles; result: a tensor of it."""
        result.cpu()  # waits for the device
        seconds = time.perf_counter() - self.clock
        how = "any compiling included" if self.device.compiles else "not compiled"
        self.print0(f"step {step}: {seconds:.1f} s for the first step at H_cycles {cycles[0]}, L_cycles "
                    f"{cycles[1]}, {how}; left out of the rates below")
        self.restart_clock(step)

    def within_step(self, seconds, share):
        """Reports how far a step is that takes longer than SLOW; see Device.for_each_micro_batch."""
        restart_watchdog(self.settings.stall_timeout)
        step_seconds = seconds / share
        if step_seconds >= SLOW and time.monotonic() >= self.next_line:
            self.next_line = time.monotonic() + SLOW
            self.print0(f"{share:.0%} of a step, {files.duration(step_seconds - seconds)} left")

    def write_train(self, step, total_steps, values, lr, flops_per_example):
        """Logs the steps since the last line; returns the metrics, which are values and the speed.

        Args:
            step, total_steps: the steps that are done, and the length of the run.
            values: {"train/loss": ...}, means over the steps since the last line.
            lr: the learning rate of the last step.
            flops_per_example: forward and backward.
        """
        line = f"step {step}/{total_steps} | {listed(values)}"
        values = values | {"train/lr": lr}
        # the speed, unless all these steps compiled
        if step > self.timed_from:
            seconds = (time.perf_counter() - self.clock) / (step - self.timed_from)
            speed = self.settings.global_batch_size / seconds
            flops = speed * flops_per_example
            values |= {
                "perf/examples_per_sec": speed,
                "perf/step_time": seconds,
                "perf/tflops": flops / 1e12,
            }
            peak = peak_flops(self.device)
            if peak:
                values["perf/mfu"] = flops / peak / self.device.world
            line += f" | {speed:,.0f} examples/s {1e3 * seconds:,.0f} ms"
            line += f" | eta {files.duration((total_steps - step) * seconds)}"
        values |= self.device.counts()  # of the compiler, on XLA
        self.write_metrics(step, values)
        self.print0(line)
        self.step = step
        return values

    def write_evaluation(self, step, values):
        """Logs an evaluation; metrics.jsonl is the record of the training run alone."""
        if not self.settings.eval_only:
            self.write_metrics(step, values)
        self.print0(f"step {step} | evaluation: {listed(values)}")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        """Ends W&B, which can hang: the watchdog then ends the process."""
        if self.wandb:
            restart_watchdog(60)
            with suppress(Exception):
                self.wandb.finish()
        restart_watchdog(0)


def listed(values):
    """Returns {"train/accuracy": 0.5, ...} as "accuracy 0.5000 ...", without names that lack a slash."""
    words = []
    for name, value in values.items():
        group, slash, metric = name.partition("/")
        if slash:
            words += [metric, f"{value:.4f}" if isinstance(value, float) else str(value)]
    return " ".join(words)


def check_login(settings):
    """Raises UserError if a run needs W&B's key, and this machine has none; wandb.init would ask for it."""
    if not settings.wandb_log or settings.wandb_mode != "online" or settings.eval_only:
        return
    try:
        import wandb
        problem = "" if wandb.login(prompt=False, verify=False) else "no login at W&B"
    except Exception as e:  # wandb is missing, or the key has another form
        problem = one_line(e)
    if problem:
        raise UserError(f"--wandb_log: {problem}: run `wandb login`, or choose --wandb_mode=offline")
