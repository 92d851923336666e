"""The end of honed-send, its reloads, and its waits: signals and the end of the daemon that started it decide."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from typing import IO, Any

from honed.system.notify import Notifier


class Lifetime:
    """Tells when to end or to reload, and waits no longer than that.

    The end of `stdin` means that the daemon that started us has ended: `flush_sec` is left for the last deliveries.
    """

    def __init__(
        self,
        notifier: Notifier,
        *,
        flush_sec: Callable[[], float],
        stdin: IO[Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._notifier = notifier
        self._flush_sec = flush_sec
        self._stdin = stdin
        self._clock = clock
        self._signals: set[int] = set()
        self._ends_at: float | None = None
        self._wake_read_fd, self._wake_write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def catch_signals(self, hang_up: Callable[[], None]) -> None:
        """Note signals from now on; one that ends us calls `hang_up`, to interrupt a request."""

        def note(number: int, _frame: object) -> None:
            self._signals.add(number)
            if number != signal.SIGHUP:
                hang_up()

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, note)
        signal.set_wakeup_fd(self._wake_write_fd, warn_on_full_buffer=False)

    def take_reload(self) -> bool:
        """Return True once after each SIGHUP."""
        is_asked = signal.SIGHUP in self._signals
        self._signals.discard(signal.SIGHUP)
        return is_asked

    @property
    def is_flushing(self) -> bool:
        """True once the daemon has ended: deliver what is queued, then end."""
        return self._ends_at is not None

    def must_end(self) -> bool:
        """Return True if we were asked to stop, or the time for the last deliveries is over."""
        self._look(0)
        is_over = self._ends_at is not None and self._clock() >= self._ends_at
        return is_over or bool(self._signals & {signal.SIGTERM, signal.SIGINT})

    def left_sec(self) -> float:
        """Return the seconds left for the last deliveries; 0 if we were asked to stop."""
        return max(0.0, self._ends_at - self._clock()) if self._ends_at is not None and not self._signals else 0.0

    def wait(self, seconds: float, *, at_the_end_sec: float = 0.0) -> None:
        """Sleep; a signal wakes us. Once the daemon has ended, sleep at most `at_the_end_sec`."""
        began = self._clock()
        while not self._signals:
            patience = seconds if self._ends_at is None else min(seconds, at_the_end_sec)
            if (left := began + patience - self._clock()) <= 0:
                return
            self._notifier.watchdog()
            self._look(min(left, (self._notifier.watchdog_interval_sec or left) / 2))

    def _look(self, seconds: float) -> None:
        """Check whether the daemon has ended; returns before `seconds` have passed for that and for a signal."""
        watched: list[Any] = [self._wake_read_fd]
        if self._stdin is not None and self._ends_at is None:
            watched.append(self._stdin)
        ready, _, _ = select.select(watched, [], [], seconds)
        if self._wake_read_fd in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read_fd, 4096)
        if self._stdin is not None and self._stdin in ready and not os.read(self._stdin.fileno(), 4096):
            self._ends_at = self._clock() + self._flush_sec()
