"""What systemd is told of a run, where the worker is a unit's: ready, how far it is, and that it still moves.

Fed from the events and from the looks at the stop flag, which every stage takes between two batches; so nothing but
real progress keeps the unit's watchdog quiet. Silent where the daemon has not asked for it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from honed.progress import progress_text

#: Stages that are one long call, without a sign of life in it: how many times as long they may take.
PATIENCE = {"trial": 4, "prepare": 2, "load": 4, "data": 2, "mask": 2, "export": 4}
#: Seconds between two signs of life, at least.
BEAT_INTERVAL_SEC = 1.0


class Pulse:
    """One worker's word to its unit. Takes the variables out of `environment`, so that no child speaks for it."""

    def __init__(
        self, environment: MutableMapping[str, str] = os.environ, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        address, watchdog = environment.pop("NOTIFY_SOCKET", ""), environment.pop("HONED_WATCHDOG_SEC", "")
        for name in ("WATCHDOG_USEC", "WATCHDOG_PID"):
            environment.pop(name, None)
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog_sec = float(watchdog) if address and watchdog else None
        self._clock = clock
        self._beat_at = clock()
        self._is_ready = False

    def beat(self) -> None:
        """It moves: called between two batches."""
        if self._clock() - self._beat_at >= BEAT_INTERVAL_SEC:
            self._send("WATCHDOG=1")

    def tell(self, kind: str, data: Mapping[str, Any]) -> None:
        """An event, put into words for `systemctl status`."""
        match kind:
            case "stage":
                self._enter(str(data.get("stage")))
            case "step":
                self._send("WATCHDOG=1", f"STATUS={progress_text(data)}")
            case "evaluation":
                self._send("WATCHDOG=1", f"STATUS=step {data.get('step')}: evaluated")
            case _:
                self.beat()

    def _enter(self, stage: str) -> None:
        if self._watchdog_sec is not None:
            ready = [] if self._is_ready else ["READY=1"]
            usec = int(self._watchdog_sec * PATIENCE.get(stage, 1) * 1e6)
            # In this order: the new deadline counts from the sign of life.
            self._send(*ready, f"WATCHDOG_USEC={usec}", "WATCHDOG=1", f"STATUS={stage}")
            self._is_ready = True

    def _send(self, *lines: str) -> None:
        self._beat_at = self._clock()
        if self._watchdog_sec is None:
            return
        text = "\n".join(" ".join(line.split()) for line in lines)
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            end.connect(self._address)
            end.send(text.encode(errors="replace"), socket.MSG_DONTWAIT)  # systemd may be busy; the run is not to wait
