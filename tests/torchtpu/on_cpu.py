"""Runs a Python command that finds a TPU: TorchTPU over XLA's CPU client.

    pip install -r requirements-torchtpu.txt
    pip install --no-deps lammps-jax-pjrt-cpu==0.11.2 xla-cpu-pjrt==0.0.1    # the client, and its header
    python tests/torchtpu/on_cpu.py train.py config/demo.py --device=tpu
"""
import importlib.util
import os
import subprocess
import sys
import tempfile

FOLDER = os.path.dirname(os.path.abspath(__file__))


def main(command):
    """Runs a Python command with a TPU, and returns its exit code, or what is missing in words."""
    specs = list(map(importlib.util.find_spec, ("torch_tpu", "lammps_jax_pjrt_cpu", "xla_plugins")))
    if not all(specs):
        return f"torch_tpu or XLA's CPU client is not installed: see {__file__}"
    _, client, header = (spec.submodule_search_locations[0] for spec in specs)
    with tempfile.TemporaryDirectory() as folder:
        plugin = os.path.join(folder, "cpu_plugin.so")
        flags = ["-shared", "-fPIC", f"-I{header}/xla_cpu_pjrt/include", "-o", plugin]
        subprocess.run(["cc", *flags, f"{FOLDER}/cpu_plugin.c", "-ldl"], check=True)
        environment = os.environ | dict(
            TPU_LIBRARY_PATH=plugin,
            CPU_CLIENT=f"{client}/pjrt_c_api_cpu_plugin.so",
            TORCH_TPU_TOPOLOGY="1,1,1", PYTHONPATH=FOLDER)
        return subprocess.run([sys.executable, *command], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
