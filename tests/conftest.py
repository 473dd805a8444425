"""Environment of all tests, and of the commands that they start."""
import faulthandler
import importlib.util
import os
import signal

import pytest

# Two test files run at a time (pytest.ini): more threads than cores would slow both down many times.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# XLA's CPU compiler takes most of the tests' time; the programs are small, and optimising them does not pay.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
# As configurator.py does, but before tests import torch.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
# A shell that starts the tests with & lets them ignore SIGINT, and so would the scripts that tests interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item):
    if item.get_closest_marker("xla") and not importlib.util.find_spec("torch_xla"):
        pytest.skip("torch_xla is not installed")


@pytest.fixture(autouse=True)
def no_watchdog():
    """A replica that a test ran in this process may have left its watchdog behind."""
    yield
    faulthandler.cancel_dump_traceback_later()
