# After a file of config/study: the same run in miniature, 6x6 Sudoku on one CPU core in some two minutes.
#     OMP_NUM_THREADS=1 python scripts/sweep.py config/mini.py      all 67; start it twice to use two cores
#     python scripts/report.py out/mini
# What the study varies keeps its proportions (but halt_max_steps) and recursions: a width is a 16th.
import math

# The dataset has as many puzzles as the study's, and a tenth of the copies.
_prepare_flags = dict(flag.lstrip("-").split("=") for flag in data_prepare.split()[1:])
_puzzles = int(_prepare_flags.get("subsample_size", 1000))
_copies = int(_prepare_flags.get("num_aug", 1000)) // 10
data_path = f"data/mini-{_puzzles}-aug-{_copies}"
data_prepare = (
    f"prepare_sudoku.py --source=generate --size=6 --num_train={_puzzles} --num_test=1000 --num_aug={_copies}"
    f" --output_dir={data_path}"
)
global_batch_size //= 192
micro_batch_size = 0

# A baseline run has 937 steps.
_share = 0.0006  # of the study's epochs
epochs = round(epochs * _share)
curriculum_epochs = round(curriculum_epochs * _share)

# model
hidden_size //= 16
num_heads = 1
puzzle_emb_ndim //= 16
puzzle_emb_len = 2
halt_max_steps = max(1, halt_max_steps // 8)  # more puzzles in as many steps
if forward_dtype == "float16":  # few processors have instructions for it
    forward_dtype = "float32"

# optimizer
loss_type = "softmax_cross_entropy"  # learns faster than stablemax on a short run
lr *= 50
lr_warmup_steps //= 40
weight_decay /= 10
ema_rate = 1 - 5 * (1 - ema_rate)
puzzle_emb_lr *= 50
puzzle_emb_weight_decay /= 10

# Runs whose other settings are equal here get different seeds; a run that is not named has seed 0.
_seeds = {
    # the baseline, 14 times; exp01c_h512 has seed 0
    "exp02a_03_L6": 1,
    "exp02b_03_H3": 2,
    "exp03b_2x6": 3,
    "exp04a_1000_puzzles": 4,
    "exp04b_1000_copies": 5,
    "exp05_d_halt16": 6,
    "exp06_c_batch6144": 7,
    "exp07b_bfloat16": 8,
    "exp08d_ema0.999": 9,
    "exp09a_adam_atan2_beta2_0.95": 10,
    "exp10b_lr1e-4": 11,
    "contrib01_baseline_3x6": 12,
    "contrib02_baseline_0.1": 13,
    # halt_max_steps is 1 in these and in exp05_a_halt4
    "exp05_b_halt8": 1,
    "exp05_c_halt12": 2,
    # forward_dtype is float32 in this and in exp07a_float32
    "exp07c_float16": 1,
}
seed = _seeds.get(wandb_run_name, 0)

# evaluation
eval_interval = math.ceil(epochs / 8)
eval_max_puzzles = 200
eval_halt_max_steps = 16  # a puzzle is done once its answer repeats: 2.6 steps on average
eval_patience = 1

# run
checkpoint_interval = 100
keep_last_n = 1
out_dir = f"out/mini/{wandb_run_name}"
device = "cpu"
log_interval = 25
wandb_log = False
