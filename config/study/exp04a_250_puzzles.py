run("../study.py")
data_path = "data/sudoku-extreme-250-aug-1000"
data_prepare = "prepare_sudoku.py --subsample_size=250"
epochs = 50000 * 1000 // 250  # as many steps as the baseline: an epoch shows each puzzle once
eval_interval = 5000 * 1000 // 250  # every tenth of the run
