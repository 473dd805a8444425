run("../study.py")
_question = "How much does evaluating averaged weights help, and how long should the average be?"
ema = False
