run("../study.py")
H_cycles = 4  # depth 56
