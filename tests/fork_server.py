"""The server from which the tests' processes are forked, since to import torch takes seconds."""
import multiprocessing.forkserver
import os

import pytest

SERVER = multiprocessing.forkserver._forkserver


def start():
    """Starts it, unless it runs already; returns its address."""
    SERVER.set_forkserver_preload(["helpers", "torch._dynamo", "torch_xla"])  # if it is installed
    with pytest.MonkeyPatch.context() as variables:
        variables.setenv("PYTHONPATH", os.path.dirname(os.path.abspath(__file__)))
        variables.setenv("PJRT_DEVICE", "CPU")  # or torch_xla says which one it takes
        SERVER.ensure_running()
    return SERVER._forkserver_address


def use(address):
    """Lets this process use the server that another one has started, and ends."""
    SERVER._forkserver_address = address
    SERVER._forkserver_alive_fd = os.open(os.devnull, os.O_WRONLY)
    SERVER.ensure_running = lambda: None
