run("../study.py")
H_cycles = 5  # depth 70
