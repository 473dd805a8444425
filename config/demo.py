# 6x6 Sudoku in a minute or two on 2 CPU cores: makes puzzles, trains and solves unseen ones.
#     python train.py config/demo.py
# Expected: 98% or more of 1000 unseen puzzles (in float32 97% or more), by the first answer that repeats.
# After 16 steps (--eval_patience=0) three runs in bfloat16 solve 92.3±5.7%.
data_path = "data/sudoku-6x6-demo"
data_prepare = (
    "prepare_sudoku.py --source=generate --size=6 --num_train=3000 --num_test=1000 --num_aug=100"
    f" --output_dir={data_path}"
)
out_dir = "out/demo"
global_batch_size = 32
epochs = 9  # 843 steps
hidden_size = 128
expansion = 2.0
puzzle_emb_ndim = 0
L_layers = 1  # a step costs half of what two layers cost
H_cycles = 2
L_cycles = 3
curriculum_epochs = 6  # H_cycles is 1 for 6 epochs, then 2; with 1 alone, deeper evaluations fail
H_cycles_start = 1
L_cycles_start = 3
forward_dtype = "auto"  # bfloat16 takes about half the time on processors that have it
loss_type = "softmax_cross_entropy"  # learns faster than stablemax on a short run
halt_max_steps = 2  # fewer steps a puzzle, more puzzles a minute; evaluations go deeper
eval_halt_max_steps = 16
eval_patience = 1  # a puzzle is done once its answer repeats, at the latest after 16 steps
lr = 1e-2  # one layer tolerates a higher rate than two
lr_min_ratio = 0.0
lr_warmup_steps = 15
weight_decay = 0.1
ema_rate = 0.98
eval_interval = 3
eval_max_puzzles = 100
log_interval = 25
