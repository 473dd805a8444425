"""scripts/sky*.yaml and docs/engines.md's command through SkyPilot's own parser; no cloud.

    python -m venv sky && sky/bin/pip install skypilot==0.14.1 && sky/bin/python tests/sky_check.py

SkyPilot downloads its catalogue. Here are the TPU's rows in us-west4, from catalogs/v8/gcp/vms.csv of
github.com/skypilot-org/skypilot-catalog, commit 006059e.
"""
import os
import pathlib
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
CATALOGUE = """InstanceType,vCPUs,MemoryGiB,AcceleratorName,AcceleratorCount,GpuInfo,Region,AvailabilityZone,\
Price,SpotPrice
,,,tpu-v5litepod-16,1,tpu-v5litepod-16,us-west4,us-west4-a,19.2,7.68
,,,tpu-v5litepod-16,1,tpu-v5litepod-16,us-west4,us-west4-b,19.2,7.68
"""


def main(home):
    os.environ["HOME"] = home  # before SkyPilot looks for its catalogue
    import sky
    import yaml
    from sky.client.cli import command
    catalogue = pathlib.Path(home, ".sky/catalogs/v8/gcp/vms.csv")
    catalogue.parent.mkdir(parents=True)
    catalogue.write_text(CATALOGUE)

    os.environ["BUCKET"] = "gs://b"
    flags = ["--env=BUCKET", "--env=CONFIG=config/sudoku.py --lr=2e-4", "--env=RUN=study/x"]
    flags += ["--yes", "--detach-run", "--name=exp08b_ema0.99", "--secret=WANDB_API_KEY=x"]
    for name in "sky.yaml", "sky-tpu.yaml":
        path = str(ROOT / "scripts" / name)
        params = command.jobs_launch.make_context("launch", [path, *flags]).params
        config = yaml.safe_load(pathlib.Path(path).read_text())
        task = sky.Task.from_yaml_config(config, params["env"], params["secret"])
        [resources] = task.resources
        assert task.envs["BUCKET"] == "gs://b" and task.envs["CONFIG"].endswith("--lr=2e-4"), task.envs
        assert resources.use_spot and resources.job_recovery["max_restarts_on_errors"] == 3, resources
        print(f"{name}: {resources}")
        # without a value for BUCKET
        try:
            sky.Task.from_yaml(path)
            raise AssertionError(f"{name} is accepted without BUCKET")
        except ValueError as e:
            assert "BUCKET" in str(e), e

    # the TPU is in the catalogue, in that region
    resources.validate()
    [accelerator] = resources.accelerators
    regions = sky.catalog.get_region_zones_for_accelerators(accelerator, 1, use_spot=True, clouds="gcp")
    assert resources.region in [region.name for region in regions], regions


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:
        main(home)
