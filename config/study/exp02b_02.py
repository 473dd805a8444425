run("../baseline.py")
# Is depth better spent on H_cycles or, as in exp02a, on L_cycles? Here the depth is 28.
H_cycles = 2
wandb_log = True
wandb_project = "TRM-Exp02b-HCycles"
wandb_run_name = "exp02b_02_H2"
out_dir = "out/study/exp02b_02_H2"
