run("../baseline.py")
# How does accuracy grow with the parameters (accuracy = a - b * params^-c), and where does it saturate?
hidden_size = 512
num_heads = 8
puzzle_emb_ndim = hidden_size
wandb_log = True
wandb_project = "TRM-Exp01-ModelScaling"
wandb_run_name = "exp01c_h512"
out_dir = "out/study/exp01c_h512"
