"""config/study/*.py against the study's table: each run changes what the table says, and nothing else."""
import functools
import os
import shlex

import pytest
from helpers import ROOT

import configurator
import optim
import prepare_sudoku
import train

BASELINE = os.path.join(ROOT, "config", "baseline.py")
STUDY = os.path.join(ROOT, "config", "study")
STEPS = 8138  # 50,000,000 / 6144
STEPS_OF_BATCH = {1536: 32552, 3072: 16276, 12288: 4069, 24576: 2034, 49152: 1017}


@functools.cache
def settings(path):
    return configurator.configure(train.__file__, [path])


def batch(n):
    """Learning rates grow with sqrt(batch); the warm-up has as many examples as the baseline's 2000 steps."""
    lr = 1e-4 * (n / 6144) ** 0.5
    return dict(global_batch_size=n, micro_batch_size=16 if n == 1536 else 32, lr=lr, puzzle_emb_lr=lr,
                lr_warmup_steps=2000 * 6144 // n)


def puzzles(n):
    """n puzzles, with as many steps and evaluations as the baseline: an epoch is n examples."""
    count = f"{n // 1000}k" if n >= 1000 else str(n)
    prepare = "prepare_sudoku.py" if n == 1000 else f"prepare_sudoku.py --subsample_size={n}"
    return dict(data_path=f"data/sudoku-extreme-{count}-aug-1000", epochs=50_000_000 // n,
                data_prepare=prepare, eval_interval=5_000_000 // n)


def copies(n):
    prepare = "prepare_sudoku.py" if n == 1000 else f"prepare_sudoku.py --num_aug={n}"
    return dict(data_path=f"data/sudoku-extreme-1k-aug-{n}", data_prepare=prepare)


# W&B project: {name of a run and of its file: the settings it changes}
TABLE = {
    "TRM-Exp01-ModelScaling": {
        f"exp01{x}_h{width}": dict(hidden_size=width, num_heads=heads, puzzle_emb_ndim=width)
        for x, width, heads in zip("abcdef", (256, 384, 512, 768, 1024, 1536), (4, 6, 8, 8, 8, 8))},
    "TRM-Exp02a-LCycles": {
        f"exp02a_0{i}_L{n}": dict(L_cycles=n) for i, n in enumerate((2, 4, 6, 8, 10, 12), 1)},
    "TRM-Exp02b-HCycles": {f"exp02b_0{n}_H{n}": dict(H_cycles=n) for n in (1, 2, 3, 4, 5)},
    "TRM-Exp03-LayersVsCycles": {
        f"exp03{x}_{layers}x{cycles}": dict(L_layers=layers, L_cycles=cycles)
        for x, layers, cycles in zip("abcde", (1, 2, 3, 4, 6), (12, 6, 4, 3, 2))},
    "TRM-Exp04a-DataSize": {
        f"exp04a_{n}_puzzles": puzzles(n) for n in (100, 250, 500, 1000, 2000, 5000)},
    "TRM-Exp04b-Augmentation": {
        f"exp04b_{n:04}_copies": copies(n) for n in (10, 100, 500, 1000, 2000)},
    "TRM-Exp05-HaltingSteps": {
        f"exp05_{x}_halt{n}": dict(halt_max_steps=n) for x, n in zip("abcdef", (4, 8, 12, 16, 24, 32))},
    "TRM-Exp06-BatchSize": {
        f"exp06_{x}_batch{n}": batch(n)
        for x, n in zip("abcdef", (1536, 3072, 6144, 12288, 24576, 49152))},
    "TRM-Exp07-Precision": {
        f"exp07{x}_{dtype}": dict(forward_dtype=dtype)
        for x, dtype in zip("abc", ("float32", "bfloat16", "float16"))},
    "TRM-Exp08-EMA": {
        "exp08a_ema_off": dict(ema=False),
        **{f"exp08{x}_ema{r}": dict(ema_rate=r) for x, r in zip("bcde", (0.99, 0.995, 0.999, 0.9995))}},
    "TRM-Exp09-Optimizer": {
        f"exp09{x}_{optimizer}_beta2_{beta2}": dict(optimizer=optimizer, beta2=beta2)
        for x, optimizer, beta2 in (
            ("a", "adam_atan2", 0.95), ("b", "adamw", 0.95), ("c", "adamw", 0.99), ("d", "adamw", 0.999),
            ("e", "lion", 0.99))},
    "TRM-Exp10-LearningRate": {
        "exp10a_lr3e-5": dict(lr=3e-5),
        "exp10b_lr1e-4": {},
        "exp10c_lr3e-4": dict(lr=3e-4),
        "exp10d_lr1e-4_min0.1": dict(lr_min_ratio=0.1),
        "exp10e_lr1e-4_min0.01": dict(lr_min_ratio=0.01)},
    "TRM-Contrib01-Curriculum": {
        "contrib01_baseline_3x6": {},
        "contrib01_curriculum_1x2_to_3x6": dict(curriculum_epochs=10000, H_cycles_start=1, L_cycles_start=2)},
    "TRM-Contrib02-AnnealedExploration": {
        "contrib02_baseline_0.1": {},
        "contrib02_adaptive_0.3_to_0.05": dict(halt_exploration_prob=0.3, halt_exploration_prob_end=0.05)},
}
RUNS = {name: (project, changes) for project, runs in TABLE.items() for name, changes in runs.items()}


def path_of(name):
    return os.path.join(STUDY, name + ".py")


def test_the_files_and_the_baseline_are_those_of_the_table():
    assert len(RUNS) == 67 and {name + ".py" for name in RUNS} == {*os.listdir(STUDY)}
    expected = dict(
        data_path="data/sudoku-extreme-1k-aug-1000", mlp_t=True, pos_encodings="none", hidden_size=512,
        num_heads=8, expansion=4.0, L_layers=2, H_cycles=3, L_cycles=6, puzzle_emb_ndim=512,
        puzzle_emb_len=16, halt_max_steps=16, halt_exploration_prob=0.1, halt_exploration_prob_end=-1.0,
        forward_dtype="bfloat16", global_batch_size=6144, epochs=50000, max_steps=0, curriculum_epochs=0,
        eval_interval=5000, eval_max_puzzles=4096, eval_final_max_puzzles=0, optimizer="adam_atan2", lr=1e-4,
        lr_min_ratio=1.0, lr_warmup_steps=2000, beta1=0.9, beta2=0.95, weight_decay=1.0, puzzle_emb_lr=1e-4,
        puzzle_emb_weight_decay=1.0, ema=True, ema_rate=0.999, checkpoint_interval=1000)
    assert expected.items() <= vars(settings(BASELINE)).items()


@pytest.mark.parametrize("name", sorted(RUNS))
def test_a_run_changes_what_the_table_says_and_nothing_else(name):
    project, changes = RUNS[name]
    run = settings(path_of(name))
    named = dict(wandb_log=True, wandb_project=project, wandb_run_name=name, out_dir=f"out/study/{name}")
    assert vars(run) == vars(settings(BASELINE)) | changes | named
    with open(path_of(name), encoding="utf-8") as f:
        assert f.readline() == 'run("../study.py")\n'

    # It fits its data, its steps and the chips.
    flags = shlex.split(run.data_prepare)[1:]
    prepared = configurator.configure(prepare_sudoku.__file__, flags)
    prepare_sudoku.fill_in(prepared)
    assert prepared.output_dir == run.data_path and prepared.source == "hub" and prepared.seed == 0
    steps = optim.count_steps(run, prepared.subsample_size)
    assert steps == STEPS_OF_BATCH.get(run.global_batch_size, STEPS) and run.lr_warmup_steps < steps / 4
    for chips in (8, 16, 32):
        assert run.global_batch_size % (chips * run.micro_batch_size) == 0
    first, last = (train.cycles_at(run, prepared.subsample_size, step) for step in (0, steps))
    assert first <= last == (run.H_cycles, run.L_cycles)


def test_the_study_in_miniature():
    """config/mini.py keeps what the runs vary, but for the smallest halting depths and float16."""
    mini = os.path.join(ROOT, "config", "mini.py")
    own = ("seed", "out_dir", "data_prepare", "eval_interval", "wandb_project", "wandb_run_name")
    full_size = {}
    seeds = {}
    for name in RUNS:
        small = configurator.configure(train.__file__, [path_of(name), mini])
        train.check_settings(small)
        small_text = str(vars(small) | dict.fromkeys(own))
        full_text = str(vars(settings(path_of(name))) | dict.fromkeys(own))
        if name not in ("exp05_b_halt8", "exp05_c_halt12", "exp07c_float16"):
            assert full_size.setdefault(small_text, full_text) == full_text, name  # differences stay
        seeds.setdefault(small_text, []).append(small.seed)
    assert sorted(map(len, seeds.values())) == [1] * 48 + [2, 3, 14]
    assert all(sorted(same) == list(range(len(same))) for same in seeds.values())  # repetitions are seeds
