run("../study.py")
_question = "Is depth better spent on H_cycles or, as in exp02a, on L_cycles?"
H_cycles = 4  # depth 56
