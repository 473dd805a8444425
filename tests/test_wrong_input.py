"""Wrong input: exit code 2, one line that says what is wrong, where, and how to fix it; no file changes.

Most cases call a script's start() in this process. Those in COMMANDS run the real command, two at a time.
"""
import glob
import gzip
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import configurator
import numpy as np
import pytest
import torch
from configurator import configure

import prepare_maze
import prepare_sudoku
import train

ROOT = os.path.dirname(os.path.abspath(configurator.__file__))
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
CONFIGS = {
    "tiny": TINY,
    "typo": 'run("tiny.py")\nhiden_size = 8\n', "words": 'run("tiny.py")\nlr = "1e-3"\n',
    "flag": 'run("tiny.py")\nema = 1\n',
    "fraction": 'run("tiny.py")\nmax_steps = 2.0\n', "cut": 'run("tiny.py")\nlr = (1e-3\n',
    "raises": 'run("tiny.py")\n\nlr = 1 / 0\n',
    "lines": 'raise ValueError("one\\ntwo")\n', "leaf": 'run("nowhere.py")\n', "loop": 'run("loop.py")\n',
    "array": 'import numpy\nrun("tiny.py")\nlr = numpy.ones((3, 3))\n',
    "list": 'run("tiny.py")\nhidden_size = [8, 16]\n',
    "nan": 'run("tiny.py")\nlr = float("nan")\n'}
# 4x4 puzzles: one with a single solution, and everything that can be wrong in a CSV file
GOOD = "me,1..3.42...1.2...,1243342143122134,0"
HEADER = "source,question,answer,rating"
CSVS = {
    "good": [HEADER, GOOD], "empty": [HEADER], "void": [], "columns": ["source,question,rating", "me,1,2"],
    "short": [HEADER, GOOD, "me,1..3,1243342143122134,0"], "fields": [HEADER, GOOD, "me,1..3.42...1.2..."],
    "digit": [HEADER, GOOD, GOOD.replace("1..3", "1..5")], "rating": [HEADER, GOOD[:-1] + "hard"],
    "foreign": [HEADER, GOOD.replace("1..3", "é..3")],
    "blank": [HEADER, GOOD, GOOD.replace("1243", "124.")],
    "twice": [HEADER, GOOD, GOOD.replace("1243", "1143")],
    "contradicts": [HEADER, GOOD, "me,1...............,2134431212433421,0"],
    "ambiguous": [HEADER, GOOD, "me,1...............,1243342143122134,0"],
    "unsolvable": [HEADER, GOOD, "me,12....3....4....,1243342143122134,0"]}
# 3x3 mazes
MAZE = "me,S   #   G,Soo #o  G,0"
CSVS |= {
    "maze": [HEADER, MAZE], "maze_short": [HEADER, MAZE, "me,S   #  G,Soo #o G,0"],
    "maze_oblong": [HEADER, "me,S   #  G,So o#o G,0"],
    "maze_foreign": [HEADER, MAZE, MAZE.replace("#", "X")],
    "maze_goals": [HEADER, MAZE, "me,S  G#   G,SooG#o  G,0"],
    "maze_wall": [HEADER, MAZE, "me,S   #   G,So  oo  G,0"],
    "maze_gap": [HEADER, MAZE, "me,S   #   G,So  #o  G,0"],
    "maze_closed": [HEADER, MAZE, "me,S ####  G,S ####  G,0"],
    "maze_detour": [HEADER, MAZE, "me,S G #    ,S Go#oooo,0"]}


def command(script, argv, folder, **env):
    """Runs a script as its users do: (exit code, stdout, stderr)."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("PJRT_DEVICE", "RANK")}
    env = inherited | dict(env, OMP_NUM_THREADS="1")
    try:
        done = subprocess.run([sys.executable, os.path.join(ROOT, script), *argv], cwd=folder,
                              capture_output=True, text=True, env=env, timeout=60)
    except subprocess.TimeoutExpired:
        return None, "", "hangs"
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with a data set, a run of two steps on it, and damaged, foreign and wrong files."""
    folder = tmp_path_factory.mktemp("world")
    os.makedirs(folder / "config")
    for name, text in CONFIGS.items():
        (folder / f"config/{name}.py").write_text(text)
    for name, lines in CSVS.items():
        (folder / f"{name}.csv").write_text("".join(line + "\n" for line in lines))
    (folder / "cut.csv.gz").write_bytes(gzip.compress(("\n".join([HEADER] + [GOOD] * 9)).encode())[:-12])
    (folder / "plain.csv.gz").write_text(GOOD)
    for name, seed in (("sudoku", 0), ("other", 1)):
        prepare_sudoku.main(configure(prepare_sudoku.__file__, [
            "--source=generate", "--size=4", "--num_train=16", "--num_test=4", "--num_aug=1",
            f"--seed={seed}", f"--output_dir={folder}/data/{name}"]))
    code, out, err = command("train.py", ["config/tiny.py", "--out_dir=out/run"], folder)
    assert (code, err) == (0, ""), err

    damage_data_sets(folder)
    damage_checkpoints(folder)
    (folder / "out/file").write_text("a file\n")
    os.makedirs(folder / "data/taken")
    return folder


def damage_data_sets(folder):
    """Adds copies of data/sudoku to a world, each damaged in its own way."""
    def damaged(name):
        return shutil.copytree(folder / "data/sudoku", folder / "data" / name)

    inputs = damaged("cut") / "train/all__inputs.npy"
    inputs.write_bytes(inputs.read_bytes()[:-40])
    inputs = damaged("cut_official") / "train/all__inputs.npy"  # the official layout has no manifest
    inputs.write_bytes(inputs.read_bytes()[:-40])
    os.remove(folder / "data/cut_official/manifest.json")
    labels = damaged("changed") / "test/all__labels.npy"
    labels.write_bytes(labels.read_bytes()[:-1] + b"\1")
    os.remove(damaged("lacks") / "test/all__group_indices.npy")
    (damaged("garbled") / "manifest.json").write_text('{"sha256": ')
    shutil.rmtree(damaged("half") / "test")
    broken = damaged("broken")
    os.remove(broken / "manifest.json")
    metadata = json.loads((broken / "train/dataset.json").read_text())
    del metadata["vocab_size"]
    (broken / "train/dataset.json").write_text(json.dumps(metadata))
    tokens = damaged("tokens")
    os.remove(tokens / "manifest.json")
    np.save(tokens / "train/all__inputs.npy", np.load(tokens / "train/all__inputs.npy") + 9)
    mixed = damaged("mixed")
    os.remove(mixed / "manifest.json")
    for field in ("inputs", "labels"):
        np.save(mixed / f"test/all__{field}.npy", np.load(mixed / f"test/all__{field}.npy")[:, :9])
    metadata = json.loads((mixed / "test/dataset.json").read_text())
    (mixed / "test/dataset.json").write_text(json.dumps(metadata | {"seq_len": 9}))


def damage_checkpoints(folder):
    """Adds damaged checkpoints, foreign .pt files and runs with damaged files to a world, from out/run."""
    newest = folder / "out/run/ckpt_00000002.pt"
    (folder / "cut.pt").write_bytes(newest.read_bytes()[:-1000])
    (folder / "text.pt").write_text("no checkpoint")
    (folder / "empty.pt").write_bytes(b"")
    torch.save({"step": 3, "note": "no weights"}, folder / "weightless.pt")
    torch.save([1, 2, 3], folder / "list.pt")
    torch.save({"weights": [1, 2, 3]}, folder / "listed.pt")
    torch.save({0: torch.zeros(2)}, folder / "numbered.pt")
    state = torch.load(newest, weights_only=True)
    torch.save({k: v for k, v in state["weights"].items() if "L_level" not in k}, folder / "partial.pt")
    torch.save({**state["weights"], "extra.weight": torch.zeros(2)}, folder / "extra.pt")
    for name in ("damaged", "listed", "best"):
        shutil.copytree(folder / "out/run", folder / "out" / name)
    for path in (folder / "out/damaged").glob("ckpt_*.pt"):  # neither of the two checkpoints is whole
        path.write_bytes(path.read_bytes()[:-1000])
    (folder / "out/damaged/ckpt_00000001.json").unlink()
    for path in (folder / "out/listed").glob("ckpt_*.json"):
        path.write_text("[]")


def snapshot(folder):
    """{relative path: (inode, size, mtime, ctime)} of everything under folder."""
    found = {}
    for parent, folders, files in os.walk(folder):
        for name in folders + files:
            path = os.path.join(parent, name)
            stat = os.stat(path)
            stamps = stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
            if name in folders:  # a lock may come and go in it
                stamps = stat.st_ino
            found[os.path.relpath(path, folder)] = stamps
    return found


@pytest.fixture(scope="module")
def spare():
    return []


@pytest.fixture
def folder(world, spare, tmp_path_factory):
    """A copy of the world, copied again after a case that changed it."""
    if not spare:
        copy = shutil.copytree(world, tmp_path_factory.mktemp("copy") / "world")
        spare.append((copy, snapshot(copy)))
    yield spare[0][0]
    if snapshot(spare[0][0]) != spare[0][1]:
        spare.clear()


def assert_refused(script, result, words, before, after):
    """One line with all the words in it, exit code 2, and no file changed."""
    code, out, err = result
    lines = err.splitlines()
    assert "Traceback" not in err, err[-1500:]
    assert len(lines) == 1, err[-1500:]
    assert lines[0].startswith(f"{script}: "), lines[0]
    assert code == 2, lines[0]
    missing = [word for word in words if word not in lines[0]]
    assert not missing, f"{missing} not in: {lines[0]}"
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert not changed, f"changed on disk: {sorted(changed)}"



T, P, M = "train.py", "prepare_sudoku.py", "prepare_maze.py"
CSV = ["--size=4", "--num_aug=0", "--output_dir=data/new"]


def of_csv(name):
    return [f"--train_csv={name}", "--test_csv=good.csv", *CSV]


def of_mazes(name):
    return [f"--train_csv={name}", "--test_csv=maze.csv", "--output_dir=data/new"]


# what is wrong: (script, arguments, words that the line must contain); train.py reads config/tiny.py first
CASES = {
    # flags and files
    "unknown flag": (T, ["--warmup=3"], ["--warmup=3", "unknown setting warmup", "lr_warmup_steps"]),
    "near miss": (T, ["--hiden_size=8"], ["unknown setting hiden_size", "the closest is hidden_size"]),
    "far miss": (T, ["--zzz=8"], ["unknown setting zzz", "--help"]),
    "unknown key in a file": (T, ["config/typo.py"],
                              ["typo.py", "unknown setting hiden_size", "the closest is hidden_size"]),
    "text for a float": (T, ["--lr=fast"], ["--lr=fast", "lr must be float", "'fast'"]),
    "fraction for an int": (T, ["--max_steps=2.5"], ["--max_steps=2.5", "max_steps must be int"]),
    "text for a float in a file": (T, ["config/words.py"], ["words.py", "lr must be float", "'1e-3'"]),
    "float for an int in a file": (T, ["config/fraction.py"],
                                   ["fraction.py", "max_steps must be int", "2.0"]),
    "number for a bool": (T, ["--ema=1"], ["--ema=1", "ema must be bool", "True"]),
    "number for a bool in a file": (T, ["config/flag.py"], ["flag.py", "ema must be bool", "True"]),
    "list for an int in a file": (T, ["config/list.py"], ["list.py", "hidden_size must be int", "[8, 16]"]),
    "array for a float in a file": (T, ["config/array.py"], ["array.py", "lr must be float"]),
    "no value": (T, ["--lr"], ["--lr needs a value", "--lr=0.0001"]),
    "value after a space": (T, ["--lr", "1e-3"], ["--lr needs a value", "--lr=0.0001"]),
    "bool after a space": (T, ["--ema", "False"], ["False: cannot read this config file", "--key=value"]),
    "empty value": (T, ["--lr="], ["--lr=", "lr must be float"]),
    "no dashes": (T, ["lr=1e-3"], ["lr=1e-3: cannot read this config file", "--key=value"]),
    "no such file": (T, ["config/nowhere.py"], ["config/nowhere.py", "No such file"]),
    "a folder for a file": (T, ["data"], ["data", "Is a directory"]),
    "no such file in a file": (T, ["config/leaf.py"], ["nowhere.py", "No such file"]),
    "syntax error": (T, ["config/cut.py"], ["cut.py", "line 2", "SyntaxError", "'(' was never closed"]),
    "file raises": (T, ["config/raises.py"], ["raises.py:3", "ZeroDivisionError", "division by zero"]),
    "file raises two lines": (T, ["config/lines.py"], ["lines.py:1", "ValueError", "one two"]),
    "file runs itself": (T, ["config/loop.py"], ["loop.py:1", "RecursionError"]),
    "checkpoint for a file": (T, ["out/run/ckpt_00000002.pt"], ["out/run/ckpt_00000002.pt", "SyntaxError"]),
    "unknown flag of the other script": (P, ["--num_agu=3"],
                                         ["unknown setting num_agu", "the closest is num_aug"]),
    # values
    "micro-batch that does not divide": (T, ["--micro_batch_size=3"],
                                         ["global_batch_size 4", "micro_batch_size 3", "as 3 or 6"]),
    "micro-batch over the batch": (T, ["--micro_batch_size=8"],
                                   ["global_batch_size 4", "micro_batch_size 8", "8"]),
    "no batch": (T, ["--global_batch_size=0"], ["global_batch_size must be above 0", "not 0"]),
    "negative micro-batch": (T, ["--micro_batch_size=-1"], ["micro_batch_size must be 0 or more", "not -1"]),
    "no halting steps": (T, ["--halt_max_steps=0"], ["halt_max_steps must be above 0"]),
    "no L_cycles": (T, ["--L_cycles=0"], ["L_cycles must be above 0"]),
    "no H_cycles": (T, ["--H_cycles=0"], ["H_cycles must be above 0"]),
    "no layers": (T, ["--L_layers=0"], ["L_layers must be above 0"]),
    "negative lr": (T, ["--lr=-1e-3"], ["lr must be above 0", "not -0.001"]),
    "nan lr": (T, ["--lr=nan"], ["lr must be above 0", "nan"]),
    "nan lr in a file": (T, ["config/nan.py"], ["lr must be above 0", "nan"]),
    "infinite lr": (T, ["--lr=inf"], ["lr must be above 0", "inf"]),
    "beta2 of 1": (T, ["--beta2=1.0"], ["beta2 must be from 0 to below 1", "not 1.0"]),
    "ema_rate over 1": (T, ["--ema_rate=1.5"], ["ema_rate must be from 0 to below 1"]),
    "exploration over 1": (T, ["--halt_exploration_prob=1.5"], ["halt_exploration_prob must be from 0 to 1"]),
    "bucket without gs://": (T, ["--gcs_dir=bucket/run"], ["'bucket/run'", "gs://bucket/folder"]),
    "unknown wandb_mode": (T, ["--wandb_mode=sometimes"],
                           ["wandb_mode", "online, offline, disabled", "sometimes"]),
    "negative seed": (T, ["--seed=-1"], ["seed must be 0 or more"]),
    "seed beyond 64 bits": (T, [f"--seed={2 ** 65}"], ["seed must be"]),
    "no end": (T, ["--max_steps=0", "--epochs=0"], ["epochs and max_steps are both 0"]),
    "epochs under a batch": (T, ["--max_steps=0", "--epochs=1", "--global_batch_size=32"],
                             ["epochs=1", "16 puzzles", "global_batch_size=32"]),
    "unknown optimizer": (T, ["--optimizer=adam"],
                          ["optimizer must be one of adam_atan2, adamw, lion, muon", "'adam'"]),
    "unknown device": (T, ["--device=gpu"], ["device must be one of auto, xla, cuda", "'gpu'"]),
    "unknown loss": (T, ["--loss_type=mse"], ["loss_type must be one of", "softmax_cross_entropy", "'mse'"]),
    "unknown positions": (T, ["--pos_encodings=rotary"],
                          ["pos_encodings must be one of none, rope, learned", "'rotary'"]),
    "unknown dtype": (T, ["--forward_dtype=fp16"],
                      ["forward_dtype must be one of bfloat16, float32, float16", "'fp16'"]),
    "unknown outputs": (T, ["--eval_save_outputs=preds,logits"],
                        ["eval_save_outputs", "'logits'", "q_halt_logits"]),
    "heads that do not divide": (T, ["--mlp_t=False", "--num_heads=3"], ["hidden_size 16", "num_heads 3"]),
    "odd head size under rope": (T, ["--mlp_t=False", "--pos_encodings=rope", "--num_heads=16"],
                                 ["rope", "even", "num_heads"]),
    "no room in the SwiGLU": (T, ["--expansion=0.01"], ["expansion"]),
    "puzzle embedding too wide": (T, ["--puzzle_emb_ndim=33"],
                                  ["puzzle_emb_ndim 33", "puzzle_emb_len 2", "hidden_size 16"]),
    "data_prepare with an open quote": (T, ["--data_path=data/new", "--data_prepare=prepare_sudoku.py 'x"],
                                        ["data_prepare", "quot"]),
    "no out_dir": (T, ["--out_dir="], ["out_dir"]),
    "out_dir is a file": (T, ["--out_dir=out/file"], ["out/file"]),
    "out_dir under a file": (T, ["--out_dir=out/file/deep"], ["out/file/deep"]),
    # the data set
    "no data set": (T, ["--data_path=data/nowhere"],
                    ["data/nowhere", "no such dataset", "prepare_sudoku.py"]),
    "no data_path": (T, ["--data_path="], ["data_path"]),
    "data_path is a file": (T, ["--data_path=good.csv"], ["good.csv", "no such dataset"]),
    "truncated .npy": (T, ["--data_path=data/cut"],
                       ["data/cut/train/all__inputs.npy", "does not match manifest.json",
                        "prepare_sudoku.py"]),
    "truncated .npy without a manifest": (T, ["--data_path=data/cut_official"],
                                          ["data/cut_official/train/all__inputs.npy", "cannot be read",
                                           "build"]),
    "changed file": (T, ["--data_path=data/changed"],
                     ["data/changed/test/all__labels.npy", "does not match manifest.json",
                      "prepare_sudoku.py"]),
    "missing file": (T, ["--data_path=data/lacks"],
                     ["data/lacks/test/all__group_indices.npy is missing", "prepare_sudoku.py"]),
    "missing split": (T, ["--data_path=data/half"], ["data/half/test", "no such dataset"]),
    "garbled manifest": (T, ["--data_path=data/garbled"],
                         ["data/garbled/manifest.json", "build the dataset again"]),
    "missing metadata": (T, ["--data_path=data/broken"],
                         ["data/broken/train/dataset.json", "vocab_size", "again"]),
    "tokens beyond the vocabulary": (T, ["--data_path=data/tokens"],
                                     ["data/tokens/train/all__inputs.npy", "dataset.json", "again"]),
    "test set of other sizes": (T, ["--data_path=data/mixed"], ["data/mixed", "seq_len"]),
    # checkpoints
    "nothing to resume": (T, ["--init_from=resume"],
                          ["out/new", "no complete checkpoint", "--init_from=auto starts from scratch"]),
    "only damaged ones to resume": (T, ["--init_from=resume", "--out_dir=out/damaged"], [
        "out/damaged", "ckpt_00000001.pt", "ckpt_00000002.pt", "another out_dir or gcs_dir"]),
    "checkpoints with a wrong .json": (T, ["--init_from=resume", "--out_dir=out/listed"], [
        "out/listed", "no complete checkpoint", "ckpt_00000002", "another out_dir or gcs_dir"]),
    "auto on damaged ones": (T, ["--init_from=auto", "--out_dir=out/damaged"], ["out/damaged"]),
    "no such checkpoint": (T, ["--init_from=nowhere.pt"], ["nowhere.pt", "no such checkpoint"]),
    "misspelt init_from": (T, ["--init_from=scrach"], ["scrach", "scratch"]),
    "no init_from": (T, ["--init_from="], ["init_from"]),
    "a folder for a checkpoint": (T, ["--init_from=out/run"], ["out/run", "checkpoint"]),
    "text for a checkpoint": (T, ["--init_from=text.pt"], ["text.pt", "cannot be read as a checkpoint"]),
    "empty checkpoint": (T, ["--init_from=empty.pt"], ["empty.pt", "cannot be read as a checkpoint"]),
    "truncated checkpoint": (T, ["--init_from=cut.pt"],
                             ["cut.pt", "cannot be read as a checkpoint", "damaged"]),
    "checkpoint without weights": (T, ["--init_from=weightless.pt"], ["weightless.pt", "no weights"]),
    "list for a checkpoint": (T, ["--init_from=list.pt"], ["list.pt", "no weights"]),
    "checkpoint with a list of weights": (T, ["--init_from=listed.pt"], ["listed.pt", "no weights"]),
    "checkpoint with numbers for names": (T, ["--init_from=numbered.pt"], ["numbered.pt", "no weights"]),
    "checkpoint of a part": (T, ["--init_from=partial.pt"], ["partial.pt", "lacks L_level"]),
    "checkpoint of more": (T, ["--init_from=extra.pt"], ["extra.pt", "also has extra.weight"]),
    "checkpoint of another width": (T, ["--init_from=out/run/ckpt_00000002.pt", "--hidden_size=32"],
                                    ["ckpt_00000002.pt", "shape", "settings"]),
    "checkpoint of another mixer": (T, ["--init_from=out/run/ckpt_00000002.pt", "--mlp_t=False"],
                                    ["ckpt_00000002.pt", "mlp_t"]),
    "resume at another width": (
        T, ["--init_from=resume", "--out_dir=out/run", "--hidden_size=32", "--max_steps=4"],
        ["out/run", "shape", "settings"]),
    "resume with another mixer": (
        T, ["--init_from=resume", "--out_dir=out/run", "--mlp_t=False", "--max_steps=4"],
        ["out/run", "mlp_t"]),
    "out_dir holds a run": (T, ["--out_dir=out/run"], ["out/run", "--init_from=auto", "--out_dir"]),
    "out_dir holds a run, from a file": (T, ["--out_dir=out/run", "--init_from=out/run/ckpt_00000001.pt"],
                                         ["out/run", "--init_from=auto"]),
    "resume on another data set": (T, ["--init_from=resume", "--out_dir=out/run", "--data_path=data/other"],
                                   ["data/other", "out/run", "--out_dir"]),
    "max_steps below the checkpoint's": (T, ["--init_from=resume", "--out_dir=out/run", "--max_steps=1"],
                                         ["out/run", "step 2", "max_steps"]),
    "eval_only from scratch": (T, ["--eval_only"], ["eval_only", "--init_from=resume", "--init_from=FILE"]),
    "eval_only, nothing to resume": (T, ["--eval_only", "--init_from=resume"],
                                     ["out/new", "no complete checkpoint"]),
    "eval_only on auto, nothing there": (T, ["--eval_only", "--init_from=auto"], ["out/new", "checkpoint"]),
    "export from scratch": (T, ["--export_official=new.pt"], ["export_official", "--init_from"]),
    "export on auto, nothing there": (T, ["--export_official=new.pt", "--init_from=auto"],
                                      ["out/new", "checkpoint"]),
    "export onto a file": (T, ["--export_official=extra.pt", "--init_from=resume", "--out_dir=out/run"],
                           ["extra.pt", "exists"]),
    "export into no folder": (
        T, ["--export_official=nowhere/new.pt", "--init_from=resume", "--out_dir=out/run"],
        ["nowhere"]),
    "export to a folder": (T, ["--export_official=data", "--init_from=resume", "--out_dir=out/run"],
                           ["data"]),
    # CSV files
    "short row": (P, of_csv("short.csv"), ["short.csv:3", "4 characters", "16"]),
    "row without an answer": (P, of_csv("fields.csv"), ["fields.csv:3", "2 columns", "4"]),
    "wrong digit": (P, of_csv("digit.csv"), ["digit.csv:3", "character 4", "'5'"]),
    "answer with a blank": (P, of_csv("blank.csv"), ["blank.csv:3", "character 4 of the answer", "'.'"]),
    "foreign character": (P, of_csv("foreign.csv"), ["foreign.csv:2", "character 1 of the question", "'é'"]),
    "wrong rating": (P, of_csv("rating.csv"), ["rating.csv:2", "rating 'hard' is not an integer"]),
    "answer contradicts question": (P, of_csv("contradicts.csv"),
                                    ["contradicts.csv:3", "1 in row 1, column 1", "2"]),
    "answer against the rules": (P, of_csv("twice.csv"), ["twice.csv:3", "digit 1 twice in row 1"]),
    "ambiguous puzzle": (P, of_csv("ambiguous.csv"), ["ambiguous.csv:3", "more than one solution"]),
    "unsolvable puzzle": (P, of_csv("unsolvable.csv"), ["unsolvable.csv:3", "no solution"]),
    "no puzzle": (P, of_csv("empty.csv"), ["empty.csv:2", "no puzzle"]),
    "no header": (P, of_csv("void.csv"), ["void.csv:1", "source,question,answer,rating"]),
    "missing column": (P, of_csv("columns.csv"),
                       ["columns.csv:1", "no column answer", "source,question,answer,rating"]),
    "puzzles all in the test set": (P, of_csv("good.csv"), ["good.csv", "no puzzle is left", "test set"]),
    "no such CSV": (P, of_csv("nowhere.csv"), ["nowhere.csv", "No such file"]),
    "a folder for a CSV": (P, of_csv("data"), ["data", "Is a directory"]),
    "truncated .gz": (P, of_csv("cut.csv.gz"), ["cut.csv.gz", "cannot be read"]),
    "a .gz that is none": (P, of_csv("plain.csv.gz"), ["plain.csv.gz", "cannot be read"]),
    "a test_csv alone": (P, ["--test_csv=good.csv", *CSV], ["--train_csv"]),
    # the other settings of prepare_sudoku.py
    "size 5": (P, ["--source=generate", *CSV, "--size=5"], ["size must be 4, 6 or 9", "not 5"]),
    "size 6 from the hub": (P, ["--size=6"], ["size must be 9", "not 6"]),
    "unknown source": (P, ["--source=web"], ["source must be hub, csv or generate", "'web'"]),
    "no puzzles": (P, ["--source=generate", *CSV, "--num_train=0"],
                   ["num_train must be at least 1", "not 0"]),
    "negative copies": (P, ["--source=generate", *CSV, "--num_aug=-1"],
                        ["num_aug must be at least 0", "not -1"]),
    "output_dir exists": (P, ["--source=generate", *CSV, "--output_dir=data/sudoku"],
                          ["data/sudoku exists", "--output_dir"]),
    "output_dir is an empty folder": (P, ["--source=generate", *CSV, "--output_dir=data/taken"],
                                      ["data/taken exists", "--output_dir"]),
    "output_dir under a file": (
        P, ["--source=generate", *CSV, "--num_train=8", "--num_test=4", "--output_dir=good.csv/new"],
        ["good.csv/new", "cannot be written"]),
}
CASES |= {
    # mazes
    "unknown flag of prepare_maze.py": (M, ["--augment"],
                                        ["--augment", "unknown setting augment", "the closest is aug"]),
    "short maze": (M, of_mazes("maze_short.csv"), ["maze_short.csv:3", "8 characters", "9"]),
    "maze that is no square": (M, of_mazes("good.csv"), ["good.csv:2", "16 characters", "not 9"]),
    "first maze that is no square": (M, ["--train_csv=maze.csv", "--test_csv=maze_oblong.csv"],
                                     ["maze_oblong.csv:2", "not a square"]),
    "foreign character in a maze": (M, of_mazes("maze_foreign.csv"),
                                    ["maze_foreign.csv:3", "character 5 of the question", "'X'", "'# SG'"]),
    "maze with two goals": (M, of_mazes("maze_goals.csv"), ["maze_goals.csv:3", "2 cells G"]),
    "path through a wall": (M, of_mazes("maze_wall.csv"),
                            ["maze_wall.csv:3", "'o' in row 2, column 2", "'#'"]),
    "path with a gap": (M, of_mazes("maze_gap.csv"), ["maze_gap.csv:3", "one line from S to G"]),
    "maze without a way": (M, of_mazes("maze_closed.csv"), ["maze_closed.csv:3", "no way from S to G"]),
    "path that is not shortest": (M, of_mazes("maze_detour.csv"),
                                  ["maze_detour.csv:3", "6 steps", "2 are enough"]),
    "mazes all in the test set": (M, of_mazes("maze.csv"), ["maze.csv", "no maze is left", "test set"]),
    "mazes too large": (M, ["--source=generate", "--size=65"], ["size must be at most 64", "not 65"]),
    "mazes too small for the path": (M, ["--source=generate", "--size=5"], ["5x5", "111 steps", "min_path"]),
    "no path": (M, ["--source=generate", "--min_path=0"], ["min_path must be at least 1", "not 0"]),
    "a test_csv of mazes alone": (M, ["--test_csv=maze.csv"], ["--train_csv"]),
    "output_dir of mazes exists": (M, ["--source=generate", "--output_dir=data/sudoku"],
                                   ["data/sudoku exists", "--output_dir"]),
}
XLA, TPU = importlib.util.find_spec("torch_xla"), glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*")
NO_TPU = ["no TPU", "PJRT_DEVICE=CPU"] if XLA else ["torch_xla is not installed", "pip install"]
# the cases that run as the real command, with environment variables to add
COMMANDS = {
    "no GPU": (T, ["--device=cuda"], ["--device=cuda", "no such GPU", "--device=cpu"],
               {"CUDA_VISIBLE_DEVICES": ""}),
    "no TPU": (T, ["--device=xla"], ["--device=xla", *NO_TPU], {}),
    "no TPU for PJRT_DEVICE": (T, ["--device=xla"], ["--device=xla", *NO_TPU], {"PJRT_DEVICE": "TPU"}),
    "no TorchTPU": (T, ["--device=tpu"], ["--device=tpu", "requirements-torchtpu.txt"], {}),
    "unknown PJRT_DEVICE": (T, ["--device=xla"], ["PJRT_DEVICE", "no TPU"] if XLA else NO_TPU,
                            {"PJRT_DEVICE": "TPUS"}),
    "batch for two replicas": (T, ["--device=xla", "--global_batch_size=3"],
                               ["global_batch_size 3", "multiple of 2", "as 2 or 4"],
                               {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}),
    "no data set on auto": (T, ["--device=auto", "--data_path=data/nowhere"],
                            ["data/nowhere", "no such dataset"], {"CUDA_VISIBLE_DEVICES": ""}),
    "data_prepare that makes nothing": (T, ["--data_path=data/new", "--data_prepare=-c pass"],
                                        ["data/new", "data_prepare"], {}),
    **{name: (*CASES[name], {}) for name in (
        "near miss", "file raises", "no data set", "nothing to resume", "truncated checkpoint",
        "out_dir holds a run",
        "unknown flag of the other script", "short row", "output_dir exists")},
}


def arguments(script, argv):
    return argv if script != T else ["config/tiny.py", *argv]


@pytest.mark.parametrize("name", CASES)
def test_wrong_input(name, folder, monkeypatch, capfd, recwarn):
    script, argv, words = CASES[name]
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [script, *arguments(script, argv)])
    for variable in ("PJRT_DEVICE", "RANK"):
        monkeypatch.delenv(variable, raising=False)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    before, module = snapshot(folder), {T: train, P: prepare_sudoku, M: prepare_maze}[script]
    try:
        with pytest.raises(SystemExit) as stop:
            configurator.start(module.main, module.__file__)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert not [w.message for w in recwarn
                if issubclass(w.category, (UserWarning, RuntimeWarning, FutureWarning))]
    assert_refused(script, (stop.value.code, *capfd.readouterr()), words, before, snapshot(folder))


@pytest.fixture(scope="module")
def refusals(world, tmp_path_factory):
    """Results of the commands in COMMANDS: {name: (result, files before, files after)}."""
    def run(name):
        script, argv, _, env = COMMANDS[name]
        folder = shutil.copytree(world, tmp_path_factory.mktemp("command") / "world")
        before = snapshot(folder)
        return command(script, arguments(script, argv), folder, **env), before, snapshot(folder)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(COMMANDS, pool.map(run, COMMANDS)))


@pytest.mark.parametrize("name", COMMANDS)
def test_wrong_input_of_the_command(name, refusals):
    if TPU and name in ("no TPU", "no TPU for PJRT_DEVICE", "no data set on auto"):
        pytest.skip("a TPU is here")
    if not XLA and name == "batch for two replicas":
        pytest.skip("torch_xla is not installed")
    script, _, words, _ = COMMANDS[name]
    assert_refused(script, refusals[name][0], words, *refusals[name][1:])
    if name == "no data set on auto":
        assert refusals[name][0][1].startswith("device cpu: ")


def test_data_prepare_that_fails(folder):
    """The prepare script says what is wrong; train.py says which command failed."""
    before = snapshot(folder)
    prepare = f"{os.path.join(ROOT, P)} --source=generate --size=5"
    code, out, err = command(T, ["config/tiny.py", "--data_path=data/new", f"--data_prepare={prepare}"],
                             folder)
    first, last = err.splitlines()
    assert first == "prepare_sudoku.py: size must be 4, 6 or 9, not 5"
    assert_refused(T, (code, out, last), ["data_prepare", prepare], before, snapshot(folder))


def test_a_garbled_line_of_metrics_does_not_stop_a_resume(world, tmp_path):
    """Garbage that a crash left in metrics.jsonl is cut off, like lines past the checkpoint's step."""
    folder = shutil.copytree(world, tmp_path / "world")
    with open(folder / "out/run/metrics.jsonl", "a") as f:
        f.write("\0\0\0\n")
    code, out, err = command(T, ["config/tiny.py", "--init_from=resume", "--out_dir=out/run",
                                 "--max_steps=3"], folder)
    assert (code, err) == (0, ""), err
    with open(folder / "out/run/metrics.jsonl") as f:
        assert [json.loads(line)["step"] for line in f][-1] == 3
