"""Environment of all tests, and of the commands that they start."""
import faulthandler
import http.server
import importlib.util
import os
import signal
import sys
import threading

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, os.path.join(ROOT, "scripts")]

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


@pytest.fixture(scope="session")
def random_puzzles(tmp_path_factory):
    """A dataset of 1000 random 4x4 grids for training and for tests."""
    from types import SimpleNamespace

    import bench
    return bench.dataset_path(SimpleNamespace(data_path="4x4"), str(tmp_path_factory.mktemp("data")))[0]


@pytest.fixture
def at_once(monkeypatch):
    """No waits between attempts at a request, in this process."""
    from urllib3.util import Retry
    monkeypatch.setattr(Retry, "get_backoff_time", lambda self: 0.0)


class Server(http.server.ThreadingHTTPServer):
    """A local server on another thread; state: its attributes."""

    daemon_threads, block_on_close = True, False

    def __init__(self, handler, **state):
        vars(self).update(state)
        super().__init__(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=[0.02], daemon=True).start()

    def handle_error(self, request, client_address):
        pass  # the resets that the tests ask for

    def server_close(self):
        self.shutdown()
        super().server_close()
