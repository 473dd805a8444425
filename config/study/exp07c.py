run("../baseline.py")
# How much accuracy does lower precision cost, and how much faster is it?
forward_dtype = "float16"
wandb_log = True
wandb_project = "TRM-Exp07-Precision"
wandb_run_name = "exp07c_float16"
out_dir = "out/study/exp07c_float16"
