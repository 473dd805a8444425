run("../study.py")
lr = 3e-5
