run("../baseline.py")
# How much does evaluating averaged weights help, and how long should the average be?
ema_rate = 0.9995
wandb_log = True
wandb_project = "TRM-Exp08-EMA"
wandb_run_name = "exp08e_ema0.9995"
out_dir = "out/study/exp08e_ema0.9995"
