run("../study.py")
H_cycles = 1  # depth 14
