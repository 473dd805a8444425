"""config/study/*.py against the study's table: each run changes what the table says, and nothing else."""
import functools
import glob
import os
import shlex

import configurator
import pytest
import torch
from conftest import ROOT

import prepare_sudoku
import train
from model import TRM, TRMConfig

BASELINE = os.path.join(ROOT, "config", "baseline.py")
STUDY = glob.glob(os.path.join(ROOT, "config", "study", "*.py"))
FILES = {os.path.basename(path).removesuffix(".py"): path for path in STUDY}
STEPS = 8138  # 50,000,000 / 6144
STEPS_OF_BATCH = {1536: 32552, 3072: 16276, 12288: 4069, 24576: 2034, 49152: 1017}
PUZZLES = {"exp04a_100": 100, "exp04a_250": 250, "exp04a_500": 500, "exp04a_2000": 2000, "exp04a_5000": 5000}
COPIES = {"exp04b_0010": 10, "exp04b_0100": 100, "exp04b_0500": 500, "exp04b_2000": 2000}


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
    return dict(data_path=f"data/sudoku-extreme-{count}-aug-1000", epochs=50_000_000 // n,
                data_prepare=f"prepare_sudoku.py --subsample_size={n}", eval_interval=5_000_000 // n)


# W&B project: {file: (suffix of its run's name, the settings it changes)}
TABLE = {
    "TRM-Exp01-ModelScaling": {
        f"exp01{x}": (f"h{width}", dict(hidden_size=width, num_heads=heads, puzzle_emb_ndim=width))
        for x, width, heads in zip("abcdef", (256, 384, 512, 768, 1024, 1536), (4, 6, 8, 8, 8, 8))},
    "TRM-Exp02a-LCycles": {
        f"exp02a_0{i}": (f"L{n}", dict(L_cycles=n)) for i, n in enumerate((2, 4, 6, 8, 10, 12), 1)},
    "TRM-Exp02b-HCycles": {f"exp02b_0{n}": (f"H{n}", dict(H_cycles=n)) for n in (1, 2, 3, 4, 5)},
    "TRM-Exp03-LayersVsCycles": {
        f"exp03{x}": (f"{layers}x{cycles}", dict(L_layers=layers, L_cycles=cycles))
        for x, layers, cycles in zip("abcde", (1, 2, 3, 4, 6), (12, 6, 4, 3, 2))},
    "TRM-Exp04a-DataSize": {
        "exp04a_1000": ("puzzles", {}), **{file: ("puzzles", puzzles(n)) for file, n in PUZZLES.items()}},
    "TRM-Exp04b-Augmentation": {
        "exp04b_1000": ("copies", {}), **{file: ("copies", dict(
            data_path=f"data/sudoku-extreme-1k-aug-{n}",
            data_prepare=f"prepare_sudoku.py --num_aug={n}")) for file, n in COPIES.items()}},
    "TRM-Exp05-HaltingSteps": {
        f"exp05_{x}": (f"halt{n}", dict(halt_max_steps=n)) for x, n in zip("abcdef", (4, 8, 12, 16, 24, 32))},
    "TRM-Exp06-BatchSize": {
        f"exp06_{x}": (f"batch{n}", batch(n))
        for x, n in zip("abcdef", (1536, 3072, 6144, 12288, 24576, 49152))},
    "TRM-Exp07-Precision": {
        f"exp07{x}": (dtype, dict(forward_dtype=dtype))
        for x, dtype in zip("abc", ("float32", "bfloat16", "float16"))},
    "TRM-Exp08-EMA": {
        "exp08a": ("ema_off", dict(ema=False)),
        **{f"exp08{x}": (f"ema{r}", dict(ema_rate=r)) for x, r in zip("bcde", (0.99, 0.995, 0.999, 0.9995))}},
    "TRM-Exp09-Optimizer": {
        "exp09a": ("adam_atan2_beta2_0.95", dict(optimizer="adam_atan2", beta2=0.95)),
        "exp09b": ("adamw_beta2_0.95", dict(optimizer="adamw", beta2=0.95)),
        "exp09c": ("adamw_beta2_0.99", dict(optimizer="adamw", beta2=0.99)),
        "exp09d": ("adamw_beta2_0.999", dict(optimizer="adamw", beta2=0.999)),
        "exp09e": ("lion_beta2_0.99", dict(optimizer="lion", beta2=0.99))},
    "TRM-Exp10-LearningRate": {
        "exp10a": ("lr3e-5", dict(lr=3e-5)),
        "exp10b": ("lr1e-4", dict(lr=1e-4)),
        "exp10c": ("lr3e-4", dict(lr=3e-4)),
        "exp10d": ("lr1e-4_min0.1", dict(lr=1e-4, lr_min_ratio=0.1)),
        "exp10e": ("lr1e-4_min0.01", dict(lr=1e-4, lr_min_ratio=0.01))},
    "TRM-Contrib01-Curriculum": {
        "contrib01_baseline": ("3x6", {}),
        "contrib01_curriculum": (
            "1x2_to_3x6", dict(curriculum_epochs=10000, H_cycles_start=1, L_cycles_start=2))},
    "TRM-Contrib02-AnnealedExploration": {
        "contrib02_baseline": ("0.1", {}),
        "contrib02_adaptive": (
            "0.3_to_0.05", dict(halt_exploration_prob=0.3, halt_exploration_prob_end=0.05))},
}
RUNS = {
    file: (project, f"{file}_{suffix}", changes)
    for project, runs in TABLE.items() for file, (suffix, changes) in runs.items()}


def test_the_files_and_the_baseline_are_those_of_the_table():
    assert len(RUNS) == 67 and FILES.keys() == RUNS.keys()
    expected = dict(
        data_path="data/sudoku-extreme-1k-aug-1000", mlp_t=True, pos_encodings="none", hidden_size=512,
        num_heads=8, expansion=4.0, L_layers=2, H_cycles=3, L_cycles=6, puzzle_emb_ndim=512,
        puzzle_emb_len=16, halt_max_steps=16, halt_exploration_prob=0.1, halt_exploration_prob_end=-1.0,
        forward_dtype="bfloat16", global_batch_size=6144, epochs=50000, max_steps=0, curriculum_epochs=0,
        eval_interval=5000, eval_max_puzzles=4096, eval_final_max_puzzles=0, optimizer="adam_atan2", lr=1e-4,
        lr_min_ratio=1.0, lr_warmup_steps=2000, beta1=0.9, beta2=0.95, weight_decay=1.0, puzzle_emb_lr=1e-4,
        puzzle_emb_weight_decay=1.0, ema=True, ema_rate=0.999, checkpoint_interval=1000)
    assert expected.items() <= vars(settings(BASELINE)).items()


@pytest.mark.parametrize("file", sorted(RUNS))
def test_a_run_changes_what_the_table_says_and_nothing_else(file):
    project, name, changes = RUNS[file]
    c = settings(FILES[file])
    own = dict(wandb_log=True, wandb_project=project, wandb_run_name=name, out_dir=f"out/study/{name}")
    assert vars(c) == vars(settings(BASELINE)) | changes | own
    with open(FILES[file], encoding="utf-8") as f:
        first, second, *rest = f.read().splitlines()
    assert first == 'run("../baseline.py")' and second.startswith("# ")
    assert not any(line.startswith("#") for line in rest)

    # It fits its data, its steps and the chips.
    flags = shlex.split(c.data_prepare)[1:]
    prepared = prepare_sudoku.complete(configurator.configure(prepare_sudoku.__file__, flags))
    assert prepared.output_dir == c.data_path and prepared.source == "hub" and prepared.seed == 0
    assert prepared.subsample_size == PUZZLES.get(file, 1000)
    assert prepared.num_aug == COPIES.get(file, 1000)
    steps = int(c.epochs * prepared.subsample_size / c.global_batch_size)
    assert steps == STEPS_OF_BATCH.get(c.global_batch_size, STEPS)
    assert c.lr_warmup_steps < steps / 4
    for chips in (8, 16, 32):
        assert c.global_batch_size % (chips * c.micro_batch_size) == 0
    for cycles in train.stages(c, prepared.subsample_size).values():
        assert cycles <= (c.H_cycles, c.L_cycles)


def test_every_size_can_be_built():
    """The parameters of exp01 enter its fit."""
    counts = {}
    for file in RUNS:
        c = TRMConfig.of(settings(FILES[file]), seq_len=81, vocab_size=11)
        if (c.hidden_size, c.L_layers) not in counts:
            with torch.device("meta"):
                counts[c.hidden_size, c.L_layers] = sum(p.numel() for p in TRM(c).parameters())
    widths = [256, 384, 512, 768, 1024, 1536]
    assert counts.keys() == {(width, 2) for width in widths} | {(512, layers) for layers in (1, 2, 3, 4, 6)}
    by_width = [counts[width, 2] for width in widths]
    assert by_width == sorted(set(by_width)) and by_width[2] == 5_028_866


def test_the_study_in_miniature():
    """config/mini.py keeps what the runs vary, but for the smallest halting depths and float16."""
    mini = os.path.join(ROOT, "config", "mini.py")
    own = ("seed", "out_dir", "data_prepare", "eval_interval", "wandb_project", "wandb_run_name")
    full_size, seeds = {}, {}
    for name, path in FILES.items():
        c = configurator.configure(train.__file__, [path, mini])
        train.check_settings(c)
        small, full = ({k: v for k, v in vars(x).items() if k not in own} for x in (c, settings(path)))
        if name not in ("exp05_b", "exp05_c", "exp07c"):
            assert full_size.setdefault(str(small), full) == full, name  # runs that differ still differ
        seeds.setdefault(str(small), []).append(c.seed)
    assert sorted(map(len, seeds.values())) == [1] * 48 + [2, 3, 14]
    assert all(len(own) == len(set(own)) for own in seeds.values())  # those that repeat one are its seeds
    for name, changed in (("exp01f", {"hidden_size": 96, "puzzle_emb_ndim": 96}),
                          ("exp06_f", {"global_batch_size": 256}), ("exp04a_100", {"epochs": 300})):
        c = vars(configurator.configure(train.__file__, [FILES[name], mini]))
        assert {key: c[key] for key in changed} == changed
