run("../study.py")
lr = 1e-4
