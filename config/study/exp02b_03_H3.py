run("../study.py")
H_cycles = 3  # depth 42
seed = 2  # the baseline once more
