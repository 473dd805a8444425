run("../baseline.py")
# What does the precision of the network cost in accuracy, and bring in speed?
forward_dtype = "float16"
wandb_log = True
wandb_project = "TRM-Exp07-Precision"
wandb_run_name = "exp07c_float16"
out_dir = "out/study/exp07c_float16"
