run("../study.py")
data_path = "data/sudoku-extreme-500-aug-1000"
data_prepare = "prepare_sudoku.py --subsample_size=500"
epochs = 50000 * 1000 // 500  # as many steps as the baseline: an epoch shows each puzzle once
eval_interval = 5000 * 1000 // 500  # every tenth of the run
