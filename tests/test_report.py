"""scripts/report.py on runs with known numbers: fit, tables, seeds, unfinished and damaged runs."""
import json
import os
import re
from pathlib import Path

import pytest

import train
from configurator import configure

image = pytest.importorskip("matplotlib.image")
pytest.importorskip("scipy")
import report

DEFAULTS = vars(configure(train.Settings, []))
EXP01 = {256: 1.4, 384: 2.9, 512: 5.03, 768: 11.0, 1024: 19.4, 1536: 43.0}  # hidden_size: million parameters


def write_run(folder, accuracy=80.0, parameters=5.0, data="a", forks=(), **settings):
    """Writes the metrics.jsonl of a run of 8000 steps and 2 hours, with an evaluation every 2000 steps."""
    lines = [{"step": 0, "run": dict(
        settings=DEFAULTS | settings, hardware=["8 x xla (TPU v5e)"], parameters=parameters * 1e6,
        init_from="scratch", data_sha256=data * 64, forks=dict(forks))}]
    for step in 2000, 4000, 6000, 8000:
        solved = step / 8000
        lines.append({
            "step": step, "train/exact_accuracy": 0.9 * solved, "perf/step_time": 0.9, "perf/tflops": 50.0})
        lines.append({"step": step, "eval/exact_accuracy": accuracy / 100 * solved})
    lines[-1]["final"] = True
    os.makedirs(folder)
    Path(folder, "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def run_report(monkeypatch):
    """report.py in this process: a function of its arguments that returns report.md."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **__: None)  # drawing takes a second

    def run_report(*argv):
        report.main([*map(str, argv), "--out_dir=out"])
        return Path("out/report.md").read_text()

    return run_report


def rows(text, group):
    """Returns the table of a group: {setting: [seeds, accuracy, ...]}."""
    section = text.split(f"## {group}")[1].split("\n## ")[0]
    table = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return {row[0]: row[1:] for row in table[2:]}


def test_a_group_has_a_table_a_law_and_a_picture():
    for size, parameters in EXP01.items():
        accuracy = 90 - 20 * parameters ** -0.8
        write_run(f"runs/exp01_{size:04}", accuracy, parameters, hidden_size=size)
    report.main(["runs", "--out_dir=out"])
    text = Path("out/report.md").read_text()
    assert list(rows(text, "exp01: How does accuracy grow"))[:2] == ["exp01_0256", "hidden_size=384"]
    for words in "accuracy = a - b * n^-c, with a = 90 ± ", "b = 20 ± ", "c = 0.8 ± ", "](exp01.png)":
        assert words in text
    pixels = image.imread("out/exp01.png")[..., :3]
    assert 0.02 < (pixels.min(-1) < 0.95).mean() < 0.5


def test_lines_count_by_their_steps(run_report):
    write_run("exp02a")
    assert "| exp02a | 1 | 80 | 10 | 5 | 2 | 360 |" in run_report("exp02a")

    # the same run with a line for the first 6000 steps, of 0.9 s, and one for 2000, of 2.7 s
    path = Path("exp02a/metrics.jsonl")
    text = re.sub('"step": [24]000, "train.*', "", path.read_text())
    path.write_text(re.sub('(8000, "train.*step_time": )0.9', r"\g<1>2.7", text))
    assert "| exp02a | 1 | 80 | 10 | 5 | 3 | 540 |" in run_report("exp02a")


def test_other_groups_runs_are_seeds_of_the_baseline_which_is_the_reference(run_report):
    for seed, name in enumerate(("exp01c_h512", "exp02a_03_L6", "exp10a_lr3e-5", "exp10b_lr1e-4")):
        write_run(name, 80.0 + seed, seed=seed, lr=3e-5 if name == "exp10a_lr3e-5" else 1e-4)
    table = rows(run_report("."), "exp10")
    assert {label: row[:2] for label, row in table.items()} == {
        "lr=3e-05": ["1", "82"], "exp10b_lr1e-4": ["3", "81.33 ± 1.5"]}


def test_other_runs_are_split_by_what_changes_their_result_and_by_their_data(run_report):
    for seed in range(3):
        write_run(f"demo{seed}", 98.0 + seed, seed=seed, micro_batch_size=16 * seed)
    write_run("fork", forks={"fprm.py": "12ab34cd"})
    write_run("wide", hidden_size=1024)
    write_run("other", data="b", data_path="data/binairo")
    text = run_report(".")
    table = rows(text, "sudoku-extreme-1k-aug-1000-aaaaaaaa: Runs")
    assert list(table) == ["demo0", "forks={'fprm.py': '12ab34cd'}", "hidden_size=1024"]
    assert table["demo0"][:2] == ["3", "99 ± 1"]
    assert list(rows(text, "binairo-bbbbbbbb: Runs")) == ["other"]


def test_an_unfinished_run_does_not_count_and_is_named(run_report):
    write_run("whole")
    write_run("cut", epochs=7)
    path = Path("cut/metrics.jsonl")
    path.write_text(path.read_text()[:-10])
    words = "- 1 of 2 runs are complete\n- cut/metrics.jsonl: EOFError: the run is unfinished\n"
    assert words in run_report(".")


def test_a_folder_without_runs_is_an_error_of_one_line():
    with pytest.raises(report.UserError, match="nowhere: no run"):
        report.main(["nowhere"])
