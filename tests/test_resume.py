"""A resume trains on with the settings that the run began with: the command line, as users start it."""
import glob
import os
import re
import shutil
from pathlib import Path

import pytest
from helpers import (
    DATA,
    ROOT,
    hosts,
    in_new_process,
    last_weights,
    newest,
    run,
    same,
    start_script,
    start_train,
)

import configurator
import train
from configurator import configure
from runtime.device import Device
from runtime.errors import UserError
from runtime.files import checkpoint_paths

MINI = f"{ROOT}/config/mini.py"
# each line reads what another file, a flag or the defaults say
RELATIVE = """
lr *= 0.5
global_batch_size //= 2
checkpoint_interval = max_steps // 2
if beta1 > 1:
    beta1 = 0.5
"""


@pytest.fixture(autouse=True)
def relative():
    """Each test has relative.py, a config file that changes settings by what they were."""
    Path("relative.py").write_text(RELATIVE)


def saved(out="run"):
    """Returns the recipe in the newest checkpoint."""
    return train.recipe(newest(out)["settings"])



def test_a_relative_config_file_on_two_hosts_that_share_no_folder(data):
    """Only the host of rank 0 has checkpoints."""
    def train_on_both(*flags):
        ranks = [start_train(data, str(rank), "relative.py", *flags, **environment)
                 for rank, environment in enumerate(hosts(2))]
        return [rank.output() for rank in ranks][0]

    train_on_both("--max_steps=2", "--beta2=0.9", "--seed=3")
    first = saved("0")
    assert (first["lr"], first["global_batch_size"], first["beta2"], first["seed"]) == (1e-3, 8, 0.9, 3)

    # without the flags that were given at first
    text = train_on_both("--max_steps=4", "--init_from=auto")
    assert "training from step 2 to 4" in text
    assert "max_steps is 4; the checkpoint had 2" in text and "lr is" not in text, text
    assert saved("0") == first | dict(max_steps=4)
    assert not checkpoint_paths("1")


def test_what_a_flag_or_a_file_says_wins_and_is_logged(data):
    """num_heads may change, since this model has no attention."""
    run(data, "run", "--max_steps=2", "--weight_decay=0.5")
    Path("again.py").write_text("lr = 3e-4\nema_rate = 0.999")
    again = ["--out_dir=run", "--device=cpu", "--init_from=resume", "again.py", "--beta1=0.8",
             "--num_heads=4", "--max_steps=3"]
    text = start_script("train", again).output()
    changed = re.findall("(.*); the checkpoint had (.*)", text)
    assert {("beta1 is 0.8", "0.9"), ("log_interval is 10", "5"), ("lr is 0.0003", "0.002"),
            ("max_steps is 3", "2"), ("num_heads is 4", "2")} == {*changed}
    assert saved()["weight_decay"] == 0.5 and saved()["data_path"] == data


def test_a_machine_with_an_empty_disk_takes_the_settings_of_the_bucket(bucket_server):
    """It does not take data_prepare: a checkpoint may be a stranger's, and must execute no command."""
    bucket = "--gcs_dir=gs://bucket/run"
    prepare = f"--data_prepare=prepare_sudoku.py {DATA} --output_dir=data"  # beside train.py
    text = start_train("data", "first", bucket, "--max_steps=2", prepare).output()
    assert "training puzzles: 64" in text and "Train on it" not in text  # train.py goes on by itself
    shutil.rmtree("data")
    own = "--out_dir=second", bucket, "--device=cpu", "--init_from=resume", "--max_steps=3"
    assert "data" in start_script("train", own).output(2) and not os.path.exists("data")
    start_script("train", [*own, prepare]).output()
    assert saved("second") == saved("first") | dict(max_steps=3)


def test_the_weights_of_attention_are_resumed_only_by_the_same_model(data):
    """Another one may have the same shapes. A new run may begin with them, and says what has changed."""
    attention = "--mlp_t=False", "--max_steps=1"
    run(data, "run", *attention)  # its checkpoint has mlp_t, without which rope is an error
    line = "pos_encodings is rope; the checkpoint had none"
    with pytest.raises(UserError, match=f"^run/ckpt_00000001.pt was trained as another model: {line}: leave"):
        run(data, "run", "--init_from=resume", "--pos_encodings=rope")
    begin = "--init_from=run/ckpt_00000001.pt", "--pos_encodings=rope"
    assert line in run(data, "new", *attention, *begin)


def test_epochs_of_the_command_set_the_length(data):
    """The max_steps of a checkpoint, or of a config file, does not count."""
    run(data, "run", "--max_steps=2")
    assert "training from step 2 to 4" in run(data, "run", "--init_from=resume", "--epochs=1")
    Path("short.py").write_text("max_steps = 2")
    assert "training from step 0 to 4" in run(data, "new", "short.py", "--epochs=1")


def test_a_resume_on_another_device_has_the_dtype_that_was_asked_for(data, monkeypatch):
    """The first device would emulate bfloat16, and computes in float32 instead."""
    flags = "--forward_dtype=bfloat16", "--checkpoint_interval=1"
    with monkeypatch.context() as patch:
        patch.setattr(Device, "fastest_dtype", lambda device: ("float32", "it has no units"))
        assert "forward_dtype is float32: it has no units" in run(data, "run", *flags, "--max_steps=1")
    run(data, "float32", "--max_steps=1")
    assert same(last_weights("run"), last_weights("float32"))
    assert newest("run")["settings"]["forward_dtype"] == "bfloat16"


CONFIGS = [[path] for path in glob.glob(f"{ROOT}/config/*.py")]
CONFIGS += [[path, MINI] for path in glob.glob(f"{ROOT}/config/study/*.py")]


@pytest.mark.parametrize("files", CONFIGS, ids=lambda files: os.path.basename(files[0]))
def test_the_settings_of_a_checkpoint_give_the_recipe_of_each_config(files):
    """config/mini.py divides what the study's files say."""
    # a config file may run a fork, itself or by another file; the study's files do not
    if MINI in files:
        compare_recipes(files)
    else:
        in_new_process(compare_recipes, files)


def compare_recipes(files):
    began = configure(train.Settings, [*files, "--beta1=0.5"])
    configurator.FORKS.clear()  # the command of a resume has a process of its own
    resumed = configure(train.Settings, [*files, "--init_from=auto"])
    resumed.fill(train.recipe(vars(began)))
    train.check_start_settings(resumed)
    assert train.recipe(vars(resumed)) == train.recipe(vars(began))
