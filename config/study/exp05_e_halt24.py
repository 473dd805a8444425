run("../study.py")
halt_max_steps = 24
