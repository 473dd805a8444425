"""The parts of scripts/first_gpu.sh that are Python.

    python scripts/first_gpu.py mixers cuda             each mixer of config/sudoku.py with kernels off and on
    python scripts/first_gpu.py tables out/first_gpu    tables for docs/performance.md, from the logs
"""
import json
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import configurator
import torch
from configurator import UserError

import model
from data import read_metrics


def mixers(device, length=97, width=512):
    """Prints milliseconds of a mixer, forward alone and with gradients, through model.mix and kernels.mix.

    On the CPU a rehearsal, in Triton's interpreter.
    """
    on_gpu = device == "cuda"
    if not on_gpu:
        os.environ["TRITON_INTERPRET"] = "1"
    import kernels
    print("| mixer | kernels | forward | with gradients |\n|---|---|---|---|")
    dtype, batch_size = (torch.bfloat16, 768) if on_gpu else (torch.float32, 1)
    for across in (True, False):
        mlp = model.SwiGLU(length if across else width, 4.0).to(device, dtype)
        x = torch.randn(batch_size, length, width, device=device, dtype=dtype, requires_grad=True)

        def gradients(mix, x=x, mlp=mlp):
            return torch.autograd.grad(mix(x, mlp, across).sum(), [x, *mlp.parameters()])  # noqa: B023

        for name, mix in ("off", model.mix), ("on", kernels.mix):
            mix = torch.compile(mix, dynamic=False) if on_gpu else mix
            with torch.no_grad():
                forward = milliseconds(lambda: mix(x, mlp, across), device)  # noqa: B023
            both = milliseconds(lambda: gradients(mix), device)  # noqa: B023
            print(f"| {'positions' if across else 'channels'} | {name} | {forward:.3f} ms | {both:.3f} ms |")


def milliseconds(call, device):
    """The mean of 20 calls, on the CPU of one, after one that compiles."""
    wait, n = (torch.cuda.synchronize, 20) if device == "cuda" else (lambda: None, 1)
    call()
    wait()
    began = time.perf_counter()
    for _ in range(n):
        call()
    wait()
    return 1e3 * (time.perf_counter() - began) / n


def tables(folder):
    """Prints what the parts in folder have found so far."""
    print("| step | ms | TFLOP/s | of a matmul | of the peak | evaluation | memory | first step |\n"
          "|---|---|---|---|---|---|---|---|")
    names = ["sudoku", "sudoku_on", "sudoku_eager", "sudoku_fast", "sudoku_fast_on"]
    for name in names + [f"maze_{size}" for size in (24, 48, 96, 192)]:
        f = last_object(os.path.join(folder, name + ".log"))
        if f:
            peak = f"{f['mfu_of_peak']:.0%}" if f["mfu_of_peak"] else "-"
            print(f"| {name} | {f['step_ms']:.1f} ({f['step_ms_min']:.1f} to {f['step_ms_max']:.1f}) | "
                  f"{f['tflops']:.1f} | {f['mfu_of_matmul']:.0%} | {peak} | {f['evaluation_ms']:.1f} ms | "
                  f"{f['peak_memory_gb']:.1f} GB | {f['first_step_s']:.0f} s |")
    runs = {name: read_metrics(os.path.join(folder, name, "metrics.jsonl"))
            for name in ("demo", "demo_cpu", "two", "begin")}
    print("\n| run | steps | examples/s | eval/exact_accuracy | train/loss of the first lines |\n"
          "|---|---|---|---|---|")
    for name, lines in runs.items():
        if lines:
            speeds = sorted(line["perf/examples_per_sec"] for line in lines if "train/loss" in line)
            accuracy = [line["eval/exact_accuracy"] for line in lines if "eval/exact_accuracy" in line]
            first = ", ".join(f"{line['train/loss']:.3f}" for line in lines[:4] if "train/loss" in line)
            print(f"| {name} | {lines[-1]['step']} | {speeds[len(speeds) // 2]:,.0f} | "
                  f"{f'{accuracy[-1]:.1%}' if accuracy else '-'} | {first} |")
    for name in ("mixers", "profile"):
        path = os.path.join(folder, name + ".log")
        if os.path.exists(path):
            with open(path) as f:
                print(f"\n{name}\n{f.read()}")


def last_object(path):
    """The JSON object in the last line of a log, or None."""
    if os.path.exists(path):
        with open(path) as f:
            lines = f.read().splitlines()
        if lines and lines[-1].startswith("{"):
            return json.loads(lines[-1])
    return None


def main(argv):
    if len(argv) != 2 or argv[0] not in ("mixers", "tables"):
        raise UserError("give mixers and a device, or tables and a folder; scripts/first_gpu.sh does")
    return mixers(argv[1]) if argv[0] == "mixers" else tables(argv[1])


if __name__ == "__main__":
    configurator.command(lambda: main(sys.argv[1:]), __file__)
