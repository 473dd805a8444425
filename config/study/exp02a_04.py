run("../baseline.py")
# How does accuracy grow with depth, H_cycles * (L_cycles + 1) * L_layers = 54, and when does it overfit?
L_cycles = 8
wandb_log = True
wandb_project = "TRM-Exp02a-LCycles"
wandb_run_name = "exp02a_04_L8"
out_dir = "out/study/exp02a_04_L8"
