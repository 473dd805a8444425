"""Environment of all tests, and of the commands that they start."""
import atexit
import contextlib
import faulthandler
import gc
import http.server
import importlib.util
import io
import json
import multiprocessing.forkserver
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, os.path.join(ROOT, "scripts")]

# Three test files run at a time (pytest.ini): more threads than cores would slow all down many times.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# XLA's CPU compiler takes most of the tests' time; the programs are small, and optimising them does not pay.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
# A shell that starts the tests with & lets them ignore SIGINT, and so would the scripts that tests interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# The files that take longest. The workers take whole files, these first, so that all end together.
LONGEST = ("replicas", "hard_to_kill", "engines", "tpu_sh", "kernels", "aot", "sweep", "train", "chaos",
           "play", "parity", "wrong_input", "smoke", "gcs", "solve", "rollouts", "data", "bench")


def pytest_collection_modifyitems(items):
    def place(item):
        name = item.path.stem.removeprefix("test_")
        return LONGEST.index(name) if name in LONGEST else len(LONGEST)

    items.sort(key=place)


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
    monkeypatch.setattr("bucket.backoff", lambda attempt: 0)


def wait_for(condition, seconds=120):
    """Waits until condition() is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def children(pid):
    """The processes that a process has started, in this order."""
    with open(f"/proc/{pid}/task/{pid}/children") as f:
        return list(map(int, f.read().split()))


def hosts(n):
    """Environments of ranks 0 to n - 1, which gloo joins. Rank 0 is on the last of n hosts."""
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = str(s.getsockname()[1])
    return [dict(RANK=str(i), LOCAL_RANK="0", GROUP_RANK=str(n - 1 - i), WORLD_SIZE=str(n),
                 MASTER_ADDR="127.0.0.1", MASTER_PORT=port) for i in range(n)]


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["train"])


class ForkedTrain:
    """`python train.py ...` in a fork of a process that has imported it, as importing torch takes seconds.

    As subprocess.Popen with one pipe for output and errors.
    """

    def __init__(self, argv, cwd=".", env=None):
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("PYTHONPATH", ROOT)
            multiprocessing.forkserver.ensure_running()
        reader, writer = FORKS.Pipe(duplex=False)
        self.process = FORKS.Process(
            target=run_train, args=(argv, os.path.abspath(cwd), dict(env or os.environ), writer))
        self.process.start()
        writer.close()
        self.stdout = open(os.dup(reader.fileno()), encoding="utf-8")
        self.kill, self.terminate, self.pid = self.process.kill, self.process.terminate, self.process.pid

    @property
    def returncode(self):
        return self.process.exitcode

    def wait(self, timeout=None):
        self.process.join(timeout)
        return self.returncode

    def communicate(self, timeout=60):
        killer = threading.Timer(timeout, self.kill)
        killer.start()
        text = self.stdout.read()
        self.wait()
        killer.cancel()
        return text, None


def run_train(argv, cwd, env, writer):
    import configurator
    import train
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup lets the tests ignore it
    for descriptor, name in (1, "stdout"), (2, "stderr"):
        os.dup2(writer.fileno(), descriptor)
        setattr(sys, name, open(descriptor, "w", buffering=1, closefd=False, encoding="utf-8"))
        setattr(sys, f"__{name}__", getattr(sys, name))
    writer.close()
    sys.argv = ["train.py", *argv]
    code = 0
    try:
        configurator.start(train.main, train.__file__)
    except SystemExit as e:
        code = e.code
    atexit._run_exitfuncs()  # multiprocessing ends without them, and frees nothing: a lock's file would stay
    gc.collect()
    sys.exit(code)


# Replicas of torch_xla on the CPU: threads of one process that stays, as torch_xla takes long to import.

def work(world):
    """Reads (module, name of a function, arguments) from stdin, all replicas call it with their rank."""
    import torch_xla.debug.metrics
    import torch_xla.runtime as xr
    from torch_xla._internal import pjrt
    barrier, replies, job = threading.Barrier(world), sys.stdout, []

    def replica():
        try:
            while True:
                if xr.global_ordinal() == 0:
                    job[:] = json.loads(sys.stdin.readline() or "[null, null, []]")
                    torch_xla.debug.metrics.clear_all()
                barrier.wait()
                if not job[0]:
                    return
                getattr(importlib.import_module(job[0]), job[1])(xr.global_ordinal(), *job[2])
                barrier.wait()
                if xr.global_ordinal() == 0:
                    print(json.dumps(printed.getvalue()), file=replies, flush=True)
                    printed.seek(0)
                    printed.truncate()
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        pjrt._run_thread_per_device(0, 1, replica, pjrt.initialize_multiprocess)


def xla_environment(world):
    return {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(world)}


@pytest.fixture(scope="session")
def replicas():
    """A function (world, function, arguments) that lets a process with so many replicas call it."""
    started = {}

    def call(world, function, *args):
        if world not in started:
            env = xla_environment(world) | {"XLA_THREAD_POOL_SIZE": "16", "PYTHONPATH": ROOT}
            started[world] = subprocess.Popen([sys.executable, __file__, str(world)], stdin=subprocess.PIPE,
                                              stdout=subprocess.PIPE, text=True, env=env)
        job = function.__module__, function.__name__, args
        print(json.dumps(job), file=started[world].stdin, flush=True)
        reply = started[world].stdout.readline()
        assert reply, f"{world} replicas ended in {job}; see stderr"
        return json.loads(reply)

    yield call
    for process in started.values():
        process.stdin.close()
        process.wait(30)


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


if __name__ == "__main__":
    work(int(sys.argv[1]))
