"""Machines that are not here: GPUs, and processors with and without instructions for bfloat16."""
import getpass
import os
import pwd
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers import TINY, hosts, run, start_train
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import configurator
import optim
import train
from runtime import device as devices
from runtime import engines, errors, flops


def settings_of(*flags):
    return configurator.configure(train.Settings, [*TINY, "--eval_final_max_puzzles=16", *flags])


def test_rows_of_the_puzzle_embedding_add_up_in_a_fixed_order_on_a_gpu():
    """torch documents index_add as nondeterministic on CUDA; index_put with accumulate=True sorts there."""
    with FakeTensorMode():
        entries = torch.zeros(6, 8, device="cuda")
        bins = torch.zeros(6, dtype=torch.int32, device="cuda")
        program = make_fx(partial(optim.add_up, num_bins=4))(entries, bins).code
    assert ".index_put." in program and "index_add" not in program


def test_a_step_that_could_not_be_compiled_says_so(data, monkeypatch, capsys):
    """Compiling fails where Triton or a C compiler is missing."""
    torch._dynamo.reset()
    flags = ["--max_steps=2", "--eval_final_max_puzzles=16"]
    failing = partial(torch.compile, backend=mock.Mock(side_effect=OSError("no compiler")))
    monkeypatch.setattr(torch, "compile", failing)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
        run(data, "run", *flags, "--compile=on")

    # --compile=auto, which compiles on GPUs alone: the step runs as it is
    monkeypatch.setattr(devices.Device, "compile", compile_as_on_a_gpu)
    assert "L_cycles 1, not compiled" in run(data, "other", *flags, "--compile=auto")
    assert "torch.compile failed: BackendCompilerFailed: " in capsys.readouterr().err


def compile_as_on_a_gpu(device, fn, compile=devices.Device.compile):
    device.compiles = True
    return compile(device, fn)


def test_a_user_without_a_name_can_compile(monkeypatch):
    """A container's: torch.compile and torch_xla ask for the name."""
    monkeypatch.setattr(pwd, "getpwuid", mock.Mock(side_effect=KeyError("uid not found: 12345")))
    for name in "LOGNAME", "USER", "LNAME", "USERNAME":
        monkeypatch.delenv(name, raising=False)
    engines.choose_device("cpu")
    assert getpass.getuser() == str(os.getuid())


@pytest.mark.parametrize("name, tflops", [
    ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA L40", None),
    ("NVIDIA GeForce RTX 4090 D", None), ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
    ("TPU v5litepod-8", 197)])
def test_the_peak_is_that_of_the_very_chip(name, tflops):
    peak = flops.peak_flops(SimpleNamespace(name=name))
    assert peak == (tflops and tflops * 1e12)


@pytest.mark.parametrize("flags, given, taken, is_said", [
    ("avx512_bf16", "auto", "bfloat16", True), ("avx2", "auto", "float32", True),
    ("avx2", "bfloat16", "float32", True), ("avx2", "float32", "float32", False)])
def test_no_processor_emulates_16_bit_numbers_in_silence(flags, given, taken, is_said, monkeypatch):
    monkeypatch.setattr(devices.Path, "exists", lambda path: True)
    monkeypatch.setattr(devices.Path, "read_text", lambda path: f"flags\t: fpu {flags}\n")
    dtype, note = devices.Device("cpu", settings_of()).choose_dtype(given)
    assert (dtype, bool(note)) == (taken, is_said)


def test_a_full_memory_names_the_sequences_at_a_time(data):
    """A resume has them from its checkpoint. One sequence cannot be divided."""
    Path("full.py").write_text("import torch, train\n_full = torch.OutOfMemoryError('CUDA out of memory')\n"
                               "def _fail(*args): raise _full\ntrain.train_step = _fail\n")
    run(data, "run", "--micro_batch_size=4", "--max_steps=1", "--eval_max_puzzles=16")
    for flags, advice in [
            (["--init_from=resume", "--max_steps=2"], "a --micro_batch_size below 4 gives the same result"),
            (["--out_dir=one", "--micro_batch_size=1"], "device: a lower global_batch_size")]:
        assert advice in run(data, "run", "full.py", *flags, code=2)


def test_a_full_memory_is_known_in_each_of_its_errors():
    from torch._dynamo.exc import BackendCompilerFailed
    from torch._inductor.exc import InductorError
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    xla = RuntimeError("RESOURCE_EXHAUSTED: XLA:TPU compile permanent error")
    for error in full, InductorError(full, None), BackendCompilerFailed(print, full, None), xla:
        assert errors.is_out_of_memory(error)
    assert not errors.is_out_of_memory(errors.TransientError("gs://bucket: 429 RESOURCE_EXHAUSTED"))


# Environments of launchers, clusters and images.

ADDRESS = "MASTER_ADDR=localhost MASTER_PORT=29500"
TASKS = "SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2"


def set_variables(variables, monkeypatch):
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))


@pytest.mark.parametrize("variables, place", [
    ("RANK= WORLD_SIZE= LOCAL_RANK=x", devices.Place()),
    (f"{ADDRESS} SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=1 PET_NNODES=1:1", devices.Place()),
    (f"{ADDRESS} RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 GROUP_RANK=1 GROUP_WORLD_SIZE=2 {TASKS}",
     devices.Place(1, 2, 1, 1, must_join=True)),
])
def test_the_place_that_an_environment_names(variables, place, monkeypatch):
    set_variables(variables, monkeypatch)
    engines.choose_device("cpu")
    assert devices.read_place() == place


@pytest.mark.parametrize("variables, words", [
    ("WORLD_SIZE=8", "^RANK= WORLD_SIZE=8 .* GROUP_RANK= in the environment: "),
    (f"{ADDRESS} RANK=2 WORLD_SIZE=2", "need the first four, .* one process needs `env -u RANK"),
    (f"{ADDRESS} RANK=0 WORLD_SIZE=2 LOCAL_RANK=x", "LOCAL_RANK=x"),
    (TASKS, "^SLURM_STEP_NUM_TASKS=2 .* torchrun joins them"),
])
def test_processes_that_would_wait_or_train_alone_are_wrong_input(variables, words, monkeypatch):
    set_variables(variables, monkeypatch)
    with pytest.raises(errors.UserError, match=words):
        engines.choose_device("cpu")


def test_a_rank_does_not_wait_for_a_name_without_an_address(data):
    Path("soon.py").write_text("from runtime import device\ndevice.ADDRESS_TIMEOUT = 0\n")
    variables = hosts(2)[1] | dict(MASTER_ADDR="nowhere.invalid")
    text = start_train(data, "run", "soon.py", **variables).output(2)
    assert "MASTER_ADDR=nowhere.invalid in the environment: this name has no" in text.splitlines()[-1]


def test_replicas_join_a_group_that_stands_already(data):
    """Ray Train, accelerate and Lightning make it."""
    Path("group.py").write_text("import torch.distributed as _dist\n_dist.init_process_group('gloo')\n")
    ranks = [start_train(data, "run", "group.py", "--max_steps=1", **environment) for environment in hosts(2)]
    assert "2 x cpu" in ranks[0].output()
    ranks[1].output()


def test_a_rank_whose_peer_never_comes_obeys_sigterm(data):
    rank = start_train(data, "run", **hosts(2)[0])
    assert "device cpu" in rank.stdout.readline()
    time.sleep(1)  # it waits, or begins to
    rank.terminate()
    rank.output(3, timeout=20)


@pytest.mark.xla
@pytest.mark.parametrize("variable, words", [
    ("XLA_USE_SPMD=1", "XLA_USE_SPMD=1 .* one replica instead of one on each device"),
    ("CPU_NUM_DEVICES=two", "CPU_NUM_DEVICES=two "),
])
def test_variables_are_refused_that_torch_xla_must_not_obey(variable, words, monkeypatch):
    """On other devices they change nothing."""
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setenv(*variable.split("=", 1))
    assert engines.choose_device("cpu")[0] == "cpu"
    with pytest.raises(errors.UserError, match=words):
        engines.choose_device("xla")
