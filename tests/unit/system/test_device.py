"""Devices, without a GPU: a fake module in place of NVML gives its answers."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from pydantic_core import _pydantic_core

from honed.system import device, record
from honed.system.device import Device

FAKE_NVML = '''
"""Three GPUs: one at work for someone else, one fallen off the bus, one without memory of its own."""
class NVMLError(Exception): pass
class NVMLError_NotSupported(NVMLError): pass
class Memory: total, free = 80 * 2**30, 60 * 2**30
def nvmlInit():
    if {no_driver}: raise NVMLError("Driver Not Loaded")
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return 3
def nvmlDeviceGetHandleByIndex(index):
    if index == 1: raise NVMLError("GPU is lost")
    return index
def nvmlDeviceGetName(handle): return b"NVIDIA H100" if handle == 0 else "NVIDIA GB10"
def nvmlDeviceGetUUID(handle): return "GPU-%d" % handle
def nvmlDeviceGetCudaComputeCapability(handle): return [9, 0]
def nvmlDeviceGetMemoryInfo(handle):
    if handle == 2: raise NVMLError_NotSupported("Not Supported")
    return Memory
class Rates: gpu = 93
def nvmlDeviceGetUtilizationRates(handle):
    if handle == 2: raise NVMLError_NotSupported("Not Supported")
    return Rates
NVML_TEMPERATURE_GPU = 0
def nvmlDeviceGetPowerUsage(handle):
    if handle == 2: raise NVMLError_NotSupported("Not Supported")
    return 312500
def nvmlDeviceGetTemperature(handle, sensor): return 61 - handle
def nvmlSystemGetDriverVersion(): return "570.1"
'''


def probe_with(tmp_path: Path, code: str, *, no_driver: bool = False) -> str:
    """Return the output of a fresh process that imports that NVML."""
    (tmp_path / "pynvml.py").write_text(FAKE_NVML.replace("{no_driver}", str(no_driver)))
    library = tmp_path / "libnvidia-ml.so.1"
    library.unlink(missing_ok=True)
    library.symlink_to(_pydantic_core.__file__)  # any library: the module is the fake
    path = f"{tmp_path}:{Path(device.__file__).parents[2]}"
    environment = os.environ | {"PYTHONPATH": path, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True, text=True)
    return done.stdout.strip()


def test_gpus_are_told_by_nvml_and_a_lost_one_is_left_out(tmp_path: Path) -> None:
    code = (
        "from honed.system.device import *; print([(d.index, d.name, d.uuid, d.compute_capability) for d in probe()])"
    )
    expected = [(0, "NVIDIA H100", "GPU-0", (9, 0)), (2, "NVIDIA GB10", "GPU-2", (9, 0))]
    assert probe_with(tmp_path, code) == str(expected)


def test_a_gpu_that_shares_the_machines_memory_has_that(tmp_path: Path) -> None:
    code = "from honed.system.device import *; d = probe()[1]; print(d.total_bytes == system_memory()[0])"
    assert probe_with(tmp_path, code) == "True"


def test_how_busy_a_gpu_is_where_it_says_so(tmp_path: Path) -> None:
    code = (
        "from honed.system.device import *\n"
        "print([(d.uuid, d.busy_percent, d.used_bytes >> 30) for d in gpu_loads()][:1])"
    )
    assert probe_with(tmp_path, code) == "[('GPU-0', 93, 20)]"
    told = "(d.index, d.power_watts, d.temperature_celsius)"
    code = f"from honed.system.device import *; print([{told} for d in gpu_loads()])"
    assert probe_with(tmp_path, code) == "[(0, 312.5, 61), (2, None, 59)]"
    code = "from honed.system.device import *; print([d.busy_percent for d in gpu_loads()])"
    assert probe_with(tmp_path, code) == "[93, None]"
    assert probe_with(tmp_path, code, no_driver=True) == "[]"


def test_only_the_gpus_that_honed_may_use_are_there(tmp_path: Path) -> None:
    code = "from honed.system.device import *; print([d.index for d in probe([2])], [d.kind for d in probe([])])"
    assert probe_with(tmp_path, code) == "[2] ['cpu']"


def test_without_a_driver_there_is_the_cpu(tmp_path: Path) -> None:
    code = "from honed.system.device import *; print([d.kind for d in probe()])"
    assert probe_with(tmp_path, code, no_driver=True) == "['cpu']"


def test_probing_imports_no_torch(tmp_path: Path) -> None:
    code = "import sys; from honed.system.device import *; probe(); print('torch' in sys.modules)"
    assert probe_with(tmp_path, code) == "False"


def test_the_cpu_has_the_machines_memory() -> None:
    found = device.cpu()
    assert found.kind == "cpu"
    assert found.name
    assert 0 < found.free_bytes <= found.total_bytes


def test_memory_is_read_from_meminfo(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(
        "MemTotal:  1000 kB\nMemFree:  10 kB\nMemAvailable:  400 kB\nHugePages_Total: 0\n"
    )
    assert device.system_memory(tmp_path / "meminfo") == (1000 * 1024, 400 * 1024)


def test_a_gpu_on_which_others_work_is_not_free() -> None:
    gib = 2**30
    gpu = Device(kind="cuda", name="T4", total_bytes=16 * gib, free_bytes=10 * gib)
    assert not device.is_free(gpu, 1 * gib)
    assert device.is_free(gpu, 6 * gib)
    assert device.is_free(Device(kind="cpu", name="cpu", total_bytes=16 * gib, free_bytes=0), 1 * gib)


def test_a_device_survives_json() -> None:
    gpu = Device(kind="cuda", name="T4", index=0, uuid="GPU-1", compute_capability=(7, 5), total_bytes=1, free_bytes=1)
    assert record.read(Device, asdict(gpu) | {"compute_capability": [7, 5]}) == gpu


def test_apple_silicon_is_told_by_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    for release, has_bfloat16 in (("13.6.1", False), ("14.0", True), ("26.1", True), ("", True)):
        monkeypatch.setattr("platform.mac_ver", lambda release=release: (release, ("", "", ""), "arm64"))
        [found] = device.probe([])
        assert (found.kind, found.has_bfloat16) == ("mps", has_bfloat16)
