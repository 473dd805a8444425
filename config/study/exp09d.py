run("../baseline.py")
# Which optimizer is best, and with which beta2?
optimizer = "adamw"
beta2 = 0.999
wandb_log = True
wandb_project = "TRM-Exp09-Optimizer"
wandb_run_name = "exp09d_adamw_beta2_0.999"
out_dir = "out/study/exp09d_adamw_beta2_0.999"
