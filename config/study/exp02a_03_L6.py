run("../study.py")
L_cycles = 6  # depth 42
