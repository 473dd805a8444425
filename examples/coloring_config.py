# 3-colourings of 4x5 cells; examples/coloring.py has the commands. Other settings: the demo's.
run("../config/demo.py")
data_prepare = ""
data_path = "data/coloring"
out_dir = "out/coloring"
epochs = 6  # 780 steps
