run("../baseline.py")
# Which optimizer is best, and with which beta2?
optimizer = "adam_atan2"
beta2 = 0.95
wandb_log = True
wandb_project = "TRM-Exp09-Optimizer"
wandb_run_name = "exp09a_adam_atan2_beta2_0.95"
out_dir = "out/study/exp09a_adam_atan2_beta2_0.95"
