"""Settings of a script: its top-level globals, overridden by Python config files and --key=value flags.

    python train.py config/sudoku.py --lr=3e-4 --eval_only

A script's settings are the literals assigned at its top level above its first function or class; a trailing comment
documents each, a comment line of its own opens a group. Names in capitals are constants, not settings. A config file is
Python that assigns some of them and may read the others; `run("baseline.py")` in it runs another file first, found
beside it. Its own names start with an underscore; imports and functions are its own, too. Files and flags apply from
left to right. A flag of a bool may go without a value: --eval_only.
"""
import ast
import difflib
import io
import os
import sys
import tokenize
import traceback
from types import ModuleType, SimpleNamespace


class UserError(Exception):
    """Wrong input: one line for people that says what, where and the mend. start() prints it and exits with 2."""


def read_settings(script):
    """Reads a script's settings without running it.

    script: path of the script. Returns {name: (default, comment, group)} in the order of the file.
    Raises ValueError where a setting's default is not a plain int, float, bool or str.
    """
    with open(script, encoding="utf-8") as f:
        source = f.read()
    comments, own_line = {}, {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            where = own_line if token.line.lstrip().startswith("#") else comments
            where[token.start[0]] = token.string.lstrip("# ")
    settings, previous, group = {}, 0, ""
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            break
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name) or node.targets[0].id.isupper():
            continue
        name = node.targets[0].id
        try:
            default = ast.literal_eval(node.value)
        except ValueError:
            default = None
        if type(default) not in (int, float, bool, str):
            raise ValueError(f"{script}:{node.lineno}: the default of {name} must be a plain int, float, bool or str")
        group = next((own_line[n] for n in range(node.lineno - 1, previous, -1) if n in own_line), group)
        settings[name] = (default, comments.get(node.lineno, ""), group)
        previous = node.lineno
    return settings


def check(name, value, defaults, where):
    """Returns value as the type of defaults[name]; raises UserError for an unknown name or another type."""
    if name not in defaults:
        close = difflib.get_close_matches(name.lower(), [k.lower() for k in defaults], 1, 0.5)
        close = [k for k in defaults if k.lower() in close]
        raise UserError(f"{where}: unknown setting {name}" + (f"; the closest is {close[0]}" if close else "; --help lists all"))
    want = type(defaults[name])
    if want is float and type(value) is int:
        value = float(value)
    if type(value) is not want:
        raise UserError(f"{where}: {name} must be {want.__name__} (as {defaults[name]!r}), not {value!r}")
    return value


def parse(text, want):
    """A flag's text as a value of type want, or the text itself where it is not one."""
    if want is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return want(text)
    except ValueError:
        return text


def run_file(path, values, defaults):
    """Runs a config file that sees `values`, and returns the settings after it. Raises UserError with file and line."""
    space = dict(values, run=lambda other: space.update(run_file(os.path.join(os.path.dirname(path), other), space, defaults)))
    try:
        with open(path, "rb") as f:
            source = f.read()
    except OSError as e:
        raise UserError(f"{path}: cannot read this config file ({e.strerror}); a setting is written --key=value") from None
    try:
        exec(compile(source, path, "exec"), space)
    except UserError:
        raise
    except Exception as e:  # a SyntaxError names its line itself
        line = [f":{f.lineno}" for f in traceback.extract_tb(e.__traceback__) if f.filename == path][-1:]
        raise UserError(f"{path}{''.join(line)}: {type(e).__name__}: {e}") from None
    own = lambda name, value: name.startswith("_") or callable(value) or isinstance(value, ModuleType)
    return {name: check(name, value, defaults, path) for name, value in space.items() if name in defaults or not own(name, value)}


def configure(script, argv):
    """Settings of script after the config files and flags in argv, as a namespace. --help prints them and exits.

    Raises UserError, one line, for an unknown key (the closest is named), a wrong type, or a file that fails to run.
    """
    documented = read_settings(script)
    defaults = {name: default for name, (default, _, _) in documented.items()}
    if "--help" in argv or "-h" in argv:
        print_help(script, documented)
        sys.exit(0)
    values = dict(defaults)
    for arg in argv:
        if not arg.startswith("-"):
            values.update(run_file(arg, values, defaults))
            continue
        name, equals, text = arg.lstrip("-").partition("=")
        want = type(defaults.get(name, ""))
        if not equals and name in defaults and want is not bool:
            raise UserError(f"{arg} needs a value: {arg}={defaults[name]}")
        values[name] = check(name, parse(text, want) if equals else True, defaults, arg)
    return SimpleNamespace(**values)


def print_help(script, documented):
    with open(script, encoding="utf-8") as f:
        lines = [ast.get_docstring(ast.parse(f.read())) or ""]
    shown = None
    for name, (default, comment, group) in documented.items():
        if group != shown:
            lines.append(f"\n{group}")
            shown = group
        lines.append(f"  --{name}={default}".ljust(38) + f" {comment}")
    print("\n".join(lines))  # at once: the reader may be head


def start(main, script):
    """Runs main(settings) as a command, with the settings that sys.argv gives."""
    command(lambda: main(configure(script, sys.argv[1:])), script)


def command(run, script):
    """Runs run() as a command: a UserError becomes one line on stderr and exit code 2."""
    try:
        run()
    except UserError as e:
        print(f"{os.path.basename(script)}: {' '.join(str(e).splitlines())}", file=sys.stderr)
        sys.exit(2)
