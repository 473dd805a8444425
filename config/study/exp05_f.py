run("../baseline.py")
# How much accuracy does the depth of supervision buy, at what cost of inference, and where do sequences halt?
halt_max_steps = 32
wandb_log = True
wandb_project = "TRM-Exp05-HaltingSteps"
wandb_run_name = "exp05_f_halt32"
out_dir = "out/study/exp05_f_halt32"
