# 9x9 Sudoku on 2 CPU cores in 70 to 130 minutes: makes 30,000 minimal puzzles in 31 versions each.
# Expected: 84% of 1000 unseen puzzles exactly right (seed 0, with bfloat16).
run("demo.py")
data_path = "data/sudoku-9x9-cpu"
data_prepare = (
    "prepare_sudoku.py --source=generate --num_train=30000 --num_test=1000 --num_aug=30"
    f" --output_dir={data_path}"
)
out_dir = "out/sudoku_cpu"
epochs = 36  # 33,750 steps
hidden_size = 192
curriculum_epochs = 0
halt_max_steps = 4
lr = 5e-3
lr_warmup_steps = 100
ema_rate = 0.998
eval_interval = 3
eval_max_puzzles = 200
log_interval = 50
