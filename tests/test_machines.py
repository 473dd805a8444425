"""Machines that are not here: GPUs, and processors with and without instructions for bfloat16."""
import getpass
import json
import os
import pwd
import socket
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers import TINY, TrainProcess, hosts, run, start_train
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import configurator
import optim
import train
from runtime import device as devices
from runtime import errors


def settings_of(*flags):
    return configurator.configure(train.Settings, [*TINY, "--eval_final_max_puzzles=16", *flags])


def test_only_cuda_gets_weights_in_another_order_and_all_get_their_numbers():
    w = torch.randn(32, 97)
    for device_type, strides in ("cuda", (1, 32)), ("xla", (97, 1)), ("cpu", (97, 1)):
        cast = devices.cast_weights(SimpleNamespace(type=device_type), {"gate": w}, torch.bfloat16)["gate"]
        assert cast.stride() == strides and torch.equal(cast, w.bfloat16())


class Operations(TorchDispatchMode):
    """Notes the names of all operations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("num_bins, operation", [(1, "sum"), (4, "index_put")])
def test_rows_of_the_puzzle_embedding_add_up_in_a_fixed_order_on_a_gpu(num_bins, operation):
    """torch documents index_add as nondeterministic on CUDA; index_put with accumulate=True sorts there."""
    with FakeTensorMode(), Operations() as operations:
        entries = torch.zeros(6, 8, device="cuda")
        bins = torch.zeros(6, dtype=torch.int32, device="cuda")
        assert optim.add_up(entries, bins, num_bins).shape == (num_bins, 8)
    assert operation in operations.names and "index_add" not in operations.names


def test_both_ways_to_add_up_bins_agree():
    entries = torch.randn(50, 3)
    bins = torch.randint(0, 7, (50,))
    want = torch.zeros(7, 3).index_put((bins,), entries, accumulate=True)
    assert torch.allclose(optim.add_up(entries, bins, 7), want, atol=1e-5)


def test_a_step_that_could_not_be_compiled_says_so(data, monkeypatch):
    """As without Triton or a C compiler."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch._dynamo.config, "suppress_errors", True)
    torch._dynamo.utils.counters.clear()
    failing = partial(torch.compile, backend=mock.Mock(side_effect=OSError))
    monkeypatch.setattr(torch, "compile", failing)
    flags = ["--max_steps=2", "--eval_final_max_puzzles=16", "--compile=on"]
    text = run(data, "run", *flags)
    assert "for the first step at H_cycles 1, L_cycles 1, not compiled, since torch.compile failed" in text


def test_a_user_without_a_name_can_compile(monkeypatch):
    """A container's: torch.compile asks for the name."""
    monkeypatch.setattr(torch, "compile", mock.Mock())
    unknown = mock.Mock(side_effect=KeyError("getpwuid(): uid not found: 12345"))
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    devices.Device("cpu", settings_of("--compile=on")).compile(abs)
    assert getpass.getuser() == str(os.getuid())


@pytest.mark.parametrize("name, tflops", [
    ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA L4", 121), ("NVIDIA L40", None),
    ("TPU v5litepod-8", 197), ("x86_64", None)])
def test_the_peak_is_that_of_the_very_chip(name, tflops):
    peak = devices.peak_flops(SimpleNamespace(name=name))
    assert peak == (tflops and tflops * 1e12)


@pytest.mark.parametrize("flags, given, taken", [
    ("avx512_bf16", "auto", "bfloat16"), ("avx512_bf16", "bfloat16", "bfloat16"), ("avx2", "auto", "float32"),
    ("avx2", "bfloat16", "float32"), ("avx2", "float32", "float32")])
def test_no_processor_emulates_16_bit_numbers_in_silence(flags, given, taken, monkeypatch):
    monkeypatch.setattr(devices.Path, "exists", lambda path: True)
    monkeypatch.setattr(devices.Path, "read_text", lambda path: f"flags\t: fpu {flags}\n")
    dtype, note = devices.Device("cpu", settings_of()).choose_dtype(given)
    assert dtype == taken and bool(note) == (given == "auto" or (flags, given) == ("avx2", "bfloat16"))


def test_what_a_gpu_or_torch_compile_lacks_is_one_line(random_puzzles, monkeypatch):
    """Memory, also while it compiles, or a compiler."""
    from torch._dynamo.exc import BackendCompilerFailed
    from torch._inductor.exc import InductorError
    for name, value in hosts(2)[1].items():
        monkeypatch.setenv(name, value)
    words = "^out of memory on the device: a --micro_batch_size smaller than 16 gives the same result"
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    for error in full, InductorError(full, None), BackendCompilerFailed(print, full, None):
        monkeypatch.setattr(train, "replica", mock.Mock(side_effect=error))
        with pytest.raises(errors.UserError, match=words):
            train.main(settings_of("--device=cpu", f"--data_path={random_puzzles}", "--global_batch_size=16"))

    # or finds no compiler
    for words in "No working C++ compiler found in config.cpp.cxx", "Failed to find C compiler.":
        error = InductorError(RuntimeError(words), None)
        monkeypatch.setattr(train, "replica", mock.Mock(side_effect=error))
        with pytest.raises(errors.UserError, match="^--compile=auto: InductorError: .* --compile=off$"):
            train.main(settings_of("--device=cpu", f"--data_path={random_puzzles}"))
    assert errors.is_out_of_memory(RuntimeError("RESOURCE_EXHAUSTED: XLA:TPU compile permanent error"))
    with pytest.raises(RuntimeError) as e:
        torch.empty(2 ** 60)
    assert errors.is_out_of_memory(e.value) and errors.is_out_of_memory(MemoryError())
    assert not errors.is_out_of_memory(errors.TransientError("gs://bucket: 429 RESOURCE_EXHAUSTED"))


# Environments of launchers, clusters and images.

ADDRESS = "WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29500"


def set_variables(variables, monkeypatch):
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))


@pytest.mark.parametrize("variables", [
    "RANK= WORLD_SIZE=", "LOCAL_RANK=3", "MASTER_ADDR=localhost MASTER_PORT=29500",
    "RANK=0 WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT=", "SLURM_NTASKS=2 SLURM_PROCID=0",
    "SLURM_NTASKS=2 SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1"])
def test_one_process_trains_alone_in_an_environment_that_names_no_others(variables, monkeypatch):
    set_variables(variables, monkeypatch)
    device = devices.Device("cpu", settings_of())
    assert (device.rank, device.world, device.host) == (0, 1, 0)


def test_a_rank_without_an_address_is_wrong_input(data):
    [error] = start_train(data, "run", RANK="0", WORLD_SIZE="2").output(2).splitlines()
    assert "RANK=0 WORLD_SIZE=2 MASTER_ADDR= MASTER_PORT= in the environment: " in error


SRUN = "SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2"


@pytest.mark.parametrize("variables, words", [
    ("RANK=x WORLD_SIZE=2", "RANK=x in the environment must be a whole number, "),
    (f"RANK=-1 {ADDRESS}", "RANK=-1 "),
    ("WORLD_SIZE=8", "RANK= WORLD_SIZE=8 MASTER_ADDR= MASTER_PORT= in the environment: "),
    ("RANK=1", "several replicas need all four, as torchrun sets them"),
    ("RANK=1 WORLD_SIZE=2 MASTER_ADDR=localhost", "MASTER_ADDR=localhost MASTER_PORT= in the environment: "),
    ("RANK=2 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=1", "one process needs `env -u RANK"),
    ("RANK=0 WORLD_SIZE=0", "WORLD_SIZE=0 .* several replicas need all four"),
    (f"RANK=0 {ADDRESS} MASTER_PORT=http", "MASTER_PORT=http .* whole number"),
    (f"RANK=0 {ADDRESS} LOCAL_RANK=x", "LOCAL_RANK=x "),
    (f"RANK=0 {ADDRESS} LOCAL_WORLD_SIZE=x", "LOCAL_WORLD_SIZE=x "),
    (f"RANK=0 {ADDRESS} GROUP_RANK=-1", "GROUP_RANK=-1 "),
    (SRUN, r"srun started 2 tasks .*: torchrun joins them"),
    (f"{SRUN} RANK=0 {ADDRESS} GROUP_WORLD_SIZE=1", r"srun started 2 tasks .*: torchrun joins them"),
])
def test_a_launcher_that_sets_a_wrong_value_is_wrong_input(variables, words, monkeypatch):
    set_variables(variables, monkeypatch)
    with pytest.raises(errors.UserError, match=words):
        devices.read_place()


@pytest.mark.parametrize("variables, place", [
    (f"{SRUN} RANK=1 {ADDRESS} GROUP_WORLD_SIZE=2 GROUP_RANK=1", (1, 2, 0, 1, 1)),
    (f"RANK=1 {ADDRESS} LOCAL_RANK= LOCAL_WORLD_SIZE= GROUP_RANK=", (1, 2, 0, 1, 0)),
])
def test_torchrun_under_srun_and_empty_variables(variables, place, monkeypatch):
    set_variables(variables, monkeypatch)
    assert devices.read_place() == place


def test_a_port_in_use_may_be_free_later(data):
    with socket.create_server(("127.0.0.1", 0)) as server:
        variables = dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                         MASTER_PORT=str(server.getsockname()[1]))
        text = start_train(data, "run", **variables).output(1)
    assert "another process has this port" in text.splitlines()[-1] and "Traceback" not in text


@pytest.mark.parametrize("variables, words", [
    (dict(MASTER_ADDR="nowhere.invalid"), "MASTER_ADDR=nowhere.invalid in the environment: this name has no"),
    (dict(GLOO_SOCKET_IFNAME="nodev0"), "GLOO_SOCKET_IFNAME=nodev0 in the environment: no such network")])
def test_an_address_or_an_interface_that_is_not_there(variables, words, data):
    Path("soon.py").write_text("from runtime import device\ndevice.ADDRESS_TIMEOUT = 0\n")
    [environment] = hosts(1)
    text = start_train(data, "run", "soon.py", **(environment | variables)).output(2)
    assert words in text.splitlines()[-1] and "Traceback" not in text


def test_a_rank_whose_peer_never_comes_obeys_sigterm(data):
    rank = start_train(data, "run", **hosts(2)[0])
    assert "device cpu" in rank.stdout.readline()
    time.sleep(1)  # it waits, or begins to
    rank.terminate()
    rank.output(3, timeout=20)


@pytest.mark.xla
@pytest.mark.parametrize("variable, words", [
    ("XLA_USE_BF16=1", "XLA_USE_BF16=1 .* see --forward_dtype"), ("XLA_USE_FP16=1", "XLA_USE_FP16=1 "),
    ("XLA_DOWNCAST_BF16=true", "XLA_DOWNCAST_BF16=true "), ("XLA_DOWNCAST_FP16=1", "XLA_DOWNCAST_FP16=1 "),
    ("XLA_USE_SPMD=1", "XLA_USE_SPMD=1 .* one replica instead of one on each device"),
    ("CPU_NUM_DEVICES=two", "CPU_NUM_DEVICES=two "),
])
def test_variables_are_refused_that_torch_xla_must_not_obey(variable, words, monkeypatch):
    """On other devices they change nothing."""
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setenv(*variable.split("=", 1))
    assert devices.choose_device("cpu")[0] == "cpu"
    with pytest.raises(errors.UserError, match=words):
        devices.choose_device("xla")


@pytest.mark.xla
def test_variables_that_change_nothing_are_left_to_torch_xla(monkeypatch):
    for variable in "PJRT_DEVICE=CPU", "XLA_USE_BF16=0", "XLA_USE_SPMD=", "CPU_NUM_DEVICES=":
        monkeypatch.setenv(*variable.split("="))
    monkeypatch.setenv("XLA_THREAD_POOL_SIZE", "16")
    assert devices.choose_device("xla")[0] == "xla" and os.environ["CPU_NUM_DEVICES"] == "1"


def test_two_processes_measure_the_batch_that_one_of_them_chooses(random_puzzles):
    flags = [flag for flag in TINY if "batch_size" not in flag]
    flags += [f"--data_path={random_puzzles}", "--device=cpu", "--steps=1"]
    ranks = [TrainProcess(flags, script="bench", **environment) for environment in hosts(2)]
    figures = json.loads(ranks[0].output().splitlines()[-1])
    ranks[1].output()
    assert figures["replicas"] == 2 and figures["global_batch_size"] == 2 * figures["sequences_at_a_time"]


def test_more_ranks_than_gpus_are_wrong_input(monkeypatch):
    """torchrun tells every rank of the host, so that none waits for another."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in (hosts(4)[1] | dict(LOCAL_WORLD_SIZE="3")).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(errors.UserError, match="torch sees 2: torchrun --nproc-per-node=2"):
        devices.choose_device("auto")


def test_a_missing_torch_xla_says_where_it_can_be_installed(monkeypatch):
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(devices.platform, "python_version", lambda: "3.14.0")
    with pytest.raises(errors.UserError, match="for Python 3.10 to 3.13 .* Python 3.14.0"):
        devices.choose_device("xla")
