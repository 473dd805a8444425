run("../baseline.py")
# How much does evaluating averaged weights help, and how long should the average be?
ema_rate = 0.999
wandb_log = True
wandb_project = "TRM-Exp08-EMA"
wandb_run_name = "exp08d_ema0.999"
out_dir = "out/study/exp08d_ema0.999"
