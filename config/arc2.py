# ARC-AGI-2 with the paper's recipe. This code has not run it. Others report, for the public evaluation tasks:
#   7.8% in two tries, about 3 days on 4 H100 (arXiv 2510.04871; perhaps a vote over ten evaluations)
#   6.2% in two tries, for one checkpoint (huggingface.co/arcprize/trm_arc_prize_verification)
# A run has 723,914 steps. The TPU compiler estimates arc1.py's time, and 0.6 GB more for the identifiers.
# Data: python prepare_arc.py --source=arc2 --extra=ConceptARC/corpus (github.com/victorvikram/ConceptARC)
run("arc1.py")
data_path = "data/arc2-aug-1000-extra-corpus"
out_dir = "out/arc2"
