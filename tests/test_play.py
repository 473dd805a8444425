"""scripts/play.py: its server, and its page in a real browser (Chromium, as Qt WebEngine)."""
import functools
import http.client
import json
import os
import re
import signal
import socket
import struct
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import export
import numpy as np
import play
import pytest
import solve
import torch
from helpers import ROOT, TrainProcess, begun, in_new_process, needs, wait_for

import model
from puzzles.sudoku import Sudoku
from runtime.errors import UserError


def game_of(path, *train_arguments):
    return play.game_of(str(path), *solve.load(str(path), train_arguments))


@pytest.fixture(scope="module")
def serve(models_folder):
    """A function of a model's name that returns its server, which runs in a thread."""
    @functools.cache
    def serve(name):
        server = play.open_server(game_of(models_folder / name), 0)
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

@pytest.mark.parametrize("model, number, attempts, words", [
    (f"{ROOT}/models/sudoku-6x6.pt", "1", 1, "; sure after 6 steps, 1 attempt;"),
    (f"{ROOT}/models/sudoku-6x6.pt", "16", 2, "; sure after 12 steps, 2 attempts;"),
    ("maze", "3", 3, "; not sure after 18 steps, 3 attempts;")])
def test_the_kept_answer_is_that_of_solve(serve, run_solve, model, number, attempts, words):
    server = serve(model)
    game = server.game
    request = dict(game.test_puzzle(number), steps=6, attempts=3, seed=3)
    status, (first, *lines, last) = ask(server, "POST", "/api/solve", json.dumps(request))
    assert (status, first, last) == (200, request | {"warning": ""}, {"attempts": attempts})
    assert [line["attempt"] for line in lines] == np.repeat(np.arange(attempts) + 1, 6).tolist()
    sure = np.array([line["sure"] for line in lines])
    i = sure.argmax()
    flags = "--eval_halt_max_steps=6", "--eval_attempts=3", "--seed=3", "--eval_patience=0"
    text = run_solve(game.path, request["question"], *flags)
    assert lines[i]["answer"] in text.splitlines()
    assert f"step {i % 6 + 1}: {sure.max():.0%} sure{words}" in text
    assert lines[i]["solved"] == ("a solution" in text)


def test_one_of_several_right_answers_is_not_shown_as_the_answer(server, monkeypatch):
    """The page then marks what breaks the rules, not what differs from the known answer."""
    assert re.fullmatch("[1-4]{16}", server.game.test_puzzle("60")["answer"])
    monkeypatch.setattr(Sudoku, "has_several_answers", True)
    assert server.game.test_puzzle("60")["answer"] is None


REQUEST = dict(question="." * 16, steps=256, attempts=16, seed=0)


@pytest.mark.parametrize("request_line, changes, words", [
    ("POST /api/solve", {"steps": "many"}, "steps must be an integer from 1 to 256, not 'many'"),
    ("POST /api/solve", {"steps": 2.5}, "steps must be an integer from 1 to 256, not 2.5"),
    ("POST /api/solve", {"steps": 0}, "steps must be an integer from 1 to 256, not 0"),
    ("POST /api/solve", {"attempts": 1_000_000}, "attempts must be an integer from 1 to 16, not 1000000"),
    ("POST /api/solve", {"seed": None}, "seed must be an integer from 0"),
    ("POST /api/solve", {"question": "12"}, "with 2 cells, is no puzzle"),
    ("POST /api/solve", {"question": "11.............."}, "the puzzle has no solution: row 1, column 1"),
    ("GET /../play.py", {}, "no such page"),
    ("GET /api/puzzle?number=0", {}, "number must be from 1 to 60, not 0"),
    ("GET /api/puzzle?number=%C2%B2", {}, "%C2%B2")])
def test_wrong_requests_are_refused(server, request_line, changes, words):
    status, [answer] = ask(server, *request_line.split(), json.dumps(REQUEST | changes))
    assert status == 400 and list(answer) == ["error"] and words in answer["error"]


def test_a_request_needs_a_question_alone(server, arc_server):
    _, (first, *lines) = ask(server, "POST", "/api/solve", json.dumps({"question": "." * 16}))
    run = server.game.describe()
    assert (first["steps"], first["attempts"]) == (run["depth"], run["attempts"])
    assert len(lines) == run["depth"] * lines[-1]["attempts"] + 1
    for played, body, missing in (server, "{}", "question"), (arc_server, '{"question": [[1]]}', "task"):
        assert ask(played, "POST", "/api/solve", body) == (400, [{"error": f"{missing} is missing"}])


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
    process = TrainProcess([str(models_folder / "model.pt"), "--port=0"], script="play")
    with begun(process, "open http://127.0.0.1:"):
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(20) == 3


@pytest.mark.parametrize("flags, words", [
    (["--eval_attempts=17"], "eval_attempts=17: the page takes up to 16"),
    (["--eval_halt_max_steps=257"], "eval_halt_max_steps=257: the page takes up to 256"),
    (["--eval_halt_max_steps=0", "--halt_max_steps=300"], "steps=300: the page takes up to 256"),
    (["--eval_attempts=16", "--eval_halt_max_steps=256", "--port=-1"], "--port=-1: ")])
def test_command_refuses_what_its_server_would(models_folder, flags, words):
    with pytest.raises(UserError, match=re.escape(words)):
        play.main([str(models_folder / "model.pt"), *flags])


def test_page_writes_no_html():
    """What somebody types, or a file holds, is text."""
    assert "innerHTML" not in play.PAGE.read_text()


def test_arc_needs_the_dataset_that_it_was_trained_on(arc_folder, models_folder):
    with pytest.raises(UserError, match="was not trained on .*sudoku-data"):
        game_of(arc_folder / "arc", f"--data_path={models_folder / 'sudoku-data'}")


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

        class NoNetwork(QtWebEngineCore.QWebEngineUrlRequestInterceptor):
            def interceptRequest(self, info):
                requests.append(info.requestUrl().scheme())
                info.block(requests[-1] != "file")

        self.messages = messages = []  # of the console
        self.requests = requests = []  # schemes of the addresses that were asked for without a network
        self.no_network = NoNetwork()
        self.app = QtWidgets.QApplication.instance() or QtWidgets.QApplication(["test_play"])
        self.test = QtTest.QTest
        self.view = QtWebEngineWidgets.QWebEngineView()
        self.page = Page(self.view)
        self.view.setPage(self.page)
        self.view.show()

    def load(self, server):
        self.open(f"http://127.0.0.1:{server.server_port}/")

    def open(self, url):
        from PyQt6.QtCore import QUrl
        for address in "about:blank", url:
            self.page.setUrl(QUrl(address))
            self.wait_for_signal(self.page.loadFinished)
        self.until("run && question.length === cellCount()")

    def wait_for_signal(self, signal):
        calls = []
        signal.connect(calls.append)
        self.wait(lambda: calls)

    def wait(self, condition, pause=5):
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end, self.messages
            self.test.qWait(pause)

    def js(self, code):
        """Returns the value of a JavaScript expression in the page."""
        results = []
        self.page.runJavaScript(f"JSON.stringify({code}) ?? 'null'", results.append)
        self.wait(lambda: results)
        assert results[0], f"{code}: {self.messages}"
        return json.loads(results[0])

    def until(self, code):
        self.wait(lambda: self.js(code), pause=20)

    def click(self, selector):
        self.js(f"document.querySelector('{selector}').click()")

    def press(self, *names):
        from PyQt6.QtCore import Qt
        for name in names:
            self.test.keyClick(self.view.focusProxy(), getattr(Qt.Key, "Key_" + name))
            self.test.qWait(30)

    def press_mouse(self, selector):
        """Clicks with the mouse, which takes the focus from a field first."""
        from PyQt6.QtCore import QPoint, Qt
        left, top = self.js(f"(r => [r.left + 9, r.top + 9])($('{selector[1:]}').getBoundingClientRect())")
        place = QPoint(round(left), round(top))
        self.test.mouseClick(self.view.focusProxy(), Qt.MouseButton.LeftButton, pos=place)
        self.test.qWait(30)

    def texts(self, selector):
        return self.js(f"[...document.querySelectorAll('{selector}')].map(el => el.textContent)")

    def type(self, text):
        """Enters a puzzle as text; returns the error that the page shows."""
        return self.js(f"($('text').value = '{text}', $('typed').requestSubmit(), $('error').textContent)")

    def solve(self, number=0):
        """Solves the question, or a test puzzle; returns the steps."""
        if number:
            self.js(f"(window.chosen = false, choose({number}).then(() => {{ chosen = true; }}), 0)")
            self.until("chosen")
        self.click("#solve")
        self.until("!controller")
        return self.js("(stop(), stepsOf(0))")


@pytest.fixture(scope="module")
def chromium():
    needs("PyQt6-WebEngine")
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
    browser.until("shown === 1")  # a busy machine is late
    assert browser.texts("#board .cell") == steps[0]["answer"]
    browser.click("#kept")
    sure = browser.js("attempts.map(steps => steps.map(step => step.sure))")
    assert sure[browser.js("attempt")][browser.js("shown") - 1] == max(map(max, sure))
    browser.js("(request.steps = 100, show(0))")  # which makes the playback fast
    browser.click("#play")
    browser.until("timer === null && shown === 4")  # it plays to the end and stops


def test_page_marks_what_is_wrong(browser, server):
    """The cells unlike the known answer; without one, those that break a rule, a row of them as a row."""
    browser.load(server)
    browser.solve(number=2)
    status = "(show(1), $('status').textContent)"
    browser.js("(attempts[0][0].solved = false, answer = [...attempts[0][0].answer],"
               " answer[5] = answer[6] = 'x')")
    assert ": 2 cells wrong ✕, " in browser.js(status)
    assert len(browser.texts("#board .wrong")) == 2
    browser.js("(answer = null, attempts[0][0].broken = [0, 1, 2, 3, 15])")
    assert "row 1, 1 cell break a rule ✕" in browser.js(status)
    assert len(browser.texts("#board .group")) == len(browser.texts("#board .cell.wrong")) == 1


def test_page_thinks_deeper_and_in_attempts(browser, server):
    browser.load(server)
    browser.solve()
    browser.click('input[name=steps][value="16"]')  # one click solves again
    browser.until("!controller && stepsOf(0).length === 16")
    browser.click('input[name=attempts][value="4"]')
    browser.until("!controller && request.attempts === 4 && attempts.length === 4")
    assert len(browser.texts("#attempts .attempt")) == len(browser.texts("#curve polyline")) == 4
    assert "; not sure after 4 attempts" in browser.js("(stop(), $('status').textContent)")
    sure = browser.js("attempts.map(steps => steps[1].sure)")
    browser.click("#redraw")
    browser.until("!controller && request.seed === 1")
    again = browser.js("attempts.map(steps => steps[1].sure)")
    assert again[0] == sure[0] and again[1:] != sure[1:]
    # the playback goes on with the next attempt, to the end of the last
    browser.js("(stop(), attempt = 2, show(15))")
    browser.click("#play")
    browser.until("timer === null && attempt === 3 && shown === 16")


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


def test_page_solves_what_was_typed_or_chosen_beside_the_board(browser, server):
    """A number, the next puzzle, and a line without "Use"; what is no puzzle keeps its error."""
    browser.load(server)
    browser.js("$('number').select()")
    browser.press("7")
    browser.press_mouse("#solve")
    for number in 7, 8:
        wanted = server.game.test_puzzle(number)["question"]
        browser.until(f"!controller && request?.question === '{wanted}' && stepsOf(0).length === 4")
        assert browser.js("[question.join(''), $('text').value, number]") == [wanted, wanted, number]
        browser.js("($('next').click(), $('solve').click(), 0)")
    browser.until("!controller && number === 9 && stepsOf(0).length === 4")
    for field, typed, words in ("number", "99", "must be from 1 to 60"), ("text", "12", "has 2 cells"):
        browser.js(f"(request.is_old = true, showError(''), $('{field}').select())")
        browser.press(*typed)
        for _ in range(2):
            browser.press_mouse("#solve")
            browser.until(f"!controller && $('error').textContent.includes('{words}')")
            assert browser.js("[request.is_old, $('error').hidden]") == [True, False]
    assert browser.js("$('number').value") == "9"
    browser.js("$('text').select()")
    browser.press(*"1000000000000000")
    browser.press_mouse("#solve")
    browser.until("!controller && request.question === '1' + '.'.repeat(15)")


SQUARES = "🟥🟦"  # each has two units of UTF-16


@pytest.fixture(params=["server", "file"])
def squares(request, browser, serve, models_folder):
    """The page of a model without rules, from the server or in a file; returns its three test puzzles.

    The symbols are colored squares, and may change places. The answer of puzzle 1 leaves out a cell.
    """
    export.main([str(models_folder / "exchange"), "exchange.pt"])
    saved = torch.load("exchange.pt")
    saved["task"] |= {"symbols": "_" + SQUARES, "symmetries": {"permute_symbols": SQUARES}}
    saved["test_puzzles"]["labels"][0][0] = 0
    saved["test_puzzles"] = {name: t[:3] for name, t in saved["test_puzzles"].items()}
    torch.save(saved, "squares.pt")
    server = serve(os.path.abspath("squares.pt"))
    if request.param == "file":
        export.main(["squares.pt", "squares.html"])
        browser.open(f"file://{os.path.abspath('squares.html')}")
    else:
        browser.load(server)
    return [server.game.test_puzzle(number) for number in (1, 2, 3)]


def test_page_takes_symbols_of_two_units(browser, squares):
    browser.type(SQUARES * 3)
    browser.click('input[name=attempts][value="4"]')
    browser.solve()
    assert browser.js("[$('error').hidden, request.question, attempts.length]") == [True, SQUARES * 3, 2]
    assert set(browser.js("attempts.flat().flatMap(step => step.answer)")) <= {*SQUARES}
    browser.click("#clear")
    assert browser.js("[question, $('text').value]") == [["🟥"] * 6, "🟥" * 6]
    assert browser.texts("#keypad button") == ["🟦", "⌫"]
    browser.js("""$('board').onkeydown(new KeyboardEvent("keydown", {key: "🟦"}))""")
    assert browser.js("question.join('')") == "🟦" + "🟥" * 5


def test_page_judges_a_typed_question_as_the_test_puzzle(browser, squares):
    """Without rules the known answer decides. What has none, or one that lacks a cell, is not judged."""
    verdicts = []
    for number, puzzle in enumerate(squares, 1):
        browser.solve(number)
        verdicts.append(browser.js("verdict(4, 0)"))
        browser.type(puzzle["question"])
        browser.solve()
        assert browser.js("verdict(4, 0)") == verdicts[-1]
    assert verdicts[0].startswith("not judged, ")
    assert all(re.match("solved|[1-6] cells? wrong", verdict) for verdict in verdicts[1:])
    browser.type("🟥" * 6)
    browser.solve()
    assert ": not judged, " in browser.js("(show(4), $('status').textContent)")
    assert browser.texts("#board .wrong") == browser.texts("#curve .solved") == []


def test_page_shows_an_arc_task_and_its_versions_vote_as_in_the_evaluation(browser, arc_server, arc_folder):
    browser.load(arc_server)
    browser.solve(number=2)
    puzzle = arc_server.game.test_puzzle("2")
    assert len(browser.texts("#pairs .pair")) == 4
    assert browser.js("asGrid(question)") == puzzle["question"]
    elected = browser.js("(show(3), stepsOf(0)[2].votes.map(vote => vote.grid))")
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


# The page in one file of export.py

DEMO = f"{ROOT}/docs/demo.html"
MODELS = ["sudoku-9x9", "sudoku-6x6", "maze-6x6"]  # in this order


@pytest.fixture
def offline(browser):
    """The browser without a network: the page asks for its file only."""
    browser.requests.clear()
    browser.page.setUrlRequestInterceptor(browser.no_network)
    yield browser
    browser.page.setUrlRequestInterceptor(None)
    assert set(browser.requests) == {"file"}


def answers_of(browser, request):
    """Returns the lines with which the worker answers a request to solve."""
    browser.js(f"""(window.lines = [], (async () => {{
        for await (const line of call("/api/solve", {json.dumps(request)})) lines.push(line);
    }})(), 0)""")
    browser.until("'attempts' in (lines.at(-1) ?? {}) && lines.length > 1")
    return browser.js("lines")


def check_answers(browser, path, numbers=(1, 2)):
    """Checks that the page in the browser answers as play.py's server does, q_halt within 1e-3."""
    def q_halt(line):
        sure = line.pop("sure")
        return np.log(sure / (1 - sure))

    game = game_of(path)
    for number in numbers:
        request = dict(game.test_puzzle(number), steps=3, attempts=1, seed=0)
        ours, theirs = answers_of(browser, request), list(game.solve(request))
        assert browser.js("lines[0].question") == request["question"] and len(ours) == 5
        assert [*map(q_halt, ours[1:-1])] == pytest.approx([*map(q_halt, theirs[1:-1])], abs=1e-3)
        assert ours == theirs


def test_demo_is_what_export_writes():
    """If not: rm docs/demo.html, and python scripts/export.py with these arguments."""
    paths = [f"{ROOT}/models/{name}.pt" for name in MODELS]
    export.main([*paths, "demo.html"])
    page = Path("demo.html").read_bytes()
    assert page == Path(DEMO).read_bytes() and len(page) <= 3_000_000


@pytest.mark.parametrize("name", MODELS)
def test_file_answers_as_the_server_does(offline, name):
    offline.open(f"file://{DEMO}#{MODELS.index(name)}")
    check_answers(offline, f"{ROOT}/models/{name}.pt", [2])


@pytest.mark.parametrize("settings", [
    dict(mlp_t=False, pos_encodings="rope"),
    dict(mlp_t=False, pos_encodings="learned"),
    dict(puzzle_emb_ndim=40, puzzle_emb_len=3)], ids=["rope", "learned", "puzzle embedding"])
def test_file_answers_with_other_blocks(offline, models_folder, settings):
    save_model(models_folder, "model.pt", settings)
    export.main(["model.pt", "page.html"])
    offline.open(f"file://{os.getcwd()}/page.html")
    check_answers(offline, "model.pt")


@pytest.mark.parametrize("kind, attempts", [("maze", 8), ("exchange", 1)])
def test_file_of_a_run(offline, models_folder, kind, attempts):
    """Without rules or symmetries, the page compares with the known answer and makes one attempt."""
    export.main([str(models_folder / kind), "page.html"])
    offline.open(f"file://{os.getcwd()}/page.html")
    check_answers(offline, str(models_folder / kind))
    assert offline.js("run.attempts") == attempts and offline.js("$('models').hidden")


def save_model(models_folder, path, settings, num_puzzle_identifiers=1):
    """Writes a file of a model of 4x4 Sudoku with random weights, in which the halting head has some too."""
    saved = torch.load(models_folder / "model.pt")
    settings = saved["settings"] | settings | {"seed": 1}
    sizes = saved["sizes"] | {"num_puzzle_identifiers": num_puzzle_identifiers}
    trm = model.TRM(SimpleNamespace(**settings), **sizes)
    generator = torch.Generator().manual_seed(2)
    trm.q_head.weight.data.normal_(0, 0.1, generator=generator)
    if trm.has_puzzle_emb:
        trm.puzzle_emb.weights.normal_(generator=generator)
    torch.save(saved | dict(sizes=sizes, settings=settings, weights=trm.state_dict()), path)


def test_file_plays_as_with_a_server(offline):
    """It makes attempts, takes another model, warns, and leaves a puzzle for another one."""
    offline.open(f"file://{DEMO}#2")
    assert offline.texts("#models a") == ["9×9 Sudoku", "6×6 Sudoku", "6×6 mazes"]
    offline.solve(number=45)
    assert offline.js("kept()[0] > 0 && kept()[0] === attempts.length - 1")  # sure at a later attempt
    assert offline.js("stepsOf(kept()[0]).at(-1).solved")
    offline.click("#models a:nth-child(2)")
    offline.until("typeof run === 'object' && run?.model === 1 && question.length === cellCount()")
    offline.type("11" + "." * 34)
    offline.solve()
    assert "⚠ The puzzle has no solution: row 1, column 1 breaks" in offline.js("$('error').textContent")
    offline.click("#clear")
    offline.click("#solve")
    offline.until("stepsOf(0).length")
    assert "more than one solution" in offline.js("$('warning').textContent")
    assert offline.solve(number=2)[-1]["solved"]


def export_with_fork(path):
    load = solve.load
    paths = []
    solve.load = lambda path, *rest: paths.append(path) or load(path, *rest)
    export.main([path, path, "fork.py", "page.html"])
    assert len(paths) == 2 and Path("runs.txt").read_text() == "once"


def test_export_loads_each_model_once_and_runs_its_fork_once(models_folder):
    Path("fork.py").write_text("import model\nopen('runs.txt', 'a').write('once')\n")
    in_new_process(export_with_fork, str(models_folder / "model.pt"))


PAGE_FORKS = {"losses.py": "model.TRM.losses = lambda *arguments: None", "network.py": "model.rms_norm = abs"}


@pytest.mark.parametrize("argv, words", [
    (["a.pt"], "usage"),
    (["a.pt", "b.pt", "c.pt"], "usage"),
    (["arc.pt", "page.html"], "arc.pt has 41 puzzle identifiers: play.py takes it"),
    (["identifiers.pt", "page.html"], "identifiers.pt has 2 puzzle identifiers: play.py takes it"),
    (["fork.pt", "page.html"], "fork.pt: trained with the fork gone.py 12345678, which is not among"),
    (["model.pt", "network.py", "page.html"], "model.pt: a fork replaces rms_norm in model.py: play.py"),
    (["model.pt", "losses.py", "here/page.html"], "here/page.html: must be a new file in a folder"),
    (["model.pt", "losses.py", "page.HTML"], "")])
def test_models_that_no_file_can_run_are_refused(models_folder, arc_folder, argv,
                                                 words):
    save_model(models_folder, "model.pt", {})
    save_model(models_folder, "identifiers.pt", dict(puzzle_emb_ndim=32), num_puzzle_identifiers=2)
    torch.save(torch.load("model.pt") | dict(forks={"gone.py": "12345678"}), "fork.pt")
    Path("arc.pt").symlink_to(arc_folder / "model.pt")
    for name, line in PAGE_FORKS.items():
        Path(name).write_text(f"import model\n{line}\n")
    text = TrainProcess(argv, script="export").output(2 if words else 0)
    assert words in text and not Path("page.html").exists()
    assert words or Path("page.HTML").read_text().startswith("<!doctype html>")


def test_an_edited_model_whose_weights_engine_js_does_not_know_is_refused(models_folder, monkeypatch):
    init = model.Block.__init__

    def with_a_layer(self, settings, length):
        init(self, settings, length)
        self.gate = torch.nn.Linear(4, 4)

    monkeypatch.setattr(model.Block, "__init__", with_a_layer)
    save_model(models_folder, "model.pt", {})
    with pytest.raises(UserError, match="engine.js does not know the weights L_level.layers.0.gate"):
        export.main(["model.pt", "page.html"])
