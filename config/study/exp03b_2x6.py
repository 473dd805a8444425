run("../study.py")
# L_layers * L_cycles is 12 in all files of exp03.
L_layers = 2
L_cycles = 6
seed = 3  # the baseline once more
