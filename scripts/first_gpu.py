"""The first five minutes on a GPU: is this code right there, and how fast?

    pip install -r requirements-gpu.txt pytest    (a test checks the parity)
    python scripts/first_gpu.py                   prints JSON line by line, then a table in Markdown
    python scripts/first_gpu.py --device=cpu      rehearses it at tiny sizes in a minute

First come the checks, then the times, memory and kernels of five models, the most valuable first. The script
leaves out the models for which the minutes are too few, and says so. It downloads nothing. out_dir keeps
results.jsonl and the data. The exit code is 1 if a check or a model has failed.
"""
import json
import os
import shlex
import subprocess
import sys
import time
import traceback
from pathlib import Path

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, os.path.join(ROOT, "tests")]
import torch
from torch.profiler import profile
from torch.utils._pytree import tree_leaves, tree_map

import bench
import configurator
import train
from runtime import device as devices
from runtime import process
from runtime.errors import UserError, check_choices


class Settings:
    # what is measured, and for how long
    minutes = 5.0  # in all
    device = "cuda"  # or cpu: a rehearsal
    out_dir = "out/first_gpu"  # a new folder
    part = ""  # only this one, in a process that first_gpu.py starts


# {part: seconds that must be left for it to start}; on an H200 a compiled model took 70 to 110 s
PARTS = {
    "checks": 30,
    "sudoku_speed": 90,
    "sudoku": 110,
    "sudoku_att": 110,
    "sudoku_eager": 60,
    "maze_eager": 60,
}

# {model: (config file, side of its puzzles, flags)}; the micro-batches fit a card of 24 GB
MODELS = {
    "sudoku_speed": ("sudoku_speed.py", 9, ["--micro_batch_size=384"]),
    "sudoku": ("sudoku.py", 9, ["--micro_batch_size=192"]),
    "sudoku_att": ("sudoku_att.py", 9, ["--micro_batch_size=192"]),
    "sudoku_eager": ("sudoku.py", 9, ["--micro_batch_size=192", "--compile=off"]),
    "maze_eager": ("maze.py", 30, ["--global_batch_size=96", "--micro_batch_size=48", "--compile=off"]),
}
# the demo's model, at full depth and not compiled
DEMO = ("demo.py", 6, ["--curriculum_epochs=0", "--compile=off"])
# a rehearsal has these flags, and these parts
TINY = ["--hidden_size=32", "--global_batch_size=8", "--micro_batch_size=0", "--L_cycles=1",
        "--L_cycles_start=1"]
REHEARSED = ("checks", "sudoku_speed", "maze_eager")


def main(settings):
    """Runs all parts, and prints the table. Exits with 1 if one has failed."""
    if settings.part:
        run_part(settings)
        return

    # the device, and a new folder
    check_choices(settings, dict(device=("cuda", "cpu")))
    _, card = devices.choose_device(settings.device)
    if os.path.exists(settings.out_dir):
        raise UserError(f"--out_dir={settings.out_dir} exists: choose another")
    os.makedirs(settings.out_dir)
    end = time.monotonic() + 60 * settings.minutes
    put(settings, "environment", card, torch=torch.__version__, cuda=torch.version.cuda,
        cores=os.cpu_count())

    # each part is a process, so that one which fails does not end the others
    left_out = []
    for name in PARTS if settings.device == "cuda" else REHEARSED:
        seconds_left = end - time.monotonic()
        if seconds_left < PARTS[name]:
            left_out.append(name)
            continue
        command = [sys.executable, os.path.abspath(__file__), f"--device={settings.device}",
                   f"--out_dir={settings.out_dir}", f"--part={name}"]
        try:
            subprocess.run(command, check=True, timeout=seconds_left)
        except subprocess.TimeoutExpired:
            left_out.append(name)
        except subprocess.CalledProcessError as e:
            put(settings, "part", name, ok=False, error=str(e))

    # tell what all parts have found
    lines = Path(settings.out_dir, "results.jsonl").read_text().splitlines()
    results = [json.loads(line) for line in lines]
    print_table(results)
    if left_out:
        names = ", ".join(left_out)
        print(f"\nleft out or cut short, since --minutes={settings.minutes:g} are too few: {names}")
    if not all(result.get("ok", True) for result in results):
        sys.exit(1)


def run_part(settings):
    """Runs the checks, or measures one of MODELS."""
    if settings.part in MODELS:
        measure(settings, settings.part)
        return
    # a check that fails does not end the others
    for check in parity, losses, repeat, resume:
        try:
            check(settings)
        except Exception as e:
            traceback.print_exc()
            put(settings, check.__name__, "", ok=False, error=f"{type(e).__name__}: {e}"[:300])


def put(settings, part, case, /, **values):
    """Adds a result to results.jsonl, and prints it."""
    line = json.dumps(dict(part=part, case=case, **values))
    with open(f"{settings.out_dir}/results.jsonl", "a") as f:
        f.write(line + "\n")
    print(line, flush=True)


def print_table(results):
    """Prints in Markdown what failed, and the measured steps."""
    # the checks
    checks = [result for result in results if "ok" in result]
    failed = [result for result in checks if not result["ok"]]
    print(f"\n{len(checks) - len(failed)} of {len(checks)} checks passed")
    for result in failed:
        print(f"**failed**: {json.dumps(result)}")
    # the steps; a CPU has neither a known peak nor a memory of its own
    print("\n| steps | sequences at a time | step | of peak | memory | evaluation step | compiling |")
    print("|---|---|---|---|---|---|---|")
    for result in results:
        if result["part"] == "step":
            print(
                f"| {result['case']} | {result['sequences_at_a_time']} | {result['step_ms']:.1f} ms "
                f"| {result['mfu'] or 0:.1%} | {result['peak_memory_gb'] or 0:.1f} GB "
                f"| {result['evaluation_ms']:.1f} ms "
                f"| {result['first_step_s'] + result['first_evaluation_s']:.0f} s |")


def new_run(settings, model, *flags, kind=""):
    """Returns a train.Run and a function that makes its next inputs, of random puzzles.

    Args:
        settings: of this script.
        model: one of MODELS, or DEMO.
        flags: more flags of train.py.
        kind: of device, if not the settings'.
    """
    # a rehearsal has smaller boards, too
    config, side, model_flags = model
    tiny = []
    if settings.device == "cpu":
        tiny = TINY
        side = 6
    # the settings, and the puzzles unless an earlier run has made them
    folder = f"{settings.out_dir}/{side}"
    run_settings = configurator.configure(train.Settings, [
        f"{ROOT}/config/{config}", f"--data_path={folder}/random", *model_flags, *tiny, *flags])
    bench.find_or_make_dataset(run_settings, folder, side)
    # the device, and the run on it
    run_device = train.open_device(kind or settings.device, run_settings)
    run_settings.forward_dtype, _ = run_device.choose_dtype(run_settings.forward_dtype)
    return bench.new_run(run_settings, run_device)


# ---------------------------------------------------------------------------------------------------------
# Is it right?

def parity(settings):
    """Puts the largest error against the official code's recorded steps, at float32."""
    import test_parity
    for path in test_parity.FILES:
        replay = test_parity.Replay(path, settings.device)
        error = ""
        try:
            replay.compare_all()
        except AssertionError as e:
            error = str(e)
        put(settings, "parity", os.path.basename(path), ok=not error, worst=replay.worst, error=error)


def losses(settings):
    """Puts the demo's first losses on the CPU in float32, and how far the device's are from them."""
    expected = []
    for kind, dtype, limit in (
        ("cpu", "float32", 0),
        (settings.device, "float32", 1e-3),
        (settings.device, "bfloat16", 0.05),
    ):
        # the mean loss of each of 20 steps
        run, next_inputs = new_run(settings, DEMO, f"--forward_dtype={dtype}", kind=kind)
        train_step = bench.train_step_of(run, next_inputs)
        curve = []
        for _ in range(20):
            train_step()
            curve.append(run.take_means(1)["train/loss"])
        # the first curve is what the others must be near
        expected = expected or curve
        worst = max(abs(a - b) / b for a, b in zip(curve, expected))
        put(settings, "losses", f"{kind} {dtype}", ok=worst <= limit, worst=worst, losses=curve)


def repeat(settings):
    """Puts whether steps of three kinds of models give the same bits twice."""
    cases = {
        "demo": [],
        "demo with a puzzle embedding": ["--puzzle_emb_ndim=64", "--puzzle_emb_len=2"],
        "demo with attention": ["--mlp_t=False", "--num_heads=2", "--pos_encodings=rope"],
    }
    for case, flags in cases.items():
        run, next_inputs = new_run(settings, DEMO, *flags)
        put_repeat(settings, case, run, next_inputs)


def put_repeat(settings, case, run, next_inputs):
    """Puts whether ten steps from the run's state end with the same bits twice."""
    cycles = run.settings.H_cycles, run.settings.L_cycles
    inputs = [next_inputs() for _ in range(10)]
    # both times from the same state, with the same puzzles
    ends = []
    for _ in range(2):
        state = tree_map(torch.clone, run.state)
        for step_inputs in inputs:
            run.train_step(state, step_inputs, cycles)
        ends.append(state)
    put(settings, "repeat", case, compiled=devices.is_compiled(run.device), ok=same_bits(*ends))


def same_bits(tree, other):
    return all(map(torch.equal, tree_leaves(tree), tree_leaves(other)))


def resume(settings):
    """Puts whether train.py ends with the same bits once its last checkpoint is lost and it resumes."""
    out = f"{settings.out_dir}/resume"
    run, _ = new_run(settings, DEMO, f"--device={settings.device}", f"--out_dir={out}", "--max_steps=20",
                     "--checkpoint_interval=10", "--eval_interval=0", "--eval_final_max_puzzles=32")
    command = [sys.executable, train.__file__, *shlex.split(run.settings.flags())]
    # train to the end, lose the last checkpoint, and go on with the one before
    ends = []
    for init_from in "scratch", "resume":
        subprocess.run([*command, f"--init_from={init_from}"], check=True)
        saved = torch.load(f"{out}/ckpt_00000020.pt", weights_only=True)
        ends.append([saved[name] for name in ("weights", "ema", "optimizer")])
        for suffix in "pt", "json":
            os.remove(f"{out}/ckpt_00000020.{suffix}")
    put(settings, "resume", "demo", ok=same_bits(*ends))


# ---------------------------------------------------------------------------------------------------------
# How fast?

def measure(settings, name):
    """Puts the times and the memory of train.py's own steps, and the kernels that take longest."""
    run, next_inputs = new_run(settings, MODELS[name])
    put(settings, "step", name, **bench.measure(run, next_inputs, 0, print))
    put_repeat(settings, name, run, next_inputs)

    # kernels, which a CPU does not have; the profiler also lists the operations that start them
    train_step = bench.train_step_of(run, next_inputs)
    with profile() as profiler:
        train_step().cpu()
    kernels = []
    for event in profiler.key_averages():
        if event.device_type.name == "CUDA":
            kernels.append([round(event.self_device_time_total / 1e3, 3), event.count, event.key[:90]])
    put(settings, "kernels", name, ms_count_name=sorted(kernels, reverse=True)[:12])


if __name__ == "__main__":
    process.start(main, Settings)
