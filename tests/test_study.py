"""config/study: what holds for each of the 67 runs, at full size and in miniature."""
import os
import shlex

import pytest
from helpers import ROOT
from sweep import BASELINE, GROUPS, NEUTRAL, STUDY, changes, group_of

import optim
import prepare_sudoku
import train
from configurator import configure

FILES = sorted(os.listdir(STUDY))
BASELINE_SETTINGS = vars(configure(train.Settings, [str(BASELINE)]))


def settings_of(file, *others):
    return configure(train.Settings, [os.path.join(STUDY, file), *others])


@pytest.mark.parametrize("file", FILES)
def test_a_run_has_its_name_and_fits_its_data_the_steps_and_the_chips(file, monkeypatch):
    run = settings_of(file)
    name = file.removesuffix(".py")
    project = GROUPS[group_of(name)]["project"]
    assert [run.wandb_run_name, run.wandb_project, run.out_dir] == [name, project, f"out/study/{name}"]
    assert run.global_batch_size % (32 * run.micro_batch_size) == 0  # on up to 32 chips

    # data_prepare makes the dataset of data_path: its command names the folder before it downloads
    data = configure(prepare_sudoku.Settings, shlex.split(run.data_prepare)[1:])
    monkeypatch.delattr(prepare_sudoku, "csv_paths")
    with pytest.raises(NameError, match="csv_paths"):
        prepare_sudoku.main(data)
    assert data.output_dir == run.data_path and data.source == "hub"
    # all runs see as many examples, between as many evaluations
    steps = optim.count_steps(run, data.subsample_size)
    assert steps == 50_000_000 // run.global_batch_size > 4 * run.lr_warmup_steps
    assert run.eval_interval * data.subsample_size == 5_000_000


def test_the_baseline_of_each_group_differs_from_the_baseline_in_its_seed_alone():
    allowed = *NEUTRAL, "seed"
    same = [file for file in FILES if not changes(vars(settings_of(file)), BASELINE_SETTINGS, allowed)]
    assert same == sorted(group["baseline"] + ".py" for group in GROUPS.values())


def test_no_run_in_miniature_repeats_another_one():
    """Runs with equal settings have different seeds."""
    runs = [settings_of(file, f"{ROOT}/config/mini.py") for file in FILES]
    for run in runs:
        train.check_start_settings(run)
    assert len({changes(vars(run), BASELINE_SETTINGS) for run in runs}) == 67
