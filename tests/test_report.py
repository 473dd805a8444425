"""scripts/report.py on runs with known numbers: fit, tables, seeds, missing and damaged runs, wrong input."""
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from helpers import ROOT

from configurator import read_settings

image = pytest.importorskip("matplotlib.image")
pytest.importorskip("scipy")
import report

DEFAULTS = {name: values[0] for name, values in read_settings(os.path.join(ROOT, "train.py")).items()}
EXP01 = {256: 1.4, 384: 2.9, 512: 5.03, 768: 11.0, 1024: 19.4, 1536: 43.0}  # hidden_size: million parameters


def write_run(folder, accuracy=80.0, parameters=5.0, final=True, **settings):
    """Writes what train.py leaves of a run of 8000 steps and 2 hours, with an evaluation every 2000 steps."""
    os.makedirs(folder)
    lines = []
    for step in range(100, 8001, 100):
        exact = accuracy / 100 * (step / 8000) ** 0.5
        lines.append({
            "step": step, "train/loss": 0.5, "train/exact_accuracy": 0.95 * (step / 8000) ** 0.5,
            "train/steps": 4.0, "perf/examples_per_sec": 6826.0, "perf/step_time": 0.9, "perf/tflops": 50.0})
        if step % 2000 == 0:
            lines.append({"step": step, "eval/exact_accuracy": exact})
    if final:
        lines[-1] |= {"final": True, "eval/surest_accuracy": 1.02 * exact}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "ckpt_00008000.json").write_text(json.dumps({"step": 8000, "settings": DEFAULTS | settings}))
    (folder / "log.txt").write_text(
        "# python 3.11, torch 2.9.1, Linux, 112 cores, 8 x xla (TPU v5litepod-8); settings that differ ...\n"
        f"{round(parameters * 1e6):,} parameters; 1,001,000 training examples of 1,000 puzzles, 9 test\n")


@pytest.fixture
def run_report(tmp_path, capsys, monkeypatch):
    """report.py in this process: a function of its arguments that returns report.md and what it prints."""
    monkeypatch.setattr(report.plt.Figure, "savefig", lambda *_, **__: None)  # drawing takes a second

    def run_report(*argv):
        report.main([*map(str, argv), f"--out_dir={tmp_path / 'out'}"])
        return (tmp_path / "out/report.md").read_text(), capsys.readouterr().out

    return run_report


def rows(text, group):
    """The table of a group: {setting: {column: text}}."""
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


@pytest.mark.parametrize("x, y", [
    ([1, 1, 2, 4], [10, 11, 20, 25]), ([1, 2, 4, 8], [40, 30, 20, 10]), ([1, 2, 4, 8], [10, 20, 30, 40.5])])
def test_there_is_no_fit_for_too_few_sizes_or_another_shape(x, y):
    assert report.fit_power_law(x, y) is None


def test_a_study_has_tables_pictures_a_law_and_the_names_of_unfinished_runs(tmp_path):
    for size, parameters in EXP01.items():
        write_run(tmp_path / f"runs/exp01_{size}", law(parameters), parameters, hidden_size=size)
    write_run(tmp_path / "runs/seed1/exp01_512", law(5.03) + 1, 5.03, hidden_size=512, seed=1, out_dir="x")
    write_run(tmp_path / "runs/copy/exp01_512", law(5.03), 5.03, hidden_size=512)
    write_run(tmp_path / "runs/exp04a_2000", 90.0, final=False)
    argv = [tmp_path / "runs", f"--out_dir={tmp_path / 'out'}"]
    done = subprocess.run([sys.executable, report.__file__, *argv], capture_output=True, text=True)
    status = "- 8 of 9 runs are complete\n- exp04a_2000: unfinished\n"
    text = (tmp_path / "out/report.md").read_text()
    assert done.returncode == 0 and status in done.stdout and status in text, done.stderr

    table = rows(text, "exp01")
    assert list(table) == [f"exp01_{size}" for size in EXP01]
    solved = table["exp01_512"]["test puzzles solved (%)"]
    assert solved == f"{law(5.03) + 0.5:.4g} ± {0.5 ** 0.5:.4g}"  # two seeds
    row, accuracy = table["exp01_1536"], law(43.0)
    train = 95 * np.mean(np.sqrt(np.arange(73, 81) / 80))
    expected = {
        "seeds": "1", "test puzzles solved (%)": f"{accuracy:.4g}", "parameters (millions)": "43",
        "surest answers right (%)": f"{1.02 * accuracy:.4g}", "training time (hours)": "2",
        "training puzzles solved (%)": f"{train:.4g}", "training arithmetic (PFLOP)": "360"}
    assert expected.items() <= row.items() and "8 x xla (TPU v5litepod-8)" in text
    fit = re.search(", ".join(name + r" = ([\d.]+) ± ([\d.]+)" for name in "abc"), text)
    values = np.array(fit.groups(), float)
    assert (abs(values[::2] - [90, 20, 0.8]) < 2 * values[1::2]).all()

    assert sorted(os.listdir(tmp_path / "out")) == ["exp01.png", "report.md", "results.json"]
    results = {result["name"]: result for result in json.loads((tmp_path / "out/results.json").read_text())}
    assert results["exp01_1536"]["accuracy"] == pytest.approx(accuracy)
    assert list(results["exp01_1536"]["evaluations"]) == ["2000", "4000", "6000", "8000"]
    pixels = image.imread(tmp_path / "out/exp01.png")[..., :3]
    assert 0.02 < (pixels.min(-1) < 0.95).mean() < 0.5 and "](exp01.png)" in text


def test_runs_that_repeat_a_setting_are_its_seeds_in_every_group_with_an_interval(tmp_path, run_report):
    for seed, (name, accuracy) in enumerate((("exp01c", 80.0), ("exp02a_03", 81.0), ("exp06_c", 82.0))):
        write_run(tmp_path / f"runs/{name}", accuracy, seed=seed)
    for seed, accuracy in enumerate((70.0, 74.0)):
        write_run(tmp_path / f"runs/{seed}/exp01a", accuracy, hidden_size=256, seed=seed)
    text, _ = run_report(tmp_path / "runs")
    assert rows(text, "exp06")["exp06_c"]["test puzzles solved (%)"] == "81 ± 1"
    # Welch: variances of the means 4 and 1 / 3; 1.169 degrees of freedom, of which the quantile is 9.06
    interval = rows(text, "exp01")["exp01a"]["points against exp01c"]
    low, high = map(float, re.fullmatch(r"-9.0 \((.*) to (.*)\)", interval).groups())
    assert (low, high) == pytest.approx((-9 - 9.06 * (13 / 3) ** 0.5, -9 + 9.06 * (13 / 3) ** 0.5), abs=0.1)


def test_runs_outside_the_study_are_compared_by_their_settings(tmp_path, run_report):
    for seed, accuracy in enumerate((98.9, 98.4, 98.7)):
        write_run(tmp_path / f"demo{seed}", accuracy, seed=seed)
    write_run(tmp_path / "wide", 99.0, hidden_size=1024)
    text, _ = run_report(tmp_path / "wide", *sorted(tmp_path.glob("demo*")))
    table = rows(text, "runs: How do the other runs compare?")
    assert table["demo0, demo1, demo2"]["test puzzles solved (%)"] == "98.67 ± 0.2517"
    assert table["wide"]["seeds"] == "1" and "exp01" not in text and "(runs.png)" in text


@pytest.mark.parametrize("path, pattern, instead, problem", [
    ("metrics.jsonl", '.*"step": 4000, "train.*}\n', "\0\0\0\0\n", ""),  # a line that a crash left
    ("log.txt", "of 1,000 puzzles", "of 0 puzzles", "damaged: ZeroDivisionError"),
    ("metrics.jsonl", '"final".*\n', '"fin', "unfinished"),  # a run in progress
    ("ckpt_00008000.json", '"L_cycles": 6', '"L_cycles": null', "damaged: TypeError"),
    ("ckpt_00008000.json", '"settings".*', '"sett', "damaged: KeyError")])
def test_damage_costs_at_most_the_run_that_has_it(tmp_path, run_report, path, pattern, instead, problem):
    for name in ("exp04a_damaged", "exp04a_whole"):
        write_run(tmp_path / f"runs/{name}", data_path=name)
    path = tmp_path / "runs/exp04a_damaged" / path
    path.write_text(re.sub(pattern, lambda _: instead, path.read_text(), count=1))
    text, printed = run_report(tmp_path / "runs")
    complete = 1 if problem else 2
    assert f"- {complete} of 2 runs are complete\n" in printed and len(rows(text, "exp04a")) == complete
    assert not problem or f"\n- exp04a_damaged: {problem}" in printed


@pytest.mark.parametrize("argv, words", [("nowhere", "nowhere: no run"), ("--targt=80", "closest is target")])
def test_wrong_input_is_an_error_of_one_line(argv, words):
    with pytest.raises(report.UserError, match=words):
        report.main([argv])
