"""The first fifteen minutes on a chip: is this code right there, and how fast?

    python scripts/first_chip.py --device=cuda     NVIDIA GPUs
    python scripts/first_chip.py --device=xla      TPUs, by torch_xla
    python scripts/first_chip.py --device=tpu      TPUs, by TorchTPU
    python scripts/first_chip.py --device=cpu      rehearses it at tiny sizes, in two minutes
    PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 python scripts/first_chip.py --device=xla     the same through XLA
    PJRT_DEVICE=CPU XLA_FLAGS= python tests/torchtpu/on_cpu.py scripts/first_chip.py --device=tpu

Each part is one command, which has the chips for itself. A part that fails or hangs does not end the others,
and one for which the minutes are too few is left out. Nothing is downloaded. out_dir keeps the output of each
part, and all results in results.md and results.json. The exit code is 1 if a part has failed.
"""
import importlib.metadata
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Callable, NamedTuple

ROOT = str(Path(__file__).parents[1])
sys.path.insert(0, ROOT)
import configurator
from configurator import Above0
from runtime.errors import UserError, check_choices
from runtime.files import read_metrics, read_torch_file


class Settings:
    device = ""  # cuda, xla, tpu or cpu
    minutes: Above0 = 15.0  # in all
    out_dir = "out/first_chip"  # a new folder


TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node="
# torch.compile may choose other kernels in the next run, so the checks on a GPU do without it. A maze has 11
# times the cells of a Sudoku.
TPU = ("", "", "--replica_batch_size=96 --micro_batch_size=32",
       "--replica_batch_size=12 --micro_batch_size=4 --size=30")
# {device: (what starts a script on all of its chips, flags of runs that are compared, and for a chip's share
# of the paper's Sudokus and of its mazes bench.py's flags)}
DEVICES = {
    "cuda": (TORCHRUN + "gpu", "--compile=off", "--replica_batch_size=768 --micro_batch_size=192",
             "--replica_batch_size=96 --micro_batch_size=24 --size=30"),
    "xla": TPU,
    "tpu": TPU,
    "cpu": (TORCHRUN + "2", "", "", ""),
}
# The demo's puzzles; 20 of its steps, at full depth and a constant rate.
PUZZLES = "--size=6 --num_train=3000 --num_test=1000 --num_aug=100"
STEPS = ("--curriculum_epochs=0 --lr_min_ratio=1 --max_steps=20 --checkpoint_interval=10 --log_interval=1 "
         "--eval_interval=0 --eval_final_max_puzzles=32")
# A rehearsal's puzzles, models and batches. XLA's optimizer would take longer than their steps.
TINY_PUZZLES = "--size=4 --num_train=64 --num_test=40 --num_aug=5"
TINY = "--hidden_size=32 --multiple_of=32 --H_cycles=1 --L_cycles=1"
TINY_BENCH = f"{TINY} --size=4 --replica_batch_size=8 --micro_batch_size=4 --steps=2"
TINY_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "XLA_FLAGS": "--xla_backend_optimization_level=0 "
                    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"}
BUSY_SECONDS = 30  # chips stay busy for so long after their process was killed


class Part(NamedTuple):
    """Describes a command and how its result is judged."""

    seconds: float  # it starts if so many are left, and may take four times as many
    command: str
    judge: Callable  # judge(output) returns (whether it is right, words, figures)
    stop_at: str = ""  # it gets SIGTERM once its output has these words


# ---------------------------------------------------------------------------------------------------------
# What is run

def list_parts(device, is_rehearsal):
    """Returns {name: Part}, the most valuable first, for a folder of their own."""
    launcher, check_flags, sudoku, maze = DEVICES[device]
    puzzles, model, bench, goal = PUZZLES, "", "", 0.98
    if is_rehearsal:
        puzzles, model, bench, goal = TINY_PUZZLES, TINY, TINY_BENCH, 0
    prepare = f"prepare_sudoku.py --source=generate {puzzles} --output_dir=data"
    demo = (f"config/demo.py --device={device} --data_path=data '--data_prepare={prepare}' "
            f"{check_flags} {model}")
    train = f"train.py {demo} {STEPS}"
    train_on_all = f"{launcher} {train}"

    def measure(config, flags=sudoku):
        """Returns the Part that times the steps of a config file on all chips."""
        return Part(90, f"{launcher} bench.py config/{config} --device={device} --data_path=missing "
                    f"--steps=20 {flags} {bench}", judge_steps)

    parts = {
        "parity of one chip, float32": Part(60, f"scripts/parity.py --device={device}", judge_parity),
        "losses of the CPU": Part(
            30, f"{train} --out_dir=cpu --device=cpu --forward_dtype=float32",
            partial(find_line, "trained ")),
        "losses of one chip, float32": Part(
            40, f"scripts/one_chip.py {demo} {STEPS} --out_dir=one --forward_dtype=float32",
            partial(compare_losses, "one", "cpu", 1e-3)),
        "losses of one chip, --compile=off": Part(
            90, f"scripts/one_chip.py {demo} {STEPS} --out_dir=off --forward_dtype=float32 --compile=off",
            partial(compare_losses, "off", "one", 1e-3)),
        "losses of all chips, float32": Part(
            40, f"{train_on_all} --out_dir=all --forward_dtype=float32",
            partial(compare_losses, "all", "one", 1e-3)),
        "losses of all chips, bfloat16": Part(
            40, f"{train_on_all} --out_dir=bfloat16 --forward_dtype=bfloat16",
            partial(compare_losses, "bfloat16", "cpu", 0.05)),
        "sudoku": measure("sudoku.py"),
        "ten steps again": Part(
            40, f"{train_on_all} --out_dir=again --forward_dtype=bfloat16 --max_steps=10",
            partial(compare_checkpoints, "again", "bfloat16", 10)),
        "resumed from there": Part(
            40, f"{train_on_all} --out_dir=again --forward_dtype=bfloat16 --init_from=resume",
            partial(compare_checkpoints, "again", "bfloat16", 20)),
        "SIGTERM": Part(
            40, f"{train} --out_dir=stopped --max_steps=100",
            partial(find_line, "stopped at step"), stop_at="step 2/"),
        "resumed after it": Part(
            40, f"{train} --out_dir=stopped --max_steps=100 --init_from=resume",
            partial(find_line, "training from step")),
        "demo": Part(90, f"train.py {demo} --out_dir=demo", partial(judge_demo, goal)),
        # 16 chips share the batch of the study's baseline
        "baseline": measure("baseline.py", f"{sudoku} --replica_batch_size=384"),
        "sudoku, --compile=off": measure("sudoku.py", f"{sudoku} --compile=off"),
        "sudoku_att": measure("sudoku_att.py"),
        "maze": measure("maze.py", maze),
    }
    # on a GPU the runs that are compared do without compiling, and a CPU does not compile
    if device != "tpu":
        del parts["losses of one chip, --compile=off"]
    if is_rehearsal:
        # they repeat what others show
        del parts["baseline"], parts["sudoku_att"], parts["maze"]
    return parts


# ---------------------------------------------------------------------------------------------------------
# How it is judged

def judge_parity(output):
    errors = last_json(output)
    return True, f"largest error {max(errors.values()):.1e}", errors


def compare_losses(name, reference, limit, output):
    """Compares the losses of a run's steps with those of another run."""
    losses, expected = map(losses_of, (name, reference))
    worst = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
    return worst <= limit, f"within {worst:.1e} of {reference}", losses


def losses_of(run):
    return [line["train/loss"] for line in read_metrics(f"{run}/metrics.jsonl") if "train/loss" in line]


def compare_checkpoints(name, reference, step, output):
    """Compares all that two runs have trained."""
    from torch.utils._pytree import tree_leaves
    states = []
    for run in name, reference:
        saved = read_torch_file(f"{run}/ckpt_{step:08d}.pt")
        states.append(tree_leaves([saved[part] for part in ("weights", "ema", "optimizer")]))
    worst = max(float((a - b).abs().max()) for a, b in zip(*states))
    return worst == 0, f"differs from {reference} by {worst:.1e}" if worst else "the same bits", worst


def find_line(words, output):
    return True, re.findall(f".*{words}.*", output)[0], None


def judge_demo(goal, output):
    share = read_metrics("demo/metrics.jsonl")[-1]["eval/exact_accuracy"]
    return share >= goal, f"solves {share:.1%}", share


def judge_steps(output):
    """Tells what bench.py measured."""
    figures = last_json(output)
    words = (f"{figures['step_ms']:.1f} ms for {figures['global_batch_size']} sequences, "
             f"{figures['examples_per_sec']:,.0f} examples/s, "
             f"host {figures['host_ms'] / figures['step_ms']:.0%}, "
             f"evaluation {figures['evaluation_ms']:.1f} ms, first step {figures['first_step_s']:.0f} s")
    # a CPU has no memory of its own, and neither it nor some GPUs have a known peak
    if figures["peak_memory_gb"]:
        words += f", {figures['peak_memory_gb']:.1f} GB"
    if figures["mfu"]:
        words += f", {figures['mfu']:.1%} of peak"
    return True, words, figures


def last_json(output):
    return json.loads(re.findall("^{.*}$", output, re.MULTILINE)[-1])


# ---------------------------------------------------------------------------------------------------------
# The command

def main(settings):
    """Runs the parts for which there is time. Exits with 1 if one has failed."""
    check_choices(settings, dict(device=DEVICES))
    if os.path.exists(settings.out_dir):
        raise UserError(f"--out_dir={settings.out_dir} exists: choose another")
    os.makedirs(settings.out_dir)
    os.chdir(settings.out_dir)
    is_rehearsal = settings.device == "cpu" or os.environ.get("PJRT_DEVICE") == "CPU"
    if is_rehearsal:
        os.environ.update(TINY_ENVIRONMENT | os.environ)

    end = time.monotonic() + 60 * settings.minutes
    results = {}
    for name, part in list_parts(settings.device, is_rehearsal).items():
        seconds_left = end - time.monotonic()
        print(f"{seconds_left / 60:.1f} minutes left: {name}", flush=True)
        results[name] = dict(ok=None, text=f"left out: it needs {part.seconds} s", seconds=0)
        if seconds_left >= part.seconds:
            results[name] = run_part(name, part, min(seconds_left, 4 * part.seconds))
        print(f"    {results[name]['text']}", flush=True)
        # what is known stays if this process is killed
        table = report(results)

    print(f"\n{table}\nPlease open an issue of the project with both files, results.md and results.json of "
          f"{settings.out_dir}")
    if any(result["ok"] is False for result in results.values()):
        sys.exit(1)


def run_part(name, part, limit):
    """Returns {name: value} of what a part has shown; limit: the seconds that it may take."""
    log = Path(f"{name}.log".replace(" ", "_"))
    began = time.monotonic()
    try:
        ok, text, figures = part.judge(run_command(part, log, limit))
    # a run that failed, or one that lacks the run to compare it with
    except Exception as e:
        ok, text, figures = False, " ".join(f"{type(e).__name__}: {e}".split()), None
    if not ok:
        text = f"**failed**: {text}"
    seconds = time.monotonic() - began
    return dict(ok=ok, text=text, seconds=seconds, figures=figures, command=part.command)


def run_command(part, log, limit):
    """Returns the output of a part's command, which also goes to a file. Raises RuntimeError if it fails."""
    words = shlex.split(part.command)
    command = [sys.executable, *(f"{ROOT}/{word}" if word.endswith(".py") else word for word in words)]
    stop_at = part.stop_at
    end = time.monotonic() + limit
    with open(log, "w") as f:
        running = subprocess.Popen(command, stdout=f, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        while running.poll() is None and time.monotonic() < end:
            if stop_at and stop_at in log.read_text(errors="replace"):
                running.terminate()
                stop_at = ""
            time.sleep(0.1)
    finally:
        # the processes that it has started, too
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
    output = log.read_text(errors="replace")
    if running.returncode == (3 if part.stop_at else 0):
        return output
    # its last lines say why
    if running.returncode is None:
        time.sleep(BUSY_SECONDS)
        raise TimeoutError(f"no end after {limit:.0f} s: {output[-300:]}")
    raise RuntimeError(output[-300:])


def report(results):
    """Writes results.md and results.json, and returns the first."""
    # versions and hardware; the log of a run begins with most of them
    facts = ["commit " + subprocess.getoutput(f"git -C {shlex.quote(ROOT)} rev-parse HEAD")]
    for package in ("torch_xla", "torch_tpu", "libtpu"):
        with suppress(importlib.metadata.PackageNotFoundError):
            facts.append(f"{package} {importlib.metadata.version(package)}")
    with suppress(OSError):
        facts.append(Path("all/log.txt").read_text().partition(";")[0].removeprefix("# "))
    table = ", ".join(facts) + "\n\n| part | result | seconds |\n|---|---|---|\n"
    for name, result in results.items():
        text = result["text"].replace("|", "\\|")
        table += f"| {name} | {text} | {result['seconds']:.0f} |\n"
    Path("results.md").write_text(table)
    Path("results.json").write_text(json.dumps(dict(facts=facts, parts=results), indent=1))
    return table


if __name__ == "__main__":
    configurator.start(main, Settings)
