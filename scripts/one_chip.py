"""Trains as train.py does, but on one chip of a host that has several; train.py takes all chips of a TPU.

    python scripts/one_chip.py config/demo.py --device=xla
"""
import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import configurator
import train
from runtime import process
from runtime.engines import choose_device


def main(argv):
    """Trains with train.py's arguments."""
    settings = configurator.configure(train.Settings, argv)
    device_type, *_ = choose_device(settings.device)
    if device_type == "xla":
        import torch_xla.distributed.xla_multiprocessing as xmp
        xmp.spawn = functools.partial(xmp.spawn, nprocs=1)  # in this process
    if device_type == "tpu":
        import torch
        launch = torch.tpu.distributed.set_tpu_launch_env
        torch.tpu.distributed.set_tpu_launch_env = functools.partial(launch, nproc_per_node=1)
    train.main(settings)


if __name__ == "__main__":
    process.command(main)
