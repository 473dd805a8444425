run("../study.py")
halt_max_steps = 12
seed = 2  # equal to exp05_a in config/mini.py
