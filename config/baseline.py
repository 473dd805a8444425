# The study's baseline: the paper's model at batch 6144, 50000 epochs of 1000 puzzles, 8138 steps. Target: 87.4%.
data_prepare = "prepare_sudoku.py"
global_batch_size = 6144
micro_batch_size = 32  # what stays on a TPU chip between two uses; a GPU is faster with as many as its memory holds
eval_max_puzzles = 0
out_dir = "out/baseline"
