"""Opens a web page where a trained model solves puzzles, step by step.

    python scripts/play.py                              models/sudoku.pt
    python scripts/play.py out/demo                     the newest checkpoint of a run
    python scripts/play.py out/fork fork.py             a model that fork.py trained
    python scripts/play.py out/demo models/sudoku-6x6.pt     two models

It takes the same models as solve.py. Each model brings 100 test puzzles, and you can type or paste others.
export.py writes the page as a temporary file, and says in --help which models a page can have. Some browsers,
such as Ubuntu's Firefox, cannot read temporary files. For them, let export.py write the page elsewhere.
"""
import tempfile
import webbrowser
from pathlib import Path

import export
import solve

from configurator import split_arguments
from runtime.process import command


class Settings:
    """All settings are train.py's."""


def main(argv):
    """Writes the page, prints where it is, and opens it."""
    _, paths, train_arguments = split_arguments(Settings, argv)
    page = Path(tempfile.mkdtemp(), "play.html")
    export.write_page(paths or [f"{solve.ROOT}/models/sudoku.pt"], str(page), train_arguments)
    webbrowser.open(page.as_uri())


if __name__ == "__main__":
    command(main)
