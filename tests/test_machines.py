"""Machines that are not here: GPUs, and processors with and without instructions for bfloat16."""
import json
import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers import ROOT, TINY, hosts, run, start_train
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.exc import InductorError
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import bench
import configurator
import optim
import train
from data import Dataset
from runtime import device as devices
from runtime import errors
from runtime.checkpoint import Start


def settings_of(*flags):
    return configurator.configure(train.__file__, [*TINY, "--eval_final_max_puzzles=16", *flags])


# GPUs. Torch's meta device stands for one: its tensors have shapes and no values.

class FakeGPU(TorchDispatchMode):
    """Notes in `events` where the host waits for the device, and gives it ones there.

    strides: of the weights in batched products, whose first stride is 0.
    """

    def __init__(self):
        super().__init__()
        self.events = []
        self.strides = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        kwargs = dict(kwargs or {})
        operation = func.overloadpacket
        kwargs.pop("pin_memory", None)  # which needs a driver
        if operation == aten.bmm:
            self.strides |= {t.stride()[1:] for t in args if t.stride(0) == 0}
        if operation == aten._pin_memory:
            return args[0]
        if operation == aten.copy_ and args[1].is_meta and not args[0].is_meta:  # an event tells
            return args[0].zero_()
        if operation == aten._local_scalar_dense and args[0].is_meta:
            self.events.append("wait")
            return 0
        if operation == aten._to_copy and args[0].is_meta and kwargs.get("device") == torch.device("cpu"):
            self.events.append("wait")
            return torch.ones(args[0].shape)
        return func(*args, **kwargs)


@pytest.mark.parametrize("flags", [
    [], ["--micro_batch_size=4"], ["--mlp_t=False", "--pos_encodings=rope"]])
def test_the_host_waits_for_a_gpu_only_before_a_line_of_the_log(flags, random_puzzles, monkeypatch):
    """Otherwise it is a step ahead: it waits for the step before the one that it has just launched."""
    settings = settings_of(f"--data_path={random_puzzles}", "--log_interval=3", "--compile=off", *flags)
    device = devices.Device("cpu", settings)
    device.kind = "cuda"
    device.torch = torch.device("meta")
    gpu = FakeGPU()

    class Event:
        def record(self):
            self.step = gpu.events.count("launch")

        def synchronize(self):
            gpu.events.append(f"wait for step {self.step}")

    def launch(*inputs):
        stops = program(*inputs)
        gpu.events.append("launch")
        return stops

    monkeypatch.setattr(torch.cuda, "Event", Event)
    data = Dataset(random_puzzles, "train")
    log = mock.Mock(step=0)
    log.train.side_effect = lambda *_: gpu.events.append("line") or {}
    with gpu:
        run = train.Run(settings, bench.new_model(settings, data), device)
        program = run.train_program
        run.train_program = launch
        gpu.events.clear()
        train.train(run, data, data, log, mock.Mock(), Start(), 6)
    first = ["launch", "launch", "wait for step 1", "launch", "wait for step 2", "wait", "line"]
    second = ["launch", "wait for step 3", "launch", "wait for step 4", "launch", "wait for step 5", "wait",
              "line"]
    assert gpu.events == first + second
    # 18 positions: a product that walks along them would load 4 bytes at a time
    assert bool(gpu.strides) == settings.mlp_t
    assert all(min(strides) == 1 and max(strides) % 8 == 0 for strides in gpu.strides)


def test_only_cuda_gets_weights_in_another_order_and_all_get_their_numbers():
    weights = {"gate": torch.randn(32, 97), "down": torch.randn(97, 32), "bias": torch.randn(3)}
    for kind, strides in ("cuda", (1, 32)), ("xla", (97, 1)), ("cpu", (97, 1)):
        cast = devices.cast_weights(SimpleNamespace(kind=kind), weights, torch.bfloat16)
        assert cast["gate"].stride() == strides and cast["down"].stride() == (32, 1)
        assert all(torch.equal(cast[name], w.bfloat16()) for name, w in weights.items())


class Operations(TorchDispatchMode):
    """Notes the names of all operations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("num_slots, operation", [(1, "sum"), (4, "index_put")])
def test_rows_of_the_puzzle_embedding_add_up_in_a_fixed_order_on_a_gpu(num_slots, operation):
    """torch documents index_add as nondeterministic on CUDA; index_put with accumulate=True sorts there."""
    with FakeTensorMode(), Operations() as operations:
        entries = torch.zeros(6, 8, device="cuda")
        slots = torch.zeros(6, dtype=torch.int32, device="cuda")
        assert optim.add_up(entries, slots, num_slots).shape == (num_slots, 8)
    assert operation in operations.names and "index_add" not in operations.names


def test_both_ways_to_add_up_slots_agree():
    entries = torch.randn(50, 3)
    slots = torch.randint(0, 7, (50,))
    want = torch.zeros(7, 3).index_put((slots,), entries, accumulate=True)
    assert torch.allclose(optim.add_up(entries, slots, 7), want, atol=1e-5)


def test_peaks_are_those_of_the_very_chip():
    tflops = {
        "NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA H100 NVL": 835, "NVIDIA H200": 989,
        "NVIDIA A100-SXM4-80GB": 312, "NVIDIA A10": 125, "NVIDIA L4": 121, "NVIDIA L40S": 362,
        "NVIDIA GeForce RTX 4090": 165, "TPU v5litepod-8": 197, "TPU v4-32": 275}
    assert {name: devices.peak_flops(SimpleNamespace(name=name)) / 1e12 for name in tflops} == tflops
    others = "NVIDIA GH200 480GB", "NVIDIA A10G", "NVIDIA L40", "x86_64"
    assert not any(devices.peak_flops(SimpleNamespace(name=name)) for name in others)


def test_a_step_that_could_not_be_compiled_says_so(data, tmp_path, monkeypatch):
    """As without Triton or a C compiler."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch._dynamo.config, "suppress_errors", True)
    torch._dynamo.utils.counters.clear()
    failing = partial(torch.compile, backend=mock.Mock(side_effect=OSError))
    monkeypatch.setattr(torch, "compile", failing)
    flags = ["--max_steps=2", "--eval_final_max_puzzles=16", "--L_cycles=1", "--compile=on"]
    text = run(data, tmp_path, *flags)
    assert "for the first step at H_cycles 2, L_cycles 1, not compiled, since torch.compile failed" in text


@pytest.mark.parametrize("capability, given, taken", [
    ((9, 0), "bfloat16", "bfloat16"), ((7, 5), "bfloat16", "float16"), ((6, 1), "bfloat16", "float32"),
    ((7, 5), "auto", "float16")])
def test_a_gpu_compiles_has_no_tf32_and_may_lack_bfloat16_units(capability, given, taken, monkeypatch):
    for name, value in (("get_device_name", "Fake GPU"), ("set_device", None),
                        ("get_device_capability", capability)):
        monkeypatch.setattr(torch.cuda, name, mock.Mock(return_value=value))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported",
                        lambda including_emulation: including_emulation or capability >= (8, 0))
    device = train.open_device("cuda", settings_of("--device=cuda"))
    dtype, note = device.choose_dtype(given)
    # a config file may ask for TF32
    assert device.compiles and torch.get_float32_matmul_precision() == "highest"
    assert dtype == taken and note.startswith(f"forward_dtype is {taken}" if given != taken else "")


def test_first_gpu_rehearses_on_a_cpu(tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, f"{ROOT}/scripts/first_gpu.py", "--device=cpu", f"--out_dir={out}"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    parts = [json.loads(line)["part"] for line in (out / "results.jsonl").read_text().splitlines()]
    checks = ["parity"] * 2 + ["losses"] * 3 + ["repeat"] * 3 + ["resume"]
    assert parts == ["environment", *checks, *["step", "repeat", "kernels"] * 2]
    assert "\n11 of 11 checks passed\n" in process.stdout and "| maze_eager | 8 | " in process.stdout
    assert os.listdir(tmp_path) == ["out"]  # it leaves nothing elsewhere


@pytest.mark.parametrize("flags, given, taken", [
    ("avx512_bf16", "auto", "bfloat16"), ("avx512_bf16", "bfloat16", "bfloat16"), ("avx2", "auto", "float32"),
    ("avx2", "bfloat16", "float32"), ("avx2", "float32", "float32")])
def test_no_processor_emulates_16_bit_numbers_in_silence(flags, given, taken, monkeypatch):
    monkeypatch.setattr(devices.Path, "exists", lambda path: True)
    monkeypatch.setattr(devices.Path, "read_text", lambda path: f"flags\t: fpu {flags}\n")
    dtype, note = devices.Device("cpu", settings_of()).choose_dtype(given)
    assert dtype == taken and bool(note) == (given == "auto" or (flags, given) == ("avx2", "bfloat16"))


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


@pytest.mark.parametrize("error", [
    OUT_OF_MEMORY, InductorError(OUT_OF_MEMORY, None), BackendCompilerFailed(print, OUT_OF_MEMORY, None)])
def test_out_of_gpu_memory(random_puzzles, monkeypatch, error):
    full = mock.Mock(side_effect=error)
    for name, value in hosts(2)[1].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(train, "replica", full)
    monkeypatch.setattr(train, "on_signals", lambda: None)
    flags = ["--device=cpu", f"--data_path={random_puzzles}"]
    words = "^out of memory on the device with 8 sequences at a time: .* --micro_batch_size that divides 8"
    with pytest.raises(errors.UserError, match=words):
        train.main(settings_of(*flags))


# Environments of launchers, clusters and images.

@pytest.mark.parametrize("variables", [
    "RANK= WORLD_SIZE=", "RANK=0", "WORLD_SIZE=1", "LOCAL_RANK=3", "RANK=0 WORLD_SIZE=1", "GROUP_RANK=",
    "MASTER_ADDR=localhost MASTER_PORT=29500", "RANK=0 WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT="])
def test_one_process_trains_alone_in_an_environment_that_names_no_others(variables, monkeypatch):
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    device = devices.Device("cpu", settings_of())
    assert (device.rank, device.world, device.host) == (0, 1, 0)


@pytest.mark.parametrize("variables, words", [
    ("RANK=0 WORLD_SIZE=2", "RANK=0 WORLD_SIZE=2 MASTER_ADDR= MASTER_PORT= in the environment: "),
    ("WORLD_SIZE=8", "RANK= WORLD_SIZE=8 MASTER_ADDR= MASTER_PORT= in the environment: "),
    ("RANK=1", "several replicas need all four, as torchrun sets them"),
    ("RANK=1 WORLD_SIZE=2 MASTER_ADDR=localhost", "MASTER_ADDR=localhost MASTER_PORT= in the environment: "),
    ("RANK=2 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=1", "one process needs `env -u RANK"),
    ("RANK=x", "RANK=x in the environment: must be a whole number"),
    ("RANK=0 WORLD_SIZE=-1", "WORLD_SIZE=-1 in the environment: must be a whole number"),
    ("RANK=1 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=x", "MASTER_PORT=x in the environment: must"),
])
def test_ranks_without_an_address_are_wrong_input(variables, words, data, tmp_path):
    environment = dict(variable.split("=") for variable in variables.split())
    process = start_train(data, tmp_path / "run", **environment)
    *others, error = process.output().splitlines()
    assert process.returncode == 2 and words in error and others == [], error


def test_more_ranks_than_gpus_are_wrong_input_and_each_rank_takes_its_own(monkeypatch):
    def name_of(index=None):
        assert set_device.called  # or the first GPU would have a context of every rank
        return "Fake GPU"

    set_device = mock.Mock()
    for name, value in ("is_available", True), ("device_count", 2):
        monkeypatch.setattr(torch.cuda, name, mock.Mock(return_value=value))
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(torch.cuda, "get_device_name", name_of)
    for name, value in (hosts(4)[1] | dict(LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")).items():
        monkeypatch.setenv(name, value)
    assert devices.choose_device("auto") == ("cuda", "Fake GPU")
    set_device.assert_called_once_with(1)
    # torchrun tells every rank of the host, so that none waits for another
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(errors.UserError, match="torch sees 2: torchrun --nproc-per-node=2"):
        devices.choose_device("auto")


def test_a_missing_torch_xla_says_where_it_can_be_installed(monkeypatch):
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(devices.platform, "python_version", lambda: "3.14.0")
    with pytest.raises(errors.UserError, match="for Python 3.10 to 3.13 .* Python 3.14.0"):
        devices.choose_device("xla")
