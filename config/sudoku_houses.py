# 9x9 Sudoku by a small network that is told which cells share a row, a column or a box: records/houses.md.
# Copies by symmetry would change nothing for it, so the puzzles have none. The average at step 1000 solved
# 63.5% of 200 generated puzzles after 16 steps; training was not stable, and step 1300 was worse.
run("sudoku_cpu.py")
run("../examples/houses.py")
data_path = "data/sudoku-9x9-60k"
data_prepare = (
    "prepare_sudoku.py --source=generate --num_train=60000 --num_test=1000 --num_aug=0"
    f" --output_dir={data_path}"
)
out_dir = "out/sudoku_houses"
max_steps = 1300
hidden_size = 48
L_layers = 1
H_cycles = 2
L_cycles = 4
expansion = 2.0
halt_max_steps = 8  # solved boards must be seen in training: with 2 steps, deep evaluations fail
micro_batch_size = 8  # its tensors stay in the processor's cache
lr = 5e-3
lr_warmup_steps = 90
weight_decay = 0.01
beta2 = 0.99
ema_rate = 0.995
eval_patience = 0  # it gets better with depth
checkpoint_interval = 1000
forward_dtype = "float32"
