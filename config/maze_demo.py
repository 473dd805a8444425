# 6x6 mazes in 3 to 4 minutes on 2 CPU cores: makes mazes, trains and solves unseen ones.
#     python train.py config/maze_demo.py
# Expected: 88% or more of 1000 unseen mazes after 8 steps (--eval_patience=0). Other settings are the demo's.
run("demo.py")
data_path = "data/maze-6x6-demo"
data_prepare = (
    "prepare_maze.py --source=generate --size=6 --min_path=6 --num_train=16000 --num_test=1000"
    f" --output_dir={data_path}"
)
out_dir = "out/maze_demo"
epochs = 3  # 1500 steps
L_layers = 2
L_cycles = 2
curriculum_epochs = 0
eval_halt_max_steps = 8
lr = 3e-3
lr_min_ratio = 0.1
lr_warmup_steps = 50
ema_rate = 0.99
eval_interval = 1
forward_dtype = "float32"
