run("../baseline.py")
# Which learning rate is best, and does it help to decay it?
lr = 3e-5
wandb_log = True
wandb_project = "TRM-Exp10-LearningRate"
wandb_run_name = "exp10a_lr3e-5"
out_dir = "out/study/exp10a_lr3e-5"
