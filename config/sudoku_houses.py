# Sudoku of every size by a small network that is told which cells share a row, a column or a box:
# records/houses.md.
#     OMP_NUM_THREADS=1 python train.py config/sudoku_houses.py --compile=on
# 53 minutes of one thread (AVX512, float32), 1.4e14 FLOP. Seeds 0 to 2 solve 98.0, 98.2 and 95.5% of 1000
# generated 9x9 puzzles after 16 steps, and 99.8, 99.8 and 99.4% of 500 with --eval_patience=2
# --eval_halt_max_steps=256. With two layers, as in config/record.py, they solve 98.1, 99.0 and 98.3%.
# Making the puzzles takes 13 minutes of 2 cores before.
# Copies by symmetry would change nothing for this network, so the puzzles have none.
run("sudoku_cpu.py")
run("../examples/houses.py")
run("../examples/soap.py")
run("../examples/sizes.py")
data_path = "data/sudoku-9x9-hard"
data_prepare = (
    "prepare_sudoku.py --source=generate --num_train=40000 --num_hard=20000 --num_test=1000 --num_aug=0"
    f" --output_dir={data_path}"
)
other_data_path = "data/sudoku-6x6-3k"
other_data_prepare = (
    "prepare_sudoku.py --source=generate --size=6 --num_train=3000 --num_test=1000 --num_aug=0"
    f" --output_dir={other_data_path}"
)
out_dir = "out/sudoku_houses"
max_steps = 6600
global_batch_size = 32
micro_batch_size = 8  # its tensors stay in the cache
hidden_size = 48
multiple_of = 64
L_layers = 1
L_cycles = 15
expansion = 2.0
halt_max_steps = 16  # solved boards must be seen in training: else deep evaluations fail
lr = 5e-3
lr_warmup_steps = 100
weight_decay = 0.01
beta2 = 0.99
ema_rate = 0.997
eval_patience = 0  # it gets better with depth
eval_interval = 0
checkpoint_interval = 2200
forward_dtype = "float32"
