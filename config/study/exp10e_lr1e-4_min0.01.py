run("../study.py")
lr = 1e-4
lr_min_ratio = 0.01
