"""Solves puzzles with a trained model.

    python scripts/solve.py 2.....4...6.....156....2..3.5.......     by the model of models/ for this size
    python scripts/solve.py out/demo puzzle.txt                       by the newest checkpoint of a run
    python scripts/solve.py out/maze/best.pt maze.txt --steps --halt_max_steps=64
    python scripts/solve.py out/demo puzzles.csv --output=answers.csv --eval_rollouts=8
    python scripts/solve.py official_checkpoint config/sudoku.py puzzle.txt --plot=answer.gif
    python scripts/solve.py out/arc --task=0934a4d8 --plot=task.png   an ARC task of the run's dataset
    python scripts/solve.py out/arc tasks.json --output=submission.json

A puzzle is a line, a file, or stdin (if left out, or -), in one line or in several. A Sudoku has digits with
. or 0 for an empty cell, a maze "# SG" (wall, open, start, goal), others the symbols of their dataset. A
.csv or .jsonl file, also .gz, has a puzzle a row, in the column question. The rules of Sudoku and mazes judge
the answers. A puzzle that begins with - must be in a file.

The script keeps the most confident answer: of all supervision steps, and of several attempts with noise
(eval_rollouts). The model is a file of export.py, a run's folder or a checkpoint. They contain its
settings and say what it solves. An official checkpoint needs the settings that differ from train.py's, as
config files or flags; its sizes tell whether it solves Sudoku or mazes. The model runs on the CPU as in
train.py's evaluation: averaged weights, forward_dtype (float32 for a file of export.py), full depth.

ARC needs the dataset of the run, which knows the versions of each task. They vote, as in train.py's
evaluation. Many tasks are a folder with a .json file for each, or a .json file like Kaggle's. If the dataset
only trains on a task, the task's last pair is its test pair.
"""
import copy
import csv
import glob
import importlib.util
import io
import json
import math
import os
import re
import sys
import zipfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
# isort: off
import train
from checkpoint import load_weights, newest_checkpoint, read_checkpoint
from configurator import Settings, UserError, command, configure, split_arguments
from data import Dataset, Progress, replacing
from device import open_device
from evaluate import (
    Evaluator, Queue, count_votes, elect, grid_of_key, noise_keys, submission, surest_answers,
    surest_attempts, unlabelled_batch, weights_of)
from prepare import csv_rows
from prepare_arc import arc_task_of, read_folder, read_object
from puzzles import (
    ARC, BOXES, MAZE, appearance, arc_task, are_solutions, broken_cells, canvas,
    check_questions, maze_task, parse_question, side_by_side, sudoku_task, text_of, verdict)

# output
steps = False  # show the answers after several supervision steps, and how sure the halting head is
plot = ""  # draw them: FILE.png, or FILE.gif with a frame for each step; needs matplotlib
output = ""  # write the answers of a .csv to this new .csv: question, answer, certainty, step, result
task = ""  # name of an ARC task in the model's dataset
versions = 0  # versions of each ARC task that vote; 0: all
halt_max_steps = 0  # supervision steps; 0: as many as the run's evaluation; more may solve more

MODELS = os.path.join(ROOT, "models")  # trained ones, files of export.py
CSV_ENDINGS = (".csv", ".csv.gz", ".jsonl", ".jsonl.gz")
CELLS_AT_A_TIME = 5_000  # in a batch: 61 Sudokus of 9x9 or 5 mazes of 30x30


def main(argv):
    """Solves one puzzle and prints it, or solves all puzzles in a file."""
    settings, operands, train_arguments = split_arguments(__file__, argv)
    if settings.task:  # it takes the place of a puzzle
        operands.append("-")
    path, source = model_and_source(operands)
    is_arc_file = source.endswith(".json") or os.path.isdir(source)
    check_output(settings, is_arc_file, source.endswith(CSV_ENDINGS))
    if settings.halt_max_steps:
        train_arguments.append(f"--eval_halt_max_steps={settings.halt_max_steps}")
    if settings.task or is_arc_file:
        train_arguments.append("--eval_rollouts=1")  # the versions of a task are its attempts
        solve_arc(read_saved(path, train_arguments), source, settings)
        return

    # the puzzles, and the model for them
    texts = read_texts(source)
    path = path or choose_model(texts[0][1])
    saved = read_saved(path, train_arguments)
    task = task_of_model(saved, texts[0][1])
    if task["kind"] == "arc":  # a question alone has no identifier
        raise UserError(f"{path} solves ARC tasks: choose one with --task=NAME, or a file or folder of tasks")
    task, questions = parse_texts(task, texts)
    model = build_model(saved, questions.shape[1])

    # solve
    if source.endswith(CSV_ENDINGS):
        solve_file(saved.settings, model, task, questions, settings.output)
    else:
        solve_one(saved, model, task, questions[0], settings)


# ---------------------------------------------------------------------------------------------------------
# One puzzle

def watch_attempts(settings, model, question):
    """Yields the results [attempts, ...] of Evaluator.watch, of eval_rollouts attempts at one puzzle.

    Args:
        settings: train.py's settings.
        model: a TRM on the CPU.
        question: tokens int32 [cells].
    """
    attempts = settings.eval_rollouts
    batch = unlabelled_batch(question[None].repeat(attempts, axis=0))
    keys = noise_keys(settings.seed, attempts, 1)[:, 0]
    return evaluator_of(settings, model, attempts).watch(*weights_of(model), batch, keys)


def evaluator_of(settings, model, slots):
    """Returns an Evaluator on the CPU."""
    return Evaluator(settings, model, open_device("cpu", settings), slots)


def solve_one(saved, model, task, question, settings):
    """Prints a question, the most confident answer and whether it is a solution; draws them if asked to.

    Args:
        saved, model: a Saved and its TRM.
        task: the question's task.
        question: tokens int32 [cells].
        settings: of this script.
    """
    results = list(watch_attempts(saved.settings, model, question))
    depth = len(results)
    attempt = surest_attempts(results[-1])
    kept = results[-1]["surest_steps"][attempt]
    answers = np.stack([question] + [result["preds"][attempt] for result in results])
    broken = broken_cells(task, question[None], answers)
    if broken is None:
        broken = np.zeros(answers.shape, dtype=bool)
    broken[0] = False  # the question itself

    # the question, and after it the answer of each step
    titles = ["question"]
    for step, result in enumerate(results, 1):
        certainty = sigmoid(result["q_halt_logits"][attempt])
        titles.append(f"step {step}: {certainty:.0%} sure" + ", kept" * int(step == kept))
    grids = list(zip(titles, answers, broken))

    # print the question and the kept answer, or several steps: 1, 2, 4, ..., the kept and the last one
    several = [grids[i] for i in range(depth + 1) if i in (kept, depth) or i & (i - 1) == 0]
    shown = several if settings.steps else [grids[0], grids[kept]]
    print(side_by_side(shown, task["symbols"], *task["grid"]))
    print(text_of(task, answers[kept]))
    print(f"{verdict(task, question, answers[kept])} ({titles[kept]}; {depth} steps, "
          f"attempt {attempt + 1} of {saved.settings.eval_rollouts}; {saved.name})")
    if settings.plot:
        given = question != task["symbols"].index(appearance(task).empty, 1)
        draw(settings.plot, task, given, [grids if settings.plot.endswith(".gif") else several])


def sigmoid(logits):
    return 1 / (1 + np.exp(-np.float64(logits)))


# ---------------------------------------------------------------------------------------------------------
# A file of puzzles

def solve_file(settings, model, task, questions, output):
    """Solves puzzles, prints how many are right, and writes a row for each to a new file.

    Args:
        settings: train.py's settings.
        model: a TRM.
        task: the puzzles' task.
        questions: tokens int32 [n, cells].
        output: path of the file, "" for none.
    """
    n = len(questions)
    surest = surest_answers(run_queue(settings, model, n, lambda i: unlabelled_batch(questions[i])))
    answers = surest["surest_preds"]
    certainties = sigmoid(surest["surest_q_halt_logits"])
    is_solution = are_solutions(task, questions, answers)
    if is_solution is None:
        results = ["not judged"] * n
    else:
        results = np.where(is_solution, "right", "wrong").tolist()
    for result, count in Counter(results).items():
        print(f"{count} of {n} {result} ({count / n:.1%})")
    if not output:
        return

    # a row for each
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["question", "answer", "certainty", "step", "result"])
    for i in range(n):
        writer.writerow([text_of(task, questions[i]), text_of(task, answers[i]),
                         certainties[i].round(4), int(surest["surest_steps"][i]), results[i]])
    with replacing(output) as f:
        f.write(file.getvalue().encode())
    print(f"wrote {output}")


def run_queue(settings, model, n, read_rows):
    """Returns the results of an evaluate.Queue.

    Args:
        settings: train.py's settings.
        model: a TRM.
        n: how many puzzles.
        read_rows: see Queue.
    """
    keys = noise_keys(settings.seed, settings.eval_rollouts, n)
    slots = min(keys.size, max(1, CELLS_AT_A_TIME // model.config.seq_len))
    queue = Queue(evaluator_of(settings, model, slots), *weights_of(model), read_rows, keys)
    progress = Progress("solving", keys.size, "puzzles", settings.eval_rollouts)
    while queue.num_unfinished():
        progress.add(queue.step())
    return queue.results


# ---------------------------------------------------------------------------------------------------------
# ARC

def solve_arc(saved, source, settings):
    """Solves an ARC task and prints it, or solves all tasks in a file or folder and writes a submission.

    Args:
        saved: a Saved.
        source: path of the tasks, unless settings.task names one.
        settings: of this script.
    """
    train_data, test_data = arc_datasets(saved)
    model = build_model(saved, train_data.seq_len)

    # one task
    if settings.task:
        demonstrations = pairs_of(train_data, settings.task)
        if settings.task in test_data.task_names:
            tests = pairs_of(test_data, settings.task)
        else:
            tests = [demonstrations.pop()]
        data = dataset_of_task(train_data, settings.task, tests, settings.versions)
        votes = vote(saved.settings, model, data)
        show_task(demonstrations, tests, votes, settings.plot)
        print(f"task {settings.task}; {saved.name}")
        return

    # many tasks: all are checked before the first is solved
    is_folder = os.path.isdir(source)
    contents = read_folder(f"{glob.escape(source)}/*.json") if is_folder else read_object(source).items()
    tasks = [arc_task_of(name, content) for name, content in contents]
    chosen = [dataset_of_task(train_data, task.name, task.test, settings.versions) for task in tasks]

    # answers in Kaggle's format
    attempts = {}
    for data in chosen:
        attempts |= submission(data, vote(saved.settings, model, data))
    with replacing(settings.output) as f:
        f.write(json.dumps(attempts).encode())
    print(f"wrote {settings.output}: two answers to each test input of {len(tasks)} tasks")


def arc_datasets(saved):
    """Returns both splits of the dataset that a Saved was trained on. Raises UserError unless it is ARC's."""
    train_data = Dataset(saved.settings.data_path, "train")
    if not train_data.has_versions:
        raise UserError(f"{train_data.path}: not made by prepare_arc.py, so that it has no ARC tasks")

    # the same tasks and versions, in the same order; an official checkpoint knows their number
    trained_on = saved.sizes["num_puzzle_identifiers"], saved.state.get("data", train_data.sha256)
    if trained_on != (train_data.num_puzzle_identifiers, train_data.sha256):
        raise UserError(f"{saved.path} was trained with other puzzle identifiers than "
                        f"{train_data.path} has: --data_path=FOLDER says where its dataset is")
    return train_data, Dataset(saved.settings.data_path, "test")


def pairs_of(data, name):
    """Returns the pairs of a task in a split. Raises UserError."""
    return data.pairs(group_of(data, name))


def group_of(data, name):
    """Returns the group of a task. Raises UserError if there is none, and hence no identifier."""
    if name not in data.task_names:
        raise UserError(f"task {name}: the model has no identifier for it, since {data.path} lacks it; "
                        "config/arc_adapt.py adapts a model to new tasks, see docs/arc.md")
    return data.task_names.index(name)


def dataset_of_task(data, name, pairs, num_versions):
    """Returns a Dataset of one task in its versions, whose examples are the given pairs. Raises UserError.

    Args:
        data: the training split, which has the versions of all tasks.
        name: the task's name.
        pairs: list of (input, output); an output that is not known is empty.
        num_versions: how many of its versions, the original first; 0: all.
    """
    # the same split with the versions of this task alone
    group = group_of(data, name)
    puzzles = np.arange(*data.group_indices[group:group + 2])[:num_versions or None]
    chosen = copy.copy(data)
    chosen.task_names = [name]
    chosen.group_indices = np.array([0, len(puzzles)])
    chosen.versions = data.versions[puzzles]
    chosen.puzzle_identifiers = data.puzzle_identifiers[puzzles]

    # all versions share the pairs
    chosen.grids = pairs
    chosen.first_rows = np.zeros(len(puzzles), dtype=int)
    chosen.puzzle_indices = np.arange(len(puzzles) + 1) * len(pairs)
    return chosen


def vote(settings, model, data):
    """Returns the votes on the examples of a Dataset from dataset_of_task, see evaluate.count_votes."""
    results = run_queue(settings, model, len(data), lambda i: data.test_batch(i, len(i)))
    return count_votes(data, np.arange(len(data)), results["preds"][0], results["q_halt_logits"][0])


def show_task(demonstrations, tests, votes, plot):
    """Prints the pairs of a task and the answers with the most votes; draws them if asked to.

    Args:
        demonstrations, tests: lists of (input, output); an output that is not known is empty.
        votes: what vote() returns for the test inputs.
        plot: path of the picture, "" for none.
    """
    # a row of (title, grid) for each pair
    rows = [[("input", question), ("output", answer)] for question, answer in demonstrations]
    for number, (question, answer) in enumerate(tests):
        row = [(f"test input {number + 1}", question)]
        candidates = votes[0, number]
        for key in elect(candidates)[:2]:
            row.append((f"answer with {candidates[key][0]} votes", grid_of_key(key)))
        if answer.size:
            row.append(("known answer", answer))
        rows.append(row)

    # all on canvases of one size, whose edges are not shown
    side = max(max(grid.shape) for row in rows for _, grid in row)
    task = arc_task(side) | {"symbols": ARC.replace("|", " ")}
    nothing = np.zeros(side * side, dtype=bool)
    panels = []
    for row in rows:
        panels.append([(title, canvas(grid, side).ravel(), nothing) for title, grid in row])
        text = side_by_side(panels[-1], task["symbols"], side, side)
        text = re.sub("\n{2,}", "\n\n", text)
        print(text, end="")
    if plot:
        draw(plot, task, nothing, panels)


# ---------------------------------------------------------------------------------------------------------
# Pictures

def draw(path, task, given, rows):
    """Draws grids to a new .png, or each as a frame of a .gif.

    Args:
        path: the file.
        task: the puzzle's task.
        given: which cells to draw on grey [cells].
        rows: lists of (title, tokens [cells], which cells break a rule [cells]).
    """
    if path.endswith(".gif"):
        frames = [picture(task, given, [[grid]]) for row in rows for grid in row]
    else:
        frames = [picture(task, given, rows)]
    with replacing(path) as f:
        frames[0].save(f, path[-3:], save_all=True, append_images=frames[1:], duration=500, loop=0)
    print(f"wrote {path}")


def picture(task, given, rows):
    """Returns an image of grids; given, rows: see draw."""
    from matplotlib.figure import Figure
    from PIL import Image
    size = max(3, max(task["grid"]) / 6)  # inches
    columns = max(map(len, rows))
    figure = Figure((size * columns, (size + 0.3) * len(rows)), dpi=160, layout="constrained")
    for i, row in enumerate(rows):
        for j, (title, tokens, broken) in enumerate(row, 1):
            ax = figure.add_subplot(len(rows), columns, i * columns + j)
            ax.set(title=title, xticks=[], yticks=[])
            draw_grid(ax, task, given, tokens, broken)
    file = io.BytesIO()
    figure.savefig(file)
    return Image.open(file)


def draw_grid(ax, task, given, tokens, broken):
    """Draws a grid: givens on grey, broken cells on black, others in the colours of their kind."""
    from matplotlib.colors import to_rgb
    rows, columns = task["grid"]
    style = appearance(task)

    # the cells, with symbols that are white on dark colours
    colours = np.zeros((rows, columns, 3))
    for i, token in enumerate(tokens):
        place = divmod(i, columns)
        symbol = task["symbols"][token]
        if not broken[i]:
            colours[place] = to_rgb(style.palette.get(symbol, "#e0e0e0" if given[i] else "white"))
        ax.text(*place[::-1], symbol.strip("#_."), ha="center", va="center",
                color="white" if colours[place][1] < 0.5 else "black", fontsize=max(6, 120 / columns))
    ax.imshow(colours)

    # the lines between them
    for draw_line, cells, box in (ax.axhline, rows, style.box[0]), (ax.axvline, columns, style.box[1]):
        for k in range(cells + 1):
            draw_line(k - 0.5, color="black", linewidth=0.2 if k % box else 1.5)


# ---------------------------------------------------------------------------------------------------------
# Arguments and puzzles

def model_and_source(operands):
    """Returns the path of the model, "" for one of models/, and the puzzle or its file. Raises UserError."""
    if len(operands) == 1:
        name = operands[0]
        is_model = os.path.isdir(name) or name.endswith(".pt") or zipfile.is_zipfile(name)
        operands = [name, "-"] if is_model else ["", name]
    if len(operands) != 2:
        raise UserError("usage: python scripts/solve.py MODEL PUZZLE, each a file, or a run's folder "
                        "and the puzzle in a line; or PUZZLE alone; see --help")
    return operands


def check_output(settings, is_arc_file, is_csv):
    """Raises UserError if the output that is asked for cannot be written."""
    is_file = is_arc_file or is_csv
    if is_file and (settings.steps or settings.plot) or settings.output and not is_file:
        raise UserError("--steps and --plot show one puzzle or task, --output is for a file of them")
    if is_arc_file and not settings.output:
        raise UserError("choose a file for the answers to the tasks, --output=submission.json")

    # a new file
    path = settings.plot or settings.output
    endings = (".json",) if is_arc_file else (".csv",) if is_csv else (".png", ".gif")
    if path and not path.endswith(endings):
        raise UserError(f"{path}: must end in {' or '.join(endings)}")
    if settings.plot and not importlib.util.find_spec("matplotlib"):
        raise UserError("--plot needs matplotlib: pip install matplotlib")
    if os.path.lexists(path):
        raise UserError(f"{path}: exists already; choose another name")
    if path and not os.access(os.path.dirname(path) or ".", os.W_OK):
        raise UserError(f"{path}: there is no such folder, or it cannot be written to")


def read_texts(source):
    """Returns a list of (file and line, puzzle), of a .csv, a file, stdin (-) or a line. Raises UserError."""
    if source.endswith(CSV_ENDINGS):
        texts = [(f"{source}:{line}: ", text) for line, [text] in csv_rows(source, ["question"])]
        if not texts:
            raise UserError(f"{source}:2: no puzzle under the header")
        return texts
    if source == "-":
        content = sys.stdin.buffer.read()
    elif os.path.isfile(source):
        content = Path(source).read_bytes()
    else:
        content = source.encode()
    return [("", content.decode("utf-8-sig", errors="replace"))]


def parse_texts(task, texts):
    """Returns the task with the grid of puzzles, and their tokens, int32 [n, cells]; texts: from read_texts.

    Warns on stderr if one has several solutions. Raises UserError for the first that is wrong or has none.
    """
    questions = []
    for place, text in texts:
        try:
            task, tokens = parse_question(task, text)
        except UserError as e:
            raise UserError(f"{place}{e}") from None
        questions.append(tokens)
    if len(set(map(len, questions))) > 1:
        raise UserError("the puzzles must all have as many cells")
    questions = np.stack(questions)
    warning = check_questions(task, questions, [place for place, _ in texts])
    if warning:
        print(f"solve.py: warning: {warning}", file=sys.stderr)
    return task, questions


# ---------------------------------------------------------------------------------------------------------
# Models

class Saved(NamedTuple):
    """A trained model on disk."""
    path: str
    state: dict  # the content of its file
    settings: Settings  # train.py's, for an evaluation of the model
    sizes: dict  # its train.SIZES; seq_len is 0 in an official checkpoint

    @property
    def name(self):
        return f"{self.path}, training step {self.state.get('step', 0)}"


def shipped_models():
    """Returns {path: task} of the files in models/ that say what they solve."""
    tasks = {}
    for path in sorted(glob.glob(os.path.join(glob.escape(MODELS), "*.pt"))):
        task = read_checkpoint(path).get("task")
        if task:
            tasks[os.path.relpath(path)] = task
    return tasks


def choose_model(question):
    """Returns the file of models/ for puzzles of this one's size and symbols. Raises UserError."""
    tasks = shipped_models()
    for path, task in tasks.items():
        with suppress(UserError):
            if parse_question(task, question)[0] == task:
                return path
    raise UserError(f"{question.strip()[:20]!r} is no file, and no puzzle for one of {', '.join(tasks)}")


def read_saved(path, train_arguments):
    """Returns a Saved. Raises UserError.

    Args:
        path: a model file or a checkpoint, or a run's folder, for its newest checkpoint.
        train_arguments: config files and flags of train.py, over the settings in the checkpoint.
    """
    if os.path.isdir(path):
        notes = []
        state = newest_checkpoint(path, notes.append)
        if not state:
            raise UserError("; ".join([f"{path}: no complete checkpoint (ckpt_*.pt with its .json)", *notes]))
    else:
        state = read_checkpoint(path)

    # the settings that describe the model, and those for solving; a fork's loss and optimizer are not needed
    ignored = (*train.RUN_SETTINGS, "loss_type", "optimizer")
    flags = []
    for name, value in state.get("settings", {}).items():
        if name in train.DEFAULTS and name not in ignored:
            flags.append(f"--{name}={value}")
    if "command" in state:  # a file of export.py travels, and many CPUs have no bfloat16 units
        flags.append("--forward_dtype=float32")
    one_batch = ["--global_batch_size=1", "--micro_batch_size=0", "--eval_patience=0"]  # shows every step
    settings = configure(train.__file__, flags + train_arguments + one_batch)
    train.check_settings(settings)

    # an official checkpoint has its sizes in the shapes of its weights
    lengths = {name.rpartition("inner.")[2]: len(t) for name, t in state["weights"].items()}
    sizes = dict(seq_len=0, vocab_size=lengths.get("lm_head.weight", 0),
                 num_puzzle_identifiers=lengths.get("puzzle_emb.weights", 1))
    if "model" in state:
        sizes = {name: state["model"][name] for name in train.SIZES}
    return Saved(path, state, settings, sizes)


def task_of_model(saved, question="", cells=0):
    """Returns the task of a model: its checkpoint's, or the one that its sizes tell.

    Args:
        saved: a Saved.
        question, cells: a typed question, or the cells of one.

    Raises UserError if they tell none.
    """
    task = saved.state.get("task", {})
    if task.get("kind"):
        return task
    cells = cells or saved.sizes["seq_len"] or len(question)
    vocab_size = saved.sizes["vocab_size"]
    if vocab_size == len(MAZE) and cells:
        return maze_task(math.isqrt(cells))
    if vocab_size - 2 in BOXES:
        return sudoku_task(vocab_size - 2)
    raise UserError(f"{saved.path} does not say what it solves, and its sizes do not tell; play.py shows the "
                    "puzzles of its dataset, --data_path=FOLDER")


def build_model(saved, cells):
    """Returns the TRM for so many cells with the averaged weights. Raises UserError if they do not fit."""
    model = train.new_model(saved.settings, **saved.sizes | {"seq_len": cells})
    load_weights(model, saved.state.get("ema", saved.state["weights"]), saved.path)
    return model


if __name__ == "__main__":
    command(lambda: main(sys.argv[1:]), __file__)
