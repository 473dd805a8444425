"""Opens a web page where a trained model solves puzzles, step by step.

    python scripts/play.py                              models/sudoku.pt
    python scripts/play.py out/demo                     a run's
    python scripts/play.py out/fork fork.py             a model that fork.py trained
    python scripts/play.py out/demo models/sudoku-6x6.pt --output=page.html    two models, in a file to keep

The models are those of solve.py. Each brings 100 test puzzles; others can be typed or pasted. The page is a
file of export.py, which says what it can compute. Without --output it is a temporary file. Some browsers,
such as Ubuntu's Firefox, cannot read temporary files.
"""
import os
import tempfile
import webbrowser
from pathlib import Path

import export
import solve

from configurator import split_arguments
from runtime.process import command


class Settings:
    # output
    output = ""  # keep the page in this new .html file


def main(argv):
    """Writes the page, prints where it is, and opens it."""
    settings, operands, train_arguments = split_arguments(Settings, argv)
    paths = operands or [os.path.relpath(f"{solve.ROOT}/models/sudoku.pt")]
    target = settings.output or f"{tempfile.mkdtemp()}/play.html"
    solve.check_new_file(target)
    export.write_page(paths, target, train_arguments)
    webbrowser.open(Path(target).absolute().as_uri())


if __name__ == "__main__":
    command(main)
