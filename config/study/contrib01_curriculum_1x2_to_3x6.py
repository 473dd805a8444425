run("../study.py")
curriculum_epochs = 10000
H_cycles_start = 1
L_cycles_start = 2
