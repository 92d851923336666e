"""GPUs that a test hands in: a module in the place of NVML's, and the metadata of a torch that is built for them.

They are seen by processes that begin with `variables`, the daemon and its checks. The torch that is there sees none:
workers of jobs that are planned for them train on the CPU.
"""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

from pydantic_core import _pydantic_core

NVML = """
NVML_TEMPERATURE_GPU = 0
class NVMLError(Exception): pass
class NVMLError_NotSupported(NVMLError): pass
class Memory: total, free = 80 * 2**30, 80 * 2**30
class Rates: gpu = 0
def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return {num}
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetName(handle): return "test GPU"
def nvmlDeviceGetUUID(handle): return key(handle)
def nvmlDeviceGetCudaComputeCapability(handle): return [8, 0]
def nvmlDeviceGetMemoryInfo(handle): return Memory
def nvmlDeviceGetUtilizationRates(handle): return Rates
def nvmlDeviceGetPowerUsage(handle): return 100000
def nvmlDeviceGetTemperature(handle, sensor): return 40
def nvmlSystemGetDriverVersion(): return "570.1"
def key(index): return f"GPU-{index}"
"""


def write_torch(directory: Path) -> None:
    """Write the metadata of a torch that was built for GPUs into a directory of packages."""
    number = version("torch").partition("+")[0]
    metadata = directory / f"torch-{number}.dist-info/METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {number}\n")


def variables(directory: Path, num: int) -> dict[str, str]:
    """Return the environment of a process that sees so many GPUs, alike and free. `directory` is made for it."""
    directory.mkdir()
    write_torch(directory)
    (directory / "pynvml.py").write_text(NVML.replace("{num}", str(num)))
    (directory / "libnvidia-ml.so.1").symlink_to(_pydantic_core.__file__)  # any library: the module is the fake
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH", "")])),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(directory), os.environ.get("LD_LIBRARY_PATH", "")])),
    }
