run("../study.py")
_question = "How much sooner does a run reach 85% if the recursion deepens over its first fifth?"
