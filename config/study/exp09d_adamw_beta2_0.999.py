run("../study.py")
_question = "Which optimizer is best, and with which beta2?"
optimizer = "adamw"
beta2 = 0.999
