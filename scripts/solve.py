"""Solves puzzles with a trained model.

    python scripts/solve.py 2.....4...6.....156....2..3.5.......      by the smallest of models/ for this size
    python scripts/solve.py out/demo puzzle.txt                        by the newest checkpoint of a run
    python scripts/solve.py out/maze/best.pt maze.txt --steps --eval_halt_max_steps=64
    python scripts/solve.py out/demo puzzles.csv --output=answers.csv --eval_attempts=1
    python scripts/solve.py out/fork fork.py puzzle.txt --plot=answer.gif     a model that fork.py trained

PUZZLE is a text, a file, or - for standard input. It has one of two forms: a line with all its cells, or a
line for each row, with an empty line before the next puzzle. A Sudoku has digits, a maze "# SG" (wall, open,
start, goal), others the symbols of their dataset. Each of . 0 _ * ? is an empty cell unless it is a symbol;
white space and rulers of | + - = are left out unless they are symbols. A puzzle that begins with - must be in
a file. A .csv or .tsv file (also .gz) has a puzzle in each row, in the column question. If the rules are
known, they judge the answers. If not, the answers are compared with the column answer.

MODEL is a file of export.py, a run's folder or a checkpoint. It says what it solves and how it is evaluated;
train.py's config files and flags change how it is evaluated, but neither its depth nor its network. Forks of
examples/ that trained a model run by themselves, unless config files are given. export.py makes a model file
of a checkpoint of the official code. docs/arc.md says how to ask a model for ARC.

ATTEMPTS: The script keeps the most confident answer of all supervision steps. An attempt ends after
eval_halt_max_steps, or once its answer repeats (--eval_patience=0: never). As long as no answer is sure, the
script tries copies of the puzzle by symmetry and turns the answer back, up to 8 attempts (eval_attempts). The
model of examples/houses.py takes Sudokus of every size, in one attempt, since copies would change nothing;
its file says after how many steps the attempt ends. All models run on the CPU, in float32, with averaged
weights.
"""
import copy
import csv
import functools
import io
import os
import re
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np

ROOT = str(Path(__file__).parents[1])
sys.path.insert(0, ROOT)
import evaluate
import train
import weights
from configurator import From0, configure, split_arguments
from puzzles import kind_of, sigmoid
from puzzles.text import csv_rows, open_text, parse, squeezed
from runtime.errors import UserError, writing
from runtime.files import newest_complete, read_torch_file, replacing, to_stderr
from runtime.process import command
from runtime.saved import missing_forks
from weights import load_model


class Settings:
    # output
    steps = False  # show the answers after several supervision steps, and how sure the halting head is
    plot = ""  # draw the answer: FILE.png, or FILE.gif with a frame for each step; needs matplotlib
    output = ""  # write the answers to this new .csv, with confidence, attempts, step and result
    # puzzles
    cells: From0 = 0  # of each; 0: as many as the model's; models with attention take mazes of any size


ATTEMPTS = 8  # at most, unless --eval_attempts says otherwise


def main(argv):
    """Solves one puzzle and prints it, or solves all puzzles in a file."""
    argv = ["/dev/stdin" if argument == "-" else argument for argument in argv]
    output_settings, operands, train_arguments = split_arguments(Settings, argv)
    if len(operands) not in (1, 2):
        raise UserError("usage: python scripts/solve.py MODEL PUZZLE, or PUZZLE alone; see --help")
    *models_given, source = operands

    # the new files
    for path in output_settings.plot, output_settings.output:
        check_new_file(path)
    if output_settings.plot[-4:] not in ("", ".png", ".gif"):
        raise UserError(f"--plot={output_settings.plot}: must be a .png or a .gif")

    # the puzzles, and the model for them
    prefix, text, known_answers = read_source(source)
    [path] = models_given or [choose_model(text)]
    trm, settings = load(path, train_arguments, output_settings.cells)
    # the weights may fit several sizes: the text decides which
    kind = taking(weights.fitting_kinds(trm), text) or kind_of(trm.task)
    if trm.sizes["seq_len"] != kind.cells:
        trm = load_model(file_of(path), kind.cells, vars(settings))
    try:
        questions = parse(kind.task, text)
    except UserError as e:
        raise UserError(f"{prefix}{e}; some models take other sizes, one at a time") from None
    tokens = np.stack([*questions.values()])
    for line, count in zip(questions, kind.num_solutions(tokens)):
        if count == 0:
            raise UserError(f"{prefix}line {line}: the puzzle has no solution")
        if count > 1:
            to_stderr(f"warning: line {line}: the puzzle has more than one solution")
    is_table = known_answers or len(questions) > 1 or output_settings.output
    if is_table and (output_settings.steps or output_settings.plot):
        raise UserError("--steps and --plot show one puzzle: not a .csv, not several, not with --output")

    # solve
    if is_table:
        known_answers = [known_answers.get(line, "") for line in questions]
        solve_file(settings, trm, kind, tokens, known_answers, output_settings)
    else:
        solve_one(settings, trm, kind, tokens[0], output_settings, path)


def check_new_file(path):
    if os.path.lexists(path) or not Path(path).parent.is_dir():
        raise UserError(f"{path}: must be a new file in a folder that exists")


# ---------------------------------------------------------------------------------------------------------
# Puzzles

def read_source(source):
    """Returns a prefix for messages, the text of the puzzles, and {line: known answer}.

    source: a file, or the text itself. Only a .csv or .tsv file has known answers. Raises UserError.
    """
    prefix = f"{source}: "
    if re.search(r"\.[ct]sv(\.gz)?$", source.lower()):
        # each question stands in the line of the text where its row ends in the file
        lines = []
        known_answers = {}
        for number, row in csv_rows(source, ["question"]):
            lines += [""] * (number - 1 - len(lines))
            lines.append(row["question"])
            known_answers[number] = row.get("answer") or ""
        return prefix, "\n".join(lines), known_answers
    if not os.path.exists(source):
        return "no such file; as a text, ", source, {}
    with open_text(source) as f:
        return prefix, f.read(), {}


# ---------------------------------------------------------------------------------------------------------
# Solving

def solve_one(settings, trm, kind, question, output_settings, path):
    """Prints a question, the most confident answer and whether it is a solution; draws them if asked to.

    Args:
        settings, output_settings: train.py's settings, and this script's.
        trm: a TRM, from `path`.
        kind: the Kind of the question.
        question: tokens [cells].
    """
    steps = [*weights.watch(settings, trm, question)]
    # if several answers are equally confident, the last one of the first attempt counts
    best = max(steps, key=lambda step: (step.confidence, -step.attempt, step.number))

    # the question and the answers
    grids = [("question", question, question < 0), *map(grid_of, steps)]
    best_grid = grid_of(best)
    show(kind, grids if output_settings.steps else [grids[0], best_grid])
    print(kind.text(best.answer))
    # the verdict, and how the answer came about
    sureness = "sure" if best.confidence >= evaluate.SURE else "not sure"
    print(f"{kind.verdict(question, best.answer)} ({best_grid[0]}; {sureness} after {len(steps)} steps, "
          f"attempts: {steps[-1].attempt}; {path})")
    if output_settings.plot:
        is_animation = output_settings.plot.endswith(".gif")
        draw(output_settings.plot, kind, question, grids if is_animation else [best_grid])


def grid_of(step):
    """Returns a Step as a grid: its title, its answer, and the cells that break a known rule."""
    title = f"attempt {step.attempt}, step {step.number}: {step.confidence:.0%} sure"
    broken = step.judgement.broken[0] if step.judgement else step.answer < 0
    return title, step.answer, broken


def show(kind, grids):
    """Prints grids next to each other, as many as 120 characters hold.

    grids: list of (title, tokens [cells], which cells to mark with * [cells]).
    """
    # write the lines of each grid below its title, which has 29 characters or fewer
    width = max(31, 3 * kind.columns + 2)
    blocks_per_line = max(1, 120 // width)
    blocks = []
    for title, tokens, marked in grids:
        cells = [" *"[int(mark)] + kind.symbols[token] + " " for token, mark in zip(tokens, marked)]
        blocks.append([title, *map("".join, np.reshape(cells, kind.grid))])

    # put as many blocks beside each other as fit
    for first in range(0, len(blocks), blocks_per_line):
        for lines in zip(*blocks[first:first + blocks_per_line]):
            print("".join(line.ljust(width) for line in lines).rstrip())
        print()


def draw(path, kind, question, grids):
    """Draws grids, (title, tokens [cells], broken cells [cells]), as the frames of a .gif; or one as a .png.

    What the question gives is on gray, what breaks a rule on red.
    """
    try:
        from matplotlib.figure import Figure
        from PIL import Image
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install matplotlib") from None
    rows, columns = kind.grid
    box_rows, box_columns = kind.box
    frames = []
    for title, tokens, broken in grids:
        figure = Figure((4, 4), layout="constrained")
        ax = figure.add_subplot(title=title, xlim=(0, columns), ylim=(rows, 0), aspect="equal")
        ax.set_axis_off()
        # the cells
        colors = np.select([broken, question != kind.empty], ["salmon", "lightgray"], "white")
        table = ax.table(
            cellText=np.reshape([*kind.text(tokens).replace(".", " ")], kind.grid),
            cellColours=np.reshape(colors, kind.grid),
            cellLoc="center",
            bbox=[0, 0, 1, 1],
        )
        table.set_fontsize(140 / columns)
        # the lines between boxes
        ax.hlines(range(0, rows + 1, box_rows), 0, columns, "black", linewidth=3)
        ax.vlines(range(0, columns + 1, box_columns), 0, rows, "black", linewidth=3)
        frame = io.BytesIO()
        figure.savefig(frame)
        frames.append(Image.open(frame))

    # a command that is interrupted leaves nothing
    with writing(path), replacing(path) as f:
        frames[0].save(f, path[-3:], save_all=True, append_images=frames[1:], duration=500, loop=0)


def solve_file(settings, trm, kind, questions, known_answers, output_settings):
    """Solves puzzles, prints how many are right, and writes a row for each to a new file.

    Args:
        settings: train.py's settings.
        trm: a TRM.
        kind: the Kind of the puzzles.
        questions: tokens [n, cells].
        known_answers: a text for each; "": it is not known.
        output_settings: this script's settings.
    """
    # all attempts at all puzzles; the surest answers count
    results = weights.answers_to(settings, trm, questions)
    answers = results["surest_preds"]
    verdicts = [result_of(kind, *puzzle) for puzzle in zip(questions, answers, known_answers)]
    for verdict, count in Counter(verdicts).items():
        print(f"{count} of {len(verdicts)} {verdict} ({count / len(verdicts):.1%})")

    # the file has a row for each puzzle
    columns = dict(
        question=map(kind.text, questions),
        answer=map(kind.text, answers),
        confidence=sigmoid(results["surest_q_halt_logits"]).round(4),
        attempts=results["attempts"],
        step=results["surest_steps"].astype(int),
        result=verdicts,
    )
    path = output_settings.output
    if path:
        # a command that is interrupted leaves nothing
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*columns.values()))
        with writing(path), replacing(path) as f:
            f.write(text.getvalue().encode())


def result_of(kind, question, answer, known_answer):
    """Returns whether an answer is right: "right", "wrong" or "not judged".

    The rules decide, or else the known answer.

    Args:
        kind: the Kind of the puzzle.
        question, answer: tokens [cells].
        known_answer: a text; "": it is not known.
    """
    judgement = kind.judge(question[None], answer[None])
    if judgement:
        return "right" if judgement.solved[0] else "wrong"
    # a known answer may be missing or cut off
    known_answer = squeezed(known_answer, kind.symbols[1:])
    if len(known_answer) != kind.cells:
        return "not judged"
    return "right" if known_answer == kind.text(answer) else "wrong"


# ---------------------------------------------------------------------------------------------------------
# Models

def load(path, train_arguments, cells=0):
    """Returns the TRM at a path, and train.py's settings for solving with it. Raises UserError.

    Args:
        path: a model file, a checkpoint, or a run's folder, for its newest checkpoint.
        train_arguments: config files of train.py, among them forks, and flags; they change how it is
            evaluated. Without config files, the forks of examples/ that trained it run.
        cells: see weights.load_model.
    """
    for argument in train_arguments:
        if argument.startswith("--forward_dtype="):
            raise UserError(f"{argument}: puzzles are solved in float32")
    file = file_of(path)
    try:
        # the forks come first: the model is made of their classes
        if not any(argument.endswith(".py") for argument in train_arguments):
            train_arguments = [*weights.own_forks(file), *train_arguments]
        settings = copy.copy(configured(*train_arguments))
        trm = load_model(file, cells, vars(settings))
    except (OSError, ValueError) as e:
        raise UserError(e) from None
    for line in missing_forks(trm.forks, settings.forks):
        to_stderr(f"warning: {line}")

    kind = kind_of(trm.task)
    settings.fill(train.recipe(vars(trm.settings)))
    # where the weights fit every size, copies by symmetry change nothing, and the file says how deep to go
    if not weights.fits_every_size(trm):
        settings.fill(dict(eval_attempts=ATTEMPTS if kind.has_symmetries else 1, eval_patience=1))
    settings.forward_dtype = "float32"  # the arithmetic is the same for every model and machine
    kind.check_attempts(settings.eval_attempts)
    return trm, settings


@functools.cache
def configured(*train_arguments):
    """Returns train.py's settings. A page may have several models, and forks run once."""
    return configure(train.Settings, train_arguments)


def file_of(path):
    """Returns the path of a file, or of the newest checkpoint in a run's folder. Raises UserError."""
    file = newest_complete(path, print) if os.path.isdir(path) else path
    if not os.path.isfile(file):
        raise UserError(f"{path}: neither a file nor a folder with a complete checkpoint")
    return file


def choose_model(text):
    """Returns the path of the smallest of models/ that takes the puzzles in a text. Raises UserError.

    Models of a fork, which may take every size, come last.
    """
    paths = Path(os.path.relpath(ROOT), "models").glob("*.pt")
    for path in sorted(paths, key=lambda path: (len(weights.own_forks(path)), os.path.getsize(path))):
        # from the file alone: a fork that has run cannot be undone
        kind = kind_of(read_torch_file(path)["task"])
        kinds = weights.sizes_of(kind) if weights.own_forks(path) else [kind]
        if taking(kinds, text):
            print(f"by {path}", flush=True)
            return path
    raise UserError(f"{text[:20]!r} is no file and no puzzle for a model of models/: see --help")


def taking(kinds, text):
    """Returns the first of the Kinds whose puzzles a text has; None if there is none."""
    for kind in kinds:
        with suppress(UserError):
            parse(kind.task, text)
            return kind


if __name__ == "__main__":
    command(main)
