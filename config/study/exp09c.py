run("../baseline.py")
# Which optimizer is best, and with which beta2?
optimizer = "adamw"
beta2 = 0.99
wandb_log = True
wandb_project = "TRM-Exp09-Optimizer"
wandb_run_name = "exp09c_adamw_beta2_0.99"
out_dir = "out/study/exp09c_adamw_beta2_0.99"
