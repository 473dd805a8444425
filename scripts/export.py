"""Makes a model file, or a web page that solves puzzles, from a run, a checkpoint or an official checkpoint.

    python scripts/export.py out/demo model.pt              the newest checkpoint of a run
    python scripts/export.py out/demo/best.pt model.pt      this checkpoint
    python scripts/export.py official.pt model.pt config/sudoku.py --data_path=data/NAME
    python scripts/export.py out/demo sudoku.html           a web page with this model, in one file
    python scripts/export.py a.pt b.pt demo.html            the same with several models

weights.load_model, solve.py, play.py and train.py's init_from take the file. The official code takes its
"weights", which are what an evaluation computes with: averaged, and in forward_dtype. The checkpoint of a
run has the settings, sizes, task and 100 test puzzles. For an official checkpoint they come from config
files, flags and the dataset.

A .html file solves puzzles in any browser, without a server and offline; play.py opens one. In it, engine.js
takes the place of model.py, and game.js of puzzles/. It has the rules of Sudokus and mazes; answers to other
puzzles are compared with the known answer, if there is one. The file cannot have models for ARC, models with
several puzzle identifiers, or models whose network a fork changes, but for examples/houses.py. The weights
are stored in bfloat16 if this changes none of them, else in float32.
"""
import base64
import json
import re
import runpy
from pathlib import Path

import solve
import torch

import evaluate
import model
import train
import weights
from configurator import configure, split_arguments
from data import load
from puzzles import kind_of
from puzzles.download import local_dataset
from runtime.checkpoint import some_puzzles
from runtime.errors import UserError, writing
from runtime.files import replacing
from runtime.process import command
from runtime.saved import load_weights, missing_forks, read_checkpoint


class Settings:
    """All settings are train.py's."""


HOUSES = str(weights.EXAMPLES / "houses.py")
PREFIX = "_orig_mod.model.inner."  # the beginning of the official names of weights
# the settings that engine.js reads
NETWORK = "hidden_size", "num_heads", "L_layers", "H_cycles", "L_cycles", "mlp_t", "pos_encodings"
# the weights that it reads
WEIGHTS = re.compile(
    r"(embed_tokens|embed_pos)\.embedding_weight|puzzle_emb\.weights|lm_head\.weight|q_head\.(weight|bias)"
    r"|[HL]_init|L_level\.layers\.\d+\.(mlp|mlp_t|self_attn)\.(gate_up|down|qkv|o)_proj\.weight")


def main(argv):
    """Writes the file."""
    _, operands, train_arguments = split_arguments(Settings, argv)
    *paths, target = operands or [""]
    is_page = target.lower().endswith(".html")
    if not paths or len(paths) > 1 and not is_page:
        raise UserError("usage: python scripts/export.py MODEL FILE, or MODEL ... FILE.html; "
                        "MODEL is a run's folder or a checkpoint")
    solve.check_new_file(target)
    if is_page:
        write_page(paths, target, train_arguments)
    else:
        write_model(paths[0], target, train_arguments)


# ---------------------------------------------------------------------------------------------------------
# A model file

def write_model(source, target, train_arguments):
    """Writes a model file from `source`, a run's folder or a checkpoint. Raises UserError."""
    path = solve.file_of(source)
    saved = read_checkpoint(path)

    # the settings of the training, unless this command says otherwise
    settings = configure(train.Settings, train_arguments)
    train.check_start_settings(settings)
    recipe = train.recipe(saved.get("settings", {}))
    settings.fill(recipe)
    if "test_puzzles" not in saved:
        saved = add_dataset(saved, settings, path)
    for name in train.RUN_SETTINGS:
        delattr(settings, name)
    if settings.forward_dtype == "auto":  # each device chooses its own
        settings.forward_dtype = "float32"

    # leave out what only training needs: the optimizer and the raw weights
    dtype = getattr(torch, settings.forward_dtype)
    averaged = saved["weights"] | saved.get("ema", {})
    content = {
        name: saved[name]
        for name in ("sizes", "task", "data_sha256", "identifiers_sha256", "test_puzzles", "step", "forks")
    }
    content |= dict(
        weights={PREFIX + name.removeprefix(PREFIX): t.to(dtype) for name, t in averaged.items()},
        settings=recipe | vars(settings),  # a copy of train.py may have more
        command=f"python train.py {settings.flags()}",
    )
    # a file that is interrupted leaves nothing
    with writing(target), replacing(target) as f:
        torch.save(content, f)
    print(f"wrote {target}, weights in {settings.forward_dtype}")


def add_dataset(saved, settings, path):
    """Returns the content of an official file, or of a checkpoint without puzzles, with what it lacks.

    path: the file. Raises UserError if it and the dataset do not fit together.
    """
    # the model has the dataset's sizes, and the weights' names without the official code's prefixes
    train_set, test_set = load(local_dataset(settings.data_path))
    trm = train.new_model(settings, train_set)
    if load_weights(trm, saved["weights"]):
        raise UserError(f"{path} has other puzzle identifiers than {train_set.path}")
    added = dict(
        sizes=trm.sizes,
        task=train_set.task,
        data_sha256=train_set.sha256,
        identifiers_sha256=train_set.identifiers_sha256,
        test_puzzles=some_puzzles(test_set),
        step=0,
        forks={},
    )
    return added | saved | dict(weights=trm.state_dict())


# ---------------------------------------------------------------------------------------------------------
# A page in one file

def write_page(paths, target, train_arguments):
    """Writes play.html with the models at these paths, engine.js and game.js. Raises UserError."""
    # the models, first those without a fork: one that has run cannot be undone
    in_order = sorted(paths, key=lambda path: len(weights.own_forks(solve.file_of(path))))
    contents = {path: page_content(path, train_arguments) for path in in_order}
    # then the programs of the worker; "<" could end the element in which the page finds them
    data = json.dumps([contents[path] for path in paths]).replace("<", "\\u003c")
    page, engine, game = (
        Path(__file__).with_name(name).read_text("utf-8")
        for name in ("play.html", "engine.js", "game.js"))
    program = f"{engine}const MODELS = {data};\n{game}"
    element = f'<script id="worker" type="text/plain">\n{program}</script>\n'
    page = page.replace("<script>", element + "<script>", 1)

    # a file that is interrupted leaves nothing
    with writing(target), replacing(target) as f:
        f.write(page.encode())
    print(f"wrote {target}, {len(page) / 1e6:.1f} MB: open it in a browser")


def page_content(path, train_arguments):
    """Returns what game.js knows of a model, a dict for JSON. Args: see solve.load. Raises UserError."""
    trm, settings = solve.load(path, train_arguments)
    problem = problem_of(trm, settings, weights.own_forks(solve.file_of(path)))
    if problem:
        raise UserError(f"{path}: {problem}: a page cannot compute it, scripts/solve.py can")
    kind = kind_of(trm.task)

    # the test puzzles as text
    puzzles = []
    for question, answer in zip(trm.test_puzzles["inputs"], trm.test_puzzles["labels"]):
        # several answers may be right, or the known one may leave out cells
        has_one_answer = (answer > 0).all() and not kind.has_several_answers
        puzzles.append({
            "question": kind.text(question),
            "answer": kind.text(answer) if has_one_answer else None,
        })

    # each weight as a matrix: its rows, its columns and its numbers
    matrices = {}
    for name, t in trm.state_dict().items():
        matrices[name] = [*t.reshape(-1, t.shape[-1]).shape, base64_of(t)]
    network = {name: getattr(trm.settings, name) for name in NETWORK}
    run = {
        "path": Path(path).absolute().name,
        "kind": kind.task["kind"],
        "grid": kind.grid,
        "symbols": kind.symbols[1:],
        "depth": settings.eval_halt_max_steps or settings.halt_max_steps,
        "attempts": settings.eval_attempts,
        # a TRM's page shows all steps; a model that fits every size says when an answer is final
        "patience": settings.eval_patience if weights.fits_every_size(trm) else 0,
        "sure": evaluate.SURE,
        "parameters": trm.num_parameters(),
        "training_step": trm.step,
    }
    return dict(
        run=run,
        tasks=[kind.task for kind in weights.fitting_kinds(trm)],
        puzzles=puzzles,
        settings=network | trm.sizes | {"prefix": trm.prefix},
        weights=matrices,
    )


def base64_of(t):
    """Returns the little-endian bits of a float32 tensor in base64, those of bfloat16 if they are enough."""
    bits = t.contiguous().numpy().view("<u4")
    if not (bits & 0xFFFF).any():
        bits = (bits >> 16).astype("<u2")
    return base64.b64encode(bits).decode()


def problem_of(trm, settings, own_forks):
    """Returns why engine.js cannot run a model, in words, or "".

    Args:
        trm, settings: the results of solve.load.
        own_forks: the paths of the forks in examples/ that trained it.
    """
    # a fork that is not among the arguments may have replaced anything
    missing = missing_forks(trm.forks, settings.forks)
    if missing:
        return missing[0]
    num_identifiers = trm.sizes["num_puzzle_identifiers"]
    if num_identifiers > 1:
        return f"it has {num_identifiers} puzzle identifiers, for ARC see docs/arc.md"
    # engine.js knows the network of one fork, alone or with an optimizer
    if HOUSES in own_forks and settings.forks.keys() <= {Path(path).name for path in own_forks}:
        return ""

    # model.py may have been edited
    for name in trm.state_dict():
        if not WEIGHTS.fullmatch(name):
            return f"engine.js does not know the weights {name}"
    # a fork may change the loss, but no answers: model.py runs once more, without the fork, for its answers
    original = runpy.run_path(model.__file__)["TRM"](trm.settings, **trm.sizes, task=trm.task)
    original.load_state_dict(trm.state_dict(), strict=False)  # without a weight it answers otherwise
    questions = trm.test_puzzles["inputs"][:3]
    results = weights.solve(trm, questions, 3), weights.solve(original, questions, 3)
    return "" if all(map(torch.equal, *results)) else "a fork changes the answers"


if __name__ == "__main__":
    command(main)
