"""Messages to systemd: readiness, status, watchdog, reload, stop. Does nothing if systemd did not start us."""

from __future__ import annotations

import math
import os
import time

import sdnotify

from honed.system import quote
from honed.system.error import plain

#: Maximum number of characters of a status line.
MAX_STATUS = 2000


class Notifier:
    """Wrapper around sdnotify that fixes its encoding and limits the rate."""

    def __init__(self) -> None:
        self._notifier = sdnotify.SystemdNotifier()
        self._status = ""
        self._watchdog_at = 0.0
        self._extended_at = -math.inf
        for_us = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        usec = os.environ.get("WATCHDOG_USEC", "0") if for_us else "0"
        #: Seconds between pings, half of what systemd allows; None without a watchdog.
        self.watchdog_interval_sec = int(usec) / 2e6 if usec.isdecimal() and int(usec) else None

    def _send(self, message: str) -> None:
        # sdnotify 0.3.2 encodes Latin-1 and silently ignores other characters: pass the UTF-8 bytes as Latin-1.
        self._notifier.notify(message.encode(errors="replace").decode("latin-1"))

    def ready(self) -> None:
        self._send("READY=1")

    def status(self, text: str) -> None:
        """Send a status line for people, if it changed."""
        # It may contain the worker's own words, and everybody on the machine may read it.
        line = plain(quote.hide(" ".join(text.split())))[:MAX_STATUS]
        if line != self._status:
            self._status = line
            self._send(f"STATUS={line}")

    def watchdog(self) -> None:
        """Ping the watchdog. Call it only after a complete pass of the main loop."""
        now = time.monotonic()
        if self.watchdog_interval_sec is not None and now - self._watchdog_at >= self.watchdog_interval_sec / 2:
            self._watchdog_at = now
            self._send("WATCHDOG=1")

    def reloading(self) -> None:
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def extend_start(self, seconds: float) -> None:
        """Ask systemd for more time to start; call it as often as there is progress."""
        now = time.monotonic()
        if now - self._extended_at >= 1.0:
            self._extended_at = now
            self.extend_timeout(seconds)

    def extend_timeout(self, seconds: float) -> None:
        """Ask systemd for more time while workers write their checkpoints."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")
