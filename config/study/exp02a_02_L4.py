run("../study.py")
L_cycles = 4  # depth 30
