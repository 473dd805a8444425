run("../study.py")
_question = "What is the smallest number of training puzzles that reaches 85%?"
