"""Wrong input: exit code 2, one line that says what is wrong, where, and how to fix it; no file changes.

Most cases call a script's start() in this process.
Wrong config files and flags of the wrong type are in test_configurator.py.
"""
import gzip
import os
import shutil
import signal
import sys

import pytest
import torch
from helpers import flip_a_bit, prepare, start_script

import configurator
import prepare_arc
import prepare_maze
import prepare_sudoku
import train

CONFIG = """
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
# a 4x4 Sudoku, and {wrong row: words of the error}
GOOD = "me,1..3.42...1.2...,1243342143122134,0"
PUZZLES = {
    "me,1..5.42...1.2...,1243342143122134,0": "the question has '5' in row 1, column 4",
    "me,1...............,2134431212433421,0": "row 1, column 1 of the answer breaks a rule",
    "me,12....3....4....,1243342143122134,0": "row 2, column 3 of the answer breaks a rule"}
# the same for a 3x3 maze
MAZE = "me,S   #   G,Soo #o  G,0"
MAZES = {
    "me,S   #  G,Soo #o G,0": "8 cells | not 3x3",
    "me,So  #   G,Soo #o  G,0": "the answer is not a shortest path",
    "me,S G #    ,S Go#oooo,0": "the answer is not a shortest path (read as a grid of 3x3)"}
CSVS = {
    "good": [HEADER, GOOD], "empty": [HEADER], "columns": ["source,question,rating", "me,1,2"],
    "maze": [HEADER, MAZE]}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A folder with a dataset, a run of two steps on it, and damaged, foreign and wrong files."""
    folder = tmp_path_factory.mktemp("workspace")
    (folder / "tiny.py").write_text(CONFIG)
    for name, lines in CSVS.items():
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    (folder / "cut.csv.gz").write_bytes(gzip.compress(("\n".join([HEADER] + [GOOD] * 9)).encode())[:-12])
    for name, seed in (("sudoku", 0), ("other", 1)):
        prepare(folder / "data" / name, source="generate", size=4, num_train=16, num_test=4, num_aug=1,
                seed=seed)
    start_script("train", ["tiny.py", "--out_dir=out/run"], cwd=folder).output()
    damage_datasets(folder / "data")
    damage_checkpoints(folder)
    (folder / "out/file").write_text("a file\n")
    return folder


def damage_datasets(folder):
    """Adds a dataset of the official layout that is cut off, and one with another byte."""
    shutil.copytree(folder / "sudoku", folder / "cut", ignore=shutil.ignore_patterns("manifest.json"))
    os.truncate(folder / "cut/train/all__inputs.npy", 200)
    shutil.copytree(folder / "sudoku", folder / "changed")
    flip_a_bit(folder / "changed/test/all__labels.npy")


def damage_checkpoints(folder):
    """Adds damaged checkpoints and foreign .pt files, made from out/run."""
    path = folder / "out/run/ckpt_00000002.pt"
    for name in "cut.pt", "flipped.pt":
        shutil.copy(path, folder / name)
    os.truncate(folder / "cut.pt", 1000)
    flip_a_bit(folder / "flipped.pt")
    (folder / "page.pt").write_text("<!DOCTYPE html>\n<html></html>\n")
    (folder / "pointer.pt").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    state = torch.load(path)
    torch.save({"lm_head.weight": state["weights"]["lm_head.weight"]}, folder / "partial.pt")
    state["task"]["symbols"] = "_.4321"
    torch.save(state, folder / "renamed.pt")


def snapshot(folder):
    """Returns {path: content} of everything under folder but the files of locks."""
    paths = [path for path in folder.rglob("*") if path.suffix != ".lock"]
    return {str(path): path.is_file() and path.read_bytes() for path in paths}


def assert_refused(script, code, error, words, before, after):
    """Checks that a command wrote one line with all the words, ended with 2, and changed no file."""
    assert code == 2 and error.startswith(f"{script}: ") and error.count("\n") == 1, error
    for word in words.split(" | "):
        assert word in error
    assert before == after, "files changed"


# Flags: words that the line must contain. train.py reads tiny.py first.
RESUME = "--init_from=resume --out_dir=out/run "
BEGIN = "--init_from=out/run/ckpt_00000002.pt "
TRAIN = {
    # values
    "--micro_batch_size=3": "micro_batch_size 3 must divide the 4 sequences of a replica",
    "--lr=nan": "lr must be above 0 | not nan",
    "--help --lrr=1": "unknown setting lrr",
    "--beta1=1": "beta1 must be from 0 to below 1 | not 1.0",
    "--hidden_size=1000000": "memory",
    "--gcs_dir=bucket/run": "'bucket/run' | gs://bucket/folder",
    "--max_steps=0 --epochs=1 --global_batch_size=32": "epochs=1 | 16 puzzles | global_batch_size=32",
    "--optimizer=x": "optimizer must be one of adam_atan2, adamw, lion | 'x'",
    "--eval_save_outputs=preds,logits": "eval_save_outputs | 'preds,logits' | q_halt_logits",
    "--pos_encodings=rope": "pos_encodings=rope | --mlp_t=False",
    "--mlp_t=False --num_heads=3": "hidden_size 16 | num_heads 3",
    "--freeze_weights --puzzle_emb_ndim=0": "freeze_weights | puzzle_emb_ndim is 0",
    "--puzzle_emb_ndim=33": "puzzle_emb_ndim 33 | puzzle_emb_len 2 | hidden_size 16",
    "--data_path=data/new --data_prepare='x": "data_prepare | quot",
    "--data_path=data/new --data_prepare=tiny.py": "data/new | data_prepare",
    "--out_dir=out/file": "out/file",
    "--out_dir=gs://bucket/run": "gs://bucket/run | --gcs_dir",
    # the dataset
    "--data_path=": "data_path",
    "--data_path=data/nowhere": "data/nowhere | no such dataset | prepare_sudoku.py",
    "--data_path=data/cut": "data/cut/train/all__inputs.npy | cannot be read | build",
    "--data_path=data/changed":
        "data/changed/test/all__labels.npy | does not match manifest.json | build it again",
    # checkpoints
    "--init_from=resume": "out/new | no complete checkpoint | --init_from=auto starts from scratch",
    "--init_from=nowhere.pt": "nowhere.pt | no such file",
    "--init_from=scrach": "scrach | scratch",
    "--init_from=out/run": "out/run | checkpoint",
    "--init_from=cut.pt": "cut.pt | cannot be read as a checkpoint | damaged",
    "--init_from=page.pt": "page.pt | a web page",
    "--init_from=pointer.pt": "pointer.pt | Git LFS pointer",
    "--init_from=flipped.pt": "flipped.pt | cannot be read as a checkpoint | damaged",
    "--init_from=partial.pt": "partial.pt | Missing key(s) in state_dict: \"H_init\" | settings",
    "--init_from=renamed.pt": "renamed.pt | symbols '_.4321' | data/sudoku has ' .1234'",
    BEGIN + "--hidden_size=32": "ckpt_00000002.pt | shape | settings",
    "--out_dir=out/run": "out/run | --init_from=auto | --out_dir",
    RESUME + "--data_path=data/other": "data/other | out/run | --out_dir",
    RESUME + "--max_steps=1": "out/run/ckpt_00000002.pt | max_steps",
    "--eval_only": "eval_only | --init_from=resume | --init_from=FILE"}
# flags of prepare_sudoku.py
MAKE = "--source=generate --size=4 --num_aug=0 "
CSV = "--size=4 --num_aug=0 --output_dir=data/new --test_csv=good.csv "
SUDOKU = {
    CSV: "--train_csv",
    "--size=6": "size must be one of [9] | not 6",
    CSV + "--train_csv=good.csv --num_hard=9": "num_hard does nothing with --source=csv",
    MAKE + "--output_dir=data/sudoku": "data/sudoku exists | --output_dir",
    MAKE + "--output_dir=~/d": "--output_dir=~/d | write the folder of ~ out",
    MAKE + "--num_train=8 --num_test=4 --output_dir=good.csv/new": "good.csv/new | cannot be written",
    # training files beside a good test file
    CSV + "--train_csv=empty.csv": "empty.csv:2 | no puzzle",
    CSV + "--train_csv=columns.csv":
        "columns.csv:1 | question, answer once each: it has source, question, rating",
    CSV + "--train_csv=good.csv": "good.csv | no puzzle is left | test set",
    CSV + "--train_csv=nowhere.csv": "nowhere.csv | No such file",
    CSV + "--train_csv=cut.csv.gz": "cut.csv.gz | cannot be read"}
MAZE_CSV = "--test_csv=maze.csv --output_dir=data/new "
MAZE_FLAGS = {
    "--source=generate --size=5": "5x5 | 111 steps | min_path",
    "--size=10": "size does nothing with --source=hub",
    "--source=generate --subsample_size=9": "subsample_size does nothing with --source=generate"}
ARC = {
    "--size=5": "size does nothing with --source=arc1",
    "--source=generate --max_side=5": "max_side does nothing with --source=generate",
    "--source=generate --num_pairs=1": "num_pairs must be 2 or more, not 1",
    "--source=nowhere": "nowhere has no tasks for evaluation | source must be arc1, arc2, generate",
    "--source=generate --num_train=4 --num_test=4 --test_subset=tests":
        "test_subset=tests: it must be one of subsets=training,"}
# (script, flags, words)
CASES = [(train, *case) for case in TRAIN.items()]
CASES += [(prepare_sudoku, *case) for case in SUDOKU.items()]
CASES += [(prepare_maze, *case) for case in MAZE_FLAGS.items()]
CASES += [(prepare_arc, *case) for case in ARC.items()]

# (script, flags, a good row, the wrong row below it, words)
ROWS = [(prepare_sudoku, CSV, GOOD, *case) for case in PUZZLES.items()]
ROWS += [(prepare_sudoku, f"{CSV} --min_difficulty=-1", GOOD, f"{GOOD}x", "rating '0x' is not a number")]
ROWS += [(prepare_maze, MAZE_CSV, MAZE, *case) for case in MAZES.items()]


@pytest.fixture
def refuse(workspace, monkeypatch, capfd):
    """A function that runs a script in the workspace, and checks that it refuses its flags in these words."""
    def refuse(script, flags, words):
        name = f"{script.__name__}.py"
        files = ["tiny.py"] if script is train else []
        monkeypatch.setattr(sys, "argv", [name, *files, *flags.split()])
        before = snapshot(workspace)
        with pytest.raises(SystemExit) as stop:
            configurator.start(script.main, script.Settings)
        assert_refused(name, stop.value.code, capfd.readouterr().err, words, before, snapshot(workspace))

    monkeypatch.chdir(workspace)
    for variable in ("PJRT_DEVICE", "RANK"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its handlers
    return refuse


@pytest.mark.parametrize("script, flags, words", CASES)
def test_wrong_input_is_refused_in_one_line_and_changes_no_file(script, flags, words, refuse):
    refuse(script, flags, words)


@pytest.mark.parametrize("script, flags, good, wrong, words", ROWS)
def test_a_wrong_row_of_a_file_is_named_with_its_number(script, flags, good, wrong, words, refuse, workspace):
    (workspace / "row.csv").write_text("\n".join([HEADER, good, wrong]))
    refuse(script, f"{flags} --train_csv=row.csv", f"row.csv:3 | {words}")


@pytest.mark.parametrize("flag, variables, words", [
    ("--device=cuda", dict(CUDA_VISIBLE_DEVICES=""), "--device=cuda needs a GPU | --device=cpu"),
    ("--device=xla", dict(PJRT_DEVICE="TPU"), "--device=xla needs torch_xla | PJRT_DEVICE=CPU"),
    ("--device=tpu", {}, "--device=tpu needs TorchTPU | requirements-torchtpu.txt"),
])
def test_a_device_that_is_missing_is_wrong_input(flag, variables, words, workspace):
    before = snapshot(workspace)
    text = start_script("train", ["tiny.py", flag], cwd=workspace, **variables).output(2)
    assert_refused("train.py", 2, text.splitlines(keepends=True)[-1], words, before, snapshot(workspace))
