"""Forks: config files that replace functions and classes, or add settings.

A fork is known by what it imports, and by new(). What it replaces stays replaced, so that a process runs one
set of forks, each of them once. Checkpoints and model files name the forks that trained them.
"""
import ast
import hashlib
import os
from typing import NamedTuple

from runtime.errors import UserError

# the modules whose functions and classes a fork may replace
REPLACEABLE = {"ask", "data", "evaluate", "generated", "model", "optim", "puzzles", "runtime", "train",
               "weights"}

# {name: the beginning of its text's SHA-256} of the forks that this process has run
FORKS = {}
# {a script's class Settings: its part of FORKS}
SETS = {}


class Done(NamedTuple):
    """What a fork did to the settings when it ran."""

    read: dict  # {name: value} of the settings that it reads, before it ran
    assigned: dict  # {name: value} of its global names, and of the settings that it assigned
    added: dict  # {name: default} of its new()


DONE = {}  # {digest: Done}
FAILED = []  # paths of forks that ended with an error


# ---------------------------------------------------------------------------------------------------------
# Running them

def is_fork(tree):
    """Returns whether a config file is a fork; tree: the syntax tree of its text."""
    # wherever it imports a module
    modules = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules.append(node.module or "")
        elif isinstance(node, ast.Name) and node.id == "new":
            return True
    return any(module.partition(".")[0] in REPLACEABLE for module in modules)


def run(path, text, tree, names, settings, assigned):
    """Runs a fork, or repeats what it did to the settings if it has run in this process.

    Args:
        path, text, tree: of its file; tree: the syntax tree of the text.
        names, settings, assigned: see configurator.execute. The `forks` of settings get the fork.

    Raises UserError for a fork that another set lacks, if settings that it reads are not as they were, or
    after a fork that failed.
    """
    if FAILED:
        raise UserError(f"{path}: {FAILED[0]} failed in this process, and may have replaced something before "
                        "that: begin a new process")
    digest = hashlib.sha256(text).hexdigest()[:8]
    name = os.path.basename(path)
    if FORKS.get(name, digest) != digest:
        name = path  # another fork has that name
    if SETS and digest not in DONE:
        raise UserError(f"{path}: this process has run other forks ({', '.join(FORKS) or 'none'}): run it in "
                        "a process of its own")
    FORKS[name] = settings.forks[name] = digest

    # what it did depends on the settings that it reads
    visible = names["__builtins__"] | names
    read = {name: visible[name] for name in names_read(tree) & vars(settings).keys()}
    if digest in DONE:
        done = DONE[digest]
        if read != done.read:
            raise UserError(f"{path} reads {', '.join(sorted(read))}, which had other values when it ran: a "
                            "process runs a fork once")
        names["__builtins__"]["new"](**done.added)
        names.update(done.assigned)
        return

    before = assigned | names
    defaults = set(settings.defaults)
    try:
        exec(compile(tree, path, "exec"), names)
    except BaseException:
        FAILED.append(path)
        raise
    changed = {name: value for name, value in (assigned | names).items() if before.get(name) is not value}
    added = {name: value for name, value in settings.defaults.items() if name not in defaults}
    DONE[digest] = Done(read, changed, added)


def names_read(tree):
    """Returns the names that a syntax tree reads; an augmented assignment reads its target."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            names.add(node.id)
    return names


def check_set(settings_class, forks):
    """Raises UserError unless a configure() ran the forks that an earlier one of this class has run."""
    if forks:
        SETS.setdefault(settings_class, forks)
    expected = SETS.get(settings_class, forks)
    # the order counts too: both may replace the same function
    if [*forks.items()] != [*expected.items()]:
        raise UserError(f"this process has run the forks {', '.join(expected)}: another set of forks needs a "
                        "process of its own")


# ---------------------------------------------------------------------------------------------------------
# Files

def missing(forks):
    """Returns a line for each fork of a checkpoint or model file that this process has not run.

    forks: FORKS of the process that wrote the file.
    """
    lines = []
    for name, digest in forks.items():
        if digest not in FORKS.values():
            other = f"has {FORKS[name]} here" if name in FORKS else "is not among the arguments"
            lines.append(f"trained with the fork {name} {digest}, which {other}: results may differ")
    return lines
