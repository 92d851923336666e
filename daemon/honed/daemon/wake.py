"""Waking the loop from outside: a byte in a pipe, written by threads, and by Python itself where a signal comes."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
from collections.abc import Callable


class Wake:
    """The pipe, watched by the loop's selector, and the signals that came. `woken` is called in the loop."""

    def __init__(self, selector: selectors.BaseSelector, woken: Callable[[], None]) -> None:
        self._woken = woken
        self._signals: set[int] = set()
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        selector.register(self._read_fd, selectors.EVENT_READ, self._drain)

    def wake(self) -> None:
        """Make the loop go round now; safe from any thread and from signal handlers."""
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._write_fd, b".")

    def _drain(self, _events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._read_fd, 4096)) == 4096:
                pass
        self._woken()

    def catch_signals(self) -> None:
        """From now on signals are noted, and wake the loop."""

        def note(number: int, _frame: object) -> None:
            self._signals.add(number)

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, note)
        # The kernel's word that somebody opens a file on which the watcher holds a lease, for the moment of a look.
        signal.signal(signal.SIGIO, lambda *_: None)
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)

    def signals(self) -> set[int]:
        """Those that came since the last call."""
        signals, self._signals = self._signals, set()
        return signals
