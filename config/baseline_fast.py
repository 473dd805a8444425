# The study's baseline without the puzzle embedding, as in config/sudoku_fast.py. NOT RUN.
run("baseline.py")
puzzle_emb_ndim = 0
puzzle_emb_len = 0
out_dir = "out/baseline_fast"
