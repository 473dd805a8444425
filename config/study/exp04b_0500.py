run("../baseline.py")
# Can augmented copies replace puzzles?
data_path = "data/sudoku-extreme-1k-aug-500"
data_prepare = "prepare_sudoku.py --num_aug=500"
wandb_log = True
wandb_project = "TRM-Exp04b-Augmentation"
wandb_run_name = "exp04b_0500_copies"
out_dir = "out/study/exp04b_0500_copies"
