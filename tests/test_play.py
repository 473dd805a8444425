"""scripts/play.py and the page of export.py, in a real browser (Chromium, as Qt WebEngine)."""
import functools
import json
import os
import re
import time
import webbrowser
from pathlib import Path
from types import SimpleNamespace

import export
import numpy as np
import play
import pytest
import solve
import torch
from helpers import ROOT, newest, start_script

import model
import weights
from puzzles import kind_of
from puzzles.sudoku import EMPTY, Sudoku, random_boards
from puzzles.text import csv_rows


@pytest.fixture(scope="module")
def page_of(models_folder, tmp_path_factory):
    """A function of a model's name that returns the address of its page."""
    @functools.cache
    def page_of(name):
        path = tmp_path_factory.mktemp("page") / "page.html"
        export.main([str(models_folder / name), str(path)])
        return path.as_uri()

    return page_of


@pytest.fixture
def page(page_of):
    return page_of("model.pt")


# The command

def test_command_opens_a_page_and_says_where_it_is(models_folder, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    play.main([str(models_folder / "model.pt")])
    path = opened[0].removeprefix("file://")
    assert Path(path).exists() and f"wrote {path}," in capsys.readouterr().out  # without a browser


def test_page_writes_no_html():
    """What somebody types, or a file holds, is shown as text."""
    assert "innerHTML" not in Path(ROOT, "scripts/play.html").read_text()


# The page

PASTE = """(() => {
  const clipboardData = new DataTransfer();
  clipboardData.setData("text", TEXT);
  $("text").select();
  $("text").dispatchEvent(new ClipboardEvent("paste", {clipboardData}));
  $("typed").requestSubmit();
  return $("error").textContent;
})()"""


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
        self.loaded = []  # for each page whether it could be loaded
        self.page.loadFinished.connect(self.loaded.append)
        self.view.setPage(self.page)
        self.view.show()

    def open(self, url):
        from PyQt6.QtCore import QUrl
        for address in "about:blank", url:
            self.loaded.clear()
            self.page.setUrl(QUrl(address))
            self.wait(lambda: self.loaded)
        self.until("run && question.length === cellCount()")

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
        """Clicks, which takes the focus from a field first."""
        self.js(f"(document.activeElement.blur(), document.querySelector('{selector}').click())")

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

    def paste(self, text):
        """Replaces the line of text as from the clipboard, and uses it; returns the page's error."""
        return self.js(PASTE.replace("TEXT", json.dumps(text)))

    def solve(self, number=0):
        """Solves the question, or a test puzzle; returns the steps of the first attempt, which is shown."""
        if number:
            self.js(f"choose({number})")
        self.click("#solve")
        self.until("!thinking")
        return self.js("(stop(), attempt = 0, stepsOf(0))")


@pytest.fixture(scope="module")
def chromium():
    pytest.importorskip("PyQt6.QtWebEngineWidgets", exc_type=ModuleNotFoundError)
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
    assert chromium.js("performance.getEntriesByType('resource')") == []  # the page is one file


def test_page_solves_a_test_puzzle_and_plays_the_steps(browser, page):
    browser.open(page)
    steps = browser.solve(number=2)
    browser.js("$('slider').focus()")
    browser.press("Home", "Right")
    browser.until("shown === 1")  # a busy machine is late
    assert browser.texts("#board .cell") == steps[0]["answer"]
    browser.click("#kept")
    sure = browser.js("attempts.map(steps => steps.map(step => step.sure))")
    assert sure[browser.js("attempt")][browser.js("shown") - 1] == max(map(max, sure))
    # it plays to the end of the last attempt, and stops
    browser.js("(request.steps = 100, attempt = 0, show(0))")  # which makes the playback fast
    browser.click("#play")
    browser.until("timer === null && attempt === attempts.length - 1 && shown === stepsOf(attempt).length")


def test_page_marks_what_is_wrong(browser, page):
    """It marks cells unlike the known answer. Without one, it marks rows and cells that break a rule."""
    browser.open(page)
    browser.solve(number=2)
    status = "(show(1), $('status').textContent)"
    browser.js("(attempts[0][0].solved = false, answer = [...attempts[0][0].answer],"
               " answer[5] = answer[6] = 'x')")
    assert ": 2 cells wrong ✕, " in browser.js(status)
    assert len(browser.texts("#board .wrong")) == 2
    browser.js("(answer = null, attempts[0][0].broken = [0, 1, 2, 3, 15])")
    assert "row 1, 1 cell break a rule ✕" in browser.js(status)
    assert len(browser.texts("#board .group")) == len(browser.texts("#board .cell.wrong")) == 1


def test_page_thinks_in_attempts_and_deeper(browser, page):
    browser.open(page)
    browser.solve()
    browser.click('input[name=attempts][value="4"]')  # one click solves again
    browser.until("!thinking && request.attempts === 4 && attempts.length === 4")
    assert len(browser.texts("#attempts .attempt")) == len(browser.texts("#curve polyline")) == 4
    sure = browser.js("attempts.map(steps => steps[1].sure)")
    browser.click("#redraw")
    browser.until("!thinking && request.seed === 1")
    again = browser.js("attempts.map(steps => steps[1].sure)")
    assert again[0] == sure[0] and again[1:] != sure[1:]
    browser.click('input[name=steps][value="16"]')
    browser.until("!thinking && stepsOf(0).length === 16")
    assert "; not sure after 4 attempts" in browser.js("(stop(), $('status').textContent)")


def test_page_fits_a_phone_and_a_screen(browser, page):
    """The board comes first, and the button is in sight without scrolling."""
    browser.open(page)
    for width in 360, 1400:
        browser.view.resize(width, 800)
        browser.until(f"innerWidth === {width}")
        assert browser.js("document.documentElement.scrollWidth") <= width
        board, puzzle, button = browser.js(
            "['board-card', 'puzzle-card', 'solve'].map(name => $(name).getBoundingClientRect().top)")
        assert board <= puzzle and button < 760


def test_page_takes_typed_puzzles_and_shows_errors(browser, page):
    browser.open(page)
    assert browser.type("12").startswith("⚠ This text has 2 cells, the model takes 16")
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


FRAMED = """
+---+---+
|1 2|0 *|
|_ ?|3 .|
|===+===|
|. .|. .|
|. .|. 4|
+---+---+
"""
MAZE = "S #.0#\n#_?*##\n" + "##  ##\n" * 3 + "##G  #"


@pytest.mark.parametrize("name, text, question", [
    ("model.pt", FRAMED, "12....3........4"),
    ("maze", MAZE, "S #  ##   ####  ####  ####  ####G  #")], ids=["frame", "maze"])
def test_page_takes_pasted_grids(browser, page_of, name, text, question):
    """Line ends, spaces and rulers go unless they are symbols. Any sign of an empty cell will do."""
    browser.open(page_of(name))
    assert browser.paste(text) == "⚠ "
    assert browser.js("question.join('')") == question
    assert browser.paste(text[13:]).startswith("⚠ This text has")


def test_page_solves_what_was_typed_or_chosen_beside_the_board(browser, page):
    """It may be a number, or a line of text for which nobody clicked "Use"."""
    browser.open(page)
    browser.js("$('number').select()")
    browser.press("7")
    browser.click("#solve")
    browser.until("!thinking && request && request.question === run.puzzles[6].question")
    browser.js("$('text').select()")
    browser.press(*"1000000000000000")
    browser.click("#solve")
    browser.until("!thinking && request.question === '1...............'")


SQUARES = "🟥🟦"  # each has two units of UTF-16


def test_page_of_a_model_without_rules(browser, models_folder):
    """Its symbols are colored squares. The known answer to test puzzle 1 leaves out a cell."""
    saved = newest(models_folder / "exchange")
    saved["task"] |= {"symbols": "_" + SQUARES, "symmetries": {"permute_symbols": SQUARES}}
    saved["test_puzzles"]["labels"][0][0] = 0
    torch.save(saved, "squares.pt")
    export.main(["squares.pt", "squares.html"])
    browser.open(Path("squares.html").absolute().as_uri())

    # it takes symbols of two units
    browser.type(SQUARES * 3)
    browser.click('input[name=attempts][value="4"]')
    browser.solve()
    assert browser.js("[$('error').hidden, request.question, attempts.length]") == [True, SQUARES * 3, 2]
    assert browser.texts("#keypad button") == ["🟦", "⌫"]

    # it judges by the known answer, unless that lacks a cell
    for number, is_judged in (1, False), (2, True):
        browser.solve(number)
        assert bool(re.match("solved|[1-6] cells? wrong", browser.js("verdict(4, 0)"))) == is_judged


# What the page computes

DEMO = f"{ROOT}/docs/demo.html"
MODELS = ["sudoku", "sudoku-6x6", "maze-6x6"]  # in this order


def check_answers(browser, path):
    """Checks the first steps of the page at test puzzle 2 against weights.watch's, q_halt within 1e-3."""
    # the page's steps
    browser.js("choose(2)")
    browser.click("#solve")
    browser.until("stepsOf(0).length >= 3")

    # Python's steps, and both compared
    trm, settings = solve.load(path, ["--eval_halt_max_steps=3", "--eval_attempts=1", "--eval_patience=0"])
    kind = kind_of(trm.task)
    question = trm.test_puzzles["inputs"][1].numpy()
    for line, step in zip(browser.js("stepsOf(0)"), weights.watch(settings, trm, question)):
        assert "".join(line["answer"]) == kind.text(step.answer)
        ours, theirs = np.log(1 / np.array([line["sure"], step.confidence]) - 1)  # -q_halt
        assert abs(ours - theirs) < 1e-3
        if step.judgement:
            broken = np.flatnonzero(step.judgement.broken).tolist()
            assert [line["broken"], line["solved"]] == [broken, *step.judgement.solved]


def test_demo_is_what_export_writes():
    """If not: rm docs/demo.html, and python scripts/export.py with these arguments."""
    paths = [f"{ROOT}/models/{name}.pt" for name in MODELS]
    start_script("export", [*paths, "demo.html"]).output()
    page = Path("demo.html").read_bytes()
    assert page == Path(DEMO).read_bytes() and len(page) <= 3_000_000


def test_page_answers_as_python_does(browser):
    browser.open(f"file://{DEMO}#2")
    check_answers(browser, f"{ROOT}/models/maze-6x6.pt")


@pytest.mark.parametrize("settings", [
    dict(mlp_t=False, pos_encodings="learned", puzzle_emb_ndim=40, puzzle_emb_len=3),
    dict(mlp_t=False, pos_encodings="rope")], ids=["learned, puzzle embedding", "rope"])
def test_page_answers_with_other_blocks(browser, models_folder, settings):
    save_model(models_folder, "model.pt", settings)
    export.main(["model.pt", "page.html"])
    browser.open(f"file://{os.getcwd()}/page.html")
    check_answers(browser, "model.pt")


def save_model(models_folder, path, settings):
    """Writes a file of a model of 4x4 Sudoku with random weights, in which the halting head has some too."""
    saved = torch.load(models_folder / "model.pt")
    settings = saved["settings"] | settings | {"seed": 1}
    trm = model.TRM(SimpleNamespace(**settings), **saved["sizes"])
    generator = torch.Generator().manual_seed(2)
    trm.q_head.weight.data.normal_(0, 0.1, generator=generator)
    if trm.has_puzzle_emb:
        trm.puzzle_emb.weights.normal_(generator=generator)
    torch.save(saved | dict(settings=settings, weights=trm.state_dict()), path)


def test_page_takes_another_model(browser):
    browser.open(f"file://{DEMO}#2")
    assert browser.texts("#models a") == ["4×4 to 16×16 Sudoku", "6×6 Sudoku", "6×6 mazes"]
    browser.solve(number=45)
    assert browser.js("kept()[0] > 0 && kept()[0] === attempts.length - 1")  # sure at a later attempt
    assert browser.js("stepsOf(kept()[0]).at(-1).solved")
    browser.click("#models a:nth-child(2)")
    browser.until("typeof run === 'object' && run?.model === 1 && question.length === cellCount()")
    assert browser.solve(number=2)[-1]["solved"]


def test_page_warns_if_the_search_for_solutions_was_too_long(browser):
    """This Sudoku has none, which takes minutes to find."""
    browser.open(f"file://{DEMO}#0")
    browser.type(".....5.8....6.1.43..........1.5........1.6...3.......553.....61........4.........")
    browser.click("#solve")
    browser.until("stepsOf(0).length")
    assert "the search was too long" in browser.js("$('warning').textContent")


HOUSES = f"{ROOT}/examples/houses.py"


def test_one_model_answers_every_size_in_the_terminal_and_in_the_page(browser, models_folder):
    """A run of examples/houses.py is such a model. The page computes its second model without the fork."""
    houses = f"{models_folder}/houses"
    plain = f"{models_folder}/model.pt"
    flags = ["--eval_halt_max_steps=3", "--eval_patience=1"]
    start_script("export", [houses, plain, *flags, "page.html"]).output()
    url = Path("page.html").absolute().as_uri()
    browser.open(url)
    all_num_steps = set()
    for rows, num_puzzles in {4: 9, 6: 3, 16: 1}.items():
        # solve puzzles in the terminal
        boards = random_boards(num_puzzles, rows, np.random.default_rng(0))
        boards[:, ::5] = EMPTY
        Path("questions").write_text("\n".join(map(Sudoku(Sudoku.new_task(rows)).text, boards)))
        start_script("solve", [houses, "questions", *flags, f"--output={rows}.csv"]).output()

        # and in the page, where a digit may tie with another one
        browser.click(f'input[value="{rows}×{rows}"]')
        for _, row in csv_rows(f"{rows}.csv"):
            browser.type(row["question"])
            steps = browser.solve()
            kept = steps[browser.js("kept()[1] - 1")]
            assert sum(map(str.__ne__, kept["answer"], row["answer"])) <= 1
            assert abs(kept["sure"] - float(row["confidence"])) < 1e-4
            # it ends after two of three steps if the first answer stays
            assert len(steps) == 3 - (steps[0]["answer"] == steps[1]["answer"])
            all_num_steps.add(len(steps))
    assert all_num_steps == {2, 3}
    browser.open(f"{url}#1")
    check_answers(browser, plain)


ENTROPY = f"{ROOT}/tests/forks/entropy.py"
OTHER_NETWORK = """
import model

class Other(model.TRM):
    def embed(self, *arguments):
        return 2 * super().embed(*arguments)

model.TRM = Other
"""


@pytest.mark.parametrize("argv, words", [
    (["model.pt", "other.py", "page.html"], "model.pt: a fork changes the answers: a page cannot"),
    (["houses", HOUSES, ENTROPY, "page.html"], "houses: engine.js does not know the weights")])
def test_models_that_no_page_can_run_are_refused(models_folder, argv, words):
    save_model(models_folder, "model.pt", {})
    Path("other.py").write_text(OTHER_NETWORK)
    os.symlink(models_folder / "houses", "houses")
    assert words in start_script("export", argv).output(2)
    assert not Path("page.html").exists()


def test_a_fork_that_changes_no_answer_may_have_a_page(models_folder):
    """README's fork changes the loss and the metrics."""
    start_script("export", [f"{models_folder}/model.pt", ENTROPY, "page.HTML"]).output()
    assert Path("page.HTML").read_text().startswith("<!doctype html>")
