"""Settings, config files and flags: configurator.py."""
import glob
import os
import subprocess
import sys

import configurator
import pytest
from configurator import UserError, configure, read_settings, split_arguments
from conftest import ROOT

import train

SCRIPT = '''"""Trains a toy.

    python toy.py config/small.py
"""
import os

undocumented = 3
# data
path = "data/toy"  # where the data is
# the last line above a group names it
batch = 16  # sequences a step
# optimizer
lr = 1e-3  # peak; "#1" of the choices
shift = -1  # may be negative
fast = False  # leave out the checks
slow = True
CHOICES = dict(path=("a", "b"))
os.environ["TOY"] = "1"
raise SystemExit("the script was run")
'''
DEFAULTS = dict(undocumented=3, path="data/toy", batch=16, lr=1e-3, shift=-1, fast=False, slow=True)


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Runs configure() on the toy script in a folder with the given files, {name: text}."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.py").write_text(SCRIPT)

    def run(*argv, **files):
        for name, text in files.items():
            path = tmp_path / (name.replace("__", "/") + ".py")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return configure("toy.py", argv)

    return run


@pytest.mark.parametrize("stop", ["def main(): pass", "class Model: pass", "@property\ndef main(): pass"])
def test_settings_end_at_the_first_function_or_class(tmp_path, stop):
    (tmp_path / "s.py").write_text(f'"""Settings of a\nclass or\ndef."""\na = 1\n{stop}\nb = [2]\n')
    assert list(read_settings(str(tmp_path / "s.py"))) == ["a"]


@pytest.mark.parametrize("script", ["train.py", "prepare_sudoku.py", "prepare_maze.py"])
def test_scripts_document_every_setting(script):
    for name, (_, comment, group) in read_settings(os.path.join(ROOT, script)).items():
        assert comment and group, name


def test_threads_may_read_settings_at_a_time():
    """A garbage collection within ast.parse, as torch has callbacks of, lets another thread run."""
    code = f"""
import concurrent.futures, configurator, gc, sys
gc.callbacks.append(lambda *_: sum(range(50)))
gc.set_threshold(50)
sys.setswitchinterval(1e-6)
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    list(pool.map(configurator.read_settings, [{train.__file__!r}] * 300))"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("flag, value", {
    "--lr=3e-4": 3e-4, "--lr=2": 2.0, "--lr=-.5": -0.5, "-lr=1": 1.0, "--lr=inf": float("inf"),
    "--batch=32": 32, "--batch=10_000": 10000, "--shift=-7": -7, "--shift=+7": 7,
    "--fast": True, "--fast=True": True, "--fast=true": True, "--slow=False": False, "--slow=false": False,
    "--slow": True, "--path=": "", "--path=123": "123", "--path=1e-3": "1e-3", "--path=True": "True",
    "--path=a=b=c": "a=b=c", "--path=a b": "a b", "--path='q'": "'q'", "--path=--x": "--x",
    "--path=none": "none", "--path=[1]": "[1]", "--path=naïve": "naïve"}.items())
def test_flag(toy, flag, value):
    name = flag.lstrip("-").partition("=")[0]
    settings = vars(toy(flag))
    assert settings == DEFAULTS | {name: value}
    assert type(settings[name]) is type(DEFAULTS[name])


def test_files_and_flags_apply_from_left_to_right(toy):
    files = dict(a="lr = 1.0\nbatch = 1\nshift = 1", b="lr = 2.0\nbatch = 2")
    assert vars(toy("a.py", "b.py", **files)) == DEFAULTS | dict(lr=2.0, batch=2, shift=1)
    assert toy("b.py", "a.py").lr == 1.0
    assert toy("a.py", "--lr=3", "b.py").lr == 2.0
    assert toy("a.py", "b.py", "--lr=3", "--lr=4").lr == 4.0
    assert toy("--batch=7", "a.py").batch == 1


def test_imports_functions_and_private_names_are_the_files_own(toy):
    text = """
import math, os.path as where
from math import sqrt
_chips = 4
class Chip:
    size = 2
def share(n):
    return n // (_chips * Chip.size)
batch = share(4 * batch)
lr = sqrt(4.0)
path = where.join("a", "b")
shift = max(_i for _i in range(3))
fast = not fast and batch > 1
"""
    settings = toy("--batch=8", "a.py", "b.py", a=text, b="assert not {'_chips', 'math'} & {*globals()}")
    assert vars(settings) == DEFAULTS | dict(batch=4, lr=2.0, path="a/b", shift=2, fast=True)


def test_a_file_runs_another_file_found_beside_it(toy):
    files = {"config__base": "lr = 5.0\nbatch = 5",
             "config__study__middle": 'run("../base.py")\nassert lr == 5.0\nlr = 6.0',
             "config__study__leaf": 'run("middle.py")\nassert lr == 6.0\nshift = batch\n'}
    os.makedirs("config")
    assert vars(toy("config/study/leaf.py", **files)) == DEFAULTS | dict(lr=6.0, batch=5, shift=5)
    assert toy(os.path.abspath("config/study/leaf.py")).lr == 6.0


def test_run_overrides_only_what_precedes_it(toy):
    files = {"base": "lr = 2 * lr\nbatch = 5", "first": 'run("base.py")\nlr = 6',
             "last": 'lr = 6\nshift = 6\nrun("base.py")\ndel shift'}
    assert toy("first.py", **files).lr == 6.0 and type(toy("first.py").lr) is float
    assert vars(toy("last.py")) == DEFAULTS | dict(lr=12.0, batch=5)
    assert toy("two.py", two='run("base.py")\nrun("first.py")').lr == 6.0


@pytest.mark.parametrize("wrong, message", [
    ("--btach=3", "--btach=3: unknown setting btach; the closest is batch"),
    ("--LR=1", "--LR=1: unknown setting LR; the closest is lr"),
    ("--zzz=3", "--zzz=3: unknown setting zzz; --help lists all"),
    ("--CHOICES=3", "unknown setting CHOICES"),
    ("--lr", "--lr needs a value: --lr=0.001"), ("--lr=", "--lr=: lr must be float (as 0.001), not ''"),
    ("--batch=1.5", "batch must be int (as 16), not '1.5'"),
    ("--fast=1", "--fast=1: fast must be bool (as False), not '1'"),
    ("--", "--: unknown setting"),
    ("lr=3", "lr=3: cannot read this config file (No such file or directory); a setting is written --key"),
    ("btach = 3", "a.py: unknown setting btach; the closest is batch"),
    ("lr = '1e-3'", "a.py: lr must be float (as 0.001), not '1e-3'"),
    ("lr = True", "lr must be float (as 0.001), not True"),
    ("import numpy\nlr = numpy.ones(3)", "a.py: lr must be float (as 0.001), not array"),
    ("batch = 16.0", "batch must be int (as 16), not 16.0"),
    ("batch = True", "batch must be int (as 16), not True"),
    ("fast = 1", "fast must be bool (as False), not 1"),
    ("def fast(): pass", "fast must be bool (as False), not <function"),
    ("lr = 1.0\nbatch = (3\n", "a.py: SyntaxError: '(' was never closed (a.py, line 2)"),
    ("lr = 1.0\n\nbatch = 16 / 0", "a.py:3: ZeroDivisionError: division by zero"),
    ("def half(n):\n    return n // zero\nbatch = half(3)", "a.py:2: NameError: name 'zero' is not defined"),
    ("\nopen('no_such_file')", "a.py:2: FileNotFoundError: [Errno 2] No such file or directory: 'no_such"),
    ("run('b.py')", "b.py: cannot read this config file (No such file or directory)"),
    ("\nrun('c.py')", "c.py:2: KeyError: 'x'"),
    ("run(3)", "a.py:1: TypeError"),
    ("run('a.py')", "a.py:1: RecursionError"),
    ("run('d.py')", "d.py: unknown setting btach; the closest is batch"),
    ("weights.pt", "weights.pt: "), ("latin.py", "latin.py: Syntax"), (".", "Is a dir")])
def test_wrong_flags_and_files(toy, tmp_path, wrong, message):
    """wrong: a flag, a path, or the text of a file."""
    (tmp_path / "weights.pt").write_bytes(b"PK\x03\x04\x00\x00\x80\xff")
    (tmp_path / "latin.py").write_bytes("path = 'é'".encode("latin-1"))
    files = dict(a=wrong, c="\n{}['x']", d="btach = 1")
    with pytest.raises(UserError) as error:
        toy("a.py" if "(" in wrong or " = " in wrong else wrong, **files)
    assert message in str(error.value)


def test_split_arguments(toy):
    argv = ["--lr=2", "a.py", "run1", "--depth=3", "-", "-fast", "--lrs=1", "run.pyc"]
    own, operands, rest = split_arguments("toy.py", argv)
    assert vars(own) == DEFAULTS | dict(lr=2.0, fast=True)
    assert operands == ["run1", "-", "run.pyc"] and rest == ["a.py", "--depth=3", "--lrs=1"]
    with pytest.raises(UserError, match="batch must be int"):
        split_arguments("toy.py", ["--batch=x"])


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_prints_every_setting_and_reads_only_the_script(toy, flag, capsys):
    with pytest.raises(SystemExit, match="0"):
        configure("toy.py", ["no_such_config.py", flag, "--nonsense"])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "Trains a toy.", "", "python toy.py config/small.py", "", "", "--undocumented=3", "",
        "data", "--path=data/toy where the data is", "",
        "the last line above a group names it", "--batch=16 sequences a step", "",
        "optimizer", '--lr=0.001 peak; "#1" of the choices', "--shift=-1 may be negative",
        "--fast=False leave out the checks", "--slow=True"]


ERROR = "toy.py: an error of two lines\n"
MAIN = """
import sys
from configurator import TransientError, UserError, start

def main(c):
    print(c.lr, "ü")
    print("x" * 200000 * c.slow, flush=True)  # more than a pipe holds
    sys.stdout.flush()
    sys.stderr.flush()
    if c.fast:
        raise eval(c.path)("an error\\nof two lines")

start(main, __file__)
"""


def toy_command(tmp_path, arguments):
    """Runs the toy script as a command of a shell: (exit code, stdout, stderr)."""
    (tmp_path / "toy.py").write_text(SCRIPT.replace('raise SystemExit("the script was run")', "") + MAIN)
    command = ["bash", "-c", f"{sys.executable} toy.py {arguments}; exit ${{PIPESTATUS[0]}}"]
    env = dict(os.environ, PYTHONPATH=ROOT, PYTHONUNBUFFERED="", PYTHONUTF8="1")
    env |= {"PYTHONIOENCODING": "ascii"} if arguments.endswith("# ascii") else {}
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=env, cwd=tmp_path)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("arguments, done", {
    "--lr=2 --slow=False": (0, "2.0 ü\n\n", ""), "--lr": (2, "", "toy.py: --lr needs a value: --lr=0.001\n"),
    "--help | true": (0, "", ""), "| true": (0, "", ""), ">&-": (0, "", ""), ">&- 2>&-": (0, "", ""),
    "--slow=False 2>&-": (0, "0.001 ü\n\n", ""), "--slow=False <&-": (0, "0.001 ü\n\n", ""),
    "--fast --path=UserError | true": (2, "", ERROR), "--fast --path=UserError >&-": (2, "", ERROR),
    "--fast --path=TransientError | true": (1, "", ERROR), "--fast --path=UserError 2>&- | true": (2, "", ""),
    "--fast --path=KeyboardInterrupt | true": (3, "", "toy.py: stopped\n"),
    "--slow=False # ascii": (0, "0.001 \\xfc\n\n", "")}.items())
def test_output_that_cannot_be_written_changes_no_exit_code(tmp_path, arguments, done):
    assert toy_command(tmp_path, arguments) == done


def test_a_bug_keeps_its_traceback(tmp_path):
    code, _, err = toy_command(tmp_path, "--fast --path=KeyError | true")
    assert code == 1 and err.startswith("Traceback")


@pytest.mark.parametrize("value", ["[1, 2]", "None", "os.cpu_count()", "1 + batch", "b''"])
def test_a_default_that_is_not_a_literal_is_one_line(tmp_path, value):
    (tmp_path / "s.py").write_text(f"batch = 16\nworkers = {value}\n")
    message = "s.py:2: the default of workers must be a plain int, float, bool or str"
    with pytest.raises(UserError, match=f"^{message}$"):
        read_settings(str(tmp_path / "s.py"))


CONFIGS = sorted(glob.glob(os.path.join(ROOT, "config", "**", "*.py"), recursive=True))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: os.path.relpath(path, ROOT))
def test_config_file_of_the_project(path):
    settings = configure(train.__file__, [path])
    train.check_settings(settings)
    assert settings.global_batch_size % (settings.micro_batch_size or 1) == 0
    assert {"demo.py", "sudoku.py", "baseline.py"} <= {os.path.basename(path) for path in CONFIGS}
