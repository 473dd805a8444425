run("../baseline.py")
# How much accuracy does lower precision cost, and how much faster is it?
forward_dtype = "float32"
wandb_log = True
wandb_project = "TRM-Exp07-Precision"
wandb_run_name = "exp07a_float32"
out_dir = "out/study/exp07a_float32"
