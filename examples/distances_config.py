# Distances on 6x6 cells; docs/own-puzzles.md has the commands, the time and the accuracy. Others: the demo's.
run("../config/demo.py")
data_prepare = ""
data_path = "data/distances"
out_dir = "out/distances"
epochs = 6  # 923 steps
curriculum_epochs = 4
