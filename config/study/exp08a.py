run("../baseline.py")
# How much does evaluating averaged weights help, and how long should the average be?
ema = False
wandb_log = True
wandb_project = "TRM-Exp08-EMA"
wandb_run_name = "exp08a_ema_off"
out_dir = "out/study/exp08a_ema_off"
