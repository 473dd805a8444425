"""A web page on this machine where a trained model solves puzzles, step by step.

    python scripts/play.py                              the model of models/ with the largest puzzles
    python scripts/play.py out/demo --browser=False     a run's; then open the address that it prints
    python scripts/play.py out/maze/best.pt --port=0    on any free port

Test puzzles come from the model file, or from the run's dataset where that exists; others can be typed.
Official checkpoints, config files and flags work as in solve.py. The server of the page, play.html, listens
on 127.0.0.1 only. Its API is JSON, errors are {"error": "..."}:

    GET  /api/run               what the model plays
    GET  /api/puzzle?index=7    a test puzzle and its answer, null if there are several
    POST /api/solve             {"question": "2...", "steps": 16, "copies": 4, "noise": 1.0, "seed": 0}

For ARC, questions and answers are grids, [[0, 1], [2, 0]]. A test puzzle also has the name of its task and
the pairs that demonstrate it; a request to solve has the name, "task", and copies counts the versions that
vote. The answer is the original version's; votes lists all answers, each with the number of its votes.

/api/solve answers with a line of JSON at once, and another after each supervision step with lists of the
copies; kept: the most confident copy and step so far. All copies of the puzzle but the first get normal noise
on the latent after each step.
"""
import contextlib
import json
import math
import os
import sys
import threading
import webbrowser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
# isort: off
import solve
from checkpoint import check_task
from configurator import Settings, UserError, command, split_arguments
from data import Dataset
from evaluate import count_votes, elect, grid_of_key, surest_attempts, weights_of
from puzzles import SEVERAL_ANSWERS, check_questions, judge, parse_question, text_of
from puzzles.arc import crop, grid_of

# server
port = 8000  # the port of the page's address; 0: any free one
browser = True  # open the page in the browser

PAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "play.html")
# the values in a request: type, smallest, largest
LIMITS = {
    "steps": (int, 1, 256),
    "copies": (int, 1, 16),
    "noise": (float, 0, 10),
    "seed": (int, 0, 2 ** 31 - 1),
}


def main(argv):
    """Loads the model and serves the page until Ctrl-C."""
    settings, operands, train_arguments = split_arguments(__file__, argv)
    # without a model, the one with the largest puzzles
    if not operands:
        tasks = solve.shipped_models()
        operands = [max(tasks, key=lambda path: math.prod(tasks[path]["grid"]))]
    if len(operands) != 1:
        raise UserError("usage: python scripts/play.py MODEL, a file or a run's folder; see --help")
    # the page, until Ctrl-C
    server = open_server(Game(operands[0], train_arguments), settings.port)
    address = f"http://127.0.0.1:{server.server_port}"
    print(f"{address} (Ctrl-C stops)", flush=True)
    if settings.browser:  # in a thread: some browsers return when they are closed
        threading.Thread(target=webbrowser.open, args=[address], daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
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
    """A model and its test puzzles, from its dataset if that exists, else from its file.

    Args:
        path: the model's path, as solve.py takes it.
        train_arguments: train.py's config files and flags.

    Raises UserError, also if the weights were trained on other symbols than the dataset's.
    """

    def __init__(self, path, train_arguments):
        self.saved = solve.read_saved(path, train_arguments)
        state = self.saved.state
        settings = self.saved.settings

        # the test puzzles, tokens [n, cells]; models with attention take the grid of any dataset
        puzzles = {"inputs": [], "labels": []}
        task = {"kind": ""}
        cells = 0
        if "puzzles" in state:
            puzzles = {name: t.numpy() for name, t in state["puzzles"].items()}
        elif os.path.isdir(settings.data_path):
            test = Dataset(settings.data_path, "test")
            check_task(state, test, path)
            puzzles = vars(test)
            task = test.task
            cells = test.seq_len
        self.task = task if task["kind"] else solve.task_of_model(self.saved, cells=cells)
        self.is_arc = self.task["kind"] == "arc"
        if self.is_arc:
            self.train_data, self.test_data = solve.arc_datasets(self.saved)
            puzzles = vars(self.test_data)
        self.inputs = puzzles["inputs"]
        self.labels = puzzles["labels"]

        self.model = solve.build_model(self.saved, math.prod(self.task["grid"]))
        self.lock = threading.Lock()  # one request at a time uses the model
        # what a request need not say
        depth = settings.eval_halt_max_steps or settings.halt_max_steps
        self.defaults = {"steps": min(depth, 256), "copies": 1, "noise": settings.eval_noise, "seed": 0}

    def describe(self):
        """Returns the run, for the page."""
        return {
            "path": self.saved.path,
            "kind": self.task["kind"],
            "grid": self.task["grid"],
            "symbols": self.task["symbols"][1:],
            "depth": self.defaults["steps"],
            "noise": self.defaults["noise"],
            "parameters": self.model.num_parameters(),
            "training_step": self.saved.state.get("step", 0),
            "puzzles": len(self.inputs),
        }

    def test_puzzle(self, index):
        """Returns a test puzzle, for the page; index: as text. Raises UserError, or ValueError for no number.

        The answer is None if it is not known, or one of several right ones.
        """
        i = int(index)
        if not 0 <= i < len(self.inputs):
            raise UserError(f"index must be a number below {len(self.inputs)}, not {i}")
        if self.is_arc:
            return self.arc_puzzle(i)
        labels = self.labels[i]
        has_one_answer = (labels > 0).all() and self.task["kind"] not in SEVERAL_ANSWERS
        return {
            "index": i,
            "question": text_of(self.task, self.inputs[i]),
            "answer": text_of(self.task, labels) if has_one_answer else None,
        }

    def arc_puzzle(self, i):
        """Returns a test input of an ARC task, for the page; the answer is None if it is not known."""
        group = np.searchsorted(self.test_data.task_indices, i, side="right") - 1
        name = self.test_data.task_names[group]
        question, answer = self.test_data.grids[i]
        pairs = solve.pairs_of(self.train_data, name)
        return {
            "index": i,
            "task": name,
            "pairs": [[grid.tolist() for grid in pair] for pair in pairs],
            "question": question.tolist(),
            "answer": answer.tolist() or None,
        }

    def parse_request(self, body):
        """Returns the question, a warning, and the values of LIMITS in a request to solve.

        The question is tokens [cells], for ARC the name of a task and a grid. Raises UserError.
        """
        values = {}
        # a KeyError, TypeError or ValueError if the request is not as it must be
        try:
            request = self.defaults | json.loads(body)
            text = request["question"]
            if self.is_arc:
                question = request["task"], grid_of(text)
            else:
                task, question = parse_question(self.task, text + "")
            for name, (convert, _, _) in LIMITS.items():
                values[name] = convert(request[name])
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
            raise UserError('the request is not JSON, as {"question": "..."}') from None
        # its values
        for name, (_, low, high) in LIMITS.items():
            if not low <= values[name] <= high:
                raise UserError(f"{name} must be a number from {low} to {high}")

        # the question
        if self.is_arc:
            solve.group_of(self.train_data, question[0])
            if max(question[1].shape) > self.train_data.side:
                raise UserError(f"the grid has a side over {self.train_data.side}")
            return question, "", values
        if task["grid"] != self.task["grid"]:
            raise UserError(f"the question has {len(question)} cells, not {math.prod(self.task['grid'])}")
        return question, check_questions(task, question[None], [""]), values

    def solve(self, question, steps, copies, noise, seed):
        """Yields a dict for the page after each step.

        Args:
            question: what parse_request returns.
            steps, copies, noise, seed: as in LIMITS.
        """
        # the run's settings, and the request's
        attempts = 1 if self.is_arc else copies
        changed = dict(eval_halt_max_steps=steps, eval_rollouts=attempts, eval_noise=noise, seed=seed)
        settings = Settings(**vars(self.saved.settings) | changed)
        with self.lock:
            if self.is_arc:
                yield from self.solve_arc(settings, *question, copies)
                return
            for results in solve.watch_attempts(settings, self.model, question):
                # the answers, and which is the most confident one so far
                answers = results["preds"]
                kept_copy = int(surest_attempts(results))
                line = {
                    "answers": [text_of(self.task, answer) for answer in answers],
                    "sure": solve.sigmoid(results["q_halt_logits"]).round(4).tolist(),
                    "kept": [kept_copy, int(results["surest_steps"][kept_copy])],
                }

                # by the rules, if they are known
                judgement = judge(self.task, question[None], answers)
                if judgement:
                    line["broken"] = [np.flatnonzero(cells).tolist() for cells in judgement.broken]
                    line["solved"] = judgement.solved.tolist()
                yield line

    def solve_arc(self, settings, name, grid, num_versions):
        """Yields a dict for the page after each step.

        Args:
            settings: train.py's settings.
            name: the task's name.
            grid: its test input.
            num_versions: how many of its versions vote.
        """
        # each version of the task is a sequence of one batch
        data = solve.dataset_of_task(self.train_data, name, [(grid, grid)], num_versions)
        n = len(data)
        evaluator = solve.evaluator_of(settings, self.model, n)
        batch = data.test_batch(range(n), n)
        for step, results in enumerate(evaluator.watch(*weights_of(self.model), batch), 1):
            answers = results["preds"]
            # what the versions answer, turned back
            votes = count_votes(data, range(n), answers, results["q_halt_logits"])[0, 0]
            yield {
                "answers": [crop(answers[0], data.side).tolist()],  # the first version is the original
                "sure": solve.sigmoid(results["q_halt_logits"][:1]).round(4).tolist(),
                "kept": [0, step],
                "votes": [[grid_of_key(key).tolist(), votes[key][0]] for key in elect(votes)],
            }


# ---------------------------------------------------------------------------------------------------------
# The server

class Handler(BaseHTTPRequestHandler):
    timeout = 30  # seconds that a client may keep a thread waiting

    def handle(self):
        with contextlib.suppress(ConnectionError):  # the page was closed, or asked for something else
            super().handle()

    def answer(self):
        """Answers a request. What is wrong with it gets status 400 and {"error": ...}."""
        game = self.server.game
        try:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path, _, index = self.path.partition("?index=")
            if path == "/":
                with open(PAGE, "rb") as f:
                    self.reply(200, "text/html; charset=utf-8", f.read())
            elif path == "/api/run":
                self.reply_json(200, game.describe())
            elif path == "/api/puzzle":
                self.reply_json(200, game.test_puzzle(index))
            elif path == "/api/solve":
                question, warning, values = game.parse_request(body)
                self.stream(values | {"warning": warning}, game.solve(question, **values))
            else:
                raise UserError("no such page")
        except (UserError, ValueError) as e:
            self.reply_json(400, {"error": " ".join(str(e).splitlines())})

    do_GET = answer
    do_POST = answer

    def stream(self, first, lines):
        """Sends a line for the request, and one for each step."""
        with contextlib.closing(lines):  # releases the model
            self.reply(200, "application/x-ndjson", json_line(first))
            for line in lines:
                self.wfile.write(json_line(line))

    def reply(self, status, content_type, body):
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def reply_json(self, status, value):
        self.reply(status, "application/json", json_line(value))

    def log_message(self, *args):
        """No line for each request."""


def json_line(value):
    return json.dumps(value).encode() + b"\n"


if __name__ == "__main__":
    command(lambda: main(sys.argv[1:]), __file__)
