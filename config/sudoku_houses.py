# 9x9 Sudoku by a small network that is told which cells share a row, a column or a box: records/houses.md.
#     OMP_NUM_THREADS=1 python train.py config/sudoku_houses.py --compile=on
#     OMP_NUM_THREADS=1 python train.py config/sudoku_houses_deep.py --compile=on
# The two parts take 55 minutes of one thread (AVX512, float32), 1.15e14 FLOP; seed 0: 81.8% of 1000 generated
# puzzles after 16 steps, 87.1% by the surest answer. 1000 steps more of the second part: 87.2 and 88.5%.
# config/sudoku_symbols.py solves 88.8% by 1e14 FLOP.
# Copies by symmetry would change nothing for this network, so the puzzles have none.
run("sudoku_cpu.py")
run("../examples/houses.py")
data_path = "data/sudoku-9x9-60k"
data_prepare = (
    "prepare_sudoku.py --source=generate --num_train=60000 --num_test=1000 --num_aug=0"
    f" --output_dir={data_path}"
)
out_dir = "out/sudoku_houses"
max_steps = 6000
global_batch_size = 32
micro_batch_size = 8  # its tensors stay in the processor's cache
multiple_of = 64
L_layers = 1
L_cycles = 15
expansion = 2.0
halt_max_steps = 5
halt_exploration_prob = 0.3  # solved boards must be seen in training: else deep evaluations fail
lr = 5e-3
lr_warmup_steps = 100
weight_decay = 0.01
beta2 = 0.99
ema_rate = 0.997
eval_patience = 0  # it gets better with depth
checkpoint_interval = 2000
forward_dtype = "float32"
