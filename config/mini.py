# Named after a file of config/study, this file makes the same run in miniature: 6x6 Sudoku on one CPU core.
#     export OMP_NUM_THREADS=1
#     python scripts/sweep.py config/mini.py      all 67
#     python scripts/report.py out/mini
# A run takes two minutes on a core with instructions for bfloat16, and eight on others, in float32.
# The recursions stay as in the study, widths are a 16th. Other things that the study varies keep their
# proportions, but for halt_max_steps.
import math
import shlex

import prepare_sudoku
from configurator import configure

# The dataset has as many puzzles as the study's, and a tenth of the copies.
_study_data = configure(prepare_sudoku.Settings, shlex.split(data_prepare)[1:])
_puzzles = _study_data.subsample_size
_copies = _study_data.num_aug // 10
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
