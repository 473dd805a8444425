"""Solves a puzzle with a trained model.

    python scripts/solve.py out/demo 2.....4...6.....156....2..3.5.......     the newest checkpoint of a run
    python scripts/solve.py out/maze/best.pt maze.txt --steps --halt_max_steps=64
    python scripts/solve.py official_checkpoint config/sudoku.py puzzle.txt --plot=answer.gif

The puzzle is a line, a file, or stdin (if left out, or -). It is a Sudoku in digits with . or 0 for an empty
cell, or a maze of "# SG" (wall, open, start, goal), in one line or in several. Our checkpoints contain the
settings of the model. An official checkpoint needs those that differ from train.py's, as config files or
flags. The model runs on the CPU as in train.py's evaluation: averaged weights, forward_dtype, full depth.
"""
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
from configurator import UserError, command, configure, read_settings  # noqa: E402
from data import GOAL, IGNORED, OPEN, PATH, START, WALL, path_metrics  # noqa: E402

# output
steps = False  # show the answers after supervision steps 1, 2, 4, ..., and how sure the halting head is
plot = ""  # draw the same: FILE.png, or FILE.gif with a frame for each step
halt_max_steps = 0  # supervision steps; 0: those of the run's evaluation; more may solve more
# ---

SYMBOLS = {"sudoku": " .123456789", "maze": " " + prepare_maze.SYMBOLS}  # by token


def main(argv):
    """Solves the puzzle; prints the question, the answer and whether it is a solution."""
    s, checkpoint, puzzle, model_flags = read_arguments(argv)
    kind, size, question = read_puzzle(puzzle)
    run, training_step = read_model(checkpoint, model_flags, kind, size)
    run.eval_depth = s.halt_max_steps or run.eval_depth
    answers = solve(run, question)

    grids = [("question", question, np.zeros(len(question), dtype=bool))]
    for n, (answer, sure) in enumerate(answers, 1):
        grids.append((f"step {n}: {sure:.0%} sure", answer, broken_cells(kind, size, question, answer)))
    powers = [grids[n] for n in range(len(answers)) if n & (n - 1) == 0]  # steps 0, 1, 2, 4, ...
    selected = powers + grids[-1:]
    shown = selected if s.steps else [grids[0], grids[-1]]
    print(train.side_by_side(shown, SYMBOLS[kind], size, size))
    answer, sure = answers[-1]
    print("".join(SYMBOLS[kind][token] for token in answer))
    print(f"{verdict(kind, size, question, answer)} (after {len(answers)} supervision steps, "
          f"{sure:.0%} sure; {checkpoint}, training step {training_step})")
    if s.plot.endswith(".gif"):
        draw_animation(s.plot, kind, size, question, grids)
    elif s.plot:
        draw_picture(s.plot, kind, size, question, selected)
    if s.plot:
        print(f"wrote {s.plot}")


def solve(run, question):
    """[(answer [cells], how sure, 0 to 1)] after each supervision step, to the depth of run's evaluation."""
    batch = dict(
        inputs=question[None],
        labels=np.full_like(question[None], IGNORED),
        puzzle_identifiers=np.zeros(1, dtype=np.int32))
    inputs = run.eval_inputs(batch)
    state = run.new_evaluation()
    answers = []
    for _ in range(run.eval_depth):
        answer, q_halt = run.eval_program(state, inputs)
        answers.append((answer[0].numpy(), float(q_halt[0].sigmoid())))
    return answers


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


def broken_cells(kind, size, question, answer):
    """Which cells [cells] break a rule: a digit twice in a unit, a changed given, a wall in the path."""
    if kind == "maze":
        return (answer != question) & ~((question == OPEN) & (answer == PATH))
    box_rows, box_columns = prepare_sudoku.BOXES[size]
    row, column = np.divmod(np.arange(size * size), size)
    box = row // box_rows * box_rows + column // box_columns
    in_one_unit = np.zeros((size * size, size * size), dtype=bool)
    for unit in (row, column, box):
        in_one_unit |= unit[:, None] == unit
    np.fill_diagonal(in_one_unit, False)
    repeated = (in_one_unit & (answer[:, None] == answer)).any(axis=1)
    return repeated | (answer < 2) | ((question > 1) & (answer != question))


# Input.

def read_arguments(argv):
    """solve.py's settings, the checkpoint, the puzzle, and the config files and flags of the model."""
    own = (*read_settings(__file__), "help", "h")
    flags = [a for a in argv if a.startswith("-") and a != "-"]
    own_flags = [a for a in flags if a.lstrip("-").partition("=")[0] in own]
    configs = [a for a in argv if a.endswith(".py") and a not in flags]
    operands = [a for a in argv if a not in flags and a not in configs]
    s = configure(__file__, own_flags)
    if len(operands) not in (1, 2):
        raise UserError("usage: python scripts/solve.py CHECKPOINT PUZZLE, each a file, or a run's folder "
                        "and the puzzle in a line; see --help")
    if s.halt_max_steps < 0:
        raise UserError(f"halt_max_steps must be 0 or more, not {s.halt_max_steps}")
    if s.plot and not s.plot.endswith((".png", ".gif")):
        raise UserError(f"--plot={s.plot}: must end in .png or .gif")
    if s.plot and not importlib.util.find_spec("matplotlib"):
        raise UserError("--plot needs matplotlib: pip install matplotlib")
    checkpoint, puzzle = (*operands, "-")[:2]
    return s, checkpoint, puzzle, configs + [a for a in flags if a not in own_flags]


def read_puzzle(text):
    """("sudoku" or "maze", cells of a row, tokens [cells]) of a puzzle: its text, its file, or - for stdin.

    Raises UserError for one that has no solution.
    """
    if text == "-" or os.path.isfile(text):
        with open(0 if text == "-" else text, encoding="utf-8", errors="replace") as f:
            text = f.read()
    kind = "maze" if set(text) & set("#SG") else "sudoku"
    if kind == "maze":
        lines = text.strip("\r\n").splitlines()
        width = max(map(len, lines))
        cells = "".join(line.ljust(width) for line in lines)  # editors strip spaces at the end of a line
    else:
        cells = "".join(text.split()).replace("0", ".")
    size = math.isqrt(len(cells))
    size_fits = size <= prepare_maze.LARGEST if kind == "maze" else size in prepare_sudoku.BOXES
    if size * size != len(cells) or not size_fits:
        raise UserError(f"the puzzle {text.strip()[:20]!r} has {len(cells)} cells: a Sudoku has 16, 36 or "
                        "81, a maze as many rows as columns, 64 at most "
                        "(if a file was meant: there is none of that name)")
    allowed = SYMBOLS[kind][1:5] if kind == "maze" else SYMBOLS[kind][1:size + 2]
    for i, symbol in enumerate(cells):
        if symbol not in allowed:
            raise UserError(f"row {i // size + 1}, column {i % size + 1} of the puzzle is {symbol!r}: "
                            f"must be one of {allowed!r}")
    tokens = np.array([SYMBOLS[kind].index(symbol, 1) for symbol in cells], dtype=np.int32)
    check_solvable(kind, size, tokens)
    return kind, size, tokens


def check_solvable(kind, size, tokens):
    """Raises UserError for a puzzle [cells] without a solution."""
    if kind == "sudoku":
        candidates = prepare_sudoku.candidates_of(tokens[None] - 1, size)
        if not prepare_sudoku.count_solutions(candidates, size, 1)[0]:
            raise UserError(prepare_sudoku.board_error(tokens - 1, tokens - 1, size))
        return
    if (tokens == START).sum() != 1 or (tokens == GOAL).sum() != 1:
        raise UserError("the maze must have one S and one G")
    if not prepare_maze.solve(tokens[None], size)[1][0]:
        raise UserError("the maze has no path from S to G")


def read_model(path, flags, kind, size):
    """The checkpoint at path, a file or a run's folder, as a train.Run for one puzzle, and its training step.

    flags: config files and flags of train.py, over the settings in the checkpoint. Raises UserError.
    """
    state = read_state(path)
    groups = {name: group for name, (_, _, group) in read_settings(train.__file__).items()}
    saved = {name: value for name, value in state.get("settings", {}).items()
             if groups.get(name) not in (None, "run", "logging")}
    c = configure(train.__file__, [f"--{name}={value}" for name, value in saved.items()] + flags)
    c.global_batch_size = 1
    c.micro_batch_size = 0
    c.out_dir = tempfile.gettempdir()  # nothing is written
    train.check_settings(c)

    vocab_size = len(SYMBOLS["maze"]) if kind == "maze" else size + 2
    own_vocab_size = rows_of(state, "lm_head.weight") or vocab_size
    if own_vocab_size != vocab_size:
        raise UserError(f"{path} is not a model of {size}x{size} {kind}s: "
                        f"it knows {own_vocab_size} tokens, not {vocab_size}")
    identifiers = rows_of(state, "puzzle_emb.weights") or 1
    try:
        model = train.TRM(train.TRMConfig.of(c, seq_len=size * size, vocab_size=vocab_size,
                                             num_puzzle_identifiers=identifiers))
    except ValueError as e:
        raise UserError(str(e)) from None
    length = rows_of(state, "layers.0.mlp_t.down_proj.weight")
    length = length or rows_of(state, "embed_pos.embedding_weight") or model.length
    if length != model.length:
        raise UserError(f"{path} is not a model of {size}x{size} {kind}s: "
                        f"it takes {length - model.prefix} cells, not {size * size}")
    train.load_weights(model, state["weights"], path)
    averaged = {name: state[name] for name in ("ema",) if name in state}
    return train.Run(model, c, train.open_device("cpu", c), averaged), state.get("step", 0)


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
    """Draws the grids, (title, tokens, broken cells) each, side by side. Raises UserError."""
    columns = min(4, len(grids))
    fig, axes = new_figure(size, math.ceil(len(grids) / columns), columns)
    for ax, grid in zip(axes, grids):
        draw_grid(ax, kind, size, question, *grid)
    for ax in axes[len(grids):]:
        ax.axis("off")
    try:
        fig.savefig(path, dpi=120)
    except OSError as e:
        raise cannot_write(path, e) from None


def draw_animation(path, kind, size, question, grids):
    """Draws the grids, (title, tokens, broken cells) each, as the frames of a .gif. Raises UserError."""
    fig, (ax,) = new_figure(size, 1, 1)
    from matplotlib.animation import PillowWriter
    writer = PillowWriter(fps=2)
    try:
        with writer.saving(fig, path, dpi=100):
            for grid in grids + grids[-1:] * 3:  # the last one stays for a while
                ax.clear()
                draw_grid(ax, kind, size, question, *grid)
                writer.grab_frame()
    except OSError as e:
        raise cannot_write(path, e) from None


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


def cannot_write(path, error):
    return UserError(f"--plot={path}: cannot be written ({error.strerror or error})")


if __name__ == "__main__":
    command(lambda: main(sys.argv[1:]), __file__)
