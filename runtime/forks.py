"""Forks: config files that replace functions and classes, or add settings.

A fork is known by what it imports, and by new(). Checkpoints and model files name the forks that trained
them.
"""
import ast
import hashlib
import os
import sys

# the modules whose functions and classes a fork may replace
REPLACEABLE = {"data", "evaluate", "model", "optim", "puzzles", "runtime", "train"}

# {file name: the beginning of its text's SHA-256} of the forks that this process has run
FORKS = {}
# {module or class: its attributes before a fork replaced some}
ORIGINALS = {}


def record(path, text, tree):
    """Records a config file, before it is executed, if it is a fork; tree: the syntax tree of its text."""
    modules = imported(tree) & REPLACEABLE
    adds_settings = any(isinstance(node, ast.Name) and node.id == "new" for node in ast.walk(tree))
    if not modules and not adds_settings:
        return
    FORKS[os.path.basename(path)] = hashlib.sha256(text).hexdigest()[:8]
    # keep the attributes of these modules, and of the classes that they define
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in modules:
            for place in (module, *vars(module).values()):
                # a class that a module imports is another module's
                if place is module or isinstance(place, type) and place.__module__ == name:
                    ORIGINALS.setdefault(place, dict(vars(place)))


def imported(tree):
    """Returns the names of the modules and packages that a syntax tree imports, wherever it does so."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return {name.partition(".")[0] for name in names}


def undo():
    """Puts back what forks have replaced in this process, and forgets them."""
    for place, attributes in ORIGINALS.items():
        for name, value in attributes.items():
            if vars(place).get(name) is not value:
                setattr(place, name, value)
    ORIGINALS.clear()
    FORKS.clear()


def missing(forks):
    """Returns a line for each fork of a checkpoint or model file that this process has not run.

    forks: FORKS of the process that wrote the file.
    """
    lines = []
    for name, digest in forks.items():
        if FORKS.get(name) != digest:
            other = f"has {FORKS[name]} here" if name in FORKS else "is not among the arguments"
            lines.append(f"trained with the fork {name} {digest}, which {other}: results may differ")
    return lines
