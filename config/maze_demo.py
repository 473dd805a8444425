# 6x6 mazes in minutes on 2 CPU cores: makes mazes, trains, solves unseen ones and shows one.
# Expected: 85% or more of 1000 unseen mazes exactly right. Other settings are those of config/demo.py.
run("demo.py")
data_path = "data/maze-6x6-demo"
data_prepare = (
    "prepare_maze.py --source=generate --size=6 --min_path=6 --num_train=16000 --num_test=1000"
    f" --output_dir={data_path}"
)
out_dir = "out/maze_demo"
epochs = 3  # 1500 steps
lr = 3e-3
eval_interval = 1
