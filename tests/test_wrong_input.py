"""Wrong input: exit code 2, one line that says what is wrong, where, and how to fix it; no file changes.

Most cases call a script's start() in this process. Those in COMMANDS run the real command.
Wrong config files and flags of the wrong type are in test_configurator.py.
"""
import glob
import gzip
import importlib.util
import os
import shutil
import signal
import subprocess
import sys

import configurator
import numpy as np
import pytest
import torch
from configurator import configure
from conftest import ROOT, ForkedTrain

import prepare_maze
import prepare_sudoku
import train

T, P, M = "train.py", "prepare_sudoku.py", "prepare_maze.py"
TINY = """
data_path = "data/sudoku"
out_dir = "out/new"
device = "cpu"
global_batch_size = 4
max_steps = 2
hidden_size = 16
num_heads = 2
puzzle_emb_ndim = 16
puzzle_emb_len = 2
L_layers = 1
H_cycles = 1
L_cycles = 1
halt_max_steps = 2
checkpoint_interval = 1
forward_dtype = "float32"
"""
HEADER = "source,question,answer,rating"
# 4x4 puzzles: one with a single solution, and wrong rows of a CSV file with the words of the error
GOOD = "me,1..3.42...1.2...,1243342143122134,0"
PUZZLES = {
    "me,1..3,1243342143122134,0": "4 characters | 16",
    "me,1..3.42...1.2...": "question, answer, rating | first line",
    "me,1..5.42...1.2...,1243342143122134,0": "character 4 | '5'",
    "me,é..3.42...1.2...,1243342143122134,0": "character 1 of the question | 'é'",
    "me,1..3.42...1.2...,124.342143122134,0": "character 4 of the answer | '.'",
    "me,1..3.42...1.2...,12433421431221341,0": "answer has 17 characters | 16",
    "me,1..3.42...1.2...,\u0663243342143122134,0": "character 1 of the answer | '\u0663' | '1234'",
    "me,1..3.42...1.2...,1243342143122134,hard": "rating 'hard' is not an integer",
    "me,1...............,2134431212433421,0": "1 in row 1, column 1 | 2",
    "me,1..3.42...1.2...,1143342143122134,0": "the answer has digit 1 twice in row 1",
    "me,1..1............,1243342143122134,0": "the question has digit 1 twice in row 1",
    "me,1...............,1243342143122134,0": "more than one solution",
    "me,12....3....4....,1243342143122134,0": "no solution"}
MAZE = "me,S   #   G,Soo #o  G,0"  # 3x3
MAZES = {
    "me,S   #  G,Soo #o G,0": "8 characters | 9",
    "me,So  #   G,Soo #o  G,0": "character 2 of the question | 'o' | '# SG'",
    "me,S   X   G,Soo Xo  G,0": "character 5 of the question | 'X' | '# SG'",
    "me,S   #   G,Soo #o  x,0": "character 9 of the answer | 'x' | '# SGo'",
    "me,S  G#   G,SooG#o  G,0": "2 cells G",
    "me,S   #   G,So  oo  G,0": "the answer has 'o' in row 2, column 2 | the question has '#'",
    "me,S   #   G,Soo  o  G,0": "the answer has ' ' in row 2, column 2 | the question has '#'",
    "me,S   #   G,So  #o  G,0": "one line from S to G",
    "me,S   #   G,Sooo#oooG,0": "one line from S to G",
    "me,S ####  G,S ####  G,0": "no way from S to G",
    "me,S G #    ,S Go#oooo,0": "6 steps | 2 are enough"}
CSVS = {
    "good": [HEADER, GOOD], "empty": [HEADER], "void": [], "columns": ["source,question,rating", "me,1,2"],
    "maze": [HEADER, MAZE], "oblong": [HEADER, "me,S   #  G,So o#o G,0"], "nothing": [HEADER, "me,,,0"],
    **{f"puzzle{i}": [HEADER, GOOD, row] for i, row in enumerate(PUZZLES)},
    **{f"maze{i}": [HEADER, MAZE, row] for i, row in enumerate(MAZES)}}


def inherited():
    return {k: v for k, v in os.environ.items() if k not in ("PJRT_DEVICE", "RANK")}


def command(script, argv, folder, **env):
    """Runs a script as its users do: (exit code, stdout, stderr)."""
    done = subprocess.run([sys.executable, os.path.join(ROOT, script), *argv], cwd=folder, timeout=120,
                          capture_output=True, text=True, env=inherited() | env)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with a dataset, a run of two steps on it, and damaged, foreign and wrong files."""
    folder = tmp_path_factory.mktemp("world")
    (folder / "tiny.py").write_text(TINY)
    for name, lines in CSVS.items():
        (folder / f"{name}.csv").write_text("".join(line + "\n" for line in lines))
    (folder / "cut.csv.gz").write_bytes(gzip.compress(("\n".join([HEADER] + [GOOD] * 9)).encode())[:-12])
    (folder / "plain.csv.gz").write_text(GOOD)
    for name, seed in (("sudoku", 0), ("other", 1)):
        prepare_sudoku.main(configure(prepare_sudoku.__file__, [
            "--source=generate", "--size=4", "--num_train=16", "--num_test=4", "--num_aug=1",
            f"--seed={seed}", f"--output_dir={folder}/data/{name}"]))
    code, out, err = command("train.py", ["tiny.py", "--out_dir=out/run"], folder)
    assert (code, err) == (0, ""), err
    damage_datasets(folder / "data")
    damage_checkpoints(folder)
    (folder / "out/file").write_text("a file\n")
    os.makedirs(folder / "data/taken")
    return folder


def damage_datasets(folder):
    """Adds copies of sudoku, each damaged in its own way; the official layout has no manifest."""
    def damaged(name, manifest=True):
        path = shutil.copytree(folder / "sudoku", folder / name)
        if not manifest:
            os.remove(path / "manifest.json")
        return path

    def replace(path, old, new):
        path.write_text(path.read_text().replace(old, new))

    inputs = damaged("cut", manifest=False) / "train/all__inputs.npy"
    inputs.write_bytes(inputs.read_bytes()[:-40])
    labels = damaged("changed") / "test/all__labels.npy"
    labels.write_bytes(labels.read_bytes()[:-1] + b"\1")
    os.remove(damaged("lacks") / "test/all__group_indices.npy")
    (damaged("garbled") / "manifest.json").write_text('{"sha256": ')
    shutil.rmtree(damaged("half") / "test")
    replace(damaged("broken", manifest=False) / "train/dataset.json", "vocab_size", "size")
    test = damaged("mixed", manifest=False) / "test"
    replace(test / "dataset.json", '"seq_len": 16', '"seq_len": 9')
    for field in ("inputs", "labels"):
        np.save(test / f"all__{field}.npy", np.load(test / f"all__{field}.npy")[:, :9])


def damage_checkpoints(folder):
    """Adds damaged checkpoints, foreign .pt files and runs with damaged files to a world, from out/run."""
    newest = folder / "out/run/ckpt_00000002.pt"
    (folder / "cut.pt").write_bytes(newest.read_bytes()[:-1000])
    (folder / "text.pt").write_text("no checkpoint")
    (folder / "empty.pt").write_bytes(b"")
    weights = torch.load(newest, weights_only=True)["weights"]
    for name, state in {
            "weightless": {"step": 3, "note": "no weights"}, "list": [1, 2, 3],
            "listed": {"weights": [1, 2, 3]}, "numbered": {0: torch.zeros(2)},
            "partial": {k: v for k, v in weights.items() if "L_level" not in k},
            "extra": weights | {"extra.weight": torch.zeros(2)}}.items():
        torch.save(state, folder / f"{name}.pt")
    for name in ("damaged", "listed"):
        shutil.copytree(folder / "out/run", folder / "out" / name)
    for path in (folder / "out/damaged").glob("ckpt_*.pt"):  # neither of the two checkpoints is whole
        path.write_bytes(path.read_bytes()[:-1000])
    (folder / "out/damaged/ckpt_00000001.json").unlink()
    for path in (folder / "out/listed").glob("ckpt_*.json"):
        path.write_text("[]")


def snapshot(folder):
    """{path: what changes with the content} of everything under folder; locks may come and go in folders."""
    found = {}
    for path in folder.rglob("*"):
        stat = path.stat()
        stamps = stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
        found[str(path)] = stat.st_ino if path.is_dir() else stamps
    return found


def assert_refused(script, result, words, before, after):
    """One line with all the words in it, exit code 2, and no file changed."""
    code, out, err = result
    lines = err.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"{script}: ") and code == 2, (code, err[-1500:])
    missing = [word for word in words.split(" | ") if word not in lines[0]]
    assert not missing, f"{missing} not in: {lines[0]}"
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert not changed, f"changed on disk: {sorted(changed)}"


# Flags: words that the line must contain. train.py reads tiny.py first.
RESUME, BEGIN = "--init_from=resume --out_dir=out/run ", "--init_from=out/run/ckpt_00000002.pt "
TRAIN = {
    "--hiden_size=8": "unknown setting hiden_size | the closest is hidden_size",
    # values
    "--micro_batch_size=3": "global_batch_size 4 | micro_batch_size 3 | as 6",
    "--micro_batch_size=8": "global_batch_size 4 | micro_batch_size 8 | 8",
    **{f"--{name}=0": f"{name} must be above 0 | not 0" for name in (
        "global_batch_size", "halt_max_steps", "L_cycles", "H_cycles", "L_layers", "lr")},
    "--micro_batch_size=-1": "micro_batch_size must be 0 or more | not -1",
    "--lr=-1e-3": "lr must be above 0 | not -0.001",
    "--lr=nan": "lr must be above 0 | nan", "--lr=inf": "lr must be above 0 | inf",
    **{f"--{name}={n}": f"{name} must be from 0 to 1, not {n}" for name, n in (
        ("beta2", 1.1), ("ema_rate", 1.5), ("halt_exploration_prob", 1.5),
        ("halt_exploration_prob_end", -0.5), ("halt_exploration_prob_end", 2.0))},
    "--curriculum_epochs=-1": "curriculum_epochs must be 0 or more",
    **{f"--curriculum_epochs=5 --{name}_start={n}": f"{name}_start must be from 1 to {name} (1), not {n}"
       for name, n in (("L_cycles", 7), ("H_cycles", 0))},
    "--gcs_dir=bucket/run": "'bucket/run' | gs://bucket/folder",
    "--seed=-1": "seed must be 0 or more", f"--seed={2 ** 65}": "seed must be",
    "--max_steps=0 --epochs=0": "epochs and max_steps are both 0",
    "--max_steps=0 --epochs=1 --global_batch_size=32": "epochs=1 | 16 puzzles | global_batch_size=32",
    **{f"--{name}=x": f"{name} must be one of {choices} | 'x'" for name, choices in {
        "optimizer": "adam_atan2, adamw, lion, muon", "device": "auto, xla, cuda",
        "loss_type": "stablemax_cross_entropy, softmax", "pos_encodings": "none, rope, learned",
        "forward_dtype": "bfloat16, float32, float16", "wandb_mode": "online, offline, disabled"}.items()},
    "--eval_save_outputs=preds,logits": "eval_save_outputs | 'logits' | q_halt_logits",
    "--mlp_t=False --num_heads=3": "hidden_size 16 | num_heads 3",
    "--mlp_t=False --pos_encodings=rope --num_heads=16": "hidden_size 16 | even | num_heads 16",
    "--expansion=0.01": "expansion",
    "--puzzle_emb_ndim=33": "puzzle_emb_ndim 33 | puzzle_emb_len 2 | hidden_size 16",
    "--data_path=data/new --data_prepare='x": "data_prepare | quot",
    "--out_dir=": "out_dir", "--out_dir=out/file": "out/file", "--out_dir=out/file/deep": "out/file/deep",
    # the dataset
    "--data_path=": "data_path", "--data_path=good.csv": "good.csv | no such dataset",
    "--data_path=data/nowhere": "data/nowhere | no such dataset | prepare_sudoku.py",
    "--data_path=data/cut": "data/cut/train/all__inputs.npy | cannot be read | build",
    "--data_path=data/changed":
        "data/changed/test/all__labels.npy | does not match manifest.json | prepare_sudoku.py",
    "--data_path=data/lacks": "data/lacks/test/all__group_indices.npy is missing | prepare_sudoku.py",
    "--data_path=data/half": "data/half/test | no such dataset",
    "--data_path=data/garbled": "data/garbled/manifest.json | build the dataset again",
    "--data_path=data/broken": "data/broken/train/dataset.json | vocab_size | again",
    "--data_path=data/mixed": "data/mixed | seq_len",
    # checkpoints
    "--init_from=resume": "out/new | no complete checkpoint | --init_from=auto starts from scratch",
    "--init_from=resume --out_dir=out/damaged":
        "out/damaged | ckpt_00000001.pt | ckpt_00000002.pt | another out_dir or gcs_dir",
    "--init_from=resume --out_dir=out/listed":
        "out/listed | no complete checkpoint | ckpt_00000002 | another out_dir or gcs_dir",
    "--init_from=auto --out_dir=out/damaged": "out/damaged",
    "--init_from=nowhere.pt": "nowhere.pt | no such checkpoint",
    "--init_from=scrach": "scrach | scratch", "--init_from=": "init_from",
    "--init_from=out/run": "out/run | checkpoint",
    "--init_from=text.pt": "text.pt | cannot be read as a checkpoint",
    "--init_from=empty.pt": "empty.pt | cannot be read as a checkpoint",
    "--init_from=cut.pt": "cut.pt | cannot be read as a checkpoint | damaged",
    **{f"--init_from={name}.pt": f"{name}.pt | no weights"
       for name in ("weightless", "list", "listed", "numbered")},
    "--init_from=partial.pt": "partial.pt | lacks L_level",
    "--init_from=extra.pt": "extra.pt | also has extra.weight",
    BEGIN + "--hidden_size=32": "ckpt_00000002.pt | shape | settings",
    BEGIN + "--mlp_t=False": "ckpt_00000002.pt | mlp_t",
    RESUME + "--hidden_size=32 --max_steps=4": "out/run | shape | settings",
    RESUME + "--mlp_t=False --max_steps=4": "out/run | mlp_t",
    "--out_dir=out/run": "out/run | --init_from=auto | --out_dir",
    BEGIN + "--out_dir=out/run": "out/run | --init_from=auto",
    RESUME + "--data_path=data/other": "data/other | out/run | --out_dir",
    RESUME + "--max_steps=1": "out/run | step 2 | max_steps",
    "--eval_only": "eval_only | --init_from=resume | --init_from=FILE",
    "--eval_only --init_from=auto": "out/new | checkpoint",
    "--export=new.pt": "export | --init_from",
    "--export=new.pt --init_from=auto": "out/new | checkpoint",
    RESUME + "--export=extra.pt": "extra.pt | exists",
    RESUME + "--export=nowhere/new.pt": "nowhere",
    RESUME + "--export=data": "data"}
MAKE, CSV = "--source=generate --size=4 --num_aug=0 ", "--size=4 --num_aug=0 --output_dir=data/new "
SUDOKU = {
    "--num_agu=3": "unknown setting num_agu | the closest is num_aug",
    **{f"{CSV}--test_csv=good.csv --train_csv={name}": f"{name}{words}" for name, words in {
        "empty.csv": ":2 | no puzzle", "void.csv": ":2 | no puzzle",
        "columns.csv": ":2 | question, answer, rating",
        "good.csv": " | no puzzle is left | test set", "nowhere.csv": " | No such file",
        "data": " | Is a directory", "cut.csv.gz": " | cannot be read", "plain.csv.gz": " | cannot be read",
        **{f"puzzle{i}.csv": f":3 | {words}" for i, words in enumerate(PUZZLES.values())}}.items()},
    CSV + "--test_csv=good.csv": "--train_csv",
    MAKE + "--size=5": "size must be 4, 6 or 9 | not 5", "--size=6": "size must be 9 | not 6",
    "--source=web": "source must be hub, csv or generate | 'web'",
    MAKE + "--num_train=0": "num_train must be at least 1 | not 0",
    MAKE + "--num_aug=-1": "num_aug must be at least 0 | not -1",
    MAKE + "--output_dir=data/sudoku": "data/sudoku exists | --output_dir",
    MAKE + "--output_dir=data/taken": "data/taken exists | --output_dir",
    MAKE + "--num_train=8 --num_test=4 --output_dir=good.csv/new": "good.csv/new | cannot be written"}
MAZE_FLAGS = {
    "--augment": "--augment | unknown setting augment | the closest is aug",
    "--train_csv=maze.csv --test_csv=oblong.csv": "oblong.csv:2 | not a square",
    "--train_csv=maze.csv --test_csv=nothing.csv": "nothing.csv:2 | question has 0 characters",
    **{f"--test_csv=maze.csv --output_dir=data/new --train_csv={name}": f"{name}{words}"
       for name, words in {
        "good.csv": ":2 | 16 characters | not 9", "maze.csv": " | no maze is left | test set",
        **{f"maze{i}.csv": f":3 | {words}" for i, words in enumerate(MAZES.values())}}.items()},
    "--source=generate --size=65": "size must be at most 64 | not 65",
    "--source=generate --size=5": "5x5 | 111 steps | min_path",
    "--source=generate --min_path=0": "min_path must be at least 1 | not 0",
    "--test_csv=maze.csv": "--train_csv",
    "--source=generate --output_dir=data/sudoku": "data/sudoku exists | --output_dir"}
CASES = {(script, flags): words for script, table in ((T, TRAIN), (P, SUDOKU), (M, MAZE_FLAGS))
         for flags, words in table.items()}
XLA, TPU = importlib.util.find_spec("torch_xla"), glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*")
NO_TPU = "no TPU | PJRT_DEVICE=CPU" if XLA else "torch_xla is not installed | pip install"
NO_CUDA = {"CUDA_VISIBLE_DEVICES": ""}
# (script, flags): the words and environment variables to add, of cases that run as the real command
COMMANDS = {
    (T, "--device=cuda"): ("--device=cuda | no such GPU | --device=cpu", NO_CUDA),
    (T, "--device=xla"): (f"--device=xla | {NO_TPU}", {}),
    (T, "--device=xla --seed=1"): (f"--device=xla | {NO_TPU}", {"PJRT_DEVICE": "TPU"}),
    (T, "--device=tpu"): ("--device=tpu | requirements-torchtpu.txt", {}),
    (T, "--device=xla --seed=2"): ("PJRT_DEVICE | no TPU" if XLA else NO_TPU, {"PJRT_DEVICE": "TPUS"}),
    (T, "--device=auto --data_path=data/nowhere"): ("data/nowhere | no such dataset", NO_CUDA),
    (T, "--data_path=data/new --data_prepare=tiny.py"): ("data/new | data_prepare", {}),
    **{case: (CASES[case], {}) for case in (
        (T, "--hiden_size=8"), (T, "--out_dir=out/run"), (P, MAKE + "--output_dir=data/sudoku"))}}


def arguments(script, flags):
    return (["tiny.py"] if script == T else []) + flags.split()


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_wrong_input(case, world, monkeypatch, capfd, recwarn):
    script, flags = case
    monkeypatch.chdir(world)
    monkeypatch.setattr(sys, "argv", [script, *arguments(script, flags)])
    for variable in ("PJRT_DEVICE", "RANK"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its handlers
    before, module = snapshot(world), {T: train, P: prepare_sudoku, M: prepare_maze}[script]
    with pytest.raises(SystemExit) as stop:
        configurator.start(module.main, module.__file__)
    assert not [w.message for w in recwarn
                if issubclass(w.category, (UserWarning, RuntimeWarning, FutureWarning))]
    assert_refused(script, (stop.value.code, *capfd.readouterr()), CASES[case], before, snapshot(world))


@pytest.mark.parametrize("case", COMMANDS, ids=" ".join)
def test_wrong_input_of_the_command(case, world):
    script, flags = case
    words, env = COMMANDS[case]
    if TPU and (words.endswith(NO_TPU) or "auto" in flags):
        pytest.skip("a TPU is here")
    before = snapshot(world)
    if case in CASES or "data_prepare" in flags:
        result = command(script, arguments(script, flags), world, **env)
    else:
        process = ForkedTrain(arguments(script, flags), world, inherited() | env)
        *out, error = process.communicate()[0].splitlines()
        assert [line.partition(":")[0] for line in out] == ["device cpu"] * ("auto" in flags)
        result = process.returncode, out, error
    assert_refused(script, result, words, before, snapshot(world))


def test_data_prepare_that_fails(world):
    """The prepare script says what is wrong; train.py says which command failed."""
    before = snapshot(world)
    prepare = f"{os.path.join(ROOT, P)} --source=generate --size=5"
    code, out, err = command(T, ["tiny.py", "--data_path=data/new", f"--data_prepare={prepare}"], world)
    first, last = err.splitlines()
    assert first == "prepare_sudoku.py: size must be 4, 6 or 9, not 5"
    assert_refused(T, (code, out, last), f"data_prepare | {prepare}", before, snapshot(world))
