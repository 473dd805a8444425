run("../baseline.py")
# Which optimizer is best, and with which beta2?
optimizer = "lion"
beta2 = 0.99
wandb_log = True
wandb_project = "TRM-Exp09-Optimizer"
wandb_run_name = "exp09e_lion_beta2_0.99"
out_dir = "out/study/exp09e_lion_beta2_0.99"
