"""Waking the loop: a byte in a pipe, written by threads, and by Python itself when a signal arrives."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
from collections.abc import Callable


class Wake:
    """The pipe, watched by the loop's selector, and the signals received. `woken` is called in the loop."""

    def __init__(self, selector: selectors.BaseSelector, woken: Callable[[], None]) -> None:
        self._woken = woken
        self._signals: set[int] = set()
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        selector.register(self._read_fd, selectors.EVENT_READ, self._drain)

    def wake(self) -> None:
        """Start the loop's next turn now; safe from any thread and from signal handlers."""
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._write_fd, b".")

    def _drain(self, _events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._read_fd, 4096)) == 4096:
                pass
        self._woken()

    def catch_signals(self) -> None:
        """Record signals from now on, and wake the loop with each."""

        def note(number: int, _frame: object) -> None:
            self._signals.add(number)

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, note)
        # The kernel sends SIGIO when somebody opens a file during the moment in which the watcher holds a lease on it.
        signal.signal(signal.SIGIO, lambda *_: None)
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)

    def signals(self) -> set[int]:
        """Return the signals received since the last call."""
        signals, self._signals = self._signals, set()
        return signals
