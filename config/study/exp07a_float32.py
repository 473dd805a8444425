run("../study.py")
_question = "How much accuracy does lower precision cost, and how much faster is it?"
forward_dtype = "float32"
