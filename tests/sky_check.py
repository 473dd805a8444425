"""scripts/sky*.yaml through SkyPilot's own parser, rows of its catalogue and its command line; no cloud.

    python -m venv sky && sky/bin/pip install skypilot==0.14.1 && sky/bin/python tests/sky_check.py

SkyPilot downloads its catalogue. Here are the TPU's rows in us-west4, from catalogs/v8/gcp/vms.csv of
github.com/skypilot-org/skypilot-catalog, commit 006059e.
"""
import copy
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
    os.environ["HOME"] = home
    import sky
    import yaml
    catalogue = pathlib.Path(home, ".sky/catalogs/v8/gcp/vms.csv")
    catalogue.parent.mkdir(parents=True)
    catalogue.write_text(CATALOGUE)
    for name in "sky.yaml", "sky-tpu.yaml":
        path = ROOT / "scripts" / name
        assert len(path.read_text().splitlines()) <= 40, name
        assert "BUCKET" in refused(sky.Task.from_yaml, str(path)), name
        config = yaml.safe_load(path.read_text())
        resources = parse(sky, config)
        assert resources.use_spot and resources.job_recovery["recover_on_exit_codes"] == [1, 3], resources
        if "tpu" in name:
            print("a wrong type:", refused(parse, sky, config, accelerators="tpu-v5litepod-17"))
            print("a wrong region:", refused(parse, sky, config, infra="gcp/us-west5"))
        print("a wrong key:", refused(parse, sky, config, use_spots=True))
        print(f"{name}: {resources}")
    check_commands()


def parse(sky, config, **changed):
    """A task's resources as SkyPilot reads them. Raises ValueError unless its catalogue has a TPU there."""
    config = copy.deepcopy(config | dict(resources=config["resources"] | changed))  # SkyPilot changes it
    [resources] = sky.Task.from_yaml_config(config, env_overrides=[("BUCKET", "gs://bucket")]).resources
    [(name, count)] = resources.accelerators.items()
    if "tpu" in name:
        resources.validate()
        regions = sky.catalog.get_region_zones_for_accelerators(name, count, use_spot=True, clouds="gcp")
        if resources.region not in [region.name for region in regions]:
            raise ValueError(f"{name} is not in {resources.region}")
    return resources


def refused(call, *args, **kwargs):
    """The first line of the ValueError that a call raises."""
    try:
        call(*args, **kwargs)
    except ValueError as e:
        return str(e).splitlines()[0]
    raise AssertionError(f"accepted: {args} {kwargs}")


def check_commands():
    """The command lines of sweep.py: SkyPilot's parser takes them, and reads back what they say."""
    from sky.client.cli import command
    env = ["--env=BUCKET=gs://b", "--env=CONFIG=config/study/exp08a.py --max_steps=4", "--env=RUN=study/x"]
    words = ["--yes", "--detach-run", "--name=study-exp08b_ema0.99", "scripts/sky-tpu.yaml", *env]
    context = command.jobs_launch.make_context("launch", words)
    assert dict(context.params["env"])["CONFIG"] == "config/study/exp08a.py --max_steps=4", context.params
    assert context.params["detach_run"] and context.params["yes"]
    context = command.jobs_queue.make_context("queue", ["--all", "--skip-finished", "--output=json"])
    assert context.params["skip_finished"] and context.params["all"]
    print("sky jobs launch and queue: their flags are SkyPilot's")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:
        main(home)
