run("../study.py")
halt_max_steps = 16
seed = 6  # the baseline once more
