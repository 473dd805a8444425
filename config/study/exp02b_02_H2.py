run("../study.py")
H_cycles = 2  # depth 28
