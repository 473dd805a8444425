run("../study.py")
optimizer = "adamw"
beta2 = 0.99
