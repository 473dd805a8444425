"""Solves puzzles with a trained model.

    python scripts/solve.py out/demo 2.....4...6.....156....2..3.5.......     the newest checkpoint of a run
    python scripts/solve.py out/maze/best.pt maze.txt --steps --halt_max_steps=64
    python scripts/solve.py out/demo puzzles.csv --output=answers.csv --eval_rollouts=8
    python scripts/solve.py official_checkpoint config/sudoku.py puzzle.txt --plot=answer.gif

A puzzle is a line, a file, or stdin (if left out, or -). It is a Sudoku in digits with . or 0 for an empty
cell, or a maze of "# SG" (wall, open, start, goal), in one line or in several. A .csv or .csv.gz file has a
puzzle a row, in the column question, and may have the right answers in the column answer.

The answer is the surest: that of the supervision step where the halting head was most certain, also of
several attempts with noise (eval_rollouts). Our checkpoints contain the settings of the model. An official
checkpoint needs those that differ from train.py's, as config files or flags. The model runs on the CPU as in
train.py's evaluation: averaged weights, forward_dtype, full depth.
"""
import csv
import importlib.util
import math
import os
import sys
import tempfile

import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
import prepare_maze  # noqa: E402
import prepare_sudoku  # noqa: E402
import train  # noqa: E402
from configurator import UserError, command, configure, read_settings, split_flags  # noqa: E402
from data import (  # noqa: E402
    GOAL, IGNORED, NOISE, OPEN, PATH, START, WALL, Progress, csv_rows, generator, path_metrics)

# output
steps = False  # show the answers after several supervision steps, and how sure the halting head is
plot = ""  # draw the same: FILE.png, or FILE.gif with a frame for each step
output = ""  # of a .csv: a new .csv with the columns question, answer, certainty, step and result
halt_max_steps = 0  # supervision steps; 0: those of the run's evaluation; more may solve more
# ---

SYMBOLS = {"sudoku": " .123456789", "maze": " " + prepare_maze.SYMBOLS}  # by token
CSV_ENDINGS = (".csv", ".csv.gz")
PANELS_IN_A_ROW = 4  # of --plot
CELLS_AT_A_TIME = 5_000  # of all puzzles in a batch: 61 of 9x9 Sudoku, 5 of 30x30 mazes


def main(argv):
    """Solves one puzzle and prints it, or those of a file."""
    s, checkpoint, puzzle, model_flags = read_arguments(argv)
    is_file = puzzle.endswith(CSV_ENDINGS)
    if is_file:
        kind, size, questions, labels = read_puzzles(puzzle)
    else:
        kind, size, question = read_puzzle(puzzle)
        warn(check_questions(kind, size, question[None], [""]))
    state, c = read_model(checkpoint, model_flags)
    run = build_run(state, c, checkpoint, kind, size)
    run.eval_depth = s.halt_max_steps or run.eval_depth
    if is_file:
        solve_file(run, kind, size, questions, labels, s.output)
    else:
        origin = f"{checkpoint}, training step {state.get('step', 0)}"
        solve_one(run, kind, size, question, s, origin)


def solve_one(run, kind, size, question, s, origin):
    """Prints the question, the surest answer and whether it is a solution; draws them if asked to."""
    preds, q_halt = [np.stack(arrays) for arrays in zip(*solve(run, question[None]))]
    (best,), (attempt,) = surest(q_halt)
    grids = [("question", question, np.zeros(len(question), dtype=bool))]
    for n, answer in enumerate(preds[:, 0, attempt]):
        title = f"step {n + 1}: {sigmoid(q_halt[n, 0, attempt]):.0%}" + (", kept" if n == best else " sure")
        grids.append((title, answer, broken_cells(kind, size, question, answer)))
    if s.steps:
        per_row = 120 // (2 + max(3 * size, *(len(title) for title, _, _ in grids)))
        panels = choose_panels(run.eval_depth, best + 1, max(1, per_row))
    else:
        panels = [0, best + 1]
    print(train.side_by_side([grids[n] for n in panels], SYMBOLS[kind], size, size))
    answer = preds[best, 0, attempt]
    print(text_of(kind, answer))
    attempts = f", attempt {attempt + 1} of {len(q_halt[0, 0])}" if len(q_halt[0, 0]) > 1 else ""
    print(f"{verdict(kind, size, question, answer)} ({sigmoid(q_halt[best, 0, attempt]):.0%} sure after step "
          f"{best + 1} of {run.eval_depth}{attempts}; {origin})")
    if s.plot.endswith(".gif"):
        draw_animation(s.plot, kind, size, question, grids + [grids[best + 1]] * 3)  # it stays for a while
    elif s.plot:
        panels = choose_panels(run.eval_depth, best + 1, PANELS_IN_A_ROW)
        draw_picture(s.plot, kind, size, question, [grids[n] for n in panels])
    if s.plot:
        print(f"wrote {s.plot}")


def solve_file(run, kind, size, questions, labels, path):
    """Solves questions [n, cells], writes a row for each to a new file, prints how many are right.

    labels: [n, cells]; 0 in the rows of unknown answers, which the rules judge. path: "" for no file.
    """
    known = labels[:, 0] > 0
    is_right, certainty = np.zeros(len(questions), dtype=bool), np.zeros(len(questions))
    batch_size = max(1, CELLS_AT_A_TIME // (size * size * run.c.eval_rollouts))
    with (open(path or os.devnull, "x" if path else "w", encoding="utf-8", newline="") as f,
          Progress("solving", len(questions), "puzzles") as progress):
        rows = csv.writer(f, lineterminator="\n")
        rows.writerow(["question", "answer", "certainty", "step", "result"])
        for first in range(0, len(questions), batch_size):
            batch = slice(first, first + batch_size)
            preds, q_halt = (np.stack(arrays) for arrays in zip(*solve(run, questions[batch])))
            step, attempt = surest(q_halt)
            chosen = step, np.arange(len(step)), attempt
            answers, certainty[batch] = preds[chosen], sigmoid(q_halt[chosen])
            is_solution = are_solutions(kind, size, questions[batch], answers)
            is_right[batch] = np.where(known[batch], (answers == labels[batch]).all(axis=1), is_solution)
            for i, answer in enumerate(answers, first):
                result = ("wrong", "right") if known[i] else ("not a solution", "solution")
                rows.writerow([text_of(kind, questions[i]), text_of(kind, answer), f"{certainty[i]:.4f}",
                               step[i - first] + 1, result[int(is_right[i])]])
            progress.add(len(answers))
    summary = f"{is_right.sum()} of {len(questions)} puzzles solved ({is_right.mean():.1%})"
    if known.any() and not known.all():
        summary += f", {known.sum()} by their known answers and the others by the rules"
    sure = certainty >= 0.9
    print(f"{summary}; of the {sure.sum()} answers that are 90% sure, {is_right[sure].sum()} are right")
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


def choose_panels(depth, best, per_row):
    """The steps to show, 0 for the question: the best, the last, 1, 2, 4, ..., and more to fill the rows."""
    chosen = {0: None, best: None, depth: None} | {2 ** i: None for i in range(depth.bit_length())}
    in_order = list(chosen | {step: None for step in range(depth)})
    num_rows = math.ceil(len(chosen) / per_row)
    if num_rows * per_row > len(in_order):
        num_rows -= 1
    return sorted(in_order[:num_rows * per_row or len(in_order)])


def verdict(kind, size, question, answer):
    """Whether the answer is a solution, in words."""
    if kind == "sudoku":
        broken = broken_cells(kind, size, question, answer).sum()
        if broken:
            return f"not a solution: {broken} cells break a rule"
        return "a solution: every row, column and box, and all givens kept"
    shortest, path_steps = prepare_maze.solve(question[None], size)
    valid, optimal = path_metrics(question[None], shortest, answer[None], (size, size))
    answer_steps = (answer == PATH).sum() + 1
    if optimal[0]:
        return f"a shortest path, {answer_steps} steps"
    if valid[0]:
        return f"a path of {answer_steps} steps; the shortest has {path_steps[0]}"
    return "not a path from S to G"


def are_solutions(kind, size, questions, answers):
    """Which answers [n, cells] solve their questions: keep all rules, or are a shortest path; bool [n]."""
    if kind == "sudoku":
        is_filled = (answers > 1).all(axis=1)
        return is_filled & prepare_sudoku.are_valid(questions - 1, np.maximum(answers, 2) - 1, size)
    return path_metrics(questions, prepare_maze.solve(questions, size)[0], answers, (size, size))[1]


def broken_cells(kind, size, question, answer):
    """Which cells [..., cells] break a rule: a digit twice in a unit, a changed given, a wall in the path."""
    if kind == "maze":
        return (answer != question) & ~((question == OPEN) & (answer == PATH))
    box_rows, box_columns = prepare_sudoku.BOXES[size]
    row, column = np.divmod(np.arange(size * size), size)
    box = row // box_rows * box_rows + column // box_columns
    in_one_unit = np.zeros((size * size, size * size), dtype=bool)
    for unit in (row, column, box):
        in_one_unit |= unit[:, None] == unit
    np.fill_diagonal(in_one_unit, False)
    repeated = (in_one_unit & (answer[..., :, None] == answer[..., None, :])).any(axis=-1)
    return repeated | (answer < 2) | ((question > 1) & (answer != question))


def text_of(kind, tokens):
    return "".join(SYMBOLS[kind][token] for token in tokens)


def warn(message):
    if message:
        print(f"solve.py: warning: {message}", file=sys.stderr)


# Input.

def read_arguments(argv):
    """solve.py's settings, the checkpoint, the puzzle, and the config files and flags of the model."""
    s, operands, model_flags = split_arguments(__file__, argv)
    if len(operands) not in (1, 2):
        raise UserError("usage: python scripts/solve.py CHECKPOINT PUZZLE, each a file, or a run's folder "
                        "and the puzzle in a line; see --help")
    checkpoint, puzzle = (*operands, "-")[:2]
    if s.halt_max_steps < 0:
        raise UserError(f"halt_max_steps must be 0 or more, not {s.halt_max_steps}")
    if s.plot and not s.plot.endswith((".png", ".gif")):
        raise UserError(f"--plot={s.plot}: must end in .png or .gif")
    if s.plot and not importlib.util.find_spec("matplotlib"):
        raise UserError("--plot needs matplotlib: pip install matplotlib")
    is_file = puzzle.endswith(CSV_ENDINGS)
    if is_file and (s.steps or s.plot):
        raise UserError("--steps and --plot show one puzzle, not a file of them")
    if s.output and not (is_file and s.output.endswith(".csv")):
        raise UserError(f"--output={s.output}: must end in .csv, and is for the puzzles of a .csv")
    if os.path.lexists(s.output):
        raise UserError(f"--output={s.output}: exists already; choose another name")
    for name in ("plot", "output"):
        if getattr(s, name):
            check_writable(name, getattr(s, name))
    return s, checkpoint, puzzle, model_flags


def split_arguments(script, argv):
    """The settings of a script, its operands, and the config files and flags of train.py, in argv."""
    own, rest = split_flags(script, argv)
    flags = [a for a in rest if a.startswith("-") and a != "-"]
    configs = [a for a in rest if a.endswith(".py") and a not in flags]
    operands = [a for a in rest if a not in flags + configs]
    return configure(script, own), operands, configs + flags


def check_writable(name, path):
    """Raises UserError unless the file that a setting names can be written."""
    is_new = not os.path.lexists(path)
    try:
        open(path, "ab").close()
    except OSError as e:
        raise UserError(f"--{name}={path}: cannot be written ({e.strerror or e})") from None
    if is_new:
        os.remove(path)


def read_puzzle(text):
    """("sudoku" or "maze", cells of a row, tokens [cells]) of a puzzle: its text, its file, or - for stdin.

    Raises UserError.
    """
    if text == "-" or os.path.isfile(text):
        with open(0 if text == "-" else text, encoding="utf-8", errors="replace") as f:
            return parse_puzzle(f.read())
    try:
        return parse_puzzle(text)
    except UserError as e:
        raise UserError(f"{e} (if a file was meant: there is none of that name)") from None


def parse_puzzle(text):
    """As read_puzzle, of the puzzle's text. Does not check that there is a solution."""
    kind = "maze" if set(text) & set("#SG") else "sudoku"
    if kind == "maze":
        lines = text.strip("\r\n").splitlines()
        width = max(map(len, lines))
        cells = "".join(line.ljust(width) for line in lines)  # editors strip spaces at the end of a line
    else:
        cells = "".join(text.split()).replace("0", ".")
    size = math.isqrt(len(cells))
    if kind == "maze":
        size_fits, allowed = size <= prepare_maze.LARGEST, SYMBOLS[kind][1:5]
    else:
        size_fits, allowed = size in prepare_sudoku.BOXES, SYMBOLS[kind][1:size + 2]
    if size * size != len(cells) or not size_fits:
        raise UserError(f"the puzzle {text.strip()[:20]!r} has {len(cells)} cells: a Sudoku has 16, 36 or "
                        "81, a maze as many rows as columns, 64 at most")
    return kind, size, tokens_of(kind, size, cells, allowed, "the puzzle")


def tokens_of(kind, size, cells, allowed, name):
    """The tokens [cells] of a text. Raises UserError for the first symbol that is not allowed."""
    for i, symbol in enumerate(cells):
        if symbol not in allowed:
            raise UserError(f"row {i // size + 1}, column {i % size + 1} of {name} is {symbol!r}: "
                            f"must be one of {allowed!r}")
    return np.array([SYMBOLS[kind].index(symbol, 1) for symbol in cells], dtype=np.int32)


def read_puzzles(path):
    """(kind, size, questions [n, cells], labels [n, cells]) of a CSV file; a label is 0 where there is none.

    Raises UserError, with the line, for the first row that is wrong or has no solution.
    """
    numbered_rows = csv_rows(path)
    _, header = next(numbered_rows, (1, []))
    header = [name.strip() for name in header]
    if "question" not in header:
        raise UserError(f"{path}:1: no column question; the first line must be question, question,answer "
                        "or source,question,answer,rating")
    places, puzzles = [], []
    for line, row in numbered_rows:
        places.append(f"{path}:{line}: ")
        try:
            puzzles.append(parse_row(header, row))
            if puzzles[-1][:2] != puzzles[0][:2]:
                raise UserError("the puzzle is not of the kind and size of the first")
        except UserError as e:
            raise UserError(places[-1] + str(e)) from None
    if not puzzles:
        raise UserError(f"{path}:2: no puzzle under the header")
    kind, size = puzzles[0][:2]
    questions, labels = (np.stack(arrays) for arrays in list(zip(*puzzles))[2:])
    warn(check_questions(kind, size, questions, places))
    is_wrong = (labels[:, 0] > 0) & ~are_solutions(kind, size, questions, labels)
    if is_wrong.any():
        raise UserError(places[int(is_wrong.argmax())] + "the answer is not a solution of the question")
    return kind, size, questions, labels


def parse_row(header, row):
    """(kind, size, question [cells], label [cells], 0 if there is none) of a row. Raises UserError."""
    if len(row) != len(header):
        raise UserError(f"{len(row)} columns, but the header has {len(header)}")
    values = dict(zip(header, row))
    kind, size, question = parse_puzzle(values["question"])
    answer = values.get("answer", "")
    if answer and len(answer) != len(question):
        raise UserError(f"the answer has {len(answer)} characters, not {len(question)}")
    allowed = SYMBOLS[kind][1:] if kind == "maze" else SYMBOLS[kind][2:size + 2]
    label = tokens_of(kind, size, answer, allowed, "the answer") if answer else np.zeros_like(question)
    return kind, size, question, label


def check_questions(kind, size, questions, places):
    """A warning if questions [n, cells] are unlike those of training: ambiguous or nearly empty; else "".

    places: a prefix for each question. Raises UserError for the first question without a solution.
    """
    if kind == "sudoku":
        candidates = prepare_sudoku.candidates_of(questions - 1, size)
        counts = prepare_sudoku.count_solutions(candidates, size, 2)
        unusual, reason = counts > 1, "more than one solution"
    else:
        has_ends = ((questions == START).sum(axis=1) == 1) & ((questions == GOAL).sum(axis=1) == 1)
        counts = has_ends * prepare_maze.solve(questions, size)[1]
        unusual, reason = (questions == WALL).mean(axis=1) < 0.1, "hardly any walls"
    if not counts.all():
        i = int(counts.argmin())
        if kind == "sudoku":
            raise UserError(places[i] + prepare_sudoku.board_error(questions[i] - 1, questions[i] - 1, size))
        if not has_ends[i]:
            raise UserError(f"{places[i]}the maze must have one S and one G")
        raise UserError(f"{places[i]}the maze has no path from S to G")
    if not unusual.any():
        return ""
    given = (questions != OPEN).sum(axis=1) if kind == "maze" else (questions > 1).sum(axis=1)
    i = int(unusual.argmax())
    others = f" (as have {unusual.sum() - 1} others)" if unusual.sum() > 1 else ""
    cells = f"{given[i]} of {size * size} cells are given"
    return f"{places[i]}the puzzle has {reason}{others}, unlike those of training: {cells}"


def read_model(path, flags):
    """The state in the checkpoint at path, a file or a run's folder, and its settings.

    flags: config files and flags of train.py, over the settings in the checkpoint. Raises UserError.
    """
    state = read_state(path)
    groups = {name: group for name, (_, _, group) in read_settings(train.__file__).items()}
    saved = {name: value for name, value in state.get("settings", {}).items()
             if groups.get(name) not in (None, "run", "logging")}
    c = configure(train.__file__, [f"--{name}={value}" for name, value in saved.items()] + flags)
    c.global_batch_size = 1
    c.micro_batch_size = 0
    c.eval_patience = 0  # every step is shown
    c.out_dir = tempfile.gettempdir()  # nothing is written
    train.check_settings(c)
    return state, c


def build_run(state, c, path, kind, size):
    """The model in a checkpoint's state as a train.Run. Raises UserError unless it is one of such puzzles."""
    vocab_size = len(SYMBOLS["maze"]) if kind == "maze" else size + 2
    own_vocab_size = rows_of(state, "lm_head.weight") or vocab_size
    if own_vocab_size != vocab_size:
        raise UserError(f"{path} is not a model of {size}x{size} {kind}s: "
                        f"it knows {own_vocab_size} tokens, not {vocab_size}")
    identifiers = rows_of(state, "puzzle_emb.weights") or 1
    sizes = dict(seq_len=size * size, vocab_size=vocab_size, num_puzzle_identifiers=identifiers)
    model = train.new_model(c, **sizes)
    length = model_length(state) or model.length
    if length != model.length:
        raise UserError(f"{path} is not a model of {size}x{size} {kind}s: "
                        f"it takes {length - model.prefix} cells, not {size * size}")
    train.load_weights(model, state["weights"], path)
    averaged = {"ema": state["ema"]} if "ema" in state else {}
    return train.Run(model, c, train.open_device("cpu", c), averaged)


def model_length(state):
    """Positions of the model in a checkpoint's state: cells and puzzle embedding; 0: it takes any number."""
    return rows_of(state, "layers.0.mlp_t.down_proj.weight") or rows_of(state, "embed_pos.embedding_weight")


def read_state(path):
    """The state in a checkpoint, or in the newest of a run's folder. Raises UserError."""
    if not os.path.exists(path):
        raise UserError(f"{path}: no such checkpoint or folder")
    if not os.path.isdir(path):
        return train.read_checkpoint(path)

    def print_skipped(note):
        if note.startswith("skipped"):
            print(note, file=sys.stderr)

    state = train.newest_checkpoint(path, print_skipped)
    if not state:
        raise UserError(f"{path}: no complete checkpoint (ckpt_*.pt with its .json) in it")
    return state


def rows_of(state, name):
    """Rows of the weight whose name ends so; 0 if there is none."""
    return next((len(t) for key, t in state["weights"].items() if key.endswith(name)), 0)


# Pictures.

def draw_picture(path, kind, size, question, grids):
    """Draws the grids, (title, tokens, broken cells) each, side by side."""
    columns = min(PANELS_IN_A_ROW, len(grids))
    fig, axes = new_figure(size, math.ceil(len(grids) / columns), columns)
    for ax, grid in zip(axes, grids):
        draw_grid(ax, kind, size, question, *grid)
    for ax in axes[len(grids):]:
        ax.axis("off")
    fig.savefig(path, dpi=120)


def draw_animation(path, kind, size, question, grids):
    """Draws the grids, (title, tokens, broken cells) each, as the frames of a .gif."""
    fig, (ax,) = new_figure(size, 1, 1)
    from matplotlib.animation import PillowWriter
    writer = PillowWriter(fps=2)
    with writer.saving(fig, path, dpi=160):
        for grid in grids:
            ax.clear()
            draw_grid(ax, kind, size, question, *grid)
            writer.grab_frame()


def draw_grid(ax, kind, size, question, title, tokens, broken):
    """Draws a grid: givens bold on grey, answers plain on white (a path on grey), broken cells on black."""
    maze = kind == "maze"
    given = question != OPEN if maze else question > 1
    shades = np.full(len(tokens), 1.0)
    shades[given] = 0.88
    if maze:
        shades[tokens == PATH] = 0.75
        shades[tokens == WALL] = 0.3
    shades[broken] = 0
    ax.imshow(shades.reshape(size, size), cmap="gray", vmin=0, vmax=1)
    for i, token in enumerate(tokens):
        ax.text(i % size, i // size, SYMBOLS[kind][token].strip("# ."), ha="center", va="center",
                color="white" if broken[i] else "black", fontsize=max(6, 120 / size),
                fontweight="bold" if given[i] else "normal")
    box_rows, box_columns = (size, size) if maze else prepare_sudoku.BOXES[size]
    for k in range(size + 1):
        ax.axhline(k - 0.5, color="black", linewidth=0.2 if k % box_rows else 1.5)
        ax.axvline(k - 0.5, color="black", linewidth=0.2 if k % box_columns else 1.5)
    ax.set(title=title, xticks=[], yticks=[])


def new_figure(size, rows, columns):
    """A figure and its axes [rows * columns] for grids with `size` cells in a row."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    inches = max(3, size / 6)
    fig, axes = plt.subplots(rows, columns, squeeze=False, layout="constrained",
                             figsize=(inches * columns, (inches + 0.3) * rows))
    fig.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
    return fig, axes.flatten()


if __name__ == "__main__":
    command(lambda: main(sys.argv[1:]), __file__)
