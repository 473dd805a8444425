"""Settings of a script: its top-level globals, overridden by Python config files and --key=value flags.

    python train.py config/sudoku.py --lr=3e-4 --eval_only

A script's settings are the numbers, strings and bools assigned at its top level above its first function or
class, except to names in capitals. --help prints these lines with their comments.

A config file is Python that assigns some of the settings and may read the others. run("baseline.py") in it
runs another one beside it in its place; `__file__` is the outer file's path. Names that start with an
underscore are the file's own, and so are values of other types, such as modules and functions. Files and
flags apply from left to right, once, on the script's defaults; a checkpoint fills in only what none of them
assigned. A bool flag needs no value: --eval_only.

A config file may also be a fork: new(grad_clip=0.0) adds settings, and it may replace classes and functions
in the modules that it imports, each where it stands: import model; model.TRM = MyTRM.
"""
import ast
import difflib
import functools
import os
import shlex
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from runtime import forks
from runtime.errors import UserError

TYPES = (int, float, bool, str)  # that a setting may have


class Settings:
    """Holds a script's settings as attributes; vars(settings) is a dict of them.

    defaults: {name: value} before any config file and flag.
    assigned: the names of those that a config file or a flag assigned.
    """

    __slots__ = ("defaults", "assigned", "__dict__")

    def __init__(self, defaults):
        self.defaults = dict(defaults)
        self.assigned = set()
        vars(self).update(defaults)

    def assign(self, name, value, where):
        """Sets a setting to a value of its type.

        where: the flag or the file, for messages. Raises UserError for an unknown name or another type.
        """
        if name not in self.defaults:
            [closest] = difflib.get_close_matches(name, [*self.defaults, *OWN_NAMES], 1, 0)
            raise UserError(f"{where}: unknown setting {name}; the closest is {closest}; see --help")

        # an int will do for a float
        default = self.defaults[name]
        expected = type(default)
        if expected is float and type(value) is int:
            value = float(value)
        if type(value) is not expected:
            raise UserError(f"{where}: {name} must be of type {expected.__name__}, for example "
                            f"--{name}={default}, not {value!r}")
        setattr(self, name, value)
        self.assigned.add(name)

    def fill(self, saved):
        """Takes from `saved`, {name: value}, the settings that no file and no flag assigned."""
        for name, value in saved.items():
            if name in self.defaults and name not in self.assigned:
                setattr(self, name, value)

    def flags(self):
        """Returns the settings that differ from their defaults, as one line of flags."""
        changed = [(name, value) for name, value in vars(self).items() if value != self.defaults[name]]
        return shlex.join(f"--{name}={value}" for name, value in changed)


class Arguments(NamedTuple):
    """Holds the arguments of a script that passes some on to train.py."""

    settings: Settings  # the script's own
    operands: list  # neither flags nor config files
    train_arguments: list  # config files and flags for train.py


# Names beside train.py's settings that a mistyped flag may mean: the settings of the script itself.
OWN_NAMES = {"help"}


# ---------------------------------------------------------------------------------------------------------
# Arguments

def split_arguments(script, argv):
    """Splits argv, the arguments of a script that has settings of its own beside train.py's."""
    OWN_NAMES.update(read_settings(script))

    # its own flags, train.py's flags and config files, and the rest
    own_flags = []
    operands = []
    train_arguments = []
    for argument in argv:
        is_flag = argument.startswith("-")
        if is_flag and argument.lstrip("-").partition("=")[0] in OWN_NAMES:
            own_flags.append(argument)
        elif is_flag or argument.endswith(".py"):
            train_arguments.append(argument)
        else:
            operands.append(argument)
    return Arguments(configure(script, own_flags), operands, train_arguments)


def configure(script, argv):
    """Returns a script's Settings after the config files and flags in argv. --help prints them and exits.

    Raises UserError for an unknown key (it names the closest one), a wrong type, or a file that fails to run.
    """
    # train.py may be configured again in this process, as for each run of the study, and must not see what
    # earlier forks replaced. A config file may configure another script, which undoes nothing.
    if os.path.basename(script) == "train.py":
        forks.undo()

    # later arguments override earlier ones
    settings = Settings(read_settings(script))
    for argument in argv:
        if argument == "--help":
            continue
        read = read_flag if argument.startswith("-") else run_file
        for name, value in read(argument, settings).items():
            settings.assign(name, value, argument)
    if "--help" in argv:
        print_help(script)
        sys.exit(0)
    return settings


def read_flag(flag, settings):
    """Returns {name: value} of a flag, --name=text or --name for a bool.

    The value has the type of the setting, if the text can be read so.
    """
    name, equals, text = flag.lstrip("-").partition("=")
    expected = type(settings.defaults.get(name, ""))
    value = text
    if not equals:
        value = True
    elif expected is bool:
        value = {"true": True, "false": False}.get(text.lower(), text)
    else:
        with suppress(ValueError):
            value = expected(text)
    return {name: value}


# ---------------------------------------------------------------------------------------------------------
# Config files

class Names(dict):
    """Holds the global names of a config file; assigned: those that it assigns."""

    def __init__(self, **names):
        super().__init__(names)
        self.assigned = set()

    def __setitem__(self, name, value):
        super().__setitem__(name, value)
        self.assigned.add(name)


def run_file(path, settings):
    """Runs a config file and returns {name: value} of the settings that it assigns.

    The file sees `settings`, and new() in it adds to them. Raises UserError for a file that fails to run.
    """
    if not path.endswith(".py"):
        raise UserError(f"{path}: no config file (.py); a setting is written --key=value")

    def new(**added):
        # a checkpoint with a value of another type could not be read
        for name, value in added.items():
            if type(value) not in TYPES:
                raise TypeError(f"{name} must be a number, a string or a bool, not {value!r}")
        settings.defaults.update(added)
        vars(settings).update(added)
        names.update(added)

    names = Names(__file__=path, new=new, **vars(settings))
    try:
        execute(path, names)
    except Exception as e:
        # name the innermost line outside of this file; a SyntaxError names its line itself
        where = path
        for frame in traceback.extract_tb(e.__traceback__):
            if frame.filename != __file__:
                where = f"{frame.filename}:{frame.lineno}"
        raise UserError(f"{where}: {type(e).__name__}: {e}") from None

    # Numbers, strings and bools without an underscore must be settings, which assign() checks. All else is
    # the file's own; a module may have the name of a setting, as device.py has.
    assigned = {}
    for name, value in names.items():
        is_setting = name in settings.defaults and not isinstance(value, ModuleType)
        is_like_one = type(value) in TYPES and not name.startswith("_")
        if name in names.assigned and (is_setting or is_like_one):
            assigned[name] = value
    return assigned


def execute(path, names):
    """Executes a config file; names: the Names that it sees and assigns."""
    # run() finds files beside the one that calls it
    def run(other):
        execute(os.path.join(os.path.dirname(path), other), names)
        names["run"] = run

    names["run"] = run
    with open(path, "rb") as f:
        text = f.read()
    tree = compile(text, path, "exec", ast.PyCF_ONLY_AST)

    forks.record(path, text, tree)
    exec(compile(tree, path, "exec"), names)


# ---------------------------------------------------------------------------------------------------------
# Settings as a script writes them

@functools.lru_cache
def read_settings(script):
    """Returns the settings of a script, a path, without running it: {name: default}, in the script's order.

    Raises UserError for what looks like a setting and is none.
    """
    tree = ast.parse(Path(script).read_text(encoding="utf-8"))
    values = {}
    settings = {}
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            break
        # without imports and builtins, numbers and strings are all that can be computed
        with suppress(Exception):
            exec(ast.unparse(node), {"__builtins__": {}}, values)
        # all names that the line assigns are settings, but for constants
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            name = getattr(target, "id", "")
            if not name or name.isupper():
                continue
            settings[name] = values.get(name)
            if type(settings[name]) not in TYPES:
                raise UserError(f"{script}:{node.lineno}: {name} is no setting: its value must be a number, "
                                "a string or a bool, computed from such alone; constants have capitals")
    return settings


def print_help(script):
    """Prints a script's docstring, and its settings as they stand in it: the paragraphs that have some."""
    _, docstring, code = Path(script).read_text(encoding="utf-8").split('"""', 2)
    print(docstring)
    for paragraph in code.split("\n\n"):
        first_words = {line.partition(" ")[0] for line in paragraph.splitlines()}
        if first_words & read_settings(script).keys():
            print(paragraph)
