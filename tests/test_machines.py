"""Machines that are not here: GPUs, Apple's GPU, and an environment with plugins of torch."""
import os
import subprocess
import sys
from types import SimpleNamespace

import configurator
import numpy as np
import pytest
import torch
from conftest import ROOT
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import bench
import data
import device as devices
import train

TINY = ["--hidden_size=32", "--num_heads=2", "--puzzle_emb_ndim=32", "--puzzle_emb_len=2", "--H_cycles=2",
        "--L_cycles=2", "--halt_max_steps=4", "--global_batch_size=16", "--lr_warmup_steps=5",
        "--eval_interval=0", "--eval_final_max_puzzles=16"]
SCRIPTS = ["train.py", "bench.py", "data.py", "prepare_maze.py", "prepare_sudoku.py"] + sorted(
    f"scripts/{name}" for name in os.listdir(os.path.join(ROOT, "scripts")) if name.endswith(".py"))


def settings(*flags):
    return configurator.configure(train.__file__, [*TINY, *flags])


# GPUs. Torch's meta device stands for one: its tensors have shapes and no values.

class FakeGPU(TorchDispatchMode):
    """Notes in `events` where the host waits for the device, and gives it zeros there.

    Fails where the device would get float64, which Apple's GPU lacks and others are slow at.
    """

    def __init__(self):
        super().__init__()
        self.events, self.pinned = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten, kwargs, operation = torch.ops.aten, dict(kwargs or {}), func.overloadpacket
        if operation == aten.is_pinned:
            return self.is_pinned(args[0])
        if operation == aten._local_scalar_dense and args[0].is_meta:
            self.events.append("wait")
            return 0
        if operation == aten.copy_ and args[0].is_meta != args[1].is_meta:
            self.note_copy(args[0] if args[1].is_meta else args[1], True in args[2:])
            return args[0].zero_()
        if operation == aten._to_copy:
            source, device = args[0], torch.device(kwargs.get("device") or args[0].device).type
            if source.is_meta and device == "cpu":
                self.events.append("wait")
                return torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)
            if not source.is_meta and device == "meta":
                self.note_copy(source, kwargs.get("non_blocking"))
        pins = kwargs.pop("pin_memory", False) or operation == aten._pin_memory
        result = args[0].clone() if operation == aten._pin_memory else func(*args, **kwargs)
        if pins:
            self.pinned.append(result)
        assert not (torch.is_tensor(result) and result.is_meta and result.dtype == torch.float64), func
        return result

    def note_copy(self, host, non_blocking):
        if not (self.is_pinned(host) and non_blocking):
            self.events.append("unpinned" if non_blocking else "wait")

    def is_pinned(self, t):
        return any(t.data_ptr() == pinned.data_ptr() for pinned in self.pinned)


def train_on_fake(kind, random_puzzles, monkeypatch, *flags):
    """Trains 6 steps, with a line of the log after each third; returns what happened, in order."""
    c = settings(f"--data_path={random_puzzles}", "--log_interval=3", *flags)
    device = devices.Device("cpu", c)
    device.kind, device.torch = kind, torch.device("meta")
    with FakeGPU() as gpu:
        class Event:
            def record(self):
                self.step = gpu.events.count("launch")

            def synchronize(self):
                gpu.events.append(f"wait for step {self.step}")

        monkeypatch.setattr(torch.cuda, "Event", Event)
        dataset, nothing = data.Dataset(random_puzzles, "train"), lambda *args, **kwargs: None
        run = train.Run(train.new_model(c, seq_len=16, vocab_size=6), c, device)
        program = run.train_program
        gpu.events.clear()
        run.train_program = lambda *inputs: (program(*inputs), gpu.events.append("launch"))[0]
        log = SimpleNamespace(step=0, print0=nothing, restart_clock=nothing, first_step=nothing,
                              train=lambda *_: gpu.events.append("line") or {})
        train.train(run, dataset, dataset, log, SimpleNamespace(save=nothing), 0, 6)
    return gpu.events


@pytest.mark.parametrize("flags", [
    [], ["--micro_batch_size=4"], ["--mlp_t=False", "--pos_encodings=rope", "--optimizer=muon"]])
def test_the_host_waits_for_a_gpu_only_before_a_line_of_the_log(flags, random_puzzles, monkeypatch):
    """Otherwise it is a step ahead: it waits for the step before the one that it has just launched.

    Apple's GPU stands no float64, and no copy that may read the host's memory after it was freed
    (pytorch#189690).
    """
    first = ["launch", "launch", "wait for step 1", "launch", "wait for step 2", "wait", "line"]
    second = ["launch", "wait for step 3", "launch", "wait for step 4", "launch", "wait for step 5", "wait",
              "line"]
    assert train_on_fake("cuda", random_puzzles, monkeypatch, *flags) == first + second
    events = train_on_fake("mps", random_puzzles, monkeypatch, *flags)
    assert events.count("launch") == 6 and "unpinned" not in events


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that torch believes in."""
    def compile(fn):
        if gpu.error:
            raise RuntimeError(gpu.error)
        return fn

    gpu = SimpleNamespace(capability=(9, 0), error="")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Fake GPU")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: gpu.capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported",
                        lambda including_emulation: including_emulation or gpu.capability >= (8, 0))
    monkeypatch.setattr(torch, "compile", compile)
    precision = torch.get_float32_matmul_precision()
    yield gpu
    torch.set_float32_matmul_precision(precision)


def open_fake(*flags):
    c = settings("--device=cuda", *flags)
    with FakeTensorMode():  # the kernel that a GPU is tried with
        return devices.Device("cuda", c), c


@pytest.mark.parametrize("capability, given, taken", [
    ((9, 0), "bfloat16", "bfloat16"), ((7, 5), "bfloat16", "float16"), ((6, 1), "bfloat16", "float32"),
    ((7, 5), "float32", "float32")])
def test_a_gpu_compiles_has_tf32_and_may_lack_bfloat16_units(gpu, capability, given, taken):
    gpu.capability = capability
    device, c = open_fake(f"--forward_dtype={given}")
    assert device.compiles and torch.get_float32_matmul_precision() == "high"
    assert c.forward_dtype == taken and len(device.notes) == (given != taken)
    assert all(f"forward_dtype is {taken}, not bfloat16" in note for note in device.notes)


def test_a_gpu_for_which_torch_cannot_compile(gpu):
    gpu.error = "backend='inductor' raised:\nTritonMissing: none\n\nSet TORCHDYNAMO_VERBOSE=1 ..."
    device, _ = open_fake()
    assert not device.compiles and device.notes == [
        "compile is off, which is slower: torch.compile fails here "
        "(RuntimeError: backend='inductor' raised: TritonMissing: none)"]
    assert open_fake("--compile=off")[0].notes == []
    with pytest.raises(configurator.UserError, match="--compile=on: .*TritonMissing.*--compile=auto"):
        open_fake("--compile=on")


def test_gpus_that_cannot_be_used(gpu, monkeypatch):
    def ones(*_, **__):
        raise RuntimeError("CUDA error: no kernel image is available\nfor execution on the device")

    monkeypatch.setattr(torch, "ones", ones)
    with pytest.raises(configurator.UserError, match="Fake GPU: .*no kernel image is available for.*=cpu"):
        devices.Device("cuda", settings("--device=cuda"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(configurator.UserError, match="replica 1 .*--nproc-per-node=1"):
        open_fake()


def test_the_log_has_the_devices_notes(random_puzzles, tmp_path, monkeypatch):
    device = devices.Device("cpu", settings())
    device.notes = ["what this GPU lacks"]
    monkeypatch.setattr(train, "open_device", lambda *_: device)
    train.replica(settings(f"--data_path={random_puzzles}", f"--out_dir={tmp_path}", "--max_steps=1"), "cpu")
    assert "\nwhat this GPU lacks\n" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize("script, flags, ranks, hint", [
    ("train.py", [], 1, "16 sequences at a time: --micro_batch_size=8"),
    ("bench.py", [], 2, "8 sequences at a time: --micro_batch_size=4"),
    ("train.py", ["--micro_batch_size=5", "--global_batch_size=15"], 1,
     "5 sequences at a time: --micro_batch_size=1"),
    ("train.py", ["--micro_batch_size=1"], 1, "1 sequences at a time: --device=cpu has more")])
def test_out_of_gpu_memory(script, flags, ranks, hint, random_puzzles, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setattr(train, "replica", full)
    monkeypatch.setattr(train, "on_signals", lambda: None)
    monkeypatch.setattr(bench, "bench", full)
    argv = [*TINY, "--device=cpu", f"--data_path={random_puzzles}", *flags]
    with pytest.raises(configurator.UserError, match=f"^out of GPU memory with {hint}"):
        train.main(settings(*argv)) if script == "train.py" else bench.main([*argv, "--steps=1"])


def test_choosing_apples_gpu(monkeypatch):
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    with pytest.raises(configurator.UserError, match="no such GPU"):
        devices.choose_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert devices.choose_device("mps")[0] == "mps"
    if devices.choose_device("auto")[0] == "cpu":  # auto leaves it
        assert "--device=mps" in devices.choose_device("auto")[1]


# Plugins of torch, which `import torch` would load.

def run_python(path, *command, **env):
    """Runs a Python command that finds modules and plugins in path."""
    kept = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=120,
                          env=kept | {"PYTHONPATH": str(path)} | env)


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_script_loads_plugins_of_torch(script, tmp_path):
    """Another torch says what it would do if a script imports it."""
    (tmp_path / "torch.py").write_text("import os\nprint(os.environ.get('TORCH_DEVICE_BACKEND_AUTOLOAD', "
                                       "'loads plugins'), flush=True)\nos._exit(0)\n")
    done = run_python(tmp_path, script, "--help")
    assert "loads plugins" not in done.stdout and "Traceback" not in done.stderr, done.stderr
    assert script not in ("train.py", "bench.py") or done.stdout == "0\n"
    if script == "train.py":  # unless asked to
        assert run_python(tmp_path, script, TORCH_DEVICE_BACKEND_AUTOLOAD="1").stdout == "1\n"


def test_a_run_uses_nothing_deprecated_and_loads_no_plugins(random_puzzles, tmp_path):
    info = tmp_path / "plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nplugin = no_such_module:load\n")
    warnings = ["-W", "error::DeprecationWarning", "-W", "error::FutureWarning"]
    flags = f"--data_path={random_puzzles}", "--max_steps=2", "--device=cpu", f"--out_dir={tmp_path / 'run'}"
    done = run_python(tmp_path, *warnings, "train.py", *TINY, *flags)
    assert done.returncode == 0, done.stderr
