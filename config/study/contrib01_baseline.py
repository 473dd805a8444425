run("../baseline.py")
# How much sooner does a run reach 85% if the recursion deepens over its first fifth?
wandb_log = True
wandb_project = "TRM-Contrib01-Curriculum"
wandb_run_name = "contrib01_baseline_3x6"
out_dir = "out/study/contrib01_baseline_3x6"
