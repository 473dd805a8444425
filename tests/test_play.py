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
import urllib.request

import play
import pytest
import solve
from helpers import wait_for

import puzzles
from evaluate import elect, grid_of_key


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
    return serve("sudoku")


@pytest.fixture
def arc_server(serve, arc_folder):
    return serve(arc_folder / "arc")


def ask(server, method, path, body=None, **headers):
    """(status, text) of an answer; body: JSON text."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    return response.status, response.read().decode()


def ask_json(server, method, path, body=None, **headers):
    status, text = ask(server, method, path, body, **headers)
    assert text.count("\n") == 1
    return status, json.loads(text)


def ask_to_solve(server, **request):
    """The lines of the answer to a request to solve."""
    status, text = ask(server, "POST", "/api/solve", json.dumps(request))
    assert status == 200, text
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("kind", ["sudoku", "maze"])
def test_answers_are_those_of_solve(serve, models_folder, kind):
    game = serve(kind).game
    text = game.test_puzzle("3")["question"]
    first, *lines = ask_to_solve(serve(kind), question=text, steps=6, copies=3, noise=0.5, seed=3)
    assert first["warning"] == "" and len(lines) == 6
    saved = solve.read_saved(str(models_folder / kind), [
        "--eval_rollouts=3", "--eval_noise=0.5", "--seed=3", "--eval_halt_max_steps=6"])
    _, question = puzzles.parse_question(game.task, text)
    for line, step in zip(lines, solve.watch_attempts(saved.settings, game.model, question)):
        assert line["sure"] == pytest.approx(solve.sigmoid(step["q_halt_logits"]), abs=1e-3)
        assert line["answers"] == [puzzles.text_of(game.task, answer) for answer in step["preds"]]
        assert line["solved"] == puzzles.are_solutions(game.task, question[None], step["preds"]).tolist()
    copy, step = lines[-1]["kept"]
    assert lines[step - 1]["sure"][copy] == max(max(line["sure"]) for line in lines)


def test_one_of_several_right_answers_is_not_shown_as_the_answer(serve, monkeypatch):
    """The page then marks what breaks the rules, not what differs from the known answer."""
    game = serve("sudoku").game
    monkeypatch.setattr(play, "SEVERAL_ANSWERS", {"sudoku"})
    assert game.test_puzzle("3")["answer"] is None


Q = '"question": "................"'


@pytest.mark.parametrize("request_line, body, words", [
    ("POST /api/solve", "[" * 10000, "not JSON"),
    ("POST /api/solve", "[[1, 2]]", "not JSON, as {"),
    ("POST /api/solve", '{"question": "12"}', "has 2 cells, not 4x4"),
    ("POST /api/solve", '{"question": "11.............."}', "the puzzle has no solution: row 1, column 1"),
    ("POST /api/solve", f'{{{Q}, "steps": 257}}', "steps must be a number from 1 to 256"),
    ("POST /api/solve", f'{{{Q}, "steps": 1e999}}', "not JSON"),
    ("POST /api/solve", f'{{{Q}, "noise": NaN}}', "noise must be a number from 0 to 10"),
    ("POST /api/solve", None, "not JSON"),
    ("GET /../play.py", None, "no such page"),
    ("GET /api/puzzle?index=60", None, "index must be a number below 60, not 60"),
    ("GET /api/puzzle?index=%C2%B2", None, "%C2%B2")])
def test_wrong_requests_are_refused(server, request_line, body, words, monkeypatch):
    monkeypatch.setattr(server.game, "solve", None)
    status, answer = ask_json(server, *request_line.split(), body)
    assert status == 400 and list(answer) == ["error"] and words in answer["error"]


def test_a_client_that_leaves_frees_the_model(server, capfd):
    """It leaves with a reset, after the first step: the server prints nothing."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    connection.request("POST", "/api/solve", f'{{{Q}, "steps": 256, "copies": 16}}')
    reset = struct.pack("ii", 1, 0)  # instead of a proper end
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
    assert connection.sock.recv(15)
    connection.close()
    wait_for(lambda: not server.game.lock.locked())
    assert len(ask_to_solve(server, question="." * 16)) == 5 and capfd.readouterr() == ("", "")


def test_command_opens_the_browser_on_the_model_with_the_largest_puzzles(tmp_path):
    process = subprocess.Popen([sys.executable, play.__file__, "--port=0"], stdout=subprocess.PIPE, text=True,
                               env={**os.environ, "BROWSER": f"sh -c 'echo $0 > {tmp_path}/opened' %s"})
    try:
        address = process.stdout.readline().split()[0]
        with urllib.request.urlopen(f"{address}/api/run", timeout=60) as f:
            run = json.load(f)
        assert run["path"].endswith("sudoku-9x9.pt") and run["puzzles"] == 100
        wait_for((tmp_path / "opened").exists)
        assert (tmp_path / "opened").read_text() == f"{address}\n"
    finally:
        process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0


def test_page_fetches_nothing_from_elsewhere(server):
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/", timeout=60) as response:
        page = response.read().decode()
    assert not re.search(r"""(src|href)=["'](?!data:,)|url\(|@import|innerHTML""", page)
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}


def test_votes_on_an_arc_task_are_those_of_solve(arc_server, arc_test):
    _, puzzle = ask_json(arc_server, "GET", "/api/puzzle?index=2")
    question, answer = arc_test.grids[2]
    assert puzzle["question"] == question.tolist() and puzzle["answer"] == answer.tolist()
    game = arc_server.game
    *_, line = game.solve((puzzle["task"], question), 3, 4, 0, 0)
    data = solve.dataset_of_task(game.train_data, puzzle["task"], [(question, answer)], 0)
    votes = solve.vote(game.saved.settings, game.model, data)[0, 0]
    assert line["votes"] == [[grid_of_key(key).tolist(), votes[key][0]] for key in elect(votes)]


@pytest.mark.parametrize("change, words", [
    ({"task": "new"}, "task new: the model has no identifier"),
    ({"question": [[1, 2], [3]]}, "not JSON"),
    ({"question": [[1] * 5]}, "a side over 4")])
def test_wrong_requests_for_arc_are_refused(arc_server, arc_test, change, words):
    request = {"task": arc_test.task_names[0], "question": [[1, 2]]} | change
    status, answer = ask_json(arc_server, "POST", "/api/solve", json.dumps(request))
    assert status == 400 and words in answer["error"]


# The page.

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
        self.test, self.view = QtTest.QTest, QtWebEngineWidgets.QWebEngineView()
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
        """The value of a JavaScript expression in the page."""
        results = []
        self.page.runJavaScript(f"JSON.stringify({code}) ?? 'null'", results.append)
        self.wait(lambda: results)
        assert results[0], f"{code}: {self.messages}"
        return json.loads(results[0])

    def until(self, code):
        self.wait(lambda: self.js(code))

    def choose(self, index):
        self.js(f"choose({index})")
        self.until(f"index === {index}")

    def click(self, selector):
        self.js(f"document.querySelector('{selector}').click()")

    def count(self, selector):
        return self.js(f"document.querySelectorAll('{selector}').length")

    def press(self, *names):
        from PyQt6.QtCore import Qt
        for name in names:
            self.test.keyClick(self.view.focusProxy(), getattr(Qt.Key, "Key_" + name))
            self.test.qWait(30)

    def check_width(self, width):
        """The page fits into the width: nothing scrolls sideways."""
        self.view.resize(width, 800)
        self.until(f"innerWidth === {width}")
        assert self.js("document.documentElement.scrollWidth") <= width
        assert self.js("[...document.querySelectorAll('button, input, .board')].filter("
                       f"el => el.getBoundingClientRect().right > {width}).length") == 0

    def solve(self):
        self.click("#solve")
        self.until("!controller")
        return self.js("(stop(), steps)")

    def cells(self):
        return self.js("[...document.querySelectorAll('#board .cell')].map(el => el.textContent || '.')")


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


@pytest.fixture(scope="module")
def puzzle(serve):
    """A test puzzle whose answer after the first step is wrong."""
    for i in range(1, 60):
        puzzle = ask_json(serve("sudoku"), "GET", f"/api/puzzle?index={i}")[1]
        if ask_to_solve(serve("sudoku"), question=puzzle["question"])[1]["answers"][0] != puzzle["answer"]:
            return puzzle


def test_page_solves_a_test_puzzle(browser, server, puzzle):
    browser.load(server)
    browser.choose(puzzle["index"])
    assert browser.cells() == list(puzzle["question"])
    steps = browser.solve()
    assert len(steps) == browser.count("#curve circle") == 4 and browser.count("#curve polyline.chosen") == 1
    browser.js("$('slider').focus()")
    browser.press("Home", "Right")
    first = steps[0]["answers"][0]
    assert browser.cells() == list(first)
    wrong = [i for i, (a, b) in enumerate(zip(first, puzzle["answer"])) if a != b]
    assert browser.js("$('status').textContent").startswith(f"Step 1 of 4: {len(wrong)} wrong ✕, ")
    assert wrong == browser.js("[...document.querySelectorAll('#board .cell')].flatMap("
                               "(el, i) => el.ariaLabel.endsWith('wrong') ? [i] : [])")
    browser.click("#kept")
    assert browser.js("shown") == steps[-1]["kept"][1]
    browser.js("(request.steps = 100, show(0))")  # which makes the playback fast
    browser.click("#play")
    browser.until("timer !== null && shown > 0")
    browser.until("timer === null && shown === 4")  # it plays to the end and stops


def test_page_thinks_deeper_and_in_copies(browser, server):
    browser.load(server)
    browser.solve()
    browser.click('input[name=steps][value="16"]')  # one click solves again
    browser.until("!controller && steps.length === 16")
    browser.click('input[name=copies][value="4"]')
    browser.until("!controller && request.copies === 4 && steps.length === 16")
    assert browser.count("#copies .copy") == browser.count("#curve polyline") == 4
    steps = browser.js("(show(2), steps)")
    browser.click("#copies .copy:nth-child(3)")
    assert browser.cells() == list(steps[1]["answers"][2])
    browser.click("#redraw")
    browser.until("!controller && steps.length === 16 && request.seed === 1")
    again = browser.js("steps[1].sure")
    assert again[0] == steps[1]["sure"][0] and again[1:] != steps[1]["sure"][1:]
    for width in (360, 700, 1400):
        browser.check_width(width)


def test_page_takes_typed_puzzles_and_shows_errors(browser, server):
    browser.load(server)
    error = browser.js("($('text').value = '12', $('typed').requestSubmit(), $('error').textContent)")
    assert error.startswith("⚠ This line has 2 cells, the model takes 16")
    browser.js("($('text').value = '11' + '.'.repeat(14), $('typed').requestSubmit())")
    assert browser.js("$('error').hidden")
    browser.solve()
    assert "⚠ The puzzle has no solution: row 1, column 1" in browser.js("$('error').textContent")
    browser.click("#clear")
    browser.js("document.querySelector('#board .cell').focus()")
    browser.press("Right", "Down", "3", "Right", "Down", "2", "Left", "4", "Backspace", "Home", "Up", "1")
    typed = "....13....2....."
    assert browser.js("$('text').value") == typed and browser.cells() == list(typed)
    browser.solve()
    assert "more than one solution" in browser.js("$('warning').textContent")


def test_page_shows_an_arc_task_its_votes_and_edits_the_test_input(browser, arc_server):
    browser.load(arc_server)
    browser.choose(1)
    puzzle = arc_server.game.test_puzzle("1")
    cells = [str(colour) for row in puzzle["question"] for colour in row]
    assert browser.count("#pairs .pair") == 4 and browser.cells() == cells
    assert browser.js("[...document.querySelectorAll('#board .cell')].map(el => el.title)") == cells
    votes = browser.solve()[-1]["votes"]
    browser.js("show(3)")
    captions = browser.js("[...document.querySelectorAll('#copies figcaption')].map(el => el.textContent)")
    assert captions[0].startswith(f"{votes[0][1]} of 4") and captions[-1] == "Known answer"
    assert len(captions) == len(votes) + 1
    for width in (360, 1100):
        browser.check_width(width)

    # by key, by palette, by a second click, and as text
    browser.js("selectCell(1)")
    browser.press("7", "Right")
    browser.click("#keypad button:nth-child(4)")
    browser.click("#board .cell:nth-child(3)")
    assert browser.js("question.slice(1, 3)") == ["7", "4"] and browser.js("answer") is None
    browser.js("($('text').value = '12 34', $('typed').requestSubmit())")
    assert browser.js("asGrid(question)") == [[1, 2], [3, 4]] and len(browser.solve()) == 3
