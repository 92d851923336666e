"""Messages to systemd: readiness, status, watchdog, reload, stop. Does nothing if systemd did not start us.

A message never waits for systemd. One that its full queue does not take is sent before the next one, or by the next
`watchdog` or `status`; of those with the same key the last is kept.
"""

from __future__ import annotations

import math
import os
import time

import sdnotify

from honed.system import quote
from honed.system.error import plain

#: Maximum number of characters of a status line.
MAX_STATUS = 2000
#: Seconds within which a message that systemd did not take is to be sent again.
RESEND_SEC = 1.0


class Notifier:
    """Wrapper around sdnotify that fixes its encoding, limits the rate, and never blocks."""

    def __init__(self) -> None:
        self._notifier = sdnotify.SystemdNotifier()
        if self._notifier.socket is not None:
            self._notifier.socket.setblocking(False)
            self._notifier.debug = True  # raise what it otherwise ignores, such as a full queue
        self._unsent: dict[str, str] = {}  # by key, in order
        self._status = ""
        self._watchdog_at = 0.0
        self._extended_at = -math.inf
        for_us = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        usec = os.environ.get("WATCHDOG_USEC", "0") if for_us else "0"
        #: Seconds between pings, half of what systemd allows; None without a watchdog.
        self.watchdog_interval_sec = int(usec) / 2e6 if usec.isdecimal() and int(usec) else None

    def patience(self) -> float:
        """Return the seconds until `watchdog` is to be called."""
        ping_sec = math.inf if self.watchdog_interval_sec is None else self.watchdog_interval_sec / 2
        return min(ping_sec, RESEND_SEC) if self._unsent else ping_sec

    def _send(self, message: str) -> None:
        key = message.partition("=")[0]
        self._unsent.pop(key, None)
        self._unsent[key] = message
        self._send_unsent()

    def _send_unsent(self) -> None:
        for key, message in list(self._unsent.items()):
            try:
                # sdnotify 0.3.2 encodes Latin-1 and refuses other characters: pass the UTF-8 bytes as Latin-1.
                self._notifier.notify(message.encode(errors="replace").decode("latin-1"))
            except BlockingIOError:
                return
            except OSError:
                pass  # nobody receives it
            del self._unsent[key]

    def ready(self) -> None:
        self._send("READY=1")

    def status(self, text: str) -> None:
        """Send a status line for people, if it changed."""
        self._send_unsent()
        # It may contain the worker's own words, and everybody on the machine may read it.
        line = plain(quote.hide(" ".join(text.split())))[:MAX_STATUS]
        if line != self._status:
            self._status = line
            self._send(f"STATUS={line}")

    def watchdog(self) -> None:
        """Ping the watchdog. Call it only after a complete pass of the main loop."""
        self._send_unsent()
        now = time.monotonic()
        if self.watchdog_interval_sec is not None and now - self._watchdog_at >= self.watchdog_interval_sec / 2:
            self._send("WATCHDOG=1")
            if self._unsent.pop("WATCHDOG", None) is None:  # an unsent ping is not kept: the next pass has to earn it
                self._watchdog_at = now

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
