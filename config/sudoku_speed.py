# Sudoku-Extreme at the paper's width, by the recipe with which the small models of records/records.md learn
# 9x9 Sudoku: 2 supervision steps in training, 16 in the test. NOT RUN in full.
# Training costs 3.0e17 FLOP, the final evaluation at most 0.5e17. Expected: 20 to 22 minutes on an H200 (by
# its measured step), 9 on a v5e-8 (at 40% of its peak; the TPU compiler says that it fits, 1.2 of 16 GB).
# Data: python prepare_sudoku.py
run("sudoku_fast.py")
out_dir = "out/sudoku_speed"
epochs = 21000  # 27,343 steps: a seventh of the FLOP of config/sudoku.py
H_cycles = 2
L_cycles = 3
halt_max_steps = 2  # in training; evaluations go deeper
eval_halt_max_steps = 16
eval_patience = 1
loss_type = "softmax_cross_entropy"
lr = 1e-3  # 4e-3 at width 128, times 128 / 512
lr_min_ratio = 0.0
lr_warmup_steps = 800  # 3% of the run, as in config/sudoku_cpu.py
weight_decay = 0.1
