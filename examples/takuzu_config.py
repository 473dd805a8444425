# 6x6 Takuzu; docs/own-puzzles.md has the commands, the time and the accuracy. Other settings: the demo's.
run("../config/demo.py")
data_prepare = ""
data_path = "data/takuzu"
out_dir = "out/takuzu"
epochs = 8  # 1250 steps
L_layers = 2
H_cycles = 1
curriculum_epochs = 0
lr = 4e-3
