"""scripts/report.py on runs with known numbers: fit, tables, seeds, missing and damaged runs, wrong input."""
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

image = pytest.importorskip("matplotlib.image")
pytest.importorskip("scipy")
import report

EXP01 = {256: 1.4, 384: 2.9, 512: 5.03, 768: 11.0, 1024: 19.4, 1536: 43.0}  # hidden_size: million parameters


def write_run(folder, accuracy=80.0, parameters=5.0, final=True, settings=None, puzzles=1000, copies=1000):
    """Writes what train.py leaves of a run of 8000 steps and 2 hours, with an evaluation every 2000 steps."""
    os.makedirs(folder)
    settings = {"global_batch_size": 6144} | (settings or {})
    exact, lines = accuracy / 100, []
    for step in range(100, 8001, 100):
        done = step / 8000
        lines.append({
            "step": step, "train/loss": 0.5 + 2 * (1 - done) ** 2, "train/exact_accuracy": 0.95 * done ** 0.5,
            "train/steps": 4.0, "perf/examples_per_sec": settings["global_batch_size"] / 0.9,
            "perf/step_time": 0.9, "perf/tflops": 50.0})
        if step % 2000 == 0 and step < 8000:
            lines.append({"step": step, "eval/exact_accuracy": exact * done ** 0.5, "eval/accuracy": 0.9})
    if final:
        lines.append({"step": 8000, "final": True, "eval/exact_accuracy": exact, "eval/accuracy": 0.95,
                      "eval/surest_accuracy": 1.02 * exact})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "ckpt_00008000.json").write_text(json.dumps({"step": 8000, "settings": settings}))
    (folder / "log.txt").write_text(
        "# python 3.11, torch 2.9.1, Linux, 112 cores, 8 x xla (TPU v5litepod-8); settings that differ ...\n"
        f"{round(parameters * 1e6):,} parameters; {puzzles * (copies + 1):,} training examples of "
        f"{puzzles:,} puzzles, 422,786 test puzzles in data/x\n")


@pytest.fixture(autouse=True)
def limits(monkeypatch):
    """(label, low, high) of each axis of the pictures, which are not drawn in this process."""
    found = []

    def savefig(fig, path, **_):
        for axis in (axis for ax in fig.axes for axis in (ax.xaxis, ax.yaxis)):
            found.append((axis.get_label_text(), *axis.get_view_interval()))

    monkeypatch.setattr(report.plt.Figure, "savefig", savefig)
    return found


def run(*argv):
    report.command(lambda: report.main(list(map(str, argv))), report.__file__)


def rows(text, group):
    """The table of a group: {setting: {column: text}}."""
    section = text.split(f"## {group}")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(table[0], row)) for row in table[2:]}


def law(n):
    return 90 - 20 * n ** -0.8


def test_fit_recovers_a_known_law_within_its_stated_error():
    n = np.array(list(EXP01.values()))
    assert report.fit_power_law(n, law(n))[0] == pytest.approx([90, 20, 0.8], rel=1e-6)
    noisy, within = np.repeat(n, 3), []
    for seed in range(100):
        noise = np.random.default_rng(seed).normal(0, 0.2, len(noisy))
        p, covariance = report.fit_power_law(noisy, law(noisy) + noise)
        within.append(np.abs(p - [90, 20, 0.8]) < np.sqrt(np.diag(covariance)))
    assert 0.55 < np.mean(within) < 0.8  # one standard error: 68% of a normal distribution


def test_no_fit_where_the_points_do_not_allow_one():
    assert "3 sizes" in report.fit_power_law([1, 1, 2, 4], [10, 11, 20, 25])
    for y in [40, 30, 20, 10], [10, 20, 30, 40.5]:
        assert "does not rise" in report.fit_power_law([1, 2, 4, 8], y)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A folder with runs, exp01 complete and exp04a in part, and their report; and its text."""
    folder = tmp_path_factory.mktemp("study")
    for size, parameters in EXP01.items():
        write_run(folder / f"runs/exp01_{size}", law(parameters), parameters, settings={"hidden_size": size})
    write_run(folder / "runs/exp01_512_seed1", law(5.03) + 1, 5.03,
              settings={"hidden_size": 512, "seed": 1, "out_dir": "elsewhere"})
    for puzzles, accuracy in ((250, 70.0), (500, 80.0), (1000, 90.0), (2000, 95.0)):
        write_run(folder / f"runs/exp04a_{puzzles}", accuracy, final=puzzles < 2000, puzzles=puzzles,
                  settings={"data_path": f"data/{puzzles}"})
    os.makedirs(folder / "configs")
    for name in [f"exp01_{size}" for size in EXP01] + ["exp04a_100", "exp04a_250", "exp04a_2000", "exp07a"]:
        (folder / f"configs/{name}.py").touch()
    argv = [folder / "runs", f"--out_dir={folder / 'out'}", f"--configs={folder / 'configs'}"]
    done = subprocess.run([sys.executable, report.__file__, *argv], capture_output=True, text=True)
    assert done.returncode == 0 and "10 of 11 runs are complete" in done.stdout, done.stderr
    return folder, (folder / "out/report.md").read_text()


def test_tables_pictures_and_missing_runs_of_a_study(study):
    folder, text = study
    table = rows(text, "exp01")
    assert list(table) == [f"hidden_size {size}" for size in EXP01]
    solved = table["hidden_size 512"]["test puzzles solved (%)"]
    assert solved == f"{law(5.03) + 0.5:.2f} ± {0.5 ** 0.5:.2f}"  # two seeds
    row, accuracy = table["hidden_size 1536"], law(43.0)
    train = 95 * np.mean(np.sqrt(np.arange(73, 81) / 80))
    expected = {
        "seeds": "1", "test puzzles solved (%)": f"{accuracy:.2f}", "parameters (millions)": "43.000",
        "surest answers right (%)": f"{1.02 * accuracy:.2f}", "training time (hours)": "2.000",
        "training puzzles solved (%)": f"{train:.2f}", "training arithmetic (FLOP)": "3.6e+17",
        "accuracy per parameter-hour (% / (million hours))": f"{accuracy / 43 / 2:.2f}"}
    assert {key: row[key] for key in expected} == expected
    assert "8 x xla (TPU v5litepod-8)" in text
    pattern = r"over 7 runs.*" + ", ".join(name + r" = ([\d.]+) ± ([\d.]+)%?" for name in "abc")
    found = np.array(re.search(pattern, text).groups(), float)
    assert (abs(found[::2] - [90, 20, 0.8]) < 2 * found[1::2]).all()

    for line in ("exp01 | 7 | - | -", "exp07 | 0 | - | exp07a",
                 "exp04a | 3 | exp04a_2000: unfinished at step 8,000 | exp04a_100"):
        assert f"\n| {line} |\n" in text
    assert list(rows(text, "exp04a")) == ["250 puzzles", "500 puzzles", "1,000 puzzles"]

    names = ["exp01.png", "exp04a.png"]
    assert re.findall(r"\]\((.*\.png)\)", text) == names
    assert sorted(os.listdir(folder / "out")) == names + ["report.md", "results.json"]
    results = {run["name"]: run for run in json.loads((folder / "out/results.json").read_text())}
    assert len(results) == 10 and results["exp01_1536"]["accuracy"] == pytest.approx(accuracy, rel=1e-5)
    assert list(results["exp01_1536"]["evaluations"]) == ["2000", "4000", "6000", "8000"]
    for name in names:
        pixels = image.imread(folder / "out" / name)[..., :3]
        assert min(pixels.shape[:2]) > 250 and 0.02 < (pixels.min(-1) < 0.95).mean() < 0.5, name


def test_data_needed_is_interpolated_only_between_runs(study, tmp_path):
    folder, text = study
    assert f"about {np.sqrt(500 * 1000):,.0f}" in text  # 85 is half-way from 80 to 90: of the logarithm too
    run(folder / "runs/exp04a_250", folder / "runs/exp04a_500", f"--out_dir={tmp_path}", "--configs=nowhere")
    text = (tmp_path / "report.md").read_text()
    assert "do not bracket 85%" in text and "| - | not known: nowhere has no files |" in text


def test_every_group_has_its_table_and_axes_of_percentages_end_at_0_and_100(tmp_path, limits):
    other = {"lr": 2e-4, "hidden_size": 256, "L_cycles": 2, "halt_max_steps": 8, "global_batch_size": 3072}
    for group in report.GROUPS:
        for i, settings in enumerate(({"lr": 1e-4}, other)):
            solved = 80 + 6 * i if group.prefix.startswith("contrib") else 100 * i
            write_run(tmp_path / f"runs/{group.prefix}_{i}", solved, 5 + i, True, settings, 500 + i, 100 + i)
    run(tmp_path / "runs", f"--out_dir={tmp_path / 'out'}")
    text = (tmp_path / "out/report.md").read_text()
    assert all(len(rows(text, group.prefix)) == 2 for group in report.GROUPS)
    before = 86 * 0.75 ** 0.5  # at step 6000, 1.5 hours
    hours = 1.5 + 0.5 * (85 - before) / (86 - before)
    assert [row["hours to 85%"] for row in rows(text, "contrib01").values()] == ["-", f"{hours:.3f}"]
    assert rows(text, "contrib02")["1"]["supervision steps saved by halting (%)"] == "50.0"
    percentages = [(low, high) for label, low, high in limits if label.endswith("(%)")]
    assert len(percentages) > 25 and all(0 <= low < high <= 100 for low, high in percentages), limits


def test_runs_outside_the_study(tmp_path):
    for seed, accuracy in enumerate((98.9, 98.4, 98.7)):
        write_run(tmp_path / f"demo{seed}", accuracy, settings={"seed": seed})
    write_run(tmp_path / "wide", 99.0, settings={"hidden_size": 1024})
    for path in tmp_path.glob("*/metrics.jsonl"):
        path.write_text(path.read_text().replace('"perf/step_time": 0.9', '"perf/step_time": 0.001'))
    run(tmp_path / "wide", *sorted(tmp_path.glob("demo*")), f"--out_dir={tmp_path / 'out'}")
    text = (tmp_path / "out/report.md").read_text()
    table = rows(text, "How do these runs compare?")
    assert table["demo"]["test puzzles solved (%)"] == "98.67 ± 0.25"
    assert (table["wide"]["seeds"], table["wide"]["training time (seconds)"]) == ("1", "8.000")
    assert "exp01" not in text and "(runs.png)" in text


def test_runs_that_repeat_a_setting_are_its_seeds_in_every_group(tmp_path):
    for seed, (name, accuracy) in enumerate((("exp01c", 80.0), ("exp02a_03", 81.0), ("exp06_c", 82.0))):
        write_run(tmp_path / f"runs/{name}", accuracy, settings={"seed": seed})
    write_run(tmp_path / "runs/copy/exp06_c", 82.0, settings={"seed": 2})
    write_run(tmp_path / "runs/exp01a", 82.1, 1.0, settings={"hidden_size": 128, "seed": 1})
    write_run(tmp_path / "runs/exp01b", 70.0, 2.0, settings={"hidden_size": 256, "seed": 1})
    run(tmp_path / "runs", f"--out_dir={tmp_path / 'out'}")
    text = (tmp_path / "out/report.md").read_text()
    assert rows(text, "exp06")["batch 6144, lr 1.00e-04"]["test puzzles solved (%)"] == "81.00 ± 1.00"
    assert rows(text, "exp01")["hidden_size 512"]["seeds"] == "3"
    assert "runs/exp06_c has the settings and the seed of" in text and "runs/copy/exp06_c: left out" in text
    # Student's t with 2 degrees of freedom: 4.30 * 1.00 * sqrt(1 / 3 + 1) = 4.97
    assert ("Points against hidden_size 512, 81.0 ± 1.0 over 3 seeds, with 95% confidence intervals. Beyond "
            "chance: hidden_size 256 -11.0 (-16.0 to -6.0). Within: hidden_size 128 +1.1 (-3.9 to +6.1)."
            ) in text


def test_a_difference_has_its_confidence_interval():
    def difference(*groups):
        return report.difference_of(*([{"accuracy": value} for value in group] for group in groups))

    # Welch: variances of the means 4 / 3 and 1 / 3; 2.941 degrees of freedom, of which the quantile is 3.218
    half = 3.218 * (5 / 3) ** 0.5
    assert difference([70, 72, 74], [80, 81, 82]) == pytest.approx((-9, -9 - half, -9 + half), rel=1e-3)
    half = 4.303 * (1 / 2 + 1 / 3) ** 0.5  # two runs say little of their own variance
    assert difference([70, 74], [80, 81, 82]) == pytest.approx((-9, -9 - half, -9 + half), rel=1e-3)


@pytest.mark.parametrize("path, found, instead, problem", [
    ("metrics.jsonl", '"step": 4000, "train.*}\n', '"step": 4000, "tra', ""),  # the next line is glued to it
    ("metrics.jsonl", '.*"step": 4000, "train.*}\n', "\0\0\0\0\n", ""),  # no text in any encoding
    ("metrics.jsonl", '"train/loss": [\\d.]+', '"train/loss": "x"', ""),
    ("log.txt", "of 1,000 puzzles", "of 0 puzzles", ""),
    ("metrics.jsonl", '"final".*}', '"final": true}', "its final line in metrics.jsonl has no accuracy"),
    ("metrics.jsonl", '"final".*\n', '"fin', "unfinished at step 8,000"),  # a run in progress
    ("metrics.jsonl", "(?s).*", "", "unfinished at step 0"),
    ("ckpt_00008000.json", '"settings".*', '"settings": "x"}', "no ckpt_*.json with its settings"),
    ("ckpt_00008000.json", '"settings".*', '"sett', "no ckpt_*.json with its settings")])
def test_damage_costs_at_most_the_run_that_has_it(tmp_path, capsys, path, found, instead, problem):
    for name in ("exp04a_damaged", "exp04a_whole"):
        write_run(tmp_path / f"runs/{name}", settings={"data_path": name})
    path = tmp_path / "runs/exp04a_damaged" / path
    path.write_text(re.sub(found, lambda _: instead, path.read_text(), count=1))
    run(tmp_path / "runs", f"--out_dir={tmp_path / 'out'}")
    complete, named = (1, f"exp04a_damaged: {problem}") if problem else (2, "-")
    assert f"| exp04a | {complete} | {named} |" in capsys.readouterr().out
    assert len(rows((tmp_path / "out/report.md").read_text(), "exp04a")) == complete


@pytest.mark.parametrize("argv, words", [
    ("nowhere", "nowhere: no run"), ("--targt=80", "the closest is target"),
    ("without matplotlib", "pip install matplotlib"), ("without scipy", "matplotlib scipy")])
def test_wrong_input_is_an_error_of_one_line(study, tmp_path, argv, words):
    if argv.startswith("without "):
        (tmp_path / f"{argv.split()[1]}.py").write_text("raise ImportError('not installed')")
        argv = study[0] / "runs"
    command = [sys.executable, report.__file__, argv, f"--out_dir={tmp_path / 'out'}"]
    done = subprocess.run(command, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("report.py: ") and words in done.stderr
