run("../study.py")
forward_dtype = "bfloat16"
