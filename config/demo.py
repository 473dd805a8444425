# 6x6 Sudoku from nothing in 3 minutes on 2 cores: makes its own puzzles, trains, solves unseen ones, shows one.
data_path = "data/sudoku-6x6-demo"
data_prepare = "prepare_sudoku.py --source=generate --size=6 --num_train=2000 --num_test=1000 --num_aug=100 --output_dir=data/sudoku-6x6-demo"
out_dir = "out/demo"
global_batch_size = 64
epochs = 30
eval_interval = 5
hidden_size = 128
puzzle_emb_ndim = 0
H_cycles = 2
L_cycles = 2
halt_max_steps = 8
forward_dtype = "float32"
lr = 2e-3
lr_warmup_steps = 50
lr_min_ratio = 0.1
ema_rate = 0.99
weight_decay = 0.1
eval_show_puzzle = True
