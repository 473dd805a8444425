run("../baseline.py")
# How much accuracy does lower precision cost, and how much faster is it?
forward_dtype = "bfloat16"
wandb_log = True
wandb_project = "TRM-Exp07-Precision"
wandb_run_name = "exp07b_bfloat16"
out_dir = "out/study/exp07b_bfloat16"
