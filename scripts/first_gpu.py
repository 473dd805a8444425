"""The first five minutes on a GPU: is this code right there, and how fast?

    pip install -r requirements-gpu.txt pytest    (a test checks the parity)
    python scripts/first_gpu.py                   prints the tables of docs/gpu.md
    python scripts/first_gpu.py --device=cpu      rehearses it at tiny sizes in a minute

First come the checks, while the programs compile behind them; then times, memory and kernels, the most
valuable first. What the time does not suffice for is left out. Nothing is downloaded. out_dir keeps
results.jsonl and a log of each part. Each part is a process: one that fails does not end the others.
"""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from statistics import median

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, os.path.join(ROOT, "tests")]
import torch
from torch.autograd import DeviceType
from torch.profiler import profile
from torch.utils._pytree import tree_flatten, tree_map

import bench
import configurator
import data as datasets
import train
from runtime import device as devices
from runtime import process
from runtime.errors import UserError, check_choices, check_numbers
from runtime.flops import flops_per_example

# what is measured, and for how long
minutes = 5.0  # in all
device = "cuda"  # or cpu: a rehearsal
out_dir = "out/first_gpu"  # a new folder
part = ""  # only this one, in a process that first_gpu.py starts
only_compile = False  # end this part once its programs are compiled

# {name of a part: (config file, flags, batch, MB a sequence in the backward pass, side of the puzzles)}
CASES = {
    "sudoku_speed": ("sudoku_speed.py", [], 768, 20, 9),
    "sudoku": ("sudoku.py", [], 768, 56, 9),
    "sudoku_att": ("sudoku_att.py", [], 768, 34, 9),
    "sudoku_eager": ("sudoku.py", ["--compile=off"], 768, 56, 9),
    "maze_eager": ("maze.py", ["--compile=off"], 96, 227, 30),
}
# flags of a rehearsal, and the parts that it has besides the checks
TINY = ["--hidden_size=32", "--global_batch_size=8", "--L_cycles=1", "--L_cycles_start=1"]
REHEARSED = ("sudoku_speed", "maze_eager")


def put(settings, part, **values):
    """Adds a line to results.jsonl, on the disk at once, and prints it."""
    line = json.dumps(dict(part=part, **values))
    with open(f"{settings.out_dir}/results.jsonl", "a") as f:
        f.write(line + "\n")
        f.flush()
        os.fsync(f.fileno())
    print(line, flush=True)


def new_run(settings, size, config, *flags, device=""):
    """Returns (train.Run, a function that makes its next inputs, folder of random puzzles with this side)."""
    path = f"{settings.folder}/{size}/random"
    places = [f"--device={device or settings.device}", f"--data_path={path}"]
    tiny = TINY if settings.device == "cpu" else []
    settings = configurator.configure(train.__file__, [f"{ROOT}/config/{config}", *places, *tiny, *flags])
    replica_device = train.open_device(settings.device, settings)
    settings.forward_dtype, _ = replica_device.choose_dtype(settings.forward_dtype)
    bench.dataset_path(settings, os.path.dirname(path), size)  # makes the puzzles, if they are missing
    run, next_inputs = bench.new_run(settings, replica_device, datasets.Dataset(path, "train"))
    return run, next_inputs, path


def new_demo(settings, *flags, **options):
    """Returns new_run() of the demo's model, at full depth and not compiled."""
    return new_run(settings, 6, "demo.py", "--curriculum_epochs=0", "--compile=off", *flags, **options)


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
        put(settings, "parity", case=os.path.basename(path), ok=not error, worst=replay.worst, error=error)


def losses(settings):
    """Puts the demo's first losses on the CPU in float32, and how far the device's are from them."""
    torch.set_num_threads(min(4, os.cpu_count()))  # the cores are busy with compiling
    expected = []
    for kind, dtype, limit in ("cpu", "float32", 0), (settings.device, "float32", 1e-3), \
            (settings.device, "bfloat16", 0.05):
        run, next_inputs, _ = new_demo(settings, f"--forward_dtype={dtype}", device=kind)
        curve = []
        for _ in range(20):
            run.train_program(run.state, next_inputs(), (run.settings.H_cycles, run.settings.L_cycles))
            sums = run.read_sums()
            curve.append(sums["loss"] / sums["sequences"])
        expected = expected or curve
        worst = max(abs(a - b) / b for a, b in zip(curve, expected))
        put(settings, "losses", case=f"{kind} {dtype}", ok=worst <= limit, worst=worst, losses=curve)


def repeat(settings):
    """Puts whether steps of three kinds of models give the same bits twice."""
    cases = {
        "demo": [],
        "demo with a puzzle embedding": ["--puzzle_emb_ndim=64", "--puzzle_emb_len=2"],
        "demo with attention": ["--mlp_t=False", "--num_heads=2", "--pos_encodings=rope"],
    }
    for case, flags in cases.items():
        run, next_inputs, _ = new_demo(settings, *flags)
        put_repeat(settings, f"{case}, not compiled", run, next_inputs)


def put_repeat(settings, case, run, next_inputs):
    """Puts whether ten steps from the run's state end with the same bits twice."""
    cycles = run.settings.H_cycles, run.settings.L_cycles
    inputs = [next_inputs() for _ in range(10)]
    ends = []
    for _ in range(2):
        state = tree_map(torch.clone, run.state)
        for step_inputs in inputs:
            run.train_program(state, step_inputs, cycles)
        ends.append(tree_flatten(state)[0])
    put(settings, "repeat", case=case, ok=all(map(torch.equal, *ends)))


def resume(settings):
    """Puts whether train.py ends with the same bits after a resume."""
    _, _, path = new_demo(settings)
    whole = f"{settings.folder}/whole"
    resumed = f"{settings.folder}/resumed"
    command = [sys.executable, f"{ROOT}/train.py", f"{ROOT}/config/demo.py", f"--device={settings.device}",
               f"--data_path={path}", "--data_prepare=", "--compile=off", "--max_steps=20",
               "--checkpoint_interval=10", "--eval_interval=0", "--eval_final_max_puzzles=32",
               *TINY * (settings.device == "cpu")]
    subprocess.run([*command, f"--out_dir={whole}"], check=True)
    # what a crash before the last checkpoint would leave
    os.mkdir(resumed)
    for name in ("run.json", "ckpt_00000010.pt", "ckpt_00000010.json"):
        shutil.copy(f"{whole}/{name}", resumed)
    subprocess.run([*command, f"--out_dir={resumed}", "--init_from=resume"], check=True)
    states = [torch.load(f"{folder}/ckpt_00000020.pt", weights_only=True) for folder in (whole, resumed)]
    trees = [tree_flatten([state[name] for name in ("weights", "ema", "optimizer")])[0] for state in states]
    put(settings, "resume", case="demo", ok=all(map(torch.equal, *trees)))


# ---------------------------------------------------------------------------------------------------------
# How fast?

def sizes(name):
    """Returns flags: the batch of a case, and how much of it fits into 80% of the card's memory at a time."""
    _, _, batch_size, megabytes, _ = CASES[name]
    memory = torch.cuda.get_device_properties(0).total_memory / 1e6
    divisors = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
    micro_batch_size = max(n for n in divisors if n == 1 or n * megabytes < 0.8 * memory)
    return [f"--global_batch_size={batch_size}", f"--micro_batch_size={micro_batch_size}"]


def measure(settings, name):
    """Puts the times and the memory of train.py's own steps, and the kernels that take longest."""
    config, flags, _, _, size = CASES[name]
    is_cuda = settings.device == "cuda"
    batch = sizes(name) if is_cuda else []
    run, next_inputs, path = new_run(settings, size if is_cuda else 6, config, *flags, *batch)
    cycles = run.settings.H_cycles, run.settings.L_cycles
    eval_state, eval_inputs = bench.evaluation_of(run, path)

    def train_step():
        return run.train_program(run.state, next_inputs(), cycles)

    def eval_step():
        return run.evaluator.program(eval_state, eval_inputs)["halted"]

    # the first steps compile
    first_seconds = bench.seconds_of(1, train_step)[0] + bench.seconds_of(1, eval_step)[0]
    compiled = devices.is_compiled(run.device)
    if settings.only_compile:
        put(settings, "compile", case=name, compiled=compiled, seconds=first_seconds)
        return

    # times
    n = 20 if is_cuda else 1
    bench.seconds_of(n, train_step)
    seconds = median(bench.seconds_of(n, train_step)[0] for _ in range(3))
    eval_seconds = median(bench.seconds_of(n, eval_step)[0] for _ in range(3))
    example_flops = flops_per_example(run.model)
    flops = run.settings.global_batch_size * example_flops / seconds
    peak = devices.peak_flops(run.device)
    put(settings, "step", case=name,
        compiled=compiled,
        sequences_at_a_time=run.settings.micro_batch_size or run.settings.global_batch_size,
        ms=1e3 * seconds,
        eval_ms=1e3 * eval_seconds,
        tflops=flops / 1e12,
        mfu=peak and flops / peak,
        peak_gb=torch.cuda.max_memory_allocated() / 1e9)
    put_repeat(settings, f"{name}{', compiled' * compiled}", run, next_inputs)

    # kernels; operations, which count the time of their kernels too, are on the CPU
    with profile() as profiler:
        bench.seconds_of(1, train_step)
    kernels = []
    for event in profiler.key_averages():
        if event.device_type == (DeviceType.CUDA if is_cuda else DeviceType.CPU):
            microseconds = event.self_device_time_total if is_cuda else event.self_cpu_time_total
            kernels.append([round(microseconds / 1e3, 3), event.count, event.key[:90]])
    put(settings, "kernels", case=name, ms_count_name=sorted(kernels, reverse=True)[:12])


# ---------------------------------------------------------------------------------------------------------
# The parts

def run_part(settings):
    """Runs the checks, or measures one of CASES."""
    with tempfile.TemporaryDirectory() as settings.folder:
        if settings.part in CASES:
            measure(settings, settings.part)
            return
        for check in parity, losses, repeat, resume:
            try:
                check(settings)
            except Exception as e:
                traceback.print_exc()
                put(settings, check.__name__, case="", ok=False, error=f"{type(e).__name__}: {e}"[:300])


def start_part(settings, name, *flags):
    """Starts a process of this script for one part; its log is in out_dir."""
    command = [sys.executable, os.path.abspath(__file__), f"--device={settings.device}", f"--part={name}",
               f"--out_dir={settings.out_dir}", *flags]
    with open(f"{settings.out_dir}/{name}.log", "ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def end_part(settings, name, process, end):
    """Waits for a part until `end`, of time.monotonic(), and puts what went wrong."""
    try:
        error = process.wait(max(0, end - time.monotonic())) and f"see {name}.log"
    except subprocess.TimeoutExpired:
        error = "the time was over"
    finally:
        process.kill()
    if error:
        put(settings, "part", case=name, ok=False, error=error)


def tables(lines):
    """Returns the results in Markdown; lines: the objects in results.jsonl."""
    rows = ["| check | case | |", "|---|---|---|"]
    compiling = {}
    steps = []
    for line in lines:
        if "ok" in line:
            verdict = "passed" if line["ok"] else f"**failed** {line.get('error', '')}"
            worst = f", largest error {line['worst']:.1e}" if "worst" in line else ""
            rows.append(f"| {line['part']} | {line['case']} | {verdict}{worst} |")
        elif line["part"] == "compile":
            compiling[line["case"]] = f"{line['seconds']:.0f} s"
        elif line["part"] == "step":
            steps.append(f"| {line['case']} | {line['sequences_at_a_time']} | {line['ms']:.1f} ms | "
                         f"{100 * (line['mfu'] or 0):.1f}% | {line['peak_gb']:.1f} GB | "
                         f"{line['eval_ms']:.1f} ms | {compiling.get(line['case'], '')} |")
    rows += ["", "| steps | sequences at a time | step | of peak | memory | evaluation step | compiling |",
             "|---|---|---|---|---|---|---|"]
    return "\n".join(rows + steps)


def main(settings):
    """Runs all parts, and prints the tables. Exits with 1 if one has failed."""
    if settings.part:
        run_part(settings)
        return
    check_numbers(dict(minutes=settings.minutes), ["minutes"])
    check_choices(settings, dict(device=("cuda", "cpu")))
    _, card = devices.choose_device(settings.device)
    if os.path.exists(settings.out_dir):
        raise UserError(f"--out_dir={settings.out_dir} exists: choose another")
    os.makedirs(settings.out_dir)
    end = time.monotonic() + 60 * settings.minutes
    put(settings, "environment", card=card, torch=torch.__version__, cuda=torch.version.cuda,
        cores=os.cpu_count())

    # compiling takes the host a minute, while the checks take the device
    names = CASES if settings.device == "cuda" else REHEARSED
    compiling = [name for name in names if settings.device == "cuda" and not name.endswith("eager")]
    processes = {name: start_part(settings, name, "--only_compile") for name in compiling}
    end_part(settings, "checks", start_part(settings, "checks"), end)
    for name, part in processes.items():
        end_part(settings, name, part, end - 30 * settings.minutes)
    # times, alone on the device
    for name in names:
        if time.monotonic() < end - 10:
            end_part(settings, name, start_part(settings, name), end)

    lines = Path(settings.out_dir, "results.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in lines]
    print(tables(lines))
    if not all(line.get("ok", True) for line in lines):
        sys.exit(1)


if __name__ == "__main__":
    process.start(main, __file__)
