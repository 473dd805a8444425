run("../study.py")
_question = "How does accuracy grow with the depth H_cycles * (L_cycles + 1) * L_layers, and does it overfit?"
L_cycles = 8  # depth 54
