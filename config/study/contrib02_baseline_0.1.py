run("../study.py")
seed = 13  # the baseline once more
