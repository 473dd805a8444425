"""scripts/report.py on runs with known numbers: the fit, the tables, seeds, missing runs, wrong input."""
import contextlib
import io
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

EXP01 = {  # run: (hidden_size, parameters in millions)
    "a_h256": (256, 1.4), "b_h384": (384, 2.9), "c_h512": (512, 5.03), "d_h768": (768, 11.0),
    "e_h1024": (1024, 19.4), "f_h1536": (1536, 43.0)}


def write_run(folder, accuracy=80.0, parameters=5.0, final=True, settings=None, puzzles=1000, copies=1000):
    """Writes what train.py leaves of a run of 8000 steps and 2 hours.

    Its evaluations, every 2000 steps, end at `accuracy` percent.
    """
    steps, step_time = 8000, 0.9
    os.makedirs(folder)
    settings = dict(global_batch_size=6144, out_dir=str(folder)) | (settings or {})
    lines = []
    for step in range(100, steps + 1, 100):
        done = step / steps
        lines.append({
            "step": step, "train/loss": 0.5 + 2 * (1 - done) ** 2, "train/exact_accuracy": 0.95 * done ** 0.5,
            "train/steps": 4.0, "perf/examples_per_sec": settings["global_batch_size"] / step_time,
            "perf/step_time": step_time, "perf/tflops": 50.0})
        if step % 2000 == 0 and step < steps:
            exact = accuracy / 100 * done ** 0.5
            lines.append({"step": step, "eval/exact_accuracy": exact, "eval/accuracy": 0.9})
    if final:
        exact = accuracy / 100
        lines.append({"step": steps, "final": True, "eval/exact_accuracy": exact, "eval/accuracy": 0.95,
                      "eval/surest_accuracy": 1.02 * exact, "eval/example": "a puzzle, with wandb_log"})
    with open(os.path.join(folder, "metrics.jsonl"), "w") as f:
        f.writelines(json.dumps(line) + "\n" for line in lines)
    with open(os.path.join(folder, f"ckpt_{steps:08d}.json"), "w") as f:
        json.dump({"step": steps, "settings": settings, "metrics": {}}, f)
    with open(os.path.join(folder, "log.txt"), "w") as f:
        f.write("# python 3.11, torch 2.9.1, Linux, 112 cores, 8 x xla (TPU v5litepod-8); "
                "settings that differ from train.py's: none\n"
                f"{round(parameters * 1e6):,} parameters; {puzzles * (copies + 1):,} training examples of "
                f"{puzzles:,} puzzles, 422,786 test puzzles in data/x\n")


def run(*argv, code=0):
    """Runs report.py in this process; returns what it prints."""
    output = io.StringIO()
    exit_code = 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            report.command(lambda: report.main(list(map(str, argv))), report.__file__)
        except SystemExit as e:
            exit_code = e.code
    assert exit_code == code, output.getvalue()
    return output.getvalue()


def run_process(*argv, **env):
    """Runs report.py as a command."""
    return subprocess.run([sys.executable, os.path.join(ROOT, "scripts", "report.py"), *map(str, argv)],
                          capture_output=True, text=True, timeout=200, env={**os.environ, **env})


def read(path):
    with open(path) as f:
        return f.read()


def rows(text, group):
    """The table of a group: {setting: {column: text}}."""
    section = text.split(f"## {group}")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(table[0], row)) for row in table[2:]}


def law(n, a=90.0, b=20.0, c=0.8):
    return a - b * n ** -c


def test_fit_recovers_a_known_law_within_its_stated_error():
    n = np.array([size for _, size in EXP01.values()])
    (a, b, c), covariance = report.fit_power_law(n, law(n))
    assert [a, b, c] == pytest.approx([90, 20, 0.8], rel=1e-6)
    within = []
    for seed in range(200):
        noisy = np.repeat(n, 3)
        noise = np.random.default_rng(seed).normal(0, 0.2, len(noisy))
        p, covariance = report.fit_power_law(noisy, law(noisy) + noise)
        within.append(np.abs(p - [90, 20, 0.8]) < np.sqrt(np.diag(covariance)))
    assert 0.55 < np.mean(within) < 0.8  # one standard error: 68% of a normal distribution


@pytest.mark.parametrize("x, y, reason", [
    ([1, 2, 4], [10, 20, 25], "3 sizes"),
    ([1, 1, 2, 4], [10, 11, 20, 25], "3 sizes"),
    ([1, 2, 4, 8], [40, 30, 20, 10], "does not rise"),
    ([1, 2, 4, 8], [10, 20, 30, 40.5], "does not rise")])
def test_no_fit_where_the_points_do_not_allow_one(x, y, reason):
    assert reason in report.fit_power_law(x, y)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """exp01 complete, with two seeds of one size; exp04a in part, one run unfinished; the study's files."""
    folder = tmp_path_factory.mktemp("study")
    for name, (size, parameters) in EXP01.items():
        write_run(folder / f"runs/exp01{name}", law(parameters), parameters, settings={"hidden_size": size})
    write_run(folder / "runs/exp01c_h512_seed1", law(5.03) + 1, 5.03,
              settings={"hidden_size": 512, "seed": 1, "out_dir": "elsewhere"})
    for puzzles, accuracy in ((250, 70.0), (500, 80.0), (1000, 90.0)):
        settings = {"data_path": f"data/{puzzles}"}
        write_run(folder / f"runs/exp04a_{puzzles}", accuracy, puzzles=puzzles, settings=settings)
    write_run(folder / "runs/exp04a_2000", 95.0, final=False, puzzles=2000,
              settings={"data_path": "data/2000"})
    os.makedirs(folder / "configs")
    names = [f"exp01{name}" for name in EXP01] + ["exp07a_float32"]
    names += [f"exp04a_{puzzles}" for puzzles in (100, 250, 500, 1000, 2000, 5000)]
    for name in names:
        open(folder / f"configs/{name}.py", "w").close()
    return folder


@pytest.fixture(scope="module")
def text(study):
    """The report on it, by the command."""
    done = run_process(study / "runs", f"--out_dir={study / 'out'}", f"--configs={study / 'configs'}")
    assert done.returncode == 0 and "10 complete runs of 11" in done.stdout, done.stderr
    return read(study / "out/report.md")


def test_table_has_the_numbers_of_the_runs(text):
    table = rows(text, "exp01")
    row = table["hidden_size 1536"]
    assert list(table) == [f"hidden_size {size}" for size, _ in EXP01.values()]
    assert row["seeds"] == "1" and row["test puzzles solved (%)"] == f"{law(43.0):.2f}"
    assert row["parameters (millions)"] == "43.000"
    assert row["training time (hours)"] == "2.000" and row["throughput (examples/s)"] == f"{6144 / 0.9:,.1f}"
    assert row["effective depth (layers per supervision step)"] == "42"
    train = 95 * np.mean(np.sqrt(np.arange(73, 81) / 80))
    assert float(row["training - test (points)"]) == pytest.approx(train - law(43.0), abs=0.01)
    per_hour = row["accuracy per parameter-hour (% / (million hours))"]
    assert float(per_hour) == pytest.approx(law(43.0) / 43 / 2, rel=1e-2)
    assert "8 x xla (TPU v5litepod-8)" in text


def test_seeds_are_one_point_with_its_deviation(text):
    row = rows(text, "exp01")["hidden_size 512"]
    assert row["seeds"] == "2"
    assert row["test puzzles solved (%)"] == f"{law(5.03) + 0.5:.2f} ± {0.5 ** 0.5:.2f}"


def test_report_states_the_law_of_the_runs(text):
    pattern = r"over 7 runs.*a = ([\d.]+) ± ([\d.]+)%, b = ([\d.]+) ± ([\d.]+), c = ([\d.]+) ± ([\d.]+)"
    a, a_error, b, b_error, c, c_error = map(float, re.search(pattern, text).groups())
    assert abs(a - 90) < 2 * a_error and abs(b - 20) < 2 * b_error and abs(c - 0.8) < 2 * c_error


def test_missing_and_unfinished_runs_are_named_and_not_filled_in(text):
    status = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| exp")}
    assert "| exp01 | 7 | - | - |" == status["exp01"]
    assert "exp04a_2000: unfinished at step 8,000" in status["exp04a"]
    assert status["exp04a"].endswith("| exp04a_100, exp04a_5000 |")
    assert status["exp07"] == "| exp07 | 0 | - | exp07a_float32 |"
    assert list(rows(text, "exp04a")) == ["250 puzzles", "500 puzzles", "1,000 puzzles"]
    assert "is not known" not in text


def test_data_needed_is_interpolated_only_between_runs(study, text, tmp_path):
    # 85 is half-way from 80 to 90, so in the logarithm of the puzzles
    assert f"about {np.sqrt(500 * 1000):,.0f}" in text
    run(study / "runs/exp04a_250", study / "runs/exp04a_500", f"--out_dir={tmp_path}", "--configs=nowhere")
    text = read(tmp_path / "report.md")
    assert "do not bracket 85%" in text
    assert "nowhere has no files, so which runs are missing is not known" in text


def test_pictures_exist_and_are_not_empty(study, text):
    import matplotlib.image
    named = re.findall(r"\]\((.*\.png)\)", text)
    assert sorted(named) == ["exp01.png", "exp01_curves.png", "exp04a.png", "exp04a_curves.png"]
    assert "surest answers right (%)" in rows(text, "exp01")["hidden_size 1536"]
    assert sorted(os.listdir(study / "out")) == sorted(named) + ["report.md"]
    for name in named:
        pixels = matplotlib.image.imread(study / "out" / name)[..., :3]
        assert min(pixels.shape[:2]) > 250 and 0.02 < (pixels.min(-1) < 0.95).mean() < 0.5, name


def test_every_group_has_its_table(tmp_path):
    other = {"lr": 2e-4, "hidden_size": 256, "L_cycles": 2, "halt_max_steps": 8, "global_batch_size": 3072}
    for group in report.GROUPS:
        for i, settings in enumerate(({"lr": 1e-4}, other)):
            write_run(tmp_path / f"runs/{group.prefix}_{i}", 80 + 6 * i, 5 + i, settings=settings,
                      puzzles=500 + i, copies=100 + i)
    run(tmp_path / "runs", f"--out_dir={tmp_path / 'out'}", "--dpi=40")
    text = read(tmp_path / "out/report.md")
    for group in report.GROUPS:
        assert len(rows(text, group.prefix)) == 2
    before = 86 * 0.75 ** 0.5  # at step 6000
    hours = 2 * (6000 + 2000 * (85 - before) / (86 - before)) / 8000
    assert rows(text, "contrib01")["1"]["hours to 85%"] == f"{hours:.3f}"
    assert rows(text, "contrib01")["0"]["hours to 85%"] == "-"
    assert rows(text, "contrib02")["1"]["supervision steps saved by halting (%)"] == "50.0"


def test_runs_outside_the_study(tmp_path):
    for seed, accuracy in enumerate((98.9, 98.4, 98.7)):
        write_run(tmp_path / f"demo{seed}", accuracy, settings={"seed": seed})
    write_run(tmp_path / "wide", 99.0, settings={"hidden_size": 1024})
    run(tmp_path / "demo*", tmp_path / "wide", f"--out_dir={tmp_path / 'out'}")
    text = read(tmp_path / "out/report.md")
    table = rows(text, "How do these runs compare?")
    assert table["demo"]["test puzzles solved (%)"] == "98.67 ± 0.25"
    assert table["wide"]["seeds"] == "1" and "exp01" not in text
    assert sorted(os.listdir(tmp_path / "out")) == ["report.md", "runs.png", "runs_curves.png"]


def test_a_copy_of_a_run_does_not_count_twice(tmp_path):
    write_run(tmp_path / "runs/a/exp07_a", 80.0)
    write_run(tmp_path / "runs/b/exp07_a", 80.0)
    run(tmp_path / "runs", f"--out_dir={tmp_path / 'out'}")
    text = read(tmp_path / "out/report.md")
    assert rows(text, "exp07")["bfloat16"]["seeds"] == "1" and "left out" in text


def test_a_run_in_progress_is_unfinished(tmp_path):
    """Half a last line, no checkpoint and no log yet."""
    write_run(tmp_path / "runs/exp07_a", 80.0, final=False)
    os.remove(tmp_path / "runs/exp07_a/log.txt")
    os.remove(tmp_path / "runs/exp07_a/ckpt_00008000.json")
    with open(tmp_path / "runs/exp07_a/metrics.jsonl", "a") as f:
        f.write('{"step": 8100, "tra')
    os.makedirs(tmp_path / "runs/exp07_b")
    open(tmp_path / "runs/exp07_b/metrics.jsonl", "w").close()
    output = run(tmp_path / "runs", f"--out_dir={tmp_path / 'out'}")
    assert "exp07_a: unfinished at step 8,000; exp07_b: unfinished at step 0" in output


def test_runs_that_repeat_a_setting_are_its_seeds_in_every_group(tmp_path):
    """Three copies of a baseline in three groups, and a setting that only one of the groups has."""
    for seed, (name, accuracy) in enumerate((("exp01c", 80.0), ("exp02a_03", 81.0), ("exp06_c", 82.0))):
        write_run(tmp_path / f"runs/{name}", accuracy, settings={"seed": seed})
    write_run(tmp_path / "runs/exp01a", 82.1, 1.0, settings={"hidden_size": 128, "seed": 1})
    write_run(tmp_path / "runs/exp01b", 70.0, 2.0, settings={"hidden_size": 256, "seed": 1})
    run(tmp_path / "runs", f"--out_dir={tmp_path / 'out'}")
    text = read(tmp_path / "out/report.md")
    assert rows(text, "exp06")["batch 6144, lr 1.00e-04"]["test puzzles solved (%)"] == "81.00 ± 1.00"
    assert rows(text, "exp01")["hidden_size 512"]["seeds"] == "3"
    # Student's t with 2 degrees of freedom: 4.30 * 1.00 * sqrt(1 / 3 + 1) = 4.97
    found = re.search(r"by ([\d.]+) by chance \(95%\): hidden_size 128: \+1.10 \(may be chance\); "
                      r"hidden_size 256: -11.00\.", text)
    assert float(found[1]) == pytest.approx(4.97, rel=0.05), text
    assert "exp06.png" not in text and "exp06_curves.png" in text  # one setting: a curve and no dot


def test_the_unit_of_time_fits_the_runs(tmp_path):
    write_run(tmp_path / "runs/short", 80.0)
    path = tmp_path / "runs/short/metrics.jsonl"
    path.write_text(path.read_text().replace('"perf/step_time": 0.9', '"perf/step_time": 0.001'))
    run(tmp_path / "runs", f"--out_dir={tmp_path / 'out'}")
    table = rows(read(tmp_path / "out/report.md"), "How do these runs compare?")
    assert table["short"]["training time (seconds)"] == "8.000"


def test_axes_of_percentages_stay_within_0_and_100(tmp_path, monkeypatch):
    limits = []

    def look(fig, path, **_):
        limits.extend((ax.get_ylabel(), *ax.get_ylim()) for ax in fig.axes)
        limits.extend((ax.get_xlabel(), *ax.get_xlim()) for ax in fig.axes)

    monkeypatch.setattr(report.plt.Figure, "savefig", look)
    for dtype, accuracy in (("float16", 0.0), ("float32", 100.0)):
        write_run(tmp_path / f"runs/exp02a_{dtype}", accuracy, settings={"L_cycles": int(dtype[-2:])})
        write_run(tmp_path / f"runs/exp07_{dtype}", accuracy, settings={"forward_dtype": dtype})
    run(tmp_path / "runs", f"--out_dir={tmp_path / 'out'}")
    percentages = [(low, high) for label, low, high in limits if label.endswith("(%)")]
    assert len(percentages) == 8 and all(0 <= low < high <= 100 for low, high in percentages), limits


def test_html_is_one_file_with_all_of_the_report(tmp_path):
    for dtype in ("float16", "float32"):
        write_run(tmp_path / f"runs/exp07_{dtype}", 80.0, settings={"forward_dtype": dtype})
    run(tmp_path / "runs", f"--out_dir={tmp_path / 'out'}", "--html")
    page = read(tmp_path / "out/report.html")
    assert page.count('src="data:image/png;base64,') == 2 and "<td>float16</td>" in page
    assert page.count("<table>") == page.count("</table>") == 2 and page.count("<ul>") == page.count("</ul>")
    outside = re.sub(r'src="data:[^"]*"', "", page)
    assert "http" not in outside and "src=" not in outside and "|" not in outside


@pytest.mark.parametrize("line", [
    '{"step": 8100, "tra', "[1, 2]", '{"train/loss": 1.0}', '{"step": 8100, "train/loss": "x"}'])
def test_a_damaged_line_is_an_error_of_one_line(tmp_path, line):
    write_run(tmp_path / "run")
    with open(tmp_path / "run/metrics.jsonl", "a") as f:
        f.write(line + "\n")
    output = run(tmp_path / "run", f"--out_dir={tmp_path / 'out'}", code=2)
    assert output.startswith("report.py: ") and output.count("\n") == 1
    assert "metrics.jsonl:85: damaged" in output and not os.path.exists(tmp_path / "out")


@pytest.mark.parametrize("argv, words", [
    (["nowhere"], "nowhere: no run"),
    (["--targt=80"], "the closest is target"),
    (["--target=high"], "target must be float")])
def test_wrong_input_is_an_error_of_one_line(tmp_path, argv, words):
    output = run(*argv, f"--out_dir={tmp_path / 'out'}", code=2)
    assert output.startswith("report.py: ") and output.count("\n") == 1
    assert words in output and not os.path.exists(tmp_path / "out")


def test_without_matplotlib_the_error_says_how_to_install_it(tmp_path):
    write_run(tmp_path / "run")
    (tmp_path / "matplotlib.py").write_text("raise ImportError('not installed')")
    done = run_process(tmp_path / "run", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2 and "pip install matplotlib" in done.stderr and done.stderr.count("\n") == 1
