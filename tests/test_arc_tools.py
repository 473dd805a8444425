"""ARC in scripts/solve.py and TRM.solve, on small models that are trained here."""
import json
import re

import pytest
import solve
import torch
from helpers import ARC_MODEL, ROOT, prepare, train_one

import prepare_arc
from configurator import UserError
from data import Dataset
from model import TRM

# solve.py

def test_answers_to_a_file_of_tasks_are_the_final_evaluations(run_solve, arc_folder, tmp_path):
    text = run_solve(arc_folder / "arc", arc_folder / "tasks.json", f"--output={tmp_path}/a.json")
    assert "two answers to each test input of 6 tasks" in text
    assert json.loads((tmp_path / "a.json").read_text()) == \
        json.loads((arc_folder / "arc/submission.json").read_text())


def test_a_task_is_shown_with_the_votes_and_the_known_answer(run_solve, arc_folder, arc_test, tmp_path):
    name = arc_test.task_names[0]
    text = run_solve(arc_folder / "arc", f"--task={name}", "--versions=2", f"--plot={tmp_path}/a.png")
    *pairs, shown, _ = text.split("\n\n")
    assert len(pairs) == 4 and all(re.match(r"input +output\n", pair) for pair in pairs)
    assert re.match(r"test input 1 +answer with [12] votes.* +known answer\n", shown)
    question, answer = arc_test.grids[0]
    first_row = list(map(int, shown.splitlines()[1].split()))
    assert first_row[:4] == question[0].tolist() and first_row[-4:] == answer[0].tolist()
    assert (tmp_path / "a.png").read_bytes()[1:4] == b"PNG"


def test_the_last_pair_of_a_task_that_is_only_trained_on_is_its_test(run_solve, arc_folder, arc_test):
    names = Dataset(arc_test.path, "train").task_names
    text = run_solve(arc_folder / "arc", f"--task={min(set(names) - set(arc_test.task_names))}")
    assert text.count("output") == 4 and text.count("test input") == 1


def test_what_the_model_cannot_solve_is_refused(arc_folder, arc_test, tmp_path):
    tasks = (arc_folder / "tasks.json").read_text()
    (tmp_path / "tasks.json").write_text(tasks.replace(arc_test.task_names[3], "new"))
    unknown = "task new: the model has no identifier for it.*config/arc_adapt.py adapts.*docs/arc.md"
    for words, arguments in (
            (unknown, ["--task=new"]),
            (unknown, [f"{tmp_path}/tasks.json", f"--output={tmp_path}/a.json"]),
            ("solves ARC tasks: choose one with --task=NAME", ["0" * 16])):
        with pytest.raises(UserError, match=words):
            solve.main([str(arc_folder / "arc"), *arguments])
    assert not (tmp_path / "a.json").exists()


def test_adaptation_answers_new_tasks(arc_folder, tmp_path):
    """config/arc_adapt.py goes from a model file and a folder of tasks to answers."""
    (tmp_path / "evaluation").mkdir()
    for name, content in json.loads((arc_folder / "tasks.json").read_text()).items():
        del content["test"][0]["output"]
        (tmp_path / f"evaluation/new_{name}.json").write_text(json.dumps(content))
    adapted = tmp_path / "adapted"
    prepare(f"{adapted}-data", prepare_arc, source=tmp_path, subsets="evaluation", max_side=4, num_aug=2)
    flags = [f"{ROOT}/config/arc_adapt.py", *ARC_MODEL, f"--init_from={arc_folder / 'model.pt'}"]
    with pytest.raises(UserError, match="has other puzzle identifiers than .*: it can be trained further"):
        train_one(adapted, *flags, "--eval_only")
    train_one(adapted, *flags)
    assert "all start from the mean of its embedding" in (adapted / "log.txt").read_text()
    assert len(json.loads((adapted / "submission.json").read_text())) == 6


def test_model_file_has_the_identifiers_of_its_puzzles(arc_folder, arc_test):
    model = TRM.load(arc_folder / "model.pt")
    saved = torch.load(arc_folder / "model.pt")["puzzles"]
    originals = arc_test.puzzle_identifiers[arc_test.group_indices[:-1]]
    assert saved["puzzle_identifiers"].tolist() == originals.tolist()

    # the identifiers matter once their rows differ
    model.puzzle_emb.weights.data[1:] = torch.randn(len(model.puzzle_emb.weights) - 1, 32)
    answers, _ = model.solve(saved["inputs"], steps=3, identifiers=saved["puzzle_identifiers"])
    others, _ = model.solve(saved["inputs"], steps=3)
    assert (answers != others).any()
