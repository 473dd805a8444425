run("../baseline.py")
# How does accuracy grow with the parameters (accuracy = a - b * params^-c), and where does it saturate?
hidden_size = 1536
num_heads = 8
puzzle_emb_ndim = hidden_size
wandb_log = True
wandb_project = "TRM-Exp01-ModelScaling"
wandb_run_name = "exp01f_h1536"
out_dir = "out/study/exp01f_h1536"
