run("../baseline.py")
# Which learning rate is best, and does it help to decay it?
lr = 1e-4
lr_min_ratio = 0.1
wandb_log = True
wandb_project = "TRM-Exp10-LearningRate"
wandb_run_name = "exp10d_lr1e-4_min0.1"
out_dir = "out/study/exp10d_lr1e-4_min0.1"
