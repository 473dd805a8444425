"""Settings of a script: its top-level globals, overridden by Python config files and --key=value flags.

    python train.py config/sudoku.py --lr=3e-4 --eval_only

A script's settings are the numbers, texts and bools assigned at its top level above its first function or
class, except to names in capitals. --help prints them: a trailing comment documents a setting, and the
nearest comment line above is the title of its group.

A config file is Python that assigns some of the settings and may read the others. run("baseline.py") in it
runs another one beside it in its place; `__file__` is the outer file's path. Names that start with an
underscore are the file's own, and so is what is no number, text or bool: modules, functions. Files and flags
apply from left to right, once, on the script's defaults; a checkpoint fills in only what none of them
assigned. A bool flag needs no value: --eval_only.

A config file may also be a fork: new(grad_clip=0.0) adds settings, and it may replace classes and functions
in the modules that it imports, each where it stands: import model; model.TRM = MyTRM.
"""
import ast
import difflib
import dis
import functools
import hashlib
import importlib
import itertools
import os
import re
import sys
import traceback
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

from runtime.errors import UserError

TYPES = (int, float, bool, str)  # that a setting may have
# Modules whose functions and classes a fork may replace: a config file that imports one of them is a fork.
REPLACEABLE = "data", "evaluate", "model", "optim", "puzzles", "runtime", "train"


class Settings(SimpleNamespace):
    """Holds a script's settings as attributes; vars(settings) is a dict of them.

    assigned: the names of those that a config file or a flag assigned.
    """
    __slots__ = ("assigned",)

    def __init__(self, assigned=(), **values):
        super().__init__(**values)
        self.assigned = assigned

    def __reduce__(self):  # copies, and what spawned processes receive, have `assigned` too
        return Settings, (self.assigned,), vars(self)

    def fill(self, saved):
        """Takes from `saved`, {name: value}, the settings that no file and no flag assigned."""
        for name, value in saved.items():
            if hasattr(self, name) and name not in self.assigned:
                setattr(self, name, value)


class Setting(NamedTuple):
    """Describes one setting, as its script writes it down."""

    default: object  # an int, float, bool or str
    comment: str  # the documentation that --help prints
    group: str  # the title above it in --help


class Arguments(NamedTuple):
    """Holds the arguments of a script that passes some on to train.py."""

    settings: Settings  # the script's own
    operands: list  # what is neither a flag nor a config file
    train_arguments: list  # config files and flags for train.py


# {file name: the beginning of its text's SHA-256} of the forks that this process has run
FORKS = {}
# {module or class: its attributes before a fork replaced some}
ORIGINALS = {}
# Names beside train.py's settings that a mistyped flag may mean: those of the script itself.
OWN_NAMES = {"help"}


# ---------------------------------------------------------------------------------------------------------
# Commands

# ---------------------------------------------------------------------------------------------------------
# Arguments

def split_arguments(script, argv):
    """Splits argv, the arguments of a script that has settings of its own beside train.py's."""
    own_names = {*read_settings(script), "help"}
    OWN_NAMES.update(own_names)

    # its own flags, train.py's flags and config files, and the rest
    own_flags = []
    operands = []
    train_arguments = []
    for argument in argv:
        is_flag = re.match("-.", argument)
        if is_flag and argument.lstrip("-").partition("=")[0] in own_names:
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
    undo_forks()
    # later arguments override earlier ones
    known = read_settings(script)
    values = {name: setting.default for name, setting in known.items()}
    assigned = set()
    for argument in argv:
        if not argument.startswith("-"):
            run_file(argument, values, assigned, known)
            continue

        # a flag: --name=text, or --name alone for a bool
        name, equals, text = argument.lstrip("-").partition("=")
        if name == "help":
            continue
        value = True
        if equals:
            value = parse(text, type(known[name].default) if name in known else str)
        values[name] = check(name, value, known, argument)
        assigned.add(name)
    if "--help" in argv:
        print_help(script)
        sys.exit(0)
    return Settings(assigned, **values)


def run_file(path, values, assigned, known):
    """Runs a config file.

    Args:
        path: of the file.
        values: {name: value} of the settings, which the file sees and changes.
        assigned: a set, to which the names that the file assigns are added.
        known: {name: Setting} of the script, to which new() in the file adds some.

    Raises UserError for a file that fails to run, an unknown setting, or a wrong type.
    """
    if not os.path.isfile(path) or not path.endswith(".py"):
        raise UserError(f"{path}: no such config file (.py); a setting is written --key=value")

    def new(**settings):
        for name, default in settings.items():
            known[name] = Setting(default, "", f"from {path}")
            values.setdefault(name, default)
            space.setdefault(name, default)

    space = {"__file__": path, "new": new} | values
    names = Names(space)
    try:
        execute(path, names)
    except Exception as e:
        # name the innermost line outside of this file; a SyntaxError names its line itself
        where = path
        for frame in traceback.extract_tb(e.__traceback__):
            if frame.filename != __file__:
                where = f"{frame.filename}:{frame.lineno}"
        raise UserError(f"{where}: {type(e).__name__}: {e}") from None

    # Numbers, texts and bools must be settings; all else, and what begins with an underscore, is the file's.
    # A module may have the name of a setting, as device.py has.
    for name, value in space.items():
        if name not in names.assigned and value is values.get(name):
            continue
        is_setting = name in known and not isinstance(value, ModuleType)
        if is_setting or type(value) in TYPES and not name.startswith("_"):
            values[name] = check(name, value, known, path)
            assigned.add(name)


class Names(dict):
    """The local names of a config file: passes what it assigns on to `space`, its globals, and remembers it.

    It stays empty, so that Python looks for every name in the globals, as functions of the file do.
    """

    def __init__(self, space):
        self.space = space
        self.assigned = set()

    def __setitem__(self, name, value):
        self.space[name] = value
        self.assigned.add(name)

    def __delitem__(self, name):
        del self.space[name]


def execute(path, names):
    """Executes a config file; names: the Names that it sees and assigns."""
    space = names.space

    def run(other):
        execute(os.path.join(os.path.dirname(path), other), names)
        space["run"] = run  # the other file's own finds files beside that one

    space["run"] = run
    with open(path, "rb") as f:
        text = f.read()
    # a fork adds settings or imports modules of this folder, where a script in another folder does not look
    folder = os.path.dirname(os.path.abspath(__file__))
    if folder not in sys.path:
        sys.path.insert(0, folder)
    tree = compile(text, path, "exec", ast.PyCF_ONLY_AST)
    used = names_used(tree)
    if used.intersection([*REPLACEABLE, "new"]):
        FORKS[os.path.basename(path)] = hashlib.sha256(text).hexdigest()[:8]
    remember(used.intersection(REPLACEABLE))
    exec(compile(tree, path, "exec"), space, names)


def names_used(tree):
    """Returns the names of the modules that a config file imports, and "new" if it calls that."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(aliases):
                names.update(alias.name.partition(".")[0] for alias in aliases)
            case ast.ImportFrom(str(module)):
                names.add(module.partition(".")[0])
            case ast.Call(ast.Name("new")):
                names.add("new")
    return names


def remember(modules):
    """Keeps the attributes of modules, and of the classes that they define, for undo_forks()."""
    for name in modules:
        importlib.import_module(name)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in modules:
            continue
        for place in (module, *vars(module).values()):
            if place is module or isinstance(place, type) and place.__module__ == name:
                ORIGINALS.setdefault(place, dict(vars(place)))


def undo_forks():
    """Undoes what forks have replaced: scripts/sweep.py runs one again for each run of the study."""
    for place, attributes in ORIGINALS.items():
        for name, value in attributes.items():
            if vars(place).get(name) is not value:
                setattr(place, name, value)


def missing_forks(forks):
    """Returns a line for each fork of a checkpoint or model file that this process has not run.

    forks: FORKS of the process that wrote the file.
    """
    lines = []
    for name, digest in forks.items():
        if FORKS.get(name) != digest:
            other = f"has {FORKS[name]} here" if name in FORKS else "is not among the arguments"
            lines.append(f"trained with the fork {name} {digest}, which {other}: results may differ")
    return lines


def check(name, value, known, where):
    """Returns value as the type of the setting; raises UserError for an unknown name or another type."""
    if name not in known:
        [closest] = difflib.get_close_matches(name, [*known, *OWN_NAMES], 1, 0)
        raise UserError(f"{where}: unknown setting {name}; the closest is {closest}, and --help lists all")

    # an int will do for a float
    default = known[name].default
    expected = type(default)
    if expected is float and type(value) is int:
        value = float(value)
    if type(value) is not expected:
        raise UserError(f"{where}: {name} must be of type {expected.__name__}, for example "
                        f"--{name}={default}, not {value!r}")
    return value


def parse(text, expected):
    """Returns a flag's text as a value of the expected type, or the text itself if it is not one."""
    if expected is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return expected(text)
    except ValueError:
        return text


# ---------------------------------------------------------------------------------------------------------
# Values that a run can use

def check_choices(settings, choices):
    """Raises UserError for the first setting that is not one of its choices, {name: its values}."""
    for name, allowed in choices.items():
        value = getattr(settings, name)
        if value not in allowed:
            raise UserError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")


def check_numbers(settings, positive, shares=()):
    """Raises UserError for the first number that no run could use: one below 0, NaN, or beyond 64 bits.

    Args:
        settings: {name: value}.
        positive: names of settings that must be above 0.
        shares: names of settings that are at most 1.
    """
    for name, value in settings.items():
        if isinstance(value, str):
            continue
        # comparisons with NaN are false
        too_large = float("inf") if isinstance(value, float) else 2 ** 63
        if name in shares and not 0 <= value <= 1:
            raise UserError(f"{name} must be from 0 to 1, not {value}")
        if name in positive and not 0 < value < too_large:
            raise UserError(f"{name} must be above 0, not {value}")
        if not 0 <= value < too_large:
            raise UserError(f"{name} must be 0 or more, not {value}")


# ---------------------------------------------------------------------------------------------------------
# Settings as a script documents them

@functools.lru_cache
def read_settings(script):
    """Returns the settings of a script, a path, without running it: {name: Setting}, in the script's order.

    The result is cached, and new() in a config file adds to it. A process in which replicas are threads
    calls this before they start: to parse is not safe in two threads at once (python/cpython#106905).
    Raises UserError for what looks like a setting and is none.
    """
    with open(script, encoding="utf-8") as f:
        text = f.read()
    lines = text.split("\n")
    settings = {}
    values = {}
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            break
        if not isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            continue
        # without imports and builtins, numbers and texts are all that can be computed
        code = compile(ast.Module([node], []), script, "exec")
        with suppress(Exception):
            exec(code, {"__builtins__": {}}, values)
        # the comment behind it, and the one above
        rest = lines[node.end_lineno - 1].encode()[node.end_col_offset:].decode()
        title = next((line for line in reversed(lines[:node.lineno]) if line.startswith("#")), "")
        for instruction in dis.get_instructions(code):
            name = instruction.argval
            if instruction.opname != "STORE_NAME" or name.isupper():
                continue
            default = values.get(name)
            if type(default) not in TYPES:
                raise UserError(f"{script}:{node.lineno}: {name} is no setting: its value must be a number, "
                                "a text or a bool, computed from such alone; constants have capitals")
            settings[name] = Setting(default, rest.partition("# ")[2], title.strip("# "))
    return settings


def print_help(script):
    """Prints a script's docstring and its settings in groups."""
    with open(script, encoding="utf-8") as f:
        print(f.read().split('"""')[1])
    for group, items in itertools.groupby(read_settings(script).items(), lambda item: item[1].group):
        print(f"\n{group}")
        for name, setting in items:
            print(f"  --{name}={setting.default}".ljust(38), setting.comment, flush=True)
