run("../study.py")
_question = "Which optimizer is best, and with which beta2?"
optimizer = "adam_atan2"
beta2 = 0.95
