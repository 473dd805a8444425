run("../baseline.py")
# Which learning rate is best, and does it help to decay it?
lr = 3e-4
wandb_log = True
wandb_project = "TRM-Exp10-LearningRate"
wandb_run_name = "exp10c_lr3e-4"
out_dir = "out/study/exp10c_lr3e-4"
