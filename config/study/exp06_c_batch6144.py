run("../study.py")
_question = "What is the critical batch size, and how does throughput grow with the batch?"
global_batch_size = 6144
