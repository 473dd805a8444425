run("../baseline.py")
# Can recursion replace layers, and at what speed and memory? L_layers * L_cycles is 12 in all of exp03.
L_layers = 6
L_cycles = 2
wandb_log = True
wandb_project = "TRM-Exp03-LayersVsCycles"
wandb_run_name = "exp03e_6x2"
out_dir = "out/study/exp03e_6x2"
