"""Settings of a script: its top-level globals, overridden by Python config files and --key=value flags.

    python train.py config/sudoku.py --lr=3e-4 --eval_only

A script's settings are the literals assigned at its top level above its first function or class, except to
names in capitals. A trailing comment documents each; a comment line of its own opens a group.

A config file is Python that assigns some of the settings and may read the others. run("baseline.py") in it
runs another one beside it. Imports, functions and names that start with an underscore are the file's own.
Files and flags apply from left to right. A bool flag needs no value: --eval_only.
"""
import ast
import difflib
import functools
import io
import itertools
import os
import signal
import sys
import threading
import tokenize
import traceback
from types import ModuleType, SimpleNamespace

# `import torch` loads every device plugin that is installed, and with TorchTPU's the first step on a machine
# without a TPU takes ten minutes. So scripts import this file before torch. --device=tpu loads the plugin.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
PARENT = os.getppid()  # for device.end_with_parent: it may die while torch is imported
PARSING = threading.Lock()  # replicas may be threads, and ast.parse is not safe in two: python/cpython#106905


class UserError(Exception):
    """Wrong input: one line that says what is wrong, where, and how to fix it. The exit code is 2."""


class TransientError(Exception):
    """A network or a server failed, and may work later: one line. The exit code is 1."""


def start(main, script):
    """Runs main(settings) as a command, with the settings that sys.argv gives."""
    command(lambda: main(configure(script, sys.argv[1:])), script)


def command(run, script):
    """Runs run() as a command: an expected error becomes one line on stderr and an exit code.

    SIGTERM ends it as Ctrl-C does, by a KeyboardInterrupt: what it was writing is removed.
    """
    name, streams = os.path.basename(script), (sys.stdout, sys.stderr)
    protect_output()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run()
    except (UserError, TransientError, OSError) as e:
        print(f"{name}: {' '.join(str(e).splitlines())}", file=sys.stderr)
        sys.exit(2 if isinstance(e, UserError) else 1)
    except KeyboardInterrupt:
        print(f"{name}: stopped", file=sys.stderr)
        sys.exit(3)
    finally:
        sys.stdout.flush()
        sys.stdout, sys.stderr = streams


class Output:
    """A text stream that loses what cannot be written, instead of raising: no program ends for its output."""

    def __init__(self, stream):
        self.stream = stream
        self.write = functools.partial(self.attempt, stream.write)
        self.flush = functools.partial(self.attempt, stream.flush)

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def attempt(self, call, *args):
        try:
            call(*args)
        except BrokenPipeError:  # the reader has left, as `| head` does; the interpreter flushes once more
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
        except (OSError, ValueError):  # a full disk, or the stream is closed
            pass


def protect_output():
    """Makes sys.stdout and sys.stderr streams that never raise, also where they were closed (>&-)."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # otherwise the next file that is opened would take its number
            null = os.open(os.devnull, os.O_RDWR)
            if null != descriptor:
                os.dup2(null, descriptor)
            os.set_inheritable(descriptor, True)
            stream = open(descriptor, "w" if descriptor else "r", closefd=False)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        if descriptor and not isinstance(getattr(sys, name), Output):
            stream = getattr(sys, name)
            if hasattr(stream, "reconfigure"):  # for names of files that its encoding does not have
                stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, Output(stream))


def split_arguments(script, argv):
    """Splits the arguments of a script that has settings of its own beside train.py's.

    Returns the script's settings; its operands; and the config files (NAME.py) and flags for train.py.
    """
    names = {*read_settings(script), "help", "h"}
    own = [a for a in argv if a.startswith("-") and a.lstrip("-").partition("=")[0] in names]
    rest = [a for a in argv if a not in own]
    train_arguments = [a for a in rest if a.endswith(".py") or a.startswith("-") and a != "-"]
    return configure(script, own), [a for a in rest if a not in train_arguments], train_arguments


def configure(script, argv):
    """A script's settings after the config files and flags in argv. --help prints all settings and exits.

    Raises UserError for an unknown key (it names the closest one), a wrong type, or a file that fails to run.
    """
    documented = read_settings(script)
    if "--help" in argv or "-h" in argv:
        print_help(script, documented)
        sys.exit(0)
    defaults = {name: default for name, (default, _, _) in documented.items()}
    values = defaults.copy()
    for arg in argv:
        if not arg.startswith("-"):
            values.update(run_file(arg, values, defaults))
            continue
        name, equals, text = arg.lstrip("-").partition("=")
        expected = type(defaults.get(name, ""))
        if not equals and name in defaults and expected is not bool:
            raise UserError(f"{arg} needs a value: {arg}={defaults[name]}")
        values[name] = check(name, parse(text, expected) if equals else True, defaults, arg)
    return SimpleNamespace(**values)


def run_file(path, values, defaults):
    """Runs a config file that sees `values`; returns the settings after it. Raises UserError."""
    def run(other):
        space.update(run_file(os.path.join(os.path.dirname(path), other), space, defaults))

    space = values | {"run": run}
    try:
        with open(path, "rb") as f:
            source = f.read()
    except OSError as e:
        hint = "a setting is written --key=value"
        raise UserError(f"{path}: cannot read this config file ({e.strerror}); {hint}") from None
    try:
        exec(compile(source, path, "exec"), space)
    except UserError:
        raise
    except Exception as e:
        lines = [frame.lineno for frame in traceback.extract_tb(e.__traceback__) if frame.filename == path]
        place = f"{path}:{lines[-1]}" if lines else path  # a SyntaxError names its line itself
        raise UserError(f"{place}: {type(e).__name__}: {e}") from None
    return {name: check(name, value, defaults, path) for name, value in space.items() if name in defaults
            or not (name.startswith("_") or callable(value) or isinstance(value, ModuleType))}


def check(name, value, defaults, where):
    """Returns value as the type of defaults[name]; raises UserError for an unknown name or another type."""
    if name not in defaults:
        lowered = {known.lower(): known for known in defaults}
        close = difflib.get_close_matches(name.lower(), lowered, 1, 0.5)
        hint = f"the closest is {lowered[close[0]]}" if close else "--help lists all"
        raise UserError(f"{where}: unknown setting {name}; {hint}")
    expected = type(defaults[name])
    value = float(value) if expected is float and type(value) is int else value
    if type(value) is not expected:
        raise UserError(f"{where}: {name} must be {expected.__name__} (as {defaults[name]!r}), not {value!r}")
    return value


def parse(text, expected):
    """A flag's text as a value of the expected type, or the text itself if it is not one."""
    if expected is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return expected(text)
    except ValueError:
        return text


def read_settings(script):
    """The settings of a script, a path, without running it: {name: (default, comment, group)}, in its order.

    Raises UserError if a setting's default is not a plain int, float, bool or str.
    """
    with open(script, encoding="utf-8") as f:
        source = f.read()
    comments, own_line = {}, {}  # {line: comment}, after a statement and on a line of its own
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        line, column = token.start
        if column == 0 and token.string in ("def", "class", "@"):
            break
        if token.type == tokenize.COMMENT:
            kind = own_line if token.line.lstrip().startswith("#") else comments
            kind[line] = token.string.lstrip("# ")
    settings = {}
    with PARSING:
        body = ast.parse("\n".join(source.split("\n")[:line - 1])).body
    for node in body:
        name = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else ""
        if not name.isidentifier() or name.isupper():
            continue
        try:
            default = ast.literal_eval(node.value)
        except ValueError:
            default = None
        if type(default) not in (int, float, bool, str):
            place = f"{os.path.basename(script)}:{node.lineno}"
            raise UserError(f"{place}: the default of {name} must be a plain int, float, bool or str")
        group = next((text for line, text in reversed(own_line.items()) if line < node.lineno), "")
        settings[name] = (default, comments.get(node.lineno, ""), group)
    return settings


def print_help(script, documented):
    """Prints a script's docstring and settings; documented: as read_settings returns them."""
    with open(script, encoding="utf-8") as f:
        print(ast.get_docstring(ast.parse(f.read())) or "")
    for group, items in itertools.groupby(documented.items(), lambda item: item[1][2]):
        print(f"\n{group}")
        for name, (default, comment, _) in items:
            print(f"  --{name}={default}".ljust(38) + f" {comment}")
