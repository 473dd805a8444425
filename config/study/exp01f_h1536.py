run("../study.py")
hidden_size = 1536
num_heads = 8
puzzle_emb_ndim = hidden_size
