run("../study.py")
forward_dtype = "float16"
seed = 1  # equal to exp07a in config/mini.py
