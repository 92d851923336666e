"""The answer to `metrics`: what only the daemon knows, of itself and of the GPUs, which honed-web may not open."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable

from honed.daemon.status import Status
from honed.daemon.verb import verb
from honed.job.query import Asker
from honed.job.shape import Gpu, Telemetry
from honed.system import device
from honed.system.control import Request
from honed.system.device import Load
from honed.system.usage import usage

#: Seconds between two readings of the GPUs, at least, and the age from which a reading is no longer reported.
READ_INTERVAL_SEC, MAX_AGE_SEC = 5.0, 60.0
#: Seconds that the loop waits for a reading, once per reading: a driver may take seconds, or hang.
WAIT_SEC = 0.1


class Gpus:
    """The GPUs' load, read in a thread, and only when asked. `clock` is monotonic seconds."""

    def __init__(
        self,
        read: Callable[[], list[Load]] = device.gpu_loads,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._clock = clock
        self._reading: threading.Thread | None = None
        self._loads: list[Load] = []
        self._read_at = -math.inf

    def loads(self) -> list[Load]:
        """Return the last reading, and have a new one made if it is old; empty if there is none of the last minute."""
        is_running = self._reading is not None and self._reading.is_alive()
        if not is_running and self._clock() - self._read_at >= READ_INTERVAL_SEC:
            self._reading = threading.Thread(target=self._look, name="gpus", daemon=True)
            self._reading.start()
            self._reading.join(WAIT_SEC)
        return self._loads if self._clock() - self._read_at < MAX_AGE_SEC else []

    def _look(self) -> None:
        loads = self._read()
        self._loads, self._read_at = loads, self._clock()


class Observer:
    """Answers `metrics`."""

    def __init__(self, status: Status, gpus: Gpus | None = None) -> None:
        self._status = status
        self._gpus = gpus or Gpus()

    @verb("metrics")
    def answer(self, _request: Request, _asker: Asker) -> Telemetry:
        """Return what is wrong with honed, the load of the GPUs, and the daemon's own resource use."""
        status, num_damaged = self._status, 0
        with contextlib.suppress(OSError):
            num_damaged = len(status.spool.corrupt.names())
        faults = {
            "machine": bool(status.health.fault),
            "device": bool(status.placement.fault),
            "damaged_entries": num_damaged > 0,
            "internal": not status.health.is_sound,
        }
        jobs = Counter(key for running in status.attempts.running.values() for key in running.job.attempt.devices)
        gpus: list[Gpu] = [{**vars(load), "num_jobs": jobs[load.uuid]} for load in self._gpus.loads()]  # type: ignore[typeddict-item]
        return {"faults": faults, "num_damaged": num_damaged, "gpus": gpus, "process": usage()}
