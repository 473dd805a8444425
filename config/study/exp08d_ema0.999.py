run("../study.py")
ema_rate = 0.999
