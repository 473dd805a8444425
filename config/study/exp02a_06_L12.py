run("../study.py")
L_cycles = 12  # depth 78
