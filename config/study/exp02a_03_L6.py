run("../study.py")
L_cycles = 6  # depth 42
seed = 1  # the baseline once more
