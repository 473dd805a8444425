run("../baseline.py")
# What does the precision of the network cost in accuracy, and bring in speed?
forward_dtype = "bfloat16"
wandb_log = True
wandb_project = "TRM-Exp07-Precision"
wandb_run_name = "exp07b_bfloat16"
out_dir = "out/study/exp07b_bfloat16"
