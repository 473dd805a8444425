# Every file of config/study runs this file first. The file's name is the run's name, which decides the run's
# folder and its group.
#
# Files with equal settings have different seeds. The baseline stands in 14 files, with the seeds 0 to 13.
import os

run("baseline.py")

# The groups, by the first letters of their runs' names. scripts/sweep.py and scripts/report.py read this.
#   project   name of the group's project at Weights & Biases
#   question  what the group asks
#   baseline  the run that is the baseline once more, with a seed of its own
#   x         the x axis of the group's picture: a setting or a fact; without it, settings stand side by side
groups = {
    "exp01": dict(
        project="TRM-Exp01-ModelScaling",
        question="How does accuracy grow with parameters, and where does it saturate?",
        baseline="exp01c_h512",
        x="parameters",
    ),
    "exp02a": dict(
        project="TRM-Exp02a-LCycles",
        question="Does more effective depth, by L_cycles, help, and does it overfit?",
        baseline="exp02a_03_L6",
        x="depth",
    ),
    "exp02b": dict(
        project="TRM-Exp02b-HCycles",
        question="At equal effective depth, are H_cycles worth more than L_cycles?",
        baseline="exp02b_03_H3",
        x="depth",
    ),
    "exp03": dict(
        project="TRM-Exp03-LayersVsCycles",
        question="Can recursion replace layers?",
        baseline="exp03b_2x6",
    ),
    "exp04a": dict(
        project="TRM-Exp04a-DataSize",
        question="How few training puzzles are enough?",
        baseline="exp04a_1000_puzzles",
        x="puzzles",
    ),
    "exp04b": dict(
        project="TRM-Exp04b-Augmentation",
        question="Can augmented copies replace data?",
        baseline="exp04b_1000_copies",
        x="examples",
    ),
    "exp05": dict(
        project="TRM-Exp05-HaltingSteps",
        question="What does accuracy cost at inference?",
        baseline="exp05_d_halt16",
        x="halt_max_steps",
    ),
    "exp06": dict(
        project="TRM-Exp06-BatchSize",
        question="Up to which size does a larger batch save steps and gain throughput?",
        baseline="exp06_c_batch6144",
        x="global_batch_size",
    ),
    "exp07": dict(
        project="TRM-Exp07-Precision",
        question="Which precision is enough?",
        baseline="exp07b_bfloat16",
    ),
    "exp08": dict(
        project="TRM-Exp08-EMA",
        question="Does the average of the weights help, and at which rate?",
        baseline="exp08d_ema0.999",
    ),
    "exp09": dict(
        project="TRM-Exp09-Optimizer",
        question="Which optimizer?",
        baseline="exp09a_adam_atan2_beta2_0.95",
    ),
    "exp10": dict(
        project="TRM-Exp10-LearningRate",
        question="Which learning rate, and does decaying it help?",
        baseline="exp10b_lr1e-4",
    ),
    "contrib01": dict(
        project="TRM-Contrib01-Curriculum",
        question="Does a curriculum of growing depth reach the target sooner?",
        baseline="contrib01_baseline_3x6",
    ),
    "contrib02": dict(
        project="TRM-Contrib02-AnnealedExploration",
        question="Does exploration that decays over the run lead to earlier halting?",
        baseline="contrib02_baseline_0.1",
    ),
}
wandb_run_name = os.path.basename(__file__).removesuffix(".py")
for _prefix, _group in groups.items():
    if wandb_run_name.startswith(_prefix):
        wandb_project = _group["project"]
wandb_log = True
out_dir = f"out/study/{wandb_run_name}"
