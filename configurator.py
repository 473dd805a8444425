"""Settings of a script: the attributes of its class Settings, config files and --key=value flags.

    python train.py config/sudoku.py --lr=3e-4 --eval_only

Each attribute of the class is a setting and its default: a number, a string or a bool. An annotation such as
lr: Above0 = 1e-4 is the Rule of its values. Files and flags apply from left to right; a checkpoint fills in
what none of them assigned.

A config file is Python that assigns some of the settings and may read the others. run("baseline.py") in it
runs the file beside it, where `__file__` is the outer file's path. Names that start with an underscore belong
to the file, and so do modules, functions and other values. Once the file has run, its functions no longer see
the settings, because a later flag may change them.

A config file may also be a fork: new(grad_clip=0.0) adds settings, and it may replace classes and functions
in the modules that it imports: import model; model.TRM = MyTRM. A process configures forks once.
"""
import ast
import builtins
import difflib
import hashlib
import inspect
import os
import shlex
import sys
import textwrap
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import NamedTuple

from runtime import process
from runtime.errors import UserError, one_line

TYPES = (int, float, bool, str)  # that a setting may have
# the modules whose functions and classes a fork may replace
REPLACEABLE = {"data", "evaluate", "model", "optim", "puzzles", "runtime", "train", "weights"}
# {name: the beginning of its text's SHA-256} of the forks that this process has run
FORKS = {}


class Rule(NamedTuple):
    """The annotation of a setting: which values it may have."""
    words: object  # what the value must be, or a function that returns this
    holds: Callable  # a function of the value; comparisons with NaN are false


def one_of(names):
    """Returns the Rule of a setting that is one of `names`; a fork may add names to a dict."""
    return Rule(lambda: f"one of {', '.join(names)}", lambda value: value in names)


# sizes and steps become int32 numbers
Above0 = Rule("above 0 and below 2^31", lambda number: 0 < number < 2 ** 31)
From0 = Rule("0 or more and below 2^31", lambda number: 0 <= number < 2 ** 31)
From0To1 = Rule("from 0 to 1", lambda number: 0 <= number <= 1)
From0Below1 = Rule("from 0 to below 1", lambda number: 0 <= number < 1)


class MissingSetting(UserError, AttributeError):
    """Is raised for a setting that code reads and a script does not have."""


class Values:
    """The values of a script's settings as attributes; vars(settings) is a dict of them.

    defaults: {name: value} before any config file and flag. argv: the config files and flags. assigned: the
    names that they assigned. forks: {name: digest} of the config files that are forks.
    """

    __slots__ = ("defaults", "assigned", "forks", "argv", "__dict__")

    def __init__(self, defaults, argv=()):
        self.argv = argv
        self.defaults = dict(defaults)
        self.assigned = []
        self.forks = {}
        vars(self).update(defaults)

    def __getattr__(self, name):
        """Names the line that reads a missing setting: model.py may read one that only a copy has."""
        caller = sys._getframe(1)
        raise MissingSetting(
            f"{caller.f_code.co_filename}:{caller.f_lineno}: no setting {name}: scripts have the settings of "
            "train.py, not of a copy, and of new() in config files; weights.load_model has those in the "
            "model file and in its argument defaults")

    def assign(self, name, value, where):
        """Sets a setting. Raises UserError, which names `where`, for an unknown name or another type."""
        if name not in self.defaults:
            [closest] = difflib.get_close_matches(name, self.defaults, 1, 0)
            raise UserError(f"{where}: unknown setting {name}; the closest is {closest}; see --help; "
                            "flags of a fork follow its file, and its own names begin with _")

        default = self.defaults[name]
        expected = type(default)
        if expected is float and type(value) is int:
            value = float(value)
        if type(value) is not expected:
            raise UserError(f"{where}: {name} must be of type {expected.__name__}, not {value!r}: write "
                            f"--{name}=VALUE, for example --{name}={default}")
        setattr(self, name, value)
        self.assigned.append(name)

    def fill(self, saved):
        """Takes from `saved`, {name: value}, the settings that no file and no flag assigned."""
        for name, value in saved.items():
            if name in self.defaults and name not in self.assigned:
                setattr(self, name, value)

    def flags(self):
        """Returns the settings that differ from their defaults, as one line of flags."""
        values = vars(self).items()
        return shlex.join(f"--{name}={value}" for name, value in values if value != self.defaults[name])


class Arguments(NamedTuple):
    """The arguments of a script that passes some on to train.py."""
    settings: Values  # of the script's own class Settings
    operands: list  # neither flags nor config files
    train_arguments: list  # config files and flags for train.py


# ---------------------------------------------------------------------------------------------------------
# Arguments

class Spawned:
    """What engines.spawner() calls in new processes; arguments: of prepare_process.

    Unpickling it runs prepare_process(), because an engine looks for chips before it calls anything.
    """

    def __init__(self, *arguments):
        self.arguments = arguments

    def __reduce__(self):
        return prepare_process, self.arguments


def prepare_process(function, settings_class, settings, *args):
    """Prepares a new process for its replica; returns function(settings, *args), which an engine calls."""
    process.end_with_parent()
    # forks replace classes and functions here, too
    configure(settings_class, settings.argv)
    process.on_signals(is_spawned=True)
    # an engine may wait for chips forever; replica() restarts the watchdog
    process.restart_watchdog(process.START_TIMEOUT, suspended=0)
    return lambda index: function(settings, *args)


def start(main, settings_class):
    """Runs main(settings) as a command, with the settings that sys.argv gives."""
    process.command(lambda argv: main(configure(settings_class, argv)))


def split_arguments(settings_class, argv):
    """Returns the Arguments in argv of a script that has settings of its own beside train.py's."""
    own_names = read_settings(settings_class)
    own_flags = []
    operands = []
    train_arguments = []
    for argument in argv:
        is_flag = argument.startswith("-")
        if argument == "--help" or is_flag and argument[2:].partition("=")[0] in own_names:
            own_flags.append(argument)
        elif is_flag or argument.endswith(".py"):
            train_arguments.append(argument)
        else:
            operands.append(argument)
    return Arguments(configure(settings_class, own_flags), operands, train_arguments)


def configure(settings_class, argv):
    """Returns the Values of a script's class Settings after the config files and flags in argv.

    --help prints the settings and exits, after a check of all other arguments: scripts/tpu.sh asks for that.
    Raises UserError for an unknown name, a wrong type, a value that breaks its Rule, and a file that fails to
    run.
    """
    settings = Values(read_settings(settings_class), argv)
    for argument in argv:
        if argument == "--help":
            continue
        read = read_flag if argument.startswith("-") else run_file
        for name, value in read(argument, settings).items():
            settings.assign(name, value, argument)
    check_rules(settings_class, settings)
    if "--help" in argv:
        print_help(settings_class)
        sys.exit(0)
    return settings


def read_flag(flag, settings):
    """Returns {name: value} of a flag, --name=text or --name for a bool."""
    if not flag.startswith("--"):
        raise UserError(f"{flag}: a flag begins with two dashes: -{flag}")
    name, equals, text = flag[2:].partition("=")
    expected = type(settings.defaults.get(name, ""))
    value = text
    if not equals:
        value = True
    elif expected is bool:
        value = {"true": True, "false": False}.get(text.lower(), text)
    else:
        with suppress(ValueError):  # assign() refuses the text
            value = expected(text)
    return {name: value}


# ---------------------------------------------------------------------------------------------------------
# Config files

def run_file(path, settings):
    """Runs a config file and returns {name: value} of the settings that it assigns.

    The file sees `settings`, and new() in it adds to them. Raises UserError for a file that fails to run.
    """
    if not path.endswith(".py") or not os.path.isfile(path):
        raise UserError(f"{path}: no config file (.py) is there; a setting is written --key=value")

    def run(other):
        # it is beside the file that calls run()
        folder = os.path.dirname(sys._getframe(1).f_code.co_filename)
        execute(os.path.join(folder, other), names, settings)

    def new(**added):
        for name, value in added.items():
            # a checkpoint with a value of another type could not be read
            if type(value) not in TYPES:
                raise TypeError(f"{name} must be a number, a string or a bool, not {value!r}")
            if settings.defaults.setdefault(name, value) != value:
                raise ValueError(f"{name} is a setting already; its default is {settings.defaults[name]!r}")
            visible[name] = vars(settings).setdefault(name, value)

    # exec() looks a name up in its dict, and then in the dict's __builtins__, as Python documents it. The
    # settings are there, so that `names` has only what the file assigns, in whatever way: a subclass of dict
    # with its own __setitem__ would not see `global` in a function, nor globals().update().
    visible = vars(builtins) | vars(settings) | dict(run=run, new=new)
    names = {"__file__": path, "__builtins__": visible}
    try:
        execute(path, names, settings)
    except UserError:
        raise
    except Exception as e:
        # name the innermost line outside of this file
        frames = traceback.extract_tb(e.__traceback__)
        lines = [f"{frame.filename}:{frame.lineno}" for frame in frames if frame.filename != __file__]
        raise UserError(f"{[path, *lines][-1]}: {one_line(e)}") from None

    # from here on its functions see no settings
    visible.clear()
    visible.update(vars(builtins))
    return take_settings(names, settings)


def execute(path, names, settings):
    """Executes a config file, whose global names are `names`; settings: its forks join them."""
    with open(path, "rb") as f:
        text = f.read()
    tree = compile(text, path, "exec", ast.PyCF_ONLY_AST)
    # a copy of train.py, say, would run as a fork
    if any(isinstance(node, ast.ClassDef) and node.name == "Settings" for node in tree.body):
        raise UserError(f"{path} is a copy of a script and no config file: python {path} runs it")
    if is_fork(tree):
        add_fork(path, text, settings)
    exec(compile(tree, path, "exec"), names)


def take_settings(names, settings):
    """Removes the settings from a config file's global names, and returns {name: value} of them.

    Numbers, strings and bools without an underscore must be settings, which assign() checks. All else is the
    file's own; a module may have the name of a setting, as device.py has.
    """
    assigned = {}
    for name, value in list(names.items()):
        is_setting = name in settings.defaults and not isinstance(value, ModuleType)
        is_like_one = type(value) in TYPES and not name.startswith("_")
        if is_setting or is_like_one:
            assigned[name] = names.pop(name)
    return assigned


# ---------------------------------------------------------------------------------------------------------
# Forks. They cannot be undone, so only one configure() of a process may run them.

def is_fork(tree):
    """Returns True if a config file calls new() or imports one of REPLACEABLE; tree: its syntax tree."""
    modules = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules.append(node.module or "")
        elif isinstance(node, ast.Name) and node.id == "new":
            return True
    return any(module.partition(".")[0] in REPLACEABLE for module in modules)


def add_fork(path, text, settings):
    """Adds a fork that is about to run to FORKS and to settings.forks; text: the fork's file.

    Raises UserError if an earlier configure() had forks, or if this fork has run.
    """
    digest = hashlib.sha256(text).hexdigest()[:8]
    if FORKS != settings.forks or digest in FORKS.values():
        raise UserError(f"{path}: this process has run forks already ({', '.join(FORKS)}): begin a new one, "
                        "and name each fork once")
    name = os.path.basename(path)
    if name in FORKS:  # another fork has that name
        name = path
    FORKS[name] = digest
    settings.forks = dict(FORKS)


# ---------------------------------------------------------------------------------------------------------
# Settings as a script writes them

def read_settings(settings_class):
    """Returns the settings of a script's class, {name: default}: its numbers, strings and bools."""
    items = vars(settings_class).items()
    return {name: value for name, value in items if type(value) in TYPES and not name.startswith("__")}


def check_rules(settings_class, settings):
    """Raises UserError for the first value that breaks its Rule."""
    for name, rule in settings_class.__annotations__.items():
        value = vars(settings).get(name)
        if isinstance(rule, Rule) and not rule.holds(value):
            words = rule.words if isinstance(rule.words, str) else rule.words()
            raise UserError(f"{name} must be {words}, not {value!r}")


def print_help(settings_class):
    """Prints the docstring of a script, and its settings as they stand in its class."""
    print(sys.modules[settings_class.__module__].__doc__)
    _, lines = inspect.getsource(settings_class).split("\n", 1)
    print(textwrap.dedent(lines))
