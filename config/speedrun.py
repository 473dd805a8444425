# 6x6 Sudoku from nothing faster than config/demo.py: its puzzles, learned by one layer instead of two, in bfloat16.
# Expected: 94% of 1000 unseen puzzles exactly right, 90% to 96% by seed. What is not set here is config/demo.py's.
run("demo.py")
out_dir = "out/speedrun"
epochs = 9  # 843 steps
L_layers = 1  # half the price of a step
L_cycles = 3
curriculum_epochs = 6  # one recursion a step until then, two after: with one alone, answers fell apart at depths not trained
H_cycles_start = 1
L_cycles_start = 3
forward_dtype = "bfloat16"  # half the time of float32, on processors that have instructions for it
eval_halt_max_steps = 4
lr = 1e-2  # one layer bears twice the demo's
lr_min_ratio = 0.0
lr_warmup_steps = 15
ema_rate = 0.98
eval_interval = 0  # only at the end
