"""A web page on this machine where a trained model solves puzzles, step by step.

    python scripts/play.py                              models/sudoku-9x9.pt
    python scripts/play.py out/demo                     a run's
    python scripts/play.py out/fork fork.py --port=0    a model that fork.py trained, on any free port

Open the address that it prints. The model is what solve.py takes, and brings 100 test puzzles; others can be
typed. ARC's tasks come from the dataset of the training (--data_path). The server of the page, play.html,
listens on 127.0.0.1 only. Its API is JSON, errors are {"error": "..."}:

    GET  /api/run                what the model plays
    GET  /api/puzzle?number=7    a test puzzle, from 1, and its answer, null if there are several
    POST /api/solve              {"question": "2...", "steps": 16, "attempts": 8, "seed": 0},
                                 where all but the question may be missing

/api/solve answers at once with the request, a warning, and the known answer if a test puzzle asks the same.
Another line of JSON follows after each supervision step of each attempt: {"attempt": 1, "answer": "21...",
"sure": 0.6, "broken": [3, 7], "solved": false}, where the last two are missing if the rules are not known.
Attempts after the first are at copies by symmetry, which follow from the seed; their answers are turned back.
They end once an answer is as sure as /api/run says. The last line, {"attempts": 2}, says how many there were.

For ARC, questions and answers are grids, [[0, 1], [2, 0]]. A test puzzle also has the name of its task and
the pairs that demonstrate it; a request to solve has the name, "task". The attempts are versions of the task,
the original first, which run side by side: a line has the lists "answers", turned and recolored back, and
"sure".
"""
import contextlib
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import solve

import ask
import data
import evaluate
import model
from configurator import split_arguments
from puzzles import arc, kind_of, parse
from runtime.dataset import local_dataset
from runtime.errors import UserError
from runtime.process import command


class Settings:
    # server
    port = 8000  # the port of the page's address; 0: any free one


# the most of a request: larger numbers would keep this machine busy for hours
MOST_STEPS = 256
MOST_ATTEMPTS = 16

PAGE = Path(__file__).with_suffix(".html")


def main(argv):
    """Loads the model and serves the page until Ctrl-C."""
    # one model, by default the one for 9x9 Sudoku
    settings, operands, train_arguments = split_arguments(Settings, argv)
    if len(operands) > 1:
        raise UserError("usage: python scripts/play.py MODEL, a file or a run's folder; see --help")
    [path] = operands or [os.path.relpath(f"{solve.ROOT}/models/sudoku-9x9.pt")]
    game = game_of(path, *solve.load(path, train_arguments))
    # the page offers what the run says, and the server must take it
    run = game.describe()
    for name, number, most in (("eval_halt_max_steps", run["depth"], MOST_STEPS),
                               ("eval_attempts", run["attempts"], MOST_ATTEMPTS)):
        if number > most:
            raise UserError(f"{path}: {name}={number}: the page takes up to {most}, choose --{name}={most}")
    server = open_server(game, settings.port)
    print(f"open http://127.0.0.1:{server.server_port} in a browser (Ctrl-C stops)", flush=True)
    server.serve_forever()


def open_server(game, port):
    """Returns an HTTP server of the game, on 127.0.0.1. Raises UserError if the port cannot be used."""
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as e:
        raise UserError(f"--port={port}: {e}; --port=0 takes a free one") from None
    server.game = game
    return server


# ---------------------------------------------------------------------------------------------------------
# The game

class Game:
    """A model and its test puzzles.

    Args: the model's path, and what solve.load returns for it. Raises UserError.
    """

    required = ("question",)  # what a request to solve must have

    def __init__(self, path, trm, settings):
        self.path = path
        self.model = trm
        self.settings = settings
        self.kind = kind_of(trm.task)
        self.lock = threading.Lock()  # one request at a time uses the model
        self.puzzles = self.test_puzzles()

    def test_puzzles(self):
        """Returns the test puzzles, (question, answer) each."""
        tokens = self.model.test_puzzles
        return list(zip(tokens["inputs"], tokens["labels"]))

    def describe(self):
        """Returns the run, for the page."""
        return {
            "path": self.path,
            "kind": self.kind.task["kind"],
            "grid": self.kind.grid,
            "symbols": self.kind.symbols[1:],
            "depth": self.settings.eval_halt_max_steps or self.settings.halt_max_steps,
            "attempts": self.settings.eval_attempts,
            "sure": model.SURE,
            "parameters": self.model.num_parameters(),
            "training_step": self.model.step,
            "puzzles": len(self.puzzles),
        }

    def test_puzzle(self, number):
        """Returns a test puzzle, for the page; number: a string. Raises UserError or ValueError.

        The answer is None if it is not known, or one of several right ones.
        """
        # numbers begin with 1
        i = int(number) - 1
        if not 0 <= i < len(self.puzzles):
            raise UserError(f"number must be from 1 to {len(self.puzzles)}, not {number}")
        return self.shown(i, *self.puzzles[i])

    def shown(self, i, question, answer):
        """Returns test puzzle i for the page."""
        # several answers may be right, or the known one may leave out cells
        has_one_answer = (answer > 0).all() and not self.kind.has_several_answers
        return {
            "question": self.kind.text(question),
            "answer": self.kind.text(answer) if has_one_answer else None,
        }

    def known_answer(self, question, task=None):
        """Returns the answer of the test puzzle that asks the same, for the page; None as in test_puzzle().

        question: tokens [cells], or the grid of a test input; task: the name of its task, for ARC.
        """
        for i, (other, _) in enumerate(self.puzzles):
            if np.array_equal(other, question):
                puzzle = self.test_puzzle(i + 1)
                if puzzle.get("task") == task:
                    return puzzle["answer"]
        return None

    def solve(self, request):
        """Returns an iterator of dicts for the page, the lines of /api/solve.

        Raises various errors if the request is not as it must be.
        """
        # what the request leaves out, and what it must have
        run = self.describe()
        request = {"steps": run["depth"], "attempts": run["attempts"], "seed": 0} | request
        for name in self.required:
            if name not in request:
                raise UserError(f"{name} is missing")
        limits = ("steps", 1, MOST_STEPS), ("attempts", 1, MOST_ATTEMPTS), ("seed", 0, 2 ** 63)
        for name, least, most in limits:
            number = request[name]
            if type(number) is not int or not least <= number <= most:
                raise UserError(f"{name} must be an integer from {least} to {most}, not {number!r}")
        # the run's settings, but for the request's; the page shows all steps, also after an answer repeats
        settings = SimpleNamespace(**vars(self.settings) | dict(
            eval_halt_max_steps=request["steps"], eval_attempts=request["attempts"], seed=request["seed"],
            eval_patience=0))

        # the request comes first, so that the page shows the warning at once
        known, warning, steps = self.start(settings, request)
        return self.in_turn(request | {"answer": known, "warning": warning}, steps)

    def in_turn(self, first, steps):
        """Yields a dict at once, and those of an iterator while no other request uses the model."""
        yield first
        with self.lock:
            yield from steps

    def start(self, settings, request):
        """Returns the known answer, a warning, and an iterator of dicts that solves the question."""
        [tokens] = parse(self.kind.task, request["question"]).values()
        self.kind.check_attempts(settings.eval_attempts)
        [(num_solutions, warning)] = self.kind.solution_notes(tokens[None])
        if num_solutions == 0:
            raise UserError(warning)
        return self.known_answer(tokens), warning, self.attempts(settings, tokens)

    def attempts(self, settings, question):
        """Yields a dict after each step of each attempt; settings: train.py's; question: tokens [cells]."""
        for step in ask.watch(settings, self.model, self.kind, question):
            line = {"attempt": step.attempt, "answer": self.kind.text(step.answer), "sure": step.confidence}
            # by the rules, if they are known
            if step.judgement:
                line["broken"] = np.flatnonzero(step.judgement.broken).tolist()
                line["solved"] = bool(step.judgement.solved)
            yield line
        yield {"attempts": step.attempt}


class ARCGame(Game):
    """A model for ARC. The versions of its tasks are in the dataset that it was trained on."""

    required = ("question", "task")

    def test_puzzles(self):
        """See Game. The puzzles are grids."""
        folder = local_dataset(self.settings.data_path)
        self.train_data, self.test_data = data.load(folder)
        if self.train_data.sha256 != self.model.data_sha256:
            raise UserError(f"{self.path} was not trained on {folder}: choose another --data_path")
        return self.test_data.grids

    def shown(self, i, question, answer):
        """See Game. The pairs that demonstrate the task are in the dataset of the training."""
        group = np.searchsorted(self.test_data.indices, i, side="right") - 1
        name = self.test_data.names[group]
        pairs = self.train_data.pairs(self.train_data.names.index(name))
        return {
            "task": name,
            "pairs": [[grid.tolist() for grid in pair] for pair in pairs],
            "question": question.tolist(),
            "answer": answer.tolist() or None,
        }

    def start(self, settings, request):
        """See Game."""
        group = self.train_data.names.index(request["task"])
        grid = arc.grid_of(request["question"])
        arc.canvas(grid, self.train_data.side)  # a ValueError if it is too large
        return self.known_answer(grid, request["task"]), "", self.attempts(settings, group, grid)

    def attempts(self, settings, group, grid):
        """Yields the answers to a task's versions after each step.

        Args:
            settings: train.py's settings; eval_attempts says how many versions of the task vote.
            group: the task's number in the dataset.
            grid: its test input.
        """
        # each version of the task is a puzzle of one batch, and the first one is the original
        train_data = self.train_data
        numbers = range(*train_data.group_indices[group:group + 2])[:settings.eval_attempts]
        settings.eval_attempts = 1
        # the test input in all versions
        versions = train_data.versions[numbers]
        side = train_data.side
        canvases = [arc.canvas(arc.apply_version(grid, version), side) for version in versions]
        batch = evaluate.unlabeled_batch(np.int32(canvases).reshape(len(numbers), -1))
        batch["puzzle_identifiers"][:] = train_data.puzzle_identifiers[numbers]
        queue = ask.queue_of(settings, self.model, self.kind.task, batch, len(numbers))
        for results in queue.watch():
            # the answers, turned and recolored back
            answers = []
            for tokens, version in zip(results["preds"], versions):
                answers.append(arc.undo_version(arc.crop(tokens, side), version).tolist())
            yield {"answers": answers, "sure": evaluate.sigmoid(results["q_halt_logits"]).tolist()}
        yield {"attempts": len(numbers)}


def game_of(path, trm, settings):
    """Returns the Game of a model; see there."""
    game = ARCGame if trm.task["kind"] == "arc" else Game
    return game(path, trm, settings)


# ---------------------------------------------------------------------------------------------------------
# The server

class Handler(BaseHTTPRequestHandler):
    timeout = 30  # seconds that a client may keep a thread waiting

    def handle(self):
        with contextlib.suppress(ConnectionError):  # the page was closed, or asked for something else
            super().handle()

    def answer(self):
        """Answers a request. What is wrong with it gets status 400 and {"error": ...}."""
        # the page, or lines of JSON
        is_page = self.path == "/"
        status = 200
        try:
            lines = [PAGE.read_bytes()] if is_page else map(json_line, self.results())
        except Exception as e:  # whatever it is, the page shows it
            status = 400
            lines = [json_line({"error": " ".join(str(e).splitlines())})]
        # each line is sent once it is known
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8" if is_page else "application/json")
        self.end_headers()
        for line in lines:
            self.wfile.write(line)

    def results(self):
        """Returns the dicts that answer a request of the API."""
        game = self.server.game
        path, _, number = self.path.partition("?number=")
        if path == "/api/run":
            return [game.describe()]
        if path == "/api/puzzle":
            return [game.test_puzzle(number)]
        if path == "/api/solve":
            body = self.rfile.read(int(self.headers["Content-Length"]))
            return game.solve(json.loads(body))
        raise UserError("no such page")

    do_GET = answer
    do_POST = answer

    def log_message(self, *args):
        """No line for each request."""


def json_line(value):
    return json.dumps(value).encode() + b"\n"


if __name__ == "__main__":
    command(main)
