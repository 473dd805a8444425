"""train.py as on a TPU host with two chips: xmp.spawn starts a process for each, here on the CPU.

Each process is a world of its own, since torch_xla's CPU has no collectives between processes: this shows how
processes start, stop and die. Arguments: train.py's.
"""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

if __name__ == "__main__":
    from unittest import mock

    from torch_xla._internal import pjrt

    import configurator
    import train

    # torch_xla asks the plugin of a chip for their number; without this the CPU has one process of threads
    pjrt.plugins.using_dynamic_plugins = lambda: True
    pjrt.plugins.default = lambda: mock.Mock(physical_chip_count=lambda: 2)
    configurator.start(train.main, train.__file__)
