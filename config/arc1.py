# ARC-AGI-1 with the paper's recipe. This code has not run it. Others report, for the public evaluation tasks:
#   44.6% in two tries, about 3 days on 4 H100 (arXiv 2510.04871; perhaps a vote over ten evaluations)
#   40.0% in two tries, for one checkpoint (huggingface.co/arcprize/trm_arc_prize_verification)
# The TPU compiler estimates 3.0 GB a chip and 150 to 551 ms a step for 16 v5e and --micro_batch_size=4.
# Data: python prepare_arc.py --extra=ConceptARC/corpus (github.com/victorvikram/ConceptARC)
data_path = "data/arc1-aug-1000-extra-corpus"
epochs = 100000  # 518,000 steps
mlp_t = False
pos_encodings = "rope"
L_cycles = 4
weight_decay = 0.1
puzzle_emb_lr = 1e-2
puzzle_emb_weight_decay = 0.1
eval_interval = 10000
eval_versions = 10  # the paper evaluates all versions each time; here only at the end
out_dir = "out/arc1"
