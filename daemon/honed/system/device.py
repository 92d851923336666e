"""The devices that a job can run on, found without torch: NVIDIA GPUs through NVML, else Apple's, else the CPU."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from honed.system.error import EnvironmentInvalidError

Kind = Literal["cuda", "cpu", "mps"]


#: The first macOS on which Metal computes in bfloat16; transformers and accelerate refuse it on older ones.
MACOS_BFLOAT16 = 14


@dataclass(frozen=True)
class Device:
    """One device, as it was when it was probed."""

    kind: Kind
    name: str
    index: int | None = None  #: as nvidia-smi numbers it
    uuid: str | None = None  #: the value for CUDA_VISIBLE_DEVICES: indices depend on CUDA_DEVICE_ORDER
    compute_capability: tuple[int, int] | None = None
    total_bytes: int = 0
    free_bytes: int = 0  #: excludes memory held by other processes
    has_bfloat16: bool = True  #: False for an Apple GPU before macOS 14

    @property
    def key(self) -> str:
        """The device's name in entries: a GPU's UUID, or the kind."""
        return self.uuid or self.kind

    @property
    def label(self) -> str:
        """The device's short name for people."""
        if self.kind == "cuda":
            return f"GPU {self.index if self.index is not None else self.uuid}"
        return "the CPU" if self.kind == "cpu" else "the GPU"


def probe(gpus: list[int] | None = None) -> list[Device]:
    """Return the GPUs among `gpus` (default: all), or if there are none, the machine's one other device.

    Never raises: without an NVIDIA driver there is no GPU, and a GPU that does not answer (off the bus) is skipped.
    """
    return cuda_devices(gpus) or [_mps() if (platform.system(), platform.machine()) == ("Darwin", "arm64") else cpu()]


#: Share of a GPU's memory by which two GPUs of one kind may differ.
TOLERANCE = 0.02


def are_alike(one: Device, other: Device) -> bool:
    """Tell whether two devices may train one job together."""
    lower, higher = sorted((one.total_bytes, other.total_bytes))
    is_same = (one.kind, one.compute_capability) == (other.kind, other.compute_capability)
    return is_same and lower >= higher * (1 - TOLERANCE)


def alike(devices: Sequence[Device]) -> list[list[Device]]:
    """Return groups of devices that are alike, in the order of their first ones."""
    groups: list[list[Device]] = []
    for device in devices:
        group = next((group for group in groups if are_alike(group[0], device)), None)
        if group is None:
            groups.append([device])
        else:
            group.append(device)
    return groups


def is_free(device: Device, busy_bytes: int) -> bool:
    """Tell whether other processes hold at most `busy_bytes` of a GPU. The CPU always counts as free."""
    return device.kind != "cuda" or device.total_bytes - device.free_bytes <= busy_bytes


def cuda_devices(gpus: list[int] | None = None) -> list[Device]:
    """Return the GPUs that NVML reports; empty without its library or driver."""
    try:
        return _ask_nvml(gpus)
    except EnvironmentInvalidError:
        return []


@dataclass(frozen=True)
class Load:
    """The current utilisation of a GPU."""

    uuid: str
    name: str
    busy_percent: int | None  #: of about the last second; None if the GPU does not report it
    used_bytes: int
    total_bytes: int
    index: int = 0  #: as nvidia-smi numbers it
    power_watts: float | None = None  #: None if the GPU does not report it, as the next one
    temperature_celsius: int | None = None


def gpu_loads() -> list[Load]:
    """Return the utilisation, memory use, power and temperature of each GPU that answers; empty without NVML's
    library or driver."""
    try:
        with _nvml() as nvml:
            loads = [_load(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except EnvironmentInvalidError:
        return []
    return [load for load in loads if load is not None]


def _load(nvml: Any, index: int) -> Load | None:
    if (gpu := _cuda(nvml, index)) is None:
        return None

    def ask(name: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, name)(nvml.nvmlDeviceGetHandleByIndex(index), *arguments)
        except nvml.NVMLError:  # a MIG slice does not report it
            return None

    rates, milliwatts = ask("nvmlDeviceGetUtilizationRates"), ask("nvmlDeviceGetPowerUsage")
    return Load(
        gpu.uuid or "",
        gpu.name,
        int(rates.gpu) if rates is not None else None,
        gpu.total_bytes - gpu.free_bytes,
        gpu.total_bytes,
        index,
        milliwatts / 1000 if milliwatts is not None else None,
        ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
    )


def driver_version() -> str:
    """Return the NVIDIA driver's version. Raises EnvironmentInvalidError with NVML's message."""
    with _nvml() as nvml:
        return _text(nvml.nvmlSystemGetDriverVersion())


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """Yield NVML, initialised. Raises EnvironmentInvalidError without it, and for an error of its own."""
    hint = "is the NVIDIA driver installed and loaded?"
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:  # asked first: without the library, its module would only take memory
        raise EnvironmentInvalidError("NVML: NVML Shared Library Not Found", hint=hint) from error
    try:
        import pynvml  # noqa: PLC0415
    except ImportError as error:
        raise EnvironmentInvalidError("no nvidia-ml-py", hint="pip install nvidia-ml-py") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise EnvironmentInvalidError(f"NVML: {error}", hint=hint) from error
    try:
        yield pynvml
    except pynvml.NVMLError as error:
        raise EnvironmentInvalidError(f"NVML: {error}", hint="see nvidia-smi") from error
    finally:
        pynvml.nvmlShutdown()


def _ask_nvml(gpus: list[int] | None) -> list[Device]:
    if gpus == []:
        return []
    with _nvml() as nvml:
        count = nvml.nvmlDeviceGetCount()
        gpus_there = [_cuda(nvml, index) for index in range(count) if gpus is None or index in gpus]
    return [device for device in gpus_there if device is not None]


def _cuda(nvml: Any, index: int) -> Device | None:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        total, free = _cuda_memory(nvml, handle)
        return Device(
            kind="cuda",
            name=_text(nvml.nvmlDeviceGetName(handle)),
            index=index,
            uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
            compute_capability=tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
            total_bytes=total,
            free_bytes=free,
        )
    except nvml.NVMLError:
        return None


def _cuda_memory(nvml: Any, handle: Any) -> tuple[int, int]:
    """Return total and free bytes; for a GPU that shares the machine's memory (Jetson, GB10), those of the machine."""
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError_NotSupported:
        return system_memory()
    return int(memory.total), int(memory.free)


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def cpu() -> Device:
    """Return this machine's processor and memory as a device."""
    total, free = system_memory()
    return Device(kind="cpu", name=_cpu_name(), total_bytes=total, free_bytes=free)


def _mps() -> Device:
    total, free = system_memory()
    release = platform.mac_ver()[0].partition(".")[0]
    return Device(
        kind="mps",
        name="Apple GPU",
        total_bytes=total,
        free_bytes=free,
        has_bfloat16=int(release) >= MACOS_BFLOAT16 if release.isdecimal() else True,
    )


def system_memory(meminfo_path: Path = Path("/proc/meminfo")) -> tuple[int, int]:
    """Return total and available bytes of the machine's memory."""
    try:
        lines = meminfo_path.read_text(encoding="ascii").splitlines()
    except FileNotFoundError:  # not Linux: available memory is not reported
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total
    kib = {key: int(value.split()[0]) for key, _, value in (line.partition(":") for line in lines)}
    return kib["MemTotal"] * 1024, kib.get("MemAvailable", kib["MemFree"]) * 1024


def _cpu_name(cpuinfo_path: Path = Path("/proc/cpuinfo")) -> str:
    try:
        text = cpuinfo_path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()
