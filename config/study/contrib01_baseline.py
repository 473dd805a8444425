run("../baseline.py")
# How much sooner is 85% reached if the recursion deepens over the first fifth of the run?
wandb_log = True
wandb_project = "TRM-Contrib01-Curriculum"
wandb_run_name = "contrib01_baseline_3x6"
out_dir = "out/study/contrib01_baseline_3x6"
