"""scripts/play.py: its server, and its page in a real browser (Chromium, as Qt WebEngine)."""
import functools
import json
import math
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request

import numpy as np
import play
import pytest
import solve
import torch
from configurator import UserError
from conftest import wait_for
from test_solve import folder  # a fixture: the models

import puzzles


@pytest.fixture(scope="module")
def serve(folder):
    """A function of a model's name that returns its server, which runs in a thread."""
    @functools.cache
    def serve(name):
        server = play.open_server(play.Game(str(folder / name), []), 0)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    return serve


@pytest.fixture
def server(serve):
    return serve("sudoku")


def connect(server, sent):
    """A connection that has sent these bytes; PORT in them is the server's port."""
    connection = socket.create_connection(("127.0.0.1", server.server_port), timeout=60)
    connection.sendall(sent.replace(b"PORT", str(server.server_port).encode()))
    return connection


def ask(server, method, path, body=None, **headers):
    """(status, text) of an answer; body: JSON text. A header of None is left out."""
    headers = {"Host": "127.0.0.1:PORT", "Content-Length": None if body is None else len(body)} | headers
    fields = [f"{name}: {value}" for name, value in headers.items() if value is not None]
    request = "\r\n".join([f"{method} {path} HTTP/1.1", *fields, "", body or ""])
    with connect(server, request.encode()) as s:
        head, text = b"".join(iter(lambda: s.recv(65536), b"")).decode().split("\r\n\r\n")
    return int(head.split()[1]), text


def ask_json(server, method, path, body=None, **headers):
    status, text = ask(server, method, path, body, **headers)
    assert text.count("\n") == 1
    return status, json.loads(text)


def ask_to_solve(server, **request):
    """The lines of the answer to a request to solve."""
    status, text = ask(server, "POST", "/api/solve", json.dumps(request))
    assert status == 200, text
    return [json.loads(line) for line in text.splitlines()]


def test_run_and_puzzles(server, serve):
    status, run = ask_json(server, "GET", "/api/run")
    assert status == 200 and (run["kind"], run["grid"], run["box"]) == ("sudoku", [4, 4], [2, 2])
    assert run["puzzles"] == 60 and run["depth"] == 4 and run["training_step"] == 70
    status, puzzle = ask_json(server, "GET", "/api/puzzle?index=7", Host=f"LOCALHOST:{server.server_port}")
    assert status == 200 and re.fullmatch("[.1-4]{16}", puzzle["question"])
    for name, array in (("question", server.game.test.inputs), ("answer", server.game.test.labels)):
        assert puzzle[name] == puzzles.text_of(puzzles.guess(16, 6), array[7])
    assert len(ask_to_solve(server, question="." * 16)) == 5  # as many steps as in the evaluation
    run = ask_json(serve("maze"), "GET", "/api/run")[1]
    assert (run["kind"], run["grid"], run["symbols"]) == ("maze", [6, 6], "# SG")
    status, answer = ask_json(serve("maze"), "POST", "/api/solve", '{"question": "S       G"}')
    assert status == 400 and answer["error"] == "the question has 9 cells, not 36"


@pytest.mark.parametrize("kind, copies", [("sudoku", 1), ("sudoku", 3), ("maze", 2)])
def test_answers_are_those_of_solve(serve, folder, kind, copies):
    site, path = serve(kind), str(folder / kind)
    puzzle = ask_json(site, "GET", "/api/puzzle?index=3")[1]
    settings = dict(steps=6, copies=copies, noise=0.5, seed=3)
    first, *steps = ask_to_solve(site, question=puzzle["question"], **settings)
    assert first == settings | {"warning": ""} and len(steps) == 6
    state, c = solve.read_model(path, [f"--eval_rollouts={copies}", "--eval_noise=0.5", "--seed=3"])
    kind, question = puzzles.parse(solve.puzzle_of(state, c), puzzle["question"])
    run = solve.build_run(state, c, path, len(question))
    run.eval_depth = 6
    answers = list(solve.solve(run, question[None]))
    (best,), (attempt,) = solve.surest(np.stack([q_halt for _, q_halt in answers]))
    assert steps[-1]["kept"] == [attempt, best + 1]
    for step, ((preds,), (q_halt,)) in zip(steps, answers):
        given = kind, question[None].repeat(copies, axis=0), preds
        assert step["sure"] == pytest.approx(1 / (1 + np.exp(-q_halt)), abs=1e-3)
        assert step["answers"] == [puzzles.text_of(kind, answer) for answer in preds]
        assert step["broken"] == [np.flatnonzero(cells).tolist() for cells in puzzles.broken_cells(*given)]
        assert step["solved"] == puzzles.are_solutions(*given).tolist()


Q = '"question": "................"'


@pytest.mark.parametrize("request_line, body, status, words", [
    ("POST /api/solve", "", 400, "not JSON"),
    ("POST /api/solve", "[" * 10000, 400, "not JSON"),
    ("POST /api/solve", "[7]", 400, "not JSON, as {"),
    ("POST /api/solve", '{"question": "12"}', 400, "has 2 cells: it must have 4x4"),
    ("POST /api/solve", '{"question": 12}', 400, "question must be str, not int"),
    ("POST /api/solve", '{"question": "11.............."}', 400, "the question has digit 1 twice in row 1"),
    ("POST /api/solve", '{"question": "\\ud800..............."}', 400, "row 1, column 1"),
    ("POST /api/solve", f'{{{Q}, "step": 4}}', 400, "unknown field 'step'"),
    ("POST /api/solve", f'{{{Q}, "steps": 257}}', 400, "steps must be from 1 to 256"),
    ("POST /api/solve", f'{{{Q}, "steps": true}}', 400, "steps must be int, not bool"),
    ("POST /api/solve", f'{{{Q}, "noise": NaN}}', 400, "noise must be from 0 to 10"),
    ("POST /api/solve", " " * 500_000, 413, "more than 20000 bytes"),
    ("POST /api/solve", None, 411, "Content-Length"),
    ("POST /nowhere", "{}", 404, "no such page"),
    ("GET /../play.py", None, 404, "no such page"),
    ("GET http://[", None, 400, ""),
    ("GET /api/puzzle", None, 400, "index"),
    ("GET /api/puzzle?index=60", None, 400, "index must be a number below 60, not '60'"),
    ("GET /api/puzzle?index=" + "1" * 5000, None, 400, "below 60"),
    ("GET /api/puzzle?index=%C2%B2", None, 400, "below 60")])
def test_wrong_requests_are_refused(server, request_line, body, status, words, monkeypatch):
    monkeypatch.setattr(server.game, "solve", None)
    code, answer = ask_json(server, *request_line.split(), body)
    assert code == status and list(answer) == ["error"] and words in answer["error"]


def test_other_hosts_and_pages_of_other_sites_are_refused(server):
    port = server.server_port
    solving, own = ("POST", "/api/solve", f"{{{Q}}}"), f"http://localhost:{port}"
    hosts = (None, "", "evil.example", "127.0.0.1", f"127.0.0.1:{port}.evil.example", f"0.0.0.0:{port}",
             f"127.0.0.1:{port}\r\nHost: 127.0.0.1:{port}")
    origins = "http://evil.example", "null", "", own + "0", own.replace("http", "https")
    for request, headers, word in [
            *((r, {"Host": h}, "Host") for h in hosts for r in (("GET", "/"), ("GET", "/api/run"), solving)),
            *((solving, {"Origin": origin}, "other sites") for origin in origins)]:
        status, answer = ask_json(server, *request, **headers)
        assert status == 403 and word in answer["error"]
    assert ask(server, *solving, Origin=own)[0] == 200


HEAD = b"POST /api/solve HTTP/1.1\r\nHost: 127.0.0.1:PORT\r\n"


BODY = b"Content-Length: 80\r\n\r\n{%s, \"steps\": 256, \"copies\": 16}" % Q.encode().ljust(51)


@pytest.mark.parametrize("sent, received", [
    (b"", 0), (b"GET /", 0), (HEAD, 0), (HEAD + BODY[:40], 0), (HEAD + BODY, 0), (HEAD + BODY, 15),
    (HEAD.replace(b"POST /api/solve", b"GET /") + b"\r\n", 0)])
def test_client_that_leaves(server, monkeypatch, capfd, sent, received):
    """With a reset: whatever it was doing, the server prints nothing, and the model is free again."""
    ended, left = threading.Event(), threading.Event()
    shutdown, reply = server.shutdown_request, play.Handler.reply
    monkeypatch.setattr(server, "shutdown_request", lambda request: (shutdown(request), ended.set()))
    monkeypatch.setattr(play.Handler, "reply", lambda *args: (received or left.wait(20), reply(*args)))
    with connect(server, sent) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close() sends a reset
        assert s.recv(received) if received else time.sleep(0.05) is None  # the server reads what there is
    left.set()
    assert ended.wait(30) and capfd.readouterr() == ("", "")
    assert not server.game.lock.locked()


def test_command_and_a_page_that_fetches_nothing_from_elsewhere(tmp_path):
    """It plays the model of models/ with the largest puzzles, and opens the browser."""
    command = [sys.executable, play.__file__, "--port=0"]
    env = {**os.environ, "BROWSER": f"sh -c 'echo $0 > {tmp_path}/opened' %s"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    try:
        port = int(re.match(r"http://127\.0\.0\.1:(\d+) ", process.stdout.readline())[1])
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60) as response:
            policy, page = response.headers["Content-Security-Policy"], response.read().decode()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/run", timeout=60) as f:
            run = json.load(f)
        shipped = [math.prod(task["grid"]) for task in solve.shipped_models().values()]
        assert math.prod(run["grid"]) == max(shipped) and run["puzzles"] == 100
        wait_for((tmp_path / "opened").exists)
        assert (tmp_path / "opened").read_text() == f"http://127.0.0.1:{port}\n"
        with pytest.raises(UserError, match="--port=0 takes a free one"):
            play.open_server(None, port)
        with pytest.raises(UserError, match="65535"):
            play.open_server(None, 70000)
    finally:
        process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0 and process.stderr.read() == ""
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert not re.search(r"""(src|href)=["'](?!data:,)|url\(|@import|innerHTML""", page)
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}


def test_browser_stays_closed(folder, monkeypatch, capsys):
    with pytest.raises(UserError, match="usage"):
        play.main(["a", "b"])
    monkeypatch.setattr(play.ThreadingHTTPServer, "serve_forever", lambda server: server.server_close())
    monkeypatch.setattr(play.threading, "Thread", lambda **options: pytest.fail("it opens the browser"))
    play.main([str(folder / "sudoku"), "--port=0", "--browser=False"])
    assert "http://127.0.0.1:" in capsys.readouterr().out


def test_model_file_brings_its_puzzles(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where the dataset is not
    own = play.Game(str(folder / "model.pt"), ["--data_path=nowhere"])
    other = play.Game(str(folder / "sudoku"), [])
    assert own.describe() | {"path": ""} == other.describe() | {"path": ""}
    assert [own.test_puzzle(str(i)) for i in range(60)] == [other.test_puzzle(str(i)) for i in range(60)]


def test_models_without_their_dataset(folder, tmp_path):
    state = torch.load(folder / "maze/ckpt_00000004.pt", weights_only=True)
    del state["model"], state["task"]  # as in an official checkpoint
    torch.save(state, tmp_path / "any.pt")
    torch.save(state | {"model": {"seq_len": 36, "vocab_size": 6}}, tmp_path / "sized.pt")
    shutil.copytree(folder / "maze-data", tmp_path / "official")
    os.remove(tmp_path / "official/manifest.json")
    for path, data_path, *expected in (
            (folder / "sudoku", "nowhere", "sudoku", [4, 4], 0),
            (tmp_path / "sized.pt", "nowhere", "maze", [6, 6], 0),
            (tmp_path / "any.pt", tmp_path / "official", "maze", [6, 6], 20)):
        run = (game := play.Game(str(path), [f"--data_path={data_path}"])).describe()
        assert [run["kind"], run["grid"], run["puzzles"]] == expected
        with pytest.raises(UserError, match=f"index must be a number below {expected[-1]}"):
            game.test_puzzle("20")
    with pytest.raises(UserError, match="puzzles of any size.*--data_path"):
        play.Game(str(tmp_path / "any.pt"), ["--data_path=nowhere"])


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
        self.js(f"document.querySelector({json.dumps(selector)}).click()")

    def count(self, selector):
        return self.js(f"document.querySelectorAll({json.dumps(selector)}).length")

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
    browser.choose(puzzle["index"] - 1)
    browser.click("#next")
    browser.until(f"index === {puzzle['index']}")
    assert browser.cells() == list(puzzle["question"])
    steps = browser.solve()
    assert len(steps) == browser.count("#curve circle") == 4 and browser.count("#curve polyline.chosen") == 1
    browser.js("$('slider').focus()")
    browser.press("Home", "Right")
    first = steps[0]["answers"][0]
    assert browser.cells() == list(first)
    wrong = [i for i, (a, b) in enumerate(zip(first, puzzle["answer"])) if a != b]
    assert browser.js("$('status').textContent").startswith(f"Step 1 of 4: {len(wrong)} wrong ✕, ")
    assert wrong == browser.js(
        "[...document.querySelectorAll('#board .cell')].flatMap((el, i) => "
        "getComputedStyle(el).textDecorationLine === 'underline' && el.ariaLabel.endsWith('wrong') && "
        "getComputedStyle(el, '::after').content === '\"✕\"' ? [i] : [])")
    browser.press("Right", "Right")
    assert browser.cells() == list(steps[2]["answers"][0]) and browser.js("shown") == 3
    browser.click("#kept")
    assert browser.js("shown") == steps[-1]["kept"][1]
    browser.js("(request.steps = 100, show(0))")  # which makes the playback fast
    browser.click("#play")
    browser.until("timer !== null && shown > 0")
    browser.until("timer === null && shown === 4")  # it plays to the end and stops


def test_page_thinks_deeper_and_in_copies(browser, server):
    browser.load(server)
    browser.solve()
    browser.click("input[name=steps][value='16']")  # one click solves again
    browser.until("!controller && steps.length === 16")
    browser.click("input[name=copies][value='4']")
    browser.until("!controller && request.copies === 4 && steps.length === 16")
    assert browser.count("#copies .copy") == browser.count("#curve polyline") == 4
    browser.js("show(2)")
    browser.click("#copies .copy:nth-child(3)")
    assert browser.cells() == list(browser.js("steps[1].answers[2]"))
    assert browser.js("document.querySelector('[aria-pressed=true].copy .caption').textContent[0]") in "◆C"
    sure = browser.js("steps[1].sure")
    browser.click("#redraw")
    browser.until("!controller && steps.length === 16 && request.seed === 1")
    again = browser.js("steps[1].sure")
    assert again[0] == sure[0] and again[1:] != sure[1:]
    for width in (360, 700, 1400):
        browser.check_width(width)


def test_page_takes_typed_puzzles_and_shows_errors(browser, server):
    browser.load(server)
    error = browser.js("($('text').value = '12', $('typed').requestSubmit(), $('error').textContent)")
    assert error.startswith("⚠ This line has 2 cells, the model takes 16")
    browser.js("($('text').value = '11' + '.'.repeat(14), $('typed').requestSubmit())")
    assert browser.js("$('error').hidden")
    browser.solve()
    assert browser.js("$('error').textContent") == "⚠ The question has digit 1 twice in row 1"
    assert browser.js("getComputedStyle($('error')).display") != "none" and browser.js("steps") == []
    browser.click("#clear")
    browser.js("document.querySelector('#board .cell').focus()")
    browser.press("Right", "Down", "3", "Right", "Down", "2", "Left", "4", "Backspace", "Home", "Up", "1")
    typed = "....13....2....."
    assert browser.js("$('text').value") == typed and browser.cells() == list(typed)
    assert browser.js("document.activeElement.getAttribute('aria-label')") == "row 2 column 1: 1, given"
    browser.solve()
    assert "more than one solution" in browser.js("$('warning').textContent")
    browser.js("show(1)")
    assert browser.count("#board .wrong") == len(browser.js("steps[0].broken[0]"))
    browser.click("#edit")
    browser.click("#keypad button:nth-child(2)")
    assert browser.js("$('text').value") == "....23....2....."
    browser.check_width(360)


def test_page_solves_mazes(browser, serve):
    browser.load(serve("maze"))
    browser.click("input[name=copies][value='4']")
    steps = browser.solve()
    browser.js("show(4)")
    symbols = {"●": "o", ".": " "}
    walls = browser.js("[...document.querySelectorAll('#board .cell')].map(el => el.matches('.wall'))")
    cells = ["#" if wall else symbols.get(cell, cell) for cell, wall in zip(browser.cells(), walls)]
    assert cells == list(steps[3]["answers"][0])
    browser.js("selectCell(7)")
    browser.press("S", "Right", "NumberSign", "Right", "Space")
    question = browser.js("question")
    assert question.count("S") == 1 and question[7:10] == ["S", "#", " "]
    for width in (360, 1100):
        browser.check_width(width)


def test_page_of_another_kind_compares_with_the_known_answer(browser, serve):
    """On a board of 2x3 cells; of a question that was typed, nothing is known."""
    browser.load(serve("exchange"))
    steps = browser.solve()
    solved = [step["answers"][0] == browser.js("answer.join('')") for step in steps]
    assert [step["solved"][0] for step in steps] == solved and any(solved)
    browser.js("show(1)")
    assert browser.cells() == list(steps[0]["answers"][0])
    assert browser.js("getComputedStyle($('board')).gridTemplateColumns.split(' ').length") == 3
    browser.js("selectCell(1)")
    browser.press("1", "Down", "0", "Left", "Backspace")
    assert browser.js("question.join('')[1] + question.join('').slice(3, 5)") == "100"
    assert not any(step["solved"][0] or step["broken"][0] for step in browser.solve())


def test_page_is_readable_in_light_and_dark_and_has_names(browser, server, puzzle):
    browser.load(server)
    browser.choose(puzzle["index"])
    browser.solve()
    browser.js("show(1)")
    colors = ("(style => [style.color, style.backgroundColor].map(color => color.match(/[0-9.]+/g)"
              ".slice(0, 3).map(Number)))(getComputedStyle(document.querySelector('%s')))")
    rule = "(dark = [...document.styleSheets[0].cssRules].find(rule => rule.media)).media.mediaText"
    assert browser.js(rule) == "(prefers-color-scheme: dark)"
    for scheme in ("not all", "all"):
        browser.js(f"dark.media.mediaText = '{scheme}'")
        for selector in ("body", "#board-card", "#puzzle-card", "#board .wrong", "#board .given", "#solve"):
            rgb = np.array(browser.js(colors % selector)) / 255
            linear = np.where(rgb <= 0.03928, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
            ink, paper = linear @ [0.2126, 0.7152, 0.0722]  # luminance, as in WCAG
            assert selector != "body" or (ink > paper) == (scheme == "all")
            assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) > 4.5, (scheme, selector)
    nameless = browser.js("[...document.querySelectorAll('button, input')].filter(el => !(el.ariaLabel || "
                          "el.textContent.trim() || el.labels?.length)).map(el => el.outerHTML)")
    assert nameless == []
