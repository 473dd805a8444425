run("../baseline.py")
# Can augmented copies replace puzzles?
data_path = "data/sudoku-extreme-1k-aug-10"
data_prepare = "prepare_sudoku.py --num_aug=10"
wandb_log = True
wandb_project = "TRM-Exp04b-Augmentation"
wandb_run_name = "exp04b_0010_copies"
out_dir = "out/study/exp04b_0010_copies"
