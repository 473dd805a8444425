# The best known recipe for an hour of a GPU, or else of a CPU core: see records/records.md.
#     python train.py config/record.py                        # config/sudoku_speed.py: NOT RUN at this length
#     OMP_NUM_THREADS=1 python train.py config/record.py      # config/sudoku_symbols.py: 88.9%
import torch

if torch.cuda.is_available():
    run("sudoku_speed.py")
else:
    run("sudoku_symbols.py")
max_minutes = 60.0
out_dir = "out/record"
