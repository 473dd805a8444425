# The paper's Sudoku-Extreme with the MLP mixer: 87.4% of the test set (arXiv 2510.04871, table 1),
# in under 36 hours on one L40S. This code has not run it in full. These are train.py's defaults.
# Data: python prepare_sudoku.py
out_dir = "out/sudoku"
