# 9x9 Sudoku on one CPU core: makes 60,000 minimal puzzles in 21 versions each, and solves 83.5±0.9% of 1000.
#     OMP_NUM_THREADS=1 python train.py config/sudoku_cpu.py
# It takes an hour on a core without bfloat16 instructions. config/sudoku_symbols.py solves 89% by equal FLOP.
run("demo.py")
data_path = "data/sudoku-9x9-cpu"
data_prepare = (
    "prepare_sudoku.py --source=generate --num_train=60000 --num_test=1000 --num_aug=20"
    f" --output_dir={data_path}"
)
out_dir = "out/sudoku_cpu"
max_steps = 6118  # 3.3 epochs
L_layers = 2
expansion = 1.5  # MLPs half as wide as the demo's
multiple_of = 128
curriculum_epochs = 0
lr = 4e-3
lr_warmup_steps = 184
ema_rate = 0.99728
eval_interval = 1
eval_max_puzzles = 200
checkpoint_interval = 500
log_interval = 50
