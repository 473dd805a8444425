run("../study.py")
optimizer = "lion"
beta2 = 0.99
