run("../baseline.py")
# How much accuracy do more supervision steps buy, at what inference cost, and when do sequences halt?
halt_max_steps = 24
wandb_log = True
wandb_project = "TRM-Exp05-HaltingSteps"
wandb_run_name = "exp05_e_halt24"
out_dir = "out/study/exp05_e_halt24"
