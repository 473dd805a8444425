"""A fork is a config file: it replaces classes and functions where they stand, and everybody follows."""
import re
import shutil
import threading
from functools import cache
from pathlib import Path

import pytest
import torch
from helpers import (
    DEEP,
    ROOT,
    arguments,
    in_new_process,
    last_weights,
    lines,
    newest,
    on_replicas,
    remove,
    run,
    same,
    start_train,
)

import configurator
import model
import train
from runtime.errors import UserError

EXAMPLES = "rsm fprm symbols houses"
FORK_PATHS = [f"{ROOT}/examples/{name}.py" for name in EXAMPLES.split()]
FORK_PATHS += sorted(map(str, Path(ROOT, "tests/forks").glob("*.py")))
FLAGS = [*DEEP, "--halt_max_steps=2", "--H_cycles_start=1", "--curriculum_epochs=3", "--puzzle_emb_ndim=0",
         "--lr_min_ratio=1", "--log_interval=1", "--eval_final_max_puzzles=8", "--eval_attempts=2"]
OWN = dict(  # a fork's settings
    rsm=["--H_cycles=3", "--L_cycles=2"],
    symbols=[f"{ROOT}/examples/soap.py"])
each_fork = pytest.mark.parametrize("fork", FORK_PATHS, ids=lambda path: Path(path).stem)


def flags_of(fork, *flags):
    """Returns a fork's arguments."""
    return [fork, *FLAGS, *OWN.get(Path(fork).stem, []), *flags]


def figures(out):
    """Returns the lines of metrics.jsonl without what a machine measures."""
    return [{name: value for name, value in line.items() if not name.startswith(("perf/", "xla/"))}
            for line in lines(out)]


@each_fork
def test_a_fork_resumes_bit_for_bit(fork, data):
    """The resume begins halfway to the second stage of the curriculum."""
    flags = flags_of(fork, "--checkpoint_interval=4")
    run(data, "whole", *flags, "--max_steps=8")
    shutil.copytree("whole", "parts")
    remove("parts", "ckpt_00000008.*")
    run(data, "parts", *flags, "--max_steps=8", "--init_from=resume")
    assert same(last_weights("whole"), last_weights("parts"))
    assert figures("parts")[-5:] == figures("whole")[-5:]


LOCK = threading.Lock()


@cache
def configured(*argv):
    return configurator.configure(train.Settings, argv)


def xla_fork(rank, argv):
    """Trains as train.py does. Replicas that are threads share what the fork replaces, once."""
    with LOCK:
        settings = configured(*argv)
    train.replica(settings, "xla")


@pytest.mark.xla
@pytest.mark.parametrize("names", ["fprm shampoo", "houses"])
def test_a_fork_trains_the_same_curve_on_two_replicas_of_xla(names, data):
    """The latents of symbols differ from the usual ones as those of houses do."""
    fork, *others = [path for path in FORK_PATHS if Path(path).stem in names.split()]
    flags = flags_of(fork, *others, "--max_steps=3", "--lr=1e-4")
    run(data, "cpu", *flags)
    argv = arguments(data, "xla", *flags, "--micro_batch_size=4")
    on_replicas(2, xla_fork, argv)
    for ours, theirs in zip(figures("xla"), figures("cpu"), strict=True):
        assert ours == pytest.approx(theirs, rel=2e-4, abs=1e-6)


# A function of the trainer that a fork replaces is the one that training and evaluations call.

REPLACED = """
    model.take_new_puzzles model.cross_entropy model.rms_norm
    model.step_metrics optim.optimizer_state optim.rates_at optim.exploration optim.cycles_at optim.update
    optim.descend optim.learning_rate data.halting_draws evaluate.evaluate
    evaluate.eval_sums train.make_inputs train.forward_backward train.train_step
""".split()


def test_a_function_is_replaced_where_it_stands(data):
    # the fork's functions write their names down, and call the functions that they replace
    code = ["import data, evaluate, model, optim, train"]
    for function in REPLACED:
        code.append(f"""
def replaced(*args, _old={function}, **options):
    open("calls", "a").write("{function}\\n")
    return _old(*args, **options)
{function} = replaced""")
    Path("fork.py").write_text("\n".join(code))
    run(data, "run", "fork.py", "--max_steps=2", "--H_cycles=1", "--halt_max_steps=2")
    assert {*Path("calls").read_text().split()} == {*REPLACED}


# Mistakes that would go unnoticed otherwise.

def test_a_checkpoint_names_the_forks_that_trained_it(data):
    """A run that reads it without them, or with changed ones, says so."""
    fork = Path(shutil.copy(f"{ROOT}/tests/forks/entropy.py", "."))
    run(data, "run", str(fork), "--max_steps=2")
    assert newest("run")["forks"].keys() == {"entropy.py"}

    # with the same fork, and with a changed one
    again = "--init_from=resume", "--eval_only"
    equal = start_train(data, "run", str(fork), *again).output()
    assert "forks: {'entropy.py': " in equal and "trained with the fork" not in equal
    fork.write_text(fork.read_text() + "# changed")
    changed = start_train(data, "run", str(fork), *again).output()
    assert re.search(r"the fork entropy.py \w+, which has \w+ here", changed)

    # without the fork; an error has these lines too
    without = start_train(data, "run", "--init_from=resume", "--L_layers=2").output(2)
    assert "another block or other settings" in without and "trained with the fork entropy.py" in without
    assert "entropy_weight is no setting here; the checkpoint had 0.1" in without


def configure_twice():
    settings = configurator.configure(train.Settings, ["fork.py", "b/fork.py", "--weight=2"])
    assert (settings.device, settings.weight, settings.lr) == ("auto", 2, 1e-5)
    assert settings.forks.keys() == {"fork.py", "b/fork.py"}
    # without a fork
    assert configurator.configure(train.Settings, ["--seed=1"]).lr == 1e-4
    with pytest.raises(UserError, match="^fork.py: this process has run forks already .fork.py, b/fork.py.:"):
        configurator.configure(train.Settings, ["fork.py"])


def test_a_process_configures_forks_once():
    """One of them imports a module with the name of a setting, which changes no setting."""
    Path("fork.py").write_text("from runtime import device\nnew(weight=0.5)\nlr *= 0.1")
    Path("b").mkdir()
    Path("b/fork.py").write_text("new(other=0.5)")
    in_new_process(configure_twice)


def test_a_term_is_a_number_for_each_sequence(data, monkeypatch):
    losses = model.TRM.losses
    monkeypatch.setattr(model.TRM, "losses", lambda *args: losses(*args) | {"lm_loss": torch.ones(())})
    with pytest.raises(UserError, match=r"^lm_loss, .* for each sequence, \[16\], and is \[\]"):
        run(data, "run", "--max_steps=1")


def test_a_metric_that_nothing_returns_is_named(data, monkeypatch):
    monkeypatch.setattr(model, "METRICS", (*model.METRICS, "certainty"))
    with pytest.raises(UserError, match="has 'certainty', but TRM.forward returns no such value"):
        run(data, "run", "--max_steps=1")


class WithBuffers(model.TRM):
    """Has a buffer that float32 would round."""

    def __init__(self, *args, **sizes):
        super().__init__(*args, **sizes)
        self.register_buffer("counter", torch.tensor([2 ** 24 + 1]))


def test_buffers_of_a_fork_keep_their_type(data, monkeypatch):
    monkeypatch.setattr(model, "TRM", WithBuffers)
    run(data, "run", "--max_steps=1")
    assert newest("run")["weights"]["counter"].tolist() == [2 ** 24 + 1]


def test_a_fork_reads_no_setting_when_it_trains(data):
    """Its functions would see the value from before the flags: a bare name is an error, as in train.py."""
    Path("fork.py").write_text("""
import model
lr = 1.0
model.TRM.halts = lambda self, steps, *_: steps > lr""")
    assert "NameError: name 'lr' is not defined" in run(data, "run", "fork.py", "--max_steps=2", code=1)


def test_the_readme_has_a_fork_that_is_tested():
    assert Path(ROOT, "tests/forks/entropy.py").read_text() in Path(ROOT, "README.md").read_text()


def test_a_config_file_that_replaces_nothing_is_no_fork(data):
    Path("plain.py").write_text('''"""The rate is
from train.py, and its comment is the
import model of new(lr=1).
"""
import math  # not a model
lr = math.sqrt(4)''')
    arguments = [f"{ROOT}/config/study/exp01a_h256.py", f"{ROOT}/config/mini.py", "plain.py"]
    configurator.configure(train.Settings, arguments)
    assert not configurator.FORKS
