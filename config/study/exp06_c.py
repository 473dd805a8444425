run("../baseline.py")
# What is the critical batch size, and how does throughput grow with the batch?
global_batch_size = 6144
wandb_log = True
wandb_project = "TRM-Exp06-BatchSize"
wandb_run_name = "exp06_c_batch6144"
out_dir = "out/study/exp06_c_batch6144"
