run("../study.py")
halt_exploration_prob = 0.3
halt_exploration_prob_end = 0.05
