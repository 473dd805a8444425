# The best known recipe for an hour of a GPU, or else of a CPU core: see records/records.md. The last lines of
# bench.py say how many steps an hour has on another machine.
#     python train.py config/record.py
#         config/sudoku_speed.py: NOT RUN at this length. By its measured step (42.5 ms) the training takes
#         53 minutes of an NVIDIA H200, and the final evaluation at most 3.
#     OMP_NUM_THREADS=1 python train.py config/record.py
#         config/sudoku_symbols.py: 88.9% after 57.5 minutes, final evaluation included, on one thread of a
#         shared AMD EPYC (AVX2) in float32.
import torch

if torch.cuda.is_available():
    run("sudoku_speed.py")
    max_steps = 75000
else:
    run("sudoku_symbols.py")
    max_steps = 2358
out_dir = "out/record"
