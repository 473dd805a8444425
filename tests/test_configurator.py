"""Settings, config files and flags: configurator.py."""
import ast
import glob
import os
import subprocess
import sys

import pytest

import configurator
import train
from configurator import TransientError, UserError, check, configure, read_settings, start

ROOT = os.path.dirname(os.path.abspath(configurator.__file__))
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
os.environ["TOY_WAS_RUN"] = "1"
raise SystemExit("the script was run")


def main(c):
    pass


late = 5  # not a setting
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


# Reading a script.

def test_settings_are_read_without_running_the_script(toy, tmp_path):
    settings = read_settings("toy.py")
    assert {name: default for name, (default, _, _) in settings.items()} == DEFAULTS
    assert list(settings) == list(DEFAULTS)
    assert "TOY_WAS_RUN" not in os.environ
    assert vars(toy()) == DEFAULTS


def test_comments_and_groups(toy):
    settings = read_settings("toy.py")
    assert settings["path"][1:] == ("where the data is", "data")
    assert settings["batch"][1:] == ("sequences a step", "the last line above a group names it")
    assert settings["lr"][1:] == ('peak; "#1" of the choices', "optimizer")
    assert settings["shift"][2] == settings["slow"][2] == "optimizer"
    assert settings["slow"][1] == ""
    assert settings["undocumented"][1:] == ("", "")


@pytest.mark.parametrize("stop", ["def main(): pass", "class Model: pass", "@property\ndef main(): pass"])
def test_settings_end_at_the_first_function_or_class(tmp_path, stop):
    (tmp_path / "s.py").write_text(f'"""Settings of a\nclass or\ndef."""\na = 1\n{stop}\nb = [2]\n')
    assert list(read_settings(str(tmp_path / "s.py"))) == ["a"]


@pytest.mark.parametrize("value", ["[1, 2]", "None", "os.cpu_count()", "{}", "1 + a", "b''"])
def test_a_default_that_is_not_a_plain_literal(tmp_path, value):
    path = str(tmp_path / "s.py")
    with open(path, "w") as f:
        f.write(f"import os\na = 1\nworkers = {value}\n")
    message = r"s\.py:3: the default of workers must be a plain int, float, bool or str"
    with pytest.raises(ValueError, match=message):
        read_settings(path)


@pytest.mark.parametrize("script", ["train.py", "prepare_sudoku.py", "prepare_maze.py"])
def test_scripts_document_every_setting(script):
    for name, (default, comment, group) in read_settings(os.path.join(ROOT, script)).items():
        assert comment and group, name


# Flags.

@pytest.mark.parametrize("flag, name, value", [
    ("--lr=3e-4", "lr", 3e-4),
    ("--lr=2", "lr", 2.0),
    ("--lr=-.5", "lr", -0.5),
    ("-lr=1", "lr", 1.0),
    ("--lr=inf", "lr", float("inf")),
    ("--batch=32", "batch", 32),
    ("--batch=10_000", "batch", 10000),
    ("--shift=-7", "shift", -7),
    ("--shift=+7", "shift", 7),
    ("--fast", "fast", True),
    ("--fast=True", "fast", True),
    ("--fast=true", "fast", True),
    ("--slow=False", "slow", False),
    ("--slow=false", "slow", False),
    ("--slow", "slow", True),
    ("--path=", "path", ""),
    ("--path=123", "path", "123"),
    ("--path=1e-3", "path", "1e-3"),
    ("--path=True", "path", "True"),
    ("--path=a=b=c", "path", "a=b=c"),
    ("--path=a b", "path", "a b"),
    ("--path='q'", "path", "'q'"),
    ("--path=--x", "path", "--x"),
    ("--path=none", "path", "none"),
    ("--path=[1]", "path", "[1]"),
    ("--path=naïve", "path", "naïve"),
])
def test_flag(toy, flag, name, value):
    settings = vars(toy(flag))
    assert settings == DEFAULTS | {name: value}
    assert type(settings[name]) is type(DEFAULTS[name])


NOT_A_FILE = "cannot read this config file (No such file or directory); a setting is written --key=value"


@pytest.mark.parametrize("flag, message", [
    ("--btach=3", "--btach=3: unknown setting btach; the closest is batch"),
    ("--LR=1", "--LR=1: unknown setting LR; the closest is lr"),
    ("--undocumentd", "--undocumentd: unknown setting undocumentd; the closest is undocumented"),
    ("--zzz=3", "--zzz=3: unknown setting zzz; --help lists all"),
    ("--CHOICES=3", "unknown setting CHOICES"),
    ("--late=6", "unknown setting late"),
    ("--main=1", "unknown setting main"),
    ("--lr", "--lr needs a value: --lr=0.001"),
    ("--path", "--path needs a value: --path=data/toy"),
    ("--lr=", "--lr=: lr must be float (as 0.001), not ''"),
    ("--lr=fast", "lr must be float (as 0.001), not 'fast'"),
    ("--batch=1.5", "batch must be int (as 16), not '1.5'"),
    ("--batch=1e3", "batch must be int (as 16), not '1e3'"),
    ("--batch=True", "batch must be int (as 16), not 'True'"),
    ("--batch=", "batch must be int (as 16), not ''"),
    ("--fast=1", "--fast=1: fast must be bool (as False), not '1'"),
    ("--fast=yes", "fast must be bool (as False), not 'yes'"),
    ("--fast=", "fast must be bool (as False), not ''"),
    ("--", "--: unknown setting"),
    ("False", f"False: {NOT_A_FILE}"),
    ("lr=3", f"lr=3: {NOT_A_FILE}"),
])
def test_wrong_flag(toy, flag, message):
    with pytest.raises(UserError) as error:
        toy(flag)
    assert message in str(error.value)


# Config files.

def test_files_and_flags_apply_from_left_to_right(toy):
    files = dict(a="lr = 1.0\nbatch = 1\nshift = 1", b="lr = 2.0\nbatch = 2")
    assert vars(toy("a.py", "b.py", **files)) == DEFAULTS | dict(lr=2.0, batch=2, shift=1)
    assert toy("b.py", "a.py").lr == 1.0
    assert toy("a.py", "--lr=3", "b.py").lr == 2.0
    assert toy("a.py", "b.py", "--lr=3", "--lr=4").lr == 4.0
    assert toy("--batch=7", "a.py").batch == 1


def test_an_int_is_accepted_for_a_float(toy):
    settings = toy("a.py", a="lr = 2")
    assert settings.lr == 2.0 and type(settings.lr) is float


def test_a_file_computes_with_the_settings_before_it(toy):
    text = "lr = lr * batch / 16\nbatch += 1\nfast = not fast\npath = f'{path}-{batch}'"
    settings = toy("--batch=64", "a.py", a=text)
    assert (settings.lr, settings.batch, settings.fast, settings.path) == (0.004, 65, True, "data/toy-65")


def test_imports_functions_and_private_names_are_the_files_own(toy):
    text = """
import math, os.path as where
from math import sqrt
_chips = 4
class Chip:
    size = 2
def share(n):
    return n // (_chips * Chip.size)
batch = share(64)
lr = sqrt(4.0)
path = where.join("a", "b")
shift = max(_i for _i in range(3))
"""
    settings = toy("a.py", "b.py", a=text, b="assert '_chips' not in globals()\nfast = 'math' in globals()")
    assert vars(settings) == DEFAULTS | dict(batch=8, lr=2.0, path="a/b", shift=2)


def test_a_file_runs_another_file_found_beside_it(toy):
    files = {
        "config__base": "lr = 5.0\nbatch = 5",
        "config__study__middle": 'run("../base.py")\nassert lr == 5.0\nlr = 6.0',
        "config__study__leaf": 'run("middle.py")\nassert lr == 6.0\nshift = batch\n',
    }
    os.makedirs("config")
    assert vars(toy("config/study/leaf.py", **files)) == DEFAULTS | dict(lr=6.0, batch=5, shift=5)
    assert toy(os.path.abspath("config/study/leaf.py")).lr == 6.0


def test_run_overrides_only_what_precedes_it(toy):
    files = {
        "base": "lr = 5.0\nbatch = 5",
        "first": 'run("base.py")\nlr = 6.0',
        "last": 'lr = 6.0\nshift = 6\nrun("base.py")',
    }
    assert toy("first.py", **files).lr == 6.0
    assert vars(toy("last.py")) == DEFAULTS | dict(lr=5.0, batch=5, shift=6)
    assert toy("two.py", two='run("base.py")\nrun("first.py")').lr == 6.0


def test_a_file_sees_the_settings_of_the_file_that_runs_it(toy):
    assert toy("leaf.py", base="lr = lr * 2", leaf='lr = 8.0\nrun("base.py")').lr == 16.0


def test_deleting_a_setting_keeps_its_value(toy):
    assert vars(toy("a.py", a="del lr")) == DEFAULTS


@pytest.mark.parametrize("text, message", [
    ("btach = 3", "a.py: unknown setting btach; the closest is batch"),
    ("zzz = 3", "a.py: unknown setting zzz; --help lists all"),
    ("SIZE = 3", "a.py: unknown setting SIZE"),
    ("for i in range(2): pass", "a.py: unknown setting i;"),
    ("lr = '1e-3'", "a.py: lr must be float (as 0.001), not '1e-3'"),
    ("lr = True", "lr must be float (as 0.001), not True"),
    ("lr = None", "lr must be float (as 0.001), not None"),
    ("batch = 16.0", "batch must be int (as 16), not 16.0"),
    ("batch = True", "batch must be int (as 16), not True"),
    ("fast = 1", "fast must be bool (as False), not 1"),
    ("path = 3", "path must be str (as 'data/toy'), not 3"),
    ("def fast(): pass", "fast must be bool (as False), not <function"),
    ("import math as lr", "lr must be float (as 0.001), not <module"),
    ("lr = 1.0\nbatch = (3\n", "a.py: SyntaxError: '(' was never closed (a.py, line 2)"),
    ("lr = 1.0\n\nbatch = 16 / 0", "a.py:3: ZeroDivisionError: division by zero"),
    ("def half(n):\n    return n // zero\nbatch = half(3)", "a.py:2: NameError: name 'zero' is not defined"),
    ("batch = int('x')", "a.py:1: ValueError: invalid literal"),
    ("import no_such_module", "a.py:1: ModuleNotFoundError: No module named 'no_such_module'"),
    ("\nopen('no_such_file')", "a.py:2: FileNotFoundError: [Errno 2] No such file or directory: 'no_such"),
    ("run('b.py')", "b.py: cannot read this config file (No such file or directory)"),
    ("\nrun('c.py')", "c.py:2: KeyError: 'x'"),
    ("run(3)", "a.py:1: TypeError"),
    ("run('a.py')", "a.py:1: RecursionError"),
    ("run('d.py')", "d.py: unknown setting btach; the closest is batch"),
])
def test_wrong_file(toy, text, message):
    with pytest.raises(UserError) as error:
        toy("a.py", a=text, c="\n{}['x']", d="btach = 1")
    assert message in str(error.value)


def test_files_that_are_not_python(toy, tmp_path):
    (tmp_path / "weights.pt").write_bytes(b"PK\x03\x04\x00\x00\x80\xff")
    (tmp_path / "latin.py").write_bytes("path = 'é'".encode("latin-1"))
    for path, message in (
        ("weights.pt", "weights.pt: "),
        ("latin.py", "latin.py: SyntaxError"),
        (str(tmp_path), "Is a directory"),
    ):
        with pytest.raises(UserError) as error:
            toy(path)
        assert message in str(error.value)


# check(), --help and start().

def test_check(toy):
    assert check("lr", 3, DEFAULTS, "here") == 3.0
    assert check("batch", 3, DEFAULTS, "here") == 3
    with pytest.raises(UserError, match="^here: unknown setting bacth; the closest is batch$"):
        check("bacth", 3, DEFAULTS, "here")


def words(lines):
    return [line.split() for line in lines]


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("script", ["train.py", "prepare_sudoku.py"])
def test_help_prints_every_setting_with_its_default_and_comment(script, flag, capsys):
    script = os.path.join(ROOT, script)
    with pytest.raises(SystemExit) as stop:
        configure(script, ["no_such_config.py", flag, "--nonsense"])
    assert stop.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    with open(script, encoding="utf-8") as f:
        assert lines[0] == ast.get_docstring(ast.parse(f.read())).splitlines()[0]
    expected = []
    previous_group = None
    for name, (default, comment, group) in read_settings(script).items():
        if group != previous_group:
            expected += ["", group]
        expected.append(f"--{name}={default} {comment}")
        previous_group = group
    assert words(lines[-len(expected):]) == words(expected)


def test_help_reads_only_the_script(toy, capsys):
    with pytest.raises(SystemExit):
        toy("--help")
    out = capsys.readouterr().out
    assert out.startswith("Trains a toy.\n\npython toy.py config/small.py\n")
    assert "  --undocumented=3 " in out and "\n\noptimizer\n  --lr=0.001 " in out
    assert "late" not in out and "CHOICES" not in out


def test_start(toy, monkeypatch, capsys):
    toy()
    calls = []
    monkeypatch.setattr(sys, "argv", ["toy.py", "--lr=2"])
    start(calls.append, "toy.py")
    assert vars(calls[0]) == DEFAULTS | dict(lr=2.0)
    with pytest.raises(ZeroDivisionError):  # a bug keeps its traceback
        start(lambda c: 1 / 0, "toy.py")


@pytest.mark.parametrize("error, code", [(UserError, 2), (TransientError, 1)])
def test_expected_errors_become_one_line_and_an_exit_code(toy, monkeypatch, capsys, error, code):
    toy()
    monkeypatch.setattr(sys, "argv", ["toy.py"])

    def main(c):
        raise error("an error\nof two lines: a hint")

    with pytest.raises(SystemExit) as stop:
        start(main, os.path.abspath("toy.py"))
    assert stop.value.code == code
    assert capsys.readouterr() == ("", "toy.py: an error of two lines: a hint\n")


@pytest.fixture
def toy_command(toy):
    """Runs the toy script, which prints lr, as a command: (exit code, stdout, stderr)."""
    script = SCRIPT.replace('raise SystemExit("the script was run")', "")
    toy(toy=script + "\nfrom configurator import start\nstart(lambda c: print(c.lr), __file__)\n")

    def run(*argv, stdout=subprocess.PIPE):
        command = [sys.executable, "toy.py", *argv]
        env = dict(os.environ, PYTHONPATH=ROOT, PYTHONUNBUFFERED="")
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=env)
        return done.returncode, done.stdout, done.stderr

    return run


def test_command(toy_command):
    assert toy_command("--lr=2") == (0, "2.0\n", "")
    assert toy_command("--lr", "2") == (2, "", "toy.py: --lr needs a value: --lr=0.001\n")


def test_help_whose_reader_has_left(toy_command):
    """`--help | head`: no traceback, not even when the interpreter flushes its buffer at exit."""
    reader, writer = os.pipe()
    os.close(reader)
    assert toy_command("--help", stdout=writer) == (0, None, "")
    os.close(writer)


# The project's own config files.

CONFIGS = sorted(glob.glob(os.path.join(ROOT, "config", "**", "*.py"), recursive=True))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: os.path.relpath(path, ROOT))
def test_config_file_of_the_project(path):
    script = os.path.join(ROOT, "train.py")
    settings = configure(script, [path])
    train.check_settings(settings)
    assert settings.global_batch_size % (settings.micro_batch_size or 1) == 0
    types = {name: type(default) for name, (default, _, _) in read_settings(script).items()}
    assert {name: type(value) for name, value in vars(settings).items()} == types


def test_config_files_exist():
    assert {"demo.py", "sudoku.py", "baseline.py"} <= {os.path.basename(path) for path in CONFIGS}
