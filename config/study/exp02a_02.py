run("../baseline.py")
# How does accuracy grow with depth, H_cycles * (L_cycles + 1) * L_layers = 30, and when does it overfit?
L_cycles = 4
wandb_log = True
wandb_project = "TRM-Exp02a-LCycles"
wandb_run_name = "exp02a_02_L4"
out_dir = "out/study/exp02a_02_L4"
