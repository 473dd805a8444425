"""scripts/report.py on runs whose numbers are known: the fit, the tables, seeds, what is missing, wrong input."""
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "scripts"))
pytest.importorskip("matplotlib")
import report  # noqa: E402

EXP01 = {"a_h256": (256, 1.4), "b_h384": (384, 2.9), "c_h512": (512, 5.03), "d_h768": (768, 11.0), "e_h1024": (1024, 19.4), "f_h1536": (1536, 43.0)}


def write_run(folder, accuracy=80.0, parameters=5.0, final=True, settings=None, steps=8000, step_time=0.9, puzzles=1000, copies=1000,
              halting=4.0, train=95.0, loss=0.5):
    """A folder as train.py leaves it: evaluations every 2000 steps that end at `accuracy` percent; hours = steps * step_time / 3600."""
    os.makedirs(folder)
    settings = dict(global_batch_size=6144, out_dir=str(folder)) | (settings or {})
    lines, rate = [], settings["global_batch_size"] / step_time
    for step in range(100, steps + 1, 100):
        done = step / steps
        lines.append({"step": step, "train/loss": loss + 2 * (1 - done) ** 2, "train/exact_accuracy": train / 100 * done ** 0.5,
                      "train/steps": halting, "perf/examples_per_sec": rate, "perf/step_time": step_time})
        if step % 2000 == 0 and step < steps:
            lines.append({"step": step, "eval/exact_accuracy": accuracy / 100 * done ** 0.5, "eval/accuracy": 0.9})
    if final:
        lines.append({"step": steps, "final": True, "eval/exact_accuracy": accuracy / 100, "eval/accuracy": 0.95})
    with open(os.path.join(folder, "metrics.jsonl"), "w") as f:
        f.writelines(json.dumps(line) + "\n" for line in lines)
    with open(os.path.join(folder, f"ckpt_{steps:08d}.json"), "w") as f:
        json.dump({"step": steps, "settings": settings, "metrics": {}}, f)
    with open(os.path.join(folder, "log.txt"), "w") as f:
        f.write("# python 3.11, torch 2.9.1, Linux, 112 cores, 8 x xla (TPU v5litepod-8); settings that differ from train.py's: none\n"
                f"{round(parameters * 1e6):,} parameters; {puzzles * (copies + 1):,} training examples of {puzzles:,} puzzles, "
                "422,786 test puzzles in data/x\n")


def run(*argv, code=0):
    script = os.path.join(ROOT, "scripts", "report.py")
    done = subprocess.run([sys.executable, script, *map(str, argv)], capture_output=True, text=True, timeout=200)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def rows(text, group):
    """The table of a group: {setting: {column: text}}."""
    section = text.split(f"## {group}")[1].split("\n## ")[0]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")]
    return {row[0]: dict(zip(table[0], row)) for row in table[2:]}


def law(n, a=90.0, b=20.0, c=0.8):
    return a - b * n ** -c


def test_the_fit_recovers_a_known_law_within_its_stated_error():
    n = np.array([size for _, size in EXP01.values()])
    (a, b, c), covariance = report.fit_power_law(n, law(n))
    assert [a, b, c] == pytest.approx([90, 20, 0.8], rel=1e-6)
    within = []
    for seed in range(200):
        noisy = np.repeat(n, 3)
        p, covariance = report.fit_power_law(noisy, law(noisy) + np.random.default_rng(seed).normal(0, 0.2, len(noisy)))
        within.append(np.abs(p - [90, 20, 0.8]) < np.sqrt(np.diag(covariance)))
    assert 0.55 < np.mean(within) < 0.8  # one standard error: 68% of a normal distribution


@pytest.mark.parametrize("x, y, why", [
    ([1, 2, 4], [10, 20, 25], "3 sizes"), ([1, 1, 2, 4], [10, 11, 20, 25], "3 sizes"), ([1, 2, 4, 8], [40, 30, 20, 10], "does not rise"),
    ([1, 2, 4, 8], [10, 20, 30, 40.5], "does not rise")])
def test_no_fit_where_the_points_do_not_allow_one(x, y, why):
    assert why in report.fit_power_law(x, y)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """exp01 whole, two seeds of one size; exp04a in part, one run unfinished; a folder of the files that there should be."""
    folder = tmp_path_factory.mktemp("study")
    for name, (size, parameters) in EXP01.items():
        write_run(folder / f"runs/exp01{name}", law(parameters), parameters, settings={"hidden_size": size})
    write_run(folder / "runs/exp01c_h512_seed1", law(5.03) + 1, 5.03, settings={"hidden_size": 512, "seed": 1, "out_dir": "elsewhere"})
    for puzzles, accuracy in ((250, 70.0), (500, 80.0), (1000, 90.0)):
        write_run(folder / f"runs/exp04a_{puzzles}", accuracy, puzzles=puzzles, settings={"data_path": f"data/{puzzles}"})
    write_run(folder / "runs/exp04a_2000", 95.0, puzzles=2000, final=False, settings={"data_path": "data/2000"})
    for name in [f"exp01{name}" for name in EXP01] + [f"exp04a_{n}" for n in ("100", "250", "500", "1000", "2000", "5000")] + ["exp07a_float32"]:
        os.makedirs(folder / "configs", exist_ok=True)
        open(folder / f"configs/{name}.py", "w").close()
    return folder


@pytest.fixture(scope="module")
def text(study):
    printed = run(study / "runs", f"--out_dir={study / 'out'}", f"--configs={study / 'configs'}")
    assert "10 complete runs of 11" in printed
    with open(study / "out/report.md") as f:
        return f.read()


def test_the_table_has_the_runs_own_numbers(text):
    table = rows(text, "exp01")
    row = table["hidden_size 1536"]
    assert list(table) == [f"hidden_size {size}" for size, _ in EXP01.values()]
    assert row["seeds"] == "1" and row["test puzzles solved (%)"] == f"{law(43.0):.2f}" and row["parameters (millions)"] == "43.000"
    assert row["training time (hours)"] == "2.000" and row["throughput (examples/s)"] == f"{6144 / 0.9:,.1f}"
    assert row["effective depth (layers a supervision step)"] == "42"
    assert float(row["training - test (points)"]) == pytest.approx(95 * np.mean(np.sqrt(np.arange(73, 81) / 80)) - law(43.0), abs=0.01)
    assert float(row["accuracy per parameter-hour (% per million parameters and hour)"]) == pytest.approx(law(43.0) / 43 / 2, rel=1e-2)
    assert "8 x xla (TPU v5litepod-8)" in text


def test_seeds_are_one_point_with_its_deviation(text):
    row = rows(text, "exp01")["hidden_size 512"]
    assert row["seeds"] == "2" and row["test puzzles solved (%)"] == f"{law(5.03) + 0.5:.2f} ± {0.5 ** 0.5:.2f}"


def test_the_reports_law_is_the_one_put_in(text):
    found = re.search(r"over 7 runs.*a = ([\d.]+) ± ([\d.]+)%, b = ([\d.]+) ± ([\d.]+), c = ([\d.]+) ± ([\d.]+)", text)
    a, a_error, b, b_error, c, c_error = map(float, found.groups())
    assert abs(a - 90) < 2 * a_error and abs(b - 20) < 2 * b_error and abs(c - 0.8) < 2 * c_error


def test_what_is_missing_or_unfinished_is_named_and_not_filled_in(text):
    status = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| exp")}
    assert "| exp01 | 7 | - | - |" == status["exp01"]
    assert "exp04a_2000: unfinished at step 8,000" in status["exp04a"] and status["exp04a"].endswith("| exp04a_100, exp04a_5000 |")
    assert status["exp07"] == "| exp07 | 0 | - | exp07a_float32 |"
    assert list(rows(text, "exp04a")) == ["250 puzzles", "500 puzzles", "1,000 puzzles"] and "is not known" not in text


def test_the_data_needed_is_interpolated_only_between_runs(study, text, tmp_path):
    assert f"about {np.sqrt(500 * 1000):,.0f}" in text  # 85 is half-way from 80 to 90, so in the logarithm of the puzzles
    run(study / "runs/exp04a_250", study / "runs/exp04a_500", f"--out_dir={tmp_path}", "--configs=nowhere")
    with open(tmp_path / "report.md") as f:
        text = f.read()
    assert "do not bracket 85%" in text and "nowhere has no files, so which runs are missing is not known" in text


def test_pictures_are_there_and_not_empty(study, text):
    import matplotlib.image
    named = re.findall(r"\]\((.*\.png)\)", text)
    assert sorted(named) == ["exp01.png", "exp01_curves.png", "exp04a.png", "exp04a_curves.png"]
    assert sorted(os.listdir(study / "out")) == sorted(named) + ["report.md"]
    for name in named:
        pixels = matplotlib.image.imread(study / "out" / name)[..., :3]
        assert min(pixels.shape[:2]) > 250 and 0.02 < (pixels.min(-1) < 0.95).mean() < 0.5, name


def test_every_group_reports(tmp_path):
    for g in report.GROUPS:
        for i, change in enumerate(({"lr": 1e-4}, {"lr": 2e-4, "hidden_size": 256, "L_cycles": 2, "halt_max_steps": 8, "global_batch_size": 3072})):
            write_run(tmp_path / f"runs/{g.prefix}_{i}", 80 + 6 * i, 5 + i, settings=change, puzzles=500 + i, copies=100 + i)
    run(tmp_path / "runs", f"--out_dir={tmp_path / 'out'}", "--dpi=40")
    with open(tmp_path / "out/report.md") as f:
        text = f.read()
    for g in report.GROUPS:
        assert len(rows(text, g.prefix)) == 2
    assert rows(text, "contrib01")["1"]["hours to 85%"] == f"{2 * (6000 + 2000 * (85 - 86 * 0.75 ** 0.5) / (86 - 86 * 0.75 ** 0.5)) / 8000:.3f}"
    assert rows(text, "contrib01")["0"]["hours to 85%"] == "-" and rows(text, "contrib02")["1"]["supervision steps saved by halting (%)"] == "50.0"


def test_runs_that_are_not_of_the_study(tmp_path):
    for seed, accuracy in enumerate((98.9, 98.4, 98.7)):
        write_run(tmp_path / f"demo{seed}", accuracy, settings={"seed": seed})
    write_run(tmp_path / "wide", 99.0, settings={"hidden_size": 1024})
    run(tmp_path / "demo*", tmp_path / "wide", f"--out_dir={tmp_path / 'out'}")
    with open(tmp_path / "out/report.md") as f:
        text = f.read()
    table = rows(text, "How do these runs compare?")
    assert table["demo"]["test puzzles solved (%)"] == "98.67 ± 0.25" and table["wide"]["seeds"] == "1" and "exp01" not in text
    assert sorted(os.listdir(tmp_path / "out")) == ["report.md", "runs.png", "runs_curves.png"]


def test_a_copy_of_a_run_does_not_count_twice(tmp_path):
    write_run(tmp_path / "runs/a/exp07_a", 80.0)
    write_run(tmp_path / "runs/b/exp07_a", 80.0)
    run(tmp_path / "runs", f"--out_dir={tmp_path / 'out'}")
    with open(tmp_path / "out/report.md") as f:
        text = f.read()
    assert rows(text, "exp07")["bfloat16"]["seeds"] == "1" and "left out" in text


def test_a_run_that_is_being_written_is_read(tmp_path):
    """Half a last line, no checkpoint and no log yet: unfinished."""
    write_run(tmp_path / "runs/exp07_a", 80.0, final=False)
    os.remove(tmp_path / "runs/exp07_a/log.txt")
    os.remove(tmp_path / "runs/exp07_a/ckpt_00008000.json")
    with open(tmp_path / "runs/exp07_a/metrics.jsonl", "a") as f:
        f.write('{"step": 8100, "tra')
    os.makedirs(tmp_path / "runs/exp07_b")
    open(tmp_path / "runs/exp07_b/metrics.jsonl", "w").close()
    assert "exp07_a: unfinished at step 8,000; exp07_b: unfinished at step 0" in run(tmp_path / "runs", f"--out_dir={tmp_path / 'out'}")


@pytest.mark.parametrize("line", ["{\"step\": 8100, \"tra", "[1, 2]", "{\"train/loss\": 1.0}", "{\"step\": 8100, \"train/loss\": \"x\"}"])
def test_a_damaged_line_is_one_line(tmp_path, line):
    write_run(tmp_path / "run")
    with open(tmp_path / "run/metrics.jsonl", "a") as f:
        f.write(line + "\n")
    said = run(tmp_path / "run", f"--out_dir={tmp_path / 'out'}", code=2)
    assert said.startswith("report.py: ") and said.count("\n") == 1 and "metrics.jsonl:85: damaged" in said and not os.path.exists(tmp_path / "out")


@pytest.mark.parametrize("argv, want", [
    (["nowhere"], "nowhere: no run"), (["--targt=80"], "the closest is target"), (["--target=high"], "target must be float")])
def test_wrong_input_is_one_line(tmp_path, argv, want):
    said = run(*argv, f"--out_dir={tmp_path / 'out'}", code=2)
    assert said.startswith("report.py: ") and said.count("\n") == 1 and want in said and not os.path.exists(tmp_path / "out")


def test_without_matplotlib_one_line_says_so(tmp_path):
    write_run(tmp_path / "run")
    (tmp_path / "matplotlib.py").write_text("raise ImportError('not installed')")
    done = subprocess.run([sys.executable, os.path.join(ROOT, "scripts", "report.py"), str(tmp_path / "run")], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2 and "pip install matplotlib" in done.stderr and done.stderr.count("\n") == 1
