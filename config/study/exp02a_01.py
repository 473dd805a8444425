run("../baseline.py")
# How does accuracy grow with depth, H_cycles * (L_cycles + 1) * L_layers = 18, and when does it overfit?
L_cycles = 2
wandb_log = True
wandb_project = "TRM-Exp02a-LCycles"
wandb_run_name = "exp02a_01_L2"
out_dir = "out/study/exp02a_01_L2"
