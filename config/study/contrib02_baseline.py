run("../baseline.py")
# How many steps of inference are saved, and where do sequences halt, if exploration falls over the run?
wandb_log = True
wandb_project = "TRM-Contrib02-AnnealedExploration"
wandb_run_name = "contrib02_baseline_0.1"
out_dir = "out/study/contrib02_baseline_0.1"
