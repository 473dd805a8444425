# 6x6 Sudoku in under 3 minutes on 2 CPU cores: makes puzzles, trains, solves unseen ones and shows one.
# Expected: 98% or more of 1000 unseen puzzles exactly right.
data_path = "data/sudoku-6x6-demo"
data_prepare = (
    "prepare_sudoku.py --source=generate --size=6 --num_train=3000 --num_test=1000 --num_aug=100"
    f" --output_dir={data_path}"
)
out_dir = "out/demo"
global_batch_size = 32
epochs = 12  # 1125 steps
hidden_size = 128
expansion = 2.0
puzzle_emb_ndim = 0
H_cycles = 2
L_cycles = 2
forward_dtype = "float32"  # bfloat16 is slow on processors without instructions for it
loss_type = "softmax_cross_entropy"  # learns faster than stablemax on a short run
halt_max_steps = 2  # fewer steps a puzzle, more puzzles a minute; evaluation goes deeper
eval_halt_max_steps = 8
lr = 5e-3
lr_min_ratio = 0.1
lr_warmup_steps = 50
weight_decay = 0.1
ema_rate = 0.99
eval_interval = 4
eval_max_puzzles = 250
log_interval = 25
eval_show_puzzle = True
