run("../study.py")
optimizer = "adam_atan2"
beta2 = 0.95
