run("../study.py")
_question = "Which learning rate is best, and does it help to decay it?"
lr = 3e-4
