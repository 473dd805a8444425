# 9x9 Sudoku on one CPU core in two hours (with bfloat16): makes 60,000 minimal puzzles in 21 versions each.
# models/sudoku-9x9.pt was trained with this recipe, on these and on real puzzles: docs/results.md.
run("demo.py")
data_path = "data/sudoku-9x9-cpu"
data_prepare = (
    "prepare_sudoku.py --source=generate --num_train=60000 --num_test=1000 --num_aug=20"
    f" --output_dir={data_path}"
)
out_dir = "out/sudoku_cpu"
global_batch_size = 64
max_steps = 10000  # 10.7 epochs
hidden_size = 192
L_layers = 2
curriculum_epochs = 0
halt_max_steps = 4  # 2 learns faster in runs of 3000 steps: docs/results.md
lr = 4e-3
lr_warmup_steps = 100
ema_rate = 0.998
eval_interval = 1
eval_max_puzzles = 200
log_interval = 50
