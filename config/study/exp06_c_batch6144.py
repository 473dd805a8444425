run("../study.py")
global_batch_size = 6144
