run("../study.py")
hidden_size = 384
num_heads = 6
puzzle_emb_ndim = hidden_size
