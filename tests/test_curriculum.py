"""Schedules: the curriculum of depth and the decay of exploration, each a pure function of the step."""
import os
import re
import shutil
import subprocess
import sys
import types

import configurator
import pytest
from test_train import ROOT, TINY, curve, data, last_weights, run, same

import train
from data import halting_draws

# 64 puzzles in batches of 16: 6 epochs are 24 steps, 12 at (1, 1) and 12 at (1, 2), then (2, 3).
FLAGS = ["--H_cycles=2", "--L_cycles=3", "--curriculum_epochs=6", "--H_cycles_start=1", "--L_cycles_start=1",
         "--max_steps=32", "--lr=5e-4", "--checkpoint_interval=8", "--keep_last_n=9",
         "--halt_exploration_prob=0.9", "--halt_exploration_prob_end=0.1"]


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    out = str(tmp_path_factory.mktemp("whole") / "run")
    return out, run(data, out, *FLAGS, "--eval_interval=2", "--eval_max_puzzles=0")


def only_until(source, out, step):
    """Copies a run without its checkpoints after step."""
    shutil.copytree(source, out)
    for path in train.checkpoint_paths(str(out)):
        if int(path[-11:-3]) > step:
            os.remove(path)
            os.remove(path[:-3] + ".json")
    return out


def test_the_stages():
    c = configurator.configure(train.__file__,
                               [os.path.join(ROOT, "config", "baseline.py"), "--curriculum_epochs=10000"])
    # 10,000,000 / 6144 = 1627.6
    assert train.stages(c, 1000.0) == {0: (1, 2), 407: (1, 3), 814: (2, 4), 1221: (2, 5), 1628: (3, 6)}
    c.H_cycles_start = 3
    assert list(train.stages(c, 1000.0).values()) == [(3, 2), (3, 3), (3, 4), (3, 5), (3, 6)]
    c.L_cycles_start = 6
    assert train.stages(c, 1000.0) == {0: (3, 6)}
    c.curriculum_epochs, c.L_cycles = 0, 1
    assert train.stages(c, 1000.0) == {0: (3, 1)}


def test_exploration():
    c = types.SimpleNamespace(halt_exploration_prob=0.3, halt_exploration_prob_end=0.05)
    assert [round(train.exploration(c, step, 11), 9) for step in (0, 5, 10)] == [0.3, 0.175, 0.05]
    assert train.exploration(c, 0, 1) == 0.3
    c.halt_exploration_prob_end = -1.0
    assert train.exploration(c, 7, 11) == 0.3


def test_a_run_explores_with_the_probability_of_its_step(data, whole, tmp_path, monkeypatch):
    """A run that resumes in the first stage, 24 steps before its end, and ends as if uninterrupted."""
    drawn = []

    def record(*args):
        drawn.append((args[1], round(args[4], 6)))
        return halting_draws(*args)

    monkeypatch.setattr(train, "halting_draws", record)
    monkeypatch.setenv(train.STOP_FILE, str(tmp_path / "stop"))
    only_until(whole[0], tmp_path / "run", 8)
    flags = [f"--data_path={data}", f"--out_dir={tmp_path / 'run'}", *TINY, *FLAGS, "--eval_interval=0",
             "--init_from=resume"]
    train.replica(configurator.configure(train.__file__, flags), "cpu")
    assert drawn == [(step, round(0.9 - 0.8 * step / 31, 6)) for step in range(8, 32)]
    assert same(last_weights(tmp_path / "run"), last_weights(whole[0]))
    assert curve(tmp_path / "run") == curve(whole[0])


def test_the_log_says_what_changes(whole):
    out, text = whole
    assert re.findall(r"curriculum: (.*)", text) == [
        "H_cycles 1, L_cycles 1 from step 1 on",
        "H_cycles 1, L_cycles 2 from step 13 on",
        "H_cycles 2, L_cycles 3 from step 25 on"]
    assert re.findall(r"step (\d+): .* for the first step", text) == ["1", "13", "25"]
    # no line covers two stages
    assert list(curve(out)) == [5, 8, 10, 12, 15, 16, 20, 24, 25, 30, 32]
    # the first step of a stage is left out of the rates
    assert set(curve(out)) - set(curve(out, "perf/step_time")) == {25}


@pytest.mark.parametrize("step", [16, 24], ids=["in the second stage", "at a border"])
def test_resume_equals_the_uninterrupted_run(data, whole, tmp_path, step):
    out = only_until(whole[0], str(tmp_path / "run"), step)
    text = run(data, out, *FLAGS, "--eval_interval=2", "--eval_max_puzzles=0", "--init_from=resume")
    assert f"training from step {step} to 32" in text
    assert same(last_weights(out), last_weights(whole[0])) and curve(out) == curve(whole[0])
    assert curve(out, "eval/loss") == curve(whole[0], "eval/loss")


def test_evaluation_is_at_full_depth(data, whole, tmp_path):
    checkpoint = os.path.join(whole[0], "ckpt_00000008.pt")

    def evaluated_loss(H_cycles, L_cycles):
        text = run(data, tmp_path / "eval", f"--init_from={checkpoint}", "--eval_only",
                   f"--H_cycles={H_cycles}", f"--L_cycles={L_cycles}")
        return re.search(r"loss (\S+)", text)[1]

    found = [evaluated_loss(2, 3), evaluated_loss(1, 1)]
    assert f"{curve(whole[0], 'eval/loss')[8]:.4f}" == found[0] != found[1]


@pytest.mark.xla
def test_replicas_compile_one_program_a_stage(data, whole, tmp_path):
    """Two replicas through torch_xla follow the CPU's curve."""
    text = run(data, tmp_path / "run", *FLAGS, "--device=xla", PJRT_DEVICE="CPU", CPU_NUM_DEVICES="2")
    assert "2 x xla" in text
    compiles = curve(tmp_path / "run", "xla/compiles")
    assert [compiles[step] - compiles[5] for step in compiles] == [0] * 4 + [1] * 4 + [2] * 3
    assert curve(tmp_path / "run") == pytest.approx(curve(whole[0]), rel=1e-3)
    assert set(curve(tmp_path / "run", "xla/fallbacks").values()) == {0}


@pytest.mark.xla
def test_a_curriculum_ends_in_the_program_of_a_run_without():
    """The texts of the programs are equal, compared in a new process."""
    script = f"""
import torch, configurator, train
from model import TRM, TRMConfig
texts = []
for flags in ({FLAGS!r}, ["--H_cycles=2", "--L_cycles=3"]):
    c = configurator.configure(train.__file__, {TINY!r} + flags)
    device, plan = train.open_device("xla", c), train.stages(c, 64.0)
    run = train.Run(TRM(TRMConfig.of(c, seq_len=16, vocab_size=6)), c, device)
    ids = lambda *shape: torch.ones(shape, dtype=torch.int32)
    batch = dict(inputs=ids(16, 16), labels=ids(16, 16), puzzle_identifiers=ids(16) * 0,
                 min_halt_steps=ids(16))
    rates = dict.fromkeys(train.rates(c, 0, 1), torch.ones(1))
    inputs = device.put(dict(batch=batch, rates=rates, stop_requested=torch.zeros(1)))
    for cycles in plan.values():
        with torch.no_grad():
            hlo = device.lower(run.train_step, run.state, inputs, cycles)[0].hlo()
        texts.append(device.xb.get_computation_hlo(device.xb.computation_from_module_proto("step", hlo)))
print(len(texts), texts[2] == texts[3], texts[0] != texts[1] != texts[2])
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "PJRT_DEVICE": "CPU"})
    assert done.stdout.split() == ["4", "True", "True"], done.stdout + done.stderr


@pytest.mark.parametrize("flags, words", [
    (["--L_cycles_start=7"], "L_cycles_start must be from 1 to L_cycles (6), not 7"),
    (["--H_cycles_start=0"], "H_cycles_start must be from 1 to H_cycles (3), not 0"),
    (["--curriculum_epochs=-1"], "curriculum_epochs must be 0 or more"),
    (["--halt_exploration_prob_end=-0.5"], "or -1 (constant), not -0.5"),
    (["--halt_exploration_prob_end=2"], "must be from 0 to 1"),
], ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_wrong_settings(flags, words):
    with pytest.raises(configurator.UserError) as error:
        train.check_settings(configurator.configure(train.__file__, ["--curriculum_epochs=5", *flags]))
    assert words in str(error.value)
