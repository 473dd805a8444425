"""Environment of all tests, and of the commands that they start; and the order of the test files."""
import gc
import importlib.util
import os
import signal

import fork_server
import pytest

# Three test files run at a time (pyproject.toml): more threads than cores would slow all down many times.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# XLA's CPU compiler takes most of the tests' time; the programs are small, and optimizing them does not pay.
# Its older emitters write less code, and on one thread. The client of test_torchtpu.py has only new ones.
flags = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if "CPU_CLIENT" not in os.environ:
    flags += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", flags)
# A shell lets the tests ignore SIGINT after &, and SIGHUP under nohup; what they start would do so, too.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# These files take long for their size: each test starts several processes, or compiles.
LONG = ["test_aot.py", "test_chaos.py", "test_copies.py", "test_first_chip.py", "test_models.py",
        "test_parity.py", "test_smoke.py", "test_sweep.py"]


def pytest_configure(config):
    # the process that only hands out the tests of `pytest -n` need not import torch, but its server does
    if config.getoption("dist", "no") == "no":
        pytest.register_assert_rewrite("helpers")
        config.pluginmanager.import_plugin("shared_fixtures")
    else:
        os.environ["FORK_SERVER"] = fork_server.start_server()


def pytest_collection_finish():
    gc.freeze()  # no collection visits what torch has made until here; fork_server.py disabled them
    gc.enable()


def pytest_collection_modifyitems(items):
    # the workers take whole files, long ones first, so that all end together
    items.sort(key=lambda item: (item.path.name in LONG, item.path.stat().st_size), reverse=True)
    if importlib.util.find_spec("torch_xla"):
        return
    for item in items:
        if item.get_closest_marker("xla"):
            item.add_marker(pytest.mark.skip("needs torch_xla"))
