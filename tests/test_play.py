"""scripts/play.py: its server, and its page in a real browser (Chromium, as Qt WebEngine)."""
import functools
import http.client
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

import numpy as np
import play
import pytest
from helpers import wait_for

import puzzles
from configurator import UserError


@pytest.fixture(scope="module")
def serve(models_folder):
    """A function of a model's name that returns its server, which runs in a thread."""
    @functools.cache
    def serve(name):
        server = play.open_server(play.Game(str(models_folder / name), []), 0)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    return serve


@pytest.fixture
def server(serve):
    return serve("model.pt")


@pytest.fixture
def arc_server(serve, arc_folder):
    return serve(arc_folder / "arc")


def ask(server, method, path, body=None):
    """Returns the status of an answer and its lines."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request(method, path, body)
    response = connection.getresponse()
    return response.status, list(map(json.loads, response))


# The server

@pytest.mark.parametrize("kind", ["sudoku", "maze"])
def test_the_kept_answer_is_that_of_solve(serve, run_solve, kind):
    game = serve(kind).game
    request = dict(game.test_puzzle("3"), steps=6, attempts=3, noise=0.5, seed=3)
    status, (first, *lines) = ask(serve(kind), "POST", "/api/solve", json.dumps(request))
    assert (status, first, len(lines)) == (200, request | {"warning": ""}, 6)
    sure = np.array([line["sure"] for line in lines])
    line, attempt = np.unravel_index(sure.argmax(), sure.shape)
    flags = "--eval_halt_max_steps=6", "--eval_rollouts=3", "--eval_noise=0.5", "--seed=3"
    text = run_solve(game.path, request["question"], *flags)
    assert lines[line]["answers"][attempt] in text.splitlines()
    assert f"(step {line + 1}: {sure.max():.0%} sure; 6 steps, attempt {attempt + 1} of 3" in text
    assert lines[line]["solved"][attempt] == ("a solution" in text)


def test_one_of_several_right_answers_is_not_shown_as_the_answer(server, monkeypatch):
    """The page then marks what breaks the rules, not what differs from the known answer."""
    assert re.fullmatch("[1-4]{16}", server.game.test_puzzle("60")["answer"])
    monkeypatch.setattr(puzzles, "SEVERAL_ANSWERS", {"sudoku"})
    assert server.game.test_puzzle("60")["answer"] is None


REQUEST = dict(question="." * 16, steps=256, attempts=16, noise=1, seed=0)


@pytest.mark.parametrize("request_line, changes, words", [
    ("POST /api/solve", {"steps": "many"}, "steps must be an integer from 1 to 256, not 'many'"),
    ("POST /api/solve", {"steps": 2.5}, "steps must be an integer from 1 to 256, not 2.5"),
    ("POST /api/solve", {"steps": 0}, "steps must be an integer from 1 to 256, not 0"),
    ("POST /api/solve", {"attempts": 1_000_000}, "attempts must be an integer from 1 to 16, not 1000000"),
    ("POST /api/solve", {"seed": None}, "seed must be an integer from 0"),
    ("POST /api/solve", {"question": "12"}, "has 2 cells, not 4x4"),
    ("POST /api/solve", {"question": "11.............."}, "the puzzle has no solution: row 1, column 1"),
    ("GET /../play.py", {}, "no such page"),
    ("GET /api/puzzle?number=0", {}, "number must be from 1 to 60, not 0"),
    ("GET /api/puzzle?number=%C2%B2", {}, "%C2%B2")])
def test_wrong_requests_are_refused(server, request_line, changes, words):
    status, [answer] = ask(server, *request_line.split(), json.dumps(REQUEST | changes))
    assert status == 400 and list(answer) == ["error"] and words in answer["error"]


def test_a_request_needs_a_question_alone(server, arc_server):
    status, (first, *lines) = ask(server, "POST", "/api/solve", json.dumps({"question": "." * 16}))
    run = server.game.describe()
    assert (status, len(lines), first["steps"], first["attempts"]) == (200, run["depth"], run["depth"], 1)
    assert ask(server, "POST", "/api/solve", "{}") == (400, [{"error": "question is missing"}])
    request = json.dumps({"question": [[1]]})
    assert ask(arc_server, "POST", "/api/solve", request) == (400, [{"error": "task is missing"}])


def test_a_client_that_leaves_frees_the_model(server, capfd):
    """It leaves with a reset, after the first step: the server prints nothing."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    connection.request("POST", "/api/solve", json.dumps(REQUEST))
    reset = struct.pack("ii", 1, 0)  # instead of a proper end
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
    assert connection.sock.recv(15)
    connection.close()
    wait_for(lambda: not server.game.lock.locked())
    assert capfd.readouterr() == ("", "")


def test_command_prints_its_address(models_folder):
    command = [sys.executable, play.__file__, models_folder / "model.pt", "--port=0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert re.match(r"open http://127.0.0.1:\d+ in a browser", process.stdout.readline())
    finally:
        process.send_signal(signal.SIGINT)
    assert process.wait(20) == 3


def test_page_fetches_nothing_from_elsewhere():
    page = play.PAGE.read_text()
    assert not re.search(r"""(src|href)=["'](?!data:,)|url\(|@import|innerHTML""", page)
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}


def test_arc_needs_the_dataset_that_it_was_trained_on(arc_folder, models_folder):
    with pytest.raises(UserError, match="was not trained on .*sudoku-data"):
        play.Game(str(arc_folder / "arc"), [f"--data_path={models_folder / 'sudoku-data'}"])


# The page

class Browser:
    """A Chromium window without a screen."""

    def __init__(self):
        os.environ["QT_QPA_PLATFORM"] = "offscreen"
        os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = "--no-sandbox --disable-gpu"
        from PyQt6 import QtTest, QtWebEngineCore, QtWebEngineWidgets, QtWidgets

        class Page(QtWebEngineCore.QWebEnginePage):
            def javaScriptConsoleMessage(self, level, message, line, source):
                messages.append(f"{source}:{line}: {message}")

        self.messages = messages = []  # of the console
        self.app = QtWidgets.QApplication.instance() or QtWidgets.QApplication(["test_play"])
        self.test = QtTest.QTest
        self.view = QtWebEngineWidgets.QWebEngineView()
        self.page = Page(self.view)
        self.view.setPage(self.page)
        self.view.show()

    def load(self, server):
        from PyQt6.QtCore import QUrl
        loaded = []
        self.page.loadFinished.connect(loaded.append)
        self.page.setUrl(QUrl(f"http://127.0.0.1:{server.server_port}/"))
        self.wait(lambda: loaded)
        self.until("run && question.length === cellCount()")

    def wait(self, condition, seconds=60):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.messages
            self.test.qWait(5)

    def js(self, code):
        """Returns the value of a JavaScript expression in the page."""
        results = []
        self.page.runJavaScript(f"JSON.stringify({code}) ?? 'null'", results.append)
        self.wait(lambda: results)
        assert results[0], f"{code}: {self.messages}"
        return json.loads(results[0])

    def until(self, code):
        self.wait(lambda: self.js(code))

    def click(self, selector):
        self.js(f"document.querySelector('{selector}').click()")

    def press(self, *names):
        from PyQt6.QtCore import Qt
        for name in names:
            self.test.keyClick(self.view.focusProxy(), getattr(Qt.Key, "Key_" + name))
            self.test.qWait(30)

    def texts(self, selector):
        return self.js(f"[...document.querySelectorAll('{selector}')].map(el => el.textContent)")

    def type(self, text):
        """Enters a puzzle as text; returns the error that the page shows."""
        return self.js(f"($('text').value = '{text}', $('typed').requestSubmit(), $('error').textContent)")

    def solve(self, number=0):
        """Solves the question, or a test puzzle; returns the steps."""
        if number:
            self.js(f"choose({number})")
            self.until(f"number === {number}")
        self.click("#solve")
        self.until("!controller")
        return self.js("(stop(), steps)")


@pytest.fixture(scope="module")
def chromium():
    browser = Browser()
    yield browser
    browser.view.close()
    browser.page.deleteLater()
    browser.view.deleteLater()
    browser.test.qWait(200)


@pytest.fixture
def browser(chromium):
    chromium.messages.clear()
    chromium.view.resize(1100, 900)
    yield chromium
    assert chromium.messages == []  # no error in the console


def test_page_solves_a_test_puzzle_and_plays_the_steps(browser, server):
    browser.load(server)
    steps = browser.solve(number=2)
    browser.js("$('slider').focus()")
    browser.press("Home", "Right")
    assert "".join(browser.texts("#board .cell")) == steps[0]["answers"][0]
    browser.click("#kept")
    sure = [step["sure"] for step in steps]
    assert sure[browser.js("shown") - 1] == max(sure)
    browser.js("(request.steps = 100, show(0))")  # which makes the playback fast
    browser.click("#play")
    browser.until("timer === null && shown === 4")  # it plays to the end and stops


def test_page_marks_what_is_wrong(browser, server):
    """The cells unlike the known answer; without one, those that break a rule, a row of them as a row."""
    browser.load(server)
    browser.solve(number=2)
    status = "(show(1), $('status').textContent)"
    browser.js("(steps[0].solved = [false], answer = [...steps[0].answers[0]], answer[5] = answer[6] = 'x')")
    assert ": 2 cells wrong ✕, " in browser.js(status)
    assert len(browser.texts("#board .wrong")) == 2
    browser.js("(answer = null, steps[0].broken = [[0, 1, 2, 3, 15]])")
    assert "row 1, 1 cell break a rule ✕" in browser.js(status)
    assert len(browser.texts("#board .group")) == len(browser.texts("#board .cell.wrong")) == 1


def test_page_thinks_deeper_and_in_attempts(browser, server):
    browser.load(server)
    browser.solve()
    browser.click('input[name=steps][value="16"]')  # one click solves again
    browser.until("!controller && steps.length === 16")
    browser.click('input[name=attempts][value="4"]')
    browser.until("!controller && request.attempts === 4 && steps.length === 16")
    assert len(browser.texts("#attempts .attempt")) == len(browser.texts("#curve polyline")) == 4
    sure = browser.js("(stop(), steps[1].sure)")
    browser.click("#redraw")
    browser.until("!controller && steps.length === 16 && request.seed === 1")
    again = browser.js("steps[1].sure")
    assert again[0] == sure[0] and again[1:] != sure[1:]


@pytest.mark.parametrize("width", [360, 700, 1400])
def test_page_fits_and_the_board_comes_first(browser, server, width):
    browser.load(server)
    browser.view.resize(width, 800)
    browser.until(f"innerWidth === {width}")
    assert browser.js("document.documentElement.scrollWidth") <= width
    names = "board-card", "puzzle-card", "solve"
    board, puzzle, solve = [browser.js(f"$('{name}').getBoundingClientRect().top") for name in names]
    assert board <= puzzle and solve < 760  # of 800, without scrolling


def test_page_takes_typed_puzzles_and_shows_errors(browser, server):
    browser.load(server)
    assert browser.type("12").startswith("⚠ This line has 2 cells, the model takes 16")
    browser.type("11" + "." * 14)
    assert browser.js("$('error').hidden")
    browser.solve()
    assert "⚠ The puzzle has no solution: row 1, column 1" in browser.js("$('error').textContent")
    browser.click("#clear")
    browser.js("document.querySelector('#board .cell').focus()")
    browser.press("Right", "Down", "3", "Right", "Down", "2", "Left", "4", "Backspace", "Home", "Up", "1")
    assert browser.js("$('text').value") == "....13....2....."
    browser.solve()
    assert "more than one solution" in browser.js("$('warning').textContent")


def test_page_shows_an_arc_task_and_its_versions_vote_as_in_the_evaluation(browser, arc_server, arc_folder):
    browser.load(arc_server)
    browser.solve(number=2)
    puzzle = arc_server.game.test_puzzle("2")
    assert len(browser.texts("#pairs .pair")) == 4
    assert browser.js("asGrid(question)") == puzzle["question"]
    elected = browser.js("(show(3), steps[2].votes.map(vote => vote.grid))")
    submission = json.loads((arc_folder / "arc/submission.json").read_text())
    [attempts] = submission[puzzle["task"]]
    assert [elected[0], elected[:2][-1]] == [attempts["attempt_1"], attempts["attempt_2"]]
    assert browser.texts("#attempts figcaption")[-1] == "Known answer"


def test_page_edits_the_test_input_of_an_arc_task(browser, arc_server):
    """By key, by palette, by a second click, and as text."""
    browser.load(arc_server)
    browser.js("selectCell(1)")
    browser.press("7", "Right")
    browser.click("#keypad button:nth-child(4)")
    browser.click("#board .cell:nth-child(3)")
    assert browser.js("question.slice(1, 3)") == ["7", "4"] and browser.js("answer") is None
    browser.type("12 34")
    assert browser.js("asGrid(question)") == [[1, 2], [3, 4]] and len(browser.solve()) == 3
