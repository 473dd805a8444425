"""Settings, config files and flags: what a file or a flag says holds, and a mistake is named in one line.

test_resume.py runs each config file of the project.
"""
import os
import pickle
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import ROOT

from configurator import FORKS, configure
from runtime.errors import UserError

SCRIPT = '''"""Trains a toy.

    python toy.py config/small.py
"""
import os

from configurator import Above0


class Settings:
    undocumented = 3
    # data
    path = "data/toy"  # where the data is
    # the last line above a group names it
    batch: Above0 = 16  # sequences a step
    # optimizer
    lr=1e-2 / 10  # peak; "#1" of the choices
    shift = -(batch // 16)  # may be negative
    fast = False  # leave out the checks
    slow = True
'''
DEFAULTS = dict(undocumented=3, path="data/toy", batch=16, lr=1e-3, shift=-1, fast=False, slow=True)


@pytest.fixture
def toy():
    """Runs configure() on the toy script in a folder with the given files, {name: text}."""
    script = {}
    exec(SCRIPT, script)

    def run(*argv, **files):
        for name, text in files.items():
            path = Path(name.replace("__", "/") + ".py")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return configure(script["Settings"], argv)

    yield run
    # these forks have replaced nothing
    FORKS.clear()


@pytest.mark.parametrize("flag, value", {
    "--lr=3e-4": 3e-4, "--lr=2": 2.0, "--batch=10_000": 10000, "--fast": True, "--fast=true": True,
    "--slow=False": False, "--path=": "", "--path=123": "123", "--path=a=b c": "a=b c"}.items())
def test_a_flag_is_a_value_of_the_settings_type(toy, flag, value):
    name = flag.lstrip("-").partition("=")[0]
    settings = vars(toy(flag))
    assert settings == DEFAULTS | {name: value}
    assert type(settings[name]) is type(DEFAULTS[name])


def test_files_and_flags_apply_from_left_to_right(toy):
    files = dict(a="lr = 1.0\nbatch = 1\nshift = 1", b="lr = 2.0\nbatch = 2")
    assert vars(toy("a.py", "b.py", **files)) == DEFAULTS | dict(lr=2.0, batch=2, shift=1)
    assert toy("a.py", "--lr=3", "b.py").lr == 2.0
    assert toy("a.py", "b.py", "--lr=3", "--lr=4").lr == 4.0


def test_imports_functions_and_private_names_are_the_files_own(toy):
    text = """
from __future__ import annotations
import math, os.path as where
from math import sqrt
from os import environ
_chips = 4
_folder = where.dirname(where.abspath(__file__))
class Chip:
    size = 2
def share(n):
    return n // (_chips * Chip.size)
batch = share(4 * batch)
lr = sqrt(4.0)
path = where.relpath(_folder)
shift = max(_i for _i in range(3))
fast = not fast and batch > 1
"""
    settings = toy("--batch=8", "a.py", "b.py", a=text, b="assert not {'_chips', 'math'} & {*globals()}")
    assert vars(settings) == DEFAULTS | dict(batch=4, lr=2.0, path=".", shift=2, fast=True)


def test_a_file_runs_another_file_found_beside_it_in_its_place(toy):
    files = {"config__base": "lr = 5.0\nbatch = 5",
             "config__study__middle": 'run("../base.py")\nassert lr == 5.0\nlr = 6.0',
             "config__study__leaf": 'run("middle.py")\nassert lr == 6.0\nshift = batch\n'}
    os.makedirs("config")
    assert vars(toy("config/study/leaf.py", **files)) == DEFAULTS | dict(lr=6.0, batch=5, shift=5)
    assert toy("last.py", last='lr = 6.0\nrun("config/base.py")').lr == 5.0


def test_a_checkpoint_fills_in_what_no_file_and_no_flag_assigns(toy):
    text = """
lr *= 0.5
run("b.py")
for batch in (4, 8):
    pass
if batch == 4:
    path = "data/four"
try:
    shift = 1 // 0
except ZeroDivisionError as _e:
    shift = -1
"""
    settings = toy("--slow", "a.py", a=text, b="fast = False")
    settings = pickle.loads(pickle.dumps(settings))  # as a spawned process receives them
    saved = dict(undocumented=4, path="data/own", batch=32, lr=1.0, shift=5, fast=True, slow=False, gone=1)
    settings.fill(saved)
    assert vars(settings) == DEFAULTS | dict(undocumented=4, path="data/own", batch=8, lr=5e-4)


@pytest.mark.parametrize("argument, message", [
    ("--btach=3", "--btach=3: unknown setting btach; the closest is batch"),
    ("--lr", "--lr: lr must be of type float, not True: write --lr=VALUE, for example --lr=0.001"),
    ("--batch=1.5", "batch must be of type int, not '1.5': write --batch=VALUE, for example --batch=16"),
    ("lr=3", "lr=3: no config file (.py) is there; a setting is written --key=value"),
    ("-lr=3", "-lr=3: a flag begins with two dashes: --lr=3"),
    ("--batch=0", "batch must be above 0 and below 2^31, not 0"),
])
def test_a_wrong_argument_is_named(toy, argument, message):
    with pytest.raises(UserError, match=re.escape(message)):
        toy(argument)


@pytest.mark.parametrize("text, message", [
    ("lr = '1e-3'", "a.py: lr must be of type float, not '1e-3': "),
    ("lr = 1.0\nbatch = (3\n", "a.py: SyntaxError: '(' was never closed (a.py, line 2)"),
    ("def half(n):\n    return n // zero\nbatch = half(3)", "a.py:2: NameError: name 'zero' is not defined"),
    ("new(batch=8)", "a.py:1: ValueError: batch is a setting already; its default is 16"),
    ("import numpy\nnew(clip=numpy.float64(1))",
     "a.py:2: TypeError: clip must be a number, a string or a bool, not np.float64(1.0)"),
    ("run('b.py')", "No such file or directory: 'b.py'"),
    ("class Settings:\n    lr = 1.0", "a.py is a copy of a script and no config file: python a.py runs it"),
])
def test_a_wrong_line_of_a_config_file_is_named(toy, text, message):
    with pytest.raises(UserError, match=re.escape(message)):
        toy("a.py", a=text)


def test_a_setting_counts_in_whatever_way_a_file_assigns_it(toy):
    text = """
PRESETS = {"small": dict(lr=0.3, batch=16)}
globals().update(PRESETS["small"])
def small():
    global shift
    shift = 3
small()
exec("path = 'here'")
"""
    settings = toy("a.py", a=text)
    assert vars(settings) == DEFAULTS | dict(lr=0.3, shift=3, path="here")
    assert {*settings.assigned} == {"lr", "batch", "shift", "path"}  # also batch, which keeps its value


def test_what_a_fork_adds_stays_as_it_was_assigned(toy):
    text = "new(clip=1.0)\nnew(clip=1.0)\nassert clip == {}"
    assert toy("a.py", "--clip=2", "b.py", a=text.format(1), b=text.format(2)).clip == 2.0


ERROR = "toy.py: an error of two lines\n"
MAIN = """
import signal, sys, time
from configurator import start
from runtime.errors import TransientError, UserError
from runtime.process import restart_watchdog

class Freed:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)  # Python drops the KeyboardInterrupt

def stop(text):
    Freed()
    time.sleep(20)

def main(settings):
    restart_watchdog(60)  # which writes to stderr
    print(settings.lr, "ü")
    print("x" * 200000 * settings.slow, flush=True)  # more than a pipe holds
    if settings.fast:
        raise eval(settings.path)("an error\\nof two lines")

start(main, Settings)
"""


def toy_command(arguments):
    """Runs the toy script as a command of a shell: (exit code, stdout, stderr)."""
    Path("toy.py").write_text(SCRIPT + MAIN)
    command = ["bash", "-c", f"{sys.executable} toy.py {arguments}; exit ${{PIPESTATUS[0]}}"]
    env = os.environ | dict(PYTHONPATH=ROOT, PYTHONUTF8="1")
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=env)
    return done.returncode, done.stdout, done.stderr


def test_help_prints_every_setting():
    settings = SCRIPT.partition("class Settings:")[2].replace("\n    ", "\n")
    code, text, _ = toy_command("--help")
    assert not code and text.startswith("Trains a toy.\n\n") and text.endswith(f"\n{settings}\n")
    # scripts/tpu.sh asks so for mistyped flags
    code, _, error = toy_command("--help --lrr=1")
    assert code == 2 and "unknown setting lrr" in error


@pytest.mark.parametrize("arguments, done", {
    "--slow=False --fast --path=UserError": (2, "0.001 ü\n\n", ERROR),
    "--slow=False --fast --path=TransientError": (1, "0.001 ü\n\n", ERROR),
    "--slow=False --fast --path=KeyboardInterrupt": (3, "0.001 ü\n\n", "toy.py: stopped\n"),
    "| true": (1, "", ""), "--lr=2 --slow=False 2>&-": (0, "2.0 ü\n\n", "")}.items())
def test_how_a_command_ends_has_its_exit_code_and_its_words(arguments, done):
    """Expected errors are one line. A reader that leaves, as `| head` does, causes none."""
    assert toy_command(arguments) == done


def test_a_character_that_the_terminals_encoding_lacks(monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    assert toy_command("--lr=2 --slow=False") == (0, "2.0 \\xfc\n\n", "")


def test_an_error_that_nobody_expects_keeps_its_traceback():
    """An OSError is one, for example after a typo in a path of an edited file."""
    code, _, text = toy_command("--slow=False --fast --path=OSError")
    assert code == 1 and "in main\n" in text and text.endswith("OSError: an error\nof two lines\n")


def test_a_stop_that_python_drops_ends_a_command():
    began = time.monotonic()
    assert toy_command("--slow=False --fast --path=stop")[0] == 3
    assert time.monotonic() - began < 15


def test_code_that_reads_a_missing_setting_is_named(toy):
    """For example a model.py that was edited for a copy of train.py."""
    with pytest.raises(UserError, match=r"^.*test_configurator\.py:\d+: no setting clip: "):
        print(toy().clip)
