"""Machines that are not here: GPUs, Apple's GPU, Windows, and an environment with plugins of torch."""
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
import bench  # noqa: E402
import configurator  # noqa: E402
import data  # noqa: E402
import torch  # noqa: E402
import train  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

TINY = ["--hidden_size=32", "--num_heads=2", "--puzzle_emb_ndim=32", "--puzzle_emb_len=2", "--H_cycles=2",
        "--L_cycles=2", "--halt_max_steps=4", "--global_batch_size=16", "--lr_warmup_steps=5",
        "--eval_interval=0"]
SCRIPTS = ["train.py", "bench.py", "data.py", "prepare_maze.py", "prepare_sudoku.py"] + sorted(
    f"scripts/{name}" for name in os.listdir(os.path.join(ROOT, "scripts")) if name.endswith(".py"))
MODULES = ["configurator.py", "model.py", "torchtpu.py", "xla.py"]


def settings(*flags):
    return configurator.configure(train.__file__, [*TINY, *flags])


@pytest.fixture(scope="module")
def puzzles(tmp_path_factory):
    """A data set of 4x4 grids with random tokens."""
    path = str(tmp_path_factory.mktemp("data") / "random")
    grids = np.random.default_rng(0).integers(1, 6, (2, 64, 16), dtype=np.uint8)
    data.write_dataset(path, {split: (64, 1, [grids]) for split in ("train", "test")}, 6, {"grid": [4, 4]})
    return path


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
        if operation == aten._pin_memory:
            self.pinned.append(args[0].clone())
            return self.pinned[-1]
        if operation == aten._local_scalar_dense and args[0].is_meta:
            self.events.append("wait")
            return 0
        if operation == aten._to_copy:
            return self.to(func, args[0], kwargs)
        if operation == aten.copy_ and args[0].is_meta != args[1].is_meta:
            self.note_copy(args[0] if args[1].is_meta else args[1], True in args[2:])
            return args[0].zero_()
        is_pinned = kwargs.pop("pin_memory", False)
        result = func(*args, **kwargs)
        if is_pinned:
            self.pinned.append(result)
        assert not (torch.is_tensor(result) and result.is_meta and result.dtype == torch.float64), func
        return result

    def to(self, func, source, kwargs):
        device = torch.device(kwargs.get("device") or source.device).type
        if source.is_meta and device == "cpu":
            self.events.append("wait")
            return torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        if not source.is_meta and device == "meta":
            self.note_copy(source, kwargs.get("non_blocking"))
        return func(source, **kwargs)

    def note_copy(self, host, non_blocking):
        if not self.is_pinned(host):
            self.events.append("unpinned" if non_blocking else "wait")
        elif not non_blocking:
            self.events.append("wait")

    def is_pinned(self, t):
        return any(t.data_ptr() == pinned.data_ptr() for pinned in self.pinned)


def train_on_fake(kind, puzzles, monkeypatch, *flags):
    """Trains 6 steps, with a line of the log after each third; returns what happened, in order."""
    c = settings(f"--data_path={puzzles}", "--log_interval=3", *flags)
    device = train.Device("cpu", c)
    device.kind, device.torch = kind, torch.device("meta")
    with FakeGPU() as gpu:
        class Event:
            def record(self):
                self.step = gpu.events.count("launch")

            def synchronize(self):
                gpu.events.append(f"wait for step {self.step}")

        monkeypatch.setattr(torch.cuda, "Event", Event)
        dataset = data.Dataset(puzzles, "train")
        run = train.Run(train.build_model(c, dataset, dataset), c, device)
        program = run.train_program
        gpu.events.clear()

        def train_program(*inputs):
            result = program(*inputs)
            gpu.events.append("launch")
            return result

        def line(step, *_):
            gpu.events.append("line")
            return {}

        def nothing(*args, **kwargs):
            pass

        run.train_program = train_program
        log = SimpleNamespace(step=0, say=nothing, restart_clock=nothing, first_step=nothing, train=line)
        train.train(run, dataset, dataset, log, SimpleNamespace(save=nothing), 0, 6)
    return gpu.events


FLAGS = {"mlp": [], "micro-batches": ["--micro_batch_size=4", "--recompute"],
         "attention": ["--mlp_t=False", "--pos_encodings=rope", "--optimizer=muon"]}


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_the_host_waits_for_a_gpu_only_before_a_line_of_the_log(flags, puzzles, monkeypatch):
    """Otherwise it is a step ahead: it waits for the step before the one that it has just launched."""
    first = ["launch", "launch", "wait for step 1", "launch", "wait for step 2", "wait", "line"]
    second = ["launch", "wait for step 3", "launch", "wait for step 4", "launch", "wait for step 5", "wait",
              "line"]
    assert train_on_fake("cuda", puzzles, monkeypatch, *flags) == first + second


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_what_apples_gpu_does_not_stand(flags, puzzles, monkeypatch):
    """No float64, and no copy that may read the host's memory after it was freed (pytorch#189690)."""
    events = train_on_fake("mps", puzzles, monkeypatch, *flags)
    assert events.count("launch") == 6 and "unpinned" not in events


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that torch believes in. A test can change its properties before it opens a Device."""
    gpu = SimpleNamespace(capability=(9, 0), fault="")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Fake GPU")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: gpu.capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported",
                        lambda including_emulation: including_emulation or gpu.capability >= (8, 0))
    monkeypatch.setattr(train, "compile_fault", lambda device: gpu.fault)
    precision = torch.get_float32_matmul_precision()
    yield gpu
    torch.set_float32_matmul_precision(precision)


def open_fake(c):
    with FakeTensorMode():  # the kernel that a GPU is tried with
        return train.Device("cuda", c)


def test_a_new_gpu_compiles_in_bfloat16_and_has_tf32(gpu):
    c = settings("--device=cuda")
    device = open_fake(c)
    assert device.compiles and c.forward_dtype == "bfloat16" and device.notes == []
    assert torch.get_float32_matmul_precision() == "high"


def test_more_replicas_than_gpus(gpu, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(configurator.UserError, match="replica 1 .*--nproc-per-node=1"):
        open_fake(settings("--device=cuda"))


@pytest.mark.parametrize("capability,given,taken", [
    ((7, 5), "bfloat16", "float16"), ((6, 1), "bfloat16", "float32"), ((7, 5), "float32", "float32")])
def test_a_gpu_without_bfloat16_units(gpu, capability, given, taken):
    gpu.capability = capability
    c = settings("--device=cuda", f"--forward_dtype={given}")
    notes = open_fake(c).notes
    assert c.forward_dtype == taken and len(notes) == (given != taken)
    assert all(f"forward_dtype is {taken}, not bfloat16" in note for note in notes)


def test_a_gpu_for_which_torch_cannot_compile(gpu):
    gpu.fault = "TritonMissing: Cannot find a working triton installation"
    device = open_fake(settings("--device=cuda"))
    assert not device.compiles and len(device.notes) == 1 and gpu.fault in device.notes[0]
    assert open_fake(settings("--device=cuda", "--compile=off")).notes == []
    with pytest.raises(configurator.UserError, match="--compile=on: .*TritonMissing.*--compile=auto"):
        open_fake(settings("--device=cuda", "--compile=on"))


def test_the_log_has_the_devices_notes(puzzles, tmp_path, monkeypatch):
    class NotedDevice(train.Device):
        def __init__(self, kind, c):
            super().__init__(kind, c)
            self.notes = ["what this GPU lacks"]

    monkeypatch.setattr(train, "Device", NotedDevice)
    train.replica(settings(f"--data_path={puzzles}", f"--out_dir={tmp_path}", "--max_steps=1"), "cpu")
    assert "\nwhat this GPU lacks\n" in (tmp_path / "log.txt").read_text()


def test_a_gpu_that_this_torch_has_no_kernels_for(gpu, monkeypatch):
    def ones(*_, **__):
        raise RuntimeError("CUDA error: no kernel image is available\nfor execution on the device")

    monkeypatch.setattr(torch, "ones", ones)
    with pytest.raises(configurator.UserError, match="Fake GPU: .*no kernel image is available for.*=cpu"):
        train.Device("cuda", settings("--device=cuda"))


def test_why_torch_cannot_compile(monkeypatch):
    def compile(fn, **_):
        raise RuntimeError("backend='inductor' raised:\nTritonMissing: none\n\nSet TORCHDYNAMO_VERBOSE=1 ...")

    assert train.compile_fault("meta") == ""
    monkeypatch.setattr(torch, "compile", compile)
    assert train.compile_fault("meta") == "RuntimeError: backend='inductor' raised: TritonMissing: none"


@pytest.mark.parametrize("flags,ranks,hint", [
    ([], 1, "16 sequences at a time: --micro_batch_size=8"),
    ([], 2, "8 sequences at a time: --micro_batch_size=4"),
    (["--micro_batch_size=5", "--global_batch_size=15"], 1, "5 sequences at a time: --micro_batch_size=1"),
    (["--micro_batch_size=1"], 1, "one sequence at a time: --recompute")])
@pytest.mark.parametrize("script", ["train.py", "bench.py"])
def test_out_of_gpu_memory(script, flags, ranks, hint, puzzles, monkeypatch, capsys):
    def replica(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setattr(train, "replica", replica)
    monkeypatch.setattr(train, "on_signals", lambda: None)
    monkeypatch.setattr(bench, "bench", replica)
    argv = [*TINY, "--device=cpu", f"--data_path={puzzles}", *flags]
    with pytest.raises(SystemExit) as stop:
        if script == "train.py":
            configurator.command(lambda: train.main(settings(*argv)), script)
        else:
            configurator.command(lambda: bench.main([*argv, "--steps=1"]), script)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1
    assert error.startswith(f"{script}: out of GPU memory with {hint} needs less")


def test_choosing_apples_gpu(monkeypatch):
    for name in ("PJRT_DEVICE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(configurator.UserError, match="no Apple GPU"):
        train.choose_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert train.choose_device("mps")[0] == "mps"
    if train.choose_device("auto")[0] == "cpu":  # auto leaves it
        assert "--device=mps" in train.choose_device("auto")[1]
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(configurator.UserError, match="torchrun"):
        train.choose_device("mps")


# Windows and macOS: without what Python has on Linux alone.


# Windows and macOS. What Python lacks there is taken away from it here, but for what subprocess itself needs.

ELSEWHERE = """
import importlib, os, runpy, signal, sys
import multiprocessing.pool, concurrent.futures.process, http.server, requests, torch, torch._dynamo

for name in "fcntl grp posix pty pwd resource termios".split():
    sys.modules[name] = None
for module, names in {
    os: "fork getpgid getppid getuid killpg mkfifo nice sched_getaffinity setpgrp setsid sysconf uname",
    signal: "SIGALRM SIGCHLD SIGHUP SIGQUIT SIGUSR1 SIGUSR2 alarm pthread_sigmask setitimer",
}.items():
    for name in names.split():
        delattr(module, name)
sys.path[:0] = [ROOT, os.path.join(ROOT, "scripts")]
os.chdir(ROOT)
"""


def elsewhere(code):
    """Runs code where Python is as on Windows; returns what it prints."""
    done = subprocess.run([sys.executable, "-c", f"ROOT = {ROOT!r}{ELSEWHERE}{code}"], capture_output=True,
                          text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_file_can_be_imported_elsewhere():
    files = {name for name in os.listdir(ROOT) if name.endswith(".py")}
    assert files == {*SCRIPTS, *MODULES, "test_smoke.py"} - {name for name in SCRIPTS if "/" in name}
    modules = [os.path.basename(path)[:-3] for path in [*SCRIPTS, *MODULES]]
    elsewhere(f"for name in {modules}: importlib.import_module(name)")


def test_commands_elsewhere(tmp_path):
    """A run makes its data, trains and resumes; the step is measured."""
    def prepare(folder):
        return ["prepare_sudoku.py", "--source=generate", "--size=4", "--num_train=64", "--num_test=40",
                f"--output_dir={tmp_path / folder}"]

    run = ["train.py", *TINY, "--device=cpu", f"--data_path={tmp_path / 'data'}",
           f"--out_dir={tmp_path / 'out'}"]
    commands = [prepare("other"), [*run, "--max_steps=4", f"--data_prepare={' '.join(prepare('data'))}"],
                [*run, "--max_steps=6", "--init_from=resume"],
                ["bench.py", *(flag for flag in TINY if "batch" not in flag), "--device=cpu", "--steps=1"]]
    text = elsewhere(f"for sys.argv in {commands}: runpy.run_path(sys.argv[0], run_name='__main__')")
    assert "step 4 |" in text and "step 6 |" in text and "sequences a step" in text


def test_stopping_and_killing_elsewhere(tmp_path):
    text = elsewhere(f"""
import subprocess, train
os.environ[train.STOP_FILE] = {str(tmp_path / "stop")!r}
train.on_signals()
signal.raise_signal(signal.SIGTERM)
wandb = train.WandB.__new__(train.WandB)
wandb.say, wandb.out_dir = print, "out"
process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"], stdin=subprocess.PIPE)
wandb.process = process
wandb.close(1)
print(process.wait(10))
""")
    assert (tmp_path / "stop").exists()
    assert "W&B: no end within 1 s, killed" in text and text.split()[-1] == "-9"


# Plugins of torch, which `import torch` would load.

@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    """A folder with an installed plugin. Loading it writes the file `loaded` there."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "fake_plugin.py").write_text("import pathlib\n\n\ndef load():\n"
                                           "    pathlib.Path(__file__).with_name('loaded').touch()\n")
    info = folder / "fake_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nfake_plugin = fake_plugin:load\n")
    return folder


def loads(plugin, *command, **env):
    """Whether a Python command loads the plugin."""
    (plugin / "loaded").unlink(missing_ok=True)
    given = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=120,
                          env={**given, "PYTHONPATH": str(plugin), **env})
    assert done.returncode in (0, 2) and "Traceback" not in done.stderr, done.stderr
    return (plugin / "loaded").exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_script_loads_plugins_of_torch(script, plugin):
    assert not loads(plugin, script, "--help")


def test_a_run_loads_no_plugins_of_torch_unless_asked_to(plugin, puzzles, tmp_path):
    """Nor does it use anything deprecated."""
    assert loads(plugin, "-c", "import torch")
    warnings = ["-W", "error::DeprecationWarning", "-W", "error::FutureWarning"]
    run = [*warnings, "train.py", *TINY, f"--data_path={puzzles}", "--max_steps=2", "--device=cpu"]
    assert not loads(plugin, *run, f"--out_dir={tmp_path / 'a'}")
    assert loads(plugin, *run, f"--out_dir={tmp_path / 'b'}", TORCH_DEVICE_BACKEND_AUTOLOAD="1")
    assert all((tmp_path / name / "metrics.jsonl").exists() for name in "ab")
