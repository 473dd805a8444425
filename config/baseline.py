# The study's baseline: the paper's model at batch 6144, 50000 epochs of 1000 puzzles, 8138 steps. NOT RUN.
# Target: 87.4%. It evaluates 4096 test puzzles every 5000 epochs (814 steps), and all 422,786 at the end.
data_prepare = "prepare_sudoku.py"
global_batch_size = 6144
micro_batch_size = 32  # the TPU's compiler keeps these in on-chip memory; a GPU is faster with as many as fit
out_dir = "out/baseline"
