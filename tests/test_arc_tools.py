"""ARC: a model file knows what its puzzle identifiers stand for, and is adapted to new tasks."""
import json
import shutil
from pathlib import Path

import pytest
from helpers import ARC_MODEL, prepare, run_config

import prepare_arc
from data import Dataset
from runtime.errors import UserError
from weights import load_model


def test_adaptation_answers_new_tasks(arc_folder):
    """config/arc_adapt.py goes from a model file and a folder of tasks to answers.

    The new tasks' identifiers would get the vectors of others: an evaluation alone is refused, and training
    begins with the mean.
    """
    Path("evaluation").mkdir()
    for name, content in json.loads((arc_folder / "tasks.json").read_text()).items():
        del content["test"][0]["output"]
        Path(f"evaluation/new_{name}.json").write_text(json.dumps(content))
    adapted = Path("adapted")
    prepare(f"{adapted}-data", prepare_arc, source=".", subsets="evaluation", max_side=4, num_aug=2)
    flags = [*ARC_MODEL, f"--init_from={arc_folder / 'model.pt'}"]
    with pytest.raises(UserError, match="has other puzzle identifiers than .*: it can be trained further"):
        run_config("arc_adapt.py", adapted, *flags, "--eval_only")
    run_config("arc_adapt.py", adapted, *flags)
    assert "all start from the mean of its embedding" in (adapted / "log.txt").read_text()
    assert len(json.loads((adapted / "submission.json").read_text())) == 6


def test_a_model_file_has_the_identifiers_of_its_puzzles(arc_folder):
    identifiers = load_model(arc_folder / "model.pt").test_puzzles["puzzle_identifiers"]
    test = Dataset(arc_folder / "arc-data", "test")
    assert identifiers.tolist() == test.puzzle_identifiers[test.group_indices[:-1]].tolist()


def test_a_part_of_the_tasks_does_not_replace_a_submission(arc_folder, capfd):
    submission = Path("arc/submission.json")
    shutil.copytree(arc_folder / "arc", submission.parent)
    content = submission.read_bytes()
    flags = [*ARC_MODEL, "--init_from=resume", "--eval_only", f"--data_path={arc_folder / 'arc-data'}"]
    run_config("arc1.py", submission.parent, *flags, "--eval_final_max_puzzles=1")
    assert submission.read_bytes() == content
    assert "submission.json is not written: these are 4 of 24 examples" in capfd.readouterr().err
