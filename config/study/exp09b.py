run("../baseline.py")
# Which optimizer is best, and with which beta2?
optimizer = "adamw"
beta2 = 0.95
wandb_log = True
wandb_project = "TRM-Exp09-Optimizer"
wandb_run_name = "exp09b_adamw_beta2_0.95"
out_dir = "out/study/exp09b_adamw_beta2_0.95"
