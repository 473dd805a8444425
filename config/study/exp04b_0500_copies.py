run("../study.py")
data_path = "data/sudoku-extreme-1k-aug-500"
data_prepare = "prepare_sudoku.py --num_aug=500"
