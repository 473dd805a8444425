run("../study.py")
L_cycles = 8  # depth 54
