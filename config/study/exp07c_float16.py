run("../study.py")
forward_dtype = "float16"
