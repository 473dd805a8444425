# The paper's Sudoku-Extreme with self-attention instead of the MLP: 74.7% (arXiv 2510.04871, table 1).
# This code has not run it in full. Data: python prepare_sudoku.py
run("sudoku.py")
mlp_t = False
pos_encodings = "rope"
out_dir = "out/sudoku_att"
