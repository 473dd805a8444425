"""The two expected errors of a command, see process.command, and how an error fits a line."""


class UserError(Exception):
    """Wrong input: one line that says what is wrong, where, and how to fix it. The exit code is 2."""


class TransientError(Exception):
    """A network or a server failed, and may work later: one line. The exit code is 1."""


def one_line(error):
    """Returns an error's type and the beginning of its text."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
