"""Machines that are not here: GPUs, and processors with and without instructions for bfloat16."""
from unittest import mock

import pytest
import torch
from helpers import TINY, hosts, start_train
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.exc import InductorError
from torch.utils._python_dispatch import TorchDispatchMode

import bench
import configurator
import device as devices
import train
from checkpoint import Start
from data import Dataset


def settings_of(*flags):
    return configurator.configure(train.__file__, [*TINY, "--eval_final_max_puzzles=16", *flags])


# GPUs. Torch's meta device stands for one: its tensors have shapes and no values.

class FakeGPU(TorchDispatchMode):
    """Notes in `events` where the host waits for the device, and gives it zeros there."""

    def __init__(self):
        super().__init__()
        self.events = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        kwargs = dict(kwargs or {})
        operation = func.overloadpacket
        kwargs.pop("pin_memory", None)  # which needs a driver
        if operation == aten._pin_memory:
            return args[0]
        if operation == aten.copy_ and args[1].is_meta and not args[0].is_meta:  # an event tells
            return args[0].zero_()
        if operation == aten._local_scalar_dense and args[0].is_meta:
            self.events.append("wait")
            return 0
        if operation == aten._to_copy and args[0].is_meta and kwargs.get("device") == torch.device("cpu"):
            self.events.append("wait")
            return torch.zeros(args[0].shape)
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


@pytest.mark.parametrize("capability, given, taken", [
    ((9, 0), "bfloat16", "bfloat16"), ((7, 5), "bfloat16", "float16"), ((6, 1), "bfloat16", "float32"),
    ((7, 5), "auto", "float16")])
def test_a_gpu_compiles_has_tf32_and_may_lack_bfloat16_units(capability, given, taken, monkeypatch):
    for name, value in (("get_device_name", "Fake GPU"), ("set_device", None),
                        ("get_device_capability", capability)):
        monkeypatch.setattr(torch.cuda, name, mock.Mock(return_value=value))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported",
                        lambda including_emulation: including_emulation or capability >= (8, 0))
    monkeypatch.setattr(torch, "set_float32_matmul_precision", mock.Mock())
    device = devices.open_device("cuda", settings_of("--device=cuda"))
    dtype, note = device.choose_dtype(given)
    assert device.compiles and torch.set_float32_matmul_precision.call_args.args == ("high",)
    assert dtype == taken and note.startswith(f"forward_dtype is {taken}" if given != taken else "")


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
    with pytest.raises(configurator.UserError, match=words):
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
    with pytest.raises(configurator.UserError, match="torch sees 2: torchrun --nproc-per-node=2"):
        devices.choose_device("auto")


def test_a_missing_torch_xla_says_where_it_can_be_installed(monkeypatch):
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(devices.platform, "python_version", lambda: "3.14.0")
    with pytest.raises(configurator.UserError, match="for Python 3.10 to 3.13 .* Python 3.14.0"):
        devices.choose_device("xla")
