"""The first fifteen minutes on a chip: is this code right there, and how fast?

    python scripts/first_chip.py --device=cuda     NVIDIA GPUs
    python scripts/first_chip.py --device=xla      TPUs, by torch_xla
    python scripts/first_chip.py --device=tpu      TPUs, by TorchTPU
    python scripts/first_chip.py --device=cpu      rehearses it at tiny sizes, in three minutes
    PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 python scripts/first_chip.py --device=xla     the same through XLA
    PJRT_DEVICE=CPU python tests/torchtpu/on_cpu.py scripts/first_chip.py --device=tpu

Each part is a command, which has the chips for itself. Its result is its exit code and its last line. A part
that fails or hangs does not end the others, and one for which the minutes are too few is left out. Nothing is
downloaded. out_dir keeps the output of each part, and all results in results.md and results.json. The exit
code is 1 if a part has failed.
"""
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

ROOT = str(Path(__file__).parents[1])
sys.path.insert(0, ROOT)
import configurator
from runtime.errors import UserError, check_choices


class Settings:
    device = ""  # cuda, xla, tpu or cpu
    minutes = 15.0  # in all
    out_dir = "out/first_chip"  # a new folder


BUSY_SECONDS = 30  # chips stay busy for so long after their process was killed


# ---------------------------------------------------------------------------------------------------------
# What is run: commands of the shell, in the folder of the project, with these variables

# A chip's share of the paper's Sudokus and of its mazes, which have 11 times the cells. torch.compile may
# choose other kernels in the next run, so the checks on a GPU do without it.
GPU = """
ONE_CHIP="$PYTHON"
ALL_CHIPS="$PYTHON -m torch.distributed.run --standalone --nproc-per-node=gpu"
CHECKS=--compile=off
SUDOKU="--replica_batch_size=768 --micro_batch_size=192"
MAZE="--replica_batch_size=96 --micro_batch_size=24 --size=30"
"""
# train.py and bench.py start a process for each chip of a TPU, unless these variables ask for one
TPU = """
ONE_CHIP="env TPU_PROCESS_BOUNDS=1,1,1 TPU_CHIPS_PER_PROCESS_BOUNDS=1,1,1 CPU_NUM_DEVICES=1 $PYTHON"
ALL_CHIPS="$PYTHON"
CHECKS=
SUDOKU="--replica_batch_size=96 --micro_batch_size=32"
MAZE="--replica_batch_size=12 --micro_batch_size=4 --size=30"
"""
DEVICES = {
    "cuda": GPU,
    "xla": TPU,
    "tpu": f"""{TPU}
ONE_CHIP="env TORCH_TPU_SLICEBUILDER_ADDRESSES=localhost:8476 TORCH_TPU_TOPOLOGY=1,1,1 $PYTHON"
""",
    "cpu": f"""{GPU}
ALL_CHIPS="$PYTHON -m torch.distributed.run --standalone --nproc-per-node=2"
""",
}
FULL = """
PUZZLES="--size=6 --num_train=3000 --num_test=1000 --num_aug=100"  # the demo's
MODEL=
BATCH=
"""
TINY = """
PUZZLES="--size=4 --num_train=64 --num_test=40 --num_aug=5"
MODEL="--hidden_size=32 --multiple_of=32 --H_cycles=1 --L_cycles=1"
BATCH="--size=4 --replica_batch_size=8 --micro_batch_size=4 --steps=2"
"""
# TRAIN: 20 steps of the demo, at full depth and a constant rate
COMMANDS = """
DEMO="train.py config/demo.py --device=$DEVICE --data_path=$OUT/data $CHECKS $MODEL"
TRAIN="$DEMO --curriculum_epochs=0 --lr_min_ratio=1 --max_steps=20 --checkpoint_interval=10 --log_interval=1
    --eval_interval=0 --eval_final_max_puzzles=32"
BENCH="$ALL_CHIPS bench.py --device=$DEVICE --data_path=missing --steps=20 $MODEL"
COMPARE="$PYTHON scripts/compare.py"
"""
# {name: (seconds, command)}, the most valuable first. A part starts if so many seconds are left, and may take
# four times as many.
PARTS = {
    "puzzles": (30, "$PYTHON prepare_sudoku.py --source=generate $PUZZLES --output_dir=$OUT/data"),
    "parity of one chip, float32": (60, "$PYTHON scripts/parity.py --device=$DEVICE"),
    "losses of the CPU": (30, "$PYTHON $TRAIN --out_dir=$OUT/cpu --device=cpu --forward_dtype=float32"),
    "losses of one chip, float32": (40, """
        $ONE_CHIP $TRAIN --out_dir=$OUT/one --forward_dtype=float32 &&
        $COMPARE $OUT/one $OUT/cpu 1e-3"""),
    "losses of one chip, --compile=off": (90, """
        $ONE_CHIP $TRAIN --out_dir=$OUT/off --forward_dtype=float32 --compile=off &&
        $COMPARE $OUT/off $OUT/one 1e-3"""),
    "losses of all chips, float32": (40, """
        $ALL_CHIPS $TRAIN --out_dir=$OUT/all --forward_dtype=float32 &&
        $COMPARE $OUT/all $OUT/one 1e-3"""),
    "losses of all chips, bfloat16": (40, """
        $ALL_CHIPS $TRAIN --out_dir=$OUT/bfloat16 --forward_dtype=bfloat16 &&
        $COMPARE $OUT/bfloat16 $OUT/cpu 0.05"""),
    "commit, versions, hardware": (10, """
        echo $(git rev-parse HEAD) $($PYTHON -m pip freeze | grep -E '^(torch|libtpu)') \
            $(head -n 1 $OUT/all/log.txt)"""),
    "sudoku": (90, "$BENCH config/sudoku.py $SUDOKU $BATCH"),
    "ten steps again": (40, """
        $ALL_CHIPS $TRAIN --out_dir=$OUT/again --forward_dtype=bfloat16 --max_steps=10 &&
        $COMPARE $OUT/again $OUT/bfloat16 0"""),
    "resumed from there": (40, """
        $ALL_CHIPS $TRAIN --out_dir=$OUT/again --forward_dtype=bfloat16 --init_from=resume &&
        $COMPARE $OUT/again $OUT/bfloat16 0"""),
    "SIGTERM": (40, """
        $PYTHON $TRAIN --out_dir=$OUT/stopped --max_steps=100 &
        until grep -qs 'step 2/' $OUT/stopped/log.txt; do sleep 0.1; kill -0 $! || exit; done
        kill $!; wait $!; test $? = 3"""),
    "resumed after it": (40, "$PYTHON $TRAIN --out_dir=$OUT/stopped --max_steps=100 --init_from=resume"),
    "demo": (90, "$PYTHON $DEMO --out_dir=$OUT/demo"),
    # 16 chips share the batch of the study's baseline
    "baseline": (90, "$BENCH config/baseline.py $SUDOKU --replica_batch_size=384 $BATCH"),
    "sudoku, --compile=off": (90, "$BENCH config/sudoku.py $SUDOKU $BATCH --compile=off"),
    "sudoku_att": (90, "$BENCH config/sudoku_att.py $SUDOKU $BATCH"),
    "maze": (90, "$BENCH config/maze.py $MAZE $BATCH"),
}


# ---------------------------------------------------------------------------------------------------------
# How it is run

def main(settings):
    """Runs the parts for which there is time. Exits with 1 if one has failed."""
    check_choices(settings, dict(device=DEVICES))
    # variables of the shell cannot hold a space that is part of a path: it sees out_dir from the root of the
    # project, and finds Python by its name
    out = os.path.relpath(settings.out_dir, ROOT)
    if os.path.exists(settings.out_dir) or " " in out:
        raise UserError(f"--out_dir={settings.out_dir} exists, or has a space: choose another")
    os.makedirs(settings.out_dir)
    folder, python = os.path.split(sys.executable)
    variables = f'PATH="{folder}:$PATH" PYTHON={python} DEVICE={settings.device} OUT={out}'
    is_rehearsal = settings.device == "cpu" or os.environ.get("PJRT_DEVICE") == "CPU"
    variables += DEVICES[settings.device] + (TINY if is_rehearsal else FULL) + COMMANDS

    end = time.monotonic() + 60 * settings.minutes
    results = {}
    table = "| part | result | seconds |\n|---|---|---|\n"
    for name, (seconds, command) in PARTS.items():
        began = time.monotonic()
        limit = min(end - began, 4 * seconds)
        if limit < seconds:
            print(f"{name}: left out, it needs {seconds} s")
            continue
        print(name, flush=True)
        exit_code, result = run(variables + command, f"{out}/'{name}'", limit)
        print("   ", result, flush=True)
        # what is known stays if this process is killed
        seconds = time.monotonic() - began
        results[name] = dict(exit_code=exit_code, result=result, seconds=seconds)
        table += f"| {name} | {result} | {seconds:.0f} |\n"
        Path(settings.out_dir, "results.json").write_text(json.dumps(results, indent=1))
        Path(settings.out_dir, "results.md").write_text(table)

    print(f"Please open an issue of the project with results.md and results.json of {settings.out_dir}")
    sys.exit(any(part["exit_code"] for part in results.values()))


def run(command, log, limit):
    """Runs a command for at most limit seconds; returns its exit code, and its last line or its last words.

    log: the beginning of the paths of its output, .log, and of its errors, .err.
    """
    running = subprocess.Popen(
        f"({command}\n) >{log}.log 2>{log}.err", shell=True, cwd=ROOT, start_new_session=True)
    try:
        exit_code = running.wait(limit)
    except subprocess.TimeoutExpired:
        exit_code = "none in time"
    finally:
        # the processes that it has started, too
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
    if exit_code == "none in time":
        time.sleep(BUSY_SECONDS)
    # neither a | nor the end of a line may stand in a table; a shell writes the last lines, at the root
    if exit_code == 0:
        return 0, tail(f"-n 1 {log}.log")
    return exit_code, f"**failed**, exit code {exit_code}: " + tail(f"-qc 300 {log}.log {log}.err")


def tail(arguments):
    return subprocess.getoutput(f"cd '{ROOT}' && tail {arguments} | tr '|\n' '/ '")


if __name__ == "__main__":
    configurator.start(main, Settings)
