"""config/study/*.py against the study's table: what each run changes of the baseline, and that nothing else differs."""
import glob
import os
import shlex
import sys

import pytest
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
import configurator  # noqa: E402
import prepare_sudoku  # noqa: E402
import train  # noqa: E402
from model import TRM, TRMConfig  # noqa: E402

BASELINE = os.path.join(ROOT, "config", "baseline.py")
FILES = {os.path.basename(path)[:-3]: path for path in glob.glob(os.path.join(ROOT, "config", "study", "*.py"))}
STEPS = 8138  # 50,000,000 / 6144
PUZZLES = {"exp04a_100": 100, "exp04a_250": 250, "exp04a_500": 500, "exp04a_2000": 2000, "exp04a_5000": 5000}
COPIES = {"exp04b_0010": 10, "exp04b_0100": 100, "exp04b_0500": 500, "exp04b_2000": 2000}


def settings(*argv):
    return configurator.configure(train.__file__, argv)


def rate(batch):
    """1e-4 * sqrt(batch / 6144), for the weights and the puzzle embedding; as many examples of warm-up as the baseline's 2000 steps."""
    return dict(lr=1e-4 * (batch / 6144) ** 0.5, puzzle_emb_lr=1e-4 * (batch / 6144) ** 0.5, lr_warmup_steps=2000 * 6144 // batch)


def puzzles(n):
    """Another number of puzzles, and as many steps and evaluations as the baseline: an epoch is n examples."""
    k = f"{n // 1000}k" if n >= 1000 else str(n)
    return dict(data_path=f"data/sudoku-extreme-{k}-aug-1000", data_prepare=f"prepare_sudoku.py --subsample_size={n}",
                epochs=50_000_000 // n, eval_interval=5_000_000 // n)


def copies(n):
    return dict(data_path=f"data/sudoku-extreme-1k-aug-{n}", data_prepare=f"prepare_sudoku.py --num_aug={n}")


# group: (W&B project, {file: (what its name ends in, what it changes)})
TABLE = {
    "exp01": ("TRM-Exp01-ModelScaling", {
        f"exp01{x}": (f"h{width}", dict(hidden_size=width, num_heads=heads, puzzle_emb_ndim=width))
        for x, width, heads in (("a", 256, 4), ("b", 384, 6), ("c", 512, 8), ("d", 768, 8), ("e", 1024, 8), ("f", 1536, 8))}),
    "exp02a": ("TRM-Exp02a-LCycles", {f"exp02a_0{i}": (f"L{n}", dict(L_cycles=n)) for i, n in enumerate((2, 4, 6, 8, 10, 12), 1)}),
    "exp02b": ("TRM-Exp02b-HCycles", {f"exp02b_0{n}": (f"H{n}", dict(H_cycles=n)) for n in (1, 2, 3, 4, 5)}),
    "exp03": ("TRM-Exp03-LayersVsCycles", {
        f"exp03{x}": (f"{layers}x{cycles}", dict(L_layers=layers, L_cycles=cycles))
        for x, layers, cycles in (("a", 1, 12), ("b", 2, 6), ("c", 3, 4), ("d", 4, 3), ("e", 6, 2))}),
    "exp04a": ("TRM-Exp04a-DataSize", {"exp04a_1000": ("puzzles", {})} | {f: ("puzzles", puzzles(n)) for f, n in PUZZLES.items()}),
    "exp04b": ("TRM-Exp04b-Augmentation", {"exp04b_1000": ("copies", {})} | {f: ("copies", copies(n)) for f, n in COPIES.items()}),
    "exp05": ("TRM-Exp05-HaltingSteps", {
        f"exp05_{x}": (f"halt{n}", dict(halt_max_steps=n)) for x, n in zip("abcdef", (4, 8, 12, 16, 24, 32))}),
    "exp06": ("TRM-Exp06-BatchSize", {
        f"exp06_{x}": (f"batch{n}", dict(global_batch_size=n, micro_batch_size=16 if n == 1536 else 32) | rate(n))
        for x, n in zip("abcdef", (1536, 3072, 6144, 12288, 24576, 49152))}),
    "exp07": ("TRM-Exp07-Precision", {f"exp07{x}": (d, dict(forward_dtype=d)) for x, d in zip("abc", ("float32", "bfloat16", "float16"))}),
    "exp08": ("TRM-Exp08-EMA", {"exp08a": ("ema_off", dict(ema=False))} | {
        f"exp08{x}": (f"ema{r}", dict(ema_rate=r)) for x, r in zip("bcde", (0.99, 0.995, 0.999, 0.9995))}),
    "exp09": ("TRM-Exp09-Optimizer", {
        f"exp09{x}": (f"{name}_beta2_{beta2}", dict(optimizer=name, beta2=beta2))
        for x, name, beta2 in (("a", "adam_atan2", 0.95), ("b", "adamw", 0.95), ("c", "adamw", 0.99), ("d", "adamw", 0.999), ("e", "lion", 0.99))}),
    "exp10": ("TRM-Exp10-LearningRate", {
        f"exp10{x}": (name, dict(lr=lr, lr_min_ratio=ratio)) for x, name, lr, ratio in (
            ("a", "lr3e-5", 3e-5, 1.0), ("b", "lr1e-4", 1e-4, 1.0), ("c", "lr3e-4", 3e-4, 1.0), ("d", "lr1e-4_min0.1", 1e-4, 0.1),
            ("e", "lr1e-4_min0.01", 1e-4, 0.01))}),
    "contrib01": ("TRM-Contrib01-Curriculum", {
        "contrib01_baseline": ("3x6", {}),
        "contrib01_curriculum": ("1x2_to_3x6", dict(curriculum_epochs=10000, H_cycles_start=1, L_cycles_start=2))}),
    "contrib02": ("TRM-Contrib02-AnnealedExploration", {
        "contrib02_baseline": ("0.1", {}),
        "contrib02_adaptive": ("0.3_to_0.05", dict(halt_exploration_prob=0.3, halt_exploration_prob_end=0.05))}),
}
RUNS = {file: (project, f"{file}_{ending}", changes) for project, runs in TABLE.values() for file, (ending, changes) in runs.items()}


def test_no_file_is_missing_and_none_too_many():
    assert len(RUNS) == 67 and FILES.keys() == RUNS.keys()


def test_the_baseline():
    want = dict(
        data_path="data/sudoku-extreme-1k-aug-1000", mlp_t=True, pos_encodings="none", hidden_size=512, num_heads=8, expansion=4.0, L_layers=2,
        H_cycles=3, L_cycles=6, puzzle_emb_ndim=512, puzzle_emb_len=16, halt_max_steps=16, halt_exploration_prob=0.1, forward_dtype="bfloat16",
        global_batch_size=6144, epochs=50000, eval_interval=5000, eval_max_puzzles=0, lr=1e-4, lr_min_ratio=1.0, lr_warmup_steps=2000, beta1=0.9,
        beta2=0.95, weight_decay=1.0, puzzle_emb_lr=1e-4, puzzle_emb_weight_decay=1.0, ema=True, ema_rate=0.999, checkpoint_interval=1000,
        optimizer="adam_atan2", curriculum_epochs=0, halt_exploration_prob_end=-1.0, max_steps=0)
    assert want.items() <= vars(settings(BASELINE)).items()


@pytest.mark.parametrize("file", sorted(RUNS))
def test_a_run_changes_what_the_table_says_and_nothing_else(file):
    project, name, changes = RUNS[file]
    c = settings(FILES[file])
    own = dict(wandb_log=True, wandb_project=project, wandb_run_name=name, out_dir=f"out/study/{name}")
    assert vars(c) == vars(settings(BASELINE)) | changes | own
    train.check_settings(c)
    with open(FILES[file], encoding="utf-8") as f:
        lines = f.read().splitlines()
    assert lines[0] == 'run("../baseline.py")' and lines[1].startswith("# ") and not any(line.startswith("#") for line in lines[2:])


@pytest.mark.parametrize("file", sorted(RUNS))
def test_a_run_fits_its_data_its_steps_and_the_chips(file):
    c = settings(FILES[file])
    prepared = prepare_sudoku.complete(configurator.configure(prepare_sudoku.__file__, shlex.split(c.data_prepare)[1:]))
    assert prepared.output_dir == c.data_path and prepared.source == "hub" and prepared.seed == 0
    assert (prepared.subsample_size, prepared.num_aug) == (PUZZLES.get(file, 1000), COPIES.get(file, 1000))
    steps = int(c.epochs * prepared.subsample_size / c.global_batch_size)
    assert steps == {1536: 32552, 3072: 16276, 12288: 4069, 24576: 2034, 49152: 1017}.get(c.global_batch_size, STEPS)
    assert c.lr_warmup_steps < steps / 4
    for chips in (8, 16, 32):
        assert c.global_batch_size % (chips * c.micro_batch_size) == 0
    for cycles in train.stages(c, prepared.subsample_size).values():
        assert cycles <= (c.H_cycles, c.L_cycles)


def test_every_size_can_be_built():
    """Parameters of exp01, whose fit they enter."""
    counts = {}
    for file in RUNS:
        c = TRMConfig.of(settings(FILES[file]), seq_len=81, vocab_size=11)
        if (c.hidden_size, c.L_layers) not in counts:
            with torch.device("meta"):
                counts[c.hidden_size, c.L_layers] = sum(p.numel() for p in TRM(c).parameters())
    assert sorted(counts) == [(256, 2), (384, 2), (512, 1), (512, 2), (512, 3), (512, 4), (512, 6), (768, 2), (1024, 2), (1536, 2)]
    assert counts[512, 2] == 5_028_866 and all(a < b for a, b in zip([counts[w, 2] for w in (256, 384, 512, 768, 1024)],
                                                                      [counts[w, 2] for w in (384, 512, 768, 1024, 1536)]))
