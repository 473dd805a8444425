"""Solves a puzzle with a trained model.

    python scripts/solve.py out/demo 2.....4...6.....156....2..3.5.......     the newest checkpoint of a run
    python scripts/solve.py out/maze/best.pt maze.txt --steps --halt_max_steps=64
    python scripts/solve.py official_checkpoint config/sudoku.py puzzle.txt --plot=answer.gif

The puzzle is a line, a file, or (left out, or -) stdin: a Sudoku in digits with . or 0 for an empty cell, or a maze of "# SG" (wall, open,
start, goal), in one line or in several. Settings of the model are in our checkpoints; an official one needs those that differ from
train.py's, as config files or flags. The model runs on the CPU, as its evaluation does: averaged weights, forward_dtype, full depth.
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

# what is shown
steps = False  # the answer after supervision steps 1, 2, 4, ..., and how sure the halting head is of each
plot = ""  # the same as a picture: FILE.png, or FILE.gif with a frame for each step
halt_max_steps = 0  # supervision steps; 0: as many as in the run's evaluation; more than in training may solve more
# ---

SYMBOLS = {"sudoku": " .123456789", "maze": " " + prepare_maze.SYMBOLS}


def read_puzzle(given):
    """("sudoku" or "maze", cells of a row, tokens [cells]) of a puzzle as it was given. Raises UserError for one that has no answer."""
    text = given
    if given == "-" or os.path.isfile(given):
        with open(0 if given == "-" else given, encoding="utf-8", errors="replace") as f:
            text = f.read()
    lines = text.strip("\r\n").splitlines()
    kind = "maze" if set(text) & set("#SG") else "sudoku"
    width = max(map(len, lines), default=0)  # editors strip the open cells at the end of a line
    cells = "".join(line.ljust(width) for line in lines) if kind == "maze" else "".join(text.split()).replace("0", ".")
    size = math.isqrt(len(cells))
    if size * size != len(cells) or (size not in prepare_sudoku.BOXES if kind == "sudoku" else size > prepare_maze.LARGEST):
        raise UserError(f"the puzzle {text.strip()[:20]!r} has {len(cells)} cells: a Sudoku has 16, 36 or 81, a maze as many rows as columns, "
                        "64 at most (if a file was meant: there is none of that name)")
    known = SYMBOLS[kind][1:5] if kind == "maze" else SYMBOLS[kind][1:size + 2]
    for i, symbol in enumerate(cells):
        if symbol not in known:
            raise UserError(f"row {i // size + 1}, column {i % size + 1} of the puzzle is {symbol!r}: must be one of {known!r}")
    tokens = np.array([SYMBOLS[kind].index(symbol, 1) for symbol in cells], dtype=np.int32)
    if kind == "maze":
        if (tokens == START).sum() != 1 or (tokens == GOAL).sum() != 1:
            raise UserError("the maze must have one S and one G")
        if not prepare_maze.solve(tokens[None], size)[1][0]:
            raise UserError("the maze has no path from S to G")
    elif not prepare_sudoku.count_solutions(prepare_sudoku.candidates_of(tokens[None] - 1, size), size, 1)[0]:
        raise UserError(prepare_sudoku.board_fault(tokens - 1, tokens - 1, size))
    return kind, size, tokens


def read_model(path, flags, kind, size):
    """The checkpoint at path, a file or a run's folder, as a train.Run for one puzzle, and the step it was saved at. Raises UserError."""
    if os.path.isdir(path):
        state = train.newest_checkpoint(path, lambda note: note.startswith("skipped") and print(note, file=sys.stderr))
    elif os.path.exists(path):
        state = train.read_checkpoint(path)
    else:
        raise UserError(f"{path}: no such checkpoint or folder")
    if not state:
        raise UserError(f"{path}: no complete checkpoint (ckpt_*.pt with its .json) in it")
    own = [k for k, (_, _, part) in read_settings(train.__file__).items() if part not in ("run", "logging")]  # what makes the model
    c = configure(train.__file__, [f"--{k}={v}" for k, v in state.get("settings", {}).items() if k in own] + flags)
    c.out_dir = tempfile.gettempdir()  # nothing is written
    train.check_settings(c)
    rows = lambda name: next((len(t) for k, t in state["weights"].items() if k.endswith(name)), 0)
    tokens = len(SYMBOLS["maze"]) if kind == "maze" else size + 2
    if rows("lm_head.weight") not in (0, tokens):
        raise UserError(f"{path} is not a model of {size}x{size} {kind}s: it knows {rows('lm_head.weight')} tokens, not {tokens}")
    try:
        config = train.TRMConfig.of(c, seq_len=size * size, vocab_size=tokens, num_puzzle_identifiers=rows("puzzle_emb.weights") or 1)
        model = train.TRM(config)
    except ValueError as e:
        raise UserError(str(e)) from None
    length = rows("layers.0.mlp_t.down_proj.weight") or rows("embed_pos.embedding_weight")
    if length not in (0, model.length):
        raise UserError(f"{path} is not a model of {size}x{size} {kind}s: it takes {length - model.prefix} cells, not {size * size}")
    train.load_weights(model, state["weights"], path)
    c.global_batch_size, c.micro_batch_size = 1, 0
    return train.Run(model, c, train.Device("cpu"), {k: v for k, v in state.items() if k == "ema"}), state.get("step", 0)


def solve(run, question):
    """[(answer [cells], how sure, 0 to 1)] after each supervision step, to the depth of run's evaluation."""
    batch = dict(inputs=question[None], labels=np.full_like(question[None], IGNORED), puzzle_identifiers=np.zeros(1, dtype=np.int32))
    state, answers = run.new_evaluation(), []
    for _ in range(run.eval_depth):
        answer, q_halt = run.eval_step(state, run.device.put(batch))
        answers.append((answer[0].numpy(), float(q_halt.sigmoid())))
    return answers


def broken(kind, size, question, answer):
    """Which cells [cells] break a rule by themselves: a digit twice in a unit, a given changed, a wall in the path."""
    if kind == "maze":
        return (answer != question) & ~((question == OPEN) & (answer == PATH))
    row, column = np.divmod(np.arange(size * size), size)
    rows, columns = prepare_sudoku.BOXES[size]
    shared = sum(unit[:, None] == unit for unit in (row, column, row // rows * size + column // columns)) > 0
    twice = (shared & ~np.eye(len(row), dtype=bool) & (answer[:, None] == answer)).any(axis=1)
    return twice | (answer < 2) | ((question > 1) & (answer != question))


def verdict(kind, size, question, answer):
    """Whether the answer is a solution, in words."""
    if kind == "sudoku":
        wrong = broken(kind, size, question, answer)
        return f"not a solution: {wrong.sum()} cells break a rule" if wrong.any() else "a solution: every row, column and box, and all givens kept"
    shortest, steps = prepare_maze.solve(question[None], size)
    valid, optimal = path_metrics(question[None], shortest, answer[None], (size, size))
    taken = (answer == PATH).sum() + 1
    if not valid[0]:
        return "not a path from S to G"
    return f"a shortest path, {taken} steps" if optimal[0] else f"a path of {taken} steps; the shortest has {steps[0]}"


def draw(ax, kind, size, question, tokens, wrong, title):
    """A grid on ax: what was given bold on grey, the model's own plain on white (a path on grey), `wrong` cells white on black, walls dark."""
    given = (question != OPEN) if kind == "maze" else (question > 1)
    maze = kind == "maze"
    shades = np.select([wrong, maze & (tokens == WALL), maze & (tokens == PATH), given], [0.0, 0.3, 0.75, 0.88], 1.0)
    ax.imshow(shades.reshape(size, size), cmap="gray", vmin=0, vmax=1)
    for i, token in enumerate(tokens):
        ax.text(i % size, i // size, SYMBOLS[kind][token].strip("# ."), color="white" if wrong[i] else "black", ha="center", va="center",
                fontsize=max(6, 120 / size), fontweight="bold" if given[i] else "normal")
    rows, columns = prepare_sudoku.BOXES.get(size, (size, size)) if kind == "sudoku" else (size, size)
    for k in range(size + 1):
        ax.axhline(k - 0.5, color="black", linewidth=0.2 if k % rows else 1.5)
        ax.axvline(k - 0.5, color="black", linewidth=0.2 if k % columns else 1.5)
    ax.set(title=title, xticks=[], yticks=[])


def picture(path, kind, size, question, grids):
    """Draws the grids (title, tokens, wrong) side by side into path, a .png, or one after the other, a .gif. Raises UserError."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.animation import PillowWriter
    across, down = (1, 1) if path.endswith(".gif") else (min(4, len(grids)), -(-len(grids) // 4))
    inches = max(3, size / 6)
    fig, axes = plt.subplots(down, across, squeeze=False, layout="constrained", figsize=(inches * across, (inches + 0.3) * down))
    fig.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
    try:
        if path.endswith(".gif"):
            writer = PillowWriter(fps=2)
            with writer.saving(fig, path, dpi=100):
                for title, *grid in grids + grids[-1:] * 3:  # the last one stays for a while
                    axes[0, 0].clear()
                    draw(axes[0, 0], kind, size, question, *grid, title)
                    writer.grab_frame()
            return
        for ax, (title, *grid) in zip(axes.flat, grids):
            draw(ax, kind, size, question, *grid, title)
        for ax in axes.flat[len(grids):]:
            ax.axis("off")
        fig.savefig(path, dpi=120)
    except OSError as e:
        raise UserError(f"--plot={path}: cannot be written ({e.strerror or e})") from None


def main(argv):
    """Solves the puzzle and prints question, answer and whether it is a solution."""
    own = read_settings(__file__)
    flags = [a for a in argv if a.startswith("-") and a != "-"]
    mine = [a for a in flags if a.lstrip("-").partition("=")[0] in (*own, "help", "h")]
    s = configure(__file__, mine)
    configs = [a for a in argv if a.endswith(".py")]
    operands = [a for a in argv if a not in flags and a not in configs]
    if len(operands) not in (1, 2):
        raise UserError("write: python scripts/solve.py CHECKPOINT PUZZLE, a file or a run's folder, and a line or a file; --help tells more")
    if s.halt_max_steps < 0:
        raise UserError(f"halt_max_steps must be 0 or more, not {s.halt_max_steps}")
    if s.plot and not s.plot.endswith((".png", ".gif")):
        raise UserError(f"--plot={s.plot}: must end in .png or .gif")
    if s.plot and not importlib.util.find_spec("matplotlib"):
        raise UserError("--plot needs matplotlib: pip install matplotlib")
    kind, size, question = read_puzzle(*operands[1:] or "-")
    run, step = read_model(operands[0], configs + [a for a in flags if a not in mine], kind, size)
    run.eval_depth = s.halt_max_steps or run.eval_depth
    answers = solve(run, question)
    grids = [("question", question, np.zeros(len(question), dtype=bool))]
    for n, (answer, sure) in enumerate(answers, 1):
        grids.append((f"step {n}: {sure:.0%} sure", answer, broken(kind, size, question, answer)))
    chosen = [n for n in range(len(grids)) if n & (n - 1) == 0 or n == len(answers)]  # the question, 1, 2, 4, ...
    print(train.side_by_side([grids[n] for n in (chosen if s.steps else (0, len(answers)))], SYMBOLS[kind], size, size))
    answer, sure = answers[-1]
    print("".join(SYMBOLS[kind][t] for t in answer))
    print(f"{verdict(kind, size, question, answer)} (after {len(answers)} supervision steps, {sure:.0%} sure; {operands[0]}, training step {step})")
    if s.plot:
        picture(s.plot, kind, size, question, grids if s.plot.endswith(".gif") else [grids[n] for n in chosen])
        print(f"wrote {s.plot}")


if __name__ == "__main__":
    command(lambda: main(sys.argv[1:]), __file__)
