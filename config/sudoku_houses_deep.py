# The second part of config/sudoku_houses.py's training: every sequence runs on after its board is solved, so
# that solved boards stay solved in more steps.
#     OMP_NUM_THREADS=1 python train.py config/sudoku_houses_deep.py --compile=on
run("sudoku_houses.py")
init_from = f"{out_dir}/ckpt_{max_steps:08d}.pt"
out_dir = "out/sudoku_houses_deep"
max_steps = 600
halt_exploration_prob = 1.0
lr = 1e-3
lr_warmup_steps = 20
ema_rate = 0.98
checkpoint_interval = 0
