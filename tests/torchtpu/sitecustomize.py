"""Gives each Python process with this folder in PYTHONPATH a TPU, which cpu_plugin.c turns into the CPU.

TorchTPU loads itself when torch is imported, if the PCI bus has chips. Here it is loaded without them; the
environment variable CHIPS is their number.
"""
import os
import sys

if "resource_tracker" not in " ".join(sys.orig_argv):  # a process of multiprocessing's own
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    from torch_tpu._internal.utils import hardware

    hardware.get_tpu_device_count = lambda: int(os.environ.get("CHIPS", "1"))
    hardware.get_tpu_device_name = lambda: "TPU v5e"
    from torch_tpu import _loader
    _loader._init_device("tpu")

    import replicas
    replicas.install()
