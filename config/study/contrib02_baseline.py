run("../baseline.py")
# If exploration decreases over the run, how many inference steps are saved, and when do sequences halt?
wandb_log = True
wandb_project = "TRM-Contrib02-AnnealedExploration"
wandb_run_name = "contrib02_baseline_0.1"
out_dir = "out/study/contrib02_baseline_0.1"
