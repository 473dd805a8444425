"""The fixtures of several test files."""
import json
import os
import shutil

import helpers  # it adds the project and its scripts to sys.path, for what follows
import pytest
import servers

# isort: split
import export
import numpy as np
import solve
import torch

import bench
import configurator
import prepare_arc
import prepare_maze
from puzzles.writer import write_dataset
from runtime import process
from runtime.files import locked


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """Each test runs in an empty folder of its own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def nothing_stays():
    """Undoes what a replica that a test ran in this process may have left behind. No fork may run here."""
    yield
    process.restart_watchdog(0)  # it would go on counting, and fast where a test replaces time.sleep
    assert not configurator.FORKS


@pytest.fixture
def at_once(monkeypatch):
    """No waits between attempts at a request, in this process."""
    monkeypatch.setattr("runtime.retry.WAITS", [0] * 9)


# Datasets and runs, which no test changes. A test that does takes a copy.

@pytest.fixture(scope="session")
def random_puzzles(tmp_path_factory):
    """A dataset of 1000 random 4x4 grids for training and for tests."""
    return bench.find_or_make_dataset("missing", str(tmp_path_factory.mktemp("data")), 4)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return helpers.small_dataset(str(tmp_path_factory.mktemp("data") / "sudoku-4x4"))


@pytest.fixture(scope="session")
def finished(data, tmp_path_factory):
    """An uninterrupted run of 40 steps with a checkpoint every 10: (out_dir, its output)."""
    out = str(tmp_path_factory.mktemp("whole") / "run")
    return out, helpers.run(data, out, *helpers.WHOLE)


@pytest.fixture
def out(finished, tmp_path):
    """A copy of the folder of `finished`."""
    return str(shutil.copytree(finished[0], tmp_path / "copy"))


@pytest.fixture(scope="session")
def build_once(tmp_path_factory):
    """A function that calls build(folder) in the first worker that asks for this name; returns the folder."""
    def build_once(name, build):
        folder = tmp_path_factory.getbasetemp()
        if "PYTEST_XDIST_WORKER" in os.environ:
            folder = folder.parent  # all workers share it
        folder /= name
        with locked(str(folder)):
            if not folder.exists():
                folder.mkdir()
                build(folder)
        return folder

    return build_once


SOLVE_MODEL = [
    "--hidden_size=64", "--num_heads=2", "--puzzle_emb_ndim=0", "--expansion=2", "--H_cycles=1",
    "--L_cycles=1", "--L_layers=1", "--halt_max_steps=2", "--eval_halt_max_steps=4",
    "--forward_dtype=float32", "--global_batch_size=48", "--lr=1e-2", "--lr_warmup_steps=20",
    "--weight_decay=0.1", "--ema_rate=0.95", "--loss_type=softmax_cross_entropy"]


@pytest.fixture(scope="session")
def models_folder(build_once):
    """NAME-data/ and NAME/ of three models; model.pt and official.pt, the first of them in files.

    One solves most 4x4 Sudokus; one 6x6 mazes, badly; one exchanges the cells 0 and 1 of a grid of 2x3.
    houses/ is a run of examples/houses.py on the first one's data.
    """
    return build_once("solve", train_models)


def train_models(path):
    helpers.prepare(path / "sudoku-data", source="generate", size=4, num_train=500, num_test=60, num_aug=10)
    helpers.prepare(path / "maze-data", prepare_maze, source="generate", size=6, min_path=6, num_train=64,
                    num_test=20)
    questions = np.random.default_rng(0).integers(1, 3, (64, 6), dtype=np.uint8)
    splits = dict.fromkeys(("train", "test"), (questions, 3 - questions))
    exchange = {"kind": "exchange", "grid": [2, 3], "symbols": "_01"}
    write_dataset(str(path / "exchange-data"), splits, 3, exchange)

    def train(name, *flags):
        helpers.run(path / f"{name}-data", path / name, *SOLVE_MODEL, *flags)

    outputs = "inputs,labels,preds,q_halt_logits,surest_preds,surest_q_halt_logits"
    train("sudoku", "--max_steps=70", "--eval_patience=1", f"--eval_save_outputs={outputs}")
    export.main([str(path / "sudoku"), str(path / "model.pt")])
    torch.save(torch.load(path / "model.pt")["weights"], path / "official.pt")
    train("maze", "--mlp_t=False", "--pos_encodings=rope", "--max_steps=4", "--eval_final_max_puzzles=8")
    train("exchange", "--max_steps=30")
    helpers.run(path / "sudoku-data", path / "houses", *SOLVE_MODEL, f"{helpers.ROOT}/examples/houses.py",
                "--max_steps=40")


@pytest.fixture(scope="session")
def arc_folder(build_once):
    """arc/, a run with its dataset arc-data/; model.pt, its file; the test tasks in tasks.json."""
    return build_once("arc", train_on_arc)


def train_on_arc(path):
    generated = dict(source="generate", num_pairs=5, num_train=4, num_test=6, num_aug=3)
    helpers.prepare(path / "arc-data", prepare_arc, **generated)
    helpers.run_config("arc1.py", path / "arc", *helpers.ARC_MODEL, "--lr=1e-2", "--lr_warmup_steps=1")
    export.main([str(path / "arc"), str(path / "model.pt")])
    settings = helpers.dataset_settings(prepare_arc, **generated)
    (path / "tasks.json").write_text(json.dumps(dict(prepare_arc.generate(settings, "evaluation"))))


@pytest.fixture
def run_solve(capsys):
    """solve.py in this process: a function of its arguments that returns what it prints."""
    def run_solve(*argv):
        capsys.readouterr()
        solve.main(list(map(str, argv)))
        return capsys.readouterr().out

    return run_solve


@pytest.fixture
def pyplot(monkeypatch):
    """matplotlib.pyplot for a notebook: its figures stay open until the next one."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("Agg")
    pyplot.close("all")  # those of other tests
    monkeypatch.setattr(pyplot, "show", lambda: None)
    return pyplot


# Servers.

@pytest.fixture
def hub(monkeypatch, at_once):
    """A local server instead of the hub, and no waits between attempts."""
    with servers.Server(servers.Hub) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url + "/")
        yield server


@pytest.fixture
def bucket_server(monkeypatch):
    """A server that passes requests on to an empty bucket, with faults. It stands for the cloud."""
    server = servers.serve_bucket()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    monkeypatch.setenv("PYTHONPATH", helpers.ROOT)
    yield server
    server.server_close()
