run("../study.py")
L_cycles = 2  # depth 18
