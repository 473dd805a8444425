"""A web page on this machine where a trained model solves puzzles, step by step.

    python scripts/play.py                              the model of models/ with the largest puzzles
    python scripts/play.py out/demo --browser=False     a run's; then open the address that it prints
    python scripts/play.py out/maze/best.pt --port=0    on any free port

Test puzzles come from the model file, or from the run's dataset where that exists; others can be typed.
Official checkpoints, config files and flags work as in solve.py. The server of the page, play.html, listens
on 127.0.0.1 only and refuses pages of other sites, by the Host and Origin headers. Its API is JSON, errors
are {"error": "..."}:

    GET  /api/run               what the model plays
    GET  /api/puzzle?index=7    a test puzzle and its answer
    POST /api/solve             {"question": "2...", "steps": 16, "copies": 4, "noise": 1.0, "seed": 0}

/api/solve answers with a line of JSON at once and another after each supervision step. All copies of the
puzzle but the first get normal noise on the latent after each step.
"""
import contextlib
import json
import math
import os
import sys
import threading
import urllib.parse
import webbrowser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
# isort: off
import solve
from configurator import UserError, command, split_arguments
from data import IGNORED, Dataset
from puzzles import (
    are_solutions, broken_cells, check_questions, look, parse, text_of)

# server
port = 8000  # of the page's address; 0: any free one
browser = True  # open the page in the browser
# ---

PAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "play.html")
LARGEST_BODY = 20_000  # bytes of a request; the largest maze takes 4096
LIMITS = {"steps": (1, 256), "copies": (1, 16), "noise": (0, 10), "seed": (0, 2 ** 31 - 1)}
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
                               "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
                               "frame-ancestors 'none'",
}


def main(argv):
    """Loads the model and serves the page until Ctrl-C."""
    s, operands, model_flags = split_arguments(__file__, argv)
    models = {} if operands else solve.shipped_models()
    if not operands and models:
        operands = [max(models, key=lambda path: (math.prod(models[path]["grid"]), path))]
    if len(operands) != 1:
        raise UserError("usage: python scripts/play.py MODEL, a file or a run's folder; see --help")
    server = open_server(Game(operands[0], model_flags), s.port)
    address = f"http://127.0.0.1:{server.server_port}"
    print(f"{address} (Ctrl-C stops)", flush=True)
    if s.browser:  # in a thread: some browsers return when they are closed
        threading.Thread(target=webbrowser.open, args=[address], daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()


def open_server(game, port):
    """An HTTP server of the game, on 127.0.0.1. Raises UserError if the port cannot be used."""
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as e:
        raise UserError(f"--port={port}: {e}; --port=0 takes a free one") from None
    server.game = game
    return server


class Game:
    """A model and its test puzzles: those in its file, or of its dataset if that exists. Raises UserError."""

    def __init__(self, path, flags):
        state, c = solve.read_model(path, flags)
        own, has_dataset = "puzzles" in state, os.path.isdir(c.data_path)
        self.test = Dataset(c.data_path, "test") if has_dataset and not own else None
        self.puzzle = solve.puzzle_of(state, c, cells=self.test.seq_len if self.test else 0)
        if self.test and self.test.task["kind"] == self.puzzle["kind"]:
            self.puzzle = self.test.task  # its grid: models with attention take any
        self.cells = math.prod(self.puzzle["grid"])
        self.run = solve.build_run(state, c, path, self.cells)
        self.depth = min(self.run.eval_depth, LIMITS["steps"][1])
        self.noise = float(min(c.eval_noise, LIMITS["noise"][1]))
        self.path, self.training_step = path, state.get("step", 0)
        self.own = {name: t.numpy() for name, t in state["puzzles"].items()} if own else {"inputs": []}
        self.num_puzzles = len(self.test or self.own["inputs"])
        self.lock = threading.Lock()  # one request at a time changes the run's settings

    def describe(self):
        """The run, for the page."""
        puzzle = self.puzzle
        return {
            "path": self.path, "kind": puzzle["kind"], "grid": puzzle["grid"], **look(puzzle),
            "depth": self.depth, "noise": self.noise, "parameters": self.run.num_parameters,
            "training_step": self.training_step, "puzzles": self.num_puzzles}

    def test_puzzle(self, index):
        """A test puzzle, for the page. Raises UserError."""
        count = self.num_puzzles
        if not (index.isascii() and index.isdecimal() and len(index) < 10 and int(index) < count):
            raise UserError(f"index must be a number below {count}, not {index[:20]!r}")
        i = int(index)
        rows = self.test.test_batch([i], 1) if self.test else {k: v[i:i + 1] for k, v in self.own.items()}
        question, answer = rows["inputs"][0], rows["labels"][0]
        return {"index": i, "question": text_of(self.puzzle, question),
                "answer": None if (answer == IGNORED).any() else text_of(self.puzzle, answer)}

    def parse_request(self, body):
        """(tokens [cells], warning, values of LIMITS) of a request to solve. Raises UserError."""
        try:
            request = dict(json.loads(body))
        except (ValueError, TypeError, RecursionError):
            raise UserError('the request is not JSON, as {"question": ...}') from None
        values = {"question": "", "steps": self.depth, "copies": 1, "noise": self.noise, "seed": 0}
        for name, value in request.items():
            if name not in values:
                raise UserError(f"unknown field {name[:20]!r}: known are {', '.join(values)}")
            expected = type(values[name])
            if type(value) is not expected and (expected, type(value)) != (float, int):
                raise UserError(f"{name} must be {expected.__name__}, not {type(value).__name__}")
            values[name] = value
        for name, (low, high) in LIMITS.items():
            if not low <= values[name] <= high:
                raise UserError(f"{name} must be from {low} to {high}")
        puzzle, tokens = parse(self.puzzle, values.pop("question"))
        if len(tokens) != self.cells:
            raise UserError(f"the question has {len(tokens)} cells, not {self.cells}")
        return tokens, check_questions(puzzle, tokens[None], [""]), values

    def solve(self, question, steps, copies, noise, seed):
        """Yields a dict for the page after each step, with lists of the copies; kept: (copy, step) so far."""
        with self.lock:
            c, self.run.eval_depth = self.run.c, steps
            c.eval_rollouts, c.eval_noise, c.seed = copies, noise, seed
            logits = []
            for preds, q_halt in solve.solve(self.run, question[None]):
                logits.append(q_halt)
                (kept_step,), (kept_copy,) = solve.surest(np.stack(logits))
                given = self.puzzle, question[None].repeat(copies, axis=0), preds[0]
                broken, solved = broken_cells(*given), are_solutions(*given)
                rules = solved is not None  # are known
                yield {
                    "answers": [text_of(self.puzzle, answer) for answer in preds[0]],
                    "sure": solve.sigmoid(q_halt[0]).round(4).tolist(),
                    "broken": [np.flatnonzero(cells).tolist() for cells in broken] if rules else None,
                    "solved": solved.tolist() if rules else None,
                    "kept": [int(kept_copy), int(kept_step) + 1]}


class RequestError(Exception):
    """A request that is refused: RequestError(HTTP status, message)."""


class Handler(BaseHTTPRequestHandler):
    timeout = 30  # seconds that a client may keep a thread waiting
    server_version, sys_version = "play", ""

    def handle(self):
        with contextlib.suppress(ConnectionError):  # the page was closed, or asked for something else
            super().handle()

    def do_GET(self):
        try:
            self.check_host()
            url = urllib.parse.urlsplit(self.path)
            if url.path == "/":
                with open(PAGE, "rb") as f:
                    self.reply(200, "text/html; charset=utf-8", f.read())
            elif url.path == "/api/run":
                self.reply_json(200, self.server.game.describe())
            elif url.path == "/api/puzzle":
                self.reply_json(200, self.server.game.test_puzzle(url.query.removeprefix("index=")))
            else:
                raise RequestError(404, "no such page")
        except (RequestError, UserError, ValueError) as e:
            self.reply_error(e)

    def do_POST(self):
        try:
            body = self.read_body()
            self.check_host()
            origin = self.headers.get("Origin")
            if origin is not None and origin.removeprefix("http://") not in self.own_hosts():
                raise RequestError(403, "requests from pages of other sites are refused")
            if self.path != "/api/solve":
                raise RequestError(404, "no such page")
            question, warning, values = self.server.game.parse_request(body)
        except (RequestError, UserError, ValueError) as e:
            self.reply_error(e)
            return
        with contextlib.closing(self.server.game.solve(question, **values)) as lines:  # releases the model
            self.reply(200, "application/x-ndjson", json_line(values | {"warning": warning}))
            for line in lines:
                self.wfile.write(json_line(line))

    def own_hosts(self):
        return [f"{name}:{self.server.server_port}" for name in ("127.0.0.1", "localhost")]

    def check_host(self):
        """Refuses other names of this address: a page of another site may have pointed its own name here."""
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or hosts[0].lower() not in self.own_hosts():
            raise RequestError(403, f"the Host must be {self.own_hosts()[0]}")

    def read_body(self):
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal()):
            raise RequestError(411, "the request needs a Content-Length")
        length = int(length[:20])
        body = self.rfile.read(min(length, 50 * LARGEST_BODY))  # many clients send all before they read
        if length > LARGEST_BODY:
            raise RequestError(413, f"the request has more than {LARGEST_BODY} bytes")
        return body

    def reply(self, status, content_type, body):
        self.send_response(status)
        for name, value in ({"Content-Type": content_type} | HEADERS).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def reply_json(self, status, value):
        self.reply(status, "application/json", json_line(value))

    def reply_error(self, error):
        status, message = error.args if isinstance(error, RequestError) else (400, str(error))
        self.reply_json(status, {"error": " ".join(message.splitlines())})

    def log_message(self, *args):
        """No line for each request."""


def json_line(value):
    return json.dumps(value).encode() + b"\n"


if __name__ == "__main__":
    command(lambda: main(sys.argv[1:]), __file__)
