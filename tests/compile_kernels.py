"""What Triton's compiler makes of kernels.py for GPUs that are not here, at config/sudoku.py's sizes.

    python tests/compile_kernels.py 90 80 89        # compute capabilities; the last line is one JSON object

Nothing runs: the tensors have no data, and the answers of a driver are made up.
"""
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction, MockTensor

import kernels
import model

BATCH_SIZE = 768
PTXAS = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "ptxas")


def compile_all(capability):
    """Returns {kernel: {"registers": of a thread, "spilled": bytes, "shared": bytes}} for sm_90, if 90."""
    figures = {}
    run_kernel = JITFunction.run

    def compile_only(kernel, *args, grid, warmup, **options):
        args = [MockTensor(t.dtype, t.shape) if torch.is_tensor(t) else t for t in args]
        code = run_kernel(kernel, *args, grid=grid, warmup=True, **options)
        figures[kernel.__name__] = read_ptx(code.asm["ptx"], capability)
        figures[kernel.__name__]["shared"] = code.metadata.shared

    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: capability,  # the compiled kernels are kept by device
        get_current_stream=lambda device: 0)
    triton.runtime.driver.set_active(driver)
    kernels.has_wgmma = lambda: capability >= 90
    JITFunction.run = compile_only
    call_operators()
    JITFunction.run = run_kernel
    return figures


def call_operators():
    """Calls each operator of kernels.py as the mixers of config/sudoku.py do."""
    def empty(*shape):
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    x = empty(BATCH_SIZE, 97, 512)
    across = model.SwiGLU(97, 4).down_proj.weight.shape[1]
    kernels.positions._init_fn(x, empty(2 * across, 97), empty(97, across))
    within = model.SwiGLU(512, 4).down_proj.weight.shape[1]
    kernels.channels._init_fn(empty(BATCH_SIZE * 97, 512), empty(2 * within, 512), empty(512, within))


def read_ptx(text, capability):
    """Returns the registers and the spilled bytes of a kernel in PTX, as NVIDIA's assembler counts them."""
    suffix = "a" if capability == 90 else ""
    command = [PTXAS, "-v", f"-arch=sm_{capability}{suffix}", "-o", os.devnull, "/dev/stdin"]
    log = subprocess.run(command, input=text, text=True, capture_output=True, check=True).stderr
    return dict(registers=max(map(int, re.findall(r"Used (\d+) registers", log))),
                spilled=sum(map(int, re.findall(r"(\d+) bytes spill stores", log))))


if __name__ == "__main__":
    print(json.dumps({f"sm_{n}": compile_all(int(n)) for n in sys.argv[1:]}))
