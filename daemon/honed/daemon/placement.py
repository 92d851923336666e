"""The choice of a job's device: which exist, which are free, and which the job was planned for."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from honed.daemon.attempts import Attempts
from honed.daemon.fencing import UNKNOWN_DEVICE
from honed.job.job import Job
from honed.job.plan_file import PlanFile
from honed.spec.config import Config
from honed.system import device, message
from honed.system.device import Device
from honed.system.layout import Layout
from honed.system.log import about

log = logging.getLogger(__name__)

#: Seconds between looks at the GPUs while a job waits for one that others hold.
DEVICE_PROBE_INTERVAL_SEC = 2.0
#: Share of a GPU's memory by which two GPUs of one kind may differ.
DEVICE_TOLERANCE = 0.02


class Placement:
    """The devices, and how queued jobs fit on them. `clock` is monotonic seconds."""

    def __init__(
        self,
        layout: Layout,
        config: Callable[[], Config],
        attempts: Attempts,
        *,
        probe: Callable[[list[int] | None], list[Device]],
        clock: Callable[[], float],
    ) -> None:
        self._layout = layout
        self._config = config
        self._attempts = attempts
        self._probe = probe
        self._clock = clock
        self._probed_at = -DEVICE_PROBE_INTERVAL_SEC
        self._devices: list[Device] = []
        self._planned_for: dict[int, Device | None] = {}  # read from each plan once
        self._unfit: dict[int, dict[str, str]] = {}  # devices on which a job does not fit, and why
        self.fault = ""  #: the devices' fault

    def tell(self) -> None:
        """Log the devices that jobs train on; a GPU that exists and does not answer is a fault."""
        self._look()
        names = ", ".join(found.name for found in self._devices) or "nothing"
        if any(found.kind == "cuda" for found in self._devices) or self._config().device.gpus == []:
            log.info("jobs train on %s", names)
        elif any(Path("/proc/driver/nvidia/gpus").glob("*")):
            self.fault = "the machine has a GPU that does not respond: honectl doctor"
            log.error("%s; jobs train on %s", self.fault, names, extra=about(message=message.DEGRADED))
        else:
            log.info("no NVIDIA GPU: jobs train on %s", names)

    def is_any_free(self, wants_gpu: bool) -> bool:
        """Return True if any device is free: else a long queue need not be searched."""
        return bool(self._free(wants_gpu, self._attempts.devices_in_use()))

    def free_device(self, job: Job) -> Device | None:
        """Return a device that no process uses, preferably one for which the job's plan holds unchanged; None without
        one.

        GPUs are probed again every few seconds.
        """
        free = self._free(job.num_gpus > 0, self._attempts.devices_in_use() | self._unfit.get(job.id, {}).keys())
        return next((found for found in free if self.holds_on(job, found)), free[0] if free else None)

    def _free(self, wants_gpu: bool, taken: set[str]) -> list[Device]:
        if self._clock() - self._probed_at >= DEVICE_PROBE_INTERVAL_SEC:
            self._look()
        wants_gpu = wants_gpu and any(found.kind == "cuda" for found in self._devices)
        if UNKNOWN_DEVICE in taken:
            return []
        return [
            found
            for found in (self._devices if wants_gpu else [_cpu(self._devices)])
            if (found.uuid or found.kind) not in taken
            and (found.kind == "cuda") == wants_gpu
            and (found.kind != "cuda" or device.is_free(found, self._config().device.busy_bytes))
        ]

    def holds_on(self, job: Job, found: Device) -> bool:
        """Return True if a job's plan, made for one GPU, holds on this one: precision and memory depend on the GPU."""
        if job.id not in self._planned_for:
            self._planned_for[job.id] = None
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # its start will tell
                self._planned_for[job.id] = PlanFile.read(self._layout.job(job.id).plan_path).device
        planned = self._planned_for[job.id]
        if planned is None or planned.kind != "cuda" or found.kind != "cuda":
            return True
        is_alike = planned.compute_capability == found.compute_capability
        return is_alike and found.total_bytes >= planned.total_bytes * (1 - DEVICE_TOLERANCE)

    def rule_out(self, job: Job, found: Device, why: str) -> None:
        """Record that a job cannot run on a device: the job is not offered that device again while it is queued."""
        self._unfit.setdefault(job.id, {})[found.uuid or found.kind] = why

    def obstacles(self, job: Job) -> tuple[str, str] | None:
        """Return why no device is available for a job, as last probed: `unfit` if none will ever be, else `device`;
        with a text for people. None if one is available."""
        wants_gpu = job.num_gpus > 0 and any(found.kind == "cuda" for found in self._devices)
        users = {running.job.attempt.device: running.job.id for running in self._attempts.running.values()}
        if UNKNOWN_DEVICE in users:
            return "device", f"job {users[UNKNOWN_DEVICE]} runs on a device that honed does not know"
        unfit, taken = [], []
        for found in self._devices if wants_gpu else [_cpu(self._devices)]:
            key = found.uuid or found.kind
            if (found.kind == "cuda") != wants_gpu:
                continue
            if (why := self._unfit.get(job.id, {}).get(key)) is not None:
                unfit.append(f"it cannot run on {found.name}: {why}")
            elif key in users:
                taken.append(f"job {users[key]} runs on {found.name}")
            elif found.kind == "cuda" and not device.is_free(found, self._config().device.busy_bytes):
                taken.append(f"other processes use the memory of {found.name}")
            else:
                return None
        return ("device" if taken else "unfit"), "; ".join(dict.fromkeys([*taken, *unfit]))

    def reread_plan(self, job: Job) -> None:
        """Forget a job's old plan: the next question reads the new one."""
        self._planned_for.pop(job.id, None)

    def forget(self, job: Job) -> None:
        """Forget a job that is no longer queued."""
        self._planned_for.pop(job.id, None)
        self._unfit.pop(job.id, None)

    def _look(self) -> None:
        self._devices, self._probed_at = self._probe(self._config().device.gpus), self._clock()


def _cpu(devices: list[Device]) -> Device:
    return next((found for found in devices if found.kind != "cuda"), None) or device.cpu()
