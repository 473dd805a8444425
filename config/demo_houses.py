# 6x6 Sudoku by a small network that is told which cells share a row, a column or a box: records/houses.md.
#     OMP_NUM_THREADS=1 python train.py config/demo_houses.py
# 99.1 to 99.4% of 1000 unseen puzzles after 16 steps (seeds 0 to 2). Training takes 44 to 46 s of one thread
# with AVX512, and all of the command 60 to 68 s.
run("demo.py")
run("../examples/houses.py")
run("../examples/soap.py")
data_path = "data/sudoku-6x6-3k"
data_prepare = (
    "prepare_sudoku.py --source=generate --size=6 --num_train=3000 --num_test=1000 --num_aug=0"
    f" --output_dir={data_path}"
)
out_dir = "out/demo_houses"
max_steps = 700
global_batch_size = 32
curriculum_epochs = 0
L_cycles = 4
halt_max_steps = 16
weight_decay = 0.01
beta2 = 0.99
eval_patience = 0
eval_interval = 0
checkpoint_interval = 0
forward_dtype = "float32"
