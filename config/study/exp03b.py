run("../baseline.py")
# Can recursion replace layers, and at what speed and memory? L_layers * L_cycles is 12 in all of exp03.
L_layers = 2
L_cycles = 6
wandb_log = True
wandb_project = "TRM-Exp03-LayersVsCycles"
wandb_run_name = "exp03b_2x6"
out_dir = "out/study/exp03b_2x6"
