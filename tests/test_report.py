"""scripts/report.py on runs with known numbers: fit, tables, seeds, unfinished and damaged runs."""
import json
import platform
import re
from pathlib import Path

import numpy as np
import pytest
from helpers import WHOLE, run

import train
from configurator import configure

image = pytest.importorskip("matplotlib.image")
pytest.importorskip("scipy")
import report

DEFAULTS = vars(configure(train.__file__, []))
EXP01 = {256: 1.4, 384: 2.9, 512: 5.03, 768: 11.0, 1024: 19.4, 1536: 43.0}  # hidden_size: million parameters


def write_run(folder, accuracy=80.0, parameters=5.0, data="a", **settings):
    """Writes the metrics.jsonl of a run of 8000 steps and 2 hours, with an evaluation every 2000 steps."""
    lines = [{"step": 0, "run": dict(
        settings=DEFAULTS | settings, hardware=["8 x xla (TPU v5e)"], parameters=parameters * 1e6,
        total_steps=8000, examples=1_001_000, puzzles=1000, data_sha256=data * 64)}]
    for step in 2000, 4000, 6000, 8000:
        solved = step / 8000
        lines.append({
            "step": step, "train/exact_accuracy": 0.9 * solved, "train/steps": 4.0,
            "perf/examples_per_sec": 6826.0, "perf/step_time": 0.9, "perf/tflops": 50.0})
        lines.append({"step": step, "eval/exact_accuracy": accuracy / 100 * solved})
    lines[-1] |= {"final": True, "eval/surest_accuracy": 0.5}
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def run_report(tmp_path, capsys, monkeypatch):
    """report.py in this process: a function of its arguments that returns report.md and what it prints."""
    monkeypatch.setattr(report.plt.Figure, "savefig", lambda *_, **__: None)  # drawing takes a second

    def run_report(*argv):
        report.main([*map(str, argv), f"--out_dir={tmp_path / 'out'}"])
        return (tmp_path / "out/report.md").read_text(), capsys.readouterr().out

    return run_report


def rows(text, group):
    """Returns the table of a group: {setting: {column: text}}."""
    section = text.split(f"## {group}")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(table[0], row)) for row in table[2:]}


def law(n):
    return 90 - 20 * n ** -0.8


def test_a_fit_recovers_a_known_law_within_its_stated_error():
    n = np.repeat(list(EXP01.values()), 3)
    within = []
    for seed in range(100):
        noise = np.random.default_rng(seed).normal(0, 0.2, len(n))
        fitted, errors = report.fit_power_law(n, law(n) + noise)
        within.append(np.abs(fitted - [90, 20, 0.8]) < errors)
    assert 0.55 < np.mean(within) < 0.8  # one standard error: 68% of a normal distribution


@pytest.mark.parametrize("x, y", [([1, 1, 2, 4], [10, 11, 20, 25]), ([1, 2, 4, 8], [10, 20, 30, 40.5])])
def test_there_is_no_fit_for_too_few_sizes_or_another_shape(x, y):
    assert report.fit_power_law(x, y) is None


def test_a_group_has_a_table_a_law_a_picture_and_its_numbers_as_json(tmp_path):
    for size, parameters in EXP01.items():
        write_run(tmp_path / f"runs/exp01_{size}", law(parameters), parameters, hidden_size=size)
    write_run(tmp_path / "runs/exp02a", 80.0, L_cycles=2)
    report.main([str(tmp_path / "runs"), f"--out_dir={tmp_path / 'out'}", "--target=50"])
    text = (tmp_path / "out/report.md").read_text()

    table = rows(text, "exp01: How does accuracy grow")
    assert list(table) == [f"hidden_size {size}" for size in EXP01]
    assert "accuracy = a - b * n^-c, with a = 90 ± " in text
    [row] = rows(text, "exp02a").values()
    assert " ".join(row.values()) == "exp02a 1 reference 80 50 90 10 5 18 4 75 5,000 1.25 6,826 2 360"
    assert "8 x xla (TPU v5e)" in text and "](exp01.png)" in text
    last = json.loads((tmp_path / "out/results.json").read_text())[-1]
    assert last["name"] == "exp02a" and last["evaluations"]["4000"] == 40
    pixels = image.imread(tmp_path / "out/exp01.png")[..., :3]
    assert 0.02 < (pixels.min(-1) < 0.95).mean() < 0.5


def test_runs_that_repeat_a_setting_are_its_seeds_in_every_group_with_an_interval(tmp_path, run_report):
    for seed, name in enumerate(("exp01c", "exp02a_03", "exp06_c")):
        write_run(tmp_path / f"runs/{name}", 80.0 + seed, seed=seed)
    for seed in 0, 1:
        write_run(tmp_path / f"runs/{seed}/exp01a", 70.0 + 4 * seed, hidden_size=256, seed=seed)
    text, _ = run_report(tmp_path / "runs")
    assert rows(text, "exp01")["hidden_size 512"]["points against the reference"] == "reference"
    assert rows(text, "exp06")["exp06_c"]["test puzzles solved (%)"] == "81 ± 1"
    # Welch: variances of the means 4 and 1 / 3; 1.169 degrees of freedom, of which the quantile is 9.06
    interval = rows(text, "exp01")["hidden_size 256"]["points against the reference"]
    assert interval == "-9.0 (-27.9 to +9.9)"  # 9.06 * (13 / 3) ** 0.5 is 18.9


def test_other_runs_are_split_by_what_changes_their_result_and_by_their_data(tmp_path, run_report):
    for seed, size in enumerate((0, 16, 32)):
        write_run(tmp_path / f"demo{seed}", 98.0 + seed, seed=seed, micro_batch_size=size, eval_interval=size)
    write_run(tmp_path / "wide", hidden_size=1024)
    write_run(tmp_path / "other", data="b", data_path="data/binairo")
    text, _ = run_report(*sorted(tmp_path.iterdir()))
    table = rows(text, "sudoku-extreme-1k-aug-1000-aaaaaaaa: Runs")
    assert list(table) == ["hidden_size 512", "hidden_size 1024"]
    assert table["hidden_size 512"]["test puzzles solved (%)"] == "99 ± 1"
    assert list(rows(text, "binairo-bbbbbbbb: Runs")) == ["other"] and "How" not in text


def test_a_run_of_train_py_that_moved_to_other_hardware_names_both(data, out, run_report):
    path = Path(out, "metrics.jsonl")
    path.write_text(path.read_text().replace("1 x cpu (", "9 x cpu (", 1))
    run(data, out, *WHOLE, "--init_from=resume", "--max_steps=50")
    text, _ = run_report(out)
    machine = platform.machine()
    assert f"Hardware: 1 x cpu ({machine}); 9 x cpu ({machine})." in text and "- 1 of 1 runs" in text


@pytest.mark.parametrize("pattern, instead, problem", [
    ('.*"step": 4000, "train.*}\n', "\0\0\0\0\n", ""),  # a line that a crash left
    ('.*"run".*\n', "", "the first line does not say what the run is"),
    ('"final".*\n', '"fin', "unfinished")])  # a run in progress
def test_damage_costs_at_most_the_run_that_has_it(tmp_path, run_report, pattern, instead, problem):
    for name in "damaged", "whole":
        write_run(tmp_path / f"runs/exp04a_{name}", epochs=len(name))
    path = tmp_path / "runs/exp04a_damaged/metrics.jsonl"
    path.write_text(re.sub(pattern, lambda _: instead, path.read_text(), count=1))
    text, printed = run_report(tmp_path / "runs")
    complete = 1 if problem else 2
    assert f"- {complete} of 2 runs are complete\n" in printed and len(rows(text, "exp04a")) == complete
    assert not problem or f"\n- {path}: {problem}" in printed


def test_a_folder_without_runs_is_an_error_of_one_line():
    with pytest.raises(report.UserError, match="nowhere: no run"):
        report.main(["nowhere"])
