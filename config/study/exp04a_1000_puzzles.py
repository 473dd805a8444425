run("../study.py")
seed = 4  # the baseline once more
