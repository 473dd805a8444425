run("../baseline.py")
# How much sooner does a run reach 85% if the recursion deepens over its first fifth?
curriculum_epochs = 10000
H_cycles_start = 1
L_cycles_start = 2
wandb_log = True
wandb_project = "TRM-Contrib01-Curriculum"
wandb_run_name = "contrib01_curriculum_1x2_to_3x6"
out_dir = "out/study/contrib01_curriculum_1x2_to_3x6"
