run("../study.py")
hidden_size = 256
num_heads = 4
puzzle_emb_ndim = hidden_size
