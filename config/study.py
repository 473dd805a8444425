# Every file of config/study runs this file first. The file's name is the run's name, which decides the run's
# folder and its group.
#
# Files with equal settings have different seeds. The baseline stands in 14 files, with the seeds 0 to 13.
import json
import os

import configurator

run("baseline.py")

wandb_run_name = os.path.basename(__file__).removesuffix(".py")
# the groups; scripts/sweep.py tells what the table has
with open(os.path.join(os.path.dirname(configurator.__file__), "config", "study.json")) as _file:
    _groups = json.load(_file)
for _prefix, _group in _groups.items():
    if wandb_run_name.startswith(_prefix):
        wandb_project = _group["project"]
wandb_log = True
out_dir = f"out/study/{wandb_run_name}"
