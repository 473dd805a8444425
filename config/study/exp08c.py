run("../baseline.py")
# How much does evaluating averaged weights help, and how long should the average be?
ema_rate = 0.995
wandb_log = True
wandb_project = "TRM-Exp08-EMA"
wandb_run_name = "exp08c_ema0.995"
out_dir = "out/study/exp08c_ema0.995"
