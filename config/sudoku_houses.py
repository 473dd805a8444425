# 9x9 Sudoku by a small network that is told which cells share a row, a column or a box: records/houses.md.
#     OMP_NUM_THREADS=1 python train.py config/sudoku_houses.py --compile=on
# 34 minutes of one thread (AVX512, float32), seed 0, 6.7e13 FLOP: 78.4% of 1000 generated puzzles after 16
# steps, 83.2% of 500 after 64. config/sudoku_symbols.py solves more, 88.8%, by 1e14 FLOP.
# Copies by symmetry would change nothing for this network, so the puzzles have none.
run("sudoku_cpu.py")
run("../examples/houses.py")
data_path = "data/sudoku-9x9-60k"
data_prepare = (
    "prepare_sudoku.py --source=generate --num_train=60000 --num_test=1000 --num_aug=0"
    f" --output_dir={data_path}"
)
out_dir = "out/sudoku_houses"
max_steps = 4500
global_batch_size = 64  # with 32, training fell and came back several times
micro_batch_size = 8  # its tensors stay in the processor's cache
multiple_of = 64
L_layers = 1
H_cycles = 2
L_cycles = 4  # with 2, six passes a step in place of ten, it learned little
expansion = 2.0
halt_max_steps = 8  # solved boards must be seen in training: with 2 steps, deep evaluations fail
lr = 5e-3
lr_warmup_steps = 100
weight_decay = 0.05
beta2 = 0.99
ema_rate = 0.997
eval_patience = 0  # it gets better with depth
checkpoint_interval = 1500
forward_dtype = "float32"
