run("../study.py")
forward_dtype = "bfloat16"
seed = 8  # the baseline once more
