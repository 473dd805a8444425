run("../study.py")
halt_max_steps = 8
seed = 1  # equal to exp05_a in config/mini.py
