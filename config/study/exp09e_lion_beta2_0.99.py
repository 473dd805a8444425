run("../study.py")
_question = "Which optimizer is best, and with which beta2?"
optimizer = "lion"
beta2 = 0.99
