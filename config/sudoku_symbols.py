# 9x9 Sudoku with digits as an axis of the latents: the data of config/sudoku_cpu.py, and its 1e14 FLOP.
# Expected: 88.7±1.7% of unseen generated puzzles (config/sudoku_cpu.py: 83.5±0.9%). See records/records.md.
run("sudoku_cpu.py")
run("../examples/symbols.py")
out_dir = "out/sudoku_symbols"
max_steps = 3610
lr_warmup_steps = 108
ema_rate = 0.99539
