run("../study.py")
_question = "When do sequences halt if exploration decays, and how many inference steps does that save?"
halt_exploration_prob = 0.3
halt_exploration_prob_end = 0.05
