# 6x6 Sudoku by a small network that is told which cells share a row, a column or a box: records/houses.md.
# NOT RUN as it stands: a first version of the fork solved 94% of 200 validation puzzles after 16 steps (seed
# 0, two minutes of a core).
run("demo.py")
run("../examples/houses.py")
data_path = "data/sudoku-6x6-3k"
data_prepare = (
    "prepare_sudoku.py --source=generate --size=6 --num_train=3000 --num_test=1000 --num_aug=0"
    f" --output_dir={data_path}"
)
out_dir = "out/demo_houses"
max_steps = 700
curriculum_epochs = 0
H_cycles = 1
L_cycles = 4
halt_max_steps = 8
weight_decay = 0.01
beta2 = 0.99
eval_patience = 0
eval_interval = 0
checkpoint_interval = 0
forward_dtype = "float32"
