run("../study.py")
seed = 12  # the baseline once more
