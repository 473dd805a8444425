run("../baseline.py")
# Which learning rate is best, and does it help to decay it?
lr = 1e-4
wandb_log = True
wandb_project = "TRM-Exp10-LearningRate"
wandb_run_name = "exp10b_lr1e-4"
out_dir = "out/study/exp10b_lr1e-4"
