"""Forks: config files that replace functions and classes, or add settings.

A fork is known by what it imports, and by new(). What it replaces stays replaced, so that a process runs the
forks of one configure(), each of them once. Checkpoints and model files name the forks that trained them.
"""
import ast
import hashlib
import os

from runtime.errors import UserError

# the modules whose functions and classes a fork may replace
REPLACEABLE = {"ask", "data", "evaluate", "generated", "model", "optim", "puzzles", "runtime", "train",
               "weights"}

# {name: the beginning of its text's SHA-256} of the forks that this process has run
FORKS = {}


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


def add(path, text, earlier):
    """Adds a fork that is about to run to FORKS, and returns FORKS as they are then.

    Args:
        path, text: of its file.
        earlier: what add() returned for the last fork of this configure(), or {}.

    Raises UserError if an earlier configure() had forks, or if this fork has run.
    """
    digest = hashlib.sha256(text).hexdigest()[:8]
    if FORKS != earlier or digest in FORKS.values():
        raise UserError(f"{path}: this process has run forks already ({', '.join(FORKS)}): begin a new one, "
                        "and name each fork once")
    name = os.path.basename(path)
    if name in FORKS:  # another fork has that name
        name = path
    FORKS[name] = digest
    return dict(FORKS)


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
