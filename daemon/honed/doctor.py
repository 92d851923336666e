"""Whether this machine can train: versions that fit together, GPU, compiled libraries that load, disk, permissions.

What needs torch is asked in child processes with a deadline, since a broken installation may hang or crash.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from honed import device, installed
from honed.config import Config
from honed.error import EnvironmentInvalidError
from honed.layout import Layout
from honed.memory import gib
from honed.preflight import nearest_existing

Status = Literal["ok", "warning", "error"]

#: Seconds that a child has; `import torch` from a cold disk has been seen to take 30.
CHILD_TIMEOUT_SEC = 120.0
#: Bytes of free disk below which one job's checkpoints may not fit.
LOW_DISK_BYTES = 20 * 2**30
#: Bytes of free disk below which not even honed's own files are safe.
NO_DISK_BYTES = 1 * 2**30

_TORCH = """
import json, torch
print(json.dumps({"version": torch.__version__, "built_for": torch.version.cuda,
                  "num_gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0}))
"""
_TORCHVISION = """
import json, torch, torchvision
kept = torchvision.ops.nms(torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.tensor([1.0]), 0.5)
print(json.dumps({"version": torchvision.__version__, "kept": len(kept)}))
"""
_TORCHVISION_MENDED = """
import json
from honed.worker import torchvision as mended
mended.mend()
import torch, torchvision.transforms.v2.functional as functional
print(json.dumps({"size": list(functional.resize(torch.zeros(3, 8, 8), [4, 4]).shape)}))
"""
_BITSANDBYTES = """
import json, bitsandbytes, bitsandbytes.cextension as native
print(json.dumps({"version": bitsandbytes.__version__, "library": type(native.lib).__name__}))
"""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    check: str
    status: Status
    detail: str
    hint: str = ""

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def examine(layout: Layout, config: Config) -> list[Finding]:
    """Everything, in the order in which a person would mend it. Takes as long as importing torch, some seconds."""
    with ThreadPoolExecutor() as pool:
        # Children in threads: each is only waited for.
        compiled = [pool.submit(look) for look in (_torch, _torchvision, _bitsandbytes)]
        found = [_python(), *_packages(), *_beside_unsloth(), _gpu(config)]
        return [*found, *(answer.result() for answer in compiled), *_instance(layout)]


def _instance(layout: Layout) -> list[Finding]:
    places = {"state": layout.state_dir, "spool": layout.spool_dir, "cache": layout.cache_dir}
    return [
        *(_disk(name, path) for name, path in places.items()),
        _permissions(layout),
        _systemd(),
        _daemon(layout),
    ]


def _python() -> Finding:
    """Our own metadata keeps older ones out; what is newer than torch's wheels is told by torch's absence."""
    return Finding("python", "ok", f"{sys.version.split()[0]}, {sys.executable}")


# --- Packages ---------------------------------------------------------------------------------------------------------


def _packages() -> list[Finding]:
    needed = [_package(name, window, is_needed=True) for name, window in installed.WINDOWS.items()]
    return needed + [_package(name, window, is_needed=False) for name, window in installed.OPTIONAL_WINDOWS.items()]


#: What an optional package is for.
_USES = {
    "bitsandbytes": "quantization: 4bit and 8bit",
    "huggingface_hub": "policy.hub: models that honed fetches",
    "unsloth": "backend: unsloth",
    "unsloth_zoo": "backend: unsloth",
    "pillow": "rows with images",
    "av": "rows with videos and sound",
    "torchvision": "the processors of vision models",
}


def _package(name: str, window: str, *, is_needed: bool) -> Finding:
    found = installed.version(name)
    install = f"pip install '{name}{window}'"
    if found is None and is_needed:
        return Finding(name, "error", "not installed: no job can be trained", install)
    if found is None:
        return Finding(name, "warning", f"not installed; it is needed for {_USES[name]}", install)
    for broken, versions, why in installed.BROKEN:
        if broken == name and installed.fits(found, versions):
            return Finding(name, "error", f"{found} {why}", install)
    if not installed.fits(found, window):
        return Finding(name, "warning", f"{found} is outside what honed was tried with ({window})", install)
    return Finding(name, "ok", found)


def _beside_unsloth() -> list[Finding]:
    unsloth, zoo = installed.version("unsloth"), installed.version("unsloth_zoo")
    if unsloth is None:
        return []
    trouble = [
        f"{name} {found} {why}"
        for name, versions, why in installed.BROKEN_BESIDE_UNSLOTH
        if (found := installed.version(name)) is not None and installed.fits(found, versions)
    ]
    if zoo != unsloth:
        trouble.append(f"unsloth_zoo {zoo or 'is missing, and'} should be of the same version, {unsloth}")
    if trouble:
        hint = "pip install 'honed[unsloth]' again; until then write backend: transformers"
        return [Finding("unsloth fits", "error", "; ".join(trouble), hint)]
    return [Finding("unsloth fits", "ok", f"{unsloth} beside the versions above")]


# --- What only a process that imports it can tell ---------------------------------------------------------------------


def ask(code: str, *, timeout_sec: float = CHILD_TIMEOUT_SEC) -> dict[str, Any]:
    """What a child process prints as its last line, JSON. Raises EnvironmentInvalidError with its last words."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_sec, check=False, encoding="utf-8",
            errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise EnvironmentInvalidError(f"no answer within {timeout_sec:g} s") from error
    if done.returncode:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), f"status {done.returncode}")
        raise EnvironmentInvalidError(last.strip()[:300])
    answer = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(answer, dict)
    return answer


def _torch() -> Finding:
    """Whether torch loads, and sees as many GPUs as the driver."""
    if installed.version("torch") is None:
        return Finding("torch loads", "error", "not installed", "pip install 'honed[train]'")
    try:
        answer = ask(_TORCH)
    except EnvironmentInvalidError as error:
        return Finding("torch loads", "error", f"import torch: {error.message}", "install torch again")
    num_gpus = len(device.cuda_devices())
    detail = f"{answer['version']}, built for {'CUDA ' + answer['built_for'] if answer['built_for'] else 'the CPU'}"
    if num_gpus > answer["num_gpus"]:
        hint = (
            "install torch from the ordinary index"
            if answer["built_for"] is None
            else "is the driver as new as that CUDA?"
        )
        return Finding("torch loads", "error", f"{detail}; it sees {answer['num_gpus']} of {num_gpus} GPUs", hint)
    return Finding("torch loads", "ok", f"{detail}; it sees {answer['num_gpus']} GPUs")


def _torchvision() -> Finding:
    """One built for another torch breaks imports that never name it, with messages that do not either."""
    if installed.version("torchvision") is None:
        return Finding("torchvision loads", "ok", "not installed; text models do without")
    try:
        return Finding("torchvision loads", "ok", ask(_TORCHVISION)["version"])
    except EnvironmentInvalidError as error:
        hint = "install the torchvision that belongs to this torch, from the same index, or uninstall it"
        detail = f"{installed.version('torchvision')} does not load: {error.message}"
    try:
        ask(_TORCHVISION_MENDED)
    except EnvironmentInvalidError:
        return Finding("torchvision loads", "error", detail, hint)
    return Finding(
        "torchvision loads", "warning", f"{detail}; workers go round that, and use what of it they need", hint
    )


def _bitsandbytes() -> Finding:
    if installed.version("bitsandbytes") is None:
        return Finding(
            "bitsandbytes loads", "warning", "not installed; 4bit and 8bit need it", "pip install bitsandbytes"
        )
    try:
        answer = ask(_BITSANDBYTES)
    except EnvironmentInvalidError as error:
        return Finding("bitsandbytes loads", "error", f"import bitsandbytes: {error.message}", "install it again")
    if "Mock" in answer["library"] and device.cuda_devices():
        detail = f"{answer['version']}: no native library for this GPU"
        return Finding("bitsandbytes loads", "error", detail, "python -m bitsandbytes says more")
    return Finding("bitsandbytes loads", "ok", answer["version"])


def _gpu(config: Config) -> Finding:
    found = device.cuda_devices()
    if not found:
        return _no_gpu()
    indices = [each.index for each in found]
    if missing := [index for index in config.device.gpus or [] if index not in indices]:
        detail = f"device.gpus names {missing}, and the machine has {indices}"
        return Finding("gpu", "error", detail, "correct it in honed.toml")
    names = ", ".join(f"{each.index}: {each.name}, {gib(each.total_bytes)}" for each in found)
    return Finding("gpu", "ok", f"{names}; driver {device.driver_version()}")


def _no_gpu() -> Finding:
    try:
        device.driver_version()
    except EnvironmentInvalidError as error:
        has_hardware = any(Path("/proc/driver/nvidia/gpus").glob("*"))
        status: Status = "error" if has_hardware else "warning"
        cpu = device.probe([])[0]
        detail = f"no NVIDIA GPU ({error.message}): jobs train on {cpu.name}, {gib(cpu.total_bytes)}"
        return Finding("gpu", status, detail, error.hint if has_hardware else "small models only")
    return Finding("gpu", "error", "the driver is there, and no GPU answers", "see nvidia-smi and the kernel's log")


# --- This instance ----------------------------------------------------------------------------------------------------


def _disk(name: str, path: Path) -> Finding:
    existing = nearest_existing(path)
    free = shutil.disk_usage(existing).free
    detail = f"{gib(free)} free for {path}"
    if free < NO_DISK_BYTES:
        return Finding(f"disk: {name}", "error", detail, "free some; honectl prune")
    if free < LOW_DISK_BYTES and name != "spool":
        return Finding(f"disk: {name}", "warning", detail, "checkpoints of a large model will not fit; honectl prune")
    return Finding(f"disk: {name}", "ok", detail)


def _permissions(layout: Layout) -> Finding:
    """Of what honed writes; before its first start there is nothing yet."""
    if not layout.spool_dir.is_dir():
        return Finding(
            "permissions", "warning", f"{layout.spool_dir} is not there yet", "honed makes it at its first start"
        )
    places = (layout.spool_dir, layout.spool_dir / "incoming", layout.state_dir, layout.jobs_dir)
    missing = [str(path) for path in places if not path.is_dir()]
    if missing:
        return Finding("permissions", "error", f"missing: {', '.join(missing)}", "start honed, which makes them")
    if layout.spool_dir.stat().st_mode & 0o002:
        return Finding(
            "permissions", "error", f"{layout.spool_dir} can be written by everyone", f"chmod o-w {layout.spool_dir}"
        )
    devices = {path.stat().st_dev for path in (layout.spool_dir, layout.spool_dir / "incoming")}
    if len(devices) > 1:
        detail = f"{layout.spool_dir}/incoming is on another file system: arrivals cannot be claimed by a rename"
        return Finding("permissions", "error", detail, "put both on one")
    if not os.access(layout.spool_dir / "incoming", os.W_OK | os.X_OK):
        return Finding("permissions", "warning", "you may not drop jobs", "join the group honed-submit")
    return Finding("permissions", "ok", f"{layout.spool_dir} and {layout.state_dir} are as they should be")


def _systemd() -> Finding:
    if not Path("/run/systemd/system").is_dir():
        return Finding("systemd", "ok", "not running here: honed runs in the foreground, workers are its children")
    try:
        import sdnotify  # noqa: F401, PLC0415
    except ImportError:
        return Finding(
            "systemd", "error", "the package sdnotify is missing: honed could not say READY", "pip install sdnotify"
        )
    return Finding("systemd", "ok", "running; honed reports to it")


def _daemon(layout: Layout) -> Finding:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(2.0)
        try:
            connection.connect(str(layout.control_path))
        except OSError as error:
            detail = f"does not answer at {layout.control_path}: {error.strerror or error}"
            return Finding("honed", "warning", detail, "systemctl start honed")
    return Finding("honed", "ok", "running")
