# 9x9 Sudoku with digits as an axis of the latents: the data of config/sudoku_cpu.py, and its 1e14 FLOP.
#     OMP_NUM_THREADS=1 python train.py config/sudoku_symbols.py
# Expected: 88.7±1.7% of unseen generated puzzles by the first repeated answer (config/sudoku_cpu.py:
# 83.5±0.9%), after 90 to 130 minutes of a CPU core (AVX2, float32) beside other work. See records/records.md.
run("sudoku_cpu.py")
run("../examples/symbols.py")
out_dir = "out/sudoku_symbols"
max_steps = 3610
lr_warmup_steps = 108
ema_rate = 0.99539
