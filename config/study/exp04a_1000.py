run("../baseline.py")
# What is the smallest number of training puzzles that reaches 85%?
wandb_log = True
wandb_project = "TRM-Exp04a-DataSize"
wandb_run_name = "exp04a_1000_puzzles"
out_dir = "out/study/exp04a_1000_puzzles"
