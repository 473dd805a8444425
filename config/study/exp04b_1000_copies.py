run("../study.py")
seed = 5  # the baseline once more
