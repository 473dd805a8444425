"""Solves puzzles with a trained model.

    python scripts/solve.py 2.....4...6.....156....2..3.5.......     by the model of models/ for this size
    python scripts/solve.py out/demo puzzle.txt                       by the newest checkpoint of a run
    python scripts/solve.py out/maze/best.pt maze.txt --steps --halt_max_steps=64
    python scripts/solve.py out/demo puzzles.csv --output=answers.csv --eval_rollouts=8
    python scripts/solve.py official_checkpoint config/sudoku.py puzzle.txt --plot=answer.gif

A puzzle is a line, a file, or stdin (if left out, or -), in one line or in several. A Sudoku has digits with
. or 0 for an empty cell, a maze "# SG" (wall, open, start, goal), others the symbols of their dataset. A
.csv or .jsonl file, also .gz, has a puzzle a row, in the column question, and may have the right answers in
the column answer. A puzzle that begins with - must be in a file.

The answer is the surest: that of the supervision step where the halting head was most certain, also of
several attempts with noise (eval_rollouts). The model is a file of train.py's --export, a run's folder or a
checkpoint. They contain its settings and say what it solves. An official checkpoint needs the settings that
differ from train.py's, as config files or flags; what it solves is read from its dataset's manifest.json, or
told by its sizes. The model runs on the CPU as in train.py's evaluation: averaged weights, forward_dtype
(float32 for a file of --export), full depth.
"""
import codecs
import csv
import glob
import importlib.util
import math
import os
import sys
import zipfile

import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
# isort: off
import train
from configurator import UserError, command, configure, read_settings, split_arguments
from data import IGNORED, NOISE, Progress, generator, read_json, replacing
from device import open_device
from prepare_csv import csv_rows
from puzzles import (
    are_solutions, broken_cells, check_questions, given_cells, guess, is_correct, look, parse, side_by_side,
    task_of, text_of, tokens_of, verdict)

# output
steps = False  # show the answers after several supervision steps, and how sure the halting head is
plot = ""  # draw the answers of --steps: FILE.png, or FILE.gif with a frame for each step
output = ""  # write the answers of a .csv to this new .csv: question, answer, certainty, step, result
halt_max_steps = 0  # supervision steps; 0: those of the run's evaluation; more may solve more
# ---

MODELS = os.path.join(ROOT, "models")  # trained ones, files of --export
CSV_ENDINGS = (".csv", ".csv.gz", ".jsonl", ".jsonl.gz")
PANELS_IN_A_ROW = 4  # of --plot
SURE = 0.9  # the certainty above which answers are counted apart
CELLS_AT_A_TIME = 5_000  # of all puzzles in a batch: 61 of 9x9 Sudoku, 5 of 30x30 mazes


def main(argv):
    """Solves one puzzle and prints it, or those of a file."""
    s, checkpoint, source, model_flags = read_arguments(argv)
    rows = read_rows(source)
    checkpoint = checkpoint or choose_model(rows[0][1])
    state, c = read_model(checkpoint, model_flags)
    puzzle, questions, labels = parse_rows(puzzle_of(state, c, rows[0][1]), rows)
    run = build_run(state, c, checkpoint, math.prod(puzzle["grid"]))
    run.eval_depth = s.halt_max_steps or run.eval_depth
    if source.endswith(CSV_ENDINGS):
        solve_file(run, puzzle, questions, labels, s.output)
    else:
        origin = f"{checkpoint}, training step {state.get('step', 0)}"
        solve_one(run, puzzle, questions[0], s, origin)


def solve_one(run, puzzle, question, s, origin):
    """Prints the question, the surest answer and whether it is a solution; draws them if asked to."""
    preds, q_halt = [np.stack(arrays) for arrays in zip(*solve(run, question[None]))]
    (best,), (attempt,) = surest(q_halt)
    answers, sure = preds[:, 0, attempt], sigmoid(q_halt[:, 0, attempt])
    grids = [("question", question, np.zeros(len(question), dtype=bool))]
    broken = broken_cells(puzzle, question[None].repeat(len(answers), axis=0), answers)
    for n, answer in enumerate(answers):
        title = f"step {n + 1}: {sure[n]:.0%}" + (", kept" if n == best else " sure")
        grids.append((title, answer, grids[0][2] if broken is None else broken[n]))
    powers = {2 ** i for i in range(run.eval_depth.bit_length())}
    several = sorted({0, best + 1, run.eval_depth} | powers)  # 0: the question
    panels = several if s.steps else [0, best + 1]
    print(side_by_side([grids[n] for n in panels], puzzle["symbols"], *puzzle["grid"]))
    print(text_of(puzzle, answers[best]))
    attempts = f", attempt {attempt + 1} of {q_halt.shape[2]}" if q_halt.shape[2] > 1 else ""
    print(f"{verdict(puzzle, question, answers[best])} ({sure[best]:.0%} sure after step {best + 1} "
          f"of {run.eval_depth}{attempts}; {origin})")
    if s.plot:
        frames = grids + [grids[best + 1]] * 3  # it stays for a while
        is_gif = s.plot.endswith(".gif")
        draw(s.plot, puzzle, question, frames if is_gif else [grids[n] for n in several])
        print(f"wrote {s.plot}")


def solve_file(run, puzzle, questions, labels, path):
    """Solves questions [n, cells], writes a row for each to a new file, prints how many are right.

    labels: [n, cells]; -100 in the rows of unknown answers, which the rules judge. path: "" for no file.
    """
    known = labels[:, 0] != IGNORED
    is_right, certainty = np.zeros(len(questions), dtype=bool), np.zeros(len(questions))
    batch_size = max(1, CELLS_AT_A_TIME // (questions.shape[1] * run.c.eval_rollouts))
    progress = Progress("solving", len(questions), "puzzles")
    with replacing(path) if path else open(os.devnull, "wb") as f:
        rows = csv.writer(codecs.getwriter("utf-8")(f), lineterminator="\n")
        rows.writerow(["question", "answer", "certainty", "step", "result"])
        for first in range(0, len(questions), batch_size):
            batch = slice(first, first + batch_size)
            preds, q_halt = (np.stack(arrays) for arrays in zip(*solve(run, questions[batch])))
            step, attempt = surest(q_halt)
            chosen = step, np.arange(len(step)), attempt
            answers, certainty[batch] = preds[chosen], sigmoid(q_halt[chosen])
            by_label = is_correct(puzzle, questions[batch], labels[batch], answers)["accuracy"]
            by_rules = are_solutions(puzzle, questions[batch], answers)
            is_right[batch] = by_label if by_rules is None else np.where(known[batch], by_label, by_rules)
            for i, answer in enumerate(answers, first):
                results = ("wrong", "right") if known[i] else ("not a solution", "solution")
                result = results[int(is_right[i])] if known[i] or by_rules is not None else "not judged"
                rows.writerow([text_of(puzzle, questions[i]), text_of(puzzle, answer), f"{certainty[i]:.4f}",
                               step[i - first] + 1, result])
            progress.add(len(answers))
    summary = f"{is_right.sum()} of {len(questions)} puzzles solved ({is_right.mean():.1%})"
    if by_rules is None and not known.all():
        summary += f", of which only {known.sum()} have a known answer to judge by"
    sure = certainty >= SURE
    print(f"{summary}; of the {sure.sum()} answers that are {SURE:.0%} sure, "
          f"{is_right[sure].sum()} are right")
    if path:
        print(f"wrote {path}")


def solve(run, questions):
    """Yields preds [n, attempts, cells] and q_halt_logits [n, attempts] after each of eval_depth steps.

    questions: tokens [n, cells]. attempts: eval_rollouts of run.c, all but the first with noise.
    """
    n, attempts = len(questions), run.c.eval_rollouts
    noise_keys = generator(run.c.seed, NOISE).integers(1, 2 ** 31, attempts, dtype=np.int32)
    noise_keys[0] = 0
    rows = questions.repeat(attempts, axis=0)
    batch = dict(
        inputs=rows,
        labels=np.full_like(rows, IGNORED),
        puzzle_identifiers=np.zeros(len(rows), dtype=np.int32))
    run.batch_size = len(rows)
    inputs = run.eval_inputs(batch, np.tile(noise_keys, n))
    state = run.new_evaluation()
    for _ in range(run.eval_depth):
        answers = run.eval_program(state, inputs)
        preds, q_halt = answers["preds"].numpy(), answers["q_halt_logits"].numpy()
        yield preds.reshape(n, attempts, -1), q_halt.reshape(n, attempts)


def surest(q_halt):
    """The step and the attempt, from 0, of each question's surest answer; q_halt: [steps, n, attempts].

    Of equals, the last step of the first attempt: that of train.py's evaluation.
    """
    num_steps, n, _ = q_halt.shape
    last_first = q_halt[::-1].transpose(1, 2, 0).reshape(n, -1)  # [n, attempts * steps]
    attempt, position = np.divmod(last_first.argmax(axis=1), num_steps)
    return num_steps - 1 - position, attempt


def sigmoid(logits):
    return 1 / (1 + np.exp(-np.float64(logits)))


# Input.

def read_arguments(argv):
    """solve.py's settings, the model ("": of models/), the puzzle, and the model's config files and flags."""
    s, operands, model_flags = split_arguments(__file__, argv)
    if len(operands) == 1 and not is_model(operands[0]):
        operands.insert(0, "")
    if len(operands) not in (1, 2):
        raise UserError("usage: python scripts/solve.py MODEL PUZZLE, each a file, or a run's folder "
                        "and the puzzle in a line; or PUZZLE alone; see --help")
    checkpoint, source = (*operands, "-")[:2]
    if s.halt_max_steps < 0:
        raise UserError(f"halt_max_steps must be 0 or more, not {s.halt_max_steps}")
    if s.plot and not s.plot.endswith((".png", ".gif")):
        raise UserError(f"--plot={s.plot}: must end in .png or .gif")
    if s.plot and not importlib.util.find_spec("matplotlib"):
        raise UserError("--plot needs matplotlib: pip install matplotlib")
    is_file = source.endswith(CSV_ENDINGS)
    if is_file and (s.steps or s.plot):
        raise UserError("--steps and --plot show one puzzle, not a file of them")
    if s.output and not (is_file and s.output.endswith(".csv")):
        raise UserError(f"--output={s.output}: must end in .csv, and is for the puzzles of a .csv")
    for path in s.plot, s.output:
        if os.path.lexists(path):
            raise UserError(f"{path}: exists already; choose another name")
        if not os.path.isdir(os.path.dirname(path) or "."):
            raise UserError(f"{path}: there is no such folder")
    return s, checkpoint, source, model_flags


def is_model(path):
    return os.path.isdir(path) or path.endswith(".pt") or zipfile.is_zipfile(path)


def read_rows(source):
    """Texts of puzzles, [(place for messages, question, answer or "")], of a .csv, a file, stdin or a line.

    Raises UserError.
    """
    if not source.endswith(CSV_ENDINGS):
        if source != "-" and not os.path.isfile(source):
            return [("", source, "")]
        is_stdin = source == "-"
        with open(0 if is_stdin else source, encoding="utf-8-sig", errors="replace",
                  closefd=not is_stdin) as f:
            return [("", f.read(), "")]
    rows = [(f"{source}:{line}: ", *texts) for line, texts in csv_rows(source, ["question"], ["answer"])]
    if not rows:
        raise UserError(f"{source}:2: no puzzle under the header")
    return rows


def parse_rows(puzzle, rows):
    """The puzzle with the grid of the rows, questions and labels [n, cells]; a label is -100 if not known.

    rows: as read_rows returns them. Raises UserError for the first one that is wrong or has no solution.
    """
    questions, labels, places = [], [], [place for place, _, _ in rows]
    for place, question, answer in rows:
        try:
            own, tokens = parse(puzzle, question)
            if questions and len(tokens) != len(questions[0]):
                raise UserError("the puzzle has not as many cells as the first")
            if answer and len(answer) != len(tokens):
                raise UserError(f"the answer has {len(answer)} characters, not {len(tokens)}")
            label = tokens_of(own, answer, own["symbols"][1:], "the answer") if answer else IGNORED
        except UserError as e:
            hint = "" if place or "\n" in question else " (if a file was meant: there is none of that name)"
            raise UserError(f"{place}{e}{hint}") from None
        questions.append(tokens)
        labels.append(np.broadcast_to(label, tokens.shape))
    questions, labels = np.stack(questions), np.stack(labels)
    warning = check_questions(own, questions, places)
    if warning:
        print(f"solve.py: warning: {warning}", file=sys.stderr)
    known = np.flatnonzero(labels[:, 0] != IGNORED)
    is_solution = are_solutions(own, questions[known], labels[known])
    if is_solution is not None and not is_solution.all():
        raise UserError(places[known[is_solution.argmin()]] + "the answer is not a solution of the question")
    return own, questions, labels


def shipped_models():
    """{path: task} of the files in models/."""
    paths = sorted(glob.glob(os.path.join(glob.escape(MODELS), "*.pt")))
    return {os.path.relpath(path): read_state(path)["task"] for path in paths}


def choose_model(text):
    """The file of models/ for puzzles of this one's size and symbols. Raises UserError if there is none."""
    reasons = []
    for path, task in shipped_models().items():
        name, (rows, columns) = os.path.basename(path), task["grid"]
        try:
            if parse(task, text)[0]["grid"] == task["grid"]:
                return path
            reasons.append(f"{name} takes {rows}x{columns}")
        except UserError as e:
            reasons.append(f"{name}: {e}")
    raise UserError(f"no file of models/ is for the puzzle {text.strip()[:20]!r} (is it a file that does not "
                    f"exist?): {'; '.join(reasons)}")


def read_model(path, flags):
    """The state in the checkpoint at path, a file or a run's folder, and its settings.

    flags: config files and flags of train.py, over the settings in the checkpoint. Raises UserError.
    """
    state = read_state(path)
    groups = {name: group for name, (_, _, group) in read_settings(train.__file__).items()}
    saved = {name: value for name, value in state.get("settings", {}).items()
             if groups.get(name) not in (None, "run", "logging")}
    if "puzzles" in state:  # a file of --export travels, and many CPUs have no bfloat16 units
        saved["forward_dtype"] = "float32"
    c = configure(train.__file__, [f"--{name}={value}" for name, value in saved.items()] + flags)
    c.global_batch_size = 1
    c.micro_batch_size = 0
    c.eval_patience = 0  # every step is shown
    train.check_settings(c)
    return state, c


def puzzle_of(state, c, text="", cells=0):
    """The task of a model: of its checkpoint, or else of its dataset's manifest, or by the model's sizes.

    text, cells: of a question, for a model that takes any number of cells. Raises UserError if the model
    has neither and is neither one of Sudoku nor of mazes.
    """
    if state.get("task", {}).get("kind"):
        return state["task"]
    own_cells, vocab_size = sizes_of(state, c)
    path = os.path.join(c.data_path, "manifest.json")
    manifest = read_json(path) if os.path.exists(path) else {}
    fits = {"kind", "grid", "symbols"} <= manifest.keys() and len(manifest["symbols"]) == vocab_size
    if fits and own_cells in (0, math.prod(manifest["grid"])):
        return manifest
    cells = own_cells or cells or state.get("model", {}).get("seq_len", 0)
    if not cells and not text:
        raise UserError(f"the model takes puzzles of any size, and its dataset is not in {c.data_path}: "
                        "--data_path=FOLDER says where it is")
    return guess(cells, vocab_size, text)


def sizes_of(state, c):
    """Cells that the model in a checkpoint's state takes, 0 for any number, and the tokens that it knows."""
    sizes, cells = state.get("model", {}), 0
    if c.mlp_t or c.pos_encodings == "learned":
        prefix = c.puzzle_emb_ndim and (c.puzzle_emb_len or math.ceil(c.puzzle_emb_ndim / c.hidden_size))
        length = rows_of(state, "mlp_t.down_proj.weight") or rows_of(state, "embed_pos.embedding_weight")
        cells = sizes.get("seq_len", max(0, length - prefix))
    return cells, sizes.get("vocab_size") or rows_of(state, "lm_head.weight")


def build_run(state, c, path, cells):
    """The model in a checkpoint's state as a train.Run. Raises UserError unless it takes so many cells."""
    own_cells, vocab_size = sizes_of(state, c)
    if own_cells not in (0, cells):
        raise UserError(f"{path}: the model takes {own_cells} cells, not {cells}")
    identifiers = rows_of(state, "puzzle_emb.weights") or 1
    model = train.new_model(c, seq_len=cells, vocab_size=vocab_size, num_puzzle_identifiers=identifiers)
    train.load_weights(model, state["weights"], path)
    averaged = {"ema": state["ema"]} if "ema" in state else {}
    return train.Run(model, c, open_device("cpu", c), averaged)


def read_state(path):
    """The state in a checkpoint, or in the newest of a run's folder. Raises UserError."""
    if not os.path.exists(path):
        raise UserError(f"{path}: no such checkpoint or folder")
    if not os.path.isdir(path):
        state = train.read_checkpoint(path)
        if "puzzles" in state:
            check_model_file(state, path)
        return state

    state = train.newest_checkpoint(
        path, lambda note: note.startswith("skipped") and print(note, file=sys.stderr))
    if not state:
        raise UserError(f"{path}: no complete checkpoint (ckpt_*.pt with its .json) in it")
    return state


def check_model_file(state, path):
    """Raises UserError unless what a file of --export says of its model fits together: others made it."""
    try:
        cells, vocab_size = state["model"]["seq_len"], state["model"]["vocab_size"]
        state["task"] = task_of(state["task"], cells, vocab_size)
        inputs, labels = (state["puzzles"][name].numpy() for name in ("inputs", "labels"))
        fits = (inputs.shape == labels.shape == (len(inputs), cells) and inputs.min() >= 0
                and inputs.max() < vocab_size and labels.max() < vocab_size
                and isinstance(state["settings"], dict) and isinstance(state["step"], int))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError, UserError):
        fits = False
    if not fits:
        raise UserError(f"{path}: damaged, or a model file of another version of this code")


def rows_of(state, name):
    """Rows of the weight whose name ends so; 0 if there is none."""
    return next((len(t) for key, t in state["weights"].items() if key.endswith(name)), 0)


# Pictures.

def draw(path, puzzle, question, grids):
    """Draws the grids, (title, tokens, broken cells) each, side by side or as the frames of a .gif."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import animation, pyplot
    panels = 1 if path.endswith(".gif") else len(grids)
    columns = min(PANELS_IN_A_ROW, panels)
    rows = math.ceil(panels / columns)
    height, width = (max(3, cells / 6) for cells in puzzle["grid"])
    fig, axes = pyplot.subplots(rows, columns, squeeze=False, layout="constrained",
                                figsize=(width * columns, (height + 0.3) * rows))
    fig.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
    if path.endswith(".gif"):
        film = animation.FuncAnimation(
            fig, lambda grid: draw_grid(axes[0, 0], puzzle, question, *grid), grids)
        film.save(path, writer="pillow", fps=2, dpi=160)
        return
    for ax, grid in zip(axes.flat, grids):
        draw_grid(ax, puzzle, question, *grid)
    for ax in axes.flat[panels:]:
        ax.axis("off")
    fig.savefig(path, dpi=120)


def draw_grid(ax, puzzle, question, title, tokens, broken):
    """Draws a grid: givens bold on grey, answers plain on white (a path on grey), broken cells on black."""
    ax.clear()
    rows, columns = puzzle["grid"]
    given, shown = given_cells(puzzle, question), look(puzzle)
    shades, names = np.where(given, 0.88, 1.0), [shown["names"].get(symbol) for symbol in puzzle["symbols"]]
    for name, shade in ("path", 0.75), ("wall", 0.3):
        shades[np.array(names)[tokens] == name] = shade
    shades[broken] = 0
    ax.imshow(shades.reshape(rows, columns), cmap="gray", vmin=0, vmax=1)
    for i, token in enumerate(tokens):
        ax.text(i % columns, i // columns, puzzle["symbols"][token].strip("#_."), ha="center", va="center",
                color="white" if broken[i] else "black", fontsize=max(6, 120 / columns),
                fontweight="bold" if given[i] else "normal")
    box_rows, box_columns = shown["box"]
    for k in range(rows + 1):
        ax.axhline(k - 0.5, color="black", linewidth=0.2 if k % box_rows else 1.5)
    for k in range(columns + 1):
        ax.axvline(k - 0.5, color="black", linewidth=0.2 if k % box_columns else 1.5)
    ax.set(title=title, xticks=[], yticks=[])


if __name__ == "__main__":
    command(lambda: main(sys.argv[1:]), __file__)
