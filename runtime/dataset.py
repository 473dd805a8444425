"""Brings a run's dataset to this machine."""
import os
import shlex
import subprocess
import sys
import time

from runtime.bucket import local_dataset
from runtime.errors import TransientError, UserError
from runtime.files import locked

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def get_dataset(settings, should_stop):
    """Brings the dataset to the folder data_path, unless it is there: from a bucket, or by data_prepare.

    An address in a bucket becomes that folder in settings. One process of a host does it, while the others
    wait. Raises SystemExit once should_stop() returns true.
    """
    settings.data_path = local_dataset(settings.data_path, should_stop)
    try:
        command = shlex.split(settings.data_prepare)
    except ValueError as e:
        raise UserError(f"data_prepare: {e}: {settings.data_prepare}") from None
    if not command or os.path.exists(settings.data_path):
        return
    # the first process of the host makes the dataset; the others wait, and find it made
    with locked(os.path.normpath(settings.data_path) + ".made"):
        if os.path.exists(settings.data_path):
            return
        # the script may stand beside train.py, and the current folder be another one
        if not os.path.exists(command[0]):
            command[0] = os.path.join(ROOT, command[0])
        # a stop ends the command, too: Ctrl-C reaches both processes, but SIGTERM only this one
        print(f"{settings.data_path} is missing; making it: python", *command, flush=True)
        process = subprocess.Popen([sys.executable, *command])
        try:
            while process.poll() is None and not should_stop():
                time.sleep(0.1)
        finally:
            process.terminate()
        code = process.wait()
        if should_stop():
            raise SystemExit(3)
        # a command that fails by itself may succeed later, one that finds wrong input may not
        if not os.path.exists(settings.data_path):
            error = UserError if code in (0, 2) else TransientError
            raise error(f"data_prepare did not make data_path={settings.data_path}: {settings.data_prepare}")
