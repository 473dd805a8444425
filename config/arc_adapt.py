# Adapts a model of arc1.py or arc2.py to new tasks, by their demonstration pairs. This code has not run it.
# arXiv 2511.02886 reports 6.67% of ARC-AGI-2's semi-private tasks in two tries, in 12 h on 4 L4.
# Data: python prepare_arc.py --source=FOLDER --subsets=evaluation --output_dir=data/arc-new
run("arc1.py")
data_path = "data/arc-new"
init_from = "out/arc1/best.pt"  # the new rows of the puzzle embedding start from the mean of its rows
global_batch_size = 384
max_steps = 12500
lr = 2e-4
puzzle_emb_lr = 2e-2
eval_interval = 0
out_dir = "out/arc_adapt"
