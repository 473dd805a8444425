run("../baseline.py")
# How much does evaluating averaged weights help, and how long should the average be?
ema_rate = 0.99
wandb_log = True
wandb_project = "TRM-Exp08-EMA"
wandb_run_name = "exp08b_ema0.99"
out_dir = "out/study/exp08b_ema0.99"
