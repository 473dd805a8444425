# 6x6 mazes from nothing on 2 CPU cores in minutes: makes its own mazes, trains, solves unseen ones, shows one.
# Expected: 85% or more of 1000 unseen mazes exactly right. What is not set here is config/demo.py's.
run("demo.py")
data_path = "data/maze-6x6-demo"
data_prepare = "prepare_maze.py --source=generate --size=6 --min_path=6 --num_train=16000 --num_test=1000 --output_dir=data/maze-6x6-demo"
out_dir = "out/maze_demo"
epochs = 3  # 1500 steps
lr = 3e-3
eval_interval = 1
