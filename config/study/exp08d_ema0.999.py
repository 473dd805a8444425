run("../study.py")
ema_rate = 0.999
seed = 9  # the baseline once more
