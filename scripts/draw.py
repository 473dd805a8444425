"""Draws boards: as text, side by side, or as a .png or a .gif."""
import numpy as np

from runtime.errors import UserError, writing


def side_by_side(kind, grids):
    """Returns a string: grids next to each other, as many as 120 characters hold.

    grids: list of (title, tokens [cells], which cells to mark with * [cells]).
    """
    # write the lines of each grid below its title
    blocks = []
    for title, tokens, marked in grids:
        cells = [" *"[int(mark)] + kind.symbols[token] + " " for token, mark in zip(tokens, marked)]
        lines = np.reshape(cells, kind.grid)
        blocks.append([title, *map("".join, lines)])

    # put as many blocks beside each other as fit
    width = max(len(line) for block in blocks for line in block) + 2
    blocks_per_line = max(1, 120 // width)
    text = ""
    for first in range(0, len(blocks), blocks_per_line):
        for lines in zip(*blocks[first:first + blocks_per_line]):
            line = "".join(part.ljust(width) for part in lines)
            text += line.rstrip() + "\n"
        text += "\n"
    return text


def draw(path, kind, question, grids):
    """Draws grids, (title, tokens [cells], broken cells [cells]), as the frames of a .gif; or one as a .png.

    What the question gives is on gray, what breaks a rule on red.
    """
    try:
        from matplotlib.animation import FuncAnimation
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install matplotlib") from None
    rows, columns = kind.grid
    box_rows, box_columns = kind.box
    ax = Figure((4, 4), layout="constrained").add_subplot()

    def draw_grid(grid):
        # a frame replaces the one before
        title, tokens, broken = grid
        ax.clear()
        ax.set(title=title, xlim=(0, columns), ylim=(rows, 0), aspect="equal")
        ax.set_axis_off()
        # the cells
        symbols = list(kind.text(tokens).replace(".", " "))
        colors = np.select([broken, question != kind.empty], ["salmon", "lightgray"], "white")
        table = ax.table(
            cellText=np.reshape(symbols, kind.grid),
            cellColours=np.reshape(colors, kind.grid),
            cellLoc="center",
            bbox=[0, 0, 1, 1],
        )
        table.set_fontsize(140 / columns)
        # the lines between boxes
        ax.hlines(range(0, rows + 1, box_rows), 0, columns, "black", linewidth=3)
        ax.vlines(range(0, columns + 1, box_columns), 0, rows, "black", linewidth=3)

    with writing(path):
        FuncAnimation(ax.figure, draw_grid, grids).save(path, "pillow", fps=2)
