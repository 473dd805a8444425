run("../study.py")
global_batch_size = 6144
seed = 7  # the baseline once more
