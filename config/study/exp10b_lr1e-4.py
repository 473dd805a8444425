run("../study.py")
lr = 1e-4
seed = 11  # the baseline once more
