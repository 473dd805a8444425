"""scripts/play.py: its server, and its page in a real browser (Chromium, as Qt WebEngine)."""
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import numpy as np
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
sys.path.insert(0, os.path.join(ROOT, "scripts"))
import play  # noqa: E402
import prepare_maze  # noqa: E402
import prepare_sudoku  # noqa: E402
import solve  # noqa: E402
import train  # noqa: E402
from configurator import UserError, configure  # noqa: E402

FLAGS = [
    "--device=cpu", "--hidden_size=64", "--num_heads=2", "--puzzle_emb_ndim=0", "--expansion=2",
    "--H_cycles=1", "--L_cycles=1", "--halt_max_steps=2", "--eval_halt_max_steps=4",
    "--forward_dtype=float32", "--global_batch_size=48", "--lr=7e-3", "--lr_warmup_steps=10",
    "--ema_rate=0.8", "--loss_type=softmax_cross_entropy", "--eval_interval=0", "--max_steps=20"]
SIZES = {"sudoku": ["--size=4", "--num_aug=9"], "maze": ["--size=6", "--min_path=6"]}
SCRIPTS = {"sudoku": prepare_sudoku, "maze": prepare_maze}
MODELS = {"sudoku": [], "maze": ["--mlp_t=False", "--pos_encodings=rope"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """{sudoku,maze}-data/, and {sudoku,maze}/, of models of 4x4 Sudoku and 6x6 mazes that solve little."""
    path = tmp_path_factory.mktemp("play")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for kind, script in SCRIPTS.items():
        data = ["--source=generate", "--num_train=300", "--num_test=20", f"--output_dir={path / kind}-data"]
        script.prepare(configure(script.__file__, data + SIZES[kind]))
        paths = [f"--data_path={path / kind}-data", f"--out_dir={path / kind}"]
        train.main(configure(train.__file__, FLAGS + MODELS[kind] + paths))
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return path


def serve(game):
    """A server of the game in a thread."""
    server = play.open_server(game, 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.fixture(scope="module")
def server(folder):
    server = serve(play.Game(str(folder / "sudoku"), []))
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def maze_server(folder):
    server = serve(play.Game(str(folder / "maze"), []))
    yield server
    server.shutdown()
    server.server_close()


def ask(server, method, path, body=None, **headers):
    """(status, text) of the answer to a request; body: JSON text. A header of None is left out."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    headers = {"Host": f"127.0.0.1:{server.server_port}"} | headers
    if body is not None:
        headers.setdefault("Content-Length", str(len(body)))
    connection.putrequest(method, path, skip_host=True)
    for name, value in headers.items():
        if value is not None:
            connection.putheader(name, value)
    connection.endheaders(body.encode() if body else None)
    response = connection.getresponse()
    answer = response.status, response.read().decode()
    connection.close()
    return answer


def ask_json(server, method, path, body=None, **headers):
    status, text = ask(server, method, path, body, **headers)
    assert text.count("\n") == 1
    return status, json.loads(text)


def ask_to_solve(server, **request):
    """The lines of the answer to a request to solve."""
    status, text = ask(server, "POST", "/api/solve", json.dumps(request))
    assert status == 200, text
    return [json.loads(line) for line in text.splitlines()]


def test_run_and_puzzles(server, maze_server):
    status, run = ask_json(server, "GET", "/api/run")
    assert status == 200 and (run["kind"], run["size"], run["box"]) == ("sudoku", 4, [2, 2])
    assert run["puzzles"] == 20 and run["depth"] == 4 and run["training_step"] == 20
    status, puzzle = ask_json(server, "GET", "/api/puzzle?index=7", Host=f"LOCALHOST:{server.server_port}")
    assert status == 200 and re.fullmatch("[.1-4]{16}", puzzle["question"])
    assert all(q in ("." + a) for q, a in zip(puzzle["question"], puzzle["answer"]))
    question, answer = (server.game.test.inputs[7], server.game.test.labels[7])
    assert puzzle["question"] == solve.text_of("sudoku", question)
    assert puzzle["answer"] == solve.text_of("sudoku", answer)
    run = ask_json(maze_server, "GET", "/api/run")[1]
    assert (run["kind"], run["size"], run["symbols"]) == ("maze", 6, "# SG")


@pytest.mark.parametrize("kind, copies", [("sudoku", 1), ("sudoku", 3), ("maze", 2)])
def test_answers_are_those_of_solve(server, maze_server, folder, kind, copies):
    site = {"sudoku": server, "maze": maze_server}[kind]
    puzzle = ask_json(site, "GET", "/api/puzzle?index=3")[1]
    first, *steps = ask_to_solve(site, question=puzzle["question"], steps=6, copies=copies, noise=0.5, seed=3)
    assert first == dict(steps=6, copies=copies, noise=0.5, seed=3, warning="") and len(steps) == 6
    kind, size, question = solve.parse_puzzle(puzzle["question"])
    path = str(folder / kind)
    state, c = solve.read_model(path, [f"--eval_rollouts={copies}", "--eval_noise=0.5", "--seed=3"])
    run = solve.build_run(state, c, path, kind, size)
    run.eval_depth = 6
    logits = []
    for step, (preds, q_halt) in zip(steps, solve.solve(run, question[None])):
        logits.append(q_halt[0])
        best = np.unravel_index(np.argmax(logits), (len(logits), copies))
        assert step["kept"] == [best[1], best[0] + 1]
        assert step["sure"] == pytest.approx(1 / (1 + np.exp(-q_halt[0])), abs=1e-3)
        for i in range(copies):
            assert step["answers"][i] == solve.text_of(kind, preds[0, i])
            broken = solve.broken_cells(kind, size, question, preds[0, i])
            assert step["broken"][i] == np.flatnonzero(broken).tolist()
            verdict = solve.verdict(kind, size, question, preds[0, i])
            assert step["solved"][i] == verdict.startswith(("a solution", "a shortest path"))


def test_defaults_and_warning(server):
    first, *steps = ask_to_solve(server, question="." * 16)
    assert len(steps) == 4 and len(steps[0]["answers"]) == 1
    assert "more than one solution" in first["warning"]


Q = '"question": "................"'


@pytest.mark.parametrize("body, status, words", [
    ("", 400, "not JSON"),
    ("{", 400, "not JSON"),
    ("[" * 10000, 400, "not JSON"),
    ("[]", 400, "must be an object"),
    ("{}", 400, "the question has 0 cells, not 16"),
    ('{"question": "12"}', 400, "the question has 2 cells, not 16"),
    ('{"question": 12}', 400, "question must be str, not int"),
    ('{"question": "...x............"}', 400, "row 1, column 4 of the puzzle is 'x'"),
    ('{"question": "S              G"}', 400, "the question is not a sudoku of 4x4 cells"),
    ('{"question": "11.............."}', 400, "the question has digit 1 twice in row 1"),
    ('{"question": "123....4........"}', 400, "no solution"),
    ('{"question": "\\ud800..............."}', 400, "row 1, column 1"),
    ('{"question": "...............\\n"}', 400, "has 15 cells"),
    (f'{{{Q}, "step": 4}}', 400, "unknown field 'step'"),
    (f'{{{Q}, "steps": 0}}', 400, "steps must be from 1 to 256"),
    (f'{{{Q}, "steps": 257}}', 400, "steps must be from 1 to 256"),
    (f'{{{Q}, "steps": 4.5}}', 400, "steps must be int, not float"),
    (f'{{{Q}, "steps": true}}', 400, "steps must be int, not bool"),
    (f'{{{Q}, "steps": null}}', 400, "steps must be int, not NoneType"),
    (f'{{{Q}, "copies": 17}}', 400, "copies must be from 1 to 16"),
    (f'{{{Q}, "noise": NaN}}', 400, "noise must be from 0 to 10"),
    (f'{{{Q}, "noise": 1e999}}', 400, "noise must be from 0 to 10"),
    (f'{{{Q}, "noise": "1"}}', 400, "noise must be float, not str"),
    (f'{{{Q}, "seed": -1}}', 400, "seed must be from 0 to"),
    (f'{{{Q}, "seed": {10 ** 30}}}', 400, "seed must be from 0 to"),
    (" " * 20_001, 413, "more than 20000 bytes"),
    (" " * 500_000, 413, "more than 20000 bytes")])
def test_malformed_requests_are_refused_and_nothing_is_solved(server, body, status, words, monkeypatch):
    monkeypatch.setattr(server.game, "solve", None)
    code, answer = ask_json(server, "POST", "/api/solve", body)
    assert code == status and list(answer) == ["error"] and words in answer["error"]


@pytest.mark.parametrize("method, path, status, words", [
    ("GET", "/favicon.ico", 404, "no such page"),
    ("GET", "/../play.py", 404, "no such page"),
    ("GET", "http://[", 400, ""),
    ("POST", "/nowhere", 404, "no such page"),
    ("GET", "/api/solve", 405, "takes POST"),
    ("POST", "/api/run", 405, "takes GET"),
    ("POST", "/", 405, "takes GET"),
    ("PUT", "/api/solve", 405, ""),
    ("DELETE", "/", 405, ""),
    ("OPTIONS", "/api/solve", 405, ""),
    ("GET", "/api/puzzle", 400, "index"),
    ("GET", "/api/puzzle?index=20", 400, "index must be a number below 20, not '20'"),
    ("GET", "/api/puzzle?index=-1", 400, "below 20"),
    ("GET", "/api/puzzle?index=x", 400, "below 20"),
    ("GET", "/api/puzzle?index=" + "1" * 5000, 400, "below 20"),
    ("GET", "/api/puzzle?index=%C2%B2", 400, "below 20"),
    ("GET", "/api/puzzle?index=", 400, "below 20"),
    ("GET", "/api/puzzle?index=1&index=2", 400, "index"),
    ("GET", "/api/puzzle?index=1&more=2", 400, "index")])
def test_other_paths_and_methods(server, method, path, status, words):
    code, answer = ask_json(server, method, path, "{}" if method == "POST" else None)
    assert code == status and list(answer) == ["error"] and words in answer["error"]


@pytest.mark.parametrize("headers", [
    dict(Host=None), dict(Host=""), dict(Host="evil.example"), dict(Host="evil.example:{port}"),
    dict(Host="127.0.0.1"), dict(Host="127.0.0.1:1"), dict(Host="127.0.0.1:{port}.evil.example"),
    dict(Host="[::1]:{port}"), dict(Host="0.0.0.0:{port}")])
def test_other_hosts_are_refused(server, headers):
    headers = {name: value and value.format(port=server.server_port) for name, value in headers.items()}
    for method, path in (("GET", "/"), ("GET", "/api/run"), ("POST", "/api/solve")):
        status, answer = ask_json(server, method, path, f"{{{Q}}}" if method == "POST" else None, **headers)
        assert status == 403 and "Host" in answer["error"]


def test_requests_of_other_sites_are_refused(server):
    own = f"http://localhost:{server.server_port}"
    for origin in ("http://evil.example", "null", "", own + "0", own.replace("http", "https")):
        status, answer = ask_json(server, "POST", "/api/solve", f"{{{Q}}}", Origin=origin)
        assert status == 403 and "other sites" in answer["error"]
    assert ask(server, "POST", "/api/solve", f"{{{Q}}}", Origin=own)[0] == 200


@pytest.mark.parametrize("request_text, status", [
    (b"nonsense\r\n\r\n", b"Bad request syntax"),
    (b"GET / HTTP/9.9\r\n\r\n", b"Invalid HTTP version"),  # of an unknown version: without a status line
    (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", b"414"),
    (b"POST /api/solve HTTP/1.1\r\nHost: 127.0.0.1:PORT\r\n\r\n", b"411"),
    (b"POST /api/solve HTTP/1.1\r\nHost: 127.0.0.1:PORT\r\nContent-Length: -1\r\n\r\n", b"411"),
    (b"GET / HTTP/1.1\r\nHost: 127.0.0.1:PORT\r\nHost: 127.0.0.1:PORT\r\n\r\n", b"403")])
def test_malformed_http(server, request_text, status):
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as s:
        s.sendall(request_text.replace(b"PORT", str(server.server_port).encode()))
        answer = b"".join(iter(lambda: s.recv(65536), b""))
    assert list(json.loads(answer.split(b"\r\n\r\n")[-1])) == ["error"]
    assert status in answer.split(b"\r\n")[0]


def test_request_that_is_given_up_releases_the_model(server):
    body = json.dumps(dict(question="." * 16, steps=256, copies=16))
    with socket.create_connection(("127.0.0.1", server.server_port)) as s:
        s.sendall(f"POST /api/solve HTTP/1.1\r\nHost: localhost:{server.server_port}\r\n"
                  f"Content-Length: {len(body)}\r\n\r\n{body}".encode())
        assert s.recv(15)
    assert len(ask_to_solve(server, question="." * 16, steps=2)) == 3
    assert not server.game.lock.locked()


def test_page_fetches_nothing_from_elsewhere(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    connection.request("GET", "/")
    response = connection.getresponse()
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    page = response.read().decode()
    assert not re.search(r"""(src|href)=["'](?!data:,)|url\(|@import|innerHTML""", page)
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}


def test_command(folder):
    command = [sys.executable, os.path.join(ROOT, "scripts", "play.py"), str(folder / "sudoku"), "--port=0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        address = re.match(r"(http://127\.0\.0\.1:\d+) ", process.stdout.readline())[1]
        assert json.load(urllib.request.urlopen(f"{address}/api/run", timeout=60))["puzzles"] == 20
        second = command[:-1] + [f"--port={address.split(':')[-1]}"]
        done = subprocess.run(second, capture_output=True, text=True, timeout=100)
        assert done.returncode == 2 and re.fullmatch(".*--port=0 takes a free one\n", done.stderr)
    finally:
        process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0 and process.stderr.read() == ""


def test_models_without_their_data_set(folder):
    game = play.Game(str(folder / "sudoku"), ["--data_path=nowhere"])
    assert (game.kind, game.size, game.describe()["puzzles"]) == ("sudoku", 4, 0)
    with pytest.raises(UserError, match="index must be a number below 0"):
        game.puzzle("0")
    with pytest.raises(UserError, match="puzzles of any size.*--data_path"):
        play.Game(str(folder / "maze"), ["--data_path=nowhere"])


@pytest.mark.parametrize("argv, words", [
    ([], "usage"),
    (["a", "b"], "usage"),
    (["nowhere"], "no such checkpoint"),
    (["{run}", "--port=70000"], "port must be from 0 to 65535"),
    (["{run}", "--prt=1"], "unknown setting prt"),
    (["{run}", "--hidden_size=32"], "these settings need")])
def test_wrong_arguments(folder, argv, words):
    with pytest.raises(UserError, match=words):
        play.main([a.format(run=folder / "sudoku") for a in argv])


# The page.

class Browser:
    """A Chromium window without a screen."""

    def __init__(self):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.debugging_port = s.getsockname()[1]
        os.environ["QT_QPA_PLATFORM"] = "offscreen"
        os.environ["QTWEBENGINE_REMOTE_DEBUGGING"] = str(self.debugging_port)
        os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = "--no-sandbox --disable-gpu"
        from PyQt6 import QtTest, QtWebEngineCore, QtWebEngineWidgets, QtWebSockets, QtWidgets

        class Page(QtWebEngineCore.QWebEnginePage):
            def javaScriptConsoleMessage(self, level, message, line, source):
                messages.append(f"{source}:{line}: {message}")

        self.messages = messages = []  # of the console
        self.app = QtWidgets.QApplication.instance() or QtWidgets.QApplication(["test_play"])
        self.test, self.socket = QtTest.QTest, QtWebSockets.QWebSocket()
        self.view = QtWebEngineWidgets.QWebEngineView()
        self.page = Page(self.view)
        self.view.setPage(self.page)
        self.view.resize(1100, 900)
        self.view.show()

    def load(self, server):
        from PyQt6.QtCore import QUrl
        loaded = []
        self.page.loadFinished.connect(loaded.append)
        self.page.setUrl(QUrl(f"http://127.0.0.1:{server.server_port}/"))
        self.wait(lambda: loaded)
        self.until("run && question.length === run.size ** 2")

    def wait(self, condition, seconds=60):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.messages
            self.test.qWait(20)

    def js(self, code):
        """The value of a JavaScript expression in the page."""
        results = []
        self.page.runJavaScript(f"JSON.stringify({code}) ?? 'null'", results.append)
        self.wait(lambda: results)
        assert results[0], f"{code}: {self.messages}"
        return json.loads(results[0])

    def until(self, code):
        self.wait(lambda: self.js(code))

    def click(self, selector):
        self.js(f"document.querySelector({json.dumps(selector)}).click()")

    def press(self, *names):
        from PyQt6.QtCore import Qt
        for name in names:
            self.test.keyClick(self.view.focusProxy(), getattr(Qt.Key, "Key_" + name))
            self.test.qWait(30)

    def emulate(self, **features):
        """Media features of the page, such as prefers_color_scheme="dark"."""
        from PyQt6.QtCore import QUrl
        pages, replies = [], []

        def find_pages():
            url = f"http://127.0.0.1:{self.debugging_port}/json"
            pages.extend(json.load(urllib.request.urlopen(url, timeout=20)))

        self.socket.textMessageReceived.connect(replies.append)
        if not self.socket.isValid():
            threading.Thread(target=find_pages, daemon=True).start()
            self.wait(lambda: pages)
            self.socket.open(QUrl(pages[0]["webSocketDebuggerUrl"]))
            self.wait(self.socket.isValid)
        media = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        request = {"id": 1, "method": "Emulation.setEmulatedMedia", "params": {"features": media}}
        self.socket.sendTextMessage(json.dumps(request))
        self.wait(lambda: replies)
        self.test.qWait(50)

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
        self.js("stop()")
        return self.js("steps")

    def cells(self):
        return self.js("[...document.querySelectorAll('#board .cell')].map(el => el.textContent || '.')")


@pytest.fixture(scope="module")
def chromium():
    browser = Browser()
    yield browser
    browser.socket.close()
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


def test_page_solves_a_test_puzzle(browser, server):
    browser.load(server)
    browser.click("#next")
    browser.until("index === 1")
    puzzle = ask_json(server, "GET", "/api/puzzle?index=1")[1]
    assert browser.cells() == list(puzzle["question"])
    steps = browser.solve()
    assert len(steps) == 4 and browser.js("document.querySelectorAll('#curve circle').length") == 4
    assert browser.js("document.querySelectorAll('#curve polyline.chosen').length") == 1
    browser.js("$('slider').focus()")
    browser.press("Home", "Right")
    assert browser.cells() == list(steps[0]["answers"][0])
    wrong = [i for i, (a, b) in enumerate(zip(steps[0]["answers"][0], puzzle["answer"])) if a != b]
    assert wrong  # the model is hardly trained
    assert browser.js("$('status').textContent").startswith(f"Step 1 of 4: {len(wrong)} wrong ✕, ")
    marked = browser.js("[...document.querySelectorAll('#board .cell')].flatMap((el, i) => "
                        "getComputedStyle(el, '::after').content === '\"✕\"' && "
                        "getComputedStyle(el).textDecorationLine === 'underline' && "
                        "el.getAttribute('aria-label').endsWith('wrong') ? [i] : [])")
    assert marked == wrong
    browser.press("Right", "Right")
    assert browser.cells() == list(steps[2]["answers"][0]) and browser.js("shown") == 3
    browser.click("#kept")
    assert browser.js("shown") == steps[-1]["kept"][1]
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
    assert browser.js("document.querySelectorAll('#copies .copy').length") == 4
    assert browser.js("document.querySelectorAll('#curve polyline').length") == 4
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
    browser.js("($('text').value = '12', $('typed').requestSubmit())")
    assert browser.js("$('error').textContent").startswith("⚠ This line has 2 cells, the model takes 16")
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
    marked = browser.js("(show(1), document.querySelectorAll('#board .wrong').length)")
    assert marked == len(browser.js("steps[0].broken[0]"))
    browser.click("#edit")
    browser.click("#keypad button:nth-child(2)")
    assert browser.js("$('text').value") == "....23....2....."
    browser.check_width(360)


def test_page_solves_mazes(browser, maze_server):
    browser.load(maze_server)
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


def test_page_is_readable_in_light_and_dark_and_has_names(browser, server):
    browser.load(server)
    browser.solve()
    browser.js("show(1)")
    pairs = {"body": "body", "status": "#board-card", "soft": "#puzzle-card", "wrong": "#board .wrong",
             "given": "#board .given", "primary": "#solve"}
    luminance = """(color => color.match(/[0-9.]+/g).slice(0, 3).map(v => v / 255)
        .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0))"""
    for scheme in ("light", "dark"):
        browser.emulate(prefers_color_scheme=scheme)
        for selector in pairs.values():
            style = f"getComputedStyle(document.querySelector('{selector}'))"
            ink, paper = (browser.js(f"{luminance}({style}.{name})") for name in ("color", "backgroundColor"))
            if selector == "body":
                assert (ink > paper) == (scheme == "dark")
            assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) > 4.5, (scheme, selector)
    nameless = browser.js("[...document.querySelectorAll('button, input')].filter(el => !(el.ariaLabel || "
                          "el.textContent.trim() || el.labels?.length)).map(el => el.outerHTML)")
    assert nameless == []
