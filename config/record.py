# The best known recipe for an hour of a GPU, or else of a CPU core: see records/records.md. The last lines of
# bench.py say how many steps an hour has on another machine.
#     python train.py config/record.py
#         config/sudoku_speed.py: NOT RUN at this length. By its measured step (42.5 ms) the training takes
#         53 minutes of an NVIDIA H200, and the final evaluation at most 3.
#     OMP_NUM_THREADS=1 python train.py config/record.py --compile=on
#         config/sudoku_houses.py, whose network is told the rows, columns and boxes, with two layers: 98.1,
#         99.0 and 98.3% after 16 steps (seeds 0 to 2), after 50 to 55 minutes of one thread of an AMD EPYC
#         (AVX512) in float32.
#         Without being told, config/sudoku_symbols.py --max_steps=2358 solves 88.9%, in 57.5 minutes (AVX2).
import torch

if torch.cuda.is_available():
    run("sudoku_speed.py")
    max_steps = 75000
else:
    run("sudoku_houses.py")
    L_layers = 2
    L_cycles = 7
out_dir = "out/record"
