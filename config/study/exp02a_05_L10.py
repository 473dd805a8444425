run("../study.py")
L_cycles = 10  # depth 66
