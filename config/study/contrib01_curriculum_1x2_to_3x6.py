run("../study.py")
_question = "How much sooner does a run reach 85% if the recursion deepens over its first fifth?"
curriculum_epochs = 10000
H_cycles_start = 1
L_cycles_start = 2
