# The demo in bfloat16 and without evaluations during training: the least time to a model.
# Expected: 98% or more of 1000 unseen puzzles exactly right.
run("demo.py")
out_dir = "out/speedrun"
forward_dtype = "bfloat16"
eval_interval = 0  # only at the end
