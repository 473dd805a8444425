run("../baseline.py")
# How many steps of inference are saved, and where do sequences halt, if exploration falls over the run?
halt_exploration_prob = 0.3
halt_exploration_prob_end = 0.05
wandb_log = True
wandb_project = "TRM-Contrib02-AnnealedExploration"
wandb_run_name = "contrib02_adaptive_0.3_to_0.05"
out_dir = "out/study/contrib02_adaptive_0.3_to_0.05"
