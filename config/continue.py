# Trains a model further, from a file: put it after the config file that trained the model.
#     python train.py config/demo.py config/continue.py --init_from=models/sudoku-6x6.pt
# With the settings for new weights, the first steps at a high rate unlearn what the file knows.
out_dir += "-continued"
lr *= 0.1
lr_warmup_steps = 100  # Adam's moments begin at zero, as in a new run
ema_rate = max(ema_rate, 0.99)
curriculum_epochs = 0  # the model already knows the full depth
