"""The models in models/ do what their cards say, and the notebook runs."""
import re
import shlex
from pathlib import Path

import pytest
import torch
from helpers import ROOT, code_cells, in_new_process, lines, prepare, start_script

import train
from configurator import configure
from weights import load_model, own_forks, solve


@pytest.mark.parametrize("name", ["maze-6x6", "sudoku-6x6", "sudoku"])
def test_a_model_repeats_the_count_of_its_card(name):
    in_new_process(count_again, Path(ROOT, "models", f"{name}.pt"))


def count_again(path):
    card = " ".join(path.with_suffix(".md").read_text().split())
    # its command still has settings of train.py and of its forks
    command = torch.load(path)["command"]
    configure(train.Settings, [*own_forks(path), *shlex.split(command)[2:]])
    model = load_model(path)
    assert model.data_sha256 in card
    steps, solved, n = map(int, re.search(r"In (\d+) steps it solves (\d+) of the (100)", card).groups())
    first = re.search(r"\((\d+) of the first (\d+)\)", card)  # 100 puzzles of 9x9 would take long
    if first:
        solved, n = map(int, first.groups())
    answers, _ = solve(model, model.test_puzzles["inputs"][:n], steps)
    num_right = (answers == model.test_puzzles["labels"][:n]).all(dim=1).sum()
    # The card has the count of one processor. Rounding on another may turn a puzzle whose answer still
    # changes at the last step. Other answers have settled before.
    assert abs(num_right - solved) <= 2


QUESTION = "2.....4...6.....156....2..3.5......."


def test_a_model_solves_a_string_or_a_list_of_them():
    model = load_model(Path(ROOT, "models/sudoku-6x6.pt"))
    answer, sure = solve(model, QUESTION)
    assert "." not in answer and 0.9 < sure <= 1
    answers, confidences = solve(model, [QUESTION, answer])
    assert answers == [answer, answer] and confidences[0] == pytest.approx(sure)


def test_a_model_trains_further_without_forgetting():
    """With the demo's own settings, q_halt_accuracy falls from 1.0 to 0.3 in these steps."""
    data = prepare("data", source="generate", size=6, num_train=100, num_test=50, num_aug=1)
    files = f"{ROOT}/config/demo.py", f"{ROOT}/config/continue.py"
    flags = (f"--init_from={ROOT}/models/sudoku-6x6.pt --data_path={data} --data_prepare= --max_steps=50 "
             "--out_dir=run --device=cpu --forward_dtype=float32 --eval_interval=99 "
             "--global_batch_size=8 --eval_halt_max_steps=4")
    settings = configure(train.Settings, [*files, *flags.split()])
    train.replica(settings, "cpu")
    first, last = (line for line in lines("run") if "eval/loss" in line)
    assert (first["step"], last["step"]) == (0, 50) and first["eval/surest_accuracy"] > 0.95
    for name in "eval/exact_accuracy", "eval/surest_accuracy", "eval/q_halt_accuracy":
        assert last[name] > first[name] - 0.03


def test_a_setting_that_is_newer_than_a_model_file_has_its_default():
    saved = torch.load(Path(ROOT, "models/sudoku-6x6.pt"))
    del saved["settings"]["pos_encodings"]
    torch.save(saved, "older.pt")
    assert load_model("older.pt", defaults=dict(pos_encodings="none")).settings.pos_encodings == "none"


def test_the_notebook_trains_and_solves(tmp_path, monkeypatch, pyplot):
    """Its cells run in order, with less data and fewer epochs."""
    cells = code_cells("demo.ipynb")
    data = prepare(tmp_path / "data", source="generate", size=6, num_train=40, num_test=8, num_aug=1)
    flags = (f"--data_path={data} --epochs=2 --device=cpu --eval_interval=1 --global_batch_size=8 "
             "--eval_halt_max_steps=2 --log_interval=2 --L_layers=1")
    cells[0] += f"\nout, flags = {str(tmp_path / 'out')!r}, {flags!r}"
    cells[-1] = cells[-1].replace("[:20]", "[:4]")

    def shell(command):
        _, _, *arguments = shlex.split(command)
        start_script("train", arguments).output()

    space = dict(shell=shell)
    monkeypatch.chdir(Path(ROOT, "examples"))
    for cell in cells:
        exec(cell, space)
    assert len(pyplot.get_fignums()) == 2 and 0.5 < space["solved"].float().mean() <= 1
