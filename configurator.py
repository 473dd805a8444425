"""Settings of a script: its top-level globals, overridden by Python config files and --key=value flags.

    python train.py config/sudoku.py --lr=3e-4 --eval_only

A script's settings are the literals assigned at its top level above its first function or class. A trailing
comment documents each; a comment line of its own opens a group. Names in capitals are constants, not
settings.

A config file is Python that assigns some of the settings and may read the others. `run("baseline.py")` in it
runs another config file, found beside it. Names that start with an underscore, imports and functions are the
file's own. Files and flags apply from left to right. A bool flag needs no value: --eval_only.
"""
import ast
import difflib
import io
import os
import sys
import tokenize
import traceback
from types import ModuleType, SimpleNamespace

# `import torch` loads every device plugin that is installed, and with TorchTPU's the first step on a machine
# without a TPU takes ten minutes. So scripts import this file before torch. --device=tpu loads the plugin.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


class UserError(Exception):
    """Wrong input: one line that says what is wrong, where, and how to fix it. The exit code is 2."""


class TransientError(Exception):
    """A network or a server failed, and may work later: one line. The exit code is 1."""


def start(main, script):
    """Runs main(settings) as a command, with the settings that sys.argv gives."""
    command(lambda: main(configure(script, sys.argv[1:])), script)


def command(run, script):
    """Runs run() as a command: an error that is no bug becomes one line on stderr and an exit code."""
    try:
        run()
    except (UserError, TransientError, OSError) as e:
        print(f"{os.path.basename(script)}: {' '.join(str(e).splitlines())}", file=sys.stderr)
        sys.exit(2 if isinstance(e, UserError) else 1)
    except KeyboardInterrupt:
        print(f"{os.path.basename(script)}: stopped", file=sys.stderr)
        sys.exit(3)


def split_flags(script, argv):
    """(the flags in argv that set a script's own settings or ask for help, the rest of argv)."""
    names = {*read_settings(script), "help", "h"}
    own = [a for a in argv if a.startswith("-") and a.lstrip("-").partition("=")[0] in names]
    return own, [a for a in argv if a not in own]


def configure(script, argv):
    """A script's settings after the config files and flags in argv. --help prints all settings and exits.

    Raises UserError for an unknown key (it names the closest one), a wrong type, or a file that fails to run.
    """
    documented = read_settings(script)
    if "--help" in argv or "-h" in argv:
        print_help(script, documented)
        sys.exit(0)
    defaults = {name: default for name, (default, _, _) in documented.items()}
    values = dict(defaults)
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
    space = dict(values)

    def run(other):
        space.update(run_file(os.path.join(os.path.dirname(path), other), space, defaults))

    space["run"] = run
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
    settings = {}
    for name, value in space.items():
        is_private = name.startswith("_") or callable(value) or isinstance(value, ModuleType)
        if name in defaults or not is_private:
            settings[name] = check(name, value, defaults, path)
    return settings


def check(name, value, defaults, where):
    """Returns value as the type of defaults[name]; raises UserError for an unknown name or another type."""
    if name not in defaults:
        lowered = {known.lower(): known for known in defaults}
        close = difflib.get_close_matches(name.lower(), lowered, 1, 0.5)
        hint = f"the closest is {lowered[close[0]]}" if close else "--help lists all"
        raise UserError(f"{where}: unknown setting {name}; {hint}")
    expected = type(defaults[name])
    if expected is float and type(value) is int:
        value = float(value)
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
    """Reads a script's settings without running it.

    script: path of the script. Returns {name: (default, comment, group)} in the order of the file.
    Raises ValueError if a setting's default is not a plain int, float, bool or str.
    """
    with open(script, encoding="utf-8") as f:
        source = f.read()
    comments = {}  # line: comment after a statement
    own_line = {}  # line: comment on a line of its own
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        line, column = token.start
        if column == 0 and token.string in ("def", "class", "@"):
            break
        if token.type == tokenize.COMMENT:
            kind = own_line if token.line.lstrip().startswith("#") else comments
            kind[line] = token.string.lstrip("# ")
    top = "\n".join(source.split("\n")[:line - 1])
    settings = {}
    previous_line = 0
    group = ""
    for node in ast.parse(top).body:
        is_assignment = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        if not is_assignment or node.targets[0].id.isupper():
            continue
        name = node.targets[0].id
        try:
            default = ast.literal_eval(node.value)
        except ValueError:
            default = None
        if type(default) not in (int, float, bool, str):
            message = f"the default of {name} must be a plain int, float, bool or str"
            raise ValueError(f"{script}:{node.lineno}: {message}")
        lines_above = range(node.lineno - 1, previous_line, -1)
        group = next((own_line[line] for line in lines_above if line in own_line), group)
        settings[name] = (default, comments.get(node.lineno, ""), group)
        previous_line = node.lineno
    return settings


def print_help(script, documented):
    """Prints a script's docstring and settings; documented: as read_settings returns them."""
    with open(script, encoding="utf-8") as f:
        lines = [ast.get_docstring(ast.parse(f.read())) or ""]
    previous_group = None
    for name, (default, comment, group) in documented.items():
        if group != previous_group:
            lines.append(f"\n{group}")
            previous_group = group
        lines.append(f"  --{name}={default}".ljust(38) + f" {comment}")
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:  # the reader has left, as `| head` does, and the interpreter will flush once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
