run("../baseline.py")
# Can augmented copies replace puzzles?
wandb_log = True
wandb_project = "TRM-Exp04b-Augmentation"
wandb_run_name = "exp04b_1000_copies"
out_dir = "out/study/exp04b_1000_copies"
