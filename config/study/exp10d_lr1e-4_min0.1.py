run("../study.py")
_question = "Which learning rate is best, and does it help to decay it?"
lr = 1e-4
lr_min_ratio = 0.1
