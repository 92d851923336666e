"""Signs of life of a run besides its events: that it progresses, its phase, and how long it may be silent.

    attempts/<n>/pulse   {"phase", "limit_sec"}; touched at every sign of life, for honed       (this module writes)
    attempts/<n>/pulse.1, …     the same of the other ranks, where there are several
    the unit's socket    readiness, progress and watchdog, where the worker is a systemd unit

They come from the events and from the checks of the stop flag, which every stage makes between two batches; so only
real progress keeps a watchdog quiet. Nothing is sent where the daemon has not asked for it. The limits are the run's
own (see patience.py), between the administrator's lower and upper ones.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import time
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from honed.job.progress import progress_text
from honed.worker.patience import Patience

#: Stages that are one long call without a sign of life: the factor by which their upper limit is longer.
PATIENCE = {"trial": 4, "prepare": 2, "load": 4, "data": 2, "mask": 2, "export": 4}
#: Minimum seconds between two signs of life.
BEAT_INTERVAL_SEC = 1.0
#: Relative change of a limit above which it is sent again.
LIMIT_TOLERANCE = 0.1
#: Size of the pulse file, in bytes: more than its record takes.
NUM_BYTES = 256


class Pulse:
    """The signs of life of one worker. Removes its variables from `environment`, so that no child speaks for it."""

    def __init__(
        self,
        environment: MutableMapping[str, str] = os.environ,
        *,
        path: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the pulse. `path` is the attempt's pulse file; its directory must exist by the first sign of life."""
        address, watchdog = environment.pop("NOTIFY_SOCKET", ""), environment.pop("HONED_WATCHDOG_SEC", "")
        for name in ("WATCHDOG_USEC", "WATCHDOG_PID"):
            environment.pop(name, None)
        self._least_sec = float(environment.pop("HONED_MIN_STALL_SEC", "0"))
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog_sec = float(watchdog) if address and watchdog else None
        self._path = path
        self._clock = clock
        self._beat_at = clock()
        self._status_at = -math.inf  #: when the last step was sent
        self._is_ready = False
        self._patience = Patience(clock())
        self._told_sec: float | None = 0.0

    def beat(self) -> None:
        """Give a sign of life; called between two batches."""
        self._patience.beat(self._clock())
        is_news = not self._told_sec and self._patience.limit_sec is not None
        if is_news or self._clock() - self._beat_at >= BEAT_INTERVAL_SEC:
            self._send(*self._watchdog(), "WATCHDOG=1")

    def enter(self, phase: str) -> None:
        """Enter a phase; stages are entered by their events."""
        self._patience.enter(phase, self._clock())
        self._told_sec = None
        self._send(*self._watchdog(), "WATCHDOG=1")

    def touch(self) -> None:
        """Give honed a sign of life, as a thread of a rank does that waits for another; a frozen process has none."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                os.utime(self._path)

    def resume(self) -> None:
        """Go on after a wait for another rank, which was no silence of this one."""
        self._patience.resume(self._clock())

    def report(self, kind: str, data: Mapping[str, Any]) -> None:
        """Send an event as a status line for `systemctl status`."""
        match kind:
            case "stage":
                self._begin(str(data.get("stage")))
            case "step":
                # systemd reads messages, and notifies its listeners: a hundred steps a second need not all be sent.
                if (now := self._clock()) - self._status_at >= BEAT_INTERVAL_SEC:
                    self._status_at = now
                    self._send("WATCHDOG=1", f"STATUS={progress_text(data)}")
            case "evaluation":
                self._send("WATCHDOG=1", f"STATUS=step {data.get('step')}: evaluated")
            case _:
                self.beat()

    def _begin(self, stage: str) -> None:
        self._patience.enter(stage, self._clock())
        self._told_sec = None
        ready = [] if self._is_ready else ["READY=1"]
        # In this order: the new deadline counts from the sign of life.
        self._send(*ready, *self._watchdog(), "WATCHDOG=1", f"STATUS={stage}")
        self._is_ready = True

    def _watchdog(self) -> list[str]:
        """Return the watchdog's limit for the current phase if it has changed, and write the pulse file."""
        learned_sec = self._patience.limit_sec
        upper_sec = (self._watchdog_sec or 0.0) * PATIENCE.get(self._patience.phase, 1)
        limit_sec = upper_sec if learned_sec is None else min(upper_sec, max(self._least_sec, learned_sec))
        told_sec = learned_sec or 0.0
        if self._told_sec is not None and abs(told_sec - self._told_sec) <= LIMIT_TOLERANCE * self._told_sec:
            return []
        self._told_sec = told_sec
        self._write({"phase": self._patience.phase, "limit_sec": learned_sec})
        return [f"WATCHDOG_USEC={int(limit_sec * 1e6)}"]

    def _write(self, facts: Mapping[str, object]) -> None:
        if self._path is None:
            return
        # One write of one size, without truncation: honed reads the file at any moment, and must not see it empty.
        with contextlib.suppress(OSError):  # a full disk: the sign of life below needs no room
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                os.pwrite(fd, json.dumps(facts).encode().ljust(NUM_BYTES), 0)
            finally:
                os.close(fd)

    def _send(self, *lines: str) -> None:
        self._beat_at = self._clock()
        self.touch()
        if self._watchdog_sec is None:
            return
        text = "\n".join(" ".join(line.split()) for line in lines)
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            end.connect(self._address)
            end.send(text.encode(errors="replace"), socket.MSG_DONTWAIT)  # systemd may be busy; the run is not to wait
