run("../baseline.py")
# Can augmented copies replace puzzles?
data_path = "data/sudoku-extreme-1k-aug-100"
data_prepare = "prepare_sudoku.py --num_aug=100"
wandb_log = True
wandb_project = "TRM-Exp04b-Augmentation"
wandb_run_name = "exp04b_0100_copies"
out_dir = "out/study/exp04b_0100_copies"
