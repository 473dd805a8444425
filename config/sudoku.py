# The paper's Sudoku-Extreme, MLP mixer: 87.4% of the test set (arXiv 2510.04871, table 1), under 36 hours on one L40S.
# Those are train.py's defaults. Data: python prepare_sudoku.py
out_dir = "out/sudoku"
