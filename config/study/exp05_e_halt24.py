run("../study.py")
_question = "How much accuracy do more supervision steps buy, at what cost, and when do sequences halt?"
halt_max_steps = 24
