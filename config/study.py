# Every file of config/study runs this file first. The name of that file is the name of the run: from it
# follow its folder, its name in Weights & Biases and, by the group's prefix, its project there.
import os

run("baseline.py")
_projects = {
    "exp01": "TRM-Exp01-ModelScaling",
    "exp02a": "TRM-Exp02a-LCycles",
    "exp02b": "TRM-Exp02b-HCycles",
    "exp03": "TRM-Exp03-LayersVsCycles",
    "exp04a": "TRM-Exp04a-DataSize",
    "exp04b": "TRM-Exp04b-Augmentation",
    "exp05": "TRM-Exp05-HaltingSteps",
    "exp06": "TRM-Exp06-BatchSize",
    "exp07": "TRM-Exp07-Precision",
    "exp08": "TRM-Exp08-EMA",
    "exp09": "TRM-Exp09-Optimizer",
    "exp10": "TRM-Exp10-LearningRate",
    "contrib01": "TRM-Contrib01-Curriculum",
    "contrib02": "TRM-Contrib02-AnnealedExploration",
}
wandb_run_name = os.path.basename(__file__).removesuffix(".py")
for _prefix, _project in _projects.items():
    if wandb_run_name.startswith(_prefix):
        wandb_project = _project
wandb_log = True
out_dir = f"out/study/{wandb_run_name}"
