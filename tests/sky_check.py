"""scripts/sky*.yaml and the flags of docs/engines.md through SkyPilot's own parser; no cloud.

    python -m venv sky && sky/bin/pip install skypilot==0.14.1 && sky/bin/python tests/sky_check.py
"""
from pathlib import Path

import sky
import yaml
from sky.client.cli import command

FLAGS = ["--env=BUCKET=gs://b", "--env=CONFIG=config/sudoku.py --lr=2e-4", "--env=RUN=study/x",
         "--secret=WANDB_API_KEY=x", "--yes", "--detach-run", "--name=exp08b_ema0.99", "--gpus=H100:8"]

for path in (Path(__file__).parents[1] / "scripts").glob("sky*.yaml"):
    flags = command.jobs_launch.make_context("launch", [str(path), *FLAGS]).params
    task = sky.Task.from_yaml_config(yaml.safe_load(path.read_text()), flags["env"], flags["secret"])
    print(path.name, *task.resources, task.envs)
