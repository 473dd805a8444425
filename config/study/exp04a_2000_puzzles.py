run("../study.py")
data_path = "data/sudoku-extreme-2k-aug-1000"
data_prepare = "prepare_sudoku.py --subsample_size=2000"
epochs = 50000 * 1000 // 2000  # as many steps as the baseline: an epoch shows each puzzle once
eval_interval = 5000 * 1000 // 2000  # every tenth of the run
