run("../baseline.py")
# How does accuracy grow with depth, H_cycles * (L_cycles + 1) * L_layers = 42, and when does it overfit?
L_cycles = 6
wandb_log = True
wandb_project = "TRM-Exp02a-LCycles"
wandb_run_name = "exp02a_03_L6"
out_dir = "out/study/exp02a_03_L6"
