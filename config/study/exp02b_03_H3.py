run("../study.py")
H_cycles = 3  # depth 42
