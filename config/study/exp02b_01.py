run("../baseline.py")
# Is depth better spent on H_cycles or, as in exp02a, on L_cycles? Here the depth is 14.
H_cycles = 1
wandb_log = True
wandb_project = "TRM-Exp02b-HCycles"
wandb_run_name = "exp02b_01_H1"
out_dir = "out/study/exp02b_01_H1"
