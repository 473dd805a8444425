run("../baseline.py")
# If exploration decreases over the run, how many inference steps are saved, and when do sequences halt?
halt_exploration_prob = 0.3
halt_exploration_prob_end = 0.05
wandb_log = True
wandb_project = "TRM-Contrib02-AnnealedExploration"
wandb_run_name = "contrib02_adaptive_0.3_to_0.05"
out_dir = "out/study/contrib02_adaptive_0.3_to_0.05"
