# The paper's Maze-Hard, 30x30, with self-attention: 85.3% of the test set (arXiv 2510.04871), in under 24
# hours on 4 L40S. This code has not run it. Data: python prepare_maze.py (1000 mazes, each turned in 8 ways)
data_path = "data/maze-30x30-hard-1k-aug-8"
mlp_t = False
pos_encodings = "rope"
L_cycles = 4
out_dir = "out/maze"
