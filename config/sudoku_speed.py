# Sudoku-Extreme as the small models of records/records.md learn 9x9 Sudoku, at the paper's width: trained
# with 2 supervision steps, tested with 16. NOT RUN. 3.0e17 FLOP, and at most 0.5e17 for the final evaluation:
# by its measured step 20 to 22 minutes on an H200; at 40% of peak 9 on a v5e-8, whose compiler says that it
# fits (1.2 of 16 GB).
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
