"""Starts the processes of the tests, which have torch imported already.

Many tests run a command in a process of its own, and a new interpreter takes seconds to import torch. So one
server, the fork server of multiprocessing, imports it once, and forks every such process from itself. What is
forked differs from a new interpreter in its folder, its variables, its output and its end: the classes below
and run_script() restore these.
"""
import atexit
import gc
import importlib.util
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import sys
import threading
from multiprocessing.connection import Connection

import pytest

gc.disable()  # a collection while torch is imported visits a million objects; pytest and NewProcess enable it
SERVER = multiprocessing.forkserver._forkserver
CONTEXT = multiprocessing.get_context("forkserver")


# The server.

def start_server():
    """Starts the server, unless it runs already; returns its address."""
    SERVER.set_forkserver_preload(["helpers", "torch._dynamo", "torch_xla"])  # if it is installed
    with pytest.MonkeyPatch.context() as variables:
        variables.setenv("PYTHONPATH", os.path.dirname(os.path.abspath(__file__)))
        variables.setenv("PJRT_DEVICE", "CPU")  # or torch_xla says which one it takes
        SERVER.ensure_running()
    return SERVER._forkserver_address


def use_server(address):
    """Lets this process use the server that another one has started, and ends."""
    SERVER._forkserver_address = address
    SERVER._forkserver_alive_fd = os.open(os.devnull, os.O_WRONLY)
    SERVER.ensure_running = lambda: None


# the workers of `pytest -n` share the server of the process that starts them
if "FORK_SERVER" in os.environ:
    use_server(os.environ["FORK_SERVER"])


# Processes from the server.

class NewProcess(CONTEXT.Process):
    """Calls target(*args) in another process, which prints where this one does."""

    def __init__(self, target, args=(), **options):
        super().__init__(target=target, args=args, **options)
        self.folder = os.getcwd()
        self.environment = dict(os.environ)
        self.writer = Connection(os.dup(1), readable=False)

    def start(self):
        start_server()
        super().start()

    def run(self):
        gc.freeze()  # a collection would copy the objects of the server, too
        gc.enable()

        # what this process starts comes from the same server, which is the parent of all
        SERVER.ensure_running = lambda: None
        multiprocessing.process._parent_process = None

        # the folder and the variables of the process that started this one
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.environment)

        # output and errors both go to the writer
        os.dup2(self.writer.fileno(), 1)
        os.dup2(self.writer.fileno(), 2)
        sys.stdout = open(1, "w", buffering=1, closefd=False, encoding="utf-8")
        sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False, encoding="utf-8")
        self.writer.close()
        super().run()


CONTEXT.Process = NewProcess


class PipedProcess(NewProcess):
    """Starts a process whose output and errors come in one pipe, as subprocess.Popen does.

    Args:
        target, args: it calls target(*args).
        cwd: its folder.
        environment: its variables besides those of this process.
    """

    def __init__(self, target, args, cwd=".", **environment):
        super().__init__(target, args)
        self.folder = os.path.abspath(cwd)
        self.environment |= environment
        reader, self.writer = CONTEXT.Pipe(duplex=False)
        self.start()
        self.writer.close()
        self.stdout = open(os.dup(reader.fileno()), encoding="utf-8")

    def wait(self, timeout=None):
        self.join(timeout)
        return self.exitcode

    def output(self, code=0, timeout=120):
        """Returns what it prints until it ends with this exit code. It is killed after so many seconds."""
        killer = threading.Timer(timeout, self.kill)
        killer.start()
        text = self.stdout.read()
        self.wait()
        killer.cancel()
        assert self.exitcode == code, f"exit code {self.exitcode}\n{text}"
        return text


def run_script(name, argv):
    """Runs a script as a command does, in this process.

    Args:
        name: of a module, or the path of a copy.
        argv: the arguments of the command.
    """
    import torch.multiprocessing  # not above, since the process that hands out the tests imports this file

    # to the script this is a first process, whose children come from the server, too
    multiprocessing.current_process().name = "MainProcess"  # by which the forks of tests know it
    torch.multiprocessing.get_context = lambda method: CONTEXT  # which xmp.spawn asks for

    path = name if name.endswith(".py") else importlib.util.find_spec(name).origin
    sys.argv = [path, *argv]
    code = 0
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as e:
        code = e.code
    atexit._run_exitfuncs()  # multiprocessing ends without them, and frees nothing: a lock's file would stay
    gc.collect()
    sys.exit(code)
