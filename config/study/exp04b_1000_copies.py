run("../study.py")
_question = "Can augmented copies replace puzzles?"
