run("../study.py")
ema = False
