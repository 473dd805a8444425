run("../study.py")
forward_dtype = "float32"
