run("../study.py")
_question = "How does accuracy grow with the parameters, as a - b * params^-c, and where does it saturate?"
hidden_size = 512
num_heads = 8
puzzle_emb_ndim = hidden_size
