"""A fork's first move: a copy of train.py, under another name, runs as it is edited."""
import os
from pathlib import Path

import export
import pytest
import torch
from helpers import ROOT, TINY, curve, newest, same, start_script, start_train, xla_environment

FORK = """
import train
new(window=-1)
print(train.__file__)
lr *= 0.5
"""
# settings in place of the learning rate's line
OWN = """
    logit_bias = -5.0
    cap = float("inf")
    lr: Above0 = 5e-5 """


@pytest.fixture
def clone():
    """A folder with links to all files of the project, and a function that adds an edited train.py."""
    Path("clone").mkdir()
    for path in Path(ROOT).iterdir():
        Path("clone", path.name).symlink_to(path)

    def copy(new_name, *edits):
        text = Path(ROOT, "train.py").read_text()
        for old, new in edits:
            assert text.count(old) == 1
            text = text.replace(old, new)
        Path("clone", new_name).write_text(text)

    return copy


@pytest.mark.parametrize("device", ["cpu", pytest.param("xla", marks=pytest.mark.xla)])
def test_a_copy_of_train_trains_as_it_is_edited(clone, data, device):
    """The copy's settings, step and replica() count, and `import train` in a fork gives the copy."""
    clone("my.train.py", ("    lr: Above0 = 1e-4 ", OWN),
          ("    # update the weights\n", "    print('my step')\n"))
    Path("fork.py").write_text(FORK)
    tiny = [flag for flag in TINY if not flag.startswith("--lr=")]
    argv = ["fork.py", f"--data_path={data}", *tiny, f"--device={device}", "--out_dir=run", "--max_steps=1",
            "--lr_warmup_steps=0", "--eval_final_max_puzzles=8"]
    script = os.path.abspath("clone/my.train.py")
    text = start_script(script, argv, **xla_environment(1)).output()
    assert "clone/my.train.py" in text and "my step" in text
    assert curve("run", "train/lr") == {1: 2.5e-5}
    # a model file has its settings, which model.py may read
    export.main(["run", "model.pt"])
    assert torch.load("model.pt")["settings"]["logit_bias"] == -5


# what README says of tensors that a step keeps: clipping at twice the running average of the gradient's norm
CLIPPING = """    # update the weights
    state["norm_average"].mul_(0.9).add_(0.1 * grad_norm)
    scale = (state["norm_average"] / grad_norm).clamp(max=1)
    totals["grads"] = {name: g * scale for name, g in totals["grads"].items()}
"""


def test_a_resume_has_what_a_copys_step_keeps(clone, data):
    state = "        self.state |= device.put(dict(norm_average=torch.ones(1)))\n"
    clone("mine.py", ("    # update the weights\n", CLIPPING),
          ("        # the programs\n", state))
    flags = "--lr=1e-2", "--checkpoint_interval=4", "--eval_final_max_puzzles=8"
    for own in "whole --max_steps=8", "parts --max_steps=4", "parts --max_steps=8 --init_from=resume":
        start_train(data, *own.split(), *flags, script="clone/mine.py").output()
    whole, parts = newest("whole"), newest("parts")
    assert whole["step"] == 8 and whole["kept"]["norm_average"] != 1
    assert same([whole["weights"], whole["kept"]], [parts["weights"], parts["kept"]])
