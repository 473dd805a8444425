run("../study.py")
_question = "When do sequences halt if exploration decays, and how many inference steps does that save?"
