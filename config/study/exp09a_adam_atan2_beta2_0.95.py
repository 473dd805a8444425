run("../study.py")
optimizer = "adam_atan2"
beta2 = 0.95
seed = 10  # the baseline once more
