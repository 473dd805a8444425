run("../study.py")
