"""The choice of a job's device: which exist, which are free and open, and which the job was planned for."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path

from honed.daemon.attempts import Attempts
from honed.daemon.availability import ALL, Availability
from honed.daemon.fencing import UNKNOWN_DEVICE
from honed.job.ahead import NO_DEVICE_KEY
from honed.job.job import Job
from honed.job.plan_file import PlanFile
from honed.job.progress import together
from honed.spec.config import Config
from honed.system import device as devices
from honed.system import message
from honed.system.device import Device
from honed.system.error import UsageError
from honed.system.layout import Layout
from honed.system.log import about

log = logging.getLogger(__name__)

#: Seconds between looks at the GPUs while a job waits for one that others hold.
DEVICE_PROBE_INTERVAL_SEC = 2.0
#: The same for HURRY_SEC after a job has ended: the driver may take a moment to free its memory.
HURRY_INTERVAL_SEC, HURRY_SEC = 0.2, 5.0


class Placement:
    """The devices, and how queued jobs fit on them. `clock` is monotonic seconds."""

    def __init__(
        self,
        layout: Layout,
        config: Callable[[], Config],
        attempts: Attempts,
        availability: Availability,
        *,
        probe: Callable[[list[int] | None], list[Device]],
        clock: Callable[[], float],
    ) -> None:
        self._layout = layout
        self._config = config
        self._attempts = attempts
        self.availability = availability
        self._probe = probe
        self._clock = clock
        self._probed_at = -DEVICE_PROBE_INTERVAL_SEC
        self._hurries_until = 0.0
        self._devices: list[Device] = []  # GPUs, if there are any
        self._processor = Device("cpu", "CPU")  # or a device that is no NVIDIA GPU: for jobs that want none
        self._planned_for: dict[int, Device | None] = {}  # read from a plan once
        self._unfit: dict[int, dict[str, str]] = {}  # devices on which a job does not fit, and why
        self.fault = ""  #: the devices' fault

    @property
    def probe_interval_sec(self) -> float:
        """Seconds between two looks at the GPUs while jobs wait for one."""
        return HURRY_INTERVAL_SEC if self._clock() < self._hurries_until else DEVICE_PROBE_INTERVAL_SEC

    def hurry(self) -> None:
        """Look at the GPUs soon, and often for a while: a job has ended."""
        self._hurries_until = self._clock() + HURRY_SEC
        self._probed_at = -DEVICE_PROBE_INTERVAL_SEC

    def report(self) -> None:
        """Log the devices that jobs train on; a GPU that exists and does not answer is a fault."""
        self._look()
        names = ", ".join(device.name for device in self._devices) or "nothing"
        if any(device.kind == "cuda" for device in self._devices) or self._config().device.gpus == []:
            log.info("jobs train on %s", names)
        elif any(Path("/proc/driver/nvidia/gpus").glob("*")):
            self.fault = "the machine has a GPU that does not respond: honectl doctor"
            log.error("%s; jobs train on %s", self.fault, names, extra=about(message=message.DEGRADED))
        else:
            log.info("no NVIDIA GPU: jobs train on %s", names)
        self._check_names()

    def reload(self) -> None:
        """Apply a new configuration."""
        self.availability.reload()
        self._check_names()

    def _check_names(self) -> None:
        for name in self.availability.unknown_names(self.all()):
            log.warning("device.hours_of: no device %r; there are: %s", name, self._names())

    def all(self) -> list[Device]:
        """Return the devices as last probed, with the one for jobs that want no GPU."""
        return [*(device for device in self._devices if device.kind == "cuda"), self._processor]

    def _names(self) -> str:
        return ", ".join(f"{device.index} ({device.uuid})" if device.uuid else device.kind for device in self.all())

    def find(self, reference: str) -> list[Device]:
        """Return the device with a UUID, its beginning, an index or the name cpu; all of them for `all`. A device that
        no longer responds counts if it is drained or reserved.

        Raises UsageError, which lists the devices.
        """
        self._look()
        if reference == ALL:
            return self.all()
        here = self.all()
        gone = set(self.availability.standing_keys()) - {device.key for device in here}
        known = [*here, *(Device("cuda", key, uuid=key) for key in sorted(gone))]
        exact = [
            device for device in known if reference in {device.key, None if device.index is None else str(device.index)}
        ]
        match exact or [device for device in known if reference and device.key.startswith(reference)]:
            case [device]:
                return [device]
            case []:
                raise UsageError(f"no device {reference!r}", hint=f"there are: {self._names()}, {ALL}")
            case several:
                keys = ", ".join(device.key for device in several)
                raise UsageError(f"{len(several)} devices begin with {reference!r}", hint=f"give more of it: {keys}")

    def overstays(self) -> Iterator[tuple[int, str]]:
        """Yield the running jobs that have to give up their devices now, each with the reason."""
        known = {device.key: device for device in self.all()}
        for job_id, running in self._attempts.running.items():
            for key in running.job.attempt.devices or (UNKNOWN_DEVICE,):
                if key in {UNKNOWN_DEVICE, NO_DEVICE_KEY}:
                    continue
                device = known.get(key) or Device("cuda", key, uuid=key)
                if (reason := self.availability.why_vacate(device)) is not None:
                    yield job_id, reason
                    break

    def is_any_free(self, wants_gpu: bool) -> bool:
        """Return True if any device is free and open: else a long queue need not be searched."""
        users = self._users()
        return any(
            self.availability.closed(device) is None and self._in_use(device, users) is None
            for device in self._among(wants_gpu, is_fresh=True)
        )

    def free_devices(self, job: Job, *, but: Set[str] = frozenset()) -> tuple[Device, ...] | None:
        """Return as many devices as a job wants that no process uses and that are alike, preferably those for which the
        job's plan holds unchanged; None if there are not enough. `but`: devices that are left to others.

        GPUs are probed again every few seconds.
        """
        number = max(1, job.num_places)
        free = [device for device in self._free(job) if device.key not in but]
        groups = [group for group in devices.alike(free) if len(group) >= number]
        chosen = next((group for group in groups if self.holds_on(job, group[0])), groups[0] if groups else None)
        return tuple(chosen[:number]) if chosen is not None else None

    def groups_for(self, job: Job) -> list[list[Device]]:
        """Return the groups of devices that are alike, on any of which a job could start, were enough of it free."""
        groups = devices.alike([device for device in self.all() if self.suits(job, device)])
        return [group for group in groups if len(group) >= max(1, job.num_places)]

    def free_keys(self, job: Job) -> set[str]:
        """Return the devices that no process uses, and on which a job may start."""
        return {device.key for device in self._free(job)}

    def _free(self, job: Job) -> list[Device]:
        users = self._users()
        return [
            device
            for device in self._among(job.num_places > 0, is_fresh=True)
            if self._closed_to(job, device) is None and self._in_use(device, users) is None
        ]

    def _among(self, wants_gpu: bool, *, is_fresh: bool = False) -> list[Device]:
        """Return the devices of the kind that a job wants. `is_fresh`: probed within the last seconds."""
        if is_fresh and self._clock() - self._probed_at >= self.probe_interval_sec:
            self._look()
        wants_gpu = wants_gpu and any(device.kind == "cuda" for device in self._devices)
        return [device for device in self.all() if (device.kind == "cuda") == wants_gpu]

    # -- what is in the way: each question above and below is answered by these ----------------------------------------

    def _users(self) -> dict[str, int]:
        return {
            key: running.job.id
            for running in self._attempts.running.values()
            for key in running.job.attempt.devices or (UNKNOWN_DEVICE,)
        }

    def _closed_to(self, job: Job, device: Device) -> tuple[str, str] | None:
        """Return why a job may not start on a device, were it free: `unfit`, or as `Availability.obstacle` does."""
        if (problem := self._unfit.get(job.id, {}).get(device.key)) is not None:
            return "unfit", f"it cannot run on {device.name}: {problem}"
        return self.availability.obstacle(job, device)

    def _in_use(self, device: Device, users: Mapping[str, int]) -> str | None:
        if UNKNOWN_DEVICE in users:
            return f"job {users[UNKNOWN_DEVICE]} runs on a device that honed does not know"
        if device.key in users:
            return f"job {users[device.key]} runs on {device.name}"
        if device.kind == "cuda" and not devices.is_free(device, self._config().device.busy_bytes):
            return f"other processes use the memory of {device.name}"
        return None

    def holds_on(self, job: Job, device: Device) -> bool:
        """Return True if a job's plan, made for one GPU, holds on this one: precision and memory depend on the GPU."""
        if job.id not in self._planned_for:
            self._planned_for[job.id] = None
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # its start reports it
                self._planned_for[job.id] = PlanFile.read(self._layout.files(job.id).plan_path).device
        planned = self._planned_for[job.id]
        if job.is_of_cluster or planned is None or planned.kind != "cuda" or device.kind != "cuda":
            return True
        is_alike = planned.compute_capability == device.compute_capability
        return is_alike and device.total_bytes >= planned.total_bytes * (1 - devices.TOLERANCE)

    def suits(self, job: Job, device: Device) -> bool:
        """Return True if a job could start on a device, were it free."""
        is_of_kind = device in self._among(job.num_places > 0)
        return is_of_kind and self._closed_to(job, device) is None and self.holds_on(job, device)

    def rule_out(self, job: Job, device: Device, why: str) -> None:
        """Record that a job cannot run on a device: the job is not offered that device again while it is queued."""
        self._unfit.setdefault(job.id, {})[device.key] = why

    def obstacle(self, job: Job) -> tuple[str, str] | None:
        """Return why no device is available for a job, as last probed, with a text for people: `device` if one is in
        use, else `hours`, `reserved` or `drained` if one will be open again, else `unfit`. None if one is available."""
        users, number = self._users(), max(1, job.num_places)
        why: dict[str, list[str]] = {code: [] for code in ("device", "hours", "reserved", "drained", "unfit")}
        closed: dict[str, list[tuple[str, str]]] = {"hours": [], "reserved": [], "drained": []}
        usable, free = [], []
        for device in self._among(job.num_places > 0):
            match self._closed_to(job, device):
                case "unfit", text:
                    why["unfit"].append(text)
                case code, text:
                    closed[code].append((device.label, text))
                case None:
                    usable.append(device)
                    if (user := self._in_use(device, users)) is None:
                        free.append(device)
                    else:
                        why["device"].append(user)
        most_free, most_usable = (max(map(len, devices.alike(some)), default=0) for some in (free, usable))
        if most_free >= number:
            return None
        if number > 1 and most_usable >= number:
            why["device"].insert(0, f"it needs {number} GPUs at the same time, and {most_free} are free")
        elif number > 1:
            kinds = f"at most {most_usable} alike" if most_usable else "none"
            why["unfit"].append(f"it needs {number} GPUs that are alike, and there are {kinds} that it may use now")
        why |= {code: together(facts) for code, facts in closed.items()}
        reason = next((code for code, texts in why.items() if texts), "unfit")
        return reason, "; ".join(dict.fromkeys(text for texts in why.values() for text in texts))

    def reread_plan(self, job: Job) -> None:
        """Forget a job's old plan: the next question reads the new one."""
        self._planned_for.pop(job.id, None)

    def forget(self, job: Job) -> None:
        """Forget a job that is no longer queued."""
        self._planned_for.pop(job.id, None)
        self._unfit.pop(job.id, None)

    def _look(self) -> None:
        self._devices, self._probed_at = self._probe(self._config().device.gpus), self._clock()
        self._processor = next((device for device in self._devices if device.kind != "cuda"), None) or devices.cpu()
